package main

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTop: locks are told by the class of their keys, those for which somebody waits first.
func TestTop(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		hold := func(key string) {
			h, err := mysqllock.Acquire(context.Background(), s.process("the holder"), key, lockctx.Advisory())
			dbtest.OK(t, err)
			t.Cleanup(func() { dbtest.OK(t, h.Release()) })
		}
		for _, key := range []string{"a:1", "a:2", "b:1", "c"} {
			hold(key)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		db := s.process("the waiter")
		go func() {
			defer close(done)
			if h, err := mysqllock.Acquire(ctx, db, "b:1", lockctx.Advisory(), lockctx.Wait(time.Hour)); err == nil {
				_ = h.Release()
			}
		}()
		t.Cleanup(func() { cancel(); <-done })
		var snap struct {
			Locks   []jsonLock
			Classes []jsonHeat
		}
		dbtest.Soon(t, "the waiter is shown", func() bool {
			s.command("ls", "--json", "--top", "--class", "a:*,b:*").read(&snap)
			return slices.ContainsFunc(snap.Classes, func(h jsonHeat) bool { return h.Waiting > 0 })
		})
		if snap.Classes[0].Longest <= 0 {
			t.Errorf("the longest wait is of %v ms", snap.Classes[0].Longest)
		}
		snap.Classes[0].Longest = 0
		if want := []jsonHeat{{"b:*", 1, 1, 1, 0}, {"a:*", 2, 2, 0, 0}, {"other", 1, 1, 0, 0}}; !slices.Equal(snap.Classes, want) || snap.Locks != nil {
			t.Errorf("the classes are %+v, want %+v", snap, want)
		}
		var lines []string
		dbtest.Soon(t, "the waiter is shown to people", func() bool { // it asks anew now and then
			lines = strings.Split(strings.TrimSpace(s.command("ls", "--top").start().must(0)), "\n")
			return len(lines) > 4 && strings.Contains(lines[1], "the holder")
		})
		for i, want := range []string{"KEYS LOCKS HELD WAITING LONGEST WAIT FOR", "b:1 1 1 1", "a:1 1 1 0", "a:2 1 1 0", "c 1 1 0"} {
			if got := strings.Join(strings.Fields(lines[i]), " "); !strings.HasPrefix(got, want) {
				t.Errorf("line %d is %q, want %q", i, got, want)
			}
		}
		s.command("ls", "--class", "a:*").start().fails(exitFailure, "--top")
	})
}
