package mysqllock_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// forQuery is the context of a single query, which has ended when that is over.
func forQuery(ctx context.Context, does func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return does(ctx)
}

// perQuery reads, decides and writes, each with a context of its own.
func perQuery(ctx context.Context, db *sql.DB, write func(ctx context.Context, n int) error) error {
	var n int
	err := forQuery(ctx, func(ctx context.Context) (err error) {
		n, err = read(ctx, db, 1)
		return err
	})
	if err != nil {
		return err
	}
	return forQuery(ctx, func(ctx context.Context) error { return write(ctx, n-1) })
}

// TestContextsOfQueries: the unit of work lives as long as its lock context, whatever
// becomes of the contexts of its queries. One that never ends leaves the lock to the
// context of the query that took it, and that is the same in each run.
func TestContextsOfQueries(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		writes := map[string]func(ctx context.Context, n int) error{
			"Exec": func(ctx context.Context, n int) error {
				_, err := db.ExecContext(ctx, setStock, n)
				return err
			},
			"BeginTx": func(ctx context.Context, n int) error {
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				if _, err := tx.ExecContext(ctx, setStock, n); err != nil {
					return err
				}
				return tx.Commit()
			},
			"Do": func(ctx context.Context, n int) error {
				return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, setStock, n)
					return err
				})
			},
		}
		for name, opts := range keptAs() {
			for how, write := range writes {
				if name == "shared" && how == "Do" {
					continue // asks for more than its lock context has
				}
				t.Run(name+" "+how, func(t *testing.T) {
					for range 15 {
						dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
						ends, cancel := context.WithCancel(context.Background())
						err := perQuery(lockctx.With(ends, "k", opts...), db, write)
						cancel()
						dbtest.OK(t, err)
						s.wantStock(1, 9)

						err = perQuery(lockctx.With(context.Background(), "k", opts...), db, write)
						if name == "optimistic" { // holds nothing
							dbtest.OK(t, err)
							s.wantStock(1, 8)
							continue
						}
						wantError(t, "a lock context that never ends", err, mysqllock.ErrLost, "the lock context never ends")
						s.wantStock(1, 9)
					}
				})
			}
		}
	})
}

// TestQueryContextEndsInATransaction: of the query that has taken the lock, in a lock
// context that never ends.
func TestQueryContextEndsInATransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, opts := range keptAs() {
			if name == "optimistic" {
				continue
			}
			t.Run(name, func(t *testing.T) {
				for range 10 {
					ctx := lockctx.With(context.Background(), "k", opts...)
					one, cancel := context.WithCancel(ctx)
					_, err := read(one, db, 1)
					dbtest.OK(t, err)
					tx, err := db.BeginTx(ctx, nil)
					dbtest.OK(t, err)
					cancel()
					err = tx.Commit() // changes nothing, so the lock would stay
					if name == "lease" || name == "advisory" {
						dbtest.OK(t, err) // they are the transaction's until its end
					} else {
						wantError(t, "Commit", err, mysqllock.ErrLost, "the lock context never ends")
					}
					_, err = db.ExecContext(ctx, setStock, 9)
					wantError(t, "a write", err, mysqllock.ErrLost, "the lock context never ends")
				}
				err := mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, append(keptAs()[name], lockctx.Wait(ttl/2))...)
				if err != nil {
					t.Errorf("nobody has the key, and it is not free: %v", err)
				}
				s.wantStock(1, 10)
			})
		}
	})
}
