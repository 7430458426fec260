package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// All time in the texts below is the server's, at the start of the statement. A comment shows a statement with 'app' where
// the text has x'617070', and the table without its database: see package schema. The 40 digits at the end of the name of
// a wake-up lock are left out.

// Setup is the statement that connections for [strategy.Config.Conns] begin with. The
// server ends them, with the wake-up locks that they carry, when they have been silent
// for ttl.
//
//	SET @mysqllock = @@autocommit, SESSION autocommit = 1, timestamp = DEFAULT, sql_mode = '', …,
//	  innodb_lock_wait_timeout = 1, lock_wait_timeout = 5, wait_timeout = 30 /*T! , transaction_isolation = 'READ-COMMITTED',
//	  tidb_txn_mode = 'pessimistic', tidb_idle_transaction_timeout = 2 */ /*T! , autocommit = 0 */
func Setup(ttl time.Duration) string {
	return fmt.Sprintf("SET "+server.Pin+" autocommit = 1, %s, %s, lock_wait_timeout = 5, wait_timeout = %d",
		server.OwnSettings, rowWait(time.Second), max(1, int(ttl/time.Second))) +
		server.InSession(longestIdle) + " /*T! , autocommit = 0 */"
}

// Plain is Setup in place of the settings of a server that has none.
var Plain = fmt.Sprintf("autocommit = 0, transaction_timeout = %d", (longestIdle * time.Second).Milliseconds())

// longestIdle is for how many seconds a transaction of inTxn may be idle, in which it has locked
// the row of a key.
const longestIdle = 2

// rowWait bounds how long the statements of a session wait for a row.
func rowWait(d time.Duration) string {
	return fmt.Sprintf("innodb_lock_wait_timeout = %d", wholeSeconds(d))
}

func wholeSeconds(d time.Duration) int { return int(math.Ceil(d.Seconds())) }

// wakeUp is an SQL expression that is 1 where the connection has the wake-up lock, whose name is
// the value of the SQL expression name. It takes it where nobody has it, and waits for at most so
// many seconds. It never takes it twice, since it would have to be given back twice.
//
//	IF(IS_USED_LOCK('mysqllock-lease-…') <=> CONNECTION_ID(), 1, COALESCE(GET_LOCK('mysqllock-lease-…', 3), 0))
func wakeUp(name, seconds string) string {
	return fmt.Sprintf("IF(IS_USED_LOCK(%[1]s) <=> CONNECTION_ID(), 1, COALESCE(GET_LOCK(%[1]s, %[2]s), 0))", name, seconds)
}

// releaseWakeUpsSQL gives back the wake-up locks of keys where the connection has them. For two keys:
//
//	DO RELEASE_LOCK(_utf8mb4'mysqllock-lease-…'), RELEASE_LOCK(_utf8mb4'mysqllock-lease-…')
func (l *Locker) releaseWakeUpsSQL(keys ...string) string {
	var b strings.Builder
	for i, key := range keys {
		fmt.Fprintf(&b, "%s RELEASE_LOCK(%s)", [2]string{"DO", ","}[min(i, 1)], lockname.Literal(lockname.OfWakeUp(l.cfg.Namespace, key)))
	}
	return b.String()
}

// listenSQL waits for the wake-up lock of key until bound is over. It returns 1 where it has got
// it. The caller waits since then. On MySQL:
//
//	SELECT /*+ MAX_EXECUTION_TIME(3000) */ /* mysqllock waits 1 ms */
//	  IF(IS_USED_LOCK('mysqllock-lease-…') <=> CONNECTION_ID(), 1, COALESCE(GET_LOCK('mysqllock-lease-…', 3), 0))
func (l *Locker) listenSQL(key string, since time.Time, bound time.Duration) string {
	begin, seconds := l.cfg.Info.WaitsNamed(since, bound)
	return begin + wakeUp("'"+lockname.OfWakeUp(l.cfg.Namespace, key)+"'", seconds)
}

// row is the condition for the row of key.
func (l *Locker) row(qualifier, key string) string {
	return schema.Row(qualifier, l.cfg.Namespace, schema.Literal(key))
}

// texts are the statements that run most often, with question marks for what differs from
// one to the next.
type texts struct {
	take, takeNow, takeOnSession, handoff, release string
}

// block is a statement that is prepared where it runs often on a connection. In a cluster it
// is not, since Galera repeats no prepared statement that another node's write has stopped;
// nor behind a proxy that may change the connection.
func (l *Locker) block(text string, values ...driver.Value) pool.Block {
	b := pool.Block{Text: text, Values: values}
	if !l.shares() {
		b = pool.Block{Text: b.String()}
	}
	return b
}

// takeBlock takes the lease on key for ttl where nobody has it. nowait: it fails where
// somebody has locked the row. Where inTurn is set it does not take the lease if someone else
// has the wake-up lock, and so goes first. See answer for what it tells.
func (l *Locker) takeBlock(key string, ttl time.Duration, inTurn, nowait bool) pool.Block {
	text := l.texts.take
	if nowait {
		text = l.texts.takeNow
	}
	return l.takeBy(text, key, ttl, inTurn)
}

// takeBy is takeBlock with one of the texts of a take.
func (l *Locker) takeBy(text, key string, ttl time.Duration, inTurn bool) pool.Block {
	wake := lockname.OfWakeUp(l.cfg.Namespace, key)
	return l.block(text, schema.Hex(key), wake, wake, flag(inTurn), ttl.Microseconds())
}

// flag is a condition for a statement.
func flag(set bool) int64 {
	if set {
		return 1
	}
	return 0
}

// takeText is the text of takeBlock. The insert always meets the row that it has read, and is
// only a way to lock the row, to decide on it, to change it, and to tell the outcome in one
// statement. rowLocked is what to do where somebody has locked the row. With the values of a take inTurn, for 30 s:
//
//	INSERT INTO mysqllock (namespace, name, owner, token, expires)
//	SELECT s.namespace, s.name, s.owner, s.token, s.expires FROM mysqllock s
//	WHERE s.namespace = 'app' AND s.name = UNHEX(CONVERT('6b' USING ascii)) FOR UPDATE NOWAIT
//	ON DUPLICATE KEY UPDATE token = IF((mysqllock.owner IS NOT NULL AND mysqllock.expires > UTC_TIMESTAMP(6)),
//	  IF(LAST_INSERT_ID(4611686018427387904 + IF((mysqllock.owner IS NOT NULL AND mysqllock.expires > UTC_TIMESTAMP(6)),
//	    TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), mysqllock.expires), 0)), mysqllock.token, mysqllock.token),
//	  IF(IF(IS_USED_LOCK('mysqllock-lease-…') <=> CONNECTION_ID(), 1, COALESCE(GET_LOCK('mysqllock-lease-…', 0), 0)) >= 1,
//	    LAST_INSERT_ID(mysqllock.token + 1), IF(LAST_INSERT_ID(4611686018427387904), mysqllock.token, mysqllock.token))),
//	owner = IF(mysqllock.token <> s.token, 'me', mysqllock.owner),
//	expires = IF(mysqllock.token <> s.token, UTC_TIMESTAMP(6) + INTERVAL 30000000 MICROSECOND, mysqllock.expires)
func (l *Locker) takeText(rowLocked string) string {
	return l.grantText("", rowLocked, wakeUp("?", "0")+" >= ?")
}

// takeOnSessionText is takeText for a session of the application's, which may have another character set, and a clock of
// its own: by that it grants nothing. MariaDB's sql_mode may make all
// assignments at once (SIMULTANEOUS_ASSIGNMENT, which ORACLE has), and those of a grant follow from that of the token.
func (l *Locker) takeOnSessionText() string {
	text := l.grantText(server.Brief+" ", " NOWAIT",
		schema.ClockRuns+" AND "+wakeUp("CONVERT(? USING utf8mb4)", "0")+" >= ?")
	if l.cfg.Info.Settings {
		text = "SET STATEMENT sql_mode = '', lock_wait_timeout = 1 FOR " + text
	}
	return text
}

// grantText is the text of a take. may is a condition: without it a lease that nobody has is not taken either. With its values in
// the text, and names for the condition that a lease is live and for what is left of it:
//
//	INSERT INTO mysqllock (namespace, name, owner, token, expires)
//	SELECT s.namespace, s.name, s.owner, s.token, s.expires FROM mysqllock s WHERE s.namespace = … AND s.name = … FOR UPDATE NOWAIT
//	ON DUPLICATE KEY UPDATE
//	token = IF(LIVE, "token, and tell noToken + LEFT", IF(may, "token + 1, and tell it", "token, and tell noToken")),
//	owner = IF("the token was raised", 'ours', owner),
//	expires = IF("the token was raised", UTC_TIMESTAMP(6) + INTERVAL ttl MICROSECOND, expires)
func (l *Locker) grantText(hint, rowLocked, may string) string {
	t := l.cfg.Table.String()
	token, refused := t+".token", strconv.FormatInt(noToken, 10)
	// keep is the token as it is, and tells what: IF(LAST_INSERT_ID(n), x, x) is x and tells n.
	keep := func(what string) string { return "IF(LAST_INSERT_ID(" + what + "), " + token + ", " + token + ")" }
	next := "LAST_INSERT_ID(" + token + " + 1)"
	raised := token + " <> s.token"
	return "INSERT " + hint + "INTO " + t + " (namespace, name, owner, token, expires)" +
		" SELECT s.namespace, s.name, s.owner, s.token, s.expires FROM " + t + " s WHERE " + l.rowOf("s.") + " FOR UPDATE" + rowLocked +
		" ON DUPLICATE KEY UPDATE" +
		" token = IF(" + schema.Live(t+".") + ", " + keep(refused+" + "+schema.Remaining(t+".")) + "," +
		" IF(" + may + ", " + next + ", " + keep(refused) + "))," +
		" owner = IF(" + raised + ", " + schema.Literal(l.owner) + ", " + t + ".owner)," +
		" expires = IF(" + raised + ", " + after + ", " + t + ".expires)"
}

// after is the server's time after so many microseconds.
const after = "UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND"

// rowOf is the condition for the row of a key, which is a value of the statement.
func (l *Locker) rowOf(qualifier string) string {
	return schema.Row(qualifier, l.cfg.Namespace, schema.Unhex)
}

// handoffBlock turns the lease into another, with the next token, where it is still
// ours.
func (l *Locker) handoffBlock(from *Grant, ttl time.Duration) pool.Block {
	return l.block(l.texts.handoff, ttl.Microseconds(), schema.Hex(from.key), int64(from.token)) //nolint:gosec // tokens are counted by one
}

// handoffText is the text of handoffBlock. With its values:
//
//	UPDATE mysqllock SET token = LAST_INSERT_ID(token + 1), expires = UTC_TIMESTAMP(6) + INTERVAL 30000000 MICROSECOND
//	WHERE namespace = 'app' AND name = UNHEX(CONVERT('6b' USING ascii)) AND token = 7 AND owner = 'me'
//	  AND expires > UTC_TIMESTAMP(6)
func (l *Locker) handoffText() string {
	return "UPDATE " + l.cfg.Table.String() + " SET token = LAST_INSERT_ID(token + 1), expires = " + after +
		" WHERE " + l.rowOf("") + " AND token = ? AND owner = " + schema.Literal(l.owner) + " AND expires > UTC_TIMESTAMP(6)"
}

// in is the server's time after d.
func in(d time.Duration) string {
	return fmt.Sprintf("UTC_TIMESTAMP(6) + INTERVAL %d MICROSECOND", d.Microseconds())
}

// noToken marks, in what a take statement tells, microseconds in place of a token.
// Above it is a bit that is left alone: MySQL Router 9.7, where it shares connections,
// makes of an id with that bit its lowest byte, which would look like a token.
const noToken = int64(1) << 62

// answer is what a take statement tells.
type answer struct {
	sent      time.Time     // before the server began to count
	token     uint64        // 0 where the lease was not granted
	leaseLeft time.Duration // how long the lease that is in the way still runs; 0 where none is
}

// tokenAndLeft reads what a row says of its lease: the token, and the microseconds left.
func tokenAndLeft(token, micros string) (uint64, time.Duration, error) {
	n, err := strconv.ParseUint(token, 10, 64)
	if err != nil {
		return 0, 0, err
	}
	left, err := strconv.ParseInt(micros, 10, 64)
	return n, time.Duration(left) * time.Microsecond, err
}

// late reports whether a lease of ttl would be over for its holder before it has begun.
func (a answer) late(ttl time.Duration) bool { return time.Since(a.sent) >= ttl-margin(ttl) }

// ask runs a statement that may acquire the lease.
func (lc *lockConn) ask(ctx context.Context, block pool.Block) (answer, error) {
	a := answer{sent: time.Now()}
	result, err := lc.change(ctx, block)
	if err != nil {
		return a, err
	}
	id, err := result.LastInsertId()
	if err == nil {
		err = a.read(id)
	}
	return a, err
}

// read notes what the statement tells as the id of a row.
func (a *answer) read(id int64) error {
	switch {
	case id == 0:
		return keyrow.ErrNoRow
	case id&noToken == 0:
		a.token = uint64(id)
	default:
		a.leaseLeft = time.Duration(id&^noToken) * time.Microsecond
	}
	return nil
}

// lockRowSQL waits in the open transaction for the row of key.
//
//	/*M!100000 SET STATEMENT max_statement_time = 2.500 FOR */ SELECT /*+ MAX_EXECUTION_TIME(2500) */
//	  1 FROM mysqllock WHERE namespace = 'app' AND name = 'k' FOR UPDATE
func (l *Locker) lockRowSQL(key string, bound time.Duration) string {
	return server.Bounded(bound) + "1 FROM " + l.cfg.Table.String() + " WHERE " + l.row("", key) + " FOR UPDATE"
}

// liveSQL asks whether a lease is live on key, once nobody is changing that.
//
//	SELECT 1 FROM mysqllock WHERE namespace = 'app' AND name = 'k'
//	  AND (owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)) LOCK IN SHARE MODE
func (l *Locker) liveSQL(key string) string {
	return "SELECT 1 FROM " + l.cfg.Table.String() + " WHERE " + l.row("", key) + " AND " + schema.Live("") + " LOCK IN SHARE MODE"
}

// holderSQL asks who has the lease on key, without waiting for anybody.
//
//	SELECT owner FROM mysqllock WHERE namespace = 'app' AND name = 'k' AND (owner IS NOT NULL AND expires > UTC_TIMESTAMP(6))
func (l *Locker) holderSQL(key string) string {
	return "SELECT owner FROM " + l.cfg.Table.String() + " WHERE " + l.row("", key) + " AND " + schema.Live("")
}

// releaseBlock gives the lease and its wake-up lock back. The lease stays for minHold, in
// another name, so that no renewal that comes late can find it.
func (l *Locker) releaseBlock(key string, token uint64, minHold time.Duration) pool.Block {
	text := l.texts.release
	if minHold > 0 {
		text = l.releaseText(schema.Literal(l.leftBy), in(minHold))
	}
	return l.block(text, lockname.OfWakeUp(l.cfg.Namespace, key), schema.Hex(key), int64(token)) //nolint:gosec // tokens are counted by one
}

// releaseText is the text of releaseBlock. With its values:
//
//	UPDATE mysqllock SET owner = IF(RELEASE_LOCK('mysqllock-lease-…') IS NULL, NULL, NULL), expires = LEAST(expires, UTC_TIMESTAMP(6))
//	WHERE namespace = 'app' AND name = UNHEX(CONVERT('6b' USING ascii)) AND token = 7 AND owner = 'me'
//
// If it stays for a second, in the name of leftBy:
//
//	UPDATE mysqllock SET owner = IF(RELEASE_LOCK('mysqllock-lease-…') IS NULL, 'me#00000000', 'me#00000000'),
//	  expires = UTC_TIMESTAMP(6) + INTERVAL 1000000 MICROSECOND
//	WHERE namespace = 'app' AND name = UNHEX(CONVERT('6b' USING ascii)) AND token = 7 AND owner = 'me'
func (l *Locker) releaseText(owner, expires string) string {
	return "UPDATE " + l.cfg.Table.String() + " SET owner = IF(RELEASE_LOCK(?) IS NULL, " + owner + ", " + owner + ")," +
		" expires = " + expires + " WHERE " + l.rowOf("") + " AND token = ? AND owner = " + schema.Literal(l.owner)
}

// grantedSQL reads the token of the lease that this process has on key, once a
// statement that is taking it has ended.
//
//	SELECT token FROM mysqllock WHERE namespace = 'app' AND name = 'k' AND owner = 'me' FOR UPDATE
func (l *Locker) grantedSQL(key string) string {
	return "SELECT token FROM " + l.cfg.Table.String() + " WHERE " + l.row("", key) + " AND owner = " + schema.Literal(l.owner) + " FOR UPDATE"
}

// lasted is the condition that a lease had not run out when the statement began. It is
// for connections of our own, whose clock nobody sets.
const lasted = "r.expires > UTC_TIMESTAMP(6)"

// What changeSQL does to leases, whose durations are d.ttl.
const (
	extend = "expires = UTC_TIMESTAMP(6) + INTERVAL d.ttl MICROSECOND"
	// tell is extend, and says since when the lease is held, and its TTL.
	tell = extend + ", renewed_token = r.token, granted_at = UTC_TIMESTAMP(6) - INTERVAL d.age MICROSECOND, ttl = d.told"
	// touch changes a row as little as possible.
	touch = "expires = r.expires + INTERVAL 1 MICROSECOND"
)

// leave is releaseSQL for changeSQL; the wake-up locks go with their connections.
func (l *Locker) leave() string {
	return "owner = IF(d.ttl > 0, " + schema.Literal(l.leftBy) + ", NULL), expires = IF(d.ttl > 0," +
		" UTC_TIMESTAMP(6) + INTERVAL d.ttl MICROSECOND, LEAST(r.expires, UTC_TIMESTAMP(6)))"
}

// changeSQL changes the rows of leases that are live and ours, each found by its primary key
// and no other row locked. lasts is the condition that they have not run out. skip leaves
// those alone that somebody has locked. It counts 2 affected rows a lease, whatever the DSN's
// clientFoundRows. For tell, and two leases that are 10 s old:
//
//	INSERT INTO mysqllock (namespace, name, owner, token, expires)
//	SELECT r.namespace, r.name, r.owner, r.token, r.expires
//	FROM (SELECT 'k' AS n, 7 AS k, 30000000 AS ttl, 10000000 AS age, 30000000 AS told
//	  UNION ALL SELECT 'l', 3, 30000000, 10000000, 30000000) d
//	STRAIGHT_JOIN mysqllock r ON r.namespace = 'app' AND r.name = d.n AND r.token = d.k AND r.owner = 'me'
//	WHERE r.expires > UTC_TIMESTAMP(6) FOR UPDATE SKIP LOCKED
//	ON DUPLICATE KEY UPDATE expires = UTC_TIMESTAMP(6) + INTERVAL d.ttl MICROSECOND,
//	  renewed_token = r.token, granted_at = UTC_TIMESTAMP(6) - INTERVAL d.age MICROSECOND, ttl = d.told
func (l *Locker) changeSQL(leases []*Grant, ttl func(*Grant) time.Duration, lasts, set, skip string) string {
	lines := make([][]string, len(leases))
	for i, g := range leases {
		lines[i] = []string{schema.Literal(g.key), strconv.FormatUint(g.token, 10), micros(ttl(g))}
		if set == tell {
			lines[i] = append(lines[i], micros(time.Since(g.granted)), toldTTL(g.ttl, ttl(g)))
		}
	}
	t := l.cfg.Table.String()
	return "INSERT INTO " + t + " (namespace, name, owner, token, expires)" +
		" SELECT r.namespace, r.name, r.owner, r.token, r.expires FROM " + schema.List(lines, "n", "k", "ttl", "age", "told") +
		" STRAIGHT_JOIN " + t + " r ON " + schema.Row("r.", l.cfg.Namespace, "d.n") +
		" AND r.token = d.k AND r.owner = " + schema.Literal(l.owner) +
		" WHERE " + lasts + " FOR UPDATE" + skip + " ON DUPLICATE KEY UPDATE " + set
}

// toldTTL is what a renewal of a lease of ttl writes as its TTL. If it makes the lease last for
// less, none follows it, and nobody is to miss that.
func toldTTL(ttl, lasts time.Duration) string {
	if lasts < ttl {
		return "NULL"
	}
	return micros(ttl)
}

func micros(d time.Duration) string { return strconv.FormatInt(d.Microseconds(), 10) }

// heldSQL asks which of leases are live and ours: name, token, microseconds left.
//
//	SELECT name, token,
//	  IF((owner IS NOT NULL AND expires > UTC_TIMESTAMP(6)), TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), 0)
//	FROM mysqllock WHERE namespace = 'app' AND name IN ('k', 'l') AND owner = 'me'
//	  AND (owner IS NOT NULL AND expires > UTC_TIMESTAMP(6))
func (l *Locker) heldSQL(leases []*Grant) string {
	return "SELECT name, token, " + schema.Remaining("") + " FROM " + l.cfg.Table.String() +
		" WHERE " + l.rowsOf(leases) + " AND owner = " + schema.Literal(l.owner) + " AND " + schema.Live("")
}

// unknown reports that a statement may have done its work although it failed:
// the connection broke, or the server cannot tell either.
func unknown(err error) bool {
	if err == nil || errors.Is(err, keyrow.ErrNoRow) || errors.Is(err, driver.ErrBadConn) { // then nothing was sent
		return false
	}
	return server.Number(err) == 0 || server.Undecided(err) || server.Gone(err, nil)
}
