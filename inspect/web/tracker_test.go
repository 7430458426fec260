package web

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// at is a snapshot so many seconds after noon.
func at(seconds float64, locks ...inspect.Lock) *inspect.Snapshot {
	return &inspect.Snapshot{Time: noon.Add(time.Duration(seconds * float64(time.Second))), Locks: locks}
}

// leased is a lease that ends so many seconds after noon, seen at another moment.
func leased(token uint64, seen, ends float64, waiters ...inspect.Waiter) inspect.Lock {
	return inspect.Lock{
		Strategy: "lease", Namespace: "shop", Key: "k", Name: "k", Stripe: -1, Token: inspect.Value(token), Waiters: waiting(waiters...),
		Holders: held(inspect.Holder{Client: inspect.Client{Program: "batch"}}),
		Expires: at(ends).Time, Remaining: time.Duration((ends - seen) * float64(time.Second)),
	}
}

func held(by ...inspect.Holder) inspect.Seen[inspect.Holder] {
	return inspect.Seen[inspect.Holder]{List: by}
}

func waiting(list ...inspect.Waiter) inspect.Seen[inspect.Waiter] {
	return inspect.Seen[inspect.Waiter]{List: list}
}

func left(l inspect.Lock) inspect.Lock {
	l.Holders.List[0].Left = true
	return l
}

func waiter(conn uint64, seconds float64) inspect.Waiter {
	return inspect.Waiter{Client: inspect.Client{ConnectionID: conn}, Least: time.Duration(seconds * float64(time.Second))}
}

// forced is the snapshot with a lease that was taken away.
func forced(token uint64, snap *inspect.Snapshot) *inspect.Snapshot {
	snap.Forced = []inspect.Lock{{
		Strategy: "lease", Namespace: "shop", Key: "k", Name: "k", Stripe: -1,
		Forced: &inspect.Forced{Token: token, Account: "root@web-1", Process: "web-1:7:mysqllock", Reason: "hangs"},
	}}
	return snap
}

// TestALeaseIsLostThatRanOutOrWasTakenAway: and no other, and each once.
func TestALeaseIsLostThatRanOutOrWasTakenAway(t *testing.T) {
	tests := []struct {
		name  string
		snaps []*inspect.Snapshot
		want  int
	}{
		{"given back", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(1)}, 0},
		{"given back and taken", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(1, leased(2, 1, 31))}, 0},
		{"renewed", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(9, leased(1, 9, 30)), at(11, leased(1, 11, 41)), at(31, leased(1, 31, 51))}, 0},
		{"ran out", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(29.5, leased(1, 29.5, 30)), at(30.5), at(31.5)}, 1},
		{"ran out and was taken at once", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(29.5, leased(1, 29.5, 30)), at(30.5, leased(2, 30.5, 60))}, 1},
		{"ran out while it was looked for", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(29, leased(1, 29, 30)), at(29.9), at(31)}, 1},
		{"broken before it would have run out", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(28, leased(1, 28, 30)), at(29), at(31)}, 0},
		{"given back at the last moment", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(20, leased(1, 20, 30)), at(21)}, 0},
		{"a short one, given back", []*inspect.Snapshot{at(0, leased(1, 0, 1)), at(1, leased(1, 1, 1.7)), at(2)}, 0},
		{"nobody looked for long", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(100)}, 0},
		{"kept for MinHold", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(1, left(leased(1, 1, 3))), at(2.9, left(leased(1, 2.9, 3))), at(4)}, 0},
		{"broken by hand", []*inspect.Snapshot{at(0, leased(1, 0, 30)), at(20, leased(1, 20, 30)), at(21, leased(3, 21, 51))}, 0},
		{"taken away", []*inspect.Snapshot{at(0, leased(1, 0, 30)), forced(1, at(1, leased(3, 1, 31))), forced(1, at(2, leased(3, 2, 31)))}, 1},
		{"taken away before anybody looked", []*inspect.Snapshot{forced(1, at(0, leased(3, 0, 30))), forced(1, at(1, leased(3, 1, 30)))}, 0},
	}
	for _, test := range tests {
		tracker := newTracker()
		var lapsed []loss
		for _, snap := range test.snaps {
			lapsed = append(lapsed, tracker.follow(snap, 200*time.Millisecond)...)
		}
		if len(lapsed) != test.want {
			t.Errorf("%s: %d have run out, want %d", test.name, len(lapsed), test.want)
		}
		for _, l := range lapsed {
			if l.Key != "k" || l.Strategy != "lease" || l.Who != "batch" || l.Why == "" || time.Since(l.at) > time.Minute {
				t.Errorf("%s: %+v", test.name, l)
			}
		}
	}
}

// Who asks again has waited on, unless somebody was granted the lease meanwhile.
func TestWhoAsksAgainHasWaitedOn(t *testing.T) {
	tracker := newTracker()
	for i, step := range []struct {
		snap *inspect.Snapshot
		want []float64
	}{
		{at(0, leased(1, 0, 30, waiter(7, 0.5))), []float64{0.5}},
		{at(4, leased(1, 4, 30, waiter(7, 4.5), waiter(8, 1))), []float64{4.5, 1}},
		{at(5, leased(1, 5, 30, waiter(8, 2), waiter(7, 0.2))), []float64{2, 5.5}}, // 7 has asked again
		{at(9, leased(1, 9, 30, waiter(8, 0.5), waiter(7, 4.2))), []float64{6, 9.5}},
		{at(10, leased(2, 10, 40, waiter(7, 0.3))), []float64{0.3}},
		{at(11), nil},
		{at(12, leased(2, 12, 40, waiter(7, 0.1))), []float64{0.1}},
	} {
		tracker.follow(step.snap, 0)
		var got []float64
		for _, l := range step.snap.Locks {
			for _, w := range l.Waiters.List {
				got = append(got, w.Least.Seconds())
			}
		}
		if !slices.Equal(got, step.want) {
			t.Errorf("step %d: the waits are %v, want %v", i, got, step.want)
		}
	}
	row := inspect.Lock{Strategy: "row", Name: "k", Stripe: -1, Waiters: waiting(waiter(7, 3))}
	tracker.follow(at(20, row), 0)
	again := inspect.Lock{Strategy: "row", Name: "k", Stripe: -1, Waiters: waiting(waiter(7, 0.1))}
	if tracker.follow(at(21, again), 0); again.Waiters.List[0].Least != 100*time.Millisecond {
		t.Errorf("one who may have been granted the row has waited for %v", again.Waiters.List[0].Least)
	}
}

func TestACounterGrowsFromItsFirstKnownValue(t *testing.T) {
	n := inspect.Value[uint64]
	var unknown inspect.Known[uint64]
	var c counter
	for i, step := range []struct {
		now  inspect.Known[uint64]
		want uint64
	}{{unknown, 0}, {n(7), 0}, {n(7), 0}, {n(9), 2}, {unknown, 0}, {n(10), 1}, {n(3), 3}} {
		if got := c.grown(step.now); got != step.want {
			t.Errorf("step %d: grown by %d, want %d", i, got, step.want)
		}
	}
}

func TestAllLossesCountAndTheLatestAreKept(t *testing.T) {
	var l Losses
	if total, _, recent := l.list(); total != 0 || recent == nil {
		t.Errorf("before any: %d, %v", total, recent)
	}
	for i := range remembered + 5 {
		l.add(loss{Key: fmt.Sprint(i)})
	}
	total, _, recent := l.list()
	if total != remembered+5 || len(recent) != remembered || recent[0].Key != fmt.Sprint(remembered+4) {
		t.Errorf("%d in all, the last of %d is %+v", total, len(recent), recent[0])
	}
}

func TestAFullPageCountsWhatItLeavesOut(t *testing.T) {
	snap := at(0)
	for i := range maxLocks + 7 {
		l := inspect.Lock{Strategy: "row", Key: fmt.Sprintf("key-%04d", i), Name: fmt.Sprint(i), Stripe: -1, Holders: held(inspect.Holder{})}
		if i == maxLocks+6 {
			for n := range maxClients + 3 {
				l.Waiters.List = append(l.Waiters.List, waiter(uint64(n+1), float64(n)))
			}
		}
		snap.Locks = append(snap.Locks, l)
	}
	v := newView(snap, new(past).classOf)
	if len(v.Locks) != maxLocks || v.Unshown != 7 || v.Held != inspect.Value(maxLocks+7) || v.Waiting != inspect.Value(maxClients+3) || v.Longest != inspect.Value(int64(maxClients+2)*1000) {
		t.Errorf("%d locks are shown, %d not; %v are held, %v wait, %v ms", len(v.Locks), v.Unshown, v.Held, v.Waiting, v.Longest)
	}
	first := v.Locks[0] // whoever is waited for
	if first.Key != fmt.Sprintf("key-%04d", maxLocks+6) || len(first.Waiters) != maxClients || first.Waiting != maxClients+3 {
		t.Errorf("the first is %s, %d of its %d waiters are shown", first.Key, len(first.Waiters), first.Waiting)
	}
}

func TestARefChangesWithTheHolderOfItsLock(t *testing.T) {
	lock := func(conn, token uint64, strategy string) inspect.Lock {
		return inspect.Lock{Strategy: strategy, Namespace: "n", Name: "k", Token: inspect.Value(token), Holders: held(inspect.Holder{Client: inspect.Client{ConnectionID: conn}})}
	}
	if ref(lock(1, 1, "row")) == ref(lock(2, 1, "row")) || ref(lock(1, 1, "row")) == ref(lock(1, 1, "advisory")) {
		t.Error("a lock that another holds has the same ref")
	}
	if ref(lock(0, 1, "lease")) == ref(lock(0, 2, "lease")) || ref(lock(0, 1, "lease")) != ref(lock(5, 1, "lease")) {
		t.Error("a lease is not told by its token")
	}
	if id(lock(1, 1, "row")) != id(lock(2, 2, "row")) {
		t.Error("the id of a lock changes with its holder")
	}
	other := lock(1, 1, "row")
	other.Namespace, other.Name = "nk", ""
	if id(other) == id(lock(1, 1, "row")) {
		t.Error("two locks have the same id")
	}
}

func TestWhatCannotBePrintedIsEscaped(t *testing.T) {
	for s, want := range map[string]string{
		"":                       "",
		"product:42":             "product:42",
		"größe 日本":               "größe 日本",
		"<b>x</b> \"q\" \\":      "<b>x</b> \"q\" \\",
		"a\nb\x00":               `a\nb\x00`,
		"\xff\xfe":               `\xff\xfe`,
		"safe\u202egnp.exe":      `safe\u202egnp.exe`,
		"zero\u200bwidth":        `zero\u200bwidth`,
		"not\u00a0a plain space": `not\u00a0a plain space`,
	} {
		if got := printable(s); got != want {
			t.Errorf("%q is shown as %s, want %s", s, got, want)
		}
	}
}

// TestALeaseThatIsNotRenewedIsExplained: with what its holder does, if others wait, and also if nobody does.
func TestALeaseThatIsNotRenewedIsExplained(t *testing.T) {
	silent := leased(1, 0, 30)
	silent.Holders.List[0].Renewed, silent.Holders.List[0].TTL = inspect.Value(90*time.Second), inspect.Value(2*time.Minute)
	overdue := leased(1, 0, 50, waiter(7, 1))
	overdue.Holders.List[0].Unrenewed, overdue.Holders.List[0].ExpectedTTL = inspect.Value(100*time.Second), inspect.Value(150*time.Second)
	for want, l := range map[string]inspect.Lock{
		"its lease was not renewed when that was due: the program has ended, is frozen, cut off or too slow; the lease ends in 30s unless it is renewed": silent,
		"if its TTL is 2m30s, as far as earlier leases or looks tell, its first renewal was due after 50s: the program has ended, is frozen, cut off" +
			" or too slow, or has a MaxHold; the lease ends in 50s unless it is renewed; what its connection does is not shown": overdue,
		"": leased(1, 0, 30),
	} {
		dbtest.Equal(t, "it says %q", newView(at(0, l), new(past).classOf).Locks[0].Why, want)
	}
}
