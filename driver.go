package mysqllock

import (
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/socket"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/unit"
	"github.com/mysqllock/mysqllock/pool"
)

func init() { sql.Register("mysqllock", &Driver{}) }

// Driver is the database/sql driver, registered as "mysqllock". Its DSN is that
// of go-sql-driver/mysql with the parameters of [Config] added.
type Driver struct {
	c *connector // that has made it; nil if a program has
}

var (
	_ driver.Driver        = (*Driver)(nil)
	_ driver.DriverContext = (*Driver)(nil)
)

// OpenConnector reads the DSN. It connects to nothing.
func (d *Driver) OpenConnector(dsn string) (driver.Connector, error) {
	base, cfg, err := ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	return NewConnector(base, cfg)
}

// NewConnector returns a connector for [sql.OpenDB]. cfg is not changed. It
// connects to nothing.
// A connector is for one handle at a time: to close a handle ends all that is held by its
// connector. A connection that is opened later, by another handle, works as on a new connector.
func NewConnector(cfg *mysql.Config, c Config) (driver.Connector, error) {
	s, err := c.settings()
	if err != nil {
		return nil, err
	}
	if err := checkParams(cfg); err != nil {
		return nil, err
	}
	cfg = cfg.Clone()
	if !strings.Contains(cfg.ConnectionAttributes, ownerAttribute+":") {
		describe(cfg, ownerAttribute, s.Owner)
	}
	if s.MaxConns > 0 {
		describe(cfg, budgetAttribute, fmt.Sprintf("%d of %s", s.MaxConns, rand.Text()[:8]))
		seeSockets(cfg)
	}
	base, err := mysql.NewConnector(cfg)
	if err != nil {
		return nil, err
	}
	how := handle.Connectors{
		Base: base, Several: true, Splits: !cfg.MultiStatements,
		ReadTimeout: cfg.ReadTimeout, LockReadTimeout: min(s.TTL-s.TTL/10, 5*time.Second),
	}
	if cfg.ReadTimeout > 0 {
		how.LockReadTimeout = min(how.LockReadTimeout, cfg.ReadTimeout)
	}
	cfg.MultiStatements = true
	if how.Session, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	cfg.MultiStatements = false // beside leases nothing else of the driver's own needs it
	// Contexts limit what runs on connections of the driver's own, where waiting is no
	// failure. Those for leases and advisory locks have a limit beside that, which costs less.
	cfg.ReadTimeout = 0
	if how.Own, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	cfg.ReadTimeout = how.LockReadTimeout
	if how.Lock, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	how.LeaseReadTimeout = 10 * time.Second
	cfg.ReadTimeout = how.LeaseReadTimeout
	if how.Lease, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	cfg.MultiStatements = true
	if how.Leases, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	if err := c.bases(&how.Base, &how.Session, &how.Own, &how.Lock, &how.Lease, &how.Leases); err != nil {
		return nil, err
	}
	return newConnector(how, s, how.Base, how.Session, how.Own, how.Lock, how.Lease, how.Leases), nil
}

// seeSockets lets the budget of connections see when one has ended, unless they go over a
// network that the application has registered: then they have ended when they are closed.
func seeSockets(cfg *mysql.Config) {
	switch {
	case cfg.DialFunc != nil:
		cfg.DialFunc = socket.Dial(cfg.DialFunc)
	case slices.Contains([]string{"tcp", "tcp4", "tcp6", "unix"}, cfg.Net):
		cfg.DialFunc = socket.Dial(new(net.Dialer).DialContext)
	}
}

// describe adds a connection attribute.
func describe(cfg *mysql.Config, name, value string) {
	if cfg.ConnectionAttributes != "" {
		cfg.ConnectionAttributes += ","
	}
	cfg.ConnectionAttributes += name + ":" + strings.ReplaceAll(value, ",", ";")
}

// ownerAttribute is the connection attribute by which a server that shows
// attributes (MySQL, in performance_schema.session_connect_attrs) names a
// holder to those who wait for it.
const ownerAttribute = "mysqllock_owner"

// budgetAttribute is the connection attribute by which `mysqllock doctor` adds up what all
// handles may open: maxConns, and a name that all connections of the handle share.
const budgetAttribute = "mysqllock_budget"

// Wrap returns a connector for one handle, by [sql.OpenDB], over any connector that speaks
// MySQL, with TLS or IAM sign-in, or traced. Sessions are connections
// that base opens, too, and a transaction with a lock begins and ends there by BeginTx, Commit
// and Rollback of its driver. Everything of base that database/sql would use is
// used, and nothing is claimed that base lacks. A limit of base on how long an
// answer may take also limits how long a lock can be waited for.
// A mock does not answer the statements of locks: for that there is package mysqllocktest.
func Wrap(base driver.Connector, c Config) (driver.Connector, error) {
	s, err := c.settings()
	if err != nil {
		return nil, err
	}
	if err := c.bases(&base); err != nil {
		return nil, err
	}
	return newConnector(handle.Connectors{Base: base, Session: base, Own: base, Lock: base, Lease: base, Leases: base}, s, base), nil
}

// connector is the connector of one database handle at a time.
type connector struct {
	how      handle.Connectors
	settings handle.Settings
	all      []driver.Connector // each that is to be closed, once

	last   atomic.Pointer[handle.Handle]
	making sync.Mutex // held while another one is made
}

var (
	_ driver.Connector = (*connector)(nil)
	_ io.Closer        = (*connector)(nil)
)

func newConnector(how handle.Connectors, s handle.Settings, all ...driver.Connector) *connector {
	c := &connector{how: how, settings: s, all: all}
	c.last.Store(handle.New(how, s))
	return c
}

// open returns the handle that is not closed, and makes one if the last one is: its sql.DB was
// closed, and another one uses the connector.
func (c *connector) open() *handle.Handle {
	c.making.Lock()
	defer c.making.Unlock()
	h := c.last.Load()
	if h.Closed() {
		h = handle.New(c.how, c.settings)
		c.last.Store(h)
	}
	return h
}

// Connect opens one of database/sql's connections.
func (c *connector) Connect(ctx context.Context) (driver.Conn, error) {
	return c.connect(ctx, statement.Caller(), nil)
}

// connect is Connect. wrapper is the package of a wrapper of drivers that has the connection; "" for
// database/sql itself. closed is told when the connection is closed; nil is nobody.
func (c *connector) connect(ctx context.Context, wrapper string, closed func()) (_ driver.Conn, err error) {
	if err := ctx.Err(); err != nil { // as that of a sql.DB which is being closed
		return nil, err
	}
	start, h := time.Now(), c.open()
	defer func() {
		if err != nil {
			err = unit.Unconnected(ctx, h, start, err)
		}
	}()
	made := &conn{connector: c, direct: wrapper == "" && closed == nil, closed: closed}
	above := h.Wrapper(wrapper)
	if h.Bounded() {
		made.of = unit.NewLight(h, above)
		sample, err := made.of.Sample(ctx)
		if err != nil {
			return nil, err
		}
		return made.shaped(sample), nil
	}
	base, err := c.how.Base.Connect(ctx)
	if err != nil {
		return nil, err
	}
	made.of = unit.NewConn(h, base, above)
	return made.shaped(base), nil
}

// Driver returns a *Driver that leads back to this connector, and a new one each time:
// see handleOf.
func (c *connector) Driver() driver.Driver { return &Driver{c: c} }

// RenewNow has all leases of the handle renewed at once, for package mysqllocktest.
func (c *connector) RenewNow() { c.last.Load().RenewNow() }

// Close ends every session, rolling back what is open on it, and closes the
// driver's own connections. database/sql calls it from DB.Close.
func (c *connector) Close() error {
	c.last.Load().Close()
	var errs []error
	for _, base := range c.all {
		if closer, ok := base.(io.Closer); ok {
			errs = append(errs, closer.Close())
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}

// PoolStats counts the connections that a handle has, by what they are for, and who
// waits. Without Config.MaxConns the connections for statements of the application are
// those that sql.DB.Stats counts. With it sql.DB.Stats counts callers, not connections.
type PoolStats struct {
	pool.Stats     // the connections of sessions
	Waiters    int // callers of this process that wait now, for a lock or for a connection to take it on

	// OldestWait is how long the one of them that came first has waited; 0 if nobody waits. OldestHold
	// is how long the lock that this handle has held for the longest is held; 0 for none. Who stands by
	// for a leadership (package leader), or has one, is left out.
	OldestWait time.Duration
	OldestHold time.Duration

	MaxConns int        // Config.MaxConns: the most connections for everything; 0 is no limit
	Reserved int        // of MaxConns, those that are in use by nobody and kept for the driver's own statements
	App      pool.Stats // with MaxConns: the connections for statements of the application, and who waits for one
	Leases   pool.Stats // connections for leases
	Advisory pool.Stats // connections for advisory locks
	Control  pool.Stats // connections for making rows and killing waiters
}

// Stats returns the counts of db. It fails if db was not opened with this driver. See [Do]
// for wrappers of drivers.
func Stats(db *sql.DB) (PoolStats, error) {
	h, err := handleOf(context.Background(), db)
	if err != nil {
		return PoolStats{}, err
	}
	return PoolStats(h.Stats()), nil
}
