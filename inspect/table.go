package inspect

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Setup has to be run to have the lock table: on MariaDB, or on MySQL with the
// procedures. By these BEGIN goes out with a row lock, a lease or the reading of a version,
// and COMMIT with the check of leases, advisory locks or versions; and a row lock is waited
// for. They begin with CREATE PROCEDURE, and may be left out. Setup asks no server.
func (i *Inspector) Setup(mariadb bool) []string {
	statements := i.table.Setup()
	if !mariadb {
		for _, procedure := range i.table.Procedures() {
			statements = append(statements, procedure.DDL())
		}
	}
	return statements
}

// Lack tells of procedures of the driver's that the account cannot call, for one reason, or of
// columns that a lock table of an older version does not have. The driver does without: without
// procedures it takes more round trips, and without the columns a [Holder] has no Since, TTL and
// Renewed of a lease.
type Lack struct {
	Procedures []string // their quoted names
	Columns    string   // the statement that adds them, which needs ALTER; "" if none are missing
	Why        string
	Grants     []string // what to run if the account lacks EXECUTE; else [Inspector.MakeTable] may help, with an account that has CREATE ROUTINE
}

// String returns what is missing, and the reason.
func (l Lack) String() string {
	if l.Columns != "" {
		return "the columns of this version: " + l.Why
	}
	return strings.Join(l.Procedures, ", ") + ": " + l.Why
}

// CheckTable returns nil if the lock table is as the driver needs it. Else the error says
// which statements to run. lacks are the driver's procedures that the account cannot call, of
// which MariaDB needs none, and missing columns. CheckTable changes nothing.
func (i *Inspector) CheckTable(ctx context.Context) (lacks []Lack, err error) {
	lacks, err = i.ensure(ctx, func(conn driver.Conn) driver.Conn { return lookOnly{conn} }, false)
	if errors.Is(err, errWouldWrite) {
		setup := i.table.Setup()
		err = fmt.Errorf("mysqllock: the lock table lacks its high-water row; make it with:\n%s", setup[len(setup)-1])
	}
	return lacks, err
}

// MakeTable makes the lock table and, on MySQL, the procedures, or brings them up to date. With
// lockSchema=auto the driver does the same when it first uses each. MakeTable needs CREATE,
// INSERT and SELECT, and CREATE ROUTINE for the procedures; lacks are those that the account
// cannot call afterwards, and the columns that could not be added. To bring a table of an older
// version up to date it needs ALTER, and that for a moment nobody uses the table. In a group with
// several primaries it makes no procedures and adds no columns.
func (i *Inspector) MakeTable(ctx context.Context) (lacks []Lack, err error) {
	return i.ensure(ctx, func(conn driver.Conn) driver.Conn { return conn }, true)
}

func (i *Inspector) ensure(ctx context.Context, as func(driver.Conn) driver.Conn, auto bool) (lacks []Lack, err error) {
	err = i.on(ctx, func(ctx context.Context, s *session) error {
		return s.onDriver(func(conn driver.Conn) error {
			conn = as(conn)
			lacks, err = s.examine(ctx, conn, auto)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("mysqllock: %w", err)
	}
	return lacks, nil
}

// examine looks at the table, and with auto makes what is missing.
func (s *session) examine(ctx context.Context, conn driver.Conn, auto bool) ([]Lack, error) {
	if _, err := s.table.Ensure(ctx, conn, s.info, auto); err != nil {
		return nil, err
	}
	columns, why, err := s.table.Complete(ctx, conn, s.info, auto)
	if err != nil {
		return nil, err
	}
	lacks, err := s.lacks(ctx, conn, s.info, auto)
	switch {
	case columns == "":
	case why != nil:
		lacks = append(lacks, Lack{Columns: columns, Why: "could not be added: " + why.Error()})
	default:
		lacks = append(lacks, Lack{Columns: columns, Why: "an older version has made the table"})
	}
	return lacks, err
}

// lacks returns the driver's procedures that the account cannot call. With auto it makes those
// that are missing.
func (s *session) lacks(ctx context.Context, conn driver.Conn, info server.Info, auto bool) (lacks []Lack, err error) {
	if !info.Procedures {
		return nil, nil
	}
	found, err := s.table.Lacks(ctx, conn, auto && info.Topology != server.MultiPrimary)
	for _, f := range found {
		at := slices.IndexFunc(lacks, func(l Lack) bool { return l.Why == f.Why })
		if at < 0 {
			at, lacks = len(lacks), append(lacks, Lack{Why: f.Why})
		}
		lacks[at].Procedures = append(lacks[at].Procedures, f.String())
		if f.Denied {
			lacks[at].Grants = append(lacks[at].Grants, s.grant("EXECUTE", "PROCEDURE "+f.String()))
		}
	}
	return lacks, err
}
