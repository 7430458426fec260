package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// What the driver says, in order, to servers that are set up wrongly or refuse its statements.
// sqlmock answers as such a server would, and has one connection for all who connect. What is
// sent where nothing fails is in the golden files of internal/matrix; what becomes of a
// transaction after a failure is tested on the server in memory, in internal/unit.

// Texts that the driver sends. The namespace is "shop", the key is k.
const (
	sqlControl = "SET @mysqllock = @@autocommit, SESSION autocommit = 1, timestamp = DEFAULT, sql_mode = '', sql_select_limit = 18446744073709551615," +
		" sql_big_selects = 1, sql_safe_updates = 0, group_concat_max_len = 1048576, character_set_connection = utf8mb4" +
		" /*!80000 , max_execution_time = 0, transaction_read_only = 0 */ /*M!100000 , max_statement_time = 0, tx_read_only = 0 */, innodb_lock_wait_timeout = 5, lock_wait_timeout = 2, wait_timeout = 30"

	sqlSession = "SET @mysqllock = @@autocommit, SESSION autocommit = 0, wait_timeout = 30" +
		" /*T! , transaction_isolation = 'READ-COMMITTED', tidb_txn_mode = 'pessimistic', tidb_idle_transaction_timeout = 30 */"

	sqlRecognise = "SELECT @@version, @@version_comment, VERSION(), DATABASE() LIMIT 1"

	// Of these only the beginning is compared.
	sqlIdentify = "SELECT /*+ MAX_EXECUTION_TIME(n) */ CONNECTION_ID(), CONCAT_WS("
	sqlProbe    = "SELECT VERSION(), "
	sqlState    = "SELECT ENGINE, "

	sqlTable = "CREATE TABLE IF NOT EXISTS `shop`.`mysqllock` (\n" +
		"  namespace VARBINARY(255) NOT NULL,\n" +
		"  name VARBINARY(255) NOT NULL,\n" +
		"  owner VARBINARY(255) NULL,\n" +
		"  token BIGINT UNSIGNED NOT NULL DEFAULT 0,\n" +
		"  expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00',\n" +
		"  versioned TINYINT UNSIGNED NOT NULL DEFAULT 0,\n" +
		"  granted_at DATETIME(6) NULL,\n" +
		"  ttl BIGINT UNSIGNED NULL,\n" +
		"  renewed_token BIGINT UNSIGNED NULL,\n" +
		"  released VARBINARY(2000) NULL,\n" +
		"  PRIMARY KEY (namespace, name)\n" +
		") ENGINE=InnoDB COMMENT='locks of mysqllock: one row a key'"
	sqlUpgrade = "ALTER TABLE `shop`.`mysqllock` ADD COLUMN owner VARBINARY(255) NULL," +
		" ADD COLUMN token BIGINT UNSIGNED NOT NULL DEFAULT 0, ADD COLUMN expires DATETIME(6) NOT NULL DEFAULT '1970-01-01 00:00:00'," +
		" ADD COLUMN versioned TINYINT UNSIGNED NOT NULL DEFAULT 0"
	sqlHighWater     = "SELECT 1 FROM `shop`.`mysqllock` WHERE namespace = x'' AND name = x''"
	sqlMakeHighWater = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name) VALUES (x'', x'')"
	sqlHighWaterAnew = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name, token)" +
		" VALUES (x'', x'', TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))"

	sqlExists = "SELECT name, token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN (x'6b', x'0073747269706573')" + sqlAndHighWater
	sqlInsert = "INSERT IGNORE INTO `shop`.`mysqllock` (namespace, name, token, expires)" +
		" SELECT x'73686f70', k, token, UTC_TIMESTAMP(6) FROM `shop`.`mysqllock` JOIN (SELECT x'6b' AS k) d" + sqlFromHighWater
	sqlAndHighWater  = " UNION ALL SELECT name, token FROM `shop`.`mysqllock` WHERE namespace = x'' AND name = x''"
	sqlFromHighWater = " WHERE namespace = x'' AND name = x'' LOCK IN SHARE MODE"
	sqlStripes       = "SELECT name, token FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name IN (x'0073747269706573')" + sqlAndHighWater

	sqlTry = "SELECT /*+ MAX_EXECUTION_TIME(n) */ CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only" +
		" FROM `shop`.`mysqllock` WHERE namespace = x'73686f70' AND name = x'6b' LIMIT 1 FOR UPDATE NOWAIT"

	sqlUpdate = "UPDATE p SET stock = ? WHERE id = ?"
)

// fixed leaves out what is not compared: the bounds, which depend on the time, and what comes
// after the beginning of some statements.
func fixed(text string) string {
	text = aBound.ReplaceAllString(text, "MAX_EXECUTION_TIME(n)")
	for _, beginning := range []string{sqlIdentify, sqlProbe, sqlState} {
		if strings.HasPrefix(text, beginning) {
			return beginning
		}
	}
	return text
}

var aBound = regexp.MustCompile(`MAX_EXECUTION_TIME\(\d+\)`)

// mocked is a database handle over sqlmock, with the hint that its tests use.
type mocked struct {
	sqlmock.Sqlmock
	t   *testing.T
	db  *sql.DB
	ctx context.Context // the hint "k"

	hasSession bool // the driver keeps a session open
}

type mockConnector struct {
	d   driver.Driver
	dsn string
}

func (mc mockConnector) Connect(context.Context) (driver.Conn, error) { return mc.d.Open(mc.dsn) }
func (mc mockConnector) Driver() driver.Driver                        { return mc.d }

func mock(t *testing.T, cfg mysqllock.Config) *mocked {
	t.Helper()
	base, m, err := sqlmock.NewWithDSN(t.Name(), sqlmock.QueryMatcherOption(sqlmock.QueryMatcherFunc(
		func(want, got string) error { return sqlmock.QueryMatcherEqual.Match(want, fixed(got)) })))
	dbtest.OK(t, err)
	if cfg.Schema == "" {
		cfg.Schema = "manual"
	}
	k, err := mysqllock.Wrap(mockConnector{base.Driver(), t.Name()}, cfg)
	dbtest.OK(t, err)
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
	version, database, topology string
	engine, columns             string // of the lock table, if there is one
}

// What the lock table has, and had in its first form.
const (
	theColumns = "namespace,name,owner,token,expires,versioned"
	fewColumns = "namespace,name"
)

var (
	aMySQL   = answers{"8.4.0", "shop", "OFF,", "InnoDB", theColumns}
	aMariaDB = answers{"10.11.9-MariaDB-log", "shop", "0,", "InnoDB", theColumns}
)

func (a answers) with(change func(a *answers)) answers {
	change(&a)
	return a
}

func (m *mocked) probe(a answers) {
	m.reprobe(a)
	m.opened(sqlControl)
}

// opened expects what sets up a connection of the driver's own.
func (m *mocked) opened(settings string) {
	m.ExpectExec(settings).WillReturnResult(sqlmock.NewResult(0, 0))
	m.ExpectQuery(sqlIdentify).WillReturnRows(sqlmock.NewRows([]string{"id", "node", "@mysqllock", "@@completion_type"}).AddRow(9, "db 3306", 1, "NO_CHAIN"))
}

func (m *mocked) reprobe(a answers) {
	m.ExpectQuery(sqlProbe).WillReturnRows(sqlmock.NewRows(strings.Split("1 2 3 4 5 6 7 8 9 10 11 12 13 14", " ")).
		AddRow(a.version, a.database, "0", "0", "REPEATABLE-READ", "0", a.topology, "0", "", "0", "0", "0", a.version, ""))
}

func (m *mocked) state(a answers) {
	rows := sqlmock.NewRows([]string{"ENGINE", "columns"})
	if a.engine != "" {
		rows.AddRow(a.engine, a.columns)
	}
	m.ExpectQuery(sqlState).WillReturnRows(rows)
}

// noTable is state where there is none.
func (m *mocked) noTable(a answers) { m.state(a.with(func(a *answers) { a.engine = "" })) }

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
func (m *mocked) exist(keys ...string) {
	rows := sqlmock.NewRows([]string{"name", "token"})
	for _, key := range keys {
		rows.AddRow(key, 0)
	}
	m.ExpectQuery(sqlExists).WillReturnRows(rows.AddRow("", 0)) // the high-water mark
}

// begun expects a transaction on a session.
func (m *mocked) begun() {
	if !m.hasSession {
		m.opened(sqlSession)
		m.hasSession = true
	}
	m.ExpectBegin()
}

// granted expects a lock statement that is granted.
func (m *mocked) granted() {
	m.ExpectQuery(sqlTry).WillReturnRows(sqlmock.NewRows([]string{"id", "token", "owner", "versioned", "read_only", "innodb_read_only"}).
		AddRow(7, 0, nil, 0, "0", "0"))
}

func (m *mocked) expectQuery(text string, values ...string) {
	m.ExpectQuery(text).WillReturnRows(column(values...))
}

func (m *mocked) expectExec(text string, args ...driver.Value) {
	m.ExpectExec(text).WithArgs(args...).WillReturnResult(sqlmock.NewResult(0, 1))
}

func (m *mocked) begin() *sql.Tx {
	m.t.Helper()
	tx, err := m.db.BeginTx(m.ctx, nil)
	dbtest.OK(m.t, err)
	return tx
}

func (m *mocked) want(err error, target error) {
	m.t.Helper()
	if !errors.Is(err, target) {
		m.t.Errorf("the error is %v, want %v", err, target)
	}
}

func number(n uint16) error { return &mysql.MySQLError{Number: n, Message: fmt.Sprint("error ", n)} }

// Statements by the words of play.
var (
	mockExecs = map[string]string{
		"+table": sqlTable, "+columns": sqlUpgrade, "+highWater": sqlMakeHighWater, "+highWaterAnew": sqlHighWaterAnew, "+row": sqlInsert,
	}
	mockQueries = map[string]string{"state": sqlState, "highWater": sqlHighWater, "rows": sqlExists, "stripes": sqlStripes, "try": sqlTry}
)

// play expects that, of a server that describes itself as a, in this order. highWater and rows are there,
// and are not with a question mark; +table, +columns, +highWater and +row make what their names say; BEGIN is on
// a session, which is opened if there is none; lock is BEGIN and a lock statement that is granted. A statement
// with !1142 fails with that error.
func (m *mocked) play(a answers, steps string) {
	m.t.Helper()
	for _, step := range strings.Fields(steps) {
		word, code, fails := strings.Cut(step, "!")
		if fails {
			n, err := strconv.ParseUint(code, 10, 16)
			dbtest.OK(m.t, err)
			if text := mockExecs[word]; text != "" {
				m.ExpectExec(text).WillReturnError(number(uint16(n)))
			} else {
				m.ExpectQuery(mockQueries[word]).WillReturnError(number(uint16(n)))
			}
		}
		if word == "+columns" {
			a.columns = theColumns
		}
		switch {
		case fails:
		case word == "version":
			m.reprobe(a)
		case word == "probe":
			m.probe(a)
		case word == "state":
			m.state(a)
		case word == "state?":
			m.noTable(a)
		case word == "highWater?":
			m.expectQuery(sqlHighWater)
		case word == "highWater":
			m.expectQuery(sqlHighWater, "1")
		case word == "rows?":
			m.exist()
		case word == "rows":
			m.exist("k")
		case word == "stripes":
			m.expectQuery(sqlStripes)
		case word == "lock":
			m.begun()
			m.granted()
		case word == "COMMIT":
			m.ExpectCommit()
		case word == "BEGIN":
			m.begun()
		case word == "ROLLBACK":
			m.ExpectRollback()
		default:
			m.expectExec(mockExecs[word])
		}
	}
}

// refused has a write refused, with an error that says so.
func (m *mocked) refused(is error, says []string) {
	m.t.Helper()
	_, err := m.db.ExecContext(m.ctx, sqlUpdate, 1, 1)
	var e *mysqllock.Error
	if !errors.As(err, &e) || e.Key != "k" || e.Op != "lock" || is != nil && !errors.Is(err, is) {
		m.t.Fatalf("the error is %#v, want %v", err, is)
	}
	dbtest.Says(m.t, err, says...)
}

// TestMockNothingRunsWhereTheSetUpFails: on these servers there can be no lock. The next hint asks again.
func TestMockNothingRunsWhereTheSetUpFails(t *testing.T) {
	old := aMySQL.with(func(a *answers) { a.columns = fewColumns })
	isam := aMySQL.with(func(a *answers) { a.engine = "MyISAM" })
	byHand := []string{sqlTable + ";\n" + sqlMakeHighWater}
	for _, c := range []struct {
		name, schema string
		server       answers
		steps        string
		is           error
		says         []string
	}{
		{"old MySQL", "", aMySQL.with(func(a *answers) { a.version = "5.7.44" }), "version", nil, []string{"5.7.44", "too old", "MySQL 8.0"}},
		{"old MariaDB", "", aMariaDB.with(func(a *answers) { a.version = "5.5.5-10.2.44-MariaDB" }), "version", nil, []string{"10.2.44", "too old", "MariaDB 10.3"}},
		{"neither", "", answers{}, "", nil, []string{"MySQL 8.0 or MariaDB 10.3 is needed"}},
		{"MyISAM", "", isam, "probe state", mysqllock.ErrUnsafe, []string{"MyISAM", "ENGINE=InnoDB"}},
		{"MyISAM of the older form", "auto", isam.with(func(a *answers) { a.columns = fewColumns }), "probe state", mysqllock.ErrUnsafe, []string{"MyISAM", "ENGINE=InnoDB"}},
		{"half an answer", "", aMySQL, "probe", nil, []string{"reading the definition of the lock table `shop`.`mysqllock`"}},
		{"no table", "", aMySQL, "probe state?", nil, append([]string{"does not exist"}, byHand...)},
		{"no database", "", aMySQL.with(func(a *answers) { a.database = "" }), "probe", nil, []string{"no database", "lockTable"}},
		{"may not make the table", "auto", aMySQL, "probe state? +table!1142", nil, append([]string{"1142"}, byHand...)},
		{"read only", "auto", aMySQL, "probe state? +table!1290", nil, append([]string{"1290"}, byHand...)},
		{"the older form", "", old, "probe state", nil, []string{"older form", sqlUpgrade + ";\n" + sqlMakeHighWater}},
		{"the older form, MariaDB", "", aMariaDB.with(func(a *answers) { a.columns = fewColumns }), "probe state", nil, []string{"older form", sqlUpgrade + ";\n" + sqlMakeHighWater}},
		{
			"one column is missing", "", aMySQL.with(func(a *answers) { a.columns = "namespace,name,token,expires,versioned" }), "probe state", nil,
			[]string{"older form", "ALTER TABLE `shop`.`mysqllock` ADD COLUMN owner VARBINARY(255) NULL;\n" + sqlMakeHighWater},
		},
		{"may not alter the table", "auto", old, "probe state +columns!1142", nil, []string{"1142", sqlUpgrade + ";\n" + sqlMakeHighWater}},
		{"may not alter the table, read only", "auto", old, "probe state +columns!1290", nil, []string{"1290", sqlUpgrade + ";\n" + sqlMakeHighWater}},
		{"somebody else alters the table for long", "auto", old, "probe state +columns!1205", mysqllock.ErrNoAnswer, []string{"1205"}},
		{"a statement is killed", "", aMySQL, "probe state!1317", mysqllock.ErrNoAnswer, []string{"1317", "KILL"}},
		{"a statement is killed, later", "auto", old, "probe state +columns!1317", mysqllock.ErrNoAnswer, []string{"1317", "KILL"}},
		{"may not see the high-water mark", "", aMySQL, "probe state highWater!1142", nil, []string{"1142"}},
		{"may not make the high-water mark", "", aMySQL, "probe state highWater? +highWater!1142", nil, []string{"1142", sqlMakeHighWater}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mock(t, mysqllock.Config{Schema: c.schema})
			m.play(c.server, c.steps)
			switch c.name {
			case "neither":
				m.expectQuery(sqlProbe, "5.6.1")
				m.ExpectQuery(sqlRecognise).WillReturnRows(sqlmock.NewRows([]string{"1", "2", "3", "4"}).AddRow("5.6.1", "Source distribution", "5.6.1", "shop"))
			case "half an answer":
				m.expectQuery(sqlState, "InnoDB")
			}
			m.refused(c.is, c.says)

			// Without a hint nothing of it matters.
			m.expectExec(sqlUpdate, 1, 1)
			_, err := m.db.Exec(sqlUpdate, 1, 1)
			m.want(err, nil)

			// Someone has put it right.
			m.play(aMySQL, "probe state highWater rows lock COMMIT")
			m.want(m.begin().Commit(), nil)
		})
	}
}

// TestMockRowLocksAreRefusedWhereSeveralServersWrite, before anything of theirs is sent. What
// the server is is asked once.
func TestMockRowLocksAreRefusedWhereSeveralServersWrite(t *testing.T) {
	percona := aMySQL.with(func(a *answers) { a.topology = "ON," })
	group := aMySQL.with(func(a *answers) { a.topology = "OFF,aaaa-bbbb,OFF" })
	for name, a := range map[string]answers{"Galera": percona, "Group Replication with several primaries": group} {
		t.Run(name, func(t *testing.T) {
			m := mock(t, mysqllock.Config{})
			m.play(a, "probe state highWater")
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
		t.Run(name+", allowed", func(t *testing.T) {
			m := mock(t, mysqllock.Config{Unsafe: "allow"})
			m.play(a, "probe state highWater rows lock COMMIT")
			m.want(m.begin().Commit(), nil)
		})
	}
	t.Run("one primary", func(t *testing.T) {
		m := mock(t, mysqllock.Config{})
		m.play(aMySQL.with(func(a *answers) { a.topology = "OFF,aaaa-bbbb,ON" }), "probe state highWater rows lock COMMIT")
		m.want(m.begin().Commit(), nil)
	})
}

// TestMockWhatIsMissingOfTheSchemaIsMadeOnce and is used then; what is somebody else's is left alone.
func TestMockWhatIsMissingOfTheSchemaIsMadeOnce(t *testing.T) {
	old := aMySQL.with(func(a *answers) { a.columns = fewColumns })
	for _, c := range []struct {
		name, schema string
		server       answers
		steps        string
	}{
		{"everything is missing", "auto", aMySQL, "probe state? +table state highWater? +highWater rows? +row stripes lock COMMIT"},
		{"everything is missing, MariaDB", "auto", aMariaDB, "probe state? +table state highWater? +highWater rows? +row stripes lock COMMIT"},
		{"the table is of the older form", "auto", old, "probe state +columns state highWater? +highWater rows lock COMMIT"},
		{"another was quicker with all of it", "auto", old, "probe state +columns!1060 state highWater rows lock COMMIT"},
		{"the high-water mark is missing", "manual", aMySQL, "probe state highWater? +highWater rows lock COMMIT"}, // it is made in manual mode, too
		{"the table goes later", "auto", aMySQL, "probe state highWater rows!1146 state? +table state highWater? +highWaterAnew rows? +row stripes lock COMMIT"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mock(t, mysqllock.Config{Schema: c.schema})
			m.play(c.server, c.steps)
			m.want(m.begin().Commit(), nil)
		})
	}
	t.Run("one column is missing", func(t *testing.T) {
		m := mock(t, mysqllock.Config{Schema: "auto"})
		m.play(aMariaDB.with(func(a *answers) { a.columns = "namespace,name,owner,expires,versioned,comment" }), "probe state")
		m.expectExec("ALTER TABLE `shop`.`mysqllock` ADD COLUMN token BIGINT UNSIGNED NOT NULL DEFAULT 0")
		m.play(aMariaDB, "state highWater rows lock COMMIT")
		m.want(m.begin().Commit(), nil)
	})
	t.Run("the high-water mark goes later", func(t *testing.T) { // no row can be made without it
		m := mock(t, mysqllock.Config{})
		m.play(aMySQL, "probe state highWater")
		m.ExpectQuery(sqlExists).WillReturnRows(sqlmock.NewRows([]string{"name", "token"}))
		m.play(aMySQL, "state highWater? +highWaterAnew +row stripes lock COMMIT")
		m.want(m.begin().Commit(), nil)
	})
}

// TestMockALockStatementThatIsRefusedIsTold, each of the driver's own, and why.
func TestMockALockStatementThatIsRefusedIsTold(t *testing.T) {
	rights := []string{"1142", "needs SELECT, INSERT, UPDATE"}
	for _, c := range []struct {
		name  string
		steps string
		is    error
		says  []string
	}{
		{"may not read", "rows!1142", nil, rights},
		{"may not insert", "rows? +row!1142", nil, rights},
		{"may not lock", "rows BEGIN try!1142 ROLLBACK", nil, rights},
		{"the table is gone", "rows!1146 state?", nil, []string{"does not exist", sqlTable}},
		{"the server became read only", "rows? +row!1290", mysqllock.ErrUnsafe, []string{"1290", "takes no writes"}},
		{"the server became read only, and the row is there", "rows BEGIN try!1290 ROLLBACK", mysqllock.ErrUnsafe, []string{"1290", "takes no writes"}},
		{"a deadlock", "rows BEGIN try!1213 ROLLBACK", mysqllock.ErrDeadlock, []string{"1213"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := mock(t, mysqllock.Config{})
			m.play(aMySQL, "probe state highWater "+c.steps)
			m.refused(c.is, c.says)
		})
	}
}
