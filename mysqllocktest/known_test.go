package mysqllocktest

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestNoStatementOfALoadIsUnknown: three processes take all kinds of locks at random, give up, and
// lose some. The fake server knows each statement of the driver, those that exclude each other do,
// and nothing is held at the end.
func TestNoStatementOfALoadIsUnknown(t *testing.T) {
	l := New()
	options := map[string]lockctx.Option{
		"row": lockctx.Row(), "lease": lockctx.Lease(time.Second), "shared": lockctx.Shared(), "slots": lockctx.Slots(2), "advisory": lockctx.Advisory(),
		"optimistic": lockctx.Optimistic(), "min hold": lockctx.MinHold(20 * time.Millisecond),
	}
	var kinds []string
	for kind := range options {
		kinds = append(kinds, kind)
	}
	var inside [2]atomic.Int32 // of a key with a row lock or a lease
	var granted, refused, lost atomic.Int32
	try := func(db *sql.DB, key int, kind string) error {
		name := fmt.Sprint("k", key)
		if kind == "shared" || kind == "slots" {
			name = kind
		}
		opts := []lockctx.Option{options[kind], lockctx.Wait(time.Duration(1+rand.IntN(60)) * time.Millisecond)}
		if kind == "min hold" {
			opts = append(opts, options["lease"])
		}
		ctx, cancel := context.WithCancel(t.Context()) // gives up while it waits, not while it holds
		defer cancel()
		impatient := time.AfterFunc(time.Duration(10+rand.IntN(100))*time.Millisecond, cancel)
		held := func() {
			if !impatient.Stop() {
				return
			}
			if kind == "row" || kind == "lease" || kind == "min hold" {
				if inside[key].Add(1) != 1 {
					t.Errorf("%s has two holders", name)
				}
				defer inside[key].Add(-1)
			}
			time.Sleep(time.Duration(rand.IntN(4)) * time.Millisecond)
		}
		if kind == "optimistic" || rand.IntN(3) == 0 {
			ctx = lockctx.With(ctx, name, opts...)
			if rand.IntN(4) == 0 && (kind == "row" || kind == "optimistic") {
				ctx = lockctx.WithKeys(ctx, []string{name, "another"}, opts...)
			}
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			if kind != "optimistic" {
				held()
			}
			return tx.Commit()
		}
		return mysqllock.Do(ctx, db, name, func(ctx context.Context) error {
			held()
			if rand.IntN(8) > 0 {
				return nil
			}
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			return tx.Rollback()
		}, opts...)
	}
	for _, c := range []mysqllock.Config{{}, {}, {MaxConns: 8}} {
		db, err := l.Open(nil, c)
		dbtest.OK(t, err)
		defer db.Close()
		var all sync.WaitGroup
		defer all.Wait()
		for range 8 {
			all.Go(func() {
				for range 60 {
					switch err := try(db, rand.IntN(2), kinds[rand.IntN(len(kinds))]); {
					case err == nil:
						granted.Add(1)
					case errors.Is(err, mysqllock.ErrLocked), errors.Is(err, context.Canceled), errors.Is(err, mysqllock.ErrExhausted), errors.Is(err, mysqllock.ErrNoAnswer):
						refused.Add(1)
					case errors.Is(err, mysqllock.ErrLost), errors.Is(err, mysqllock.ErrDeadlock), errors.Is(err, mysqllock.ErrConflict), errors.Is(err, sql.ErrTxDone):
						lost.Add(1)
					default:
						t.Error(err)
					}
				}
			})
		}
	}
	checkAtEnd(t, l, "k0", "k1", "shared", "slots", "another")
	t.Cleanup(func() {
		t.Logf("granted %d, refused %d, lost %d", granted.Load(), refused.Load(), lost.Load())
	})
}

// TestLeasesThatShareAConnectionGoTogether: they gather, so that they are taken and given back together.
func TestLeasesThatShareAConnectionGoTogether(t *testing.T) {
	l := New()
	checkAtEnd(t, l, "k3")
	db, err := l.Open(nil, mysqllock.Config{LockMaxConns: 2, Wait: time.Minute})
	dbtest.OK(t, err)
	defer db.Close()
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			for range 20 {
				key := fmt.Sprint("k", i/2)
				if err := mysqllock.Do(t.Context(), db, key, func(context.Context) error { return nil }, lockctx.Lease(time.Duration(60+i)*time.Second)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// checkAtEnd looks at what is left when the handles are closed.
func checkAtEnd(t *testing.T, l *Locks, keys ...string) {
	t.Cleanup(func() {
		for _, key := range keys {
			for deadline := time.Now().Add(time.Minute); len(l.Holders(key)) > 0; time.Sleep(time.Millisecond) {
				if time.Now().After(deadline) {
					t.Errorf("%s is held by %q", key, l.Holders(key))
					break
				}
			}
		}
		for _, s := range l.servers {
			for _, text := range s.Unknown() {
				t.Errorf("unknown: %s", text)
			}
		}
	})
}
