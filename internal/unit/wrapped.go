package unit

import (
	"cmp"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// database/sql tells a connection by Valid and Reset that a use of it is over. A wrapper of
// drivers above this one may hide both. So a connection beneath a wrapper finds out by
// itself, until Valid is called for the first time.

// enter begins each call of database/sql. Nothing runs on a connection that must not be used again,
// as a sql.Conn would until it is closed: a transaction may be open there. Beneath a wrapper, enter
// does what Valid and Reset would have done before: a new user must not meet the unit of work of a
// sql.Conn that was closed. forConn: the statement is known to be one of a sql.Conn.
func (c *Conn) enter(forConn bool) error {
	if c.tx != nil {
		return nil
	}
	if !c.told && (c.k.Bounded() || c.pinned != nil || c.lastIn != nil) {
		was := c.ofConn
		if c.ofConn = forConn || statement.ForConn(); !c.ofConn {
			if c.pinned != nil {
				c.endPinned()
			}
			if c.newUse(); was && c.k.Bounded() {
				c.release() // with statements of the sql.Conn that nobody has closed
			}
			c.lent = false
		}
	}
	if c.pinned == nil && c.bad.Load() { // else openPinned asks
		return driver.ErrBadConn // database/sql closes it, and takes another one
	}
	return nil
}

// leave ends each call of database/sql, which has returned err. If the use of a light
// connection is over with it, the real one is given back: after a statement and its rows, or
// a transaction. A sql.Conn keeps it for as long as something would be missed on another
// one. If nobody says when it is closed, that ends with the next use of c.
func (c *Conn) leave(err error) {
	if c.told || c.link == nil || !c.k.Bounded() {
		return
	}
	if u := c.pinned; u != nil && u.isOver() {
		c.pinned = nil
	}
	switch {
	case c.tx != nil: // also of a connection that is gone: what follows in the transaction must not run on another one
	case errors.Is(err, driver.ErrBadConn):
		c.discard()
		c.k.Apps().Flush()
	case c.pinned != nil || c.reading || c.lent || c.skipped != "" || len(c.stmts.own) > 0:
	case !c.ofConn:
		c.release()
	case c.pristine() && !c.bad.Load():
		link := c.link
		c.release()
		c.last = cmp.Or(c.last, link) // what only pings, or prepares, leaves nothing to ask for
	}
}

// isOver reports whether the unit has ended, and bars nothing, unless somebody else has its turn.
func (u *unit) isOver() bool {
	select {
	case u.ctxState.turn <- struct{}{}:
		defer u.ctxState.give()
		return u.state == ended && !u.bars()
	default:
		return false
	}
}

// leaveAfter is leave for a query: its use is over when its rows are.
func (c *Conn) leaveAfter(r driver.Rows, err error) (driver.Rows, error) {
	if c.told || err != nil || c.link == nil || !c.k.Bounded() || c.tx != nil || c.pinned != nil {
		c.leave(err)
		return r, err
	}
	ahead, err := statement.ReadAhead(r, 1)
	if err != nil {
		c.leave(err)
		return nil, err
	}
	if c.reading = ahead.Streaming(); c.reading {
		ahead.Done = func(err error) {
			c.reading = false
			c.leave(err)
		}
	}
	c.leave(nil)
	return ahead, nil
}

// remembers returns why a statement of a sql.Conn must not run where c is now, if so: it asks
// for what the statement before it has left, which ran elsewhere: c.last or c.lastIn says where.
func (c *Conn) remembers(text string, ofConn bool) error {
	st := statement.Statement{Text: text, Info: sqltext.Look(text), OfConn: ofConn}
	if !c.recalls(&st) {
		return nil
	}
	return &lockerr.Error{Op: "statement", Err: c.elsewhere()}
}

// recalls reports whether a statement of a sql.Conn, or of a transaction on it, asks for what
// the one before it has left.
func (c *Conn) recalls(st *statement.Statement) bool {
	return st.Recalls() && (c.tx != nil && c.ofConn || st.ForConn())
}

// elsewhere is the error of a statement of a sql.Conn that asks for what the one before it has
// left on another connection.
func (c *Conn) elsewhere() error {
	if c.last == nil {
		return lockerr.With(lockerr.ErrUnsafe, errors.New("the statement asks for something of its connection (LAST_INSERT_ID and the like), and the one before it ran on another; "+
			"run all statements of the lock context over the same sql.Conn"))
	}
	return lockerr.With(lockerr.ErrUnsafe, errors.New("the statement asks for something of its connection (LAST_INSERT_ID and the like), and the one before it ran on another: "+
		"a wrapper of drivers hides driver.Validator, so that with maxConns each statement gives its connection back; run both in a sql.Tx, or use a wrapper that passes driver.Validator on"))
}
