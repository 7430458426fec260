package inspect_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// try takes a snapshot with Filter.Try.
func try(t *testing.T, i *inspect.Inspector, f inspect.Filter) *inspect.Snapshot {
	t.Helper()
	f.Try = true
	snap, err := i.Snapshot(dbtest.Limited(t), f)
	dbtest.OK(t, err)
	return snap
}

// TestTryFindsThatSomebodyHoldsARow: who holds it may be unknown, but that somebody does is not,
// for any account on any server.
func TestTryFindsThatSomebodyHoldsARow(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		db := s.process("root", "holder")
		dbtest.OK(t, s.acquire(db, "free").Release())
		s.acquire(db, "leased", lockctx.Lease(time.Minute))
		poor, rich := s.inspector(s.open(s.user())), s.inspector(s.root)

		held := s.acquire(db, "one")
		if snap := look(t, poor); find(snap, "row", "one") != nil {
			t.Fatalf("an account without rights sees the lock anyway: %+v", snap)
		}
		// MariaDB tells of transactions from a copy that may be 100 ms old.
		dbtest.Soon(t, "it can be one connection only, and which is said", func() bool {
			l := find(try(t, rich, inspect.Filter{}), "row", "one")
			return l != nil && len(l.Holders.List) == 1 && l.Holders.List[0].ConnectionID != 0
		})
		s.acquire(db, "shared", lockctx.Shared())
		s.acquire(db, "slotted", lockctx.Slots(2))
		for name, i := range map[string]*inspect.Inspector{"without rights": poor, "with all rights": rich} {
			snap := try(t, i, inspect.Filter{})
			for _, key := range []string{"one", "shared", "slotted"} {
				if l := find(snap, "row", key); l == nil || len(l.Holders.List) != 1 {
					t.Errorf("%s: of %s is shown %+v", name, key, l)
				}
			}
			for _, key := range []string{"free", "leased"} {
				if l := find(snap, "row", key); l != nil {
					t.Errorf("%s: nobody has locked the row of %s: %+v", name, key, l)
				}
			}
			for _, g := range snap.Gaps {
				if g.Holders && strings.Contains(g.What, "row") {
					t.Errorf("%s: holders of row locks are still said to be missing: %+v", name, g)
				}
			}
			if snap := try(t, i, inspect.Filter{Keys: []string{"one", "free"}}); len(snap.Locks) != 2 || len(find(snap, "row", "one").Holders.List) != 1 || find(snap, "", "free") == nil {
				t.Errorf("%s: of two keys is shown %+v", name, snap.Locks)
			}
		}
		dbtest.OK(t, held.Release())
		s.acquire(db, "one", lockctx.NoWait()) // nothing is left locked
		s.acquire(db, "free", lockctx.NoWait())
	})
}

// TestWhatTryMayNotLockIsAGap: what it may not lock is a gap.
func TestWhatTryMayNotLockIsAGap(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		none := try(t, s.inspector(s.open("root")), inspect.Filter{})
		if gap(none, "which row locks") != nil {
			t.Errorf("without a table there is nothing to try: %+v", none.Gaps)
		}
		s.acquire(s.process("root", "holder"), "k")
		user := s.user()
		dbtest.Exec(t, s.root, "REVOKE SELECT, INSERT, UPDATE ON "+s.Name+".* FROM '"+user+"'@'%'")
		dbtest.Exec(t, s.root, "GRANT EXECUTE ON "+s.Name+".* TO '"+user+"'@'%'") // to be let in
		snap := try(t, s.inspector(s.open(user)), inspect.Filter{})
		if g := gap(snap, "which row locks"); g == nil || !g.Holders || !strings.Contains(g.Remedy, "GRANT SELECT, UPDATE ON") {
			t.Errorf("the gaps are %+v", snap.Gaps)
		}
	})
}

// TestTryKeepsNobodyFromALock: who waits is granted it all the same while somebody tries, and
// nobody fails but by NoWait.
func TestTryKeepsNobodyFromALock(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, i := s.process("root", "holder"), s.inspector(s.root)
		s.acquire(db, "k")
		stop, done := context.WithCancel(t.Context())
		tries := make(chan int, 1)
		go func() {
			n := 0
			for ; stop.Err() == nil; n++ {
				if _, err := i.Snapshot(t.Context(), inspect.Filter{Try: true}); err != nil {
					t.Error(err)
				}
			}
			tries <- n
		}()
		var refused atomic.Int64
		const rounds = 300
		for n := range rounds {
			opts := []lockctx.Option{lockctx.Wait(time.Minute)}
			if n%2 == 0 {
				opts = append(opts, lockctx.NoWait())
			}
			hold, err := mysqllock.Acquire(t.Context(), db, "wanted", opts...)
			switch {
			case err == nil:
				dbtest.OK(t, hold.Release())
			case n%2 == 0 && errors.Is(err, mysqllock.ErrLocked):
				refused.Add(1)
			default:
				t.Errorf("while somebody tries: %v", err)
			}
		}
		done()
		t.Logf("%d of %d that did not wait were refused, by %d looks", refused.Load(), rounds/2, <-tries)
	})
}
