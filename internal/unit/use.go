package unit

import (
	"context"
	"database/sql/driver"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// use is what a connection remembers of its current use by database/sql. A use is one statement over the pool,
// one transaction, or all that comes over a sql.Conn until that is closed. The use is over when database/sql
// calls Valid, as it puts the connection back, or Reset, before the next use. Beneath a wrapper of drivers that
// hides both it ends with the connection.
//
// Statements under a lock run on connections of the driver's own. So within a use
//
//   - no lock is taken once a statement has left something on the connection (USE, variables, temporary
//     tables, LOCK TABLES): the lock's connection lacks it;
//   - once a statement in a unit of work has left something on the unit's connection, statements run in that
//     unit alone;
//   - no statement asks for what the statement before it has left (LAST_INSERT_ID and the like), if that
//     statement ran on another connection.
//
// What an earlier use has left counts for none of this: no caller can rely on which connection of the pool it
// gets. There are two exceptions. A transaction that an earlier use has left open counts, since the caller may
// take statements under the lock for a part of it. And settings count that a query beside its lock depends on.
// See [Conn.checkNothingOpen] and [Conn.checkUsable].
type use struct {
	hasRun   bool         // a statement has run in this use
	lastUnit *unit        // the unit in which the last statement ran, on another connection; nil if it ran on this connection
	leftHere sqltext.Left // what statements have left on this connection
	setsNext bool         // a statement has said what the next transaction on this connection is to be
	leftAway sqltext.Left // what statements have left on other connections
	leftIn   *unit        // the unit in which they have left it; nil for none
	everLeft bool         // leftHere has, or has had, something
}

// unitToCome stands for a unit that is still to begin, on a session.
var unitToCome = new(unit)

// noteStatement notes a statement that has run in the unit ranIn, on another connection; nil if it ran on this connection.
func (u *use) noteStatement(ranIn *unit, text string, info sqltext.Info, query bool, err error) {
	u.hasRun, u.lastUnit = true, ranIn
	if !info.Taints && info.Kind != sqltext.Commits { // the statement leaves nothing, and takes nothing away
		return
	}
	if ranIn == nil {
		u.leftHere.Note(text, info, query, err)
		u.everLeft = u.everLeft || info.Taints
		return
	}
	u.leftAway.Note(text, info, query, err)
	if u.leftIn == nil && (u.leftAway.String() != "" || u.leftAway.UserVariables()) {
		u.leftIn = ranIn
	}
}

// matters reports whether later statements of the use may depend on earlier ones.
func (u *use) matters() bool { return u.everLeft || u.lastUnit != nil || u.leftIn != nil }

// newUse begins a new use of the connection.
func (c *Conn) newUse() { c.use = use{} }

// lacking returns, for errors, what in left a statement would lack on another connection; "" for nothing.
// st is nil for BEGIN.
func lacking(left *sqltext.Left, st *statement.Statement) string {
	if text := left.String(); text != "" {
		return "an earlier statement (" + text + ") has left something"
	}
	if st != nil && left.UserVariables() && st.Recalls() {
		return "an earlier statement has set a user variable"
	}
	return ""
}

// checkLeft returns an error if an earlier statement of the use has left something that st would lack where it is to run: on
// the session of the unit target, or on this connection if target is nil. st is nil for BEGIN. h is nil without a hint.
func (c *Conn) checkLeft(op string, h *hint.Hint, st *statement.Statement, target *unit) error {
	refuse := func(format string, args ...any) error {
		err := lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(format, args...))
		switch {
		case target != nil && target != unitToCome:
			return target.error(op, err)
		case h == nil:
			return &lockerr.Error{Op: op, Err: err}
		}
		return c.handle.Error(op, h, err)
	}
	if target != nil || h != nil && c.tx == nil {
		left := lacking(&c.use.leftHere, st)
		if left == "" && target == unitToCome && c.use.setsNext && c.app.Texts.SetsNext() {
			left = "an earlier statement (SET TRANSACTION) has left something"
		}
		if left != "" {
			return refuse("%s on this connection, and what runs under a lock has a connection of its own; "+
				"put session variables and the default database into the DSN, take back what was left, "+
				"or ask for the lock over another connection", left)
		}
	}
	if c.use.leftIn != nil && c.use.leftIn != target {
		if left := lacking(&c.use.leftAway, st); left != "" {
			return refuse("%s on the connection of the lock that it ran under, and this one runs on another; "+
				"run both in one transaction, or in one mysqllock.Do", left)
		}
	}
	if st != nil && c.use.hasRun && c.use.lastUnit != target && st.Recalls() {
		return refuse("the statement asks for what the one before it has left (LAST_INSERT_ID and the like), " +
			"and that ran on another connection; " +
			"use its sql.Result, or run both in one transaction, or in one mysqllock.Do")
	}
	return nil
}

// runIn runs a statement that came over this connection in a unit of work.
func (c *Conn) runIn(ctx context.Context, u *unit, st *statement.Statement) (driver.Rows, driver.Result, error) {
	r, res, err := u.run(ctx, st)
	c.use.noteStatement(u, st.Text, st.Info, st.Query, err)
	return r, res, err
}
