package mysqllock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"
	"golang.org/x/sync/singleflight"

	"github.com/mysqllock/mysqllock/pool"
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
	k.readTimeout, k.carriersReadTimeout = cfg.ReadTimeout, min(s.ttl-s.ttl/10, 5*time.Second)
	if k.readTimeout > 0 {
		k.carriersReadTimeout = min(k.carriersReadTimeout, k.readTimeout)
	}
	// Contexts limit what runs on connections of our own, where to wait is no failure.
	// Carriers have a limit beside that, which costs less.
	cfg.ReadTimeout = 0
	if k.own, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	cfg.ReadTimeout = k.carriersReadTimeout
	if k.carriers, err = mysql.NewConnector(cfg); err != nil {
		return nil, err
	}
	return k, nil
}

// ownerAttribute is the connection attribute by which a server that shows
// attributes (MySQL, in performance_schema.session_connect_attrs) names a
// holder to those who wait for it.
const ownerAttribute = "mysqllock_owner"

// Wrap returns a connector for [sql.OpenDB] over any connector that speaks
// MySQL: with TLS or IAM sign-in, traced, or a mock. Sessions are connections
// that base opens, too. Everything of base that database/sql would use is
// used, and nothing is claimed that base lacks. A limit of base on how long an
// answer may take also limits how long a lock can be waited for.
func Wrap(base driver.Connector, c Config) (driver.Connector, error) {
	s, err := c.settings()
	if err != nil {
		return nil, err
	}
	return newConnector(base, s), nil
}

// connector is what one database handle has in common.
type connector struct {
	base     driver.Connector // opens connections that the application's statements run on
	own      driver.Connector // opens connections for leases, and for control
	carriers driver.Connector // opens connections that carry advisory locks
	driver   *Driver          // which leads back here
	settings settings
	crowd    crowd // how many connections of database/sql there are, and how many wait

	readTimeout         time.Duration // how long an answer on connections of base may take; 0 is no limit, or not known
	carriersReadTimeout time.Duration // the same of carriers

	ctx  context.Context // ends when the handle is closed
	stop context.CancelFunc

	waiters atomic.Int64 // callers that wait, for a lock or for a connection to take it on

	locks  atomic.Pointer[locks] // made at the first hint
	doubt  atomic.Bool           // the server may be another one by now, or in another role
	former []*locks              // made for what it was before; guarded by mu
	making singleflight.Group
	mu     sync.Mutex // held while they are made or closed
}

var (
	_ driver.Connector = (*connector)(nil)
	_ io.Closer        = (*connector)(nil)
)

func newConnector(base driver.Connector, s settings) *connector {
	ctx, stop := context.WithCancel(context.Background())
	k := &connector{base: base, own: base, carriers: base, settings: s, ctx: ctx, stop: stop}
	k.driver = &Driver{c: k}
	return k
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
func (k *connector) Driver() driver.Driver { return k.driver }

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
