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

// starvationGuard keeps a connection of database/sql free for holders that need one.
//
// A caller that waits for a lock in BeginTx, Query or Exec occupies one of database/sql's connections. A
// holder on a session, or of a lease, needs such a connection for its next statement. If SetMaxOpenConns
// bounds them, waiters can occupy all connections, and the holder stands in the queue behind the waiters.
//
// Nobody tells the driver the bound, but the guard can find it out. When every open connection has had a
// waiter for a while, and a holder may need one, the guard makes one waiter give its connection up, by an
// error (driver.ErrBadConn) on which database/sql silently tries again. If database/sql then opens a
// connection for a caller that stood in its queue, its pool was full, and the bound is the number of open
// connections. From then on, while a lock is held, the guard keeps one connection free of waiters: a caller
// that would wait on it fails at once.
type starvationGuard struct {
	mu        sync.Mutex
	openConns int       // connections of database/sql
	waiting   []*waiter // callers that wait for a lock on one of these connections, the newest last
	held      int       // locks whose holders need one of these connections for their next statement
	bound     int       // of database/sql's pool; 0 while not known
	met       func(int) // called with the bound when that is first found
	tellOnce  sync.Once // guards the call of met
	advised   bool      // a refused caller was told what would help
	asked     time.Time // when a waiter was made to try again
	watch     *time.Timer
	grace     time.Duration // how long all connections must have waiters before one waiter is made to try again
}

type waiter struct {
	asked   *bool // a caller of the same lock context was made to try again; guarded by mu
	cancel  context.CancelCauseFunc
	retried bool // database/sql will try again for this caller
}

const (
	firstGrace = 50 * time.Millisecond
	lastGrace  = 5 * time.Second
	answerTime = time.Second // a connection that is opened within this time answers the question for the bound
)

// errYield ends the wait of a caller that is to try again on another connection.
var errYield = errors.New("another connection is to be tried")

// useMaxConns is the advice if SetMaxOpenConns keeps holders from a connection.
const useMaxConns = "use maxConns in the DSN in place of SetMaxOpenConns"

// Opened counts a new connection of database/sql. If a waiter was made to try again just before, Opened finds out
// for whom database/sql has opened the connection: a caller that stood in its queue, or one whose pool had room.
func (sg *starvationGuard) Opened() {
	sg.mu.Lock()
	sg.openConns++
	if sg.openConns > sg.bound {
		sg.bound = 0
	}
	found := time.Since(sg.asked) < answerTime && statement.ForQueue()
	if found {
		sg.bound, sg.asked = sg.openConns, time.Time{}
	}
	bound := sg.bound
	sg.mu.Unlock()
	if found {
		sg.tellOnce.Do(func() { sg.met(bound) })
	}
}

// Closed counts that a connection of database/sql was closed.
func (sg *starvationGuard) Closed() {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	sg.openConns--
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

// enter is called before a caller begins to wait on a connection of database/sql. The returned context may end
// with errYield. Then asked is set, since a lock context is made to try again only once.
func (sg *starvationGuard) enter(ctx context.Context, asked *bool) (context.Context, func(), error) {
	sg.mu.Lock()
	defer sg.mu.Unlock()
	if n := len(sg.waiting) + 1; sg.held > 0 && sg.bound > 1 && n >= sg.bound {
		err := fmt.Errorf("%d callers wait on the %d connections that SetMaxOpenConns allows,"+
			" and the last one is kept free for the holder", n-1, sg.bound)
		if !sg.advised { // one such advice is enough
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
	return sg.held > 0 && len(sg.waiting) > 0 && len(sg.waiting) >= sg.openConns
}

// look starts the clock when every connection has a waiter and a holder may need one.
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

// ask makes the newest waiter try again whose lock context was not made to do so before.
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

// Yielded turns errYield into an error on which database/sql tries again. Nothing was run, and nothing is held.
func Yielded(err error) error {
	if errors.Is(err, errYield) {
		return driver.ErrBadConn
	}
	return err
}

// boundMet is called once, when waiters have occupied all connections that SetMaxOpenConns allows.
func (h *Handle) boundMet(bound int) {
	h.advise(fmt.Errorf("mysqllock: callers that wait for locks had all %d connections that SetMaxOpenConns allows,"+
		" and the holder none; %s", bound, useMaxConns))
}
