package unit

import (
	"context"
	"fmt"
	"slices"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// join adds to the unit those locks of a hint that the unit does not hold yet.
func (u *unit) join(ctx context.Context, h *hint.Hint) (err error) {
	if h == u.heldHint {
		return nil
	}
	p, err := u.ctxState.plan(h)
	if err != nil {
		return err
	}
	for _, g := range p.around {
		if !slices.Contains(u.outer, g) {
			u.outer = append(u.outer, g)
		}
	}
	if len(p.missing) == 0 {
		u.heldHint = h
		return nil
	}
	defer func() { p.refused(ctx, u.ctxState.handle, err) }()
	if _, err := locksFor(ctx, u.ctxState.handle, h, false, p.missing...); err != nil {
		return err
	}
	p.prepareWith(u.ctxState, u.l, false) // u.l, also if the handle has met another server since
	if err := u.mayJoin(ctx, p); err != nil {
		return err
	}
	undo, err := u.ctxState.takeGrants(ctx, p, nil)
	if err != nil {
		return err
	}
	if p.versions {
		if err := u.verify(ctx); err != nil {
			undo()
			return err
		}
	}
	for i := range p.requests {
		if err := u.lock(ctx, p, i, i == 0); err != nil {
			if u.state != stateEnded {
				undo()
			}
			return err
		}
	}
	u.heldHint = h
	return nil
}

// mayJoin returns why what the unit has read, or may read, is of no use under the additional locks of p;
// nil if it is of use. If the unit has read nothing but a version, mayJoin gives up that snapshot.
func (u *unit) mayJoin(ctx context.Context, p *plan) error {
	if p.versions {
		if err := u.l.Dirty(u.levels); err != nil {
			return u.error("lock", err)
		}
	}
	if u.past.snapshot == versionSnapshot {
		u.past.snapshot = noSnapshot
		if err := u.text(ctx, "lock", "ROLLBACK"); err != nil {
			return err
		}
	}
	if u.l.StaleSnapshot(u.past.snapshot == readSnapshot, p.versions, p.h, u.levels) {
		return u.error("lock", lockerr.With(lockerr.ErrStaleSnapshot, fmt.Errorf(
			"it has read before it asks for %s; ask for all keys at once (lockctx.WithKeys), or say lockctx.AllowStale()", p.h.Names())))
	}
	return nil
}

// verify makes sure that the transaction shows nothing older than the versions that its context state
// remembers, which may have been read on another connection.
func (u *unit) verify(ctx context.Context) error {
	if !u.ctxState.remembers() {
		return nil
	}
	if err := u.takeLink(ctx, "lock"); err != nil {
		return err
	}
	defer u.giveTurn()
	if err := u.ctxState.verify(ctx, u.session); err != nil {
		return u.error("lock", noRetry(err))
	}
	return nil
}

// verify returns lockerr.ErrConflict if c leads to a node that does not show a remembered version yet. The
// caller has the turn of c.
func (cs *ctxState) verify(ctx context.Context, c *pool.Conn) error {
	for _, g := range cs.grants.list {
		if v, ok := g.held.(strategy.Verified); ok {
			if err := v.Verify(ctx, c.Conn); err != nil {
				return err
			}
		}
	}
	return nil
}

// lockRest takes the row locks that p asks for after the first of them. If one is not granted, the unit
// is over as if it had not begun: the grants from before it stay, and the lock context may try again.
func (u *unit) lockRest(ctx context.Context, p *plan) error {
	u.keep = true
	for i := 1; i < len(p.requests); i++ {
		if err := u.lock(ctx, p, i, true); err != nil {
			_ = u.finish(false)
			return err
		}
	}
	u.keep = false
	return nil
}

// lock takes the row locks of request i of p in the open transaction. first: the request is the first of
// its call, so that the transaction goes on if the locks are not granted.
func (u *unit) lock(ctx context.Context, p *plan, i int, first bool) error {
	r := p.requests[i]
	if r.Wait = p.wait.Left(); r.Wait == 0 {
		u.ctxState.handle.AwaitEnding(ctx, r.resources)
	}
	if err := u.takeLink(ctx, "lock"); err != nil {
		return err
	}
	defer u.giveTurn()
	caller := ctx
	ctx, release := u.untilClosed(ctx)
	defer release()
	p.asked = true
	r.seen, ctx = u.ctxState.handle.Observe(ctx, r.resources...)
	locked, alive, err := u.l.RowLocks.Join(ctx, u.session, r.Request)
	r.seen.Answered(u.session, nil, 0, err)
	if err == nil {
		u.savepoints.hasOlder = u.savepoints.hasOlder || len(u.rowLocks.rows) == 0
		u.granted(r, nil, locked)
		return nil
	}
	if ctx.Err() != nil && caller.Err() == nil && u.ctxState.handle.Closed() {
		err = u.error("lock", lockerr.ErrClosed)
	}
	if !alive || !first {
		gone := server.Gone(err, u.session.Conn)
		err = noRetry(err)
		u.lose(err, gone)
	}
	return err
}
