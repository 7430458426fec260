package lease

import (
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
)

// TestPrepared: what takes and releases leases is prepared on a connection where it runs often,
// except in a cluster, where a prepared statement is not repeated, and behind MySQL Router.
func TestPrepared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		cluster, router := s.info, s.info
		cluster.Topology, router.Router = server.Galera, true
		for name, info := range map[string]*server.Info{"one server": nil, "cluster": &cluster, "router": &router} {
			l := s.locker(setup{info: info})
			other := l.acquire(request("other")) // keeps the connection
			sent := l.tap.Since()
			var last uint64
			for range 20 {
				lease := l.acquire(request("k"))
				if last > 0 && lease.Token() != last+1 {
					t.Errorf("%s: token %d after %d", name, lease.Token(), last)
				}
				last = lease.Token()
				if r := s.row("k"); !r.live || r.token != last || r.left < 29*time.Second || s.wakeUps("k") != 1 {
					t.Errorf("%s: the row is %+v", name, r)
				}
				dbtest.OK(t, lease.Release())
				if r := s.row("k"); r.live || s.wakeUps("k") != 0 {
					t.Errorf("%s: after its release the row is %+v", name, r)
				}
			}
			var takes, releases, prepares int
			for _, c := range sent() {
				switch {
				case strings.HasPrefix(c.Of, "INSERT INTO"):
					takes++
				case strings.HasPrefix(c.Of, "UPDATE"):
					releases++
				case strings.HasPrefix(c.Text, "[prepare]"):
					prepares++
				}
			}
			if info == nil && (takes < 10 || releases < 10) || info != nil && takes+releases+prepares > 0 {
				t.Errorf("%s: %d takes and %d releases of 20 were prepared", name, takes, releases)
			}
			dbtest.OK(t, other.Release())
			l.close()
		}
	})
}

// TestLongBehindRowLock: who waits behind a row lock for longer than its connection reads
// keeps the connection.
func TestLongBehindRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{reads: 2400 * time.Millisecond})
		dbtest.OK(t, l.acquire(request("k")).Release())
		tx := s.lockRow("k")
		got := make(chan *Lease, 1)
		go func() { got <- l.acquire(waiting("k", 25*time.Second)) }()
		dbtest.Soon(t, "it waits behind the row lock", func() bool { return len(s.behindRow()) == 1 })
		opened := l.tap.Opened()
		time.Sleep(5 * time.Second)
		dbtest.OK(t, tx.Rollback())
		lease := <-got
		if now := l.tap.Opened(); now != opened {
			t.Errorf("%d connections were opened meanwhile", now-opened)
		}
		dbtest.OK(t, lease.Release())
	})
}
