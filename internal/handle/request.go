package handle

import (
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// Request is what to ask the locker for, and what it is for.
type Request struct {
	rowlock.Request
	Budget
	Places []Place
	Seen   *Observation
}

// Now returns the request with what is left of its wait.
func (r Request) Now() rowlock.Request {
	r.Wait = r.Left()
	return r.Request
}

// Requests says what to ask the locker for, one request after the other.
func (k *Handle) Requests(l *Locks, by Caller, wait Budget, w Wanted) (requests []Request) {
	plain := Request{Budget: wait}
	if len(w.Rows) > 0 {
		r := plain
		r.Waiting = k.WaitingFor(by, Sought{l, l.line, w.Rows})
		r.Places = w.Rows
		r.Label = strategy.Label(bare(w.Rows))
		r.Keys = inLine(w.Rows)
		requests = append(requests, r)
	}
	for _, p := range w.Slots {
		r := plain
		r.Waiting = k.WaitingFor(by, Sought{})
		r.Places = []Place{p}
		r.Label = p.Key
		r.Slots = p.SlotRows()
		requests = append(requests, r)
	}
	return requests
}
