package sqltext

import (
	"database/sql"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// takes are statements of which some take a snapshot, and Look may not know.
var takes = []struct {
	query   string
	flavour tempserver.Flavour // the only server that knows it
}{
	{query: "INSERT INTO logged VALUES (f(1))"},
	{query: "INSERT INTO logged (id) VALUES (1 + f(1))"},
	{query: "INSERT INTO logged SET id = f(1)"},
	{query: "INSERT INTO logged SELECT f(uid) FROM u LIMIT 1"},
	{query: "INSERT INTO logged (id) SELECT id FROM t WHERE id = f(1)"},
	{query: "INSERT INTO logged VALUES (1) ON DUPLICATE KEY UPDATE id = f(1)"},
	{query: "INSERT INTO p VALUES (1, 1) ON DUPLICATE KEY UPDATE a = f(1)"},
	{query: "INSERT logged VALUES (`f`(1))"},
	{query: "REPLACE INTO p (pid, a) VALUES (21, f(1))"},
	{query: "REPLACE p SELECT 21, f(1)"},
	{query: "UPDATE u SET v = f(1) WHERE uid = 1"},
	{query: "UPDATE u SET v = 1 WHERE uid = f(1)"},
	{query: "UPDATE u SET v = 1 WHERE uid = 1 AND v = f(1)"},
	{query: "UPDATE u, p SET v = 1 WHERE uid = pid AND uid = f(1)"},
	{query: "UPDATE u SET v = (SELECT f(1)) WHERE uid = 1"},
	{query: "UPDATE u SET v = 1 ORDER BY f(uid) LIMIT 1"},
	{query: "DELETE FROM u WHERE uid = f(1)"},
	{query: "DELETE u FROM u JOIN p ON uid = pid WHERE uid = f(1)"},
	{query: "DELETE FROM u WHERE uid = 1 AND EXISTS (SELECT 1 FROM p WHERE pid = f(1))"},
	{query: "SELECT f(1) FOR UPDATE"},
	{query: "SELECT uid, f(1) FROM u WHERE uid = 1 FOR UPDATE"},
	{query: "SELECT uid FROM u WHERE uid = f(1) FOR UPDATE"},
	{query: "SELECT uid FROM u WHERE uid = (SELECT f(1)) FOR UPDATE"},
	{query: "SELECT uid FROM u WHERE uid = 1 ORDER BY f(uid) LOCK IN SHARE MODE"},
	{query: "SELECT COUNT(*), MAX(f(uid)) FROM u WHERE uid = 1 FOR UPDATE"},
	{query: "SELECT uid FROM u WHERE uid = 1 AND EXISTS (SELECT 1 FROM p) FOR UPDATE"},
	{query: "DO f(1)"},
	{query: "SET @x = f(1)"},
	{query: "SELECT f(1)"},
	{query: "CALL c()"},
	{query: "CREATE TEMPORARY TABLE made (a INT) SELECT f(1) AS a"},
	{query: "CREATE TEMPORARY TABLE made AS SELECT uid FROM u WHERE uid = f(1)"},
	{query: "INSERT INTO logged SELECT id FROM made_view"},
	{query: "UPDATE u SET v = (SELECT MAX(id) FROM made_view) WHERE uid = 1"},
	{query: "INSERT INTO logged SELECT COUNT(*) FROM information_schema.tables"},
	{query: "INSERT INTO logged SELECT COUNT(*) FROM performance_schema.threads"},
	{query: "INSERT INTO logged SELECT COUNT(*) FROM sys.version", flavour: tempserver.MySQL},
	{query: "INSERT INTO logged SELECT COUNT(*) FROM sys.schema_table_statistics", flavour: tempserver.MySQL},
	{query: "INSERT INTO logged SELECT COUNT(*) FROM sys.schema_auto_increment_columns", flavour: tempserver.MySQL},
	{query: "UPDATE u SET v = 1 WHERE uid IN (SELECT 1 FROM mysql.user)"},
	{query: "DELETE FROM u WHERE uid = 1 RETURNING f(1)", flavour: tempserver.MariaDB},
	{query: "INSERT INTO logged VALUES (1) RETURNING f(1)", flavour: tempserver.MariaDB},
	{query: "INSERT INTO logged VALUES (1) RETURNING (SELECT MAX(id) FROM t)", flavour: tempserver.MariaDB},
	{query: "REPLACE INTO p VALUES (21, 1) RETURNING (SELECT MAX(id) FROM t)", flavour: tempserver.MariaDB},
	{query: "DELETE FROM u WHERE uid = 1 RETURNING (SELECT MAX(id) FROM t)", flavour: tempserver.MariaDB},
	{query: "WITH x AS (SELECT f(1) AS a) UPDATE u, x SET v = a WHERE uid = 1", flavour: tempserver.MySQL},
}

// takeNone are everyday statements, which take none, and of which Look knows it.
var takeNone = []struct {
	query   string
	flavour tempserver.Flavour
}{
	{query: "INSERT INTO logged VALUES (1)"},
	{query: "INSERT INTO logged (id) VALUES (1), (2)"},
	{query: "INSERT INTO logged(id) VALUES(1)"},
	{query: "INSERT IGNORE INTO `p` (`pid`, `a`) VALUES (1, 1)"},
	{query: "INSERT p (pid, a) VALUES (21, 1)"},
	{query: "INSERT INTO p PARTITION (p1) (pid, a) VALUES (21, 1)"},
	{query: "INSERT INTO p (pid, a) VALUES (1, 1) ON DUPLICATE KEY UPDATE a = VALUES(a) + 1"},
	{query: "INSERT INTO p (pid, a) VALUES (1, 1) AS new (x, y) ON DUPLICATE KEY UPDATE a = y", flavour: tempserver.MySQL},
	{query: "INSERT INTO p () VALUES (21, UNIX_TIMESTAMP(NOW()))"},
	{query: "INSERT INTO p SET pid = (21), a = COALESCE(NULL, 1)"},
	{query: "INSERT INTO logged SELECT id FROM t WHERE id IN (1, 2)"},
	{query: "INSERT INTO logged (id) SELECT MAX(id) FROM t GROUP BY a"},
	{query: "INSERT INTO logged (id) (SELECT id FROM t LIMIT 1)"},
	{query: "INSERT INTO logged WITH x AS (SELECT id FROM t) SELECT id FROM x"},
	{query: "INSERT INTO logged VALUES ((SELECT MAX(id) FROM t))"},
	{query: "INSERT INTO logged SELECT id FROM merged"},
	{query: "REPLACE INTO p (pid, a) VALUES (21, 1)"},
	{query: "REPLACE INTO p SELECT id, a FROM t WHERE id = 20"},
	{query: "UPDATE u SET v = v + 1, tid = (tid) WHERE uid = 1"},
	{query: "UPDATE u SET v = (SELECT MAX(id) FROM t) WHERE uid = 1"},
	{query: "UPDATE u SET v = 1 WHERE uid = (SELECT id FROM t WHERE id = 1)"},
	{query: "UPDATE u SET v = 1 WHERE uid IN (SELECT id FROM t WHERE a = 1)"},
	{query: "UPDATE u SET v = 1 WHERE EXISTS (SELECT 1 FROM t WHERE id = uid)"},
	{query: "UPDATE (u JOIN t ON uid = id) SET v = 1 WHERE (uid = 1)"},
	{query: "UPDATE u JOIN (SELECT MAX(id) AS m FROM t) d ON uid = d.m SET v = 1"},
	{query: "UPDATE u FORCE INDEX (tid) SET v = CASE WHEN (v = 1) THEN (2) ELSE (3) END WHERE tid = 1 LIMIT 1"},
	{query: "DELETE FROM u WHERE uid IN (1, 2) AND (v = 1 OR NOT (v = 2))"},
	{query: "DELETE FROM u WHERE uid IN (SELECT id FROM t WHERE id < 3)"},
	{query: "DELETE u FROM u JOIN t ON (uid = id) WHERE id = 1"},
	{query: "SELECT * FROM u WHERE uid IN (1, 2) FOR UPDATE"},
	{query: "SELECT COUNT(*), COALESCE(SUM(v), 0) FROM u FOR UPDATE"},
	{query: "SELECT uid FROM u JOIN t ON (uid = id) WHERE (id = 1) LOCK IN SHARE MODE"},
	{query: "SELECT 1"},
	{query: "SELECT @@version, @x"},
	{query: "SAVEPOINT x"},
	{query: "SET @x = 1"},
}

// TestLookSaysWhateverTakesASnapshot, and does not where everyday statements take none.
func TestLookSaysWhateverTakesASnapshot(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, text := range []string{
			"CREATE TABLE logged (id INT)",
			"CREATE FUNCTION f(a INT) RETURNS INT READS SQL DATA BEGIN DECLARE v INT; SELECT id INTO v FROM t WHERE id = a; RETURN v; END",
			"CREATE PROCEDURE c() SELECT MAX(id) FROM t",
			"CREATE VIEW made_view AS SELECT id FROM t",
		} {
			dbtest.Exec(t, s.db, text)
		}
		some := 0
		for _, c := range takes {
			if c.flavour != "" && c.flavour != s.Flavour {
				continue
			}
			if s.takesSnapshot(t, c.query) {
				if some++; !Look(c.query).Snapshot {
					t.Errorf("%q takes a snapshot", c.query)
				}
			}
		}
		if some < 20 {
			t.Errorf("only %d of the statements take a snapshot", some)
		}
		for _, c := range takeNone {
			if c.flavour != "" && c.flavour != s.Flavour {
				continue
			}
			if Look(c.query).Snapshot {
				t.Errorf("%q is refused", c.query)
			}
			if s.takesSnapshot(t, c.query) {
				t.Errorf("%q takes a snapshot", c.query)
			}
		}
	})
}

// takesSnapshot reports whether a REPEATABLE READ transaction has its snapshot after
// the query: whether it misses what another has committed since.
func (s *scratch) takesSnapshot(t *testing.T, query string) bool {
	t.Helper()
	tx, end := s.session(sql.LevelRepeatableRead, "")
	defer end()
	if _, err := read(tx, query); err != nil {
		t.Errorf("%q: %v", query, err)
	}
	dbtest.Exec(t, s.db, "UPDATE `for` SET `lock` = `lock` + 1 WHERE `from` = 1")
	var seen, is int
	dbtest.OK(t, s.db.QueryRow("SELECT `lock` FROM `for` WHERE `from` = 1").Scan(&is))
	dbtest.OK(t, tx.QueryRow("SELECT `lock` FROM `for` WHERE `from` = 1").Scan(&seen))
	dbtest.Exec(t, tx, "DROP TEMPORARY TABLE IF EXISTS made")
	return seen != is
}
