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

// opened has the connectors of connections that are opened one by one, by a driver
// around this one which knows no more than Open. Those of one DSN have a connector in
// common, so that they know of each other's locks. Nobody says when the handle is
// closed: the connector is, a while after the last of them.
var opened = opens{by: make(map[string]*open)}

type opens struct {
	mu sync.Mutex
	by map[string]*open // by DSN
}

type open struct {
	connector *connector
	conns     int // guarded by opens.mu
}

// linger is how long a connector stays without connections: database/sql may have no
// idle one between two statements.
const linger = time.Second

func (o *opens) connect(d *Driver, dsn, wrapper string) (driver.Conn, error) {
	o.mu.Lock()
	of := o.by[dsn]
	if of == nil {
		k, err := d.OpenConnector(dsn)
		if err != nil {
			o.mu.Unlock()
			return nil, err
		}
		of = &open{connector: k.(*connector)}
		o.by[dsn] = of
	}
	of.conns++
	o.mu.Unlock()
	left := sync.OnceFunc(func() { o.left(dsn, of) })
	c, err := of.connector.connect(context.Background(), wrapper, left)
	if err != nil {
		left()
		return nil, err
	}
	return c, nil
}

func (o *opens) left(dsn string, of *open) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if of.conns--; of.conns == 0 {
		time.AfterFunc(linger, func() { o.end(dsn, of) })
	}
}

// end closes a connector that has no connections, once nothing is held on it.
func (o *opens) end(dsn string, of *open) {
	o.mu.Lock()
	if of.conns > 0 || o.by[dsn] != of {
		o.mu.Unlock()
		return
	}
	if of.connector.last.Load().Holds() {
		o.mu.Unlock()
		time.AfterFunc(linger, func() { o.end(dsn, of) })
		return
	}
	delete(o.by, dsn)
	o.mu.Unlock()
	_ = of.connector.Close()
}
