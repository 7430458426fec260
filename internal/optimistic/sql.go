package optimistic

import (
	"strconv"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// All times in the statements below are the server's. A comment shows a statement with 'app' where the text has x'617070',
// and the table without its database: see package schema.

// readUncommitted is the isolation level at which a plain read sees uncommitted rows.
const readUncommitted = "READ-UNCOMMITTED"

// readSQL reads the rows of keys: the session's isolation level, name, token, whether the
// row is prepared, the remaining time of its lease, and the lease's owner. It is a plain
// read, which waits for no lock. LIMIT overrides sql_select_limit.
//
//	SELECT /*+ SET_VAR(sql_big_selects = 1) MAX_EXECUTION_TIME(4294967295) */
//	  @@transaction_isolation, name, token, versioned = 1 AND owner IS NULL,
//	  IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0), owner
//	FROM mysqllock WHERE namespace = 'app' AND name IN ('k', 'l') LIMIT 2
func (l *Locker) readSQL(keys []string) string {
	return l.big(len(keys)) + "SELECT /*+ SET_VAR(sql_big_selects = 1) MAX_EXECUTION_TIME(4294967295) */ " +
		l.cfg.Info.IsolationVariable() + ", name, token, " + schema.Prepared + ", " + schema.Remaining("") + ", owner" +
		" FROM " + l.cfg.Table.String() + " WHERE " + schema.Rows(l.cfg.Namespace, keys) + " LIMIT " + strconv.Itoa(len(keys))
}

// The two statements below change rows by an INSERT that always hits the row that it has
// read, because UPDATE has no NOWAIT.

// prepareRowSQL marks key's row as versioned, and removes an expired lease from it. rowLocked
// says what to do if the row is locked.
//
//	INSERT /*+ SET_VAR(lock_wait_timeout = 1) SET_VAR(sql_big_selects = 1) */ INTO mysqllock (namespace, name, token, expires)
//	SELECT r.namespace, r.name, r.token, r.expires FROM mysqllock r
//	WHERE r.namespace = 'app' AND r.name = 'k' AND (r.versioned = 0 OR r.owner IS NOT NULL)
//	  AND NOT (r.owner IS NOT NULL AND r.expires > UTC_TIMESTAMP(6)) FOR UPDATE NOWAIT
//	ON DUPLICATE KEY UPDATE token = r.token + 1, owner = NULL, versioned = 1, expires = UTC_TIMESTAMP(6)
func (l *Locker) prepareRowSQL(key, rowLocked string) string {
	t := l.cfg.Table.String()
	return "INSERT " + server.Brief + " INTO " + t + " (namespace, name, token, expires)" +
		" SELECT r.namespace, r.name, r.token, r.expires FROM " + t + " r" +
		" WHERE " + schema.Row("r.", l.cfg.Namespace, schema.Literal(key)) +
		" AND (r.versioned = 0 OR r.owner IS NOT NULL) AND NOT " + schema.Live("r.") + " FOR UPDATE" + rowLocked +
		" ON DUPLICATE KEY UPDATE token = r.token + 1, owner = NULL, versioned = 1, expires = UTC_TIMESTAMP(6)"
}

// big precedes a statement for so many rows on MariaDB: the application may limit how many rows a
// statement examines. For MySQL there is a hint.
func (l *Locker) big(rows int) string {
	if l.cfg.Info.Settings && rows > 1 {
		return "SET STATEMENT sql_big_selects = 1 FOR "
	}
	return ""
}

// compareSQL compares versions and sets the next ones. It finds each row by its primary key,
// and locks no other row. It counts 2 affected rows for each version, with and without
// clientFoundRows in the DSN. No version was returned while the row had an owner. For two versions:
//
//	INSERT /*+ SET_VAR(lock_wait_timeout = 1) SET_VAR(sql_big_selects = 1) */ INTO mysqllock (namespace, name, token, expires)
//	SELECT r.namespace, r.name, r.token, r.expires FROM (SELECT 'k' AS n, 7 AS v UNION ALL SELECT 'l', 3) d
//	STRAIGHT_JOIN mysqllock r ON r.namespace = 'app' AND r.name = d.n
//	WHERE r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE NOWAIT
//	ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6)
func (l *Locker) compareSQL(versions []*Version) string {
	lines := make([][]string, len(versions))
	for i, v := range versions {
		lines[i] = []string{schema.Literal(v.key), strconv.FormatUint(v.number, 10)}
	}
	t := l.cfg.Table.String()
	return l.big(len(versions)) + "INSERT " + server.Brief + " INTO " + t + " (namespace, name, token, expires)" +
		" SELECT r.namespace, r.name, r.token, r.expires FROM " + schema.List(lines, "n", "v") +
		" STRAIGHT_JOIN " + t + " r ON " + schema.Row("r.", l.cfg.Namespace, "d.n") +
		" WHERE r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE NOWAIT" +
		" ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6)"
}
