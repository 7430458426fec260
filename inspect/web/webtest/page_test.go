package webtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

var dark = &emulation.MediaFeature{Name: "prefers-color-scheme", Value: "dark"}

// The page shows who holds a key and who waits, in their order, and follows what
// becomes of them without being loaded again.
func TestThePageFollowsHoldersAndQueue(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		hold := s.acquire("the holder", "product:42", lockctx.Row())
		owners := []string{"shop-1:70:shop", "shop-2:71:shop", "shop-3:72:shop", "batch-1:73:batch", "batch-2:74:batch"}
		s.queue("product:42", lockctx.Row(), owners...)
		s.acquire("shop-1:70:shop", "stocktaking", lockctx.Lease(10*time.Minute))
		url, _ := s.serve(web.Options{})
		p := openTab(t, url, 1200, 900)
		const key, holders, queue, waits = "li.lock h3 .key", "li.lock:first-child .holders .who", "li.lock .queue li .who", "li.lock .queue li .time"
		p.until("it is live", func() bool { return p.text("#state") == "Live" })
		if got := p.texts(key); !slices.Equal(got, []string{"product:42", "stocktaking"}) { // who is waited for comes first
			t.Fatalf("the keys are %q", got)
		}
		if s.names() {
			if got := p.texts(holders); !slices.Equal(got, []string{"the holder"}) {
				t.Errorf("the holders are %q", got)
			}
			if got := p.texts(queue); !slices.Equal(got, owners) {
				t.Errorf("the waiters are %q, want %q", got, owners)
			}
		} else if got := p.texts(queue); len(got) != 5 || got[0] == "" {
			t.Errorf("the waiters are %q", got)
		}
		if got := p.texts(waits); len(got) != 5 || !strings.HasSuffix(got[0], "s") { // seconds, or milliseconds
			t.Errorf("they wait %q", got)
		}
		all := "2"
		if !s.names() { // MariaDB shows some locks only while somebody waits
			all = "≥ 2"
		}
		if held, waiting := p.text("#held"), p.text("#waiting"); held != all || waiting != "≥ 5" {
			t.Errorf("%s are held, %s wait", held, waiting)
		}
		if got := p.text("li.lock .queue summary"); !strings.HasPrefix(got, "5 waiting, the longest for ") {
			t.Errorf("the queue is called %q", got)
		}
		before := p.clock()
		p.until("time goes on", func() bool { return p.clock() != before })

		dbtest.OK(t, hold.Release())
		p.until("the next has it", func() bool { return len(p.texts(queue)) == 4 && p.text("#waiting") == "≥ 4" })
		if s.names() {
			// Which of them, MySQL decides; the others stay in their order.
			next, rest := p.text(holders), p.texts(queue)
			if i := slices.Index(owners, next); i < 0 || !slices.Equal(rest, slices.Delete(slices.Clone(owners), i, i+1)) {
				t.Errorf("the holder is %q, the waiters are %q, of %q", next, rest, owners)
			}
		}
		p.until("there is a line in the plot", func() bool {
			return strings.Count(eval[string](p, "document.querySelector('#waiting-plot .line').getAttribute('d')"), "L") > 0
		})
		if eval[int](p, "performance.getEntriesByType('navigation').length") != 1 {
			t.Error("the page was loaded again")
		}
	})
}

const evil = `<img src=x onerror="document.title='hacked'"><script>document.title='hacked'</script>`

// Keys and owners are shown as what they are.
func TestHostileTextIsShownAsWhatItIs(t *testing.T) {
	s := anyServer(t)
	name := strings.ReplaceAll(evil, "/", "") // an owner has no slash
	s.acquire(name, evil, lockctx.Lease(10*time.Minute))
	s.acquire("calm", "line\nbreak \u202e turned", lockctx.Lease(10*time.Minute))
	url, _ := s.serve(web.Options{AllowRelease: true})
	p := openTab(t, url, 1200, 900)
	p.until("they are shown", func() bool { return len(p.texts("li.lock")) == 2 })
	if got := p.texts("li.lock h3 .key"); !slices.Contains(got, evil) || !slices.Contains(got, `line\nbreak \u202e turned`) {
		t.Errorf("the keys are %q", got)
	}
	if got := p.texts(".holders .who"); !slices.Contains(got, name) {
		t.Errorf("the holders are %q", got)
	}
	dbtest.Equal(t, "%d elements were made of text", eval[int](p, "document.querySelectorAll('img, main script').length"), 0)
	p.do(chromedp.Click(chromedp.CSS(".act button")))
	p.until("it asks", func() bool { return eval[bool](p, "document.getElementById('confirm').open") })
	if title := eval[string](p, "document.title"); !strings.HasPrefix(title, "Locks") {
		t.Errorf("the title is %q", title)
	}
}

// A lock is released with the keyboard alone, after a question whose first answer
// is no.
func TestALockIsReleasedByKeyboardAfterAQuestion(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.acquire("old", "k", lockctx.Lease(10*time.Minute))
		s.queue("k", lockctx.Lease(10*time.Minute), "new")
		url, _ := s.serve(web.Options{AllowRelease: true})
		p := openTab(t, url, 1200, 900)
		asking := func() bool { return eval[bool](p, "document.getElementById('confirm').open") }
		p.until("the queue is shown", func() bool { return p.text("#waiting") == "≥ 1" })
		p.tabTo("Release")
		p.press(kb.Enter)
		p.until("it asks", asking)
		dbtest.Equal(t, "asked, %q is focused", p.focused(), "confirm-no")
		if got := p.text("#confirm"); !strings.Contains(got, "Release k?") || !strings.Contains(got, "old loses the lease") {
			t.Errorf("it asks %q", got)
		}
		p.picture("question")
		p.press(kb.Enter)
		p.until("it asks no more", func() bool { return !asking() })
		if got := p.focused(); !strings.HasPrefix(got, "Release") {
			t.Errorf("after that %q is focused", got)
		}
		p.press(kb.Enter)
		p.until("it asks again", asking)
		p.press(kb.Escape)
		p.until("Escape is no", func() bool { return !asking() })
		p.until("it was not released by a no", func() bool { return p.text("#waiting") == "≥ 1" && p.text("#result") == "" }) // a waiter for a lease is gone for moments
		p.press(kb.Enter)
		p.until("it asks again", asking)
		p.tabTo("confirm-yes")
		p.press(kb.Enter)
		p.until("it is done", func() bool { return p.text("#result") == "k: Released: the lease is broken, and its token is 2 now." })
		p.until("the next has it", func() bool { return strings.Contains(p.text(".how"), "token 3") && p.text(".holders .who") == "new" })
		if asking() {
			t.Error("it still asks")
		}

		// What has changed since the question is not released.
		p.expected = []string{"409"}
		p.do(chromedp.Click(chromedp.CSS(".act button")))
		p.until("it asks", asking)
		_, err := s.root.Exec("UPDATE mysqllock SET token = token + 1 WHERE owner IS NOT NULL")
		dbtest.OK(t, err)
		p.do(chromedp.Click(chromedp.CSS("#confirm-yes")))
		p.until("it says why not", func() bool { return strings.Contains(p.text("#confirm-trouble"), "changed hands since the snapshot") })
	})
}

func TestThePageNeedsNoMouse(t *testing.T) {
	s := anyServer(t)
	for _, key := range []string{"alpha", "beta"} {
		s.acquire("owner-of-"+key, key, lockctx.Lease(10*time.Minute))
	}
	s.acquire("owner-of-gamma", "gamma", lockctx.Advisory())
	s.queue("gamma", lockctx.Advisory(), "waiter") // for a lease it would be gone for moments
	url, _ := s.serve(web.Options{})
	p := openTab(t, url, 1200, 900)
	keys := func(want ...string) func() bool {
		return func() bool { return slices.Equal(p.texts("li.lock h3 .key"), want) }
	}
	p.until("they are shown", keys("gamma", "alpha", "beta"))

	p.tabTo("longest-plot")
	p.press(kb.ArrowLeft)
	if got := eval[string](p, "document.activeElement.getAttribute('aria-valuetext')"); !strings.HasSuffix(got, ", 5 s ago") {
		t.Errorf("the plot says %q", got)
	}
	p.press(kb.Escape)
	p.tabTo("find")
	p.press("A", "l", "p")
	p.until("found by key", keys("alpha"))
	dbtest.Equal(t, "counted are %q", p.text("#count"), "1 of 3")
	p.press(kb.Backspace, kb.Backspace, kb.Backspace)
	p.press(strings.Split("of-beta", "")...)
	p.until("found by holder", keys("beta"))
	p.press("!")
	p.until("nothing found", keys())
	dbtest.Equal(t, "it says %q", p.text("#none"), "None of them is like that.")
	for range len("of-beta!") {
		p.press(kb.Backspace)
	}
	p.tabTo("contended")
	p.press(" ")
	p.until("only what is waited for", keys("gamma"))
	p.press(" ")
	p.tabTo("≥ 1 waiting")
	p.press(kb.Enter)
	p.until("the queue is closed", func() bool { return p.text("li.lock .queue li") == "" })
	was := p.clock()
	p.until("there was news", func() bool { return p.clock() != was })
	if !strings.HasPrefix(p.focused(), "≥ 1 waiting") || p.text("li.lock .queue li") != "" {
		t.Errorf("with news the queue opens, and %q is focused", p.focused())
	}

	eval[any](p, "document.activeElement.blur()")
	p.tabTo("pause")
	p.press(kb.Enter)
	p.until("it is paused", func() bool { return p.text("#state") == "Paused" && p.text("#pause") == "Resume" })
	was = p.clock()
	time.Sleep(2500 * time.Millisecond)
	if now := p.clock(); now != was {
		t.Errorf("paused at %s, it goes on to %s", was, now)
	}
	p.press(kb.Enter)
	p.until("it goes on", func() bool { return p.text("#state") == "Live" && p.clock() != was })
}

func TestALostConnectionIsOpenedAgain(t *testing.T) {
	s := anyServer(t)
	url, srv := s.serve(web.Options{})
	p := openTab(t, url, 1200, 900)
	p.expected = []string{"net::ERR_"}
	p.until("it is live", func() bool { return p.text("#state") == "Live" })
	srv.CloseClientConnections()
	p.until("it is lost", func() bool { return p.text("#state") == "Disconnected, trying again" })
	p.until("it is back", func() bool { return p.text("#state") == "Live" })
}

// awkward makes locks that are hard to show: long keys and names, gaps, losses.
func (s *scratch) awkward() web.Options {
	s.T.Helper()
	s.acquire(strings.Repeat("owner", 20), strings.Repeat("key", 80), lockctx.Lease(10*time.Minute))
	s.queue(strings.Repeat("key", 80), lockctx.Lease(10*time.Minute), strings.Repeat("waiter", 15), "w")
	s.acquire("shop-1:70:shop", "product:42", lockctx.Row())
	s.queue("product:42", lockctx.Row(), "shop-2:71:shop", "shop-3:72:shop")
	s.acquire("shop-1:70:shop", "cache:eu", lockctx.Advisory())
	losses := s.loss(strings.Repeat("lost", 50))
	return web.Options{AllowRelease: true, Losses: losses}
}

func TestThePageFitsOnAPhone(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		url, _ := s.serve(s.awkward())
		p := openTab(t, url, 360, 740)
		p.until("all is shown", func() bool { return len(p.texts("li.lock")) >= 2 && p.text("#lost-list") != "" })
		p.picture("phone")
		const wide = "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)"
		if w := eval[int](p, wide); w > 360 {
			t.Errorf("the page is %d px wide on a phone of 360: %v", w, eval[[]string](p,
				"[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 361).map(e => e.tagName + '.' + e.className)"))
		}
		p.do(chromedp.Click(chromedp.CSS(".act button")))
		p.until("it asks", func() bool { return eval[bool](p, "document.getElementById('confirm').open") })
		p.picture("question")
		if w := eval[int](p, wide); w > 360 {
			t.Errorf("with a question it is %d px wide", w)
		}
		if small := eval[[]string](p, "[...document.querySelectorAll('button, input, summary')].filter(e => e.checkVisibility() && e.getBoundingClientRect().height < 16).map(e => e.outerHTML)"); len(small) > 0 {
			t.Errorf("too small for a finger: %q", small)
		}
	})
}

// contrast is the text that stands out too little from what is behind it, by the
// formula of WCAG 2.
const contrast = `(() => {
	const parse = (c) => { const m = c.match(/[\d.]+/g).map(Number); return { rgb: m.slice(0, 3), a: m[3] ?? 1 }; };
	const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
		.reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
	const bad = [];
	for (const e of document.querySelectorAll('body *')) {
		const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
		if (!own || !e.checkVisibility({ contentVisibilityAuto: true }) || e.closest('.unseen, svg')) continue;
		let behind = e, ground = { a: 0 };
		while (behind && ground.a === 0) { ground = parse(getComputedStyle(behind).backgroundColor); behind = behind.parentElement; }
		const [a, b] = [light(parse(getComputedStyle(e).color).rgb), light(ground.rgb)].sort((x, y) => y - x);
		const ratio = (a + 0.05) / (b + 0.05);
		if (ratio < 4.5) bad.push(ratio.toFixed(2) + ' ' + e.outerHTML.slice(0, 80));
	}
	return bad;
})()`

// All text can be read, and all that can be used has a name, in the light and in
// the dark.
func TestAllTextIsLegibleAndAllControlsAreNamed(t *testing.T) {
	s := anyServer(t)
	options := s.awkward()
	for scheme, features := range map[string][]*emulation.MediaFeature{"light": nil, "dark": {dark}} {
		url, _ := s.serve(options)
		p := openTab(t, url, 1200, 900, features...)
		p.until("all is shown", func() bool { return len(p.texts("li.lock")) >= 2 && p.text("#lost-list") != "" })
		p.picture(scheme)
		if ground := eval[string](p, "getComputedStyle(document.body).backgroundColor"); (ground == "rgb(247, 248, 249)") != (scheme == "light") {
			t.Errorf("%s: the ground is %s", scheme, ground)
		}
		if bad := eval[[]string](p, contrast); len(bad) > 0 {
			t.Errorf("%s: too little contrast: %q", scheme, bad)
		}
		tree, err := chromedp.Call(p.ctx, accessibility.GetFullAXTree, accessibility.GetFullAXTreeParams{})
		dbtest.OK(t, err)
		named := 0
		for _, node := range tree.Nodes {
			if node.Ignored || node.Role == nil {
				continue
			}
			switch role := fmt.Sprint(node.Role.Value); strings.Trim(role, `"`) {
			case "button", "searchbox", "checkbox", "slider", "DisclosureTriangle", "dialog", "textbox":
				if node.Name == nil || len(fmt.Sprint(node.Name.Value)) <= len(`""`) {
					t.Errorf("%s: a %s without a name: %+v", scheme, role, node)
				}
				named++
			}
		}
		if named < 6 {
			t.Errorf("%s: only %d things to use", scheme, named)
		}
	}
}
