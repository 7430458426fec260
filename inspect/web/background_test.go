package web_test

import (
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestThePageLooksOnWhenNobodyWatches: who looks first is told of what was before, and of a view at
// once; who looks last leaves the page looking.
func TestThePageLooksOnWhenNobodyWatches(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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

// TestWhoComesAgainSeesTheLastViewAtOnce: with its age, also if nobody looked in between and the server
// does not answer any more. Losses are counted since the page began to look, whoever looks at it.
func TestWhoComesAgainSeesTheLastViewAtOnce(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		proxy := dbtest.StartProxy(t, s.Config().Addr)
		cfg := s.Config()
		cfg.Net, cfg.Addr = "tcp", proxy.Addr()
		i, err := inspect.New(s.OpenDB(dbtest.Connector(t, cfg), nil), inspect.Options{})
		dbtest.OK(t, err)
		page, srv := serve(t, i, web.Options{})
		first := watch(t, srv)
		if hello := first.next(); hello.data.Age != 0 {
			t.Errorf("before the first view hello says %+v", hello.data)
		}
		view := first.until("a view", func(e event) bool { return e.name == "view" })
		first.stop()
		dbtest.Soon(t, "nobody looks", func() bool { return !page.Looking() })
		proxy.TurnTo("127.0.0.1:1")
		time.Sleep(2 * time.Millisecond) // the age is told in milliseconds
		again := watch(t, srv)
		hello, next := again.next(), again.next()
		if hello.data.Age <= 0 || next.name != "view" || next.data.Point.T < view.Point.T {
			t.Errorf("it is told %+v, and then %s of %d", hello.data, next.name, next.data.Point.T)
		}
		again.until("the failure", func(e event) bool { return e.name == "failed" })
		third := watch(t, srv)
		third.next()
		if next, failed := third.next(), third.next(); next.name != "view" || failed.name != "failed" {
			t.Errorf("after a failure it is told of a %s, and a %s", next.name, failed.name)
		}
		proxy.TurnTo(s.Config().Addr)
		back := again.until("another view", func(e event) bool { return e.name == "view" })
		if back.Losses.Since != view.Losses.Since || view.Losses.Since == 0 || view.Losses.Since > view.Point.T {
			t.Errorf("at %d it counts losses since %d, and for later viewers since %d", view.Point.T, view.Losses.Since, back.Losses.Since)
		}
	})
}

// TestALossCountsAlthoughNobodyLooks: a short lease runs out.
func TestALossCountsAlthoughNobodyLooks(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.OK(t, s.acquire(s.process(mysqllock.Config{}), "dead", lockctx.Lease(time.Minute)).Release()) // so that there is a row
		renew := func() {
			dbtest.Exec(t, s.root, "UPDATE mysqllock SET owner = 'ghost:1:batch#0123abcd', expires = UTC_TIMESTAMP(6) + INTERVAL 4 SECOND WHERE name LIKE '%dead%'")
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
