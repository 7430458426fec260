package pool

import (
	"context"
	"crypto/rand"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// KillQuery ends the statement whose text begins with mark, from NewMark, in a comment. It looks for the statement on all connections
// of the server, since a proxy may have chosen any of them. An account needs no privilege to KILL its own statements.
//
// late says that ctx ended before the server answered the KILL. That KILL may still arrive, and end a later statement of the connection,
// so run no further statement there. A KILL that finds the connection idle does nothing.
func (p *Pool) KillQuery(ctx context.Context, mark string) (late bool) {
	sent, err := p.killMarked(ctx, mark)
	return sent && err != nil && server.Number(err) == 0
}

// EndQuery is KillQuery for a statement for which nobody waits any more. A KILL can fail, so EndQuery kills until no connection runs
// the statement, or ctx ends.
func (p *Pool) EndQuery(ctx context.Context, mark string) {
	const pause = 100 * time.Millisecond
	for {
		if sent, err := p.killMarked(ctx, mark); !sent && err == nil {
			return
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// killMarked sends a KILL to the connection that runs the statement with mark, if any. The condition has the mark in two
// halves, so that it does not find another connection that looks for the same statement. It finds the mark 6f1c so:
//
//	SELECT ID FROM (SELECT ID, USER, HOST, … information_schema.PROCESSLIST …) p
//	WHERE INFO LIKE CONCAT('%', '6f', '1c', '%') AND ID <> CONNECTION_ID()
func (p *Pool) killMarked(ctx context.Context, mark string) (sent bool, err error) {
	half := len(mark) / 2
	return p.kill(ctx, "KILL QUERY", server.OtherIDs("INFO LIKE CONCAT('%', '"+mark[:half]+"', '"+mark[half:]+"', '%')"))
}

// Marked returns a comment with a mark, for the front of a text.
func Marked(mark string) string { return "/* mysqllock " + mark + " */ " }

// NewMark returns letters and digits that are in no other statement's text.
func NewMark() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// KillConnection ends the connection of c. Another server, or the same server after a restart, may have given the id of c to another
// connection. So KillConnection makes sure that c leads to the server that it asks, and that this server was up for as long as c. If
// the server of c is not known, nothing is ended.
func (p *Pool) KillConnection(ctx context.Context, c *Conn) error {
	if !c.identified() {
		return nil
	}
	_, err := p.EndConnection(ctx, c.id, c.atItsServer())
	return err
}

// KillAdopted is KillConnection for an adopted connection. A proxy may have led that elsewhere since, so KillAdopted ends only a
// running statement of the same account and machine.
func (p *Pool) KillAdopted(ctx context.Context, c *Conn) error {
	if !c.identified() {
		return nil
	}
	running := fmt.Sprintf("ID = %d AND COMMAND <> 'Sleep' AND %s AND %s", c.id, server.SameClient("TRUE"), c.atItsServer())
	_, err := p.kill(ctx, "KILL CONNECTION", server.OtherIDs(running))
	return err
}

// identified reports whether the id of the connection and its server are known.
func (c *Conn) identified() bool { return c.id != 0 && c.node != "" }

// atItsServer returns the condition that c leads to the asked server, and that the server was not restarted since. The
// name of the server is a hexadecimal literal in the text:
//
//	CONCAT_WS(' ', @@hostname, @@port, @@server_id, @@datadir /*!80000 , @@server_uuid */) = 'db1 3306 1 /data'
//	AND (SELECT VARIABLE_VALUE FROM /*!80000 performance_schema.global_status */
//	  /*M!100000 information_schema.GLOBAL_STATUS */ WHERE VARIABLE_NAME = 'UPTIME') > 90
func (c *Conn) atItsServer() string {
	return server.Node + " = " + schema.Literal(c.node) + " AND " + server.Up(time.Since(c.opened))
}

// EndConnection ends the connection with that id, if the SQL expression condition is true. over says that the connection
// has ended, or that the condition is not true. The server may need a while, since it ends the connection's statement
// first. For the connection 12 that has an advisory lock:
//
//	SELECT 12 FROM DUAL WHERE 12 <> CONNECTION_ID() AND IS_USED_LOCK(_utf8mb4'mysqllock:app/k') = 12
func (p *Pool) EndConnection(ctx context.Context, id uint64, condition string) (over bool, err error) {
	sent, err := p.kill(ctx, "KILL CONNECTION", fmt.Sprintf("SELECT %d FROM DUAL WHERE %[1]d <> CONNECTION_ID() AND %s", id, condition))
	return !sent && err == nil, err
}

// KillSilent closes the connection that has the named lock, if that connection has run nothing for at least silence. It
// asks the server that seen leads to. It sees connections of that node only, and without the privilege PROCESS of its
// own account only. It finds a connection that was silent for a second so, with atItsServer:
//
//	SELECT ID FROM (SELECT ID, USER, HOST, … information_schema.PROCESSLIST …) p
//	WHERE ID = IS_USED_LOCK('mysqllock-lease-…') AND COMMAND = 'Sleep' AND TIME >= 1 AND … AND ID <> CONNECTION_ID()
func (p *Pool) KillSilent(ctx context.Context, seen *Conn, lock string, silence time.Duration) error {
	if !seen.identified() {
		return nil
	}
	_, err := p.kill(ctx, "KILL CONNECTION", server.OtherIDs(fmt.Sprintf("ID = IS_USED_LOCK('%s') AND COMMAND = 'Sleep' AND TIME >= %d AND %s",
		lock, int(silence/time.Second), seen.atItsServer())))
	return err
}

// kill is [server.Kill] on a connection of the pool. A failure that has cut off the connection to be killed may also have cut off the
// idle connections of this pool.
func (p *Pool) kill(ctx context.Context, verb, ids string) (sent bool, err error) {
	ctx = purpose.For(ctx, purpose.Kill)
	for tries := 1; ; tries++ {
		c, err := p.Acquire(ctx)
		if err != nil {
			return false, err
		}
		if sent, err = server.Kill(ctx, c.Conn, verb, ids); server.Broken(err) {
			c.Taint() // its driver may not know
		}
		c.Release()
		if !errors.Is(err, driver.ErrBadConn) || sent || tries > controlTries {
			return sent, err
		}
	}
}

// controlTries is how often a statement that was not sent is tried again: as many connections may be idle.
const controlTries = 4
