package sqltext

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func (k Kind) String() string { return [...]string{"Write", "Read", "Commits"}[k] }

func (c Changes) String() string {
	return [...]string{"MayChange", "ChangesCounted", "ChangesNothing"}[c]
}

func (s State) String() string {
	var words []string
	for i, word := range []string{"idle", "open", "manual"} {
		if s&(1<<i) != 0 {
			words = append(words, word)
		}
	}
	return strings.Join(words, "|")
}

// TestATextMovesAConnectionFromStateToState: what a text that runs through does to a connection
// on which nothing is open, on which a transaction is, and whose autocommit is off.
func TestATextMovesAConnectionFromStateToState(t *testing.T) {
	const keeps = "idle, open, manual"
	for query, want := range map[string]string{
		"SELECT 1":                            keeps,
		"INSERT INTO t VALUES ('; COMMIT')":   keeps,
		"SAVEPOINT x":                         keeps,
		"ROLLBACK TO SAVEPOINT x":             keeps,
		"rollback work to x":                  keeps,
		"SET TRANSACTION READ ONLY":           keeps,
		"SET @autocommit = 0":                 keeps,
		"SET GLOBAL autocommit = 0":           keeps,
		"SET PERSIST a = 1, autocommit = 0":   keeps,
		"SET @@global.autocommit = 0":         keeps,
		"SET @@persist_only.`autocommit` = 0": keeps,
		"SELECT @@autocommit = 0":             keeps,
		"XA END 'x'":                          keeps,
		"XA RECOVER":                          keeps,
		"-- COMMIT":                           keeps,
		"BEGIN":                               "open, open, manual",
		" /* c */ begin work ;":               "open, open, manual",
		"START TRANSACTION":                   "open, open, manual",
		"START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY": "open, open, manual",
		"XA START 'x'":                       "open, open, manual",
		"XA BEGIN 'x'":                       "open, open, manual",
		"COMMIT AND CHAIN":                   "open, open, manual",
		"ROLLBACK WORK AND CHAIN NO RELEASE": "open, open, manual",
		"BEGIN; INSERT INTO t VALUES (1)":    "open, open, manual",
		"COMMIT; BEGIN":                      "open, open, manual",
		"COMMIT":                             "idle, idle, manual",
		"/* c */ COMMIT":                     "idle, idle, manual",
		"-- c\nCOMMIT":                       "idle, idle, manual",
		"# c\n commit and no chain release":  "idle, idle, manual",
		"ROLLBACK":                           "idle, idle, manual",
		"XA COMMIT 'x' ONE PHASE":            "idle, idle, manual",
		"XA ROLLBACK 'x'":                    "idle, idle, manual",
		"BEGIN; UPDATE t SET a = 1; COMMIT":  "idle, idle, manual",
		"START TRANSACTION; ROLLBACK;":       "idle, idle, manual",
		"XA START 'x'; XA END 'x'; XA COMMIT 'x' ONE PHASE": "idle, idle, manual",
		"XA PREPARE 'x'":                                          "idle, idle|open, manual",
		"CREATE TABLE t (a INT)":                                  "idle, idle|open, manual",
		"LOCK TABLES t WRITE":                                     "idle, idle|open, manual",
		"UNLOCK TABLES":                                           "idle, idle|open, manual",
		"SET PASSWORD = 'x'":                                      "idle, idle|open, manual",
		"BEGIN; ALTER TABLE t ADD b INT":                          "idle|open, idle|open, manual",
		"SET autocommit = 0":                                      "manual, manual, manual",
		"/* c */ SET autocommit=OFF":                              "manual, manual, manual",
		"SET @@session.autocommit = 0":                            "manual, manual, manual",
		"SET @@LOCAL . `autocommit` := FALSE":                     "manual, manual, manual",
		"SET @@autocommit = 'off'":                                "manual, manual, manual",
		"SET SESSION sql_mode = CONCAT('a', 'b'), autocommit = 0": "manual, manual, manual",
		"SET @x = (SELECT 1, 2), autocommit = 0":                  "manual, manual, manual",
		"SET NAMES utf8mb4, autocommit = 0":                       "manual, manual, manual",
		"SET GLOBAL a = 1, SESSION autocommit = 0":                "manual, manual, manual",
		"SET GLOBAL a = 1, @@autocommit = 0":                      "manual, manual, manual",
		"SET autocommit = 0; INSERT INTO t VALUES (1); COMMIT":    "manual, manual, manual",
		"SET autocommit = 1":                                      "idle, open, idle",
		"SET autocommit = 0; SET autocommit = 1":                  "idle, idle, idle",
		"SET autocommit = 0, autocommit = ON":                     "idle, idle, idle",
		"BEGIN; SET autocommit = 1":                               "open, open, idle",
		"SET autocommit = DEFAULT":                                "idle|manual, open|manual, idle|manual",
		"SET autocommit = ?":                                      "idle|manual, open|manual, idle|manual",
		"SET autocommit = 1 - 1":                                  "idle|manual, open|manual, idle|manual",
		"CALL p()":                                                "idle|open|manual, idle|open|manual, idle|open|manual",
		"EXECUTE s":                                               "idle|open|manual, idle|open|manual, idle|open|manual",
		"BEGIN NOT ATOMIC SELECT 1; END":                          "idle|open|manual, idle|open|manual, idle|open|manual",
		"CALL p(); COMMIT":                                        "idle|manual, idle|manual, idle|manual",
		"/*!50000 BEGIN */":                                       "idle|open|manual, idle|open|manual, idle|open|manual",
		"/*!50000 COMMIT */":                                      "idle|open|manual, idle|open|manual, idle|open|manual",
		"BEGIN /*!50000 ; COMMIT */":                              "idle|open|manual, idle|open|manual, idle|open|manual",
		"/*!40101 SET autocommit = 0 */":                          "idle|open|manual, idle|open|manual, idle|open|manual",
		`SELECT 'it\'s'; BEGIN`:                                   "open, open, manual",
		`SELECT 'a\'; BEGIN -- '`:                                 "idle|open|manual, idle|open|manual, idle|open|manual", // with NO_BACKSLASH_ESCAPES
	} {
		e := Look(query).Effect
		got := Idle.After(e).String() + ", " + Open.After(e).String() + ", " + Manual.After(e).String()
		if got != want {
			t.Errorf("%q\n got %s\nwant %s", query, got, want)
		}
		for _, s := range []State{Idle, Open, Manual} {
			if in := s.Within(e); in&s == 0 || in&s.After(e) != s.After(e) {
				t.Errorf("%q ended by an error in %v: %v", query, s, in)
			}
		}
	}
	dbtest.Equal(t, "somewhere in a text of several statements: %v", Idle.Within(Look("BEGIN; SET autocommit = 0; COMMIT; SET autocommit = 1").Effect), Unknown)
}

// TestStatesOnServers: the servers agree, whatever runs before and however it ends.
func TestStatesOnServers(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, text := range []string{
			"CREATE PROCEDURE opens() BEGIN START TRANSACTION; INSERT INTO u VALUES (900, 1, 1); END",
			"CREATE PROCEDURE manual() SET autocommit = 0",
			"CREATE PROCEDURE ends() COMMIT",
		} {
			dbtest.Exec(t, s.db, text)
		}
		db := s.several()
		t.Cleanup(func() { db.Close() })
		before := map[State]string{Idle: "SELECT 1", Open: "BEGIN", Manual: "SET autocommit = 0"}
		for _, query := range []string{
			"BEGIN", "/* c */ BEGIN", "START TRANSACTION", "COMMIT", "/* c */ COMMIT", "-- c\nCOMMIT", "ROLLBACK",
			"COMMIT AND CHAIN", "ROLLBACK AND CHAIN", "COMMIT AND NO CHAIN", "START TRANSACTION WITH CONSISTENT SNAPSHOT",
			"BEGIN; INSERT INTO u VALUES (901, 1, 1); COMMIT", "BEGIN; INSERT INTO u VALUES (1, 1, 1); COMMIT", "COMMIT; BEGIN",
			"SET autocommit=0", "/* c */ SET autocommit=0", "SET @@session.autocommit=0", "SET SESSION autocommit = OFF",
			"SET @x = 1, autocommit = 0", "SET @@local . `autocommit` := FALSE", "SET autocommit = 'OFF'", "SET autocommit = 'off', @x = 1",
			"SET autocommit = 1", "SET @@autocommit = ON", "SET autocommit = DEFAULT", "SET autocommit = (0)", "SET autocommit = 1 - 1",
			"SET autocommit = 0; SET autocommit = 1", "SET autocommit = 0, autocommit = 1",
			"SET NAMES utf8mb4, autocommit = 0", "SET GLOBAL max_connections = 2000, @@autocommit = 0",
			"SET GLOBAL max_connections = 2000, SESSION autocommit = 0", "SET @@global.max_connections = 2000, autocommit = 0",
			"/*!40101 SET autocommit = 0 */", "/*!99999 BEGIN */ SELECT 1", "/*M!100000 BEGIN */", "SELECT 1 /*!50000 ; BEGIN */",
			"SELECT frob; BEGIN", "BEGIN; SELECT frob", "SAVEPOINT x", "ROLLBACK TO x", "SAVEPOINT x; ROLLBACK TO x",
			"XA START 'x'", "XA START 'x'; XA END 'x'; XA COMMIT 'x' ONE PHASE", "XA START 'x'; XA END 'x'; XA ROLLBACK 'x'",
			"XA START 'x'; INSERT INTO u VALUES (902, 1, 1); XA END 'x'; XA PREPARE 'x'; XA ROLLBACK 'x'",
			"CREATE TEMPORARY TABLE tmp (a INT)", "DROP TABLE IF EXISTS nothing", "CREATE TABLE t (a INT)", "CREATE OR REPLACE VIEW v AS SELECT 1",
			"ANALYZE TABLE t", "LOCK TABLES t READ", "UNLOCK TABLES", "SET TRANSACTION ISOLATION LEVEL READ COMMITTED",
			"CALL opens()", "CALL manual()", "CALL ends()", "PREPARE p FROM 'SET autocommit = 0'; EXECUTE p", "DO 1",
		} {
			for from, first := range before {
				conn, err := db.Conn(t.Context())
				dbtest.OK(t, err)
				dbtest.ExecIn(t, t.Context(), conn, first)
				e := Look(query).Effect
				want := from.After(e)
				if _, err := conn.ExecContext(t.Context(), query); err != nil {
					want = from.Within(e)
				}
				if got := stateOf(t, conn); got&want == 0 {
					t.Errorf("%v, %q: %v, want %v", from, query, got, want)
				}
				dbtest.OK(t, conn.Close())
			}
		}
	})
}

// several returns a handle that takes several statements in one text, and whose
// connections are used once.
func (s *scratch) several() *sql.DB {
	db := s.Open("mysql", "multiStatements=true")
	db.SetMaxIdleConns(0)
	return db
}

// stateOf asks the server: a savepoint outlives its statement in a transaction only.
func stateOf(t *testing.T, conn *sql.Conn) State {
	t.Helper()
	var auto bool
	if err := conn.QueryRowContext(t.Context(), "SELECT @@autocommit").Scan(&auto); err == nil && !auto {
		return Manual
	}
	_, _ = conn.ExecContext(t.Context(), "SAVEPOINT asked")
	_, err := conn.ExecContext(t.Context(), "RELEASE SAVEPOINT asked")
	var refusal *mysql.MySQLError
	if errors.As(err, &refusal) && refusal.Number == 1305 {
		return Idle
	}
	return Open
}

func TestTextsThatSetIsolationLevelsAreSeen(t *testing.T) {
	for query, want := range map[string]struct{ session, next bool }{
		"SELECT 1":                  {},
		"SET TRANSACTION READ ONLY": {next: true},
		"SET TRANSACTION ISOLATION LEVEL READ COMMITTED":                     {next: true},
		"/* c */ set transaction isolation level serializable":               {next: true},
		"SET SESSION TRANSACTION READ ONLY":                                  {session: true},
		"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED":             {session: true},
		"SET LOCAL TRANSACTION READ WRITE, ISOLATION LEVEL REPEATABLE READ":  {session: true},
		"SET GLOBAL TRANSACTION ISOLATION LEVEL READ COMMITTED":              {},
		"SET SESSION transaction_isolation = 'READ-COMMITTED'":               {session: true, next: true},
		"SET tx_isolation = 'read-uncommitted'":                              {session: true, next: true},
		"SET `tx_isolation` = \"REPEATABLE-READ\"":                           {session: true, next: true},
		"SET @@session.tx_isolation := 'SERIALIZABLE'":                       {session: true, next: true},
		"SET @x = 1, transaction_isolation = `READ-COMMITTED`":               {session: true, next: true},
		"SET @@transaction_isolation = 'READ-COMMITTED'":                     {session: true, next: true},
		"SET GLOBAL transaction_isolation = 'READ-COMMITTED'":                {},
		"SET GLOBAL a = 1, transaction_isolation = 'READ-COMMITTED'":         {},
		"SET @@global.tx_isolation = 'READ-COMMITTED'":                       {},
		"SET SESSION transaction_isolation = CONCAT('READ-', 'COMMITTED')":   {session: true, next: true},
		"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; SET @x = 1": {session: true},
		"/*!80000 SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED */": {session: true},
		"CALL p()":  {session: true},
		"EXECUTE s": {session: true},
	} {
		if i := Look(query); i.SetsLevel != want.session || i.SetsNextLevel != want.next {
			t.Errorf("%q: %v for the session, %v for the next transaction, want %v, %v", query, i.SetsLevel, i.SetsNextLevel, want.session, want.next)
		}
	}
}

// TestLevelsOnServers: the transaction after a text has another level than before only where Look says that it may.
func TestLevelsOnServers(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.several()
		t.Cleanup(func() { db.Close() })
		texts := []string{
			"SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "SET TRANSACTION READ ONLY, ISOLATION LEVEL READ COMMITTED",
			"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED", "SET GLOBAL max_connections = 2000",
		}
		variable := "transaction_isolation"
		if s.Flavour == tempserver.MariaDB {
			variable = "tx_isolation"
		}
		for _, form := range []string{
			"SET %s = 'READ-COMMITTED'", "SET SESSION %s = 1", "SET @@%s = 'read-committed'", "SET @@session.%s := \"READ-COMMITTED\"",
			"SET GLOBAL max_connections = 2000, @@%s = 'READ-COMMITTED'", "SET @y = 1, %s = 'REPEATABLE-READ'", "SET `%s` = `READ-COMMITTED`",
		} {
			texts = append(texts, fmt.Sprintf(form, variable))
		}
		for _, text := range texts {
			i := Look(text)
			for n, may := range []bool{i.SetsLevel || i.SetsNextLevel, i.SetsLevel} { // the first transaction after it, and the second
				conn, err := db.Conn(t.Context())
				dbtest.OK(t, err)
				dbtest.ExecIn(t, t.Context(), conn, text)
				if n > 0 {
					_, err = conn.ExecContext(t.Context(), "SELECT 1 FROM t LIMIT 1") // a transaction of its own
					dbtest.OK(t, err)
				}
				if readsCommitted(t, s.db, conn) && !may {
					t.Errorf("%q, %d: reads what was committed meanwhile", text, n)
				}
				dbtest.OK(t, conn.Close())
			}
		}
	})
}

// readsCommitted reports whether a new transaction has a snapshot for each statement.
func readsCommitted(t *testing.T, others *sql.DB, conn *sql.Conn) bool {
	t.Helper()
	var before, after int
	dbtest.ExecIn(t, t.Context(), conn, "BEGIN")
	dbtest.OK(t, conn.QueryRowContext(t.Context(), "SELECT b FROM t WHERE id = 1").Scan(&before))
	dbtest.ExecIn(t, context.Background(), others, "UPDATE t SET b = b + 1 WHERE id = 1")
	dbtest.OK(t, conn.QueryRowContext(t.Context(), "SELECT b FROM t WHERE id = 1").Scan(&after))
	dbtest.ExecIn(t, t.Context(), conn, "ROLLBACK")
	return before != after
}

func TestAGlanceSeesWhatLookSees(t *testing.T) {
	for _, query := range []string{
		"SELECT 1", "select * from t where id = ?", "INSERT INTO `t` (`a`) VALUES (?)", "UPDATE t SET locked_at = NOW()",
		"DELETE FROM t", "REPLACE INTO t VALUES (1)", "SELECT user_id, created_at, `group` FROM line_items",
	} {
		if !Quiet(query) {
			t.Errorf("%q is not known", query)
		}
	}
	for _, rows := range [][]look{queries, lockingReads, withs, writes, sets, commits, calling, several, comments, quotes} {
		for _, row := range rows {
			if i := Look(row.query); i != worst && Quiet(row.query) && (i.Taints || i.Effect != Effect{} || i.SetsLevel || i.SetsNextLevel || i.Kind == Commits) {
				t.Errorf("%q: %+v", row.query, i)
			}
		}
	}
}
