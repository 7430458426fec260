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
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/socket"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Config says what a Pool holds.
type Config struct {
	Connect func(context.Context) (driver.Conn, error) // opens a connection
	Max     int                                        // the most connections at a time; at least 1
	Uses    string                                     // what the connections are for, in errors: "sessions"
	MaxFrom string                                     // the parameter that Max comes from, in errors; "" for none
	Idle    time.Duration                              // an unused connection is closed after this long; 0 is no limit
	Budget  *Budget                                    // nil for a pool that shares no budget
	Control bool                                       // the budget's reserved permits are for this pool
	Keeps   bool                                       // one of the budget's permits is kept for this pool: see [Pool.Keep]

	// Bare: the connections are for statements of the application, as Connect opens them. The fields below
	// do not count: they are neither set up nor asked for their ids. They are opened, looked at before the
	// next use, and waited for as database/sql does that: an opening that fails is tried again only if the
	// server is full, and a caller whose context ends gets the context's error, unless it has a patience.
	Bare bool

	// BeforeSetup is called with each new connection, before anything is sent on it; may refuse it. nil is none.
	BeforeSetup func(context.Context, driver.Conn) error

	Setup        string            // a statement that runs once on each new connection
	SetupInstead func() string     // returns what runs in place of Setup, or ""; nil is none
	Ask          func() string     // returns an SQL expression for Check, or ""; nil is none
	Check        func(Found) error // is called for each new connection, with its settings before Setup; may refuse it

	// Several is called for each new connection after Check, and says whether [Conn.Send] may send one text;
	// nil is no.
	Several func(context.Context, *Conn) (bool, error)

	// Splits: the server runs a text with a semicolon as several statements, which the DSN does not ask for.
	Splits bool

	ByCalls bool // transactions begin and end by calls of the base driver: see [Conn.ByCalls]
}

// Stats counts the pool's connections. Acquired, Waited and WaitTime are cumulative; the
// others are current.
type Stats struct {
	Max   int // the limit, lockMaxConns or maxConns, on those in use that are not Beside
	InUse int // acquired by a caller

	// Beside are those of the ones in use, and of the ones being connected, that are beside a connection of
	// database/sql, for a transaction of BeginTx or for one statement.
	Beside int

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
	permits  int         // connections, with those being opened and closed
	opening  int
	blocked  int  // connections of callers that wait in the server
	beside   int  // permits of callers with As.Beside
	sweeps   bool // its goroutine runs, from the first connection on
	closed   bool
	keeps    bool          // a permit is kept for it
	empty    chan struct{} // closed when a closed pool has no connection any more; nil if nobody waits for that
	acquired int64
	waited   int64
	waitTime time.Duration

	trip atomic.Int64 // how long a statement to the server and back takes, about, in nanoseconds: see [Conn.Send]
}

// New returns a pool. It opens no connection before the first Acquire. Close ends its one
// goroutine, which runs from the first connection on.
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

// AnswerTime is how long a server has to open a connection, and to answer a statement that waits
// for nobody. For so long a pool of a budget goes on asking one that has no connection left, with
// fullPause between: the server counts a connection for a while after it has closed it, longer
// where it is busy, and the next one may be opened in its place by then.
const AnswerTime, fullPause = 10 * time.Second, 20 * time.Millisecond

// open opens a connection and sets it up. It tries again as often as database/sql.
func (p *Pool) open(ctx context.Context) (*Conn, error) {
	began := time.Now()
	for tries := 1; ; tries++ {
		sockets := socket.NewGroup(p.budget.killer)
		c, err := p.openInTime(sockets.With(ctx))
		if err == nil {
			c.sockets = sockets
			return c, nil
		}
		sockets.Wait()
		full := p.bounded && server.Full(err) && time.Since(began) < AnswerTime
		// Idle: this program did not get to run meanwhile, for longer than Setup has it be idle.
		broken := !p.cfg.Bare && (server.Broken(err) || server.Idle(err)) && tries < 3
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

// openInTime opens a connection within AnswerTime: a server that accepts a connection and never answers
// must not keep its permit for ever, and the DSN may set no timeout.
func (p *Pool) openInTime(ctx context.Context) (*Conn, error) {
	own, cancel := server.Within(ctx, AnswerTime)
	defer cancel()
	c, err := p.openOnce(purpose.Unattributed(own))
	if err != nil && own.Err() != nil && ctx.Err() == nil {
		err = notOpened(context.Cause(own))
	}
	return c, err
}

// openOnce opens a connection, and sets it up unless it is to be bare.
func (p *Pool) openOnce(ctx context.Context) (*Conn, error) {
	conn, err := p.dial(ctx)
	switch {
	case err != nil && p.cfg.Bare:
		return nil, err
	case err != nil:
		return nil, ExplainFull(err)
	}
	c := newConn(conn, p)
	if p.cfg.Bare {
		return c, nil
	}
	if err := p.setUp(ctx, c); err != nil {
		basedriver.Close(conn)
		return nil, err
	}
	return c, nil
}

// dial has the driver open a connection.
func (p *Pool) dial(ctx context.Context) (conn driver.Conn, err error) {
	defer basedriver.Catch(nil, &err)
	return p.cfg.Connect(ctx)
}

// setUp makes a new connection one for locks, if the pool's configuration does not refuse it.
func (p *Pool) setUp(ctx context.Context, c *Conn) error {
	cfg := &p.cfg
	if cfg.BeforeSetup != nil {
		if err := cfg.BeforeSetup(ctx, c.Conn); err != nil {
			return err
		}
	}
	setup, ask := cfg.Setup, ""
	if cfg.SetupInstead != nil {
		setup = cmp.Or(cfg.SetupInstead(), setup)
	}
	var found Found
	err := server.Exec(ctx, c.Conn, setup)
	if err == nil {
		if cfg.Ask != nil {
			ask = cfg.Ask()
		}
		found, err = c.identify(ctx, ask)
	}
	if err == nil && cfg.Check != nil {
		err = cfg.Check(found)
	}
	if err == nil && cfg.Several != nil {
		c.several, err = cfg.Several(ctx, c)
	}
	if err != nil {
		return fmt.Errorf("setting up a connection for locks: %w", err)
	}
	return nil
}

// ExplainFull says what to do where err is that of a server that takes no more connections.
func ExplainFull(err error) error {
	if !server.Full(err) {
		return err
	}
	return fmt.Errorf("%w; locks need connections of their own: allow more on the server (max_connections,"+
		" max_user_connections), or fewer in this program (maxConns, or lockMaxConns and SetMaxOpenConns)", err)
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

// exhausted is the error of a caller that waits no longer for a connection, since all are in use
// that there may be; ended says why its context has ended, and is nil if its patience is over. They
// may be held by callers that need one more each. The caller holds the budget's mutex.
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

// Exhausted returns an error that says which bound keeps a caller from a connection now; nil if none
// does.
func (p *Pool) Exhausted() error {
	if p.Ready() {
		return nil
	}
	p.budget.mu.Lock()
	defer p.budget.mu.Unlock()
	return p.exhausted(nil)
}

// notOpened is the error of a caller for which no connection was opened in time.
func notOpened(why error) error {
	if silence := (server.Silence{}); errors.As(why, &silence) {
		return lockerr.With(lockerr.ErrNoAnswer, fmt.Errorf("it has not opened a connection within %v", silence.For.Round(time.Millisecond)))
	}
	return lockerr.With(lockerr.ErrNoAnswer, fmt.Errorf("it has not opened a connection: %w", why))
}

// AcquireAs is Acquire for a caller of some kind. If its patience, or ctx, ends the wait, the error
// matches lockerr.ErrExhausted if all connections are in use, and lockerr.ErrNoAnswer if one was
// being opened; and the cause of ctx. To callers without a patience a bare pool returns
// ctx.Err(), as the plain driver does.
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
	if c = p.atOnce(as); c == nil {
		c, err = p.ask(ctx, as)
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

// atOnce returns an idle connection, preferred if that is one, if nobody queues; nil
// otherwise.
func (p *Pool) atOnce(as As) *Conn {
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
func (p *Pool) ask(ctx context.Context, as As) (*Conn, error) {
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
		if as.Beside {
			p.alone()
		}
		if r == blocking {
			p.unblock()
		}
		b.serve()
		go p.giveUp(a)
	}
	if err := p.stopped(ctx); err != nil {
		return nil, err
	}
	return nil, p.exhausted(context.Cause(ctx))
}

// stopped returns the error of a caller that has been stopped, and has not waited for too long; nil
// for another one.
func (p *Pool) stopped(ctx context.Context) error {
	if p.ctx.Err() != nil {
		return lockerr.ErrClosed
	}
	if cause := context.Cause(ctx); errors.Is(cause, lockerr.ErrClosed) || errors.Is(cause, lockerr.ErrDeadlock) {
		return cause
	}
	return nil
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

// connectWithin is connect for a caller with a patience, if it has one.
func (p *Pool) connectWithin(ctx context.Context, as As) (*Conn, error) {
	if as.Patience == 0 {
		return p.connect(ctx, as)
	}
	own, cancel := server.Within(ctx, max(as.Patience, AnswerTime))
	defer cancel()
	return p.connect(own, as)
}

// connect opens a connection with a permit that the caller has. When ctx ends it goes on, for
// the next caller: otherwise callers in a hurry would open connections over and over.
func (p *Pool) connect(ctx context.Context, as As) (*Conn, error) {
	b := p.budget
	// uncount takes back what was counted for the caller.
	uncount := func() {
		if as.rank() == blocking {
			p.unblock()
		}
		if as.Beside {
			p.alone()
		}
	}
	b.mu.Lock()
	p.opening++
	if p.cfg.Idle > 0 && !p.sweeps && !p.closed {
		p.sweeps = true
		p.swept.Go(p.sweep)
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
		c, err := p.open(own)
		b.mu.Lock()
		p.opening--
		switch {
		case err != nil:
			if !gone {
				uncount()
			}
			p.drop()
			b.serve()
		case gone:
			b.mu.Unlock()
			p.put(c)
			return
		default:
			_ = c.AwaitTurn(context.Background()) // it is free
		}
		if err == nil {
			p.measured(c.trip)
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
			res.c.blocks.Store(as.rank() == blocking)
			res.c.beside = as.Beside
			res.c.Release()
		}
	default:
		gone = true
		uncount()
		b.serve()
		b.mu.Unlock()
	}
	if err := p.stopped(ctx); err != nil {
		return nil, err
	}
	return nil, notOpened(context.Cause(ctx))
}

// usable reports whether an idle connection can be used.
func (p *Pool) usable(ctx context.Context, c *Conn) bool {
	if p.cfg.Bare { // as database/sql does
		return !errors.Is(basedriver.Reset(ctx, c.Conn), driver.ErrBadConn) && c.Valid()
	}
	return c.Silence() < p.cfg.Idle && c.Fresh(ctx)
}

// put puts a connection back that can be used again, or closes it if the pool is closed.
func (p *Pool) put(c *Conn) {
	b := p.budget
	b.mu.Lock()
	p.unused(c)
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
		p.unused(c)
		p.drop()
		b.serve()
	}()
}

// unused takes back what c was counted for while it was in use. The caller holds the budget's mutex.
func (p *Pool) unused(c *Conn) {
	if c.blocks.Swap(false) {
		p.unblock()
	}
	if c.beside {
		c.beside = false
		p.alone()
	}
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

// Keep says whether one of the budget's permits is kept for this pool. The handle has it kept for
// the pools that new callers use.
func (p *Pool) Keep(keeps bool) {
	b := p.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	p.keeps = p.bounded && keeps
	b.serve()
}

// Stat returns the pool's counts.
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

// Close closes the connections. It waits until those in use are released that are not beside connections
// of database/sql.
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
		c.sockets.Wait()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for range idle {
		p.drop()
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
