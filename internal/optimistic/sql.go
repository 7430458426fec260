package optimistic

import (
	"fmt"
	"strconv"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// All times in the statements below are the server's.

// readUncommitted is the isolation level at which a plain read sees uncommitted rows.
const readUncommitted = "READ-UNCOMMITTED"

// readSQL reads the rows of keys: the session's isolation level, name, token, whether the
// row is prepared, the remaining time of its lease, and the lease's owner. It is a plain
// read, which waits for no lock. LIMIT overrides sql_select_limit.
func (l *Locker) readSQL(keys []string) string {
	return l.big(len(keys)) + fmt.Sprintf("SELECT /*+ SET_VAR(sql_big_selects = 1) MAX_EXECUTION_TIME(4294967295) */ %s,"+
		" name, token, "+schema.Prepared+", %s, owner FROM %s WHERE %s LIMIT %d",
		l.cfg.Info.IsolationVariable(), schema.Remaining(""), l.cfg.Table, schema.Rows(l.cfg.Namespace, keys), len(keys))
}

// The two statements below change rows by an INSERT that always hits the row that it has
// read, because UPDATE has no NOWAIT.

// prepareRowSQL marks key's row as versioned, and removes an expired lease from it. rowLocked
// says what to do if the row is locked.
func (l *Locker) prepareRowSQL(key, rowLocked string) string {
	return fmt.Sprintf("INSERT %s INTO %[2]s (namespace, name, token, expires)"+
		" SELECT r.namespace, r.name, r.token, r.expires FROM %[2]s r WHERE %[3]s"+
		" AND (r.versioned = 0 OR r.owner IS NOT NULL) AND NOT %[4]s FOR UPDATE%[5]s"+
		" ON DUPLICATE KEY UPDATE token = r.token + 1, owner = NULL, versioned = 1, expires = UTC_TIMESTAMP(6)",
		server.Brief, l.cfg.Table, schema.Row("r.", l.cfg.Namespace, schema.Literal(key)), schema.Live("r."), rowLocked)
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
// clientFoundRows in the DSN. No version was returned while the row had an owner.
func (l *Locker) compareSQL(versions []*Version) string {
	lines := make([][]string, len(versions))
	for i, v := range versions {
		lines[i] = []string{schema.Literal(v.key), strconv.FormatUint(v.number, 10)}
	}
	return l.big(len(versions)) + fmt.Sprintf("INSERT %s INTO %[2]s (namespace, name, token, expires)"+
		" SELECT r.namespace, r.name, r.token, r.expires FROM %[3]s STRAIGHT_JOIN %[2]s r ON %[4]s"+
		" WHERE r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE NOWAIT"+
		" ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6)",
		server.Brief, l.cfg.Table, schema.List(lines, "n", "v"), schema.Row("r.", l.cfg.Namespace, "d.n"))
}
