package mysqllock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/sqltext"
)

// statement is something to run on whatever connection a unit of work is on.
type statement struct {
	text     string
	args     []driver.NamedValue
	query    bool        // has rows
	prepared bool        // must go through Prepare, as the caller's own statement would
	stmt     driver.Stmt // already prepared on the connection that on is
	on       driver.Conn
	info     sqltext.Info
	claims   bool // locks the rows that it returns because the hint says so
	atOnce   bool // and fails where one of them is locked
}

// mayWrite is in doubt true.
func (s *statement) mayWrite() bool { return s.info.Kind != sqltext.Read || s.info.Functions }

// run runs the statement on a bare connection.
func (s *statement) run(ctx context.Context, base driver.Conn) (driver.Rows, driver.Result, error) {
	if s.stmt != nil && s.on == base {
		return s.viaStmt(ctx, s.stmt)
	}
	if !s.prepared {
		r, res, err := s.direct(ctx, base)
		if !errors.Is(err, driver.ErrSkip) {
			return r, res, err
		}
	}
	stmt, err := prepare(ctx, base, s.text)
	if err != nil {
		return nil, nil, err
	}
	if n := stmt.NumInput(); n >= 0 && n != len(s.args) {
		_ = stmt.Close()
		return nil, nil, fmt.Errorf("sql: expected %d arguments, got %d", n, len(s.args))
	}
	r, res, err := s.viaStmt(ctx, stmt)
	if err != nil || r == nil {
		_ = stmt.Close()
		return nil, res, err
	}
	return stmtRows{r, stmt}, nil, nil
}

// direct runs it without preparing, or returns driver.ErrSkip.
func (s *statement) direct(ctx context.Context, base driver.Conn) (driver.Rows, driver.Result, error) {
	if s.query {
		r, err := queryDirect(ctx, base, s.text, s.args)
		return r, nil, err
	}
	res, err := execDirect(ctx, base, s.text, s.args)
	return nil, res, err
}

func (s *statement) viaStmt(ctx context.Context, stmt driver.Stmt) (driver.Rows, driver.Result, error) {
	if s.query {
		r, err := stmtQuery(ctx, stmt, s.args)
		return r, nil, err
	}
	res, err := stmtExec(ctx, stmt, s.args)
	return nil, res, err
}

// stmtRows closes the statement with its rows. It need not keep optional
// interfaces hidden or shown: readAhead looks at the rows inside.
type stmtRows struct {
	driver.Rows
	stmt driver.Stmt
}

// The functions below call a base driver the way database/sql does, with its
// older interfaces where it lacks the newer.

func execDirect(ctx context.Context, base driver.Conn, text string, args []driver.NamedValue) (driver.Result, error) {
	if e, ok := base.(driver.ExecerContext); ok {
		return e.ExecContext(ctx, text, args)
	}
	e, ok := base.(driver.Execer) //nolint:staticcheck // for drivers without the context form
	if !ok {
		return nil, driver.ErrSkip
	}
	values, err := positional(ctx, args)
	if err != nil {
		return nil, err
	}
	return e.Exec(text, values)
}

func queryDirect(ctx context.Context, base driver.Conn, text string, args []driver.NamedValue) (driver.Rows, error) {
	if q, ok := base.(driver.QueryerContext); ok {
		return q.QueryContext(ctx, text, args)
	}
	q, ok := base.(driver.Queryer) //nolint:staticcheck // for drivers without the context form
	if !ok {
		return nil, driver.ErrSkip
	}
	values, err := positional(ctx, args)
	if err != nil {
		return nil, err
	}
	return q.Query(text, values)
}

func prepare(ctx context.Context, base driver.Conn, text string) (driver.Stmt, error) {
	if p, ok := base.(driver.ConnPrepareContext); ok {
		return p.PrepareContext(ctx, text)
	}
	stmt, err := base.Prepare(text)
	if err == nil && ctx.Err() != nil {
		_ = stmt.Close()
		return nil, ctx.Err()
	}
	return stmt, err
}

func stmtExec(ctx context.Context, stmt driver.Stmt, args []driver.NamedValue) (driver.Result, error) {
	if s, ok := stmt.(driver.StmtExecContext); ok {
		return s.ExecContext(ctx, args)
	}
	values, err := positional(ctx, args)
	if err != nil {
		return nil, err
	}
	return stmt.Exec(values) //nolint:staticcheck // for drivers without the context form
}

func stmtQuery(ctx context.Context, stmt driver.Stmt, args []driver.NamedValue) (driver.Rows, error) {
	if s, ok := stmt.(driver.StmtQueryContext); ok {
		return s.QueryContext(ctx, args)
	}
	values, err := positional(ctx, args)
	if err != nil {
		return nil, err
	}
	return stmt.Query(values) //nolint:staticcheck // for drivers without the context form
}

func positional(ctx context.Context, args []driver.NamedValue) ([]driver.Value, error) {
	values := make([]driver.Value, len(args))
	for i, a := range args {
		if a.Name != "" {
			return nil, errors.New("sql: driver does not support the use of Named Parameters")
		}
		values[i] = a.Value
	}
	return values, ctx.Err()
}

func named(values []driver.Value) []driver.NamedValue {
	args := make([]driver.NamedValue, len(values))
	for i, v := range values {
		args[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	return args
}

func (s *statement) op() string {
	if s.query {
		return "query"
	}
	return "exec"
}
