// Package lockotel has OpenTelemetry spans and metrics of locks.
//
//	locks, err := lockotel.New(lockotel.Options{})
//	…
//	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Observer: locks})
//	…
//	db := sql.OpenDB(connector)
//	registration, err := locks.Watch(db, "shop")
//
// # Spans
//
// There are three of a lock: "acquire lock", from asking to the answer; "hold lock",
// from the grant until giving back begins or the lock is lost; and "release lock",
// with the COMMIT that goes with it. They are children of the span in the context
// with which the lock was asked for; where there is none, there are no spans. They
// are made when they have ended, unless spans of statements lie beneath them.
// Attributes: db.system.name (mysql, where [Options].Attributes do not say mariadb),
// mysqllock.strategy, mysqllock.keys, mysqllock.shared, mysqllock.token (of a lease),
// mysqllock.long (of a hold that lasted longer than mysqllock.Config.LongHold),
// mysqllock.holder.connection_id and, with [Options].ClearKeys, mysqllock.holder (of
// "acquire lock": who had it, as far as is known; see mysqllock.Config.SlowWait), and
// error.type. The status is Error where there is an error.type, unless that is locked: a
// caller that would not wait has its answer.
//
// # Spans of statements
//
// [Observer.Statements] adds a span for each statement that goes to the server, for
// connecting, and for BEGIN, COMMIT and ROLLBACK:
//
//	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{
//		Observer: locks,
//		Base:     intercept.With(locks.Statements()),
//	})
//
// The statements of the application are children of the span in their context. Those that
// the driver adds are children of the lock's: of "acquire lock" until it is granted, of "hold
// lock" while it is held (renewals, fences), and of "release lock" afterwards. One for several
// locks is a child of the first, and has links to the others. What is for no lock, such as
// the START TRANSACTION around a statement, is a child of the caller's span. If a lock is asked
// for anew on another connection, its first "acquire lock" has mysqllock.retried.
//
// A span is named by the verb of its statement, and a statement of the driver's own that checks
// and commits is COMMIT. That a lock is held, as NOWAIT says, is no status Error. By the semantic conventions of database clients
// it has db.system.name, db.operation.name, db.query.text, and after an error error.type and
// db.response.status_code with the number of the server's error. The text is without literals
// and comments, and ends in … where it is not certain what is a literal. Arguments, and what the
// server says of an error, are never in a span. Beside them are mysqllock.step (take, fence,
// end, release, renew, kill or other: see package intercept), mysqllock.strategy and
// mysqllock.keys, for statements that the driver adds.
//
// # Metrics
//
//	mysqllock.lock.wait_time       histogram        s             from asking to the answer, round trips included
//	mysqllock.lock.use_time        histogram        s             from the grant until giving back begins, or loss
//	mysqllock.lock.long_holds      counter          {hold}        holds longer than mysqllock.Config.LongHold, counted while they last
//	mysqllock.lock.active_long_holds  up-down counter  {hold}     of these, the ones that last now
//
// and, with [Options].Class, by mysqllock.key_class (one for several keys counts in the class
// of each):
//
//	mysqllock.key_class.wait_time  histogram        s             from asking to the answer, with error.type where it was refused
//	mysqllock.key_class.losses     counter          {loss}        locks that were lost
//
// The attributes of the others are db.system.name, mysqllock.strategy, and of the histograms error.type
// where the lock was refused or lost, or the commit found another version: locked (and the
// caller would not wait), waited (in vain, as long as allowed), exhausted (no connection to take
// it on: ErrExhausted), canceled, deadlock, conflict, stale_snapshot, unsafe, no_end, closed,
// connection (the server has not answered: ErrNoAnswer; or it is gone), lost or other. How many were refused or lost is what the
// histograms count with an error.type. How long processes stand by for a leadership (package
// leader) is not in them. They are not db.client.operation.duration: a wait for somebody
// else's lock would spoil what that says of the database.
//
// [Observer.Watch] adds, by the semantic conventions of database clients and with
// db.client.connection.pool.name, the connections that sessions have:
//
//	db.client.connection.count     up-down counter  {connection}  now, by db.client.connection.state: used, idle, opening
//	db.client.connection.max       up-down counter  {connection}  the bound, lockMaxConns
//	mysqllock.lock.waiters         up-down counter  {waiter}      callers that wait now, for a lock or for a connection to take it on
//	mysqllock.lock.oldest_wait     gauge            s             how long the caller that came first has waited; 0 for none
//	mysqllock.lock.oldest_hold     gauge            s             how long the lock that has been held for the longest is held; 0 for none
//
// It also adds all connections of the handle, by mysqllock.connection.use: app (statements
// of the application), sessions, leases, advisory and control (making rows, killing
// waiters). Without maxConns there is no mysqllock.connection.max or .reserved, and no app: what
// database/sql has is not known here. Leaderships (package leader) are in mysqllock.lock.waiters,
// but not in the gauges of the oldest.
//
//	mysqllock.connection.count             up-down counter  {connection}  now, by use and db.client.connection.state
//	mysqllock.connection.max               up-down counter  {connection}  the bound for all of them, maxConns
//	mysqllock.connection.reserved          up-down counter  {connection}  of these, the unused ones that are kept for the driver's own
//	mysqllock.connection.pending_requests  up-down counter  {request}     callers that wait for one now, by use
//	mysqllock.connection.waits             counter          {request}     times that none was ready, by use
//	mysqllock.connection.wait_time         counter          s             time that callers waited for one, by use
package lockotel

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/telemetry/internal/classes"
	"github.com/mysqllock/mysqllock/telemetry/internal/reason"
)

// Options say where telemetry goes. The zero value works.
type Options struct {
	TracerProvider trace.TracerProvider // nil is the global one
	MeterProvider  metric.MeterProvider // nil is the global one

	// Attributes are added to all spans and metrics, to tell databases apart; [Server] has
	// server.address and db.namespace. They come after db.system.name, which is mysql,
	// since the Observer is not told what the server is: on MariaDB give
	// semconv.DBSystemNameMariaDB here.
	Attributes []attribute.KeyValue

	// ClearKeys puts keys, holders, and errors, which name both, into spans as they are.
	// Without it a key is the first 16 hexadecimal digits of its SHA-256:
	// the same key has the same, and who can guess a key can check that. Metrics
	// have no keys.
	ClearKeys bool

	// Class says to which class a key belongs, for the metrics by class: keys are too many for
	// them. inspect.Classes makes it of patterns. It is called for each key of each event, by
	// several goroutines. Of more than 100 classes the rest, and "", are "other". nil is no
	// such metrics.
	Class func(key string) string

	// LockStatementsOnly has [Observer.Statements] make no spans of the application's own
	// statements: for applications that have them from elsewhere.
	LockStatementsOnly bool
}

// Observer makes spans and metrics of what it is told of locks. It is a
// [mysqllock.Observer] for one or several handles. Make it with [New]. It is safe
// for concurrent use.
type Observer struct {
	options    Options
	attributes []attribute.KeyValue
	tracer     trace.Tracer
	meter      metric.Meter
	wait, use  metric.Float64Histogram
	longHolds  metric.Int64Counter
	longNow    metric.Int64UpDownCounter
	classes    *classes.Classes // nil without; then the two below are, too
	classWait  metric.Float64Histogram
	classLost  metric.Int64Counter
	nested     atomic.Bool // the spans of locks have those of their statements beneath them
}

var _ mysqllock.Observer = (*Observer)(nil)

const scope = "github.com/mysqllock/mysqllock/telemetry/otel"

// version is that of this module in the program; "" if it does not know.
func version() string {
	built, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, m := range append(built.Deps, &built.Main) {
		if m.Path == scope {
			return m.Version
		}
	}
	return ""
}

// Server returns the attributes of the server, and of the database on it, for
// [Options].Attributes: server.address, server.port if it has one, and db.namespace if cfg
// names a database.
func Server(cfg *mysql.Config) []attribute.KeyValue {
	out := []attribute.KeyValue{semconv.ServerAddress(cfg.Addr)}
	if host, port, err := net.SplitHostPort(cfg.Addr); err == nil && cfg.Net != "unix" {
		out[0] = semconv.ServerAddress(host)
		if n, err := strconv.Atoi(port); err == nil {
			out = append(out, semconv.ServerPort(n))
		}
	}
	if cfg.DBName != "" {
		out = append(out, semconv.DBNamespace(cfg.DBName))
	}
	return out
}

// New returns an Observer. It fails where the meter does not make its
// instruments.
func New(o Options) (*Observer, error) {
	if o.TracerProvider == nil {
		o.TracerProvider = otel.GetTracerProvider()
	}
	if o.MeterProvider == nil {
		o.MeterProvider = otel.GetMeterProvider()
	}
	out := &Observer{
		options:    o,
		attributes: append([]attribute.KeyValue{semconv.DBSystemNameMySQL}, o.Attributes...), // of two for one name the later counts
		tracer:     o.TracerProvider.Tracer(scope, trace.WithSchemaURL(semconv.SchemaURL), trace.WithInstrumentationVersion(version())),
		meter:      o.MeterProvider.Meter(scope, metric.WithSchemaURL(semconv.SchemaURL), metric.WithInstrumentationVersion(version())),
	}
	var err, errUse, errLong, errNow error
	out.wait, err = out.meter.Float64Histogram("mysqllock.lock.wait_time", metric.WithUnit("s"),
		metric.WithDescription("The time from asking for a lock to the answer."),
		metric.WithExplicitBucketBoundaries(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60))
	out.use, errUse = out.meter.Float64Histogram("mysqllock.lock.use_time", metric.WithUnit("s"),
		metric.WithDescription("The time from the grant of a lock until giving back began, or until it was lost."),
		metric.WithExplicitBucketBoundaries(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10, 60, 600, 3600))
	out.longHolds, errLong = out.meter.Int64Counter("mysqllock.lock.long_holds", metric.WithUnit("{hold}"),
		metric.WithDescription("Locks that were held for longer than Config.LongHold, counted while they are."))
	out.longNow, errNow = out.meter.Int64UpDownCounter("mysqllock.lock.active_long_holds", metric.WithUnit("{hold}"),
		metric.WithDescription("Locks that are held now, for longer than Config.LongHold."))
	if err := errors.Join(err, errUse, errLong, errNow, out.countClasses()); err != nil {
		return nil, fmt.Errorf("mysqllock: making the instruments for locks: %w", err)
	}
	return out, nil
}

// countClasses makes the instruments for classes of keys, if there are any.
func (o *Observer) countClasses() (err error) {
	if o.classes = classes.New(o.options.Class); o.classes == nil {
		return nil
	}
	var errLost error
	o.classWait, err = o.meter.Float64Histogram("mysqllock.key_class.wait_time", metric.WithUnit("s"),
		metric.WithDescription("The time from asking for a lock to the answer, by the class of its key."),
		metric.WithExplicitBucketBoundaries(0.01, 0.1, 1, 10, 60))
	o.classLost, errLost = o.meter.Int64Counter("mysqllock.key_class.losses", metric.WithUnit("{loss}"),
		metric.WithDescription("Locks that were lost while they were held, by the class of their key."))
	return errors.Join(err, errLost)
}

// standsBy reports that e ends the wait of a process that stood by for a leadership: it says
// nothing of delays.
func standsBy(e mysqllock.Event) bool {
	return e.Leadership && (e.Kind == mysqllock.Acquired || e.Kind == mysqllock.Refused)
}

// observeClasses counts by the classes of the keys.
func (o *Observer) observeClasses(ctx context.Context, e mysqllock.Event) {
	if standsBy(e) {
		return
	}
	for _, class := range o.classes.Of(e.Keys) {
		attributes := append(slices.Clone(o.attributes), attribute.String("mysqllock.key_class", class))
		switch e.Kind {
		case mysqllock.Acquired, mysqllock.Refused:
			if e.Err != nil {
				attributes = append(attributes, semconv.ErrorTypeKey.String(reason.Of(e.Err)))
			}
			o.classWait.Record(ctx, e.Duration.Seconds(), metric.WithAttributes(attributes...))
		case mysqllock.Lost:
			o.classLost.Add(ctx, 1, metric.WithAttributes(attributes...))
		}
	}
}

// Observe implements [mysqllock.Observer].
func (o *Observer) Observe(ctx context.Context, e mysqllock.Event) {
	r, begun := ctx.Value(recordKey{}).(*record)
	if begun {
		ctx = r.caller
	}
	o.observeClasses(ctx, e)
	switch e.Kind {
	case mysqllock.Acquired, mysqllock.Refused:
		if !standsBy(e) {
			o.record(ctx, o.wait, e.Duration, e)
		}
	case mysqllock.Released, mysqllock.Lost:
		o.record(ctx, o.use, e.Held, e)
	}
	if begun {
		o.observe(r, e)
	} else {
		o.spans(ctx, e)
	}
	if e.Long {
		of := metric.WithAttributes(append(slices.Clone(o.attributes), attribute.String("mysqllock.strategy", e.Strategy))...)
		if e.Kind == mysqllock.LongHold {
			o.longHolds.Add(ctx, 1, of)
			o.longNow.Add(ctx, 1, of)
		} else {
			o.longNow.Add(ctx, -1, of)
		}
	}
}

// spans makes the spans of e, which have ended.
func (o *Observer) spans(ctx context.Context, e mysqllock.Event) {
	switch e.Kind {
	case mysqllock.Acquired, mysqllock.Refused:
		o.span(ctx, "acquire lock", trace.SpanKindClient, e.Start, e.Start.Add(e.Duration), e, e.Err)
	case mysqllock.Released, mysqllock.Lost:
		var lost error
		if e.Kind == mysqllock.Lost {
			lost = e.Err
		}
		o.span(ctx, "hold lock", trace.SpanKindInternal, e.Start.Add(-e.Held), e.Start, e, lost, long(e)...)
		if e.Duration > 0 { // it was not lost before
			o.span(ctx, "release lock", trace.SpanKindClient, e.Start, e.Start.Add(e.Duration), e, e.Err)
		}
	}
}

func (o *Observer) record(ctx context.Context, h metric.Float64Histogram, d time.Duration, e mysqllock.Event) {
	attributes := append(slices.Clone(o.attributes), attribute.String("mysqllock.strategy", e.Strategy))
	if e.Err != nil {
		attributes = append(attributes, semconv.ErrorTypeKey.String(reason.Of(e.Err)))
	}
	h.Record(ctx, d.Seconds(), metric.WithAttributes(attributes...))
}

// span makes a span that has ended.
func (o *Observer) span(
	ctx context.Context, name string, kind trace.SpanKind, start, end time.Time, e mysqllock.Event, err error, more ...attribute.KeyValue,
) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return
	}
	_, span := o.begin(ctx, name, kind, start)
	span.SetAttributes(more...)
	o.finish(span, end, e, err)
}

// long is what the span of a hold has that was long.
func long(e mysqllock.Event) []attribute.KeyValue {
	if !e.Long {
		return nil
	}
	return []attribute.KeyValue{attribute.Bool("mysqllock.long", true)}
}

// finish ends a span.
func (o *Observer) finish(span trace.Span, end time.Time, e mysqllock.Event, err error) {
	defer span.End(trace.WithTimestamp(end))
	if !span.IsRecording() {
		return
	}
	span.SetAttributes(
		attribute.String("mysqllock.strategy", e.Strategy),
		attribute.StringSlice("mysqllock.keys", o.keys(e.Keys)),
		attribute.Bool("mysqllock.shared", e.Shared),
	)
	if e.Token != 0 {
		span.SetAttributes(attribute.Int64("mysqllock.token", int64(e.Token)))
	}
	if h := e.Holder; h != nil {
		if h.ConnectionID != 0 {
			id := int64(h.ConnectionID) //nolint:gosec // connections are counted by one
			span.SetAttributes(attribute.Int64("mysqllock.holder.connection_id", id))
		}
		if o.options.ClearKeys {
			span.SetAttributes(attribute.String("mysqllock.holder", h.String()))
		}
	}
	if err != nil {
		why := reason.Of(err)
		span.SetAttributes(semconv.ErrorTypeKey.String(why))
		if why == "locked" { // the caller has asked whether it is free, and has its answer
			return
		}
		if o.options.ClearKeys {
			why = err.Error()
		}
		span.SetStatus(codes.Error, why)
	}
}

func (o *Observer) keys(keys []string) []string {
	if o.options.ClearKeys {
		return keys
	}
	out := make([]string, len(keys))
	for i, key := range keys {
		sum := sha256.Sum256([]byte(key))
		out[i] = fmt.Sprintf("%.8x", sum)
	}
	return out
}
