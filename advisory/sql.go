package advisory

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
)

// Every statement that takes something first makes sure that it runs on the
// connection that it is meant for: a proxy may have sent it elsewhere; and that
// the server is one that takes writes, which it may have ceased to be. Names need
// no quoting.

// What a statement answers that was not allowed to do anything.
const (
	elsewhere = "-1" // on another connection
	readOnly  = "-2" // on a server that takes no writes
)

// Setup is the statement that connections for [Config.Conns] begin with. The
// server ends them, with the locks that they carry, when they have been silent
// for ttl.
func Setup(ttl time.Duration) string {
	return fmt.Sprintf("SET SESSION autocommit = 1, wait_timeout = %d", int(silentFor(ttl)/time.Second))
}

// silentFor is how long the server lets a connection be silent.
func silentFor(ttl time.Duration) time.Duration {
	return max(time.Second, ttl.Truncate(time.Second))
}

// here is an SQL expression that is value on the carrier's own connection, else
// elsewhere. Where others may take locks on another server it is readOnly.
func (k *carrier) here(value string) string {
	before, after := k.around()
	return before + value + after
}

// around is what here puts around the value.
func (k *carrier) around() (before, after string) {
	before, after, _ = strings.Cut(k.writable("?"), "?")
	return "IF(CONNECTION_ID() = " + strconv.FormatUint(k.id, 10) + ", " + before, after + ", " + elsewhere + ")"
}

// writable is an SQL expression that is value where the server takes writes, when
// it is evaluated: MariaDB evaluates a condition that is more than one variable
// before the statement runs.
func (k *carrier) writable(value string) string {
	if k.l.unsafe {
		return value
	}
	return "IF(@@read_only, " + readOnly + ", IF(@@innodb_read_only, " + readOnly + ", " + value + "))"
}

// openSQL takes the guard of a new carrier, which answers 1.
func (k *carrier) openSQL() string { return "SELECT " + k.here("GET_LOCK('"+k.guard+"', 0)") }

// pingSQL answers 1. A ping of the protocol could be a proxy's own answer.
func (k *carrier) pingSQL() string { return "SELECT " + k.here("1") }

// freeSQL gives the locks of batch back, in one short answer.
func freeSQL(batch []*request) string {
	var b strings.Builder
	b.Grow(len(batch) * 96)
	for i, r := range batch {
		write(&b, [2]string{"DO ", ", "}[min(i, 1)], "RELEASE_LOCK('", r.lock.name, "')")
	}
	return b.String()
}

// takeSQL takes one lock: 1 where it was taken.
func (k *carrier) takeSQL(name string) string { return "SELECT " + k.here("GET_LOCK("+name+", 0)") }

// batchSQL runs the requests of batch in their order. It answers one digit for
// each: 1 where it was done, 2 where it was interrupted, 3 where the lock was left
// to somebody who wishes it.
func (k *carrier) batchSQL(batch []*request) string {
	if len(batch) == 1 && !batch[0].yields {
		return k.takeSQL("'" + batch[0].lock.name + "'")
	}
	before, after := k.around()
	var b strings.Builder
	b.Grow(len(before) + len(batch)*128)
	write(&b, "SELECT ", before)
	get := func(name string) { write(&b, "COALESCE(GET_LOCK('", name, "', 0), 2)") }
	for i, r := range batch {
		b.WriteString([2]string{"CONCAT(", ", "}[min(i, 1)])
		switch name := r.lock.name; {
		case r.yields:
			write(&b, "IF(RELEASE_LOCK('", name, "'), IF(IS_FREE_LOCK('", lockname.OfWish(k.l.namespace, r.lock.key), "'), ")
			get(name)
			b.WriteString(", 3), 2)")
		case r.take:
			get(name)
		default:
			write(&b, "COALESCE(RELEASE_LOCK('", name, "'), 2)")
		}
	}
	write(&b, ")", after)
	return b.String()
}

func write(b *strings.Builder, parts ...string) {
	for _, part := range parts {
		b.WriteString(part)
	}
}

// What waitSQL answers where it has got the lock.
const (
	alone  = "1" // nobody else had it or waited for it
	inTurn = "2"
)

// waitSQL waits for the lock until bound is over, on the server as well, so that
// a waiter whose client is gone disappears by itself. Before that it gives the
// lock back where its own connection has it, to those who wait already. Whether
// the server takes writes is asked again after the wait: both servers evaluate
// what IF chooses when it has chosen.
func (k *carrier) waitSQL(name string, bound time.Duration) string {
	bound = max(bound, time.Millisecond)
	hint, get := "", fmt.Sprintf("GET_LOCK('%s', %.3f)", name, bound.Seconds())
	if !k.l.info.MariaDB {
		hint = fmt.Sprintf("/*+ MAX_EXECUTION_TIME(%d) */ ", bound.Milliseconds())
		get = fmt.Sprintf("GET_LOCK('%s', %d)", name, int(math.Ceil(bound.Seconds())))
	}
	granted := func(answer string) string { return "IF(" + get + ", " + k.writable(answer) + ", 0)" }
	return "SELECT " + hint + k.here("IF(RELEASE_LOCK('"+name+"') IS NULL OR IS_FREE_LOCK('"+name+"'), "+granted(alone)+", "+granted(inTurn)+")")
}

// checkSQL answers 1 where all locks are held, and whom it has answered.
func checkSQL(locks []*Lock) string { return "SELECT " + heldSQL(locks) + ", CONNECTION_ID()" }

// heldSQL is true where all locks are held.
func heldSQL(locks []*Lock) string {
	var terms []string
	held := func(name string, k *carrier) {
		terms = append(terms, fmt.Sprintf("IS_USED_LOCK('%s') = %d", name, k.id))
	}
	guarded := make(map[*carrier]bool)
	for _, lock := range locks {
		if !guarded[lock.carrier] {
			guarded[lock.carrier] = true
			held(lock.carrier.guard, lock.carrier)
		}
		held(lock.name, lock.carrier)
	}
	return strings.Join(terms, " AND ")
}

// holderSQL asks who has the lock: id, user and host of its connection, and
// where programs is set, the program's name.
func holderSQL(name string, programs bool) string {
	program := "''"
	if programs {
		program = "(SELECT a.ATTR_VALUE FROM performance_schema.session_connect_attrs a WHERE a.PROCESSLIST_ID = h.id" +
			" AND a.ATTR_NAME IN ('mysqllock_owner', 'program_name') ORDER BY a.ATTR_NAME LIMIT 1)"
	}
	return "SELECT h.id, p.USER, p.HOST, " + program + " FROM (SELECT IS_USED_LOCK('" + name + "') AS id) h" +
		" LEFT JOIN information_schema.PROCESSLIST p ON p.ID = h.id WHERE h.id IS NOT NULL"
}
