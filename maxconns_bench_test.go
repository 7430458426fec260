package mysqllock_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
)

// BenchmarkMaxConns compares work with one budget of connections to the same work with as
// many connections as there may be, and to the plain driver with the same bound.
func BenchmarkMaxConns(b *testing.B) {
	hot := func(ctx context.Context, db *sql.DB, _ int) error { return stock.Decide(ctx, db, "hot", 1) }
	hotDo := func(ctx context.Context, db *sql.DB, _ int) error {
		return mysqllock.Do(ctx, db, "hot", func(ctx context.Context) error {
			var stock int
			if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = ?", 1).Scan(&stock); err != nil {
				return err
			}
			time.Sleep(time.Millisecond)
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", stock-1, 1)
			return err
		})
	}
	few := func(ctx context.Context, db *sql.DB, i int) error {
		return stock.Sell(ctx, db, i, fmt.Sprint(i%4), i%4+1)
	}
	plain := func(ctx context.Context, db *sql.DB, i int) error {
		var stock int
		return db.QueryRowContext(ctx, fmt.Sprintf("SELECT stock FROM p WHERE id = %d", i%4+1)).Scan(&stock)
	}
	for _, d := range dbtest.Each(b) {
		s := newScratch(d)
		for _, work := range []struct {
			name    string
			callers int
			do      func(context.Context, *sql.DB, int) error
			open    func() *sql.DB
		}{
			{"hot key, Do, no bound", 100, hotDo, func() *sql.DB { return s.open("lockWait=1m") }},
			{"hot key, maxConns=25", 100, hot, func() *sql.DB { return s.open("lockWait=1m", "maxConns=25") }},
			{"4 keys, maxConns=100", 24, few, func() *sql.DB { return s.open("lockWait=1m", "maxConns=100") }},
			{"4 keys, maxConns=6", 24, few, func() *sql.DB { return s.open("lockWait=1m", "maxConns=6") }},
			{"no lock, plain driver, 25", 64, plain, func() *sql.DB {
				db := s.Open("mysql")
				db.SetMaxOpenConns(25)
				db.SetMaxIdleConns(25)
				return db
			}},
			{"no lock, maxConns=25", 64, plain, func() *sql.DB {
				db := s.open("maxConns=25")
				db.SetMaxIdleConns(64)
				return db
			}},
		} {
			b.Run(string(d.Flavour)+"/"+work.name, func(b *testing.B) {
				db := work.open()
				defer db.Close()
				run := func(n int) {
					var next atomic.Int64
					var callers sync.WaitGroup
					for range work.callers {
						callers.Go(func() {
							for i := int(next.Add(1)); i <= n; i = int(next.Add(1)) {
								if err := work.do(context.Background(), db, i); err != nil {
									b.Error(err)
									return
								}
							}
						})
					}
					callers.Wait()
				}
				run(work.callers)
				b.ReportAllocs()
				b.ResetTimer()
				run(b.N)
			})
		}
	}
}

// BenchmarkMaxConnsAbandoned compares quick statements beside ones that time out, with a budget
// and with the plain driver with as many connections. An operation is a quick statement.
func BenchmarkMaxConnsAbandoned(b *testing.B) {
	for _, d := range dbtest.Each(b) {
		s := newScratch(d)
		for _, open := range []struct {
			name string
			db   func() *sql.DB
		}{
			{"plain driver, 10", func() *sql.DB {
				db := s.Open("mysql")
				db.SetMaxOpenConns(10)
				db.SetMaxIdleConns(10)
				return db
			}},
			{"maxConns=10", func() *sql.DB { return s.open("maxConns=10") }},
		} {
			b.Run(string(d.Flavour)+"/"+open.name, func(b *testing.B) {
				db := open.db()
				defer db.Close()
				ctx, cancel := context.WithCancel(context.Background())
				var hung, quick sync.WaitGroup
				for range 4 {
					hung.Go(func() {
						for ctx.Err() == nil {
							short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
							_, _ = db.ExecContext(short, "SELECT SLEEP(60)")
							cancel()
						}
					})
				}
				var next atomic.Int64
				b.ResetTimer()
				for range 4 {
					quick.Go(func() {
						for next.Add(1) <= int64(b.N) {
							if err := db.QueryRow("SELECT stock FROM p WHERE id = 1").Scan(new(int)); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				quick.Wait()
				b.StopTimer()
				cancel()
				hung.Wait()
			})
		}
	}
}
