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

// Every lock statement below returns one row for each key, in the order of the keys, with the
// connection's id and the key's lease. If a row is missing, its key is not locked. Only the
// statements of beginSQL, which exist for speed, may have no answer at all if a row has nothing
// to tell.

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
		return "SELECT " + hint + columns + l.locking(schema.Literal(key.Name), key) + tail
	}
	if len(keys) == 1 {
		return one(keys[0], hint)
	}
	if !l.cfg.Info.UnionLocks {
		var names []string
		for _, key := range keys {
			names = append(names, key.Name)
		}
		return "SELECT " + hint + columns + l.from(names) + " ORDER BY name LIMIT " + strconv.Itoa(len(keys)) + " FOR UPDATE" + tail
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

// locking is a locking read of key's row from FROM on. name is an SQL expression.
func (l *Locker) locking(name string, key Key) string {
	return l.fromRow + name + " LIMIT 1" + l.rowLock(key)
}

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
	var lines [][]string
	for i, first := 0, rand.N(n); i < n; i++ {
		slot := slots[(first+i)%n]
		lines = append(lines, []string{strconv.Itoa(slot), schema.Literal(a.r.Slots[slot])})
	}
	skip := ""
	if a.cfg.Info.SkipLocked {
		skip = " FOR UPDATE SKIP LOCKED"
	}
	return "SELECT i FROM " + schema.List(lines, "i", "n") + " STRAIGHT_JOIN " + a.cfg.Table.String() +
		" ON " + schema.Row("", a.cfg.Namespace, "n") + " WHERE NOT " + schema.Live("") + " LIMIT 1" + skip
}

// trySQL locks the keys in the open transaction or fails at once.
func (a *attempt) trySQL() string {
	if a.streams {
		return "BEGIN NOT ATOMIC " + a.nowSQL() + "; END"
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

// noWait is NOWAIT for blocks of MariaDB, in which that is not allowed (error 1314).
const noWait = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "

// nowSQL is trySQL for a block of MariaDB. On a Galera cluster it locks the keys on all nodes: these
// hear only of changes, and when the UPDATE of a row returns, they have agreed to it. A row with an
// owner stays as it is.
func (a *attempt) nowSQL() string {
	var b strings.Builder
	for _, key := range a.keys {
		if a.streams {
			fmt.Fprintf(&b, "SET STATEMENT innodb_lock_wait_timeout = 0, wsrep_trx_fragment_unit = 'rows', wsrep_trx_fragment_size = 1 FOR UPDATE %s"+
				" SET expires = GREATEST(UTC_TIMESTAMP(6), expires + INTERVAL 1 MICROSECOND) WHERE %s AND owner IS NULL; ",
				a.cfg.Table, schema.Row("", a.cfg.Namespace, schema.Literal(key.Name)))
		}
	}
	return b.String() + noWait + a.selects(a.keys, "", "")
}

// beginSQL is BEGIN and trySQL in one round trip. It is "" if there is no way, or none that
// pays. After a failure the transaction is open all the same. quiet means that the
// statement may return no result set, if there is nothing to tell: that saves a third of the
// server's work (measured on MySQL 9.7). On MariaDB only what is prepared is quiet: in a text that is
// parsed each time the second SELECT costs more than the result set (190 against 154 µs of the
// server's CPU; prepared 128 against 134, and a seventh of the client's; measured on MariaDB 10.11).
//
// The transaction also gets a limit on its idleness: if the holder's host vanishes without
// closing the connection, the lock is released within the TTL. MariaDB has a variable for
// that. MySQL has one for the connection, whatever it is idle in. With limited it is set, and the
// statement that ends the transaction takes it off.
func (a *attempt) beginSQL(limited bool) (text string, quiet bool) {
	switch {
	case a.cfg.Info.Blocks && (a.implicit || a.opts != (driver.TxOptions{})):
		return "", false
	case a.cfg.Info.Blocks:
		return "BEGIN NOT ATOMIC " + a.startSQL() + a.nowSQL() + "; END", false
	case len(a.keys) != 1 || !a.calling():
		return "", false
	}
	key, most := a.keys[0], "NULL"
	if quiet = a.c.KnownID() != 0; quiet {
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
	if len(a.keys) != 1 || a.streams || a.opts != (driver.TxOptions{}) {
		return "", nil, false
	}
	key := a.keys[0]
	name := schema.Hex(key.Name)
	switch {
	case a.implicit && (a.cfg.Info.Blocks || !a.cfg.Procedures.Has(a.cfg.Table.LockProcedure()) || !a.cfg.Rows.Leased(key.Name)):
		return "SELECT " + server.Untimed + columns + a.locking(schema.Unhex, key) + " NOWAIT", []driver.Value{name}, false
	case a.cfg.Info.Blocks && a.c.KnownID() != 0:
		row := a.locking("v_name", key)
		return schema.BlockOfKey + a.startSQL() + noWait + "SELECT " + schema.Quiet("v_most") + " INTO v_quiet" + row +
			"; IF v_quiet IS NOT TRUE THEN SELECT " + columns + row + "; END IF; END", []driver.Value{name, a.known(key.Name)}, true
	}
	return "", nil, false
}

// known is the highest token of key that tells nothing new: any, if the key is known to
// have had a lease, else 0.
func (l *Locker) known(key string) string {
	if l.cfg.Rows.Leased(key) {
		return strconv.FormatUint(math.MaxUint64, 10)
	}
	return "0"
}

// clearSQL removes an expired lease from its row. It fails at once if the row is locked,
// for example by the last COMMIT of the lease's holder. UPDATE has no NOWAIT; the INSERT
// always hits the row that it has read.
func (l *Locker) clearSQL(lease *strategy.Leased) string {
	return fmt.Sprintf("INSERT INTO %[1]s (namespace, name) SELECT r.namespace, r.name FROM %[1]s r"+
		" WHERE %[2]s AND r.token = %[3]s AND r.owner = %[4]s FOR UPDATE NOWAIT ON DUPLICATE KEY UPDATE owner = NULL",
		l.cfg.Table, schema.Row("r.", l.cfg.Namespace, schema.Literal(lease.Key)), lease.Token, schema.Literal(lease.Owner))
}

// readSQL reads rows: the name and leaseColumns. It is a plain read, which waits for no lock.
func (l *Locker) readSQL(names []string) string {
	return "SELECT name, " + leaseColumns + l.from(names)
}

// from is the part of a statement from FROM on, for these rows.
func (l *Locker) from(names []string) string {
	return " FROM " + l.cfg.Table.String() + " WHERE " + schema.Rows(l.cfg.Namespace, names)
}
