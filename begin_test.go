package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

func (s *scratch) waiters() int { s.T.Helper(); return s.Waiters() }

func TestBeginTxRunsOnTheSession(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, commit := range []bool{true, false} {
			db, tap := s.tapped(mysqllock.Config{})
			ctx := lockctx.With(dbtest.Limited(t), "k")
			stock.MustRead(t, ctx, db, 1)
			if _, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable}); err == nil || !strings.Contains(err.Error(), "options") {
				t.Errorf("other options than the session's: %v", err)
			}
			seen := tap.Since()
			tx := dbtest.Begin(t, ctx, db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1") // a context without the hint
			s.wantLocked("k", true)
			if commit {
				dbtest.OK(t, tx.Commit())
			} else {
				dbtest.OK(t, tx.Rollback())
			}
			s.wantLocked("k", false)
			s.wantStock(1, 9)
			if log := seen(); len(log) != 2 {
				t.Errorf("want UPDATE and COMMIT or ROLLBACK, the server got %v", log)
			}
		}
	})
}

func TestGoroutinesTakeTurnsOnOneUnit(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx := dbtest.Begin(t, ctx, db)
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				for range 20 {
					var err error
					switch i % 3 {
					case 0:
						_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
					case 1:
						_, err = db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					default:
						_, err = read(ctx, db, 1)
					}
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		s.wantStock(1, 10)
		dbtest.OK(t, tx.Commit())
		s.wantStock(1, 10+11*20)
	})
}

// What happens when someone else has the key, gives up, dies or falls silent.
// Two handles stand for two processes: they share nothing in the driver.

func TestNoWaitNamesTheHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice", "lockWait=2m"), s.open("lockWait=2m")
		h := stock.Acquire(t, db, "k")
		defer h.Rollback()
		for _, from := range []*sql.DB{db, other} {
			start := time.Now()
			_, err := from.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil)
			took := time.Since(start)
			var e *mysqllock.Error
			if !s.MariaDB() && errors.As(err, &e) && e.Holder == nil { // a busy server does not say in time
				err = naming(func() error {
					_, err := from.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil)
					return err
				})
			}
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) {
				t.Fatalf("NoWait on a held key: %v", err)
			}
			if took > time.Minute { // the handle waits for longer
				t.Errorf("NoWait took %v", took)
			}
			if e.Key != "k" || e.Strategy != "row" || e.Op != "lock" {
				t.Errorf("the error does not say what it is about: %+v", e)
			}
			if from == db || !s.MariaDB() { // MariaDB shows a holder only after a wait
				if e.Holder == nil || e.Holder.ConnectionID == 0 || e.Holder.Program != "alice" {
					t.Errorf("holder: %+v", e.Holder)
				}
			}
		}
		_, err := mysqllock.Acquire(dbtest.Limited(t), s.open("lockNoWait=true"), "k")
		dbtest.Is(t, "lockNoWait on a held key", err, mysqllock.ErrLocked)
		for _, from := range []*sql.DB{db, other} {
			dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "free", lockctx.NoWait()), from, "UPDATE p SET stock = 9 WHERE id = 1")
		}
	})
}

func TestWaitEndsWithTheHolderNamed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice"), s.open()
		began := time.Now()
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
		var id uint64
		dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		for _, from := range []*sql.DB{db, other} {
			for _, end := range []string{"wait", "context"} {
				const wait, most = 200 * time.Millisecond, 10 * time.Second
				var err error
				var e *mysqllock.Error
				if end == "wait" { // MariaDB shows a picture of up to 100 ms ago, a busy server none in time
					err = naming(func() error {
						_, err := mysqllock.Acquire(dbtest.Limited(t), from, "k", lockctx.Wait(wait))
						return err
					})
				} else { // on a machine that stands still it may have ended before the lock is asked for, or before there is an answer
					for limit := wait; limit < most; limit *= 2 {
						ctx, cancel := context.WithTimeout(dbtest.Limited(t), limit)
						_, err = mysqllock.Acquire(ctx, from, "k", lockctx.Wait(time.Minute))
						cancel()
						if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, mysqllock.ErrTimeout) && errors.As(err, &e) && e.Waited >= wait*3/4 {
							break
						}
					}
				}
				if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) {
					t.Fatalf("%s: %v", end, err)
				}
				if got := errors.Is(err, context.DeadlineExceeded); got != (end == "context") {
					t.Errorf("%s: matches DeadlineExceeded: %v (%v)", end, got, err)
				}
				if e.Waited < wait*3/4 {
					t.Errorf("%s: waited %v", end, e.Waited)
				}
				if end == "context" && e.Holder == nil && from == other {
					continue // there is less time to ask
				}
				if e.Holder == nil || e.Holder.ConnectionID != id {
					t.Errorf("%s, same process %v: the holder is %+v, want connection %d", end, from == db, e.Holder, id)
				} else if since := e.Holder.Since; from == other && (since <= 0 && !s.MariaDB() || since > time.Since(began)+20*time.Millisecond) {
					t.Errorf("%s: the holder's age is %v after %v", end, since, time.Since(began)) // MariaDB tells whole seconds
				}
			}
		}
	})
}

func TestCancelAtTheMomentOfRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		rounds := dbtest.Long(150, 400)
		granted, latest := 0, 1500*time.Microsecond
		for i := range rounds {
			h := stock.Acquire(t, db, "k")
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			result, was := make(chan error, 1), granted
			go func() {
				tx, err := other.BeginTx(lockctx.With(ctx, "k"), nil)
				if err == nil {
					err = tx.Rollback()
					if errors.Is(err, sql.ErrTxDone) || errors.Is(err, mysqllock.ErrLost) {
						err = nil // the cancellation was quicker, or closed the connection, as it does without a lock
					}
					granted++
				}
				result <- err
			}()
			time.Sleep(time.Duration(rand.IntN(800)) * time.Microsecond)
			var both sync.WaitGroup
			both.Go(func() { time.Sleep(rand.N(latest)); cancel() })
			released := dbtest.Go(h.Release)
			both.Wait()
			dbtest.OK(t, <-released)
			if err := <-result; err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("round %d: %v", i, err)
			}
			if granted > was { // as fast as the machine is just now, so that it is a race
				latest = latest * 9 / 10
			} else {
				latest = min(latest*11/10, 200*time.Millisecond)
			}
			dbtest.OK(t, stock.Acquire(t, db, "k", lockctx.Wait(20*time.Second)).Release()) // it is free
		}
		if granted < 10 || granted > rounds-10 {
			t.Errorf("%d of %d were granted before the cancellation: the race was not run", granted, rounds)
		}
		dbtest.Soon(t, "no waiter is left", func() bool { return s.waiters() == 0 })
	})
}

// A lock is where its handle's database is, wherever USE has led a connection.
func TestUseDoesNotMoveTheLock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		there := newScratch(s.Beside(t))
		h := stock.Acquire(t, s.open("lockNamespace=app"), "k")
		defer h.Rollback()
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), there.open("lockNamespace=app"), "k", func(context.Context) error { return nil }))
		db := s.open("lockNamespace=app")
		db.SetMaxOpenConns(1)
		dbtest.Exec(t, db, "USE "+there.Name)
		dbtest.Is(t, "a second holder of the key, after USE", dbtest.Err(db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil)), mysqllock.ErrLocked)
	})
}

func TestHolderIsNotTheWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		h := stock.Acquire(t, other, "b")
		defer h.Rollback()
		var id uint64
		dbtest.OK(t, other.QueryRowContext(h.Context(), "SELECT CONNECTION_ID()").Scan(&id))
		var e *mysqllock.Error
		dbtest.Soon(t, "the holder is shown", func() bool {
			_, err := db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), []string{"a", "b"}, lockctx.Wait(150*time.Millisecond)), nil)
			return errors.As(err, &e) && e.Holder != nil
		})
		if e.Holder.ConnectionID != id {
			t.Errorf("the holder is said to be %v, it is connection %d", e.Holder, id)
		}
	})
}

// Who waits on a sql.Conn is never made to try again: database/sql would not.
func TestWaiterOnASQLConnIsServed(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		h := stock.Acquire(t, db, "k")
		time.AfterFunc(500*time.Millisecond, func() { h.Release() })
		conn := dbtest.Conn(t, db)
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), conn)
		dbtest.OK(t, tx.Rollback())
	})
}

// TestATransactionUnderAHoldTakesOtherLocksAsWell, and tells the lock context that asked.
func TestATransactionUnderAHoldTakesOtherLocksAsWell(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := dbtest.Limited(t)
		for _, outer := range []lockctx.Option{lockctx.Lease(ttl), lockctx.Advisory()} {
			for name, inner := range map[string][]lockctx.Option{
				"row": nil, "shared": {lockctx.Shared()}, "slots": {lockctx.Slots(2)}, "lease": {lockctx.Lease(ttl)},
				"lease slots": {lockctx.Lease(ttl), lockctx.Slots(2)}, "advisory": {lockctx.Advisory()}, "optimistic": {lockctx.Optimistic()},
			} {
				for _, commit := range []bool{true, false} {
					h, err := mysqllock.Acquire(ctx, db, "outer", outer)
					dbtest.OK(t, err)
					tx := dbtest.Begin(t, h.Context(), db)
					with := lockctx.With(h.Context(), "inner", inner...)
					dbtest.ExecIn(t, with, tx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					if _, told := mysqllock.Slot(with); told != (name == "slots" || name == "lease slots") {
						t.Errorf("%s: Slot tells %v", name, told)
					}
					if _, told := mysqllock.Version(with); told != (name == "optimistic") {
						t.Errorf("%s: Version tells %v", name, told)
					}
					if commit {
						dbtest.OK(t, tx.Commit())
					} else {
						dbtest.OK(t, tx.Rollback())
					}
					if _, told := mysqllock.Slot(with); told {
						t.Errorf("%s: Slot tells of one that is given back", name)
					}
					dbtest.OK(t, h.Release())
					again, err := mysqllock.Acquire(ctx, s.open(), "inner", lockctx.Wait(ttl*2/3)) // shorter than a lease that is not given back
					dbtest.OK(t, err)
					dbtest.OK(t, again.Release())
				}
			}
		}
		s.wantStock(1, 10+2*7)
	})
}
