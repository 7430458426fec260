package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Begin begins a transaction; with a hint, under its lock.
func (c *Conn) Begin(ctx context.Context, opts driver.TxOptions) (tx *Tx, err error) {
	if err := c.enter(false); err != nil {
		return nil, err
	}
	if !c.told {
		defer func() { c.leave(err) }()
	}
	h, _ := hint.From(ctx) // nil without one
	if c.tx == nil {
		c.ofConn = statement.ForConn()
	}
	t := &Tx{inner: inner{opts: opts}, c: c, ctx: ctx}
	if c.tx == nil && c.pinned != nil {
		if u, err := c.openPinned(ctx); err != nil {
			return nil, err
		} else if u != nil {
			defer u.ctxState.give()
			if err := c.beginPinned(ctx, u, h, &t.inner, opts); err != nil {
				return nil, err
			}
			c.tx = t
			return t, nil
		}
	}
	t.pooled = c.told && c.k.Bounded() && c.tx == nil && !c.ofConn
	if c.plain(h) { // a unit that was pinned may have ended
		if err := c.need(ctx); err != nil {
			return nil, err
		}
		if err := c.liftLimit(ctx); err != nil {
			return nil, err
		}
		base, err := basedriver.Begin(ctx, c.link.Conn, opts)
		if err != nil {
			c.texts.ran(beginEffect, false)
			return nil, err
		}
		t.base, t.levels = base, c.texts.begins(opts, false)
		c.tx = t
		c.texts.ran(beginEffect, true)
		return t, nil
	}
	if err := c.beginLocked(ctx, h, t, opts); err != nil {
		return nil, err
	}
	t.prev = c.tx
	c.tx = t
	return t, nil
}

// beginLocked begins a transaction under the lock of h, which is nil without a hint, or inside the
// one that is open on the connection.
func (c *Conn) beginLocked(ctx context.Context, h *hint.Hint, t *Tx, opts driver.TxOptions) error {
	if h != nil && h.Err != nil {
		return &lockerr.Error{Op: "begin", Err: h.Err}
	}
	if h != nil && len(h.Holds) > 0 && (h.LockContext != nil || !opts.ReadOnly) {
		if err := reaches(ctx, c.k, h); err != nil {
			return err
		}
	}
	if c.tx != nil {
		return c.tx.beginInside(ctx, h, &t.inner, opts)
	}
	s := ctxStateOf(c.k, h.LockContext)
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.give()
	if err := s.check(h); err != nil {
		return err
	}
	if u := s.unit; u != nil {
		if err := c.stay(ctx, u, h, nil, "begin"); err != nil {
			return err
		}
		if err := u.join(ctx, h); err != nil {
			return err
		}
		return u.nest(ctx, &t.inner, opts)
	}
	p, err := s.plan(h)
	if err != nil {
		return err
	}
	u, err := c.begin(ctx, s, p, opts)
	if err != nil {
		return err
	}
	t.u = u
	u.endsWith(ctx)
	u.stack = append(u.stack, &t.inner)
	return nil
}

// beginInside begins a transaction on a connection that has one open: a savepoint. h is
// nil without a hint.
func (t *Tx) beginInside(ctx context.Context, h *hint.Hint, next *inner, opts driver.TxOptions) error {
	switch {
	case t.u == nil && t.failed != nil:
		return t.failed
	case t.u == nil:
		return t.c.k.Error("begin", h, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"a transaction without the lock is open on this connection; begin that one with the lock context")))
	}
	s := t.u.ctxState
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.give()
	if err := t.usable(); err != nil {
		return err
	}
	if err := s.check(h); err != nil {
		return err
	}
	if h != nil {
		if err := s.unit.join(ctx, h); err != nil {
			return err
		}
	}
	return s.unit.nest(ctx, next, opts)
}

// Tx is a transaction that BeginTx has begun: one of the base driver, the
// transaction of a unit of work, or a savepoint in it.
type Tx struct {
	inner
	c    *Conn
	ctx  context.Context // of BeginTx
	base driver.Tx       // the base driver's; nil where it began with a hint
	read bool            // a plain read has run before any hint
	prev *Tx             // the transaction around it on the same connection
	// pooled: it is the only use of a light connection, which gives the real one back with it.
	// database/sql says so later, and meanwhile waits for other connections, to close what was
	// prepared on these, which may themselves be waiting for a real one.
	pooled bool
	under  *unit      // holds, elsewhere, the lock that its statements ran under
	hint   *hint.Hint // of the last statement that ran under it
	// changed: a statement may have changed something, where it began without a hint
	changed bool
	// levels of isolation that it may have, where it began without a hint; 0 for those of a new connection
	levels sqltext.Levels
}

// Commit commits. In a unit of work the outermost Commit gives the lock back.
func (t *Tx) Commit() (err error) {
	if t.pooled || !t.c.told {
		defer func() { t.over(err) }()
	}
	return t.end(true)
}

// over is for the end of a transaction on a connection that would be given back later, or of
// which nobody is told that it is: err is what Commit or Rollback returns.
func (t *Tx) over(err error) {
	if t.c.leave(err); t.pooled && t.c.tx == nil && t.c.pinned == nil {
		t.c.release()
	}
}

// Rollback rolls back. In a unit of work the outermost Rollback gives the lock
// back. What was lost is rolled back already.
func (t *Tx) Rollback() (err error) {
	if t.pooled || !t.c.told {
		defer func() { t.over(err) }()
	}
	err = t.end(false)
	if errors.Is(err, lockerr.ErrLost) {
		err = nil
	}
	// database/sql keeps a connection after a rollback on cancellation only if
	// its driver can reset and check it. We claim that we can; does the base?
	if t.ctx.Err() != nil && t.c.link != nil {
		_, resets := t.c.link.Conn.(driver.SessionResetter)
		_, checks := t.c.link.Conn.(driver.Validator)
		if !resets || !checks {
			t.c.bad.Store(true)
		}
	}
	return err
}

func (t *Tx) end(commit bool) (err error) {
	at := &t.c.tx // the transaction around it is the connection's open one again
	for *at != nil && *at != t {
		at = &(*at).prev
	}
	if *at == t {
		*at = t.prev
	}
	if t.c.tx == nil {
		defer func() {
			if t.c.texts.state != sqltext.Idle {
				t.c.texts.ran(endEffect, err == nil)
			}
		}()
	}
	if t.u == nil {
		switch {
		case t.failed != nil:
			return t.failed
		case commit && t.under != nil:
			return t.commitUnder()
		case commit:
			return t.base.Commit()
		default:
			return t.base.Rollback()
		}
	}
	_ = t.u.ctxState.take(context.Background())
	defer t.u.ctxState.give()
	if t.u.until != nil {
		t.u.inTime()
	}
	return t.u.endTx(t.ctx, &t.inner, commit)
}

// commitUnder commits a transaction whose statements ran under the locks of a unit of
// work elsewhere. That is still at what it has read before, so it ends with the commit,
// unless that has changed nothing.
func (t *Tx) commitUnder() (err error) {
	u := t.under
	rolledBack := func(sentinel error, why string) error {
		t.undo()
		return t.c.k.Error("commit", t.hint, lockerr.With(sentinel, errors.New(why+"; the transaction is rolled back")))
	}
	// The unit must not end meanwhile; but a statement that runs in it may be waiting
	// for our own rows.
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	err = u.ctxState.take(ctx)
	cancel()
	if err != nil {
		return rolledBack(lockerr.ErrLost, "a statement of the lock context that this transaction ran under is still running")
	}
	defer u.ctxState.give()
	if u.state != ended && t.changed && u.inside() {
		return rolledBack(lockerr.ErrUnsafe, "the lock context has a transaction or a hold open elsewhere, which goes on and may not see what this one has changed; "+
			"begin the transaction with the lock context")
	}
	f := fence{link: t.c.link, info: u.l.Info(), grants: slices.Concat(u.ctxState.grants, u.outer)}
	done, refused := false, true
	if err = u.alive(); err == nil {
		done, refused, err = f.pass()
	}
	if err == nil {
		if err = t.txn().Commit(0); done { // there is nothing left to commit, but its driver wants to know
			err = nil
		}
	}
	f.lift()
	switch {
	case err != nil && !refused && server.Gone(err, t.c.link.Conn):
		f.awaitEnd()
	case err != nil && (refused || server.Number(err) != 0):
		t.undo()
	}
	if t.changed && !refused {
		u.changed = "a transaction"
		_ = u.finish(true) // where it fails, the lock context's next statement is told
	}
	return err
}

// undo rolls back what began without a hint, and must not be committed by whatever comes after it
// on the connection.
func (t *Tx) undo() {
	if t.txn().Rollback(0) != nil {
		t.c.bad.Store(true)
	}
}

// txn is what began without a hint, for a statement of ours that ends it.
func (t *Tx) txn() *pool.Txn { return t.c.link.Continue(t.base) }

// run runs a statement in a transaction of a unit of work. h is nil without a hint.
func (t *Tx) run(ctx context.Context, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	s := t.u.ctxState
	if err := s.take(ctx); err != nil {
		return nil, nil, err
	}
	defer s.give()
	if err := t.usable(); err != nil {
		return nil, nil, err
	}
	if err := s.check(h); err != nil {
		return nil, nil, err
	}
	if err := s.undecided(h, t.u, st); err != nil {
		return nil, nil, err
	}
	if err := t.c.asks(ctx, h, st, t.u); err != nil {
		return nil, nil, err
	}
	if h != nil {
		if err := t.u.join(ctx, h); err != nil {
			return nil, nil, err
		}
	}
	return t.c.runIn(ctx, t.u, st)
}
