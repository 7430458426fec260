package inspect_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAChainEndsAtTheProcessThatWaitsForNobody: a process that holds one lock waits for the next, of whatever
// strategies. Where the server tells no processes the chain has one step, and does not say that its holder waits for
// nobody.
func TestAChainEndsAtTheProcessThatWaitsForNobody(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{}, 3)
		started := 0
		defer func() {
			cancel()
			for range started {
				<-ended
			}
		}()
		all := s.inspector(s.root)
		waits := func(process, key string, option lockctx.Option) {
			t.Helper()
			db := s.process("root", process)
			started++
			go func() {
				defer func() { ended <- struct{}{} }()
				if h, err := mysqllock.Acquire(ctx, db, key, option, lockctx.Wait(2*dbtest.Patience)); err == nil {
					_ = h.Release()
				}
			}()
			dbtest.Soon(t, process+" waits", func() bool {
				for _, l := range look(t, all).Locks {
					if l.Key == key && len(l.Waiters.List) == 1 {
						return true
					}
				}
				return false
			})
		}
		s.acquire(s.process("root", "idler:1:sleep"), "three", lockctx.Lease(time.Minute))
		s.acquire(s.process("root", "middle:2:shopd"), "two", lockctx.Advisory())
		s.acquire(s.process("root", "first:3:shopd"), "one", lockctx.Lease(time.Minute))
		waits("middle:2:shopd", "three", lockctx.Lease(time.Minute))
		waits("first:3:shopd", "two", lockctx.Advisory())
		waits("victim:4:shopd", "one", lockctx.Lease(time.Minute))

		want := 3
		if s.kind == plainMariaDB {
			want = 1
		}
		for _, keys := range [][]string{nil, {"one"}} { // asked for alone, too
			s.checkChain(t, all, want, keys...)
		}
	})
}

// TestACircleOfProcessesIsCalledOne: two processes wait for each other, by a row lock and a lease, which
// neither the server nor a process sees. Where the server tells no processes it advises to end no
// connection, but says that the process may wait.
func TestACircleOfProcessesIsCalledOne(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		defer waiting.Wait()
		defer cancel()
		all := s.inspector(s.root)
		s.acquire(s.process("root", "one:1:shopd"), "a", lockctx.Row())
		s.acquire(s.process("root", "two:2:shopd"), "b", lockctx.Lease(time.Minute))
		for process, key := range map[string]string{"one:1:shopd": "b", "two:2:shopd": "a"} {
			db := s.process("root", process)
			option := map[string]lockctx.Option{"a": lockctx.Row(), "b": lockctx.Lease(time.Minute)}[key]
			waiting.Go(func() {
				if h, err := mysqllock.Acquire(ctx, db, key, option, lockctx.Wait(2*dbtest.Patience)); err == nil {
					_ = h.Release()
				}
			})
		}
		dbtest.Eventually(t, "the circle, or the doubt, is shown", func() error {
			snap := look(t, all)
			row := find(snap, "row", "a")
			if row == nil || len(row.Holders.List) != 1 {
				return fmt.Errorf("no holder: %+v", row)
			}
			circles, advice := snap.Circles(), row.Holders.List[0].Advice()
			if s.kind == plainMariaDB {
				if strings.Contains(advice, "KILL") || len(circles) > 0 {
					t.Fatalf("it says %q, and of %d circles", advice, len(circles))
				}
				if want := "its process may wait for another lock"; !strings.Contains(advice, want) {
					return fmt.Errorf("the advice is %q, want %q", advice, want)
				}
				return nil
			}
			if advice != "" {
				t.Errorf("of one who waits itself the advice is %q", advice)
			}
			if len(circles) != 1 {
				return fmt.Errorf("there are %d circles", len(circles))
			}
			const want = `the holder of "a" waits for "b", whose holder waits for "a", and it ends only when one of these waits does: break one of the locks`
			if got := circles[0].String(); !strings.Contains(got, want) || !circles[0].Has(at(snap, "lease", "b")) {
				t.Errorf("the circle is %s, want %s", got, want)
			}
			return nil
		})
	})
}

// at is the lock of the snapshot itself.
func at(snap *inspect.Snapshot, strategy, key string) *inspect.Lock {
	i := slices.IndexFunc(snap.Locks, func(l inspect.Lock) bool { return l.Strategy == strategy && l.Key == key })
	return &snap.Locks[i]
}

// TestWaitsThatMayEndAreNoCircle: they are new, another goroutine's connection works, or a slot may come free.
func TestWaitsThatMayEndAreNoCircle(t *testing.T) {
	client := func(pid int) inspect.Client {
		return inspect.Client{Program: fmt.Sprintf("web:%d:shopd", pid), ConnectionID: uint64(pid)}
	}
	lock := func(key string, holder, waiter int) inspect.Lock {
		waits := map[string][]string{"a": {"b"}, "b": {"a"}}[key]
		l := inspect.Lock{Strategy: "lease", Key: key, Name: key, Stripe: -1}
		l.Holders.List = []inspect.Holder{{Client: client(holder), WaitsFor: waits}}
		w := client(waiter)
		w.ConnectionID += 100
		l.Waiters.List = []inspect.Waiter{{Client: w, Least: 2 * time.Second}}
		return l
	}
	for name, test := range map[string]struct {
		change func(a *inspect.Lock)
		want   int
	}{
		"a circle":   {func(*inspect.Lock) {}, 1},
		"a new wait": {func(a *inspect.Lock) { a.Waiters.List[0].Least = time.Millisecond }, 0},
		"it works":   {func(a *inspect.Lock) { a.Holders.List[0].Activity = &inspect.Activity{Running: true} }, 0},
		"a slot":     {func(a *inspect.Lock) { a.Slotted = true }, 0},
		"a chain":    {func(a *inspect.Lock) { a.Waiters.List[0].Client = client(3) }, 0},
	} {
		snap := &inspect.Snapshot{Locks: []inspect.Lock{lock("a", 1, 2), lock("b", 2, 1)}}
		test.change(&snap.Locks[0])
		if got := len(snap.Circles()); got != test.want {
			t.Errorf("%s: there are %d circles, want %d", name, got, test.want)
		}
	}
}

// checkChain checks the chain of one.
func (s *scratch) checkChain(t *testing.T, all *inspect.Inspector, want int, keys ...string) {
	t.Helper()
	var snap *inspect.Snapshot
	var chain []inspect.Link
	dbtest.Soon(t, "the chain is shown", func() bool { // who waits asks anew now and then
		snap = look(t, all, keys...)
		l := find(snap, "lease", "one")
		if l == nil {
			return false
		}
		chain = snap.Chain(l)
		return len(chain) == want
	})
	var steps []string
	for i, link := range chain {
		steps = append(steps, fmt.Sprint(link.Lock.Key, " ", link.Holder.Program, " ", link.Holder.WaitsFor))
		if link.ByProcess != (i > 0) {
			t.Errorf("step %d is linked by its process: %v", i, link.ByProcess)
		}
	}
	wanted := []string{"one first:3:shopd [two]", "two middle:2:shopd [three]", "three idler:1:sleep []"}
	if want == 1 {
		wanted = []string{"one first:3:shopd []"}
	}
	if got := strings.Join(steps, "; "); got != strings.Join(wanted, "; ") {
		t.Errorf("asked for %q the chain is %s, want %s", keys, got, strings.Join(wanted, "; "))
	}
	if a := chain[len(chain)-1].Holder.Activity; a == nil || !a.Elsewhere {
		t.Errorf("the holder of a lease does %v", a)
	}
	if len(keys) > 0 && len(snap.Locks) != len(keys) {
		t.Errorf("asked for %q it shows %+v", keys, snap.Locks)
	}
}

// TestProcessesWithOneOwnerAreToldApart: those on other hosts may have the same lockOwner, and are
// told by host and process id.
func TestProcessesWithOneOwnerAreToldApart(t *testing.T) {
	client := func(host string, pid int) inspect.Client {
		return inspect.Client{ConnectionID: uint64(pid), Program: "web", Host: host, PID: pid}
	}
	lock := func(key string, holder inspect.Client, waits []string, waiters ...inspect.Client) inspect.Lock {
		l := inspect.Lock{Strategy: "advisory", Key: key, Name: key, Stripe: -1}
		l.Holders.List = []inspect.Holder{{Client: holder, WaitsFor: waits}}
		for _, w := range waiters {
			l.Waiters.List = append(l.Waiters.List, inspect.Waiter{Client: w})
		}
		return l
	}
	holder, other := client("10.0.0.1:4000", 1), inspect.Client{ConnectionID: 8, Program: "web", Host: "10.0.0.2:4000", PID: 1}
	for _, waiter := range []inspect.Client{{ConnectionID: 9, Program: "web", Host: "10.0.0.1:5000", PID: 1}, other, {Program: "web"}, {Program: "web", Host: "10.0.0.1"}} {
		snap := &inspect.Snapshot{Locks: []inspect.Lock{lock("a", holder, []string{"b"}), lock("b", client("10.0.0.3", 3), nil, waiter)}}
		want := 1
		if waiter.ConnectionID == 9 {
			want = 2
		}
		if chain := snap.Chain(&snap.Locks[0]); len(chain) != want {
			t.Errorf("with the waiter %+v the chain is %+v", waiter, chain)
		}
	}
}
