package sqltext

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestAllTablesThatATextWritesAreAskedFor(t *testing.T) {
	for _, c := range []struct{ query, tables string }{
		{"INSERT INTO t VALUES (1)", "t"},
		{"insert ignore t(a) values (1)", "t"},
		{"INSERT INTO shop.t SELECT * FROM u", "shop.t"},
		{"INSERT LOW_PRIORITY INTO `shop` . `t` SET a = 1 ON DUPLICATE KEY UPDATE b = (SELECT 1 FROM u)", "shop.t"},
		{`INSERT INTO "t" VALUES (1)`, "t"}, // with ANSI_QUOTES
		{"REPLACE t VALUES (1)", "t"},
		{"INSERT INTO .t VALUES (1)", "t"}, // MariaDB's, as the next three
		{"REPLACE .`t` VALUES (1)", "t"},
		{"LOAD DATA LOCAL INFILE 'u' INTO TABLE .t", "t"},
		{"UPDATE .t, .u SET .t.a = 1", "t u"},
		{"INSERT INTO 2fa_codes VALUES (.5, 1.5, 2e3)", "2fa_codes"},
		{"UPDATE shop.2fa_codes, 3d.u SET shop.2fa_codes.1a = 1.5", "shop.2fa_codes 3d.u"},
		{"DELETE FROM shop.1e5t", "shop.1e5t"}, // without the schema it begins with a number
		{"/* c */ INSERT -- u\n INTO # v\n t SELECT 1", "t"},
		{"INSERT INTO t WITH x AS (SELECT 1) SELECT * FROM x", "t"},
		{"LOAD DATA LOCAL INFILE 'u' IGNORE INTO TABLE shop.t (a, @x) SET b = @x", "shop.t"},
		{"LOAD XML INFILE 'u' INTO TABLE t", "t"},

		{"UPDATE t SET a = 1 WHERE b IN (SELECT b FROM u, v)", "t"},
		{"UPDATE LOW_PRIORITY IGNORE `T` AS x SET x.a = 1, x.b = 2 ORDER BY a, b LIMIT 1", "T"},
		{"UPDATE t USE INDEX FOR ORDER BY (i, j) SET a = 1", "t"},
		{"UPDATE t PARTITION (p, q) SET a = 1", "t"},
		{"UPDATE t, shop.u SET t.a = u.a", "t shop.u"},
		{"UPDATE t x JOIN u AS y ON x.a = y.a AND x.b IN (1, 2) LEFT JOIN v USING (c, d) SET x.a = 1", "t u v"},
		{"UPDATE (t, (u STRAIGHT_JOIN v)) NATURAL JOIN w SET a = 1", "t u v w"},
		{"UPDATE t JOIN (SELECT a FROM u, w) d ON d.a = t.a, v SET t.a = 1", "t v"},
		{"UPDATE t JOIN ((SELECT a FROM u)) d, LATERAL (SELECT 1 FROM w) e SET t.a = 1", "t"},
		{"UPDATE {OJ t LEFT OUTER JOIN u ON t.a = u.a} SET t.a = 1", "t u"},
		{"WITH x AS (SELECT a FROM u) UPDATE t JOIN x ON x.a = t.a SET t.a = 1", "t x"},

		{"UPDATE t JOIN u ON t.order = u.set AND u.where = t.from JOIN v ON v.limit = t.join SET t.a = 1", "t u v"},

		{"DELETE FROM t", "t"},
		{"DELETE QUICK FROM shop.t AS x WHERE a = 1 AND b IN (SELECT b FROM u)", "shop.t"},
		{"DELETE FROM t ORDER BY a, b LIMIT 1", "t"},
		{"DELETE FROM t RETURNING a, b", "t"},
		{"DELETE t, shop.u.* FROM t JOIN shop.u USING (a) WHERE t.a = 1", "t shop.u t shop.u"},
		{"DELETE FROM t, u USING t JOIN u USING (a, b)", "t u t u"},
		{"WITH x (a) AS (SELECT 1) DELETE FROM t WHERE a IN (SELECT a FROM x)", "t"},

		{"SELECT 1; UPDATE t SET a = 1; DELETE FROM u", "t u"},
		{"SET STATEMENT max_statement_time = 1 FOR UPDATE t SET a = 1", "t"},
		{"ANALYZE UPDATE t SET a = 1", "t"},
		{"EXPLAIN ANALYZE DELETE FROM t", "t"},
		{`INSERT INTO t VALUES ('\'); UPDATE u SET a = 1 -- ')`, "t u"},

		{"IF 1 THEN UPDATE t SET a = 1; ELSEIF 2 THEN DELETE FROM u; ELSE REPLACE v VALUES (1); END IF", "t u v"},
		{"BEGIN NOT ATOMIC IF 1 THEN INSERT INTO t VALUES (1) ON DUPLICATE KEY UPDATE a = 2; END IF; UPDATE u SET a = 1; END", "t u"},
		{"LOOP UPDATE t SET a = 1; END LOOP", "t"},
		{"FOR i IN (SELECT a FROM u FOR UPDATE) DO SET @a = REPLACE(i.a, 1, 2); UPDATE t SET a = i.a; END FOR", "t"},

		{"SELECT a FROM t FOR UPDATE", ""},
		{"SELECT 'UPDATE t SET a = 1; DELETE FROM t'", ""},
		{"EXPLAIN UPDATE t SET a = 1", ""},
		{"DESCRIBE t", ""},
		{"TRUNCATE TABLE t", ""},
		{"CREATE TABLE t (a INT)", ""},
		{"CALL t()", ""},
		{"COMMIT", ""},
		{"", ""},
		{"UPDATE", ""},
		{"UPDATE 't", ""},
	} {
		var got []string
		_, sure := Writes(c.query, func(schema, table string) bool {
			if schema != "" {
				table = schema + "." + table
			}
			got = append(got, table)
			return false
		})
		if strings.Contains(c.query, `\`) { // each reading asks
			slices.Sort(got)
			got = slices.Compact(got)
		}
		if !sure || !slices.Equal(got, strings.Fields(c.tables)) {
			t.Errorf("%s\nwrites %q, %v; want %q", c.query, got, sure, c.tables)
		}
	}
}

// TestWritesSaysWhich: the first table that was asked for with a yes is the answer.
func TestWritesSaysWhich(t *testing.T) {
	asks := func(_, table string) bool { return table == "u" || table == "v" }
	for query, want := range map[string]string{
		"UPDATE t, `shop`.u, v SET a = 1":                          "shop.u true",
		"INSERT INTO t VALUES (1); DELETE FROM v":                  "v true",
		"UPDATE t SET a = 1":                                       " true",
		"/*!50000 UPDATE */ u SET a = 1":                           "u true",
		"/*!50000 UPDATE */ t /*!99999 , u */ SET a = 1":           "u true",
		"/*!50000 UPDATE */ t /*!99999 , w */ SET a = 1":           " false",
		"SELECT 1 /*!50000 /* x */ */":                             " true",  // one statement
		"SELECT 1 /*!50000 /* x */; */":                            " false", // nothing can be said of what follows
		"/*!50001 */ /*!50002 */ /*!50003 */ /*!50004 */ SELECT 1": " false",
	} {
		table, sure := Writes(query, asks)
		if got := fmt.Sprint(table, " ", sure); got != want {
			t.Errorf("%s: got %q, want %q", query, got, want)
		}
	}
}
