package lease_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTheFirstWriteUnderALeaseEndsTheUnitOfWork, if it succeeds. A read takes the lease and pins nothing.
func TestTheFirstWriteUnderALeaseEndsTheUnitOfWork(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "k", lockctx.Lease(stock.TTL))
		read := func() (n int) {
			t.Helper()
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
			return n
		}
		for want := 10; want > 7; want-- {
			n := read()
			if n != want {
				t.Fatalf("read %d, want %d", n, want)
			}
			s.WantLeased("k", true)
			stock.WantToken(t, ctx, uint64(11-want))
			if st := db.Stats(); st.InUse != 0 {
				t.Errorf("%d connections are pinned", st.InUse)
			}
			_, err := db.ExecContext(ctx, "INSERT INTO p VALUES (1, 1)")
			if err == nil {
				t.Fatal("a duplicate was inserted")
			}
			s.WantLeased("k", true) // the unit of work goes on
			if read() != want {
				t.Error("the read after a failed write is another")
			}
			dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
			s.WantLeased("k", false)
		}
		s.WantStock(1, 7)

		read()
		tx := dbtest.Begin(t, ctx, db)
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = 5 WHERE id = 1") // in the open transaction
		dbtest.OK(t, err)
		s.WantStock(1, 7)
		dbtest.OK(t, tx.Commit())
		s.WantStock(1, 5)
		s.WantLeased("k", false)

		read()
		cancel()
		dbtest.Soon(t, "the lease is given back at the end of the context", func() bool { return !s.Leased("k") })
		dbtest.Soon(t, "the lock context has ended", func() bool {
			_, err = db.ExecContext(lockctx.With(context.WithoutCancel(ctx), "k"), "UPDATE p SET stock = 1 WHERE id = 1")
			return errors.Is(err, mysqllock.ErrLost)
		})
		s.WantStock(1, 5)

		_, err = db.QueryContext(lockctx.With(context.Background(), "k", lockctx.Lease(stock.TTL)), "SELECT 1 FROM p")
		dbtest.Is(t, "a read that nothing would end", err, mysqllock.ErrNoEnd)
	})
}

// TestManyTransactionsRunUnderOneHoldOfALease, also side by side.
func TestManyTransactionsRunUnderOneHoldOfALease(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		var left *sql.Tx
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "job", func(ctx context.Context) error {
			stock.WantToken(t, ctx, 1)
			s.WantLeased("job", true)
			dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = 9 WHERE id = 1")
			s.WantStock(1, 9) // committed by itself
			s.WantLeased("job", true)

			one := dbtest.Begin(t, ctx, db)
			two := dbtest.Begin(t, ctx, db)
			dbtest.Exec(t, one, "UPDATE p SET stock = 8 WHERE id = 1")
			dbtest.Exec(t, two, "UPDATE p SET stock = 8 WHERE id = 2")
			var n int
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
			dbtest.Equal(t, "a query beside the transaction reads %d", n, 9)
			dbtest.OK(t, one.Commit())
			dbtest.OK(t, two.Rollback())
			s.WantStock(1, 8)
			s.WantStock(2, 10)

			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					tx, err := db.BeginTx(ctx, nil)
					if err == nil {
						_, err = tx.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 3")
					}
					if err == nil {
						err = tx.Commit()
					}
					if err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			s.WantStock(3, 2)

			left = dbtest.Begin(t, context.WithoutCancel(ctx), db)
			dbtest.Exec(t, left, "UPDATE p SET stock = 1 WHERE id = 4")
			return nil
		}, lockctx.Lease(stock.TTL)))
		s.WantLeased("job", false)
		stock.WantLost(t, "a commit after the hold", left.Commit())
		s.WantStock(4, 10)

		h := stock.Acquire(t, db, "job", lockctx.Lease(stock.TTL))
		dbtest.Equal(t, "the second token is %d", h.Token(), 2)
		dbtest.OK(t, h.Release())
		if h.Context().Err() == nil {
			t.Error("the hold's context outlives it")
		}
		_, err := db.ExecContext(context.WithoutCancel(h.Context()), "UPDATE p SET stock = 1 WHERE id = 4")
		stock.WantLost(t, "Exec after Release", err)
		s.WantStock(4, 10)
	})
}

// TestRenewalsMoveTheExpiryOfALease, and then it stays.
func TestRenewalsMoveTheExpiryOfALease(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, asked := s.Handle(), time.Now()
		h := stock.Acquire(t, db, "k", lockctx.Lease(9*time.Second))
		first := h.Expiry()
		if earliest, latest := asked.Add(9*time.Second), time.Now().Add(9*time.Second); first.Before(earliest) || first.After(latest) {
			t.Errorf("it is over %v after it was asked for", first.Sub(asked))
		}
		dbtest.Soon(t, "it is renewed", func() bool { return h.Expiry().After(first) })
		dbtest.OK(t, h.Release())
		if last := h.Expiry(); !last.After(first) || last != h.Expiry() {
			t.Errorf("after its end it is over at %v, before at %v", last, first)
		}
		for _, how := range []lockctx.Option{lockctx.Row(), lockctx.Advisory(), lockctx.Optimistic()} {
			h := stock.Acquire(t, db, "k", how)
			if at := h.Expiry(); !at.IsZero() {
				t.Errorf("what is no lease is over at %v", at)
			}
			dbtest.OK(t, h.Release())
		}
	})
}

func TestLeasesAndRowLocksGoInOneLockContext(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		// Row locks inside a job, each for its own unit of work.
		_ = mysqllock.Do(dbtest.Limited(t), db, "job", func(ctx context.Context) error {
			for id := range 3 {
				key := fmt.Sprint("product:", id)
				item := lockctx.With(ctx, key)
				tx := dbtest.Begin(t, item, db)
				s.WantLocked(key, true)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = ?", id+1)
				dbtest.OK(t, tx.Commit())
				s.WantLocked(key, false)
				s.WantLeased("job", true)
			}
			// The same key again joins, under a row lock, too.
			tx := dbtest.Begin(t, lockctx.With(ctx, "job"), db)
			dbtest.OK(t, tx.Commit())
			dbtest.OK(t, mysqllock.Do(ctx, db, "job", func(ctx context.Context) error {
				stock.WantToken(t, ctx, 1)
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 4")
				return err
			}, lockctx.Lease(stock.TTL)))
			dbtest.OK(t, mysqllock.Do(ctx, db, "job", func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = 2 WHERE id = 4")
				return err
			}))
			s.WantLeased("job", true)
			s.WantStock(4, 2)

			// A row-locked unit of work inside the hold is fenced, too.
			err := mysqllock.Do(context.WithoutCancel(ctx), db, "product:1", func(ctx context.Context) error {
				dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = 5 WHERE id = 1")
				s.Steal("job")
				return nil
			})
			stock.WantLost(t, "Do with a row lock inside a lost lease", err)
			s.WantStock(1, 1)
			dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = NULL WHERE name = 'job'")
			return nil
		}, lockctx.Lease(stock.TTL)) // who reports the loss is not the point here

		// A lease inside a row-locked unit of work ends with it.
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "row", func(ctx context.Context) error {
			dbtest.OK(t, mysqllock.Do(ctx, db, "lease", func(ctx context.Context) error {
				s.WantLeased("lease", true)
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = 7 WHERE id = 1")
				return err
			}, lockctx.Lease(stock.TTL)))
			s.WantLeased("lease", true)
			s.WantStock(1, 1)
			return nil
		}))
		s.WantStock(1, 7)
		s.WantLeased("lease", false)

		// Both kinds in one transaction.
		ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "a", lockctx.Lease(stock.TTL)), "b", lockctx.Row())
		tx := dbtest.Begin(t, ctx, db)
		s.WantLeased("a", true)
		s.WantLocked("b", true)
		s.WantLeased("b", false)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 3 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		s.WantLeased("a", false)
		s.WantLocked("b", false)
		s.WantStock(1, 3)
	})
}

// TestALeaseRunsOutOnceTheContextOfItsHoldHasEnded: it is not renewed any more, and what runs under it has the rest
// of the TTL to stop.
func TestALeaseRunsOutOnceTheContextOfItsHoldHasEnded(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		h, err := mysqllock.Acquire(ctx, db, "job", lockctx.Lease(9*time.Second))
		dbtest.OK(t, err)
		first := h.Expiry()
		dbtest.Soon(t, "it is renewed", func() bool { return h.Expiry().After(first) })
		cancel()
		if !s.Leased("job") && time.Now().Before(h.Expiry()) {
			t.Error("it was given back before its time")
		}
		dbtest.Soon(t, "it runs out", func() bool { return !s.Leased("job") })
		stock.WantLost(t, "Release", h.Release())
	})
}

// TestLeaseOutlivesAFailedWrite: a unit of work whose write was rolled back by the
// server goes on under the lease under which it has read.
func TestLeaseOutlivesAFailedWrite(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(stock.TTL))
		var n int
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
		blocker := dbtest.Begin(t, context.Background(), s.Plain)
		dbtest.Exec(t, blocker, "UPDATE p SET stock = stock WHERE id = 1")
		failed := dbtest.Go(func() error { return dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")) })
		var id int64
		dbtest.Soon(t, "the write waits", func() bool {
			return s.Plain.QueryRow("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'UPDATE p SET stock = 1%'", s.Name).Scan(&id) == nil
		})
		dbtest.Exec(t, s.Plain, fmt.Sprintf("KILL %d", id))
		if <-failed == nil {
			t.Error("a write whose connection was killed succeeded")
		}
		dbtest.OK(t, blocker.Rollback())
		s.WantLeased("k", true)
		stock.WantToken(t, ctx, 1)
		if _, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1); err == nil && s.Token("k") != 1 {
			t.Error("the second write ran under another lease than the read")
		}
	})
}

// TestLeaseJoinedHoldIsTold: a hold that joined the lease of a read ends with it.
func TestLeaseJoinedHoldIsTold(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "k", lockctx.Lease(stock.TTL))
		var n int
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
		h, err := mysqllock.Acquire(context.WithoutCancel(ctx), db, "k", lockctx.Lease(stock.TTL))
		dbtest.OK(t, err)
		dbtest.Equal(t, "the token is %d", h.Token(), 1)
		cancel()
		dbtest.Soon(t, "the hold is told", func() bool { return h.Context().Err() != nil })
		if !errors.Is(context.Cause(h.Context()), mysqllock.ErrLost) {
			t.Errorf("the cause is %v", context.Cause(h.Context()))
		}
		stock.WantLost(t, "Release", h.Release())
	})
}
