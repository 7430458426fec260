package sqltext

import "strings"

const worstWords = "Commits snapshot taints"

var commits = []look{
	{"BEGIN", "Commits"},
	{"begin work;", "Commits"},
	{"BEGIN NOT ATOMIC SELECT 1; END", worstWords},
	{"BEGIN COMMIT; END", worstWords}, // MariaDB's Oracle mode
	{"START TRANSACTION", "Commits snapshot"},
	{"START TRANSACTION READ ONLY", "Commits snapshot"},
	{"START TRANSACTION READ WRITE, WITH CONSISTENT SNAPSHOT", "Commits snapshot"},
	{"START REPLICA", "Commits"},
	{"START SLAVE UNTIL x", "Commits"},
	{"STOP GROUP_REPLICATION", "Commits"},
	{"COMMIT", "Commits"},
	{"COMMIT WORK", "Commits"},
	{"COMMIT AND CHAIN", "Commits"},
	{"COMMIT WORK AND NO CHAIN RELEASE", "Commits"},
	{"ROLLBACK", "Commits"},
	{"ROLLBACK WORK AND CHAIN NO RELEASE", "Commits"},
	{"XA START 'x'", "Commits"},
	{"XA END 'x'", "Commits"},
	{"XA COMMIT 'x' ONE PHASE", "Commits"},
	{"CREATE TABLE t (a INT)", "Commits"},
	{"CREATE OR REPLACE VIEW v AS SELECT a FROM t", "Commits"},
	{"CREATE UNIQUE INDEX i ON t (a)", "Commits"},
	{"CREATE TEMPORARY SEQUENCE s", "Commits taints"}, // *
	{"CREATE PROCEDURE p() BEGIN SELECT 1; COMMIT; END", "Commits"},
	{"DROP TABLE t", "Commits"},
	{"ALTER TABLE t ADD a INT", "Commits"},
	{"TRUNCATE t", "Commits"},
	{"RENAME TABLE t TO u", "Commits"},
	{"GRANT SELECT ON x.* TO y", "Commits"},
	{"LOCK TABLES t READ", "Commits taints"},
	{"UNLOCK TABLES", "Commits taints"},
	{"FLUSH TABLES WITH READ LOCK", "Commits taints"},
	{"BACKUP STAGE START", "Commits taints"}, // *
	{"RESET REPLICA", "Commits"},
	{"CHANGE REPLICATION SOURCE TO x=1", "Commits"},
	{"CHECK TABLE t", "Commits"},
	{"CACHE INDEX t IN x", "Commits"},
	{"LOAD INDEX INTO CACHE t", "Commits"},
	{"INSTALL SONAME 'x'", "Commits"},
	{"IMPORT TABLE FROM 'x'", "Commits"},
	{"CLONE LOCAL DATA DIRECTORY='/x'", "Commits"},
	{"EXECUTE s", worstWords},
	{"EXECUTE IMMEDIATE 'COMMIT'", worstWords},
	{"BINLOG 'x'", worstWords},
	{"IF 1 THEN COMMIT; END IF", worstWords},
	{"FOR i IN 1..2 DO COMMIT; END FOR", worstWords},
}

var several = []look{
	{"SELECT 1; COMMIT", "Commits"},
	{"SELECT 1; ; COMMIT;", "Commits"},
	{"(SELECT 1; COMMIT", "Commits snapshot"},
	{"SELECT a FROM t; SELECT 1", "Read snapshot"},
	{"SELECT a FROM t; DELETE FROM t", "Write snapshot"},
	{"DELETE FROM t; SELECT @a := 1", "Write taints"},
	{"COMMIT; SELECT 1", "Commits"},
	{"BEGIN; SELECT a FROM t", "Commits snapshot"},
	{"SELECT 1; BEGIN", "Commits"},
	{"SELECT 1;", "Read"},
	{";SELECT 1", "Read"},
	{"SELECT a FROM t FOR UPDATE; SELECT 1", "Read"},
}

var comments = []look{
	{"/* a */ -- b\n# c\n \t\v\f\rSELECT/**/1", "Read"},
	{"SELECT 1 -- ; COMMIT", "Read"},
	{"SELECT 1 --", "Read"},
	{"SELECT 1 --; COMMIT", "Commits"}, // no space: two minus signs
	{"SELECT 1 --\n; COMMIT", "Commits"},
	{"SELECT 1 --\x01 ; COMMIT", "Read"},
	{"SELECT 1 --\x7f ; COMMIT", "Read"},
	{"SELECT 1 # ; COMMIT", "Read"},
	{"SELECT 1 # \r ; COMMIT", "Read"},
	{"SELECT 1 # \n ; COMMIT", "Commits"},
	{"SELECT 1 # \x00 ; COMMIT", "Commits"},
	{"SELECT /* ; COMMIT */ 1", "Read"},
	{"SELECT /* a /* b */ 1; COMMIT", "Commits"}, // they don't nest
	{"SELECT /*+ NO_MERGE(`a`) */ 1", "Read"},
	{"SELECT /*+ QB_NAME(`*/ 1; COMMIT /*`) */", "Commits"}, // * quotes don't protect
	{"SELECT 2*/*c*/3", "Read"},
	{"/*m! COMMIT */ SELECT 1", "Read"},
	{"/* ! COMMIT */ SELECT 1", "Read"},
	{"/*!50000 COMMIT */", worstWords},
	{"/*!COMMIT*/", worstWords},
	{"/*M!100000 COMMIT */", worstWords},
	{"/*!40101 SET NAMES utf8 */;", worstWords},
	{"SELECT /*!40001 SQL_NO_CACHE */ * FROM t", "Write snapshot functions"},
	{"SELECT a /*!50000 FROM t */", "Write snapshot functions"},
	{"SELECT * FROM t FOR /*!80000 UPDATE */", "Write snapshot functions"},
	{"/*!80000 SELECT 1 */", worstWords},
	{"/*!80000 EXPLAIN */ DELETE FROM t", worstWords},
	{"DELETE /*M! FROM t */", "Write snapshot"},
	{"/*!90000 SELECT */ /*!80000 COMMIT */", worstWords}, // MySQL 8 runs the second only
	{"CREATE /*!99999 TEMPORARY */ TABLE t (a INT)", worstWords},
	{"SELECT a FROM /*!50708 t */ /*M!100000 u */ WHERE a", "Write snapshot functions"},
	{"SELECT 1 /*!99999 ; COMMIT */", worstWords},
	{"SELECT /*!50000 '*/' */ 1", "Write snapshot functions"},
	{"SELECT /*!99999 '*/' ; COMMIT; SELECT ' */ 1'", worstWords},
	{"SELECT /*!50000 1 /* b */ */", "Write snapshot functions"}, // nested
	{"SELECT /*!50000 '*/', /* b */ 1 */", "Write snapshot functions"},
	{"SELECT 1 /*!99999 '/*' */", "Write snapshot functions"},
	{"/*!80000 SELECT 1 */ /*M!80000 COMMIT */", worstWords},
	{"SELECT /*!1*/ /*!2*/ /*!3*/ 1", "Write snapshot functions"},
	{"SELECT /*!1*/ /*!2*/ /*!3*/ /*!4*/ 1", "Write snapshot functions"}, // too many to try
	{"SELECT '/*!1 /*!2 /*!3 /*!4', 1", "Read"},
	{"COMMIT /* unterminated", "Write"}, // rejected by both servers
	{"COMMIT /*! unterminated", worstWords},
	{"COMMIT; /*!99999 unterminated", worstWords},
}

var quotes = []look{
	{`SELECT '; COMMIT'`, "Read"},
	{`SELECT "; COMMIT"`, "Read"},
	{"SELECT `; COMMIT`", "Read"},
	{"SELECT `a\\`; COMMIT", "Commits"}, // no escapes in backticks
	{`SELECT 'a''; COMMIT'`, "Read"},
	{`SELECT 'a\\'; COMMIT`, "Commits"},
	{`SELECT 'a', '--', '#', '/*'; COMMIT`, "Commits"},
	{`SELECT @'; COMMIT', @"; COMMIT"`, "Read"},
	{`SELECT x'41', N'a', _utf8'; COMMIT', b'1'`, "Read"},
	{`SELECT 'it\'s'`, "Read"},
	{`SELECT * FROM t WHERE a='it\'s' FOR UPDATE`, "Read"},
	{`INSERT INTO t VALUES ('it\'s; for a while', 'it\'s')`, "Write"},
	{`INSERT INTO t VALUES ('it\'s; commit it, it\'s done', 1)`, "Write"},
	{`SELECT 'a\';COMMIT;-- '`, "Commits"},   // with NO_BACKSLASH_ESCAPES
	{`SELECT 1 "a\";COMMIT;-- "`, "Commits"}, // with ANSI_QUOTES
	{`SELECT 1 "a\"; COMMIT`, "Commits"},
	{`SELECT 'a\'', "b\";COMMIT;-- "`, "Commits"},
	{`CREATE TABLE t (a ENUM('it\'s'))`, "Commits"},
	{`SELECT 'unterminated; COMMIT`, "Write"},
	{"SELECT `unterminated; COMMIT", "Write"},
	{`SELECT 1; DELETE FROM t WHERE 'unterminated`, "Read"}, // the second is rejected
	{`SELECT \N; COMMIT`, "Commits"},
	{`SELECT \ ; COMMIT`, "Write"},
	{"SELECT 'a\xe5\\'; COMMIT", worstWords},             // gbk
	{"SELECT '\\'\xe5\\'; COMMIT", worstWords},           // gbk, and an escape
	{"SELECT \x83` ; COMMIT ; SELECT \x83`", worstWords}, // sjis
	{"SELECT 1 AS \xe5\\; COMMIT", worstWords},           // gbk, outside of quotes
	{"SELECT '\xff\xfe'", "Read"},
	{"SELECT größe FROM t FOR UPDATE", "Read"},
	{"SELECT 1; \xa0COMMIT", worstWords}, // latin1's no-break space
	{"COMMIT\xa0", worstWords},
	{"SELECT * FROM t WHERE a IN (\xa0SELECT a FROM u) FOR UPDATE", "Write snapshot functions"},
	{"\u00a0SELECT 1", worstWords},
	{"SELECT 1; ſELECT", worstWords},
	{"SELECT $$ ; COMMIT; $$", worstWords}, // * quotes on MySQL 9
	{"SELECT $x FROM t$", "Read snapshot"},
	{"COMMIT\x00", "Commits"}, // *
	{"SELECT " + strings.Repeat("x", 100), "Read"},
	{strings.Repeat("SELECT", 10), "Write"},
}
