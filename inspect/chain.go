package inspect

import (
	"fmt"
	"slices"
	"strings"
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
	for i := range locks {
		for j := range locks[i].Holders.List {
			locks[i].Holders.List[j].Activity = p.doing(&locks[i], &locks[i].Holders.List[j])
		}
	}
	w := waits{make(map[uint64][]*Lock), make(map[process][]*Lock)}
	for i := range locks {
		w.add(&locks[i])
	}
	for i := range locks {
		for j := range locks[i].Holders.List {
			h := &locks[i].Holders.List[j]
			awaited, _ := w.of(&locks[i], h)
			for _, l := range awaited {
				h.WaitsFor = append(h.WaitsFor, l.label())
			}
		}
	}
}

// waits are the locks for which connections wait, and for which processes do.
type waits struct {
	connections map[uint64][]*Lock
	processes   map[process][]*Lock
}

func (w waits) add(l *Lock) {
	for i := range l.Waiters.List {
		c := &l.Waiters.List[i].Client
		if c.ConnectionID != 0 {
			w.connections[c.ConnectionID] = append(w.connections[c.ConnectionID], l)
		}
		if p, ok := c.process(); ok && !slices.Contains(w.processes[p], l) {
			w.processes[p] = append(w.processes[p], l)
		}
	}
}

// of returns the other locks for which the holder of l waits. byProcess says that this is
// known of its process only.
func (w waits) of(l *Lock, h *Holder) (awaited []*Lock, byProcess bool) {
	others := func(list []*Lock) []*Lock {
		return slices.DeleteFunc(slices.Clone(list), func(other *Lock) bool { return other == l })
	}
	if awaited = others(w.connections[h.ConnectionID]); len(awaited) > 0 {
		return awaited, false
	}
	p, ok := h.process()
	if busy := h.Activity != nil && h.Activity.Running; !ok || busy || h.Left {
		return nil, false
	}
	return others(w.processes[p]), true
}

// process identifies a process.
type process struct {
	program, host string
	pid           int
}

// process returns the process of a client. ok is false if the server does not tell it. What
// a lockOwner of the default form says is enough: host, process id and name.
func (c *Client) process() (p process, ok bool) {
	if _, pid := selfNamed(c.Program); pid != 0 {
		return process{program: c.Program}, true
	}
	host, _, _ := strings.Cut(c.Host, ":") // the port differs for each connection
	return process{c.Program, host, c.PID}, c.Program != "" && host != "" && c.PID != 0
}

// Link is one step of a chain of holders, each of which waits for the next.
type Link struct {
	Lock   *Lock
	Holder *Holder

	// ByProcess says that the holder before this one waits for Lock as far as its process
	// tells: one of its goroutines does, which may be another than the one that holds.
	ByProcess bool
}

// Chain returns why the waiters of a lock wait: its holder, the holder of the lock for
// which that one waits, and so on. The last one waits for no lock that is shown: what it
// does decides for all. Of several holders it takes the first, or one that waits itself.
// A chain that leads back to a lock in it ends there; the server breaks such deadlocks of
// row locks. The holder of a lease, or of an advisory lock, is linked to what its process
// waits for.
func (s *Snapshot) Chain(l *Lock) (chain []Link) {
	w := s.awaited()
	byProcess := false
	for l != nil && len(l.Holders.List) > 0 {
		if slices.ContainsFunc(chain, func(link Link) bool { return link.Lock == l }) {
			return chain
		}
		h := &l.Holders.List[0]
		for i := range l.Holders.List {
			if len(l.Holders.List[i].WaitsFor) > 0 {
				h = &l.Holders.List[i]
				break
			}
		}
		chain = append(chain, Link{l, h, byProcess})
		if len(h.WaitsFor) == 0 {
			return chain
		}
		var next []*Lock
		next, byProcess = w.of(l, h)
		if l = nil; len(next) > 0 {
			l = next[0]
		}
	}
	return chain
}

func (s *Snapshot) awaited() waits {
	w := waits{make(map[uint64][]*Lock), make(map[process][]*Lock)}
	for i := range s.Locks {
		w.add(&s.Locks[i])
	}
	for i := range s.beyond {
		w.add(&s.beyond[i])
	}
	return w
}
