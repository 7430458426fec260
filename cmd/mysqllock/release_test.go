package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestALockIsBrokenOnlyByWhoMeansIt: then its holder has it no more. On MariaDB nobody sees a row
// lock for which nobody waits.
func TestALockIsBrokenOnlyByWhoMeansIt(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		for strategy, option := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(),
		} {
			t.Run(strategy, func(t *testing.T) {
				s := *s
				s.Database = s.For(t)
				key := "to break, " + strategy
				hold, err := mysqllock.Acquire(t.Context(), s.process("the holder"), key, option)
				dbtest.OK(t, err)
				next := make(chan error, 1)
				db := s.process("the next")
				go func() {
					hold, err := mysqllock.Acquire(t.Context(), db, key, option, lockctx.Wait(10*patience))
					if err == nil {
						err = hold.Release()
					}
					next <- err
				}()
				dbtest.Soon(t, "the next waits", func() bool {
					time.Sleep(150 * time.Millisecond)
					return s.waiters(key) == 1
				})
				alive := func() bool { return true }
				if strategy == "row" { // MySQL then tells the neighbour's thread of the lock
					_, alive = s.SplitPages("mysqllock", s.Name, key)
				}
				s.command("release", key).start().fails(1, "--force")
				s.command("release", key, "--force").start().fails(1, "--yes")
				s.command("release", key, "--force", "--yes", "--slot", "3").start().fails(1, "nobody ")
				select {
				case err := <-next:
					t.Fatalf("the next has got it: %v", err)
				default:
				}
				time.Sleep(150 * time.Millisecond)
				var done struct{ Released []jsonReleased }
				s.command("release", key, "--force", "--yes", "--json", "--reason", "it hangs").read(&done)
				if len(done.Released) != 1 || done.Released[0].Key != key || done.Released[0].Strategy != strategy ||
					(done.Released[0].Token == 2) != (strategy == "lease") || (len(done.Released[0].Killed) == 1) == (strategy == "lease") {
					t.Errorf("released: %+v", done)
				}
				if !alive() {
					t.Fatal("the connection of a neighbour was ended")
				}
				dbtest.OK(t, <-next)
				if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("the holder gives it back with %v", err)
				} else if strategy == "lease" && !strings.Contains(err.Error(), `the reason: "it hangs"`) {
					t.Errorf("the holder is not told the reason: %v", err)
				}
				if out := s.command("show", key).start().must(0); strategy == "lease" && !regexp.MustCompile(`with token 1 was taken away on .* UTC by \S+@\S+ in process \S+:mysqllock\S*: it hangs`).MatchString(out) {
					t.Errorf("show says %s", out)
				}
				time.Sleep(150 * time.Millisecond)
				s.command("release", key, "--force", "--yes").start().fails(1, "nobody ")
			})
		}
	})
}

// keep takes a lock, to be given back at the end, which may have been broken by then.
func (s *scratch) keep(key string, opts ...lockctx.Option) *mysqllock.Hold {
	s.T.Helper()
	hold, err := mysqllock.Acquire(s.T.Context(), s.process("the holder"), key, opts...)
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { _ = hold.Release() })
	return hold
}

// TestTryBreaksARowLockThatIsNotShown: nobody waits for it. It stays if its holder can be one of
// several connections, which are named then.
func TestTryBreaksARowLockThatIsNotShown(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		hold := s.keep("k")
		if s.Flavour == tempserver.MariaDB {
			dbtest.Soon(t, "the transaction is counted", func() bool {
				time.Sleep(150 * time.Millisecond) // MariaDB tells from a copy
				c := s.command("release", "k", "--force", "-y").start()
				c.must(1)
				return strings.Contains(c.errs.String(), "--try may find it")
			})
		}
		other := s.keep("other")
		if s.Flavour == tempserver.MariaDB {
			dbtest.Soon(t, "both are suspected", func() bool {
				time.Sleep(150 * time.Millisecond)
				c := s.command("release", "k", "--force", "-y", "--try").start()
				c.must(1)
				return strings.Contains(c.errs.String(), "of the connections ")
			})
			dbtest.OK(t, other.Release())
			time.Sleep(150 * time.Millisecond)
		}
		if out := s.command("release", "k", "--force", "-y", "--try").start().must(0); !strings.Contains(out, "row lock on k ended with connection") {
			t.Errorf("it says %s", out)
		}
		if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("the holder gives it back with %v", err)
		}
	})
}

// TestASharedRowIsNotTakenByAGuess: who shares it cannot be told on MariaDB, so nobody loses it,
// and it is not said that the lock has changed hands.
func TestASharedRowIsNotTakenByAGuess(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		s.keep("k", lockctx.Shared())
		s.keep("k", lockctx.Shared())
		db, ended := s.process("the writer"), make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			hold, err := mysqllock.Acquire(ctx, db, "k", lockctx.Wait(10*patience))
			if err == nil {
				err = hold.Release()
			}
			ended <- err
		}()
		dbtest.Soon(t, "the writer waits", func() bool {
			time.Sleep(150 * time.Millisecond)
			return s.waiters("k") == 1
		})
		time.Sleep(150 * time.Millisecond)
		c := s.command("release", "k", "--force", "-y").start()
		if s.Flavour == tempserver.MariaDB {
			c.fails(1, "does not tell which connection holds the lock; nothing was released; it is held by one or more of the connections ")
			cancel()
			<-ended
			return
		}
		c.must(0)
		dbtest.OK(t, <-ended)
		cancel()
	})
}

// TestASlotCanBeBrokenAlone: and all slots of a key only by who says so.
func TestASlotCanBeBrokenAlone(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		holds := make(map[int]*mysqllock.Hold)
		for range 3 {
			hold, err := mysqllock.Acquire(t.Context(), s.process("the holder"), "k", lockctx.Lease(time.Minute), lockctx.Slots(3))
			dbtest.OK(t, err)
			slot, _ := mysqllock.Slot(hold.Context())
			holds[slot] = hold
		}
		advisory, err := mysqllock.Acquire(t.Context(), s.process("of another lock"), "k", lockctx.Advisory())
		dbtest.OK(t, err)
		s.command("release", "k", "--force", "-y").start().fails(1, "held: 0, 1, 2; say which")
		if out := s.command("ls").start().must(0); !strings.Contains(out, "k [slot 0]") || !strings.Contains(out, "k [slot 2]") {
			t.Errorf("ls says %s", out)
		}
		for slot := range 2 {
			out := s.command("release", "k", "--force", "-y", "--slot", fmt.Sprint(slot)).start().must(0)
			if !strings.Contains(out, fmt.Sprintf("lease on k [slot %d] ended", slot)) || strings.Count(out, " ended") != 1 {
				t.Errorf("it says %s", out)
			}
		}
		dbtest.OK(t, advisory.Release())
		for slot, hold := range holds {
			if err := hold.Release(); errors.Is(err, mysqllock.ErrLost) != (slot < 2) {
				t.Errorf("slot %d is given back with %v", slot, err)
			}
		}
		for range 2 {
			s.keep("k", lockctx.Lease(time.Minute), lockctx.Slots(3))
		}
		if out := s.command("release", "k", "--force", "-y", "--all-slots").start().must(0); strings.Count(out, " ended") != 2 {
			t.Errorf("of two slots it says %s", out)
		}
	})
}
