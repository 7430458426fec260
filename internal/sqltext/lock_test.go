package sqltext

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// A ¦ marks where the clause goes. All but the obvious was tried on MySQL 9.7.4
// and MariaDB 10.11.19.
var lockables = []string{
	"SELECT * FROM t¦",
	"select id from jobs where state = ? order by id limit ?¦",
	"SELECT `id` FROM `jobs` WHERE `state` = 'new' ORDER BY `id` LIMIT 10 OFFSET 5¦;",
	"SELECT a FROM t¦ ; ",
	"SELECT a FROM t¦;;",
	"SELECT a FROM t¦ -- x",
	"SELECT a FROM t¦--",
	"SELECT a FROM t¦# x",
	"SELECT a FROM t¦/* x */",
	"SELECT a FROM t¦ /* ; */ ; -- ; SELECT 1",
	"SELECT a FROM t¦\n-- x\n/* y */\n# z\n",
	"/* x */ SELECT a -- FROM\nFROM t¦",
	"SELECT a FROM t WHERE b = 'x'¦",
	"SELECT a FROM t WHERE b = 'it''s'¦ -- it's",
	`SELECT a FROM t WHERE b = "x"¦`,
	"SELECT a FROM t `for`¦",
	"SELECT a FROM t WHERE b = @x¦",
	"SELECT a FROM t WHERE b = @'x'¦",
	"SELECT a FROM t WHERE b = @@sql_mode¦",
	"SELECT a FROM t WHERE b AND .5 < b AND b < 1.5e3¦",
	"SELECT a FROM t WHERE b IN (?, ?)¦",
	"SELECT a FROM t WHERE b = {d '2026-01-01'}¦",
	"SELECT a FROM {oj t LEFT JOIN u ON t.id = u.id}¦",

	// Names that look like keywords.
	"SELECT t.for, t.from, t.into, t.union, t.select, t.lock FROM t¦",
	"SELECT t .from FROM t¦", // *
	"SELECT t.1from, t.1e5, t.5 FROM shop.5union t¦",
	"SELECT for.a FROM `for`¦",
	"SELECT a FROM shop.for¦",
	"SELECT a FROM shop.dual¦",
	"SELECT a FROM `dual`¦",
	"SELECT a AS `update`, b AS 'for' FROM t¦",
	"SELECT `lock`, `into` FROM t¦",
	"SELECT @@global.from, @a.from, @`into` FROM t¦",
	"SELECT min, max FROM t ORDER BY max¦",
	"SELECT a FROM t share¦",
	"SELECT a FROM skip locked¦",
	"SELECT a FROM t nowait¦",
	"SELECT größe FROM t¦",
	"SELECT mysql.a FROM t mysql¦",
	"SELECT a FROM mysql¦",

	// Keywords in other places.
	"SELECT EXTRACT(YEAR FROM a), SUBSTRING(a FROM 2 FOR 3), TRIM(LEADING 'x' FROM a) FROM t¦",
	"SELECT REPLACE(a, 'x', 'y'), INSERT(a, 1, 2, 'x'), IF(a, 1, 2) FROM t¦",
	"SELECT a FROM t USE INDEX FOR ORDER BY (i) WHERE b ORDER BY a¦",
	"SELECT a FROM t FORCE KEY FOR JOIN (i), u IGNORE INDEX FOR GROUP BY (i)¦",
	"SELECT a FROM t WHERE id IN (SELECT id FROM u WHERE MATCH (b) AGAINST ('x'))¦",
	"SELECT t.match, `match` FROM t¦",

	// What else there may be in a SELECT.
	"SELECT STRAIGHT_JOIN SQL_NO_CACHE SQL_CALC_FOUND_ROWS a FROM t¦",
	"SELECT /*+ MAX_EXECUTION_TIME(100) */ a FROM t¦",
	"SELECT @a := a FROM t¦",
	"SELECT t.a, u.b FROM t JOIN u ON u.id = t.id LEFT JOIN v USING (id)¦",
	"SELECT a FROM (t, u) JOIN (v NATURAL JOIN w)¦",
	"SELECT a FROM t AS x PARTITION (p0, p1) WHERE a¦",
	"SELECT COUNT(*), SUM(a), GROUP_CONCAT(b) FROM t¦",
	"SELECT a FROM t HAVING a > 5¦",
	"SELECT a, ROW_NUMBER() OVER (PARTITION BY a ORDER BY b) FROM t¦",
	"SELECT a, SUM(b) OVER w FROM t WINDOW w AS (ORDER BY a)¦",
	"SELECT a FROM t LIMIT 5 ROWS EXAMINED 1000¦",
	"SELECT a FROM t ORDER BY a OFFSET 1 ROW FETCH NEXT 2 ROWS WITH TIES¦",
	"SELECT a FROM t WHERE id IN (SELECT id FROM u WHERE b = (SELECT MAX(b) FROM u))¦",
	"SELECT a FROM t WHERE id IN (SELECT DISTINCT id FROM (SELECT id FROM u) d GROUP BY id UNION SELECT 1)¦",
	"SELECT a FROM t WHERE EXISTS (SELECT 1 FROM u FOR UPDATE)¦",
	"SELECT a FROM t WHERE id IN (TABLE u)¦",
	"SELECT (SELECT ABS(MAX(a)) + MIN(a) FROM u), a FROM t¦",
	"SELECT NEXTVAL(s), a FROM t¦",

	// Readings that agree.
	"SELECT /*!40001 SQL_NO_CACHE */ a FROM t¦",
	"SELECT a FROM t /*M!100600 USE INDEX (i) */ WHERE a = 1¦",
	"SELECT a FROM t¦ /*!80000 */",
	"SELECT a FROM t¦ /*!80000 ; */",
	`SELECT a FROM t WHERE b = 'it\'s'¦`, // rejected with NO_BACKSLASH_ESCAPES
	`SELECT a FROM t WHERE b = 'it\'s a union' AND c = 'it\'s'  LIMIT 1¦`,
	`SELECT a FROM t WHERE b = 'c:\'¦`, // rejected without NO_BACKSLASH_ESCAPES
	`SELECT a FROM t WHERE b = 'a\\b\nc'¦`,
	"SELECT a FROM t WHERE b = 'a\xe5\\'¦", // gbk, or NO_BACKSLASH_ESCAPES
	"SELECT a FROM t WHERE b = '\xff\x00'¦",
	"SELECT '$$; /* \xc2\xa0 [' FROM t¦",
}

func TestLock(t *testing.T) {
	for _, marked := range lockables {
		query := strings.Replace(marked, "¦", "", 1)
		want := strings.Replace(marked, "¦", " FOR UPDATE SKIP LOCKED", 1)
		if got, err := Lock(query, "FOR UPDATE SKIP LOCKED"); got != want || err != nil {
			t.Errorf("%q\n got %q, %v\nwant %q", query, got, err, want)
		}
	}
}

// bothShare is a clause for both servers.
const bothShare = "/*!80000 FOR SHARE NOWAIT */ /*M! LOCK IN SHARE MODE NOWAIT */"

func TestLockClauseWithComments(t *testing.T) {
	for _, marked := range []string{
		"SELECT a FROM t¦",
		"/* x */ SELECT /*+ BKA(t) */ a FROM t¦; -- x",
		`SELECT a FROM t WHERE b = 'it\'s'¦ -- x`,
		"SELECT a FROM t WHERE b = 'it''s' /* x */ LIMIT 1¦ /* y */",
		"SELECT a FROM t¦ /*!80000 */",
	} {
		query := strings.Replace(marked, "¦", "", 1)
		want := strings.Replace(marked, "¦", " "+bothShare, 1)
		if got, err := Lock(query, bothShare); got != want || err != nil {
			t.Errorf("%q\n got %q, %v\nwant %q", query, got, err, want)
		}
	}
	for _, query := range []string{
		`SELECT 'a\' /*' FROM t`,                        // would end the comment of NO_BACKSLASH_ESCAPES
		`SELECT a FROM t /*!80000 WHERE b IN ('*/') */`, // would be in another comment
		`SELECT a FROM t WHERE b IN (/*!80000 '*/' */)`,
	} {
		got, err := Lock(query, bothShare)
		if _, plain := Lock(query, "FOR SHARE"); got != "" || !errors.Is(err, errReadings) || plain != nil {
			t.Errorf("%q: %q, %v, and %v without comments", query, got, err, plain)
		}
	}
}

// What passes unchanged.
var unlocking = []string{
	"INSERT INTO t VALUES (1)",
	"insert into t select * from u",
	"INSERT INTO t WITH x AS (SELECT 1) SELECT * FROM x",
	"INSERT INTO t VALUES (1) RETURNING a",
	"REPLACE INTO t TABLE u",
	"UPDATE t SET a = (SELECT MAX(a) FROM u)",
	"DELETE FROM t WHERE a IN (SELECT a FROM u) LIMIT 5;",
	"WITH x AS (SELECT a FROM u) UPDATE t SET a = 1",
	"WITH RECURSIVE x (a) AS (SELECT 1 UNION SELECT a FROM u FOR UPDATE), y AS (SELECT 2) DELETE FROM t",
	"LOAD DATA LOCAL INFILE 'x' INTO TABLE t",
	"DO SLEEP(1)",
	"BEGIN",
	"begin work",
	"START TRANSACTION READ ONLY",
	"COMMIT",
	"SAVEPOINT x",
	"RELEASE SAVEPOINT x",
	"ROLLBACK TO x",
	"SET NAMES utf8mb4",
	"SET @x = (SELECT MAX(a) FROM t)",
	"SET STATEMENT max_statement_time=1 FOR UPDATE t SET a = 1",
	"SET STATEMENT a=1 FOR SET STATEMENT b=1 FOR INSERT INTO t VALUES (1)",
	"USE shop",
	"SHOW TABLES",
	"EXPLAIN SELECT * FROM t",
	"EXPLAIN ANALYZE SELECT * FROM t",
	"DESC t",
	"ANALYZE FORMAT=JSON SELECT * FROM t",
	"CREATE TABLE t AS SELECT * FROM u",
	"CREATE PROCEDURE p() SELECT * FROM t",
	"PREPARE s FROM 'SELECT * FROM t'",
	"INSERT INTO t VALUES (1); UPDATE t SET a = 2;",
	"DO (1; WITH x AS (SELECT 1) DELETE FROM t",
	"/*!40101 SET NAMES utf8 */;",
	`INSERT INTO t VALUES ('it\'s')`,
	"",
	"-- x",
	" ; /* x */",
}

func TestLockUnchanged(t *testing.T) {
	for _, query := range unlocking {
		if got, err := Lock(query, "FOR UPDATE"); got != query || err != nil {
			t.Errorf("%q\n got %q, %v", query, got, err)
		}
	}
}

var errWords, errVerbs = errWord(""), errVerb("")

var refused = []struct {
	err     error
	queries []string
}{
	{errSeveral, []string{
		"SELECT a FROM t; SELECT b FROM t",
		"SELECT a FROM t; DELETE FROM t",
		"INSERT INTO t VALUES (1); SELECT a FROM t",
		"SELECT a FROM t; 'unterminated",
		"CREATE PROCEDURE p() BEGIN SELECT 1; SELECT a FROM t; COMMIT",
	}},
	{errParentheses, []string{
		"(SELECT a FROM t)", // * MariaDB takes the clause and locks nothing
		"((SELECT a FROM t) LIMIT 1)",
		"(SELECT a FROM t) UNION (SELECT b FROM t)",
		"/* x */ ( SELECT a FROM t )",
		"SET STATEMENT a=1 FOR (SELECT a FROM t)",
	}},
	{errWith, []string{
		"WITH x AS (SELECT a FROM t) SELECT a FROM x", // * accepted, locks nothing
		"WITH x AS (SELECT 1) SELECT a FROM t",
		"WITH x AS (SELECT 1) (SELECT a FROM t)",
		"WITH x AS (SELECT 1) (SELECT a FROM t) FOR UPDATE",
		"WITH x AS (SELECT a FROM t FOR UPDATE) TABLE x",
		"WITH x AS (SELECT 1) SELECT a FROM t UPDATE",
		"WITH x AS (SELECT 1)",
	}},
	{errTable, []string{"TABLE t", "TABLE t ORDER BY a LIMIT 1", "VALUES ROW(1)", "VALUES (1)"}},
	{errSetStatement, []string{
		"SET STATEMENT max_statement_time=1 FOR SELECT a FROM t",
		"SET STATEMENT a=1 FOR SET STATEMENT b=1 FOR SELECT a FROM t",
	}},
	{errVerbs, []string{
		"CALL p()", "HANDLER t READ FIRST", "EXECUTE s", "EXECUTE IMMEDIATE 'SELECT * FROM t'",
		"BEGIN NOT ATOMIC SELECT a FROM t; END", "BEGIN SELECT a FROM t; END", "BEGIN WORK 1",
		"IF 1 THEN SELECT a FROM t; END IF", "FOR i IN 1..2 DO SELECT a FROM t; END FOR",
		"FROBNICATE t", "x: LOOP SELECT a FROM t; END LOOP", "SELECT.5 FROM t", "select.a", "?", "1", "'x'", ")",
		"ſELECT a FROM t",
	}},
	{errUnion, []string{
		"SELECT a FROM t UNION SELECT a FROM u",
		"SELECT a FROM t UNION ALL (SELECT a FROM u) ORDER BY a",
		"SELECT a FROM t EXCEPT SELECT a FROM u",
		"SELECT a FROM t WHERE b INTERSECT VALUES (1)",
		"SELECT a FROM t WHERE b MINUS (SELECT a FROM u)", // * in MariaDB's Oracle mode
		"SELECT a FROM t SELECT b FROM t",
	}},
	{errInto, []string{
		"SELECT a FROM t INTO @a", "SELECT a INTO @a FROM t", "SELECT a FROM t INTO OUTFILE '/x'",
		"SELECT a INTO DUMPFILE '/x' FROM t",
	}},
	{errLocks, []string{
		"SELECT a FROM t FOR UPDATE",
		"SELECT a FROM t for\nshare of t skip locked;",
		"SELECT a FROM t LOCK IN SHARE MODE",
		"SELECT a FROM t WHERE b = 1 FOR /* x */ UPDATE -- x",
		"SELECT a FROM t FOR /*!80000 UPDATE */",
		"SELECT a FROM shop.key FOR UPDATE",
		"SELECT for.`a` FROM `for`",
		"SELECT a FROM t USE INDEX FOR UPDATE",
		"SELECT a FROM t FOR SYSTEM_TIME ALL", // * MariaDB rejects it with a clause
		"SELECT a FROM (t FOR SYSTEM_TIME ALL)",
		"SELECT NEXT VALUE FOR s, a FROM t",
		"SELECT a FROM t FOR",
	}},
	{errNoTable, []string{
		"SELECT 1", "SELECT NOW()", "SELECT LAST_INSERT_ID();", "SELECT 1 FROM DUAL", "SELECT 1 FROM DUAL WHERE 1",
		"SELECT EXISTS (SELECT * FROM t)", "SELECT EXTRACT(YEAR FROM a)", "SELECT 1 WHERE 1", "SELECT t.from", "SELECT",
		"SELECT 1 -- FROM t", "SELECT 'FROM t'", "SELECT (1 FROM t)", "SELECT @@from",
	}},
	{errDerived, []string{
		"SELECT a FROM (SELECT a FROM t) d", // * accepted, locks nothing
		"SELECT a FROM t, (SELECT 1) d",
		"SELECT a FROM t JOIN (u, ((SELECT 1) d))",
		"SELECT a FROM t, LATERAL (SELECT a FROM u WHERE u.id = t.id) d",
		"SELECT a FROM (VALUES ROW(1)) d",
		"SELECT a FROM (TABLE t) d",
		"SELECT a FROM (WITH x AS (SELECT a FROM t) SELECT a FROM x) d",
		"SELECT a FROM t JOIN u ON u.id = (SELECT MAX(id) FROM u)",
		"SELECT a FROM t USE INDEX FOR ORDER BY (i), (SELECT a FROM u) d",
		"SELECT a FROM t offset, (SELECT a FROM u) d",
	}},
	{errSystem, []string{
		"SELECT * FROM information_schema.tables", "SELECT * FROM `mysql`.`user`", "SELECT * FROM t, Performance_Schema . threads",
		"SELECT * FROM (sys.version)", `SELECT * FROM "mysql".user`,
	}},
	{errGroup, []string{
		"SELECT a, COUNT(*) FROM t GROUP BY a", // * locks one row a group if there is an index
		"SELECT DISTINCT a FROM t", "SELECT DISTINCTROW a FROM t", "SELECT COUNT(DISTINCT a) FROM t",
		"SELECT PERCENTILE_CONT(0.5) WITHIN GROUP (ORDER BY a) OVER () FROM t",
	}},
	{errExtreme, []string{
		"SELECT MIN(a) FROM t", "SELECT COALESCE(max (a), 0) + 1 FROM t", "SELECT a FROM t HAVING MAX(b) > 1",
		"SELECT MAX/**/(a) FROM t",
	}},
	{errMatch, []string{
		"SELECT MATCH (a) AGAINST ('x' WITH QUERY EXPANSION) FROM t",
		"SELECT a FROM t WHERE b = 1 AND (match(a) AGAINST ('x'))",
		"SELECT COUNT(*) FROM t WHERE MATCH a AGAINST ('x' IN BOOLEAN MODE)", // * locks nothing on MySQL
		"SELECT a FROM t JOIN u ON u.id = t.id AND MATCH (u.a) AGAINST (?)",
	}},
	{errWords, []string{
		"SELECT HIGH_PRIORITY a FROM t", // * MySQL: 3569
		"SELECT a FROM t, JSON_TABLE(t.j, '$' COLUMNS (x INT PATH '$')) j",
		"SELECT a FROM t LIMIT 1 PROCEDURE ANALYSE()",
		"SELECT a FROM t WHERE a FROM u",
		"SELECT t. from FROM t",
	}},
	{errDigitName, []string{"SELECT `t`.1e5from FROM t"}},
	{errOddByte, []string{
		"SELECT a FROM t\x00", "SELECT a \x00 FROM t", "SELECT a FROM t -- x\x00y", "SELECT a FROM t /* x */ \x00 -- x",
		"SELECT [a] FROM t", "SELECT [a' FROM t], [b' FROM t] FROM t", // * quotes in MariaDB's MSSQL mode
		"SELECT a\u00a0FROM t", "SELECT a FROM t\u00a0UNION SELECT b FROM t",
	}},
	{errUnbalanced, []string{
		"SELECT a FROM t)", "SELECT a FROM (t", "SELECT a) FROM (t", "SELECT a FROM t WHERE id IN (SELECT id FROM u",
		"SELECT (a FROM t; b)",
	}},
	{errUnfinished, []string{
		"SELECT a FROM t,", "SELECT a FROM t WHERE a =", "SELECT a FROM t WHERE b = 5 *", "SELECT a FROM t.", "SELECT a FROM t WHERE a <", "SELECT a FROM t WHERE a -",
		"SELECT a FROM t WHERE a *;",
	}},
	{errHint, []string{"SELECT a FROM t /*+ BKA(t) */", "SELECT a FROM t; /*+ x */", "SELECT a FROM t -- x\n/*+ x */"}},
	{errBroken, []string{
		"SELECT a FROM t WHERE b = 'x", "SELECT a FROM `t", "SELECT a FROM t /* x", `SELECT a FROM t WHERE b = \ `,
		"SELECT a FROM t /*!80000", "INSERT INTO t VALUES ('x",
	}},
	{errReadings, []string{
		"SELECT a FROM t /*!80000 WHERE b = 1 */",
		"SELECT a FROM t /*!80000 FOR UPDATE */",
		"SELECT a /*!80000 FROM t */",
		"SELECT a FROM t WHERE b = 1 /*M!100000 LIMIT 1 */;",
		"/*!80000 SELECT a FROM t */",
		"/*!80000 EXPLAIN */ SELECT a FROM t",
		`SELECT a FROM t WHERE b = 'it\'s; a union'`, // where several statements may run
		`SELECT a FROM t WHERE b = 'a\' FOR UPDATE -- '`,
		`SELECT a FROM t WHERE b = 'a\' UNION SELECT a FROM u -- '`,
		`SELECT a FROM t WHERE b = "a\" -- "`,
		`SELECT a FROM t WHERE b = 'a\'; DELETE FROM u; -- '`,
		"SELECT a FROM t WHERE b = '\xe5\\' OR c IN (1) FOR UPDATE -- '", // gbk
		"SELECT a FROM t WHERE b = `\x83` INTO @a -- `",                  // sjis
		`SELECT 'a\' FROM t -- ', b FROM u`,                              // another table
		`SELECT a FROM t WHERE b = 'a\' -- ' AND c = 'd'`,                // another end
	}},
	{errConditions, []string{
		"SELECT /*!1*/ a FROM t", "SELECT a FROM t WHERE b = /*!100*/", "SELECT /*!100100 a */ FROM t", "SELECT /*!401010 a */ FROM t",
		"SELECT /*M!1001000 a */ FROM t", "SELECT /*!40001 a */ /*!40002 */ /*!40003 */ /*!40004 */ FROM t",
	}},
	{errHopeless, []string{
		"SELECT $$a$$ FROM t", "SELECT a FROM t /*!80000 /* x */ */", "SELECT a \xa0 FROM t",
	}},
}

func TestLockRefuses(t *testing.T) {
	for _, r := range refused {
		for _, query := range r.queries {
			got, err := Lock(query, "FOR UPDATE")
			same := errors.Is(err, r.err)
			if _, after, ok := strings.Cut(r.err.Error(), `""`); ok && err != nil { // errWord and errVerb quote a word
				same = strings.HasSuffix(err.Error(), after)
			}
			if got != "" || !same {
				t.Errorf("%q\n got %q, %v\nwant %v", query, got, err, r.err)
			}
		}
	}
}

// A long text must not take longer than its length says.
func TestLockLong(t *testing.T) {
	for _, part := range []string{
		"(", ")", "a, ", "'x', ", `'\'', `, "/* x */", "/*", "-- x\n", "((SELECT 1)), ", "/*!40001 a, */", "`a`.", "\xe5\\", "MIN(",
		"SET STATEMENT a = 1 FOR ", "; SELECT a FROM t",
	} {
		long := strings.Repeat(part, 1<<18/len(part))
		for _, query := range []string{long, "SELECT a FROM t WHERE b IN (" + long + "1)"} {
			start := time.Now()
			_, _ = Lock(query, "FOR UPDATE")
			if d := time.Since(start); d > 30*time.Second {
				t.Errorf("%v for %d bytes of %q", d, len(query), part)
			}
		}
	}
}
