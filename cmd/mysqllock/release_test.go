package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestRelease: a lock is broken only by who means it, and then its holder has it
// no more. On MariaDB nobody sees a row lock for which nobody waits.
func TestRelease(t *testing.T) {
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
				s.command("release", key).start().fails(1, "--force")
				s.command("release", key, "--force").start().fails(1, "--yes")
				s.command("release", key, "--force", "--yes", "--slot", "3").start().fails(1, "nobody is seen to hold")
				select {
				case err := <-next:
					t.Fatalf("the next has got it: %v", err)
				default:
				}
				time.Sleep(150 * time.Millisecond)
				var done struct{ Released []jsonReleased }
				s.command("release", key, "--force", "--yes", "--json").read(&done)
				if len(done.Released) != 1 || done.Released[0].Key != key || done.Released[0].Strategy != strategy ||
					(done.Released[0].Token == 2) != (strategy == "lease") || (len(done.Released[0].Killed) == 1) == (strategy == "lease") {
					t.Errorf("released: %+v", done)
				}
				dbtest.OK(t, <-next)
				if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("the holder gives it back with %v", err)
				}
				time.Sleep(150 * time.Millisecond)
				s.command("release", key, "--force", "--yes").start().fails(1, "nobody is seen to hold")
			})
		}
	})
}

// TestReleaseSlot: of the slots of a key one can be broken alone.
func TestReleaseSlot(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		holds := make(map[int]*mysqllock.Hold)
		for range 3 {
			hold, err := mysqllock.Acquire(t.Context(), s.process("the holder"), "k", lockctx.Lease(time.Minute), lockctx.Slots(3))
			dbtest.OK(t, err)
			slot, _ := mysqllock.Slot(hold.Context())
			holds[slot] = hold
		}
		if out := s.command("release", "k", "--force", "-y", "--slot", "1").start().must(0); !strings.Contains(out, "lease on k ended") {
			t.Errorf("it says %s", out)
		}
		for slot, hold := range holds {
			if err := hold.Release(); errors.Is(err, mysqllock.ErrLost) != (slot == 1) {
				t.Errorf("slot %d is given back with %v", slot, err)
			}
		}
	})
}
