package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/appconn"
	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Prepare prepares a statement. To prepare takes no lock: a lock is taken when the statement runs, as the
// context of that run asks.
func (c *Conn) Prepare(ctx context.Context, text string) (*Stmt, error) {
	skipped := c.skippedText != "" && c.skippedText == text // the connection has just returned driver.ErrSkip for this text
	if err := c.enter(ctx, !skipped); err != nil {
		return nil, err
	}
	if h, hinted := hint.From(ctx); hinted && h.Err != nil {
		return nil, &lockerr.Error{Op: "prepare", Err: h.Err}
	}
	s := &Stmt{c: c, text: text}
	if !skipped {
		s.ofOne = statement.ForOne()
	}
	c.skippedText = ""
	kept := c.handle.Bounded() && !skipped && c.handle.RunsTexts() && !s.ofOne
	if c.unlocked() {
		if err := s.prepare(ctx, kept); err != nil {
			return nil, err
		}
		return s, nil
	}
	u := c.tx.u
	if err := u.ctxState.takeTurn(ctx); err != nil {
		return nil, err
	}
	defer u.ctxState.giveTurn()
	if err := c.tx.usable(); err != nil {
		return nil, err
	}
	if err := u.takeLink(ctx, "prepare"); err != nil {
		return nil, err
	}
	defer u.giveTurn()
	open, release := u.untilClosed(ctx)
	defer release()
	base, err := appconn.StatementsOf(u.session).Prepared(open, u.session.Conn, text, "")
	if err != nil {
		return nil, u.checkAnswer(ctx, "prepare", err)
	}
	// The session goes to others when the unit is over, and the statement may serve any transaction, or
	// none. So it is prepared again where it runs.
	s.kept, s.inputs = kept, base.NumInput()
	return s, nil
}

// Stmt is a prepared statement.
type Stmt struct {
	c        *Conn
	text     string
	prepared appconn.Stmt
	inputs   int  // number of placeholders of a statement without a base driver's; -1 is unknown
	ofOne    bool // the statement is for one connection, that of a sql.Conn or a sql.Tx
	kept     bool // the statement has no base: the connections on which it has run keep it prepared
}

// prepare prepares the statement on its Conn. kept: see [Stmt.keep].
func (s *Stmt) prepare(ctx context.Context, kept bool) error {
	if kept {
		return s.keep(ctx)
	}
	if err := s.c.connect(ctx); err != nil {
		return err
	}
	base, err := basedriver.Prepare(ctx, s.c.app.Link.Conn, s.text)
	if err == nil {
		s.isAt(base)
	}
	return err
}

// prepareWait is how long to wait for a connection that is needed only to prepare a statement.
const prepareWait = 10 * time.Millisecond

// keep prepares a statement that stays prepared on the connections on which it runs. If no connection is to
// be had now, the statement is prepared at its first run: callers that hold all connections and prepare
// a statement would wait for each other.
func (s *Stmt) keep(ctx context.Context) error {
	s.kept, s.inputs = true, -1
	if s.c.app.Link == nil {
		if !s.c.handle.Apps().Ready() {
			return nil
		}
		err := s.c.connectAs(ctx, pool.As{Patience: prepareWait})
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, lockerr.ErrExhausted), errors.Is(err, lockerr.ErrNoAnswer):
			return nil
		case err != nil:
			return err
		}
	}
	base, err := s.c.app.Prepared(ctx, s.text, "")
	if err == nil {
		s.inputs = base.NumInput()
	}
	return err
}

// isAt notes that base is the statement, prepared on the present connection of its Conn.
func (s *Stmt) isAt(base driver.Stmt) {
	if s.prepared = (appconn.Stmt{Base: base, On: s.c.app}); s.c.handle.Bounded() {
		s.c.app.Own(&s.prepared)
	}
}

// here returns the statement as it is prepared, for args, on the present connection of its Conn.
func (s *Stmt) here(ctx context.Context, args []driver.NamedValue) (base driver.Stmt, err error) {
	switch {
	case s.kept:
		return s.c.app.Prepared(ctx, s.text, appconn.TypesOf(args))
	case s.prepared.On != s.c.app: // the connection on which it was prepared has been given back
		err = s.prepare(ctx, false)
	}
	return s.prepared.Base, err
}

// Base returns the base driver's statement; nil if the statement is prepared only where it runs.
func (s *Stmt) Base() driver.Stmt { return s.prepared.Base }

// Close closes the statement, after the rows that are being read under it.
func (s *Stmt) Close() error {
	if s.prepared.Base == nil {
		return nil
	}
	if s.c.handle.Bounded() {
		if s.prepared.On != s.c.app {
			return nil // CloseOwn has closed it when the connection was given back
		}
		s.c.app.Disown(&s.prepared)
	}
	_ = s.c.app.Link.AwaitTurn(context.Background())
	defer s.c.app.Link.EndTurn()
	return s.prepared.Base.Close()
}

// NumInput returns the number of placeholders.
func (s *Stmt) NumInput() int {
	if s.prepared.Base == nil {
		return s.inputs
	}
	return s.prepared.Base.NumInput()
}

// Exec runs the statement.
func (s *Stmt) Exec(ctx context.Context, args []driver.NamedValue) (res driver.Result, err error) {
	if err := s.c.enter(ctx, false); err != nil {
		return nil, err
	}
	if s.c.direct(ctx) {
		base, info, err := s.direct(ctx, args)
		if err != nil {
			return nil, err
		}
		res, err := basedriver.StmtExec(ctx, base, args)
		return res, s.c.noteRun(s.text, info, false, err)
	}
	_, res, err = s.run(ctx, args, false)
	return res, err
}

// Query is Exec for a query.
func (s *Stmt) Query(ctx context.Context, args []driver.NamedValue) (r driver.Rows, err error) {
	if err := s.c.enter(ctx, false); err != nil {
		return nil, err
	}
	if s.c.direct(ctx) {
		base, info, err := s.direct(ctx, args)
		if err != nil {
			return nil, err
		}
		r, err := basedriver.StmtQuery(ctx, base, args)
		return r, s.c.noteRun(s.text, info, true, err)
	}
	r, _, err = s.run(ctx, args, true)
	return r, err
}

// direct prepares a statement that needs no lock handling, so that it can run on the connection of its
// Conn.
func (s *Stmt) direct(ctx context.Context, args []driver.NamedValue) (base driver.Stmt, info sqltext.Info, err error) {
	if info, err = s.c.checkUnhinted(ctx, s.text); err == nil {
		base, err = s.here(ctx, args)
	}
	return base, info, err
}

func (s *Stmt) run(ctx context.Context, args []driver.NamedValue, query bool) (driver.Rows, driver.Result, error) {
	st := &statement.Statement{Text: s.text, Args: args, Query: query, Prepared: true, Kept: s.kept}
	switch {
	case !s.kept && s.prepared.On == s.c.app:
		st.Stmt, st.On = s.prepared.Base, s.c.app.Link.Conn
	case s.kept && s.c.tx == nil: // the connection was only to prepare the statement, which may have to wait now
		s.c.release()
	}
	if !s.ofOne && s.c.tx == nil && !s.c.handle.Bounded() { // else database/sql does not try again
		ctx = statement.OnAny(ctx)
	}
	return s.c.run(ctx, st)
}
