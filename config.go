package mysqllock

import (
	"cmp"
	"database/sql/driver"
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/schema"
)

// Config sets up locks for one database handle. The zero value works. Each
// field mirrors a DSN parameter, whose name stands behind it; an unknown DSN
// parameter that begins with "lock", or is like one of these, is an error.
type Config struct {
	// Strategy is how a lock is kept whose options do not say: "row", which is
	// also the meaning of "", "lease", "advisory" or "optimistic". (lockStrategy)
	Strategy string

	// Wait is the longest time to queue for a lock whose options do not say;
	// 0 means 10 s. It is kept to the millisecond. (lockWait)
	Wait time.Duration

	// NoWait makes a lock whose options do not say fail at once where someone
	// else has the key. It excludes Wait. (lockNoWait)
	NoWait bool

	// TTL is how long a lock survives a holder that has fallen silent without
	// closing its connection; 0 means 30 s, and less than 1 s is an error.
	// The server counts it in whole seconds, rounded down. A holder that
	// lives is kept alive by pings, however long it holds: see "Holders that fall silent"
	// in docs/errors.md. It is also the TTL of a lease whose option does not say. (lockTTL)
	TTL time.Duration

	// Table is the lock table, as table or schema.table; "" means
	// "mysqllock". (lockTable)
	Table string

	// MaxConns is the most connections that this handle opens to the server, for
	// everything: statements, transactions, locks, and killing waiters. 0 is no such
	// limit; else it is at least 5. The driver keeps a few of them for itself: one for
	// leases, one for advisory locks, and one for making rows and killing waiters, from 8
	// on two. All others run statements, transactions and sessions.
	//
	// With MaxConns a caller that waits for a lock of this process has no connection, and
	// a connection of [database/sql] has a real one only while it needs it: leave
	// SetMaxOpenConns alone. See docs/connections.md. (maxConns)
	MaxConns int

	// LockMaxConns is the most sessions that Do, Acquire, and reads outside of transactions have at a
	// time; 0 means 16, and with MaxConns as many as that. Not counted are
	//   - the session of a BeginTx or of a single write: there is one for each connection of
	//     [database/sql] that has such a call;
	//   - connections for leases: as many again at most, with MaxConns a quarter of that. A few hold
	//     all leases, and each key that this process waits for takes one;
	//   - connections for advisory locks: the same;
	//   - up to 4 that make rows and kill waiters.
	//
	// (lockMaxConns)
	LockMaxConns int

	// Namespace goes in front of keys, so that applications which share a lock
	// table do not share keys; "" means the name of the DSN's database. At
	// most 255 bytes. (lockNamespace)
	Namespace string

	// Stripes is how many rows of the lock table all keys of the namespace share,
	// for a table that never grows; 0 is a row of its own for each key. At most
	// 10000. Keys that are on the same row by chance exclude each other, as two
	// given keys are with a probability of 1 in Stripes; of n keys that are held at
	// the same time some two are with one of about n*n in 2*Stripes. The same lock
	// context may hold both: they are one lock. [lockctx.Shared] is exclusive, and
	// advisory locks need no rows and share none.
	//
	// All programs that use a namespace must say the same: the first to use it
	// notes the number in the table, and others are refused. To change it, stop
	// all of them and delete the rows of the namespace. (lockStripes)
	Stripes int

	// Schema is "auto", also the meaning of "", to make the lock table on
	// first use where it is missing, or "manual" not to. (lockSchema)
	Schema string

	// Owner is how this process calls itself towards those it keeps waiting;
	// "" means host:pid:program. (lockOwner)
	Owner string

	// HandOvers and HandOverTime bound for how long this process keeps a lock that
	// many of its goroutines want. A lease, an advisory lock, or the row lock of Do
	// and Acquire goes from one goroutine to the next at most HandOvers times, and
	// for at most HandOverTime. Then it is offered to other processes. 0 means 30
	// times, and 10 ms. If no other process took an advisory lock when it was offered
	// last, the time alone bounds it.
	// For row locks both are the bounds between two COMMITs, at which processes
	// that wait get the lock; and at most HandOvers COMMITs in a row lock for the
	// next caller. A holder that has run no statement, and hands its row lock over,
	// is not told that its session was lost within HandOverTime, except by its socket.
	// More is more throughput for this process, and longer waits in others.
	// (lockHandOvers, lockHandOverTime)
	HandOvers    int
	HandOverTime time.Duration

	// Unsafe is "refuse", also the meaning of "", to fail with ErrUnsafe on a
	// topology where the strategy does not exclude, for leases with
	// binlog_format=STATEMENT, and on an engine that is neither MySQL nor MariaDB;
	// or "allow" for an application that sees to it that all of it uses one node,
	// also after a failover, or that knows that locks hold on its engine. (lockUnsafe)
	Unsafe string

	// Require names tables, separated by commas, whose rows are written only under a lock
	// (strict mode): a statement that writes one of them outside of any lock fails with
	// ErrNoLock before it is sent. A name may be a pattern as in [path.Match], and may have a
	// schema in front, as in "products,order_*,shop.stock"; case does not matter. What is read
	// outside a transaction under [lockctx.With] alone must then be written in [Do], or read
	// again in the transaction that writes: else the first write of such a table is
	// refused with ErrUnsafe, since its commit would give the lock back.
	//
	// After "log:", as in "log:products", nothing is refused: the Observer gets an Advised
	// event, once for each line of code and table (at most 1,000 of them); without an
	// Observer [log/slog.Default] gets a line.
	//
	// What the text of a statement does not show is not seen: see docs/no-lock.md. "" is
	// no table, and costs nothing. (lockRequire)
	Require string

	// RequireKey is for those who want the right key, too: it gets a table that Require
	// names, and that is about to be written under a lock, and the keys that the caller
	// holds exclusively, sorted. A key that is held with [lockctx.Shared], or as one of
	// several [lockctx.Slots], is none of them. Its error is the reason of an ErrNoLock. It
	// must return soon, and not use the handle. nil takes any key. It has no DSN parameter.
	RequireKey func(table string, keys []string) error

	// Observer is told what becomes of locks: for metrics, traces and logs. nil
	// is nobody. It has no DSN parameter: see [NewConnector].
	Observer Observer

	// LongHold has the Observer told of a hold that lasts longer, once, while it lasts: see
	// [LongHold]. Leaderships (package leader) are none. 0 is never. It has no DSN parameter, either.
	LongHold time.Duration

	// SlowWait has the Observer told who held a lock for which a caller waited for longer: see
	// [Event].Holder. The driver asks in such a wait, after that time, until it is told (after
	// twice the time, and so on), and nobody waits for the answer. 0 is never; a good value is the
	// one that [LogTo] is given. It has no DSN parameter, either.
	SlowWait time.Duration

	// Base wraps each connector that the handle opens connections with, those of the
	// driver's own included: what it returns sees every statement that goes to the
	// server. Package intercept has one for interceptors of github.com/ngrok/sqlmw. nil
	// costs nothing. Its error is that of [NewConnector] or [Wrap]. A connector that it
	// returns is closed with the handle if it has a Close. It has no DSN parameter.
	Base func(driver.Connector) (driver.Connector, error)
}

// settings checks and completes the Config.
func (c Config) settings() (handle.Settings, error) {
	var s handle.Settings
	c, err := c.completed()
	if err != nil {
		return s, err
	}
	table, err := schema.Parse(c.Table)
	if err != nil {
		return s, err
	}
	required, err := handle.ParseRequired(c.Require)
	switch {
	case err != nil:
		return s, err
	case required != nil:
		required.Key = c.RequireKey
	case c.RequireKey != nil:
		return s, errors.New("mysqllock: RequireKey goes with Require")
	}
	s.Strategy, s.Wait, s.TTL, s.Owner, s.Unsafe = c.Strategy, c.Wait, c.TTL, c.Owner, c.Unsafe == "allow"
	s.Table, s.Namespace, s.Stripes, s.Auto = table, c.Namespace, c.Stripes, c.Schema == "auto"
	s.MaxConns, s.LockMaxConns, s.HandOvers, s.HandOverTime = c.MaxConns, c.LockMaxConns, c.HandOvers, c.HandOverTime
	s.LongHold, s.SlowWait, s.Required = c.LongHold, c.SlowWait, required
	observe(&s, c.Observer)
	return s, nil
}

// completed returns the Config with the defaults in place of zero values, or an error that
// names a field with a bad value.
func (c Config) completed() (Config, error) {
	bad := func(format string, args ...any) (Config, error) { return c, fmt.Errorf("mysqllock: "+format, args...) }
	switch {
	case c.Wait < 0:
		return bad("lockWait is negative: %v", c.Wait)
	case c.LongHold < 0 || c.SlowWait < 0:
		return bad("LongHold is %v and SlowWait %v, want neither to be negative", c.LongHold, c.SlowWait)
	case c.NoWait && c.Wait > 0:
		return bad("lockNoWait and a lockWait of %v exclude each other", c.Wait)
	case c.HandOvers < 0 || c.HandOverTime < 0:
		return bad("lockHandOvers is %d and lockHandOverTime %v, want neither to be negative", c.HandOvers, c.HandOverTime)
	case len(c.Namespace) > schema.MaxNamespace:
		return bad("lockNamespace is longer than %d bytes", schema.MaxNamespace)
	}
	for _, p := range parameters {
		is := reflect.ValueOf(p.field(&c)).Elem()
		switch {
		case is.IsZero():
			if p.preset != nil {
				is.Set(reflect.ValueOf(p.preset))
			}
		case p.oneOf != nil && !slices.Contains(p.oneOf, is.String()):
			return bad("%s is %q, want %s", p.name, is, oneOf(p.oneOf))
		case is.CanInt() && (is.Int() < p.least || p.most > 0 && is.Int() > p.most):
			return bad("%s is %v, want %s", p.name, is, p.want)
		}
	}
	if c.NoWait {
		c.Wait = 0
	}
	c.LockMaxConns = cmp.Or(c.LockMaxConns, c.MaxConns, pool.DefaultMax)
	if c.Owner == "" {
		c.Owner = keyrow.OwnerOf(os.Args[0])
	}
	return c, nil
}

// oneOf is names as a sentence has them.
func oneOf(names []string) string {
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

// A parameter of a DSN sets a field of Config. The zero of a field is its default; here is what that means, and what
// else the field may be.
type parameter struct {
	name   string
	field  func(c *Config) any // a pointer to it
	preset any                 // what its zero means; nil if nothing else

	oneOf       []string // the texts that it may be; nil for any
	least, most int64    // of a number that is not 0; no most is 0
	want        string   // for errors: what it may be, where a DSN cannot say 0; "" where it can
}

var parameters = []parameter{
	{name: "lockStrategy", field: func(c *Config) any { return &c.Strategy }, preset: hint.StrategyRow, oneOf: handle.Strategies()},
	{
		name: "lockWait", field: func(c *Config) any { return &c.Wait },
		preset: 10 * time.Second, want: "more than 0s, or lockNoWait=true to fail at once",
	},
	{name: "lockNoWait", field: func(c *Config) any { return &c.NoWait }},
	{
		name: "lockTTL", field: func(c *Config) any { return &c.TTL },
		preset: 30 * time.Second, least: int64(time.Second), want: "1s or more",
	},
	{name: "lockTable", field: func(c *Config) any { return &c.Table }, preset: "mysqllock"},
	// At least one connection to make rows and to kill, one each that holds leases and advisory locks, and two
	// to run statements on: a caller that waits in the server may have one of these.
	{name: "maxConns", field: func(c *Config) any { return &c.MaxConns }, least: 5, most: 100_000, want: "5 to 100000"},
	{name: "lockMaxConns", field: func(c *Config) any { return &c.LockMaxConns }, least: 1, most: 100_000, want: "1 to 100000"},
	{name: "lockNamespace", field: func(c *Config) any { return &c.Namespace }},
	{name: "lockStripes", field: func(c *Config) any { return &c.Stripes }, least: 1, most: 10_000, want: "1 to 10000"},
	{name: "lockSchema", field: func(c *Config) any { return &c.Schema }, preset: "auto", oneOf: []string{"auto", "manual"}},
	{name: "lockOwner", field: func(c *Config) any { return &c.Owner }},
	// With more than about ten handoffs in a row those who wait in other
	// processes begin to wait many times as long as most others (measured with 4
	// processes of 16 callers each).
	{name: "lockHandOvers", field: func(c *Config) any { return &c.HandOvers }, preset: 30, want: "1 or more"},
	{name: "lockHandOverTime", field: func(c *Config) any { return &c.HandOverTime }, preset: 10 * time.Millisecond, want: "more than 0s"},
	{name: "lockUnsafe", field: func(c *Config) any { return &c.Unsafe }, preset: "refuse", oneOf: []string{"refuse", "allow"}},
	{name: "lockRequire", field: func(c *Config) any { return &c.Require }},
}

// parameterOf returns the parameter of a name, nil if there is none.
func parameterOf(name string) *parameter {
	at := slices.IndexFunc(parameters, func(p parameter) bool { return p.name == name })
	if at < 0 {
		return nil
	}
	return &parameters[at]
}
