package lease

import (
	"context"
	"database/sql/driver"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
)

// TestRenewalAmongFences: transactions that commit under a lease without a pause, some
// always at the same time, do not keep it from being renewed.
func TestRenewalAmongFences(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		multi := s.info
		multi.Topology = "several writers"
		for _, test := range []struct {
			name  string
			info  server.Info
			max   int // connections for leases
			pause time.Duration
		}{
			{"no pause", s.info, 16, 0},
			{"pauses", s.info, 16, 10 * time.Millisecond},
			{"one connection", s.info, 1, time.Millisecond},
			{"fenced by writes", multi, 16, 0},
		} {
			t.Run(test.name, func(t *testing.T) {
				t.Parallel()
				l := s.locker(setup{info: &test.info, max: test.max})
				r := request(test.name)
				r.TTL = 7 * time.Second
				lease := l.acquire(r)
				other := request(test.name + ", another lease")
				other.TTL = r.TTL
				beside := l.acquire(other)
				var all sync.WaitGroup
				end := time.Now().Add(9 * time.Second)
				for range 8 {
					all.Go(func() {
						s.onConn(func(conn driver.Conn) {
							for time.Now().Before(end) {
								if err := lease.commit(conn, max(test.pause, time.Millisecond)); err != nil {
									t.Error(err)
									return
								}
								time.Sleep(test.pause)
							}
						})
					})
				}
				all.Wait()
				dbtest.OK(t, lease.Err())
				dbtest.OK(t, beside.Err())
				dbtest.OK(t, lease.Release())
				dbtest.OK(t, beside.Release())
			})
		}
	})
}

// commit is a transaction under the lease, which takes so long to commit.
func (s *Lease) commit(conn driver.Conn, takes time.Duration) error {
	err := server.Exec(context.Background(), conn, "START TRANSACTION")
	if err == nil {
		err = s.l.Fence(context.Background(), conn, []*Lease{s})
	}
	time.Sleep(takes)
	end := "COMMIT"
	if err != nil {
		end = "ROLLBACK"
	}
	if failed := server.Exec(context.Background(), conn, end); err == nil {
		err = failed
	}
	return err
}
