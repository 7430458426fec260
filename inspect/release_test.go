package inspect_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

func TestRelease(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.root, "CREATE TABLE work (id INT)")
		i := s.inspector(s.root)
		for strategy, option := range strategies {
			key := "the-" + strategy
			db := s.process("root", "holder")
			hold, err := mysqllock.Acquire(t.Context(), db, key, option)
			dbtest.OK(t, err)
			granted := make(chan error, 1)
			next := s.process("root", "next")
			go func() {
				h, err := mysqllock.Acquire(context.Background(), next, key, option, lockctx.Wait(dbtest.Patience))
				if err == nil {
					defer h.Release()
				}
				granted <- err
			}()
			var seen *inspect.Lock
			dbtest.Soon(t, "one waits", func() bool {
				seen = find(look(t, i), strategy, key)
				return seen != nil && len(seen.Waiters.List) == 1
			})
			stranger := *seen
			stranger.Token = inspect.Value(value(seen.Token) + 1)
			stranger.Holders.List = append([]inspect.Holder(nil), seen.Holders.List...)
			stranger.Holders.List[0].User = "somebody else"
			if done, err := i.Release(t.Context(), stranger, ""); !errors.Is(err, inspect.ErrChanged) || len(done.Killed) > 0 {
				t.Errorf("%s: released what is not held so: %+v, %v", strategy, done, err)
			}
			done, err := i.Release(t.Context(), *seen, "")
			dbtest.OK(t, err)
			if strategy == "lease" && (done.Token != 2 || done.Killed != nil) ||
				strategy != "lease" && (len(done.Killed) != 1 || done.Killed[0] != seen.Holders.List[0].ConnectionID) {
				t.Errorf("%s: what was done is %+v", strategy, done)
			}
			dbtest.OK(t, <-granted)
			// Whoever had it cannot commit under it.
			// The hold's own context may have ended by now, and database/sql says no more of it.
			_, err = db.ExecContext(context.WithoutCancel(hold.Context()), "INSERT INTO work VALUES (1)")
			dbtest.Is(t, fmt.Sprintf("%s: the old holder writes", strategy), err, lockerr.ErrLost)
			if err := hold.Release(); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("%s: the old holder is told %v", strategy, err)
			}
			if done, err := i.Release(t.Context(), *seen, ""); !errors.Is(err, inspect.ErrChanged) {
				t.Errorf("%s: released again: %+v, %v", strategy, done, err)
			}
		}
	})
}

// TestReason: the holder of a lease is told who has taken it away, from where, when and why, also
// if another has the key by then: in its renewal, its commit and its release. Without the column
// for it, it is told that the lease is lost.
func TestReason(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		db := s.process("root", "holder")
		for n, told := range []func(*mysqllock.Hold) error{
			func(h *mysqllock.Hold) error { // the renewal
				select {
				case <-h.Context().Done():
				case <-time.After(dbtest.Patience):
				}
				dbtest.Soon(t, "who has taken it away is known", func() bool { return strings.Contains(context.Cause(h.Context()).Error(), "taken away") })
				return context.Cause(h.Context())
			},
			func(h *mysqllock.Hold) error {
				_, err := db.ExecContext(context.WithoutCancel(h.Context()), "INSERT INTO work VALUES (1)")
				return err
			},
			(*mysqllock.Hold).Release,
			(*mysqllock.Hold).Release, // without the column
		} {
			ttl := time.Minute
			if n == 0 {
				ttl = 9 * time.Second
			}
			key := fmt.Sprintf("key %d", n)
			h := s.acquire(db, key, lockctx.Lease(ttl))
			seen := find(look(t, i), "lease", key)
			if n == 0 {
				dbtest.Exec(t, s.root, "CREATE TABLE IF NOT EXISTS work (n INT)")
				if _, err := i.Release(t.Context(), *seen, strings.Repeat("é", 300)); err == nil || !strings.Contains(err.Error(), "600 bytes") {
					t.Errorf("a long reason: %v", err)
				}
			}
			if n == 3 {
				dbtest.Exec(t, s.root, dropTold)
			}
			from := time.Now().Add(-time.Second)
			_, err := i.Release(t.Context(), *seen, "it hängs; \x00ticket '4711'")
			dbtest.OK(t, err)
			next := s.acquire(s.process("root", "next"), key, lockctx.Lease(time.Minute), lockctx.Wait(dbtest.Patience))
			err = told(h)
			want := []string{`by "root@`, `in process "`, fmt.Sprintf(":%d:", os.Getpid()), `the reason: "it hängs;  ticket '4711'"`}
			if n == 3 {
				want = nil
			}
			for _, part := range want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%d: the holder is told %v, want %q", n, err, part)
				}
			}
			if !errors.Is(err, lockerr.ErrLost) || n == 3 && strings.Contains(err.Error(), "taken away") {
				t.Errorf("%d: the holder is told %v", n, err)
			}
			f := find(look(t, i), "lease", key).Forced
			if n == 3 {
				continue
			}
			if f == nil || f.Token != 1 || !strings.HasPrefix(f.Account, "root@") || !strings.Contains(f.Process, fmt.Sprintf(":%d:", os.Getpid())) ||
				f.Reason != "it hängs;  ticket '4711'" || f.Time.Before(from) || f.Time.After(time.Now()) {
				t.Errorf("%d: noted is %+v", n, f)
			}
			// The one who loses the next lease is not told what befell another.
			dbtest.Exec(t, s.root, "UPDATE mysqllock SET owner = NULL, token = token + 1 WHERE name = '"+key+"'")
			if err := next.Release(); !errors.Is(err, lockerr.ErrLost) || strings.Contains(err.Error(), "taken away") {
				t.Errorf("%d: the next is told %v", n, err)
			}
		}
	})
}

// A transaction that is committed under the lease is given time to; one that does
// not end keeps the lease from being taken.
func TestReleaseBehindFence(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.acquire(s.process("root", "holder"), "k", lockctx.Lease(30*time.Second))
		i := s.inspector(s.root)
		seen := find(look(t, i), "lease", "k")
		tx := s.rowsLocked("LOCK IN SHARE MODE", "k")
		dbtest.Is(t, "released behind a transaction that holds the row", dbtest.Err(i.Release(t.Context(), *seen, "")), lockerr.ErrLocked)
		time.AfterFunc(200*time.Millisecond, func() { _ = tx.Rollback() })
		done, err := i.Release(t.Context(), *seen, "")
		for began := time.Now(); errors.Is(err, lockerr.ErrLocked) && time.Since(began) < dbtest.Patience; { // on a busy machine it does not end in time
			done, err = i.Release(t.Context(), *seen, "")
		}
		if err != nil || done.Token != 2 {
			t.Errorf("released: %+v, %v", done, err)
		}
	})
}

func TestReleaseNeedsRights(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.acquire(s.process("root", "holder"), "k", lockctx.Advisory())
		i := s.inspector(s.open(s.user("PROCESS ON *.*", "SELECT ON performance_schema.*")))
		seen := find(look(t, i, "k"), "advisory", "k")
		if seen == nil {
			t.Fatalf("the lock is not shown: %+v", look(t, i, "k"))
		}
		_, err := i.Release(t.Context(), *seen, "")
		if err == nil || !strings.Contains(err.Error(), "GRANT CONNECTION") {
			t.Errorf("killed another account's connection: %v", err)
		}
		seen.Name = "x'); KILL 1; --"
		if _, err := i.Release(t.Context(), *seen, ""); err == nil || !strings.Contains(err.Error(), "not the name of an advisory lock") {
			t.Errorf("a made-up name was asked for: %v", err)
		}
	})
}

func TestClean(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.makeTable("a", "b", "c")
		done, err := s.inspector(s.root).Clean(t.Context(), inspect.CleanUp{Unused: time.Hour, Limit: 2})
		if done.Removed != 2 || done.Done || err != nil {
			t.Errorf("it did %+v, %v", done, err)
		}
	})
}
