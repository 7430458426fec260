package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Exec runs a statement, or returns driver.ErrSkip if the base driver has to prepare it.
func (c *Conn) Exec(ctx context.Context, text string, args []driver.NamedValue) (res driver.Result, err error) {
	if err := c.enter(ctx, true); err != nil {
		return nil, err
	}
	if c.direct(ctx) {
		info, err := c.checkUnhinted(ctx, text)
		if err != nil {
			return nil, err
		}
		res, err := basedriver.Exec(ctx, c.app.Link.Conn, text, args)
		return res, c.noteRun(text, info, false, err)
	}
	_, res, err = c.run(ctx, &statement.Statement{Text: text, Args: args})
	return res, err
}

// Query is Exec for a query.
func (c *Conn) Query(ctx context.Context, text string, args []driver.NamedValue) (r driver.Rows, err error) {
	if err := c.enter(ctx, true); err != nil {
		return nil, err
	}
	if c.direct(ctx) {
		info, err := c.checkUnhinted(ctx, text)
		if err != nil {
			return nil, err
		}
		r, err := basedriver.Query(ctx, c.app.Link.Conn, text, args)
		return r, c.noteRun(text, info, true, err)
	}
	r, _, err = c.run(ctx, &statement.Statement{Text: text, Args: args, Query: true})
	return r, err
}

// run runs a statement under the hint of its context, or in the unit of work of the transaction that is
// open on the connection.
func (c *Conn) run(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	h, _ := hint.From(ctx) // nil without one
	if h != nil && h.Err != nil {
		return nil, nil, &lockerr.Error{Op: st.Op(), Err: h.Err}
	}
	st.Info = sqltext.Look(st.Text)
	if h != nil {
		st.Holds = h.Holds
	} else if c.tx != nil { // the statement is in the holds of its transaction
		if began, ok := hint.From(c.tx.ctx); ok {
			st.Holds = began.Holds
		}
	}
	if h != nil && len(h.Holds) > 0 && !c.onlyReads(h, st) {
		if err := checkReachable(ctx, c.handle, h); err != nil {
			return nil, nil, err
		}
	}
	r, res, err := c.runLocked(ctx, h, st)
	lockEnded := errors.Is(err, errHoldEnded) || errors.Is(err, errContextEnded)
	if ctx.Err() != nil && lockEnded && !fromLock(context.Cause(ctx)) {
		err = c.lockError(h, st.Op(), ctx.Err()) // ctx has ended a moment ago, and the lock with it
	}
	return r, res, err
}

// lockError returns the error of a statement under the lock of h, or if h is nil under that of the transaction that is open
// on the connection.
func (c *Conn) lockError(h *hint.Hint, op string, err error) error {
	switch {
	case h != nil:
		return c.handle.Error(op, h, err)
	case c.tx != nil && c.tx.u != nil:
		return c.tx.u.error(op, err)
	}
	return &lockerr.Error{Op: op, Err: err}
}

// onlyReads reports whether nothing that is written in a hold can depend on a statement: it takes no
// lock, has no part in a transaction that may write, and reads no table on which a caller may decide
// what to write.
func (c *Conn) onlyReads(h *hint.Hint, st *statement.Statement) bool {
	if c.tx != nil {
		return h.LockContext == nil && c.tx.opts.ReadOnly
	}
	return h.LockContext == nil && st.Query && !st.MayWrite() && !st.Info.Tables
}

// runLocked runs a statement under a lock, by its route. h is nil without a hint, which a statement in a
// transaction need not have.
func (c *Conn) runLocked(ctx context.Context, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if c.tx != nil && !c.tx.locked() { // refused before the statement waits for a turn
		_, err := routeOf(c.tx, h, nil, st)
		return nil, nil, c.handle.Error(st.Op(), h, err)
	}
	cs, err := c.takeState(ctx, h)
	if err != nil {
		return nil, nil, err
	}
	defer cs.giveTurn()
	way, err := routeOf(c.tx, h, cs.unit, st)
	if err != nil {
		return nil, nil, c.handle.Error(st.Op(), h, err)
	}
	if way != routeDefinition {
		if err := cs.checkDecision(h, cs.unit, st); err != nil {
			return nil, nil, err
		}
	}
	switch way {
	case routeTransaction:
		return c.runInTransaction(ctx, c.tx.u, h, st)
	case routeJoin:
		return c.runJoined(ctx, cs.unit, h, st)
	case routeDefinition:
		return c.runDefinition(ctx, cs, h, st)
	case routeRead:
		return c.runRead(ctx, cs, h, st)
	default:
		return c.runAlone(ctx, cs, h, st)
	}
}

// errBeganWithout refuses a statement under a lock in a transaction that has begun without the lock. The
// transaction may show data from before the changes of the lock's last holder.
var errBeganWithout = lockerr.With(lockerr.ErrUnsafe, errors.New(
	"the transaction began without the lock; begin it with the lock context, or put mysqllock.Do around it"))

// runDefinition runs DDL in holds that no transaction keeps. DDL commits by itself. So right before it a
// transaction without anything else asks the server whether the holds are still held. If they are lost
// while the DDL runs, its context ends, and the server is told to stop it.
func (c *Conn) runDefinition(ctx context.Context, cs *ctxState, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.checkNothingOpen(ctx, st.Op(), h); err != nil {
		return nil, nil, err
	}
	if err := c.checkLeft(st.Op(), h, st, nil); err != nil {
		return nil, nil, err
	}
	p, err := cs.plan(h)
	if err != nil {
		return nil, nil, err
	}
	u, err := cs.openUnit(ctx, p, opening{op: "begin"})
	if err != nil {
		return nil, nil, err
	}
	u.noteEnd(ctx)
	if err := u.finish(true); err != nil {
		return nil, nil, err
	}
	if err := c.connect(ctx); err != nil {
		return nil, nil, err
	}
	// Behind a Router the connection that KILL ends may serve somebody else by then.
	ends := u.l.Info().Kills && !u.l.Info().Router
	if err := c.app.Link.AwaitTurn(ctx); err == nil {
		if ends {
			_ = c.app.Link.Identify(ctx) // a failure here comes again with the statement
		}
		c.app.Link.EndTurn()
	}
	link := c.app.Link
	r, res, err := c.runHere(ctx, st)
	if err != nil && ctx.Err() != nil {
		c.app.Bad.Store(true)
		if ends {
			u.l.Background(func(ctx context.Context) { _ = u.l.Control.KillAdopted(ctx, link) })
		}
	}
	return r, res, err
}
