// Package schema knows the lock table: its name, its definition, and how it
// and its helper procedure come to exist.
package schema

import (
	"context"
	"database/sql/driver"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// MaxNamespace is the longest namespace, in bytes.
const MaxNamespace = 255

// Table is the lock table: one row for each key, which is made on first use
// and stays.
type Table struct {
	schema string // "" is the connection's default database
	name   string
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9_$-]{1,64}$`)

// Parse reads "table" or "schema.table". A name has 1 to 64 letters, digits,
// or any of _ $ - and the table's at most 58, so that its procedure's name
// fits.
func Parse(s string) (Table, error) {
	schema, name, ok := strings.Cut(s, ".")
	if !ok {
		schema, name = "", s
	}
	if !plainName.MatchString(name) || len(name) > 58 || ok && !plainName.MatchString(schema) {
		return Table{}, fmt.Errorf("mysqllock: bad lock table %q: want table or schema.table, of letters, digits, _, $ and -", s)
	}
	return Table{schema, name}, nil
}

// String returns the quoted name, for SQL text.
func (t Table) String() string { return t.quoted(t.name) }

// Procedure returns the quoted name of the procedure that begins a transaction
// and locks one key in it.
func (t Table) Procedure() string { return t.quoted(t.procedure()) }

func (t Table) procedure() string { return t.name + "_begin" }

func (t Table) quoted(name string) string {
	if t.schema == "" {
		return "`" + name + "`"
	}
	return "`" + strings.ReplaceAll(t.schema, "`", "``") + "`.`" + name + "`" // a database can have any name
}

// DDL is the statement that makes the table.
func (t Table) DDL() string {
	return "CREATE TABLE IF NOT EXISTS " + t.String() + " (\n" +
		"  namespace VARBINARY(255) NOT NULL,\n" +
		"  name VARBINARY(255) NOT NULL,\n" +
		"  PRIMARY KEY (namespace, name)\n" +
		") ENGINE=InnoDB COMMENT='locks of mysqllock: one row a key'"
}

// version is part of the procedure's comment. A procedure with another one is
// made again.
const version = "mysqllock 1"

// ProcedureDDL is the statement that makes the procedure, on MySQL. MariaDB
// needs none: there the same is one anonymous block.
func (t Table) ProcedureDDL() string {
	return "CREATE PROCEDURE " + t.Procedure() + "(p_namespace VARBINARY(255), p_name VARBINARY(255))\n" +
		"SQL SECURITY INVOKER COMMENT '" + version + "'\n" +
		"BEGIN\n" +
		"  START TRANSACTION;\n" +
		"  SELECT CONNECTION_ID() FROM " + t.String() + " WHERE namespace = p_namespace AND name = p_name FOR UPDATE NOWAIT;\n" +
		"END"
}

// Literal returns b as a hexadecimal literal, which needs no quoting rules and
// compares as bytes.
func Literal(b string) string { return "x'" + hex.EncodeToString([]byte(b)) + "'" }

// Ensure sees to it that the table can keep locks, and reports whether the
// procedure is there. Where auto is set it makes what is missing, else a
// missing table is an error that carries its DDL; the procedure is a matter of
// speed only, and its lack never an error. conn must have no transaction open:
// DDL would commit it.
func (t Table) Ensure(ctx context.Context, conn driver.Conn, info server.Info, auto bool) (procedure bool, err error) {
	if t.schema == "" {
		return false, fmt.Errorf("no database is selected: name one in the DSN, or give lockTable as schema.table")
	}
	engine, err := t.engine(ctx, conn)
	if err == nil && engine == "" && auto {
		if err = server.Exec(ctx, conn, t.DDL()); err == nil {
			engine, err = t.engine(ctx, conn)
		}
	}
	switch {
	case server.Denied(err) || server.Missing(err) || server.Refused(err):
		return false, fmt.Errorf("making the lock table: %w; let someone with the right to do so run:\n%s", err, t.DDL())
	case err != nil:
		return false, err
	case engine == "":
		return false, fmt.Errorf("the lock table %s does not exist, or its privileges are missing (SELECT, INSERT, UPDATE); make it with:\n%s", t, t.DDL())
	case !strings.EqualFold(engine, "InnoDB"):
		return false, lockerr.With(lockerr.ErrUnsafe,
			fmt.Errorf("the lock table %s is kept by the engine %s, which has no row locks; ALTER TABLE %s ENGINE=InnoDB", t, engine, t))
	}
	if info.MariaDB {
		return false, nil
	}
	return t.ensureProcedure(ctx, conn, auto)
}

// engine returns the table's storage engine, "" where there is no such table
// to be seen.
func (t Table) engine(ctx context.Context, conn driver.Conn) (string, error) {
	rows, err := server.Query(ctx, conn, "SELECT ENGINE FROM information_schema.TABLES WHERE "+t.Where("TABLE_SCHEMA", "TABLE_NAME"))
	if err != nil || len(rows) == 0 {
		return "", err
	}
	if rows[0][0] == "" {
		return "none (a view)", nil
	}
	return rows[0][0], nil
}

func (t Table) ensureProcedure(ctx context.Context, conn driver.Conn, auto bool) (bool, error) {
	rows, err := server.Query(ctx, conn, "SELECT ROUTINE_COMMENT FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND "+
		t.where("ROUTINE_SCHEMA", "ROUTINE_NAME", t.procedure()))
	if err != nil {
		return false, err
	}
	if len(rows) == 1 && rows[0][0] == version {
		return true, nil
	}
	if !auto {
		return false, nil
	}
	if len(rows) == 1 {
		err = server.Exec(ctx, conn, "DROP PROCEDURE IF EXISTS "+t.Procedure())
	}
	if err == nil {
		err = server.Exec(ctx, conn, t.ProcedureDDL())
	}
	const alreadyExists = 1304 // another process was quicker
	if err == nil || server.Number(err) == alreadyExists {
		return true, nil
	}
	if server.Number(err) != 0 {
		return false, nil
	}
	return false, err
}

func (t Table) where(schemaColumn, nameColumn, name string) string {
	return schemaColumn + " = " + Literal(t.schema) + " AND " + nameColumn + " = " + Literal(name)
}

// Where returns the conditions under which a row of a system table is about
// the lock table.
func (t Table) Where(schemaColumn, nameColumn string) string {
	return t.where(schemaColumn, nameColumn, t.name)
}

// In returns the table in database where its schema was not named, so that USE
// on a connection does not lead to another one.
func (t Table) In(database string) Table {
	if t.schema == "" {
		t.schema = database
	}
	return t
}
