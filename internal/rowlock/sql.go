package rowlock

import (
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// Every lock statement below returns one row for each key, in the order of the keys, with the
// connection's id and the key's lease. If a row is missing, its key is not locked.
//
// A comment shows a statement with 'app' where the text has x'617070', and the table without its database: see package schema.

// leaseColumns are the remaining time of the lease, the token, and the owner. They are for
// control connections. The application may have set the clock of its session, so a lock
// statement only tells whether there is an owner.
var leaseColumns = schema.Remaining("") + ", token, owner"

// selects returns one locking read for all keys: a UNION ALL of single-row reads, since an IN
// list can lock every row of a small table (measured on MySQL 9.7). On TiDB it is an IN list,
// which locks what it returns there: with UNION ALL two processes have had a key at once. LIMIT
// overrides sql_select_limit. hint goes behind the first SELECT, tail behind each lock.
// For two keys, as trySQL has them locked:
//
//	(SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only
//	  FROM mysqllock WHERE namespace = 'app' AND name = 'k' LIMIT 1 FOR UPDATE NOWAIT)
//	UNION ALL (SELECT CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only
//	  FROM mysqllock WHERE namespace = 'app' AND name = 'l' LIMIT 1 FOR UPDATE NOWAIT) LIMIT 2
//
// On TiDB:
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only
//	FROM mysqllock WHERE namespace = 'app' AND name IN ('k', 'l') ORDER BY name LIMIT 2 FOR UPDATE NOWAIT
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

// trySQL locks the keys in the open transaction or fails at once. On a Galera cluster it locks them on
// all nodes: these hear only of changes, and when the UPDATE of a row returns, they have agreed to it. A
// row with an owner stays as it is. For one key:
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only
//	FROM mysqllock WHERE namespace = 'app' AND name = 'k' LIMIT 1 FOR UPDATE NOWAIT
//
// In front of it, on a Galera cluster:
//
//	SET STATEMENT innodb_lock_wait_timeout = 0, wsrep_trx_fragment_unit = 'rows', wsrep_trx_fragment_size = 1 FOR
//	UPDATE mysqllock SET expires = GREATEST(UTC_TIMESTAMP(6), expires + INTERVAL 1 MICROSECOND)
//	WHERE namespace = 'app' AND name = 'k' AND owner IS NULL
func (a *attempt) trySQL() (texts []string) {
	if a.l.streams {
		for _, key := range a.keys {
			texts = append(texts, a.settings("innodb_lock_wait_timeout = 0, wsrep_trx_fragment_unit = 'rows', wsrep_trx_fragment_size = 1")+
				fmt.Sprintf("UPDATE %s SET expires = GREATEST(UTC_TIMESTAMP(6), expires + INTERVAL 1 MICROSECOND) WHERE %s AND owner IS NULL",
					a.l.cfg.Table, schema.Row("", a.l.cfg.Namespace, schema.Literal(key.Name))))
		}
	}
	return append(texts, a.settings("")+a.l.selects(a.keys, server.Untimed, " NOWAIT"))
}

// aloneSQL is trySQL for one key with nothing to tell. It fails if the row is missing, has a lease or a version, or if the
// server takes no writes; then what is behind it in a text does not run. An aggregate returns a row in any case.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ CONNECTION_ID(), MAX(token), NULL,
//	  IF(MAX(owner IS NULL AND versioned = 0) AND CONCAT(@@read_only, @@innodb_read_only) IN ('00', 'OFFOFF'),
//	    1, (SELECT 1 UNION ALL SELECT 2)) - 1, '0', '0'
//	FROM mysqllock WHERE namespace = 'app' AND name = 'k' LIMIT 1 FOR UPDATE NOWAIT
func (a *attempt) aloneSQL() string {
	key := a.keys[0]
	plain := a.l.cfg.Info.Require("MAX(owner IS NULL AND versioned = 0) AND " + server.Writable)
	columns := "CONNECTION_ID(), MAX(token), NULL, " + plain + " - 1, '0', '0'"
	return "SELECT " + server.Untimed + columns + a.l.locking(schema.Literal(key.Name), key) + " NOWAIT"
}

// nextSQL locks a key for the next caller, or fails at once. The caller before waits for the answer, too, so it waits
// for no more than a second while the table's definition is being changed; MariaDB's NOWAIT does not wait for that. Each
// column and each hint more costs MySQL up to 7 µs, so it asks for no more than what a caller has to be told.
//
//	SELECT /*+ SET_VAR(lock_wait_timeout = 1) */ owner, versioned
//	FROM mysqllock WHERE namespace = 'app' AND name = 'k' LIMIT 1 FOR UPDATE NOWAIT
func (l *Locker) nextSQL(key string) string {
	return "SELECT /*+ SET_VAR(lock_wait_timeout = 1) */ owner, versioned" + l.locking(schema.Literal(key), Key{Name: key}) + " NOWAIT"
}

// settings are the settings of one lock statement on MariaDB, in front of it. In a
// transaction that has read, a key's row may have changed since the snapshot, for example
// because its lease was renewed. It is locked all the same: the caller has been told.
// Of a wait in a transaction that has read:
//
//	SET STATEMENT max_statement_time = 10.000, innodb_snapshot_isolation = OFF FOR
func (a *attempt) settings(more string) string {
	if a.mayHaveSnapshot && a.l.cfg.Info.SnapshotIsolation {
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

// preparedSQL is trySQL for one key, with the values for its question marks; "" if there is none. Its
// text is the same for all keys, so it can be prepared: parsing is about a third of the server's work
// for a lock (measured on MySQL 9.7 and MariaDB 10.11).
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only
//	FROM mysqllock WHERE namespace = 'app' AND name = UNHEX(CONVERT(? USING ascii)) LIMIT 1 FOR UPDATE NOWAIT
func (a *attempt) preparedSQL() (text string, args []driver.Value) {
	if len(a.keys) != 1 || a.l.streams {
		return "", nil
	}
	key := a.keys[0]
	return "SELECT " + server.Untimed + columns + a.l.locking(schema.Unhex, key) + " NOWAIT", []driver.Value{schema.Hex(key.Name)}
}

// clearSQL removes an expired lease from its row. It fails at once if the row is locked,
// for example by the last COMMIT of the lease's holder. UPDATE has no NOWAIT; the INSERT
// always hits the row that it has read.
//
//	INSERT INTO mysqllock (namespace, name) SELECT r.namespace, r.name FROM mysqllock r
//	WHERE r.namespace = 'app' AND r.name = 'k' AND r.token = 7 AND r.owner = 'me' FOR UPDATE NOWAIT
//	ON DUPLICATE KEY UPDATE owner = NULL
func (l *Locker) clearSQL(lease *strategy.Leased) string {
	return fmt.Sprintf("INSERT INTO %[1]s (namespace, name) SELECT r.namespace, r.name FROM %[1]s r"+
		" WHERE %[2]s AND r.token = %[3]s AND r.owner = %[4]s FOR UPDATE NOWAIT ON DUPLICATE KEY UPDATE owner = NULL",
		l.cfg.Table, schema.Row("r.", l.cfg.Namespace, schema.Literal(lease.Key)), lease.Token, schema.Literal(lease.Owner))
}

// readSQL reads rows: the name and leaseColumns. It is a plain read, which waits for no lock.
//
//	SELECT name,
//	  IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0),
//	  token, owner
//	FROM mysqllock WHERE namespace = 'app' AND name IN ('k', 'l')
func (l *Locker) readSQL(names []string) string {
	return "SELECT name, " + leaseColumns + l.from(names)
}

// from is the part of a statement from FROM on, for these rows.
func (l *Locker) from(names []string) string {
	return " FROM " + l.cfg.Table.String() + " WHERE " + schema.Rows(l.cfg.Namespace, names)
}
