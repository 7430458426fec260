package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/jackc/puddle/v2"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Conn is a driver connection that takes turns, can be kept alive, and knows
// its id on the server. It comes from [Pool.Acquire], or from [Adopt] for a
// connection that belongs to someone else.
type Conn struct {
	driver.Conn

	res  *puddle.Resource[*Conn] // nil for an adopted connection
	turn chan struct{}           // holds a token while someone uses the connection

	id       uint64               // the server's id, 0 until known; guarded by the turn
	host     string               // client address as the server's process list shows it; pooled connections only
	tainted  bool                 // carries session state that must not reach the next user; guarded by the turn
	prepared map[string]*prepared // by their texts; guarded by the turn
	contact  atomic.Int64         // when the server last answered, since epoch
}

var epoch = time.Now() // carries the monotonic clock

// Adopt makes a Conn of a connection that stays its owner's: Release and
// Destroy do not apply to it.
func Adopt(conn driver.Conn) *Conn {
	c := &Conn{Conn: conn, turn: make(chan struct{}, 1)}
	c.Touch()
	return c
}

// Take waits for the caller's turn to use the connection.
func (c *Conn) Take(ctx context.Context) error {
	select {
	case c.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case c.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TryTake takes the turn if nobody has it.
func (c *Conn) TryTake() bool {
	select {
	case c.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

// Give ends the caller's turn.
func (c *Conn) Give() { <-c.turn }

// Touch notes that the server has just answered: from then on it counts the
// connection as idle.
func (c *Conn) Touch() { c.contact.Store(int64(time.Since(epoch))) }

// Silence is how long ago the server answered last. It counts by the monotonic
// clock, so a stopped process sees its pause.
func (c *Conn) Silence() time.Duration {
	return time.Since(epoch) - time.Duration(c.contact.Load())
}

// Taint sees to it that the connection is destroyed instead of pooled.
func (c *Conn) Taint() { c.tainted = true }

// ID returns the server's id for the connection, asking for it once. The
// question touches no table, so that it opens no snapshot in a transaction.
func (c *Conn) ID(ctx context.Context) (uint64, error) {
	if c.id != 0 {
		return c.id, nil
	}
	rows, err := server.Query(ctx, c.Conn, "SELECT CONNECTION_ID()")
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 {
		return 0, errors.New("mysqllock: no answer to CONNECTION_ID()")
	}
	return c.id, c.SetID(rows[0][0])
}

// SetID notes the id that another statement has told.
func (c *Conn) SetID(text string) (err error) {
	if c.id, err = strconv.ParseUint(text, 10, 64); err != nil {
		return fmt.Errorf("mysqllock: CONNECTION_ID() is %q", text)
	}
	return nil
}

// identify asks for the id and the client address.
func (c *Conn) identify(ctx context.Context) error {
	rows, err := server.Query(ctx, c.Conn, "SELECT ID, HOST FROM information_schema.PROCESSLIST WHERE ID = CONNECTION_ID()")
	if err != nil {
		return err
	}
	if len(rows) != 1 || len(rows[0]) != 2 {
		return errors.New("mysqllock: the server does not list its own connection")
	}
	c.host = rows[0][1]
	return c.SetID(rows[0][0])
}

// KnownID is ID without asking: 0 where nobody has asked yet.
func (c *Conn) KnownID() uint64 { return c.id }

// prepared is a statement that is run over and over. It goes with its connection.
type prepared struct {
	asked int         // how often it was asked for while it was not prepared
	stmt  driver.Stmt // nil while it is not
}

// worth is how often a statement is asked for on a connection before it is prepared.
// That costs a round trip, which a connection does not stay long enough for that is
// closed after a few transactions.
const worth = 8

// ErrUnprepared says that a statement is to be run as text. Nothing has run.
var ErrUnprepared = errors.New("the statement is not prepared")

// QueryPrepared is [server.Query] for a text that the server has to parse only once,
// with values for its question marks. It returns ErrUnprepared where the text is too
// new on this connection, or the server or the driver does not prepare it. The caller
// has the turn.
func (c *Conn) QueryPrepared(ctx context.Context, text string, args ...driver.Value) ([][]string, error) {
	p := c.prepared[text]
	if p == nil {
		if c.prepared == nil {
			c.prepared = make(map[string]*prepared)
		}
		p = new(prepared)
		c.prepared[text] = p
	}
	if p.stmt == nil {
		if p.asked++; p.asked != worth { // it is tried once
			return nil, ErrUnprepared
		}
		stmt, err := server.Prepare(ctx, c.Conn, text)
		switch {
		case server.Gone(err, c.Conn):
			return nil, err
		case err != nil:
			return nil, ErrUnprepared
		}
		p.stmt = stmt
	}
	rows, err := server.QueryPrepared(ctx, p.stmt, args...)
	if server.Unprepared(err) {
		_ = p.stmt.Close()
		p.stmt = nil
		return nil, ErrUnprepared
	}
	return rows, err
}

// Valid reports whether the connection can still be used, as far as its driver
// knows.
func (c *Conn) Valid() bool {
	v, ok := c.Conn.(driver.Validator)
	return !ok || v.IsValid()
}

// Ping asks the server for a sign of life.
func (c *Conn) Ping(ctx context.Context) error {
	var err error
	if p, ok := c.Conn.(driver.Pinger); ok {
		err = p.Ping(ctx)
	} else {
		err = server.Exec(ctx, c.Conn, "DO 1")
	}
	if err == nil {
		c.Touch()
	}
	return err
}

// Clean reports whether the connection can go on to another user.
func (c *Conn) Clean() bool { return !c.tainted && c.Valid() }

// Release ends the caller's turn and puts the connection back, which carries no
// lock and no transaction, or destroys it if it is not clean.
func (c *Conn) Release() {
	if !c.Clean() {
		c.Destroy()
		return
	}
	c.res.Release()
	c.Give()
}

// Destroy ends the caller's turn and closes a connection that may carry one.
func (c *Conn) Destroy() {
	c.res.Destroy()
	c.Give()
}
