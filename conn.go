package mysqllock

import (
	"context"
	"database/sql/driver"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/unit"
)

// conn is one connection as database/sql sees it: the interfaces of package driver,
// around a unit.Conn.
type conn struct {
	inner     *unit.Conn // does the work
	connector *connector
	direct    bool   // no wrapper of drivers is above it, so that no probe comes: see wrapped.go
	closed    func() // is told when it is closed; nil is nobody
}

var (
	_ driver.Conn               = (*conn)(nil)
	_ driver.ConnBeginTx        = (*conn)(nil)
	_ driver.ConnPrepareContext = (*conn)(nil)
	_ driver.NamedValueChecker  = (*conn)(nil)
	_ driver.Pinger             = (*conn)(nil)
	_ driver.SessionResetter    = (*conn)(nil)
	_ driver.Validator          = (*conn)(nil)

	_ driver.Execer         = execer{} //nolint:staticcheck // go-sql-driver/mysql has it, and code uses it through Conn.Raw
	_ driver.ExecerContext  = execer{}
	_ driver.Queryer        = queryer{} //nolint:staticcheck // as above
	_ driver.QueryerContext = queryer{}
)

// execer and queryer run statements without preparing them. A connection has
// them only where the base has the like: database/sql checks a statement's
// arguments before it asks one, and by other rules than a prepared statement's.
type (
	execer  struct{ c *conn }
	queryer struct{ c *conn }
)

// shaped returns the connection with what a base connection has of them.
func (c *conn) shaped(base driver.Conn) driver.Conn {
	_, execs := base.(driver.ExecerContext)
	if !execs {
		_, execs = base.(driver.Execer) //nolint:staticcheck // for drivers without the context form
	}
	_, queries := base.(driver.QueryerContext)
	if !queries {
		_, queries = base.(driver.Queryer) //nolint:staticcheck // as above
	}
	switch {
	case execs && queries:
		return struct {
			*conn
			execer
			queryer
		}{c, execer{c}, queryer{c}}
	case execs:
		return struct {
			*conn
			execer
		}{c, execer{c}}
	case queries:
		return struct {
			*conn
			queryer
		}{c, queryer{c}}
	}
	return c
}

// Unwrap returns the base driver's connection. What runs on it directly is not
// under a lock. With maxConns it is that of the sql.Conn, until that is closed; nil if no
// connection could be had.
func (c *conn) Unwrap() driver.Conn { return c.inner.Base() }

func (e execer) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	if !e.c.direct && e.c.probed(ctx) {
		return driver.ResultNoRows, nil
	}
	return e.c.inner.Exec(ctx, text, args)
}

func (q queryer) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	if !q.c.direct && q.c.probed(ctx) {
		return noRows{}, nil
	}
	return q.c.inner.Query(ctx, text, args)
}

// Exec is for code that calls it through sql.Conn.Raw.
func (e execer) Exec(text string, args []driver.Value) (driver.Result, error) {
	return e.ExecContext(context.Background(), text, basedriver.Named(args))
}

// Query is for code that calls it through sql.Conn.Raw.
func (q queryer) Query(text string, args []driver.Value) (driver.Rows, error) {
	return q.QueryContext(context.Background(), text, basedriver.Named(args))
}

// Begin is BeginTx without context and options.
func (c *conn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

// BeginTx begins a transaction; with a lock context, under its lock.
func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if !c.direct && c.probed(ctx) {
		return noTx{}, nil
	}
	tx, err := c.inner.Begin(ctx, opts)
	if err != nil {
		return nil, err
	}
	return tx, nil
}

// Prepare is PrepareContext without a context.
func (c *conn) Prepare(text string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), text)
}

// PrepareContext prepares a statement. Preparing takes no lock; running it
// does, by the context that it runs with.
func (c *conn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	if !c.direct && c.probed(ctx) {
		return nil, errProbed
	}
	prepared, err := c.inner.Prepare(ctx, text)
	if err != nil {
		return nil, err
	}
	s := &stmt{prepared, c}
	if cc, ok := prepared.Base().(driver.ColumnConverter); ok { //nolint:staticcheck // old drivers have nothing else
		return stmtConverter{s, cc}, nil
	}
	return s, nil
}

// CheckNamedValue converts arguments the way the base driver does.
func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	base, err := c.inner.Sample(context.Background())
	if err != nil {
		return err
	}
	if n, ok := base.(driver.NamedValueChecker); ok {
		return n.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

// Ping pings the base connection.
func (c *conn) Ping(ctx context.Context) error { return c.inner.Ping(ctx) }

// ResetSession is called before the connection is used again.
func (c *conn) ResetSession(ctx context.Context) error { return c.inner.Reset(ctx) }

// IsValid reports whether the connection may go back to database/sql's pool.
func (c *conn) IsValid() bool { return c.inner.Valid() }

// Close closes the base connection, and with it the unit of work on it.
func (c *conn) Close() error {
	if c.closed != nil {
		defer c.closed()
	}
	return c.inner.Close()
}

// stmt is a prepared statement as database/sql sees it.
type stmt struct {
	*unit.Stmt
	c *conn
}

// stmtConverter is a stmt with the optional ColumnConverter, which is claimed only if
// the base driver's statement has it.
type stmtConverter struct {
	*stmt
	converter driver.ColumnConverter //nolint:staticcheck // as above
}

func (s stmtConverter) ColumnConverter(i int) driver.ValueConverter {
	return s.converter.ColumnConverter(i)
}

// Exec is ExecContext without a context.
func (s *stmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(context.Background(), basedriver.Named(args))
}

// Query is QueryContext without a context.
func (s *stmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), basedriver.Named(args))
}

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return s.Stmt.Exec(ctx, args)
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return s.Stmt.Query(ctx, args)
}

// CheckNamedValue converts arguments the way the base driver's statement does,
// else its connection.
func (s *stmt) CheckNamedValue(v *driver.NamedValue) error {
	if n, ok := s.Base().(driver.NamedValueChecker); ok {
		return n.CheckNamedValue(v)
	}
	return s.c.CheckNamedValue(v)
}
