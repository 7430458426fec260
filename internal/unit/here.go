package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
)

// look looks at an unhinted statement that is about to run. It sends nothing, but
// where it may begin a transaction and a limit for locked ones is still set. Most
// statements it knows at a glance.
func (c *Conn) look(ctx context.Context, text string, ofConn bool) (info sqltext.Info, err error) {
	if c.k.Settings.Required != nil && text != c.free {
		if err := c.k.Unlocked(text); err != nil {
			return info, err
		}
		c.free = text
	}
	if err := c.need(ctx); err != nil {
		return info, err
	}
	if c.last != nil || c.lastIn != nil {
		if err := c.remembers(text, ofConn); err != nil {
			return info, err
		}
	}
	if sqltext.Quiet(text) && (c.tx == nil || c.tx.read && c.tx.under == nil) {
		if text[0]|0x20 == 's' { // SELECT
			info.Changes = sqltext.ChangesNothing
		}
		return info, nil
	}
	info = sqltext.Look(text)
	if c.tx != nil {
		c.tx.read = c.tx.read || info.Snapshot
		return info, nil
	}
	if c.unlimit != "" && c.texts.state.Within(info.Effect) != sqltext.Idle {
		err = c.liftLimit(ctx)
	}
	return info, err
}

// runHere runs a statement on this connection as it is. On driver.ErrSkip
// database/sql prepares it.
func (c *Conn) runHere(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.need(ctx); err != nil {
		return nil, nil, err
	}
	if st.Kept {
		if err := c.again(ctx, st); err != nil {
			return nil, nil, err
		}
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
	return r, res, c.ran(st.Text, st.Info, st.Query, err)
}

// runHereClaiming runs a claim on this connection as it is.
func (c *Conn) runHereClaiming(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	base, res, err := st.Run(ctx, c.link.Conn)
	if err != nil || base == nil {
		return nil, res, err
	}
	limit := statement.BufferBytes
	if st.AtOnce {
		limit = 0 // the server may find the locked one last
	}
	r, err := statement.ReadAhead(base, limit) // it may come with a statement to be closed
	if err != nil {
		return nil, nil, err
	}
	return r, nil, nil
}

// ran notes what a statement has left that ran here, and returns err as the caller gets it.
// Where the base driver has to prepare the statement first, it comes again.
func (c *Conn) ran(text string, info sqltext.Info, query bool, err error) error {
	c.texts.note(info, query, err)
	if errors.Is(err, driver.ErrSkip) {
		c.skipped = text
		return err
	}
	if c.tx != nil {
		c.tx.changed = c.tx.changed || info.Changes != sqltext.ChangesNothing
	}
	c.newUse()
	c.left.Note(text, info, query, err)
	c.stmts.stale = c.stmts.stale || info.Taints
	if err != nil {
		err = c.k.Explained(err)
	}
	return err
}
