package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// openSession opens a unit of work on a session, which ends, at the latest,
// with the context end. hold is set where a hold owns it; else the caller
// occupies a connection of database/sql.
func (s *ctxState) openSession(ctx, end context.Context, p *plan, hold *outerHold) (_ *unit, err error) {
	k := s.k
	if err := p.ready(ctx, s, hold == nil); err != nil {
		return nil, err
	}
	if p.compares {
		if err := p.l.Dirty(0); err != nil {
			return nil, k.Error("lock", p.h, err)
		}
	}
	if len(p.outside) > 0 {
		var undo func()
		if undo, err = s.takeGrants(ctx, p, lent{}, nil); err != nil {
			return nil, handle.Yielded(err)
		}
		defer func() {
			if err != nil {
				undo()
			}
		}()
	}
	if p.inTransaction() {
		first := &p.requests[0]
		first.Since = time.Now() // also of the tries that follow
		first.seen, _ = k.Observe(ctx, first.resources...)
	}
	u, err := s.openUnit(ctx, p)
	for tries := 1; errors.Is(err, driver.ErrBadConn) && tries < 3; tries++ {
		u, err = s.openUnit(ctx, p)
	}
	if errors.Is(err, driver.ErrBadConn) {
		err = k.SetupError(p.h, err)
	}
	if err != nil {
		if p.inTransaction() {
			p.requests[0].seen.Answered(nil, nil, 0, err)
		}
		return nil, handle.Yielded(err)
	}
	u.hold = hold
	u.live(end)
	p.l.KeepAlive.Keep(u.link, u.lostBehind)
	if len(p.requests) > 1 {
		if err := u.lockRest(ctx, p); err != nil {
			return nil, handle.Yielded(err)
		}
	}
	if len(s.grants) > 0 {
		if err := u.verify(ctx); err != nil {
			_ = u.finish(false)
			return nil, err
		}
	}
	return u, nil
}

// live has the unit end with end, or with the handle, if nothing ends it before.
func (u *unit) live(end context.Context) {
	u.l.Remember(u, u.abandon)
	u.until, u.stop = end, context.AfterFunc(end, u.contextEnded)
	u.endsWith(end)
	if u.ctxState.k.Closed() {
		go u.abandon(lockerr.ErrClosed)
	}
}

// openUnit opens a transaction on a session, with the first request of p. Inside a
// hold that has the key there may be none.
func (s *ctxState) openUnit(ctx context.Context, p *plan) (u *unit, err error) {
	k, h, l := s.k, p.h, p.l
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := k.OnClose(cancel)
	defer stop()
	var link *pool.Conn
	connect := func(ctx context.Context, blocks bool) (_ *pool.Conn, err error) {
		wait := k.Wait(h)
		if k.Bounded() && p.inTransaction() {
			wait = p.wait.Left()
		}
		link, err = k.Dedicated(ctx, l, s.asks(ctx, h, p.by.Pooled, blocks), wait)
		return link, err
	}
	defer func() {
		switch {
		case u != nil:
			link.Unblocked()
			link.EndTurn()
			return
		case err != nil && k.Closed():
			err = k.SetupError(h, lockerr.ErrClosed)
		}
		if link != nil {
			link.Release()
		}
	}()
	if !p.inTransaction() {
		if _, err := connect(own, false); errors.Is(err, driver.ErrBadConn) {
			return nil, err
		} else if err != nil {
			return nil, k.SetupError(h, err)
		}
		u = newUnit(s, p, link, link.Begun(own)) // by its first statement: sessions are not in autocommit
		u.levels = l.LockedLevel()
		return u, nil
	}
	first := p.requests[0]
	if first.Wait = p.wait.Left(); first.Wait == 0 {
		k.AwaitEnding(own, first.resources)
	}
	first.Conn = func(ctx context.Context) (*pool.Conn, error) { return connect(ctx, false) }
	if k.Bounded() && !s.holds(h) {
		first.Block = func(ctx context.Context) (*pool.Conn, error) {
			if link.Block() {
				return link, nil
			}
			link.Release()
			return connect(ctx, true)
		}
	}
	first.TakeOver = func(c *pool.Conn) { link = c }
	own, asked := first.seen.Within(own)
	defer asked()
	begun, err := l.Begin(own, driver.TxOptions{}, true, first.Request)
	if err != nil {
		return nil, err
	}
	first.seen.Answered(link, begun.Ticket, 0, nil)
	u = newUnit(s, p, link, begun.Txn)
	u.levels = l.LockedLevel()
	u.granted(first, begun.Ticket, begun.Locked)
	u.handoff = begun.Handoff
	return u, nil
}
