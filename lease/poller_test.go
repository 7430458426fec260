package lease

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestPollerAmongHandOvers: a caller that has no connection to wait on in the server, and
// so polls, gets a lease that the goroutines of other processes hand over among themselves.
func TestPollerAmongHandOvers(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, test := range []struct{ conns, rivals int }{{2, 1}, {1, 1}, {2, 2}} {
			// Before it had a way to announce itself it was 250 to 470 for each try. What else the
			// machine does counts, too, so it has another chance.
			const tries, most = 20, 150
			var passed int64
			for round := range 6 {
				passed = s.passPoller(fmt.Sprint(test, round), test.conns, test.rivals, tries)
				t.Logf("%d connections, %d rivals: passed by %d grants in %d tries", test.conns, test.rivals, passed, tries)
				if passed <= most*tries {
					break
				}
			}
			if passed > most*tries {
				t.Errorf("%d connections, %d rivals: passed by %d grants in %d tries, six times", test.conns, test.rivals, passed, tries)
			}
		}
	})
}

// passPoller has a poller try to get a lease that the goroutines of rivals hand over among
// themselves, and returns how many grants it was passed by.
func (s *scratch) passPoller(key string, conns, rivals, tries int) (passed int64) {
	t := s.T
	t.Helper()
	poller := s.locker(setup{max: conns})
	dbtest.OK(t, poller.acquire(request(key)).Release())
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var grants atomic.Int64
	for range rivals {
		others := s.locker(setup{})
		for range 8 / rivals {
			all.Go(func() {
				for ctx.Err() == nil {
					lease, err := others.Acquire(ctx, waiting(key, time.Minute))
					if err != nil {
						continue
					}
					grants.Add(1)
					time.Sleep(time.Millisecond)
					if err := lease.Release(); err != nil {
						t.Error(err)
					}
				}
			})
		}
	}
	for range tries {
		first := grants.Load()
		dbtest.Soon(t, "the others have it", func() bool { return grants.Load() > first+2*handOvers })
		before := grants.Load()
		lease := poller.acquire(waiting(key, time.Minute))
		passed += grants.Load() - before
		dbtest.OK(t, lease.Release())
	}
	cancel()
	all.Wait()
	return passed
}
