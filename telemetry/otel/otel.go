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
// are made when they have ended. Attributes: db.system.name (mysql, where
// [Options].Attributes do not say mariadb), mysqllock.strategy, mysqllock.keys,
// mysqllock.shared, mysqllock.token (of a lease) and error.type.
//
// # Metrics
//
//	mysqllock.lock.wait_time       histogram        s             from asking to the answer, round trips included
//	mysqllock.lock.use_time        histogram        s             from the grant until giving back begins, or loss
//
// Their attributes are db.system.name, mysqllock.strategy, and error.type where the
// lock was refused or lost, or the commit found another version: locked (and the
// caller would not wait), waited (in vain, as long as allowed), canceled, deadlock,
// conflict, stale_snapshot, unsafe, no_end, closed, connection (gone, or not to be
// had), lost or other. How many were refused or lost is what the histograms count
// with an error.type. They are not db.client.operation.duration: a wait for somebody
// else's lock would spoil what that says of the database.
//
// [Observer.Watch] adds, by the semantic conventions of database clients and with
// db.client.connection.pool.name, the connections that sessions have:
//
//	db.client.connection.count     up-down counter  {connection}  now, by db.client.connection.state: used, idle, opening
//	db.client.connection.max       up-down counter  {connection}  the bound, lockMaxConns
//	mysqllock.lock.waiters         up-down counter  {waiter}      callers that wait now, for a lock or for a connection to take it on
package lockotel

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/dbconv"
	"go.opentelemetry.io/otel/trace"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/telemetry/internal/reason"
)

// Options say where telemetry goes. The zero value works.
type Options struct {
	TracerProvider trace.TracerProvider // nil is the global one
	MeterProvider  metric.MeterProvider // nil is the global one

	// Attributes are added to all spans and metrics, to tell databases apart:
	// db.namespace, server.address. They come after db.system.name, which is mysql,
	// since the Observer is not told what the server is: on MariaDB give
	// semconv.DBSystemNameMariaDB here.
	Attributes []attribute.KeyValue

	// ClearKeys puts keys, and errors, which name keys and holders, into spans as
	// they are. Without it a key is the first 16 hexadecimal digits of its SHA-256:
	// the same key has the same, and who can guess a key can check that. Metrics
	// have no keys.
	ClearKeys bool
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
}

var _ mysqllock.Observer = (*Observer)(nil)

const scope = "github.com/mysqllock/mysqllock/telemetry/otel"

// opening is a state of which the conventions do not know.
var opening = semconv.DBClientConnectionStateKey.String("opening")

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
		tracer:     o.TracerProvider.Tracer(scope, trace.WithSchemaURL(semconv.SchemaURL)),
		meter:      o.MeterProvider.Meter(scope, metric.WithSchemaURL(semconv.SchemaURL)),
	}
	var err, errUse error
	out.wait, err = out.meter.Float64Histogram("mysqllock.lock.wait_time", metric.WithUnit("s"),
		metric.WithDescription("The time from asking for a lock to the answer."),
		metric.WithExplicitBucketBoundaries(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60))
	out.use, errUse = out.meter.Float64Histogram("mysqllock.lock.use_time", metric.WithUnit("s"),
		metric.WithDescription("The time from the grant of a lock until giving back began, or until it was lost."),
		metric.WithExplicitBucketBoundaries(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10, 60, 600, 3600))
	if err := errors.Join(err, errUse); err != nil {
		return nil, fmt.Errorf("mysqllock: making the instruments for locks: %w", err)
	}
	return out, nil
}

// Observe implements [mysqllock.Observer].
func (o *Observer) Observe(ctx context.Context, e mysqllock.Event) {
	switch e.Kind {
	case mysqllock.Acquired, mysqllock.Refused:
		o.record(ctx, o.wait, e.Duration, e)
		o.span(ctx, "acquire lock", trace.SpanKindClient, e.Start, e.Start.Add(e.Duration), e, e.Err)
	case mysqllock.Released, mysqllock.Lost:
		o.record(ctx, o.use, e.Held, e)
		var lost error
		if e.Kind == mysqllock.Lost {
			lost = e.Err
		}
		o.span(ctx, "hold lock", trace.SpanKindInternal, e.Start.Add(-e.Held), e.Start, e, lost)
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
func (o *Observer) span(ctx context.Context, name string, kind trace.SpanKind, start, end time.Time, e mysqllock.Event, err error) {
	if !trace.SpanContextFromContext(ctx).IsValid() {
		return
	}
	_, span := o.tracer.Start(ctx, name, trace.WithSpanKind(kind), trace.WithTimestamp(start), trace.WithAttributes(o.attributes...))
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
	if err != nil {
		why := reason.Of(err)
		span.SetAttributes(semconv.ErrorTypeKey.String(why))
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

// Watch adds metrics of db's sessions, which [mysqllock.Stats] counts, and of who
// waits. pool is the db.client.connection.pool.name, which no other pool of the
// application has. It fails where db was not opened with the driver. To end it,
// unregister what it returns.
func (o *Observer) Watch(db *sql.DB, pool string) (metric.Registration, error) {
	if _, err := mysqllock.Stats(db); err != nil {
		return nil, err
	}
	count, err := dbconv.NewClientConnectionCountObservable(o.meter)
	most, errMost := dbconv.NewClientConnectionMaxObservable(o.meter)
	waiters, errWaiters := o.meter.Int64ObservableUpDownCounter("mysqllock.lock.waiters", metric.WithUnit("{waiter}"),
		metric.WithDescription("Callers that wait now, for a lock or for a connection to take it on."))
	if err := errors.Join(err, errMost, errWaiters); err != nil {
		return nil, fmt.Errorf("mysqllock: making the instruments for sessions: %w", err)
	}
	all := append(slices.Clone(o.attributes), semconv.DBClientConnectionPoolName(pool))
	with := func(more ...attribute.KeyValue) metric.MeasurementOption {
		return metric.WithAttributes(append(slices.Clone(all), more...)...)
	}
	return o.meter.RegisterCallback(func(_ context.Context, to metric.Observer) error {
		now, err := mysqllock.Stats(db)
		if err != nil {
			return err
		}
		to.ObserveInt64(count.Inst(), int64(now.InUse), with(semconv.DBClientConnectionStateUsed))
		to.ObserveInt64(count.Inst(), int64(now.Idle), with(semconv.DBClientConnectionStateIdle))
		to.ObserveInt64(count.Inst(), int64(now.Opening), with(opening))
		to.ObserveInt64(most.Inst(), int64(now.Max), with())
		to.ObserveInt64(waiters, int64(now.Waiters), with())
		return nil
	}, count.Inst(), most.Inst(), waiters)
}
