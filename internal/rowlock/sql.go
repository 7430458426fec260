package rowlock

import (
	"database/sql/driver"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// The statements below have keys as hexadecimal literals: so each is one round trip
// whatever the DSN says, and nothing needs quotes. Every lock statement returns one row
// for each key, in the order of the keys, with the connection's id and the key's lease. If
// a row is missing, its key is not locked. Only the statements of beginSQL, which exist
// for speed, may have no answer at all if a row has nothing to tell.

// leaseColumns are the remaining time of the lease, the token, and the owner. They are for
// control connections. The application may have set the clock of its session, so a lock
// statement only tells whether there is an owner.
var leaseColumns = schema.Remaining("") + ", token, owner"

// selects returns one locking read for all keys: a UNION ALL of single-row reads, since an IN
// list can lock every row of a small table (measured on MySQL 9.7). On TiDB it is an IN list,
// which locks what it returns there: with UNION ALL two processes have had a key at once. LIMIT
// overrides sql_select_limit. hint goes behind the first SELECT, tail behind each lock.
func (l *Locker) selects(keys []Key, hint, tail string) string {
	one := func(key Key, hint string) string {
		return "SELECT " + hint + columns + l.fromRow + schema.Literal(key.Name) + " LIMIT 1" + l.rowLock(key) + tail
	}
	if len(keys) == 1 {
		return one(keys[0], hint)
	}
	if !l.cfg.Info.UnionLocks {
		var in []string
		for _, key := range keys {
			in = append(in, schema.Literal(key.Name))
		}
		return "SELECT " + hint + columns + strings.TrimSuffix(l.fromRow, "= ") + "IN (" + strings.Join(in, ", ") + ") ORDER BY name LIMIT " + strconv.Itoa(len(keys)) +
			" FOR UPDATE" + tail
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

// columns are the columns of a lock statement. A row with an owner has a lease, which may
// have expired.
const columns = "CONNECTION_ID(), token, owner, versioned, " + server.WritableColumns

// rowLock is the locking clause of a read.
func (l *Locker) rowLock(key Key) string {
	if key.Shared {
		return l.cfg.Info.Share
	}
	return " FOR UPDATE"
}

// freeSQL returns one of slots that is free. It begins with a random one: processes that
// all began with the first would collide. It looks up one row after the other by its
// primary key, until it has found one.
func (a *attempt) freeSQL(slots []int) string {
	n := len(slots)
	var lines []string
	for i, first := 0, rand.N(n); i < n; i++ {
		slot := slots[(first+i)%n]
		lines = append(lines, fmt.Sprintf("SELECT %d AS i, %s AS n", slot, schema.Literal(a.r.Slots[slot])))
	}
	skip := ""
	if a.cfg.Info.SkipLocked {
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
	return a.settings("") + a.selects(a.keys, server.Untimed, " NOWAIT")
}

// settings are the settings of one lock statement on MariaDB, in front of it. In a
// transaction that has read, a key's row may have changed since the snapshot, for example
// because its lease was renewed. It is locked all the same: the caller has been told.
func (a *attempt) settings(more string) string {
	if a.late && a.cfg.Info.SnapshotIsolation {
		if more != "" {
			more += ", "
		}
		more += "innodb_snapshot_isolation = OFF"
	}
	if more == "" {
		return ""
	}
	return "SET STATEMENT " + more + " FOR "
}

// certifySQL locks the keys on all nodes of a Galera cluster, or fails at once. The other
// nodes hear only of changes; when the UPDATE of a row returns, they have agreed to it. A
// row with an owner stays as it is.
func (a *attempt) certifySQL() string {
	var b strings.Builder
	for _, key := range a.keys {
		fmt.Fprintf(&b, "SET STATEMENT innodb_lock_wait_timeout = 0, wsrep_trx_fragment_unit = 'rows', wsrep_trx_fragment_size = 1 FOR UPDATE %s"+
			" SET expires = GREATEST(UTC_TIMESTAMP(6), expires + INTERVAL 1 MICROSECOND) WHERE namespace = %s AND name = %s AND owner IS NULL; ",
			a.cfg.Table, schema.Literal(a.cfg.Namespace), schema.Literal(key.Name))
	}
	return b.String() + "SET STATEMENT innodb_lock_wait_timeout = 0 FOR " + a.selects(a.keys, "", "")
}

// beginSQL is BEGIN and trySQL in one round trip. It is "" if there is no way, or none that
// pays. After a failure the transaction is open all the same. quiet means that the
// statement may return no result set, if there is nothing to tell.
//
// MariaDB runs an anonymous block, in which NOWAIT is not allowed (error 1314)
// but a lock wait timeout of 0 means the same.
//
// The transaction also gets a limit on its idleness: if the holder's host vanishes without
// closing the connection, the lock is released within the TTL. MariaDB has a variable for
// that. MySQL has one for the connection, whatever it is idle in. With limited it is set, and the
// statement that ends the transaction takes it off.
//
// A result set of a block or a procedure is about a third of the server's work for all of
// it (measured on MySQL 9.7 and MariaDB 10.11). So if the connection's id is known, there
// is no result set for a row with nothing to tell. On MariaDB the SELECT for it is a
// string, which is then not even parsed.
func (a *attempt) beginSQL(limited bool) (text string, quiet bool) {
	if a.opts != (driver.TxOptions{}) && !a.calling() || a.implicit && a.cfg.Info.Blocks {
		return "", false
	}
	one := len(a.keys) == 1 && !a.streams()
	quiet = one && a.c.KnownID() != 0
	if a.cfg.Info.Blocks {
		start := a.startSQL()
		switch {
		case a.streams():
			return "BEGIN NOT ATOMIC " + start + a.certifySQL() + "; END", false
		case !quiet:
			return "BEGIN NOT ATOMIC " + start + noWait + a.selects(a.keys, "", "") + "; END", false
		}
		key := a.keys[0]
		tell := strings.ReplaceAll(a.selects(a.keys, "", ""), "'", "''")
		// Not DECLARE, which sql_mode ORACLE has in another place. MAX sets the variable also if there is no row.
		return "BEGIN NOT ATOMIC " + start + noWait + "SELECT MAX(" + schema.Quiet(a.known(key.Name)) + ") INTO @mysqllock_quiet" +
			a.fromRow + schema.Literal(key.Name) + a.rowLock(key) + "; IF @mysqllock_quiet IS NOT TRUE THEN EXECUTE IMMEDIATE '" + tell + "'; END IF; END", true
	}
	if !one || !a.calling() {
		return "", false
	}
	key, most := a.keys[0], "NULL"
	if quiet {
		most = a.known(key.Name)
	}
	return a.callSQL(schema.Literal(key.Name), key.Shared, most, limited), quiet
}

// callSQL calls the procedure that begins the transaction, and locks the row name unless that is
// NULL.
func (a *attempt) callSQL(name string, shared bool, most string, limited bool) string {
	seconds := 0
	if limited {
		seconds = max(1, int(a.cfg.TTL/time.Second))
	}
	return fmt.Sprintf("CALL %s(%s, %s, %t, %s, %d, %d, %t)", a.cfg.Table.LockProcedure(), schema.Literal(a.cfg.Namespace), name,
		shared, most, seconds, a.opts.Isolation, a.opts.ReadOnly)
}

// noWait is NOWAIT for blocks of MariaDB.
const noWait = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "

// startSQL begins the transaction in a block of MariaDB.
func (l *Locker) startSQL() string {
	if s := l.IdleLimit(); s > 0 {
		return l.cfg.Info.SetIdleLimit(s) + "; START TRANSACTION; "
	}
	return "START TRANSACTION; "
}

// preparedSQL is a lock statement for one key, with the values for its question marks. Its
// text is the same for all keys, so it can be prepared: parsing is about a third of the
// server's work for a lock (measured on MySQL 9.7 and MariaDB 10.11). Like the statement
// of beginSQL it begins the transaction, unless any statement does. It is "" if there is
// none. MySQL's procedure gains nothing by being prepared, and it rolls back at once if it
// finds a lease, so keys that ever had a lease use the procedure.
func (a *attempt) preparedSQL() (text string, args []driver.Value, quiet bool) {
	if len(a.keys) != 1 || a.streams() || a.opts != (driver.TxOptions{}) {
		return "", nil, false
	}
	key := a.keys[0]
	texts, name := a.single, schema.Hex(key.Name)
	if key.Shared {
		texts = a.singleShared
	}
	switch {
	case a.implicit && (a.cfg.Info.Blocks || !a.cfg.Procedures.Has(a.cfg.Table.LockProcedure()) || !a.cfg.Rows.Leased(key.Name)):
		return texts.read, []driver.Value{name}, false
	case a.cfg.Info.Blocks && a.c.KnownID() != 0:
		return texts.block, []driver.Value{name, a.known(key.Name)}, true
	}
	return "", nil, false
}

// single has the texts of preparedSQL.
type single struct{ read, block string }

// newSingle returns the texts. The values of the block are variables: if the table is
// altered, the server parses the statements in the block again without the values.
func (l *Locker) newSingle(shared bool) single {
	row := func(name string) string { return l.fromRow + name + " LIMIT 1" + l.rowLock(Key{Shared: shared}) }
	return single{
		read: "SELECT " + server.Untimed + columns + row(schema.Unhex) + " NOWAIT",
		block: blockOfKey +
			l.startSQL() + noWait + "SELECT " + schema.Quiet("v_most") + " INTO v_quiet" + row("v_name") +
			"; IF v_quiet IS NOT TRUE THEN SELECT " + columns + row("v_name") + "; END IF; END",
	}
}

// blockOfKey begins a block of MariaDB, to be prepared, with the name of a key and what known
// says of it.
const blockOfKey = "BEGIN NOT ATOMIC DECLARE v_name VARBINARY(255) DEFAULT " + schema.Unhex + "; DECLARE v_most BIGINT UNSIGNED DEFAULT ?; DECLARE v_quiet BOOL; "

// known is the highest token of key that tells nothing new: any, if the key is known to
// have had a lease, else 0.
func (l *Locker) known(key string) string {
	if l.cfg.Rows.Leased(key) {
		return strconv.FormatUint(math.MaxUint64, 10)
	}
	return "0"
}

// leaseSQL reads which rows have a lease, live or expired: the name and leaseColumns. It is
// a plain read, which waits for no lock.
func (l *Locker) leaseSQL(names []string) string { return l.readSQL(names) + " AND owner IS NOT NULL" }

// clearSQL removes an expired lease from its row. It fails at once if the row is locked,
// for example by the last COMMIT of the lease's holder. UPDATE has no NOWAIT; the INSERT
// always hits the row that it has read.
func (l *Locker) clearSQL(lease *strategy.Leased) string {
	return fmt.Sprintf("INSERT INTO %[1]s (namespace, name) SELECT r.namespace, r.name FROM %[1]s r"+
		" WHERE r.namespace = %[2]s AND r.name = %[3]s AND r.token = %[4]s AND r.owner = %[5]s FOR UPDATE NOWAIT"+
		" ON DUPLICATE KEY UPDATE owner = NULL",
		l.cfg.Table, schema.Literal(l.cfg.Namespace), schema.Literal(lease.Key), lease.Token, schema.Literal(lease.Owner))
}

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

// holderSQL asks for the holder of one of the rows, for which the connection with the id
// waiter waits: id, user, host, program, age in microseconds. Where the server does not
// list all holders, it lists one only while a connection waits. The server ends the
// statement after bound.
func (l *Locker) holderSQL(names []string, waiter uint64, bound time.Duration) string {
	if !l.cfg.Info.AllHolders {
		return l.blockerSQL(bound, fmt.Sprintf("r.trx_mysql_thread_id = %d", waiter))
	}
	return l.lockedBySQL(names, bound, fmt.Sprintf("t.PROCESSLIST_ID <> %d", waiter))
}

// awaitedSQL is holderSQL for whoever waits: the holder is one that waits for none of the
// rows itself.
func (l *Locker) awaitedSQL(names []string, bound time.Duration) string {
	if !l.cfg.Info.AllHolders {
		return l.blockerSQL(bound, "w.requested_lock_id IN (SELECT k.lock_id FROM information_schema.INNODB_LOCKS k"+
			" WHERE k.lock_table = "+schema.Literal(l.cfg.Table.String())+" AND k.lock_data IN ("+l.lockData(names)+"))")
	}
	return l.lockedBySQL(names, bound, "NOT EXISTS (SELECT 1 FROM performance_schema.data_locks r WHERE r.THREAD_ID = l.THREAD_ID"+
		" AND r.LOCK_STATUS = 'WAITING' AND r.LOCK_DATA IN ("+l.lockData(names)+"))")
}

// blockerSQL asks MariaDB who keeps a transaction waiting.
func (l *Locker) blockerSQL(bound time.Duration, waiter string) string {
	return fmt.Sprintf("SET STATEMENT max_statement_time = %.3f FOR "+
		"SELECT b.trx_mysql_thread_id, p.USER, p.HOST, '', TIMESTAMPDIFF(MICROSECOND, b.trx_started, NOW(6))"+
		" FROM information_schema.INNODB_LOCK_WAITS w"+
		" JOIN information_schema.INNODB_TRX r ON r.trx_id = w.requesting_trx_id"+
		" JOIN information_schema.INNODB_TRX b ON b.trx_id = w.blocking_trx_id"+
		" LEFT JOIN "+server.Connections+" ON p.ID = b.trx_mysql_thread_id"+
		" WHERE %s AND b.trx_state <> 'LOCK WAIT' LIMIT 1", bound.Seconds(), waiter)
}

// lockedBySQL asks MySQL which connection has locked one of the rows.
func (l *Locker) lockedBySQL(names []string, bound time.Duration, other string) string {
	return fmt.Sprintf("SELECT /*+ MAX_EXECUTION_TIME(%d) */ t.PROCESSLIST_ID, t.PROCESSLIST_USER, t.PROCESSLIST_HOST,"+
		" (SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a WHERE a.PROCESSLIST_ID = t.PROCESSLIST_ID"+
		" AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1),"+
		" (SELECT x.TIMER_WAIT DIV 1000000 FROM performance_schema.events_transactions_current x"+
		" WHERE x.THREAD_ID = t.THREAD_ID AND x.STATE = 'ACTIVE')"+
		" FROM performance_schema.data_locks l JOIN performance_schema.threads t ON t.THREAD_ID = l.THREAD_ID"+
		" WHERE %s AND l.LOCK_TYPE = 'RECORD' AND l.LOCK_STATUS = 'GRANTED' AND l.LOCK_DATA IN (%s) AND %s LIMIT 1",
		bound.Milliseconds(), l.cfg.Table.Where("l.OBJECT_SCHEMA", "l.OBJECT_NAME"), l.lockData(names), other)
}

// lockData are the primary keys of the rows, as servers show them with their locks.
func (l *Locker) lockData(names []string) string {
	var data []string
	for _, name := range names {
		data = append(data, fmt.Sprintf("'0x%X, 0x%X'", l.cfg.Namespace, name))
	}
	return strings.Join(data, ", ")
}
