package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// begin opens a unit of work, with what p asks for, on a connection of database/sql that is free.
func (c *Conn) begin(ctx context.Context, s *scope, p *plan, opts driver.TxOptions) (*unit, error) {
	if opts.ReadOnly && slices.ContainsFunc(p.missing, func(place strategy.Place) bool { return place.Traits.Inside && !place.Shared }) {
		return nil, &lockerr.Error{Op: "begin", Key: handle.Names(p.h), Strategy: hint.StrategyRow, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the server takes row locks in a READ ONLY transaction only if they are shared"))}
	}
	if err := p.ready(ctx, s, true); err != nil {
		return nil, err
	}
	if err := c.ours(ctx, "begin", p.h); err != nil { // again: by now it is known how connections begin
		return nil, err
	}
	if len(p.guards) > 0 {
		return c.beginGuarded(ctx, s, p, opts)
	}
	levels, err := c.begins(ctx, p, opts)
	if err != nil {
		return nil, err
	}
	return c.beginApart(ctx, s, p, opts, levels)
}

// begins returns the isolation levels of the transaction that is about to begin, and why versions
// that it compares are of no use there, if so.
func (c *Conn) begins(ctx context.Context, p *plan, opts driver.TxOptions) (sqltext.Levels, error) {
	levels := c.texts.begins(opts, len(p.guards) > 0)
	if p.compares {
		return levels, c.clean(ctx, p, "begin", levels)
	}
	return levels, nil
}

// beginGuarded is begin for what is to be taken outside of the transaction, too: that comes first,
// and the transaction begins with it where it can.
func (c *Conn) beginGuarded(ctx context.Context, s *scope, p *plan, opts driver.TxOptions) (*unit, error) {
	on, err := c.lends(ctx, s, p)
	if err != nil {
		return nil, err
	}
	b := c.beginning(s, p, opts)
	levels, err := c.begins(ctx, p, opts)
	if err != nil {
		return nil, err
	}
	undo, err := s.takeGuards(ctx, p, on, b)
	begun, whole := b.Conclude()
	switch {
	case err != nil:
		if begun {
			c.bad.Store(true) // the transaction goes with it
		}
		return nil, handle.Yielded(err)
	case !whole:
		undo()
		return nil, c.k.Error("begin", p.h, lockerr.With(lockerr.ErrLost, errors.New(
			"the connection on which the transaction was to begin was still in use when the lock was taken; it is closed")))
	case begun:
		u := c.newUnit(s, p, c.link.Begun(ctx), opts)
		u.levels = levels
		if b.Limited {
			p.l.KeepAlive.Keep(c.link, u.lostBehind)
		}
		return u, nil
	}
	u, err := c.beginApart(ctx, s, p, opts, levels)
	if err != nil {
		undo()
	}
	return u, err
}

// lends returns the connection on which versions are read that p asks for. If c has none yet,
// and nothing else is to be taken, it gets one now, provided that one is ready: it needs it
// right afterwards, unless it has to wait.
func (c *Conn) lends(ctx context.Context, s *scope, p *plan) (lent, error) {
	if c.link != nil || !p.versions || p.locks || !c.k.Apps().Ready() {
		return lent{link: c.link}, nil
	}
	if err := c.needToBegin(ctx, s, p.h, p.wait.Left()); err != nil {
		return lent{}, err
	}
	return lent{c.link, c.release}, nil
}

// needToBegin is needClean for a caller that does not wait in the server, with the error that
// the caller of BeginTx gets.
func (c *Conn) needToBegin(ctx context.Context, s *scope, h *hint.Hint, wait time.Duration) error {
	err := c.needClean(ctx, s, h, wait, false)
	if err == nil || errors.Is(err, driver.ErrBadConn) {
		return err
	}
	return c.k.SetupError(h, err)
}

// beginning is the transaction that may begin with what is to be taken; nil if it begins
// apart.
func (c *Conn) beginning(s *scope, p *plan, opts driver.TxOptions) *strategy.Beginning {
	if c.beginsWithVersions(p, opts) { // who takes has the turn
		return strategy.NewBeginning(func(context.Context) (*pool.Conn, error) { return c.link, nil }, func(bool) { c.spoiled() })
	}
	if len(p.guards) != 1 || p.versions || p.guards[0].Slots > 0 || p.inTransaction() {
		return nil
	}
	if c.texts.next != 0 { // to take it would use up that level
		return nil
	}
	light := c.link == nil
	back := func(begun bool) {
		c.spoiled()
		c.link.EndTurn()
		if light && !begun { // it is not kept while the caller waits for the lock
			c.release()
		}
	}
	b := strategy.NewBeginning(func(ctx context.Context) (*pool.Conn, error) {
		if err := c.needClean(ctx, s, p.h, p.wait.Left(), false); err != nil {
			return nil, err
		}
		if err := c.link.AwaitTurn(ctx); err != nil {
			if light {
				c.release()
			}
			return nil, err
		}
		if err := c.liftLimit(ctx); err != nil {
			back(false)
			return nil, err
		}
		return c.link, nil
	}, back)
	b.Options, b.Ends = opts, len(s.guards) == 0 && !s.decided
	b.Free = func() bool { return c.link != nil || c.k.Apps().Ready() }
	return b
}

// spoiled notes that the connection is not to be used again, where it is not clean.
func (c *Conn) spoiled() {
	if c.link != nil && !c.link.Clean() {
		c.bad.Store(true)
	}
}

// beginsWithVersions reports whether a transaction may begin in the statement that reads
// versions for it: nothing else is to be locked, and nothing is to be set on the connection
// before. What a SET TRANSACTION has said of the next transaction, that statement would use
// up.
func (c *Conn) beginsWithVersions(p *plan, opts driver.TxOptions) bool {
	return c.link != nil && c.unlimit == "" && c.texts.next == 0 && opts == (driver.TxOptions{}) && !p.locks
}

// beginApart begins the transaction of a unit of work whose guards were taken before, and locks
// what p asks for in it.
func (c *Conn) beginApart(ctx context.Context, s *scope, p *plan, opts driver.TxOptions, levels sqltext.Levels) (u *unit, err error) {
	switch {
	case !p.inTransaction():
		u, err = c.beginFenced(ctx, s, p, opts)
	case c.link == nil:
		u, err = c.beginLight(ctx, s, p, opts)
	default:
		u, err = c.beginHere(ctx, s, p, opts)
	}
	if err != nil {
		c.spoiled()
		return nil, handle.Yielded(err)
	}
	if u.levels == 0 {
		u.levels = levels
	}
	if c.unlimit != "" || u.txn.Limited() {
		p.l.KeepAlive.Keep(c.link, u.lostBehind)
	}
	if len(p.requests) > 1 {
		return u, handle.Yielded(u.lockRest(ctx, p))
	}
	return u, nil
}

// beginFenced begins a transaction without row locks. Under guards it is begun by text, as it
// is committed by text: see [fence].
func (c *Conn) beginFenced(ctx context.Context, s *scope, p *plan, opts driver.TxOptions) (*unit, error) {
	if err := c.needToBegin(ctx, s, p.h, c.k.Wait(p.h)); err != nil {
		return nil, err
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return nil, err
	}
	defer c.link.EndTurn()
	if err := c.liftLimit(ctx); err != nil {
		return nil, err
	}
	if opts != (driver.TxOptions{}) || len(s.guards)+len(p.around) == 0 {
		txn, err := c.link.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return c.newUnit(s, p, txn, opts), nil
	}
	if err := server.Exec(ctx, c.link.Conn, "START TRANSACTION"); err != nil {
		return nil, err
	}
	return c.newUnit(s, p, c.link.Begun(ctx), opts), nil
}

// beginHere begins a transaction with the first request of p on the connection that c has.
func (c *Conn) beginHere(ctx context.Context, s *scope, p *plan, opts driver.TxOptions) (*unit, error) {
	if err := c.link.AwaitTurn(ctx); err != nil {
		return nil, err
	}
	defer c.link.EndTurn()
	first := p.requests[0]
	first.Conn = func(context.Context) (*pool.Conn, error) { return c.limits(p.l, nil) }
	return c.beginFirst(ctx, s, p, opts, first)
}

// beginLight is beginHere for a caller without a connection: it gets one when its turn in
// the process's line has come.
func (c *Conn) beginLight(ctx context.Context, s *scope, p *plan, opts driver.TxOptions) (*unit, error) {
	connect := func(ctx context.Context, blocks bool) (*pool.Conn, error) {
		if err := c.needClean(ctx, s, p.h, p.wait.Left(), blocks); err != nil {
			return nil, err
		}
		return c.limits(p.l, c.link.AwaitTurn(context.Background())) // it is free
	}
	first := p.requests[0]
	first.Conn = func(ctx context.Context) (*pool.Conn, error) { return connect(ctx, false) }
	if !s.holds(p.h) {
		first.Block = func(ctx context.Context) (*pool.Conn, error) {
			if c.link.Block() {
				return c.limits(p.l, nil)
			}
			c.link.EndTurn()
			c.release()
			return connect(ctx, true)
		}
	}
	defer func() {
		if c.link != nil {
			c.link.Unblocked()
			c.link.EndTurn()
		}
	}()
	return c.beginFirst(ctx, s, p, opts, first)
}

// limits returns the connection, unless there is an error, and notes that a limit on its idleness
// is about to be set: also where the lock is not granted then.
func (c *Conn) limits(l *handle.Locks, err error) (*pool.Conn, error) {
	if err == nil && l.IdleLimit() > 0 {
		c.unlimit = l.Info().SetIdleLimit(l.Info().IdleLimit)
	}
	return c.link, err
}

// beginFirst begins a transaction with the first request of p.
func (c *Conn) beginFirst(ctx context.Context, s *scope, p *plan, opts driver.TxOptions, first request) (*unit, error) {
	if p.wait.None() {
		c.k.Tenures.Settle(ctx, first.places)
	}
	first.seen, ctx = c.k.Observe(ctx, first.places...)
	first.Wait = p.wait.Left()
	grant, err := p.l.Begin(ctx, opts, false, first.Request)
	if err != nil {
		first.seen.Answered(nil, nil, 0, err)
		return nil, err
	}
	first.seen.Answered(c.link, grant.Ticket, 0, nil)
	u := c.newUnit(s, p, grant.Txn, opts)
	u.levels = p.l.LockedLevel()
	u.granted(first, grant.Ticket, grant.Locked)
	return u, nil
}

// newUnit returns a unit on this connection.
func (c *Conn) newUnit(s *scope, p *plan, txn *pool.Txn, opts driver.TxOptions) *unit {
	u := newUnit(s, p, c.link, txn)
	u.on, u.opts, u.limit = &onConn{site: c.site, l: p.l, node: p.l.Node(), found: c.carries(nil)}, opts, 0
	return u
}
