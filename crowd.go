package mysqllock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// crowd sees to it that whoever holds a session gets through.
//
// A caller that waits for a lock in BeginTx, Query or Exec occupies one of
// database/sql's connections, and the holder of a session needs one for its
// next statement. Where SetMaxOpenConns bounds them, the waiters can have them
// all, and the holder stands in line behind them.
//
// The driver is not told the bound, but it can find out: when every open
// connection has had a waiter for a while and a session is held, one waiter
// gives its connection up, by an answer (driver.ErrBadConn) on which
// database/sql silently tries again. If that makes database/sql open one for
// somebody who stood in line, its pool is full, and as many connections as are
// open is the bound. From then on one of them is kept free of waiters while a
// session is held: whoever would occupy it fails at once.
type crowd struct {
	mu      sync.Mutex
	open    int       // connections of database/sql
	waiting []*waiter // callers that occupy one of them, the newest last
	held    int       // sessions with a unit of work
	bound   int       // of database/sql's pool; 0 while not known
	asked   *scope    // the waiter that was made to try again, until a connection is opened
	watch   *time.Timer
	grace   time.Duration // how long all are to have waited before one is made to try again
}

type waiter struct {
	scope  *scope
	cancel context.CancelCauseFunc
}

const (
	firstGrace = 50 * time.Millisecond
	lastGrace  = 5 * time.Second
)

// errYield ends the wait of a caller that is to try again on another
// connection.
var errYield = errors.New("another connection is to be tried")

// opened counts a connection of database/sql. ctx tells who asked for it: a
// caller, whose pool then had room, or the goroutine that opens connections
// for those who stood in line.
func (c *crowd) opened(k *connector, ctx context.Context) {
	h, hinted := lockctx.From(ctx)
	_, hasDeadline := ctx.Deadline()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open++
	if c.open > c.bound {
		c.bound = 0
	}
	switch {
	case c.asked == nil:
	case !hinted && !hasDeadline && ctx.Done() != nil:
		c.bound, c.asked = c.open, nil
	case hinted && k.scope(h.Scope) == c.asked:
		c.asked = nil // nobody stood in line
	}
}

func (c *crowd) closed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
}

// hold counts a session with a unit of work; done ends it.
func (c *crowd) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held++
	c.look()
}

func (c *crowd) done() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held--
}

// enter is called before a caller begins to wait while it occupies a
// connection of database/sql. The context it returns may end with errYield.
func (c *crowd) enter(ctx context.Context, s *scope) (context.Context, func(), error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.waiting) + 1; c.held > 0 && c.bound > 0 && n >= c.bound {
		return nil, nil, lockerr.With(ErrLocked, fmt.Errorf(
			"%d callers wait on the %d connections that SetMaxOpenConns allows, and the last is kept free for who holds the lock; allow more, or use mysqllock.Do, which waits without a connection", n-1, c.bound))
	}
	ctx, cancel := context.WithCancelCause(ctx)
	w := &waiter{s, cancel}
	c.waiting = append(c.waiting, w)
	c.look()
	return ctx, func() { c.leave(w) }, nil
}

func (c *crowd) leave(w *waiter) {
	w.cancel(nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = slices.DeleteFunc(c.waiting, func(o *waiter) bool { return o == w })
}

func (c *crowd) full() bool { return c.held > 0 && len(c.waiting) > 0 && len(c.waiting) >= c.open }

// look starts the clock when every connection has a waiter.
func (c *crowd) look() {
	if c.watch != nil || !c.full() {
		return
	}
	if c.grace == 0 {
		c.grace = firstGrace
	}
	c.watch = time.AfterFunc(c.grace, c.ask)
	c.grace = min(2*c.grace, lastGrace)
}

// ask makes the newest waiter that has not been asked before try again.
func (c *crowd) ask() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watch = nil
	if !c.full() {
		c.grace = firstGrace
		return
	}
	for _, w := range slices.Backward(c.waiting) {
		if !w.scope.asked {
			w.scope.asked = true
			c.asked = w.scope
			w.cancel(errYield)
			break
		}
	}
	c.look()
}

// stop ends the clock.
func (c *crowd) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watch != nil {
		c.watch.Stop()
	}
}
