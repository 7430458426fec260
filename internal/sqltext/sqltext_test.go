package sqltext

import (
	"strings"
	"testing"
)

// look is one row of a table: a text, and its Info in the words of describe.
type look struct{ query, want string }

func describe(i Info) string {
	s := i.Kind.String()
	for _, f := range []struct {
		set  bool
		name string
	}{{i.Snapshot, "snapshot"}, {i.Taints, "taints"}, {i.Functions, "functions"}, {i.Calls, "calls"}} {
		if f.set {
			s += " " + f.name
		}
	}
	return s
}

func check(t *testing.T, rows []look) {
	t.Helper()
	for _, row := range rows {
		if got := describe(Look(row.query)); got != row.want {
			t.Errorf("%q\n got %s\nwant %s", row.query, got, row.want)
		}
	}
}

// Rows marked with a star were surprising; all but the obvious were tried on
// MySQL 9.7.4 and MariaDB 10.11.19.

var queries = []look{
	{"SELECT 1", "Read"},
	{"SELECT @@version, @x, a.b", "Read"},
	{"select * from t where id = ?", "Read snapshot"},
	{"SELECT NOW()", "Read snapshot"},
	{"SELECT (1)", "Read snapshot"},
	{"(SELECT 1)", "Read snapshot"},
	{"((SELECT a FROM t))", "Read snapshot"},
	{"(SELECT 1) UNION (SELECT a FROM t)", "Read snapshot"},
	{"TABLE t", "Read snapshot"},
	{"TABLE t FOR UPDATE", "Read"},
	{"VALUES ROW(1,2)", "Read snapshot"},
	{"VALUES (1,2)", "Read snapshot"},
	{"VALUES ROW((SELECT MAX(a) FROM t),2)", "Read snapshot"},
	{"VALUES ROW(f(),2)", "Write snapshot functions"},
	{"SELECT a FROM t INTO OUTFILE '/x'", "Read snapshot"},
	{"SELECT a INTO DUMPFILE '/x' FROM t", "Read snapshot"},
	{"SELECT a FROM t INTO @a, @b", "Read snapshot taints"},
	{"SELECT 1 INTO @a", "Read taints"},
	{"SELECT @a := 1", "Read taints"},
	{"SELECT @a:=@a+1 FROM t", "Read snapshot taints"},
	{"SELECT GET_LOCK('x', 1)", "Read snapshot taints"},
	{"SELECT get_lock /* */ ('x', 1)", "Read snapshot taints"},
	{"SELECT `get_lock`('x', 1)", "Write snapshot taints functions"}, // *
	{"SELECT \"get_lock\"('x', 1)", "Write snapshot taints functions"},
	{"SELECT RELEASE_LOCK('x')", "Read snapshot taints"},
	{"SELECT RELEASE_ALL_LOCKS()", "Read snapshot taints"},
	{"SELECT service_get_write_locks('a','b',1)", "Write snapshot taints functions"},
	{"SELECT IS_FREE_LOCK('x')", "Read snapshot"},
	{"SELECT get_lock FROM t", "Read snapshot"},
	{"SELECT NEXT VALUE FOR s", "Write snapshot functions"},
	{"SELECT NEXTVAL(s)", "Write snapshot functions"},
	{"SELECT SETVAL(s, 5)", "Write snapshot functions"},
	{"SELECT PREVIOUS VALUE FOR s", "Read"},
	{"SHOW TABLES", "Read snapshot"},
	{"SHOW CREATE TABLE t", "Read snapshot"},
	{"SHOW WARNINGS", "Read"},
	{"SHOW GLOBAL VARIABLES LIKE 'x'", "Read"},
	{"SHOW SESSION STATUS", "Read"},
	{"SHOW VARIABLES WHERE f()", "Write snapshot functions"},
	{"DESC t", "Read snapshot"},
	{"HELP 'x'", "Read snapshot"},
	{"CHECKSUM TABLE t", "Read snapshot"}, // *
	{"EXPLAIN SELECT * FROM t", "Read snapshot"},
	{"EXPLAIN UPDATE t SET a=1", "Read snapshot"},
	{"EXPLAIN COMMIT", "Read snapshot"}, // * a table's name
	{"EXPLAIN FORMAT=JSON INTO @x SELECT 1", "Read snapshot taints"},
	{"EXPLAIN FORMAT; COMMIT", "Commits snapshot"},
	{"EXPLAIN ANALYZE SELECT * FROM t", "Read snapshot"},
	{"EXPLAIN ANALYZE SELECT * FROM t LOCK IN SHARE MODE", "Read snapshot"}, // *
	{"EXPLAIN ANALYZE FORMAT=TREE UPDATE t JOIN u SET a=1", "Write snapshot"},
	{"EXPLAIN ANALYZE FOR SCHEMA x DELETE FROM t", "Write snapshot"},
	{"DESC ANALYZE WITH x AS (SELECT 1) UPDATE t SET a=1", "Write snapshot"},
	{"ANALYZE UPDATE t SET a=1", "Write"},
	{"ANALYZE FORMAT=JSON SELECT * FROM t", "Read snapshot"},
	{"ANALYZE (SELECT 1)", "Read snapshot"},
	{"ANALYZE TABLE t", "Commits"},
	{"ANALYZE LOCAL TABLES t", "Commits"},
}

// One table read without a lock makes the snapshot.
var lockingReads = []look{
	{"SELECT * FROM t FOR UPDATE", "Read"},
	{"SELECT * FROM t FOR\nupdate NOWAIT", "Read"},
	{"SELECT * FROM t FOR SHARE SKIP LOCKED", "Read"},
	{"SELECT * FROM t LOCK IN SHARE MODE", "Read"},
	{"SELECT COUNT(*) FROM t WHERE a IN (1,2) FOR UPDATE", "Read"},
	{"(SELECT a FROM t FOR UPDATE) UNION ALL (SELECT a FROM u FOR UPDATE)", "Read snapshot"},
	{"(SELECT a FROM t FOR UPDATE) UNION ALL (SELECT a FROM u)", "Read snapshot"},
	{"SELECT a FROM t UNION SELECT a FROM u FOR UPDATE", "Read snapshot"},
	{"SELECT 1 UNION SELECT a FROM u FOR UPDATE", "Read snapshot"},
	{"SELECT * FROM t, u FOR UPDATE OF t", "Read snapshot"}, // *
	{"SELECT * FROM t, u FOR UPDATE OF t FOR SHARE OF u", "Read snapshot"},
	{"SELECT * FROM t WHERE a IN (SELECT a FROM u) FOR UPDATE", "Read snapshot"}, // *
	{"SELECT * FROM t WHERE a IN (SELECT a FROM u FOR SHARE) FOR UPDATE", "Read snapshot"},
	{"SELECT * FROM t WHERE a IN (TABLE u) FOR UPDATE", "Read snapshot"},
	{"SELECT * FROM (SELECT * FROM t FOR UPDATE) d", "Read snapshot"},
	{"SELECT * FROM (SELECT * FROM t) d FOR UPDATE", "Read snapshot"}, // *
	{"WITH x AS (SELECT * FROM t) SELECT * FROM x FOR UPDATE", "Read snapshot"},
	{"WITH x AS (SELECT 1) SELECT * FROM t FOR UPDATE", "Read snapshot"},
	{"SELECT a FROM t FOR UPDATE INTO @a", "Read taints"},
	{"SELECT 1 FOR UPDATE", "Read"},
	{"SELECT f() FOR UPDATE", "Write snapshot functions"}, // *
	{"(SELECT COUNT(*) FROM t FOR UPDATE) UNION (SELECT 1)", "Read snapshot"},
	{"SELECT * FROM t WHERE a = (SELECT 1) AND b = EXTRACT(YEAR FROM c) FOR UPDATE", "Read snapshot"},
	{"SELECT 1) FROM t", "Read"}, // rejected
	{"SELECT t.update FROM t", "Read snapshot"},
	{"SELECT t.for, t.select FROM t FOR UPDATE", "Read snapshot"},
	{"SELECT * FROM t USE INDEX FOR JOIN (i)", "Read snapshot"},
	{"SELECT * FROM t FOR SYSTEM_TIME AS OF NOW()", "Read snapshot"},
	{"SELECT 1e3FROM t", "Read snapshot"}, // * a number, then FROM
	{"SELECT 1.0FROM t", "Read snapshot"},
	{"SELECT .5FROM t", "Read snapshot"},
	{"SELECT 1.5e-3FROM t", "Read snapshot"},
	{"SELECT 1FROM", "Read"}, // * a name
	{"SELECT 0x1FROM", "Read"},
	{strings.Repeat("(", 70) + "SELECT a FROM t FOR UPDATE" + strings.Repeat(")", 70), "Read snapshot"},
}

var withs = []look{
	{"WITH x AS (SELECT 1) SELECT 1", "Read snapshot"},
	{"WITH x (a, b) AS (SELECT 1, 2), y AS (SELECT 3) SELECT * FROM x", "Read snapshot"},
	{"WITH RECURSIVE x AS (SELECT 1 a UNION ALL SELECT a+1 FROM x) CYCLE a RESTRICT SELECT 1", "Read snapshot"},
	{"WITH x(a) AS (SELECT 1) (SELECT 1)", "Read snapshot"},
	{"WITH x AS (SELECT MAX(a) m FROM t) SELECT 1", "Read snapshot"},
	{"(WITH x AS (SELECT 1) SELECT 1)", "Read snapshot"},
	{"WITH x AS (SELECT 1) VALUES ROW(1)", "Read snapshot"},
	{"WITH x AS (SELECT a FROM t) UPDATE t SET a=1", "Write"},
	{"WITH x AS (SELECT 1), y AS (SELECT (2)) DELETE FROM t", "Write"},
	{"WITH x AS (SELECT 1)", "Write snapshot"},
	{"WITH", "Write"},
	{strings.Repeat("WITH x AS (SELECT 1) ", 20), "Write snapshot"},
}

var writes = []look{
	{"INSERT INTO t VALUES (1, NOW())", "Write"},
	{"INSERT INTO t SELECT * FROM u WHERE a IN (SELECT a FROM v)", "Write"}, // *
	{"INSERT INTO t SELECT COUNT(*) FROM information_schema.tables", "Write snapshot"},
	{"INSERT INTO t SELECT COUNT(*) FROM `mysql`.user", "Write snapshot"}, // *
	{"INSERT INTO t VALUES (1) RETURNING a", "Write"},
	{"INSERT INTO t VALUES (@a := 1)", "Write taints"},
	{"INSERT INTO t VALUES (GET_LOCK('x', 1))", "Write taints"},
	{"REPLACE INTO t SELECT 1", "Write"},
	{"UPDATE t SET a = (SELECT MAX(a) FROM u)", "Write"}, // *
	{"DELETE FROM t WHERE a = 1", "Write"},
	{"LOAD DATA LOCAL INFILE 'x' INTO TABLE t", "Write"},
	{"LOAD DATA INFILE 'x' INTO TABLE t (a, @b) SET c = @b", "Write taints"},
	{"LOAD XML INFILE 'x' INTO TABLE t", "Write"},
	{"LOAD DATA INFILE 'x' INTO TABLE t IGNORE 1 LINES (a, b) SET c = NOW()", "Write"},
	{"LOAD DATA INFILE 'x' INTO TABLE t (a) SET c = f()", "Write snapshot"},
	{"CALL p()", "Write snapshot taints calls"},
	{"DO 1", "Write"},
	{"DO f()", "Write snapshot"},
	{"DO RELEASE_LOCK('x')", "Write snapshot taints"},
	{"HANDLER t OPEN", "Write snapshot taints"},
	{"KILL QUERY 5", "Write"},
	{"SIGNAL SQLSTATE '45000'", "Write"},
	{"GET DIAGNOSTICS @n = NUMBER", "Write taints"},
	{"PURGE BINARY LOGS TO 'x'", "Write"}, // *
	{"SAVEPOINT x", "Write"},
	{"RELEASE SAVEPOINT x", "Write"},
	{"ROLLBACK TO x", "Write"},
	{"rollback work to savepoint x", "Write"},
	{"USE x", "Write taints"},
	{"PREPARE s FROM 'COMMIT'", "Write taints"},
	{"DEALLOCATE PREPARE s", "Write taints"},
	{"DROP PREPARE s", "Write taints"},
	{"CREATE TEMPORARY TABLE t (a INT)", "Write snapshot taints"},
	{"CREATE OR REPLACE TEMPORARY TABLE t AS SELECT * FROM u", "Write snapshot taints"},
	{"DROP TEMPORARY TABLE t", "Write taints"},
	{"FROBNICATE t", "Write"},
	{"FROBNICATE f()", "Write snapshot"},
	{"?", "Write"},
	{"", "Write"},
	{" \n-- x", "Write"},
	{";", "Write"},
	{"()", "Write snapshot"},
}

var sets = []look{
	{"SET @x = 1", "Write taints"},
	{"SET @autocommit = 1", "Write taints"},
	{"SET @x = @@autocommit", "Write taints"},
	{"SET @x = (SELECT 1)", "Write snapshot taints"},
	{"SET NAMES utf8mb4", "Write taints"},
	{"SET ROLE NONE", "Write taints"},
	{"SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "Write"},
	{"SET SESSION TRANSACTION READ ONLY", "Write taints"},
	{"SET autocommit=1", "Commits taints"},
	{"SET autocommit = ON", "Commits taints"},
	{"SET AUTOCOMMIT = 0", "Commits taints"},
	{"SET autocommit := OFF", "Commits taints"},
	{"SET autocommit = DEFAULT", "Commits taints"},
	{"SET autocommit = 1-1", "Commits taints"},
	{"SET autocommit = ?", "Commits taints"},
	{"SET SESSION autocommit = 1", "Commits taints"},
	{"SET @@autocommit = 1", "Commits taints"},
	{"SET @@session.autocommit=0", "Commits taints"},
	{"SET @@local.`autocommit` = 1, @x = 2", "Commits taints"}, // *
	{`SET "autocommit" = 1`, "Commits taints"},                 // * with ANSI_QUOTES
	{"SET a = 1, autocommit = 0, b = 2", "Commits taints"},
	{"SET GLOBAL autocommit = 1", "Write"},
	{"SET PASSWORD = 'x'", "Commits taints"},
	{"SET DEFAULT ROLE NONE", "Commits taints"},
	{"SET STATEMENT max_statement_time=1 FOR SELECT a FROM t", "Read snapshot"},
	{"SET STATEMENT a=1, b=2 FOR SELECT a FROM t FOR UPDATE", "Read"},
	{"SET STATEMENT a=1 FOR SET STATEMENT b=1 FOR COMMIT", "Commits"},
	{"SET STATEMENT a=1 FOR (SELECT 1)", "Read snapshot"},
	{"SET STATEMENT a=1; COMMIT", "Commits"},
}

func TestLookSeesWhatStatementsDo(t *testing.T) {
	for name, rows := range map[string][]look{
		"queries": queries, "locking reads": lockingReads, "with": withs, "writes": writes, "set": sets,
		"commits": commits, "functions": calling, "several": several, "comments": comments, "quotes": quotes,
	} {
		t.Run(name, func(t *testing.T) { check(t, rows) })
	}
}

// TestAPlainUpdateOrDeleteIsKnownAtAGlance: one in which nothing can mean more.
func TestAPlainUpdateOrDeleteIsKnownAtAGlance(t *testing.T) {
	for query, want := range map[string]bool{
		"UPDATE p SET stock = stock + 1 WHERE id = 1":                    true,
		"update `products` set `stock`=?,`updated_at`=?\nwhere `id` = ?": true,
		"DELETE FROM t WHERE a >= ? ORDER BY b LIMIT 10":                 true,
		"UPDATE t SET next_run = ?":                                      false,
		"UPDATE t SET a = NEXT VALUE FOR s":                              false,
		"UPDATE t SET a = f(1)":                                          false,
		"UPDATE t SET a = LAST_INSERT_ID (1)":                            false,
		"UPDATE t SET a = 'it\\'s'":                                      false,
		"UPDATE t SET a = @a := 1":                                       false,
		"UPDATE t SET a = 1 -- b":                                        false,
		"UPDATE t SET a = 1 # b":                                         false,
		"UPDATE /*!80000 f */ t SET a = 1":                               false,
		"UPDATE mysql.user SET a = 1":                                    false,
		"UPDATE t SET a = 1; COMMIT":                                     false,
		"INSERT INTO t SET a = 1":                                        false,
		"SELECT a FROM t":                                                false,
	} {
		if PlainWrite(query) != want {
			t.Errorf("%q: %v", query, !want)
		}
	}
	for _, rows := range [][]look{queries, lockingReads, withs, writes, sets, commits, calling, several, comments, quotes} {
		for _, row := range rows {
			if i := analyze(row.query); PlainWrite(row.query) && i != (Info{Changes: ChangesCounted}) {
				t.Errorf("%q: %+v", row.query, i)
			}
		}
	}
}
