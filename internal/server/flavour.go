package server

import (
	"context"
	"database/sql/driver"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Flavour is what an engine that speaks MySQL's protocol can do. Code asks for a capability,
// never for a product.
type Flavour struct {
	Engine     string // its name and version, for errors
	RowLocks   bool   // FOR UPDATE keeps others out until the transaction ends, and what is read after it is no older than the lock
	SkipLocked bool   // SKIP LOCKED is known, and locks the rows that it returns
	Share      string // the clause of a read that keeps out those who want the row for themselves; "" if there is none
	NamedLocks bool   // a named lock of GET_LOCK is its holder's until that gives it back, or its session ends
	UnionLocks bool   // a UNION of locking reads locks what each of them reads, and reads it no older than that
	Settings   bool   // SET STATEMENT … FOR has settings for one statement, fractions of a second too; else a hint ends a SELECT
	Attributes bool   // an account with rights reads what the clients of other connections have said of themselves
	Kills      bool   // KILL QUERY ends a statement that waits, and nothing else, and KILL CONNECTION no more than a connection
	Hints      bool   // a hint ends a SELECT that waits, in milliseconds; else FOR UPDATE WAIT, in seconds
	Holders    bool   // the server shows who has locked a row
	AllHolders bool   // it does also while nobody waits for the row
	UsedTables bool   // it shows which tables the transactions of all nodes have used, but not which rows
	// Tablets is that something between the client and the server has transactions of its own. It may end
	// a transaction, and then each statement that follows commits by itself. Each transaction may be on
	// another connection, so a session has no settings, counters and limit of silence on the server.
	Tablets bool
	// EarlySnapshot is that a transaction which keeps one snapshot takes it at BEGIN, before it
	// has its locks. So a transaction under a row lock is READ COMMITTED.
	EarlySnapshot bool
	// Optimists is that there are optimistic transactions, whose locks exclude nobody before COMMIT: those
	// of a session that says so, and every statement outside of a transaction.
	Optimists bool
	// CheapWaits is that a wait for a row costs the server little. So the next caller of a process waits there while the process
	// still has the key, and does not take over its session: see package rowlock. Measured with 64 goroutines that read and write
	// a row in BeginTx: on MariaDB 10.11 they sell 1.18 times as much as by a handoff, near and 0.25 ms away, and 1.06 times 2 ms
	// away. On MySQL 9.7 they sell 1.02 times as much, but in Do 0.92 times. With all callers in the server it is slower.
	CheapWaits bool
	// EagerSubqueries is that IF evaluates a subquery which it does not return.
	EagerSubqueries bool

	why   string // why RowLocks is false: what follows the name of the engine in an error
	lacks string // what follows it where the engine lacks something
}

// asMySQL are the capabilities of MySQL, and of an engine that is taken for one; asMariaDB those of
// MariaDB, whose only clause for a shared lock allows no NOWAIT.
var (
	asMySQL = Flavour{
		SkipLocked: true, Share: " FOR SHARE", NamedLocks: true, UnionLocks: true,
		Attributes: true, Kills: true, Hints: true, Holders: true, AllHolders: true,
	}
	asMariaDB = Flavour{
		SkipLocked: true, Share: " LOCK IN SHARE MODE", NamedLocks: true, UnionLocks: true,
		Settings: true, Kills: true, Holders: true, CheapWaits: true,
	}
)

// engine is one that calls itself something else than MySQL or MariaDB.
type engine struct {
	name  string
	words []string // its version, or its version's comment, has one of these, in lower case
	can   Flavour
	ask   func(*Info, context.Context, driver.Conn) error // asks what MySQL is asked in other words; nil: nothing more
}

// calls reports whether a text has one of the engine's words, which no letter precedes or follows.
func (e engine) calls(text string) bool {
	text = strings.ToLower(text)
	has := func(word string) bool {
		for rest := text; ; {
			before, after, found := strings.Cut(rest, word)
			if !found {
				return false
			}
			if !letter(before, len(before)-1) && !letter(after, 0) {
				return true
			}
			rest = after
		}
	}
	return slices.ContainsFunc(e.words, has)
}

// letter reports whether text has a lower-case letter at i.
func letter(text string, i int) bool {
	return i >= 0 && i < len(text) && 'a' <= text[i] && text[i] <= 'z'
}

// no is an engine on which nothing can be locked, because of why; skips is whether SKIP LOCKED
// works there, or nobody knows.
func no(name string, skips bool, why string, words ...string) engine {
	f := asMySQL
	f.SkipLocked, f.why = skips, why
	return engine{name: name, words: words, can: f}
}

func untested(name string, words ...string) engine {
	return no(name, true, "where nobody has tested whether locks exclude", words...)
}

// engines are recognised by what they call themselves. One that is not here is recognised by
// what it lacks: see [Probe].
var engines = []engine{
	{"TiDB", []string{"tidb"}, Flavour{
		RowLocks: true, UsedTables: true, EarlySnapshot: true, Optimists: true, EagerSubqueries: true,
	}, (*Info).askTiDB},
	{"Vitess", []string{"vitess", "planetscale", "(git revision"}, Flavour{
		RowLocks: true, SkipLocked: true, Share: " FOR SHARE", UnionLocks: true, Hints: true, Tablets: true,
	}, (*Info).askVitess},
	no("Dolt or go-mysql-server", false, "where FOR UPDATE is accepted and locks nothing,"+
		" so that updates would be lost silently, and a test would prove nothing (package mysqllocktest tests without a server)",
		"dolt", "go-mysql-server"),
	untested("OceanBase", "oceanbase"),
	untested("PolarDB-X", "polardb-x", "polardbx", "tddl"),
	untested("SingleStore", "singlestore", "singlestoredb", "memsql"),
	untested("MatrixOne", "matrixone"),
	untested("StarRocks", "starrocks"),
	untested("Doris", "doris"),
	untested("ClickHouse", "clickhouse"),
	untested("Readyset", "readyset"),
	untested("ShardingSphere", "shardingsphere"),
	untested("Mycat", "mycat"),
}

// self is what a server says of itself.
type self struct {
	version  string // VERSION()
	variable string // @@version, which differs behind a proxy that has a version of its own
	comment  string // @@version_comment; any text, for builds of MySQL and MariaDB
}

func (s self) mariadb() bool { return strings.Contains(s.version, "MariaDB") }

// engine recognises the engine by its name. Every other name is that of a build of MySQL or
// MariaDB.
func (s self) engine() engine {
	said := []string{s.variable, s.version, s.comment}
	for _, e := range engines {
		if slices.ContainsFunc(said, e.calls) {
			e.can.Engine = e.name + " " + s.variable
			return e
		}
	}
	return engine{can: s.build()}
}

// build is what a build of MySQL or MariaDB can do.
func (s self) build() Flavour {
	major, minor, err := number(s.version)
	if err != nil {
		return s.unknown("whose version has another form than those of MySQL and MariaDB")
	}
	f := s.like()
	f.Engine, f.RowLocks = "MySQL "+s.version, true
	if s.mariadb() {
		f.Engine = "MariaDB " + s.version
		f.SkipLocked, f.lacks = major > 10 || major == 10 && minor >= 6, " (MariaDB has it from 10.6 on)"
	}
	return f
}

// like is the kind of server that it calls itself.
func (s self) like() Flavour {
	if s.mariadb() {
		return asMariaDB
	}
	return asMySQL
}

// unknown is an engine with another name or none. Its capabilities are taken to be those of
// MySQL or MariaDB, for lockUnsafe=allow.
func (s self) unknown(why string) Flavour {
	f := s.like()
	f.Engine, f.why = fmt.Sprintf("an unknown engine, %s (%s)", s.variable, s.comment), why
	return f
}

// Reliable returns an error if locks on the server do not exclude, or if nobody knows.
func (f Flavour) Reliable() error {
	if f.RowLocks {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("%s; connect to MySQL or MariaDB,"+
		" or use lockUnsafe=allow if you know that these locks hold there", f.Why()))
}

// Shows returns an error if the server shows nothing of who holds row locks.
func (f Flavour) Shows() error {
	if f.Holders || f.UsedTables {
		return nil
	}
	return fmt.Errorf("the server is %s, which does not show who holds row locks, so that only doctor, run and hold work here;"+
		" performance_schema of the MySQL behind it may", f.Engine)
}

// Why says in a sentence why locks on the server are not reliable.
func (f Flavour) Why() string { return "the server is " + f.Engine + ", " + f.why }

// Slots returns an error if slots do not work, with lockUnsafe=allow or not: they need SKIP LOCKED.
// Where no wait can be stopped, callers try one slot after the other.
func (f Flavour) Slots() error {
	return f.has(f.SkipLocked || !f.Kills, "slots", "SKIP LOCKED", f.lacks+"; use a key of its own for each slot")
}

// Leases is Slots for leases. Those without named locks are taken in transactions, which skip nothing.
func (f Flavour) Leases() error {
	return f.has(f.SkipLocked || !f.NamedLocks, "leases", "SKIP LOCKED", f.lacks+"; use a row lock")
}

// AdvisoryLocks is Slots for advisory locks.
func (f Flavour) AdvisoryLocks() error {
	return f.has(f.NamedLocks, "advisory locks", "GET_LOCK", "; use a row lock")
}

// CleansUp is Slots for clean-ups of the lock table.
func (f Flavour) CleansUp() error {
	return f.has((f.SkipLocked || f.Optimists) && !f.Tablets, "clean-ups", "SKIP LOCKED and settings of a session",
		f.lacks+"; leave the rows, which do no harm")
}

// Shares is Slots for FOR SHARE. what needs it, and instead is what the caller can do.
func (f Flavour) Shares(what, instead string) error {
	return f.has(f.Share != "", what, "FOR SHARE", "; "+instead)
}

// Within has a locking read wait for a row for at most d: hint goes behind SELECT, and tail behind
// the lock.
func (f Flavour) Within(d time.Duration) (hint, tail string) {
	if f.Hints {
		return fmt.Sprintf("/*+ MAX_EXECUTION_TIME(%d) */ ", d.Milliseconds()), ""
	}
	return "", fmt.Sprintf(" WAIT %d", max(1, int((d+time.Second-1)/time.Second)))
}

// Bounded begins a SELECT that the server ends after d. MySQL skips the comment, MariaDB the hint. For 2.5 s:
//
//	/*M!100000 SET STATEMENT max_statement_time = 2.500 FOR */ SELECT /*+ MAX_EXECUTION_TIME(2500) */
func Bounded(d time.Duration) string {
	return fmt.Sprintf("/*M!100000 SET STATEMENT max_statement_time = %.3f FOR */ SELECT /*+ MAX_EXECUTION_TIME(%d) */ ",
		d.Seconds(), d.Milliseconds())
}

// WaitsNamed begins a SELECT that waits for a named lock for at most bound, for a caller that waits
// since then, and says for how many seconds GET_LOCK is to wait. The server limits the wait as
// well, so that a waiter whose client is gone disappears by itself. On MySQL, for 3 s:
//
//	SELECT /*+ MAX_EXECUTION_TIME(3000) */ /* mysqllock waits 1 ms */ …
func (f Flavour) WaitsNamed(since time.Time, bound time.Duration) (begin, seconds string) {
	bound = max(bound, time.Millisecond)
	comment := "/* mysqllock " + Waits(since) + " */ "
	if f.Settings {
		return "SELECT " + comment, fmt.Sprintf("%.3f", bound.Seconds())
	}
	begin = fmt.Sprintf("SELECT /*+ MAX_EXECUTION_TIME(%d) */ ", bound.Milliseconds()) + comment
	return begin, fmt.Sprintf("%.0f", math.Ceil(bound.Seconds()))
}

func (f Flavour) has(it bool, what, needs, end string) error {
	if it {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("%s need %s, which does not work on %s%s", what, needs, f.Engine, end))
}
