package unit

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Conn is one connection of the application, as database/sql uses it. Without a hint
// every call goes straight to the base driver's connection, and what that returns goes
// straight back. database/sql calls one method at a time.
type Conn struct {
	k        *handle.Handle
	*appConn          // the base connection
	none     *appConn // of a light connection, while it has no real one

	tx      *Tx    // the open transaction that BeginTx has begun here
	pinned  *unit  // lives here because a sql.Conn has read; it may have ended since
	lastIn  *unit  // in which the statement before has run that came over the connection, elsewhere; nil if it ran here
	ofConn  bool   // a sql.Conn has it, as of the last call that could tell: what comes in a transaction, and the end of rows, can't
	free    string // the last text that strict mode has let run without a lock
	skipped string // the statement that was just asked for, and will be prepared

	leftOn *pool.Conn // of a light connection, the real one on which it has left something; nil if it has left nothing where it was last

	// What follows is for a connection beneath a wrapper of drivers: see [Conn.leave].
	told    bool       // database/sql calls Valid when it puts the connection back
	lent    bool       // Base has shown the real connection to the user of a sql.Conn
	reading bool       // rows are being read
	last    *pool.Conn // where the statement before has run, as far as c has not had it since; nil if it ran here
}

// NewConn returns base as a connection of the handle k. told: database/sql calls Valid when
// it puts the connection back, since there is no wrapper of drivers that may hide it.
func NewConn(k *handle.Handle, base driver.Conn, told bool) *Conn {
	k.StarvationGuard.Opened()
	return &Conn{k: k, told: told, appConn: &appConn{link: pool.Adopt(base), texts: texts{state: sqltext.Idle}}}
}

// NewLight returns a connection that has a real one only while it needs it. The handle
// has a budget. told is as in NewConn.
func NewLight(k *handle.Handle, told bool) *Conn {
	c := &Conn{k: k, told: told}
	c.vacate()
	return c
}

// direct reports whether a statement with ctx is none of our business.
func (c *Conn) direct(ctx context.Context) bool {
	h, hinted := hint.From(ctx)
	return c.unlocked() && (!hinted || h.Claim == (hint.Locking{}) && c.nothing(h))
}

// plain reports whether a transaction with h, which is nil without a hint, is none of our business.
func (c *Conn) plain(h *hint.Hint) bool { return c.unlocked() && (h == nil || c.nothing(h)) }

// unlocked reports whether no transaction with a lock is open.
func (c *Conn) unlocked() bool {
	return c.pinned == nil && (c.tx == nil || c.tx.u == nil && c.tx.failed == nil)
}

// nothing reports whether h asks for no lock.
func (c *Conn) nothing(h *hint.Hint) bool {
	return h.LockContext == nil && h.Err == nil && len(outerGrants(h)) == 0
}

// vacate leaves c with an empty appConn.
func (c *Conn) vacate() {
	if c.none == nil || !c.none.pristine() || c.none.bad.Load() {
		c.none = &appConn{texts: texts{state: sqltext.Idle}}
	}
	c.appConn = c.none
}

// need has c have a real connection.
func (c *Conn) need(ctx context.Context) error {
	if c.link != nil {
		return nil
	}
	return c.needAs(ctx, pool.As{})
}

// needAs is need for a caller of some kind, without one.
func (c *Conn) needAs(ctx context.Context, as pool.As) error {
	as.Prefer = cmp.Or(c.last, c.leftOn)
	link, err := c.k.Apps().AcquireAs(ctx, as)
	if err == nil {
		c.move(link)
	}
	return err
}

// move has c be at link, whose turn the caller has.
func (c *Conn) move(link *pool.Conn) {
	link.EndTurn()
	if c.appConn, _ = link.State.(*appConn); c.appConn == nil {
		c.appConn = &appConn{link: link, texts: texts{state: sqltext.Idle}}
		link.State = c.appConn
	}
	if c.last == link && c.user == c {
		c.last = nil
	}
	c.user = c
}

// needClean is need for a statement or a transaction under the lock of h. Nothing that
// another user has left may be on the connection: such a connection is closed, and another
// one taken, but not one that may have a transaction open, which would be lost: that is
// ErrUnsafe. The wait for one ends after about wait. blocks: the caller is about to
// wait in the server on it.
func (c *Conn) needClean(ctx context.Context, s *ctxState, h *hint.Hint, wait time.Duration, blocks bool) error {
	for c.link == nil {
		as := s.asks(ctx, h, true, blocks)
		as.Prefer = c.last
		link, err := c.k.App(ctx, as, wait)
		if err != nil {
			return err
		}
		if c.move(link); c.pristine() {
			return nil
		}
		if c.texts.state != sqltext.Idle {
			if err := c.ours(ctx, "begin", h); err != nil {
				return err
			}
		}
		if !c.pristine() {
			c.discard()
		}
	}
	return nil
}

// release gives the real connection back, if c has one, to be used by others or closed. One
// on which plain SQL text has a transaction open stays: to others it would be theirs, and the
// pool may close what is idle.
func (c *Conn) release() {
	s := c.appConn
	if s.link == nil {
		return
	}
	c.skipped, c.lent = "", false
	if manual, _ := c.k.Manual(); !manual && !s.bad.Load() && s.inTransaction() {
		return
	}
	c.vacate()
	if c.leftOn = nil; !s.bad.Load() && !s.pristine() {
		c.leftOn = s.link
	}
	_ = s.link.AwaitTurn(context.Background()) // a ping may be under way
	s.stmts.closeOwn(s.link.Conn)
	if s.bad.Load() {
		s.link.Destroy()
		return
	}
	s.link.Release()
}

// discard closes the real connection, if c has one.
func (c *Conn) discard() {
	if c.link != nil {
		c.bad.Store(true)
		c.release()
	}
}

// Base returns the base driver's connection. With a budget it has c have one, until it is
// put back; nil if there is none to be had.
func (c *Conn) Base() driver.Conn {
	if c.lent = !c.told; c.link != nil {
		return c.link.Conn
	}
	ctx, cancel := context.WithTimeout(context.Background(), max(c.k.Settings.Wait, time.Second))
	defer cancel()
	if c.need(ctx) != nil {
		return nil
	}
	return c.link.Conn
}

// Sample returns a connection of the base driver, which need not be that of c, and may be
// closed or in use: for what all of them have in common. That is which interfaces they
// have, and how they convert arguments, so that neither takes up a connection.
func (c *Conn) Sample(ctx context.Context) (driver.Conn, error) {
	if c.link != nil {
		return c.link.Conn, nil
	}
	return c.k.Sample(ctx, func() (driver.Conn, error) {
		if err := c.need(ctx); err != nil {
			return nil, err
		}
		defer c.release()
		return c.link.Conn, nil
	})
}

// ours returns why a lock is of no use on this connection, if so: it does not fit, or a transaction
// is open on it that the driver has not begun, and does not end.
func (c *Conn) ours(ctx context.Context, op string, h *hint.Hint) error {
	manual, known := c.k.Manual()
	if c.link == nil { // the connection that it will have is like a new one
		if !manual && c.leftOn == nil {
			return nil
		}
		if err := c.need(ctx); err != nil {
			return err
		}
	}
	if known && !c.texts.sure {
		if c.texts.sure = true; manual {
			c.texts.state = sqltext.Unknown
		}
	}
	if err := c.fit(ctx, op, h); err != nil {
		return err
	}
	if c.texts.state == sqltext.Idle {
		return nil
	}
	state, err := c.knownState(ctx)
	switch {
	case err != nil:
		return c.k.Error(op, h, strategy.Unreached(err))
	case state == sqltext.Idle:
		return nil
	}
	why := "a transaction that plain SQL text has begun is open on this connection, and could show what is older than the lock; begin it with BeginTx"
	if state == sqltext.Manual {
		why = "autocommit is off on this connection, so that any statement leaves a transaction open, which could show what is older than the lock; " +
			"leave autocommit on, or say autocommit=1 in the DSN where it is off by the DSN, the server's default or its init_connect, and begin transactions with BeginTx"
	}
	return c.k.Error(op, h, lockerr.With(lockerr.ErrUnsafe, errors.New(why)))
}

// fit returns why the statements of a lock cannot run on the connection, if so: rows are still being
// read from it, over a sql.Conn or in a transaction, so that nothing is sent, and they can be read on; or
// a variable was set that changes what they mean: COMMIT, or the time.
func (c *Conn) fit(ctx context.Context, op string, h *hint.Hint) error {
	if !c.link.Valid() && !statement.Retried(ctx) {
		return c.k.Error(op, h, handle.ErrUnusable)
	}
	for _, name := range []string{"completion_type", "timestamp"} {
		if c.left.Variable(name) {
			return c.k.Error(op, h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
				"plain SQL text has set %s on this connection, and locks need its default; set it to DEFAULT", name)))
		}
	}
	return nil
}

// clean returns why versions that a unit of work remembers are of no use for what is
// read on this connection at one of the levels at, if so.
func (c *Conn) clean(ctx context.Context, p *plan, op string, at sqltext.Levels) error {
	levels, err := c.levels(ctx, p.l, at)
	if err == nil {
		err = p.l.Dirty(levels)
	}
	if err != nil {
		return c.k.Error(op, p.h, strategy.Unreached(err))
	}
	return nil
}

// Ping pings the base connection.
func (c *Conn) Ping(ctx context.Context) (err error) {
	if err := c.enter(false); err != nil {
		return err
	}
	defer func() { c.leave(err) }()
	if err := c.need(ctx); err != nil {
		return err
	}
	p, ok := c.link.Conn.(driver.Pinger)
	if !ok {
		return nil
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return err
	}
	defer c.link.EndTurn()
	return p.Ping(ctx)
}

// Reset is called before the connection is used again.
func (c *Conn) Reset(ctx context.Context) error {
	if c.pinned != nil {
		c.endPinned()
	}
	if c.bad.Load() {
		return driver.ErrBadConn
	}
	if c.newUse(); !c.told && c.k.Bounded() {
		c.release()
	}
	if c.link == nil {
		return nil
	}
	if r, ok := c.link.Conn.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

// Valid reports whether the connection may go back to database/sql's pool. database/sql
// asks when it puts the connection back, and only then. So this is where a real
// connection goes back to the handle's pool. But a callback of Conn.Raw may ask, too.
func (c *Conn) Valid() bool {
	if c.k.Bounded() && !c.shareable() && statement.InRaw() {
		return !c.bad.Load() && c.link.Valid()
	}
	if !c.told {
		c.told = true
		c.k.Told.Store(true)
	}
	if c.pinned != nil {
		c.endPinned()
	}
	if c.newUse(); c.k.Bounded() {
		c.release()
		return true
	}
	return !c.bad.Load() && c.link.Valid()
}

// newUse notes that what comes over the connection now asks for nothing that came before.
func (c *Conn) newUse() { c.last, c.lastIn = nil, nil }

// shareable reports whether nobody would miss what has happened on the connection.
func (c *Conn) shareable() bool {
	return c.link == nil || c.tx == nil && c.pinned == nil && c.pristine() && len(c.stmts.own) == 0
}

// Close closes the base connection, and with it the unit of work on it.
func (c *Conn) Close() error {
	for t := c.tx; t != nil; t = t.prev {
		if t.u != nil {
			_ = t.end(false)
		}
	}
	if c.pinned != nil {
		c.endPinned()
	}
	if c.k.Bounded() {
		if c.link != nil { // database/sql does not put it back: it has turned out to be broken
			c.discard()
			if c.told {
				c.k.Apps().Flush()
			}
		}
		return nil
	}
	c.k.StarvationGuard.Closed()
	_ = c.link.AwaitTurn(context.Background()) // a ping may be under way
	defer c.link.EndTurn()
	return c.link.Conn.Close()
}
