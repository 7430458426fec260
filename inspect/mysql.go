package inspect

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/server"
)

const (
	whoRows   = "who has locked rows"
	whoNames  = "who holds advisory locks that nobody waits for, and who waits for leases and advisory locks as another account"
	someNames = "some named locks"
	deadlocks = "how many deadlocks the server has broken"
	turnOn    = "performance_schema = ON in the server's configuration, and a restart"
)

// asked is for how long a statement of MySQL has run that is running, at least; running is where
// that is, and when it began. beginning is where a wait says since when its caller waits.
const (
	asked     = "COALESCE(s.TIMER_WAIT DIV 1000000, GREATEST(t.PROCESSLIST_TIME - 1, 0) * 1000000)"
	beginning = "LEFT(t.PROCESSLIST_INFO, 300)"
)

// running is the statement that a connection runs, or has run last. If its event is later than that in
// which a lock was asked for, the connection has gone on to another statement while this was read.
const running = " LEFT JOIN performance_schema.events_statements_current s ON s.THREAD_ID = t.THREAD_ID AND s.NESTING_EVENT_LEVEL = 0"

// inTransaction is what an open transaction of MySQL says of its time.
const inTransaction = " LEFT JOIN performance_schema.events_transactions_current x ON x.THREAD_ID = t.THREAD_ID AND x.STATE = 'ACTIVE'"

var onMySQL = view{
	rowLocks: (*picture).mysqlRowLocks, namedLocks: (*picture).mysqlNamedLocks,
	deadlocks: (*picture).mysqlDeadlocks, activity: (*picture).mysqlActivity, mayKill: "CONNECTION_ADMIN",
}

// mysqlRowLocks reads the locks of the table's rows: of holders, and of waiters.
// data_lock_waits is left alone, since it has a row for every two who wait.
func (p *picture) mysqlRowLocks(ctx context.Context) error {
	if !p.schema {
		p.gap(whoRows, "performance_schema is off", turnOn)
		return p.waitersByText(ctx)
	}
	rows, err := p.query(ctx, fmt.Sprintf("SELECT ENGINE_TRANSACTION_ID, THREAD_ID, EVENT_ID, LOCK_STATUS, LOCK_MODE, LOCK_DATA"+
		" FROM performance_schema.data_locks WHERE %s AND LOCK_TYPE = 'RECORD' LIMIT %d", p.table.Where("OBJECT_SCHEMA", "OBJECT_NAME"), most))
	var owners map[string]owner
	if len(rows) > 0 {
		owners, err = p.mysqlOwners(ctx)
	}
	if hidden(err) {
		p.gap(whoRows, "the account may not read performance_schema", p.grant("SELECT", "performance_schema.*"))
		return p.waitersByText(ctx)
	}
	p.full(rows, whoRows)
	untold := 0
	for _, r := range rows {
		mode := r[4]
		if strings.Contains(mode, "INSERT_INTENTION") || strings.Contains(","+mode+",", ",GAP,") {
			continue // of the gap before the row
		}
		if r[5] == "" {
			untold++
			continue
		}
		namespace, name, ok := readPrimaryKey(r[5])
		if !ok {
			continue // the end of the table
		}
		if o, open := owners[r[0]]; open { // else the transaction has ended meanwhile
			p.claims.add(id{row, namespace, name}, o.claim(r[1], number(r[2]), r[3] == "WAITING", strings.HasPrefix(mode, "S")))
		}
	}
	if untold > 0 {
		p.blind(untold)
	}
	return p.tolerate(err, whoRows, "")
}

// owner is the connection whose transaction has locked rows of the lock table, or waits for them.
type owner struct {
	thread    string
	conn      uint64 // 0 if the transaction has no connection
	event     uint64 // in which the transaction locked the table first
	statement uint64 // the event of the statement that runs; 0 is unknown
	began     uint64 // when that began
	runs      time.Duration
	text      string
	within    time.Duration // the age of the transaction
}

// mysqlOwners reads whose transactions have locked the lock table, by the transaction: each locks the
// table before it locks a row. The thread that data_locks tells of a row's lock is not always the
// transaction's. When inserts of another connection split the index page, or the clean-up of removed rows
// merges it, the server makes the lock anew, as a lock of that thread; and it makes the lock of a
// row just inserted when the first one waits for it, as a lock of the waiter's (measured on MySQL 9.7).
// The server tells all locks of tables before those of rows, so they take a second look, or those of
// transactions that have just begun would be missing.
func (p *picture) mysqlOwners(ctx context.Context) (map[string]owner, error) {
	rows, err := p.query(ctx, fmt.Sprintf("SELECT l.ENGINE_TRANSACTION_ID, l.THREAD_ID, t.PROCESSLIST_ID, l.EVENT_ID,"+
		" s.EVENT_ID, s.TIMER_START, "+asked+", "+beginning+", x.TIMER_WAIT DIV 1000000"+
		" FROM performance_schema.data_locks l LEFT JOIN performance_schema.threads t ON t.THREAD_ID = l.THREAD_ID"+running+inTransaction+
		" WHERE %s AND l.LOCK_TYPE = 'TABLE' LIMIT %d", p.table.Where("l.OBJECT_SCHEMA", "l.OBJECT_NAME"), most))
	p.full(rows, whoRows)
	owners := make(map[string]owner)
	for _, r := range rows {
		o := owner{r[1], number(r[2]), number(r[3]), number(r[4]), number(r[5]), p.age(r[6]), r[7], p.age(r[8])}
		if first, ok := owners[r[0]]; ok {
			o.event = min(o.event, first.event)
		}
		owners[r[0]] = o
	}
	return owners, err
}

// claim is that of the transaction's connection, as data_locks tells it: of a lock that thread has made
// in event.
func (o owner) claim(thread string, event uint64, waiting, shared bool) claim {
	c := claim{conn: o.conn, waiting: waiting, shared: shared}
	if thread == o.thread {
		c.event = latest(event)
	} else {
		event = o.event // the lock is not older
	}
	if !waiting {
		c.age = o.within
		return c
	}
	if o.statement > event { // the connection has gone on to another statement
		return c
	}
	c.order, c.age = o.began, o.runs
	return c.saying(o.text)
}

// latest is the event in which a lock was asked for. The server tells the number of the
// next one (measured on MySQL 9.7); 0 is unknown.
func latest(next uint64) uint64 { return max(next, 1) - 1 }

// number reads a number; 0 if there is none.
func number(s string) uint64 {
	n, _ := strconv.ParseUint(s, 10, 64)
	return n
}

// mysqlNamedLocks reads the named locks of both kinds: of holders, and of waiters.
func (p *picture) mysqlNamedLocks(ctx context.Context) error {
	if !p.schema {
		p.gap(whoNames, "performance_schema is off", turnOn)
		return p.namedWithoutList(ctx)
	}
	rows, err := p.query(ctx, fmt.Sprintf("SELECT m.OBJECT_NAME, t.PROCESSLIST_ID, m.LOCK_STATUS = 'PENDING',"+
		" IF(m.LOCK_STATUS = 'PENDING', "+asked+", x.TIMER_WAIT DIV 1000000), s.TIMER_START, m.OWNER_EVENT_ID, "+beginning+
		" FROM performance_schema.metadata_locks m JOIN performance_schema.threads t ON t.THREAD_ID = m.OWNER_THREAD_ID"+
		running+" AND s.EVENT_ID <= m.OWNER_EVENT_ID"+inTransaction+
		" WHERE m.OBJECT_TYPE = 'USER LEVEL LOCK' AND m.OBJECT_NAME LIKE '%s%%' LIMIT %d", lockname.Any, most))
	if hidden(err) {
		p.gap(whoNames, "the account may not read performance_schema", p.grant("SELECT", "performance_schema.*"))
		return p.namedWithoutList(ctx)
	}
	p.full(rows, whoNames)
	for _, r := range rows {
		conn, _ := strconv.ParseUint(r[1], 10, 64)
		one := claim{conn: conn, waiting: r[2] == "1", age: p.age(r[3]), event: latest(number(r[5]))}
		if one.waiting {
			one.order, _ = strconv.ParseUint(r[4], 10, 64)
		}
		p.named(r[0], one.saying(r[6]))
	}
	if err := p.tolerate(err, whoNames, ""); err != nil {
		return err
	}
	return p.mysqlInstrument(ctx)
}

// mysqlInstrument notes where the list of named locks is not complete.
func (p *picture) mysqlInstrument(ctx context.Context) error {
	rows, err := p.query(ctx, "SELECT (SELECT ENABLED FROM performance_schema.setup_instruments WHERE NAME = 'wait/lock/metadata/sql/mdl'),"+
		" (SELECT VARIABLE_VALUE FROM performance_schema.global_status WHERE VARIABLE_NAME = 'Performance_schema_metadata_lock_lost')")
	if err != nil || len(rows) == 0 {
		return p.tolerate(err, someNames, p.grant("SELECT", "performance_schema.*"))
	}
	if rows[0][0] != "YES" {
		p.gap(whoNames, "performance_schema does not watch metadata locks",
			"UPDATE performance_schema.setup_instruments SET ENABLED = 'YES' WHERE NAME = 'wait/lock/metadata/sql/mdl'")
		return p.namedWithoutList(ctx)
	}
	if lost := rows[0][1]; lost != "0" && lost != "" {
		p.gap(someNames, "performance_schema had no room for "+lost+" metadata locks", "a larger performance_schema_max_metadata_locks")
	}
	return nil
}

// namedWithoutList notes what is to be seen of named locks without a list.
func (p *picture) namedWithoutList(ctx context.Context) error {
	if err := p.namedWaitersByText(ctx); err != nil {
		return err
	}
	p.unlisted = true
	return p.askForNames(ctx)
}

// mysqlDeadlocks counts the errors by which deadlocks are broken: of rows and
// tables, and of named locks. The counter of InnoDB would take PROCESS.
func (p *picture) mysqlDeadlocks(ctx context.Context) ([][]string, error) {
	if !p.schema {
		p.gap(deadlocks, "performance_schema is off", turnOn)
		return nil, nil
	}
	rows, err := p.query(ctx, fmt.Sprintf("SELECT SUM(SUM_ERROR_RAISED) FROM performance_schema.events_errors_summary_global_by_error"+
		" WHERE ERROR_NUMBER IN (%d, %d) HAVING COUNT(*) > 0", server.LockDeadlock, server.NamedLockDeadlock))
	if err == nil && len(rows) == 0 {
		p.gap(deadlocks, "performance_schema does not count errors",
			"performance_schema_error_size at its default in the server's configuration, and a restart")
	}
	return rows, p.tolerate(err, deadlocks, p.grant("SELECT", "performance_schema.*"))
}
