package mysqllock

import (
	"context"
	"database/sql"
	"time"
)

// PoolStats counts the connections that a handle has, by what they are for, and who
// waits. Without Config.MaxConns the connections for statements of the application are
// those that sql.DB.Stats counts. With it sql.DB.Stats counts callers, not connections.
type PoolStats struct {
	ConnStats     // the connections of sessions
	Waiters   int // callers of this process that wait now, for a lock or for a connection to take it on

	// OldestWait is how long the caller that came first has waited; 0 if nobody waits. OldestHold
	// is how long the lock that this handle has held for the longest is held; 0 for none. Who stands by
	// for a leadership (package leader), or has one, is left out.
	OldestWait time.Duration
	OldestHold time.Duration

	MaxConns int       // Config.MaxConns: the most connections for everything; 0 is no limit
	Reserved int       // of MaxConns, those that are in use by nobody and kept for the driver's own statements
	App      ConnStats // with MaxConns: the connections for statements of the application, and the callers that wait for one
	Leases   ConnStats // connections for leases
	Advisory ConnStats // connections for advisory locks
	Control  ConnStats // connections for making rows and killing waiters
}

// ConnStats counts the connections for one purpose, and the callers that wait for such a connection. Acquired, Waited and
// WaitTime only grow; the other fields are current.
type ConnStats struct {
	Max   int // the limit on connections in use that are not Beside: lockMaxConns or maxConns
	InUse int // connections that callers have acquired

	// Beside counts connections in use, or being opened, that stand beside a connection of database/sql, for a transaction of
	// BeginTx or for one statement.
	Beside int

	Idle     int           // connections ready for the next caller
	Opening  int           // connections that are being opened
	Waiting  int           // callers that wait for a connection now
	Acquired int64         // how often a connection was acquired
	Waited   int64         // how often a caller had to wait, because none was ready
	WaitTime time.Duration // sum of all ended waits of callers

	OldestWait time.Duration // how long the first of the callers that wait now has waited; 0 for none
}

// Stats returns the counts of db. It fails if db was not opened with this driver. See [Do]
// for wrappers of drivers.
func Stats(db *sql.DB) (PoolStats, error) {
	k, err := handleOf(context.Background(), db)
	if err != nil {
		return PoolStats{}, err
	}
	s := k.Stats()
	return PoolStats{
		ConnStats(s.Stats), s.Waiters, s.OldestWait, s.OldestHold,
		s.MaxConns, s.Reserved, ConnStats(s.App), ConnStats(s.Leases), ConnStats(s.Advisory), ConnStats(s.Control),
	}, nil
}
