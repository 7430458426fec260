// Package schema knows the lock table: its name, its definition, and how it
// and its helper procedure come to exist.
package schema

import (
	"context"
	"database/sql/driver"
	"encoding/hex"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

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

// Floor is the condition of the floor, a row that no key can have: its token is
// the highest of all rows that clean-up has removed. New rows begin with it, so
// that a key's token never goes back.
const Floor = "namespace = x'' AND name = x''"

// Stripes names the row whose token is the number of rows that the keys of its
// namespace share, where they do. No key has that name.
const Stripes = "\x00stripes"

// laterColumns are what the table's first form did not have.
var laterColumns = []string{
	"owner VARBINARY(255) NULL",
	"token BIGINT UNSIGNED NOT NULL DEFAULT 0",
	"expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00'",
	"versioned TINYINT UNSIGNED NOT NULL DEFAULT 0",
}

// DDL is the statement that makes the table. owner has the lease and is NULL
// when nobody has; token only grows: by one with each lease, and by one with each
// commit under the key that others, who keep it optimistically, have to see;
// expires is, in UTC, when the lease ends or ended, or when the row was made or
// last committed under; versioned is 1 once somebody has kept the key
// optimistically, from when on row locks count as such commits.
func (t Table) DDL() string {
	return "CREATE TABLE IF NOT EXISTS " + t.String() + " (\n" +
		"  namespace VARBINARY(255) NOT NULL,\n" +
		"  name VARBINARY(255) NOT NULL,\n  " +
		strings.Join(laterColumns, ",\n  ") + ",\n" +
		"  PRIMARY KEY (namespace, name)\n" +
		") ENGINE=InnoDB COMMENT='locks of mysqllock: one row a key'"
}

func (t Table) floorDDL() string {
	return "INSERT IGNORE INTO " + t.String() + " (namespace, name) VALUES (x'', x'')"
}

// Setup is all that has to be run to have the table.
func (t Table) Setup() []string { return []string{t.DDL(), t.floorDDL()} }

// version is the procedure's comment. A procedure with another one is made
// again.
const version = "mysqllock 5"

// ProcedureDDL is the statement that makes the procedure, on MySQL. MariaDB
// needs none: there the same is one anonymous block. Where a lease is live the
// procedure rolls back by itself, so that a caller which freezes before it has
// read the answer does not keep the lease's holder from renewing.
//
// Where the row is [Quiet] it answers without a result set, which saves a third of
// what the call costs the server (measured on MySQL 9.7). A p_quiet of NULL always
// wants one.
func (t Table) ProcedureDDL() string {
	from := " FROM " + t.String() + " WHERE namespace = p_namespace AND name = p_name "
	look := "SELECT " + Quiet("p_quiet") + " INTO v_quiet\n     " + from
	return "CREATE PROCEDURE " + t.Procedure() + "(p_namespace VARBINARY(255), p_name VARBINARY(255), p_shared BOOL, p_quiet BIGINT UNSIGNED)\n" +
		"SQL SECURITY INVOKER COMMENT '" + version + "'\n" +
		"BEGIN\n" +
		"  DECLARE v_quiet BOOL;\n" +
		"  START TRANSACTION;\n" +
		"  IF p_shared THEN\n    " + look + "FOR SHARE NOWAIT;\n" +
		"  ELSE\n    " + look + "FOR UPDATE NOWAIT;\n" +
		"  END IF;\n" +
		"  IF v_quiet IS NOT TRUE THEN BEGIN\n" +
		"    DECLARE v_remaining BIGINT;\n" +
		"    DECLARE v_token BIGINT UNSIGNED;\n" +
		"    DECLARE v_owner VARBINARY(255);\n" +
		"    DECLARE v_versioned BOOL;\n" +
		"    SELECT " + Remaining("") + ", token, owner, versioned INTO v_remaining, v_token, v_owner, v_versioned\n" +
		"     " + from + "FOR SHARE;\n" +
		"    IF v_remaining > 0 THEN ROLLBACK; END IF;\n" +
		"    SELECT CONNECTION_ID(), v_remaining, v_token, v_owner, v_versioned, " + server.WritableColumns + " FROM DUAL WHERE v_token IS NOT NULL;\n" +
		"  END; END IF;\n" +
		"END"
}

// Quiet is the condition that there is nothing to tell of a row to who has locked
// it: it has no lease, versions of it are not compared, its token is at most most,
// and the server takes writes.
func Quiet(most string) string {
	return "owner IS NULL AND versioned = 0 AND token <= " + most + " AND " + server.Writable
}

// Live is the condition that a row has a live lease, by the server's clock at
// the start of the statement. qualifier goes in front of each column: "" or, for
// example, "t.".
func Live(qualifier string) string {
	return "(" + qualifier + "owner IS NOT NULL AND " + qualifier + "expires > UTC_TIMESTAMP(6))"
}

// Remaining is how long a row's lease is still live, in microseconds; 0 where
// none is. qualifier is as in Live.
func Remaining(qualifier string) string {
	return "IF(" + Live(qualifier) + ", TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), " + qualifier + "expires), 0)"
}

// Literal returns b as a hexadecimal literal, which needs no quoting rules and
// compares as bytes.
func Literal(b string) string { return "x'" + hex.EncodeToString([]byte(b)) + "'" }

// Ensure sees to it that the table can keep locks, and reports whether the
// procedure is there. Where auto is set it makes what is missing, and brings a
// table of an older form up to date; else that is an error that carries the
// statements to run. The procedure is a matter of speed only, and its lack never
// an error. conn must have no transaction open: DDL would commit it.
//
// In a Group Replication group with several primaries nothing is made but what may
// be made twice: what two members make at the same time each has to make again for
// the other, and one that cannot leaves the group.
//
// Where another node of a cluster makes the same at this moment, the statements
// are refused until it has arrived here: then Ensure tries again.
func (t Table) Ensure(ctx context.Context, conn driver.Conn, info server.Info, auto bool) (procedure bool, err error) {
	const patience = 100
	for tries := 1; ; tries++ {
		procedure, err = t.ensure(ctx, conn, info, auto)
		if !server.Deadlock(err) || tries == patience {
			return procedure, err
		}
		select {
		case <-time.After(time.Duration(min(tries, 10)) * 10 * time.Millisecond):
		case <-ctx.Done():
			return false, err
		}
	}
}

func (t Table) ensure(ctx context.Context, conn driver.Conn, info server.Info, auto bool) (procedure bool, err error) {
	if t.schema == "" {
		return false, fmt.Errorf("no database is selected: name one in the DSN, or give lockTable as schema.table")
	}
	s, err := t.state(ctx, conn, info)
	lack := t.lack(s)
	repeatable := s.engine == "" || info.Topology != server.MultiPrimary
	if err == nil && auto && lack != "" && repeatable {
		err = server.Exec(ctx, conn, lack)
		const duplicateColumn = 1060 // another process was quicker
		if err == nil || server.Number(err) == duplicateColumn {
			if s, err = t.state(ctx, conn, info); err == nil {
				lack = t.lack(s)
			}
		}
	}
	if err == nil && lack == "" && s.innoDB() {
		err = t.ensureFloor(ctx, conn)
	}
	run := t.floorDDL()
	if lack != "" {
		run = lack + ";\n" + run
	}
	switch {
	case server.Denied(err):
		return false, fmt.Errorf("making the lock table: %w; the account needs SELECT, INSERT, UPDATE on it, and the right to make it where it is missing; or let someone who has that run:\n%s", err, run)
	case server.Refused(err):
		return false, lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("making the lock table: %w; the server takes no writes, so that no lock on it excludes anybody; on the one that takes them this may have to be run:\n%s", err, run))
	case server.Missing(err):
		return false, fmt.Errorf("making the lock table: %w; let someone with the right to do so run:\n%s", err, run)
	case server.Locked(err) && lack != "":
		return false, fmt.Errorf("the lock table is of an older form and in use, so it cannot be changed just now: %w; it is tried again at its next use, or run, when it is not:\n%s", err, run)
	case err != nil:
		return false, err
	case s.engine == "":
		return false, fmt.Errorf("the lock table %s does not exist, or its privileges are missing (SELECT, INSERT, UPDATE); make it with:\n%s", t, run)
	case !s.innoDB():
		return false, lockerr.With(lockerr.ErrUnsafe,
			fmt.Errorf("the lock table %s is kept by the engine %s, which has no row locks; ALTER TABLE %s ENGINE=InnoDB", t, s.engine, t))
	case lack != "":
		return false, fmt.Errorf("the lock table %s is of an older form; bring it up to date with:\n%s", t, run)
	case info.MariaDB:
		return false, nil
	}
	return t.ensureProcedure(ctx, conn, s, auto && info.Topology != server.MultiPrimary)
}

// state is what the server says of the table and its procedure.
type state struct {
	engine    string   // "" where there is no such table to be seen
	columns   []string // in lower case
	procedure string   // whether it is of our version, "1" or "0"; "" where there is none
}

func (s state) innoDB() bool { return strings.EqualFold(s.engine, "InnoDB") }

func (t Table) state(ctx context.Context, conn driver.Conn, info server.Info) (state, error) {
	procedure := "NULL"
	if !info.MariaDB {
		procedure = "(SELECT ROUTINE_COMMENT = '" + version + "' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND " +
			t.where("ROUTINE_SCHEMA", "ROUTINE_NAME", t.procedure()) + ")"
	}
	rows, err := server.Query(ctx, conn, "SELECT ENGINE,"+
		" (SELECT LOWER(GROUP_CONCAT(COLUMN_NAME)) FROM information_schema.COLUMNS WHERE "+t.Where("TABLE_SCHEMA", "TABLE_NAME")+"), "+
		procedure+" FROM information_schema.TABLES WHERE "+t.Where("TABLE_SCHEMA", "TABLE_NAME"))
	if err != nil || len(rows) == 0 {
		return state{}, err
	}
	if len(rows[0]) < 3 {
		return state{}, fmt.Errorf("the server does not say what the lock table %s is like", t)
	}
	s := state{rows[0][0], strings.Split(rows[0][1], ","), rows[0][2]}
	if s.engine == "" {
		s.engine = "none (a view)"
	}
	return s, nil
}

// lack is the statement that brings the table into its form; "" where it is, or
// where it is none of ours.
func (t Table) lack(s state) string {
	if s.engine == "" {
		return t.DDL()
	}
	var add []string
	for _, column := range laterColumns {
		name, _, _ := strings.Cut(column, " ")
		if !slices.Contains(s.columns, name) {
			add = append(add, "ADD COLUMN "+column)
		}
	}
	if len(add) == 0 || !s.innoDB() {
		return ""
	}
	return "ALTER TABLE " + t.String() + " " + strings.Join(add, ", ")
}

// ensureFloor looks with a plain read first, since an INSERT of a row that is
// there waits for whoever has locked it.
func (t Table) ensureFloor(ctx context.Context, conn driver.Conn) error {
	rows, err := server.Query(ctx, conn, "SELECT 1 FROM "+t.String()+" WHERE "+Floor)
	if err != nil || len(rows) > 0 {
		return err
	}
	return server.Exec(ctx, conn, t.floorDDL())
}

func (t Table) ensureProcedure(ctx context.Context, conn driver.Conn, s state, auto bool) (bool, error) {
	if s.procedure == "1" || !auto {
		return s.procedure == "1", nil
	}
	var err error
	if s.procedure != "" {
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
