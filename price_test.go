package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// nothing is a driver with the interfaces of go-sql-driver/mysql that answers
// at once. Queries have as many rows as it says.
type nothing int

func (n nothing) Connect(context.Context) (driver.Conn, error) { return n, nil }

func (n nothing) Driver() driver.Driver { return fakeDriver{} }

func (n nothing) Begin() (driver.Tx, error) { return n, nil }

func (n nothing) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return n, nil }

func (n nothing) Prepare(string) (driver.Stmt, error) { return nothingStmt{n}, nil }

func (n nothing) PrepareContext(context.Context, string) (driver.Stmt, error) {
	return nothingStmt{n}, nil
}

func (n nothing) Exec(string, []driver.Value) (driver.Result, error) { return driver.ResultNoRows, nil }

func (n nothing) Query(string, []driver.Value) (driver.Rows, error) { return &nothingRows{int(n)}, nil }

func (n nothing) CheckNamedValue(v *driver.NamedValue) (err error) { return nil }

func (n nothing) Ping(context.Context) error { return nil }

func (n nothing) ResetSession(context.Context) error { return nil }

func (n nothing) IsValid() bool { return true }

func (n nothing) Close() error { return nil }

func (n nothing) Commit() error { return nil }

func (n nothing) Rollback() error { return nil }

func (n nothing) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return driver.ResultNoRows, nil
}

func (n nothing) QueryContext(context.Context, string, []driver.NamedValue) (driver.Rows, error) {
	return &nothingRows{int(n)}, nil
}

type nothingStmt struct{ n nothing }

func (ns nothingStmt) Close() error { return nil }

func (ns nothingStmt) NumInput() int { return 2 }

func (ns nothingStmt) CheckNamedValue(*driver.NamedValue) error { return nil }

func (ns nothingStmt) Exec([]driver.Value) (driver.Result, error) { return driver.ResultNoRows, nil }

func (ns nothingStmt) Query([]driver.Value) (driver.Rows, error) { return &nothingRows{int(ns.n)}, nil }

func (ns nothingStmt) ExecContext(context.Context, []driver.NamedValue) (driver.Result, error) {
	return driver.ResultNoRows, nil
}

func (ns nothingStmt) QueryContext(context.Context, []driver.NamedValue) (driver.Rows, error) {
	return &nothingRows{int(ns.n)}, nil
}

type nothingRows struct{ left int }

func (nr *nothingRows) Columns() []string { return []string{"id"} }

func (nr *nothingRows) Close() error { return nil }

func (nr *nothingRows) Next(dest []driver.Value) error {
	if nr.left == 0 {
		return io.EOF
	}
	nr.left--
	dest[0] = int64(nr.left)
	return nil
}

// plainWork is what applications do, and how many allocations more it may cost.
var plainWork = []struct {
	name  string
	rows  nothing
	extra float64
	work  func(ctx context.Context, db *sql.DB, p *sql.Stmt) error
}{
	{"query", 1, 1, query},
	{"query 100 rows", 100, 1, query},
	{"exec", 0, 1, func(ctx context.Context, db *sql.DB, _ *sql.Stmt) error {
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock - ? WHERE id = ?", 1, 42)
		return err
	}},
	{"transaction", 0, 3, func(ctx context.Context, db *sql.DB, _ *sql.Stmt) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = stock - ? WHERE id = ?", 1, 42); err != nil {
			return err
		}
		return tx.Commit()
	}},
	{"prepared exec", 0, 1, func(ctx context.Context, _ *sql.DB, p *sql.Stmt) error {
		_, err := p.ExecContext(ctx, 1, 42)
		return err
	}},
}

func query(ctx context.Context, db *sql.DB, _ *sql.Stmt) error {
	rows, err := db.QueryContext(ctx, "SELECT id FROM products WHERE category = ? AND stock > ?", 7, 0)
	if err != nil {
		return err
	}
	defer rows.Close()
	var id int64
	for rows.Next() {
		if err := rows.Scan(&id); err != nil {
			return err
		}
	}
	return rows.Err()
}

// pair returns a function that does the work once, on the bare driver and on
// the wrapped one.
func pair(tb testing.TB, rows nothing, work func(context.Context, *sql.DB, *sql.Stmt) error) (bare, wrapped func()) {
	tb.Helper()
	k, err := mysqllock.Wrap(rows, mysqllock.Config{})
	dbtest.OK(tb, err)
	return doing(tb, rows, work), doing(tb, k, work)
}

// doing returns a function that does the work once.
func doing(tb testing.TB, k driver.Connector, work func(context.Context, *sql.DB, *sql.Stmt) error) func() {
	tb.Helper()
	ctx := context.Background()
	db := sql.OpenDB(k)
	tb.Cleanup(func() { db.Close() })
	p, err := db.PrepareContext(ctx, "UPDATE products SET stock = stock - ? WHERE id = ?")
	dbtest.OK(tb, err)
	tb.Cleanup(func() { p.Close() })
	return func() {
		dbtest.OK(tb, work(ctx, db, p))
	}
}

func TestWorkWithoutAHintAllocatesHardlyMore(t *testing.T) {
	for _, w := range plainWork {
		t.Run(w.name, func(t *testing.T) {
			bare, wrapped := pair(t, w.rows, w.work)
			least := func(f func()) float64 { // others may be at work
				return min(testing.AllocsPerRun(200, f), testing.AllocsPerRun(200, f), testing.AllocsPerRun(200, f))
			}
			if b, o := least(bare), least(wrapped); o > b+w.extra {
				t.Errorf("%v allocations, %v on the bare driver; want at most %v more", o, b, w.extra)
			}
		})
	}
}

func BenchmarkPlain(b *testing.B) {
	for _, w := range plainWork {
		b.Run(w.name, func(b *testing.B) {
			bare, wrapped := pair(b, w.rows, w.work)
			for name, once := range map[string]func(){"bare": bare, "wrapped": wrapped} {
				b.Run(name, func(b *testing.B) {
					b.ReportAllocs()
					for b.Loop() {
						once()
					}
				})
			}
			b.Run("ratio", func(b *testing.B) { sideBySide(b, 200, bare, wrapped) })
		})
	}
}

// BenchmarkEmptyInterceptor is what an interceptor costs that does nothing: "wrapped" is
// with it, "bare" the driver without.
func BenchmarkEmptyInterceptor(b *testing.B) {
	price(b, mysqllock.Config{Base: intercept.With(sqlmw.NullInterceptor{})})
}

// BenchmarkLight is what it costs a statement without a lock that its connection is light, as
// with maxConns, and not a real one, without a server.
func BenchmarkLight(b *testing.B) { price(b, mysqllock.Config{MaxConns: 100}) }

// BenchmarkStrictMode is what strict mode costs a statement that needs no lock, without a
// server, which takes some 50 microseconds more.
func BenchmarkStrictMode(b *testing.B) {
	price(b, mysqllock.Config{Require: "orders,stocks,ledger_*"})
}

// price compares a handle with cfg with one without.
func price(b *testing.B, cfg mysqllock.Config) {
	for _, w := range plainWork {
		b.Run(w.name, func(b *testing.B) {
			var once [2]func()
			var allocs [2]float64
			for i, cfg := range []mysqllock.Config{{}, cfg} {
				k, err := mysqllock.Wrap(w.rows, cfg)
				dbtest.OK(b, err)
				once[i] = doing(b, k, w.work)
				allocs[i] = testing.AllocsPerRun(200, once[i])
			}
			sideBySide(b, 200, once[0], once[1])
			b.ReportMetric(allocs[1]-allocs[0], "allocs-more")
		})
	}
}

// sideBySide reports how much longer wrapped takes than bare: the ratio of the
// medians of runs of batch that take turns, so that a busy machine hits both.
func sideBySide(b *testing.B, batch int, bare, wrapped func()) {
	var times [2][]time.Duration
	for b.Loop() {
		for i, once := range []func(){bare, wrapped} {
			start := time.Now()
			for range batch {
				once()
			}
			times[i] = append(times[i], time.Since(start))
		}
	}
	median := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2])
	}
	b.ReportMetric(median(times[1])/median(times[0]), "wrapped/bare")
	b.ReportMetric((median(times[1])-median(times[0]))/float64(batch), "ns-more")
	b.ReportMetric(0, "ns/op")
}
