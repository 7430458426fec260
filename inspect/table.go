package inspect

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Setup is what has to be run to have the lock table: on MariaDB, or on MySQL with the
// procedures. By these BEGIN goes out with a row lock, a lease or the reading of a version,
// and COMMIT with the check of leases, advisory locks or versions; and a row lock is waited for. They are
// the last eight statements and may be left out. It asks no server.
func (i *Inspector) Setup(mariadb bool) []string {
	statements := i.table.Setup()
	if !mariadb {
		for _, procedure := range i.table.Procedures() {
			statements = append(statements, procedure.DDL())
		}
	}
	return statements
}

// CheckTable returns nil if the lock table is as the driver needs it. Else the error says
// which statements to run. procedure reports whether the driver's procedure is there;
// MariaDB needs none. CheckTable changes nothing.
func (i *Inspector) CheckTable(ctx context.Context) (procedure bool, err error) {
	procedure, err = i.ensure(ctx, func(conn driver.Conn) driver.Conn { return lookOnly{conn} }, false)
	if errors.Is(err, errWouldWrite) {
		setup := i.table.Setup()
		err = fmt.Errorf("mysqllock: the lock table lacks its floor row; make it with:\n%s", setup[len(setup)-1])
	}
	return procedure, err
}

// MakeTable makes the lock table and, on MySQL, its procedure, or brings them up to date.
// With lockSchema=auto the driver does the same at its first use. MakeTable needs CREATE,
// INSERT and SELECT; without CREATE ROUTINE it makes no procedure. To bring a table of an
// older version up to date it needs ALTER, and the table must not be in use.
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
