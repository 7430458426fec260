// Package mysqllocktest tests code that uses locks without a server: what runs under
// [mysqllock.Do], [mysqllock.Acquire] and lockctx.With. [Locks] keeps the locks in memory,
// and the driver itself decides by the same rules as on MySQL: who waits, who is refused,
// what joins, which read is stale.
//
// The statements of the application go to a database of the test, for example one of
// sqlmock, which sees nothing of the locks. A handle of the code under test:
//
//	base, mock, err := sqlmock.New()
//	locks := mysqllocktest.New()
//	db, err := locks.Open(base, mysqllock.Config{})
//
// Another handle is another process: it waits for what the first one holds. It needs no
// database if it only holds locks:
//
//	other, err := locks.Open(nil, mysqllock.Config{Owner: "billing-7"})
//	hold, err := mysqllock.Acquire(ctx, other, "product:42")
//
// # What the database of the test sees
//
// It sees BEGIN, the statements of the application, and COMMIT or ROLLBACK. For a transaction
// inside another one, as of BeginTx or Do within Do, it sees SAVEPOINT, and RELEASE SAVEPOINT
// or ROLLBACK TO SAVEPOINT.
//
// A transaction of BeginTx begins there when its lock has been granted. One that the driver
// begins by itself, as for Do, begins with its first statement: a Do that runs none sends
// nothing.
//
// # What this does not show
//
// It is one MySQL server on which nothing fails by itself, and it does not lock rows of the
// application's. [mysqllock.Config.Stripes] and [mysqllock.Config.Schema] mean nothing here.
// See docs/testing.md for tests on a server.
package mysqllocktest

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"slices"
	"sync"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/purpose"
)

// Locks are locks in memory, as one MySQL server keeps them. They are safe for concurrent use.
type Locks struct {
	mu      sync.Mutex
	servers map[space]*fakeserver.Server
	handles []interface{ RenewNow() }
}

// space is where keys are the same: a namespace in a lock table.
type space struct{ namespace, table string }

// defaultNamespace is the database that a fake server says it has.
const defaultNamespace = "shop"

// New returns locks of which nobody holds any.
func New() *Locks { return &Locks{servers: make(map[space]*fakeserver.Server)} }

// Open returns a handle whose locks are l, and whose statements go to base. Each handle stands
// for a process of its own. Handles share their keys if they have the same
// [mysqllock.Config.Namespace] and Table. [mysqllock.Config.Owner] is the handle's name in
// errors and in [Locks.Holders]; "" means "process-1" for the first one, and so on.
//
// If base is nil, statements of the application fail; locks and transactions work. base is
// not closed with the handle. It has to have a connection for each one that is in use, so
// leave its SetMaxOpenConns alone.
func (l *Locks) Open(base *sql.DB, c mysqllock.Config) (*sql.DB, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.Owner == "" {
		c.Owner = fmt.Sprintf("process-%d", len(l.handles)+1)
	}
	if c.Namespace == "" {
		c.Namespace = defaultNamespace
	}
	at := space{c.Namespace, c.Table}
	s := l.servers[at]
	if s == nil {
		s = fakeserver.New()
	}
	c.Table, c.Stripes, c.Schema = "", 0, "manual"
	k, err := mysqllock.Wrap(connector{s, c.Owner, base}, c)
	if err != nil {
		return nil, err
	}
	purpose.Listen() // by its mark a statement of the driver is told from one of the application
	l.servers[at] = s
	l.handles = append(l.handles, k.(interface{ RenewNow() }))
	return sql.OpenDB(k), nil
}

// Lose takes key away from all who hold it, in every namespace, as if the server had ended
// their connections, or had not heard from the holder of a lease for its TTL. Holders get
// [mysqllock.ErrLost] and commit nothing: that of a lease at once, that of an advisory lock
// within a second, that of a row lock at its next statement or COMMIT. Lose does not wait for
// that. The key is free afterwards.
func (l *Locks) Lose(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for at, s := range l.servers {
		s.Lose(rowsOf(key), lockname.OfAdvisory(at.namespace, key))
	}
	for _, h := range l.handles {
		h.RenewNow()
	}
}

// Holders returns the owners of those who hold key now, sorted, in every namespace. Versions
// (lockctx.Optimistic) are held by nobody. A lock that ends with a context is given back
// in the background, a moment after the context has ended.
func (l *Locks) Holders(key string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var owners []string
	for at, s := range l.servers {
		for _, owner := range s.Holders(rowsOf(key), lockname.OfAdvisory(at.namespace, key)) {
			owners = append(owners, keyrow.HolderOf(owner).Program)
		}
	}
	slices.Sort(owners)
	return owners
}

// rowsOf tells the rows of key: its own, and those of its slots.
func rowsOf(key string) func(name string) bool {
	return func(name string) bool {
		m, ok := keyrow.Read(name)
		return ok && !m.Hashed && m.Stripe < 0 && m.Key == key
	}
}

// connector opens connections on which a fake server keeps the locks, and base runs what the
// application sends.
type connector struct {
	server *fakeserver.Server
	owner  string
	base   *sql.DB
}

func (c connector) Connect(ctx context.Context) (driver.Conn, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return &conn{db: c.base, locks: c.server.Open(c.owner)}, nil
}

func (c connector) Driver() driver.Driver { return c.server.Driver() }
