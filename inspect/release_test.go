package inspect_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

func TestALockIsReleasedOnlyAsItWasSeen(t *testing.T) {
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

// TestTheHolderIsToldWhoTookItsLease: from where, when and why, also if another has the key by
// then: in its renewal, its commit and its release. Without the column for it, it is told that the
// lease is lost.
func TestTheHolderIsToldWhoTookItsLease(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		db := s.process("root", "holder")
		for n, told := range []func(*mysqllock.Hold) error{
			func(h *mysqllock.Hold) error { // the renewal
				select {
				case <-h.Context().Done():
				case <-time.After(dbtest.Patience):
				}
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
			began := time.Now()
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
			most := time.Since(began) + timing
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
			if e := new(mysqllock.Error); !errors.As(err, &e) || n == 0 && e.Held <= 0 || e.Held > most { // not until it is told
				t.Errorf("%d: it is told %v, %v after it asked for the lock", n, err, most)
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

// TestVictimIsTold: the holder of a lease that is taken away is told who did it, and why, by the cause of
// its context, by its observer and by what Release returns. All say the same, and go on saying it: to
// a holder that renews, to one that has stood still meanwhile, and to one that commits.
func TestVictimIsTold(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		const ttl = 6 * time.Second
		i := s.inspector(s.root)
		for name, learn := range map[string]func(h *mysqllock.Hold, db *sql.DB, tap *dbtest.Tap, takeAway func()) error{
			"renews": func(_ *mysqllock.Hold, _ *sql.DB, _ *dbtest.Tap, takeAway func()) error { takeAway(); return nil },
			"stood still": func(h *mysqllock.Hold, _ *sql.DB, tap *dbtest.Tap, takeAway func()) error {
				thaw := tap.Freeze()
				takeAway()
				<-time.After(time.Until(h.Expiry().Add(-ttl / 10))) // when it is over for the holder
				thaw()
				return nil
			},
			"commits": func(h *mysqllock.Hold, db *sql.DB, _ *dbtest.Tap, takeAway func()) error {
				takeAway()
				_, err := db.ExecContext(h.Context(), "UPDATE mysqllock SET token = token WHERE FALSE")
				return err
			},
		} {
			t.Run(name, func(t *testing.T) {
				key, lost := "key of one that "+name, make(lossObserver, 1)
				cfg, tap := s.Config(), new(dbtest.Tap)
				cfg.User = "root"
				tap.On(cfg)
				db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Owner: "holder", Observer: lost}))
				h := s.acquire(db, key, lockctx.Lease(ttl))
				returned := learn(h, db, tap, func() {
					if _, err := i.Release(t.Context(), *find(look(t, i), "lease", key), "ticket 4711"); err != nil {
						t.Error(err)
					}
				})
				<-h.Context().Done()
				cause := context.Cause(h.Context())
				said := cause.Error()
				told := strings.Contains(said, "it was taken away on ") && strings.Contains(said, "ticket 4711")
				if !told && name == "stood still" { // a server that is slow is not waited for
					told = strings.Contains(said, "it was not renewed in time")
				}
				if !errors.Is(cause, lockerr.ErrLost) || !told {
					t.Errorf("the cause says: %s", said)
				}
				var first, e *lockerr.Error
				errors.As(cause, &first)
				for what, err := range map[string]error{"the observer": <-lost, "Release": h.Release(), "the statement": returned} {
					if what == "the statement" && name != "commits" {
						continue
					}
					if !errors.As(err, &e) || e.Err.Error() != first.Err.Error() || what != "the statement" && e.Held != first.Held {
						t.Errorf("%s says: %v; and the cause says: %v", what, err, said)
					}
				}
				dbtest.Equal(t, "the cause says later: %s, and said: %s", cause.Error(), said)
			})
		}
	})
}

// lossObserver takes the losses that it is told of.
type lossObserver chan error

func (lo lossObserver) Observe(_ context.Context, e mysqllock.Event) {
	if e.Kind == mysqllock.Lost {
		lo <- e.Err
	}
}

// TestAReleaseWaitsForATransactionUnderTheLease, which is given time to commit; one that does not end keeps the lease
// from being taken.
func TestAReleaseWaitsForATransactionUnderTheLease(t *testing.T) {
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

// TestReleaseEndsNoConnectionOfAHolderThatHasLeft: a holder that gives the lock back while Release asks who has it
// keeps its connection, and so does the next one, which the caller has not seen. The error says so.
func TestReleaseEndsNoConnectionOfAHolderThatHasLeft(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		asks := "SELECT ID, USER, HOST" // after it has asked who has it
		if s.mysql() {
			asks = "SELECT PROCESSLIST_ID, PROCESSLIST_USER"
		}
		for _, strategy := range []string{"row", "advisory"} {
			key, option := "the-"+strategy, strategies[strategy]
			hold, err := mysqllock.Acquire(t.Context(), s.process("root", "holder"), key, option)
			dbtest.OK(t, err)
			next := s.process("root", "next")
			granted := make(chan *mysqllock.Hold, 1)
			go func() {
				h, err := mysqllock.Acquire(context.Background(), next, key, option, lockctx.Wait(2*dbtest.Patience))
				if err != nil {
					t.Error(err)
				}
				granted <- h
			}()
			cfg, tap := s.Config(), new(dbtest.Tap)
			cfg.User = "root"
			tap.On(cfg)
			i := s.inspector(s.OpenDB(dbtest.Connector(t, cfg), nil))
			var seen *inspect.Lock
			dbtest.Soon(t, "one waits", func() bool {
				seen = find(look(t, i), strategy, key)
				return seen != nil && len(seen.Waiters.List) == 1 && len(seen.Holders.List) == 1
			})
			texts, arrive := tap.Texts(), tap.Stall(asks)
			released := make(chan error, 1)
			go func() {
				_, err := i.Release(context.Background(), *seen, "")
				released <- err
			}()
			dbtest.Soon(t, "it asks", func() bool {
				return slices.ContainsFunc(texts(), func(text string) bool { return strings.HasPrefix(text, asks) })
			})
			dbtest.OK(t, hold.Release())
			h := <-granted
			arrive()
			err = <-released
			if who := fmt.Sprintf("connections %d do not hold it any more", seen.Holders.List[0].ConnectionID); !errors.Is(err, inspect.ErrChanged) || !strings.Contains(err.Error(), who) {
				t.Errorf("%s: want %q: %v", strategy, who, err)
			}
			var alive int
			dbtest.OK(t, s.root.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE ID = ?", seen.Holders.List[0].ConnectionID).Scan(&alive))
			if alive != 1 {
				t.Errorf("%s: the connection of the former holder was ended", strategy)
			}
			if h != nil {
				dbtest.OK(t, h.Release())
			}
		}
	})
}

// TestReleaseEndsNoConnectionThatSharesTheLockSince the snapshot, and the error names who shares it: the lock is
// still held.
func TestReleaseEndsNoConnectionThatSharesTheLockSince(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		if !s.mysql() {
			t.Skip("it does not tell who shares a row")
		}
		i := s.inspector(s.root)
		first := s.acquire(s.process("root", "first"), "k", lockctx.Shared())
		seen := find(look(t, i), "row", "k")
		second := s.acquire(s.process("root", "second"), "k", lockctx.Shared())
		since := find(look(t, i), "row", "k")
		done, err := i.Release(t.Context(), *seen, "")
		if len(since.Holders.List) != 2 || len(done.Killed) != 1 || done.Killed[0] != seen.Holders.List[0].ConnectionID || err == nil {
			t.Fatalf("of %+v it ended %v: %v", since.Holders.List, done.Killed, err)
		}
		for _, h := range since.Holders.List {
			if said := fmt.Sprintf("connections %d have got the lock since", h.ConnectionID); (h.Program == "second") != strings.Contains(err.Error(), said) {
				t.Errorf("%s: %v", h.Program, err)
			}
		}
		dbtest.Is(t, "the first", first.Release(), lockerr.ErrLost)
		dbtest.OK(t, second.Release())
	})
}

// TestReleaseEndsNoConnectionByAnOldCopy: MariaDB shows the row locks of long ago while a program reads them all the
// time. No connection is ended because it had the lock then.
func TestReleaseEndsNoConnectionByAnOldCopy(t *testing.T) {
	dbtest.OnOwnServers(t, func(d *dbtest.Database) *scratch {
		if d.MariaDB() {
			return newScratch(plainMariaDB, d)
		}
		return newScratch(mysqlServer, d)
	}, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		holder, next := s.process("root", "holder"), s.process("root", "next")
		// On a slow machine nobody may have read for a while, and the copy is a new one.
		err := dbtest.Until(func() error { return s.releasesOld(i, holder, next) }, func(err error) bool {
			return s.mysql() || !errors.Is(err, inspect.ErrChanged)
		})
		want := inspect.ErrChanged
		if !s.mysql() {
			want = inspect.ErrNotKnown
		}
		if !errors.Is(err, want) || !s.mysql() && !strings.Contains(err.Error(), "old copy") {
			t.Errorf("beside a program that reads all the time: %v", err)
		}
	})
}

// releasesOld releases a lock that was given back since it was seen, while a program reads all the time, which is the
// error, and then without it.
func (s *scratch) releasesOld(i *inspect.Inspector, holder, next *sql.DB) error {
	t := s.T
	hold, err := mysqllock.Acquire(t.Context(), holder, "k")
	dbtest.OK(t, err)
	ctx, giveUp := context.WithCancel(dbtest.Limited(t))
	waited := dbtest.Go(func() error { return dbtest.Err(mysqllock.Acquire(ctx, next, "k", lockctx.Wait(dbtest.Patience))) })
	var seen *inspect.Lock
	dbtest.Soon(t, "one waits", func() bool {
		seen = find(look(t, i), "row", "k")
		return seen != nil && len(seen.Waiters.List) == 1 && len(seen.Holders.List) == 1
	})
	watching, stop := context.WithCancel(t.Context())
	var watched sync.WaitGroup
	defer func() { stop(); watched.Wait() }()
	for range 2 {
		watched.Go(func() {
			for db := s.root; watching.Err() == nil; time.Sleep(10 * time.Millisecond) {
				dbtest.Exec(t, db, "DO (SELECT COUNT(*) FROM information_schema.INNODB_TRX)")
			}
		})
	}
	giveUp()
	dbtest.Is(t, "it gives up", <-waited, context.Canceled)
	dbtest.OK(t, hold.Release())

	done, beside := i.Release(t.Context(), *seen, "")
	if len(done.Killed) > 0 {
		t.Errorf("beside a program that reads all the time: %+v, %v", done, beside)
	}
	stop()
	watched.Wait()
	done, err = i.Release(t.Context(), *seen, "")
	if !errors.Is(err, inspect.ErrChanged) || len(done.Killed) > 0 {
		t.Errorf("without it: %+v, %v", done, err)
	}
	var there int
	dbtest.OK(t, s.root.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE ID = ?", seen.Holders.List[0].ConnectionID).Scan(&there))
	if there != 1 {
		t.Error("the connection of the former holder was ended")
	}
	return beside
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

func TestCleanRemovesNoMoreThanItsLimit(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.makeTable("a", "b", "c")
		done, err := s.inspector(s.root).Clean(t.Context(), inspect.CleanUp{Unused: time.Hour, Limit: 2})
		if done.Removed != 2 || done.Done || err != nil {
			t.Errorf("it did %+v, %v", done, err)
		}
	})
}
