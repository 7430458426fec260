package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// begin opens a unit of work, with what p asks for, on a connection of database/sql that is free.
// What lies outside of the transaction is taken first, and the transaction begins with it where it
// can; else with the first row lock.
func (c *Conn) begin(ctx context.Context, s *ctxState, p *plan, opts driver.TxOptions) (u *unit, err error) {
	defer func() {
		if errors.Is(err, driver.ErrBadConn) && statement.ForConn() {
			err = c.k.Error("begin", p.h, handle.ErrUnusable)
		}
	}()
	if opts.ReadOnly && slices.ContainsFunc(p.missing, func(resource strategy.Resource) bool { return resource.Traits.Inside && !resource.Shared }) {
		return nil, &lockerr.Error{Op: "begin", Key: p.h.Names(), Strategy: hint.StrategyRow, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the server takes row locks in a READ ONLY transaction only if they are shared"))}
	}
	if err := p.ready(ctx, s, true); err != nil {
		return nil, err
	}
	if err := c.ours(ctx, "begin", p.h); err != nil { // by now it is known how connections begin
		return nil, err
	}
	once := c.texts.next != 0 // levels are for the next transaction alone
	levels := c.texts.begins(opts, len(p.outside) > 0)
	if p.compares {
		if err := c.clean(ctx, p, "begin", levels); err != nil {
			return nil, err
		}
	}
	if len(p.outside) > 0 {
		var undo func()
		if u, undo, err = c.takeAround(ctx, s, p, opts, once); err != nil {
			return nil, handle.Yielded(err)
		}
		if u != nil {
			u.levels = levels
			return u, nil
		}
		defer func() {
			if err != nil {
				undo()
			}
		}()
	}
	if p.inTransaction() {
		u, err = c.beginRows(ctx, s, p, opts)
	} else {
		u, err = c.beginBare(ctx, s, p, opts)
		err = c.asToBegin(p.h, err)
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
		err = handle.Yielded(u.lockRest(ctx, p))
	}
	return u, err
}

// takeAround takes what p asks for outside of the transaction. It returns the unit of work if the
// transaction has begun with that, else what gives it back. once: the next transaction has levels of
// isolation of its own, which a statement before it would use up.
func (c *Conn) takeAround(ctx context.Context, s *ctxState, p *plan, opts driver.TxOptions, once bool) (u *unit, undo func(), err error) {
	on, err := c.lends(ctx, s, p)
	if err != nil {
		return nil, nil, err
	}
	var b *strategy.Beginning
	if !once {
		b = c.beginning(s, p, opts)
	}
	undo, err = s.takeGrants(ctx, p, on, b)
	begun, whole := b.Conclude()
	switch {
	case err != nil:
		if begun {
			c.bad.Store(true) // the transaction goes with it
		}
		return nil, nil, err
	case !whole:
		undo()
		return nil, nil, c.k.Error("begin", p.h, lockerr.With(lockerr.ErrLost, errors.New(
			"the connection on which the transaction was to begin was still in use when the lock was taken; it is closed")))
	case !begun:
		return nil, undo, nil
	}
	u = c.newUnit(s, p, c.link.Begun(ctx), opts)
	if b.Limited {
		p.l.KeepAlive.Keep(c.link, u.lostBehind)
	}
	return u, nil, nil
}

// lends returns the connection on which versions are read that p asks for. If c has none yet,
// and nothing else is to be taken, it gets one now, provided that one is ready: it needs it
// right afterwards, unless it has to wait.
func (c *Conn) lends(ctx context.Context, s *ctxState, p *plan) (lent, error) {
	if c.link != nil || !p.versions || p.locks || !c.k.Apps().Ready() {
		return lent{link: c.link}, nil
	}
	if err := c.needClean(ctx, s, p.h, p.wait.Left(), false); err != nil {
		return lent{}, c.asToBegin(p.h, err)
	}
	return lent{c.link, c.release}, nil
}

// asToBegin is err as the caller of BeginTx gets it, where nothing is held.
func (c *Conn) asToBegin(h *hint.Hint, err error) error {
	if err == nil || errors.Is(err, driver.ErrBadConn) {
		return err
	}
	return c.k.SetupError(h, err)
}

// beginning is the transaction that may begin with what is to be taken outside of it; nil if it
// begins apart: where something is to be locked in it, too, or something is to be set on the
// connection before.
func (c *Conn) beginning(s *ctxState, p *plan, opts driver.TxOptions) *strategy.Beginning {
	switch {
	case p.inTransaction():
		return nil
	case !p.locks && c.link != nil && c.unlimit == "" && opts == (driver.TxOptions{}): // who reads versions has the turn
		return strategy.NewBeginning(func(context.Context) (*pool.Conn, error) { return c.link, nil }, func(bool) { c.spoiled() })
	case len(p.outside) != 1 || p.versions || p.outside[0].Slots > 0:
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
	b.Options, b.Ends = opts, len(s.grants) == 0 && !s.decided
	b.Free = func() bool { return c.link != nil || c.k.Apps().Ready() }
	return b
}

// spoiled notes that the connection is not to be used again, where it is not clean.
func (c *Conn) spoiled() {
	if c.link != nil && !c.link.Clean() {
		c.bad.Store(true)
	}
}

// beginBare begins a transaction without row locks. Under grants it is begun by text, as it
// is committed by text: see [fence.pass].
func (c *Conn) beginBare(ctx context.Context, s *ctxState, p *plan, opts driver.TxOptions) (*unit, error) {
	if err := c.needClean(ctx, s, p.h, c.k.Wait(p.h), false); err != nil {
		return nil, err
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return nil, err
	}
	defer c.link.EndTurn()
	if err := c.liftLimit(ctx); err != nil {
		return nil, err
	}
	if opts != (driver.TxOptions{}) || len(s.grants)+len(p.around) == 0 {
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

// beginRows begins a transaction with the first request of p.
func (c *Conn) beginRows(ctx context.Context, s *ctxState, p *plan, opts driver.TxOptions) (*unit, error) {
	first := p.requests[0]
	if first.Wait = p.wait.Left(); first.Wait == 0 {
		c.k.AwaitEnding(ctx, first.resources)
	}
	if c.link == nil {
		c.connectInFront(s, p, &first)
		defer func() {
			if c.link != nil {
				c.link.Unblocked()
				c.link.EndTurn()
			}
		}()
	} else {
		if err := c.link.AwaitTurn(ctx); err != nil {
			return nil, err
		}
		defer c.link.EndTurn()
		first.Conn = func(context.Context) (*pool.Conn, error) { return c.limits(p.l, nil) }
	}
	first.seen, ctx = c.k.Observe(ctx, first.resources...)
	begun, err := p.l.Begin(ctx, opts, false, first.Request)
	if err != nil {
		first.seen.Answered(nil, nil, 0, err)
		return nil, err
	}
	first.seen.Answered(c.link, begun.Ticket, 0, nil)
	u := c.newUnit(s, p, begun.Txn, opts)
	u.levels = p.l.LockedLevel()
	u.granted(first, begun.Ticket, begun.Locked)
	return u, nil
}

// connectInFront has a caller without a connection get one, with its turn, when its turn in the
// process's queue has come.
func (c *Conn) connectInFront(s *ctxState, p *plan, first *request) {
	connect := func(ctx context.Context, blocks bool) (*pool.Conn, error) {
		if err := c.needClean(ctx, s, p.h, p.wait.Left(), blocks); err != nil {
			return nil, err
		}
		return c.limits(p.l, c.link.AwaitTurn(context.Background())) // it is free
	}
	first.Conn = func(ctx context.Context) (*pool.Conn, error) { return connect(ctx, false) }
	if s.holds(p.h) {
		return
	}
	first.Block = func(ctx context.Context) (*pool.Conn, error) {
		if c.link.Block() {
			return c.limits(p.l, nil)
		}
		c.link.EndTurn()
		c.release()
		return connect(ctx, true)
	}
}

// limits returns the connection, unless there is an error, and notes that a limit on its idleness
// is about to be set: also where the lock is not granted then.
func (c *Conn) limits(l *handle.Locks, err error) (*pool.Conn, error) {
	if err == nil && l.IdleLimit() > 0 {
		c.unlimit = l.Info().SetIdleLimit(l.Info().IdleLimit)
	}
	return c.link, err
}

// newUnit returns a unit on this connection.
func (c *Conn) newUnit(s *ctxState, p *plan, txn *pool.Txn, opts driver.TxOptions) *unit {
	u := newUnit(s, p, c.link, txn)
	u.on, u.opts, u.limit = &onConn{appConn: c.appConn, l: p.l, node: p.l.Node(), found: c.carries(nil)}, opts, 0
	return u
}
