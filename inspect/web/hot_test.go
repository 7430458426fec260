package web

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock/inspect"
)

// rowLock is a lock that connections have waited for so long.
func rowLock(key string, seconds ...float64) inspect.Lock {
	l := inspect.Lock{Strategy: "row", Namespace: "shop", Key: key, Name: key, Stripe: -1}
	for i, s := range seconds {
		l.Waiters.List = append(l.Waiters.List, waiter(uint64(i+1), s))
	}
	return l
}

// moment is a point so many minutes after noon.
func moment(minutes float64) point {
	return point{Time: noon.UnixMilli() + int64(minutes*60_000)}
}

// TestWaitsAndLossesAreSummedUpByClass: for each range.
func TestWaitsAndLossesAreSummedUpByClass(t *testing.T) {
	p := &past{class: inspect.Classes("order:*")}
	lost := []loss{{at: time.Now(), keys: []string{"order:9", "x"}}, {at: time.Now().Add(-time.Hour), keys: []string{"order:9"}}}
	p.see(moment(0), at(0, rowLock("order:1", 3, 0.5), rowLock("order:2", 1), rowLock("calm")), lost, time.Second)
	p.see(moment(0.5), at(30, rowLock("order:1", 4)), nil, time.Second)
	now := at(2*3600, rowLock("order:7", 2, 2), rowLock("x", 1))
	p.see(moment(120), now, nil, 10*time.Second)
	hot := p.hot(moment(120).Time, now)
	recent := []heat{{Class: "order:*", Waited: 4000, Longest: 2000, Most: 2, Now: 2}, {Class: "other", Waited: 1000, Longest: 1000, Most: 1, Now: 1}}
	long := []heat{{Class: "order:*", Waited: 7500, Longest: 4000, Most: 3, Lost: 1, Now: 2}, {Class: "other", Waited: 1000, Longest: 1000, Most: 1, Lost: 1, Now: 1}}
	for i, want := range [][]heat{recent, recent, long} {
		if !slices.Equal(hot[i], want) {
			t.Errorf("within %d minutes: %+v, want %+v", ranges[i], hot[i], want)
		}
	}
	dbtest.Equal(t, "without classes a key is of %q", (&past{}).classOf(rowLock("order:1")), "order:1")
}

// TestPastIsBounded: what is remembered grows neither with the keys nor with the time, and
// nothing of what was waited for is forgotten within it.
func TestPastIsBounded(t *testing.T) {
	p := new(past)
	for m := range remembers + 50 {
		for half := range 2 {
			var locks []inspect.Lock
			for k := range 150 {
				locks = append(locks, rowLock(fmt.Sprintf("key %d of %d", k, m), 1))
			}
			p.see(moment(float64(m)+float64(half)/2), at(0, locks...), nil, time.Second)
		}
	}
	now := moment(remembers + 49)
	if got := len(p.minutes); got != remembers || len(p.points()) != got {
		t.Errorf("%d minutes are remembered, want %d", got, remembers)
	}
	for _, m := range p.minutes {
		if len(m.keys) > hottest {
			t.Fatalf("of a minute %d classes are remembered", len(m.keys))
		}
	}
	for i, of := range p.hot(now.Time, at(0)) {
		var waited int64
		for _, h := range of {
			waited += h.Waited
		}
		if want := int64(ranges[i]+1) * 300_000; len(of) > hottest || waited < want-300_000 || waited > want {
			t.Errorf("within %d minutes: %d classes, waited for %d ms", ranges[i], len(of), waited)
		}
	}
}

// TestMoreMayWaitThanAreSeen: where that is so of a lock, it is of the sums, too, and of all that was seen.
func TestMoreMayWaitThanAreSeen(t *testing.T) {
	p := new(past)
	unsure := rowLock("a", 1)
	unsure.Waiters.More = true
	now := at(60, rowLock("a", 1), rowLock("b", 1))
	p.see(moment(0), at(0, unsure), nil, time.Second)
	p.see(moment(1), now, nil, time.Second)
	for _, h := range p.hot(moment(1).Time, now)[0] {
		if h.More != (h.Class == "a") || h.NowMore {
			t.Errorf("when all are seen: %+v", h)
		}
	}
	for _, h := range p.hot(moment(0).Time, at(0, unsure))[0] {
		if h.NowMore != (h.Class == "a") {
			t.Errorf("when not all are: %+v", h)
		}
	}
	if v := newView(at(0, unsure), p.classOf); !v.WaitMore || !v.Point.More || v.Waiting != inspect.Value(1) {
		t.Errorf("of %v that wait it is said that there may be more: %v", v.Waiting, v.WaitMore)
	}
	if v := newView(now, p.classOf); v.WaitMore || v.Point.More {
		t.Errorf("of rows that are all seen it is said that there may be more")
	}
}
