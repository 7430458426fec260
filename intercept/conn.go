package intercept

import (
	"context"
	"database/sql/driver"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Each connection has sqlmw in the middle:
//
//	conn     is what the driver sees: it claims what the base has, and no more
//	sqlmw    calls the interceptor
//	below    is what the interceptor sees: it has all that sqlmw takes for granted
//	base     the base driver's connection
//
// What sqlmw would lose goes past it, from below to conn. The methods of a connection are
// called one at a time.

// wrapped is what sqlmw makes of a connection.
type wrapped interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
}

// below is a base connection. Its Conn is the base.
type below struct {
	driver.Conn
	result driver.Result // of the last Exec
	stmt   *belowStmt    // that was prepared last
}

var _ wrapped = (*below)(nil)

func (b *below) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	return basedriver.Begin(ctx, b.Conn, opts)
}

func (b *below) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	stmt, err := basedriver.Prepare(ctx, b.Conn, text)
	if err != nil {
		return nil, err
	}
	b.stmt = &belowStmt{Stmt: stmt}
	return b.stmt, nil
}

func (b *below) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	res, err := basedriver.Exec(ctx, b.Conn, text, args)
	b.result = res
	return res, err
}

func (b *below) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return basedriver.Query(ctx, b.Conn, text, args)
}

// Ping asks for a sign of life. The driver relies on an answer where it keeps a lock alive,
// so that is a statement if the base has no Ping; database/sql then asks for nothing.
func (b *below) Ping(ctx context.Context) error {
	if p, ok := b.Conn.(driver.Pinger); ok {
		return p.Ping(ctx)
	}
	if _, ours := purpose.From(ctx); !ours {
		return nil
	}
	return server.Exec(ctx, b.Conn, "DO 1")
}

// Unwrap returns the base driver's connection, for an interceptor that needs it.
func (b *below) Unwrap() driver.Conn { return b.Conn }

// belowStmt is a prepared statement of the base.
type belowStmt struct {
	driver.Stmt
	result driver.Result // of the last Exec
}

func (bs *belowStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	res, err := basedriver.StmtExec(ctx, bs.Stmt, args)
	bs.result = res
	return res, err
}

func (bs *belowStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return basedriver.StmtQuery(ctx, bs.Stmt, args)
}

// conn is a connection that an interceptor sees.
type conn struct {
	shown wrapped // by sqlmw
	below *below
	bad   bool // must not be used again
}

// shaped returns the connection with ExecContext and QueryContext if the base has the like:
// database/sql checks arguments by other rules without.
func (c *conn) shaped() driver.Conn {
	_, execs := c.below.Conn.(driver.ExecerContext)
	if !execs {
		_, execs = c.below.Conn.(driver.Execer) //nolint:staticcheck // for drivers without the context form
	}
	_, queries := c.below.Conn.(driver.QueryerContext)
	if !queries {
		_, queries = c.below.Conn.(driver.Queryer) //nolint:staticcheck // as above
	}
	switch {
	case execs && queries:
		return struct {
			*conn
			execer
			driver.QueryerContext
		}{c, execer{c}, c.shown}
	case execs:
		return struct {
			*conn
			execer
		}{c, execer{c}}
	case queries:
		return struct {
			*conn
			driver.QueryerContext
		}{c, c.shown}
	}
	return c
}

type execer struct{ c *conn }

func (e execer) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	e.c.below.result = nil
	res, err := e.c.shown.ExecContext(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return whole(res, e.c.below.result), nil
}

// Unwrap returns the base driver's connection.
func (c *conn) Unwrap() driver.Conn { return c.below.Conn }

func (c *conn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	tx, err := c.shown.BeginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	_, resets := c.below.Conn.(driver.SessionResetter)
	_, checks := c.below.Conn.(driver.Validator)
	if resets && checks {
		return tx, nil
	}
	return &oldTx{tx, ctx, c}, nil
}

// oldTx is a transaction on a base that cannot say whether its connection is still good:
// after a rollback on cancellation database/sql closes such a connection.
type oldTx struct {
	driver.Tx
	ctx context.Context
	c   *conn
}

func (ot *oldTx) Rollback() error {
	ot.c.bad = ot.c.bad || ot.ctx.Err() != nil
	return ot.Tx.Rollback()
}

func (c *conn) Prepare(text string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), text)
}

func (c *conn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	c.below.stmt = nil
	shown, err := c.shown.PrepareContext(ctx, text)
	if err != nil {
		return nil, err
	}
	if c.below.stmt == nil { // the interceptor has prepared it elsewhere
		return shown, nil
	}
	s := &stmt{shown: shown.(wrappedStmt), below: c.below.stmt, c: c}
	if cc, ok := s.below.Stmt.(driver.ColumnConverter); ok { //nolint:staticcheck // old drivers have nothing else
		return stmtConverter{s, cc}, nil
	}
	return s, nil
}

func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	if n, ok := c.below.Conn.(driver.NamedValueChecker); ok {
		return n.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

func (c *conn) Ping(ctx context.Context) error { return c.shown.Ping(ctx) }

func (c *conn) ResetSession(ctx context.Context) error {
	if r, ok := c.below.Conn.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

func (c *conn) IsValid() bool {
	v, ok := c.below.Conn.(driver.Validator)
	return !c.bad && (!ok || v.IsValid())
}

func (c *conn) Close() error { return c.shown.Close() }

// wrappedStmt is what sqlmw makes of a statement.
type wrappedStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

// stmt is a prepared statement that an interceptor sees.
type stmt struct {
	shown wrappedStmt
	below *belowStmt
	c     *conn
}

func (s *stmt) Close() error  { return s.shown.Close() }
func (s *stmt) NumInput() int { return s.shown.NumInput() }

func (s *stmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(context.Background(), basedriver.Named(args))
}

func (s *stmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), basedriver.Named(args))
}

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	s.below.result = nil
	res, err := s.shown.ExecContext(ctx, args)
	if err != nil {
		return nil, err
	}
	return whole(res, s.below.result), nil
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.shown.QueryContext(ctx, args)
}

func (s *stmt) CheckNamedValue(v *driver.NamedValue) error {
	if n, ok := s.below.Stmt.(driver.NamedValueChecker); ok {
		return n.CheckNamedValue(v)
	}
	return s.c.CheckNamedValue(v)
}

// stmtConverter is a stmt with the optional ColumnConverter.
type stmtConverter struct {
	*stmt
	converter driver.ColumnConverter //nolint:staticcheck // as above
}

func (s stmtConverter) ColumnConverter(i int) driver.ValueConverter {
	return s.converter.ColumnConverter(i)
}

// counts is what go-sql-driver/mysql's Result has for several statements.
type counts interface {
	AllRowsAffected() []int64
	AllLastInsertIds() []int64
}

// whole is the result that the interceptor sees, with what the base's has beside it.
func whole(shown, base driver.Result) driver.Result {
	all, ok := base.(counts)
	if !ok {
		return shown
	}
	return struct {
		driver.Result
		counts
	}{shown, all}
}
