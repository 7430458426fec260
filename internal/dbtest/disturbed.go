package dbtest

import (
	"context"
	"database/sql/driver"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Disturbed is a connection on which something happens to one statement: it fails with Err,
// before or after the server has carried it out; or Text makes it another on the way.
type Disturbed struct {
	driver.Conn
	At    func(text string) bool // which statement; nil is none
	After bool
	Err   error // nil is the server's own answer
	Text  func(string) string
	Then  func() // runs once it was carried out
	Next  error  // what those after it fail with
	over  bool
}

// QueryContext is how the driver runs such statements.
func (d *Disturbed) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	base := d.Conn.(driver.QueryerContext)
	if d.At == nil || !d.At(text) {
		if d.over && d.Next != nil {
			return nil, d.Next
		}
		return base.QueryContext(ctx, text, args)
	}
	d.over = true
	if d.Text != nil {
		text = d.Text(text)
	}
	if d.Then != nil {
		defer d.Then()
	}
	if d.Err == nil {
		return base.QueryContext(ctx, text, args)
	}
	if d.After {
		if _, err := server.Query(ctx, d.Conn, text); err != nil {
			return nil, err
		}
	}
	return nil, d.Err
}

// ExecContext leaves the statement alone.
func (d *Disturbed) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	return d.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
}

// Interrupted is what the server answers where a statement was ended by KILL QUERY.
var Interrupted = &mysql.MySQLError{Number: server.QueryInterrupted, Message: "Query execution was interrupted"}

// DisturbedCommit is what happens to a statement that checks and commits, and what comes of it.
type DisturbedCommit struct {
	Disturbed
	Committed     bool // on the server
	Done, Unknown bool // to the caller
}

// DisturbedCommits are those that any strategy must tell apart.
func DisturbedCommits() map[string]DisturbedCommit {
	return map[string]DisturbedCommit{
		"killed before": {Disturbed: Disturbed{Err: Interrupted}},
		"killed after":  {Disturbed: Disturbed{Err: Interrupted, After: true}, Committed: true, Done: true},
		"killed after, then cut": {
			Disturbed: Disturbed{Err: Interrupted, After: true, Next: mysql.ErrInvalidConn},
			Committed: true, Unknown: true,
		},
		"killed after, and again": {Disturbed: Disturbed{Err: Interrupted, After: true, Next: Interrupted}, Committed: true, Unknown: true},
		"cut before":              {Disturbed: Disturbed{Err: mysql.ErrInvalidConn}, Unknown: true},
		"cut after":               {Disturbed: Disturbed{Err: mysql.ErrInvalidConn, After: true}, Committed: true, Unknown: true},
		"nothing sent":            {Disturbed: Disturbed{Err: driver.ErrBadConn}},
		"deadlock":                {Disturbed: Disturbed{Err: &mysql.MySQLError{Number: server.LockDeadlock}}},
	}
}
