package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Begin begins a transaction; with a hint it takes the lock.
func (c *Conn) Begin(ctx context.Context, opts driver.TxOptions) (tx *Tx, err error) {
	if err := c.enter(ctx, true); err != nil {
		return nil, err
	}
	t := &Tx{inner: inner{opts: opts}, c: c, ctx: ctx, pooled: c.handle.Bounded() && c.tx == nil && statement.Retried(ctx)}
	if c.direct(ctx) {
		if err := c.connect(ctx); err != nil {
			return nil, err
		}
		base, err := basedriver.Begin(ctx, c.app.Link.Conn, opts)
		if err != nil {
			c.app.Texts.NoteBegin(false)
			return nil, err
		}
		t.shape, t.base = txPlain, base
		c.tx = t
		c.app.Texts.NoteBegin(true)
		return t, nil
	}
	if err := c.beginLocked(ctx, t, opts); err != nil {
		return nil, err
	}
	t.prev = c.tx
	c.tx = t
	return t, nil
}

// beginLocked begins a transaction under the lock that ctx asks for, or inside the transaction with a lock
// that is open on the connection.
func (c *Conn) beginLocked(ctx context.Context, t *Tx, opts driver.TxOptions) error {
	h, _ := hint.From(ctx) // nil without one
	if h != nil && h.Err != nil {
		return &lockerr.Error{Op: "begin", Err: h.Err}
	}
	if h != nil && len(h.Holds) > 0 && (h.LockContext != nil || !opts.ReadOnly) {
		if err := checkReachable(ctx, c.handle, h); err != nil {
			return err
		}
	}
	if c.tx != nil && !c.tx.locked() {
		return c.handle.Error("begin", h, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"a transaction without the lock is open on this connection; begin that one with the lock context")))
	}
	cs, err := c.takeState(ctx, h)
	if err != nil {
		return err
	}
	defer cs.giveTurn()
	if c.tx != nil {
		return c.tx.u.nest(ctx, h, &t.inner, opts)
	}
	if err := c.checkNothingOpen(ctx, "begin", h); err != nil {
		return err
	}
	if u := cs.unit; u != nil {
		if err := c.checkLeft("begin", h, nil, u); err != nil {
			return err
		}
		return u.nest(ctx, h, &t.inner, opts)
	}
	if err := c.checkLeft("begin", h, nil, unitToCome); err != nil {
		return err
	}
	p, err := cs.plan(h)
	if err != nil {
		return err
	}
	if !cs.holdsAny(h) { // a caller that holds something must not be refused the wait: others may wait for what it holds
		p.keeps = c.app.Link
	}
	u, err := cs.openUnit(ctx, p, opening{op: "begin", opts: opts})
	if err != nil {
		return err
	}
	u.noteEnd(ctx)
	return u.nest(ctx, h, &t.inner, opts)
}

// takeState takes the turn of the context state in which a call with h runs, unless nothing can run there
// any more. h may be nil if a transaction with a lock is open on the connection.
func (c *Conn) takeState(ctx context.Context, h *hint.Hint) (cs *ctxState, err error) {
	if c.tx != nil {
		cs = c.tx.u.ctxState
	} else {
		cs = ctxStateOf(c.handle, h.LockContext)
	}
	if err = cs.takeTurn(ctx); err != nil {
		return nil, err
	}
	if c.tx != nil {
		err = c.tx.usable()
	}
	if err == nil {
		err = cs.check(h)
	}
	if err != nil {
		cs.giveTurn()
	}
	return cs, err
}

// Tx is a transaction that BeginTx has begun, in one of three shapes: see txShape.
type Tx struct {
	inner
	c    *Conn
	ctx  context.Context // of BeginTx
	base driver.Tx       // of a plain one
	prev *Tx             // the transaction around this one on the same connection
	// pooled: the transaction is the only use of a light connection, which gives its real one back at the end of the
	// transaction. database/sql would say too late that the use is over. It first waits for other connections, to close
	// statements that are prepared on them, and those connections may be waiting for a real one.
	pooled bool
}

// locked reports whether the transaction is that of a unit of work, or a savepoint in one; else it is plain.
func (t *Tx) locked() bool { return t.shape != txPlain }

// Commit commits the transaction. In a unit of work the outermost Commit gives the lock back.
func (t *Tx) Commit() error {
	defer t.releasePooled()
	return t.end(true)
}

// releasePooled gives the real connection back at the end of a pooled transaction.
func (t *Tx) releasePooled() {
	if t.pooled && t.c.tx == nil {
		t.c.release()
	}
}

// Rollback rolls the transaction back. In a unit of work the outermost Rollback gives the lock back. A
// unit of work that was lost is rolled back already.
func (t *Tx) Rollback() error {
	defer t.releasePooled()
	err := t.end(false)
	if errors.Is(err, lockerr.ErrLost) {
		err = nil
	}
	// database/sql keeps a connection after a rollback on cancellation only if
	// its driver can reset and check it. Conn claims that it can; does the base driver?
	if t.ctx.Err() != nil && !t.locked() && t.c.app.Link != nil {
		_, resets := t.c.app.Link.Conn.(driver.SessionResetter)
		_, checks := t.c.app.Link.Conn.(driver.Validator)
		if !resets || !checks {
			t.c.app.Bad.Store(true)
		}
	}
	return err
}

func (t *Tx) end(commit bool) error {
	place := &t.c.tx // the transaction around t is the connection's open one again
	for *place != nil && *place != t {
		place = &(*place).prev
	}
	if *place == t {
		*place = t.prev
	}
	if t.shape == txPlain {
		end := t.base.Rollback
		if commit {
			end = t.base.Commit
		}
		err := end()
		if t.c.tx == nil {
			t.c.app.Texts.NoteEnd(err == nil)
		}
		return err
	}
	_ = t.u.ctxState.takeTurn(context.Background())
	defer t.u.ctxState.giveTurn()
	if t.u.life.until != nil {
		t.u.finishIfOver()
	}
	return t.u.endTx(t.ctx, &t.inner, commit)
}
