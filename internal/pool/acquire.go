package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// As describes the caller that asks for a connection.
type As struct {
	Urgent   bool          // others wait for what the caller holds: it goes first
	Waits    bool          // the caller is about to wait in the server for a lock, until [Conn.Unblocked]; ignored if it is urgent
	Beside   bool          // the caller has a connection of database/sql: that bounds such callers, and Config.Max does not
	Prefer   *Conn         // the connection to take if it is idle and no caller queues; nil for none
	Patience time.Duration // how long the caller queues while nobody before it is served, and waits for an opening at least; 0 for ever
}

func (a As) rank() rank {
	switch {
	case a.Urgent:
		return urgent
	case a.Waits:
		return blocking
	}
	return ordinary
}

// Acquire returns a connection that was alive a moment ago, and its turn. It waits for a connection until ctx ends. The
// caller must call Release or Destroy on the connection. After Close, Acquire returns lockerr.ErrClosed.
func (p *Pool) Acquire(ctx context.Context) (*Conn, error) { return p.AcquireAs(ctx, As{}) }

// AcquireAs is Acquire for the caller that as describes. If the caller's patience, or ctx, ends the wait, the error matches
// lockerr.ErrExhausted if all connections are in use, and lockerr.ErrNoAnswer if a connection was being opened; and it
// matches the cause of ctx. A bare pool returns ctx.Err() to callers without a patience, as the plain driver does.
func (p *Pool) AcquireAs(ctx context.Context, as As) (c *Conn, err error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if p.cfg.Bare && as.Patience == 0 {
		defer func() {
			if err != nil && ctx.Err() != nil {
				err = ctx.Err()
			}
		}()
	}
	r := as.rank()
	if c = p.acquireIdle(as); c == nil {
		c, err = p.queueUp(ctx, as)
	}
	if c != nil {
		_ = c.AwaitTurn(context.Background()) // at most a ping of its last user is running
		if !p.usable(ctx, c) {
			c.end()
			c.EndTurn()
			c = nil
		}
	}
	if err == nil && c == nil {
		c, err = p.connectWithin(ctx, as)
	}
	if err != nil {
		return nil, err
	}
	c.beside = as.Beside
	if r == blocking {
		c.blocks.Store(true)
	}
	return c, nil
}

// acquireIdle returns an idle connection if nobody queues, and the preferred one if that is idle; nil otherwise.
func (p *Pool) acquireIdle(as As) *Conn {
	r, preferred := as.rank(), as.Prefer
	b := p.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(p.idle) == 0 || b.queued > 0 || !p.mayHave(as.Beside) || !b.allows(p, r) {
		return nil
	}
	if as.Beside {
		p.beside++
	}
	if r == blocking {
		p.block()
	}
	p.acquired++
	if at := slices.Index(p.idle, preferred); at >= 0 {
		p.idle = slices.Delete(p.idle, at, at+1)
		return preferred
	}
	return p.lastIdle()
}

// lastIdle removes the idle connection that was used last from the idle ones, and returns it. The caller holds the budget's
// mutex.
func (p *Pool) lastIdle() *Conn {
	last := len(p.idle) - 1
	c := p.idle[last]
	p.idle[last] = nil
	p.idle = p.idle[:last]
	return c
}

// usable reports whether an idle connection can be used.
func (p *Pool) usable(ctx context.Context, c *Conn) bool {
	if p.cfg.Bare { // database/sql does the same
		return !errors.Is(basedriver.Reset(ctx, c.Conn), driver.ErrBadConn) && c.Valid()
	}
	return c.Silence() < p.cfg.Idle && c.Fresh(ctx)
}

// queueUp waits in the queue. It returns an idle connection, or nil for a permit with which to open a connection.
func (p *Pool) queueUp(ctx context.Context, as As) (*Conn, error) {
	b, r, patience := p.budget, as.rank(), as.Patience
	b.mu.Lock()
	if p.closed {
		b.mu.Unlock()
		return nil, lockerr.ErrClosed
	}
	b.arrivals++
	p.acquired++
	a := &asker{rank: r, beside: as.Beside, arrival: b.arrivals, start: time.Now(), ready: len(p.idle) > 0, got: make(chan *Conn, 1)}
	p.queue[r].push(a)
	b.queued++
	b.serve()
	if a.ready = a.ready && !a.queued; !a.ready {
		p.waited++
	}
	b.mu.Unlock()
	select {
	case c := <-a.got:
		return c, nil
	default:
	}
	var timer *time.Timer
	var over <-chan time.Time // nil, so never, for a caller without a patience
	if patience > 0 {
		timer = time.NewTimer(patience)
		defer timer.Stop()
		over = timer.C
	}
	for waits := true; waits; {
		select {
		case c := <-a.got:
			return c, nil
		case <-ctx.Done():
			waits = false
		case <-p.ctx.Done():
			waits = false
		case <-over:
			left := patience - p.stuckFor(a)
			waits = left > 0
			timer.Reset(left)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.queued {
		p.queue[r].remove(a)
		b.queued--
		p.acquired--
		p.waitTime += time.Since(a.start)
	} else { // the caller was served at the same moment
		p.uncount(as)
		b.serve()
		go p.returnLate(a)
	}
	if err := p.stopped(ctx); err != nil {
		return nil, err
	}
	return nil, p.exhausted(context.Cause(ctx))
}

// stuckFor returns for how long a has queued without moving up: nobody was served who came before it or goes first.
func (p *Pool) stuckFor(a *asker) time.Duration {
	b := p.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	moved := a.start
	for _, other := range b.pools {
		for r, last := range other.served {
			if (rank(r) == urgent || last.arrival <= a.arrival) && last.at.After(moved) {
				moved = last.at
			}
		}
	}
	return time.Since(moved)
}

// returnLate gives back the connection or permit of a caller that has gone.
func (p *Pool) returnLate(a *asker) {
	if c := <-a.got; c != nil {
		p.put(c)
		return
	}
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	p.dropPermit()
	p.budget.serve()
}

// stopped returns the error of a caller that was stopped before it had waited for too long; nil for any other caller.
func (p *Pool) stopped(ctx context.Context) error {
	if p.ctx.Err() != nil {
		return lockerr.ErrClosed
	}
	if cause := context.Cause(ctx); errors.Is(cause, lockerr.ErrClosed) || errors.Is(cause, lockerr.ErrDeadlock) {
		return cause
	}
	return nil
}

// exhausted returns the error of a caller that gives up waiting, since all connections are in use that there may be. ended is
// why its context has ended; nil if its patience is over. The connections may be held by callers that need one more each.
// The caller holds the budget's mutex.
func (p *Pool) exhausted(ended error) error {
	var err error
	if b := p.budget; p.bounded && (p.cfg.Bare || p.limited() < p.cfg.Max) {
		inUse, waiting, reserved := b.shortage()
		err = fmt.Errorf("none of the %d connections of this handle (maxConns) was free:"+
			" %d in use, of which %d wait in the server for locks, and %d kept for leases, advisory locks"+
			" and the driver's own statements; allow more of them, or let units of work need fewer at a time",
			b.max, inUse, waiting, reserved)
	} else {
		err = fmt.Errorf("all %d connections for %s are in use", p.cfg.Max, p.cfg.Uses)
		if p.cfg.MaxFrom != "" {
			err = fmt.Errorf("%w (%s); allow more of them, or hold locks for less time", err, p.cfg.MaxFrom)
		}
	}
	if ended != nil && !errors.As(ended, new(server.Silence)) { // the limit is the driver's own
		err = fmt.Errorf("%w: %w", err, ended)
	}
	return lockerr.With(lockerr.ErrExhausted, err)
}

// Exhausted returns which bound keeps a caller from a connection now; nil if none does.
func (p *Pool) Exhausted() error {
	if p.Ready() {
		return nil
	}
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	return p.exhausted(nil)
}

// put puts a connection back that can be used again. If the pool is closed, it closes the connection.
func (p *Pool) put(c *Conn) {
	b := p.budget
	b.mu.Lock()
	p.uncountUser(c)
	if p.closed {
		b.mu.Unlock()
		p.discard(c)
		return
	}
	c.since = time.Now()
	p.idle = append(p.idle, c)
	b.serve()
	b.mu.Unlock()
}

// discard closes a connection and frees its permit, in the background.
func (p *Pool) discard(c *Conn) {
	go func() {
		c.end()
		b := p.budget
		b.mu.Lock()
		defer b.mu.Unlock()
		p.uncountUser(c)
		p.dropPermit()
		b.serve()
	}()
}

// uncount takes back what a caller was counted for that gets no connection. The caller of uncount holds the budget's mutex.
func (p *Pool) uncount(as As) {
	if as.rank() == blocking {
		p.unblock()
	}
	if as.Beside {
		p.uncountBeside()
	}
}

// uncountUser takes back what c was counted for while it was in use. The caller holds the budget's mutex.
func (p *Pool) uncountUser(c *Conn) {
	if c.blocks.Swap(false) {
		p.unblock()
	}
	if c.beside {
		c.beside = false
		p.uncountBeside()
	}
}
