package handle

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Apps are the connections for statements of the application, of a handle with a budget.
func (h *Handle) Apps() *pool.Pool { return h.apps }

// reservedConns is how many connections of a budget are for control alone: one that waits
// for a row must not keep a waiter from being killed.
func reservedConns(maxConns int) int {
	if maxConns < 8 {
		return 1
	}
	return 2
}

// lockKinds is how many pools of lock connections there are, for leases and for advisory locks. A
// budget keeps a connection for each: callers that have all others may each ask for such a lock.
const lockKinds = 2

// App takes a connection for statements of the application, from a budget; wait is as for
// acquire.
func (h *Handle) App(ctx context.Context, by Caller, wait time.Duration) (*pool.Conn, error) {
	h.waiters.Add(1)
	defer h.waiters.Add(-1)
	link, err := h.acquire(ctx, h.apps, by, wait)
	return link, pool.ExplainFull(err)
}

// Session takes a session. by.Beside says that the caller has a connection of database/sql in its hand for as long
// as it needs the session.
func (h *Handle) Session(ctx context.Context, l *Locks, by Caller, wait time.Duration) (*pool.Conn, error) {
	by.Pooled = by.Pooled && !by.Beside && !l.sessions.Ready()
	ctx, done, err := h.waiting(ctx, by, Sought{})
	if err != nil {
		return nil, err
	}
	defer done()
	return h.acquire(ctx, l.sessions, by, wait)
}

// Short says which bound keeps a caller from a session now; nil for none.
func (l *Locks) Short() error { return l.sessions.Exhausted() }

// Far reports whether the server is so far that round trips count more than its work.
func (l *Locks) Far() bool { return l.sessions.Far() }

// acquire takes a connection of p. The caller queues until ctx ends, as it does in
// database/sql. Only if for the length of wait, and for a second, it has not moved up, it
// gives up: all connections may be held by units of work that need one more each.
func (h *Handle) acquire(ctx context.Context, p *pool.Pool, by Caller, wait time.Duration) (*pool.Conn, error) {
	as := pool.As{Patience: max(wait, time.Second), Prefer: by.Prefer, Beside: by.Beside}
	if h.Bounded() {
		as.Urgent, as.Waits = by.Urgent, by.Waits
	}
	link, err := p.AcquireAs(ctx, as)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errYield) {
		return nil, cause
	}
	return link, err
}

// Sample is a connection of the base driver, which may be closed or in use: for what all
// of them have in common. It calls open if none was opened yet.
func (h *Handle) Sample(ctx context.Context, open func() (driver.Conn, error)) (driver.Conn, error) {
	if sample := h.sample.Load(); sample != nil {
		return *sample, nil
	}
	select {
	case h.sampling <- struct{}{}: // all callers of a new handle come at once, and one connection is enough
		defer func() { <-h.sampling }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if sample := h.sample.Load(); sample != nil {
		return *sample, nil
	}
	conn, err := open()
	if err == nil {
		h.sample.Store(&conn)
	}
	return conn, err
}

// connect opens a connection for a session, which will do for a sample: callers that have all
// connections of the budget as their sessions may need one to go on.
func (h *Handle) connect(ctx context.Context) (driver.Conn, error) {
	conn, err := h.connectOr(ctx, h.connectors.Session, h.connectors.App)
	if err == nil {
		h.sample.CompareAndSwap(nil, &conn)
	}
	return conn, err
}

// connectOr opens a connection of several, or one of single: what lies between here and
// the server may refuse connections that could run several statements in a text.
func (h *Handle) connectOr(ctx context.Context, several, single driver.Connector) (driver.Conn, error) {
	conn, err := several.Connect(ctx)
	if h.connectors.splits() && server.Unsupported(err) {
		return single.Connect(ctx)
	}
	return conn, err
}

// RunsTexts reports whether the base driver runs statements without preparing them. If it
// does not, a statement that it is asked to prepare need not be one that will run again.
func (h *Handle) RunsTexts() bool {
	sample := h.sample.Load()
	if sample == nil {
		return false
	}
	_, execs := (*sample).(driver.ExecerContext)
	_, queries := (*sample).(driver.QueryerContext)
	return execs && queries
}

// ErrUnusable is of a caller whose connection, that of a sql.Conn or a transaction, is of no use for a lock.
// It is none on which database/sql closes the connection: it would wait for the end of the rows.
var ErrUnusable = lockerr.With(lockerr.ErrExhausted, errors.New(
	"rows are still being read from this connection (close them first), or it is broken; the lock is not held"))

// WatchesPool reports whether [Handle.SeePool] is worth a call: with a budget
// database/sql should bound nothing, and an observer is told once if it does.
func (h *Handle) WatchesPool() bool {
	return h.Bounded() && h.Settings.Observe != nil && !h.poolBound.Load()
}

// SeePool looks at what database/sql counts of a handle with a budget.
func (h *Handle) SeePool(s sql.DBStats) {
	bound, budget := s.MaxOpenConnections, h.Settings.MaxConns
	if bound == 0 || bound > budget && s.WaitCount == 0 || h.poolBound.Swap(true) {
		return
	}
	h.advise(fmt.Errorf("mysqllock: with maxConns=%d SetMaxOpenConns(%d) bounds callers, not connections:"+
		" those that wait for a lock can keep its holder waiting; leave SetMaxOpenConns alone", budget, bound))
}
