package handle

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/statement"
)

// starvationGuard keeps a connection of database/sql free for holders that have none.
//
// A caller that waits for a lock in BeginTx, Query or Exec occupies one of
// database/sql's connections, and a holder on a session, or of a lease, needs one for its
// next statement. Where SetMaxOpenConns bounds them, the waiters can have them
// all, and the holder stands in the queue behind them.
//
// The driver is not told the bound, but it can find out: when every open
// connection has had a waiter for a while and a session is held, one waiter
// gives its connection up, by an answer (driver.ErrBadConn) on which
// database/sql silently tries again. If that makes database/sql open one for
// somebody who stood in the queue, its pool is full, and as many connections as are
// open is the bound. From then on one of them is kept free of waiters while a
// session is held: whoever would occupy it fails at once.
type starvationGuard struct {
	mu      sync.Mutex
	open    int       // connections of database/sql
	waiting []*waiter // callers that occupy one of them, the newest last
	held    int       // locks whose holder needs one of them for its next statement
	bound   int       // of database/sql's pool; 0 while not known
	met     func(int) // is told the bound when it is first found
	told    sync.Once // met was
	advised bool      // a refused caller was told what would help
	asked   time.Time // when a waiter was made to try again
	watch   *time.Timer
	grace   time.Duration // how long all are to have waited before one is made to try again
}

type waiter struct {
	asked   *bool // its lock context was made to try again; guarded by mu
	cancel  context.CancelCauseFunc
	retried bool // database/sql will try again for it
}

const (
	firstGrace = 50 * time.Millisecond
	lastGrace  = 5 * time.Second
	answerTime = time.Second // within which a connection that is opened is the answer
)

// errYield ends the wait of a caller that is to try again on another
// connection.
var errYield = errors.New("another connection is to be tried")

// useMaxConns is what helps if SetMaxOpenConns keeps callers from each other's locks.
const useMaxConns = "use maxConns in the DSN in place of SetMaxOpenConns"

// Opened counts a connection of database/sql. If one was asked to try again, it
// tells who gets it: somebody who stood in the queue, or a caller whose pool had room.
func (c *starvationGuard) Opened() {
	c.mu.Lock()
	c.open++
	if c.open > c.bound {
		c.bound = 0
	}
	found := time.Since(c.asked) < answerTime && statement.ForQueue()
	if found {
		c.bound, c.asked = c.open, time.Time{}
	}
	bound := c.bound
	c.mu.Unlock()
	if found {
		c.told.Do(func() { c.met(bound) })
	}
}

// Closed counts a connection of database/sql less.
func (c *starvationGuard) Closed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open--
}

// hold counts a lock that is held beside the connections of database/sql.
func (c *starvationGuard) hold() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held++
	c.look()
}

// done takes back what hold has counted.
func (c *starvationGuard) done() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held--
}

// enter is called before a caller begins to wait while it occupies a
// connection of database/sql. The context it returns may end with errYield, which sets
// asked: a lock context is asked once.
func (c *starvationGuard) enter(ctx context.Context, asked *bool) (context.Context, func(), error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.waiting) + 1; c.held > 0 && c.bound > 1 && n >= c.bound {
		err := fmt.Errorf("%d callers wait on the %d connections that SetMaxOpenConns allows,"+
			" and the last one is kept free for the holder", n-1, c.bound)
		if !c.advised { // the text need not say it each time
			c.advised = true
			err = fmt.Errorf("%w; %s, or mysqllock.Do, which waits without a connection", err, useMaxConns)
		}
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	w := &waiter{asked, cancel, statement.Retried(ctx)}
	c.waiting = append(c.waiting, w)
	c.look()
	return ctx, func() { c.leave(w) }, nil
}

func (c *starvationGuard) leave(w *waiter) {
	w.cancel(nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = slices.DeleteFunc(c.waiting, func(o *waiter) bool { return o == w })
}

func (c *starvationGuard) full() bool {
	return c.held > 0 && len(c.waiting) > 0 && len(c.waiting) >= c.open
}

// look starts the clock when every connection has a waiter.
func (c *starvationGuard) look() {
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
func (c *starvationGuard) ask() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.watch = nil
	if !c.full() {
		c.grace = firstGrace
		return
	}
	for _, w := range slices.Backward(c.waiting) {
		if w.retried && !*w.asked {
			*w.asked = true
			c.asked = time.Now()
			w.cancel(errYield)
			break
		}
	}
	c.look()
}

// stop ends the clock.
func (c *starvationGuard) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watch != nil {
		c.watch.Stop()
	}
}

// Yielded makes database/sql try again where the starvation guard asked for it. Nothing
// was run and nothing is held.
func Yielded(err error) error {
	if errors.Is(err, errYield) {
		return driver.ErrBadConn
	}
	return err
}

// boundMet is called once, when waiters have filled the bound of database/sql's pool.
func (k *Handle) boundMet(bound int) {
	k.advise(fmt.Errorf("mysqllock: callers that wait for locks had all %d connections that SetMaxOpenConns allows,"+
		" and the holder none; %s", bound, useMaxConns))
}
