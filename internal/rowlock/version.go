package rowlock

import (
	"github.com/mysqllock/mysqllock/internal/schema"
)

// Raise returns the statement, for the front of COMMIT, that adds one to the versions of keys, which the open
// transaction has locked. By that a unit of work that uses one of the keys optimistically sees the commit. After an
// error the transaction must be rolled back. For one key:
//
//	UPDATE mysqllock SET token = token + 1, expires = UTC_TIMESTAMP(6) WHERE namespace = 'app' AND name = 'k'
//
// For two, on MariaDB:
//
//	SET STATEMENT sql_safe_updates = 0, sql_big_selects = 1 FOR
//	UPDATE /*+ SET_VAR(sql_big_selects = 1) */ (SELECT 'k' AS n UNION ALL SELECT 'l') d
//	STRAIGHT_JOIN mysqllock ON namespace = 'app' AND name = n SET token = token + 1, expires = UTC_TIMESTAMP(6)
func (l *Locker) Raise(keys []string) string {
	if len(keys) == 1 {
		return "UPDATE " + l.cfg.Table.String() + " SET " + schema.Next + " WHERE " + schema.Row("", l.cfg.Namespace, schema.Literal(keys[0]))
	}
	lines := make([][]string, len(keys))
	for i, key := range keys {
		lines[i] = []string{schema.Literal(key)}
	}
	text := "UPDATE /*+ SET_VAR(sql_big_selects = 1) */ " + schema.List(lines, "n") + " STRAIGHT_JOIN " + l.cfg.Table.String() +
		" ON " + schema.Row("", l.cfg.Namespace, "n") + " SET " + schema.Next
	if l.cfg.Info.Settings { // MariaDB takes the scan of the list for a scan of the table
		return "SET STATEMENT sql_safe_updates = 0, sql_big_selects = 1 FOR " + text
	}
	return text
}
