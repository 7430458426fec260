// Package server knows what differs between MySQL and MariaDB: versions, error
// numbers, and how a statement's text is run on a bare driver connection.
package server

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Info is what the driver needs to know of a server. It is read at the first hint
// of a database handle, and after what may have been a failover.
type Info struct {
	MariaDB           bool
	Version           string
	Database          string // the default database of new connections
	Isolation         string // of new connections, for example "REPEATABLE-READ"
	RollbackOnTimeout bool   // innodb_rollback_on_timeout: a lock wait timeout (1205) rolls the transaction back
	ReadOnly          bool   // read_only or innodb_read_only
	IdleLimit         int    // MariaDB's idle_transaction_timeout of new connections, in seconds; 0 is none
	SnapshotIsolation bool   // there is innodb_snapshot_isolation: where it is on, a locking read of a row that has changed fails (1020)
	SinglePrimary     bool   // of a Group Replication group: what is not replicated is lost in a failover
	Topology          string // "", also for a single primary, or of several servers that all take writes: Galera, MultiPrimary
}

// The topologies in which two nodes can grant the same row lock.
const (
	Galera       = "Galera"
	MultiPrimary = "Group Replication with several primaries"
)

// Probe asks the server on conn in one or two statements that need no privilege.
func Probe(ctx context.Context, conn driver.Conn) (Info, error) {
	// One text for both: each server skips the other's versioned comment.
	rows, err := Query(ctx, conn, "SELECT VERSION(), DATABASE(), @@innodb_rollback_on_timeout, @@read_only OR @@innodb_read_only,"+
		" /*!80000 @@transaction_isolation, 0, CONCAT(IFNULL((SELECT VARIABLE_VALUE FROM performance_schema.global_variables WHERE VARIABLE_NAME = 'wsrep_on'),'OFF'), ',',"+
		" IFNULL((SELECT GROUP_CONCAT(VARIABLE_VALUE ORDER BY VARIABLE_NAME)"+
		" FROM performance_schema.global_variables WHERE VARIABLE_NAME IN ('group_replication_group_name','group_replication_single_primary_mode')),'')), 0 */"+
		" /*M!100000 @@tx_isolation, @@idle_transaction_timeout, CONCAT(@@wsrep_on,','),"+
		" (SELECT COUNT(*) FROM information_schema.SYSTEM_VARIABLES WHERE VARIABLE_NAME = 'INNODB_SNAPSHOT_ISOLATION') */")
	if err != nil {
		return Info{}, fmt.Errorf("reading the server's settings: %w", err)
	}
	if len(rows) != 1 || len(rows[0]) < 8 {
		return Info{}, errors.New("mysqllock: the server answers like neither MySQL 8 nor MariaDB 10.3, the oldest that can be used")
	}
	r := rows[0]
	info := Info{
		Version:           r[0],
		MariaDB:           strings.Contains(r[0], "MariaDB"),
		Database:          r[1],
		RollbackOnTimeout: r[2] == "1",
		ReadOnly:          r[3] == "1",
		Isolation:         r[4],
		SnapshotIsolation: r[7] == "1",
	}
	info.IdleLimit, _ = strconv.Atoi(r[5])
	wsrep, group, _ := strings.Cut(r[6], ",")
	switch name, single, _ := strings.Cut(group, ","); {
	case wsrep == "1" || wsrep == "ON":
		info.Topology = Galera
	case name != "" && single == "OFF":
		info.Topology = MultiPrimary
	case name != "":
		info.SinglePrimary = true
	}
	return info, info.tooOld()
}

// Writable returns why nothing can be locked on a server that takes no writes,
// if so: another one takes them, and knows of no lock here.
func (i Info) Writable() error {
	switch {
	case !i.ReadOnly:
		return nil
	case i.SinglePrimary:
		return lockerr.With(lockerr.ErrUnsafe, readOnly("it is a secondary of a Group Replication group"))
	}
	return lockerr.With(lockerr.ErrUnsafe, ErrReadOnly)
}

// ErrReadOnly is what a lock statement has found that looks for it.
var ErrReadOnly = readOnly("read_only or innodb_read_only is set, as on a replica")

func readOnly(what string) error {
	return fmt.Errorf("the server takes no writes (%s), so that no lock on it excludes anybody; connect to the one that takes them", what)
}

// A server that takes no writes may grant row locks all the same, and become one
// at any time. What says so are numbers or words.
const (
	Writable        = "CONCAT(@@read_only, @@innodb_read_only) IN ('00', 'OFFOFF')" // a condition
	WritableColumns = "@@read_only, @@innodb_read_only"                             // for TakesWrites, which is quicker than the condition
)

// TakesWrites reads WritableColumns.
func TakesWrites(columns []string) bool {
	return !slices.ContainsFunc(columns, func(c string) bool { return c != "0" && c != "OFF" })
}

func (i Info) tooOld() error {
	major, minor, err := i.number()
	if err != nil {
		return fmt.Errorf("mysqllock: cannot read the server version %q", i.Version)
	}
	if i.MariaDB && (major < 10 || major == 10 && minor < 3) || !i.MariaDB && major < 8 {
		return fmt.Errorf("mysqllock: server version %s is too old: MySQL 8.0 or MariaDB 10.3 is needed", i.Version)
	}
	return nil
}

func (i Info) number() (major, minor int, err error) {
	v := strings.TrimPrefix(i.Version, "5.5.5-") // old MariaDB behind replication-safe version strings
	_, err = fmt.Sscanf(v, "%d.%d", &major, &minor)
	return major, minor, err
}

// Streams reports whether a transaction can have the other nodes of a Galera
// cluster agree to what it has written before it commits: MariaDB from 10.4 on.
func (i Info) Streams() bool {
	major, minor, _ := i.number()
	return i.Topology == Galera && i.MariaDB && (major > 10 || major == 10 && minor >= 4)
}

// SkipLocked reports whether the server knows SKIP LOCKED: MySQL 8.0 and
// MariaDB 10.6 are the first that do.
func (i Info) SkipLocked() bool {
	major, minor, _ := i.number()
	return !i.MariaDB || major > 10 || major == 10 && minor >= 6
}

// RepeatableRead reports whether an isolation level of BeginTx keeps one
// snapshot for the whole transaction.
func (i Info) RepeatableRead(level driver.IsolationLevel) bool {
	switch level {
	case 0: // sql.LevelDefault
		return i.Isolation == "REPEATABLE-READ" || i.Isolation == "SERIALIZABLE"
	case 1, 2: // sql.LevelReadUncommitted, sql.LevelReadCommitted
		return false
	default:
		return true
	}
}

// Exec runs one statement as text, in one round trip.
func Exec(ctx context.Context, conn driver.Conn, text string) error {
	_, err := Change(ctx, conn, text)
	return err
}

// Change is Exec for a statement whose result matters.
func Change(ctx context.Context, conn driver.Conn, text string) (driver.Result, error) {
	if e, ok := conn.(driver.ExecerContext); ok {
		result, err := e.ExecContext(ctx, text, nil)
		if !errors.Is(err, driver.ErrSkip) {
			return result, err
		}
	}
	stmt, err := Prepare(ctx, conn, text)
	if err != nil {
		return nil, err
	}
	defer stmt.Close()
	if s, ok := stmt.(driver.StmtExecContext); ok {
		return s.ExecContext(ctx, nil)
	}
	return stmt.Exec(nil) //nolint:staticcheck // for drivers without the context form
}

// Affected is Exec for a statement of which it matters how many rows it has
// affected.
func Affected(ctx context.Context, conn driver.Conn, text string) (int64, error) {
	result, err := Change(ctx, conn, text)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// Query runs one statement as text and reads all its result sets to the end,
// since servers report a failed lock after the first rows. NULL reads as "". out is
// nil only where there was no result set, not even one without rows.
func Query(ctx context.Context, conn driver.Conn, text string) (out [][]string, err error) {
	rows, err := query(ctx, conn, text)
	if err != nil {
		return nil, err
	}
	return read(rows)
}

// QueryPrepared is Query for a statement that is prepared.
func QueryPrepared(ctx context.Context, stmt driver.Stmt, args ...driver.Value) (out [][]string, err error) {
	rows, err := queryPrepared(ctx, stmt, args)
	if err != nil {
		return nil, err
	}
	return read(rows)
}

// read reads all result sets, and closes rows.
func read(rows driver.Rows) (out [][]string, err error) {
	defer func() {
		if cerr := rows.Close(); err == nil {
			err = cerr
		}
	}()
	for {
		dest := make([]driver.Value, len(rows.Columns()))
		if len(dest) > 0 && out == nil {
			out = [][]string{}
		}
		for {
			err := rows.Next(dest)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return nil, err
			}
			row := make([]string, len(dest))
			for i, v := range dest {
				row[i] = text1(v)
			}
			out = append(out, row)
		}
		more, ok := rows.(driver.RowsNextResultSet)
		if !ok || !more.HasNextResultSet() {
			return out, nil
		}
		if err := more.NextResultSet(); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, err
		}
	}
}

func query(ctx context.Context, conn driver.Conn, text string) (driver.Rows, error) {
	if q, ok := conn.(driver.QueryerContext); ok {
		rows, err := q.QueryContext(ctx, text, nil)
		if !errors.Is(err, driver.ErrSkip) {
			return rows, err
		}
	}
	stmt, err := Prepare(ctx, conn, text)
	if err != nil {
		return nil, err
	}
	rows, err := queryPrepared(ctx, stmt, nil)
	if err != nil {
		_ = stmt.Close()
		return nil, err
	}
	return closeBoth{rows, stmt}, nil
}

func queryPrepared(ctx context.Context, stmt driver.Stmt, args []driver.Value) (driver.Rows, error) {
	s, ok := stmt.(driver.StmtQueryContext)
	if !ok {
		return stmt.Query(args) //nolint:staticcheck // for drivers without the context form
	}
	named := make([]driver.NamedValue, len(args))
	for i, value := range args {
		named[i] = driver.NamedValue{Ordinal: i + 1, Value: value}
	}
	return s.QueryContext(ctx, named)
}

// closeBoth closes the statement with its rows.
type closeBoth struct {
	driver.Rows
	stmt driver.Stmt
}

func (r closeBoth) Close() error { return errors.Join(r.Rows.Close(), r.stmt.Close()) }

// Prepare prepares a statement with what the driver has for it.
func Prepare(ctx context.Context, conn driver.Conn, text string) (driver.Stmt, error) {
	if p, ok := conn.(driver.ConnPrepareContext); ok {
		return p.PrepareContext(ctx, text)
	}
	return conn.Prepare(text)
}

func text1(v driver.Value) string {
	switch v := v.(type) {
	case nil:
		return ""
	case []byte:
		return string(v)
	case string:
		return v
	case time.Time:
		return v.Format(time.RFC3339Nano)
	case bool:
		if v {
			return "1"
		}
		return "0"
	default:
		return fmt.Sprint(v)
	}
}
