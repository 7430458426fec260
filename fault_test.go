package mysqllock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// What happens when someone else has the key, gives up, dies or falls silent.
// Two handles stand for two processes: they share nothing in the driver.

func TestNoWait(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice", "lockWait=2m"), s.open("lockWait=2m")
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		defer h.Rollback()
		for _, from := range []*sql.DB{db, other} {
			start := time.Now()
			_, err := from.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil)
			took := time.Since(start)
			var e *mysqllock.Error
			for i := 0; i < 20 && !s.MariaDB() && errors.As(err, &e) && e.Holder == nil; i++ { // a busy server does not say in time
				_, err = from.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil)
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
		_, err = mysqllock.Acquire(dbtest.Limited(t), s.open("lockNoWait=true"), "k")
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("lockNoWait on a held key: %v", err)
		}
		for _, from := range []*sql.DB{db, other} {
			_, err = from.ExecContext(lockctx.With(dbtest.Limited(t), "free", lockctx.NoWait()), "UPDATE p SET stock = 9 WHERE id = 1")
			dbtest.OK(t, err)
		}
	})
}

func TestWaitEndsWithTheHolderNamed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice"), s.open()
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
		defer tx.Rollback()
		var id uint64
		dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		for _, from := range []*sql.DB{db, other} {
			for _, end := range []string{"wait", "context"} {
				ctx, opt := dbtest.Limited(t), lockctx.Wait(200*time.Millisecond)
				deadline := time.Now().Add(200 * time.Millisecond)
				if end == "context" {
					var cancel context.CancelFunc
					ctx, cancel = context.WithDeadline(ctx, deadline)
					defer cancel()
					opt = lockctx.Wait(time.Minute)
				}
				_, err := mysqllock.Acquire(ctx, from, "k", opt)
				// On a machine that stands still the context may have ended before it is asked for.
				for i := 0; i < 20 && end == "context" && errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, mysqllock.ErrTimeout); i++ {
					deadline = time.Now().Add(200 * time.Millisecond)
					again, cancel := context.WithDeadline(dbtest.Limited(t), deadline)
					_, err = mysqllock.Acquire(again, from, "k", opt)
					cancel()
				}
				var e *mysqllock.Error
				// MariaDB shows a picture of up to 100 ms ago, a busy server none in time.
				for i := 0; i < 20 && from == other && end == "wait" && errors.As(err, &e) && e.Holder == nil; i++ {
					_, err = mysqllock.Acquire(ctx, from, "k", opt)
				}
				if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) {
					t.Fatalf("%s: %v", end, err)
				}
				if got := errors.Is(err, context.DeadlineExceeded); got != (end == "context") {
					t.Errorf("%s: matches DeadlineExceeded: %v (%v)", end, got, err)
				}
				if e.Waited < 150*time.Millisecond {
					t.Errorf("%s: waited %v", end, e.Waited)
				}
				if end == "context" && e.Holder == nil && from == other {
					continue // there is less time to ask
				}
				if e.Holder == nil || e.Holder.ConnectionID != id {
					t.Errorf("%s, same process %v: the holder is %+v, want connection %d", end, from == db, e.Holder, id)
				} else if from == other && e.Holder.Since <= 0 {
					t.Errorf("%s: the holder's age is %v", end, e.Holder.Since)
				}
			}
		}
	})
}

func TestCancelledWaiterLeavesNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		cancelled := func(how string) (took time.Duration, left int) {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
			dbtest.OK(t, err)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			result := make(chan error, 1)
			go func() {
				lctx := lockctx.With(ctx, "k")
				var err error
				switch how {
				case "BeginTx":
					_, err = other.BeginTx(lctx, nil)
				case "Query":
					_, err = read(lctx, other, 1)
				case "Exec":
					_, err = other.ExecContext(lctx, "UPDATE p SET stock = 0")
				case "Acquire":
					_, err = mysqllock.Acquire(ctx, other, "k")
				}
				result <- err
			}()
			dbtest.Soon(t, "it waits on the server", func() bool { return s.waiters() == 1 })
			start := time.Now()
			cancel()
			err = <-result
			took, left = time.Since(start), s.waiters()
			if !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", how, err)
			}
			dbtest.Soon(t, "it does not any more", func() bool { return s.waiters() == 0 })
			dbtest.OK(t, h.Release())
			s.wantLocked("k", false)
			return took, left
		}
		for _, how := range []string{"BeginTx", "Query", "Exec", "Acquire"} {
			for round := 1; ; round++ { // a busy machine may delay one
				took, left := cancelled(how)
				if took <= 500*time.Millisecond && left == 0 {
					break
				}
				if round == 20 {
					t.Errorf("%s: of %d times, the error never came within 500ms with nobody left on the server; at last after %v, with %d", how, round, took, left)
					break
				}
			}
		}
		s.wantStock(1, 10)
	})
}

func TestCancelAtTheMomentOfRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		const rounds = 400
		granted, latest := 0, 1500*time.Microsecond
		for i := range rounds {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
			dbtest.OK(t, err)
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
			both.Go(func() { dbtest.OK(t, h.Release()) })
			both.Wait()
			if err := <-result; err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("round %d: %v", i, err)
			}
			if granted > was { // as fast as the machine is just now, so that it is a race
				latest = latest * 49 / 50
			} else {
				latest = min(latest*51/50, 200*time.Millisecond)
			}
			if h, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Wait(20*time.Second)); err != nil {
				t.Fatalf("round %d: the lock is still held: %v", i, err)
			}
			dbtest.OK(t, h.Release())
		}
		if granted < 10 || granted > rounds-10 {
			t.Errorf("%d of %d were granted before the cancellation: the race was not run", granted, rounds)
		}
		dbtest.Soon(t, "no waiter is left", func() bool { return s.waiters() == 0 })
	})
}

// jobs are what this program does as another process of a test. It says on standard
// output what it did, a line each, and goes on when it reads a line.
func jobs() dbtest.Jobs {
	say := func(err error) {
		switch {
		case err == nil:
			fmt.Println("done")
		case errors.Is(err, mysqllock.ErrLost):
			fmt.Println("lost")
		default:
			fmt.Println(err)
		}
	}
	within := func(job func(ctx context.Context, db *sql.DB, in *bufio.Scanner)) func(*sql.DB, *bufio.Scanner) {
		return func(db *sql.DB, in *bufio.Scanner) {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			job(ctx, db, in)
		}
	}
	return dbtest.Jobs{
		"hold": within(func(ctx context.Context, db *sql.DB, in *bufio.Scanner) { // Acquire, write, pause, commit
			h, err := mysqllock.Acquire(ctx, db, "k")
			if err == nil {
				_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 666 WHERE id = 1")
			}
			say(err)
			in.Scan()
			say(h.Release())
		}),
		"session": within(func(ctx context.Context, db *sql.DB, in *bufio.Scanner) { // a pinned read, pause, write
			ctx = lockctx.With(ctx, "k")
			_, err := read(ctx, db, 1)
			say(err)
			in.Scan()
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = 666 WHERE id = 1")
			say(err)
		}),
		"tx": within(func(ctx context.Context, db *sql.DB, in *bufio.Scanner) { // a transaction on the application's own connection
			tx, err := db.BeginTx(lockctx.With(ctx, "k"), nil)
			if err == nil {
				_, err = tx.Exec("UPDATE p SET stock = 666 WHERE id = 1")
			}
			say(err)
			in.Scan()
			say(tx.Commit())
		}),
		"nest": childNest,
	}
}

// A holder whose process stands still, as one whose host has vanished: its
// connection stays open, and nothing comes over it.
func TestSilentHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, how := range []string{"hold", "session", "tx"} {
			if how == "tx" && !s.MariaDB() {
				continue // MySQL has no limit on an idle transaction; see the documentation
			}
			t.Run(how, func(t *testing.T) {
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				dsn := s.Config().FormatDSN()
				dsn += map[bool]string{true: "&", false: "?"}[strings.Contains(dsn, "?")] + "lockTTL=4s"
				c := dbtest.StartJob(t, how, dsn)
				if got := c.Line(); got != "done" {
					t.Fatal(got)
				}
				dbtest.OK(t, c.Signal(syscall.SIGSTOP))
				start := time.Now()
				h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Wait(time.Minute))
				dbtest.OK(t, err)
				took := time.Since(start)
				if took > 40*time.Second {
					t.Errorf("the lock was free after %v, want the TTL of 4s", took)
				}
				t.Logf("free after %v", took)
				_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = stock - 1 WHERE id = 1")
				dbtest.OK(t, err)
				dbtest.OK(t, h.Release())
				dbtest.OK(t, c.Signal(syscall.SIGCONT))
				c.Tell("")
				if got := c.Line(); got != "lost" {
					t.Errorf("the holder that came back got %q, want ErrLost", got)
				}
				s.wantStock(1, 9)
			})
		}
	})
}

func TestKilledHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, how := range []string{"hold", "session", "tx"} {
			c := dbtest.StartJob(t, how, s.Config().FormatDSN())
			if got := c.Line(); got != "done" {
				t.Fatal(got)
			}
			c.Kill()
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Wait(time.Minute))
			dbtest.OK(t, err)
			dbtest.OK(t, h.Release())
			s.wantStock(1, 10)
		}
	})
}

func TestServerRestart(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 0 WHERE id = 1")
		dbtest.OK(t, err)
		ctx := lockctx.With(dbtest.Limited(t), "k2")
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 0 WHERE id = 2")
		waits := make(chan struct{})
		go func() {
			defer close(waits)
			if h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k"); err == nil {
				h.Rollback()
			}
		}()
		dbtest.OK(t, s.Server.Kill())
		dbtest.OK(t, s.Server.Restart(dbtest.Limited(t)))
		if err := h.Release(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Release after a restart: %v", err)
		}
		if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Commit after a restart: %v", err)
		}
		<-waits
		s.wantStock(1, 10)
		s.wantStock(2, 10)
		// Everything goes on with new connections.
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
			return err
		}))
		_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 8 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantStock(1, 8)
	})
}

// A holder that pinned a session with a read must get a connection of
// database/sql for its write, although those who wait for its lock would take
// them all.
func TestHolderGetsThroughAFullPool(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for round := range 3 {
			db := s.open("lockWait=2m")
			db.SetMaxOpenConns(4)
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
			ctx := lockctx.With(dbtest.Limited(t), "k")
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			var early, granted atomic.Int32
			var wg sync.WaitGroup
			for range 40 {
				wg.Go(func() {
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
					switch {
					case err == nil:
						granted.Add(1)
						tx.Rollback()
					case errors.Is(err, mysqllock.ErrLocked) && strings.Contains(err.Error(), "SetMaxOpenConns"):
						early.Add(1)
					default:
						t.Error(err)
					}
				})
			}
			dbtest.Soon(t, "the pool is full", func() bool { return db.Stats().InUse == 4 || early.Load() > 0 })
			start := time.Now()
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
			took := time.Since(start)
			dbtest.OK(t, err)
			if took > time.Minute { // the others wait for longer
				t.Errorf("the holder's write took %v", took)
			}
			wg.Wait()
			s.wantStock(1, 9)
			t.Logf("round %d: the write took %v; %d waiters were turned away, %d granted", round, took, early.Load(), granted.Load())
		}
	})
}

// An unbounded pool never turns anybody away, however long the holder thinks.
func TestNobodyIsTurnedAwayFromAnUnboundedPool(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=20s")
		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		var wg sync.WaitGroup
		for range 12 {
			wg.Go(func() {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
				if err != nil {
					t.Error(err)
					return
				}
				tx.Rollback()
			})
		}
		time.Sleep(time.Second)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, err)
		wg.Wait()
	})
}
