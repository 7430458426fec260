package lease

import (
	"testing"
	"time"
)

// TestGrantsDoNotLookAtAllLeases: a grant has the leases looked at only where it is to be
// renewed before they are looked at anyway.
func TestGrantsDoNotLookAtAllLeases(t *testing.T) {
	l := &Locker{leases: make(map[*Lease]struct{}), wake: make(chan struct{}, 1), renewing: true}
	grant := func(ttl time.Duration) (woken bool) {
		s := &Lease{l: l, ttl: ttl}
		l.mu.Lock()
		l.leases[s] = struct{}{}
		l.schedule(s, time.Now(), ttl)
		l.mu.Unlock()
		select {
		case <-l.wake:
			return true
		default:
			return false
		}
	}
	if _, _, next := l.due(time.Now()); next != time.Hour {
		t.Errorf("with no lease the next look is in %v", next)
	}
	if !grant(time.Minute) {
		t.Error("the first lease would not be renewed in time")
	}
	_, _, next := l.due(time.Now())
	looks := 0
	for range 1000 {
		if grant(2 * time.Minute) {
			looks++
		}
	}
	if looks > 0 {
		t.Errorf("%d of 1000 grants had all leases looked at", looks)
	}
	clear(l.leases)
	l.due(time.Now()) // a look that finds none, since they were released meanwhile
	if grant(2 * time.Minute) {
		t.Error("another grant has all leases looked at, although the look for the first is yet to come")
	}
	if !grant(time.Second) {
		t.Error("a shorter lease would not be renewed in time")
	}
	if _, _, sooner := l.due(time.Now()); sooner >= next {
		t.Errorf("the next look is in %v, with a shorter lease in %v", next, sooner)
	}
}
