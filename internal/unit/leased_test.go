package unit_test

import (
	"context"
	"database/sql"
	"errors"
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

// inTheWay checks the error of who does not wait for the lease of somebody else.
func inTheWay(t *testing.T, err error, key string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) ||
		e.Op != "lock" || e.Key != key || e.Holder == nil || *e.Holder != (mysqllock.Holder{Program: "web-2:7:shopd"}) {
		t.Errorf("the error is %v", err)
	}
}

func noWait(ctx context.Context, keys ...string) context.Context {
	return lockctx.WithKeys(ctx, keys, lockctx.NoWait())
}

// The row's lock is given back at once: it would keep the lease's holder from renewing.
func TestALeaseOfSomebodyElseIsInTheWayUntilItEnds(t *testing.T) {
	onProducts(t, func(t *testing.T, s *fakeserver.Server, db *sql.DB, ctx context.Context) {
		ctx = lockctx.Without(ctx)
		dbtest.OK(t, put(noWait(ctx, "k"), db, 8)) // on a connection that is known from now on
		for range 2 {
			s.Lease("k", time.Minute)
			_, err := db.BeginTx(noWait(ctx, "k"), nil)
			inTheWay(t, err, "k")
			inTheWay(t, put(noWait(ctx, "k"), db, 1), "k")
			inTheWay(t, db.QueryRowContext(noWait(ctx, "k"), read, 1).Err(), "k")
			_, err = mysqllock.Acquire(ctx, db, "k", lockctx.NoWait())
			inTheWay(t, err, "k")
			s.Lease("b", time.Minute)
			_, err = db.BeginTx(noWait(ctx, "a", "b"), nil)
			inTheWay(t, err, "a, b")
			wantState(t, s, 8, 0)
			if st, err := mysqllock.Stats(db); err != nil || st.InUse != 0 {
				t.Errorf("%+v, %v: a session is not free", st, err)
			}
			for _, key := range []string{"k", "b"} {
				s.Lease(key, -time.Second)
				dbtest.OK(t, put(noWait(ctx, key), db, 8))
				dbtest.OK(t, put(noWait(ctx, key), db, 8))
			}
			wantState(t, s, 8, 0)
		}
	})
}

// A transaction cannot give back the lock of one row alone.
func TestALeaseThatASecondLockFindsEndsTheTransaction(t *testing.T) {
	for of, keys := range map[string][]string{"one": {"k1"}, "two": {"k1", "k2"}} {
		t.Run(of, func(t *testing.T) {
			onProducts(t, func(t *testing.T, s *fakeserver.Server, db *sql.DB, ctx context.Context) {
				s.Lease("k2", -time.Second)
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.OK(t, put(ctx, tx, 1))
				s.Before("name = x'6b31' LIMIT 1 FOR UPDATE", func() { s.Lease("k1", time.Minute) })
				err = put(noWait(ctx, keys...), tx, 2)
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Holder == nil || e.Holder.Program != "web-2:7:shopd" {
					t.Errorf("got %v", err)
				}
				over(t, ctx, tx)
				wantState(t, s, 10, 0)
			})
		})
	}
}

// over checks that nothing goes on in what is left of a transaction.
func over(t *testing.T, ctx context.Context, tx *sql.Tx) {
	t.Helper()
	for range 2 {
		_, prepared := tx.PrepareContext(ctx, read)
		for _, err := range []error{put(ctx, tx, 3), put(lockctx.Without(ctx), tx, 3), tx.QueryRowContext(ctx, read, 1).Err(), prepared} {
			dbtest.Is(t, "a statement after it", err, mysqllock.ErrLost)
		}
	}
	dbtest.Is(t, "the commit", tx.Commit(), mysqllock.ErrLost)
}

// A key that is known to have had a lease is looked up on another connection, before its row is
// locked.
func TestALeaseThatIsKnownLeavesTheTransactionAlone(t *testing.T) {
	for name, begin := range map[string]func(*testing.T, *sql.DB, context.Context){
		"on its connection": func(*testing.T, *sql.DB, context.Context) {},
		"on a session":      func(t *testing.T, db *sql.DB, ctx context.Context) { stock.MustRead(t, ctx, db, 1) },
	} {
		synctest.Test(t, func(t *testing.T) {
			t.Log(name)
			s, db, ctx := open(t)
			begin(t, db, ctx)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			s.Lease("k1", time.Minute)
			both := lockctx.With(ctx, "k1", lockctx.NoWait(), lockctx.AllowStale())
			inTheWay(t, put(both, tx, 1), "k1")
			dbtest.OK(t, put(ctx, tx, 4))
			inTime := lockctx.With(ctx, "k1", lockctx.Wait(20*time.Millisecond), lockctx.AllowStale())
			dbtest.Is(t, "after a wait", put(inTime, tx, 1), mysqllock.ErrTimeout)

			// Where it cannot be looked up, the lock statement tells.
			s.Lease("k1", -time.Second)
			s.Fail("SELECT name, IF(", refused(1205))
			dbtest.OK(t, put(both, tx, 4))
			dbtest.OK(t, put(both, tx, 5))
			dbtest.OK(t, tx.Commit())
			wantState(t, s, 5, 0)
		})
	}
}

func TestASecondLockThatIsRefusedLeavesTheTransactionAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the limits on time depend on no machine
		s, db, ctx := open(t)
		other, err := another(t, s).BeginTx(lockctx.With(context.Background(), "k1"), nil)
		dbtest.OK(t, err)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		for _, wait := range []time.Duration{0, 20 * time.Millisecond} {
			dbtest.Is(t, "the error", put(lockctx.With(ctx, "k1", lockctx.Wait(wait)), tx, 1), mysqllock.ErrLocked)
		}
		dbtest.OK(t, put(ctx, tx, 5))
		dbtest.OK(t, tx.Commit())

		// Of two keys, one may have been locked.
		tx, err = db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.OK(t, put(ctx, tx, 6))
		dbtest.Is(t, "the error", put(noWait(ctx, "k0", "k1"), tx, 1), mysqllock.ErrLocked)
		over(t, ctx, tx)
		dbtest.OK(t, other.Rollback())
		wantState(t, s, 5, 0)
	})
}

// What was taken before the transaction is given back if a row lock in it is refused.
func TestALeaseGoesWithTheRowLockThatIsRefused(t *testing.T) {
	s, db, ctx := open(t)
	other, _ := openOn(t, s, mysqllock.Config{})
	holder, err := mysqllock.Acquire(context.Background(), other, "k")
	dbtest.OK(t, err)
	for name, way := range map[string]func(context.Context) error{
		"BeginTx": func(ctx context.Context) error {
			_, err := db.BeginTx(ctx, nil)
			return err
		},
		"write": func(ctx context.Context) error { return put(ctx, db, 1) },
		"read":  func(ctx context.Context) error { return db.QueryRowContext(ctx, read, 1).Err() },
	} {
		leased := lockctx.With(lockctx.Without(ctx), "l", lockctx.Lease(time.Minute))
		dbtest.Is(t, name+": the error", way(lockctx.With(leased, "k", lockctx.NoWait())), mysqllock.ErrLocked)
		h, err := mysqllock.Acquire(context.Background(), other, "l", lockctx.Lease(time.Minute), lockctx.NoWait())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		dbtest.OK(t, h.Release())
	}
	dbtest.OK(t, holder.Release())
}

// TestLeasesAreCheckedOnASessionWithALimitOnSilence: a host that vanishes between the checks of two leases,
// of two handles, and COMMIT keeps neither key for longer than lockTTL. The session has that limit for
// its life, so no statement sets or lifts it.
func TestLeasesAreCheckedOnASessionWithALimitOnSilence(t *testing.T) {
	s, db, ctx := openWith(t, mysqllock.Config{TTL: 10 * time.Second})
	other, _ := openOn(t, s, mysqllock.Config{})
	ctx = lockctx.Without(ctx)
	err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
		return mysqllock.Do(ctx, other, "k1", func(ctx context.Context) error {
			return mysqllock.Do(ctx, db, "named", func(ctx context.Context) error {
				s.Sent()
				return put(ctx, db, 4)
			}, lockctx.Advisory())
		}, lockctx.Lease(20*time.Second))
	}, lockctx.Lease(time.Minute))
	dbtest.OK(t, err)
	var sent []string
	for _, text := range s.Sent() {
		switch {
		case strings.Contains(text, " wait_timeout = 10 "):
			sent = append(sent, "limit")
		case strings.Contains(text, "wait_timeout"):
			sent = append(sent, text)
		case strings.Contains(text, "FOR SHARE"), strings.Contains(text, "LOCK IN SHARE MODE"):
			sent = append(sent, "check")
		case text == "COMMIT":
			sent = append(sent, text)
		default:
			t.Log(text)
		}
	}
	if want := []string{"limit", "check", "check", "COMMIT"}; !slices.Equal(sent, want) {
		t.Errorf("it sent %q, want %q", sent, want)
	}
	wantState(t, s, 4, 0)
}
