package pool

import (
	"sync"
	"time"
)

// Budget is the most connections that several pools have together. A caller that finds
// no permit left gets that of an idle connection of another pool, which is closed;
// otherwise it queues.
//
// Callers that hold a lock for which others of the process wait go first, but for every
// third place. Among the rest it is first come, first served, with three exceptions: callers
// that wait in the server leave a quarter of the permits to the others, a connection that is
// released stays with its pool if that has a caller, unless the budget has not changed
// hands for a moment, and the last permit of a pool with Config.Keeps stays with it.
type Budget struct {
	killer *killer // nil if nobody kills what was abandoned; set before the first connection

	max      int
	reserved int // permits for pools with Config.Control
	blockMax int // how many connections may wait in the server at a time

	mu       sync.Mutex // guards what follows, and the fields of the pools that say so
	open     int        // permits taken: connections, with those being opened and closed
	controls int        // of them in pools with Config.Control
	blocked  int        // connections of callers that wait in the server
	pools    []*Pool
	queued   int       // callers in all queues
	inARow   int       // urgent callers that were served since the last other one
	arrivals uint64    // numbers the callers in the order of their arrival
	turned   time.Time // when a pool lost a connection that it had a caller for
}

// share is how many urgent callers go before one of the others.
const share = 2

// turnover is how often a pool loses a connection for which it has a caller itself.
const turnover = 10 * time.Millisecond

// NewBudget returns a budget of max connections, of which reserved are for pools with
// Config.Control only.
func NewBudget(maxConns, reserved int) *Budget {
	return &Budget{max: maxConns, reserved: reserved, blockMax: max(1, (maxConns-reserved)*3/4)}
}

// Max is the most connections.
func (b *Budget) Max() int { return b.max }

// rank is how urgent a caller is.
type rank int

const (
	urgent rank = iota // others wait for what the caller holds
	ordinary
	blocking // it is about to wait in the server
	ranks
)

// As says who asks for a connection.
type As struct {
	Urgent   bool          // others wait for what it holds: it goes first
	Waits    bool          // it is about to wait in the server for a lock, until [Conn.Unblocked]; ignored if it is urgent
	Prefer   *Conn         // is taken if it is idle and no caller queues; nil is none
	Patience time.Duration // how long it queues while nobody before it is served, and at least waits for one to be opened; 0 is for ever
}

func (as As) rank() rank {
	switch {
	case as.Urgent:
		return urgent
	case as.Waits:
		return blocking
	}
	return ordinary
}

// asker is a caller that queues for a connection.
type asker struct {
	rank       rank
	arrival    uint64
	start      time.Time
	ready      bool       // there was an idle connection when it came
	queued     bool       // false once it has been served
	prev, next *asker     // in its pool's queue
	got        chan *Conn // a connection, or nil for a permit with which to open one; buffered
}

// turn is when a caller was served.
type turn struct {
	arrival uint64
	at      time.Time
}

// askers is a queue of askers. The zero value is empty.
type askers struct {
	first, last *asker
	n           int
}

func (l *askers) push(a *asker) {
	if a.prev, a.next, a.queued = l.last, nil, true; l.last != nil {
		l.last.next = a
	} else {
		l.first = a
	}
	l.last = a
	l.n++
}

func (l *askers) remove(a *asker) {
	if a.prev != nil {
		a.prev.next = a.next
	} else {
		l.first = a.next
	}
	if a.next != nil {
		a.next.prev = a.prev
	} else {
		l.last = a.prev
	}
	a.prev, a.next, a.queued = nil, nil, false
	l.n--
}

// serve gives what there is to those who queue. The caller holds b.mu.
func (b *Budget) serve() {
	for b.queued > 0 {
		served := b.inARow >= share && b.serveNext(ordinary, blocking) ||
			b.serveNext(urgent, urgent) || b.serveNext(ordinary, blocking)
		if !served {
			return
		}
	}
}

// serveNext serves the first caller of the ranks from and to that can be. The caller holds
// b.mu.
func (b *Budget) serveNext(from, to rank) bool {
	for after := uint64(0); ; {
		var next *asker
		var of *Pool
		for _, p := range b.pools {
			for r := from; r <= to; r++ {
				if a := p.queue[r].first; a != nil && a.arrival > after && (next == nil || a.arrival < next.arrival) {
					next, of = a, p
				}
			}
		}
		if next == nil {
			return false
		}
		if of.serve(next) {
			return true
		}
		after = next.arrival
	}
}

// serve serves a caller that queues, or is about to. The caller holds b.mu.
func (p *Pool) serve(a *asker) bool {
	b := p.budget
	if p.closed || a.rank == blocking && b.blocked >= b.blockMax {
		return false
	}
	if len(p.idle) > 0 {
		p.leave(a)
		a.got <- p.lastIdle()
		return true
	}
	if p.open >= p.cfg.Max {
		return false
	}
	if b.room(p) {
		p.take()
		p.leave(a)
		a.got <- nil
		return true
	}
	c := b.victim(p, a.rank)
	if c == nil {
		return false
	}
	c.pool.drop()
	p.take()
	p.leave(a)
	go func() { // the permit is free when the connection is closed, and not before
		c.end()
		a.got <- nil
	}()
	return true
}

// leave takes a caller that is served out of the queue.
func (p *Pool) leave(a *asker) {
	now := time.Now()
	p.served[a.rank] = turn{a.arrival, now}
	if a.queued {
		p.queue[a.rank].remove(a)
		p.budget.queued--
		if !a.ready {
			p.waitTime += now.Sub(a.start)
		}
	}
	switch a.rank {
	case urgent:
		p.budget.inARow++
		return
	case blocking:
		p.budget.blocked++
	}
	p.budget.inARow = 0
}

// room reports whether p may take another permit. The caller holds b.mu.
func (b *Budget) room(p *Pool) bool {
	kept := 0 // permits that others are to have
	for _, other := range b.pools {
		if other != p && other.keeps && other.open == 0 {
			kept++
		}
	}
	if p.cfg.Control {
		return b.open+kept < b.max
	}
	return b.open+kept < b.max && b.open-b.controls+kept < b.max-b.reserved
}

// Shortage tells why a caller finds no permit: how many connections are in use, how many
// of these wait in the server, and how many permits nobody uses that are not for every pool.
func (b *Budget) Shortage() (inUse, blocked, reserved int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	controls := 0
	for _, p := range b.pools {
		switch {
		case p.cfg.Control:
			controls += p.open - len(p.idle)
		case p.keeps && p.open == len(p.idle):
			reserved++ // also if its connection is open
		default:
			inUse += p.open - len(p.idle)
		}
	}
	return inUse + max(0, controls-b.reserved), b.blocked, reserved + b.reserved
}

// victim takes the connection out of another pool that has been idle for the longest
// time, for a caller of p; nil if there is none. The caller holds b.mu.
func (b *Budget) victim(p *Pool, r rank) *Conn {
	var of *Pool
	for _, other := range b.pools {
		switch {
		case other == p || len(other.idle) == 0 || other.keeps && other.open == 1:
		case other.cfg.Control && !p.cfg.Control && b.controls <= b.reserved: // its permit is not for p
		case r != urgent && other.wanted() && time.Since(b.turned) < turnover:
		case of == nil || other.idle[0].since.Before(of.idle[0].since):
			of = other
		}
	}
	if of == nil {
		return nil
	}
	if of.wanted() {
		b.turned = time.Now()
	}
	c := of.idle[0]
	of.idle = append(of.idle[:0], of.idle[1:]...)
	return c
}

// wanted reports whether a caller queues that could have an idle connection of p. The
// caller holds the budget's mutex.
func (p *Pool) wanted() bool {
	return p.queue[urgent].n+p.queue[ordinary].n > 0 ||
		p.queue[blocking].n > 0 && p.budget.blocked < p.budget.blockMax
}

// take and drop count a permit of the budget that p has. The caller holds the budget's
// mutex.
func (p *Pool) take() {
	p.open++
	p.budget.open++
	p.keeps = p.cfg.Keeps
	if p.cfg.Control {
		p.budget.controls++
	}
}

func (p *Pool) drop() {
	p.open--
	p.budget.open--
	if p.cfg.Control {
		p.budget.controls--
	}
	if p.closed && p.open == 0 && p.empty != nil {
		close(p.empty)
		p.empty = nil
	}
}
