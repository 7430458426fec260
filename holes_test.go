package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// wantError wants an *Error around sentinel that says so.
func wantError(t *testing.T, what string, err, sentinel error, says string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.As(err, &e) || !errors.Is(err, sentinel) || !strings.Contains(err.Error(), says) {
		t.Errorf("%s: %v, want %v: %s", what, err, sentinel, says)
	}
}

// TestTransactionBesideAReadEndsTheUnit: a transaction that began without the hint
// commits beside a session which has read before.
func TestTransactionBesideAReadEndsTheUnit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		beside := func(ctx context.Context, text string, args ...any) {
			t.Helper()
			tx, err := db.BeginTx(context.Background(), nil)
			dbtest.OK(t, err)
			_, err = tx.ExecContext(ctx, text, args...)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Commit())
		}
		ctx := lockctx.With(dbtest.Limited(t), "k")
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		beside(ctx, setStock, n-1)
		s.wantLocked("k", false)
		_, err = db.ExecContext(ctx, setStock, n-1)
		wantStale(t, "by the old read", err, "the commit of a transaction;")
		if n, err = read(ctx, db, 1); err != nil || n != 9 {
			t.Errorf("a new read: %d, %v, want 9", n, err)
		}
		_, err = db.ExecContext(ctx, setStock, n-1)
		dbtest.OK(t, err)
		s.wantStock(1, 8)

		// Before its hint, and after it by a statement without one.
		for _, after := range []bool{false, true} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			_, err = read(ctx, db, 1)
			dbtest.OK(t, err)
			tx, err := db.BeginTx(context.Background(), nil)
			dbtest.OK(t, err)
			if !after {
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			}
			_, err = read(ctx, tx, 1)
			dbtest.OK(t, err)
			if after {
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			}
			dbtest.OK(t, tx.Commit())
			s.wantLocked("k", false)
		}
		s.wantStock(2, 12)

		// What only reads gives nothing back, nor does a rollback.
		ctx = lockctx.With(dbtest.Limited(t), "k")
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		tx, err := db.BeginTx(context.Background(), nil)
		dbtest.OK(t, err)
		for _, ctx := range []context.Context{ctx, context.Background()} {
			_, err = read(ctx, tx, 1)
			dbtest.OK(t, err)
		}
		dbtest.OK(t, tx.Commit())
		tx, err = db.BeginTx(context.Background(), nil)
		dbtest.OK(t, err)
		_, err = tx.ExecContext(ctx, setStock, 1)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())
		s.wantLocked("k", true)
		_, err = db.ExecContext(ctx, setStock, 8)
		dbtest.OK(t, err)
	})
}

// TestTransactionBesideAHold: a hold, and a transaction, keep what they have read, so
// nothing is changed beside them.
func TestTransactionBesideAHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		const says = "begin the transaction with the lock context"
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			tx, err := db.BeginTx(context.Background(), nil)
			dbtest.OK(t, err)
			_, err = read(ctx, tx, 1)
			dbtest.OK(t, err)
			_, err = tx.ExecContext(ctx, setStock, n-1)
			wantError(t, "a write", err, mysqllock.ErrUnsafe, says)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 2") // without the hint
			wantError(t, "the commit", tx.Commit(), mysqllock.ErrUnsafe, says)
			_, err = db.ExecContext(ctx, setStock, n-1)
			return err
		}))
		s.wantStock(1, 9)
		s.wantStock(2, 10)

		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		beside, err := db.BeginTx(context.Background(), nil)
		dbtest.OK(t, err)
		_, err = beside.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 3")
		dbtest.OK(t, err)
		tx, err := db.BeginTx(ctx, nil) // meanwhile
		dbtest.OK(t, err)
		n, err := read(ctx, tx, 1)
		dbtest.OK(t, err)
		wantError(t, "the commit beside a transaction", beside.Commit(), mysqllock.ErrUnsafe, says)
		_, err = tx.ExecContext(ctx, setStock, n-1)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Commit())
		s.wantStock(1, 8)
		s.wantStock(3, 10)
	})
}

// TestHoldThatHasEnded: what goes on with a hold's context, which was kept from ending.
func TestHoldThatHasEnded(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		opts := keptAs()[t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]]
		for _, rollback := range []bool{false, true} {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", opts...)
			dbtest.OK(t, err)
			ctx := context.WithoutCancel(h.Context())
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			if rollback {
				dbtest.OK(t, h.Rollback())
			} else {
				dbtest.OK(t, h.Release())
			}
			const says = "its hold has ended"
			_, err = db.ExecContext(ctx, setStock, n-1)
			wantError(t, "Exec", err, mysqllock.ErrLost, says)
			_, err = db.BeginTx(ctx, nil)
			wantError(t, "BeginTx", err, mysqllock.ErrLost, says)
			tx, err := db.BeginTx(context.Background(), nil)
			dbtest.OK(t, err)
			_, err = tx.ExecContext(ctx, setStock, n-1)
			wantError(t, "a late hint", err, mysqllock.ErrLost, says)
			dbtest.OK(t, tx.Rollback())
			err = mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }, opts...)
			wantError(t, "Do", err, mysqllock.ErrLost, says)
		}
		s.wantStock(1, 10)

		// The context of Acquire has ended, and nobody has called Release.
		base, cancel := context.WithCancel(dbtest.Limited(t))
		h, err := mysqllock.Acquire(base, db, "k", opts...)
		dbtest.OK(t, err)
		ctx := context.WithoutCancel(h.Context())
		cancel()
		if name := t.Name(); !strings.HasSuffix(name, "lease") && !strings.HasSuffix(name, "advisory") { // these run out
			dbtest.Soon(t, "the hold has ended", func() bool {
				_, err := db.ExecContext(ctx, "DO 0")
				return errors.Is(err, mysqllock.ErrLost)
			})
		}
		_ = h.Rollback()
	})
}

// TestReadInAHoldOfALockContext: a lock context goes on after a hold that was taken in
// it, but not with what was read there.
func TestReadInAHoldOfALockContext(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				ctx := lockctx.With(dbtest.Limited(t), "k", opt)
				var n int
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) (err error) {
					n, err = read(ctx, db, 1)
					return err
				}, opt))
				_, err := db.ExecContext(ctx, setStock, n-1)
				wantStale(t, "after the hold", err, "the end of a hold;")
				n, err = read(ctx, db, 1)
				dbtest.OK(t, err)
				_, err = db.ExecContext(ctx, setStock, n-1)
				dbtest.OK(t, err)
				s.wantStock(1, 9)

				ctx = lockctx.With(dbtest.Limited(t), "k", opt)
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, setStock, 5) // reads nothing
					return err
				}, opt))
				_, err = db.ExecContext(ctx, setStock, 6)
				dbtest.OK(t, err)
			})
		}
	})
}

// TestHoldThatJoins keeps the lock of the lock context around it to its own end.
func TestHoldThatJoins(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		for name, opt := range map[string]lockctx.Option{"lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory()} {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				excluded := func() {
					t.Helper()
					err := mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait())
					wantError(t, "somebody else in the hold", err, mysqllock.ErrLocked, "")
				}
				const more = "UPDATE p SET stock = stock + 1 WHERE id = 2"
				units := map[string]func(ctx context.Context) error{
					"a statement": func(ctx context.Context) error {
						_, err := db.ExecContext(ctx, more)
						return err
					},
					"a transaction": func(ctx context.Context) error {
						tx, err := db.BeginTx(ctx, nil)
						dbtest.OK(t, err)
						_, err = tx.ExecContext(ctx, more)
						dbtest.OK(t, err)
						return tx.Commit()
					},
					"a rollback": func(ctx context.Context) error {
						tx, err := db.BeginTx(ctx, nil)
						dbtest.OK(t, err)
						return tx.Rollback()
					},
				}
				for what, unit := range units {
					ctx := lockctx.With(dbtest.Limited(t), "k", opt)
					n, err := read(ctx, db, 1)
					dbtest.OK(t, err)
					err = mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
						for range 2 {
							if err := unit(ctx); err != nil {
								return err
							}
							excluded()
						}
						if ctx.Err() != nil {
							t.Errorf("%s: the hold's context has ended: %v", what, context.Cause(ctx))
						}
						return mysqllock.Do(ctx, db, "k", unit, opt) // joins, too
					}, opt)
					if err != nil {
						t.Errorf("%s: %v", what, err)
					}
					dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait()))
					_, err = db.ExecContext(ctx, setStock, n-1)
					wantError(t, what, err, mysqllock.ErrStaleRead, "")
					n, err = read(ctx, db, 1)
					dbtest.OK(t, err)
					_, err = db.ExecContext(ctx, setStock, n-1)
					dbtest.OK(t, err)
				}

				// What has changed nothing in the hold leaves the lock where it was.
				ctx := lockctx.With(dbtest.Limited(t), "k", opt)
				n, err := read(ctx, db, 1)
				dbtest.OK(t, err)
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := read(ctx, db, 2)
					return err
				}, opt))
				excluded()
				_, err = db.ExecContext(ctx, setStock, n-1)
				dbtest.OK(t, err)
				s.wantStock(1, 6)
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait()))
			})
		}
	})
}

// TestKeyInAnotherContextsTransaction: a statement of a lock context has made its key
// part of another one's transaction.
func TestKeyInAnotherContextsTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory()} {
			t.Run(name, func(t *testing.T) {
				a, b := lockctx.With(dbtest.Limited(t), "a", opt), lockctx.With(dbtest.Limited(t), "b", opt)
				tx, err := db.BeginTx(a, nil)
				dbtest.OK(t, err)
				for range 2 {
					_, err = tx.ExecContext(b, setStock, 1)
					dbtest.OK(t, err)
				}
				began := time.Now()
				const says = "use that transaction"
				_, err = read(b, db, 2)
				wantError(t, "a read", err, mysqllock.ErrUnsafe, says)
				_, err = db.ExecContext(b, setStock, 2)
				wantError(t, "a write", err, mysqllock.ErrUnsafe, says)
				_, err = db.BeginTx(b, nil)
				wantError(t, "a transaction", err, mysqllock.ErrUnsafe, says)
				if took := time.Since(began); took > time.Minute { // lockWait is longer
					t.Errorf("they waited: %v", took)
				}
				dbtest.OK(t, tx.Commit())
				_, err = db.ExecContext(b, setStock, 3)
				dbtest.OK(t, err)
				s.wantStock(1, 3)
			})
		}
	})
}
