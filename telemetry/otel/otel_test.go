package lockotel_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
	lockotel "github.com/mysqllock/mysqllock/telemetry/otel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// recorder is a handle in a database of its own, and what is recorded of its locks.
type recorder struct {
	t          *testing.T
	db         *sql.DB
	system     attribute.KeyValue // which everything has
	connecting sync.Mutex         // nothing connects while it is held
	observer   *lockotel.Observer
	spans      *tracetest.SpanRecorder
	tracer     trace.Tracer
	metrics    *sdkmetric.ManualReader
	open       func(maxConns int) *sql.DB // another handle
}

func record(t *testing.T, bin tempserver.Binary, o lockotel.Options) *recorder {
	t.Helper()
	return recordWith(t, bin, o, func(locks *lockotel.Observer) mysqllock.Config { return mysqllock.Config{Observer: locks} })
}

func recordWith(t *testing.T, bin tempserver.Binary, o lockotel.Options, config func(*lockotel.Observer) mysqllock.Config) *recorder {
	t.Helper()
	cfg := tempserver.Database(t, tempserver.Share(t, bin).DSN(""))
	r := &recorder{t: t, system: semconv.DBSystemNameMySQL, spans: tracetest.NewSpanRecorder(), metrics: sdkmetric.NewManualReader()}
	if bin.Flavour == tempserver.MariaDB {
		r.system = semconv.DBSystemNameMariaDB
		o.Attributes = append(o.Attributes, r.system)
	}
	cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		r.connecting.Lock()
		defer r.connecting.Unlock()
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	tracers := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(r.spans))
	meters := sdkmetric.NewMeterProvider(sdkmetric.WithReader(r.metrics))
	t.Cleanup(func() {
		dbtest.OK(t, tracers.Shutdown(context.Background()))
		dbtest.OK(t, meters.Shutdown(context.Background()))
	})
	r.tracer = tracers.Tracer("test")
	o.TracerProvider, o.MeterProvider = tracers, meters
	var err error
	r.observer, err = lockotel.New(o)
	dbtest.OK(t, err)
	r.open = func(maxConns int) *sql.DB {
		c := config(r.observer)
		c.MaxConns = maxConns
		connector, err := mysqllock.NewConnector(cfg, c)
		dbtest.OK(t, err)
		db := sql.OpenDB(connector)
		t.Cleanup(func() { db.Close() })
		return db
	}
	r.db = r.open(0)
	return r
}

// lose has a lock on key lost.
func (r *recorder) lose(ctx context.Context, key string) {
	r.t.Helper()
	hold, err := mysqllock.Acquire(ctx, r.db, key)
	dbtest.OK(r.t, err)
	var id int
	dbtest.OK(r.t, r.db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
	_, err = r.db.Exec(fmt.Sprintf("KILL %d", id))
	dbtest.OK(r.t, err)
	if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
		r.t.Fatalf("a lock whose connection was killed: %v", err)
	}
}

// lostBy are the reasons of such a loss, by how the driver finds out.
var lostBy = []string{"connection", "lost"}

// children are the spans below parent that have ended, by name.
func (r *recorder) children(parent trace.Span) map[string]sdktrace.ReadOnlySpan {
	out := make(map[string]sdktrace.ReadOnlySpan)
	for _, s := range r.spans.Ended() {
		if s.Parent().SpanID() == parent.SpanContext().SpanID() {
			out[s.Name()] = s
		}
	}
	return out
}

// has reports an attribute of a span.
func has(s sdktrace.ReadOnlySpan, want attribute.KeyValue) bool {
	return slices.ContainsFunc(s.Attributes(), func(a attribute.KeyValue) bool { return a == want })
}

func TestALockHasThreeSpansBeneathTheCallers(t *testing.T) {
	for _, bin := range tempserver.EachFlavour(tempserver.Require(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			r := record(t, bin, lockotel.Options{Attributes: []attribute.KeyValue{attribute.String("db.namespace", "shop")}})
			ctx, parent := r.tracer.Start(context.Background(), "parent")
			const pause = 50 * time.Millisecond
			before := time.Now()
			dbtest.OK(t, mysqllock.Do(ctx, r.db, "product:42", func(context.Context) error { time.Sleep(pause); return nil }, lockctx.Lease(time.Minute)))
			after := time.Now()
			parent.End()
			spans := r.children(parent)
			if len(spans) != 3 {
				t.Fatalf("the spans are %v", spans)
			}
			acquire, hold, release := spans["acquire lock"], spans["hold lock"], spans["release lock"]
			if acquire.StartTime().Before(before) || acquire.EndTime().After(hold.StartTime().Add(time.Millisecond)) ||
				hold.EndTime().Sub(hold.StartTime()) < pause || !hold.EndTime().Equal(release.StartTime()) ||
				!release.EndTime().After(release.StartTime()) || release.EndTime().After(after) {
				t.Errorf("from %v to %v: %v to %v, %v to %v, %v to %v", before, after, acquire.StartTime(), acquire.EndTime(),
					hold.StartTime(), hold.EndTime(), release.StartTime(), release.EndTime())
			}
			for name, s := range spans {
				for _, want := range []attribute.KeyValue{
					r.system, attribute.String("db.namespace", "shop"),
					attribute.String("mysqllock.strategy", "lease"), attribute.Bool("mysqllock.shared", false),
					attribute.StringSlice("mysqllock.keys", []string{"1cc40f4fd022a3f4"}),
					attribute.Int64("mysqllock.token", 1),
				} {
					if !has(s, want) {
						t.Errorf("%s lacks %v: %v", name, want, s.Attributes())
					}
				}
				if s.Status().Code != codes.Unset || strings.Contains(fmt.Sprint(s), "product") {
					t.Errorf("%s: %v", name, s)
				}
			}
		})
	}
}

func TestSpansOfAFailureSayWhy(t *testing.T) {
	r := record(t, tempserver.Require(t)[0], lockotel.Options{})
	held, err := mysqllock.Acquire(context.Background(), r.db, "secret")
	dbtest.OK(t, err)
	ctx, refused := r.tracer.Start(context.Background(), "refused")
	if _, err := mysqllock.Acquire(ctx, r.db, "secret", lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
		t.Fatalf("a lock that is held: %v", err)
	}
	dbtest.OK(t, held.Release())
	spans := r.children(refused)
	s := spans["acquire lock"]
	if len(spans) != 1 || s.Status() != (sdktrace.Status{}) || !has(s, attribute.String("error.type", "locked")) { // it has not failed
		t.Errorf("refused, the spans are %v", spans)
	}
	if value(s, "mysqllock.holder.connection_id") == "" || value(s, "mysqllock.holder") != "" {
		t.Errorf("of the holder a span has %v", s.Attributes())
	}
	built, _ := debug.ReadBuildInfo()
	if v := s.InstrumentationScope().Version; v == "" || v != built.Main.Version {
		t.Errorf("the version is %q, that of the module is %q", v, built.Main.Version)
	}
	ctx, lost := r.tracer.Start(context.Background(), "lost")
	r.lose(ctx, "secret")
	spans = r.children(lost)
	if s := spans["hold lock"]; s == nil || !slices.Contains(lostBy, s.Status().Description) || spans["acquire lock"].Status().Code != codes.Unset {
		t.Errorf("lost, the spans are %v", spans)
	}
	for _, s := range r.spans.Ended() {
		if strings.Contains(fmt.Sprint(s.Attributes(), s.Status(), s.Events()), "secret") {
			t.Errorf("a span tells the key: %v", s)
		}
	}
	if n := len(r.spans.Ended()); n != 1+len(spans) { // what was done without a span of the caller's has none
		t.Errorf("there are %d spans", n)
	}
}

func TestKeysAreClearInSpansOnRequest(t *testing.T) {
	r := record(t, tempserver.Require(t)[0], lockotel.Options{ClearKeys: true})
	ctx, parent := r.tracer.Start(context.Background(), "parent")
	var refused *mysqllock.Error
	dbtest.OK(t, mysqllock.Do(context.Background(), r.db, "product:42", func(context.Context) error {
		if _, err := mysqllock.Acquire(ctx, r.db, "product:42", lockctx.NoWait()); !errors.As(err, &refused) || refused.Holder == nil {
			t.Fatalf("a lock that is held: %v", err)
		}
		return nil
	}))
	if s := r.children(parent)["acquire lock"]; !has(s, attribute.String("mysqllock.holder", refused.Holder.String())) {
		t.Errorf("of the holder a span has %v", s.Attributes())
	}
	r.lose(ctx, "product:42")
	spans := r.children(parent)
	s := spans["hold lock"]
	if s == nil || !has(s, attribute.StringSlice("mysqllock.keys", []string{"product:42"})) || !strings.Contains(s.Status().Description, `commit "product:42" (row): lock lost`) {
		t.Errorf("the spans are %v", spans)
	}
}

func TestTheServerIsKnownByItsAddress(t *testing.T) {
	for dsn, want := range map[string]string{
		"app:secret@tcp(db.example:3307)/shop": "server.address=db.example,server.port=3307,db.namespace=shop",
		"app@tcp([::1]:3306)/":                 "server.address=::1,server.port=3306",
		"app@unix(/run/mysqld.sock)/shop":      "server.address=/run/mysqld.sock,db.namespace=shop",
	} {
		cfg, err := mysql.ParseDSN(dsn)
		dbtest.OK(t, err)
		var got []string
		for _, a := range lockotel.Server(cfg) {
			got = append(got, string(a.Key)+"="+a.Value.String())
		}
		if strings.Join(got, ",") != want {
			t.Errorf("%s: %v, want %s", dsn, got, want)
		}
	}
}

func TestStandingByForALeadershipIsNoWait(t *testing.T) {
	r := record(t, tempserver.Require(t)[0], lockotel.Options{Class: func(string) string { return "all" }})
	r.observer.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.Acquired, Strategy: "lease", Keys: []string{"k"}, Leadership: true, Duration: time.Hour})
	r.observer.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.Released, Strategy: "lease", Keys: []string{"k"}, Leadership: true, Held: time.Hour})
	got := r.collect()
	if len(got["mysqllock.lock.wait_time"].Name) != 0 || len(got["mysqllock.key_class.wait_time"].Name) != 0 || len(got["mysqllock.lock.use_time"].Name) == 0 {
		t.Errorf("there are %v", got)
	}
}

// collect reads the metrics, by name.
func (r *recorder) collect() map[string]metricdata.Metrics {
	r.t.Helper()
	var all metricdata.ResourceMetrics
	dbtest.OK(r.t, r.metrics.Collect(context.Background(), &all))
	out := make(map[string]metricdata.Metrics)
	for _, scope := range all.ScopeMetrics {
		for _, m := range scope.Metrics {
			out[m.Name] = m
		}
	}
	return out
}

func TestTimesOfWaitAndUseAreRecordedByOutcome(t *testing.T) {
	for _, bin := range tempserver.EachFlavour(tempserver.Require(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			r := record(t, bin, lockotel.Options{})
			ctx := context.Background()
			const pause = 30 * time.Millisecond
			dbtest.OK(t, mysqllock.Do(ctx, r.db, "a", func(ctx context.Context) error {
				dbtest.Is(t, "a lock that is held", dbtest.Err(mysqllock.Acquire(context.Background(), r.db, "a", lockctx.Wait(pause))), mysqllock.ErrTimeout)
				return nil
			}))
			dbtest.OK(t, mysqllock.Do(ctx, r.db, "b", func(context.Context) error { time.Sleep(pause); return nil }, lockctx.Advisory()))
			r.lose(ctx, "c")
			metrics := r.collect()
			for _, want := range []struct {
				name, strategy string
				why            []string
				count          uint64
				least          float64
			}{
				{"wait_time", "row", nil, 2, 0},
				{"wait_time", "row", []string{"waited"}, 1, pause.Seconds()},
				{"wait_time", "advisory", nil, 1, 0},
				{"use_time", "row", nil, 1, pause.Seconds()},
				{"use_time", "row", lostBy, 1, 0},
				{"use_time", "advisory", nil, 1, pause.Seconds()},
			} {
				m := metrics["mysqllock.lock."+want.name]
				h, _ := m.Data.(metricdata.Histogram[float64])
				i := slices.IndexFunc(h.DataPoints, func(p metricdata.HistogramDataPoint[float64]) bool {
					system, _ := p.Attributes.Value("db.system.name")
					strategy, _ := p.Attributes.Value("mysqllock.strategy")
					why, failed := p.Attributes.Value("error.type")
					return system == r.system.Value && strategy.AsString() == want.strategy &&
						failed == (want.why != nil) && (!failed || slices.Contains(want.why, why.AsString()))
				})
				if i < 0 || m.Unit != "s" || len(h.DataPoints) != 3 {
					t.Errorf("%+v: there is %+v", want, m)
				} else if p := h.DataPoints[i]; p.Count != want.count || p.Sum < want.least || p.Sum > 60 {
					t.Errorf("%+v: %d in %v s", want, p.Count, p.Sum)
				}
			}
		})
	}
}

func TestAWatchedHandleRecordsItsConnections(t *testing.T) {
	r := record(t, tempserver.Require(t)[0], lockotel.Options{})
	watching, err := r.observer.Watch(r.db, "shop")
	dbtest.OK(t, err)
	value := func(name string, more ...attribute.KeyValue) int64 {
		t.Helper()
		set := attribute.NewSet(append(more, r.system, attribute.String("db.client.connection.pool.name", "shop"))...)
		sum, _ := r.collect()[name].Data.(metricdata.Sum[int64])
		for _, p := range sum.DataPoints {
			if p.Attributes.Equals(&set) {
				return p.Value
			}
		}
		return -1
	}
	state := func(s string) attribute.KeyValue { return attribute.String("db.client.connection.state", s) }
	hold, err := mysqllock.Acquire(context.Background(), r.db, "k")
	dbtest.OK(t, err)
	if used, most, waiters := value("db.client.connection.count", state("used")), value("db.client.connection.max"), value("mysqllock.lock.waiters"); used != 1 || most != 16 || waiters != 0 {
		t.Errorf("%d of %d are used, %d wait", used, most, waiters)
	}
	r.connecting.Lock()
	another := make(chan error)
	go func() {
		h, err := mysqllock.Acquire(context.Background(), r.db, "another", lockctx.Wait(2*time.Minute))
		if err == nil {
			err = h.Release()
		}
		another <- err
	}()
	for deadline := time.Now().Add(time.Minute); value("db.client.connection.count", state("opening")) != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Error("no connection is seen to be opened")
			break
		}
	}
	r.connecting.Unlock()
	dbtest.OK(t, <-another)
	dbtest.Equal(t, "%d are still opened", value("db.client.connection.count", state("opening")), 0)
	dbtest.OK(t, hold.Release())
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		used, idle := value("db.client.connection.count", state("used")), value("db.client.connection.count", state("idle"))
		if used == 0 && idle > 0 {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("%d are used, %d idle", used, idle)
		}
	}
	dbtest.OK(t, watching.Unregister())
	dbtest.Equal(t, "still watched: %d", value("db.client.connection.max"), -1)

	other, err := sql.Open("mysql", "/")
	dbtest.OK(t, err)
	defer other.Close()
	if _, err := r.observer.Watch(other, "other"); err == nil {
		t.Error("the handle of another driver is watched")
	}
}
