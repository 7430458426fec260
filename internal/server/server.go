// Package server knows the differences between MySQL, MariaDB and other engines that speak
// their protocol: versions, capabilities, settings and error numbers. It runs statements on a
// bare driver connection.
package server

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Info is what the driver needs to know about a server. It is read at the first hint of a
// database handle, and after a possible failover.
type Info struct {
	Flavour
	MariaDB           bool
	Version           string
	Database          string // the default database of new connections
	Isolation         string // of new connections, for example "REPEATABLE-READ"
	RollbackOnTimeout bool   // innodb_rollback_on_timeout: a lock wait timeout (1205) rolls the transaction back
	ReadOnly          bool   // read_only or innodb_read_only
	IdleLimit         int    // on the idleness of transactions of new connections, in seconds; 0 is none
	SinglePrimary     bool   // of a Group Replication group: what is not replicated is lost in a failover
	Server            string // which server, or cluster of servers with the same data, this is; "" where it does not say
	Router            bool   // a MySQL Router is in between: a client's connection may be several to the server, one after the other
	StatementLog      bool   // of new connections: replicas run statements again, and may decide otherwise
	Topology          string // "", also for a single primary, or of several servers that all take writes: Galera, MultiPrimary
	Optimistic        bool   // transactions of new connections are optimistic, where there are Optimists

	// Silence is after how long the server ends a connection, in a transaction or not, on which nobody has
	// set a limit; 0 is unknown.
	Silence time.Duration

	// SnapshotIsolation: there is innodb_snapshot_isolation. Where it is on, a locking read of a row that has
	// changed fails (1020).
	SnapshotIsolation bool
}

// OwnSettings are the settings of the driver's own connections, behind SET SESSION. They count in place of those of the
// DSN and the account. The clock is the server's; the time, size and rows of statements have no limit; transactions may
// write; and the character set is the one in which all programs name locks in the same way. Waits have limits of their
// own. Each server skips the comment for the other.
const OwnSettings = "timestamp = DEFAULT, sql_mode = '', sql_select_limit = 18446744073709551615," +
	" sql_big_selects = 1, sql_safe_updates = 0, group_concat_max_len = 1048576, character_set_connection = utf8mb4" +
	" /*!80000 , max_execution_time = 0, transaction_read_only = 0 */ /*M!100000 , max_statement_time = 0, tx_read_only = 0 */"

// Untimed, behind SELECT, lifts the application's max_execution_time, which MySQL counts for nothing
// else. MariaDB takes it for a comment.
const Untimed = "/*+ MAX_EXECUTION_TIME(4294967295) */ "

// Brief, behind INSERT, limits MySQL's wait while the table's definition is being changed, which NOWAIT does not, and lifts
// the application's limit on the rows that a statement examines. MariaDB takes it for a comment.
const Brief = "/*+ SET_VAR(lock_wait_timeout = 1) SET_VAR(sql_big_selects = 1) */"

// The topologies in which two nodes can grant the same row lock.
const (
	Galera       = "Galera"
	MultiPrimary = "Group Replication with several primaries"
)

// Node is an SQL expression that differs between any two servers, also between copies of
// one server and between nodes of a cluster, but for the servers of TiDB.
const Node = "CONCAT_WS(' ', @@hostname, @@port, @@server_id, @@datadir /*!80000 , @@server_uuid */)"

// Up is the condition that the server has been up for longer than age, so that it is never true on
// a server that was restarted since. The server tells whole seconds, the difference of two times
// that are cut off: up to one more than it has been up. So on a server that was started less than
// two seconds before that time the condition may be false. For 90 s:
//
//	(SELECT VARIABLE_VALUE FROM /*!80000 performance_schema.global_status */ /*M!100000 information_schema.GLOBAL_STATUS */
//	  WHERE VARIABLE_NAME = 'UPTIME') > 90
func Up(age time.Duration) string {
	return fmt.Sprintf("(SELECT VARIABLE_VALUE FROM /*!80000 performance_schema.global_status */"+
		" /*M!100000 information_schema.GLOBAL_STATUS */"+
		" WHERE VARIABLE_NAME = 'UPTIME') > %d", int((age+time.Second-1)/time.Second))
}

// StatementLog is an SQL expression that is 1 if what the session changes is logged as statements.
// MySQL's @@binlog_format is deprecated, and may not be there.
const StatementLog = "@@log_bin AND" +
	" /*!80000 (SELECT COUNT(*) FROM performance_schema.session_variables WHERE VARIABLE_NAME = 'binlog_format'" +
	" AND VARIABLE_VALUE = 'STATEMENT') */" +
	" /*M!100000 @@binlog_format = 'STATEMENT' */"

// LeaseLog is StatementLog; "" where leases need no named locks, so that the log does not matter.
func (i Info) LeaseLog() string {
	if !i.NamedLocks {
		return ""
	}
	return StatementLog
}

// ErrStatementLog is the error if a lease is asked for where StatementLog is 1. The statement
// that takes a lease takes the wake-up lock in the same breath, and grants nothing where somebody
// else has it. On a replica that runs the statement again the named locks are other ones.
var ErrStatementLog = lockerr.With(lockerr.ErrUnsafe, errors.New("binlog_format is STATEMENT,"+
	" with which the tokens of leases go back when a replica is promoted;"+
	" set ROW or MIXED, or use lockUnsafe=allow where no replica ever is"))

// What a server is asked, each by a column of probe.
const (
	saysVersion = iota
	saysDatabase
	saysRollbackOnTimeout
	saysReadOnly
	saysIsolation
	saysIdleLimit         // in seconds, of a transaction; 0 is none
	saysCluster           // Galera's wsrep_on; and of Group Replication the name and group_replication_single_primary_mode
	saysSnapshotIsolation // it has innodb_snapshot_isolation
	saysServer            // which one it is, or which cluster
	saysRouter            // a Router has added an attribute to those of its client
	saysSilence           // in seconds, after which it ends a connection that its user has not set up
	saysStatementLog
	saysVariable
	saysComment
	says // how many
)

// probed has an SQL expression for each. MySQL and MariaDB skip each other's.
var probed = [says]struct{ both, mysql, mariadb string }{
	saysVersion:           {both: "VERSION()"},
	saysDatabase:          {both: "DATABASE()"},
	saysRollbackOnTimeout: {both: "@@innodb_rollback_on_timeout"},
	saysReadOnly:          {both: "@@read_only OR @@innodb_read_only"},
	saysIsolation:         {mysql: "@@transaction_isolation", mariadb: "@@tx_isolation"},
	saysIdleLimit:         {mysql: "0", mariadb: "@@idle_transaction_timeout"},
	saysCluster: {
		mysql: "CONCAT(IFNULL(" + globalVariable + "'wsrep_on'), 'OFF'), ',', CONCAT_WS(',', " +
			globalVariable + "'group_replication_group_name'), " + globalVariable + "'group_replication_single_primary_mode')))",
		mariadb: "CONCAT(@@wsrep_on, ',')",
	},
	saysSnapshotIsolation: {
		mysql:   "0",
		mariadb: "(SELECT COUNT(*) FROM information_schema.SYSTEM_VARIABLES WHERE VARIABLE_NAME = 'INNODB_SNAPSHOT_ISOLATION')",
	},
	saysServer: {
		mysql: "@@server_uuid",
		mariadb: "IF(@@wsrep_on, (SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS" +
			" WHERE VARIABLE_NAME = 'WSREP_CLUSTER_STATE_UUID'), CONCAT_WS(' ', @@hostname, @@port, @@server_id, @@datadir))",
	},
	saysRouter: {
		mysql: "(SELECT COUNT(*) FROM performance_schema.session_account_connect_attrs" +
			" WHERE PROCESSLIST_ID = CONNECTION_ID() AND ATTR_NAME = '_client_ip')",
		mariadb: "0",
	},
	saysSilence: {
		mysql: "@@global.wait_timeout",
		mariadb: "LEAST(@@global.wait_timeout, IFNULL(NULLIF(@@idle_transaction_timeout, 0), @@global.wait_timeout)," +
			" IFNULL(NULLIF(@@idle_readonly_transaction_timeout, 0), @@global.wait_timeout)," +
			" IFNULL(NULLIF(@@idle_write_transaction_timeout, 0), @@global.wait_timeout))",
	},
	saysStatementLog: {both: StatementLog},
	saysVariable:     {both: "@@version"},
	saysComment:      {both: "@@version_comment"},
}

// globalVariable is a variable of MySQL's that may not be there; its name and ")" follow.
const globalVariable = "(SELECT VARIABLE_VALUE FROM performance_schema.global_variables WHERE VARIABLE_NAME = "

// probe is one text for MySQL and MariaDB. LIMIT overrides sql_select_limit.
//
//	SELECT VERSION(), DATABASE(), @@innodb_rollback_on_timeout, @@read_only OR @@innodb_read_only,
//	  /*!80000 @@transaction_isolation */ /*M!100000 @@tx_isolation */,
//	  /*!80000 0 */ /*M!100000 @@idle_transaction_timeout */, …, @@version, @@version_comment LIMIT 1
var probe = func() string {
	var columns []string
	for _, c := range probed {
		if c.both == "" {
			c.both = "/*!80000 " + c.mysql + " */ /*M!100000 " + c.mariadb + " */"
		}
		columns = append(columns, c.both)
	}
	return "SELECT " + strings.Join(columns, ", ") + " LIMIT 1"
}()

// Probe asks the server on conn what it is, by one statement that needs no privilege, and by
// another, which every engine answers, if that fails. It sends nothing else, so it may be the
// first that is sent on a connection, whatever its settings are. An engine other than MySQL
// and MariaDB is no error: see [Flavour.Reliable].
func Probe(ctx context.Context, conn driver.Conn) (Info, error) {
	rows, err := Query(ctx, conn, probe)
	switch {
	case wide(rows, err):
		return Info{}, errWide
	case err != nil && !lacks(err):
		return Info{}, fmt.Errorf("reading the server's settings: %w", err)
	case err != nil:
		return recognise(ctx, conn, err)
	case len(rows) != 1 || len(rows[0]) != says:
		return recognise(ctx, conn, errors.New("it answers in another form"))
	}
	r := rows[0]
	s := self{version: r[saysVersion], variable: r[saysVariable], comment: r[saysComment]}
	e := s.engine()
	if e.ask != nil {
		return recognise(ctx, conn, nil)
	}
	info := Info{Flavour: e.can, MariaDB: s.mariadb()}
	info.readProbe(r)
	return info, info.tooOld()
}

// wide reports whether the answer has come in a character set of two or four bytes for each letter:
// the base driver cannot read numbers in it.
func wide(rows [][]string, err error) bool {
	return errors.As(err, new(*strconv.NumError)) || len(rows) > 0 && len(rows[0]) > 0 && strings.Contains(rows[0][0], "\x00")
}

var errWide = lockerr.With(lockerr.ErrUnsafe, errors.New(
	"the server answers in a character set that numbers cannot be read from; leave character_set_results (utf16, utf32"+
		" or ucs2) out of the DSN, or set it to utf8mb4"))

// recognise asks the server what it is, in words that every engine knows, after it has not
// answered like MySQL and MariaDB.
func recognise(ctx context.Context, conn driver.Conn, because error) (Info, error) {
	rows, err := Query(ctx, conn, "SELECT @@version, @@version_comment, VERSION(), DATABASE() LIMIT 1")
	if wide(rows, err) {
		return Info{}, errWide
	}
	if err != nil || len(rows) != 1 || len(rows[0]) != 4 {
		return Info{}, fmt.Errorf("reading the server's settings: %w", errors.Join(because, err))
	}
	r := rows[0]
	s := self{variable: r[0], comment: r[1], version: r[2]}
	e := s.engine()
	info := Info{Flavour: e.can, MariaDB: s.mariadb(), Version: s.version, Database: r[3], Isolation: "REPEATABLE-READ"}
	if e.ask != nil {
		err := e.ask(&info, ctx, conn)
		return info, err
	}
	if err := info.tooOld(); err != nil {
		return info, err
	}
	if info.RowLocks {
		info.Flavour = s.unknown(fmt.Sprintf("which does not know what MySQL from 8.0 and MariaDB from 10.3 know (%v)", because))
	}
	return info, nil
}

// askTiDB asks what a TiDB has variables for.
func (i *Info) askTiDB(ctx context.Context, conn driver.Conn) error {
	rows, err := Query(ctx, conn, "SELECT "+i.IsolationVariable()+", @@tidb_txn_mode <> 'pessimistic',"+
		" @@tidb_idle_transaction_timeout, @@read_only OR @@innodb_read_only, @@global.wait_timeout LIMIT 1")
	if err != nil || len(rows) != 1 || len(rows[0]) != 5 {
		return fmt.Errorf("reading the server's settings: %w", errors.Join(
			errors.New("TiDB answers in another form; it takes 7.6 or later"), err))
	}
	r := rows[0]
	i.Isolation, i.Optimistic, i.ReadOnly = r[0], r[1] == "1", r[3] == "1"
	i.IdleLimit, _ = strconv.Atoi(r[2])
	seconds, _ := strconv.Atoi(r[4])
	i.Silence = time.Duration(seconds) * time.Second
	if i.IdleLimit > 0 && (i.Silence == 0 || i.IdleLimit < seconds) {
		i.Silence = time.Duration(i.IdleLimit) * time.Second
	}
	return nil
}

// askVitess asks what the shard behind vtgate has variables for. Locks do not hold if there is not one
// shard, as far as is known: a transaction can write to each that there is, whatever the database is.
func (i *Info) askVitess(ctx context.Context, conn driver.Conn) error {
	target := i.Database
	keyspace, tablet, _ := strings.Cut(target, "@")
	i.Database, _, _ = strings.Cut(keyspace, ":")
	if i.Database != keyspace || tablet != "" && !strings.EqualFold(tablet, "primary") {
		i.unsafe(fmt.Sprintf("whose database here is %q; say only the keyspace, which is its primary", target))
		return nil
	}
	rows, err := Query(ctx, conn, "SHOW VITESS_SHARDS")
	switch {
	case err != nil && Number(err) == 0: // the connection is lost, for example
		return fmt.Errorf("reading the server's shards: %w", err)
	case err != nil || len(rows) == 0:
		i.unsafe(fmt.Sprintf("which does not tell that it has one shard;"+
			" of several a lock can be free before another one has the data (%v)", err))
		return nil
	case len(rows) > 1:
		i.unsafe(fmt.Sprintf("which has %d shards (%s, %s …); they commit one after the other,"+
			" so a lock can be free before another one has the data", len(rows), rows[0][0], rows[1][0]))
		return nil
	}
	rows, err = Query(ctx, conn, "SELECT "+i.IsolationVariable()+", @@innodb_rollback_on_timeout, @@read_only OR @@innodb_read_only LIMIT 1")
	if err != nil || len(rows) != 1 || len(rows[0]) != 3 {
		return fmt.Errorf("reading the server's settings: %w", errors.Join(errors.New("vtgate answers in another form"), err))
	}
	i.Isolation, i.RollbackOnTimeout, i.ReadOnly = rows[0][0], rows[0][1] == "1", rows[0][2] == "1"
	return nil
}

// unsafe notes why locks do not hold.
func (i *Info) unsafe(why string) { i.RowLocks, i.why = false, why }

// Plain is what sets up a connection of the driver's own with settings that Tablets know; "" if there
// are settings of the server's.
func (i Info) Plain(settings string) string {
	if !i.Tablets {
		return ""
	}
	return "SET " + Pin + " " + settings
}

// IsolationVariable is the variable with the session's isolation level.
func (i Info) IsolationVariable() string {
	if i.MariaDB {
		return "@@tx_isolation"
	}
	return "@@transaction_isolation"
}

// InSession, behind the settings of a session, has its transactions be what a row lock needs
// where snapshots are early, and ends one that is idle for so many seconds. Other servers take it
// for a comment.
func InSession(seconds int) string {
	return fmt.Sprintf(" /*T! , transaction_isolation = 'READ-COMMITTED', tidb_txn_mode = 'pessimistic',"+
		" tidb_idle_transaction_timeout = %d */", seconds)
}

// Pessimists returns an error if FOR UPDATE excludes nobody in the transactions of new
// connections.
func (i Info) Pessimists(what string) error {
	if !i.Optimistic {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("tidb_txn_mode is not pessimistic, so that %s exclude nobody before COMMIT;"+
		" say tidb_txn_mode=pessimistic in the DSN", what))
}

// readProbe reads the answer to probe.
func (i *Info) readProbe(r []string) {
	i.Version, i.Database, i.Isolation = r[saysVersion], r[saysDatabase], r[saysIsolation]
	i.RollbackOnTimeout, i.ReadOnly = r[saysRollbackOnTimeout] == "1", r[saysReadOnly] == "1"
	i.IdleLimit, _ = strconv.Atoi(r[saysIdleLimit])
	wsrep, group, _ := strings.Cut(r[saysCluster], ",")
	name, single, _ := strings.Cut(group, ",")
	switch {
	case wsrep == "1" || wsrep == "ON":
		i.Topology = Galera
	case name != "" && single == "OFF":
		i.Topology = MultiPrimary
	case name != "":
		i.SinglePrimary = true
	}
	i.Server, i.Router = cmp.Or(name, r[saysServer]), r[saysRouter] != "0"
	i.SnapshotIsolation, i.StatementLog = r[saysSnapshotIsolation] == "1", r[saysStatementLog] == "1"
	seconds, _ := strconv.Atoi(r[saysSilence])
	i.Silence = time.Duration(seconds) * time.Second
}

// Alike reports whether locks work on the server of other as on that of i: another server, or the same server at another
// time.
func (i Info) Alike(other Info) bool {
	i.Server, other.Server = "", ""
	return i == other
}

// NotSplit fails if a MySQL Router sends reads to other servers than writes
// (access_mode=auto). Such a Router accepts the statement ROUTER SET; other Routers, and
// servers, do not know it (1064).
func NotSplit(ctx context.Context, conn driver.Conn) error {
	err := Exec(ctx, conn, "ROUTER SET access_mode = 'auto'")
	if Unparsed(err) {
		return nil
	}
	if err == nil {
		err = lockerr.With(lockerr.ErrUnsafe, errors.New(
			"MySQL Router sends reads to other servers than writes here (access_mode=auto),"+
				" so that what is read under a lock may be older than the lock; connect to its port for reads and writes"))
	}
	return err
}

// Pin, behind SET, begins the settings of a session, and keeps the session on one
// connection to the server: a proxy that has many clients share connections leaves one
// alone that has a user's variable. MySQL Router does not see one behind sql_mode. The
// variable has what autocommit was.
const Pin = "@mysqllock = @@autocommit, SESSION"

// Writable returns an error if the server takes no writes. Then another server takes them, which does not know the locks of
// this server.
func (i Info) Writable() error {
	switch {
	case !i.ReadOnly:
		return nil
	case i.SinglePrimary:
		return lockerr.With(lockerr.ErrUnsafe, readOnly("it is a secondary of a Group Replication group"))
	}
	return lockerr.With(lockerr.ErrUnsafe, ErrReadOnly)
}

// ErrReadOnly is the error if a lock statement finds that the server takes no writes.
var ErrReadOnly = readOnly("read_only or innodb_read_only is set, as on a replica")

func readOnly(what string) error {
	return fmt.Errorf("the server takes no writes (%s), so a lock on it excludes no other program; connect to the one that takes writes", what)
}

// A server that takes no writes grants row locks all the same, and a server may become
// read-only at any time. The variables are numbers or words.
const (
	Writable        = "CONCAT(@@read_only, @@innodb_read_only) IN ('00', 'OFFOFF')" // a condition
	WritableColumns = "@@read_only, @@innodb_read_only"                             // for TakesWrites, which is quicker than the condition
)

// TakesWrites reads WritableColumns.
func TakesWrites(columns []string) bool {
	return !slices.ContainsFunc(columns, func(c string) bool { return c != "0" && c != "OFF" })
}

// tooOld returns an error if the server is an old MySQL or MariaDB.
func (i Info) tooOld() error {
	major, minor, err := number(i.Version)
	if !i.RowLocks || err != nil {
		return nil
	}
	if i.MariaDB && (major < 10 || major == 10 && minor < 3) || !i.MariaDB && major < 8 {
		return fmt.Errorf("mysqllock: server version %s is too old: MySQL 8.0 or MariaDB 10.3 is needed", i.Version)
	}
	return nil
}

// number reads the version of a server of MySQL's or MariaDB's.
func number(version string) (major, minor int, err error) {
	v := strings.TrimPrefix(version, "5.5.5-") // old MariaDB behind replication-safe version strings
	first, rest, _ := strings.Cut(v, ".")
	if major, err = strconv.Atoi(first); err == nil {
		second := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
		minor, err = strconv.Atoi(second)
	}
	return major, minor, err
}

// Streams reports whether a transaction can make the other nodes of a Galera cluster agree
// to its writes before it commits (streaming replication): MariaDB from 10.4 on.
func (i Info) Streams() bool {
	major, minor, _ := number(i.Version)
	return i.Topology == Galera && i.MariaDB && (major > 10 || major == 10 && minor >= 4)
}

// RepeatableRead reports whether a transaction of a new connection keeps one snapshot.
func (i Info) RepeatableRead() bool {
	return i.Isolation == "REPEATABLE-READ" || i.Isolation == "SERIALIZABLE"
}

// Exec runs one statement as text, in one round trip.
func Exec(ctx context.Context, conn driver.Conn, text string) error {
	_, err := Change(ctx, conn, text)
	return err
}

// Change is Exec for a statement whose result matters.
func Change(ctx context.Context, conn driver.Conn, text string) (result driver.Result, err error) {
	defer func() { err = Unanswered(ctx, err) }()
	defer basedriver.Catch(conn, &err)
	ctx = purpose.Ours(ctx)
	result, err = basedriver.Exec(ctx, conn, text, nil)
	if !errors.Is(err, driver.ErrSkip) {
		return counts{result, conn}, err
	}
	stmt, err := basedriver.Prepare(ctx, conn, text)
	if err != nil {
		return nil, err
	}
	defer stmt.Close()
	result, err = basedriver.StmtExec(ctx, stmt, nil)
	return counts{result, conn}, err
}

// ChangePrepared is Change for a statement that is prepared on conn.
func ChangePrepared(ctx context.Context, conn driver.Conn, stmt driver.Stmt, args ...driver.Value) (result driver.Result, err error) {
	defer func() { err = Unanswered(ctx, err) }()
	defer basedriver.Catch(conn, &err)
	result, err = basedriver.StmtExec(purpose.Ours(ctx), stmt, basedriver.Named(args))
	return counts{result, conn}, err
}

// counts is the result of a statement of the driver's own. The caller has the turn of conn.
type counts struct {
	driver.Result
	conn driver.Conn
}

func (c counts) LastInsertId() (n int64, err error) {
	defer basedriver.Catch(c.conn, &err)
	return c.Result.LastInsertId()
}

func (c counts) RowsAffected() (n int64, err error) {
	defer basedriver.Catch(c.conn, &err)
	return c.Result.RowsAffected()
}

// Affected is Exec for a statement whose number of affected rows matters.
func Affected(ctx context.Context, conn driver.Conn, text string) (int64, error) {
	result, err := Change(ctx, conn, text)
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}

// Query runs one statement as text and reads all its result sets to the end, since servers
// report a failed lock after the first rows. NULL reads as "". out is nil only if there was
// no result set, not even an empty one.
func Query(ctx context.Context, conn driver.Conn, text string) (out [][]string, err error) {
	defer func() { err = Unanswered(ctx, err) }()
	defer basedriver.Catch(conn, &err)
	ctx = purpose.Ours(ctx)
	rows, err := basedriver.Query(ctx, conn, text, nil)
	if !errors.Is(err, driver.ErrSkip) {
		return read(rows, err)
	}
	stmt, err := basedriver.Prepare(ctx, conn, text)
	if err != nil {
		return nil, err
	}
	defer stmt.Close()
	return read(basedriver.StmtQuery(ctx, stmt, nil))
}

// QueryPrepared is Query for a statement that is prepared on conn.
func QueryPrepared(ctx context.Context, conn driver.Conn, stmt driver.Stmt, args ...driver.Value) (out [][]string, err error) {
	defer func() { err = Unanswered(ctx, err) }()
	defer basedriver.Catch(conn, &err)
	return read(basedriver.StmtQuery(purpose.Ours(ctx), stmt, basedriver.Named(args)))
}

// read reads all result sets, and closes rows. It passes on why there are none.
func read(rows driver.Rows, failed error) (out [][]string, err error) {
	if failed != nil {
		return nil, failed
	}
	defer func() {
		if cerr := rows.Close(); err == nil {
			err = cerr
		}
	}()
	for {
		if out, err = readSet(rows, out); err != nil {
			return nil, err
		}
		sets, ok := rows.(driver.RowsNextResultSet)
		if !ok || !sets.HasNextResultSet() {
			return out, nil
		}
		if err = sets.NextResultSet(); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, err
		}
	}
}

// readSet appends the rows of the current result set to out.
func readSet(rows driver.Rows, out [][]string) ([][]string, error) {
	dest := make([]driver.Value, len(rows.Columns()))
	if len(dest) > 0 && out == nil {
		out = [][]string{}
	}
	for {
		err := rows.Next(dest)
		if errors.Is(err, io.EOF) {
			return out, nil
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
