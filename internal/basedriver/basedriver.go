// Package basedriver calls a base driver the way database/sql does, with its older interfaces where it
// lacks the newer.
package basedriver

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
)

// Exec runs text without preparing it, or returns driver.ErrSkip.
func Exec(ctx context.Context, base driver.Conn, text string, args []driver.NamedValue) (driver.Result, error) {
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

// Query is [Exec] for a query.
func Query(ctx context.Context, base driver.Conn, text string, args []driver.NamedValue) (driver.Rows, error) {
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

// Prepare prepares text.
func Prepare(ctx context.Context, base driver.Conn, text string) (driver.Stmt, error) {
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

// StmtExec runs a prepared statement.
func StmtExec(ctx context.Context, stmt driver.Stmt, args []driver.NamedValue) (driver.Result, error) {
	if err := counted(stmt, args); err != nil {
		return nil, err
	}
	if s, ok := stmt.(driver.StmtExecContext); ok {
		return s.ExecContext(ctx, args)
	}
	values, err := positional(ctx, args)
	if err != nil {
		return nil, err
	}
	return stmt.Exec(values) //nolint:staticcheck // for drivers without the context form
}

// StmtQuery is [StmtExec] for a query.
func StmtQuery(ctx context.Context, stmt driver.Stmt, args []driver.NamedValue) (driver.Rows, error) {
	if err := counted(stmt, args); err != nil {
		return nil, err
	}
	if s, ok := stmt.(driver.StmtQueryContext); ok {
		return s.QueryContext(ctx, args)
	}
	values, err := positional(ctx, args)
	if err != nil {
		return nil, err
	}
	return stmt.Query(values) //nolint:staticcheck // for drivers without the context form
}

// counted refuses another number of arguments than stmt has, if it tells: database/sql cannot ask a
// statement that is prepared only where it runs.
func counted(stmt driver.Stmt, args []driver.NamedValue) error {
	if n := stmt.NumInput(); n >= 0 && n != len(args) {
		return fmt.Errorf("sql: expected %d arguments, got %d", n, len(args))
	}
	return nil
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

// Named numbers arguments that have no names.
func Named(values []driver.Value) []driver.NamedValue {
	args := make([]driver.NamedValue, len(values))
	for i, v := range values {
		args[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	return args
}

// Begin begins a transaction.
func Begin(ctx context.Context, base driver.Conn, opts driver.TxOptions) (driver.Tx, error) {
	if b, ok := base.(driver.ConnBeginTx); ok {
		return b.BeginTx(ctx, opts)
	}
	if opts.Isolation != driver.IsolationLevel(sql.LevelDefault) {
		return nil, errors.New("sql: driver does not support non-default isolation level")
	}
	if opts.ReadOnly {
		return nil, errors.New("sql: driver does not support read-only transactions")
	}
	tx, err := base.Begin() //nolint:staticcheck // for drivers without the context form
	if err == nil && ctx.Err() != nil {
		_ = tx.Rollback()
		return nil, ctx.Err()
	}
	return tx, err
}
