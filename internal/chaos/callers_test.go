package chaos

import (
	"database/sql"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestMaxConnsManyCallers: many callers wait for a few keys, in three ways, with far fewer
// connections. While the keys are taken none of them has a connection but the first of each
// queue. Then all are served, each key about in the order in which its callers came.
// CALLERS makes it long: so many callers, 100 for each key.
func TestMaxConnsManyCallers(t *testing.T) {
	callers, keys, on := 400, 10, dbtest.OnServers[*scratch]
	n, err := strconv.Atoi(os.Getenv("CALLERS"))
	long := err == nil
	if long {
		callers, keys, on = n, n/100, dbtest.OnEveryServer[*scratch]
	}
	conns := max(keys/2, 6)
	on(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.Limited(t, conns, "lockWait=5m")
		dbtest.Exec(t, s.Plain, "DELETE FROM p")
		for id := range keys {
			dbtest.Exec(t, s.Plain, "INSERT INTO p VALUES (?, 0)", id+1)
		}
		base := dbtest.Random()
		key := func(i int) string { return fmt.Sprint(base, i%keys) }
		takeAll := func() (free func()) { // by another process
			other := s.Handle("lockMaxConns=" + fmt.Sprint(keys+2))
			var txs []*sql.Tx
			for i := range keys {
				tx, err := other.BeginTx(lockctx.With(t.Context(), key(i)), nil)
				dbtest.OK(t, err)
				txs = append(txs, tx)
			}
			return func() {
				for _, tx := range txs {
					dbtest.OK(t, tx.Rollback())
				}
				dbtest.OK(t, other.Close())
			}
		}
		free := takeAll()
		stat := func() mysqllock.PoolStats {
			st, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return st
		}
		memory := func() (heap, stacks uint64) {
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			return m.HeapAlloc / uint64(callers), m.StackInuse / uint64(callers)
		}
		dbtest.OK(t, db.PingContext(t.Context()))
		heap, stacks := memory()
		ended := make([]time.Time, callers)
		var all sync.WaitGroup
		for i := range callers {
			all.Go(func() {
				if err := stock.Sell(dbtest.Within(t, 5*time.Minute), db, i/keys, key(i), i%keys+1); err != nil {
					t.Error(err)
				}
				ended[i] = time.Now()
			})
		}
		dbtest.Soon(t, "all wait", func() bool { return stat().Waiters == callers })
		heapNow, stacksNow := memory()
		t.Logf("%d callers wait: %d bytes each on the heap, %d of stack; %d connections", callers, heapNow-heap, stacksNow-stacks, conns)
		freed := time.Now()
		free()
		all.Wait()
		worst := 0.0
		for k := range keys {
			var sum, longest time.Duration
			for i := k; i < callers; i += keys {
				wait := ended[i].Sub(freed)
				sum += wait
				longest = max(longest, wait)
			}
			mean := sum / time.Duration(callers/keys)
			worst = max(worst, float64(longest)/float64(mean))
			s.WantStock(k+1, -callers/keys)
		}
		t.Logf("served within %v; the longest wait is up to %.2f times the mean of its key", time.Since(freed), worst)
		if long && worst > 3 {
			t.Errorf("the longest wait is %.2f times the mean of its key", worst)
		}
	})
}
