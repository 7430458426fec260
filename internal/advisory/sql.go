package advisory

import (
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Every statement that acquires a lock first checks that it runs on the connection that
// it is meant for, since a proxy may have sent it elsewhere; and that the server still
// takes writes. Names need no quoting. On the application's connections, which have any character
// set, they are [lockname.Literal] or [lockname.Value].
//
// Comments show the statements for the lock on the key 'k' of the namespace 'app', which is named mysqllock:app/k, on the
// connection 12. Of the name of the connection's identity, mysqllock-carrier-…, the 32 digits are left out.

// The answers of a statement that has done nothing.
const (
	elsewhere = "-1" // on another connection
	readOnly  = "-2" // on a server that takes no writes
)

// Setup is the statement that connections for [strategy.Config.Conns] begin with. The
// server ends them, and releases the locks that they hold, when they have been silent
// for ttl.
//
//	SET @mysqllock = @@autocommit, SESSION autocommit = 1, timestamp = DEFAULT, sql_mode = '', …, wait_timeout = 30
func Setup(ttl time.Duration) string {
	return fmt.Sprintf("SET "+server.Pin+" autocommit = 1, %s, wait_timeout = %d", server.OwnSettings, int(silentFor(ttl)/time.Second))
}

// silentFor is the silence after which the server ends a connection.
func silentFor(ttl time.Duration) time.Duration {
	return max(time.Second, ttl.Truncate(time.Second))
}

// here is an SQL expression that is value on the lock connection, and elsewhere on
// another connection. On a server that takes no writes it is readOnly. For GET_LOCK(?, 0):
//
//	IF(CONNECTION_ID() = 12, IF(@@read_only, -2, IF(@@innodb_read_only, -2, GET_LOCK(?, 0))), -1)
func (lc *lockConn) here(value string) string {
	return "IF(CONNECTION_ID() = " + strconv.FormatUint(lc.id, 10) + ", " + lc.writable(value) + ", " + elsewhere + ")"
}

// writable is an SQL expression that is value if the server takes writes at the moment
// of evaluation. MariaDB would evaluate a condition of more than one variable before the
// statement runs.
func (lc *lockConn) writable(value string) string {
	if lc.l.cfg.Unsafe {
		return value
	}
	return "IF(@@read_only, " + readOnly + ", IF(@@innodb_read_only, " + readOnly + ", " + value + "))"
}

// openSQL acquires the identity of a new lock connection. The answer is 1.
func (lc *lockConn) openSQL() string { return "SELECT " + lc.here("GET_LOCK('"+lc.identity+"', 0)") }

// pingSQL answers 1. To a ping of the protocol a proxy could answer by itself.
func (lc *lockConn) pingSQL() string { return "SELECT " + lc.here("1") }

// freeSQL releases the locks of batch, with one short answer. For two:
//
//	DO RELEASE_LOCK('mysqllock:app/k'), RELEASE_LOCK('mysqllock:app/l')
func freeSQL(batch []*request) string {
	var b strings.Builder
	b.Grow(len(batch) * 96)
	for i, r := range batch {
		write(&b, [2]string{"DO ", ", "}[min(i, 1)], "RELEASE_LOCK('", r.lock.name, "')")
	}
	return b.String()
}

// acquireSQL acquires one lock, whose name is a value of the statement. The answer is 1 if it was
// granted.
func (lc *lockConn) acquireSQL() string { return "SELECT " + lc.here("GET_LOCK(?, 0)") }

// batchBlock runs the requests of batch. One by itself has always the same text, to be prepared.
func (lc *lockConn) batchBlock(batch []*request) pool.Block {
	first, last := batch[0], batch[len(batch)-1]
	switch {
	case last.acquire && len(batch) > 1:
		return pool.Block{Text: lc.batchSQL(batch)}
	case len(batch) > 1:
		return pool.Block{Text: freeSQL(batch)}
	case last.acquire:
		return pool.Block{Text: lc.acquireText, Values: []driver.Value{first.lock.name}}
	}
	return pool.Block{Text: "DO RELEASE_LOCK(?)", Values: []driver.Value{first.lock.name}}
}

// batchSQL runs the requests of batch in their order. It answers one digit for each: 1 if
// it was done, 2 if it was interrupted. For a release of k, and a request for l:
//
//	SELECT IF(CONNECTION_ID() = 12, IF(@@read_only, -2, IF(@@innodb_read_only, -2, CONCAT(
//	  COALESCE(RELEASE_LOCK('mysqllock:app/k'), 2), COALESCE(GET_LOCK('mysqllock:app/l', 0), 2)))), -1)
func (lc *lockConn) batchSQL(batch []*request) string {
	var b strings.Builder
	b.Grow(len(batch) * 128)
	for i, r := range batch {
		b.WriteString([2]string{"CONCAT(", ", "}[min(i, 1)])
		if r.acquire {
			write(&b, "COALESCE(GET_LOCK('", r.lock.name, "', 0), 2)")
		} else {
			write(&b, "COALESCE(RELEASE_LOCK('", r.lock.name, "'), 2)")
		}
	}
	b.WriteString(")")
	return "SELECT " + lc.here(b.String())
}

func write(b *strings.Builder, parts ...string) {
	for _, part := range parts {
		b.WriteString(part)
	}
}

// The answers of waitSQL when the lock was granted.
const (
	alone  = "1" // no one else held it or waited for it
	inTurn = "2" // after others
)

// waitSQL waits for the lock, at most for bound, for a caller that has waited since then. If the
// connection holds the lock already, the statement releases it first, to those that wait. After the
// wait it checks again that the server takes writes: both servers evaluate a branch of IF only after
// they have chosen it. On MySQL:
//
//	SELECT /*+ MAX_EXECUTION_TIME(3000) */ /* mysqllock waits 1 ms */
//	  IF(CONNECTION_ID() = 12, IF(@@read_only, -2, IF(@@innodb_read_only, -2,
//	    IF(RELEASE_LOCK('mysqllock:app/k') IS NULL OR IS_FREE_LOCK('mysqllock:app/k'),
//	      IF(GET_LOCK('mysqllock:app/k', 3), IF(@@read_only, -2, IF(@@innodb_read_only, -2, 1)), 0),
//	      IF(GET_LOCK('mysqllock:app/k', 3), IF(@@read_only, -2, IF(@@innodb_read_only, -2, 2)), 0)))), -1)
func (lc *lockConn) waitSQL(name string, since time.Time, bound time.Duration) string {
	begin, seconds := lc.l.cfg.Info.WaitsNamed(since, bound)
	granted := func(answer string) string {
		return "IF(GET_LOCK('" + name + "', " + seconds + "), " + lc.writable(answer) + ", 0)"
	}
	return begin + lc.here("IF(RELEASE_LOCK('"+name+"') IS NULL OR IS_FREE_LOCK('"+name+"'), "+granted(alone)+", "+granted(inTurn)+")")
}

// heldSQL is true if all locks are held.
//
//	IS_USED_LOCK(_utf8mb4'mysqllock-carrier-…') = 12 AND IS_USED_LOCK(_utf8mb4'mysqllock:app/k') = 12
func heldSQL(locks []*Grant) string {
	var terms []string
	held := func(name string, lc *lockConn) {
		terms = append(terms, fmt.Sprintf("IS_USED_LOCK(%s) = %d", lockname.Literal(name), lc.id))
	}
	identified := make(map[*lockConn]bool)
	for _, lock := range locks {
		if !identified[lock.conn] {
			identified[lock.conn] = true
			held(lock.conn.identity, lock.conn)
		}
		held(lock.name, lock.conn)
	}
	return strings.Join(terms, " AND ")
}

// holderSQL asks for the holder of the lock: id, user and host of its connection, and
// with programs the name of its program.
//
//	SELECT h.id, p.USER, p.HOST, (SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a
//	  WHERE a.PROCESSLIST_ID = h.id AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1)
//	FROM (SELECT IS_USED_LOCK('mysqllock:app/k') AS id) h
//	LEFT JOIN (SELECT ID, USER, HOST, … information_schema.PROCESSLIST …) p ON p.ID = h.id WHERE h.id IS NOT NULL
func holderSQL(name string, programs bool) string {
	program := "''"
	if programs {
		program = server.ProgramOf("h.id")
	}
	return "SELECT h.id, p.USER, p.HOST, " + program + " FROM (SELECT IS_USED_LOCK('" + name + "') AS id) h" +
		" LEFT JOIN " + server.Connections + " ON p.ID = h.id WHERE h.id IS NOT NULL"
}
