package web_test

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestBackground: who looks first is told of what was before, and of a view at once;
// who looks last leaves the page looking.
func TestBackground(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		page, srv := s.page(web.Options{Background: true})
		dbtest.Soon(t, "it looks for nobody", func() bool { return page.Points() > 0 })
		stream := watch(t, srv)
		if hello := stream.next(); hello.name != "hello" || len(hello.data.History) == 0 {
			t.Errorf("the first is told %+v", hello)
		}
		stream.until("a view", func(e event) bool { return e.name == "view" })
		stream.stop()
		before := page.Points()
		dbtest.Soon(t, "it goes on", func() bool { return page.Looking() && page.Points() > before })
	})
}

// TestBackgroundLosses: a short lease that runs out counts as lost, although nobody looks.
func TestBackgroundLosses(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.OK(t, s.acquire(s.process(mysqllock.Config{}), "dead", lockctx.Lease(time.Minute)).Release()) // so that there is a row
		renew := func() {
			_, err := s.root.Exec("UPDATE mysqllock SET owner = 'ghost:1:batch#0123abcd', expires = UTC_TIMESTAMP(6) + INTERVAL 4 SECOND WHERE name LIKE '%dead%'")
			dbtest.OK(t, err)
		}
		renew()
		page, _ := s.page(web.Options{Background: true})
		// On a slow machine it may miss the moments in question: then it gets others.
		for try := 0; page.Lost() == 0 && try < 10; try++ {
			for before := page.Points(); page.Points() < before+2; time.Sleep(20 * time.Millisecond) {
				renew()
			}
			dbtest.Soon(t, "the lease has run out", func() (over bool) {
				dbtest.OK(t, s.root.QueryRow("SELECT MAX(expires) < UTC_TIMESTAMP(6) FROM mysqllock WHERE name LIKE '%dead%'").Scan(&over))
				return over
			})
			before := page.Points()
			dbtest.Soon(t, "it has looked since", func() bool { return page.Points() > before+1 || page.Lost() > 0 })
		}
		if page.Lost() == 0 {
			t.Error("leases ran out, and none was lost")
		}
	})
}
