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
	if err := c.enter(false); err != nil {
		return nil, err
	}
	if !c.told {
		defer func() { c.leave(err) }()
	}
	if c.direct(ctx) {
		info, err := c.look(ctx, text, false)
		if err != nil {
			return nil, err
		}
		res, err := basedriver.Exec(ctx, c.link.Conn, text, args)
		return res, c.ran(text, info, false, err)
	}
	_, res, err = c.run(ctx, &statement.Statement{Text: text, Args: args})
	return res, err
}

// Query is Exec for a query.
func (c *Conn) Query(ctx context.Context, text string, args []driver.NamedValue) (r driver.Rows, err error) {
	if err := c.enter(false); err != nil {
		return nil, err
	}
	if !c.told {
		defer func() { r, err = c.leaveAfter(r, err) }()
	}
	if c.direct(ctx) {
		info, err := c.look(ctx, text, false)
		if err != nil {
			return nil, err
		}
		r, err := basedriver.Query(ctx, c.link.Conn, text, args)
		return r, c.ran(text, info, true, err)
	}
	r, _, err = c.run(ctx, &statement.Statement{Text: text, Args: args, Query: true})
	return r, err
}

// run runs a statement under the hint of its context, or in the unit of work
// that the connection's transaction belongs to.
func (c *Conn) run(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	h, _ := hint.From(ctx) // nil without one
	if h != nil && h.Err != nil {
		return nil, nil, &lockerr.Error{Op: st.Op(), Err: h.Err}
	}
	if c.tx != nil && c.tx.u == nil && c.tx.failed != nil {
		return nil, nil, c.tx.failed
	}
	st.Info = sqltext.Look(st.Text)
	if h != nil {
		st.Holds = h.Holds
	} else if c.tx != nil { // it is of what its transaction is
		if began, ok := hint.From(c.tx.ctx); ok {
			st.Holds = began.Holds
		}
	}
	if h != nil && len(h.Holds) > 0 && !c.onlyReads(h, st) {
		if err := reaches(ctx, c.k, h); err != nil {
			return nil, nil, err
		}
	}
	if h != nil && h.Claim != (hint.Locking{}) {
		return c.runClaiming(ctx, h, st)
	}
	r, res, err := c.runLocked(ctx, h, st)
	if ctx.Err() != nil && (errors.Is(err, errHoldEnded) || errors.Is(err, errContextEnded)) && !fromLock(context.Cause(ctx)) {
		err = c.k.Error(st.Op(), h, ctx.Err()) // it has ended a moment ago, and the lock with it
	}
	return r, res, err
}

// runClaiming runs a statement whose hint has SELECTs lock the rows that they return.
func (c *Conn) runClaiming(ctx context.Context, h *hint.Hint, st *statement.Statement) (r driver.Rows, res driver.Result, err error) {
	if err := c.claim(ctx, h, st); err != nil {
		return nil, nil, err
	}
	if c.plain(h) { // there is nothing else to lock
		r, res, err = c.runClaim(ctx, st)
	} else {
		r, res, err = c.runLocked(ctx, h, st)
	}
	if err != nil {
		return nil, nil, claimError(h, st, err)
	}
	return r, res, nil
}

// onlyReads reports whether a statement neither takes a lock nor has a part in a
// transaction that may write, nor reads a table on which somebody may decide what is
// written in the hold.
func (c *Conn) onlyReads(h *hint.Hint, st *statement.Statement) bool {
	if c.tx != nil {
		return h.LockContext == nil && c.tx.opts.ReadOnly
	}
	return h.LockContext == nil && st.Query && !st.MayWrite() && !st.Info.Tables
}

// runLocked runs a statement in the unit of work that the connection's
// transaction belongs to, or of its context. h is nil without a hint.
func (c *Conn) runLocked(ctx context.Context, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if t := c.tx; t != nil && t.u != nil {
		return t.run(ctx, h, st)
	}
	if c.pinned != nil {
		if u, err := c.openPinned(ctx); err != nil {
			return nil, nil, err
		} else if u != nil {
			defer u.ctxState.give()
			return c.runPinned(ctx, u, h, st)
		}
	}
	if h == nil || h.Claim == (hint.Locking{}) && c.nothing(h) { // what there was ended a moment ago
		if _, err := c.look(ctx, st.Text, st.OfConn); err != nil {
			return nil, nil, err
		}
		return c.runHere(ctx, st)
	}
	s := ctxStateOf(c.k, h.LockContext)
	if err := s.take(ctx); err != nil {
		return nil, nil, err
	}
	defer s.give()
	if err := s.check(h); err != nil {
		return nil, nil, err
	}
	if st.Info.Kind == sqltext.Commits {
		switch {
		case h.LockContext != nil:
			return nil, nil, c.k.Error(st.Op(), h, errCommits)
		case !st.Info.Defines || c.tx != nil || st.Claims:
			return nil, nil, c.k.Error(st.Op(), h, errUnchecked)
		}
		return c.runDefinition(ctx, s, h, st)
	}
	if c.tx != nil {
		return c.runLate(ctx, s, h, st)
	}
	return c.runFree(ctx, s, h, st)
}

// runDefinition runs DDL in holds that no transaction keeps. It commits by itself, so the
// server is asked for the holds right before it, by a transaction without anything else; and
// when they are lost the context ends, and the server is told to stop it.
func (c *Conn) runDefinition(ctx context.Context, s *ctxState, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	p, err := s.plan(h)
	if err != nil {
		return nil, nil, err
	}
	u, err := c.begin(ctx, s, p, driver.TxOptions{})
	if err != nil {
		return nil, nil, err
	}
	u.endsWith(ctx)
	if err := u.finish(true); err != nil {
		return nil, nil, err
	}
	r, res, err := c.runHere(ctx, st)
	if err != nil && ctx.Err() != nil {
		u.on.broken()
	}
	return r, res, err
}

// runPinned runs a statement of a sql.Conn on which a unit of work lives: as in a
// transaction it is part of that, with a hint or without.
func (c *Conn) runPinned(ctx context.Context, u *unit, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.samePinned(u, h, st.Op()); err != nil {
		return nil, nil, err
	}
	if st.Info.Kind == sqltext.Commits {
		return nil, nil, u.error(st.Op(), lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the statement would end the transaction in which this sql.Conn holds the lock; run it on another connection, or end the lock context first")))
	}
	if err := u.ctxState.undecided(h, u, st); err != nil {
		return nil, nil, err
	}
	return c.runJoined(ctx, u, h, st)
}

// runFree runs a statement of a lock context outside of any transaction of this
// connection.
func (c *Conn) runFree(ctx context.Context, s *ctxState, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := s.undecided(h, s.unit, st); err != nil {
		return nil, nil, err
	}
	switch {
	case s.unit != nil:
		if err := c.stay(ctx, s.unit, h, st, st.Op()); err != nil {
			return nil, nil, err
		}
		return c.runJoined(ctx, s.unit, h, st)
	case st.Query && st.Info.Kind == sqltext.Read && st.Info.Tables && c.k.HeldElsewhere(h.LockContext):
		return nil, nil, c.k.Error(st.Op(), h, errHeldElsewhere)
	case st.Query && st.Info.Kind == sqltext.Read:
		return c.runRead(ctx, s, h, st)
	default:
		return c.runAlone(ctx, s, h, st)
	}
}
