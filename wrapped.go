package mysqllock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/handle"
)

// A handle may have been opened with a wrapper of drivers above this one, whose Driver does
// not lead here. Its connections do: a probe goes through the wrapper in the context of a
// call, and the connection beneath answers it without asking the server.

// probe finds the connector beneath a wrapper.
type probe struct{ found atomic.Pointer[conn] }

type probeKey struct{}

// probed answers a probe in ctx; false if there is none.
func (c *conn) probed(ctx context.Context) bool {
	p, ok := ctx.Value(probeKey{}).(*probe)
	if ok {
		p.found.Store(c)
	}
	return ok
}

// noTx and noRows are what a probe gets, so that a wrapper sees no error.
type noTx struct{}

func (noTx) Commit() error   { return nil }
func (noTx) Rollback() error { return nil }

type noRows struct{}

func (noRows) Columns() []string         { return nil }
func (noRows) Close() error              { return nil }
func (noRows) Next([]driver.Value) error { return io.EOF }

// errProbed answers a probe for which a statement would have to be prepared.
var errProbed = errors.New("mysqllock: the statement is a probe")

// probeTime limits how long a probe may take, which needs a connection of database/sql.
const probeTime = 10 * time.Second

// probeLevel is an isolation level that no driver knows. So a handle of another driver
// answers BeginTx with an error, and its database is asked for nothing.
const probeLevel = sql.IsolationLevel(1 << 16)

// wrapped has the connectors that probes have found, by weak.Pointer[sql.DB].
var wrapped sync.Map

// handleOf returns the handle of db, also beneath a wrapper of drivers. Such a
// wrapper may have the Driver of another handle, and return it from its own Driver method,
// as after sqldblogger.OpenDriver(dsn, db.Driver(), …). A connector of ours returns a new
// Driver each time, so a handle that returns the same one again has a wrapper.
func handleOf(ctx context.Context, db *sql.DB) (*handle.Handle, error) {
	var c *connector
	if d, ok := db.Driver().(*Driver); ok && d.c != nil && db.Driver() != driver.Driver(d) {
		c = d.c
	} else {
		var err error
		if c, err = connectorBeneath(ctx, db); err != nil {
			return nil, err
		}
	}
	k := c.last.Load()
	if k.Closed() && db.PingContext(ctx) == nil { // it was closed with another sql.DB, and a connection opens it again
		k = c.last.Load()
	}
	if k.WatchesPool() {
		k.SeePool(db.Stats())
	}
	return k, nil
}

// connectorBeneath returns the connector of a handle that was opened with another driver.
func connectorBeneath(ctx context.Context, db *sql.DB) (*connector, error) {
	key := weak.Make(db)
	if c, ok := wrapped.Load(key); ok && !c.(*connector).last.Load().Closed() { // that of Driver.Open may be another one by now
		return c.(*connector), nil
	}
	if _, ok := db.Driver().(*mysql.MySQLDriver); ok {
		return nil, otherDriver(db)
	}
	c, err := probeFor(ctx, db)
	if err != nil {
		return nil, err
	}
	if _, known := wrapped.Swap(key, c); !known {
		runtime.AddCleanup(db, func(key weak.Pointer[sql.DB]) { wrapped.Delete(key) }, key)
	}
	return c, nil
}

// probeFor asks a connection of db for its connector. What must pass through the wrapper are
// the contexts of transactions and of statements: otherwise no hint would.
func probeFor(ctx context.Context, db *sql.DB) (*connector, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	c, err := db.Conn(ctx)
	if err != nil {
		return nil, fmt.Errorf("mysqllock: no connection to see whether driver %T leads to this one: %w", db.Driver(), err)
	}
	defer func() { _ = c.Close() }()
	ask := func(call func(ctx context.Context)) *conn {
		p := new(probe)
		call(context.WithValue(ctx, probeKey{}, p))
		return p.found.Load()
	}
	found := ask(func(ctx context.Context) {
		if tx, err := c.BeginTx(ctx, &sql.TxOptions{Isolation: probeLevel}); err == nil {
			_ = tx.Rollback()
		}
	})
	if found == nil {
		if ctx.Err() != nil {
			return nil, fmt.Errorf("mysqllock: driver %T has not answered whether it leads to this one: %w", db.Driver(), ctx.Err())
		}
		return nil, otherDriver(db)
	}
	execs := ask(func(ctx context.Context) { _, _ = c.ExecContext(ctx, "DO 0") })
	queries := ask(func(ctx context.Context) {
		_ = c.QueryRowContext(ctx, "SELECT 0").Scan()
	})
	if execs == nil || queries == nil {
		return nil, fmt.Errorf("mysqllock: driver %T, a wrapper of this one, does not pass on the contexts of statements,"+
			" so that they would run without the lock;"+
			" use a wrapper with driver.ExecerContext and driver.QueryerContext, or package intercept,"+
			" which has its place beneath this driver: %w", db.Driver(), errors.ErrUnsupported)
	}
	if err := c.Raw(func(above any) error {
		if _, ok := above.(driver.Validator); !ok {
			return found.inner.Hidden()
		}
		return nil
	}); err != nil {
		return nil, err
	}
	return found.connector, nil
}

// otherDriver is the error of a handle on which no connection of this driver answers.
func otherDriver(db *sql.DB) error {
	return fmt.Errorf("mysqllock: the database was opened with driver %T, not with \"mysqllock\""+
		" or with a wrapper of it that passes on the contexts of transactions; a mock takes part by package mysqllocktest: %w",
		db.Driver(), errors.ErrUnsupported)
}
