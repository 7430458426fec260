package mysqllock

import (
	"context"
	"database/sql/driver"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/statement"
)

// Open opens one connection. database/sql uses OpenConnector instead, unless a driver
// around this one has nothing but Open. Connections of one DSN belong to one handle, as
// it were, which is closed about a second after the last of them, once it holds nothing.
func (d *Driver) Open(dsn string) (driver.Conn, error) {
	return opened.connect(d, dsn, statement.Caller())
}

// opened has the connectors of connections that Driver.Open has opened. Those of one DSN have a
// connector in common, so that they know of each other's locks. Nobody says when the handle is
// closed: the connector is, a while after the last of them.
var opened = dsnConnectors{of: make(map[string]*dsnConnector)}

type dsnConnectors struct {
	mu sync.Mutex
	of map[string]*dsnConnector // by DSN
}

type dsnConnector struct {
	*connector
	conns int // how many connections it has; guarded by dsnConnectors.mu
}

// linger is how long a connector stays without connections: database/sql may have no
// idle one between two statements.
const linger = time.Second

// connect opens a connection of the DSN's connector. wrapper is as for connector.connect.
func (dc *dsnConnectors) connect(d *Driver, dsn, wrapper string) (driver.Conn, error) {
	dc.mu.Lock()
	c := dc.of[dsn]
	if c == nil {
		made, err := d.OpenConnector(dsn)
		if err != nil {
			dc.mu.Unlock()
			return nil, err
		}
		c = &dsnConnector{connector: made.(*connector)}
		dc.of[dsn] = c
	}
	c.conns++
	dc.mu.Unlock()
	left := sync.OnceFunc(func() { dc.left(dsn, c) })
	conn, err := c.connect(context.Background(), wrapper, left)
	if err != nil {
		left()
		return nil, err
	}
	return conn, nil
}

// left notes that a connection of c is closed, or was not opened.
func (dc *dsnConnectors) left(dsn string, c *dsnConnector) {
	dc.mu.Lock()
	defer dc.mu.Unlock()
	if c.conns--; c.conns == 0 {
		time.AfterFunc(linger, func() { dc.end(dsn, c) })
	}
}

// end closes a connector that has no connections, once nothing is held on it.
func (dc *dsnConnectors) end(dsn string, c *dsnConnector) {
	dc.mu.Lock()
	if c.conns > 0 || dc.of[dsn] != c {
		dc.mu.Unlock()
		return
	}
	if c.last.Load().Holds() {
		dc.mu.Unlock()
		time.AfterFunc(linger, func() { dc.end(dsn, c) })
		return
	}
	delete(dc.of, dsn)
	dc.mu.Unlock()
	_ = c.Close()
}
