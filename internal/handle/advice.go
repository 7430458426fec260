package handle

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// useMaxConns is what helps if SetMaxOpenConns keeps callers from each other's locks.
const useMaxConns = "use maxConns in the DSN in place of SetMaxOpenConns"

// advise tells the observer what to change about how the handle is set up.
func (k *Handle) advise(err error) {
	if k.Settings.Observe != nil {
		k.Settings.Observe(context.Background(), Event{Kind: Advised, Start: time.Now(), Err: err})
	}
}

// boundMet is called once, when waiters have filled the bound of database/sql's pool.
func (k *Handle) boundMet(bound int) {
	k.advise(fmt.Errorf("mysqllock: callers that wait for locks had all %d connections that SetMaxOpenConns allows, and the holder none; %s", bound, useMaxConns))
}

// WatchesPool reports whether [Handle.SeePool] is worth a call: with a budget
// database/sql should bound nothing, and an observer is told once if it does.
func (k *Handle) WatchesPool() bool {
	return k.Bounded() && k.Settings.Observe != nil && !k.poolBound.Load()
}

// SeePool looks at what database/sql counts of a handle with a budget.
func (k *Handle) SeePool(s sql.DBStats) {
	bound, budget := s.MaxOpenConnections, k.Settings.MaxConns
	if bound == 0 || bound > budget && s.WaitCount == 0 || k.poolBound.Swap(true) {
		return
	}
	k.advise(fmt.Errorf("mysqllock: with maxConns=%d SetMaxOpenConns(%d) bounds callers, not connections: those that wait for a lock can keep its holder waiting; leave SetMaxOpenConns alone", budget, bound))
}
