package lease

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
)

// TestBehindFrozenWaiter: a waiter that is woken and does nothing, as one whose host
// stands still, does not keep those behind it from a free lease for long.
func TestBehindFrozenWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l, other := s.locker(setup{}), s.locker(setup{})
		first := l.acquire(request("k"))
		frozen, err := s.db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer frozen.Close()
		wakeUp := lockname.OfWakeUp(s.Name, "k")
		var id, woken int
		dbtest.OK(t, frozen.QueryRowContext(dbtest.Limited(t), "SELECT CONNECTION_ID()").Scan(&id))
		rang := make(chan error, 1)
		go func() {
			rang <- frozen.QueryRowContext(dbtest.Limited(t), "SELECT GET_LOCK('"+wakeUp+"', 60)").Scan(&woken)
		}()
		waits := func(what string, n int) {
			dbtest.Soon(t, what, func() bool {
				var in int
				dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE LIKE 'User lock%' AND INFO LIKE '%"+wakeUp+"%'").Scan(&in))
				return in == n
			})
		}
		waits("the frozen one waits", 1)
		granted := make(chan time.Time, 1)
		go func() {
			lease, err := other.Acquire(dbtest.Limited(t), waiting("k", 25*time.Second))
			granted <- time.Now()
			if err != nil {
				t.Error(err)
				return
			}
			dbtest.OK(t, lease.Release())
		}()
		waits("the other waits behind it", 2)
		began := time.Now()
		dbtest.OK(t, first.Release())
		dbtest.OK(t, <-rang)
		if took := (<-granted).Sub(began); took > 15*time.Second { // it would wait for longer
			t.Errorf("the lease was free for %v", took)
		}
	})
}
