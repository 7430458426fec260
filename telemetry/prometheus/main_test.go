package lockprom_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
	lockprom "github.com/mysqllock/mysqllock/telemetry/prometheus"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// open opens a handle in a database of its own, whose locks are counted,
// with a budget of connections if one is given.
func open(t *testing.T, bin tempserver.Binary, maxConns ...int) (*sql.DB, *prometheus.Registry) {
	t.Helper()
	cfg := tempserver.Database(t, tempserver.Share(t, bin).DSN(""))
	locks := lockprom.NewWithClasses(inspect.Classes("row", "lease"))
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Observer: locks, MaxConns: append(maxConns, 0)[0]})
	dbtest.OK(t, err)
	db := sql.OpenDB(connector)
	t.Cleanup(func() { db.Close() })
	stats, err := lockprom.NewStatsCollector(db)
	dbtest.OK(t, err)
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(locks, stats)
	return db, registry
}

// experience has everything happen that is counted.
func experience(t *testing.T, db *sql.DB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	const pause = 30 * time.Millisecond
	hold, err := mysqllock.Acquire(ctx, db, "row")
	dbtest.OK(t, err)
	if _, err := mysqllock.Acquire(ctx, db, "row", lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
		t.Fatalf("a lock that is held: %v", err)
	}
	if _, err := mysqllock.Acquire(ctx, db, "row", lockctx.Wait(pause)); !errors.Is(err, mysqllock.ErrTimeout) {
		t.Fatalf("a lock that is held for longer than the wait: %v", err)
	}
	dbtest.OK(t, hold.Release())
	dbtest.OK(t, mysqllock.Do(ctx, db, "lease", func(context.Context) error { time.Sleep(pause); return nil }, lockctx.Lease(time.Minute)))
	dbtest.OK(t, mysqllock.Do(ctx, db, "advisory", func(context.Context) error { return nil }, lockctx.Advisory()))

	_, err = db.ExecContext(ctx, "CREATE TABLE work (id INT)")
	dbtest.OK(t, err)
	write := func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, "INSERT INTO work VALUES (1)")
		return err
	}
	err = mysqllock.Do(ctx, db, "optimistic", func(outer context.Context) error {
		dbtest.OK(t, mysqllock.Do(ctx, db, "optimistic", write, lockctx.Optimistic()))
		return write(outer)
	}, lockctx.Optimistic())
	if !errors.Is(err, mysqllock.ErrConflict) {
		t.Fatalf("a version that has changed: %v", err)
	}

	hold, err = mysqllock.Acquire(ctx, db, "doomed")
	dbtest.OK(t, err)
	var id string
	dbtest.OK(t, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
	_, err = db.ExecContext(ctx, "KILL "+id)
	dbtest.OK(t, err)
	if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
		t.Fatalf("a lock whose connection was killed: %v", err)
	}
}

// gather reads what is counted, by name.
func gather(t *testing.T, registry *prometheus.Registry) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := registry.Gather()
	dbtest.OK(t, err)
	out := make(map[string]*dto.MetricFamily)
	for _, f := range families {
		out[f.GetName()] = f
	}
	return out
}

// metric is the one of the family with these labels, given as name=value.
func metric(f *dto.MetricFamily, labels ...string) *dto.Metric {
	for _, m := range f.GetMetric() {
		var has []string
		for _, l := range m.GetLabel() {
			has = append(has, l.GetName()+"="+l.GetValue())
		}
		if strings.Join(has, " ") == strings.Join(labels, " ") {
			return m
		}
	}
	return nil
}
