package mysqllock_test

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The exact statements of every path. Two tools: sqlmock for what happens on
// the application's own connections, and the fake driver's record where
// sessions take part. sqlmock has one connection for all who connect, so it
// cannot show on which connection a statement arrives; its connections lack
// ResetSession and IsValid; and it hides why a context has ended.

// Texts that the driver sends. The namespace is "shop", the keys are k, k1, k2
// and not there at first.
const (
	sqlIdentify    = "SELECT /*+ MAX_EXECUTION_TIME(n) */ CONNECTION_ID(), CONCAT_WS(' ', @@hostname, @@port, @@server_id, @@datadir /*!80000 , @@server_uuid */), @mysqllock, @@completion_type LIMIT 1"
	sqlConnections = "(SELECT ID, USER, HOST, COMMAND, TIME, STATE, INFO /*M!100000 , TIME_MS, QUERY_ID */ FROM /*!80022 performance_schema.processlist UNION ALL" +
		" SELECT ID, USER, HOST, COMMAND, TIME, STATE, INFO FROM */ information_schema.PROCESSLIST /*!80022 WHERE NOT @@performance_schema */) p"
	sqlOwn      = "timestamp = DEFAULT, sql_mode = '', sql_select_limit = 18446744073709551615, sql_big_selects = 1, sql_safe_updates = 0, group_concat_max_len = 1048576, character_set_connection = utf8mb4 /*!80000 , max_execution_time = 0 */ /*M!100000 , max_statement_time = n */"
	sqlControl  = "SET @mysqllock = @@autocommit, SESSION autocommit = 1, " + sqlOwn + ", innodb_lock_wait_timeout = 5, lock_wait_timeout = 2, wait_timeout = 30"
	sqlCleaning = "SELECT 1 FROM `shop`.`mysqllock` WHERE namespace = x'' AND name = x'' AND expires BETWEEN UTC_TIMESTAMP(6) AND UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE"
	sqlSession  = "SET @mysqllock = @@autocommit, SESSION autocommit = 0, wait_timeout = 30"
	sqlLeasing  = "SET @mysqllock = @@autocommit, SESSION autocommit = 1, " + sqlOwn + ", innodb_lock_wait_timeout = 1, lock_wait_timeout = 5, wait_timeout = 30"
	sqlProbe    = "SELECT VERSION(), DATABASE(), @@innodb_rollback_on_timeout, @@read_only OR @@innodb_read_only," +
		" /*!80000 @@transaction_isolation, 0, CONCAT(IFNULL((SELECT VARIABLE_VALUE FROM performance_schema.global_variables WHERE VARIABLE_NAME = 'wsrep_on'),'OFF'), ','," +
		" CONCAT_WS(',', (SELECT VARIABLE_VALUE FROM performance_schema.global_variables WHERE VARIABLE_NAME = 'group_replication_group_name')," +
		" (SELECT VARIABLE_VALUE FROM performance_schema.global_variables WHERE VARIABLE_NAME = 'group_replication_single_primary_mode'))), 0, @@server_uuid," +
		" (SELECT COUNT(*) FROM performance_schema.session_account_connect_attrs WHERE PROCESSLIST_ID = CONNECTION_ID() AND ATTR_NAME = '_client_ip'), @@global.wait_timeout */" +
		" /*M!100000 @@tx_isolation, @@idle_transaction_timeout, CONCAT(@@wsrep_on,',')," +
		" (SELECT COUNT(*) FROM information_schema.SYSTEM_VARIABLES WHERE VARIABLE_NAME = 'INNODB_SNAPSHOT_ISOLATION')," +
		" IF(@@wsrep_on, (SELECT VARIABLE_VALUE FROM information_schema.GLOBAL_STATUS WHERE VARIABLE_NAME = 'WSREP_CLUSTER_STATE_UUID')," +
		" CONCAT_WS(' ', @@hostname, @@port, @@server_id, @@datadir)), 0," +
		" LEAST(@@global.wait_timeout, IFNULL(NULLIF(@@idle_transaction_timeout, 0), @@global.wait_timeout)," +
		" IFNULL(NULLIF(@@idle_readonly_transaction_timeout, 0), @@global.wait_timeout), IFNULL(NULLIF(@@idle_write_transaction_timeout, 0), @@global.wait_timeout)) */," +
		" CONCAT_WS(' ', @@hostname, @@port, @@server_id, @@datadir /*!80000 , @@server_uuid */), @@log_bin AND" +
		" /*!80000 (SELECT COUNT(*) FROM performance_schema.session_variables WHERE VARIABLE_NAME = 'binlog_format' AND VARIABLE_VALUE = 'STATEMENT') */" +
		" /*M!100000 @@binlog_format = 'STATEMENT' */, @@version, @@version_comment LIMIT 1"
	sqlRecognise  = "SELECT @@version, @@version_comment, VERSION(), DATABASE() LIMIT 1"
	sqlState      = "SELECT ENGINE, " + sqlColumns + ", " + sqlRoutine + sqlEngine
	sqlStateMaria = "SELECT ENGINE, " + sqlColumns + ", NULL" + sqlEngine
	sqlColumns    = "(SELECT LOWER(GROUP_CONCAT(COLUMN_NAME)) FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = x'73686f70' AND TABLE_NAME = x'6d7973716c6c6f636b')"
	sqlRoutine    = "(SELECT ROUTINE_COMMENT = 'mysqllock' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE'" +
		" AND ROUTINE_SCHEMA = x'73686f70' AND ROUTINE_NAME = x'6d7973716c6c6f636b5f6c6f636b31')"
	sqlEngine = " FROM information_schema.TABLES WHERE TABLE_SCHEMA = x'73686f70' AND TABLE_NAME = x'6d7973716c6c6f636b'"
	sqlTable  = "CREATE TABLE IF NOT EXISTS `shop`.`mysqllock` (\n" +
		"  namespace VARBINARY(255) NOT NULL,\n" +
		"  name VARBINARY(255) NOT NULL,\n" +
		"  owner VARBINARY(255) NULL,\n" +
		"  token BIGINT UNSIGNED NOT NULL DEFAULT 0,\n" +
		"  expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00',\n" +
		"  versioned TINYINT UNSIGNED NOT NULL DEFAULT 0,\n" +
		"  PRIMARY KEY (namespace, name)\n" +
		") ENGINE=InnoDB COMMENT='locks of mysqllock: one row a key'"
	sqlUpgrade = "ALTER TABLE `shop`.`mysqllock` ADD COLUMN owner VARBINARY(255) NULL," +
		" ADD COLUMN token BIGINT UNSIGNED NOT NULL DEFAULT 0, ADD COLUMN expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00'," +
		" ADD COLUMN versioned TINYINT UNSIGNED NOT NULL DEFAULT 0"
	sqlFloor           = "SELECT 1 FROM `shop`.`mysqllock` WHERE namespace = x'' AND name = x''"
	sqlMakeFloor       = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name) VALUES (x'', x'')"
	sqlCreateProcedure = "CREATE PROCEDURE `shop`.`mysqllock_lock1`(p_namespace VARBINARY(255), p_name VARBINARY(255), p_shared BOOL, p_quiet BIGINT UNSIGNED)\n" +
		"SQL SECURITY INVOKER COMMENT 'mysqllock'\n" +
		"BEGIN\n" +
		"  DECLARE v_quiet BOOL;\n" +
		"  START TRANSACTION;\n" +
		"  IF p_shared THEN\n" +
		"    SELECT owner IS NULL AND versioned = 0 AND token <= p_quiet AND " + sqlWritable + " INTO v_quiet\n" +
		"      FROM `shop`.`mysqllock` WHERE namespace = p_namespace AND name = p_name FOR SHARE NOWAIT;\n" +
		"  ELSE\n" +
		"    SELECT owner IS NULL AND versioned = 0 AND token <= p_quiet AND " + sqlWritable + " INTO v_quiet\n" +
		"      FROM `shop`.`mysqllock` WHERE namespace = p_namespace AND name = p_name FOR UPDATE NOWAIT;\n" +
		"  END IF;\n" +
		"  IF v_quiet IS NOT TRUE THEN BEGIN\n" +
		"    DECLARE v_token BIGINT UNSIGNED;\n" +
		"    DECLARE v_owner VARBINARY(255);\n" +
		"    DECLARE v_versioned BOOL;\n" +
		"    SELECT token, owner, versioned INTO v_token, v_owner, v_versioned\n" +
		"      FROM `shop`.`mysqllock` WHERE namespace = p_namespace AND name = p_name FOR SHARE;\n" +
		"    IF v_owner IS NOT NULL THEN ROLLBACK; END IF;\n" +
		"    SELECT CONNECTION_ID(), v_token, v_owner, v_versioned, @@read_only, @@innodb_read_only FROM DUAL WHERE v_token IS NOT NULL;\n" +
		"  END; END IF;\n" +
		"END"
	sqlWritable = "CONCAT(@@read_only, @@innodb_read_only) IN ('00', 'OFFOFF')"

	sqlExists  = "SELECT name, token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN (x'6b', x'0073747269706573')" + sqlAndFloor
	sqlExists1 = "SELECT name, token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN (x'6b31', x'0073747269706573')" + sqlAndFloor
	sqlExists3 = "SELECT name, token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN (x'6b31', x'6b32', x'0073747269706573')" + sqlAndFloor
	sqlInsert  = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT x'73686f70', k, token, UTC_TIMESTAMP(6) FROM `shop`.`mysqllock` JOIN (SELECT x'6b' AS k) d" + sqlFromFloor
	sqlInsert1 = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT x'73686f70', k, token, UTC_TIMESTAMP(6) FROM `shop`.`mysqllock` JOIN (SELECT x'6b31' AS k) d" + sqlFromFloor
	sqlInsert2 = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT x'73686f70', k, token, UTC_TIMESTAMP(6) FROM `shop`.`mysqllock` JOIN (SELECT x'6b32' AS k) d" + sqlFromFloor
	sqlInsert3 = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT x'73686f70', k, token, UTC_TIMESTAMP(6) FROM `shop`.`mysqllock` JOIN (SELECT x'6b31' AS k UNION ALL SELECT x'6b32') d" + sqlFromFloor
	sqlAndFloor  = " UNION ALL SELECT name, token FROM `shop`.`mysqllock` WHERE namespace = x'' AND name = x''"
	sqlFromFloor = " WHERE namespace = x'' AND name = x'' LOCK IN SHARE MODE"
	sqlStripes   = "SELECT token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = x'0073747269706573'"

	// What is said of a lease: how long it is still live, its token, its owner.
	sqlLease = "IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0), token, owner"

	sqlCall  = "CALL `shop`.`mysqllock_lock1`(x'73686f70', x'6b', FALSE, NULL)"
	sqlOf    = "CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = x'6b' LIMIT 1 FOR UPDATE"
	sqlLock  = "SELECT " + sqlOf
	sqlOf1   = "CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = x'6b31' LIMIT 1 FOR UPDATE"
	sqlLock1 = "SELECT " + sqlOf1
	sqlOf2   = "CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = x'6b32' LIMIT 1 FOR UPDATE"
	sqlLock2 = "SELECT " + sqlOf2
	sqlHint  = "SELECT /*+ MAX_EXECUTION_TIME(n) */ "
	sqlTry   = sqlHint + sqlOf + " NOWAIT"
	sqlTry1  = sqlHint + sqlOf1 + " NOWAIT"
	sqlTry3  = "(" + sqlTry1 + ") UNION ALL (" + sqlLock2 + " NOWAIT) LIMIT 2"
	sqlBlock = "BEGIN NOT ATOMIC SET SESSION idle_transaction_timeout = 30; START TRANSACTION;" +
		" SET STATEMENT innodb_lock_wait_timeout = 0 FOR " + sqlLock + "; END"
	sqlPreparedBlock = "BEGIN NOT ATOMIC DECLARE v_name VARBINARY(255) DEFAULT UNHEX(CONVERT(? USING ascii)); DECLARE v_most BIGINT UNSIGNED DEFAULT ?; DECLARE v_quiet BOOL;" +
		" SET SESSION idle_transaction_timeout = 30; START TRANSACTION;" +
		" SET STATEMENT innodb_lock_wait_timeout = 0 FOR SELECT owner IS NULL AND versioned = 0 AND token <= v_most AND " + sqlWritable + " INTO v_quiet" +
		" FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = v_name LIMIT 1 FOR UPDATE;" +
		" IF v_quiet IS NOT TRUE THEN SELECT CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only" +
		" FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = v_name LIMIT 1 FOR UPDATE; END IF; END"
	sqlBlock3 = "BEGIN NOT ATOMIC SET SESSION idle_transaction_timeout = 30; START TRANSACTION;" +
		" SET STATEMENT innodb_lock_wait_timeout = 0 FOR (" + sqlLock1 + ") UNION ALL (" + sqlLock2 + ") LIMIT 2; END"
	sqlLook  = sqlLookAt + "(x'6b') AND owner IS NOT NULL"
	sqlLook1 = sqlLookAt + "(x'6b31') AND owner IS NOT NULL"
	sqlLook2 = sqlLookAt + "(x'6b32') AND owner IS NOT NULL"

	sqlLookAt = "SELECT name, " + sqlLease + " FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN "
	sqlClear  = "INSERT INTO `shop`.`mysqllock` (namespace, name) SELECT r.namespace, r.name FROM `shop`.`mysqllock` r" +
		" WHERE r.namespace = x'73686f70' AND r.name = x'6b' AND r.token = 5 AND r.owner = x'7765622d323a373a73686f7064233061316232633364'" +
		" FOR UPDATE NOWAIT ON DUPLICATE KEY UPDATE owner = NULL"

	sqlBlocker = "SET STATEMENT max_statement_time = n FOR " +
		"SELECT b.trx_mysql_thread_id, p.USER, p.HOST, '', TIMESTAMPDIFF(MICROSECOND, b.trx_started, NOW(6))" +
		" FROM information_schema.INNODB_LOCK_WAITS w" +
		" JOIN information_schema.INNODB_TRX r ON r.trx_id = w.requesting_trx_id" +
		" JOIN information_schema.INNODB_TRX b ON b.trx_id = w.blocking_trx_id" +
		" LEFT JOIN " + sqlConnections + " ON p.ID = b.trx_mysql_thread_id" +
		" WHERE r.trx_mysql_thread_id = 1 AND b.trx_state <> 'LOCK WAIT' LIMIT 1"

	dataK     = "'0x73686F70, 0x6B'" // the key k as the server prints it
	sqlUpdate = "UPDATE p SET stock = ? WHERE id = ?"
	sqlRead   = "SELECT stock FROM p WHERE id = ?"
)

// anyToken is the highest that there can be.
const anyToken = "18446744073709551615"

// sqlQuietCall and sqlQuietBlock are sqlCall and sqlBlock on a connection whose id is
// known: they are answered only where there is more to tell than a token up to most.
func sqlQuietCall(most string) string { return strings.Replace(sqlCall, "NULL", most, 1) }

func sqlQuietBlock(most string) string {
	return "BEGIN NOT ATOMIC SET SESSION idle_transaction_timeout = 30; START TRANSACTION;" +
		" SET STATEMENT innodb_lock_wait_timeout = 0 FOR SELECT MAX(owner IS NULL AND versioned = 0 AND token <= " + most + " AND " + sqlWritable + ") INTO @mysqllock_quiet" +
		" FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = x'6b' FOR UPDATE;" +
		" IF @mysqllock_quiet IS NOT TRUE THEN EXECUTE IMMEDIATE '" + strings.ReplaceAll(sqlLock, "'", "''") + "'; END IF; END"
}

// sqlHolder asks who holds keys, as the server prints them, other than the one
// who waits.
func sqlHolder(waiter int, keys string) string {
	return "SELECT /*+ MAX_EXECUTION_TIME(n) */ t.PROCESSLIST_ID, t.PROCESSLIST_USER, t.PROCESSLIST_HOST," +
		" (SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a WHERE a.PROCESSLIST_ID = t.PROCESSLIST_ID" +
		" AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1)," +
		" (SELECT x.TIMER_WAIT DIV 1000000 FROM performance_schema.events_transactions_current x" +
		" WHERE x.THREAD_ID = t.THREAD_ID AND x.STATE = 'ACTIVE')" +
		" FROM performance_schema.data_locks l JOIN performance_schema.threads t ON t.THREAD_ID = l.THREAD_ID" +
		" WHERE l.OBJECT_SCHEMA = x'73686f70' AND l.OBJECT_NAME = x'6d7973716c6c6f636b' AND l.LOCK_TYPE = 'RECORD' AND l.LOCK_STATUS = 'GRANTED'" +
		" AND l.LOCK_DATA IN (" + keys + ") AND t.PROCESSLIST_ID <> " + fmt.Sprint(waiter) + " LIMIT 1"
}

// fixed replaces what differs from one run to the next: the marks by which
// waiting statements are found again, and the bounds that depend on the time.
func fixed(text string) string {
	text = aMark.ReplaceAllString(text, "MARK")
	text = halfMark.ReplaceAllString(text, "'HALF'")
	text = aBound.ReplaceAllString(text, "MAX_EXECUTION_TIME(n)")
	return aStatementTime.ReplaceAllString(text, "max_statement_time = n")
}

var (
	aMark          = regexp.MustCompile(`\b[0-9a-f]{24}\b`)
	halfMark       = regexp.MustCompile(`'[0-9a-f]{12}'`)
	aBound         = regexp.MustCompile(`MAX_EXECUTION_TIME\((\d+)\)`)
	aStatementTime = regexp.MustCompile(`max_statement_time = [0-9.]+`)
)

// mocked is a database handle over sqlmock, with the hint that its tests use.
type mocked struct {
	sqlmock.Sqlmock
	t   *testing.T
	db  *sql.DB
	ctx context.Context // the hint "k"
	// most is the highest token of k that is nothing new to the driver; "" while it
	// does not know the id of its one connection.
	most string
}

type mockConnector struct {
	d   driver.Driver
	dsn string
}

func (k mockConnector) Connect(context.Context) (driver.Conn, error) { return k.d.Open(k.dsn) }
func (k mockConnector) Driver() driver.Driver                        { return k.d }

func mock(t *testing.T, cfg mysqllock.Config) *mocked {
	t.Helper()
	base, m, err := sqlmock.NewWithDSN(t.Name(), sqlmock.QueryMatcherOption(sqlmock.QueryMatcherFunc(
		func(want, got string) error { return sqlmock.QueryMatcherEqual.Match(want, fixed(got)) })))
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Schema == "" {
		cfg.Schema = "manual"
	}
	k, err := mysqllock.Wrap(mockConnector{base.Driver(), t.Name()}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	x := &mocked{Sqlmock: m, t: t, db: sql.OpenDB(k), ctx: lockctx.With(context.Background(), "k")}
	t.Cleanup(func() {
		if err := m.ExpectationsWereMet(); err != nil {
			t.Error(err)
		}
		// It has no expectations for the connections' ends, and says so.
		_ = x.db.Close()
		_ = base.Close()
	})
	return x
}

// answers is how a server describes itself.
type answers struct {
	version, database, isolation, topology string
	engine, columns                        string // of the lock table, if there is one
	procedure                              string // whether it is of our version, if there is one
}

// What the lock table has, and had in its first form.
const (
	theColumns = "namespace,name,owner,token,expires,versioned"
	fewColumns = "namespace,name"
)

var (
	aMySQL   = answers{"8.4.0", "shop", "REPEATABLE-READ", "OFF,", "InnoDB", theColumns, ""}
	aCalled  = answers{"8.4.0", "shop", "REPEATABLE-READ", "OFF,", "InnoDB", theColumns, "1"}
	aMariaDB = answers{"10.11.9-MariaDB-log", "shop", "REPEATABLE-READ", "0,", "InnoDB", theColumns, ""}
)

func (a answers) with(change func(a *answers)) answers {
	change(&a)
	return a
}

func (a answers) mariadb() bool { return strings.Contains(a.version, "MariaDB") }

// apart is whether BEGIN and the lock are two statements there.
func (a answers) apart() bool { return !a.mariadb() && a.procedure == "" }

// setUp expects the questions of the first hint.
func (m *mocked) setUp(a answers) {
	m.probe(a)
	m.state(a)
	m.expectQuery(sqlFloor, "1")
}

func (m *mocked) probe(a answers) {
	m.reprobe(a)
	m.ExpectExec(sqlControl).WillReturnResult(sqlmock.NewResult(0, 0))
	m.ExpectQuery(sqlIdentify).WillReturnRows(sqlmock.NewRows([]string{"id", "node", "@mysqllock", "@@completion_type"}).AddRow(9, "db 3306", 1, "NO_CHAIN"))
}

func (m *mocked) reprobe(a answers) {
	m.ExpectQuery(sqlProbe).WillReturnRows(sqlmock.NewRows([]string{"1", "2", "3", "4", "5", "6", "7", "8"}).
		AddRow(a.version, a.database, "0", "0", a.isolation, "0", a.topology, "0"))
}

func (m *mocked) state(a answers) {
	text := sqlState
	if a.mariadb() {
		text = sqlStateMaria
	}
	rows := sqlmock.NewRows([]string{"ENGINE", "columns", "procedure"})
	if a.engine != "" {
		rows.AddRow(a.engine, a.columns, orNull(a.procedure))
	}
	m.ExpectQuery(text).WillReturnRows(rows)
}

// noTable is state where there is none.
func (m *mocked) noTable(a answers) { m.state(a.with(func(a *answers) { a.engine = "" })) }

func orNull(text string) driver.Value {
	if text == "" {
		return nil
	}
	return text
}

// column is a column of those values that are not empty.
func column(values ...string) *sqlmock.Rows {
	rows := sqlmock.NewRows([]string{"c"})
	for _, v := range values {
		if v != "" {
			rows.AddRow([]byte(v))
		}
	}
	return rows
}

// exist expects the question which keys there are rows of, none of which has
// ever had a lease.
func (m *mocked) exist(text string, keys ...string) {
	rows := sqlmock.NewRows([]string{"name", "token"})
	for _, key := range keys {
		rows.AddRow(key, 0)
	}
	m.ExpectQuery(text).WillReturnRows(rows.AddRow("", 0)) // the floor
}

// lockColumns are what a lock statement answers.
var lockColumns = []string{"id", "token", "owner", "versioned", "read_only", "innodb_read_only"}

// granted is what a lock statement of connection 7 returns, a row a key.
func granted(keys int) *sqlmock.Rows {
	rows := sqlmock.NewRows(lockColumns)
	for range keys {
		rows.AddRow(7, 0, nil, 0, "0", "0")
	}
	return rows
}

// theLease is what statements say of somebody's lease: that it is live for
// another two seconds and a half, its token, and whose it is.
var theLease = []driver.Value{int64(2500000), int64(5), "web-2:7:shopd#0a1b2c3d"}

// lookColumns are what a look at a row's lease answers.
var lookColumns = []string{"name", "remaining", "token", "owner"}

// seesLease has a look at key's row see that lease.
func (m *mocked) seesLease(text, key string) {
	m.ExpectQuery(text).WillReturnRows(sqlmock.NewRows(lookColumns).AddRow(append([]driver.Value{key}, theLease...)...))
}

// lockedLease is what a lock statement of connection id returns where it finds
// that lease.
func lockedLease(id int64) []driver.Value {
	return append(append([]driver.Value{id}, theLease[1:]...), int64(0), "0", "0")
}

// leasedAfter is granted, with that lease on one more key.
func leasedAfter(before int) *sqlmock.Rows {
	return granted(before).AddRow(lockedLease(7)...)
}

// inTheWay checks the error of who does not wait for that lease.
func inTheWay(t *testing.T, err error, key string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) {
		t.Errorf("the error is %v, want ErrLocked", err)
		return
	}
	if e.Op != "lock" || e.Key != key || e.Strategy != "row" || e.Holder == nil || *e.Holder != (mysqllock.Holder{Program: "web-2:7:shopd"}) {
		t.Errorf("the error is %v with holder %+v", err, e.Holder)
	}
}

// lock expects a lock statement that is granted.
func (m *mocked) lock(text string, keys int) { m.ExpectQuery(text).WillReturnRows(granted(keys)) }

func (m *mocked) expectQuery(text string, values ...string) {
	m.ExpectQuery(text).WillReturnRows(column(values...))
}

func (m *mocked) expectExec(text string, args ...driver.Value) {
	m.ExpectExec(text).WithArgs(args...).WillReturnResult(sqlmock.NewResult(0, 1))
}

// locked expects what makes the first lock on k in a transaction.
func (m *mocked) locked(a answers) {
	m.setUp(a)
	m.exist(sqlExists, "k")
	m.again(a)
}

// again expects what makes every later lock on k. From then on the driver knows the
// connection's id.
func (m *mocked) again(a answers) {
	answer := granted(1)
	if m.most != "" && !a.apart() {
		answer = sqlmock.NewRows(nil) // no result set
	}
	m.tries(a).WillReturnRows(answer)
	m.most = cmp.Or(m.most, "0")
}

// tells is again where k's row has something to tell, and a token: from then on
// that is known.
func (m *mocked) tells(a answers, row ...driver.Value) {
	m.tries(a).WillReturnRows(sqlmock.NewRows(lockColumns).AddRow(row...))
	m.most = anyToken
}

// tries expects what asks for a lock on k.
func (m *mocked) tries(a answers) *sqlmock.ExpectedQuery {
	switch {
	case a.mariadb() && m.most != "":
		return m.ExpectQuery(sqlQuietBlock(m.most))
	case a.mariadb():
		return m.ExpectQuery(sqlBlock)
	case !a.apart():
		return m.ExpectQuery(sqlQuietCall(cmp.Or(m.most, "NULL")))
	}
	m.ExpectBegin()
	return m.ExpectQuery(sqlTry)
}

func (m *mocked) commit(a answers) {
	if a.apart() {
		m.ExpectCommit()
		return
	}
	m.expectExec("COMMIT") // the driver began it by text
}

func (m *mocked) rollback(a answers) {
	if a.apart() {
		m.ExpectRollback()
		return
	}
	m.expectExec("ROLLBACK")
}

// stillOpen is how a transaction that asks late for its lock is known to be open.
func (m *mocked) stillOpen() {
	m.expectExec("SAVEPOINT mysqllock_late")
	m.expectExec("RELEASE SAVEPOINT mysqllock_late")
}

func (m *mocked) begin() *sql.Tx {
	m.t.Helper()
	tx, err := m.db.BeginTx(m.ctx, nil)
	if err != nil {
		m.t.Fatal(err)
	}
	return tx
}

func (m *mocked) want(err error, target error) {
	m.t.Helper()
	if !errors.Is(err, target) {
		m.t.Errorf("the error is %v, want %v", err, target)
	}
}

func number(n uint16) error { return &mysql.MySQLError{Number: n, Message: fmt.Sprint("error ", n)} }

// onFlavours runs a test for each way to begin: text and lock one after the
// other, MySQL's procedure, MariaDB's block.
func onFlavours(t *testing.T, test func(t *testing.T, a answers)) {
	for name, a := range map[string]answers{"MySQL": aMySQL, "MySQL with procedure": aCalled, "MariaDB": aMariaDB} {
		t.Run(name, func(t *testing.T) { test(t, a) })
	}
}

func TestMockTransaction(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{})
		m.locked(a)
		m.expectExec(sqlUpdate, 3, 42)
		m.commit(a)
		tx := m.begin()
		_, err := tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
		m.want(err, nil)
		m.want(tx.Commit(), nil)

		// Nothing of the above is asked again, and statements without the hint
		// are in the transaction too.
		m.again(a)
		m.expectExec(sqlUpdate, 2, 42)
		m.rollback(a)
		tx = m.begin()
		_, err = tx.Exec(sqlUpdate, 2, 42)
		m.want(err, nil)
		m.want(tx.Rollback(), nil)
	})
}

// TestMockPrepared has a connection that stays: MariaDB's block is prepared, once.
func TestMockPrepared(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMariaDB)
	m.commit(aMariaDB)
	m.want(m.begin().Commit(), nil)
	for range 7 {
		m.again(aMariaDB)
		m.commit(aMariaDB)
		m.want(m.begin().Commit(), nil)
	}
	block := m.ExpectPrepare(sqlPreparedBlock)
	for range 2 {
		block.ExpectQuery().WithArgs("6b", "0").WillReturnRows(sqlmock.NewRows(nil))
		m.commit(aMariaDB)
		m.want(m.begin().Commit(), nil)
	}
	block.ExpectQuery().WithArgs("6b", "0").WillReturnRows(sqlmock.NewRows(lockColumns).AddRow(lockedLease(7)...))
	m.rollback(aMariaDB)
	m.seesLease(sqlLook, "k")
	_, err := m.db.BeginTx(lockctx.With(m.ctx, "k", lockctx.NoWait()), nil)
	inTheWay(t, err, "k")
	block.ExpectQuery().WithArgs("6b", anyToken).WillReturnRows(sqlmock.NewRows(nil))
	m.commit(aMariaDB)
	m.want(m.begin().Commit(), nil)
}

func TestMockNewKey(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.setUp(aMySQL)
	m.exist(sqlExists)
	m.expectExec(sqlInsert)
	m.expectQuery(sqlStripes)
	m.again(aMySQL)
	m.ExpectCommit()
	m.want(m.begin().Commit(), nil)
}

func TestMockExecAlone(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{})
		m.locked(a)
		m.expectExec(sqlUpdate, 3, 42)
		m.commit(a)
		_, err := m.db.ExecContext(m.ctx, sqlUpdate, 3, 42)
		m.want(err, nil)

		// A query that writes is the same.
		m.again(a)
		m.expectQuery("INSERT INTO p VALUES (1) RETURNING id", "1")
		m.commit(a)
		var id int
		m.want(m.db.QueryRowContext(m.ctx, "INSERT INTO p VALUES (1) RETURNING id").Scan(&id), nil)

		// Of several statements in one text, those that were finished stay.
		m.again(a)
		m.ExpectExec("UPDATE p SET stock = 1; UPDATE q SET x = 1").WillReturnError(number(1146))
		m.commit(a)
		_, err = m.db.ExecContext(m.ctx, "UPDATE p SET stock = 1; UPDATE q SET x = 1")
		var mysqlErr *mysql.MySQLError
		if !errors.As(err, &mysqlErr) || mysqlErr.Number != 1146 {
			t.Errorf("the statement's error comes back as %v", err)
		}
	})
}

func TestMockSeveralKeys(t *testing.T) {
	for _, a := range []answers{aMySQL, aCalled, aMariaDB} {
		t.Run(a.version+a.procedure, func(t *testing.T) {
			m := mock(t, mysqllock.Config{})
			m.setUp(a)
			m.exist(sqlExists3)
			m.expectExec(sqlInsert3)
			m.expectQuery(sqlStripes)
			for _, hint := range []context.Context{
				lockctx.WithKeys(context.Background(), []string{"k2", "k1", "k2"}),
				lockctx.With(lockctx.With(context.Background(), "k2"), "k1"),
			} {
				if a == aMariaDB {
					m.lock(sqlBlock3, 2)
					m.expectExec("COMMIT")
				} else {
					m.ExpectBegin()
					m.lock(sqlTry3, 2)
					m.ExpectCommit()
				}
				m.ctx = hint
				m.want(m.begin().Commit(), nil)
			}
		})
	}
}

// TestMockMissingRow has a row of two that vanished after it was seen: the
// lock is not granted.
func TestMockMissingRow(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.setUp(aMySQL)
	m.exist(sqlExists3, "k1", "k2")
	m.ExpectBegin()
	m.lock(sqlTry3, 1)
	m.ExpectRollback()
	m.exist(sqlExists3, "k1")
	m.expectExec(sqlInsert2)
	m.expectQuery(sqlStripes)
	m.ExpectBegin()
	m.lock(sqlTry3, 2)
	m.ExpectCommit()
	m.ctx = lockctx.WithKeys(context.Background(), []string{"k1", "k2"})
	m.want(m.begin().Commit(), nil)
}

// TestMockHex has a key, a namespace and a table that would end every quoting.
func TestMockHex(t *testing.T) {
	m := mock(t, mysqllock.Config{Namespace: "it's `\\\x00", Table: "locks.my-table$"})
	m.probe(aMySQL)
	const is = "TABLE_SCHEMA = x'6c6f636b73' AND TABLE_NAME = x'6d792d7461626c6524'"
	m.ExpectQuery("SELECT ENGINE, (SELECT LOWER(GROUP_CONCAT(COLUMN_NAME)) FROM information_schema.COLUMNS WHERE " + is + ")," +
		" (SELECT ROUTINE_COMMENT = 'mysqllock' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE'" +
		" AND ROUTINE_SCHEMA = x'6c6f636b73' AND ROUTINE_NAME = x'6d792d7461626c65245f6c6f636b31')" +
		" FROM information_schema.TABLES WHERE " + is).
		WillReturnRows(sqlmock.NewRows([]string{"1", "2", "3"}).AddRow("InnoDB", theColumns, 1))
	m.expectQuery("SELECT 1 FROM `locks`.`my-table$` WHERE namespace = x'' AND name = x''", "1")
	const key = "x'27293b2044524f50205441424c452070202d2d20c3a4ff'"
	m.exist("SELECT name, token FROM `locks`.`my-table$` WHERE namespace = x'6974277320605c00' AND name IN (" + key + ", x'0073747269706573')" +
		" UNION ALL SELECT name, token FROM `locks`.`my-table$` WHERE namespace = x'' AND name = x''")
	m.expectExec("INSERT IGNORE INTO `locks`.`my-table$` (namespace, name, token, expires)" +
		" SELECT x'6974277320605c00', k, token, UTC_TIMESTAMP(6) FROM `locks`.`my-table$` JOIN (SELECT " + key + " AS k) d" + sqlFromFloor)
	m.expectQuery("SELECT token FROM `locks`.`my-table$` WHERE namespace = x'6974277320605c00' AND name = x'0073747269706573'")
	m.lock("CALL `locks`.`my-table$_lock1`(x'6974277320605c00', "+key+", FALSE, NULL)", 1)
	m.expectExec("COMMIT")
	m.ctx = lockctx.With(context.Background(), "'); DROP TABLE p -- ä\xff")
	m.want(m.begin().Commit(), nil)
}

// TestMockJoin has a second key that joins the transaction.
func TestMockJoin(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.exist(sqlExists1, "k1")
	m.lock(sqlTry1, 1)
	m.expectExec(sqlUpdate, 3, 42)
	m.expectExec(sqlUpdate, 4, 42)
	m.ExpectCommit()
	tx := m.begin()
	both := lockctx.With(m.ctx, "k1")
	for i := range 2 { // the same keys again join without a word
		_, err := tx.ExecContext(both, sqlUpdate, 3+i, 42)
		m.want(err, nil)
	}
	m.want(tx.Commit(), nil)
}

// TestMockJoinRefused has a second key that someone else has: the transaction
// goes on as if it had not been asked for.
func TestMockJoinRefused(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.exist(sqlExists1, "k1")
	m.ExpectQuery(sqlTry1).WillReturnError(number(3572))
	m.expectQuery(sqlHolder(7, "'0x73686F70, 0x6B31'"))
	m.expectExec(sqlUpdate, 3, 42)
	m.ExpectCommit()
	tx := m.begin()
	_, err := tx.ExecContext(lockctx.With(m.ctx, "k1", lockctx.NoWait()), sqlUpdate, 1, 1)
	m.want(err, mysqllock.ErrLocked)
	_, err = tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
	m.want(err, nil)
	m.want(tx.Commit(), nil)
}

// TestMockJoinHalfRefused asks for two more keys at once. One of them may have
// been granted, so the transaction cannot go on.
func TestMockJoinHalfRefused(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.exist(sqlExists3, "k1", "k2")
	m.ExpectQuery(sqlTry3).WillReturnError(number(3572))
	m.expectQuery(sqlHolder(7, "'0x73686F70, 0x6B31', '0x73686F70, 0x6B32'"))
	m.ExpectRollback()
	tx := m.begin()
	_, err := tx.ExecContext(lockctx.WithKeys(m.ctx, []string{"k1", "k2"}, lockctx.NoWait()), sqlUpdate, 1, 1)
	m.want(err, mysqllock.ErrLocked)
	_, err = tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
	m.want(err, mysqllock.ErrLost)
	m.want(tx.Commit(), mysqllock.ErrLost)
}

func TestMockSavepoints(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{})
		m.locked(a)
		m.expectExec("SAVEPOINT mysqllock_1")
		m.expectExec(sqlUpdate, 1, 1)
		m.expectExec("SAVEPOINT mysqllock_2")
		m.expectExec("ROLLBACK TO SAVEPOINT mysqllock_2")
		m.expectExec("RELEASE SAVEPOINT mysqllock_1")
		m.commit(a)
		outer := m.begin()
		middle := m.begin()
		_, err := middle.Exec(sqlUpdate, 1, 1)
		m.want(err, nil)
		inner := m.begin()
		m.want(inner.Rollback(), nil)
		m.want(middle.Commit(), nil)
		m.want(outer.Commit(), nil)

		// In another order than the reverse, all is rolled back.
		m.most = "" // it is on the connection that was the middle one's
		m.again(a)
		m.expectExec("SAVEPOINT mysqllock_1")
		m.rollback(a)
		outer = m.begin()
		inner = m.begin()
		if err := outer.Commit(); err == nil || !strings.Contains(err.Error(), "reverse order") {
			t.Errorf("the outer transaction ended first: %v", err)
		}
		if err := inner.Commit(); err == nil || !strings.Contains(err.Error(), "reverse order") {
			t.Errorf("the inner transaction ended last: %v", err)
		}
	})
}

func TestMockLocked(t *testing.T) {
	cols := []string{"1", "2", "3", "4", "5"}
	t.Run("MySQL", func(t *testing.T) {
		m := mock(t, mysqllock.Config{NoWait: true})
		m.setUp(aMySQL)
		m.exist(sqlExists, "k")
		m.ExpectBegin()
		m.ExpectQuery(sqlTry).WillReturnError(number(3572))
		m.ExpectRollback()
		m.ExpectQuery(sqlHolder(0, dataK)).WillReturnRows(sqlmock.NewRows(cols).AddRow(55, "app", "web-1", "web-1:7:shopd", 1500000))
		_, err := m.db.BeginTx(m.ctx, nil)
		m.want(err, mysqllock.ErrLocked)
		var e *mysqllock.Error
		want := mysqllock.Holder{ConnectionID: 55, User: "app", Host: "web-1", Program: "web-1:7:shopd", Since: 1500 * time.Millisecond}
		if !errors.As(err, &e) || e.Op != "lock" || e.Key != "k" || e.Holder == nil || *e.Holder != want {
			t.Errorf("the error is %#v with holder %+v", e, e.Holder)
		}
		if errors.Is(err, mysqllock.ErrTimeout) {
			t.Error("ErrLocked is no ErrTimeout")
		}
	})
	t.Run("MySQL with procedure", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		m.setUp(aCalled)
		m.exist(sqlExists, "k")
		m.ExpectQuery(sqlCall).WillReturnError(number(3572))
		m.expectExec("ROLLBACK")
		m.ExpectQuery(sqlHolder(0, dataK)).WillReturnError(number(1142)) // may not look, and is not asked again
		ctx := lockctx.With(context.Background(), "k", lockctx.NoWait())
		_, err := m.db.ExecContext(ctx, sqlUpdate, 1, 1)
		m.want(err, mysqllock.ErrLocked)

		m.ExpectQuery(sqlCall).WillReturnError(number(3572))
		m.expectExec("ROLLBACK")
		_, err = m.db.ExecContext(ctx, sqlUpdate, 1, 1)
		m.want(err, mysqllock.ErrLocked)
	})
	t.Run("MariaDB", func(t *testing.T) { // which shows holders only to those who wait
		m := mock(t, mysqllock.Config{NoWait: true})
		m.setUp(aMariaDB)
		m.exist(sqlExists, "k")
		m.ExpectQuery(sqlBlock).WillReturnError(number(1205))
		m.expectExec("ROLLBACK")
		_, err := m.db.BeginTx(m.ctx, nil)
		m.want(err, mysqllock.ErrLocked)
	})
	t.Run("in this process", func(t *testing.T) { // without asking the server
		m := mock(t, mysqllock.Config{NoWait: true, Owner: "me"})
		m.locked(aMySQL)
		m.ExpectRollback()
		tx := m.begin()
		_, err := m.db.ExecContext(lockctx.With(context.Background(), "k"), sqlUpdate, 1, 1)
		m.want(err, mysqllock.ErrLocked)
		var e *mysqllock.Error
		if !errors.As(err, &e) || e.Holder == nil || e.Holder.ConnectionID != 7 || e.Holder.Program != "me" {
			t.Errorf("the error is %v, want connection 7 of me as holder", err)
		}
		m.want(tx.Rollback(), nil)
	})
}

// TestMockLeased has a key on which somebody has a lease. The row's lock, which
// was granted, is given back at once: it would keep the lease's holder from
// renewing.
func TestMockLeased(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{NoWait: true})
		m.setUp(a)
		m.exist(sqlExists, "k")
		for range 2 {
			m.tells(a, lockedLease(7)...)
			m.rollback(a)
			m.seesLease(sqlLook, "k")
		}
		_, err := m.db.BeginTx(m.ctx, nil)
		inTheWay(t, err, "k")
		_, err = m.db.ExecContext(m.ctx, sqlUpdate, 1, 1)
		inTheWay(t, err, "k")

		// It has ended. What is left of it is taken off first: its holder may have a last
		// COMMIT under way.
		m.tells(a, 7, 5, theLease[2], 0, "0", "0")
		m.rollback(a)
		m.ExpectQuery(sqlLook).WillReturnRows(sqlmock.NewRows(lookColumns).AddRow("k", 0, theLease[1], theLease[2]))
		m.expectExec(sqlClear)
		m.tells(a, 7, 5, nil, 0, "0", "0")
		m.commit(a)
		m.want(m.begin().Commit(), nil)
	})
	for _, a := range []answers{aMySQL, aMariaDB} {
		t.Run("one of several keys, "+a.version, func(t *testing.T) {
			m := mock(t, mysqllock.Config{NoWait: true})
			m.setUp(a)
			m.exist(sqlExists3, "k1", "k2")
			if a.mariadb() {
				m.ExpectQuery(sqlBlock3).WillReturnRows(leasedAfter(1))
			} else {
				m.ExpectBegin()
				m.ExpectQuery(sqlTry3).WillReturnRows(leasedAfter(1))
			}
			m.rollback(a)
			m.seesLease(sqlLook2, "k2")
			m.ctx = lockctx.WithKeys(context.Background(), []string{"k1", "k2"})
			_, err := m.db.BeginTx(m.ctx, nil)
			inTheWay(t, err, "k1, k2")
		})
	}
}

// TestMockJoinLeased has a second key on which somebody has a lease that is not
// known of before: the transaction, which cannot give back the row's lock alone,
// is rolled back. From then on it is known, and seen before the row is locked.
func TestMockJoinLeased(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{})
		m.locked(a)
		m.expectExec(sqlUpdate, 1, 1)
		m.exist(sqlExists1, "k1")
		m.ExpectQuery(sqlTry1).WillReturnRows(leasedAfter(0))
		m.seesLease(sqlLook1, "k1")
		m.rollback(a)
		tx := m.begin()
		_, err := tx.Exec(sqlUpdate, 1, 1)
		m.want(err, nil)
		both := lockctx.With(m.ctx, "k1", lockctx.NoWait())
		_, err = tx.ExecContext(both, sqlUpdate, 2, 2)
		inTheWay(t, err, "k1")
		_, err = tx.ExecContext(m.ctx, sqlUpdate, 3, 3)
		m.want(err, mysqllock.ErrLost)
		_, err = tx.Exec(sqlUpdate, 3, 3)
		m.want(err, mysqllock.ErrLost)
		m.want(tx.Commit(), mysqllock.ErrLost)

		m.ctx = lockctx.With(context.Background(), "k")
		m.again(a)
		m.seesLease(sqlLook1, "k1")
		m.expectExec(sqlUpdate, 3, 3)
		m.commit(a)
		tx = m.begin()
		_, err = tx.ExecContext(lockctx.With(m.ctx, "k1", lockctx.NoWait()), sqlUpdate, 2, 2)
		inTheWay(t, err, "k1")
		_, err = tx.ExecContext(m.ctx, sqlUpdate, 3, 3)
		m.want(err, nil)
		m.want(tx.Commit(), nil)
	})
}

// TestMockJoinHalfLeased asks for two more keys at once, one of which is known to
// have had a lease. Only that is looked up; then the other turns out to have one.
func TestMockJoinHalfLeased(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.ExpectQuery(sqlExists3).WillReturnRows(sqlmock.NewRows([]string{"name", "token"}).AddRow("", 2).AddRow("k2", 0).AddRow("k1", 4))
	m.ExpectQuery(sqlLook1).WillReturnRows(sqlmock.NewRows(lookColumns))
	m.ExpectQuery(sqlTry3).WillReturnRows(leasedAfter(1))
	m.seesLease(sqlLook2, "k2")
	m.ExpectRollback()
	tx := m.begin()
	_, err := tx.ExecContext(lockctx.WithKeys(m.ctx, []string{"k1", "k2"}, lockctx.NoWait()), sqlUpdate, 1, 1)
	inTheWay(t, err, "k1, k2")
	_, err = tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
	m.want(err, mysqllock.ErrLost)
	m.want(tx.Commit(), mysqllock.ErrLost)
}

// TestMockDeadlock has a user's statement that the server chose to break a
// deadlock with: nothing may go on in what is left of the transaction.
func TestMockDeadlock(t *testing.T) {
	onFlavours(t, func(t *testing.T, a answers) {
		m := mock(t, mysqllock.Config{})
		m.locked(a)
		m.ExpectExec(sqlUpdate).WithArgs(3, 42).WillReturnError(number(1213))
		m.rollback(a)
		tx := m.begin()
		_, err := tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
		m.want(err, mysqllock.ErrDeadlock)
		for range 2 {
			_, err = tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
			m.want(err, mysqllock.ErrLost)
			_, err = tx.Exec(sqlUpdate, 3, 42)
			m.want(err, mysqllock.ErrLost)
			_, err = tx.Query(sqlRead, 42)
			m.want(err, mysqllock.ErrLost)
			_, err = tx.Prepare(sqlRead)
			m.want(err, mysqllock.ErrLost)
		}
		err = tx.Commit()
		m.want(err, mysqllock.ErrLost)
		m.want(err, mysqllock.ErrDeadlock)

		// The same with a statement of its own, which can be run again.
		m.again(a)
		m.ExpectExec(sqlUpdate).WithArgs(3, 42).WillReturnError(number(1213))
		m.rollback(a)
		_, err = m.db.ExecContext(lockctx.With(context.Background(), "k"), sqlUpdate, 3, 42)
		m.want(err, mysqllock.ErrDeadlock)
		if errors.Is(err, driver.ErrBadConn) {
			t.Error("database/sql would run it again")
		}

		m.again(a)
		m.expectExec(sqlUpdate, 3, 42)
		m.commit(a)
		_, err = m.db.ExecContext(lockctx.With(context.Background(), "k"), sqlUpdate, 3, 42)
		m.want(err, nil)
	})
}

// TestMockFailedStatement has an error that leaves the transaction as it is.
func TestMockFailedStatement(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.ExpectExec(sqlUpdate).WithArgs(3, 42).WillReturnError(number(1062))
	m.expectExec(sqlUpdate, 4, 42)
	m.ExpectCommit()
	tx := m.begin()
	_, err := tx.Exec(sqlUpdate, 3, 42)
	if want := number(1062); err == nil || err.Error() != want.Error() {
		t.Errorf("the error comes back as %v, want %v", err, want)
	}
	_, err = tx.Exec(sqlUpdate, 4, 42)
	m.want(err, nil)
	m.want(tx.Commit(), nil)
}

func TestMockCommitFails(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.ExpectCommit().WillReturnError(number(3101)) // Group Replication found a conflict
	m.ExpectRollback()
	err := m.begin().Commit()
	m.want(err, mysqllock.ErrLost)
	m.want(err, mysqllock.ErrDeadlock)
}

// TestMockSetUpFails has servers on which there can be no lock. Nothing of the
// caller's is sent, and the next hint asks again.
func TestMockSetUpFails(t *testing.T) {
	old := aMySQL.with(func(a *answers) { a.columns = fewColumns })
	for _, c := range []struct {
		name   string
		cfg    mysqllock.Config
		expect func(m *mocked)
		is     error
		says   []string
	}{
		{"old MySQL", mysqllock.Config{}, func(m *mocked) {
			m.reprobe(aMySQL.with(func(a *answers) { a.version = "5.7.44" }))
		}, nil, []string{"5.7.44", "too old", "MySQL 8.0"}},
		{"old MariaDB", mysqllock.Config{}, func(m *mocked) {
			m.reprobe(aMariaDB.with(func(a *answers) { a.version = "5.5.5-10.2.44-MariaDB" }))
		}, nil, []string{"10.2.44", "too old", "MariaDB 10.3"}},
		{"neither", mysqllock.Config{}, func(m *mocked) {
			m.expectQuery(sqlProbe, "5.6.1")
			m.ExpectQuery(sqlRecognise).WillReturnRows(sqlmock.NewRows([]string{"1", "2", "3", "4"}).AddRow("5.6.1", "Source distribution", "5.6.1", "shop"))
		}, nil, []string{"MySQL 8.0 or MariaDB 10.3 is needed"}},
		{"MyISAM", mysqllock.Config{}, func(m *mocked) {
			m.probe(aMySQL)
			m.state(aMySQL.with(func(a *answers) { a.engine = "MyISAM" }))
		}, mysqllock.ErrUnsafe, []string{"MyISAM", "ENGINE=InnoDB"}},
		{"MyISAM of the older form", mysqllock.Config{Schema: "auto"}, func(m *mocked) {
			m.probe(aMySQL)
			m.state(old.with(func(a *answers) { a.engine = "MyISAM" }))
		}, mysqllock.ErrUnsafe, []string{"MyISAM", "ENGINE=InnoDB"}},
		{"half an answer", mysqllock.Config{}, func(m *mocked) {
			m.probe(aMySQL)
			m.expectQuery(sqlState, "InnoDB")
		}, nil, []string{"reading the definition of the lock table `shop`.`mysqllock`"}},
		{"no table", mysqllock.Config{}, func(m *mocked) {
			m.probe(aMySQL)
			m.noTable(aMySQL)
		}, nil, []string{"does not exist", sqlTable + ";\n" + sqlMakeFloor}},
		{"no database", mysqllock.Config{}, func(m *mocked) {
			m.probe(aMySQL.with(func(a *answers) { a.database = "" }))
		}, nil, []string{"no database", "lockTable"}},
		{"may not make the table", mysqllock.Config{Schema: "auto"}, func(m *mocked) {
			m.probe(aMySQL)
			m.noTable(aMySQL)
			m.ExpectExec(sqlTable).WillReturnError(number(1142))
		}, nil, []string{"1142", sqlTable + ";\n" + sqlMakeFloor}},
		{"read only", mysqllock.Config{Schema: "auto"}, func(m *mocked) {
			m.probe(aMySQL)
			m.noTable(aMySQL)
			m.ExpectExec(sqlTable).WillReturnError(number(1290))
		}, nil, []string{"1290", sqlTable + ";\n" + sqlMakeFloor}},
		{"the older form", mysqllock.Config{}, func(m *mocked) {
			m.probe(old)
			m.state(old)
		}, nil, []string{"older form", sqlUpgrade + ";\n" + sqlMakeFloor}},
		{"the older form, MariaDB", mysqllock.Config{}, func(m *mocked) {
			a := aMariaDB.with(func(a *answers) { a.columns = fewColumns })
			m.probe(a)
			m.state(a)
		}, nil, []string{"older form", sqlUpgrade + ";\n" + sqlMakeFloor}},
		{"one column is missing", mysqllock.Config{}, func(m *mocked) {
			m.probe(aMySQL)
			m.state(aMySQL.with(func(a *answers) { a.columns = "namespace,name,token,expires,versioned" }))
		}, nil, []string{"older form", "ALTER TABLE `shop`.`mysqllock` ADD COLUMN owner VARBINARY(255) NULL;\n" + sqlMakeFloor}},
		{"may not alter the table", mysqllock.Config{Schema: "auto"}, func(m *mocked) {
			m.probe(old)
			m.state(old)
			m.ExpectExec(sqlUpgrade).WillReturnError(number(1142))
		}, nil, []string{"1142", sqlUpgrade + ";\n" + sqlMakeFloor}},
		{"may not alter the table, read only", mysqllock.Config{Schema: "auto"}, func(m *mocked) {
			m.probe(old)
			m.state(old)
			m.ExpectExec(sqlUpgrade).WillReturnError(number(1290))
		}, nil, []string{"1290", sqlUpgrade + ";\n" + sqlMakeFloor}},
		{"somebody else alters the table for long", mysqllock.Config{Schema: "auto"}, func(m *mocked) {
			m.probe(old)
			m.state(old)
			m.ExpectExec(sqlUpgrade).WillReturnError(number(1205))
		}, nil, []string{"1205"}},
		{"may not see the floor", mysqllock.Config{}, func(m *mocked) {
			m.probe(aMySQL)
			m.state(aMySQL)
			m.ExpectQuery(sqlFloor).WillReturnError(number(1142))
		}, nil, []string{"1142"}},
		{"may not make the floor", mysqllock.Config{}, func(m *mocked) {
			m.probe(aMySQL)
			m.state(aMySQL)
			m.expectQuery(sqlFloor)
			m.ExpectExec(sqlMakeFloor).WillReturnError(number(1142))
		}, nil, []string{"1142", sqlMakeFloor}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mock(t, c.cfg)
			c.expect(m)
			_, err := m.db.ExecContext(m.ctx, sqlUpdate, 1, 1)
			if err == nil || c.is != nil && !errors.Is(err, c.is) {
				t.Fatalf("the error is %v, want %v", err, c.is)
			}
			for _, text := range c.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("the error does not say %q: %v", text, err)
				}
			}
			var e *mysqllock.Error
			if !errors.As(err, &e) || e.Key != "k" || e.Op != "lock" {
				t.Errorf("the error is %#v", err)
			}

			// Without a hint nothing of it matters.
			m.expectExec(sqlUpdate, 1, 1)
			_, err = m.db.Exec(sqlUpdate, 1, 1)
			m.want(err, nil)

			// Someone has put it right.
			m.probe(aCalled)
			m.state(aCalled)
			m.expectQuery(sqlFloor, "1")
			m.exist(sqlExists, "k")
			m.again(aCalled)
			m.expectExec("COMMIT")
			m.want(m.begin().Commit(), nil)
		})
	}
}

// TestMockTopology has servers of which several take writes: row locks are
// refused there, before anything of theirs is sent. What the server is is asked
// once.
func TestMockTopology(t *testing.T) {
	percona := aMySQL.with(func(a *answers) { a.topology = "ON," })
	group := aMySQL.with(func(a *answers) { a.topology = "OFF,aaaa-bbbb,OFF" })
	for name, a := range map[string]answers{"Galera": percona, "Group Replication with several primaries": group} {
		t.Run(name, func(t *testing.T) {
			m := mock(t, mysqllock.Config{})
			m.setUp(a)
			for range 2 {
				_, err := m.db.ExecContext(m.ctx, sqlUpdate, 1, 1)
				m.want(err, mysqllock.ErrUnsafe)
				var e *mysqllock.Error
				if !errors.As(err, &e) || e.Op != "lock" || e.Key != "k" || e.Strategy != "row" ||
					!strings.Contains(err.Error(), name) || !strings.Contains(err.Error(), "lockUnsafe=allow") {
					t.Errorf("the error is %v", err)
				}
				_, err = m.db.BeginTx(m.ctx, nil)
				m.want(err, mysqllock.ErrUnsafe)
			}
		})
		t.Run(name+", late", func(t *testing.T) { // the transaction goes on as if it had not asked
			m := mock(t, mysqllock.Config{})
			m.ExpectBegin()
			m.setUp(a)
			m.stillOpen()
			if a.mariadb() {
				m.expectExec("SET SESSION idle_transaction_timeout = 30")
			}
			m.expectExec(sqlUpdate, 1, 1)
			m.ExpectCommit()
			tx, err := m.db.Begin()
			m.want(err, nil)
			_, err = tx.ExecContext(m.ctx, sqlUpdate, 2, 2)
			m.want(err, mysqllock.ErrUnsafe)
			_, err = tx.Exec(sqlUpdate, 1, 1)
			m.want(err, nil)
			m.want(tx.Commit(), nil)
		})
		t.Run(name+", allowed", func(t *testing.T) {
			m := mock(t, mysqllock.Config{Unsafe: "allow"})
			m.locked(a)
			m.commit(a)
			m.want(m.begin().Commit(), nil)
		})
	}
	t.Run("one primary", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		m.locked(aMySQL.with(func(a *answers) { a.topology = "OFF,aaaa-bbbb,ON" }))
		m.ExpectCommit()
		m.want(m.begin().Commit(), nil)
	})
}

func TestMockAutomaticSchema(t *testing.T) {
	old := aMySQL.with(func(a *answers) { a.columns = fewColumns })
	auto := func(t *testing.T) *mocked { return mock(t, mysqllock.Config{Schema: "auto"}) }
	t.Run("everything is missing", func(t *testing.T) {
		m := auto(t)
		m.probe(aMySQL)
		m.noTable(aMySQL)
		m.expectExec(sqlTable)
		m.state(aMySQL)
		m.expectQuery(sqlFloor)
		m.expectExec(sqlMakeFloor)
		m.expectExec(sqlCreateProcedure)
		m.exist(sqlExists)
		m.expectExec(sqlInsert)
		m.expectQuery(sqlStripes)
		m.lock(sqlCall, 1)
		m.expectExec("COMMIT")
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the table is of the older form", func(t *testing.T) {
		m := auto(t)
		m.probe(old)
		m.state(old)
		m.expectExec(sqlUpgrade)
		m.state(aMySQL)
		m.expectQuery(sqlFloor)
		m.expectExec(sqlMakeFloor)
		m.expectExec(sqlCreateProcedure)
		m.exist(sqlExists, "k")
		m.lock(sqlCall, 1)
		m.expectExec("COMMIT")
		m.want(m.begin().Commit(), nil)
	})
	t.Run("another was quicker with all of it", func(t *testing.T) {
		m := auto(t)
		m.probe(old)
		m.state(old)
		m.ExpectExec(sqlUpgrade).WillReturnError(number(1060))
		m.state(aMySQL)
		m.expectQuery(sqlFloor, "1")
		m.ExpectExec(sqlCreateProcedure).WillReturnError(number(1304))
		m.exist(sqlExists, "k")
		m.lock(sqlCall, 1)
		m.expectExec("COMMIT")
		m.want(m.begin().Commit(), nil)
	})
	t.Run("one column is missing", func(t *testing.T) {
		m := auto(t)
		m.probe(aMariaDB)
		m.state(aMariaDB.with(func(a *answers) { a.columns = "namespace,name,owner,expires,versioned,comment" }))
		m.expectExec("ALTER TABLE `shop`.`mysqllock` ADD COLUMN token BIGINT UNSIGNED NOT NULL DEFAULT 0")
		m.state(aMariaDB)
		m.expectQuery(sqlFloor, "1")
		m.exist(sqlExists, "k")
		m.again(aMariaDB)
		m.expectExec("COMMIT")
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the floor is missing", func(t *testing.T) { // it is made in manual mode, too
		m := mock(t, mysqllock.Config{})
		m.probe(aMySQL)
		m.state(aMySQL)
		m.expectQuery(sqlFloor)
		m.expectExec(sqlMakeFloor)
		m.exist(sqlExists, "k")
		m.again(aMySQL)
		m.ExpectCommit()
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the floor goes later", func(t *testing.T) { // no row can be made without it
		m := mock(t, mysqllock.Config{})
		m.setUp(aMySQL)
		m.ExpectQuery(sqlExists).WillReturnRows(sqlmock.NewRows([]string{"name", "token"}))
		m.state(aMySQL)
		m.expectQuery(sqlFloor)
		m.expectExec(sqlMakeFloor)
		m.expectExec(sqlInsert)
		m.expectQuery(sqlStripes)
		m.again(aMySQL)
		m.ExpectCommit()
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the procedure is somebody else's", func(t *testing.T) { // it is neither called nor removed
		m := auto(t)
		m.probe(aMySQL)
		m.state(aMySQL.with(func(a *answers) { a.procedure = "0" }))
		m.expectQuery(sqlFloor, "1")
		m.exist(sqlExists, "k")
		m.again(aMySQL)
		m.ExpectCommit()
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the procedure is somebody else's, manual", func(t *testing.T) { // it would not tell of leases
		m := mock(t, mysqllock.Config{})
		m.setUp(aMySQL.with(func(a *answers) { a.procedure = "0" }))
		m.exist(sqlExists, "k")
		m.again(aMySQL)
		m.ExpectCommit()
		m.want(m.begin().Commit(), nil)
	})
	t.Run("no right to make the procedure", func(t *testing.T) { // then without
		m := auto(t)
		m.probe(aMySQL)
		m.state(aMySQL)
		m.expectQuery(sqlFloor, "1")
		m.ExpectExec(sqlCreateProcedure).WillReturnError(number(1044))
		m.exist(sqlExists, "k")
		m.again(aMySQL)
		m.ExpectCommit()
		m.want(m.begin().Commit(), nil)
	})
	t.Run("MariaDB", func(t *testing.T) { // needs no procedure
		m := auto(t)
		m.probe(aMariaDB)
		m.noTable(aMariaDB)
		m.expectExec(sqlTable)
		m.state(aMariaDB)
		m.expectQuery(sqlFloor)
		m.expectExec(sqlMakeFloor)
		m.exist(sqlExists)
		m.expectExec(sqlInsert)
		m.expectQuery(sqlStripes)
		m.lock(sqlBlock, 1)
		m.expectExec("COMMIT")
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the table goes later", func(t *testing.T) {
		m := auto(t)
		m.setUp(aCalled)
		m.ExpectQuery(sqlExists).WillReturnError(number(1146))
		m.noTable(aCalled)
		m.expectExec(sqlTable)
		m.state(aCalled)
		m.expectQuery(sqlFloor)
		m.expectExec(sqlMakeFloor)
		m.exist(sqlExists)
		m.expectExec(sqlInsert)
		m.expectQuery(sqlStripes)
		m.lock(sqlCall, 1)
		m.expectExec("COMMIT")
		m.want(m.begin().Commit(), nil)
	})
}

// TestMockLockFails has statements of the driver's own that the server
// refuses.
func TestMockLockFails(t *testing.T) {
	for _, c := range []struct {
		name   string
		expect func(m *mocked)
		is     error
		says   []string
	}{
		{"may not read", func(m *mocked) {
			m.setUp(aMySQL)
			m.ExpectQuery(sqlExists).WillReturnError(number(1142))
		}, nil, []string{"1142", "needs SELECT, INSERT, UPDATE"}},
		{"may not insert", func(m *mocked) {
			m.setUp(aMySQL)
			m.exist(sqlExists)
			m.ExpectExec(sqlInsert).WillReturnError(number(1142))
		}, nil, []string{"1142", "needs SELECT, INSERT, UPDATE"}},
		{"may not lock", func(m *mocked) {
			m.setUp(aMySQL)
			m.exist(sqlExists, "k")
			m.ExpectBegin()
			m.ExpectQuery(sqlTry).WillReturnError(number(1142))
			m.ExpectRollback()
		}, nil, []string{"1142", "needs SELECT, INSERT, UPDATE"}},
		{"may not lock, with procedure", func(m *mocked) {
			m.setUp(aCalled)
			m.exist(sqlExists, "k")
			m.ExpectQuery(sqlCall).WillReturnError(number(1142))
			m.expectExec("ROLLBACK")
			m.ExpectBegin()
			m.ExpectQuery(sqlTry).WillReturnError(number(1142))
			m.ExpectRollback()
		}, nil, []string{"1142", "needs SELECT, INSERT, UPDATE"}},
		{"the table is gone", func(m *mocked) {
			m.setUp(aMySQL)
			m.ExpectQuery(sqlExists).WillReturnError(number(1146))
			m.noTable(aMySQL)
		}, nil, []string{"does not exist", sqlTable}},
		{"the server became read only", func(m *mocked) {
			m.setUp(aMySQL)
			m.exist(sqlExists)
			m.ExpectExec(sqlInsert).WillReturnError(number(1290))
		}, mysqllock.ErrUnsafe, []string{"1290", "takes no writes"}},
		{"the server became read only, and the row is there", func(m *mocked) {
			m.setUp(aMySQL)
			m.exist(sqlExists, "k")
			m.ExpectBegin()
			m.ExpectQuery(sqlTry).WillReturnError(number(1290))
			m.ExpectRollback()
		}, mysqllock.ErrUnsafe, []string{"1290", "takes no writes"}},
		{"a deadlock", func(m *mocked) {
			m.setUp(aMySQL)
			m.exist(sqlExists, "k")
			m.ExpectBegin()
			m.ExpectQuery(sqlTry).WillReturnError(number(1213))
			m.ExpectRollback()
		}, mysqllock.ErrDeadlock, []string{"1213"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mock(t, mysqllock.Config{})
			c.expect(m)
			_, err := m.db.ExecContext(m.ctx, sqlUpdate, 1, 1)
			if err == nil || c.is != nil && !errors.Is(err, c.is) {
				t.Fatalf("the error is %v, want %v", err, c.is)
			}
			for _, text := range c.says {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("the error does not say %q: %v", text, err)
				}
			}
		})
	}

	t.Run("the procedure is another's", func(t *testing.T) { // which says nothing of leases
		m := mock(t, mysqllock.Config{})
		m.setUp(aCalled)
		m.exist(sqlExists, "k")
		m.expectQuery(sqlCall, "7")
		m.expectExec("ROLLBACK")
		for range 2 {
			m.again(aMySQL)
			m.ExpectCommit()
		}
		m.want(m.begin().Commit(), nil)
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the procedure is gone", func(t *testing.T) { // then without, from now on
		m := mock(t, mysqllock.Config{})
		m.setUp(aCalled)
		m.exist(sqlExists, "k")
		m.ExpectQuery(sqlCall).WillReturnError(number(1305))
		m.expectExec("ROLLBACK")
		for range 2 {
			m.again(aMySQL)
			m.ExpectCommit()
		}
		m.want(m.begin().Commit(), nil)
		m.want(m.begin().Commit(), nil)
	})
}

// TestMockLate has a transaction that began without the hint.
func TestMockLate(t *testing.T) {
	begin := func(m *mocked, opts *sql.TxOptions) *sql.Tx {
		m.ExpectBegin()
		tx, err := m.db.BeginTx(context.Background(), opts)
		m.want(err, nil)
		return tx
	}
	t.Run("before it has read", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		tx := begin(m, nil)
		m.expectExec(sqlUpdate, 1, 1)
		m.setUp(aMySQL)
		m.stillOpen()
		m.exist(sqlExists, "k")
		m.lock(sqlTry, 1)
		m.expectExec(sqlUpdate, 3, 42)
		m.ExpectCommit()
		_, err := tx.Exec(sqlUpdate, 1, 1)
		m.want(err, nil)
		_, err = tx.ExecContext(m.ctx, sqlUpdate, 3, 42)
		m.want(err, nil)
		m.want(tx.Commit(), nil)
	})
	for _, c := range []struct {
		name   string
		opts   *sql.TxOptions
		server string // its isolation level
		hint   []lockctx.Option
		stale  bool
	}{
		{"after it has read", nil, "REPEATABLE-READ", nil, true},
		{"after it has read, serializable", &sql.TxOptions{Isolation: sql.LevelSerializable}, "READ-COMMITTED", nil, true},
		{"after it has read, read committed", nil, "READ-COMMITTED", nil, false},
		{"after it has read, read committed by choice", &sql.TxOptions{Isolation: sql.LevelReadCommitted}, "REPEATABLE-READ", nil, false},
		{"after it has read, knowing", nil, "REPEATABLE-READ", []lockctx.Option{lockctx.AllowStale()}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := aMySQL
			a.isolation = c.server
			m := mock(t, mysqllock.Config{})
			tx := begin(m, c.opts)
			m.ExpectQuery(sqlRead).WithArgs(42).WillReturnRows(column("3"))
			m.setUp(a)
			if !c.stale {
				m.stillOpen()
				m.exist(sqlExists, "k")
				m.lock(sqlTry, 1)
				m.expectExec(sqlUpdate, 3, 42)
			}
			m.ExpectRollback()
			var n int
			m.want(tx.QueryRow(sqlRead, 42).Scan(&n), nil)
			_, err := tx.ExecContext(lockctx.With(context.Background(), "k", c.hint...), sqlUpdate, 3, 42)
			if c.stale {
				m.want(err, mysqllock.ErrStaleSnapshot)
			} else {
				m.want(err, nil)
			}
			m.want(tx.Rollback(), nil)
		})
	}
	t.Run("refused", func(t *testing.T) { // one key that was not granted has locked nothing
		m := mock(t, mysqllock.Config{NoWait: true})
		tx := begin(m, nil)
		m.setUp(aMySQL)
		m.stillOpen()
		m.exist(sqlExists, "k")
		m.ExpectQuery(sqlTry).WillReturnError(number(3572))
		m.expectQuery(sqlHolder(0, dataK))
		m.expectExec(sqlUpdate, 3, 42)
		m.ExpectCommit()
		_, err := tx.ExecContext(m.ctx, sqlUpdate, 1, 1)
		m.want(err, mysqllock.ErrLocked)
		_, err = tx.Exec(sqlUpdate, 3, 42)
		m.want(err, nil)
		m.want(tx.Commit(), nil)
	})
	t.Run("somebody has a lease", func(t *testing.T) {
		m := mock(t, mysqllock.Config{NoWait: true})
		tx := begin(m, nil)
		m.expectExec(sqlUpdate, 1, 1)
		m.setUp(aMySQL)
		m.stillOpen()
		m.exist(sqlExists, "k")
		m.ExpectQuery(sqlTry).WillReturnRows(leasedAfter(0))
		m.seesLease(sqlLook, "k")
		m.ExpectRollback()
		_, err := tx.Exec(sqlUpdate, 1, 1)
		m.want(err, nil)
		_, err = tx.ExecContext(m.ctx, sqlUpdate, 2, 2)
		inTheWay(t, err, "k")
		_, err = tx.Exec(sqlUpdate, 3, 42)
		m.want(err, mysqllock.ErrLost)
		m.want(tx.Commit(), mysqllock.ErrLost)
	})
	t.Run("the transaction has ended", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		tx := begin(m, nil)
		m.setUp(aMySQL)
		m.expectExec("SAVEPOINT mysqllock_late")
		m.ExpectExec("RELEASE SAVEPOINT mysqllock_late").WillReturnError(number(1305))
		m.ExpectRollback()
		_, err := tx.ExecContext(m.ctx, sqlUpdate, 1, 1)
		m.want(err, mysqllock.ErrLost)
		_, err = tx.Exec(sqlUpdate, 3, 42)
		m.want(err, mysqllock.ErrLost)
		m.want(tx.Commit(), mysqllock.ErrLost)
	})
	t.Run("deadlock", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		tx := begin(m, nil)
		m.setUp(aMySQL)
		m.stillOpen()
		m.exist(sqlExists, "k")
		m.ExpectQuery(sqlTry).WillReturnError(number(1213))
		m.ExpectRollback()
		_, err := tx.ExecContext(m.ctx, sqlUpdate, 1, 1)
		m.want(err, mysqllock.ErrDeadlock)
		_, err = tx.Exec(sqlUpdate, 3, 42)
		m.want(err, mysqllock.ErrLost)
		m.want(tx.Commit(), mysqllock.ErrLost)
	})
}

// TestMockNothingIsSent has calls that fail before anything reaches the
// server, or anything but BEGIN.
func TestMockNothingIsSent(t *testing.T) {
	forever := lockctx.With(context.Background(), "k")
	exec := func(ctx context.Context, db *sql.DB, text string) error {
		_, err := db.ExecContext(ctx, text)
		return err
	}
	for _, c := range []struct {
		name string
		call func(db *sql.DB) error
		is   error
		says string
	}{
		{"no end", func(db *sql.DB) error { return db.QueryRowContext(forever, sqlRead, 1).Err() }, mysqllock.ErrNoEnd, "context.WithCancel"},
		{"COMMIT", func(db *sql.DB) error { return exec(forever, db, "COMMIT") }, mysqllock.ErrUnsafe, "sql.Tx"},
		{"DDL", func(db *sql.DB) error { return exec(forever, db, "ALTER TABLE p ADD c INT") }, mysqllock.ErrUnsafe, "lockctx.Without"},
		{"several", func(db *sql.DB) error { return exec(forever, db, "UPDATE p SET a = 1; COMMIT") }, mysqllock.ErrUnsafe, "sql.Tx"},
		{"read only", func(db *sql.DB) error {
			_, err := db.BeginTx(forever, &sql.TxOptions{ReadOnly: true})
			return err
		}, mysqllock.ErrUnsafe, "READ ONLY"},
		{"no key", func(db *sql.DB) error { return exec(lockctx.WithKeys(forever, nil), db, "UPDATE p") }, nil, "bad hint: no key"},
		{"empty key", func(db *sql.DB) error {
			_, err := db.BeginTx(lockctx.With(context.Background(), ""), nil)
			return err
		}, nil, "bad hint: empty key"},
		{"long key", func(db *sql.DB) error {
			_, err := db.PrepareContext(lockctx.With(context.Background(), strings.Repeat("x", 256)), sqlRead)
			return err
		}, nil, "bad hint: key of 256 bytes"},
		{"negative wait", func(db *sql.DB) error {
			return db.QueryRowContext(lockctx.With(context.Background(), "k", lockctx.Wait(-1)), sqlRead, 1).Err()
		}, nil, "bad hint: negative wait"},
		{"Do with a bad key", func(db *sql.DB) error {
			return mysqllock.Do(context.Background(), db, "", func(context.Context) error { return nil })
		}, nil, "bad hint: empty key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.call(mock(t, mysqllock.Config{}).db)
			var e *mysqllock.Error
			if !errors.As(err, &e) || c.is != nil && !errors.Is(err, c.is) {
				t.Fatalf("the error is %v, want %v", err, c.is)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("the error does not say %q: %v", c.says, err)
			}
		})
	}
	t.Run("a transaction begun by text", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		m.db.SetMaxOpenConns(1)
		m.expectExec("/* by hand */ START TRANSACTION")
		m.want(exec(context.Background(), m.db, "/* by hand */ START TRANSACTION"), nil)
		m.expectQuery("SELECT @@autocommit", "1") // a deadlock could have ended it
		m.expectExec("SAVEPOINT mysqllock_open")
		m.expectExec("RELEASE SAVEPOINT mysqllock_open")
		m.want(exec(forever, m.db, "UPDATE p SET a = 1"), mysqllock.ErrUnsafe)
		m.expectExec("ROLLBACK")
		m.want(exec(context.Background(), m.db, "ROLLBACK"), nil)
		m.locked(aMySQL)
		m.expectExec("UPDATE p SET a = 1")
		m.ExpectCommit()
		m.want(exec(forever, m.db, "UPDATE p SET a = 1"), nil)
	})
	t.Run("inside a transaction", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		m.locked(aMySQL)
		m.ExpectCommit()
		tx := m.begin()
		for _, text := range []string{"COMMIT", "CREATE TABLE q (id INT)", "SET autocommit = 1", "BEGIN"} {
			_, err := tx.Exec(text)
			m.want(err, mysqllock.ErrUnsafe)
			_, err = tx.ExecContext(lockctx.Without(m.ctx), text)
			m.want(err, mysqllock.ErrUnsafe)
		}
		m.want(tx.Commit(), nil)
	})
}

// TestMockCall has a procedure, which may end the transaction: a savepoint
// tells.
func TestMockCall(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.expectExec("SAVEPOINT mysqllock_call")
	m.expectExec("CALL sell(?)", 42)
	m.expectExec("RELEASE SAVEPOINT mysqllock_call")
	m.expectExec("SAVEPOINT mysqllock_call")
	m.expectExec("CALL sell(?)", 43)
	m.ExpectExec("RELEASE SAVEPOINT mysqllock_call").WillReturnError(number(1305))
	m.ExpectRollback()
	tx := m.begin()
	_, err := tx.Exec("CALL sell(?)", 42)
	m.want(err, nil)
	_, err = tx.Exec("CALL sell(?)", 43)
	m.want(err, nil) // not asked yet: see the next one
	m.want(tx.Commit(), mysqllock.ErrLost)
}

// TestMockCallIsAskedForLater has statements that ask for what a CALL has left: the savepoint
// would reset it.
func TestMockCallIsAskedForLater(t *testing.T) {
	m := mock(t, mysqllock.Config{})
	m.locked(aMySQL)
	m.expectExec("SAVEPOINT mysqllock_call")
	m.expectExec("CALL sell()")
	m.expectExec("SET @n = ROW_COUNT()")
	m.expectExec("RELEASE SAVEPOINT mysqllock_call")
	m.expectExec("UPDATE a SET b = 1")
	m.ExpectCommit()
	tx := m.begin()
	for _, text := range []string{"CALL sell()", "SET @n = ROW_COUNT()", "UPDATE a SET b = 1"} {
		_, err := tx.Exec(text)
		m.want(err, nil)
	}
	m.want(tx.Commit(), nil)
}

// TestMockIdleLimit has MariaDB's limit on idle transactions, which outlives
// the locked transaction and must not hit another.
func TestMockIdleLimit(t *testing.T) {
	m := mock(t, mysqllock.Config{TTL: 30 * time.Second})
	m.db.SetMaxOpenConns(1)
	m.locked(aMariaDB)
	m.expectExec("COMMIT")
	m.want(m.begin().Commit(), nil)
	m.expectExec("SET SESSION idle_transaction_timeout = 0")
	for range 2 {
		m.ExpectBegin()
		m.ExpectRollback()
	}
	for range 2 {
		tx, err := m.db.Begin()
		m.want(err, nil)
		m.want(tx.Rollback(), nil)
	}
}

// record is a database handle over a fake server whose connections can be told
// apart. The log shows them by what they are for: app, control or session,
// numbered by their order; what is said on those for leases is package lease's
// own affair.
type record struct {
	*fakeServer
	t    *testing.T
	k    driver.Connector
	db   *sql.DB
	role map[string]string
	// answers that differ from those of a server where all is well
	fail  map[string]error
	reply map[string]fakeReply
}

func newRecord(t *testing.T, cfg mysqllock.Config) *record {
	t.Helper()
	r := &record{fakeServer: newFake().mysqlAnswers(), t: t, role: make(map[string]string), fail: make(map[string]error), reply: make(map[string]fakeReply)}
	normal := r.answer
	r.answer = func(c *fakeConn, text string) (fakeReply, error) {
		r.mu.Lock()
		err := r.fail[fixed(text)]
		reply, has := r.reply[fixed(text)]
		r.mu.Unlock()
		if err != nil || has {
			return reply, err
		}
		return normal(c, text)
	}
	r.replying(sqlCleaning) // nobody cleans up
	cfg.Schema = "manual"
	var err error
	if r.k, err = mysqllock.Wrap(fakeConnector{r.fakeServer}, cfg); err != nil {
		t.Fatal(err)
	}
	r.db = sql.OpenDB(r.k)
	return r
}

var logLine = regexp.MustCompile(`^(\d+) (?:\S*(?:Query|Exec|Prepare)(?:Context)? )?(.*?)(?: \[\])?$`)

// lines returns what was sent since the last call, without what makes a
// connection ready.
func (r *record) lines() (lines []string) {
	count := make(map[string]int)
	for _, role := range r.role {
		count[strings.TrimRight(role, "0123456789")]++
	}
	for _, line := range r.sent() {
		part := logLine.FindStringSubmatch(line)
		id, text := part[1], fixed(part[2])
		switch text {
		case sqlControl, sqlSession, sqlLeasing:
			role := map[string]string{sqlControl: "control", sqlSession: "session", sqlLeasing: "lease"}[text]
			count[role]++
			r.role[id] = fmt.Sprint(role, count[role])
			continue
		case sqlIdentify, sqlProbe, sqlState, sqlStateMaria, sqlFloor:
			continue
		}
		if strings.HasPrefix(r.role[id], "lease") {
			continue
		}
		if r.role[id] == "" {
			count["app"]++
			r.role[id] = fmt.Sprint("app", count["app"])
		}
		lines = append(lines, r.role[id]+": "+text)
	}
	return lines
}

func (r *record) want(lines ...string) {
	r.t.Helper()
	if got := r.lines(); !slices.Equal(got, lines) {
		r.t.Errorf("the server got\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(lines, "\n\t"))
	}
}

func (r *record) failing(text string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail[text] = err
}

// replying answers text with one row; without values, with none.
func (r *record) replying(text string, values ...driver.Value) {
	reply := fakeReply{columns: make([]string, len(values))}
	if len(values) > 0 {
		reply.rows = [][]driver.Value{values}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reply[text] = reply
}

func (r *record) read(ctx context.Context, q queryer) error {
	rows, err := q.QueryContext(ctx, "SELECT stock FROM p")
	if err != nil {
		return err
	}
	return rows.Close()
}

func (r *record) write(ctx context.Context, q queryer) error {
	_, err := q.ExecContext(ctx, "UPDATE p SET stock = 1")
	return err
}

func (r *record) is(err, target error) {
	r.t.Helper()
	if !errors.Is(err, target) {
		r.t.Errorf("the error is %v, want %v", err, target)
	}
}

// recorded runs a test on a record, in a bubble in which time stands still
// while anything runs.
func recorded(t *testing.T, cfg mysqllock.Config, test func(ctx context.Context, r *record)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		r := newRecord(t, cfg)
		ctx, cancel := context.WithCancel(context.Background())
		test(ctx, r)
		cancel()
		synctest.Wait()
		if err := r.db.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestRecordReadThenWrite(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		for i := range 2 {
			hint := lockctx.With(ctx, "k")
			r.is(r.read(hint, r.db), nil)
			r.is(r.read(hint, r.db), nil)
			r.is(r.write(hint, r.db), nil)
			if i == 0 {
				r.want(
					"control1: "+sqlExists,
					"control1: "+sqlInsert, "control1: "+sqlStripes,
					"session1: "+sqlTry, // begins the transaction too: autocommit is off
					"session1: SELECT stock FROM p",
					"session1: SELECT stock FROM p",
					"session1: UPDATE p SET stock = 1",
					"session1: COMMIT",
				)
				continue
			}
			r.want( // on the same connections, and without what is known
				"session1: "+sqlTry,
				"session1: SELECT stock FROM p",
				"session1: SELECT stock FROM p",
				"session1: UPDATE p SET stock = 1",
				"session1: COMMIT",
			)
		}
		// What has no hint is where it was.
		r.is(r.write(ctx, r.db), nil)
		r.want("app1: UPDATE p SET stock = 1")
	})
}

func TestRecordTransactionOnTheSession(t *testing.T) {
	for _, commit := range []bool{true, false} {
		recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
			hint := lockctx.With(ctx, "k")
			r.is(r.read(hint, r.db), nil)
			tx, err := r.db.BeginTx(hint, nil)
			r.is(err, nil)
			r.is(r.write(hint, tx), nil)
			nested, err := r.db.BeginTx(hint, nil)
			r.is(err, nil)
			r.is(r.write(ctx, nested), nil) // a transaction's statements need no hint
			r.is(nested.Commit(), nil)
			r.is(r.write(hint, r.db), nil) // in the transaction
			end, text := tx.Commit, "COMMIT"
			if !commit {
				end, text = tx.Rollback, "ROLLBACK"
			}
			r.is(end(), nil)
			r.want(
				"control1: "+sqlExists,
				"control1: "+sqlInsert, "control1: "+sqlStripes,
				"session1: "+sqlTry,
				"session1: SELECT stock FROM p",
				"session1: UPDATE p SET stock = 1",
				"session1: SAVEPOINT mysqllock_1",
				"session1: UPDATE p SET stock = 1",
				"session1: RELEASE SAVEPOINT mysqllock_1",
				"session1: UPDATE p SET stock = 1",
				"session1: "+text,
			)
		})
	}
}

// TestRecordLeased has a key on which somebody has a lease: the session is free
// again, and nothing is open on it.
func TestRecordLeased(t *testing.T) {
	recorded(t, mysqllock.Config{NoWait: true}, func(ctx context.Context, r *record) {
		r.replying(sqlTry, lockedLease(7)...)
		r.replying(sqlLook, append([]driver.Value{"k"}, theLease...)...)
		_, err := mysqllock.Acquire(ctx, r.db, "k")
		inTheWay(t, err, "k")
		inTheWay(t, r.read(lockctx.With(ctx, "k"), r.db), "k")
		r.want(
			"control1: "+sqlExists,
			"control1: "+sqlInsert, "control1: "+sqlStripes,
			"session1: "+sqlTry,
			"session1: ROLLBACK",
			"control1: "+sqlLook,
			"session1: "+sqlTry,
			"session1: ROLLBACK",
			"control1: "+sqlLook,
		)
		if stats, err := mysqllock.Stats(r.db); err != nil || stats.InUse != 0 {
			t.Errorf("%+v, %v: a session is not free", stats, err)
		}
	})
}

// TestRecordJoinLeased has a second key that is known to have had a lease.
// Whether one is live is looked up on another connection, before the row is
// locked: the transaction could not give that back, and a plain read in it could
// open its snapshot.
func TestRecordJoinLeased(t *testing.T) {
	for _, session := range []bool{false, true} {
		recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
			r.replying(sqlExists1, "k1", int64(4))
			hint, where, id := lockctx.With(ctx, "k"), "app1: ", 1
			if session {
				where, id = "session1: ", 3
				r.is(r.read(hint, r.db), nil)
			}
			tx, err := r.db.BeginTx(hint, nil)
			r.is(err, nil)
			r.lines()

			both := lockctx.With(hint, "k1", lockctx.NoWait(), lockctx.AllowStale())
			r.replying(sqlLook1, append([]driver.Value{"k1"}, theLease...)...)
			inTheWay(t, r.write(both, tx), "k1")
			r.want("control1: "+sqlExists1, "control1: "+sqlLook1)
			r.is(r.write(hint, tx), nil)
			r.want(where + "UPDATE p SET stock = 1")

			// Where it cannot be looked up, the lock statement tells.
			holder := sqlHolder(id, "'0x73686F70, 0x6B31'")
			r.failing(sqlLook1, number(1205))
			r.failing(sqlTry1, number(3572))
			r.replying(holder)
			r.is(r.write(both, tx), mysqllock.ErrLocked)
			r.want("control1: "+sqlLook1, where+sqlTry1, "control1: "+holder, "control1: "+sqlCleaning)

			// It has ended.
			r.failing(sqlLook1, nil)
			r.failing(sqlTry1, nil)
			r.replying(sqlLook1)
			r.is(r.write(both, tx), nil)
			r.is(r.write(both, tx), nil)
			r.is(tx.Commit(), nil)
			end := "Commit"
			if session {
				end = "COMMIT"
			}
			r.want(
				"control1: "+sqlLook1,
				where+sqlTry1,
				where+"UPDATE p SET stock = 1",
				where+"UPDATE p SET stock = 1",
				where+end,
			)
		})
	}
}

func TestRecordContextEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		work func(hint context.Context, r *record) // after a read
		end  string
	}{
		{"after a read", func(context.Context, *record) {}, "COMMIT"},
		{"in a transaction", func(hint context.Context, r *record) {
			_, err := r.db.BeginTx(hint, nil)
			r.is(err, nil)
		}, "ROLLBACK"},
	} {
		t.Run(c.name, func(t *testing.T) {
			recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
				inner, end := context.WithCancel(ctx)
				hint := lockctx.With(inner, "k")
				r.is(r.read(hint, r.db), nil)
				c.work(hint, r)
				r.lines()
				end()
				synctest.Wait()
				r.want("session1: " + c.end)
				r.is(r.read(hint, r.db), context.Canceled)
				r.want()
			})
		})
	}
}

func TestRecordSecondKeyOnTheSession(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		hint := lockctx.With(ctx, "k")
		r.is(r.read(hint, r.db), nil)
		r.lines()
		// The snapshot is older than the second lock.
		r.is(r.read(lockctx.With(hint, "k1"), r.db), mysqllock.ErrStaleSnapshot)
		r.want()
		r.is(r.read(lockctx.With(hint, "k1", lockctx.AllowStale()), r.db), nil)
		r.is(r.write(lockctx.With(hint, "k1"), r.db), nil)
		r.want(
			"control1: "+sqlExists1,
			"control1: "+sqlInsert1, "control1: "+sqlStripes,
			"session1: "+sqlTry1,
			"session1: SELECT stock FROM p",
			"session1: UPDATE p SET stock = 1",
			"session1: COMMIT",
		)
	})
}

// TestRecordUnderAnotherUnit has a transaction that began without the hint and
// runs a statement under the lock of a session: it may commit only while the
// session holds it.
func TestRecordUnderAnotherUnit(t *testing.T) {
	for _, lost := range []bool{false, true} {
		recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
			hint := lockctx.With(ctx, "k")
			tx, err := r.db.BeginTx(ctx, nil)
			r.is(err, nil)
			r.is(r.read(hint, r.db), nil)
			r.lines()
			r.is(r.write(hint, tx), nil)
			if !lost {
				r.is(tx.Commit(), nil)
				r.want("app1: UPDATE p SET stock = 1", "session1: DO 0", "app1: Commit", "session1: COMMIT") // the unit of work ends with it
				return
			}
			r.failing("DO 0", mysql.ErrInvalidConn)
			r.is(tx.Commit(), mysqllock.ErrLost)
			synctest.Wait()
			if got := r.lines(); !slices.Contains(got, "app1: Rollback") || slices.Contains(got, "app1: Commit") {
				t.Errorf("the server got %q", got)
			}
		})
	}
}

func TestRecordDeadlockOnTheSession(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		hint := lockctx.With(ctx, "k")
		r.is(r.read(hint, r.db), nil)
		r.lines()
		r.failing("UPDATE p SET stock = 1", number(1213))
		r.is(r.write(hint, r.db), mysqllock.ErrDeadlock)
		r.want("session1: UPDATE p SET stock = 1", "session1: ROLLBACK")
		r.failing("UPDATE p SET stock = 1", nil)
		// What was decided on the read must not be written now.
		r.is(r.write(hint, r.db), mysqllock.ErrLost)
		_, err := r.db.BeginTx(hint, nil)
		r.is(err, mysqllock.ErrLost)
		r.want()
		// Another lock context is another matter.
		r.is(r.write(lockctx.With(ctx, "k"), r.db), nil)
	})
}

func TestRecordDo(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error {
			r.is(r.write(ctx, r.db), nil)
			tx, err := r.db.BeginTx(ctx, nil)
			r.is(err, nil)
			r.is(r.write(ctx, tx), nil)
			return tx.Commit()
		}), nil)
		r.want(
			"control1: "+sqlExists,
			"control1: "+sqlInsert, "control1: "+sqlStripes,
			"session1: "+sqlTry,
			"session1: UPDATE p SET stock = 1",
			"session1: SAVEPOINT mysqllock_1",
			"session1: UPDATE p SET stock = 1",
			"session1: RELEASE SAVEPOINT mysqllock_1",
			"session1: COMMIT",
		)
		r.is(mysqllock.Do(ctx, r.db, "k", func(context.Context) error { return errFake }), errFake)
		r.want("session1: "+sqlTry, "session1: ROLLBACK")

		h, err := mysqllock.Acquire(ctx, r.db, "k")
		r.is(err, nil)
		r.is(h.Release(), nil)
		r.is(h.Release(), nil)
		r.is(h.Rollback(), nil)
		r.want("session1: "+sqlTry, "session1: COMMIT")

		// A deadlock, and another try.
		tries := 0
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error {
			tries++
			if tries == 1 {
				r.failing("UPDATE p SET stock = 1", number(1213))
			} else {
				r.failing("UPDATE p SET stock = 1", nil)
			}
			return r.write(ctx, r.db)
		}, lockctx.Retry(1)), nil)
		r.want(
			"session1: "+sqlTry,
			"session1: UPDATE p SET stock = 1",
			"session1: ROLLBACK",
			"session1: "+sqlTry,
			"session1: UPDATE p SET stock = 1",
			"session1: COMMIT",
		)
	})
}

// TestRecordTaint has a statement that leaves something on the connection: the
// session ends with the unit of work.
func TestRecordTaint(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		r.is(mysqllock.Do(ctx, r.db, "k", func(ctx context.Context) error {
			_, err := r.db.ExecContext(ctx, "SET @a = 1")
			return err
		}), nil)
		r.lines()
		h, err := mysqllock.Acquire(ctx, r.db, "k")
		r.is(err, nil)
		r.want("session2: " + sqlTry)
		r.is(h.Release(), nil)
	})
}

// TestRecordWait has a key that someone else has: the caller queues in the
// server until its wait is over, and is killed there.
func TestRecordWait(t *testing.T) {
	const look = "SELECT ID FROM " + sqlConnections + " WHERE INFO LIKE CONCAT('%', 'HALF', 'HALF', '%') AND ID <> CONNECTION_ID()"
	const find = "SELECT ROUTINE_COMMENT = 'mysqllock' FROM information_schema.ROUTINES WHERE ROUTINE_TYPE = 'PROCEDURE' AND ROUTINE_SCHEMA = x'73686f70' AND ROUTINE_NAME = x'6d7973716c6c6f636b5f7761697432'"
	const begin = "app1: BeginTx {Isolation:0 ReadOnly:false}"
	for _, c := range []struct {
		name    string
		version string
		locked  uint16
		bound   string // of the wait on the server: a second more than the caller's own
		begin   []string
		wait    string
		end     []string
		holder  string
	}{
		{
			"MySQL", "8.4.0", 3572, "', 3)",
			[]string{begin, "app1: " + sqlTry, "app1: Rollback", "app1: SELECT /*+ MAX_EXECUTION_TIME(n) */ CONNECTION_ID() LIMIT 1", "control1: " + find, begin},
			"/* mysqllock MARK */ CALL `shop`.`mysqllock_wait2`(x'73686f70', '[[\"6b\", 0]]', 'MARK', 3)",
			[]string{"SET SESSION innodb_lock_wait_timeout = COALESCE(@mysqllock_limit, @@SESSION.innodb_lock_wait_timeout), @mysqllock_limit = NULL", "Rollback"},
			sqlHolder(1, dataK),
		},
		{
			"MariaDB", "10.11.9-MariaDB", 1205, "max_statement_time = 3.000",
			[]string{
				"app1: " + sqlBlock, "app1: ROLLBACK", "app1: SELECT /*+ MAX_EXECUTION_TIME(n) */ CONNECTION_ID() LIMIT 1",
				"app1: BEGIN NOT ATOMIC SET SESSION idle_transaction_timeout = 30; START TRANSACTION; END",
			},
			"SET STATEMENT max_statement_time = n FOR BEGIN NOT ATOMIC SET @mysqllock_owner = NULL; SET @mysqllock_token = NULL;" +
				" SELECT /* mysqllock MARK */ token, owner, versioned INTO @mysqllock_token, @mysqllock_owner, @mysqllock_versioned FROM `shop`.`mysqllock`" +
				" WHERE namespace = x'73686f70' AND name = x'6b' FOR UPDATE; IF @mysqllock_owner IS NOT NULL THEN ROLLBACK; END IF;" +
				" IF @mysqllock_token IS NOT NULL THEN SELECT CONNECTION_ID(), @mysqllock_token, @mysqllock_owner, @mysqllock_versioned, @@read_only, @@innodb_read_only; END IF; END",
			[]string{"ROLLBACK"},
			sqlBlocker,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			recorded(t, mysqllock.Config{Wait: 2 * time.Second}, func(ctx context.Context, r *record) {
				killed := make(chan struct{})
				normal := r.answer
				r.answer = func(conn *fakeConn, text string) (fakeReply, error) {
					switch {
					case text == sqlProbe:
						reply, err := normal(conn, text)
						reply.rows[0][0] = c.version
						return reply, err
					case text == find:
						return fakeReply{columns: []string{"1"}, rows: [][]driver.Value{{int64(1)}}}, nil
					case strings.Contains(text, "/* mysqllock "):
						if !strings.Contains(text, c.bound) {
							t.Errorf("the wait has another bound than %s: %s", c.bound, text)
						}
						<-killed
						return fakeReply{}, number(1317)
					case fixed(text) == look:
						return fakeReply{columns: []string{"ID"}, rows: [][]driver.Value{{int64(1)}}}, nil
					case strings.HasPrefix(text, "KILL QUERY"):
						close(killed)
					case fixed(text) == c.holder:
						return fakeReply{columns: make([]string, 5), rows: [][]driver.Value{{int64(77), "app", "web-2", "shopd", int64(3000)}}}, nil
					}
					return normal(conn, text)
				}
				r.failing(sqlTry, number(c.locked))
				r.failing(sqlBlock, number(c.locked))
				start := time.Now()
				_, err := r.db.BeginTx(lockctx.With(ctx, "k"), nil)
				r.is(err, mysqllock.ErrTimeout)
				r.is(err, mysqllock.ErrLocked)
				if waited := time.Since(start); waited != 2*time.Second {
					t.Errorf("it took %v", waited)
				}
				var e *mysqllock.Error
				if !errors.As(err, &e) || e.Holder == nil || e.Holder.ConnectionID != 77 || e.Waited < 2*time.Second {
					t.Errorf("the error is %v", err)
				}
				end := make([]string, len(c.end))
				for i, text := range c.end {
					end[i] = "app1: " + text
				}
				r.want(slices.Concat(
					[]string{"control1: " + sqlExists, "control1: " + sqlInsert, "control1: " + sqlStripes},
					c.begin,
					[]string{"app1: " + c.wait, "control1: " + c.holder, "control1: " + look, "control1: KILL QUERY 1"}, end,
				)...)
			})
		})
	}
}

// TestRecordWaitLeased waits for a lease without a lock on its row, until it has
// been given back after a second, or until the wait is over.
func TestRecordWaitLeased(t *testing.T) {
	const begin = "app1: BeginTx {Isolation:0 ReadOnly:false}"
	waits := func(t *testing.T, givenBack bool, test func(ctx context.Context, r *record)) {
		recorded(t, mysqllock.Config{Wait: 2 * time.Second}, func(ctx context.Context, r *record) {
			normal := r.answer
			r.answer = func(c *fakeConn, text string) (fakeReply, error) {
				switch {
				case strings.Contains(text, "GET_LOCK(") && !givenBack: // the server's own bound ends it
					bound, err := time.ParseDuration(aBound.FindStringSubmatch(text)[1] + "ms")
					r.is(err, nil)
					time.Sleep(bound)
					return fakeReply{}, number(3024)
				case strings.Contains(text, "GET_LOCK("):
					time.Sleep(time.Second)
					r.replying(sqlTry, int64(1), int64(5), nil, int64(0), "0", "0")
					r.replying(sqlLook1)
					return fakeReply{columns: []string{"c"}, rows: [][]driver.Value{{int64(1)}}}, nil
				case strings.HasSuffix(text, "LOCK IN SHARE MODE"):
					return fakeReply{columns: []string{"c"}}, nil
				}
				return normal(c, text)
			}
			test(ctx, r)
		})
	}
	took := func(t *testing.T, start time.Time, want time.Duration) {
		t.Helper()
		if waited := time.Since(start); waited != want {
			t.Errorf("it took %v, want %v", waited, want)
		}
	}
	repeated := func(t *testing.T, lines []string, attempt ...string) { // a few times
		t.Helper()
		if n := len(lines) / len(attempt); n < 2 || n > 4 || !slices.Equal(lines, slices.Repeat(attempt, n)) {
			t.Errorf("the server got\n\t%s", strings.Join(lines, "\n\t"))
		}
	}
	locked := lockedLease(1)
	t.Run("given back", func(t *testing.T) {
		waits(t, true, func(ctx context.Context, r *record) {
			r.replying(sqlTry, locked...)
			r.replying(sqlLook, append([]driver.Value{"k"}, theLease...)...)
			start := time.Now()
			r.is(r.write(lockctx.With(ctx, "k"), r.db), nil)
			took(t, start, time.Second)
			r.want(
				"control1: "+sqlExists, "control1: "+sqlInsert, "control1: "+sqlStripes,
				begin, "app1: "+sqlTry, "app1: Rollback", "control1: "+sqlLook,
				begin, "app1: "+sqlTry, "app1: UPDATE p SET stock = 1", "app1: Commit",
			)
		})
	})
	t.Run("not given back", func(t *testing.T) {
		waits(t, false, func(ctx context.Context, r *record) {
			r.replying(sqlTry, locked...)
			r.replying(sqlLook, append([]driver.Value{"k"}, theLease...)...)
			start := time.Now()
			err := r.write(lockctx.With(ctx, "k"), r.db)
			took(t, start, 2*time.Second)
			r.is(err, mysqllock.ErrTimeout)
			var e *mysqllock.Error
			if !errors.As(err, &e) || e.Holder == nil || e.Holder.Program != "web-2:7:shopd" || e.Waited != 2*time.Second {
				t.Errorf("the error is %v", err)
			}
			repeated(t, r.lines()[3:], begin, "app1: "+sqlTry, "app1: Rollback", "control1: "+sqlLook)
		})
	})
	t.Run("joins", func(t *testing.T) {
		waits(t, true, func(ctx context.Context, r *record) {
			r.replying(sqlExists1, "k1", int64(4))
			r.replying(sqlLook1, append([]driver.Value{"k1"}, theLease...)...)
			hint := lockctx.With(ctx, "k")
			tx, err := r.db.BeginTx(hint, nil)
			r.is(err, nil)
			r.lines()
			start := time.Now()
			r.is(r.write(lockctx.With(hint, "k1"), tx), nil)
			took(t, start, time.Second)
			r.is(tx.Commit(), nil)
			r.want(
				"control1: "+sqlExists1,
				"control1: "+sqlLook1,
				"control1: "+sqlLook1,
				"app1: "+sqlTry1,
				"app1: UPDATE p SET stock = 1",
				"app1: Commit",
			)
		})
	})
	t.Run("joins, not given back", func(t *testing.T) { // the transaction goes on
		waits(t, false, func(ctx context.Context, r *record) {
			r.replying(sqlExists1, "k1", int64(4))
			r.replying(sqlLook1, append([]driver.Value{"k1"}, theLease...)...)
			hint := lockctx.With(ctx, "k")
			tx, err := r.db.BeginTx(hint, nil)
			r.is(err, nil)
			r.lines()
			start := time.Now()
			r.is(r.write(lockctx.With(hint, "k1"), tx), mysqllock.ErrTimeout)
			took(t, start, 2*time.Second)
			repeated(t, r.lines()[1:], "control1: "+sqlLook1)
			r.is(r.write(hint, tx), nil)
			r.is(tx.Commit(), nil)
			r.want("app1: UPDATE p SET stock = 1", "app1: Commit")
		})
	})
}

// TestRecordBadConn: only where nothing is held may database/sql try again.
func TestRecordBadConn(t *testing.T) {
	once := func(r *record, bad string) {
		normal := r.answer
		r.answer = func(c *fakeConn, text string) (fakeReply, error) {
			if fixed(text) == bad && r.first(text) {
				return fakeReply{}, driver.ErrBadConn
			}
			return normal(c, text)
		}
	}
	const begin = "BeginTx {Isolation:0 ReadOnly:false}"
	t.Run("before the lock is held", func(t *testing.T) {
		recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
			once(r, sqlTry)
			r.is(r.write(lockctx.With(ctx, "k"), r.db), nil)
			r.want(
				"control1: "+sqlExists, "control1: "+sqlInsert, "control1: "+sqlStripes,
				"app1: "+begin, "app1: "+sqlTry, "app1: Rollback",
				"app2: "+begin, "app2: "+sqlTry, "app2: UPDATE p SET stock = 1", "app2: Commit",
			)
		})
	})
	t.Run("while it is held", func(t *testing.T) {
		recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
			once(r, "UPDATE p SET stock = 1")
			err := r.write(lockctx.With(ctx, "k"), r.db)
			r.is(err, mysqllock.ErrLost)
			if errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%v makes database/sql try again", err)
			}
			synctest.Wait()
			got := r.lines()
			want := []string{
				"control1: " + sqlExists, "control1: " + sqlInsert, "control1: " + sqlStripes,
				"app1: " + begin, "app1: " + sqlTry, "app1: UPDATE p SET stock = 1",
			}
			if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
				t.Fatalf("the server got %q, want %q", got, want)
			}
			// What may still run there is ended.
			rest := strings.Join(got[len(want):], "\n\t")
			if !strings.Contains(rest, "COMMAND <> 'Sleep'") || !strings.Contains(rest, "KILL CONNECTION") || strings.Contains(rest, "UPDATE") {
				t.Errorf("then the server got\n\t%s", rest)
			}
			// The connection is not used again.
			r.is(r.write(ctx, r.db), nil)
			r.want("app2: UPDATE p SET stock = 1")
		})
	})
	t.Run("while a session holds it", func(t *testing.T) {
		recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
			once(r, "UPDATE p SET stock = 1")
			hint := lockctx.With(ctx, "k")
			r.is(r.read(hint, r.db), nil)
			r.is(r.write(hint, r.db), mysqllock.ErrLost)
			r.is(r.write(hint, r.db), mysqllock.ErrLost)
			synctest.Wait()
			got := r.lines()
			want := []string{
				"control1: " + sqlExists, "control1: " + sqlInsert, "control1: " + sqlStripes,
				"session1: " + sqlTry, "session1: SELECT stock FROM p", "session1: UPDATE p SET stock = 1",
			}
			if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
				t.Fatalf("the server got\n\t%s", strings.Join(got, "\n\t"))
			}
			// The server may be busy with it still: it is killed there.
			if rest := strings.Join(got[len(want):], "\n\t"); !strings.Contains(rest, "KILL CONNECTION") || strings.Contains(rest, "UPDATE") {
				t.Errorf("then the server got\n\t%s", rest)
			}
		})
	})
	t.Run("at COMMIT", func(t *testing.T) {
		recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
			r.txErr = driver.ErrBadConn
			err := r.write(lockctx.With(ctx, "k"), r.db)
			r.is(err, mysqllock.ErrLost)
			var e *mysqllock.Error
			if !errors.As(err, &e) || e.Op != "commit" || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("the error is %v", err)
			}
			synctest.Wait()
			got := r.lines()
			want := []string{
				"control1: " + sqlExists, "control1: " + sqlInsert, "control1: " + sqlStripes,
				"app1: " + begin, "app1: " + sqlTry, "app1: UPDATE p SET stock = 1", "app1: Commit",
			}
			if len(got) < len(want) || !slices.Equal(got[:len(want)], want) {
				t.Fatalf("the server got\n\t%s", strings.Join(got, "\n\t"))
			}
			// What may still run there is ended.
			if rest := strings.Join(got[len(want):], "\n\t"); !strings.Contains(rest, "COMMAND <> 'Sleep'") || strings.Contains(rest, "UPDATE") {
				t.Errorf("then the server got\n\t%s", rest)
			}
		})
	})
}

// TestRecordMayNotLook has an account that the server does not tell who holds a
// lock: it is asked once.
func TestRecordMayNotLook(t *testing.T) {
	recorded(t, mysqllock.Config{NoWait: true}, func(ctx context.Context, r *record) {
		r.failing(sqlTry, number(3572))
		r.failing(sqlHolder(0, dataK), number(1142))
		for range 2 {
			r.is(r.write(lockctx.With(ctx, "k"), r.db), mysqllock.ErrLocked)
		}
		try := []string{"app1: BeginTx {Isolation:0 ReadOnly:false}", "app1: " + sqlTry, "app1: Rollback"}
		r.want(slices.Concat([]string{"control1: " + sqlExists, "control1: " + sqlInsert, "control1: " + sqlStripes}, try, []string{"control1: " + sqlHolder(0, dataK), "control1: " + sqlCleaning}, try, []string{"control1: " + sqlCleaning})...)
	})
}

// TestRecordIsolation has a level of its own, which the procedure cannot set.
func TestRecordIsolation(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		r.replying(sqlState, "InnoDB", theColumns, int64(1))
		tx, err := r.db.BeginTx(lockctx.With(ctx, "k"), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		r.is(err, nil)
		r.is(tx.Commit(), nil)
		tx, err = r.db.BeginTx(lockctx.With(ctx, "k"), nil)
		r.is(err, nil)
		r.is(tx.Commit(), nil)
		r.want(
			"control1: "+sqlExists,
			"control1: "+sqlInsert, "control1: "+sqlStripes,
			"app1: BeginTx {Isolation:2 ReadOnly:false}",
			"app1: "+sqlTry,
			"app1: Commit",
			"app1: "+sqlQuietCall("0"),
			"app1: COMMIT",
		)
	})
}

// TestRecordNestedOnOneConnection begins both transactions on one sql.Conn.
func TestRecordNestedOnOneConnection(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		hint := lockctx.With(ctx, "k")
		conn, err := r.db.Conn(ctx)
		r.is(err, nil)
		outer, err := conn.BeginTx(hint, nil)
		r.is(err, nil)
		inner, err := conn.BeginTx(hint, nil)
		r.is(err, nil)
		r.is(inner.Commit(), nil)
		r.lines()

		// The outer transaction is still the connection's.
		_, err = outer.Exec("COMMIT")
		r.is(err, mysqllock.ErrUnsafe)
		r.failing("UPDATE p SET stock = 1", number(1213))
		r.is(r.write(ctx, outer), mysqllock.ErrDeadlock)
		r.failing("UPDATE p SET stock = 1", nil)
		r.is(r.write(ctx, outer), mysqllock.ErrLost)
		r.want("app1: UPDATE p SET stock = 1", "app1: Rollback")
		_ = outer.Rollback()
		r.is(conn.Close(), nil)
	})
}

// TestRecordClosedInsideNested closes a connection with a transaction and a
// savepoint open on it: nobody may wait for its key any more.
func TestRecordClosedInsideNested(t *testing.T) {
	recorded(t, mysqllock.Config{}, func(ctx context.Context, r *record) {
		begin := func(c driver.Conn, hint context.Context) {
			_, err := c.(driver.ConnBeginTx).BeginTx(hint, driver.TxOptions{})
			r.is(err, nil)
		}
		hint := lockctx.With(ctx, "k")
		c, err := r.k.Connect(ctx)
		r.is(err, nil)
		begin(c, hint)
		begin(c, hint)
		r.lines()
		r.is(c.Close(), nil)
		if sent := r.lines(); len(sent) == 0 || sent[len(sent)-1] != "app1: Rollback" {
			t.Errorf("the server got %q, want Rollback at the end", sent)
		}

		c, err = r.k.Connect(ctx)
		r.is(err, nil)
		begin(c, lockctx.With(ctx, "k", lockctx.NoWait()))
		r.is(c.Close(), nil)
	})
}
