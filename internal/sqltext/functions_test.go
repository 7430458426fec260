package sqltext

import (
	"database/sql"
	"errors"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

var calling = []look{
	{"SELECT f()", "Write snapshot functions"},
	{"SELECT f(1) FROM t", "Write snapshot functions"},
	{"SELECT f /* x */\n()", "Write snapshot functions"},
	{"SELECT db.f()", "Write snapshot functions"},
	{"SELECT db . f ()", "Write snapshot functions"},
	{"SELECT `f`()", "Write snapshot functions"},
	{"SELECT \"f\"()", "Write snapshot functions"}, // with ANSI_QUOTES
	{"SELECT `now`()", "Write snapshot functions"}, // *
	{"SELECT db.now()", "Write snapshot functions"},
	{"SELECT db.`now`()", "Write snapshot functions"},
	{"SELECT db.1now()", "Write snapshot functions"}, // * a name
	{"SELECT db.1()", "Write snapshot functions"},
	{"SELECT 1f()", "Write snapshot functions"},
	{"SELECT now ()", "Write snapshot functions"}, // *
	{"SELECT now/**/()", "Write snapshot functions"},
	{"SELECT größe()", "Write snapshot functions"},
	{"SELECT " + strings.Repeat("f", 64) + "()", "Write snapshot functions"},
	{"SELECT ABS" + strings.Repeat("x", 61) + "()", "Write snapshot functions"},
	{"SELECT {fn f()}", "Write snapshot functions"},
	{"SELECT a FROM t WHERE a IN (SELECT COALESCE(f(b), 1) FROM u)", "Write snapshot functions"},
	{"SELECT a FROM t WHERE a = f(1) FOR UPDATE", "Write snapshot functions"},
	{"SELECT (a), f(b) FROM t FOR UPDATE", "Write snapshot functions"},
	{"SELECT 1 AS a, f(b) FROM t FOR UPDATE", "Write snapshot functions"},
	{"SELECT CASE WHEN (a) THEN f(b) END FROM t FOR UPDATE", "Write snapshot functions"},
	{"SELECT a FROM t ORDER BY f(a) FOR UPDATE", "Write snapshot functions"},
	{"TABLE t ORDER BY f(a)", "Write snapshot functions"},
	{"(SELECT 1) UNION (SELECT f())", "Write snapshot functions"},
	{"SELECT 1; SELECT f(); SELECT 1", "Write snapshot functions"},
	{"WITH x AS (SELECT f() a) SELECT a FROM x", "Write snapshot functions"},
	{"WITH x (a) AS (SELECT 1) SELECT f(a) FROM x", "Write snapshot functions"},
	{"SET STATEMENT max_statement_time = 1 FOR SELECT f()", "Write snapshot functions"},
	{"SET STATEMENT max_statement_time = f() FOR SELECT 1", "Write snapshot functions"},
	{"EXPLAIN ANALYZE SELECT f()", "Write snapshot functions"},
	{"EXPLAIN SELECT f()", "Write snapshot functions"},
	{"ANALYZE FORMAT=JSON SELECT f()", "Write snapshot functions"},
	{"SELECT LASTVAL(s)", "Write snapshot functions"},
	{"SELECT 1 /*!80000 , f() */", "Write snapshot functions"},
	{"SELECT now /*!99999 + f */ ()", "Write snapshot functions"},
	{`SELECT 'a\', f() -- '`, "Write snapshot functions"}, // with NO_BACKSLASH_ESCAPES

	// Where it is a query that calls, is of interest for queries only.
	{"SELECT NEXTVAL(s), f()", "Write snapshot functions"},
	{"INSERT INTO t (a) VALUES (f())", "Write snapshot"},
	{"UPDATE t SET a = f(a)", "Write snapshot"},
	{"DO f()", "Write snapshot"},
	{"SET @x = f()", "Write snapshot taints"},
	{"EXPLAIN ANALYZE UPDATE t SET a = f()", "Write snapshot"},

	// What applications and their libraries write.
	{"SELECT COUNT(*), SUM(`a`), count(DISTINCT b) FROM t FOR UPDATE", "Read"},
	{"SELECT COALESCE(MAX(a), 0) FROM t FOR UPDATE", "Read"},
	{"SELECT COALESCE (a, 0), IF (a, 1, 2), LEFT (b, 2), REPLACE(b, 'x', 'y') FROM t FOR UPDATE", "Read"},
	{"SELECT NOW(), NOW(6), CURRENT_TIMESTAMP(6), UTC_TIMESTAMP(), DATE_FORMAT(a, '%Y') FROM t FOR UPDATE", "Read"},
	{"SELECT IFNULL(a, 1), CONCAT('%', b), GROUP_CONCAT(c SEPARATOR ',') FROM t FOR UPDATE", "Read"},
	{"SELECT JSON_UNQUOTE(JSON_EXTRACT(a, '$.b')), JSON_ARRAYAGG(c) FROM t FOR UPDATE", "Read"},
	{"SELECT a FROM t WHERE a IN (?,?) AND (b = ? OR NOT (c BETWEEN (1) AND (2))) FOR UPDATE", "Read"},
	{"SELECT a FROM t WHERE (a, b) IN ((1, 2), (3, 4)) AND b LIKE (?) AND c REGEXP (?) FOR UPDATE", "Read"},
	{"SELECT a FROM t WHERE a > DATE_SUB(NOW(), INTERVAL (1 + 1) DAY) FOR UPDATE", "Read"},
	{"SELECT a FROM t WHERE EXISTS (SELECT 1 FROM u FOR UPDATE) AND b = ANY (SELECT b FROM u FOR UPDATE) FOR UPDATE", "Read snapshot"},
	{"SELECT ROW_NUMBER() OVER (PARTITION BY a ORDER BY b), LAG(a, 1) OVER w FROM t WINDOW w AS (ORDER BY a) FOR UPDATE", "Read"},
	{"SELECT CAST(a AS DECIMAL(10, 2)), CAST(a AS DATETIME(6)), CONVERT(a, CHAR(5)) FROM t FOR UPDATE", "Read"},
	{"SELECT a FROM t USE INDEX (i) FORCE INDEX FOR ORDER BY (j) JOIN u USING (a) JOIN (v, w) ON (v.a = w.a) FOR UPDATE", "Read"},
	{"SELECT a FROM t PARTITION (p0, p1) WHERE MATCH (a) AGAINST ('x') FOR UPDATE", "Read"},
	{"SELECT ST_Distance_Sphere(POINT(1, 2), a), ST_GeomFromText('POINT(1 2)', 4326) FROM t FOR UPDATE", "Read"},
	{"SELECT BIN_TO_UUID(a), ANY_VALUE(b), JSON_VALUE(c, '$.x'), MD5(d) FROM t FOR UPDATE", "Read"},
	{"SELECT (a), f, `g` FROM t WHERE f = (1) FOR UPDATE", "Read"},
	{"SELECT 1 FROM t WHERE a IN(1)AND(b)OR(c)FOR UPDATE", "Read"},
	{"WITH RECURSIVE x (a, b) AS (SELECT 1, 2), `y`(c) AS (SELECT 3) SELECT 1", "Read snapshot"},
	{"SELECT a FROM (VALUES ROW(1), ROW(2)) AS d (a), (SELECT 2) `e`(b)", "Read snapshot"},
	{"SELECT LAST_INSERT_ID(), DATABASE(), VERSION(), CONNECTION_ID(), FOUND_ROWS()", "Read snapshot"},
}

// resolves reports whether a server looks for a stored function where a query
// calls one by this name, with whatever number of arguments.
func (s *scratch) resolves(t *testing.T, name string) bool {
	t.Helper()
	for _, args := range []string{"()", "(1)", "(1, 2)", "(1, 2, 3)", "(1, 2, 3, 4)"} {
		st, err := s.db.PrepareContext(t.Context(), "SELECT "+name+args)
		if err == nil {
			st.Close()
			continue
		}
		var refusal *mysql.MySQLError
		if !errors.As(err, &refusal) {
			t.Fatal(err)
		}
		// There is none of that name, the second time with a hint at the space.
		if refusal.Number == 1305 || refusal.Number == 1630 {
			return true
		}
	}
	return false
}

// TestNoServerTakesABuiltinForAStoredFunction where Look knows the word, and all take others
// for that.
func TestNoServerTakesABuiltinForAStoredFunction(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		known := keywords + functions + onlyMySQL
		if s.Flavour == tempserver.MariaDB {
			known = keywords + functions + onlyMariaDB
		}
		for _, w := range strings.Fields(known) {
			if s.resolves(t, w) {
				t.Errorf("%s( may be a stored function", w)
			}
			if builtins[w] && s.resolves(t, w+" ") {
				t.Errorf("%s ( may be a stored function", w)
			}
		}
		for _, w := range []string{"f", "COUNT ", "now/**/", "`now`", "x.now", "x . `now`", "x.1now", "x.1", "1now"} {
			if !s.resolves(t, w) {
				t.Errorf("%s( is no stored function", w)
			}
		}
	})
}

func TestLookSeesAWriteByAStoredFunction(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.db, "CREATE TABLE log (id INT)")
		for _, name := range []string{"f", "now"} {
			dbtest.Exec(t, s.db, "CREATE FUNCTION `"+name+"`(a INT) RETURNS INT DETERMINISTIC BEGIN INSERT INTO log VALUES (a); RETURN 1; END")
		}
		for _, c := range []struct {
			query, mode string
			flavour     tempserver.Flavour
		}{
			{query: "SELECT f(1)"},
			{query: "select F /* x */ (1)"},
			{query: "SELECT `f`(1)"},
			{query: `SELECT "f"(1)`, mode: "ANSI_QUOTES"},
			{query: "SELECT " + s.Name + ".now(1)"},
			{query: "SELECT " + s.Name + " . f(1)"},
			{query: "SELECT `now`(1)"},
			{query: "SELECT now (1)"},
			{query: "SELECT now\n(1)"},
			{query: "SELECT f(1) FROM t LIMIT 1 FOR UPDATE"},
			{query: "SELECT id FROM t WHERE id = 1 AND f(id) FOR UPDATE"},
			{query: "SELECT (1), 1 AS x, CASE WHEN (1) THEN f(1) END"},
			{query: "SELECT {fn f(1)}"},
			{query: "SELECT id FROM t ORDER BY f(id) LIMIT 1"},
			{query: "SELECT x FROM (SELECT f(1) x) AS d"},
			{query: "WITH x (a) AS (SELECT f(1)) SELECT a FROM x"},
			{query: "SELECT /*!50000 f(1) + */ 1"},
			{query: "VALUES ROW(f(1))", flavour: tempserver.MySQL},
			{query: "EXPLAIN ANALYZE SELECT f(id) FROM t", flavour: tempserver.MySQL},
			{query: "VALUES (f(1))", flavour: tempserver.MariaDB},
			{query: "ANALYZE SELECT f(id) FROM t", flavour: tempserver.MariaDB},
			{query: "SET STATEMENT max_statement_time = 5 FOR SELECT f(1)", flavour: tempserver.MariaDB},
		} {
			if c.flavour != "" && c.flavour != s.Flavour {
				continue
			}
			if i := Look(c.query); i.Kind != Write || !i.Functions {
				t.Errorf("%q: %+v", c.query, i)
			}
			tx, end := s.session(sql.LevelRepeatableRead, c.mode)
			_, err := read(tx, c.query)
			dbtest.OK(t, err)
			rows, err := read(tx, "SELECT * FROM log")
			dbtest.OK(t, err)
			end()
			if rows == 0 {
				t.Errorf("%q writes nothing", c.query)
			}
		}
	})
}
