package strategy

import (
	"context"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// Config says where a strategy keeps its locks. Each strategy uses what it needs of it.
type Config struct {
	Info       server.Info
	Table      schema.Table // the lock table
	Rows       *keyrow.Rows // of that table
	Procedures *schema.Registry
	Namespace  string        // precedes keys
	Owner      string        // the name of this process, for errors
	TTL        time.Duration // the longest wait in one statement, and how long a connection that holds something may be silent
	Queue      *queue.Queue  // where the callers of this process queue; strategies whose locks exclude each other share it

	// Conns are the connections of the strategy's own, which began with its Setup(TTL); Control are
	// those in autocommit for statements beside the caller's: making rows, asking, KILL. None of
	// them waits longer than a few seconds for a row.
	Conns, Control *pool.Pool

	// ReadTimeout is the driver's own limit on each read from the connections on which the strategy
	// waits; 0 means that there is none, or that it is not known. A caller asks again after half of
	// it, and is then the last of the waiters in the server. With a known limit statements on
	// connections of the strategy's own cost less, since no context has to bound them.
	ReadTimeout time.Duration

	// A lock is handed over from caller to caller at most HandOvers times, and for at most
	// HandOverTime; then other processes have their turn.
	HandOvers    int
	HandOverTime time.Duration

	Unsafe bool // also work where the strategy cannot keep its promise, such as on clusters whose nodes do not see each other's locks

	// Await returns when key's lease may have been released, after atMost, or with ctx's error. The
	// caller has waited since then. done lets the next waiter have its turn.
	Await func(ctx context.Context, key string, since time.Time, atMost time.Duration) (done func(), err error)

	// FreeSlot looks for one of open, the indexes of some of rows, that nobody has locked, and that
	// has no live lease; -1 is none.
	FreeSlot func(ctx context.Context, rows []string, open []int) (int, error)
}
