package dbtest

import (
	"context"
	"database/sql/driver"
	"io"
)

// Wrapper is a wrapper of drivers that passes on statements, with their contexts, pings and the end of the handle. Unless
// it Tells, it hides driver.Validator and driver.SessionResetter, so nobody is told when database/sql has done with a connection.
type Wrapper struct {
	driver.Connector
	Tells bool
}

// Close implements [io.Closer], also for a connector that does not.
func (w Wrapper) Close() error {
	if c, ok := w.Connector.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// Statements are what it passes on.
type Statements interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.NamedValueChecker
	driver.Pinger
}

// Connect implements [driver.Connector].
func (w Wrapper) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := w.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	if w.Tells {
		return struct {
			Statements
			driver.Validator
			driver.SessionResetter
		}{c.(Statements), c.(driver.Validator), c.(driver.SessionResetter)}, nil
	}
	return struct{ Statements }{c.(Statements)}, nil
}
