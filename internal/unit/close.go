package unit

import (
	"context"
	"database/sql/driver"

	"github.com/mysqllock/mysqllock/internal/statement"
)

// Ping pings the base connection.
func (c *Conn) Ping(ctx context.Context) (err error) {
	if err := c.enter(); err != nil {
		return err
	}
	defer func() { c.leave(err) }()
	if err := c.need(ctx); err != nil {
		return err
	}
	p, ok := c.link.Conn.(driver.Pinger)
	if !ok {
		return nil
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return err
	}
	defer c.link.EndTurn()
	return p.Ping(ctx)
}

// Reset is called before the connection is used again.
func (c *Conn) Reset(ctx context.Context) error {
	if c.pinned != nil {
		c.endPinned()
	}
	if c.bad.Load() {
		return driver.ErrBadConn
	}
	if c.link == nil {
		return nil
	}
	if r, ok := c.link.Conn.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

// Valid reports whether the connection may go back to database/sql's pool. database/sql
// asks when it puts the connection back, and only then. So this is where a real
// connection goes back to the handle's pool. But a callback of Conn.Raw may ask, too.
func (c *Conn) Valid() bool {
	if c.k.Bounded() && !c.shareable() && statement.InRaw() {
		return !c.bad.Load() && c.link.Valid()
	}
	if !c.told {
		c.told = true
		c.k.Told.Store(true)
	}
	if c.pinned != nil {
		c.endPinned()
	}
	if c.k.Bounded() {
		c.release()
		c.last = nil
		return true
	}
	return !c.bad.Load() && c.link.Valid()
}

// shareable reports whether nobody would miss what has happened on the connection.
func (c *Conn) shareable() bool {
	return c.link == nil || c.tx == nil && c.pinned == nil && c.pristine() && len(c.stmts.own) == 0
}

// Close closes the base connection, and with it the unit of work on it.
func (c *Conn) Close() error {
	for t := c.tx; t != nil; t = t.prev {
		if t.u != nil {
			_ = t.end(false)
		}
	}
	if c.pinned != nil {
		c.endPinned()
	}
	if c.k.Bounded() {
		if c.link != nil { // database/sql does not put it back: it has turned out to be broken
			c.discard()
			if c.told {
				c.k.Apps().Flush()
			}
		}
		return nil
	}
	c.k.Crowd.Closed()
	_ = c.link.AwaitTurn(context.Background()) // a ping may be under way
	defer c.link.EndTurn()
	return c.link.Conn.Close()
}
