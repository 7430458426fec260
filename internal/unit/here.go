package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
)

// checkUnhinted looks at an unhinted statement before it runs, and refuses one that must not run without a lock,
// or not on this connection. checkUnhinted sends nothing. For most statements a glance is enough.
func (c *Conn) checkUnhinted(ctx context.Context, text string) (info sqltext.Info, err error) {
	if r := c.handle.Settings.Required; r != nil && text != c.allowedText {
		if table := r.Writes(text); table == "" {
			c.allowedText = text
		} else if err := c.handle.Unlocked(table); err != nil {
			return info, err
		}
	}
	if err := c.connect(ctx); err != nil {
		return info, err
	}
	moved := c.use.lastUnit != nil || c.use.leftIn != nil
	if !moved && sqltext.Quiet(text) {
		return info, nil
	}
	info = sqltext.Look(text)
	if moved {
		if err := c.checkLeft("statement", nil, &statement.Statement{Text: text, Info: info}, nil); err != nil {
			return info, err
		}
	}
	return info, nil
}

// runHere runs a statement on this connection as it is. If it returns driver.ErrSkip, database/sql
// prepares the statement.
func (c *Conn) runHere(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	if err := c.connect(ctx); err != nil {
		return nil, nil, err
	}
	if st.Kept {
		if err := c.app.Reprepare(ctx, st); err != nil {
			return nil, nil, err
		}
	}
	run := st.Run
	if st.Stmt == nil && !st.Prepared {
		run = st.Direct
	}
	r, res, err := run(ctx, c.app.Link.Conn)
	return r, res, c.noteRun(st.Text, st.Info, st.Query, err)
}

// noteRun notes what a statement has left that ran on this connection, and returns err as the caller gets it.
// If the base driver has to prepare the statement first, the statement comes again.
func (c *Conn) noteRun(text string, info sqltext.Info, query bool, err error) error {
	c.app.Texts.Note(info, query, err)
	if errors.Is(err, driver.ErrSkip) {
		c.skippedText = text
		return err
	}
	if server.Unprepared(err) {
		c.app.ForgetPrepared()
	}
	c.use.hasRun, c.use.lastUnit = true, nil
	c.use.setsNext = c.use.setsNext || info.SetsNextLevel
	if info.Taints || info.Kind == sqltext.Commits {
		c.use.noteStatement(nil, text, info, query, err)
		c.app.NoteLeft(text, info, query, err)
	}
	if err != nil {
		err = c.handle.Explained(err)
	}
	return err
}
