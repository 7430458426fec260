package rowlock

import (
	"fmt"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
)

// The texts below carry keys as hexadecimal literals, so that each is one
// round trip whatever the DSN, with nothing to quote. Every lock statement
// returns one row a key, in their order, which tells the connection's id for
// free, and the key's lease: a missing row is a key that is not locked.

// leaseColumns are how long the lease is still live, the token, and the owner.
var leaseColumns = schema.Remaining("") + ", token, owner"

// selects returns one locking read for all keys: a UNION ALL of single-row
// reads, since an IN list can lock every row of a small table (measured on
// MySQL 9.7). hint goes behind the first SELECT, tail behind each FOR UPDATE.
func (l *Locker) selects(keys []string, hint, tail string) string {
	one := func(key, hint string) string {
		return "SELECT " + hint + "CONNECTION_ID(), " + leaseColumns + ", versioned FROM " + l.cfg.Table.String() + " WHERE namespace = " + schema.Literal(l.cfg.Namespace) +
			" AND name = " + schema.Literal(key) + " FOR UPDATE" + tail
	}
	if len(keys) == 1 {
		return one(keys[0], hint)
	}
	var b strings.Builder
	for i, key := range keys {
		if i > 0 {
			b.WriteString(" UNION ALL ")
			hint = ""
		}
		b.WriteString("(" + one(key, hint) + ")")
	}
	return b.String()
}

// trySQL locks keys in the open transaction or fails at once.
func (l *Locker) trySQL(keys []string) string { return l.selects(keys, "", " NOWAIT") }

// waitSQL locks keys in the open transaction and queues in the server. The
// server ends it after bound, so that a waiter whose client is gone disappears
// by itself. mark makes its text unique, for KILL.
func (l *Locker) waitSQL(keys []string, bound time.Duration, mark string) string {
	comment := " /* mysqllock " + mark + " */"
	if l.cfg.Info.MariaDB {
		return fmt.Sprintf("SET STATEMENT max_statement_time = %.3f FOR ", bound.Seconds()) + l.selects(keys, "", "") + comment
	}
	return l.selects(keys, fmt.Sprintf("/*+ MAX_EXECUTION_TIME(%d) */ ", bound.Milliseconds()), "") + comment
}

// beginSQL begins a transaction and locks keys in it or fails at once, in one
// round trip; "" where the server has no way to. After a failure the
// transaction is open all the same.
//
// MariaDB runs an anonymous block, in which NOWAIT is not allowed (error 1314)
// but a lock wait timeout of 0 means the same. There the transaction also gets
// a limit on its idleness, which MySQL has no variable for: a holder whose host
// vanished without closing the connection frees the lock within the TTL.
func (l *Locker) beginSQL(keys []string) string {
	if l.cfg.Info.MariaDB {
		limit := ""
		if s := l.IdleLimit(); s > 0 {
			limit = IdleLimitSQL(s) + "; "
		}
		return "BEGIN NOT ATOMIC " + limit + "START TRANSACTION; SET STATEMENT innodb_lock_wait_timeout = 0 FOR " +
			l.selects(keys, "", "") + "; END"
	}
	if !l.cfg.Rows.Procedure() || len(keys) != 1 {
		return ""
	}
	return "CALL " + l.cfg.Table.Procedure() + "(" + schema.Literal(l.cfg.Namespace) + ", " + schema.Literal(keys[0]) + ", FALSE)"
}

// IdleLimitSQL sets MariaDB's limit on the idleness of transactions, in seconds,
// until it is set again.
func IdleLimitSQL(seconds int) string {
	return fmt.Sprintf("SET SESSION idle_transaction_timeout = %d", seconds)
}

// leaseSQL reads which of keys have a live lease: the key and leaseColumns. It
// is a plain read, which waits for nobody.
func (l *Locker) leaseSQL(keys []string) string {
	var in []string
	for _, key := range keys {
		in = append(in, schema.Literal(key))
	}
	return "SELECT name, " + leaseColumns + " FROM " + l.cfg.Table.String() + " WHERE namespace = " + schema.Literal(l.cfg.Namespace) +
		" AND name IN (" + strings.Join(in, ", ") + ") AND " + schema.Live("")
}

// holderSQL asks who holds one of keys while waiter, a connection id, waits for
// them: id, user, host, program, age in microseconds. On MySQL it also works
// when nobody waits; MariaDB lists a lock only while somebody does. The server
// ends the question after bound.
func (l *Locker) holderSQL(keys []string, waiter uint64, bound time.Duration) string {
	if l.cfg.Info.MariaDB {
		return fmt.Sprintf("SET STATEMENT max_statement_time = %.3f FOR "+
			"SELECT b.trx_mysql_thread_id, p.USER, p.HOST, '', TIMESTAMPDIFF(MICROSECOND, b.trx_started, NOW(6))"+
			" FROM information_schema.INNODB_LOCK_WAITS w"+
			" JOIN information_schema.INNODB_TRX r ON r.trx_id = w.requesting_trx_id"+
			" JOIN information_schema.INNODB_TRX b ON b.trx_id = w.blocking_trx_id"+
			" LEFT JOIN information_schema.PROCESSLIST p ON p.ID = b.trx_mysql_thread_id"+
			" WHERE r.trx_mysql_thread_id = %d AND b.trx_state <> 'LOCK WAIT' LIMIT 1", bound.Seconds(), waiter)
	}
	var data []string // as data_locks prints a row's primary key
	for _, key := range keys {
		data = append(data, fmt.Sprintf("'0x%X, 0x%X'", l.cfg.Namespace, key))
	}
	return fmt.Sprintf("SELECT /*+ MAX_EXECUTION_TIME(%d) */ t.PROCESSLIST_ID, t.PROCESSLIST_USER, t.PROCESSLIST_HOST,"+
		" (SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a WHERE a.PROCESSLIST_ID = t.PROCESSLIST_ID"+
		" AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1),"+
		" (SELECT x.TIMER_WAIT DIV 1000000 FROM performance_schema.events_transactions_current x"+
		" WHERE x.THREAD_ID = t.THREAD_ID AND x.STATE = 'ACTIVE')"+
		" FROM performance_schema.data_locks l JOIN performance_schema.threads t ON t.THREAD_ID = l.THREAD_ID"+
		" WHERE %s AND l.LOCK_TYPE = 'RECORD' AND l.LOCK_STATUS = 'GRANTED' AND l.LOCK_DATA IN (%s) AND t.PROCESSLIST_ID <> %d LIMIT 1",
		bound.Milliseconds(), l.cfg.Table.Where("l.OBJECT_SCHEMA", "l.OBJECT_NAME"), strings.Join(data, ", "), waiter)
}
