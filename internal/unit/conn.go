package unit

import (
	"context"
	"database/sql/driver"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Conn is one connection of the application, as database/sql uses it. Without a hint
// every call goes straight to the base driver's connection, and what that returns goes
// straight back. database/sql calls one method at a time.
type Conn struct {
	k     *handle.Handle
	*site       // the base connection
	none  *site // of a light connection, while it has no real one

	tx      *Tx    // the open transaction that BeginTx has begun here
	pinned  *unit  // lives here because a sql.Conn has read; it may have ended since
	lastIn  *unit  // in which the statement before has run that came over the connection, elsewhere; nil if it ran here
	skipped string // the statement that was just asked for, and will be prepared
	unused  bool   // it has a real connection that was only looked at: see Sample
}

// NewConn returns base as a connection of the handle k.
func NewConn(k *handle.Handle, base driver.Conn) *Conn {
	k.Crowd.Opened()
	return &Conn{k: k, site: &site{link: pool.Adopt(base), texts: texts{state: sqltext.Idle}}}
}

// Exec runs a statement, or returns driver.ErrSkip if the base driver has to prepare it.
func (c *Conn) Exec(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	if c.direct(ctx) {
		info, err := c.look(ctx, text)
		if err != nil {
			return nil, err
		}
		res, err := statement.Exec(ctx, c.link.Conn, text, args)
		c.ran(text, info, false, err)
		return res, err
	}
	_, res, err := c.run(ctx, &statement.Statement{Text: text, Args: args})
	return res, err
}

// Query is Exec for a query.
func (c *Conn) Query(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	if c.direct(ctx) {
		info, err := c.look(ctx, text)
		if err != nil {
			return nil, err
		}
		r, err := statement.Query(ctx, c.link.Conn, text, args)
		c.ran(text, info, true, err)
		return r, err
	}
	r, _, err := c.run(ctx, &statement.Statement{Text: text, Args: args, Query: true})
	return r, err
}

// plain reports whether a transaction with ctx is none of our business.
func (c *Conn) plain(ctx context.Context) bool {
	h, hinted := hint.From(ctx)
	return c.unlocked() && (!hinted || c.nothing(h))
}

// direct reports whether a statement with ctx is none of our business.
func (c *Conn) direct(ctx context.Context) bool {
	h, hinted := hint.From(ctx)
	return c.unlocked() && (!hinted || c.nothing(h) && h.Claim == (hint.Locking{}))
}

// unlocked reports whether no transaction with a lock is open.
func (c *Conn) unlocked() bool {
	return c.pinned == nil && (c.tx == nil || c.tx.u == nil && c.tx.failed == nil)
}

// nothing reports whether h asks for no lock.
func (c *Conn) nothing(h *hint.Hint) bool {
	return h.Scope == nil && h.Err == nil && len(enclosing(h)) == 0
}

// run runs a statement under the hint of its context, or in the unit of work
// that the connection's transaction belongs to.
func (c *Conn) run(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	h, hinted := hint.From(ctx)
	if hinted && h.Err != nil {
		return nil, nil, &lockerr.Error{Op: st.Op(), Err: h.Err}
	}
	if c.tx != nil && c.tx.u == nil && c.tx.failed != nil {
		return nil, nil, c.tx.failed
	}
	c.releaseUnused()
	st.Info = sqltext.Look(st.Text)
	if hinted {
		st.Holds = h.Holds
	} else if c.tx != nil { // it is of what its transaction is
		if began, ok := hint.From(c.tx.ctx); ok {
			st.Holds = began.Holds
		}
	}
	if hinted && !c.onlyReads(h, st) {
		if err := reaches(ctx, c.k, h); err != nil {
			return nil, nil, err
		}
	}
	if hinted && h.Claim != (hint.Locking{}) {
		return c.runClaiming(ctx, h, st)
	}
	return c.runLocked(ctx, h, hinted, st)
}

// onlyReads reports whether a statement neither takes a lock nor has a part in a
// transaction that may write.
func (c *Conn) onlyReads(h *hint.Hint, st *statement.Statement) bool {
	if c.tx != nil {
		return h.Scope == nil && c.tx.opts.ReadOnly
	}
	return h.Scope == nil && st.Query && !st.MayWrite()
}

// runLocked runs a statement in the unit of work that the connection's
// transaction belongs to, or of its context.
func (c *Conn) runLocked(ctx context.Context, h *hint.Hint, hinted bool, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if t := c.tx; t != nil && t.u != nil {
		return t.run(ctx, h, st)
	}
	if u, err := c.openPinned(ctx); err != nil {
		return nil, nil, err
	} else if u != nil {
		defer u.scope.give()
		return c.runPinned(ctx, u, h, st)
	}
	if !hinted || c.nothing(h) && h.Claim == (hint.Locking{}) { // what there was ended a moment ago
		if _, err := c.look(ctx, st.Text); err != nil {
			return nil, nil, err
		}
		return c.runHere(ctx, st)
	}
	s := scopeOf(c.k, h.Scope)
	if err := s.take(ctx); err != nil {
		return nil, nil, err
	}
	defer s.give()
	if err := s.check(h); err != nil {
		return nil, nil, err
	}
	if st.Info.Kind == sqltext.Commits {
		return nil, nil, &lockerr.Error{Op: st.Op(), Key: handle.Names(h), Err: errCommits}
	}
	if c.tx != nil {
		return c.runLate(ctx, s, h, st)
	}
	return c.runFree(ctx, s, h, st)
}

// runFree runs a statement of a lock context outside of any transaction of this
// connection.
func (c *Conn) runFree(ctx context.Context, s *scope, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.ours(ctx, st.Op(), h); err != nil {
		return nil, nil, err
	}
	if err := s.undecided(h, s.unit, st); err != nil {
		return nil, nil, err
	}
	switch {
	case s.unit != nil:
		if err := c.stay(s.unit, h, st, st.Op()); err != nil {
			return nil, nil, err
		}
		return c.runJoined(ctx, s.unit, h, st)
	case st.Query && st.Info.Kind == sqltext.Read:
		return c.runRead(ctx, s, h, st)
	default:
		return c.runAlone(ctx, s, h, st)
	}
}

// runHere runs a statement on this connection as it is. On driver.ErrSkip
// database/sql prepares it.
func (c *Conn) runHere(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.need(ctx); err != nil {
		return nil, nil, err
	}
	if err := c.again(ctx, st); err != nil {
		return nil, nil, err
	}
	var r driver.Rows
	var res driver.Result
	var err error
	switch {
	case st.Claims:
		r, res, err = c.runHereClaiming(ctx, st)
	case st.Stmt == nil && !st.Prepared:
		r, res, err = st.Direct(ctx, c.link.Conn)
	default:
		r, res, err = st.Run(ctx, c.link.Conn)
	}
	c.ran(st.Text, st.Info, st.Query, err)
	return r, res, err
}

// liftLimit takes the limit on idleness off before a transaction without a lock.
func (c *Conn) liftLimit(ctx context.Context) error {
	if c.unlimit == "" {
		return nil
	}
	err := server.Exec(ctx, c.link.Conn, c.unlimit)
	if err == nil {
		c.unlimit = ""
	}
	return err
}

// tidy is liftLimit after a lock that was not granted, whose caller may have gone.
func (c *Conn) tidy() error {
	ctx, cancel := context.WithTimeout(context.Background(), commitLimit)
	defer cancel()
	return c.liftLimit(ctx)
}

// Ping pings the base connection.
func (c *Conn) Ping(ctx context.Context) error {
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
	c.endPinned()
	if c.bad.Load() {
		return driver.ErrBadConn
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
	c.endPinned()
	if c.k.Bounded() {
		c.release()
		return true
	}
	return !c.bad.Load() && c.link.Valid()
}

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
	c.endPinned()
	if c.k.Bounded() {
		if c.link != nil { // database/sql does not put it back: it has turned out to be broken
			c.discard()
			c.k.Apps().Flush()
		}
		return nil
	}
	c.k.Crowd.Closed()
	_ = c.link.AwaitTurn(context.Background()) // a ping may be under way
	defer c.link.EndTurn()
	return c.link.Conn.Close()
}
