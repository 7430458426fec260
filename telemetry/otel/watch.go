package lockotel

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/dbconv"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/telemetry/internal/uses"
)

// opening is a state of which the conventions do not know.
var opening = semconv.DBClientConnectionStateKey.String("opening")

// Watch adds metrics of db's connections, which [mysqllock.Stats] counts, and of who
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
	oldestWait, errWait := o.meter.Float64ObservableGauge("mysqllock.lock.oldest_wait", metric.WithUnit("s"),
		metric.WithDescription("How long the one of mysqllock.lock.waiters that came first has waited; 0 for none."))
	oldestHold, errHold := o.meter.Float64ObservableGauge("mysqllock.lock.oldest_hold", metric.WithUnit("s"),
		metric.WithDescription("How long the lock that has been held for the longest is held; 0 for none."))
	b, errBudget := o.newBudget()
	if err := errors.Join(err, errMost, errWaiters, errWait, errHold, errBudget); err != nil {
		return nil, fmt.Errorf("mysqllock: making the instruments for connections: %w", err)
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
		to.ObserveFloat64(oldestWait, now.OldestWait.Seconds(), with())
		to.ObserveFloat64(oldestHold, now.OldestHold.Seconds(), with())
		b.observe(to, now, with)
		return nil
	}, append(b.instruments(), count.Inst(), most.Inst(), waiters, oldestWait, oldestHold)...)
}

// budget has the instruments for all connections of a handle.
type budget struct {
	count, most, reserved, pending metric.Int64ObservableUpDownCounter
	waits                          metric.Int64ObservableCounter
	waitTime                       metric.Float64ObservableCounter
}

func (o *Observer) newBudget() (*budget, error) {
	b := new(budget)
	upDown := func(to *metric.Int64ObservableUpDownCounter, name, unit, text string) (err error) {
		*to, err = o.meter.Int64ObservableUpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(text))
		return err
	}
	var errWaits, errTime error
	b.waits, errWaits = o.meter.Int64ObservableCounter("mysqllock.connection.waits", metric.WithUnit("{request}"),
		metric.WithDescription("Times that no connection was ready and a caller waited."))
	b.waitTime, errTime = o.meter.Float64ObservableCounter("mysqllock.connection.wait_time", metric.WithUnit("s"),
		metric.WithDescription("Time that callers waited for a connection."))
	return b, errors.Join(errWaits, errTime,
		upDown(&b.count, "mysqllock.connection.count", "{connection}", "Connections now, by what they are for."),
		upDown(&b.most, "mysqllock.connection.max", "{connection}", "The most connections for everything: maxConns."),
		upDown(&b.reserved, "mysqllock.connection.reserved", "{connection}",
			"Of maxConns, those that nobody uses and that are kept for the driver's own statements."),
		upDown(&b.pending, "mysqllock.connection.pending_requests", "{request}", "Callers that wait for a connection now."))
}

func (b *budget) instruments() []metric.Observable {
	return []metric.Observable{b.count, b.most, b.reserved, b.pending, b.waits, b.waitTime}
}

func (b *budget) observe(to metric.Observer, now mysqllock.PoolStats, with func(...attribute.KeyValue) metric.MeasurementOption) {
	if now.MaxConns > 0 {
		to.ObserveInt64(b.most, int64(now.MaxConns), with())
		to.ObserveInt64(b.reserved, int64(now.Reserved), with())
	}
	for _, of := range uses.Of(now) {
		use := attribute.String("mysqllock.connection.use", of.Use)
		to.ObserveInt64(b.count, int64(of.InUse), with(use, semconv.DBClientConnectionStateUsed))
		to.ObserveInt64(b.count, int64(of.Idle), with(use, semconv.DBClientConnectionStateIdle))
		to.ObserveInt64(b.count, int64(of.Opening), with(use, opening))
		to.ObserveInt64(b.pending, int64(of.Waiting), with(use))
		to.ObserveInt64(b.waits, of.Waited, with(use))
		to.ObserveFloat64(b.waitTime, of.WaitTime.Seconds(), with(use))
	}
}
