package optimistic

import (
	"fmt"
	"strings"

	"github.com/mysqllock/mysqllock/internal/schema"
)

// The texts below carry keys as hexadecimal literals, so that each is one round
// trip whatever the DSN, with nothing to quote. All time is the server's.

// readUncommitted is the isolation at which a plain read sees what is then rolled
// back.
const readUncommitted = "READ-UNCOMMITTED"

// readSQL reads the rows of keys: the session's isolation, name, token, whether
// it is settled, how long its lease is still live, and the lease's owner. It is a
// plain read, which waits for nobody. LIMIT is in place of sql_select_limit.
func (l *Locker) readSQL(keys []string) string {
	isolation := "@@transaction_isolation"
	if l.cfg.Info.MariaDB {
		isolation = "@@tx_isolation"
	}
	var in []string
	for _, key := range keys {
		in = append(in, schema.Literal(key))
	}
	return fmt.Sprintf("SELECT %s, name, token, versioned = 1 AND owner IS NULL, %s, owner FROM %s WHERE namespace = %s AND name IN (%s) LIMIT %d",
		isolation, schema.Remaining(""), l.cfg.Table, schema.Literal(l.cfg.Namespace), strings.Join(in, ", "), len(keys))
}

// The two below change rows by an insert that always meets the row which it has
// read, since an UPDATE knows no NOWAIT. On MySQL that is about rows only, so a
// hint, which is a comment elsewhere, bounds how long they wait for who changes
// the table's definition.
const brief = "/*+ SET_VAR(lock_wait_timeout = 1) */"

// settleSQL marks key's row as versioned, and takes a lease off it that has run
// out. rowLocked is what to do where somebody has locked the row.
func (l *Locker) settleSQL(key, rowLocked string) string {
	return fmt.Sprintf("INSERT %[6]s INTO %[1]s (namespace, name, token, expires)"+
		" SELECT r.namespace, r.name, r.token, r.expires FROM %[1]s r WHERE r.namespace = %[2]s AND r.name = %[3]s"+
		" AND (r.versioned = 0 OR r.owner IS NOT NULL) AND NOT %[4]s FOR UPDATE%[5]s"+
		" ON DUPLICATE KEY UPDATE token = r.token + 1, owner = NULL, versioned = 1, expires = UTC_TIMESTAMP(6)",
		l.cfg.Table, schema.Literal(l.cfg.Namespace), schema.Literal(key), schema.Live("r."), rowLocked, brief)
}

// commitSQL compares versions and sets the next ones, each row found by its
// primary key and no other row locked. It counts 2 affected rows a version,
// whatever the DSN's clientFoundRows. A version was never told while the row had
// an owner, live or not.
func (l *Locker) commitSQL(versions []*Version) string {
	var b strings.Builder
	fmt.Fprintf(&b, "INSERT %s INTO %s (namespace, name, token, expires) SELECT r.namespace, r.name, r.token, r.expires FROM (", brief, l.cfg.Table)
	for i, v := range versions {
		form := " UNION ALL SELECT %s, %d"
		if i == 0 {
			form = "SELECT %s AS n, %d AS v"
		}
		fmt.Fprintf(&b, form, schema.Literal(v.key), v.number)
	}
	fmt.Fprintf(&b, ") d STRAIGHT_JOIN %s r ON r.namespace = %s AND r.name = d.n"+
		" WHERE r.token = d.v AND r.versioned = 1 AND r.owner IS NULL FOR UPDATE NOWAIT"+
		" ON DUPLICATE KEY UPDATE token = r.token + 1, expires = UTC_TIMESTAMP(6)", l.cfg.Table, schema.Literal(l.cfg.Namespace))
	return b.String()
}
