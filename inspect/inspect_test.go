package inspect_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

var strategies = map[string]lockctx.Option{
	"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(),
}

func TestOneHolderAndFiveWaiters(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		for strategy, option := range strategies {
			key := "the-" + strategy
			s.acquire(s.process("root", "holder"), key, option)
			waiting := func() int {
				if l := find(look(t, i), strategy, key); l != nil {
					return len(l.Waiters.List)
				}
				return 0
			}
			since := s.queue(waiting, "root", key, 5, option)
			var snap *inspect.Snapshot
			var l *inspect.Lock
			dbtest.Soon(t, "all are shown", func() bool { // a waiter that asks again does not wait for a moment
				snap = look(t, i)
				l = find(snap, strategy, key)
				return l != nil && len(l.Holders.List) == 1 && len(l.Waiters.List) == 5
			})
			if l.Namespace != s.Name || l.Stripe != -1 || l.Slot != 0 {
				t.Errorf("%s: %+v", strategy, l)
			}
			programs := s.kind != plainMariaDB
			if h := l.Holders.List[0]; programs && h.Program != "holder" || strategy != "lease" && (h.ConnectionID == 0 || h.User != "root") || h.Shared {
				t.Errorf("%s: the holder is %+v", strategy, h)
			}
			var order []string
			for n, w := range l.Waiters.List {
				var i int
				if _, err := fmt.Sscanf(w.Program, "waiter-%d", &i); err == nil {
					order = append(order, w.Program)
				}
				if waited, known := w.Waited.Get(); !known || waited != w.Least || i > 0 && waited < snap.Time.Sub(since[i-1])-timing {
					t.Errorf("%s: waiter %d, since %v, is %+v", strategy, i, since, w)
				}
				if programs && (i == 0 || w.PID == 0) || w.ConnectionID == 0 || w.User != "root" || w.Host == "" {
					t.Errorf("%s: waiter %d is %+v", strategy, n+1, w)
				}
				if w.Least <= 0 || w.Least > 2*dbtest.Patience {
					t.Errorf("%s: waiter %d has waited for %v", strategy, n+1, w.Least)
				}
			}
			if !slices.IsSorted(order) && time.Since(since[0]) < 2*time.Second { // none has asked again
				t.Errorf("%s: the order is %v", strategy, order)
			}
			switch strategy {
			case "lease":
				if value(l.Token) != 1 || l.Remaining <= 0 || l.Remaining > 30*time.Second || l.Expires.Sub(snap.Time) > 31*time.Second || l.Expires.Before(snap.Time) {
					t.Errorf("the lease is %+v at %v", l, snap.Time)
				}
			case "row":
				if h := l.Holders.List[0]; value(h.Within) <= 0 || value(h.Within) > 2*dbtest.Patience || s.mysql() != !h.Since.IsZero() {
					t.Errorf("the row is held for %v, at least %v, in a transaction of %v", h.Since, h.Least, h.Within)
				}
			case "advisory":
				if l.Holders.List[0].Locks.Seen != 1 {
					t.Errorf("the connection has %v locks", l.Holders.List[0].Locks)
				}
			}
			if only := look(t, i, key, "free"); len(only.Locks) != 2 || find(only, strategy, key) == nil || find(only, "", "free") == nil {
				t.Errorf("%s: asked for the key: %+v", strategy, only.Locks)
			}
		}
	})
}

// gap is the gap about what; nil where there is none.
func gap(snap *inspect.Snapshot, what string) *inspect.Gap {
	for _, g := range snap.Gaps {
		if strings.Contains(g.What, what) {
			return &g
		}
	}
	return nil
}

func TestALockWithoutWaitersIsShownOrAGap(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.process("root", "holder")
		for strategy, option := range strategies {
			s.acquire(db, "the-"+strategy, option)
		}
		const unseen = "row locks that nobody waits for"
		snap := look(t, s.inspector(s.root))
		for first := time.Now(); !s.mysql() && gap(snap, unseen) == nil && time.Since(first) < dbtest.Patience; {
			snap = look(t, s.inspector(s.root))
		}
		want := []string{"lease"}
		if s.kind != plainMariaDB {
			want = append(want, "advisory")
		} else if g := gap(snap, "advisory locks that nobody waits for"); g == nil || g.Remedy != "INSTALL SONAME 'metadata_lock_info'" {
			t.Errorf("the gaps are %+v", snap.Gaps)
		}
		if s.mysql() {
			want = append(want, "row")
			if len(snap.Gaps) > 0 {
				t.Errorf("the gaps are %+v", snap.Gaps)
			}
		} else if gap(snap, unseen) == nil {
			t.Errorf("the gaps are %+v", snap.Gaps)
		}
		for strategy := range strategies {
			l := find(snap, strategy, "the-"+strategy)
			if slices.Contains(want, strategy) != (l != nil) || l != nil && (len(l.Holders.List) != 1 || len(l.Waiters.List) > 0) {
				t.Errorf("%s: %+v", strategy, l)
			}
		}
		asked := look(t, s.inspector(s.root), "the-advisory")
		if l := find(asked, "advisory", "the-advisory"); l == nil || len(l.Holders.List) != 1 {
			t.Errorf("asked for the advisory lock: %+v", asked)
		}
	})
}
