package rowlock

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Holder asks the server who has locked one of the rows, if another connection waits for the row. It returns nil if the
// server does not tell before ctx ends.
func (l *Locker) Holder(ctx context.Context, names []string) *lockerr.Holder {
	if l.blind.Load() {
		return nil
	}
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	return l.holderBy(ctx, c, l.awaitedSQL(names, terms.Calmly/2))
}

// holderBy sends text on c, a question of the form of holderSQL, and reads the answer.
func (l *Locker) holderBy(ctx context.Context, c *pool.Conn, text string) *lockerr.Holder {
	rows, err := server.Query(ctx, c.Conn, text)
	if server.Denied(err) {
		l.blind.Store(true)
	}
	if err != nil || len(rows) == 0 {
		return nil
	}
	h := &lockerr.Holder{User: rows[0][1], Host: rows[0][2], Program: rows[0][3]}
	h.ConnectionID, _ = strconv.ParseUint(rows[0][0], 10, 64)
	if l.streams && h.Host == "" { // the thread that applies the changes of another node
		h = &lockerr.Holder{Program: "another node of the cluster"}
	}
	micros, _ := strconv.ParseInt(rows[0][4], 10, 64)
	h.Since = time.Duration(micros) * time.Microsecond
	return h
}

// askHolder asks the server who holds one of the keys, in one statement. It returns nil if the server does not tell.
// waiter is the id of the caller's connection, or 0. mark is the mark of the statement with which the caller waits; ""
// if it does not wait.
func (a *attempt) askHolder(ctx context.Context, waiter uint64, mark string) *lockerr.Holder {
	if a.l.blind.Load() || !a.l.cfg.Info.AllHolders && mark == "" {
		return nil
	}
	bound := terms.Calmly / 2
	if deadline, ok := ctx.Deadline(); ok { // the other half is for the kill
		bound = min(bound, time.Until(deadline)/2)
	}
	c, err := a.control(ctx, terms.Calmly)
	if err != nil {
		return nil
	}
	defer c.Release()
	return a.l.holderBy(ctx, c, a.l.holderSQL(a.names, waiter, mark, max(bound, time.Millisecond)))
}

// blocker returns the holder for which the caller waits in the server, by the statement with the mark. A caller that has
// gone ahead waits for a holder of its own process. The queue names that holder without a question to the server, which a
// busy server may not answer in time.
func (a *attempt) blocker(ctx context.Context, mark string) *lockerr.Holder {
	if a.Ticket.Ahead() {
		if h, _ := a.l.cfg.Queue.HolderOf(a.r.Keys...); h != nil {
			return h
		}
	}
	return a.askHolder(ctx, a.c.KnownID(), mark)
}

// holderSQL returns a query for the holder of one of the rows: id, user, host, program, age in microseconds. The
// connection with the id waiter waits for the row, by the statement with the mark. Some servers do not list all
// holders: they list one only while a connection waits, and from a copy that can be older than this wait. Only if the
// copy has the statement with the mark, the blocker in it is that of this wait. The server ends the query after bound.
func (l *Locker) holderSQL(names []string, waiter uint64, mark string, bound time.Duration) string {
	if !l.cfg.Info.AllHolders {
		return l.blockerSQL(bound, fmt.Sprintf("r.trx_mysql_thread_id = %d AND r.trx_query LIKE '%%%s%%'", waiter, mark))
	}
	return l.lockedBySQL(names, bound, fmt.Sprintf("t.PROCESSLIST_ID <> %d", waiter))
}

// awaitedSQL is holderSQL for any waiter. The holder is one that does not itself wait for a row.
func (l *Locker) awaitedSQL(names []string, bound time.Duration) string {
	if !l.cfg.Info.AllHolders {
		return l.blockerSQL(bound, "w.requested_lock_id IN (SELECT k.lock_id FROM information_schema.INNODB_LOCKS k"+
			" WHERE k.lock_table = "+schema.Literal(l.cfg.Table.String())+" AND k.lock_data IN ("+l.lockData(names)+"))")
	}
	return l.lockedBySQL(names, bound, "NOT EXISTS (SELECT 1 FROM performance_schema.data_locks r"+
		" WHERE r.ENGINE_TRANSACTION_ID = l.ENGINE_TRANSACTION_ID"+
		" AND r.LOCK_STATUS = 'WAITING' AND r.LOCK_DATA IN ("+l.lockData(names)+"))")
}

// blockerSQL asks MariaDB who keeps a transaction waiting. MariaDB tells in whole seconds when a transaction began, so
// its age is at least the difference less one. For connection 12, which waits by a statement with the mark 6f1c:
//
//	/*M!100000 SET STATEMENT max_statement_time = 2.500 FOR */ SELECT /*+ MAX_EXECUTION_TIME(2500) */
//	  b.trx_mysql_thread_id, p.USER, p.HOST, '', GREATEST(TIMESTAMPDIFF(SECOND, b.trx_started, NOW(6)) - 1, 0) * 1000000
//	FROM information_schema.INNODB_LOCK_WAITS w
//	JOIN information_schema.INNODB_TRX r ON r.trx_id = w.requesting_trx_id
//	JOIN information_schema.INNODB_TRX b ON b.trx_id = w.blocking_trx_id
//	LEFT JOIN (SELECT ID, USER, HOST, … information_schema.PROCESSLIST …) p ON p.ID = b.trx_mysql_thread_id
//	WHERE r.trx_mysql_thread_id = 12 AND r.trx_query LIKE '%6f1c%' AND b.trx_state <> 'LOCK WAIT' LIMIT 1
func (l *Locker) blockerSQL(bound time.Duration, waiter string) string {
	return server.Bounded(bound) +
		"b.trx_mysql_thread_id, p.USER, p.HOST, '', GREATEST(TIMESTAMPDIFF(SECOND, b.trx_started, NOW(6)) - 1, 0) * 1000000" +
		" FROM information_schema.INNODB_LOCK_WAITS w" +
		" JOIN information_schema.INNODB_TRX r ON r.trx_id = w.requesting_trx_id" +
		" JOIN information_schema.INNODB_TRX b ON b.trx_id = w.blocking_trx_id" +
		" LEFT JOIN " + server.Connections + " ON p.ID = b.trx_mysql_thread_id" +
		" WHERE " + waiter + " AND b.trx_state <> 'LOCK WAIT' LIMIT 1"
}

// lockedBySQL asks MySQL which connection has locked one of the rows. It goes by the lock of that transaction on the
// table. The thread of a row's lock would not do: it becomes the thread of another connection whose inserts split the
// index page, or that waits for a row just inserted (measured on MySQL 9.7). The row's lock comes first in the join,
// so that the server does not look for other transactions. A lock on the gap before a row locks nobody out of the row.
// For connection 12, which waits:
//
//	/*M!100000 SET STATEMENT max_statement_time = 2.500 FOR */ SELECT /*+ MAX_EXECUTION_TIME(2500) */
//	  t.PROCESSLIST_ID, t.PROCESSLIST_USER, t.PROCESSLIST_HOST,
//	  (SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a WHERE a.PROCESSLIST_ID = t.PROCESSLIST_ID
//	    AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1),
//	  (SELECT x.TIMER_WAIT DIV 1000000 FROM performance_schema.events_transactions_current x
//	    WHERE x.THREAD_ID = t.THREAD_ID AND x.STATE = 'ACTIVE')
//	FROM performance_schema.data_locks l
//	STRAIGHT_JOIN performance_schema.data_locks o
//	  ON o.ENGINE_TRANSACTION_ID = l.ENGINE_TRANSACTION_ID AND o.LOCK_TYPE = 'TABLE'
//	STRAIGHT_JOIN performance_schema.threads t ON t.THREAD_ID = o.THREAD_ID
//	WHERE l.OBJECT_SCHEMA = 'shop' AND l.OBJECT_NAME = 'mysqllock' AND l.LOCK_TYPE = 'RECORD' AND l.LOCK_STATUS = 'GRANTED'
//	  AND l.LOCK_DATA IN ('0x617070, 0x6B') AND l.LOCK_MODE NOT LIKE '%,GAP%' AND l.LOCK_MODE NOT LIKE '%INSERT_INTENTION%'
//	  AND t.PROCESSLIST_ID <> 12 LIMIT 1
func (l *Locker) lockedBySQL(names []string, bound time.Duration, other string) string {
	return server.Bounded(bound) +
		"t.PROCESSLIST_ID, t.PROCESSLIST_USER, t.PROCESSLIST_HOST, " + server.ProgramOf("t.PROCESSLIST_ID") + "," +
		" (SELECT x.TIMER_WAIT DIV 1000000 FROM performance_schema.events_transactions_current x" +
		" WHERE x.THREAD_ID = t.THREAD_ID AND x.STATE = 'ACTIVE')" +
		" FROM performance_schema.data_locks l STRAIGHT_JOIN performance_schema.data_locks o" +
		" ON o.ENGINE_TRANSACTION_ID = l.ENGINE_TRANSACTION_ID AND o.LOCK_TYPE = 'TABLE'" +
		" STRAIGHT_JOIN performance_schema.threads t ON t.THREAD_ID = o.THREAD_ID" +
		" WHERE " + l.cfg.Table.Where("l.OBJECT_SCHEMA", "l.OBJECT_NAME") +
		" AND l.LOCK_TYPE = 'RECORD' AND l.LOCK_STATUS = 'GRANTED' AND l.LOCK_DATA IN (" + l.lockData(names) + ")" +
		" AND l.LOCK_MODE NOT LIKE '%,GAP%' AND l.LOCK_MODE NOT LIKE '%INSERT_INTENTION%'" +
		" AND " + other + " LIMIT 1"
}

// lockData returns the primary keys of the rows, in the form in which servers show them with their locks.
func (l *Locker) lockData(names []string) string {
	var data []string
	for _, name := range names {
		data = append(data, fmt.Sprintf("'0x%X, 0x%X'", l.cfg.Namespace, name))
	}
	return strings.Join(data, ", ")
}
