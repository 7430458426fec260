package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// openSession opens a unit of work on a session, which ends, at the latest,
// with the context end. hold is set where a hold owns it; else the caller
// occupies a connection of database/sql.
func (s *scope) openSession(ctx, end context.Context, h *hint.Hint, hold *enclosure) (_ *unit, err error) {
	k := s.k
	l, err := k.Use(ctx, h)
	if err != nil {
		return nil, k.SetupError(h, err)
	}
	w, err := s.wanted(h)
	if err != nil {
		return nil, err
	}
	if w.Versions() || s.remembers() {
		if err := l.Dirty(0); err != nil {
			return nil, k.Error("lock", h, err)
		}
	}
	wait := k.Budget(h)
	undo, err := s.takeGuards(ctx, l, wait, w.Guards, lent{}, hold == nil)
	if err != nil {
		return nil, handle.Yielded(err)
	}
	defer func() {
		if err != nil {
			undo()
		}
	}()
	requests := k.Requests(l, s.caller(hold == nil), wait, w)
	if len(requests) > 0 {
		requests[0].Since = time.Now() // also of the tries that follow
	}
	u, err := s.openUnit(ctx, l, h, requests, hold == nil)
	for tries := 1; errors.Is(err, driver.ErrBadConn) && tries < 3; tries++ {
		u, err = s.openUnit(ctx, l, h, requests, hold == nil)
	}
	if errors.Is(err, driver.ErrBadConn) {
		err = k.SetupError(h, errors.New("connections for sessions break as soon as they are used"))
		if len(requests) > 0 {
			k.Answered(k.Observe(ctx, requests[0].Places...), 0, err)
		}
	}
	if err != nil {
		return nil, handle.Yielded(err)
	}
	u.hold = hold
	u.live(end)
	k.Crowd.Hold()
	u.on.(*onSession).done = k.Crowd.Done
	l.KeepAlive.Keep(u.link, u.lostBehind)
	if err := u.lockRest(ctx, requests); err != nil {
		return nil, handle.Yielded(err)
	}
	if err := u.verify(ctx); err != nil {
		_ = u.finish(false)
		return nil, err
	}
	return u, nil
}

// live has the unit end with end, or with the handle, if nothing ends it before.
func (u *unit) live(end context.Context) {
	u.l.Remember(u, u.abandon)
	u.until, u.stop = end, context.AfterFunc(end, u.contextEnded)
	u.endsWith(end)
	if u.scope.k.Closed() {
		go u.abandon(lockerr.ErrClosed)
	}
}

// openUnit opens a transaction on a session, with the first of requests. Inside a
// hold that has the key there may be none.
func (s *scope) openUnit(ctx context.Context, l *handle.Locks, h *hint.Hint, requests []handle.Request, pooled bool) (u *unit, err error) {
	k := s.k
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := k.OnClose(cancel)
	defer stop()
	var link *pool.Conn
	connect := func(ctx context.Context, blocks bool) (_ *pool.Conn, err error) {
		wait := k.Wait(h)
		if k.Bounded() && len(requests) > 0 {
			wait = requests[0].Left()
		}
		link, err = k.Dedicated(ctx, l, s.asks(ctx, h, pooled, blocks), wait)
		return link, err
	}
	defer func() {
		switch {
		case u != nil:
			link.Unblocked()
			link.EndTurn()
			return
		case err == nil && link != nil: // the driver below panics: nobody knows what is open on it
			link.Taint()
		case err != nil && k.Closed():
			err = k.SetupError(h, lockerr.ErrClosed)
		}
		if link != nil {
			link.Release()
		}
	}()
	if len(requests) == 0 {
		if _, err := connect(own, false); errors.Is(err, driver.ErrBadConn) {
			return nil, err
		} else if err != nil {
			return nil, k.SetupError(h, err)
		}
		u = newUnit(l, s, h, link, link.Begun(own)) // by its first statement: sessions are not in autocommit
		u.levels = l.LockedLevel()
		return u, nil
	}
	first := requests[0]
	if first.None() {
		k.Tenures.Settle(own, first.Places)
	}
	first.Request = first.Now()
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
	first.Inherit = func(c *pool.Conn) { link = c }
	first.Seen = k.Observe(ctx, first.Places...)
	own, asked := first.Seen.Within(own)
	defer asked()
	grant, err := l.Begin(own, driver.TxOptions{}, true, first.Request)
	if err == nil {
		first.Seen.TakenBy(link, grant.Ticket)
	}
	k.Answered(first.Seen, 0, k.Refused(err, first.Places))
	if err != nil {
		return nil, err
	}
	u = newUnit(l, s, h, link, grant.Txn)
	u.levels = l.LockedLevel()
	u.granted(first, grant.Ticket, grant.Locked)
	u.succession = grant.Succession
	return u, nil
}
