package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/socket"
)

// Conn is a driver connection whose users take turns. It can be kept alive, and knows its id on the server. It comes from
// [Pool.Acquire], or from [Adopt] for a connection that belongs to database/sql.
type Conn struct {
	driver.Conn

	pool *Pool         // nil for a connection that belongs to database/sql
	turn chan struct{} // holds a token while the connection is in use

	id       uint64               // the server's id, 0 until known; guarded by the turn
	node     string               // the server it leads to, as [server.Node] says, "" until known; guarded by the turn
	tainted  bool                 // the connection has session state that must not reach the next user; guarded by the turn
	prepared map[string]*prepared // by text; guarded by the turn
	opened   time.Time            // when the connection was opened, or adopted
	several  bool                 // the server takes several statements in a text on this connection
	State    any                  // what users keep with the connection from one Acquire to the next; guarded by the turn
	sockets  *socket.Group        // of a connection of a pool
	contact  atomic.Int64         // when the server last answered, or when the statement was sent that it answered; since epoch
	since    time.Time            // when the connection was put back; guarded by the budget's mutex, and by the turn of its next user
	blocks   atomic.Bool          // the user may be waiting in the server, and is counted for that
	beside   bool                 // the user has asked for the connection with As.Beside; guarded by the turn
}

var epoch = time.Now() // carries the monotonic clock

// Adopt makes a Conn of a connection that belongs to another owner. Do not call Release or Destroy on the Conn.
func Adopt(conn driver.Conn) *Conn { return newConn(conn, nil) }

func newConn(conn driver.Conn, owner *Pool) *Conn {
	c := &Conn{Conn: conn, pool: owner, turn: make(chan struct{}, 1), opened: time.Now()}
	c.Touch()
	return c
}

// Close closes the connection. The error is nil, even if the base driver panics.
func (c *Conn) Close() error {
	basedriver.Close(c.Conn)
	return nil
}

// end closes the connection, and waits until it has ended on the server, too.
func (c *Conn) end() {
	_ = c.Close()
	c.sockets.Wait()
}

// AwaitTurn waits for the caller's turn to use the connection.
func (c *Conn) AwaitTurn(ctx context.Context) error {
	select {
	case c.turn <- struct{}{}:
		return nil
	default:
	}
	select {
	case c.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return server.EndOf(ctx)
	}
}

// TryTurn gives the caller the turn, if it is free.
func (c *Conn) TryTurn() bool {
	select {
	case c.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

// EndTurn ends the caller's turn.
func (c *Conn) EndTurn() { <-c.turn }

// Touch notes that the server has just answered. From then on the server counts the connection as idle.
func (c *Conn) Touch() { c.Answered(time.Now()) }

// Answered is Touch for an answer to a statement that was sent at sent: this process may have been stopped since the answer came.
func (c *Conn) Answered(sent time.Time) { c.contact.Store(int64(sent.Sub(epoch))) }

// Silence returns the time since Touch, or since the time that Answered was given. It counts by the monotonic clock, so a process
// that was stopped sees the pause.
func (c *Conn) Silence() time.Duration {
	return time.Since(epoch) - time.Duration(c.contact.Load())
}

// Taint marks the connection: Release will close it in place of pooling it.
func (c *Conn) Taint() { c.tainted = true }

// ID returns the server's id of the connection. If that is not known, ID asks for it as Identify does.
func (c *Conn) ID(ctx context.Context) (id uint64, err error) {
	if c.id == 0 {
		err = c.Identify(ctx)
	}
	return c.id, err
}

// KnownID returns the server's id without a statement; 0 if the id is not known yet.
func (c *Conn) KnownID() uint64 { return c.id }

// Node returns the server that the connection leads to, as [server.Node] says; "" if that is not known yet.
func (c *Conn) Node() string { return c.node }

// SetID notes the id that a statement has returned. If it is another id than before, the connection may lead to another server.
func (c *Conn) SetID(text string) error {
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return fmt.Errorf("mysqllock: CONNECTION_ID() is %q", text)
	}
	if id != c.id {
		c.id, c.node = id, ""
	}
	return nil
}

// Identify makes sure that KillConnection and KillAdopted find the connection: the first time it asks for the id and the server,
// with AnswerTime for the answer. The statement reads no table, so it opens no snapshot in a transaction. The caller has the
// turn.
func (c *Conn) Identify(ctx context.Context) error {
	if c.identified() {
		return nil
	}
	ctx, cancel := server.Within(ctx, AnswerTime)
	defer cancel()
	_, err := c.identify(ctx, "")
	return err
}

// Found has the settings with which a connection begins: by its DSN, the server's defaults and init_connect.
type Found struct {
	Autocommit     bool
	CompletionType string // NO_CHAIN, CHAIN or RELEASE
	Asked          string // the value of [Config.Ask]
}

// identify asks for the id, the server and the settings of the connection. If ask is not "", it also asks for the value
// of that SQL expression.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ CONNECTION_ID(),
//	  CONCAT_WS(' ', @@hostname, @@port, @@server_id, @@datadir /*!80000 , @@server_uuid */), @mysqllock, @@completion_type LIMIT 1
func (c *Conn) identify(ctx context.Context, ask string) (found Found, err error) {
	text := "SELECT " + server.Untimed + "CONNECTION_ID(), " + server.Node + ", @mysqllock, @@completion_type"
	if ask != "" {
		text += ", " + ask
	}
	rows, err := server.Query(ctx, c.Conn, text+" LIMIT 1") // which overrides sql_select_limit
	if err != nil {
		return found, err
	}
	if len(rows) != 1 || len(rows[0]) < 4 {
		return found, errors.New("mysqllock: unexpected result when reading the settings of a connection")
	}
	if len(rows[0]) > 4 {
		found.Asked = rows[0][4]
	}
	found.Autocommit, found.CompletionType = rows[0][2] == "1" || rows[0][2] == "ON", rows[0][3]
	if err = c.SetID(rows[0][0]); err == nil {
		c.node = rows[0][1]
	}
	return found, err
}

// Ping asks the server for a sign of life.
func (c *Conn) Ping(ctx context.Context) (err error) {
	defer basedriver.Catch(c.Conn, &err)
	if p, ok := c.Conn.(driver.Pinger); ok {
		err = server.Unanswered(ctx, p.Ping(ctx))
	} else {
		err = server.Exec(ctx, c.Conn, "DO 1")
	}
	if err == nil {
		c.Touch()
	}
	return err
}

// Valid reports whether the connection can still be used, as far as the driver knows.
func (c *Conn) Valid() bool { return basedriver.Valid(c.Conn) }

// Own reports whether the connection is go-sql-driver's own, without another driver's connection around it. Then Fresh sends nothing,
// and may be called in a transaction.
func (c *Conn) Own() bool {
	t := reflect.TypeOf(c.Conn)
	return t.Kind() == reflect.Pointer && t.Elem().PkgPath() == "github.com/go-sql-driver/mysql"
}

// Fresh reports whether the connection can still be used. The driver looks at the socket,
// without a round trip.
func (c *Conn) Fresh(ctx context.Context) bool {
	return basedriver.Reset(ctx, c.Conn) == nil && c.Valid()
}

// Clean reports whether the connection can be given to another user.
func (c *Conn) Clean() bool { return !c.tainted && c.Valid() }

// Block notes that the connection's user is about to wait for a lock, until [Conn.Unblocked]. It returns false if the users of
// enough connections wait: then the user has to release this connection, and to ask for another connection with [As.Waits].
func (c *Conn) Block() bool { return c.block(false) }

// BlockHolding is Block for a user that holds a lock on the connection. That user may wait however many others do. It counts, so
// fewer callers may wait that hold nothing.
func (c *Conn) BlockHolding() { c.block(true) }

func (c *Conn) block(holds bool) bool {
	if c.pool == nil || c.blocks.Load() {
		return true
	}
	b := c.pool.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.blocked >= b.blockMax && !holds {
		return false
	}
	c.pool.block()
	c.blocks.Store(true)
	return true
}

// Unblocked notes that the connection's user does not wait in the server any more.
func (c *Conn) Unblocked() {
	if c.pool == nil || !c.blocks.Swap(false) {
		return
	}
	b := c.pool.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	c.pool.unblock()
	b.serve()
}

// Wanted reports whether a caller queues for a connection of the pool, or of its budget.
func (c *Conn) Wanted() bool {
	if c.pool == nil {
		return false
	}
	b := c.pool.budget
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.queued > 0
}

// Release ends the caller's turn and puts the connection back into the pool. It closes a connection that is not clean. The
// connection must hold no lock and no transaction.
func (c *Conn) Release() {
	if !c.Clean() {
		c.Destroy()
		return
	}
	c.pool.put(c)
	c.EndTurn()
}

// Destroy ends the caller's turn and closes the connection, which may hold a lock or a
// transaction.
func (c *Conn) Destroy() {
	c.pool.discard(c)
	c.EndTurn()
}
