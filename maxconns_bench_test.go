package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
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

// BenchmarkMaxConnsBeside compares what a budget of 10 connections must not slow down to the
// plain driver with as many, or to a handle without a budget where the plain driver has no such
// thing. An operation is one of 4 callers', beside what goes on meanwhile.
func BenchmarkMaxConnsBeside(b *testing.B) {
	read := func(ctx context.Context, db *sql.DB, _ int) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(new(int))
	}
	hang := func(ctx context.Context, db *sql.DB, _ int) {
		ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		_, _ = db.ExecContext(ctx, "SELECT SLEEP(60)")
	}
	work := func(ctx context.Context, db *sql.DB) error {
		return db.QueryRowContext(ctx, "SELECT SLEEP(0.005)").Scan(new(int))
	}
	held := func(ctx context.Context, db *sql.DB, i int) {
		_ = mysqllock.Do(ctx, db, fmt.Sprint("held", i), func(ctx context.Context) error { return work(ctx, db) }, lockctx.Lease(time.Minute))
	}
	unheld := func(ctx context.Context, db *sql.DB, _ int) { _ = work(ctx, db) }
	waits := func(ctx context.Context, db *sql.DB, i int) {
		_ = mysqllock.Do(ctx, db, fmt.Sprint("taken", i), func(context.Context) error { return nil })
	}
	own := func(opts ...lockctx.Option) func(context.Context, *sql.DB, int) error {
		return func(ctx context.Context, db *sql.DB, i int) error {
			tx, err := db.BeginTx(lockctx.With(ctx, fmt.Sprint("own", i), opts...), nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err := tx.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 3"); err != nil {
				return err
			}
			return tx.Commit()
		}
	}
	prepare := func(ctx context.Context, db *sql.DB, _ int) error {
		st, err := db.PrepareContext(ctx, "SELECT stock FROM p WHERE id = ?")
		if err != nil {
			return err
		}
		return errors.Join(st.QueryRowContext(ctx, 1).Scan(new(int)), st.Close())
	}
	for _, d := range dbtest.Each(b) {
		s := newScratch(d)
		local := s.at(s.Changed(dbtest.OverSocket(b, s.Server)))
		plain := func(s *scratch) *sql.DB {
			db := s.Open("mysql")
			db.SetMaxOpenConns(10)
			db.SetMaxIdleConns(10)
			return db
		}
		unbounded := func(s *scratch) *sql.DB { return s.open("lockWait=1m") }
		budget := func(s *scratch) *sql.DB { return s.open("lockWait=1m", "maxConns=10") }
		wrapped := func(s *scratch) *sql.DB {
			return s.wrapped(wrappers["without Validator"], "lockWait=1m", "maxConns=10")
		}
		for i := range 4 {
			tx, err := s.open().BeginTx(lockctx.With(context.Background(), fmt.Sprint("taken", i)), nil)
			dbtest.OK(b, err)
			b.Cleanup(func() { dbtest.OK(b, tx.Rollback()) })
		}
		for _, c := range []struct {
			name   string
			via    *scratch
			open   func(*scratch) *sql.DB
			others int
			other  func(ctx context.Context, db *sql.DB, i int) // again and again
			do     func(ctx context.Context, db *sql.DB, i int) error
		}{
			{"reads beside 4 that time out, plain driver", s, plain, 4, hang, read},
			{"reads beside 4 that time out, maxConns=10", s, budget, 4, hang, read},
			{"reads beside 4 that time out, plain driver over a socket", local, plain, 4, hang, read},
			{"reads beside 4 that time out, maxConns=10 over a socket", local, budget, 4, hang, read},
			{"reads beside 24 that work, plain driver", s, plain, 24, unheld, read},
			{"reads beside 24 that work under leases, maxConns=10", s, budget, 24, held, read},
			{"prepare and read, plain driver", s, plain, 0, nil, prepare},
			{"prepare and read, maxConns=10", s, budget, 0, nil, prepare},
			{"NoWait beside 4 that wait, no budget", s, unbounded, 4, waits, own(lockctx.NoWait())},
			{"NoWait beside 4 that wait, maxConns=10", s, budget, 4, waits, own(lockctx.NoWait())},
			{"optimistic, no budget", s, unbounded, 0, nil, own(lockctx.Optimistic())},
			{"optimistic, maxConns=10", s, budget, 0, nil, own(lockctx.Optimistic())},
			{"BeginTx, no budget", s, unbounded, 0, nil, own()},
			{"BeginTx, maxConns=10", s, budget, 0, nil, own()},
			{"BeginTx beneath a wrapper, maxConns=10", s, wrapped, 0, nil, own()},
		} {
			b.Run(string(d.Flavour)+"/"+c.name, func(b *testing.B) {
				db := c.open(c.via)
				defer db.Close()
				ctx, cancel := context.WithCancel(context.Background())
				var others, callers sync.WaitGroup
				for i := range c.others {
					others.Go(func() {
						for ctx.Err() == nil {
							c.other(ctx, db, i)
						}
					})
				}
				var next atomic.Int64
				b.ResetTimer()
				for range 4 {
					callers.Go(func() {
						for i := int(next.Add(1)); i <= b.N; i = int(next.Add(1)) {
							if err := c.do(ctx, db, i); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				callers.Wait()
				b.StopTimer()
				cancel()
				others.Wait()
			})
		}
	}
}
