package mysqllock

import (
	"context"
	"database/sql"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
)

// PoolStats counts the connections that a handle has, by what they are for, and who
// waits. Without Config.MaxConns the connections for statements of the application are
// those that sql.DB.Stats counts. With it sql.DB.Stats counts callers, not connections.
type PoolStats struct {
	pool.Stats     // the connections of sessions
	Waiters    int // callers of this process that wait now, for a lock or for a connection to take it on

	// OldestWait is how long the one of them that came first has waited; 0 if nobody waits. OldestHold
	// is how long the lock that this handle has held for the longest is held; 0 for none. Who stands by
	// for a leadership (package leader), or has one, is left out.
	OldestWait time.Duration
	OldestHold time.Duration

	MaxConns int        // Config.MaxConns: the most connections for everything; 0 is no limit
	Reserved int        // of MaxConns, those that are in use by nobody and kept for the driver's own statements
	App      pool.Stats // with MaxConns: the connections for statements of the application, and who waits for one
	Leases   pool.Stats // connections for leases
	Advisory pool.Stats // connections for advisory locks
	Control  pool.Stats // connections for making rows and killing waiters
}

// Stats returns the counts of db. It fails if db was not opened with this driver. See [Do]
// for wrappers of drivers.
func Stats(db *sql.DB) (PoolStats, error) {
	k, err := handleOf(context.Background(), db)
	if err != nil {
		return PoolStats{}, err
	}
	return PoolStats(k.Stats()), nil
}
