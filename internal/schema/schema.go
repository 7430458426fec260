// Package schema knows the lock table: its definition, how it is made and cleaned up, and the procedures of earlier
// versions beside it. It also has what the texts of several strategies are made of.
//
// A text is beside the code that gives it values and reads its answer. No two strategies send the same
// one, so a package of all texts would only part them from that.
//
// Comments show what the texts become, for the table mysqllock, the namespace 'app', the keys 'k' and 'l', the owner 'me'
// and the token 7. The texts have such values as hexadecimal literals, x'617070' for 'app' ([Literal]), and the name of
// the table in quotes, with its database in front.
package schema

import (
	"context"
	"database/sql/driver"
	"encoding/hex"
	"errors"
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

// Table is the lock table. It has one row for each key, which is made at the key's first use.
type Table struct {
	schema string // "" is the default database of the connection
	name   string
	anew   bool // see Anew
}

var plainName = regexp.MustCompile(`^[A-Za-z0-9_$-]{1,64}$`)

// Parse reads "table" or "schema.table". A name has 1 to 64 characters: letters, digits, _
// $ and -. The table's name has at most 58: earlier versions add the ends of their procedures' names to it.
func Parse(s string) (Table, error) {
	schema, name, ok := strings.Cut(s, ".")
	if !ok {
		schema, name = "", s
	}
	if !plainName.MatchString(name) || len(name) > 58 || ok && !plainName.MatchString(schema) {
		return Table{}, fmt.Errorf("mysqllock: bad lock table %q: want table or schema.table, of letters, digits, _, $ and -", s)
	}
	return Table{schema: schema, name: name}, nil
}

// String returns the quoted name, for SQL text.
func (t Table) String() string { return t.quoted(t.name) }

func (t Table) quoted(name string) string {
	if t.schema == "" {
		return "`" + name + "`"
	}
	return "`" + strings.ReplaceAll(t.schema, "`", "``") + "`.`" + name + "`" // a database can have any name
}

// HighWater is the condition for the high-water row, which belongs to no key. Its token is at least
// that of every row that a clean-up has removed. New rows begin with it, so a key's token
// never goes back.
const HighWater = "namespace = x'' AND name = x''"

// Stripes is the name of a row whose token is the number of rows that the keys of its
// namespace share. It exists only if they do. No key has that name.
const Stripes = "\x00stripes"

// laterColumns are the columns that the first version of the table did not have.
var laterColumns = []string{
	"owner VARBINARY(255) NULL",
	"token BIGINT UNSIGNED NOT NULL DEFAULT 0",
	"expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00'",
	"versioned TINYINT UNSIGNED NOT NULL DEFAULT 0",
}

// toldColumns came later still. They are only for those who look at the locks, so the driver
// works without them, and does not add them to a table that has none: [Table.Complete] does.
// Programs that do not know them leave them as they are.
var toldColumns = []string{
	"granted_at DATETIME(6) NULL",
	"ttl BIGINT UNSIGNED NULL",
	"renewed_token BIGINT UNSIGNED NULL",
	"released VARBINARY(2000) NULL",
}

// DDL is the statement that makes the table. Its columns:
//
//   - owner is the holder of the lease; NULL without a lease.
//   - token only grows: by one with each lease, and by one with each commit under the key
//     that optimistic units of work must see.
//   - expires is, in UTC, when the lease ends or ended, or when the row was made, or when
//     the last commit under it was.
//   - versioned is 1 once the key was used optimistically. From then on row locks add one
//     to the token, too.
//   - granted_at is, in UTC, when the lease was granted, and ttl its TTL in microseconds: the
//     last renewal was ttl before expires. Each renewal writes them, with the token of its
//     lease into renewed_token. If that is not the row's token they are of an earlier lease.
//     The ttl is NULL if that was the last renewal, because of a MaxHold.
//   - released is who has last taken a lease of the key away from its holder: see [Forced].
func (t Table) DDL() string {
	return "CREATE TABLE IF NOT EXISTS " + t.String() + " (\n" +
		"  namespace VARBINARY(255) NOT NULL,\n" +
		"  name VARBINARY(255) NOT NULL,\n  " +
		strings.Join(slices.Concat(laterColumns, toldColumns), ",\n  ") + ",\n" +
		"  PRIMARY KEY (namespace, name)\n" +
		") ENGINE=InnoDB COMMENT='locks of mysqllock: one row a key'"
}

// Anew returns the table for a program that has used it, and finds it dropped or emptied. Tokens then go on above all
// that there were, at the server's clock in microseconds, since somebody may still remember an earlier one. If they began
// at 1 again, they could reach a version that a unit of work has read before. That unit would commit, although what it has
// read has changed since.
func (t Table) Anew() Table {
	t.anew = true
	return t
}

// highWaterDDL makes the high-water row, if it is missing. For a table that is made anew:
//
//	INSERT IGNORE INTO mysqllock (namespace, name, token)
//	VALUES (x'', x'', TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
func (t Table) highWaterDDL() string {
	if t.anew {
		return "INSERT IGNORE INTO " + t.String() + " (namespace, name, token)" +
			" VALUES (x'', x'', TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))"
	}
	return "INSERT IGNORE INTO " + t.String() + " (namespace, name) VALUES (x'', x'')"
}

// Setup returns the statements that make the table.
func (t Table) Setup() []string { return []string{t.DDL(), t.highWaterDDL()} }

// Unhex is the value of a question mark that stands for bytes, as [Hex] writes them: in any
// character set of the connection.
const Unhex = "UNHEX(CONVERT(? USING ascii))"

// Hex writes bytes for Unhex.
func Hex(bytes string) string { return hex.EncodeToString([]byte(bytes)) }

// RenewedAfter returns how long after its grant, or its last renewal, a lease is renewed, give or take a tenth: after a
// third of its TTL. Other times of renewals are parts of that. An inspector, which may be of another version than the
// holder, judges by it whether a renewal is late.
func RenewedAfter(ttl time.Duration) time.Duration { return ttl / 3 }

// Live is the condition that a row has a live lease, by the session's clock at the start of
// the statement. The application may have set the clock of its own sessions. qualifier
// precedes each column: "" or, for example, "t.".
//
//	(r.owner IS NOT NULL AND r.expires > UTC_TIMESTAMP(6))
func Live(qualifier string) string {
	return "(" + qualifier + "owner IS NOT NULL AND " + qualifier + "expires > UTC_TIMESTAMP(6))"
}

// Remaining is the remaining time of a row's lease in microseconds; 0 without a live lease.
// qualifier is as for Live.
//
//	IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0)
func Remaining(qualifier string) string {
	return "IF(" + Live(qualifier) + ", TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), " + qualifier + "expires), 0)"
}

// Lasts is the condition that a row's lease has not expired at the moment when the statement
// has got the row, for a connection of the application. Such a session may have its own
// time zone and clock. SYSDATE goes on while the statement waits, and SET timestamp does
// not move it. If the application has set the clock, Lasts is true, since the difference
// of two local times says nothing across a change to daylight saving time. Owner and token
// alone then tell whether the lease is held. That is enough, because each grant of the key
// changes them.
//
//	(TIMESTAMPDIFF(SECOND, NOW(6), SYSDATE(6)) NOT BETWEEN 0 AND 3600
//	  OR r.expires > UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) MICROSECOND)
func Lasts(qualifier string) string {
	return "(" + ahead + " NOT BETWEEN 0 AND 3600" +
		" OR " + qualifier + "expires > UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(MICROSECOND, NOW(6), SYSDATE(6)) MICROSECOND)"
}

// ClockRuns is the condition that the session has the server's clock, not one that the application has set. Across a
// change to daylight saving time it may be false all the same.
const ClockRuns = "(" + ahead + " BETWEEN 0 AND 3600)"

// ahead is by how many seconds the server's clock is ahead of the session's.
const ahead = "TIMESTAMPDIFF(SECOND, NOW(6), SYSDATE(6))"

// Prepared is the condition that every commit under a key changes its version: its row is marked,
// and has no lease.
const Prepared = "versioned = 1 AND owner IS NULL"

// Released are the assignments that end a row's lease.
const Released = "owner = NULL, expires = LEAST(expires, UTC_TIMESTAMP(6))"

// Next are the assignments of a commit under a row's key that optimistic units must see.
const Next = "token = token + 1, expires = UTC_TIMESTAMP(6)"

// Row is the condition for the row of a namespace whose name is an SQL expression. qualifier is as
// for Live.
//
//	r.namespace = 'app' AND r.name = 'k'
func Row(qualifier, namespace, name string) string {
	return qualifier + "namespace = " + Literal(namespace) + " AND " + qualifier + "name = " + name
}

// Rows is the condition for the rows of a namespace with these names.
//
//	namespace = 'app' AND name IN ('k', 'l')
func Rows(namespace string, names []string) string {
	in := make([]string, len(names))
	for i, name := range names {
		in[i] = Literal(name)
	}
	return "namespace = " + Literal(namespace) + " AND name IN (" + strings.Join(in, ", ") + ")"
}

// List is a table d for FROM, with lines of SQL expressions, and these names for its columns. Joined
// by STRAIGHT_JOIN it has each row looked up by its primary key: an IN list can lock every row of a
// small table. For two lines, and the columns n and v:
//
//	(SELECT 'k' AS n, 7 AS v UNION ALL SELECT 'l', 3) d
func List(lines [][]string, columns ...string) string {
	var b strings.Builder
	for i, line := range lines {
		b.WriteString([2]string{"(SELECT ", " UNION ALL SELECT "}[min(i, 1)])
		for j, value := range line {
			if j > 0 {
				b.WriteString(", ")
			}
			b.WriteString(value)
			if i == 0 {
				b.WriteString(" AS " + columns[j])
			}
		}
	}
	return b.String() + ") d"
}

// Literal returns b as a hexadecimal literal, which needs no quotes and compares as bytes. A text
// that has its values so is one round trip, whatever the DSN says.
func Literal(b string) string { return "x'" + hex.EncodeToString([]byte(b)) + "'" }

// Ensure checks that the table exists and has its current form. With auto it makes what is missing, and brings an older
// table up to date. Without auto that is an error with the statements to run. conn must have no open transaction, since
// DDL would commit it.
//
// In a Group Replication group with several primaries, Ensure runs only DDL that may run
// twice: each member repeats the DDL of the others, and a member that cannot leaves the
// group.
//
// If another node of a cluster runs the same DDL at this moment, the server refuses the
// statements until that DDL has arrived here. Ensure then tries again, as it does while
// another process makes the table, for a few seconds.
func (t Table) Ensure(ctx context.Context, conn driver.Conn, info server.Info, auto bool) error {
	const maxTries = 100
	start := time.Now()
	for tries := 1; ; tries++ {
		err := t.ensure(ctx, conn, info, auto)
		again := server.Deadlock(err) && tries < maxTries || errors.Is(err, errBeingMade) && time.Since(start) < maxMaking
		if !again {
			return err
		}
		select {
		case <-time.After(time.Duration(min(tries, 10)) * 10 * time.Millisecond):
		case <-ctx.Done():
			return err
		}
	}
}

// maxMaking is how long another process may take to make the table.
const maxMaking = 10 * time.Second

var errBeingMade = errors.New("the lock table is being made by somebody else, who takes long")

func (t Table) ensure(ctx context.Context, conn driver.Conn, info server.Info, auto bool) error {
	if t.schema == "" {
		return fmt.Errorf("no database is selected: name one in the DSN, or set lockTable to schema.table")
	}
	s, err := t.state(ctx, conn)
	lack := t.lack(s)
	repeatable := s.engine == "" || info.Topology != server.MultiPrimary
	if err == nil && auto && lack != "" && repeatable {
		err = server.Exec(ctx, conn, lack)
		if err == nil || server.Number(err) == server.DuplicateColumn {
			if s, err = t.state(ctx, conn); err == nil {
				lack = t.lack(s)
			}
		}
	}
	if err == nil && lack == "" && s.innoDB() {
		err = t.ensureHighWater(ctx, conn)
	}
	if err != nil {
		return t.notMade(s, lack, err)
	}
	return t.unfit(s, lack)
}

// remedy is what to run for a table that lacks something.
func (t Table) remedy(lack string) string {
	if lack == "" {
		return t.highWaterDDL()
	}
	return lack + ";\n" + t.highWaterDDL()
}

// notMade says what can be done about an error with which the table was looked at, made or brought
// up to date.
func (t Table) notMade(s state, lack string, err error) error {
	run := t.remedy(lack)
	switch {
	case server.Denied(err):
		return fmt.Errorf("making the lock table: %w; the account needs SELECT, INSERT, UPDATE on it, and CREATE if it is missing;"+
			" or run with another account:\n%s", err, run)
	case server.ReadOnlyTransactions(err):
		return server.RefusedReadOnly(err)
	case server.Refused(err):
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("making the lock table: %w; the server takes no writes, so no lock on it"+
			" excludes other programs; connect to the server that takes writes, where this may have to be run:\n%s", err, run))
	case server.Missing(err):
		return fmt.Errorf("making the lock table: %w; make the database if it is missing, and the table by:\n%s", err, run)
	case server.Locked(err) && s.engine == "":
		return fmt.Errorf("%w: %w", errBeingMade, err)
	case server.Locked(err) && lack != "":
		return fmt.Errorf("the lock table is of an older form and in use, so it cannot be changed now: %w;"+
			" the next use tries again, or run while it is not in use:\n%s", err, run)
	}
	return err
}

// unfit is the error for a table that is there, or is not, in a form in which it cannot be used; nil
// for one that can.
func (t Table) unfit(s state, lack string) error {
	switch {
	case s.engine == "":
		return fmt.Errorf("the lock table %s does not exist, or the account lacks privileges on it (SELECT, INSERT, UPDATE);"+
			" make it with:\n%s", t, t.remedy(lack))
	case s.engine == view:
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("the lock table %s is a view, which has no rows of its own to lock;"+
			" name a table in lockTable, or a name that nothing has yet", t))
	case !s.innoDB():
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("the lock table %s uses the storage engine %s, which has no row locks;"+
			" run ALTER TABLE %s ENGINE=InnoDB", t, s.engine, t))
	case lack != "":
		return fmt.Errorf("the lock table %s is of an older form; bring it up to date with:\n%s", t, t.remedy(lack))
	}
	return nil
}

// view stands for the engine of a view, which has none.
const view = "VIEW"

// state is the state of the table.
type state struct {
	engine  string   // "" if the account sees no such table
	columns []string // in lower case
}

func (s state) innoDB() bool { return strings.EqualFold(s.engine, "InnoDB") }

// state asks for the state of the table in the database shop:
//
//	SELECT ENGINE, (SELECT LOWER(GROUP_CONCAT(COLUMN_NAME)) FROM information_schema.COLUMNS
//	  WHERE TABLE_SCHEMA = 'shop' AND TABLE_NAME = 'mysqllock')
//	FROM information_schema.TABLES WHERE TABLE_SCHEMA = 'shop' AND TABLE_NAME = 'mysqllock'
func (t Table) state(ctx context.Context, conn driver.Conn) (state, error) {
	rows, err := server.Query(ctx, conn, "SELECT ENGINE,"+
		" (SELECT LOWER(GROUP_CONCAT(COLUMN_NAME)) FROM information_schema.COLUMNS WHERE "+t.Where("TABLE_SCHEMA", "TABLE_NAME")+")"+
		" FROM information_schema.TABLES WHERE "+t.Where("TABLE_SCHEMA", "TABLE_NAME"))
	if err != nil || len(rows) == 0 {
		return state{}, err
	}
	if len(rows[0]) < 2 {
		return state{}, fmt.Errorf("unexpected result when reading the definition of the lock table %s", t)
	}
	s := state{rows[0][0], strings.Split(rows[0][1], ",")}
	switch {
	case s.engine == "" && rows[0][1] == "": // MariaDB
		return state{}, errBeingMade
	case s.engine == "":
		s.engine = view
	}
	return s, nil
}

// lack is the statement that makes the table, or brings it up to date; "" if there is
// nothing to do, or if the table is not ours. For one without versioned:
//
//	ALTER TABLE mysqllock ADD COLUMN versioned TINYINT UNSIGNED NOT NULL DEFAULT 0
func (t Table) lack(s state) string {
	if s.engine == "" {
		return t.DDL()
	}
	add := s.adding(laterColumns)
	if add == "" || !s.innoDB() {
		return ""
	}
	return "ALTER TABLE " + t.String() + " " + add
}

// adding is what adds those of columns that the table does not have; "" if it has all.
func (s state) adding(columns []string) string {
	var add []string
	for _, column := range columns {
		name, _, _ := strings.Cut(column, " ")
		if !slices.Contains(s.columns, name) {
			add = append(add, "ADD COLUMN "+column)
		}
	}
	return strings.Join(add, ", ")
}

// Complete returns the statement that adds the columns which the driver can do without, if the
// table lacks any; else "". With auto it runs that statement, which waits for at most a
// second for those who use the table, and why is what the server has refused.
func (t Table) Complete(ctx context.Context, conn driver.Conn, info server.Info, auto bool) (lack string, why, err error) {
	s, err := t.state(ctx, conn)
	if err != nil {
		return "", nil, err
	}
	add := s.adding(toldColumns)
	if add == "" {
		return "", nil, nil
	}
	lack = "ALTER TABLE " + t.String() + " " + add
	if !auto || info.Topology == server.MultiPrimary {
		return lack, nil, nil
	}
	err = server.Exec(ctx, conn, "ALTER TABLE "+t.String()+" /*M!100300 WAIT 1 */ "+add)
	switch n := server.Number(err); {
	case err == nil, n == server.DuplicateColumn: // another process was quicker
		return "", nil, nil
	case n != 0:
		return lack, err, nil
	}
	return lack, nil, err
}

// ensureHighWater makes the high-water row if a plain read does not find it. (An INSERT of an
// existing row would wait for its lock.)
func (t Table) ensureHighWater(ctx context.Context, conn driver.Conn) error {
	there, err := t.hasHighWater(ctx, conn)
	if err != nil || there {
		return err
	}
	return server.Exec(ctx, conn, t.highWaterDDL())
}

func (t Table) hasHighWater(ctx context.Context, conn driver.Conn) (bool, error) {
	rows, err := server.Query(ctx, conn, "SELECT 1 FROM "+t.String()+" WHERE "+HighWater)
	return len(rows) > 0, err
}

func (t Table) where(schemaColumn, nameColumn, name string) string {
	return schemaColumn + " = " + Literal(t.schema) + " AND " + nameColumn + " = " + Literal(name)
}

// Where returns the condition for the rows of a system table that are about the lock table.
//
//	l.OBJECT_SCHEMA = 'shop' AND l.OBJECT_NAME = 'mysqllock'
func (t Table) Where(schemaColumn, nameColumn string) string {
	return t.where(schemaColumn, nameColumn, t.name)
}

// AlikeSQL asks for the names of up to ten tables in the same database that have the columns of a lock table.
//
//	SELECT TABLE_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = 'shop'
//	  AND COLUMN_NAME IN ('namespace', 'name', 'owner', 'token', 'expires')
//	GROUP BY TABLE_NAME HAVING COUNT(*) = 5 ORDER BY TABLE_NAME LIMIT 10
func (t Table) AlikeSQL() string {
	return "SELECT TABLE_NAME FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = " + Literal(t.schema) +
		" AND COLUMN_NAME IN ('namespace', 'name', 'owner', 'token', 'expires') GROUP BY TABLE_NAME HAVING COUNT(*) = 5" +
		" ORDER BY TABLE_NAME LIMIT 10"
}

// Named returns the table of that name in the same database.
func (t Table) Named(name string) Table { return Table{schema: t.schema, name: name} }

// In returns the table with database as its schema, unless it has one. So USE on a
// connection does not lead to another table.
func (t Table) In(database string) Table {
	if t.schema == "" {
		t.schema = database
	}
	return t
}
