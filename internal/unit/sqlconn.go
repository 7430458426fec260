package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// What a unit of work on a sql.Conn has of its own: it lives on the connection of
// that sql.Conn, not on a session, so that its statements find there what earlier
// ones have left (the default database, variables, temporary tables).

// openPinned returns c.pinned, the unit of work that lives on this connection because it was
// read in over a sql.Conn, and takes its turn; nil where it has ended. Where it was lost, what was
// to run in it is refused until its lock context ends, with the hint of a hold around, of a claim or
// of another lock context, too: it would commit by itself.
func (c *Conn) openPinned(ctx context.Context) (*unit, error) {
	u := c.pinned
	if err := u.ctxState.take(ctx); err != nil {
		return nil, err
	}
	u.outlivesHold()
	if u.state == ended {
		defer u.ctxState.give()
		h, _ := hint.From(ctx)
		own := h != nil && h.LockContext != nil && ctxStateOf(c.k, h.LockContext) == u.ctxState
		switch {
		case !u.bars():
			c.pinned = nil
		case !own:
			return nil, u.cause
		}
		if c.bad.Load() && (!own || u.ctxState.failed == nil) { // see enter; a lock context that has failed says why
			return nil, driver.ErrBadConn
		}
		return nil, nil
	}
	return u, nil
}

// bars reports whether what is to run in the unit, which has ended, would commit by itself. Its lock
// context may have begun another one since: then the caller knows.
func (u *unit) bars() bool {
	return errors.Is(u.cause, lockerr.ErrLost) && u.until != nil && u.until.Err() == nil && u.ctxState.latest == u
}

// samePinned returns why a call with h must not become part of u, the unit of work
// that lives on this connection.
func (c *Conn) samePinned(u *unit, h *hint.Hint, op string) error {
	if h != nil && h.LockContext != nil && ctxStateOf(c.k, h.LockContext) != u.ctxState {
		return c.k.Error(op, h, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the unit of work of another lock context is open on this sql.Conn, which has one transaction at a time; end that context first, or use one lock context for both")))
	}
	return u.ctxState.check(h)
}

// openHere opens a unit of work on the connection of a sql.Conn, for a query that
// only reads. It ends with its first commit, at the latest with the context end or
// when the sql.Conn is closed.
func (c *Conn) openHere(ctx, end context.Context, s *ctxState, p *plan) (*unit, error) {
	u, err := c.begin(ctx, s, p, driver.TxOptions{})
	if err != nil {
		return nil, err
	}
	u.on.(*onConn).pinned, c.pinned = true, u
	u.live(end)
	return u, nil
}

// endPinned ends c.pinned, the unit of work that lives on this connection, which is about to
// go to another user. Only finished autocommit statements are in it.
func (c *Conn) endPinned() {
	u := c.pinned
	c.pinned = nil
	_ = u.ctxState.take(context.Background())
	defer u.ctxState.give()
	if u.state == ended {
		return
	}
	commit := len(u.stack) == 0
	if err := u.finish(commit); err == nil && !commit {
		u.cause = u.error("statement", lockerr.With(lockerr.ErrLost, errors.New("the sql.Conn on which the transaction was open has been closed")))
	}
	if stale := u.ctxState.stale; stale.by.Load() != nil {
		by := "the end of its sql.Conn"
		stale.by.Store(&by)
	}
}

// stay returns why a statement that came over this connection must not run on that
// of u, if so: what it needs is here, or what it leaves must not be there. See [Conn.ours], too.
func (c *Conn) stay(ctx context.Context, u *unit, h *hint.Hint, st *statement.Statement, op string) error {
	if err := c.ours(ctx, op, h); err != nil {
		return err
	}
	if u.appConn() == c.appConn {
		return nil
	}
	refuse := func(format string, args ...any) error {
		return c.k.Error(op, h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(format, args...)))
	}
	if left := c.carries(st); left != "" {
		return refuse("the lock context has its unit of work open on another connection, and %s on this one; "+
			"run all statements of the lock context over the same sql.Conn", left)
	}
	if on, ok := u.on.(*onConn); ok {
		left := on.found // a transaction shares what it leaves itself
		if on.pinned {
			left = on.carries(st)
		}
		if left != "" {
			return refuse("the lock context has its unit of work open on another connection, and %s there; "+
				"run all statements of the lock context over the same sql.Conn, or its sql.Tx", left)
		}
	}
	if st == nil {
		return nil
	}
	if st.Info.Taints && !st.Info.Calls && (u.pinned() || st.ForConn()) {
		return refuse("the statement leaves something on its connection, and the lock context has its unit of work open on another one; " +
			"run all statements of the lock context over the same sql.Conn")
	}
	return c.asks(ctx, h, st, u)
}

// asks returns why a statement must not run in to, or here where to is nil, or is here: a
// sql.Conn asks for what the statement before it has left, which ran elsewhere.
func (c *Conn) asks(ctx context.Context, h *hint.Hint, st *statement.Statement, to *unit) error {
	if !c.recalls(st) {
		return nil
	}
	if to != nil && to.appConn() != c.appConn {
		if c.lastIn == to {
			return nil
		}
		return to.error(st.Op(), c.elsewhere())
	}
	if c.last != nil && c.lastIn == nil {
		if err := c.need(ctx); err != nil { // it may be the one of then
			return c.k.Error(st.Op(), h, err)
		}
	}
	switch {
	case c.last == nil && c.lastIn == nil:
		return nil
	case to != nil:
		return to.error(st.Op(), c.elsewhere())
	}
	return c.k.Error(st.Op(), h, c.elsewhere())
}

// runIn runs a statement that came over this connection in a unit of work.
func (c *Conn) runIn(ctx context.Context, u *unit, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if c.newUse(); u.appConn() != c.appConn {
		c.lastIn = u
	}
	return u.run(ctx, st)
}

// beginPinned begins a transaction on a sql.Conn on which a unit of work lives: it is
// that one's, with a hint or without.
func (c *Conn) beginPinned(ctx context.Context, u *unit, h *hint.Hint, t *inner, opts driver.TxOptions) error {
	if h != nil && h.Err != nil {
		return &lockerr.Error{Op: "begin", Err: h.Err}
	}
	if err := c.samePinned(u, h, "begin"); err != nil {
		return err
	}
	if h != nil {
		if err := u.join(ctx, h); err != nil {
			return err
		}
	}
	return u.nest(ctx, t, opts)
}

// open opens the unit of work of a query that only reads: on the sql.Conn that it
// came over, else on a session, which has nothing of what there is on this one. A light
// connection that is not told of the end of its sql.Conn leaves the unit to a session,
// unless it keeps a real connection in any case.
func (c *Conn) open(ctx, end context.Context, s *ctxState, p *plan, st *statement.Statement) (*unit, error) {
	if st.ForConn() && (c.told || !c.k.Bounded() || c.link != nil) {
		return c.openHere(ctx, end, s, p)
	}
	if left := c.carries(st); left != "" {
		return nil, c.k.Error(st.Op(), p.h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
			"%s on this connection, and the unit of work would run on another; use a sql.Conn or BeginTx for what belongs to one connection, and the DSN for session variables", left)))
	}
	return s.openSession(ctx, end, p, nil)
}
