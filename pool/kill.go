package pool

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// KillQuery ends the statement whose text begins with mark, from NewMark, in a comment. It looks
// for the statement on all connections of the server, since a proxy may have chosen any of them.
// An account needs no privilege to KILL its own statements.
//
// late reports that ctx ended before the server answered the KILL. The KILL may still
// come, and end a later statement of the connection, so run no further statement there. A
// KILL that finds the connection idle does nothing.
func (p *Pool) KillQuery(ctx context.Context, mark string) (late bool) {
	sent, err := p.killMarked(ctx, mark)
	return sent && err != nil && server.Number(err) == 0
}

// EndQuery is KillQuery for a statement that no one waits for any more. It kills until no
// connection runs the statement, or ctx ends, since a KILL can fail.
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

// killMarked sends a KILL to the connection that runs the statement with mark, if any. The
// condition has the mark in two halves, so that it finds no other connection that is looking for
// the same statement.
func (p *Pool) killMarked(ctx context.Context, mark string) (sent bool, err error) {
	half := len(mark) / 2
	return p.kill(ctx, "KILL QUERY", listed("INFO LIKE CONCAT('%', '"+mark[:half]+"', '"+mark[half:]+"', '%')"))
}

// Marked is a comment with a mark, in front of a text.
func Marked(mark string) string { return "/* mysqllock " + mark + " */ " }

// NewMark returns letters and digits that are in no other statement's text.
func NewMark() string {
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// KillConnection ends the connection of c. Another server, or the same one after a restart,
// may have given its id to another connection. So the server must be the one that c leads to,
// and up for as long as c. If it is not known which one that is, nothing is ended.
func (p *Pool) KillConnection(ctx context.Context, c *Conn) error {
	if !c.identified() {
		return nil
	}
	_, err := p.EndConnection(ctx, c.id, c.here())
	return err
}

// KillAdopted is KillConnection for an adopted connection, which a proxy may have led elsewhere
// since: it ends only a running statement of the same account and machine.
func (p *Pool) KillAdopted(ctx context.Context, c *Conn) error {
	if !c.identified() {
		return nil
	}
	running := fmt.Sprintf("ID = %d AND COMMAND <> 'Sleep' AND %s AND %s", c.id, fromHere("TRUE"), c.here())
	_, err := p.kill(ctx, "KILL CONNECTION", listed(running))
	return err
}

// identified reports whether it is known what the connection is to which server.
func (c *Conn) identified() bool { return c.id != 0 && c.node != "" }

// here is the condition that the server is the one that c leads to, and was not restarted since.
func (c *Conn) here() string { return onNode(c.node) + " AND " + server.Up(time.Since(c.opened)) }

func onNode(node string) string { return server.Node + " = " + schema.Literal(node) }

// A row of [server.Connections] has the account and machine of client, and there the port of
// port, if it has one.
const (
	port   = "SUBSTRING_INDEX(HOST, ':', -1)"
	client = "USER, IF(LOCATE(':', HOST) > 0, LEFT(HOST, CHAR_LENGTH(HOST) - CHAR_LENGTH(" + port + ")), HOST)"
)

// fromHere is the condition for a connection of the same account and machine as the one that
// asks, if also is true for that.
func fromHere(also string) string {
	return fmt.Sprintf("(%s) = (SELECT %[1]s FROM "+server.Connections+" WHERE ID = CONNECTION_ID() AND %s)", client, also)
}

// EndConnection ends the connection with that id, if the SQL expression condition is true.
// over reports that it has ended, or that the condition is not true. That can take the server a
// while, since it ends the connection's statement first.
func (p *Pool) EndConnection(ctx context.Context, id uint64, condition string) (over bool, err error) {
	sent, err := p.kill(ctx, "KILL CONNECTION", fmt.Sprintf("SELECT %d FROM DUAL WHERE %[1]d <> CONNECTION_ID() AND %s", id, condition))
	return !sent && err == nil, err
}

// KillSilent closes the connection that has the named lock on the server that seen leads to, if it
// has run nothing for at least silence. It sees connections of its own node only, and without the
// privilege PROCESS of its own account only.
func (p *Pool) KillSilent(ctx context.Context, seen *Conn, lock string, silence time.Duration) error {
	if !seen.identified() {
		return nil
	}
	_, err := p.kill(ctx, "KILL CONNECTION", listed(fmt.Sprintf("ID = IS_USED_LOCK('%s') AND COMMAND = 'Sleep' AND TIME >= %d AND %s",
		lock, int(silence/time.Second), seen.here())))
	return err
}

// listed is a query for the ids of the other connections for which condition is true.
func listed(condition string) string {
	return "SELECT ID FROM " + server.Connections + " WHERE " + condition + " AND ID <> CONNECTION_ID()"
}

// kill sends a KILL to the connections whose ids the query ids returns, if any. What has cut off the connection that is
// to be killed may have cut off the idle ones from which to do so.
func (p *Pool) kill(ctx context.Context, verb, ids string) (sent bool, err error) {
	ctx = purpose.For(ctx, purpose.Kill)
	for tries := 1; ; tries++ {
		c, err := p.Acquire(ctx)
		if err != nil {
			return false, err
		}
		if sent, err = c.kill(ctx, verb, ids); server.Broken(err) {
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

// killPause is between two KILLs. In MariaDB, a KILL that meets a statement in SLEEP while another
// one is waking up takes 2 seconds, in which every SLEEP of the server stands still.
const killPause = time.Millisecond

// kill sends a KILL from the connection.
func (c *Conn) kill(ctx context.Context, verb, ids string) (sent bool, err error) {
	rows, err := server.QueryConnections(ctx, c.Conn, ids)
	for i, row := range rows {
		if i > 0 {
			time.Sleep(killPause)
		}
		this := server.Exec(ctx, c.Conn, verb+" "+row[0])
		if server.Number(this) == server.NoSuchThread {
			continue
		}
		sent = true
		if err = cmp.Or(err, this); server.Number(this) == 0 && this != nil {
			break
		}
	}
	return sent, err
}

// killer ends connections that were closed while the server was busy with their statements: it
// would go on, and count them. Their places in the budget are free when it has let go of them.
type killer struct {
	pool *Pool // of one connection

	mu     sync.Mutex     // guards what follows
	next   []*socket      // to be killed
	runs   bool           // its goroutine, while there are any
	ended  sync.WaitGroup // the goroutine
	closed bool
}

// KillClosed has the connections of the budget killed that are closed while the server is
// busy with their statements. cfg is for the pool, of one connection, that is opened when there
// is something to kill. stop kills what has gathered, and closes the pool.
func (b *Budget) KillClosed(cfg Config) (stop func()) {
	cfg.Budget, cfg.Max, cfg.Control = b, 1, true
	k := &killer{pool: newPool(cfg)}
	b.killer = k
	return func() {
		k.mu.Lock()
		k.closed = true
		k.mu.Unlock()
		k.ended.Wait()
		k.pool.Close()
	}
}

// end kills the connection of s soon, if it can, which it reports.
func (k *killer) end(s *socket) bool {
	if k == nil || s.id.Load() == 0 || s.port() == "" {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return false
	}
	if k.next = append(k.next, s); !k.runs {
		k.runs = true
		k.ended.Go(k.run)
	}
	return true
}

// run kills what has gathered, until there is nothing left.
func (k *killer) run() {
	for {
		k.mu.Lock()
		gathered := k.next
		k.next, k.runs = nil, len(gathered) > 0
		k.mu.Unlock()
		if len(gathered) == 0 {
			return
		}
		k.kill(gathered)
	}
}

// killsTime is how long a server may take to end what has gathered, and Close to wait for that.
const killsTime = 3 * time.Second

// kill kills the connections of gathered. An id may be one that a proxy has made up, or of another
// server, and on this one that of somebody else. So the connection must lead to the address that
// the control connection leads to, and the server must see each of the two come from the port that
// it has here.
func (k *killer) kill(gathered []*socket) {
	ctx, cancel := server.Within(purpose.For(k.pool.ctx, purpose.Kill), killsTime)
	defer cancel()
	c, err := k.pool.Acquire(ctx)
	if err != nil {
		return // they run on
	}
	defer c.Release()
	own := c.ends.last
	if own == nil {
		return
	}
	var these []string
	for _, s := range gathered {
		if s.RemoteAddr().String() == own.RemoteAddr().String() {
			these = append(these, fmt.Sprintf("(%d, '%s')", s.id.Load(), s.port()))
		}
	}
	if len(these) == 0 {
		return
	}
	_, _ = c.kill(ctx, "KILL CONNECTION", listed(fmt.Sprintf("(ID, %s) IN (%s) AND %s",
		port, strings.Join(these, ", "), fromHere(port+" = '"+own.port()+"'"))))
}
