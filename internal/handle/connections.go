package handle

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Apps returns the pool of connections for statements of the application. Only a handle with a budget has it.
func (h *Handle) Apps() *pool.Pool { return h.apps }

// reservedConns returns how many connections of a budget are for control alone. A larger budget has two, since
// a control connection that waits for a row must not keep a waiter from being killed.
func reservedConns(maxConns int) int {
	if maxConns < 8 {
		return 1
	}
	return 2
}

// lockKinds is how many pools of lock connections there are: one for leases, one for advisory locks. A
// budget keeps a connection for each, since callers that have all others may each ask for such a lock.
const lockKinds = 2

// App takes a connection for statements of the application, from the budget. wait is as for acquire.
func (h *Handle) App(ctx context.Context, asker Caller, wait time.Duration) (*pool.Conn, error) {
	h.waiters.Add(1)
	defer h.waiters.Add(-1)
	link, err := h.acquire(ctx, h.apps, asker, wait)
	return link, pool.ExplainFull(err)
}

// Session takes a session. asker.Beside says that the caller has a connection of database/sql in its hand for
// as long as it needs the session.
func (h *Handle) Session(ctx context.Context, l *Locks, asker Caller, wait time.Duration) (*pool.Conn, error) {
	asker.Pooled = asker.Pooled && !asker.Beside && !l.sessions.Ready()
	ctx, done, err := h.beginWait(ctx, asker, Sought{})
	if err != nil {
		return nil, err
	}
	defer done()
	return h.acquire(ctx, l.sessions, asker, wait)
}

// Short returns which bound keeps a caller from a session now; nil if none does.
func (l *Locks) Short() error { return l.sessions.Exhausted() }

// Spare reports whether a caller may occupy a session before it can use it: sessions have a bound of their own, and less
// than half of them are in use.
func (l *Locks) Spare() bool { return l.sessions.Spare() }

// acquire takes a connection of p. The caller queues until ctx ends, as it does in database/sql. It gives up
// earlier only if it has not moved up for as long as wait, and for at least a second: then units of work
// that each need one more connection may have them all.
func (h *Handle) acquire(ctx context.Context, p *pool.Pool, asker Caller, wait time.Duration) (*pool.Conn, error) {
	as := pool.As{Patience: max(wait, time.Second), Prefer: asker.Prefer, Beside: asker.Beside}
	if h.Bounded() {
		as.Urgent, as.Waits = asker.Urgent, asker.Waits
	}
	link, err := p.AcquireAs(ctx, as)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errYield) {
		return nil, cause
	}
	return link, err
}

// Sample returns a connection of the base driver, which may be closed or in use: it serves to look at what
// all connections have in common. If no connection was opened yet, Sample calls open.
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

// connect opens a connection for a session, and keeps it as the sample: callers that have all connections
// of the budget as their sessions may need a sample to go on.
func (h *Handle) connect(ctx context.Context) (driver.Conn, error) {
	conn, err := h.connectOr(ctx, h.connectors.Session, h.connectors.App)
	if err == nil {
		h.sample.CompareAndSwap(nil, &conn)
	}
	return conn, err
}

// connectOr opens a connection by the connector several. If that is refused, it uses single: a proxy in front
// of the server may refuse connections that could run several statements in a text.
func (h *Handle) connectOr(ctx context.Context, several, single driver.Connector) (driver.Conn, error) {
	conn, err := several.Connect(ctx)
	if h.connectors.splits() && server.Unsupported(err) {
		return single.Connect(ctx)
	}
	return conn, err
}

// RunsTexts reports whether the base driver runs statements without preparing them. If it does not,
// database/sql prepares each statement, also one that will not run again.
func (h *Handle) RunsTexts() bool {
	sample := h.sample.Load()
	if sample == nil {
		return false
	}
	_, execs := (*sample).(driver.ExecerContext)
	_, queries := (*sample).(driver.QueryerContext)
	return execs && queries
}

// ErrUnusable is the error of a caller with a sql.Conn or a transaction whose connection is of no use for a
// lock. On an error such as driver.ErrBadConn, database/sql would close the connection, and wait for the
// end of the rows.
var ErrUnusable = lockerr.With(lockerr.ErrExhausted, errors.New(
	"rows are still being read from this connection (close them first), or it is broken; the lock is not held"))

// WatchesPool reports whether [Handle.SeePool] is worth a call. With a budget database/sql should bound
// nothing, and an observer is told once if it does.
func (h *Handle) WatchesPool() bool {
	return h.Bounded() && h.Settings.Observe != nil && !h.poolBound.Load()
}

// SeePool looks at the numbers of database/sql's pool, for a handle with a budget.
func (h *Handle) SeePool(s sql.DBStats) {
	bound, budget := s.MaxOpenConnections, h.Settings.MaxConns
	if bound == 0 || bound > budget && s.WaitCount == 0 || h.poolBound.Swap(true) {
		return
	}
	h.advise(fmt.Errorf("mysqllock: with maxConns=%d SetMaxOpenConns(%d) bounds callers, not connections:"+
		" those that wait for a lock can keep its holder waiting; leave SetMaxOpenConns alone", budget, bound))
}
