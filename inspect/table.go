package inspect

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Setup is what has to be run to have the lock table: on MariaDB, or on MySQL with
// the procedure by which BEGIN and a row lock go out together, which is the last
// statement and may be left out. It asks no server.
func (i *Inspector) Setup(mariadb bool) []string {
	statements := i.table.Setup()
	if !mariadb {
		statements = append(statements, i.table.ProcedureDDL())
	}
	return statements
}

// CheckTable returns nil where the lock table is as the driver needs it, and else
// an error that says what to run. procedure is whether the server has one that the
// driver uses; MariaDB needs none. It changes nothing.
func (i *Inspector) CheckTable(ctx context.Context) (procedure bool, err error) {
	procedure, err = i.ensure(ctx, func(conn driver.Conn) driver.Conn { return lookOnly{conn} }, false)
	if errors.Is(err, errWouldWrite) {
		setup := i.table.Setup()
		err = fmt.Errorf("mysqllock: the lock table lacks its floor row; make it with:\n%s", setup[len(setup)-1])
	}
	return procedure, err
}

// MakeTable makes the lock table and, on MySQL, its procedure, or brings them up
// to date, as the driver does at its first use where lockSchema is auto. It needs
// CREATE, INSERT and SELECT; without CREATE ROUTINE there is no procedure. Where
// the table is of an older form it needs ALTER, and that nobody uses the table.
func (i *Inspector) MakeTable(ctx context.Context) (procedure bool, err error) {
	return i.ensure(ctx, func(conn driver.Conn) driver.Conn { return conn }, true)
}

func (i *Inspector) ensure(ctx context.Context, as func(driver.Conn) driver.Conn, auto bool) (procedure bool, err error) {
	err = i.on(ctx, func(ctx context.Context, s *session) error {
		return s.onDriver(func(conn driver.Conn) error {
			info, err := server.Probe(ctx, conn)
			if err != nil {
				return err
			}
			procedure, err = s.table.Ensure(ctx, as(conn), info, auto)
			return err
		})
	})
	if err != nil {
		return false, fmt.Errorf("mysqllock: %w", err)
	}
	return procedure, nil
}
