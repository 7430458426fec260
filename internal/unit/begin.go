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

// begin opens a unit of work on a connection of database/sql that is free.
func (c *Conn) begin(ctx context.Context, s *scope, h *hint.Hint, opts driver.TxOptions) (*unit, error) {
	w, err := s.wanted(h)
	if err != nil {
		return nil, err
	}
	if opts.ReadOnly && (len(w.Slots) > 0 || slices.ContainsFunc(w.Rows, func(p handle.Place) bool { return !p.Shared })) {
		return nil, &lockerr.Error{Op: "begin", Key: handle.Names(h), Strategy: hint.StrategyRow, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the server takes row locks in a READ ONLY transaction only if they are shared"))}
	}
	l, err := c.k.Use(ctx, h)
	if err != nil {
		return nil, c.k.SetupError(h, err)
	}
	if err := c.ours(ctx, "begin", h); err != nil { // again: by now it is known how connections begin
		return nil, err
	}
	wait := c.k.Budget(h)
	on, err := c.lends(ctx, s, h, w, wait)
	if err != nil {
		return nil, err
	}
	b := c.beginning(s, h, w, wait, opts)
	levels := c.texts.begins(opts, len(w.Guards) > 0)
	if w.Versions() || s.remembers() {
		if err := c.clean(ctx, l, "begin", h, levels); err != nil {
			return nil, err
		}
	}
	undo, err := s.takeGuardsWith(ctx, l, wait, w.Guards, on, b, true)
	begun, whole := b.Conclude()
	switch {
	case err != nil:
		if begun {
			c.bad.Store(true) // the transaction goes with it
		}
		return nil, handle.Yielded(err)
	case !whole:
		undo()
		return nil, c.k.Error("begin", h, lockerr.With(lockerr.ErrLost, errors.New(
			"the connection on which the transaction was to begin was still in use when the lock was taken; it is closed")))
	case begun:
		u := c.newUnit(l, s, h, c.link.Begun(ctx), opts)
		u.levels = levels
		if b.Limited {
			l.KeepAlive.Keep(c.link, u.lostBehind)
		}
		return u, nil
	}
	u, err := c.beginApart(ctx, l, s, h, opts, levels, c.k.Requests(l, s.caller(true), wait, w))
	if err != nil {
		undo()
		return nil, handle.Yielded(err)
	}
	return u, nil
}

// lends returns the connection on which versions are read that w wants. If c has none yet,
// and nothing else is to be taken, it gets one now, provided that one is ready: it needs it
// right afterwards, unless it has to wait.
func (c *Conn) lends(ctx context.Context, s *scope, h *hint.Hint, w handle.Wanted, wait handle.Budget) (lent, error) {
	if c.link != nil || !w.Versions() || w.Locks() || !c.k.Apps().Ready() {
		return lent{link: c.link}, nil
	}
	if err := c.needToBegin(ctx, s, h, wait.Left()); err != nil {
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

// beginApart begins the transaction of a unit of work whose guards were taken before.
func (c *Conn) beginApart(ctx context.Context, l *handle.Locks, s *scope, h *hint.Hint, opts driver.TxOptions, levels sqltext.Levels, requests []handle.Request) (*unit, error) {
	u, err := c.beginUnit(ctx, l, s, h, opts, requests)
	if err != nil {
		c.spoiled()
		return nil, err
	}
	if u.levels == 0 {
		u.levels = levels
	}
	if c.unlimit != "" || u.txn.Limited() {
		l.KeepAlive.Keep(c.link, u.lostBehind)
	}
	return u, u.lockRest(ctx, requests)
}

// beginning is the transaction that may begin with what is to be taken; nil if it begins
// apart.
func (c *Conn) beginning(s *scope, h *hint.Hint, w handle.Wanted, wait handle.Budget, opts driver.TxOptions) *strategy.Beginning {
	if c.beginsWithVersions(w, opts) { // who takes has the turn
		return strategy.NewBeginning(func(context.Context) (*pool.Conn, error) { return c.link, nil }, func(bool) { c.spoiled() })
	}
	if len(w.Guards) != 1 || !w.Guards[0].Traits.Excludes || w.Guards[0].Slots > 0 || w.InTransaction() {
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
		if err := c.needClean(ctx, s, h, wait.Left(), false); err != nil {
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
func (c *Conn) beginsWithVersions(w handle.Wanted, opts driver.TxOptions) bool {
	locks := func(p handle.Place) bool { return p.Traits.Excludes }
	return c.link != nil && c.unlimit == "" && c.texts.next == 0 && opts == (driver.TxOptions{}) &&
		!w.InTransaction() && !slices.ContainsFunc(w.Guards, locks)
}

// beginUnit begins the transaction of a unit of work, with the first of requests.
func (c *Conn) beginUnit(ctx context.Context, l *handle.Locks, s *scope, h *hint.Hint, opts driver.TxOptions, requests []handle.Request) (*unit, error) {
	if len(requests) > 0 && requests[0].None() {
		c.k.Tenures.Settle(ctx, requests[0].Places)
	}
	if c.link == nil && len(requests) > 0 {
		return c.beginLight(ctx, l, s, h, opts, requests[0])
	}
	if err := c.needToBegin(ctx, s, h, c.k.Wait(h)); err != nil {
		return nil, err
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return nil, err
	}
	defer c.link.EndTurn()
	if len(requests) == 0 {
		if err := c.liftLimit(ctx); err != nil {
			return nil, err
		}
		txn, err := c.beginFenced(ctx, s, h, opts)
		if err != nil {
			return nil, err
		}
		return c.newUnit(l, s, h, txn, opts), nil
	}
	first := requests[0]
	first.Conn = func(context.Context) (*pool.Conn, error) { return c.link, nil }
	return c.beginFirst(ctx, l, s, h, opts, first)
}

// beginLight is beginUnit for a caller without a connection: it gets one when its turn in
// the process's line has come.
func (c *Conn) beginLight(ctx context.Context, l *handle.Locks, s *scope, h *hint.Hint, opts driver.TxOptions, first handle.Request) (*unit, error) {
	connect := func(ctx context.Context, blocks bool) (*pool.Conn, error) {
		if err := c.needClean(ctx, s, h, first.Left(), blocks); err != nil {
			return nil, err
		}
		return c.link, c.link.AwaitTurn(context.Background()) // it is free
	}
	first.Conn = func(ctx context.Context) (*pool.Conn, error) { return connect(ctx, false) }
	if !s.holds(h) {
		first.Block = func(ctx context.Context) (*pool.Conn, error) {
			if c.link.Block() {
				return c.link, nil
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
	return c.beginFirst(ctx, l, s, h, opts, first)
}

// beginFirst begins the transaction of a unit of work with its first request.
func (c *Conn) beginFirst(ctx context.Context, l *handle.Locks, s *scope, h *hint.Hint, opts driver.TxOptions, first handle.Request) (*unit, error) {
	first.Request = first.Now()
	limited := func(connect func(context.Context) (*pool.Conn, error)) func(context.Context) (*pool.Conn, error) {
		return func(ctx context.Context) (*pool.Conn, error) {
			link, err := connect(ctx)
			if err == nil && l.IdleLimit() > 0 {
				c.unlimit = l.Info().SetIdleLimit(l.Info().IdleLimit) // also where the lock is not granted
			}
			return link, err
		}
	}
	first.Conn = limited(first.Conn)
	if first.Block != nil {
		first.Block = limited(first.Block)
	}
	first.Seen = c.k.Observe(ctx, first.Places...)
	ctx = first.Seen.Context(ctx)
	grant, err := l.Begin(ctx, opts, false, first.Request)
	if err == nil {
		first.Seen.TakenBy(c.link, grant.Ticket)
	}
	c.k.Answered(first.Seen, 0, c.k.Refused(err, first.Places))
	if err != nil {
		return nil, err
	}
	u := c.newUnit(l, s, h, grant.Txn, opts)
	u.levels = l.LockedLevel()
	u.granted(first, grant.Ticket, grant.Locked)
	return u, nil
}

// beginFenced begins a transaction without row locks. Under guards it is begun by text, as it
// is committed by text: see [commit.runLast].
func (c *Conn) beginFenced(ctx context.Context, s *scope, h *hint.Hint, opts driver.TxOptions) (*pool.Txn, error) {
	if opts != (driver.TxOptions{}) || len(s.guards)+len(enclosing(h)) == 0 {
		return c.link.Begin(ctx, opts)
	}
	if err := server.Exec(ctx, c.link.Conn, "START TRANSACTION"); err != nil {
		return nil, err
	}
	return c.link.Begun(ctx), nil
}

// newUnit returns a unit on this connection.
func (c *Conn) newUnit(l *handle.Locks, s *scope, h *hint.Hint, txn *pool.Txn, opts driver.TxOptions) *unit {
	u := newUnit(l, s, h, c.link, txn)
	u.on, u.opts = &onConn{site: c.site, l: l, node: l.Node(), found: c.carries(nil)}, opts
	return u
}
