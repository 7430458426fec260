package pool

import (
	"context"
	"database/sql/driver"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/socket"
)

// Budget is the most connections that several pools have together. If no permit is left, a caller gets the permit of an idle
// connection of another pool, which is closed for that; otherwise the caller queues.
//
// Callers that hold a lock for which others of the process wait go first, but for every third place. All others are served
// first come, first served, with two exceptions. Callers that wait in the server leave a quarter of the permits to the others,
// and two at least. And a connection that is released stays with its pool if that has a caller, unless the budget has not
// moved a permit from pool to pool for a moment.
//
// Some permits are kept: for pools with Config.Control as many as are reserved, and one for each pool with Config.Keeps. Other
// pools have no connection in use on these permits: see allows.
type Budget struct {
	killer *socket.Killer // kills abandoned statements; nil if nobody does; set before the first connection

	max      int
	reserved int // permits for pools with Config.Control
	keeping  int // pools with Config.Keeps, also if they are not made yet
	blockMax int // how many connections may wait in the server at a time

	mu       sync.Mutex // guards the fields below, and the fields of the pools that say so
	taken    int        // permits taken: connections, with those being opened and closed
	controls int        // those of open that are in pools with Config.Control
	blocked  int        // connections of callers that wait in the server
	pools    []*Pool
	queued   int       // callers in all queues
	inARow   int       // urgent callers that were served since the last other one
	arrivals uint64    // how many callers have come; numbers them in their order
	turned   time.Time // when a pool last lost a connection for which it had a caller
}

// share is how many urgent callers go before one other caller.
const share = 2

// turnover is how often a pool loses a connection for which it has a caller itself.
const turnover = 10 * time.Millisecond

// NewBudget returns a budget of maxConns connections. reserved of them are for pools with Config.Control only, and one is kept for
// each of keeping pools with Config.Keeps.
func NewBudget(maxConns, reserved, keeping int) *Budget {
	usable := maxConns - reserved - keeping
	// A caller that holds a lock and a connection may wait for another caller that holds a lock and needs a connection: so two
	// are left, if there are so many.
	return &Budget{max: maxConns, reserved: reserved, keeping: keeping, blockMax: max(1, min(usable*3/4, usable-2))}
}

// Max returns the most connections.
func (b *Budget) Max() int { return b.max }

// KillClosed kills connections of the budget that are closed while the server is busy with their statements. cfg is for the pool,
// of one connection, that is opened when there is something to kill. stop kills what has gathered, and closes that pool.
func (b *Budget) KillClosed(cfg Config) (stop func()) {
	cfg.Budget, cfg.Max, cfg.Control = b, 1, true
	p := New(cfg)
	b.killer = socket.NewKiller(func(ctx context.Context, kill func(driver.Conn, *socket.Group)) {
		if c, err := p.Acquire(ctx); err == nil {
			defer c.Release()
			kill(c.Conn, c.sockets)
		}
	})
	return func() {
		b.killer.Close()
		p.Close()
	}
}

// serve gives connections and permits to the callers that queue, as far as there are any. The caller holds b.mu.
func (b *Budget) serve() {
	for b.queued > 0 {
		served := b.inARow >= share && b.serveNext(ordinary, blocking) ||
			b.serveNext(urgent, urgent) || b.serveNext(ordinary, blocking)
		if !served {
			return
		}
	}
}

// serveNext serves the first caller that can be served, of the ranks first, last and between. It reports whether there was one.
// The caller holds b.mu.
func (b *Budget) serveNext(first, last rank) bool {
	for after := uint64(0); ; {
		var next *asker
		var owner *Pool
		for _, p := range b.pools {
			for r := first; r <= last; r++ {
				if a := p.nextAsker(r); a != nil && a.arrival > after && (next == nil || a.arrival < next.arrival) {
					next, owner = a, p
				}
			}
		}
		if next == nil {
			return false
		}
		if owner.serveCaller(next) {
			return true
		}
		after = next.arrival
	}
}

// nextAsker returns the first caller of rank r that may have a connection by Config.Max; nil if there is none. The caller of
// nextAsker holds the budget's mutex.
func (p *Pool) nextAsker(r rank) *asker {
	queue := &p.queue[r]
	if p.mayHave(false) {
		return queue.first
	}
	if queue.beside == 0 {
		return nil
	}
	a := queue.first
	for !a.beside {
		a = a.next
	}
	return a
}

// serveCaller serves a caller that queues, or is about to. The caller holds b.mu.
func (p *Pool) serveCaller(a *asker) bool {
	b := p.budget
	if p.closed || !b.allows(p, a.rank) {
		return false
	}
	if len(p.idle) > 0 {
		p.dequeue(a)
		a.got <- p.lastIdle()
		return true
	}
	if b.mayOpen(p) {
		p.takePermit()
		p.dequeue(a)
		a.got <- nil
		return true
	}
	c := b.victim(p, a.rank)
	if c == nil {
		return false
	}
	c.pool.dropPermit()
	p.takePermit()
	p.dequeue(a)
	go func() { // the permit is free only when the connection is closed
		c.end()
		a.got <- nil
	}()
	return true
}

// limited returns how many permits count for Config.Max. The caller holds the budget's mutex.
func (p *Pool) limited() int { return p.permits - len(p.idle) - p.beside }

// mayHave reports whether Config.Max allows one more connection in use; beside says that the caller is As.Beside. The caller
// holds the budget's mutex.
func (p *Pool) mayHave(beside bool) bool { return beside || p.limited() < p.cfg.Max }

// Spare reports whether callers may occupy connections that they cannot use yet: the pool shares no budget, and less than half of
// Config.Max connections are in use.
func (p *Pool) Spare() bool {
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	return !p.bounded && 2*p.limited() < p.cfg.Max
}

// dequeue removes a caller that is served from the queue.
func (p *Pool) dequeue(a *asker) {
	now := time.Now()
	if a.beside {
		p.beside++
	}
	p.served[a.rank] = service{a.arrival, now}
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
		p.block()
	}
	p.budget.inARow = 0
}

// counts returns the number of connections in use, how many of them are in pools with Config.Control, and how many permits are
// kept for pools that do not use them now. The caller holds b.mu.
func (b *Budget) counts() (inUse, controls, kept int) {
	inUse, controls, kept = b.taken, b.controls, b.keeping
	for _, p := range b.pools {
		inUse -= len(p.idle)
		switch {
		case p.cfg.Control:
			controls -= len(p.idle)
		case p.keeps && p.usesKept():
			kept--
		}
	}
	return inUse, controls, kept + max(0, b.reserved-controls)
}

// usesKept reports whether the pool uses the permit that is kept for it: it has a connection in use that does not wait in the
// server. The user of a connection that waits in the server may wait for a caller that needs the permit. The caller holds the
// budget's mutex.
func (p *Pool) usesKept() bool { return p.permits-len(p.idle) > p.blocked }

// allows reports whether p may have one more connection in use, for a caller of rank r. The
// caller holds b.mu.
func (b *Budget) allows(p *Pool, r rank) bool {
	if r == blocking && b.blocked >= b.blockMax {
		return false
	}
	inUse, controls, kept := b.counts()
	if p.cfg.Control && controls < b.reserved || p.keeps && !p.usesKept() && r != blocking {
		kept-- // for this caller
	}
	return inUse+kept < b.max
}

// mayOpen reports whether p may open a connection beside all that are open. Reserved permits are not taken by idle connections of
// other pools, since a KILL cannot wait until such a connection has ended. The caller holds b.mu.
func (b *Budget) mayOpen(p *Pool) bool {
	return b.taken < b.max && (p.cfg.Control || b.taken-b.controls < b.max-b.reserved)
}

// Shortage tells why a caller finds no permit: how many connections are in use, how many of these wait in the server, and how many
// permits are not for every pool. The last are the reserved permits, in use or not, and the permits kept for pools that do not
// use them now.
func (b *Budget) Shortage() (inUse, blocked, reserved int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.shortage()
}

// shortage is Shortage for a caller that holds b.mu.
func (b *Budget) shortage() (inUse, blocked, reserved int) {
	inUse, controls, kept := b.counts()
	controls = min(controls, b.reserved)
	return inUse - controls, b.blocked, kept + controls
}

// victim removes from another pool the connection that has been idle for the longest time, and returns it, for a caller of p;
// nil if there is none. The caller holds b.mu.
func (b *Budget) victim(p *Pool, r rank) *Conn {
	var owner *Pool
	for _, other := range b.pools {
		switch {
		case other == p || len(other.idle) == 0 || other.keeps && len(other.idle) == 1 && !other.usesKept():
		case other.cfg.Control && !p.cfg.Control && b.controls <= b.reserved: // its permit is not for p
		case r != urgent && other.wanted() && time.Since(b.turned) < turnover:
		case owner == nil || other.idle[0].since.Before(owner.idle[0].since):
			owner = other
		}
	}
	if owner == nil {
		return nil
	}
	if owner.wanted() {
		b.turned = time.Now()
	}
	c := owner.idle[0]
	owner.idle = append(owner.idle[:0], owner.idle[1:]...)
	return c
}

// wanted reports whether a caller queues that could have an idle connection of p. The caller of wanted holds the budget's mutex.
func (p *Pool) wanted() bool {
	return p.queue[urgent].n+p.queue[ordinary].n > 0 ||
		p.queue[blocking].n > 0 && p.budget.blocked < p.budget.blockMax
}

// block and unblock count a connection whose user waits in the server. The caller holds the
// budget's mutex.
func (p *Pool) block() {
	p.blocked++
	p.budget.blocked++
}

func (p *Pool) unblock() {
	p.blocked--
	p.budget.blocked--
}

// takePermit and dropPermit count a permit of the budget that p has. The caller holds the budget's
// mutex.
func (p *Pool) takePermit() {
	p.permits++
	p.budget.taken++
	if p.cfg.Control {
		p.budget.controls++
	}
}

func (p *Pool) dropPermit() {
	p.permits--
	p.budget.taken--
	if p.cfg.Control {
		p.budget.controls--
	}
	p.checkEmpty()
}

// uncountBeside counts a permit less that is beside.
func (p *Pool) uncountBeside() {
	p.beside--
	p.checkEmpty()
}

// checkEmpty ends the wait of Close if the pool is closed and has no connection left but those beside connections of
// database/sql: that closes them when it has done with them. The caller holds the budget's mutex.
func (p *Pool) checkEmpty() {
	if p.closed && p.permits == p.beside && p.empty != nil {
		close(p.empty)
		p.empty = nil
	}
}
