// Package pool keeps the connections that database/sql never sees: those of sessions and of locks, and a few control
// connections from which waiters are killed. An application sets their number with maxConns or lockMaxConns in the DSN,
// and sees them in mysqllock.Stats; docs/connections.md says how many there should be.
//
// The pool keeps its connections alive, and closes one that may still hold a lock. It knows no
// lock SQL.
package pool

import (
	"context"
	"database/sql/driver"
	"math"
	"slices"
	"sync"
	"time"
)

// DefaultMax is how many connections a handle without lockMaxConns has at most for each of three uses: sessions, leases,
// and advisory locks. ControlMax is how many control connections it has.
const (
	DefaultMax = 16
	ControlMax = 4
)

// Config says what a Pool holds.
type Config struct {
	Connect func(context.Context) (driver.Conn, error) // opens a connection
	Max     int                                        // the most connections at a time; at least 1
	Uses    string                                     // what the connections are for, in errors: "sessions"
	MaxFrom string                                     // the parameter that sets Max, in errors; "" for none
	// Idle: a connection that was not in use for so long is not used again. It is closed some time after half of that; 0 for no limit.
	Idle    time.Duration
	Budget  *Budget // nil for a pool that shares no budget
	Control bool    // the budget's reserved permits are for this pool
	Keeps   bool    // one of the budget's permits is kept for this pool: see [Pool.Keep]

	// Bare: the connections are for statements of the application, as Connect opens them. They are not set up, and not asked for
	// their ids, so the fields below do not count. They are opened, looked at before their next use, and waited for as in
	// database/sql. If one cannot be opened, that is tried again only if the server is full. If a caller's context ends, the
	// caller gets the context's error, unless it has a patience.
	Bare bool

	// BeforeSetup is called with each new connection before anything is sent on it, and may refuse it; nil for none.
	BeforeSetup func(context.Context, driver.Conn) error

	Setup        string            // a statement that runs once on each new connection
	SetupInstead func() string     // returns a statement that runs in place of Setup, or ""; nil for none
	Ask          func() string     // returns an SQL expression for Check, or ""; nil for none
	Check        func(Found) error // called for each new connection, with its settings before Setup; may refuse the connection

	// Several is called for each new connection after Check, and says whether [Conn.Send] may send several statements as one text;
	// nil for no.
	Several func(context.Context, *Conn) (bool, error)

	// Splits: the server runs a text with a semicolon as several statements, although the DSN does not ask for that.
	Splits bool

	ByCalls bool // transactions begin and end by calls of the base driver: see [Conn.ByCalls]
}

// Stats counts the pool's connections. Its fields are those of mysqllock.ConnStats, which says what they are.
type Stats struct {
	Max, InUse, Beside, Idle, Opening, Waiting int
	Acquired, Waited                           int64
	WaitTime, OldestWait                       time.Duration
}

// Pool is a bounded set of connections. It is safe for concurrent use.
type Pool struct {
	cfg     Config
	budget  *Budget         // of cfg
	bounded bool            // the budget is shared with other pools
	ctx     context.Context // ends when the pool is closed
	stop    context.CancelFunc
	swept   sync.WaitGroup

	// Guarded by the budget's mutex.
	queue    [ranks]askerQueue
	served   [ranks]service // of each queue, the last caller that got a connection
	idle     []*Conn        // the one used last is at the end
	permits  int            // how many connections, with those being opened and closed
	opening  int
	blocked  int  // connections of callers that wait in the server
	beside   int  // permits of callers with As.Beside
	sweeps   bool // the pool's goroutine runs, from the first connection on
	closed   bool
	keeps    bool          // the budget keeps a permit for the pool
	empty    chan struct{} // closed when a closed pool has no connection any more; nil if nobody waits for that
	acquired int64
	waited   int64
	waitTime time.Duration
}

// New returns a pool. It opens no connection before the first Acquire. The pool has one goroutine, which runs from the first
// connection on, and which Close ends.
func New(cfg Config) *Pool {
	bounded := cfg.Budget != nil
	if !bounded {
		cfg.Budget = &Budget{max: math.MaxInt, blockMax: math.MaxInt} // Config.Max limits those that are not Beside
	}
	p := &Pool{cfg: cfg, bounded: bounded, budget: cfg.Budget, keeps: bounded && cfg.Keeps}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.budget.mu.Lock()
	p.budget.pools = append(p.budget.pools, p)
	p.budget.mu.Unlock()
	return p
}

// Ready reports whether the next Acquire need not wait for another caller to release a
// connection.
func (p *Pool) Ready() bool {
	b := p.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.allows(p, ordinary) {
		return false
	}
	return p.mayHave(false) && (len(p.idle) > 0 || p.queue[ordinary].n+p.queue[urgent].n == 0)
}

// Keep says whether the budget keeps one of its permits for this pool. It does for the pools that new callers use.
func (p *Pool) Keep(keeps bool) {
	b := p.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	p.keeps = p.bounded && keeps
	b.serve()
}

// Stat returns the present numbers of the pool.
func (p *Pool) Stat() Stats {
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	s := Stats{
		Max: p.cfg.Max, InUse: p.permits - len(p.idle) - p.opening, Beside: p.beside, Idle: len(p.idle), Opening: p.opening,
		Acquired: p.acquired, Waited: p.waited, WaitTime: p.waitTime,
	}
	for r := range p.queue {
		s.Waiting += p.queue[r].n
		if first := p.queue[r].first; first != nil {
			s.OldestWait = max(s.OldestWait, time.Since(first.start))
		}
	}
	return s
}

// Close closes the connections. It waits until all connections in use are released, except those beside connections of
// database/sql.
func (p *Pool) Close() {
	if wait := p.beginClose(); wait != nil {
		<-wait
	}
}

// Shut is Close without the wait: connections in use are closed when they are released.
func (p *Pool) Shut() { p.beginClose() }

// beginClose closes the idle connections, and gives no more connections to callers. The channel that it returns is closed when
// no connection is left.
func (p *Pool) beginClose() <-chan struct{} {
	p.stop()
	b := p.budget
	b.mu.Lock()
	idle := p.idle
	p.idle = nil
	if !p.closed {
		p.closed = true
		b.pools = slices.DeleteFunc(b.pools, func(other *Pool) bool { return other == p })
	}
	b.mu.Unlock()
	p.swept.Wait()
	for _, c := range idle {
		_ = c.Close()
	}
	for _, c := range idle {
		c.sockets.Wait()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for range idle {
		p.dropPermit()
	}
	b.serve()
	if p.permits == p.beside {
		return nil
	}
	if p.empty == nil {
		p.empty = make(chan struct{})
	}
	return p.empty
}

// Flush closes the connections that are idle now. Another connection has turned out to be broken without a sign on its socket, and
// the idle ones may be broken, too.
func (p *Pool) Flush() {
	p.closeIdle(func(*Conn) bool { return true })
}

// closeIdle closes the idle connections for which old is true.
func (p *Pool) closeIdle(old func(*Conn) bool) {
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	kept := p.idle[:0]
	for _, c := range p.idle {
		if old(c) {
			p.discard(c)
		} else {
			kept = append(kept, c)
		}
	}
	clear(p.idle[len(kept):])
	p.idle = kept
}

// CloseOldest closes the idle connection that was opened first, if there is one.
func (p *Pool) CloseOldest() {
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	if len(p.idle) == 0 {
		return
	}
	at := 0
	for i, c := range p.idle {
		if c.opened.Before(p.idle[at].opened) {
			at = i
		}
	}
	c := p.idle[at]
	p.idle = slices.Delete(p.idle, at, at+1)
	p.discard(c)
}

// sweep closes connections that were idle for a while, before the server does.
func (p *Pool) sweep() {
	tick := time.NewTicker(max(p.cfg.Idle/2, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-tick.C:
			p.closeIdle(func(c *Conn) bool { return c.Silence() > p.cfg.Idle/2 })
		}
	}
}
