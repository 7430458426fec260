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
// session is held: one that would occupy it fails at once.
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
func (sg *starvationGuard) Opened() {
	sg.mu.Lock()
	sg.open++
	if sg.open > sg.bound {
		sg.bound = 0
	}
	found := time.Since(sg.asked) < answerTime && statement.ForQueue()
	if found {
		sg.bound, sg.asked = sg.open, time.Time{}
	}
	bound := sg.bound
	sg.mu.Unlock()
	if found {
		sg.told.Do(func() { sg.met(bound) })
	}
}

// Closed counts a connection of database/sql less.
func (sg *starvationGuard) Closed() {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	sg.open--
}

// hold counts a lock that is held beside the connections of database/sql.
func (sg *starvationGuard) hold() {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	sg.held++
	sg.look()
}

// done takes back what hold has counted.
func (sg *starvationGuard) done() {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	sg.held--
}

// enter is called before a caller begins to wait while it occupies a
// connection of database/sql. The context it returns may end with errYield, which sets
// asked: a lock context is asked once.
func (sg *starvationGuard) enter(ctx context.Context, asked *bool) (context.Context, func(), error) {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	if n := len(sg.waiting) + 1; sg.held > 0 && sg.bound > 1 && n >= sg.bound {
		err := fmt.Errorf("%d callers wait on the %d connections that SetMaxOpenConns allows,"+
			" and the last one is kept free for the holder", n-1, sg.bound)
		if !sg.advised { // the text need not say it each time
			sg.advised = true
			err = fmt.Errorf("%w; %s, or mysqllock.Do, which waits without a connection", err, useMaxConns)
		}
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	w := &waiter{asked, cancel, statement.Retried(ctx)}
	sg.waiting = append(sg.waiting, w)
	sg.look()
	return ctx, func() { sg.leave(w) }, nil
}

func (sg *starvationGuard) leave(w *waiter) {
	w.cancel(nil)
	sg.mu.Lock()
	defer sg.mu.Unlock()
	sg.waiting = slices.DeleteFunc(sg.waiting, func(o *waiter) bool { return o == w })
}

func (sg *starvationGuard) full() bool {
	return sg.held > 0 && len(sg.waiting) > 0 && len(sg.waiting) >= sg.open
}

// look starts the clock when every connection has a waiter.
func (sg *starvationGuard) look() {
	if sg.watch != nil || !sg.full() {
		return
	}
	if sg.grace == 0 {
		sg.grace = firstGrace
	}
	sg.watch = time.AfterFunc(sg.grace, sg.ask)
	sg.grace = min(2*sg.grace, lastGrace)
}

// ask makes the newest waiter that has not been asked before try again.
func (sg *starvationGuard) ask() {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	sg.watch = nil
	if !sg.full() {
		sg.grace = firstGrace
		return
	}
	for _, w := range slices.Backward(sg.waiting) {
		if w.retried && !*w.asked {
			*w.asked = true
			sg.asked = time.Now()
			w.cancel(errYield)
			break
		}
	}
	sg.look()
}

// stop ends the clock.
func (sg *starvationGuard) stop() {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	if sg.watch != nil {
		sg.watch.Stop()
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
func (h *Handle) boundMet(bound int) {
	h.advise(fmt.Errorf("mysqllock: callers that wait for locks had all %d connections that SetMaxOpenConns allows,"+
		" and the holder none; %s", bound, useMaxConns))
}
