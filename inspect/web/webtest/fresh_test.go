package webtest

import (
	"net/http/httptest"
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

// TestServerGone: the page does not go on to say that it is live when the server does not
// answer, and when it has gone. What it showed last stays, also on reload, with its time.
func TestServerGone(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.acquire("holder", "k", lockctx.Lease(10*time.Minute))
		proxy := dbtest.StartProxy(t, s.Config().Addr)
		url := s.through(proxy, s.Config().User)
		p := openTab(t, url, 1200, 900)
		p.until("it is live", func() bool { return strings.HasPrefix(light(p), "live | Live | ") && len(p.texts("li.lock")) == 1 })
		proxy.Block()
		p.until("it is old, and looks", func() bool {
			return strings.HasPrefix(light(p), "old | As of ") && strings.HasSuffix(light(p), " UTC | looking now")
		})
		p.picture("silent")
		again := openTab(t, url, 1200, 900)
		again.until("on reload it shows the last view", func() bool {
			return strings.HasPrefix(light(again), "old | As of ") && len(again.texts("li.lock")) == 1
		})
		proxy.Close()
		p.until("it has gone", func() bool {
			return strings.HasPrefix(light(p), "lost | No answer since ") && strings.Contains(p.text("#trouble"), "did not tell") && len(p.texts("li.lock")) == 1
		})
		p.picture("gone")
		third := openTab(t, url, 1200, 900)
		third.until("on reload it shows the last view, and the failure", func() bool {
			return strings.HasPrefix(light(third), "lost | No answer since ") && len(third.texts("li.lock")) == 1
		})
	})
}

// TestSlowLooks: looks that take long are few, and in between the page says how old it is and
// when the next one comes.
func TestSlowLooks(t *testing.T) {
	s := anyServer(t)
	proxy := dbtest.StartProxy(t, s.Config().Addr)
	url := s.through(proxy, s.Config().User)
	proxy.Slow(20 * time.Millisecond)
	p := openTab(t, url, 1200, 900)
	p.until("it says when the next look is", func() bool {
		return strings.HasPrefix(light(p), "old | As of ") && strings.Contains(light(p), " | next look in ")
	})
	p.picture("slow")
	before := p.text("#state")
	again := openTab(t, url, 1200, 900)
	again.until("on reload it shows the same", func() bool { return again.text("#state") == before && strings.Contains(light(again), "next look in ") })
	p.until("it is live for a moment", func() bool { return p.text("#state") == "Live" })
}

// TestNothingKnown: for an account that may not see anything, no number is 0.
func TestNothingKnown(t *testing.T) {
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
