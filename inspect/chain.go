package inspect

import (
	"fmt"
	"slices"
	"strconv"
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
// A chain that leads back to a lock in it ends there: see [Snapshot.Circles]. The holder of a lease, or of an
// advisory lock, is linked to what its process waits for.
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

// Circle is a circle of waits: the holder of each lock in it waits for the next lock, and that of the last
// for the first. The server, and each process, break the circles that they see whole. One over several
// strategies and processes ends only when one of the waits does.
type Circle []Link

// Has reports whether the lock is in the circle.
func (c Circle) Has(l *Lock) bool {
	return slices.ContainsFunc(c, func(link Link) bool { return link.Lock == l })
}

// String says what the circle is, and what ends it.
func (c Circle) String() string {
	var b strings.Builder
	doubt := ""
	b.WriteString("a circle of waits: ")
	for i, link := range c {
		holder := "whose holder"
		if i == 0 {
			holder = "the holder of " + strconv.Quote(link.Lock.label())
		}
		fmt.Fprintf(&b, "%s waits for %q, ", holder, c[(i+1)%len(c)].Lock.label())
		if link.ByProcess {
			doubt = ". So much the processes tell: it is none if one of them still works under its lock in another goroutine"
		}
	}
	return b.String() + "and it ends only when one of these waits does: break one of the locks" + doubt
}

// Circles returns the circles whose waits have each lasted for a second. Link.ByProcess says that the holder
// of the lock before waits as far as its process tells: then it is no circle if the process still works under
// that lock in another goroutine. Of several circles through one lock not all are returned.
func (s *Snapshot) Circles() (circles []Circle) {
	w := s.awaited()
	var path []Link
	visited := make(map[*Lock]bool)
	var visit func(l *Lock, byProcess bool)
	visit = func(l *Lock, byProcess bool) {
		if at := slices.IndexFunc(path, func(link Link) bool { return link.Lock == l }); at >= 0 {
			circle := Circle(slices.Clone(path[at:]))
			circle[0].ByProcess = byProcess
			circles = append(circles, circle)
			return
		}
		if visited[l] || l.Slotted { // who waits for a slot may get another one
			return
		}
		visited[l] = true
		for i := range l.Holders.List {
			h := &l.Holders.List[i]
			path = append(path, Link{l, h, byProcess})
			next, byProcess := w.of(l, h)
			for _, n := range next {
				if n.awaitedLong(h) {
					visit(n, byProcess)
				}
			}
			path = path[:len(path)-1]
		}
	}
	for i := range s.Locks {
		visit(&s.Locks[i], false)
	}
	return circles
}

// awaitedLong reports whether h, or its process, has waited for the lock for so long that it is no
// passing moment.
func (l *Lock) awaitedLong(h *Holder) bool {
	process, known := h.process()
	return slices.ContainsFunc(l.Waiters.List, func(w Waiter) bool {
		waiting, ok := w.process()
		return w.Least >= calm && (w.ConnectionID == h.ConnectionID && h.ConnectionID != 0 || known && ok && waiting == process)
	})
}
