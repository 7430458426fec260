// Package pool keeps the connections that database/sql never sees: the connections of
// sessions and of locks, and a few from which waiters are killed. An application sets their
// number with maxConns or lockMaxConns in the DSN ([mysqllock.Config]), and sees them in
// mysqllock.Stats; docs/connections.md says how many there should be. There is nothing here
// to call from outside of this module: the types need those of internal packages.
//
// The pool keeps its connections alive, and closes one that may still hold a lock. It knows no
// lock SQL.
//
// [mysqllock.Config]: https://pkg.go.dev/github.com/mysqllock/mysqllock#Config
package pool

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Config says what a Pool holds.
type Config struct {
	Connect  func(context.Context) (driver.Conn, error) // opens a connection
	First    func(context.Context, driver.Conn) error   // is called with each new connection, before anything is sent on it; may refuse it. nil is none
	Check    func(Found) error                          // is called for each new connection, with its settings before Setup; may refuse it
	Ask      func() string                              // returns an SQL expression for Check, or ""; nil is none
	Setup    string                                     // a statement that runs once on each new connection
	Instead  func() string                              // returns what runs in place of Setup, or ""; nil is none
	Max      int                                        // the most connections at a time; at least 1
	Idle     time.Duration                              // an unused connection is closed after this long
	Budget   *Budget                                    // nil for a pool that shares no budget
	Control  bool                                       // the budget's reserved permits are for this pool
	Keeps    bool                                       // from its first connection on, one of the budget's permits is kept for this pool
	Bare     bool                                       // for statements of the application: neither set up nor asked for its id. Idle may be 0, for no limit
	Lifetime time.Duration                              // an older connection is closed instead of used again; 0 is no limit
}

// Stats counts the pool's connections. Acquired, Waited and WaitTime are cumulative; the
// others are current.
type Stats struct {
	Max      int           // the limit, lockMaxConns or maxConns
	InUse    int           // acquired by a caller
	Idle     int           // ready for the next caller
	Opening  int           // being connected
	Waiting  int           // callers that wait for one now
	Acquired int64         // how often a connection was acquired
	Waited   int64         // how often a caller had to wait, because none was ready
	WaitTime time.Duration // sum of the time that callers waited, until they waited no more

	OldestWait time.Duration // how long the caller that came first of those that wait now has waited; 0 for none
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
	queue    [ranks]askers
	served   [ranks]turn // of each queue, the last caller that got a connection
	idle     []*Conn     // the last used at the end
	open     int         // connections, with those being opened and closed
	opening  int
	sweeps   bool // its goroutine runs, from the first connection on
	closed   bool
	keeps    bool          // a permit is kept for it
	empty    chan struct{} // closed when a closed pool has no connection any more; nil if nobody waits for that
	acquired int64
	waited   int64
	waitTime time.Duration
}

// New returns a pool. It opens no connection before the first Acquire. Close ends its one
// goroutine, which runs from the first connection on.
func New(cfg Config) (*Pool, error) {
	if cfg.Max < 1 {
		return nil, fmt.Errorf("mysqllock: a pool of %d connections", cfg.Max)
	}
	return newPool(cfg), nil
}

// NewBare is New for connections of the application, with a Max that was checked.
func NewBare(cfg Config) *Pool {
	cfg.Bare = true
	return newPool(cfg)
}

func newPool(cfg Config) *Pool {
	bounded := cfg.Budget != nil
	if !bounded {
		cfg.Budget = &Budget{max: cfg.Max, blockMax: cfg.Max}
	}
	p := &Pool{cfg: cfg, bounded: bounded, budget: cfg.Budget}
	p.ctx, p.stop = context.WithCancel(context.Background())
	p.budget.mu.Lock()
	p.budget.pools = append(p.budget.pools, p)
	p.budget.mu.Unlock()
	return p
}

// AnswerTime is how long a server has to open a connection, and to answer a statement that waits
// for nobody. For so long a pool of a budget goes on asking one that has no connection left, with
// fullPause between: the server counts a connection for a while after it has closed it, longer
// where it is busy, and the next one may be opened in its place by then.
const AnswerTime, fullPause = 10 * time.Second, 20 * time.Millisecond

// connect opens a connection and sets it up. It tries again as often as database/sql.
func (cfg Config) connect(ctx context.Context, bounded bool) (c *Conn, err error) {
	began := time.Now()
	for tries := 1; ; tries++ {
		ends := &sockets{killer: cfg.Budget.killer}
		if c, err = cfg.openInTime(context.WithValue(ctx, socketsKey{}, ends)); err == nil {
			c.ends = ends
			return c, nil
		}
		ends.Wait()
		full := bounded && server.Full(err) && time.Since(began) < AnswerTime
		// Idle: this program did not get to run meanwhile, for longer than Setup has it be idle.
		broken := !cfg.Bare && (server.Broken(err) || server.Idle(err)) && tries < 3
		if ctx.Err() != nil || !full && !broken {
			return nil, err
		}
		if full {
			select {
			case <-time.After(fullPause):
			case <-ctx.Done():
			}
		}
	}
}

// openInTime is open within AnswerTime: a server that accepts a connection and never answers
// must not keep its permit for ever, and the DSN may set no timeout.
func (cfg Config) openInTime(ctx context.Context) (*Conn, error) {
	own, cancel := context.WithTimeout(ctx, AnswerTime)
	defer cancel()
	c, err := cfg.open(own)
	if err != nil && own.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w within %v", ErrNotOpened, AnswerTime)
	}
	return c, err
}

// dial has the driver open a connection.
func (cfg Config) dial(ctx context.Context) (conn driver.Conn, err error) {
	defer basedriver.Catch(nil, &err)
	return cfg.Connect(ctx)
}

// open opens a connection and sets it up.
func (cfg Config) open(ctx context.Context) (*Conn, error) {
	ctx = purpose.Unattributed(ctx)
	conn, err := cfg.dial(ctx)
	if cfg.Bare {
		if err != nil {
			return nil, err
		}
		return Adopt(conn), nil
	}
	if err != nil {
		return nil, ExplainFull(err)
	}
	c := Adopt(conn)
	c.adopted = false
	if cfg.First != nil {
		if err := cfg.First(ctx, conn); err != nil {
			_ = conn.Close()
			return nil, err
		}
	}
	setup := ""
	if cfg.Instead != nil {
		setup = cfg.Instead()
	}
	var found Found
	if err = server.Exec(ctx, conn, cmp.Or(setup, cfg.Setup)); err == nil {
		ask := ""
		if cfg.Ask != nil {
			ask = cfg.Ask()
		}
		found, err = c.identify(ctx, ask)
	}
	if err == nil && cfg.Check != nil {
		err = cfg.Check(found)
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("setting up a connection for locks: %w", err)
	}
	return c, nil
}

// ExplainFull says what to do where err is that of a server that takes no more connections.
func ExplainFull(err error) error {
	if !server.Full(err) {
		return err
	}
	return fmt.Errorf("%w; locks need connections of their own: allow more on the server (max_connections, max_user_connections), or fewer in this program (maxConns, or lockMaxConns and SetMaxOpenConns)", err)
}

// Acquire returns a connection that was alive a moment ago, and its turn. It waits for one
// until ctx ends. Release or Destroy the connection. After Close, Acquire returns
// lockerr.ErrClosed.
func (p *Pool) Acquire(ctx context.Context) (*Conn, error) { return p.AcquireAs(ctx, As{}) }

// Lend is Acquire for a caller that needs no more than the connection.
func (p *Pool) Lend(ctx context.Context) (conn driver.Conn, giveBack func(), err error) {
	c, err := p.Acquire(ctx)
	if err != nil {
		return nil, nil, err
	}
	return c.Conn, c.Release, nil
}

// ErrStuck ends the wait of a caller whose patience is over: all connections are in use, and
// for so long nobody before it has been given one. They may be held by callers that need one
// more each.
var ErrStuck = errors.New("all connections are in use, and none has changed hands")

// ErrNotOpened ends the wait of a caller whose patience is over while a connection was opened
// for it.
var ErrNotOpened = lockerr.With(lockerr.ErrExhausted, errors.New("the server has not opened a connection"))

// AcquireAs is Acquire for a caller of some kind. When its patience is over, it returns
// ErrStuck or ErrNotOpened.
func (p *Pool) AcquireAs(ctx context.Context, as As) (*Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r := as.rank()
	c, err := p.atOnce(r, as.Prefer), error(nil)
	if c == nil {
		c, err = p.ask(ctx, r, as.Patience)
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
		c, err = p.connectWithin(ctx, r, as)
	}
	if err != nil {
		return nil, err
	}
	if r == blocking {
		c.blocks.Store(true)
	}
	return c, nil
}

// atOnce returns an idle connection, preferred if that is one, if nobody queues; nil
// otherwise.
func (p *Pool) atOnce(r rank, preferred *Conn) *Conn {
	b := p.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(p.idle) == 0 || b.queued > 0 || r == blocking && b.blocked >= b.blockMax {
		return nil
	}
	if r == blocking {
		b.blocked++
	}
	p.acquired++
	if at := slices.Index(p.idle, preferred); at >= 0 {
		p.idle = slices.Delete(p.idle, at, at+1)
		return preferred
	}
	return p.lastIdle()
}

// lastIdle takes out the idle connection that was used last. The caller holds the
// budget's mutex.
func (p *Pool) lastIdle() *Conn {
	last := len(p.idle) - 1
	c := p.idle[last]
	p.idle[last] = nil
	p.idle = p.idle[:last]
	return c
}

// ask returns an idle connection, or nil for a permit with which to open one.
func (p *Pool) ask(ctx context.Context, r rank, patience time.Duration) (*Conn, error) {
	b := p.budget
	b.mu.Lock()
	if p.closed {
		b.mu.Unlock()
		return nil, lockerr.ErrClosed
	}
	b.arrivals++
	p.acquired++
	a := &asker{rank: r, arrival: b.arrivals, start: time.Now(), ready: len(p.idle) > 0, got: make(chan *Conn, 1)}
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
	var over <-chan time.Time // never, for who is patient for ever
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
			left := patience - p.unmoved(a)
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
	} else { // served at the same moment
		b.unblock(r == blocking)
		go p.giveUp(a)
	}
	switch {
	case p.ctx.Err() != nil:
		return nil, lockerr.ErrClosed
	case ctx.Err() != nil:
		return nil, ctx.Err()
	}
	return nil, ErrStuck
}

// unmoved is for how long a has queued without moving up: nobody who came before it or goes
// first was served.
func (p *Pool) unmoved(a *asker) time.Duration {
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

// giveUp gives back what a caller gets that has gone.
func (p *Pool) giveUp(a *asker) {
	if c := <-a.got; c != nil {
		p.put(c)
		return
	}
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	p.drop()
	p.budget.serve()
}

// unblock counts a connection that no longer waits in the server.
func (b *Budget) unblock(blocked bool) {
	if blocked {
		b.blocked--
		b.serve()
	}
}

// connectWithin is connect for a caller with a patience, if it has one.
func (p *Pool) connectWithin(ctx context.Context, r rank, as As) (*Conn, error) {
	if as.Patience == 0 {
		return p.connect(ctx, r)
	}
	own, cancel := context.WithTimeout(ctx, max(as.Patience, AnswerTime))
	defer cancel()
	c, err := p.connect(own, r)
	if err != nil && own.Err() != nil && ctx.Err() == nil && p.ctx.Err() == nil {
		err = ErrNotOpened
	}
	return c, err
}

// connect opens a connection with a permit that the caller has. When ctx ends it goes on, for
// the next caller: otherwise callers in a hurry would open connections over and over.
func (p *Pool) connect(ctx context.Context, r rank) (*Conn, error) {
	b := p.budget
	b.mu.Lock()
	p.opening++
	if every := p.cfg.sweepEvery(); every > 0 && !p.sweeps && !p.closed {
		p.sweeps = true
		p.swept.Go(func() { p.sweep(every) })
	}
	b.mu.Unlock()
	start := time.Now()
	type result struct {
		c   *Conn
		err error
	}
	done, gone := make(chan result, 1), false // gone is guarded by b.mu
	go func() {
		own, cancel := context.WithCancel(context.WithoutCancel(ctx))
		defer cancel()
		defer context.AfterFunc(p.ctx, cancel)()
		c, err := p.cfg.connect(own, p.bounded)
		b.mu.Lock()
		p.opening--
		switch {
		case err != nil:
			b.unblock(r == blocking && !gone)
			p.drop()
			b.serve()
		case gone:
			c.pool = p
			b.mu.Unlock()
			p.put(c)
			return
		default:
			c.pool = p
			_ = c.AwaitTurn(context.Background()) // it is free
		}
		done <- result{c, err}
		b.mu.Unlock()
	}()
	select {
	case res := <-done:
		b.mu.Lock()
		p.waitTime += time.Since(start)
		b.mu.Unlock()
		if res.err != nil && p.ctx.Err() != nil {
			res.err = lockerr.ErrClosed
		}
		return res.c, res.err
	case <-ctx.Done():
	case <-p.ctx.Done():
	}
	b.mu.Lock()
	select {
	case res := <-done: // at the same moment
		b.mu.Unlock()
		if res.err == nil {
			res.c.blocks.Store(r == blocking)
			res.c.Release()
		}
	default:
		gone = true
		b.unblock(r == blocking)
		b.mu.Unlock()
	}
	switch {
	case p.ctx.Err() != nil:
		return nil, lockerr.ErrClosed
	case p.cfg.Bare: // as the plain driver says it
		return nil, ctx.Err()
	}
	return nil, fmt.Errorf("%w before its caller gave up: %w", ErrNotOpened, ctx.Err())
}

// usable reports whether an idle connection can be used.
func (p *Pool) usable(ctx context.Context, c *Conn) bool {
	if p.cfg.Bare { // as database/sql does
		return !p.expired(c) && !errors.Is(basedriver.Reset(ctx, c.Conn), driver.ErrBadConn) && c.Valid()
	}
	return c.Silence() < p.cfg.Idle && !p.cfg.old(c) && c.Fresh(ctx)
}

// expired reports whether an idle bare connection is to be closed.
func (p *Pool) expired(c *Conn) bool {
	return p.cfg.Idle > 0 && time.Since(c.since) >= p.cfg.Idle || p.cfg.old(c)
}

// old reports whether a connection has reached its age.
func (cfg Config) old(c *Conn) bool {
	return cfg.Lifetime > 0 && time.Since(c.opened) >= cfg.Lifetime
}

// put puts a connection back that can be used again, or closes it if the pool is closed.
func (p *Pool) put(c *Conn) {
	b := p.budget
	b.mu.Lock()
	if c.blocks.Swap(false) {
		b.blocked--
	}
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
		if c.blocks.Swap(false) {
			b.blocked--
		}
		p.drop()
		b.serve()
	}()
}

// Ready reports whether the next Acquire need not wait for another caller to release a
// connection.
func (p *Pool) Ready() bool {
	b := p.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(p.idle) > 0 {
		return true
	}
	if p.open >= p.cfg.Max || p.queue[ordinary].n+p.queue[urgent].n > 0 {
		return false
	}
	if b.room(p) {
		return true
	}
	return slices.ContainsFunc(b.pools, func(other *Pool) bool {
		return other != p && len(other.idle) > 0 && (!other.keeps || other.open > 1) && (!other.cfg.Control || b.controls > b.reserved)
	})
}

// Stat returns the pool's counts.
func (p *Pool) Stat() Stats {
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	s := Stats{
		Max: p.cfg.Max, InUse: p.open - len(p.idle) - p.opening, Idle: len(p.idle), Opening: p.opening,
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

// Close closes the connections. It waits until those in use are released.
func (p *Pool) Close() {
	if wait := p.end(); wait != nil {
		<-wait
	}
}

// Shut is Close without the wait: connections in use are closed when they are released.
func (p *Pool) Shut() { p.end() }

// end closes what is idle, and lets nobody in any more. The channel is closed when
// nothing is left.
func (p *Pool) end() <-chan struct{} {
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
		c.ends.Wait()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for range idle {
		p.drop()
	}
	b.serve()
	if p.open == 0 {
		return nil
	}
	if p.empty == nil {
		p.empty = make(chan struct{})
	}
	return p.empty
}

// Flush closes the connections that are idle now: another one has turned out to be
// broken without a sign on its socket, and these may be, too.
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

// sweepEvery is how often to look for connections that were idle for too long; 0 is
// never.
func (cfg Config) sweepEvery() time.Duration {
	every := cfg.Idle / 2
	if cfg.Lifetime > 0 && (every == 0 || cfg.Lifetime/2 < every) {
		every = cfg.Lifetime / 2
	}
	if every > 0 {
		every = max(every, time.Millisecond)
	}
	return every
}

// sweep closes connections that were idle for a while, before the server does.
func (p *Pool) sweep(every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-tick.C:
			p.closeIdle(func(c *Conn) bool {
				if p.cfg.Bare {
					return p.expired(c)
				}
				return c.Silence() > p.cfg.Idle/2 || p.cfg.old(c)
			})
		}
	}
}
