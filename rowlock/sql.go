package rowlock

import (
	"database/sql/driver"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// The texts below carry keys as hexadecimal literals, so that each is one
// round trip whatever the DSN, with nothing to quote. Every lock statement
// returns one row a key, in their order, which tells the connection's id for
// free, and the key's lease: a missing row is a key that is not locked. Only the
// texts of beginSQL, which are there for speed, may be answered with nothing at all
// where a row has nothing to tell.

// leaseColumns are how long the lease is still live, the token, and the owner.
var leaseColumns = schema.Remaining("") + ", token, owner"

// selects returns one locking read for all keys: a UNION ALL of single-row
// reads, since an IN list can lock every row of a small table (measured on
// MySQL 9.7). LIMIT is in place of sql_select_limit. hint goes behind the first SELECT, tail behind each lock.
func (l *Locker) selects(keys []Key, hint, tail string) string {
	return l.selectsWith(leaseColumns, keys, hint, tail)
}

// selectsWith is selects with other columns for the lease.
func (l *Locker) selectsWith(leaseColumns string, keys []Key, hint, tail string) string {
	one := func(key Key, hint string) string {
		return "SELECT " + hint + columns(leaseColumns) + l.fromRow + schema.Literal(key.Name) + l.rowLock(key) + tail
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
	return b.String() + " LIMIT " + strconv.Itoa(len(keys))
}

// columns are those of a lock statement.
func columns(leaseColumns string) string {
	return "CONNECTION_ID(), " + leaseColumns + ", versioned, " + server.WritableColumns
}

// rowLock is how a read locks. What is shared both servers know by different names:
// MySQL's takes NOWAIT, and MariaDB knows no other.
func (l *Locker) rowLock(key Key) string {
	switch {
	case !key.Shared:
		return " FOR UPDATE"
	case l.cfg.Info.MariaDB:
		return " LOCK IN SHARE MODE"
	}
	return " FOR SHARE"
}

// freeSQL returns one of slots that nobody has, beginning with a random one:
// processes that all began with the first would be in each other's way. Each row
// is looked up by its primary key, until one is found.
func (a *attempt) freeSQL(slots []int) string {
	n := len(slots)
	var lines []string
	for i, first := 0, rand.N(n); i < n; i++ {
		slot := slots[(first+i)%n]
		lines = append(lines, fmt.Sprintf("SELECT %d AS i, %s AS n", slot, schema.Literal(a.r.Slots[slot])))
	}
	skip := ""
	if a.cfg.Info.SkipLocked() {
		skip = " FOR UPDATE SKIP LOCKED"
	}
	return "SELECT i FROM (" + strings.Join(lines, " UNION ALL ") + ") d STRAIGHT_JOIN " + a.cfg.Table.String() +
		" ON namespace = " + schema.Literal(a.cfg.Namespace) + " AND name = n WHERE NOT " + schema.Live("") + " LIMIT 1" + skip
}

// trySQL locks the keys in the open transaction or fails at once.
func (a *attempt) trySQL() string {
	if a.streams() {
		return "BEGIN NOT ATOMIC " + a.certifySQL() + "; END"
	}
	return a.selects(a.keys, "", " NOWAIT")
}

// certifySQL locks the keys on all nodes of a Galera cluster, or fails at once. A
// change is what the others hear of, and they have agreed to that of a row when
// the UPDATE returns. A row with a live lease stays as it is, which its owner
// shows: the lease may run out before the answer is made.
func (a *attempt) certifySQL() string {
	var b strings.Builder
	for _, key := range a.keys {
		fmt.Fprintf(&b, "SET STATEMENT innodb_lock_wait_timeout = 0, wsrep_trx_fragment_unit = 'rows', wsrep_trx_fragment_size = 1 FOR UPDATE %s"+
			" SET owner = NULL, expires = GREATEST(UTC_TIMESTAMP(6), expires + INTERVAL 1 MICROSECOND) WHERE namespace = %s AND name = %s AND NOT %s; ",
			a.cfg.Table, schema.Literal(a.cfg.Namespace), schema.Literal(key.Name), schema.Live(""))
	}
	return b.String() + "SET STATEMENT innodb_lock_wait_timeout = 0 FOR " + a.selectsWith("IF(owner IS NULL, 0, GREATEST(1, "+schema.Remaining("")+")), token, owner", a.keys, "", "")
}

// waitSQL locks keys in the open transaction and queues in the server. The
// server ends it after bound, so that a waiter whose client is gone disappears
// by itself. mark makes its text unique, for KILL.
func (l *Locker) waitSQL(keys []Key, bound time.Duration, mark string) string {
	comment := " /* mysqllock " + mark + " */"
	if l.cfg.Info.MariaDB {
		return fmt.Sprintf("SET STATEMENT max_statement_time = %.3f FOR ", bound.Seconds()) + l.selects(keys, "", "") + comment
	}
	return l.selects(keys, fmt.Sprintf("/*+ MAX_EXECUTION_TIME(%d) */ ", bound.Milliseconds()), "") + comment
}

// beginSQL is trySQL with the BEGIN of the transaction before it, in one round
// trip; "" where there is no way to, or none that pays. After a failure the
// transaction is open all the same. quiet means that no answer is one.
//
// MariaDB runs an anonymous block, in which NOWAIT is not allowed (error 1314)
// but a lock wait timeout of 0 means the same. There the transaction also gets
// a limit on its idleness, which MySQL has no variable for: a holder whose host
// vanished without closing the connection frees the lock within the TTL.
//
// A result set from within a block or a procedure is about a third of what the server
// has to do for all of it (measured on MySQL 9.7 and MariaDB 10.11). So where the
// connection's id is known there is none as long as the row is quiet, and on MariaDB
// the SELECT for it is a string that is not even parsed.
func (a *attempt) beginSQL() (text string, quiet bool) {
	if a.opts != (driver.TxOptions{}) || a.implicit && a.cfg.Info.MariaDB {
		return "", false
	}
	one := len(a.keys) == 1 && !a.streams()
	quiet = one && a.c.KnownID() != 0
	if a.cfg.Info.MariaDB {
		start := a.startSQL()
		switch {
		case a.streams():
			return "BEGIN NOT ATOMIC " + start + a.certifySQL() + "; END", false
		case !quiet:
			return "BEGIN NOT ATOMIC " + start + noWait + a.selects(a.keys, "", "") + "; END", false
		}
		key := a.keys[0]
		tell := strings.ReplaceAll(a.selects(a.keys, "", ""), "'", "''")
		// sql_mode ORACLE declares variables elsewhere. MAX sets it without a row, too.
		return "BEGIN NOT ATOMIC " + start + noWait + "SELECT MAX(" + schema.Quiet(a.known(key)) + ") INTO @mysqllock_quiet" +
			a.fromRow + schema.Literal(key.Name) + a.rowLock(key) + "; IF @mysqllock_quiet IS NOT TRUE THEN EXECUTE IMMEDIATE '" + tell + "'; END IF; END", true
	}
	if !one || !a.cfg.Rows.Procedure() {
		return "", false
	}
	key, most := a.keys[0], "NULL"
	if quiet {
		most = a.known(key)
	}
	return "CALL " + a.cfg.Table.Procedure() + "(" + schema.Literal(a.cfg.Namespace) + ", " + schema.Literal(key.Name) + ", " +
		strings.ToUpper(strconv.FormatBool(key.Shared)) + ", " + most + ")", quiet
}

// noWait is NOWAIT for MariaDB's blocks.
const noWait = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "

// startSQL is how MariaDB's blocks begin the transaction.
func (l *Locker) startSQL() string {
	if s := l.IdleLimit(); s > 0 {
		return IdleLimitSQL(s) + "; START TRANSACTION; "
	}
	return "START TRANSACTION; "
}

// preparedSQL is a lock statement for one key that is the same for all of them, to be
// prepared, with the values for its question marks: parsing is about a third of what
// the server has to do for a lock (measured on MySQL 9.7 and MariaDB 10.11). Like that
// of beginSQL it begins the transaction, too, unless any statement does. It is "" where
// there is none: MySQL's procedure gains nothing by it, and rolls back at once where it
// finds a lease, so that it stays for keys that have had one.
func (a *attempt) preparedSQL() (text string, args []driver.Value, quiet bool) {
	if len(a.keys) != 1 || a.streams() || a.opts != (driver.TxOptions{}) {
		return "", nil, false
	}
	key := a.keys[0]
	texts, name := a.single, hex.EncodeToString([]byte(key.Name))
	if key.Shared {
		texts = a.singleShared
	}
	switch {
	case a.implicit && (a.cfg.Info.MariaDB || !a.cfg.Rows.Procedure() || !a.cfg.Rows.Leased(key.Name)):
		return texts.read, []driver.Value{name}, false
	case a.cfg.Info.MariaDB && a.c.KnownID() != 0:
		return texts.block, []driver.Value{name, a.known(key)}, true
	}
	return "", nil, false
}

// single are the texts of preparedSQL.
type single struct{ read, block string }

// newSingle returns the texts. The block's values are variables, since the statements
// that read the table may be parsed again by themselves when somebody has altered it.
func (l *Locker) newSingle(shared bool) single {
	row := func(name string) string { return l.fromRow + name + " LIMIT 1" + l.rowLock(Key{Shared: shared}) }
	const name = "UNHEX(CONVERT(? USING ascii))" // whatever the connection's character set
	return single{
		read: "SELECT " + columns(leaseColumns) + row(name) + " NOWAIT",
		block: "BEGIN NOT ATOMIC DECLARE v_name VARBINARY(255) DEFAULT " + name + "; DECLARE v_most BIGINT UNSIGNED DEFAULT ?; DECLARE v_quiet BOOL; " +
			l.startSQL() + noWait + "SELECT " + schema.Quiet("v_most") + " INTO v_quiet" + row("v_name") +
			"; IF v_quiet IS NOT TRUE THEN SELECT " + columns(leaseColumns) + row("v_name") + "; END IF; END",
	}
}

// known is the highest token of key that tells nothing new: any, where it is known
// to have had a lease.
func (a *attempt) known(key Key) string {
	if a.cfg.Rows.Leased(key.Name) {
		return strconv.FormatUint(math.MaxUint64, 10)
	}
	return "0"
}

// IdleLimitSQL sets MariaDB's limit on the idleness of transactions, in seconds,
// until it is set again.
func IdleLimitSQL(seconds int) string {
	return fmt.Sprintf("SET SESSION idle_transaction_timeout = %d", seconds)
}

// leaseSQL reads which rows have a live lease: the name and leaseColumns. It is
// a plain read, which waits for nobody.
func (l *Locker) leaseSQL(names []string) string { return l.readSQL(names) + " AND " + schema.Live("") }

// surveySQL is leaseSQL for the rows of all slots, with a lease or without.
func (a *attempt) surveySQL() string { return a.readSQL(a.names) }

func (l *Locker) readSQL(names []string) string {
	var in []string
	for _, name := range names {
		in = append(in, schema.Literal(name))
	}
	return "SELECT name, " + leaseColumns + " FROM " + l.cfg.Table.String() + " WHERE namespace = " + schema.Literal(l.cfg.Namespace) +
		" AND name IN (" + strings.Join(in, ", ") + ")"
}

// holderSQL asks who holds one of the rows while waiter, a connection id, waits
// for them: id, user, host, program, age in microseconds. On MySQL it also works
// when nobody waits; MariaDB lists a lock only while somebody does. The server
// ends the question after bound.
func (l *Locker) holderSQL(names []string, waiter uint64, bound time.Duration) string {
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
	for _, name := range names {
		data = append(data, fmt.Sprintf("'0x%X, 0x%X'", l.cfg.Namespace, name))
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
