package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
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
	handle   *handle.Handle
	*appConn          // the base connection
	none     *appConn // of a light connection, while it has no real one

	tx      *Tx    // the open transaction that BeginTx has begun here
	use     use    // what database/sql uses it for now
	free    string // the last text that strict mode lets run without a lock
	skipped string // the statement that was just asked for, and will be prepared

	leftOn *pool.Conn // of a light connection, the real one on which it has left something; nil if it has left nothing where it was last

	above *handle.Wrapper // of drivers, through which database/sql uses the connection; nil for none
	came  bool            // a call has come, while it was not known whether database/sql calls Valid through that
}

// NewConn returns base as a connection of the handle k. above is the wrapper of drivers through
// which database/sql uses it; nil for none.
func NewConn(k *handle.Handle, base driver.Conn, above *handle.Wrapper) *Conn {
	k.StarvationGuard.Opened()
	return &Conn{handle: k, above: above, appConn: &appConn{link: pool.Adopt(base), texts: texts{state: sqltext.Idle}}}
}

// NewLight returns a connection that has a real one only while it needs it. The handle
// has a budget. above is as in NewConn.
func NewLight(k *handle.Handle, above *handle.Wrapper) *Conn {
	c := &Conn{handle: k, above: above}
	c.vacate()
	return c
}

// enter begins each call of database/sql. It refuses a connection that must not be used again (a sql.Conn
// would until it is closed): a transaction may be open there; with a budget also one beneath a wrapper of
// drivers that is known to hide driver.Validator. first: over the pool, the call is the first of a use.
func (c *Conn) enter(ctx context.Context, first bool) error {
	if c.tx != nil {
		return nil
	}
	if c.above != nil && c.handle.Bounded() && !c.above.Told() {
		if first && c.came && statement.Retried(ctx) { // it comes over the pool, so the use before is over, and Valid was not called
			c.above.Hides()
		}
		if err := c.above.Unusable(); err != nil {
			return err
		}
		c.came = true
	}
	if c.bad.Load() {
		return driver.ErrBadConn // database/sql closes it, and takes another one
	}
	return nil
}

// Hidden notes that the wrapper of drivers above hides driver.Validator, and returns why the connection
// cannot be used through it, if so.
func (c *Conn) Hidden() error {
	if !c.handle.Bounded() || c.above == nil {
		return nil
	}
	c.above.Hides()
	return c.above.Unusable()
}

// direct reports whether a statement or a transaction with ctx needs no lock handling.
func (c *Conn) direct(ctx context.Context) bool {
	h, hinted := hint.From(ctx)
	return c.unlocked() && (!hinted || h.LockContext == nil && h.Err == nil && len(h.Holds) == 0)
}

// unlocked reports whether no transaction with a lock is open.
func (c *Conn) unlocked() bool { return c.tx == nil || !c.tx.locked() }

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
	told := c.above == nil || c.above.Told()
	if as.Prefer = c.leftOn; !told && as.Patience == 0 {
		as.Patience = max(c.handle.Settings.Wait, time.Second)
	}
	link, err := c.handle.Apps().AcquireAs(ctx, as)
	switch {
	case err == nil:
		c.move(link)
	case ctx.Err() != nil: // as database/sql says it
		return ctx.Err()
	case !told && errors.Is(err, lockerr.ErrExhausted) && !server.Full(err): // uses may be over of which nobody tells
		return c.above.Refuses()
	}
	return err
}

// move makes c use link, whose turn the caller has.
func (c *Conn) move(link *pool.Conn) {
	link.EndTurn()
	if c.appConn, _ = link.State.(*appConn); c.appConn == nil {
		c.appConn = &appConn{link: link, texts: texts{state: sqltext.Idle}}
		link.State = c.appConn
	}
}

// needClean is need for a statement or a transaction under the lock of h. Nothing that
// another user has left may be on the connection: such a connection is closed, and another
// one taken. But one that may have a transaction open, which would be lost, is refused:
// ErrUnsafe. The wait for one ends after about wait. blocks: the caller is about to wait
// in the server on it.
func (c *Conn) needClean(ctx context.Context, s *ctxState, h *hint.Hint, wait time.Duration, blocks bool) error {
	for c.link == nil {
		as := s.asks(ctx, h, true, blocks)
		as.Prefer = c.leftOn
		link, err := c.handle.App(ctx, as, wait)
		if err != nil {
			return err
		}
		if c.move(link); c.pristine() || link == c.leftOn {
			return nil
		}
		if c.texts.state != sqltext.Idle {
			if err := c.outside(ctx, "begin", h); err != nil {
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
	c.skipped = ""
	if manual, _ := c.handle.Manual(); !manual && !s.bad.Load() && s.inTransaction() {
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

// Base returns the base driver's connection: in a transaction with a lock its session. With a budget it has c have
// one, until it is put back; nil if there is none to be had.
func (c *Conn) Base() driver.Conn {
	if !c.unlocked() && c.tx.u.state == stateOpen {
		return c.tx.u.link.Conn
	}
	if c.link != nil {
		return c.link.Conn
	}
	ctx, cancel := server.Within(context.Background(), max(c.handle.Settings.Wait, time.Second))
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
	return c.handle.Sample(ctx, func() (driver.Conn, error) {
		if err := c.need(ctx); err != nil {
			return nil, err
		}
		defer c.release()
		return c.link.Conn, nil
	})
}

// outside returns why what comes over this connection cannot run under a lock, if so: tables are locked on it, or a
// transaction is open that the driver has not begun, and does not end.
func (c *Conn) outside(ctx context.Context, op string, h *hint.Hint) error {
	at := c.appConn
	if c.leftOn != nil { // its user may come back to that one alone
		at, _ = c.leftOn.State.(*appConn)
	}
	if by := at.left.Locks(); by != "" {
		return c.handle.Error(op, h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
			"an earlier statement (%s) has locked tables on this connection, "+
				"and what runs under a lock has a connection of its own, which would wait for them; "+
				"UNLOCK TABLES first", by)))
	}
	manual, known := c.handle.Manual()
	if c.link == nil { // the connection that it will have is like a new one
		if !manual {
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
	if c.texts.state == sqltext.Idle {
		return nil
	}
	state, err := c.knownState(ctx)
	switch {
	case err != nil:
		return c.handle.Error(op, h, strategy.Unreached(err))
	case state == sqltext.Idle:
		return nil
	}
	why := "a transaction that plain SQL text has begun is open on this connection, " +
		"and could show what is older than the lock; begin it with BeginTx"
	if state == sqltext.Manual {
		why = "autocommit is off on this connection, so that any statement leaves a transaction open, " +
			"which could show what is older than the lock; " +
			"leave autocommit on, or say autocommit=1 in the DSN where it is off by the DSN, " +
			"the server's default or its init_connect, and begin transactions with BeginTx"
	}
	return c.handle.Error(op, h, lockerr.With(lockerr.ErrUnsafe, errors.New(why)))
}

// fit returns why a query cannot run on the connection beside its lock, if so: rows are still being read from it, over
// a sql.Conn, so that nothing is sent, and they can be read on; or a variable was set that changes what the
// statements of a version mean: ROLLBACK, or the time.
func (c *Conn) fit(ctx context.Context, op string, h *hint.Hint) error {
	if c.link == nil {
		return nil
	}
	if !c.link.Valid() && !statement.Retried(ctx) {
		return c.handle.Error(op, h, handle.ErrUnusable)
	}
	for _, name := range []string{"completion_type", "timestamp"} {
		if c.left.Variable(name) {
			return c.handle.Error(op, h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
				"plain SQL text has set %s on this connection, and locks need its default; set it to DEFAULT", name)))
		}
	}
	return nil
}

// clean returns why versions that a unit of work remembers are of no use for what is
// read on this connection, if so.
func (c *Conn) clean(ctx context.Context, p *plan, op string) error {
	levels, err := c.levels(ctx, p.l)
	if err == nil {
		err = p.l.Dirty(levels)
	}
	if err != nil {
		return c.handle.Error(op, p.h, strategy.Unreached(err))
	}
	return nil
}

// Ping pings the base connection.
func (c *Conn) Ping(ctx context.Context) error {
	if err := c.enter(ctx, true); err != nil {
		return err
	}
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
	if c.bad.Load() || c.handle.Closed() {
		return driver.ErrBadConn
	}
	if c.newUse(); c.above != nil && c.handle.Bounded() && !c.above.Told() {
		c.above.Hides() // else Valid had been called
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
	if (c.handle.Bounded() && !c.shareable() || c.use.matters()) && statement.InRaw() {
		return !c.bad.Load() && c.link.Valid()
	}
	if c.above != nil {
		c.above.Tells()
	}
	if c.newUse(); c.handle.Bounded() {
		c.release()
		return true
	}
	return !c.bad.Load() && c.link.Valid()
}

// shareable reports whether nobody would miss what has happened on the connection.
func (c *Conn) shareable() bool {
	return c.link == nil || c.tx == nil && c.pristine() && len(c.stmts.own) == 0
}

// Close closes the base connection, and with it the unit of work on it.
func (c *Conn) Close() error {
	for t := c.tx; t != nil; t = t.prev {
		if t.locked() {
			_ = t.end(false)
		}
	}
	if c.handle.Bounded() {
		if c.link != nil { // database/sql does not put it back: it has turned out to be broken
			c.discard()
			if c.above.Told() {
				c.handle.Apps().Flush()
			}
		} else { // one idle connection less, or it has reached its age: as many real ones as light ones are idle
			c.handle.Apps().CloseOldest()
		}
		return nil
	}
	c.handle.StarvationGuard.Closed()
	_ = c.link.AwaitTurn(context.Background()) // a ping may be under way
	defer c.link.EndTurn()
	return c.link.Conn.Close()
}
