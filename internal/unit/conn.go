package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/appconn"
	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Conn is one connection of the application, as database/sql uses it. Without a hint each call goes
// straight to the base driver's connection, and its result straight back. database/sql calls one method
// at a time.
type Conn struct {
	handle   *handle.Handle
	app      *appconn.Conn // the base connection
	emptyApp *appconn.Conn // an empty one, used while a light connection has no real one

	tx          *Tx    // the open transaction that BeginTx has begun here
	use         use    // what database/sql uses the connection for now
	allowedText string // the last text that strict mode has let run without a lock
	skippedText string // the text for which the last call has returned driver.ErrSkip: database/sql prepares it next

	// Of the last real connection of a light one: the connection, if something was left on it, else nil; and the statement
	// that has locked tables there, or "". Others may use the connection by now.
	leftOn    *appconn.Conn
	leftLocks string

	wrapper      *handle.Wrapper // the wrapper of drivers through which database/sql uses the connection; nil for none
	calledBefore bool            // a call came before it was known whether wrapper passes calls of Valid on
}

// NewConn returns a Conn of the handle k on base. wrapper is the wrapper of drivers through which
// database/sql uses it; nil for none.
func NewConn(k *handle.Handle, base driver.Conn, wrapper *handle.Wrapper) *Conn {
	k.StarvationGuard.Opened()
	return &Conn{handle: k, wrapper: wrapper, app: appconn.New(pool.Adopt(base))}
}

// NewLight returns a Conn that has a real connection only while it needs one. The handle k must have a
// budget. wrapper is as in NewConn.
func NewLight(k *handle.Handle, wrapper *handle.Wrapper) *Conn {
	c := &Conn{handle: k, wrapper: wrapper}
	c.clearApp()
	return c
}

// enter begins each call of database/sql. It refuses a connection that must not be used again, since a
// transaction may be open on it: a sql.Conn would use it until the sql.Conn is closed. With a budget it
// also refuses a connection beneath a wrapper of drivers that is known to hide driver.Validator.
// first: if the call comes over the pool, it is the first call of a use.
func (c *Conn) enter(ctx context.Context, first bool) error {
	if c.tx != nil {
		return nil
	}
	if c.wrapper != nil && c.handle.Bounded() && !c.wrapper.Told() {
		if first && c.calledBefore && statement.Retried(ctx) { // over the pool, so the use before is over, and nobody called Valid
			c.wrapper.Hides()
		}
		if err := c.wrapper.Unusable(); err != nil {
			return err
		}
		c.calledBefore = true
	}
	if c.app.Bad.Load() {
		return driver.ErrBadConn // database/sql closes it, and takes another one
	}
	return nil
}

// Hidden notes that the wrapper around c hides driver.Validator. It returns why the connection cannot be
// used through that wrapper; nil if it can.
func (c *Conn) Hidden() error {
	if !c.handle.Bounded() || c.wrapper == nil {
		return nil
	}
	c.wrapper.Hides()
	return c.wrapper.Unusable()
}

// direct reports whether a statement or a transaction with ctx needs no lock handling.
func (c *Conn) direct(ctx context.Context) bool {
	h, hinted := hint.From(ctx)
	return c.unlocked() && (!hinted || h.LockContext == nil && h.Err == nil && len(h.Holds) == 0)
}

// unlocked reports whether no transaction with a lock is open.
func (c *Conn) unlocked() bool { return c.tx == nil || !c.tx.locked() }

// clearApp leaves c without a real connection, with an empty appconn.Conn.
func (c *Conn) clearApp() {
	if c.emptyApp == nil || !c.emptyApp.Pristine() || c.emptyApp.Bad.Load() {
		c.emptyApp = appconn.New(nil)
	}
	c.app = c.emptyApp
}

// connect takes a real connection for c, unless c has one.
func (c *Conn) connect(ctx context.Context) error {
	if c.app.Link != nil {
		return nil
	}
	return c.connectAs(ctx, pool.As{})
}

// connectAs takes a real connection for c, which has none. as says what kind of caller asks.
func (c *Conn) connectAs(ctx context.Context, as pool.As) error {
	told := c.wrapper == nil || c.wrapper.Told()
	if as.Prefer = c.preferred(); !told && as.Patience == 0 {
		as.Patience = max(c.handle.Settings.Wait, time.Second)
	}
	link, err := c.handle.Apps().AcquireAs(ctx, as)
	switch {
	case err == nil:
		c.setLink(link)
	case ctx.Err() != nil: // database/sql says it like this
		return ctx.Err()
	case !told && errors.Is(err, lockerr.ErrExhausted) && !server.Full(err): // uses may be over, and the wrapper hides their end
		return c.wrapper.Refuses()
	}
	return err
}

// preferred returns the real connection on which c has left something; nil if it has left nothing.
func (c *Conn) preferred() *pool.Conn {
	if c.leftOn == nil {
		return nil
	}
	return c.leftOn.Link
}

// setLink makes link the real connection of c. The caller has the turn of link; setLink ends it.
func (c *Conn) setLink(link *pool.Conn) {
	link.EndTurn()
	c.app = appconn.Of(link)
}

// connectClean is connect for a query under the locks of p. The connection must not have anything that another user has
// left: connectClean closes such a connection, and takes another. But a transaction that may be open on the connection
// would be lost: then connectClean fails with ErrUnsafe. So it does if the caller itself may have left on the connection
// what would show something older, or something that may be rolled back.
// It waits for a connection for about wait. blocks: the caller is about to wait for a lock in the
// server, on the connection.
func (c *Conn) connectClean(ctx context.Context, cs *ctxState, p *plan, op string, wait time.Duration, blocks bool) error {
	for c.app.Link == nil {
		as := cs.connCaller(ctx, p.h, true, blocks)
		as.Prefer = c.preferred()
		link, err := c.handle.App(ctx, as, wait)
		if err != nil {
			return err
		}
		if c.setLink(link); c.app.Pristine() {
			return nil
		}
		if c.app == c.leftOn {
			return c.checkOwnLeft(ctx, p, op)
		}
		if c.app.Texts.State != sqltext.Idle {
			if err := c.checkNothingOpen(ctx, op, p.h); err != nil {
				return err
			}
		}
		if !c.app.Pristine() {
			c.discard()
		}
	}
	return nil
}

// checkOwnLeft checks the connection that a light Conn has got: earlier checks were made when the Conn had none.
func (c *Conn) checkOwnLeft(ctx context.Context, p *plan, op string) error {
	if err := c.checkNothingOpen(ctx, op, p.h); err != nil {
		return err
	}
	if err := c.checkUsable(ctx, op, p.h); err != nil || !p.compares {
		return err
	}
	return c.checkLevels(ctx, p, op)
}

// release gives the real connection back, if c has one, to be used by others or closed. If plain SQL
// text has a transaction open on it, c keeps it: the next user would run in that transaction, and the
// pool may close idle connections.
func (c *Conn) release() {
	app := c.app
	if app.Link == nil {
		return
	}
	c.skippedText = ""
	if manual, _ := c.handle.Manual(); !manual && !app.Bad.Load() && app.InTransaction() {
		return
	}
	c.clearApp()
	c.leftOn, c.leftLocks = nil, ""
	if !app.Bad.Load() && !app.Pristine() {
		c.leftOn, c.leftLocks = app, app.Left.Locks()
	}
	_ = app.Link.AwaitTurn(context.Background()) // a ping may be under way
	app.CloseOwn()
	if app.Bad.Load() {
		app.Link.Destroy()
		return
	}
	app.Link.Release()
}

// discard closes the real connection, if c has one.
func (c *Conn) discard() {
	if c.app.Link != nil {
		c.app.Bad.Store(true)
		c.release()
	}
}

// Base returns the base driver's connection; in a transaction with a lock, its session, on which the caller may do anything
// that this package does not see. With a budget, c takes a real connection if it has none, and keeps it until database/sql
// puts c back. Base returns nil if there is no connection to be had.
func (c *Conn) Base() driver.Conn {
	if !c.unlocked() {
		if session := c.tx.u.unwrapped(); session != nil {
			return session
		}
	}
	if c.app.Link != nil {
		return c.app.Link.Conn
	}
	ctx, cancel := server.Within(context.Background(), max(c.handle.Settings.Wait, time.Second))
	defer cancel()
	if c.connect(ctx) != nil {
		return nil
	}
	return c.app.Link.Conn
}

// Sample returns a connection of the base driver, to look at what all of them have in common: which
// interfaces they have, and how they convert arguments. It need not be the connection of c, and may be
// closed or in use, so that looking takes up no connection.
func (c *Conn) Sample(ctx context.Context) (driver.Conn, error) {
	if c.app.Link != nil {
		return c.app.Link.Conn, nil
	}
	return c.handle.Sample(ctx, func() (driver.Conn, error) {
		if err := c.connect(ctx); err != nil {
			return nil, err
		}
		defer c.release()
		return c.app.Link.Conn, nil
	})
}

// checkNothingOpen returns why what comes over this connection cannot run under a lock; nil if it can. Either
// tables are locked on the connection, or a transaction is open there that the driver has not begun,
// and does not end.
func (c *Conn) checkNothingOpen(ctx context.Context, op string, h *hint.Hint) error {
	text := c.app.Left.Locks()
	if c.app.Link == nil && c.leftLocks != "" && c.leftOn.TablesLocked() { // the next statement may be back on that connection
		text = c.leftLocks
	}
	if text != "" {
		return c.handle.Error(op, h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
			"an earlier statement (%s) has locked tables on this connection, "+
				"and what runs under a lock has a connection of its own, which would wait for them; "+
				"UNLOCK TABLES first", text)))
	}
	manual, known := c.handle.Manual()
	if c.app.Link == nil { // the connection that c gets will be like a new one
		if !manual {
			return nil
		}
		if err := c.connect(ctx); err != nil {
			return err
		}
	}
	if known {
		c.app.Texts.Began(manual)
	}
	if c.app.Texts.State == sqltext.Idle {
		return nil
	}
	state, err := c.app.KnownState(ctx)
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

// checkUsable returns why a query cannot run on the connection beside its lock; nil if it can. Over a sql.Conn,
// rows may still be read from the connection: then checkUsable sends nothing, so that they can be read on. Or a
// variable was set that changes what the statements of a version mean: ROLLBACK, or the time.
func (c *Conn) checkUsable(ctx context.Context, op string, h *hint.Hint) error {
	if c.app.Link == nil {
		return nil
	}
	if !c.app.Link.Valid() && !statement.Retried(ctx) {
		return c.handle.Error(op, h, handle.ErrUnusable)
	}
	for _, name := range []string{"completion_type", "timestamp"} {
		if c.app.Left.Variable(name) {
			return c.handle.Error(op, h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
				"plain SQL text has set %s on this connection, and locks need its default; set it to DEFAULT", name)))
		}
	}
	return nil
}

// checkLevels returns why the versions that a unit of work remembers say nothing of what is read on this
// connection; nil if they do.
func (c *Conn) checkLevels(ctx context.Context, p *plan, op string) error {
	levels, err := c.app.Levels(ctx, p.l.Info().IsolationVariable())
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
	if err := c.connect(ctx); err != nil {
		return err
	}
	p, ok := c.app.Link.Conn.(driver.Pinger)
	if !ok {
		return nil
	}
	if err := c.app.Link.AwaitTurn(ctx); err != nil {
		return err
	}
	defer c.app.Link.EndTurn()
	return p.Ping(ctx)
}

// Reset is what database/sql calls before it uses the connection again.
func (c *Conn) Reset(ctx context.Context) error {
	if c.app.Bad.Load() || c.handle.Closed() {
		return driver.ErrBadConn
	}
	if c.newUse(); c.wrapper != nil && c.handle.Bounded() && !c.wrapper.Told() {
		c.wrapper.Hides() // a wrapper that does not would have passed Valid on
		c.release()
	}
	if c.app.Link == nil {
		return nil
	}
	if r, ok := c.app.Link.Conn.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

// Valid reports whether the connection may go back to database/sql's pool. database/sql asks only when
// it puts the connection back, so this is where the real connection goes back to the handle's pool. But
// a callback of Conn.Raw may ask, too, while the connection is in use.
func (c *Conn) Valid() bool {
	missed := c.handle.Bounded() && !c.shareable() || c.use.matters() // by a later call of the use
	if missed && statement.InRaw() {
		return !c.app.Bad.Load() && c.app.Link.Valid()
	}
	if c.wrapper != nil {
		c.wrapper.Tells()
	}
	if c.newUse(); c.handle.Bounded() {
		c.release()
		return true
	}
	return !c.app.Bad.Load() && c.app.Link.Valid()
}

// shareable reports whether nothing has happened on the connection that its user would miss on another.
func (c *Conn) shareable() bool {
	return c.app.Link == nil || c.tx == nil && c.app.Pristine() && !c.app.Owns()
}

// Close rolls back the transactions with a lock that were begun on c, and closes the base connection.
func (c *Conn) Close() error {
	for t := c.tx; t != nil; t = t.prev {
		if t.locked() {
			_ = t.end(false)
		}
	}
	if c.handle.Bounded() {
		if c.app.Link != nil { // database/sql has not put c back, so c has turned out to be broken
			c.discard()
			if c.wrapper.Told() {
				c.handle.Apps().Flush()
			}
		} else { // c was idle, and too many or too old: close a real one, too, so that as many are idle
			c.handle.Apps().CloseOldest()
		}
		return nil
	}
	c.handle.StarvationGuard.Closed()
	_ = c.app.Link.AwaitTurn(context.Background()) // a ping may be under way
	defer c.app.Link.EndTurn()
	return c.app.Link.Conn.Close()
}
