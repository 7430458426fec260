package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// runRead runs a query that only reads, outside any transaction. Its lock is kept when the query is over,
// so for a row lock the query runs on a session. Under grants, and inside a hold, the query runs on this
// connection.
func (c *Conn) runRead(
	ctx context.Context, cs *ctxState, h *hint.Hint, st *statement.Statement,
) (_ driver.Rows, _ driver.Result, err error) {
	if st.Info.Tables && c.handle.HeldElsewhere(h.LockContext) {
		return nil, nil, c.handle.Error(st.Op(), h, errHeldElsewhere)
	}
	p, err := cs.plan(h)
	if err != nil {
		return nil, nil, err
	}
	defer func() { p.refused(ctx, c.handle, err) }()
	var end context.Context
	if len(p.missing) > 0 {
		if end, err = c.readUntil(ctx, cs, p, st); err != nil {
			return nil, nil, err
		}
	}
	if err := c.checkNothingOpen(ctx, st.Op(), h); err != nil {
		return nil, nil, err
	}
	if p.inTransaction() {
		if err := c.checkLeft(st.Op(), h, st, unitToCome); err != nil {
			return nil, nil, err
		}
		u, err := cs.openUnit(ctx, p, opening{op: "lock", end: end, with: st})
		if err != nil {
			return nil, nil, err
		}
		return c.runIn(ctx, u, st)
	}
	if err := c.checkUsable(ctx, st.Op(), h); err != nil {
		return nil, nil, err
	}
	if err := c.checkLeft(st.Op(), h, st, nil); err != nil {
		return nil, nil, err
	}
	if err := c.readUnder(ctx, end, cs, p, st); err != nil {
		return nil, nil, err
	}
	if err := c.connectClean(ctx, cs, p, st.Op(), c.handle.Wait(h), false); err != nil {
		return nil, nil, c.handle.Error(st.Op(), h, err)
	}
	if err := c.verify(ctx, cs, st); err != nil {
		return nil, nil, c.handle.Error(st.Op(), h, err)
	}
	r, res, err := c.runHere(ctx, st)
	if err == nil && r != nil && cs.decision.stale.giver.Load() != nil {
		r, err = statement.ReadAhead(r, statement.BufferBytes) // the server may find an error among the rows
	}
	if err != nil {
		return nil, nil, err
	}
	cs.decision.hasRead(cs.handle, st, len(cs.grants.list) > 0)
	noteHolds(st)
	return r, res, nil
}

// verify makes sure that a query of tables shows nothing older than the remembered versions, and nothing that may still be
// rolled back. This connection may lead to another node, which does not have what has set the versions yet. And plain SQL
// text may have set the level READ UNCOMMITTED for the transaction that comes next, which would be this query.
func (c *Conn) verify(ctx context.Context, cs *ctxState, st *statement.Statement) error {
	if !st.Info.Tables || !cs.remembers() {
		return nil
	}
	if err := c.app.Link.AwaitTurn(ctx); err != nil {
		return err
	}
	defer c.app.Link.EndTurn()
	if err := c.app.PassNext(ctx); err != nil {
		return err
	}
	return cs.verify(ctx, c.app.Link)
}

// readUntil returns the context that ends the locks which a query takes, and gets p ready. After that the
// handle knows how connections begin, which checkNothingOpen asks.
func (c *Conn) readUntil(ctx context.Context, cs *ctxState, p *plan, st *statement.Statement) (end context.Context, err error) {
	if end = p.h.LockContext.Context(); end.Done() == nil && p.locks {
		end = ofQuery{ctx}
	}
	if end.Done() == nil && p.locks {
		return nil, c.handle.Error(st.Op(), p.h, lockerr.With(lockerr.ErrNoEnd, errors.New(
			"nothing would release the lock that this query takes; "+
				"derive the context with context.WithCancel or WithTimeout before lockctx.With, or use BeginTx or mysqllock.Do")))
	}
	return end, p.prepare(ctx, cs, true)
}

// readUnder takes the grants that a query asks for. The grants end with end.
func (c *Conn) readUnder(ctx, end context.Context, cs *ctxState, p *plan, st *statement.Statement) error {
	if !p.compares && len(p.outside) == 0 {
		return nil
	}
	if err := p.prepare(ctx, cs, true); err != nil {
		return err
	}
	if p.compares {
		if err := c.checkLevels(ctx, p, st.Op()); err != nil {
			return err
		}
	}
	if len(p.outside) == 0 {
		return nil
	}
	lender, lent := c.lender(cs, p, st.Op())
	_, err := cs.takeGrants(ctx, p, lender)
	if *lent {
		c.app.Link.EndTurn()
	}
	if err != nil {
		return handle.Yielded(err)
	}
	cs.watch(end)
	return nil
}

// lender lends the connection of c to a strategy that reads versions. lent says whether it is lent now. c may have no
// connection yet. Then the strategy takes one for c, if one is ready and only versions are to be taken: the query needs
// it right afterwards, unless the caller has to wait.
func (c *Conn) lender(cs *ctxState, p *plan, op string) (lender *strategy.Lender, lent *bool) {
	lent = new(bool)
	if !p.versions || p.locks || c.app.Link == nil && !c.handle.Apps().Ready() {
		return nil, lent
	}
	light := c.app.Link == nil
	give := func() {
		if light {
			c.release()
		}
	}
	return &strategy.Lender{
		Get: func(ctx context.Context) (*pool.Conn, error) {
			if err := c.connectClean(ctx, cs, p, op, p.wait.Left(), false); err != nil {
				return nil, err
			}
			err := c.app.Link.AwaitTurn(ctx)
			if err == nil {
				if err = c.app.PassNext(ctx); err != nil {
					c.app.Link.EndTurn()
				}
			}
			if err != nil {
				give()
				return nil, err
			}
			*lent = true
			return c.app.Link, nil
		},
		Put: func() {
			*lent = false
			if !c.app.Link.Clean() {
				c.app.Bad.Store(true)
			}
			c.app.Link.EndTurn()
			give()
		},
	}, lent
}

// runAlone runs a statement as a unit of work of its own. If the lock context has read under grants
// before, these stay when the statement fails.
func (c *Conn) runAlone(ctx context.Context, cs *ctxState, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.checkNothingOpen(ctx, st.Op(), h); err != nil {
		return nil, nil, err
	}
	if err := c.checkLeft(st.Op(), h, st, unitToCome); err != nil {
		return nil, nil, err
	}
	goesOn := len(cs.grants.list) > 0
	p, err := cs.plan(h)
	if err != nil {
		return nil, nil, err
	}
	st.Last = true
	u, err := cs.openUnit(ctx, p, opening{op: "begin", with: st})
	if err != nil {
		return nil, nil, err
	}
	u.noteEnd(ctx)
	u.keep = goesOn // also if the statement ends its transaction by an error
	r, res, err := c.runIn(ctx, u, st)
	u.keep = goesOn && (err != nil || cs.decision.readStands && u.relying.changed == "")
	// The unit commits after an error, too: of several statements in one text those that have finished
	// stay, as they do in autocommit.
	known := u.cause != nil
	ferr := u.finish(!inPart(st, err))
	if cs.failed != nil {
		cs.dropSpent() // nothing more runs in the lock context
	}
	switch {
	case ferr == nil || known && err != nil:
		return r, res, err
	case err == nil:
		return nil, nil, ferr
	}
	return nil, nil, errors.Join(err, ferr)
}

// runInTransaction runs a statement in the unit of work of the transaction that is open on the connection.
// h is nil without a hint.
func (c *Conn) runInTransaction(ctx context.Context, u *unit, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.checkLeft(st.Op(), h, st, u); err != nil {
		return nil, nil, err
	}
	if h != nil {
		if err := u.join(ctx, h); err != nil {
			return nil, nil, err
		}
	}
	return c.runIn(ctx, u, st)
}

// runJoined runs a statement in the unit of work that is open in its lock context.
func (c *Conn) runJoined(ctx context.Context, u *unit, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.checkNothingOpen(ctx, st.Op(), h); err != nil {
		return nil, nil, err
	}
	if err := c.checkLeft(st.Op(), h, st, u); err != nil {
		return nil, nil, err
	}
	if err := u.join(ctx, h); err != nil {
		return nil, nil, err
	}
	st.Last = !u.inside()
	r, res, err := c.runIn(ctx, u, st)
	if inPart(st, err) && !u.inside() {
		_ = u.finish(false)
	}
	if onlyReads := st.Query && st.Info.Kind == sqltext.Read; err != nil || u.inside() || onlyReads {
		return r, res, err
	}
	if err := u.commitOrKeep(); err != nil {
		return nil, nil, err
	}
	return r, res, nil
}

// inPart reports whether st, which has failed with err, may have written a part of its rows: if the client
// fails to read the file of LOAD DATA LOCAL, the statement ends well for the server.
func inPart(st *statement.Statement, err error) bool {
	return err != nil && server.Number(err) == 0 && st.Info.FromClient
}
