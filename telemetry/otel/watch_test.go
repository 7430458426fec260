package lockotel_test

import (
	"context"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	lockotel "github.com/mysqllock/mysqllock/telemetry/otel"
)

// connection is what is recorded in mysqllock.connection.<name> of a pool.
func (r *recorder) connection(name, pool string, more ...string) (value float64, exists bool) {
	attributes := []attribute.KeyValue{r.system, attribute.String("db.client.connection.pool.name", pool)}
	for i := 0; i < len(more); i += 2 {
		attributes = append(attributes, attribute.String(more[i], more[i+1]))
	}
	set := attribute.NewSet(attributes...)
	switch sum := r.collect()["mysqllock.connection."+name].Data.(type) {
	case metricdata.Sum[int64]:
		for _, p := range sum.DataPoints {
			if p.Attributes.Equals(&set) {
				return float64(p.Value), true
			}
		}
	case metricdata.Sum[float64]:
		for _, p := range sum.DataPoints {
			if p.Attributes.Equals(&set) {
				return p.Value, true
			}
		}
	}
	return 0, false
}

// TestConnectionsAreRecordedByUse: those of a handle with maxConns, with the bound, and who waits
// for one. What is not known without maxConns is not there.
func TestConnectionsAreRecordedByUse(t *testing.T) {
	const use, state = "mysqllock.connection.use", "db.client.connection.state"
	r := record(t, tempserver.Require(t)[0], lockotel.Options{})
	db := r.open(6)
	watching, err := r.observer.Watch(db, "shop")
	dbtest.OK(t, err)
	defer func() { dbtest.OK(t, watching.Unregister()) }()
	dbtest.OK(t, mysqllock.Do(t.Context(), db, "k", func(context.Context) error { return nil }))
	value := func(name string, more ...string) float64 {
		t.Helper()
		v, exists := r.connection(name, "shop", more...)
		if !exists {
			t.Errorf("there is no %s of %v", name, more)
		}
		return v
	}
	var end []func() error
	for range 3 { // three of the six are kept
		tx, err := db.Begin()
		dbtest.OK(t, err)
		end = append(end, tx.Rollback)
	}
	queued := make(chan error)
	go func() { queued <- db.PingContext(t.Context()) }()
	dbtest.Soon(t, "a caller is seen to wait for a connection", func() bool { return value("pending_requests", use, "app") == 1 })
	if r.collect()["mysqllock.lock.oldest_wait"].Data.(metricdata.Gauge[float64]).DataPoints[0].Value <= 0 {
		t.Error("it has not waited for any time")
	}
	if r.collect()["mysqllock.lock.oldest_hold"].Data.(metricdata.Gauge[float64]).DataPoints[0].Value != 0 {
		t.Error("something is held")
	}
	dbtest.Equal(t, "%v are reserved", value("reserved"), 3)
	if bound, used := value("max"), value("count", use, "app", state, "used"); bound != 6 || used != 3 {
		t.Errorf("of %v connections %v are used", bound, used)
	}
	before := value("wait_time", use, "app")
	for _, f := range end {
		dbtest.OK(t, f())
	}
	dbtest.OK(t, <-queued)
	if n, took := value("waits", use, "app"), value("wait_time", use, "app"); n == 0 || took <= before {
		t.Errorf("%v have waited for %v s", n, took)
	}
	for _, other := range []string{"sessions", "leases", "advisory", "control"} {
		if n := value("pending_requests", use, other); n != 0 {
			t.Errorf("%s: %v wait", other, n)
		}
	}

	without, err := r.observer.Watch(r.db, "without")
	dbtest.OK(t, err)
	defer func() { dbtest.OK(t, without.Unregister()) }()
	if n, exists := r.connection("max", "without"); exists {
		t.Errorf("the bound without maxConns is %v", n)
	}
	if _, exists := r.connection("count", "without", use, "app", state, "used"); exists {
		t.Error("without maxConns the application's connections are counted")
	}
	if _, exists := r.connection("count", "without", use, "sessions", state, "used"); !exists {
		t.Error("without maxConns no connections are counted")
	}
}
