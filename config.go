package mysqllock

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Config sets up locks for one database handle. The zero value works. Each
// field mirrors a DSN parameter, whose name stands behind it; an unknown DSN
// parameter that begins with "lock" and a capital letter is an error.
type Config struct {
	// Strategy is how a lock is kept whose hint does not say: "row", which is
	// also the meaning of "", "lease", "advisory" or "optimistic". (lockStrategy)
	Strategy string

	// Wait is the longest time to queue for a lock whose hint does not say;
	// 0 means 10 s. It is kept to the millisecond. (lockWait, where 0 means
	// NoWait)
	Wait time.Duration

	// NoWait makes a lock whose hint does not say fail at once where someone
	// else has the key. It excludes Wait.
	NoWait bool

	// TTL is how long a lock survives a holder that has fallen silent without
	// closing its connection; 0 means 30 s, and less than 1 s is an error.
	// The server counts it in whole seconds, rounded down. A holder that
	// lives is kept alive by pings, however long it holds. It does not limit
	// BeginTx and Exec on MySQL, which run on database/sql's own connections:
	// see "Holders that fall silent" above. It is also the TTL of a lease
	// whose hint does not say. (lockTTL)
	TTL time.Duration

	// Table is the lock table, as table or schema.table; "" means
	// "mysqllock". (lockTable)
	Table string

	// MaxConns is the most connections that sessions may have, beside those
	// of database/sql; 0 means 16. Leases may have as many again: a few hold
	// all of them, and each key that this process waits for takes one. Up to
	// 4 more are used to make rows and to kill waiters. (lockMaxConns)
	MaxConns int

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

	// HandOvers and HandOverTime bound how long a lease or an advisory lock that
	// many goroutines of this process want goes from one to the next, before it is
	// offered to other processes: at most so many times, and only while so much
	// time has not passed; 0 means 30 times, and 10 ms. An advisory lock that no
	// other process took when it was offered last is bounded by the time alone.
	// More is more throughput for this process, and longer waits in others.
	// (lockHandOvers, lockHandOverTime)
	HandOvers    int
	HandOverTime time.Duration

	// Unsafe is "refuse", also the meaning of "", to fail with ErrUnsafe on a
	// topology where the strategy does not exclude, or "allow" for an
	// application that sees to it that all of it uses one node. (lockUnsafe)
	Unsafe string

	// Observer is told what becomes of locks: for metrics, traces and logs. nil
	// costs nothing. It has no DSN parameter: see [NewConnector].
	Observer Observer
}

const (
	defaultWait     = 10 * time.Second
	defaultTTL      = 30 * time.Second
	defaultMaxConns = 16
	controlConns    = 4
	maxStripes      = 10_000

	// With more than about ten hand-overs in a row those who wait in other
	// processes begin to wait many times as long as most others (measured with 4
	// processes of 16 callers each).
	defaultHandOvers    = 30
	defaultHandOverTime = 10 * time.Millisecond
)

// settings is a Config that was checked and completed.
type settings struct {
	strategy  string
	wait      time.Duration
	ttl       time.Duration
	maxConns  int
	table     schema.Table
	namespace string
	stripes   int
	auto      bool   // make the lock table where it is missing
	unsafe    bool   // also work where the strategy does not exclude
	owner     string // how this process calls itself

	handOvers    int
	handOverTime time.Duration
	observer     Observer
}

func (c Config) settings() (settings, error) {
	s := settings{
		strategy: c.Strategy, wait: c.Wait, ttl: c.TTL, maxConns: c.MaxConns, namespace: c.Namespace, stripes: c.Stripes,
		auto: c.Schema != "manual", unsafe: c.Unsafe == "allow", owner: c.Owner,
		handOvers: c.HandOvers, handOverTime: c.HandOverTime, observer: c.Observer,
	}
	bad := func(format string, args ...any) (settings, error) {
		return settings{}, fmt.Errorf("mysqllock: "+format, args...)
	}
	switch {
	case !slices.Contains([]string{"", lockctx.StrategyRow, lockctx.StrategyLease, lockctx.StrategyAdvisory, lockctx.StrategyOptimistic}, c.Strategy):
		return bad("lockStrategy is %q, want row, lease, advisory or optimistic", c.Strategy)
	case c.Wait < 0:
		return bad("lockWait is negative: %v", c.Wait)
	case c.NoWait && c.Wait > 0:
		return bad("NoWait and a Wait of %v exclude each other", c.Wait)
	case c.TTL != 0 && c.TTL < time.Second:
		return bad("lockTTL is %v, want 1s or more", c.TTL)
	case c.MaxConns < 0 || c.MaxConns > 100_000:
		return bad("lockMaxConns is %d, want 1 to 100000", c.MaxConns)
	case c.HandOvers < 0 || c.HandOverTime < 0:
		return bad("lockHandOvers is %d and lockHandOverTime %v, want more than nothing", c.HandOvers, c.HandOverTime)
	case len(c.Namespace) > schema.MaxNamespace:
		return bad("lockNamespace is longer than %d bytes", schema.MaxNamespace)
	case c.Stripes < 0 || c.Stripes > maxStripes:
		return bad("lockStripes is %d, want 1 to %d", c.Stripes, maxStripes)
	case c.Schema != "" && c.Schema != "auto" && c.Schema != "manual":
		return bad("lockSchema is %q, want auto or manual", c.Schema)
	case c.Unsafe != "" && c.Unsafe != "refuse" && c.Unsafe != "allow":
		return bad("lockUnsafe is %q, want refuse or allow", c.Unsafe)
	}
	if s.wait == 0 && !c.NoWait {
		s.wait = defaultWait
	}
	if s.ttl == 0 {
		s.ttl = defaultTTL
	}
	if s.maxConns == 0 {
		s.maxConns = defaultMaxConns
	}
	if s.handOvers == 0 {
		s.handOvers = defaultHandOvers
	}
	if s.handOverTime == 0 {
		s.handOverTime = defaultHandOverTime
	}
	if c.Table == "" {
		c.Table = "mysqllock"
	}
	var err error
	if s.table, err = schema.Parse(c.Table); err != nil {
		return settings{}, err
	}
	if s.strategy == "" {
		s.strategy = lockctx.StrategyRow
	}
	if s.owner == "" {
		host, _ := os.Hostname()
		s.owner = fmt.Sprintf("%s:%d:%s", host, os.Getpid(), filepath.Base(os.Args[0]))
	}
	return s, nil
}

// ParseDSN reads a DSN of the driver, for a program that changes some of it before
// it calls [NewConnector].
func ParseDSN(dsn string) (*mysql.Config, Config, error) {
	plain, cfg, err := splitDSN(dsn)
	if err != nil {
		return nil, Config{}, err
	}
	base, err := mysql.ParseDSN(plain)
	if err != nil {
		if strings.HasPrefix(err.Error(), "default addr for network") { // it goes on with what may be a password
			err = errors.New("mysqllock: the DSN has no address that can be read, want user:password@tcp(host:port)/database")
		}
		return nil, Config{}, err
	}
	return base, cfg, nil
}

// splitDSN takes the lock parameters out of a DSN. System variables such as
// lock_wait_timeout, which go-sql-driver/mysql takes too, stay in it.
func splitDSN(dsn string) (plain string, cfg Config, err error) {
	slash := strings.LastIndexByte(dsn, '/')
	if slash < 0 { // go-sql-driver says what is wrong; what looks like parameters may be a password
		return dsn, cfg, nil
	}
	head, params, found := strings.Cut(dsn[slash+1:], "?")
	if !found {
		return dsn, cfg, nil
	}
	var rest []string
	seen := make(map[string]bool)
	for _, p := range strings.Split(params, "&") {
		name, raw, _ := strings.Cut(p, "=")
		if !strings.HasPrefix(name, "lock") || len(name) == 4 || name[4] < 'A' || name[4] > 'Z' {
			rest = append(rest, p)
			continue
		}
		value, err := url.QueryUnescape(raw)
		if err != nil {
			return "", cfg, fmt.Errorf("mysqllock: DSN parameter %s: %q is not URL-escaped", name, raw)
		}
		if seen[name] {
			return "", cfg, fmt.Errorf("mysqllock: DSN parameter %s is given twice", name)
		}
		seen[name] = true
		if err := cfg.set(name, value); err != nil {
			return "", cfg, err
		}
	}
	plain = dsn[:slash+1] + head
	if len(rest) > 0 {
		plain += "?" + strings.Join(rest, "&")
	}
	return plain, cfg, nil
}

func (c *Config) set(name, value string) (err error) {
	switch name {
	case "lockStrategy":
		c.Strategy = value
	case "lockWait":
		c.Wait, err = time.ParseDuration(value)
		c.NoWait = c.Wait == 0
	case "lockTTL":
		c.TTL, err = time.ParseDuration(value)
		if err == nil && c.TTL == 0 {
			return errors.New("mysqllock: lockTTL is 0s, want 1s or more")
		}
	case "lockTable":
		c.Table = value
	case "lockMaxConns":
		c.MaxConns, err = strconv.Atoi(value)
		if err == nil && c.MaxConns == 0 {
			return errors.New("mysqllock: lockMaxConns is 0, want 1 to 100000")
		}
	case "lockNamespace":
		c.Namespace = value
	case "lockStripes":
		c.Stripes, err = strconv.Atoi(value)
		if err == nil && c.Stripes == 0 {
			return fmt.Errorf("mysqllock: lockStripes is 0, want 1 to %d", maxStripes)
		}
	case "lockSchema":
		c.Schema = value
	case "lockHandOvers":
		c.HandOvers, err = strconv.Atoi(value)
		if err == nil && c.HandOvers == 0 {
			return errors.New("mysqllock: lockHandOvers is 0, want 1 or more")
		}
	case "lockHandOverTime":
		c.HandOverTime, err = time.ParseDuration(value)
		if err == nil && c.HandOverTime == 0 {
			return errors.New("mysqllock: lockHandOverTime is 0s, want more than nothing")
		}
	case "lockOwner":
		c.Owner = value
	case "lockUnsafe":
		c.Unsafe = value
	default:
		return fmt.Errorf("mysqllock: unknown DSN parameter %s", name)
	}
	if value == "" {
		return fmt.Errorf("mysqllock: DSN parameter %s is empty", name)
	}
	if err != nil {
		return fmt.Errorf("mysqllock: DSN parameter %s: cannot read %q", name, value)
	}
	return nil
}
