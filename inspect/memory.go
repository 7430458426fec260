package inspect

import (
	"fmt"
	"sync"
	"time"
)

// memory is since when locks were seen to be held without a break, in the looks of an Inspector. That is
// a bound of their age which a single look does not have: the driver's signs of life hide for how
// long a connection was idle.
type memory struct {
	mu    sync.Mutex
	looks map[string]*lookBefore // by which keys were asked for
}

// mostLooks is how many questions are remembered: an application asks few different ones again and again.
const mostLooks = 16

// lookBefore is the look before at the same keys.
type lookBefore struct {
	time  time.Time          // the server's
	holds map[held]seenSince // since when, likewise
}

// seenSince is since when a lock was seen to be held.
type seenSince struct {
	time.Time
	left time.Duration // the most that a lease had left
}

// held is a lease with one token, or a row lock in one transaction.
type held struct {
	lock  id
	token uint64 // of a lease
	conn  uint64 // of a row lock
}

// follow completes the ages of locks, which were read between two moments.
func (m *memory) follow(f Filter, locks []Lock, now, end time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	asked := fmt.Sprintf("%q %v", f.Keys, f.AllNamespaces)
	before := m.looks[asked]
	if before == nil {
		before = new(lookBefore)
		if len(m.looks) == 0 || len(m.looks) >= mostLooks {
			m.looks = make(map[string]*lookBefore)
		}
	}
	if now.Before(before.time) { // another look has come before this one
		return
	}
	look := &lookBefore{now, make(map[held]seenSince)}
	for i := range locks {
		before.follow(&locks[i], now, end, look.holds)
	}
	m.looks[asked] = look
}

// follow completes the ages of the holders of a lock in the look after, and notes them in holds.
func (lb *lookBefore) follow(l *Lock, now, end time.Time, holds map[held]seenSince) {
	for i := range l.Holders.List {
		h := &l.Holders.List[i]
		key, same := held{lock: l.id()}, true
		switch token, _ := l.Token.Get(); {
		case l.Strategy == lease:
			key.token = token
		case l.Strategy == row && h.ConnectionID != 0:
			within, known := h.Within.Get()
			key.conn = h.ConnectionID
			same = known && now.Add(-within).Before(lb.time)
		default:
			continue
		}
		since := seenSince{end, l.Remaining}
		if h.Least > 0 {
			since.Time = now.Add(-h.Least)
		}
		if before, known := lb.holds[key]; known && same {
			since.left = max(since.left, before.left)
			if before.Before(since.Time) {
				since.Time = before.Time
			}
		}
		holds[key] = since
		if h.Since.IsZero() {
			h.Least = max(h.Least, now.Sub(since.Time))
		}
		if expected, _ := h.ExpectedTTL.Get(); l.Strategy == lease && h.Renewed.IsZero() && h.Since.IsZero() && !h.Left && since.left > expected {
			h.expect(Value(since.left), l.Remaining)
		}
	}
}
