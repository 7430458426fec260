package inspect

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
)

// Setup returns the statements that make the lock table. It asks no server.
func (i *Inspector) Setup() []string { return i.table.Setup() }

// Lack tells of columns that a lock table which an earlier version has made does not have. The driver does without: a
// [Holder] has no Since, TTL and Renewed of a lease then.
type Lack struct {
	Columns string // the statement that adds them, which needs ALTER; "" if none are missing
	Why     string
}

// CheckTable returns no error if the lock table is as the driver needs it. Else the error says
// which statements to run. CheckTable changes nothing.
func (i *Inspector) CheckTable(ctx context.Context) (lack Lack, err error) {
	lack, err = i.ensure(ctx, func(conn driver.Conn) driver.Conn { return lookOnly{conn} }, false)
	if errors.Is(err, errWouldWrite) {
		setup := i.table.Setup()
		err = fmt.Errorf("mysqllock: the lock table lacks its high-water row; make it with:\n%s", setup[len(setup)-1])
	}
	return lack, err
}

// MakeTable makes the lock table, or brings it up to date. With lockSchema=auto the driver does the same when it first
// uses it. MakeTable needs CREATE, INSERT and SELECT. To bring a table of an earlier version up to date it needs ALTER, and
// that for a moment nobody uses the table; lack tells of columns that could not be added. In a group with several
// primaries it adds no columns.
func (i *Inspector) MakeTable(ctx context.Context) (lack Lack, err error) {
	return i.ensure(ctx, func(conn driver.Conn) driver.Conn { return conn }, true)
}

// DropProcedures drops the procedures that earlier versions of the driver have made on MySQL beside the lock table, and
// returns the quoted names of those that it has dropped, also with an error. It leaves alone what belongs to others: each of
// ours has a known name, and "mysqllock" as its comment. Programs of this version call none. Those of an earlier version go
// their way without them, by more statements; one that starts later makes them again, if its account may. DropProcedures
// needs ALTER ROUTINE, and on MySQL SYSTEM_USER if the account that made them has it; an account without a privilege on a
// procedure does not see it.
func (i *Inspector) DropProcedures(ctx context.Context) (dropped []string, err error) {
	err = i.on(ctx, func(ctx context.Context, s *session) error {
		return s.onDriver(func(conn driver.Conn) error {
			dropped, err = s.table.DropProcedures(ctx, conn)
			return err
		})
	})
	if err != nil {
		return dropped, fmt.Errorf("mysqllock: %w", err)
	}
	return dropped, nil
}

func (i *Inspector) ensure(ctx context.Context, as func(driver.Conn) driver.Conn, auto bool) (lack Lack, err error) {
	err = i.on(ctx, func(ctx context.Context, s *session) error {
		return s.onDriver(func(conn driver.Conn) error {
			lack, err = s.examine(ctx, as(conn), auto)
			return err
		})
	})
	if err != nil {
		return Lack{}, fmt.Errorf("mysqllock: %w", err)
	}
	return lack, nil
}

// examine looks at the table, and with auto makes what is missing.
func (s *session) examine(ctx context.Context, conn driver.Conn, auto bool) (Lack, error) {
	if err := s.table.Ensure(ctx, conn, s.info, auto); err != nil {
		return Lack{}, err
	}
	columns, why, err := s.table.Complete(ctx, conn, s.info, auto)
	switch {
	case err != nil || columns == "":
		return Lack{}, err
	case why != nil:
		return Lack{columns, "could not be added: " + why.Error()}, nil
	}
	return Lack{columns, "an earlier version has made the table"}, nil
}
