package webtest

import (
	"strings"
	"testing"

	"github.com/chromedp/chromedp/kb"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// TestThePageTellsByClassWhatWasAwaitedMost, for as long as somebody wants to look back, also when the wait is over;
// all of that with the keyboard.
func TestThePageTellsByClassWhatWasAwaitedMost(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.keys("order:1", "order:2", "lonely")
		s.locked(false, "order:1", "order:2", "lonely")
		s.locked(true, "order:1")
		s.locked(true, "order:2")
		url, _ := s.serve(web.Options{Class: inspect.Classes("order:*")})
		p := openTab(t, url, 375, 900)
		p.until("two of a class wait", func() bool {
			return strings.HasPrefix(p.text("#hot-list tr"), "order:*\t2\t") && len(p.texts("#hot-list tr")) == 1
		})
		if p.text("#hot-range") != "10 min" {
			t.Errorf("the range is %q", p.text("#hot-range"))
		}
		p.tabTo("1 h")
		p.press(kb.Enter)
		if got := p.text("#hot-range"); got != "1 h" || p.text("#ranges [aria-pressed=true]") != "1 h" || !strings.HasPrefix(p.text("#longest-plot .times"), "−1 h") {
			t.Errorf("the range is %q: %q", got, p.text("#longest-plot"))
		}
		if d := eval[string](p, "document.querySelector('#longest-plot .line').getAttribute('d')"); !strings.HasPrefix(d, "M") {
			t.Errorf("in an hour the plot shows %q", d)
		}
		p.tabTo("order:*")
		p.press(kb.Enter)
		if p.focused() != "locks-title" || eval[string](p, "document.querySelector('#find').value") != "order:*" {
			t.Errorf("the keyboard is at %q", p.focused())
		}
		p.until("only the keys of the class are listed", func() bool {
			return strings.HasPrefix(strings.Join(p.texts("li.lock h3 .key"), " "), "order:") && len(p.texts("li.lock")) == 2
		})
		if w := eval[int64](p, "document.documentElement.scrollWidth"); w > 375 {
			t.Errorf("the page is %d px wide on 375", w)
		}
		if bad := eval[[]string](p, contrast); len(bad) > 0 {
			t.Errorf("too little contrast: %q", bad)
		}
	})
}
