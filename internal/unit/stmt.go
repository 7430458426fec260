package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Prepare prepares a statement. Preparing takes no lock; running it
// does, by the context that it runs with.
func (c *Conn) Prepare(ctx context.Context, text string) (prepared *Stmt, err error) {
	if err := c.enter(); err != nil {
		return nil, err
	}
	defer func() { c.leave(err) }()
	if h, hinted := hint.From(ctx); hinted && h.Err != nil {
		return nil, &lockerr.Error{Op: "prepare", Err: h.Err}
	}
	s := &Stmt{c: c, text: text}
	skipped := c.skipped != "" && c.skipped == text
	if !skipped { // else it comes back by the way that it came
		s.ofConn = statement.ForConn()
	}
	c.skipped = ""
	kept := c.k.Bounded() && !skipped && c.k.RunsTexts() && !statement.ForOne()
	if c.tx != nil && c.tx.u == nil && c.tx.failed != nil {
		return nil, c.tx.failed
	}
	u, err := c.openPinned(ctx)
	switch {
	case err != nil:
		return nil, err
	case u != nil:
		defer u.scope.give()
	case c.tx == nil || c.tx.u == nil:
		if err := s.prepare(ctx, kept); err != nil {
			return nil, err
		}
		return s, nil
	default:
		u = c.tx.u
		if err := u.scope.take(ctx); err != nil {
			return nil, err
		}
		defer u.scope.give()
		if err := c.tx.usable(); err != nil {
			return nil, err
		}
	}
	if err := u.takeLink(ctx, "prepare"); err != nil {
		return nil, err
	}
	defer u.give()
	open, release := u.on.untilClosed(ctx)
	defer release()
	if u.home() == c.site {
		if err := s.prepare(open, kept); err != nil {
			return nil, u.check(ctx, "prepare", err)
		}
		return s, nil
	}
	base, err := statement.Prepare(open, u.link.Conn, text)
	if err != nil {
		return nil, u.check(ctx, "prepare", err)
	}
	// The session goes its own ways when the unit is over, so the statement is
	// prepared there again whenever it runs. This was to see whether it can be.
	s.inputs = base.NumInput()
	return s, base.Close()
}

// Stmt is a prepared statement.
type Stmt struct {
	baseStmt
	c      *Conn
	text   string
	inputs int  // of a statement without base, or of one that is kept
	ofConn bool // it is one of a sql.Conn
	kept   bool // it is one of those that stay on the connections on which they have run; base is one of them
}

// prepare prepares the statement on the connection of its Conn. kept: it stays there.
func (s *Stmt) prepare(ctx context.Context, kept bool) error {
	s.kept = kept
	err := s.c.need(ctx)
	switch {
	case err != nil:
		return err
	case kept:
		_, err = s.here(ctx)
		return err
	}
	base, err := statement.Prepare(ctx, s.c.link.Conn, s.text)
	if err == nil {
		s.isAt(base)
	}
	return err
}

// isAt notes that the statement is prepared on the connection of its Conn.
func (s *Stmt) isAt(base driver.Stmt) {
	if s.base, s.at = base, s.c.site; s.c.k.Bounded() {
		s.at.stmts.own = append(s.at.stmts.own, &s.baseStmt)
	}
}

// here returns the statement as it is prepared on the connection that its Conn has now.
func (s *Stmt) here(ctx context.Context) (base driver.Stmt, err error) {
	switch {
	case s.kept:
		if base, err = s.c.prepared(ctx, s.text); err == nil {
			s.base, s.at, s.inputs = base, s.c.site, base.NumInput()
		}
		return base, err
	case s.at != s.c.site: // that of then has been given back
		err = s.prepare(ctx, false)
	}
	return s.base, err
}

// Base returns the base driver's statement; nil if the statement is prepared again for
// each use.
func (s *Stmt) Base() driver.Stmt { return s.base }

// Close closes the statement, after the rows that are being read under it.
func (s *Stmt) Close() (err error) {
	defer func() { s.c.leave(err) }()
	if s.base == nil || s.kept {
		return nil
	}
	if s.c.k.Bounded() {
		if s.at != s.c.site {
			return nil // it was closed when the connection was given back
		}
		s.at.stmts.own = slices.DeleteFunc(s.at.stmts.own, func(o *baseStmt) bool { return o == &s.baseStmt })
	}
	if t := s.c.tx; t != nil && t.u != nil && t.u.home() == s.c.site && t.u.closeLater(s.base) {
		return nil
	}
	if u := s.c.pinned; u != nil && u.closeLater(s.base) {
		return nil
	}
	_ = s.c.link.AwaitTurn(context.Background())
	defer s.c.link.EndTurn()
	return s.base.Close()
}

// NumInput is the number of placeholders.
func (s *Stmt) NumInput() int {
	if s.base == nil || s.kept {
		return s.inputs
	}
	return s.base.NumInput()
}

// Exec runs the statement.
func (s *Stmt) Exec(ctx context.Context, args []driver.NamedValue) (res driver.Result, err error) {
	if err := s.c.enter(); err != nil {
		return nil, err
	}
	defer func() { s.c.leave(err) }()
	if s.base != nil && s.c.direct(ctx) {
		base, info, err := s.direct(ctx)
		if err != nil {
			return nil, err
		}
		res, err := statement.StmtExec(ctx, base, args)
		s.c.ran(s.text, info, false, err)
		return res, err
	}
	_, res, err = s.run(ctx, args, false)
	return res, err
}

// Query is Exec for a query.
func (s *Stmt) Query(ctx context.Context, args []driver.NamedValue) (r driver.Rows, err error) {
	if err := s.c.enter(); err != nil {
		return nil, err
	}
	defer func() { r, err = s.c.leaveAfter(r, err) }()
	if s.base != nil && s.c.direct(ctx) {
		base, info, err := s.direct(ctx)
		if err != nil {
			return nil, err
		}
		r, err := statement.StmtQuery(ctx, base, args)
		s.c.ran(s.text, info, true, err)
		return r, err
	}
	r, _, err = s.run(ctx, args, true)
	return r, err
}

// direct gets the statement ready to run where it is none of our business.
func (s *Stmt) direct(ctx context.Context) (base driver.Stmt, info sqltext.Info, err error) {
	if info, err = s.c.look(ctx, s.text); err == nil {
		base, err = s.here(ctx)
	}
	return base, info, err
}

func (s *Stmt) run(ctx context.Context, args []driver.NamedValue, query bool) (driver.Rows, driver.Result, error) {
	if s.base == nil && s.c.plain(ctx) {
		return nil, nil, &lockerr.Error{Op: "statement", Err: lockerr.With(lockerr.ErrLost, errors.New(
			"the transaction that this statement was prepared in has ended"))}
	}
	st := &statement.Statement{Text: s.text, Args: args, Query: query, Prepared: true, OfConn: s.ofConn, Kept: s.kept}
	switch {
	case !s.kept && s.at == s.c.site:
		st.Stmt, st.On = s.base, s.c.link.Conn
	case s.kept && s.c.tx == nil: // it was only to be prepared on this one, and may have to wait now
		s.c.release()
	}
	return s.c.run(ctx, st)
}
