package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// wantEndOfHold wants ErrStaleRead that says that a hold has ended.
func wantEndOfHold(t *testing.T, what string, err error) {
	t.Helper()
	wantError(t, what, err, mysqllock.ErrStaleRead, "given back by the end of a hold;")
}

// guardHolds are the holds that have no transaction, by their names.
func guardHolds() map[string]lockctx.Option {
	return map[string]lockctx.Option{"lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory()}
}

// inHolds runs a test on each server, with each of the holds that have no transaction,
// and in a lock context of each strategy around it, on the key k. with begins that one;
// keys are what the hold can be on.
func inHolds(t *testing.T, test func(t *testing.T, s *scratch, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string)) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE orders (id INT PRIMARY KEY AUTO_INCREMENT, n INT NOT NULL DEFAULT 1) ENGINE=InnoDB")
		db := s.open()
		for name, opt := range guardHolds() {
			for around, opts := range keptAs() {
				t.Run(name+" in "+around, func(t *testing.T) {
					dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
					keys := []string{"k", "other"}
					if name == "lease" && around == "optimistic" {
						keys = keys[1:] // no version is compared in a lease on its key
					}
					test(t, s, db, func() (context.Context, func()) {
						ctx, cancel := context.WithCancel(dbtest.Limited(t))
						return lockctx.With(ctx, "k", opts...), cancel
					}, opt, keys)
				})
			}
		}
	})
}

// TestReadOutlivesALease: and an advisory lock. What was read in it does not decide on
// what is written after it.
func TestReadOutlivesALease(t *testing.T) {
	inHolds(t, func(t *testing.T, s *scratch, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		reads := map[string]func(ctx context.Context) (int, error){
			"a query": func(ctx context.Context) (int, error) { return read(ctx, db, 1) },
			"a transaction": func(ctx context.Context) (int, error) {
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				defer tx.Rollback()
				var n int
				return n, tx.QueryRow("SELECT stock FROM p WHERE id = 1").Scan(&n) // without the hint
			},
			"a transaction with a late hint": func(ctx context.Context) (int, error) {
				tx, err := db.BeginTx(context.Background(), nil)
				dbtest.OK(t, err)
				defer tx.Rollback()
				return read(ctx, tx, 1)
			},
			"a sql.Conn": func(ctx context.Context) (int, error) {
				conn, err := db.Conn(ctx)
				dbtest.OK(t, err)
				defer conn.Close()
				return read(ctx, conn, 1)
			},
			"a prepared statement": func(ctx context.Context) (n int, err error) {
				stmt, err := db.PrepareContext(ctx, "SELECT stock FROM p WHERE id = ?")
				dbtest.OK(t, err)
				defer stmt.Close()
				return n, stmt.QueryRowContext(ctx, 1).Scan(&n)
			},
			"a locking read": func(ctx context.Context) (n int, err error) {
				return n, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1 FOR UPDATE").Scan(&n)
			},
			"a hold in the hold": func(ctx context.Context) (n int, err error) {
				return n, mysqllock.Do(ctx, db, "third", func(ctx context.Context) (err error) {
					n, err = read(ctx, db, 1)
					return err
				}, opt)
			},
		}
		for _, key := range keys {
			for what, does := range reads {
				for _, rollback := range []bool{false, true} {
					ctx, cancel := with()
					h, err := mysqllock.Acquire(ctx, db, key, opt)
					dbtest.OK(t, err)
					_, err = does(h.Context())
					if err != nil {
						t.Fatalf("%s: %v", what, err)
					}
					if rollback {
						dbtest.OK(t, h.Rollback())
					} else {
						dbtest.OK(t, h.Release())
					}
					what := what + " under " + key
					_, err = db.ExecContext(ctx, setStock, 9)
					wantError(t, what, err, mysqllock.ErrStaleRead, "given back by the ")
					tx, err := db.BeginTx(ctx, nil)
					dbtest.OK(t, err)
					_, err = tx.ExecContext(ctx, setStock, 9)
					wantError(t, what+", in a transaction", err, mysqllock.ErrStaleRead, "given back by the ")
					dbtest.OK(t, tx.Rollback())
					err = mysqllock.Do(ctx, db, "next", func(ctx context.Context) error {
						_, err := db.ExecContext(ctx, setStock, 9)
						return err
					}, opt)
					wantError(t, what+", in another hold", err, mysqllock.ErrStaleRead, "given back by the ")
					s.wantStock(1, 10)
					n, err := read(ctx, db, 1)
					dbtest.OK(t, err)
					if _, err = db.ExecContext(ctx, setStock, n-1); err != nil {
						t.Errorf("%s, after a new read: %v", what, err)
					}
					s.wantStock(1, 9)
					dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
					cancel()
				}
			}
		}
	})
}

// TestHoldWithoutReads: a lock context goes on after a hold in which nothing was read,
// and in it.
func TestHoldWithoutReads(t *testing.T) {
	inHolds(t, func(t *testing.T, s *scratch, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		const more = "UPDATE p SET stock = stock + 1 WHERE id = 1"
		for _, key := range keys {
			ctx, cancel := with()
			for range 2 {
				dbtest.OK(t, mysqllock.Do(ctx, db, key, func(context.Context) error { return nil }, opt))
				dbtest.OK(t, mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, more)
					return err
				}, opt))
				_, err := db.ExecContext(ctx, more)
				dbtest.OK(t, err)
			}
			s.wantStock(1, 14)
			dbtest.OK(t, mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
				n, err := read(ctx, db, 1)
				dbtest.OK(t, err)
				_, err = db.ExecContext(ctx, setStock, n-4)
				return err
			}, opt))
			_, err := read(ctx, db, 2) // new
			dbtest.OK(t, err)
			_, err = db.ExecContext(ctx, more)
			dbtest.OK(t, err)
			cancel()
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
		}
	})
}

// TestHoldWithoutALockContext: there is nothing that goes on after it. What the program
// does with other contexts is its own.
func TestHoldWithoutALockContext(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, opt := range guardHolds() {
			ctx := dbtest.Limited(t)
			dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				_, err := read(ctx, db, 1)
				return err
			}, opt))
			_, err := db.ExecContext(ctx, setStock, 9)
			dbtest.OK(t, err)
			_, err = db.ExecContext(lockctx.With(ctx, "k", opt), setStock, 8)
			dbtest.OK(t, err)
			dbtest.OK(t, mysqllock.Do(ctx, db, "outer", func(ctx context.Context) error {
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := read(ctx, db, 1)
					return err
				}, opt))
				_, err := db.ExecContext(lockctx.Without(ctx), setStock, 7)
				return err
			}, opt))
		}
	})
}

// TestReadBeforeAHold: what the lock context has read itself does not keep what was read
// in a hold from being changed after it, unless the hold's lock became its own.
func TestReadBeforeAHold(t *testing.T) {
	inHolds(t, func(t *testing.T, s *scratch, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		ctx, cancel := with()
		defer cancel()
		_, err := read(ctx, db, 2)
		dbtest.OK(t, err)
		dbtest.OK(t, mysqllock.Do(ctx, db, "other", func(ctx context.Context) error {
			_, err := read(ctx, db, 1)
			return err
		}, opt, lockctx.AllowStale())) // in the transaction that has read, of a row lock
		taken := mysqllock.Do(dbtest.Limited(t), db, "other", func(context.Context) error { return nil }, opt, lockctx.NoWait())
		_, err = db.ExecContext(ctx, setStock, 9)
		if taken == nil {
			wantEndOfHold(t, "the lock of the hold is free", err)
			_, err = read(ctx, db, 1)
			dbtest.OK(t, err)
			_, err = db.ExecContext(ctx, setStock, 9)
		}
		dbtest.OK(t, err)
		s.wantStock(1, 9)
	})
}

// TestRowHoldInALease: a hold with a row lock, in a lock context that has read under a
// lease, gives its row back at its end.
func TestRowHoldInALease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, opt := range guardHolds() {
			ctx := lockctx.With(dbtest.Limited(t), "k", opt)
			_, err := read(ctx, db, 2)
			dbtest.OK(t, err)
			dbtest.OK(t, mysqllock.Do(ctx, db, "other", func(ctx context.Context) error {
				_, err := read(ctx, db, 1)
				return err
			}, lockctx.Row()))
			_, err = db.ExecContext(ctx, setStock, 9)
			wantEndOfHold(t, name, err)
			_, err = read(ctx, db, 1)
			dbtest.OK(t, err)
			_, err = db.ExecContext(ctx, setStock, 9)
			dbtest.OK(t, err)
		}
	})
}

// TestReadOutlivesALostHold: that was lost, and that nobody has released.
func TestReadOutlivesALostHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		h, err := mysqllock.Acquire(ctx, db, "k", lockctx.Lease(ttl))
		dbtest.OK(t, err)
		_, err = read(h.Context(), db, 1)
		dbtest.OK(t, err)
		s.steal("k")
		select {
		case <-h.Context().Done():
		case <-time.After(time.Minute):
			t.Fatal("the hold does not hear that its lease is lost")
		}
		dbtest.Soon(t, "the process knows that the lease is lost", func() bool {
			_, err := db.ExecContext(context.WithoutCancel(h.Context()), "DO 0")
			return errors.Is(err, mysqllock.ErrLost)
		})
		_, err = db.ExecContext(ctx, setStock, 9)
		wantEndOfHold(t, "before Release", err)
		s.wantStock(1, 10)
		if err := h.Release(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Release: %v, want ErrLost", err)
		}
	})
}

// TestTransactionAfterAHold: the hold's own lock is not asked for in it, although a read
// in the hold has begun the lock context's unit of work.
func TestTransactionAfterAHold(t *testing.T) {
	inHolds(t, func(t *testing.T, s *scratch, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		for _, key := range keys {
			for _, conned := range []bool{false, true} {
				ctx, cancel := with()
				conn, err := db.Conn(ctx)
				dbtest.OK(t, err)
				var q interface {
					querier
					BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
				} = db
				if conned {
					q = conn
				}
				dbtest.OK(t, mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := read(ctx, q, 2)
					return err
				}, opt))
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 20 WHERE id = 2")
				tx, err := q.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				n, err := read(ctx, tx, 2)
				dbtest.OK(t, err)
				if n != 20 {
					t.Errorf("the transaction reads %d, as it was in the hold, want 20", n)
				}
				_, err = tx.ExecContext(ctx, setStock, n-1)
				dbtest.OK(t, err)
				dbtest.OK(t, tx.Commit())
				s.wantStock(1, 19)
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				dbtest.OK(t, conn.Close())
				cancel()
			}
		}
	})
}

// TestTransactionLeftOpenInAHold: that was begun in it, and has written.
func TestTransactionLeftOpenInAHold(t *testing.T) {
	inHolds(t, func(t *testing.T, s *scratch, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		for _, key := range keys {
			ctx, cancel := with()
			h, err := mysqllock.Acquire(ctx, db, key, opt)
			dbtest.OK(t, err)
			tx, err := db.BeginTx(context.WithoutCancel(h.Context()), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, setStock, 9)
			dbtest.OK(t, h.Release())
			wantError(t, "the commit", tx.Commit(), mysqllock.ErrLost, "its hold has ended")
			s.wantStock(1, 10)
			cancel()
		}
	})
}
