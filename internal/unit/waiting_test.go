package unit_test

import (
	"context"
	"database/sql"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// another is another process on the same server.
func another(t *testing.T, s *fakeserver.Server) *sql.DB {
	t.Helper()
	k, err := mysqllock.Wrap(s, mysqllock.Config{Schema: "manual"})
	dbtest.OK(t, err)
	db := sql.OpenDB(k)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// arrives waits for a signal of the fake, and fails where done is first.
func arrives(t *testing.T, s *fakeserver.Server, signal <-chan struct{}, done <-chan error) {
	t.Helper()
	select {
	case <-signal:
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(time.Minute):
		t.Fatalf("it sent %q", s.Sent())
	}
}

func TestAWaitEndsWithItsContext(t *testing.T) {
	for _, kind := range []string{"row", "advisory"} {
		t.Run(kind, func(t *testing.T) {
			s, db, ctx := open(t)
			ctx = lockctx.With(lockctx.Without(ctx), "k", kinds[kind].option)
			other := another(t, s)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			waits, done := s.Arrival("waits"), make(chan error, 1)
			own, cancel := context.WithCancel(context.Background())
			go func() { done <- put(lockctx.With(own, "k", kinds[kind].option), other, 2) }()
			arrives(t, s, waits, done)
			s.Sent()
			cancel()
			dbtest.Is(t, "the error", <-done, context.Canceled)
			if slices.Contains(s.Sent(), write) {
				t.Error("it wrote without the lock")
			}
			dbtest.OK(t, put(ctx, tx, 1))
			dbtest.OK(t, tx.Commit())
			dbtest.OK(t, other.Close())
			dbtest.OK(t, db.Close())
			wantState(t, s, 1, 0)
		})
	}
}

func TestAKeyThatIsHeldIsRefusedWithoutWaiting(t *testing.T) {
	for kind, k := range kinds {
		if kind == "shared" || kind == "slots" {
			continue // they have room for another
		}
		t.Run(kind, func(t *testing.T) {
			s, db, ctx := open(t)
			tx, err := db.BeginTx(lockctx.With(lockctx.Without(ctx), "k", k.option), nil)
			dbtest.OK(t, err)
			for name, db := range map[string]*sql.DB{"this process": db, "another": another(t, s)} {
				err := put(lockctx.With(context.Background(), "k", k.option, lockctx.NoWait()), db, 2)
				dbtest.Is(t, name, err, mysqllock.ErrLocked)
				// A wait that is over before it begins is a wait.
				_, err = mysqllock.Acquire(context.Background(), db, "k", k.option, lockctx.Wait(1))
				dbtest.Is(t, name+", Wait(1)", err, mysqllock.ErrTimeout)
			}
			dbtest.OK(t, tx.Rollback())
			wantState(t, s, 10, 0)
		})
	}
}

func TestALockWaitTimeoutOfTheServerIsATimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the limits on time depend on no machine
		s, db, ctx := open(t)
		other := another(t, s)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		s.Fail("waits", refused(1205))
		short := lockctx.With(context.Background(), "k", lockctx.Wait(50*time.Millisecond))
		dbtest.Is(t, "the error", put(short, other, 2), mysqllock.ErrTimeout)
		dbtest.OK(t, tx.Rollback())
		wantState(t, s, 10, 0)
	})
}

// Who has the key itself has its first slot, until the unit of work ends.
func TestASlotOfAKeyThatIsLockedItselfGoesWithIt(t *testing.T) {
	_, db, _ := open(t)
	key := lockctx.With(context.Background(), "k")
	both := lockctx.With(key, "k", lockctx.Slots(2))
	for name, begin := range map[string]context.Context{"together": both, "the key first": key} {
		tx, err := db.BeginTx(begin, nil)
		dbtest.OK(t, err)
		dbtest.OK(t, put(both, tx, 5))
		if slot, ok := mysqllock.Slot(both); !ok || slot != 0 {
			t.Errorf("%s: the slot is %d, %v", name, slot, ok)
		}
		dbtest.OK(t, tx.Rollback())
		if slot, ok := mysqllock.Slot(both); ok {
			t.Errorf("%s: after the end the slot is %d", name, slot)
		}
	}
}

// The server has said that no slot is free, so somebody has them, also if the caller's wait is over
// before it waits for one.
func TestAWaitForSlotsThatIsOverBeforeItBeginsIsATimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the limits on time depend on no machine
		s, db, _ := open(t)
		slot := func(wait time.Duration) []lockctx.Option {
			return []lockctx.Option{lockctx.Slots(1), lockctx.Wait(wait)}
		}
		held, err := mysqllock.Acquire(context.Background(), db, "k", slot(time.Minute)...)
		dbtest.OK(t, err)
		const wait = 20 * time.Millisecond
		other := another(t, s)
		for range 2 { // what is asked once is known to the second
			s.Before("SKIP LOCKED", func() { time.Sleep(2 * wait) })
			_, err := other.BeginTx(lockctx.With(lockctx.With(context.Background(), "a"), "k", slot(wait)...), nil)
			dbtest.Is(t, "the error", err, mysqllock.ErrTimeout)
		}
		dbtest.OK(t, held.Release())
		wantState(t, s, 10, 0)
	})
}

func TestAHoldOfALeaseTellsItsTokenAndExpiry(t *testing.T) {
	s, db, ctx := open(t)
	var last uint64
	for range 2 {
		h, err := mysqllock.Acquire(lockctx.Without(ctx), db, "k", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		token, ok := mysqllock.Token(h.Context())
		if h.Token() <= last || token != h.Token() || !ok {
			t.Errorf("token %d, and %d in the context, after %d", h.Token(), token, last)
		}
		if left := time.Until(h.Expiry()); left <= 0 || left > time.Minute {
			t.Errorf("it expires in %v", left)
		}
		last = h.Token()
		dbtest.OK(t, h.Release())
		dbtest.Is(t, "a write after the release", put(h.Context(), db, 1), context.Canceled)
		wantState(t, s, 10, 0)
	}
}

// TestAQueryThatTheDriversOwnKillHasMetRunsAgain: the query went out with the lock of a slot, which was granted, and then a
// slot of this process came free, so that the wait was to end.
func TestAQueryThatTheDriversOwnKillHasMetRunsAgain(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{})
		other, slots := s.Handle(), lockctx.Slots(2)
		dbtest.Exec(t, s.Plain, "CREATE TABLE slow (id INT PRIMARY KEY, n INT)")
		dbtest.Exec(t, s.Plain, "INSERT INTO slow VALUES (1, 7)")
		begin := func(db *sql.DB) *sql.Tx { return dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k", slots), db) }
		ours, others := begin(db), begin(other)
		conn := dbtest.Conn(t, s.Plain)
		dbtest.Exec(t, conn, "LOCK TABLES slow WRITE")
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		read := dbtest.Go(func() error {
			var n int
			return db.QueryRowContext(lockctx.With(ctx, "k", slots, lockctx.Wait(dbtest.Patience)), "SELECT n FROM slow WHERE id = 1").Scan(&n)
		})
		dbtest.Soon(t, "it waits for a slot", func() bool { return s.Waiters() > 0 })
		dbtest.OK(t, others.Rollback())
		dbtest.Soon(t, "it has the slot, and the query runs", func() bool {
			return len(dbtest.Column[int](t, s.Plain, "SELECT 1 FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND STATE LIKE '%metadata lock%'")) > 0
		})
		sent := tap.Texts()
		dbtest.OK(t, ours.Rollback())
		dbtest.Soon(t, "the driver ends the wait", func() bool {
			return slices.ContainsFunc(sent(), func(text string) bool { return strings.HasPrefix(text, "KILL QUERY") })
		})
		dbtest.Exec(t, conn, "UNLOCK TABLES")
		dbtest.OK(t, <-read)
	})
}
