package socket

import (
	"context"
	"database/sql/driver"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Killer ends connections that were closed while the server was busy with their statements: it
// would go on, and count them. Those that come while it kills are killed together.
type Killer struct {
	lend func(ctx context.Context, kill func(driver.Conn, *Group))

	mu      sync.Mutex     // guards what follows
	next    []*socket      // to be killed
	running bool           // its goroutine, while there are any
	ended   sync.WaitGroup // the goroutine
	closed  bool
}

// NewKiller returns a Killer that kills from connections which lend lends: it calls kill with one and the
// connection's sockets, or not at all if it has none to lend until ctx ends.
func NewKiller(lend func(ctx context.Context, kill func(driver.Conn, *Group))) *Killer {
	return &Killer{lend: lend}
}

// Close kills what has gathered. What is closed after that is not killed.
func (k *Killer) Close() {
	k.mu.Lock()
	k.closed = true
	k.mu.Unlock()
	k.ended.Wait()
}

// add has the connection of s killed soon, if it can be, which it reports. A nil Killer kills none.
func (k *Killer) add(s *socket) bool {
	if k == nil || s.id.Load() == 0 || s.port() == "" {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		return false
	}
	if k.next = append(k.next, s); !k.running {
		k.running = true
		k.ended.Go(k.run)
	}
	return true
}

// run kills what has gathered, until there is nothing left.
func (k *Killer) run() {
	for {
		k.mu.Lock()
		gathered := k.next
		k.next, k.running = nil, len(gathered) > 0
		k.mu.Unlock()
		if len(gathered) == 0 {
			return
		}
		k.kill(gathered)
	}
}

// killsTime is how long a server may take to end what has gathered, and Close to wait for that.
const killsTime = 3 * time.Second

// kill kills the connections of gathered. Without a connection to kill from, they run on.
func (k *Killer) kill(gathered []*socket) {
	ctx, cancel := server.Within(purpose.For(context.Background(), purpose.Kill), killsTime)
	defer cancel()
	k.lend(ctx, func(conn driver.Conn, from *Group) {
		if condition := killable(gathered, from.last); condition != "" {
			_, _ = server.Kill(ctx, conn, "KILL CONNECTION", server.OtherIDs(condition))
		}
	})
}

// killable is the SQL condition for the connections of gathered that can be killed from the connection of the
// socket from; "" for none. A proxy may have made an id up, or the id is of another server; on the server
// that is asked, somebody else may have it. So a connection must lead to the address that from leads to, and the
// server must see each of the two come from the port that it has here. For two connections:
//
//	(ID, SUBSTRING_INDEX(HOST, ':', -1)) IN ((12, '41000'), (13, '41002')) AND (USER, IF(LOCATE(':', HOST) > 0, …, HOST))
//	  = (SELECT USER, … p WHERE ID = CONNECTION_ID() AND SUBSTRING_INDEX(HOST, ':', -1) = '41004')
func killable(gathered []*socket, from *socket) string {
	if from == nil {
		return ""
	}
	var these []string
	for _, s := range gathered {
		if s.RemoteAddr().String() == from.RemoteAddr().String() {
			these = append(these, fmt.Sprintf("(%d, '%s')", s.id.Load(), s.port()))
		}
	}
	if len(these) == 0 {
		return ""
	}
	return fmt.Sprintf("(ID, %s) IN (%s) AND %s", server.ClientPort,
		strings.Join(these, ", "), server.SameClient(server.ClientPort+" = '"+from.port()+"'"))
}
