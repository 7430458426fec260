package mysqllock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestSessionsInUse: a caller that finds no session is told so, and not that somebody
// has the key.
func TestSessionsInUse(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockMaxConns=1")
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "a")
		dbtest.OK(t, err)
		wanted := func(name, strategy string, err error, ended error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrExhausted) ||
				errors.Is(err, mysqllock.ErrTimeout) || errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("%s: %v", name, err)
				return
			}
			if e.Strategy != strategy || e.Key != "b" || e.Holder != nil || !strings.Contains(err.Error(), "all 1 connections for sessions are in use (lockMaxConns)") {
				t.Errorf("%s: %v", name, err)
			}
			if ended != nil && !errors.Is(err, ended) || ended == nil && errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v, want it to match %v", name, err, ended)
			}
		}
		for strategy, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
			_, err := mysqllock.Acquire(dbtest.Limited(t), db, "b", opt, lockctx.Wait(100*time.Millisecond))
			wanted("Acquire", strategy, err, nil)
			_, err = mysqllock.Acquire(dbtest.Limited(t), db, "b", opt, lockctx.NoWait())
			wanted("Acquire, NoWait", strategy, err, nil)
			ctx, cancel := context.WithTimeout(dbtest.Limited(t), 2*time.Second)
			wanted("Do, deadline", strategy, mysqllock.Do(ctx, db, "b", func(context.Context) error { return nil }, opt), context.DeadlineExceeded)
			cancel()
		}
		// A read outside a transaction needs a session.
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "b", lockctx.Wait(100*time.Millisecond)))
		var n int
		wanted("query", "row", db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n), nil)
		cancel()

		// A key that somebody has is locked, all the same.
		_, err = mysqllock.Acquire(dbtest.Limited(t), db, "a", lockctx.NoWait())
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("a held key: %v", err)
		}
		dbtest.OK(t, h.Release())
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "b", func(context.Context) error { return nil }))
	})
}
