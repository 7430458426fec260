package inspect

import (
	"fmt"
	"slices"
)

// label is what errors and chains call the lock.
func (l *Lock) label() string {
	switch {
	case l.Stripe >= 0:
		return fmt.Sprintf("stripe %d", l.Stripe)
	case l.Key != "":
		return l.Key
	}
	return l.Name
}

// link notes what holders do, and for which other locks they wait.
func (p *picture) link(locks []Lock) {
	waits := make(map[uint64][]string)
	for i := range locks {
		for _, w := range locks[i].Waiters {
			if w.ConnectionID != 0 {
				waits[w.ConnectionID] = append(waits[w.ConnectionID], locks[i].label())
			}
		}
	}
	for i := range locks {
		for j := range locks[i].Holders {
			h := &locks[i].Holders[j]
			h.Activity = p.activity[h.ConnectionID]
			if locks[i].Strategy == row && h.ConnectionID != 0 {
				h.WaitsFor = waits[h.ConnectionID]
			}
		}
	}
}

// Link is one step of a chain of holders, each of which waits for the next.
type Link struct {
	Lock   *Lock
	Holder *Holder
}

// Chain returns why the waiters of a lock wait: its holder, the holder of the lock for
// which that one waits, and so on. The last one waits for no lock that is shown: what it
// does decides for all. Of several holders it takes the first, or one that waits itself.
// A chain that leads back to a holder in it ends there; the server breaks such deadlocks.
func (s *Snapshot) Chain(l *Lock) (chain []Link) {
	var passed []uint64
	for l != nil && len(l.Holders) > 0 {
		h := &l.Holders[0]
		for i := range l.Holders {
			if len(l.Holders[i].WaitsFor) > 0 {
				h = &l.Holders[i]
				break
			}
		}
		if h.ConnectionID != 0 && slices.Contains(passed, h.ConnectionID) {
			return chain
		}
		chain, passed = append(chain, Link{l, h}), append(passed, h.ConnectionID)
		if len(h.WaitsFor) == 0 {
			return chain
		}
		l = s.awaitedBy(h.ConnectionID)
	}
	return chain
}

// awaitedBy is the lock for which a connection waits.
func (s *Snapshot) awaitedBy(conn uint64) *Lock {
	for i := range s.Locks {
		if slices.ContainsFunc(s.Locks[i].Waiters, func(w Waiter) bool { return w.ConnectionID == conn }) {
			return &s.Locks[i]
		}
	}
	return nil
}
