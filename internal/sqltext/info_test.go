package sqltext

import "testing"

func TestLookSeesWhatATextMayChange(t *testing.T) {
	for want, queries := range map[Changes][]string{
		ChangesNothing: {
			"SELECT 1", "SELECT stock FROM p WHERE id = ?", "select max(a) from t for update", "SHOW TABLES",
			"(SELECT 1) UNION (SELECT a FROM t)", "WITH x AS (SELECT 1) SELECT * FROM x", "SELECT 1; SELECT 2",
			"SAVEPOINT x", "RELEASE SAVEPOINT x", "ROLLBACK TO x", "ROLLBACK WORK TO SAVEPOINT x",
			"SET @x = 1", "SET NAMES utf8mb4", "SET TRANSACTION READ ONLY", "SET @x = (SELECT MAX(a) FROM t)",
			"USE x", "SAVEPOINT x; SELECT 1", `SELECT 'it\'s'`,
		},
		ChangesCounted: {
			"UPDATE t SET a = 1", "update t set a = a + 1 where b in (1, 2)", "DELETE FROM t WHERE a = 1",
			"INSERT INTO t VALUES (1)", "INSERT INTO t (a, b) VALUES (?, NOW())", "INSERT IGNORE t (a) VALUES (1)",
			"INSERT INTO `t` (`a`,`b`) VALUES (?,?) ON DUPLICATE KEY UPDATE `a`=VALUES(`a`)",
			"INSERT INTO `shop`.`t` (`a`) VALUES (?)", "INSERT INTO shop . t (a) SELECT a FROM u", "REPLACE INTO t (a) VALUES (1)",
			"REPLACE LOW_PRIORITY t (a) VALUES (1)", "INSERT INTO t PARTITION (p0) (a) VALUES (1)", "INSERT INTO t () VALUES ()",
			"INSERT INTO t (a) VALUES (1) AS new(x) ON DUPLICATE KEY UPDATE a = x", "INSERT INTO t SET a = (1)",
			"WITH x AS (SELECT 1) UPDATE t SET a = 1", "SET STATEMENT max_statement_time = 1 FOR UPDATE t SET a = 1",
			"/* c */ UPDATE t SET a = 1;", `UPDATE t SET a = 'it\'s'`,
			"INSERT INTO t (a) VALUES (1) RETURNING a",
		},
		MayChange: {
			"", "COMMIT", "CREATE TABLE t (a INT)", "CALL p()", "DO f()", "DO SLEEP(1)", "FROBNICATE",
			"SELECT f()", "SELECT f(a) FROM t", "SELECT NEXTVAL(s)", "SELECT NEXT VALUE FOR s",
			"INSERT INTO t (a) VALUES (f())", "INSERT INTO t VALUES (db.f(1))", "INSERT t SELECT f()", "INSERT INTO t SET a = f()",
			"INSERT INTO t (a) SELECT db.now()", "INSERT INTO t VALUES (NEXTVAL(s))", "REPLACE t VALUES (`f`())",
			"UPDATE t SET a = f(a)", "UPDATE t SET a = 1 WHERE f(a)", "DELETE FROM t WHERE a = f()", "SET @x = f()",
			"UPDATE t SET a = 1; UPDATE t SET a = 2", "UPDATE t SET a = 1; SELECT 1", "SELECT 1; UPDATE t SET a = 1",
			"EXPLAIN ANALYZE UPDATE t SET a = 1", "ANALYZE UPDATE t SET a = 1", "LOAD DATA INFILE 'x' INTO TABLE t",
			"HANDLER t OPEN", "CREATE TEMPORARY TABLE t (a INT)", "EXECUTE s", "LOCK TABLES t READ",
			"UPDATE t SET a = /*!80000 f() */ 1", "UPDATE /*!40001 LOW_PRIORITY */ t SET a = 1", `UPDATE t SET a = 'x\', f() -- '`,
		},
	} {
		for _, q := range queries {
			if got := Look(q).Changes; got != want {
				t.Errorf("%q: %v, want %v", q, got, want)
			}
		}
	}
}

// TestLookSeesWhatDependsOnTheConnection: on what it did before, and the like.
func TestLookSeesWhatDependsOnTheConnection(t *testing.T) {
	for _, flag := range []struct {
		name string
		of   func(Info) bool
		want map[string]bool
	}{
		{"Tables", func(i Info) bool { return i.Tables }, map[string]bool{
			"SELECT a FROM t": true, "select stock from p for update": true, "TABLE t": true, "(SELECT a FROM t)": true,
			"SELECT (SELECT MAX(a) FROM t)": true, "WITH x AS (SELECT a FROM t) SELECT 1": true, "SELECT 1; SELECT a FROM t": true,
			"SELECT COUNT(*) FROM t": true, "SELECT 1 UNION SELECT a FROM t": true, "SELECT f(a) FROM t": true,
			"SELECT 1": false, "SELECT LAST_INSERT_ID()": false, "SELECT NOW(), @@version": false, "SELECT EXTRACT(YEAR FROM NOW())": false,
			"SELECT TRIM(LEADING 'x' FROM 'xy')": false, "SHOW TABLES FROM x": false, "EXPLAIN SELECT a FROM t": false, "DESC t": false,
			"EXPLAIN ANALYZE SELECT a FROM t": false, "ANALYZE SELECT a FROM t": false, "SELECT 'FROM t'": false, "VALUES ROW(1)": false,
			"DELETE FROM t": false, "INSERT INTO t SELECT a FROM u": false, "": false, "UPDATE t SET a = (SELECT b FROM u)": false,
			"SELECT 1 FROM DUAL": false, "SELECT 1 FROM dual WHERE 1": false, "SELECT 1 FROM information_schema.tables": false,
			"SELECT 1 FROM `mysql`.user": false, "SELECT (SELECT a FROM t) FROM DUAL": true, "SELECT 1 FROM (SELECT a FROM t) d": true,
			"SELECT a FROM dualism": true, "SELECT a FROM `t`": true, "SELECT a FROM d.t": true,
			"SELECT a INTO @a FROM t": true, "SET @a = (SELECT a FROM t)": true, "CREATE TEMPORARY TABLE u AS SELECT a FROM t": true, "SET @a = 1": false,
		}},
		{"Recalls", func(i Info) bool { return i.Recalls }, map[string]bool{
			"SELECT LAST_INSERT_ID()": true, "select last_insert_id ( )": true, "INSERT INTO t VALUES (LAST_INSERT_ID())": true,
			"SELECT FOUND_ROWS()": true, "SELECT ROW_COUNT()": true, "SELECT CONNECTION_ID()": true,
			"SELECT @@identity": true, "SELECT @@session.last_insert_id": true, "SELECT @@warning_count": true,
			"SHOW WARNINGS": true, "SHOW ERRORS LIMIT 1": true, "SHOW COUNT(*) WARNINGS": true, "GET DIAGNOSTICS @x = NUMBER": true,
			"SELECT @x": true, "UPDATE t SET a = @x": true, "SELECT @x := 1": true, "EXECUTE s": true,
			"SET @x = 7": false, "SET @x := 7, @y = (SELECT MAX(a) FROM t), SESSION sort_buffer_size = 1, @z = 0": false, "SET @x = @x + 1": true, "SET @y = 1, @x = (SELECT @y)": true,
			"SET @x = LAST_INSERT_ID(), @y = 1": true, "SET sql_mode = @old, @old = ''": true, "SET @x = @@version": false, "SET @x = 1; SELECT @x": true,
			"SELECT id, identity, last_insert_id FROM t": false, "SELECT @@version": false, "SELECT COUNT(*) FROM t": false,
			"INSERT INTO t VALUES (1) ON DUPLICATE KEY UPDATE id = LAST_INSERT_ID(id)": false,
			"SET @x = 1": false, "SET @x = 1, @y := 2": false, "SET @x = @y": true, "SET @x = 1, @y = @x + 1": true, "SET @x = LAST_INSERT_ID()": true, "SET a = @@identity": true,
			"SELECT '@x', \"LAST_INSERT_ID()\" -- @x": false, "SHOW TABLES": false,
		}},
		{"Anywhere", func(i Info) bool { return i.Anywhere }, map[string]bool{
			"SELECT @n := @n + 1, p.id FROM p, (SELECT @n := 0) init": true, "SELECT CONNECTION_ID()": true, "KILL QUERY connection_id ( )": true, "SELECT 1; SELECT @a := 1": true,
			"SELECT @n": false, "SELECT @n, ':='": false, "SELECT @n /* := CONNECTION_ID() */": false, "SET @n := @m": false, "SELECT LAST_INSERT_ID()": false, "SELECT connection_id, @n FROM t": false,
		}},
		{"FromClient", func(i Info) bool { return i.FromClient }, map[string]bool{
			"LOAD DATA LOCAL INFILE 'x' INTO TABLE t": true, "/* x */ load data low_priority local infile 'x' into table t": true, "LOAD XML LOCAL INFILE 'x' INTO TABLE t": true, "DO 1; LOAD DATA LOCAL INFILE 'x' INTO TABLE t": true,
			"LOAD DATA INFILE 'x' INTO TABLE t": false, "SELECT 'LOAD DATA LOCAL INFILE'": false, "INSERT INTO local (infile) VALUES (1)": false, "LOAD DATA INFILE 'LOCAL' INTO TABLE `local`": false,
		}},
	} {
		for query, want := range flag.want {
			if got := flag.of(Look(query)); got != want {
				t.Errorf("%q: %s is %v", query, flag.name, got)
			}
		}
	}
}

func TestTheVerbIsThatOfTheFirstWrite(t *testing.T) {
	for q, want := range map[string]string{
		"update t set a = 1": "UPDATE", " /* c */ (SELECT 1)": "SELECT", "SELECT 1; DELETE FROM t; INSERT t VALUES (1)": "DELETE",
		"WITH x AS (SELECT 1) DELETE FROM t": "DELETE", "": "", "?": "", "COMMIT": "COMMIT", "SELECT 'UPDATE'": "SELECT",
	} {
		if got := Verb(q); got != want {
			t.Errorf("%q: %q, want %q", q, got, want)
		}
	}
}
