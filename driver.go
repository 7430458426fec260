package mysqllock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/unit"
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
	describe(cfg, s)
	if s.MaxConns > 0 {
		seeSockets(cfg)
	}
	connectors, err := connectorsOf(cfg, c, s.TTL)
	if err != nil {
		return nil, err
	}
	return newConnector(connectors, s, false), nil
}

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
	if base, err = c.wrapBase(base); err != nil {
		return nil, err
	}
	var connectors handle.Connectors
	for _, of := range connectors.All() {
		of.Connector = base
	}
	return newConnector(connectors, s, true), nil
}

// connector is the connector of one database handle at a time.
type connector struct {
	connectors handle.Connectors // of the base driver
	wraps      bool              // they are one and the same, that which Wrap was given
	settings   handle.Settings

	last   atomic.Pointer[handle.Handle] // closed, if its sql.DB is
	making sync.Mutex                    // held while another one is made
}

var (
	_ driver.Connector = (*connector)(nil)
	_ io.Closer        = (*connector)(nil)
)

func newConnector(connectors handle.Connectors, s handle.Settings, wraps bool) *connector {
	c := &connector{connectors: connectors, wraps: wraps, settings: s}
	c.last.Store(handle.New(connectors, s))
	return c
}

// handle returns a handle that is not closed. It makes one if the last one is closed: its sql.DB was
// closed, and another one uses the connector.
func (c *connector) handle() *handle.Handle {
	c.making.Lock()
	defer c.making.Unlock()
	k := c.last.Load()
	if k.Closed() {
		k = handle.New(c.connectors, c.settings)
		c.last.Store(k)
	}
	return k
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
	start, k := time.Now(), c.handle()
	defer func() {
		if err != nil {
			err = unit.Unconnected(ctx, k, start, err)
		}
	}()
	made := &conn{connector: c, direct: wrapper == "" && closed == nil, closed: closed}
	above := k.Wrapper(wrapper)
	if k.Bounded() {
		made.inner = unit.NewLight(k, above)
		sample, err := made.inner.Sample(ctx)
		if err != nil {
			return nil, err
		}
		return made.shaped(sample), nil
	}
	base, err := c.connectors.App.Connect(ctx)
	if err != nil {
		return nil, err
	}
	made.inner = unit.NewConn(k, base, above)
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
	all := c.connectors.All()
	if c.wraps {
		all = all[:1]
	}
	for _, of := range all {
		if closer, ok := of.Connector.(io.Closer); ok {
			errs = append(errs, closer.Close())
		}
	}
	if len(errs) == 1 {
		return errs[0]
	}
	return errors.Join(errs...)
}
