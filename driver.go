package mysqllock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"
	"golang.org/x/sync/singleflight"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lease"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/optimistic"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
)

func init() { sql.Register("mysqllock", &Driver{}) }

// Driver is the database/sql driver, registered as "mysqllock". Its DSN is that
// of go-sql-driver/mysql with the parameters of [Config] added.
type Driver struct {
	c *connector // of the handle whose DB.Driver returned it; nil for the registered one
}

var (
	_ driver.Driver        = (*Driver)(nil)
	_ driver.DriverContext = (*Driver)(nil)
)

// Open opens one connection. database/sql uses OpenConnector instead.
func (d *Driver) Open(dsn string) (driver.Conn, error) {
	c, err := d.OpenConnector(dsn)
	if err != nil {
		return nil, err
	}
	return c.Connect(context.Background())
}

// OpenConnector reads the DSN. It connects to nothing.
func (d *Driver) OpenConnector(dsn string) (driver.Connector, error) {
	base, cfg, err := ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	return NewConnector(base, cfg)
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
	// time has not passed; 0 means 10 times, and 10 ms. More is more throughput
	// for this process, and longer waits in others. (lockHandOvers,
	// lockHandOverTime)
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
	defaultHandOvers    = 10
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

// NewConnector returns a connector for [sql.OpenDB]. cfg is not changed. It
// connects to nothing.
func NewConnector(cfg *mysql.Config, c Config) (driver.Connector, error) {
	s, err := c.settings()
	if err != nil {
		return nil, err
	}
	cfg = cfg.Clone()
	if !strings.Contains(cfg.ConnectionAttributes, ownerAttribute+":") {
		if cfg.ConnectionAttributes != "" {
			cfg.ConnectionAttributes += ","
		}
		cfg.ConnectionAttributes += ownerAttribute + ":" + strings.ReplaceAll(s.owner, ",", ";")
	}
	base, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, err
	}
	k := newConnector(base, s)
	// Statements on connections that carry advisory locks are watched by this
	// limit, which costs less than a context does.
	cfg = cfg.Clone()
	if limit := min(s.ttl-s.ttl/10, 5*time.Second); cfg.ReadTimeout == 0 || cfg.ReadTimeout > limit {
		cfg.ReadTimeout = limit
	}
	if k.carriers, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	k.readTimeout = cfg.ReadTimeout
	return k, nil
}

// ownerAttribute is the connection attribute by which a server that shows
// attributes (MySQL, in performance_schema.session_connect_attrs) names a
// holder to those who wait for it.
const ownerAttribute = "mysqllock_owner"

// Wrap returns a connector for [sql.OpenDB] over any connector that speaks
// MySQL: with TLS or IAM sign-in, traced, or a mock. Sessions are connections
// that base opens, too. Everything of base that database/sql would use is
// used, and nothing is claimed that base lacks.
func Wrap(base driver.Connector, c Config) (driver.Connector, error) {
	s, err := c.settings()
	if err != nil {
		return nil, err
	}
	return newConnector(base, s), nil
}

// connector is what one database handle has in common.
type connector struct {
	base        driver.Connector
	carriers    driver.Connector // opens connections that carry advisory locks
	readTimeout time.Duration    // of these; 0 is none
	settings    settings
	crowd       crowd // how many connections of database/sql there are, and how many wait

	ctx  context.Context // ends when the handle is closed
	stop context.CancelFunc

	waiters atomic.Int64 // callers that wait, for a lock or for a connection to take it on

	locks  atomic.Pointer[locks] // made at the first hint
	doubt  atomic.Bool           // the server may be another one by now, or in another role
	former []*locks              // made for what it was before; guarded by mu
	making singleflight.Group
	mu     sync.Mutex // held while they are made or closed
}

// locks is what a handle needs once a lock is asked for.
type locks struct {
	*rowlock.Locker
	leases     *lease.Locker
	advisories *advisory.Locker
	versions   *optimistic.Locker
	table      schema.Table
	furnished  atomic.Bool // it is there
	rows       *keyrow.Rows
	line       *queue.Queue // where the callers of this process line up for rows
	owner      string       // how this process calls itself
	sessions   *pool.Pool   // connections on which units of work live outside any sql.Tx
	leasing    *pool.Pool   // connections for leases
	advising   *pool.Pool   // connections for advisory locks
	control    *pool.Pool   // connections for making rows, asking who holds, killing waiters
	keeper     *pool.Keeper // keeps sessions alive

	mu   sync.Mutex
	open map[*unit]struct{} // units on sessions

	ctx   context.Context // the connector's: ends when the handle is closed
	later sync.WaitGroup  // work that its caller did not wait for
}

// background does something that its caller need not wait for, but Close does.
func (l *locks) background(f func(context.Context)) {
	l.later.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		f(ctx)
	})
}

var (
	_ driver.Connector = (*connector)(nil)
	_ io.Closer        = (*connector)(nil)
)

func newConnector(base driver.Connector, s settings) *connector {
	ctx, stop := context.WithCancel(context.Background())
	return &connector{base: base, carriers: base, settings: s, ctx: ctx, stop: stop}
}

// Connect opens one of database/sql's connections.
func (k *connector) Connect(ctx context.Context) (driver.Conn, error) {
	base, err := k.base.Connect(ctx)
	if err != nil {
		return nil, err
	}
	k.crowd.opened()
	return (&conn{k: k, link: pool.Adopt(base)}).shaped(), nil
}

// Driver returns a *Driver that leads back to this connector.
func (k *connector) Driver() driver.Driver { return &Driver{c: k} }

// Close ends every session, rolling back what is open on it, and closes the
// driver's own connections. database/sql calls it from DB.Close.
func (k *connector) Close() error {
	k.stop()
	k.crowd.stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, l := range append(k.former, k.locks.Swap(nil)) {
		if l != nil {
			l.close()
		}
	}
	if c, ok := k.base.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// use returns what is needed for the locks of h, making it at first use; h is nil
// for what needs none. Making it does not end with ctx, so that callers in a hurry
// do not start it over and over. A failure is not remembered: the next hint tries
// again.
func (k *connector) use(ctx context.Context, h *lockctx.Hint) (*locks, error) {
	if l := k.locks.Load(); l != nil && (l.furnished.Load() || !k.inTable(h)) && !k.doubt.Load() && k.ctx.Err() == nil {
		return l, nil
	}
	inTable := k.inTable(h)
	made := k.making.DoChan(strconv.FormatBool(inTable), func() (_ any, err error) {
		k.mu.Lock() // Close waits until we are done
		defer k.mu.Unlock()
		if k.ctx.Err() != nil {
			return nil, ErrClosed
		}
		ctx, cancel := context.WithTimeout(k.ctx, 20*time.Second)
		defer cancel()
		l := k.locks.Load()
		if l != nil && k.doubt.Load() {
			if l, err = k.reconsider(ctx, l); err != nil {
				return nil, err
			}
		}
		inUse := l != nil
		if !inUse {
			if l, err = k.newLocks(ctx); err != nil {
				return nil, err
			}
		}
		if inTable && !l.furnished.Load() {
			err = k.furnish(ctx, l)
		}
		switch {
		case inUse:
		case err != nil:
			l.close()
		default:
			k.locks.Store(l)
		}
		return l, err
	})
	select {
	case r := <-made:
		switch {
		case k.ctx.Err() != nil:
			return nil, ErrClosed
		case r.Err != nil:
			return nil, r.Err
		}
		return r.Val.(*locks), nil
	case <-ctx.Done():
		return nil, lockerr.With(ErrTimeout, ctx.Err())
	}
}

// suspect notes a failure after which the server may not be what it was: a failover
// makes another one of it, and changes roles.
func (k *connector) suspect(err error) {
	if server.Refused(err) || server.Undecided(err) || errors.Is(err, server.ErrReadOnly) {
		k.doubt.Store(true)
	}
}

// reconsider asks what the server is now, and returns what was made for that, or
// nil where nothing was yet, and an error where nothing can be locked on it. k.mu is
// the caller's.
func (k *connector) reconsider(ctx context.Context, l *locks) (*locks, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second) // others wait for this
	defer cancel()
	conn, err := k.base.Connect(ctx)
	if err != nil {
		return l, nil // what l is asked for will say why
	}
	defer conn.Close()
	info, err := server.Probe(ctx, conn)
	if err != nil {
		return l, nil
	}
	if err := info.Writable(); err != nil && !k.settings.unsafe {
		return nil, err
	}
	k.doubt.Store(false)
	if info == l.Info() {
		return l, nil
	}
	// Who uses l goes on. It is used again where the server is what it was, so that
	// there are no more of them than there are kinds of servers.
	at := slices.IndexFunc(k.former, func(f *locks) bool { return f.Info() == info })
	if at < 0 {
		k.former = append(k.former, l)
		k.locks.Store(nil)
		return nil, nil
	}
	k.former[at], l = l, k.former[at]
	k.locks.Store(l)
	return l, nil
}

// inTable reports whether the lock table keeps any lock of h. Advisory locks need
// neither the table nor a privilege on it.
func (k *connector) inTable(h *lockctx.Hint) bool {
	return h != nil && slices.ContainsFunc(h.Locks, func(lock lockctx.Lock) bool {
		return k.kind(lock.Kind).Strategy != lockctx.StrategyAdvisory
	})
}

func (k *connector) newLocks(ctx context.Context) (_ *locks, err error) {
	s := k.settings
	l := &locks{open: make(map[*unit]struct{}), ctx: k.ctx}
	// A blocked DDL or insert must not occupy a control connection for long.
	if l.control, err = pool.New(pool.Config{
		Connect: k.base.Connect, Max: controlConns, Idle: s.ttl,
		Setup: "SET SESSION autocommit = 1, innodb_lock_wait_timeout = 5, lock_wait_timeout = 2",
	}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			l.control.Close()
		}
	}()
	// wait_timeout is what frees the lock of a holder that vanished without
	// closing its connection; autocommit=0 saves the round trip of BEGIN.
	if l.sessions, err = pool.New(pool.Config{
		Connect: k.base.Connect, Max: s.maxConns, Idle: s.ttl / 2,
		Setup: fmt.Sprintf("SET SESSION autocommit = 0, wait_timeout = %d", int(s.ttl/time.Second)),
	}); err != nil {
		return nil, err
	}
	if l.leasing, err = pool.New(pool.Config{
		Connect: k.base.Connect, Max: s.maxConns, Idle: s.ttl / 2, Setup: lease.Setup(s.ttl),
	}); err != nil {
		return nil, err
	}
	if l.advising, err = pool.New(pool.Config{
		Connect: k.carriers.Connect, Max: s.maxConns, Idle: s.ttl / 2, Setup: advisory.Setup(s.ttl),
	}); err != nil {
		return nil, err
	}
	if err = k.prepare(ctx, l); err != nil {
		l.sessions.Close()
		l.leasing.Close()
		l.advising.Close()
		return nil, err
	}
	l.keeper = pool.NewKeeper(s.ttl.Truncate(time.Second))
	return l, nil
}

// prepare asks what the server is, and makes the strategies.
func (k *connector) prepare(ctx context.Context, l *locks) error {
	s := k.settings
	c, err := l.control.Acquire(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if s.strategy == lockctx.StrategyAdvisory {
			c.Destroy() // which has hardly any use for another one
			return
		}
		c.Release()
	}()
	info, err := server.Probe(ctx, c.Conn)
	if err == nil && !s.unsafe {
		err = info.Writable()
	}
	if err != nil {
		return err
	}
	l.table = s.table.In(info.Database)
	namespace := s.namespace
	if namespace == "" {
		namespace = info.Database
	}
	l.owner = s.owner
	l.rows = keyrow.New(keyrow.Config{
		Control: l.control, Table: l.table, Namespace: namespace, Info: info, Auto: s.auto, Procedure: !info.MariaDB, Stripes: s.stripes,
	})
	l.line = new(queue.Queue)
	l.leases = lease.New(lease.Config{
		Conns: l.leasing, Control: l.control, Rows: l.rows, Queue: l.line, Table: l.table, Namespace: namespace,
		Owner: s.owner, Info: info, TTL: s.ttl, HandOvers: s.handOvers, HandOverTime: s.handOverTime,
	})
	l.advisories = advisory.New(advisory.Config{
		Conns: l.advising, Control: l.control, Queue: new(queue.Queue), Namespace: namespace,
		Owner: s.owner, Info: info, TTL: s.ttl, Unsafe: s.unsafe, ReadTimeout: k.readTimeout,
		HandOvers: s.handOvers, HandOverTime: s.handOverTime,
	})
	l.versions = optimistic.New(optimistic.Config{
		Control: l.control, Rows: l.rows, Table: l.table, Namespace: namespace, Info: info, TTL: s.ttl, Await: l.leases.Await,
	})
	l.Locker = rowlock.New(rowlock.Config{
		Control: l.control, Rows: l.rows, Queue: l.line, Table: l.table, Namespace: namespace,
		Owner: s.owner, Info: info, TTL: s.ttl, Unsafe: s.unsafe, Await: l.leases.Await,
	})
	return nil
}

// furnish sees to it that the lock table is there.
func (k *connector) furnish(ctx context.Context, l *locks) error {
	c, err := l.control.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	procedure, err := l.table.Ensure(ctx, c.Conn, l.Info(), k.settings.auto)
	if err != nil {
		return err
	}
	if !procedure {
		l.rows.NoProcedure()
	}
	if k.settings.stripes > 0 {
		if err := l.rows.Agree(ctx, c.Conn); err != nil {
			return err
		}
	}
	l.furnished.Store(true)
	return nil
}

func (l *locks) close() {
	l.keeper.Close()
	l.mu.Lock()
	var open []*unit
	for u := range l.open {
		open = append(open, u)
	}
	l.mu.Unlock()
	for _, u := range open {
		u.abandon(ErrClosed)
	}
	l.leases.Close()
	l.advisories.Close()
	l.later.Wait()
	l.sessions.Close()
	l.leasing.Close()
	l.advising.Close()
	l.Locker.Close()
	l.control.Close()
}

// PoolStats counts the connections that sessions have, beside those that
// sql.DB.Stats counts, and who waits.
type PoolStats struct {
	pool.Stats
	Waiters int // callers of this process that wait now, for a lock or for a connection to take it on
}

// Stats returns the counts of db. It fails where db was not opened with this
// driver.
func Stats(db *sql.DB) (PoolStats, error) {
	k, err := connectorOf(db)
	if err != nil {
		return PoolStats{}, err
	}
	l := k.locks.Load()
	if l == nil {
		return PoolStats{Stats: pool.Stats{Max: k.settings.maxConns}}, nil
	}
	return PoolStats{l.sessions.Stat(), int(k.waiters.Load())}, nil
}

func connectorOf(db *sql.DB) (*connector, error) {
	d, ok := db.Driver().(*Driver)
	if !ok || d.c == nil {
		return nil, fmt.Errorf("mysqllock: the database was opened with driver %T, not with \"mysqllock\"", db.Driver())
	}
	return d.c, nil
}
