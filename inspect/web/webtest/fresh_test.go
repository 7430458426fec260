package webtest

import (
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// through serves the page of a server behind a proxy.
func (s *scratch) through(p *dbtest.Proxy, user string) string {
	s.T.Helper()
	cfg := s.Config()
	cfg.Net, cfg.Addr, cfg.User = "tcp", p.Addr(), user
	i, err := inspect.New(s.OpenDB(dbtest.Connector(s.T, cfg), nil), inspect.Options{})
	dbtest.OK(s.T, err)
	page := web.New(i, web.Options{})
	srv := httptest.NewServer(page)
	s.T.Cleanup(func() {
		page.Close()
		srv.Close()
	})
	return srv.URL
}

// light is the colour of the light, by its class, with the words beside it.
func light(p *tab) string {
	return eval[string](p, `[document.querySelector("#light").className.split(" ")[1], document.querySelector("#state").textContent, document.querySelector("#clock").textContent].join(" | ")`)
}

// dimmed reports whether the page shows that its figures are old.
func dimmed(p *tab) bool {
	return eval[bool](p, `document.body.classList.contains("stale") && getComputedStyle(document.querySelector(".figures")).opacity < 1`)
}

// TestEachRedLossCountsInTheFigure: for viewers that come later, too.
func TestEachRedLossCountsInTheFigure(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.keys("dead")
		url, _ := s.serve(web.Options{})
		first := openTab(t, url, 1200, 900)
		first.until("it is live", func() bool { return first.text("#state") == "Live" })
		ghost := func() { // a lease that is neither renewed nor given back
			dbtest.Exec(t, s.root, "UPDATE mysqllock SET owner = 'ghost:1:batch#0123abcd', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 6 SECOND WHERE name = 'dead'")
		}
		red := func(p *tab) int { return len(p.texts("#lost-list li:not(.past)")) }
		for red(first) == 0 { // on a slow machine the page may miss the moment
			ghost()
			first.until("the lease has run out", func() bool {
				var over bool
				dbtest.OK(t, s.root.QueryRow("SELECT expires < UTC_TIMESTAMP(6) FROM mysqllock WHERE name = 'dead'").Scan(&over))
				return over
			})
			was := first.clock()
			dbtest.Eventually(t, "it has looked", func() error {
				if red(first) > 0 || first.clock() > was && !slices.Contains(first.texts("li.lock h3 .key"), "dead") {
					return nil
				}
				return fmt.Errorf("its view was of %s, and is of %s (%s), with %q", was, first.clock(), light(first), first.texts("li.lock h3 .key"))
			})
		}
		later := openTab(t, url, 1200, 900)
		later.until("it shows the loss", func() bool { return red(later) > 0 })
		dbtest.Equal(t, "the figure is %s", later.text("#losses"), fmt.Sprint(red(later)))
		if note := later.text("div:has(> #losses) dt"); !strings.HasPrefix(note, "Losses in the ") || !strings.HasSuffix(note, " watched") {
			t.Errorf("of the losses it says %q", note)
		}
	})
}

// TestThePageIsNotLiveWithoutItsServer: the server does not answer, and then it has gone. What the
// page showed last stays, also on reload, with its time.
func TestThePageIsNotLiveWithoutItsServer(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.acquire("holder", "k", lockctx.Lease(10*time.Minute))
		proxy := dbtest.StartProxy(t, s.Config().Addr)
		url := s.through(proxy, s.Config().User)
		p := openTab(t, url, 1200, 900)
		p.until("it is live", func() bool { return strings.HasPrefix(light(p), "live | Live | ") && len(p.texts("li.lock")) == 1 })
		proxy.Block()
		p.until("it is old, and looks", func() bool {
			return strings.HasPrefix(light(p), "old | As of ") && strings.HasSuffix(light(p), " ago, looking now")
		})
		p.until("it is dimmed", func() bool { return dimmed(p) })
		p.picture("silent")
		again := openTab(t, url, 1200, 900)
		again.until("on reload it shows the last view", func() bool {
			old := strings.HasPrefix(light(again), "old | As of ") || strings.HasPrefix(light(again), "lost | No answer since ") // to open it may take as long as a look may
			return old && len(again.texts("li.lock")) == 1
		})
		proxy.Close()
		p.until("it has gone", func() bool {
			return strings.HasPrefix(light(p), "lost | No answer since ") && strings.Contains(p.text("#trouble"), "did not tell") && len(p.texts("li.lock")) == 1
		})
		p.picture("gone")
		third := openTab(t, url, 1200, 900)
		third.until("on reload it shows the last view, and the failure", func() bool {
			return strings.HasPrefix(light(third), "lost | No answer since ") && strings.HasSuffix(light(third), " ago") && len(third.texts("li.lock")) == 1 && dimmed(third)
		})
	})
}

// TestSlowLooksAreFew: in between the page says how old it is and when the next one comes.
func TestSlowLooksAreFew(t *testing.T) {
	s := anyServer(t)
	proxy := dbtest.StartProxy(t, s.Config().Addr)
	url := s.through(proxy, s.Config().User)
	proxy.Slow(20 * time.Millisecond)
	p := openTab(t, url, 1200, 900)
	p.until("it says when the next look is", func() bool {
		return strings.HasPrefix(light(p), "old | As of ") && strings.Contains(light(p), " ago, next look in ")
	})
	p.picture("slow")
	before := p.text("#state")
	again := openTab(t, url, 1200, 900)
	again.until("on reload it shows the same", func() bool { return again.text("#state") == before && strings.Contains(light(again), "next look in ") })
	p.until("it is live for a moment", func() bool { return p.text("#state") == "Live" })
}

// TestNoNumberIsZeroWithoutRights: the account may not see anything.
func TestNoNumberIsZeroWithoutRights(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.acquire("holder", "k", lockctx.Lease(10*time.Minute))
		user := s.Name
		for _, text := range []string{"CREATE USER '%u'@'%'", "GRANT EXECUTE ON %u.* TO '%u'@'%'"} {
			dbtest.Exec(t, s.root, strings.ReplaceAll(text, "%u", user))
		}
		t.Cleanup(func() { dbtest.Exec(t, s.root, "DROP USER '"+user+"'@'%'") })
		p := openTab(t, s.through(dbtest.StartProxy(t, s.Config().Addr), user), 1200, 900)
		p.until("it is live", func() bool { return p.text("#state") == "Live" })
		for id, want := range map[string]string{
			"#held": "–", "#waiting": "–", "#longest": "–", "#losses": "–",
			"#held-note": "none seen; there may be some", "#waiting-note": "none seen; there may be some",
			"#losses-note": "not known: the account cannot read the leases", "#longest-reading": "peak not known", "#waiting-reading": "peak not known",
		} {
			if got := p.text(id); !strings.HasPrefix(got, want) {
				t.Errorf("%s is %q, want %q", id, got, want)
			}
		}
		if none := p.text("#none"); !strings.HasPrefix(none, "No lock is seen.") {
			t.Errorf("of the locks it says %q", none)
		}
		p.picture("nothing-known")
	})
}
