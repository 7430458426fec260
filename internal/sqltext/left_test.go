package sqltext

import (
	"errors"
	"strings"
	"testing"
)

// TestTextsLeaveOnAConnectionWhatNoneTakesBack: what there is on a connection after texts, one
// after the other, that are joined by a bar here. One with ! in front fails, one with ? is a query.
func TestTextsLeaveOnAConnectionWhatNoneTakesBack(t *testing.T) {
	const names = "SET NAMES, for which the DSN has charset="
	for texts, want := range map[string]string{
		"SELECT 1": "", "INSERT INTO t VALUES (1)": "", "BEGIN": "", "COMMIT": "", "CREATE TABLE t (a INT)": "", "LOAD DATA INFILE 'x' INTO TABLE t": "",

		"SET @who = 'me'": "SET", "SET @a := @b": "SET", "SELECT 5 INTO @who": "SELECT", "SELECT a, 1 INTO @a, @b FROM t": "SELECT", "(SELECT 5) INTO @who": "SELECT",
		"SELECT @n := @n + 1, p.id FROM p, (SELECT @n := 0) init": "user variables", "SELECT @a := 1 INTO @b": "SELECT, user variables",
		"LOAD DATA INFILE 'x' INTO TABLE t (a, @b)": "LOAD", "GET DIAGNOSTICS @n = NUMBER": "GET", "SELECT ':=', @a": "",
		"CALL p()": "", "CALL p(1, 'x')": "", "CALL p(@out)": "CALL", "USE shop": "USE", "use `shop`;": "USE", "HANDLER t OPEN": "HANDLER", "EXECUTE s": "EXECUTE",

		"SET time_zone = '+03:00'": "SET time_zone", "SET time_zone = '+03:00'|SET time_zone = DEFAULT": "", "set @@session.sql_mode = ''": "SET sql_mode",
		"SET FOREIGN_KEY_CHECKS = 0;|SET @@local.foreign_key_checks := ON": "", "SET SESSION unique_checks = 0|SET unique_checks=1": "",
		"SET `timestamp` = 5": "SET timestamp", "SET timestamp = 5|SET TIMESTAMP = 0": "", "SET completion_type = 1|SET completion_type = 'NO_CHAIN'": "",
		"SET a = -1, b = 'x, y'": "SET a, SET b", "SET a = 1024 * 1024": "SET a", "SET sql_mode = CONCAT(@@sql_mode, ',ANSI')": "SET sql_mode",
		"SET a = 'default'": "SET a", "SET unique_checks = 1 - 1": "SET unique_checks", "SET a = 1|SET b = DEFAULT": "SET a",
		"SET NAMES latin1": names, "SET CHARACTER SET utf8": names, "SET CHARSET utf8": names, "SET NAMES utf8mb4, autocommit = 0": "SET NAMES, for which the DSN has charset=, SET autocommit",
		"SET GLOBAL a = 1": "", "SET GLOBAL a := 1": "", "SET PERSIST a = 1, b = 2": "", "SET @@global.a = 1": "", "SET GLOBAL a = 1, SESSION b = 2": "SET b",
		"SET PASSWORD FOR u = 'x, y'": "", "SET DEFAULT ROLE a, b TO u": "", "SET ROLE NONE": "SET",
		"SET TRANSACTION READ ONLY": "", "SET SESSION TRANSACTION READ ONLY": "SET", "SET STATEMENT a = 1 FOR SELECT 1": "", "SET STATEMENT a = 1 FOR SELECT 1 INTO @x": "SELECT",

		"CREATE TEMPORARY TABLE a (b INT)": "CREATE TEMPORARY TABLE", "CREATE OR REPLACE TEMPORARY TABLE IF NOT EXISTS a SELECT 1": "CREATE TEMPORARY TABLE",
		"CREATE TEMPORARY TABLE `a` (b INT)|DROP TABLE a": "", "CREATE TEMPORARY TABLE a (b INT)|drop temporary table if exists A;": "",
		"CREATE TEMPORARY TABLE s . a (b INT)|DROP TABLE `s`.`a`": "", "CREATE TEMPORARY TABLE a (b INT)|DROP TABLE b": "CREATE TEMPORARY TABLE",
		"CREATE TEMPORARY TABLE a (b INT)|DROP TABLE a, b": "CREATE TEMPORARY TABLE", "CREATE TEMPORARY TABLE a (b INT)|DROP TABLE s.a": "CREATE TEMPORARY TABLE",
		"CREATE TEMPORARY SEQUENCE s": "CREATE", "DROP TEMPORARY TABLE a, b": "DROP", "DROP TABLE a": "",
		"PREPARE s FROM 'SELECT 1'": "PREPARE", "PREPARE s FROM 'SELECT 1'|DEALLOCATE PREPARE S": "", "PREPARE s FROM 'SELECT 1'|DROP PREPARE s": "", "PREPARE s FROM 'SELECT 1'|DROP PREPARE t": "PREPARE",
		"LOCK TABLES a READ": "LOCK TABLES", "LOCK TABLES a READ|UNLOCK TABLES": "", "LOCK TABLE a READ|unlock table;": "", "UNLOCK INSTANCE": "UNLOCK", "BACKUP STAGE START": "BACKUP",
		"FLUSH PRIVILEGES": "", "FLUSH TABLES": "", "FLUSH LOCAL TABLES": "FLUSH", "FLUSH BINARY LOGS": "", "FLUSH TABLES WITH READ LOCK": "FLUSH", "FLUSH TABLES logs WITH READ LOCK": "FLUSH", "FLUSH TABLES a FOR EXPORT": "FLUSH",

		"DO GET_LOCK('a', 0)": "GET_LOCK", "SELECT get_lock /* x */ (?, 0)": "GET_LOCK", "SET @x = GET_LOCK('a', 0)": "SET", "SELECT GET_LOCK('a', 0) INTO @x": "SELECT",
		"DO GET_LOCK('a', 0)|DO RELEASE_LOCK('a')": "", "SELECT GET_LOCK('a', 0), GET_LOCK('b', 0)|DO RELEASE_LOCK('a')": "GET_LOCK",
		"SELECT GET_LOCK('a', 0), GET_LOCK('b', 0)|DO RELEASE_ALL_LOCKS()": "", `DO GET_LOCK('it\'s', 0)|DO RELEASE_LOCK('it\'s')`: "GET_LOCK",
		`DO GET_LOCK('a', 0)|SELECT 'it\'s', RELEASE_LOCK('a')`: "GET_LOCK", // which may be read in several ways
		"SELECT 'GET_LOCK(1)'": "", "SELECT `get_lock`(1)": "SELECT", "SELECT service_get_write_locks('a', 'b', 1)": "SELECT",

		// Comments, and texts of several statements.
		"/* by x */ SET unique_checks = 0|SET unique_checks = 1 -- by x": "", "/*!40101 SET NAMES utf8 */;": names + ", SQL text",
		"SET unique_checks = 0|/*!40014 SET unique_checks = 1 */": "SET unique_checks, SQL text", "/*!1*/ /*!2*/ /*!3*/ /*!4*/ SET NAMES utf8": names + ", SQL text", "SELECT $$a$$; SET a = 1": "SQL text",
		"SET unique_checks = 0; UPDATE p SET a = 'x;y'; SET unique_checks = 1;": "", "BEGIN; SET unique_checks = 0; SET unique_checks = 1; COMMIT": "",
		"SET unique_checks = 1; SET unique_checks = 0": "SET unique_checks", "DO GET_LOCK('a', 0); DO RELEASE_LOCK('a'); DO GET_LOCK('b', 0)": "GET_LOCK",
		"SET unique_checks = 0; UPDATE p SET a = ';SET unique_checks = 1;'": "SET unique_checks", `SET a = 1; SELECT 'x\'; SET a = DEFAULT -- '`: "SET a",
		"SET unique_checks = 0|CREATE PROCEDURE p() BEGIN DO 1; SET unique_checks = 1; SET @x = 1; END": "SET, SET unique_checks",
		"SET unique_checks = 0|BEGIN NOT ATOMIC DO 1; SET unique_checks = 1; END":                       "BEGIN, SET unique_checks", "IF 1 THEN DO 1; END IF": "IF",

		// What has failed may have left something, and takes nothing back.
		"!SET a = 1": "SET a", "SET a = 1|!SET a = DEFAULT, b = DEFAULT": "SET a", "!SET unique_checks = 0; DO 1; SET unique_checks = 1": "SET unique_checks", "!DO GET_LOCK('a', 0)": "GET_LOCK",
		"DO GET_LOCK('a', 0)|!DO RELEASE_LOCK('a')": "GET_LOCK", "DO GET_LOCK('a', 0)|!DO RELEASE_ALL_LOCKS()": "GET_LOCK", "SET a = 'open": "", "CREATE TEMPORARY TABLE a (b INT)|!DROP TABLE a": "CREATE TEMPORARY TABLE",
		"?SET unique_checks = 0; SELECT 1; SET unique_checks = 1": "SET unique_checks", "SET unique_checks = 0|?SET unique_checks = 1; SELECT 1": "SET unique_checks", "?SELECT 1; SET a = 1": "SET a",
	} {
		var l Left
		for text := range strings.SplitSeq(texts, "|") {
			rest, failed := strings.CutPrefix(text, "!")
			rest, query := strings.CutPrefix(rest, "?")
			var err error
			if failed {
				err = errors.New("it has failed")
			}
			l.Note(rest, Look(rest), query, err)
		}
		got := l.String()
		if l.UserVariables() {
			got = strings.TrimPrefix(got+", user variables", ", ")
		}
		if got != want {
			t.Errorf("%s\n got %s\nwant %s", texts, got, want)
		}
		if name := "unique_checks"; l.Variable(name) != strings.Contains(want, name) {
			t.Errorf("%s: Variable says %v", texts, l.Variable(name))
		}
	}
}
