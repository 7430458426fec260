package unit

import (
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// carries says what a statement would miss on another connection, for errors; ""
// where there is nothing. st is nil for BEGIN.
func (c *Conn) carries(st *statement.Statement) string {
	if left := c.left.String(); left != "" {
		return "an earlier statement (" + left + ") has left something"
	}
	if st != nil && c.left.UserVariables() && st.Recalls() {
		return "an earlier statement has set a user variable"
	}
	return ""
}

// fit returns lockerr.ErrUnsafe where a variable was set on the connection that changes what
// the statements of a lock mean: COMMIT, or the time.
func (c *Conn) fit(op string, h *hint.Hint) error {
	for _, name := range []string{"completion_type", "timestamp"} {
		if c.left.Variable(name) {
			return c.k.Error(op, h, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
				"plain SQL text has set %s on this connection, and locks need its default; set it to DEFAULT", name)))
		}
	}
	return nil
}

// ran notes what a statement has left that ran here. Where the base driver has to
// prepare it first, it comes again.
func (c *Conn) ran(text string, info sqltext.Info, query bool, err error) {
	c.texts.note(info, query, err)
	if errors.Is(err, driver.ErrSkip) {
		c.skipped = text
		return
	}
	if c.tx != nil {
		c.tx.changed = c.tx.changed || info.Changes != sqltext.ChangesNothing
	}
	c.lastIn = nil
	c.left.Note(text, info, query, err)
	c.stmts.note(info)
}

// asks returns why a statement of a sql.Conn must not run in to, or here where to is
// nil: it asks for what the statement before it has left, which ran elsewhere.
func (c *Conn) asks(st *statement.Statement, to *unit) error {
	if c.lastIn == to || !st.Recalls() || !st.ForConn() {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, errors.New("the statement asks for something of its connection (LAST_INSERT_ID and the like), and the one before it ran on another; "+
		"run all statements of the lock context over the same sql.Conn"))
}
