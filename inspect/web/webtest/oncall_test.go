package webtest

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// locked has a transaction lock rows one after the other, and end with the test. The last
// one it may wait for.
func (s *scratch) locked(waits bool, names ...string) (conn uint64) {
	s.T.Helper()
	ctx := context.Background()
	c, err := s.root.Conn(ctx)
	dbtest.OK(s.T, err)
	dbtest.OK(s.T, c.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&conn))
	_, err = c.ExecContext(ctx, "SET SESSION innodb_lock_wait_timeout = 3600") // until the end, however slow the machine is
	dbtest.OK(s.T, err)
	_, err = c.ExecContext(ctx, "START TRANSACTION")
	dbtest.OK(s.T, err)
	lock := func(name string) error {
		_, err := c.ExecContext(ctx, fmt.Sprintf("SELECT 1 FROM `%s`.`mysqllock` WHERE namespace = x'%x' AND name = x'%x' FOR UPDATE", s.Name, s.Name, name))
		return err
	}
	done := make(chan struct{})
	if last := len(names) - 1; waits {
		for _, name := range names[:last] {
			dbtest.OK(s.T, lock(name))
		}
		go func() {
			defer close(done)
			_ = lock(names[last])
		}()
	} else {
		for _, name := range names {
			dbtest.OK(s.T, lock(name))
		}
		close(done)
	}
	s.T.Cleanup(func() {
		_, _ = s.root.Exec(fmt.Sprintf("KILL %d", conn))
		<-done
		_ = c.Close()
	})
	return conn
}

// keys makes the lock table, with rows for keys.
func (s *scratch) keys(names ...string) {
	s.T.Helper()
	table, err := schema.Parse(s.Name + ".mysqllock")
	dbtest.OK(s.T, err)
	for _, text := range table.Setup() {
		dbtest.Exec(s.T, s.root, text)
	}
	for _, name := range names {
		dbtest.Exec(s.T, s.root, fmt.Sprintf("INSERT INTO mysqllock (namespace, name, token) VALUES (x'%x', x'%x', 3)", s.Name, name))
	}
}

// longest has the page show waits as long as they get, and returns how wide it is then.
const longest = `(() => {
	for (const node of document.querySelectorAll(".figures dd:not(.note), .hot td")) {
		if (/[0-9]/.test(node.textContent) && !node.querySelector(".key")) node.textContent = "≥ 23 h 59 min";
	}
	return document.documentElement.scrollWidth;
})()`

// pictures keeps the page in the light, in the dark, and on a phone.
func pictures(t *testing.T, url, name string, ready func(p *tab) bool) (p *tab) {
	t.Helper()
	for _, way := range []string{"light", "dark", "narrow"} {
		var features []*emulation.MediaFeature
		width := int64(1200)
		if way == "dark" {
			features = append(features, dark)
		}
		if way == "narrow" {
			width = 375
		}
		p = openTab(t, url, width, 900, features...)
		p.until(name+" is shown", func() bool { return p.text("#state") == "Live" && ready(p) })
		p.picture(name + "-" + way)
		if w := eval[int64](p, "document.documentElement.scrollWidth"); w > width {
			t.Errorf("%s: the page is %d px wide on %d", name, w, width)
		}
		if bad := eval[[]string](p, contrast); len(bad) > 0 {
			t.Errorf("%s: too little contrast: %q", name, bad)
		}
	}
	return p
}

// TestThePageSaysForWhomAChainWaits: one waits for the next, and all of them for the last.
func TestThePageSaysForWhomAChainWaits(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.keys("one", "two", "three")
		sleeper := s.locked(false, "three")
		const advice = "its process may wait for another lock" // these say no program's name
		s.locked(true, "two", "three")
		s.locked(true, "one", "two")
		s.locked(true, "one")
		url, _ := s.serve(web.Options{})
		p := pictures(t, url, "chain", func(p *tab) bool {
			return len(p.texts("li.lock")) == 3 && strings.Contains(strings.Join(p.texts("li.lock > .why"), ""), advice) && p.text("#waiting") == "3"
		})
		all := strings.Join(p.texts("li.lock > .why"), "\n")
		for text, times := range map[string]int{
			"idle for ": 1,
			advice:      1, // after a second
			fmt.Sprintf("(connection %d): begin with that one", sleeper): 2,
		} {
			if strings.Count(all, text) != times {
				t.Errorf("they wait since, which has %q not %d times:\n%s", text, times, all)
			}
		}
		if blamed := p.texts(".blame:not([hidden])"); len(blamed) != 1 || blamed[0] != "holds up 3" {
			t.Errorf("blamed: %q", blamed)
		}
	})
}

// TestThePageCallsACircleOne: two processes wait for each other over two strategies. The page counts the circle, and
// does not say to begin with one that waits itself.
func TestThePageCallsACircleOne(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if !s.names() {
			t.Skip("it does not tell the processes")
		}
		s.acquire("one:1:shopd", "a", lockctx.Row())
		s.acquire("two:2:shopd", "b", lockctx.Lease(10*patience))
		s.queue("b", lockctx.Lease(10*patience), "one:1:shopd")
		s.queue("a", lockctx.Row(), "two:2:shopd")
		url, _ := s.serve(web.Options{})
		p := pictures(t, url, "circle", func(p *tab) bool {
			return p.text("#deadlocks") == "1" && strings.HasPrefix(p.text("#deadlocks-note"), "1 circle of waits now")
		})
		if why := p.texts("li.lock > .why"); len(why) != 2 || !strings.HasPrefix(why[0], "a circle of waits: ") || !strings.HasPrefix(why[1], "a circle of waits: ") {
			t.Errorf("they wait since %q", why)
		}
		if blamed := p.texts(".blame:not([hidden])"); len(blamed) != 2 || blamed[0] != "in a circle of waits" {
			t.Errorf("blamed: %q", blamed)
		}
		if !eval[bool](p, "document.querySelector('#deadlocks').classList.contains('bad')") {
			t.Error("the circle is not red")
		}
	})
}

// TestAnOpenedLockShowsItsLastHour: if there is a record.
func TestAnOpenedLockShowsItsLastHour(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.acquire("the holder", "k", lockctx.Lease(10*patience))
		plain, _ := s.serve(web.Options{})
		p := openTab(t, plain, 1200, 900)
		p.until("the lock is shown", func() bool { return len(p.texts("li.lock")) == 1 })
		if n := len(p.texts("li.lock > .history:not([hidden])")); n != 0 {
			t.Errorf("without a record there are %d histories", n)
		}
		path := filepath.Join(t.TempDir(), "locks.jsonl")
		recorder, err := record.New(s.inspector(), path, 100*time.Millisecond, 1<<20)
		dbtest.OK(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := dbtest.Go(func() error { return recorder.Run(ctx) })
		defer func() { cancel(); dbtest.OK(t, <-done) }()
		dbtest.Soon(t, "it is recorded", func() bool {
			m, err := record.At(path, time.Now(), 0, "", "k")
			return err == nil && len(m.Holders) == 1
		})
		url, _ := s.serve(web.Options{Record: path})
		p = openTab(t, url, 1200, 900)
		p.until("the lock is shown", func() bool { return len(p.texts("li.lock > .history:not([hidden])")) == 1 })
		p.do(chromedp.Click(chromedp.CSS("li.lock > .history summary")))
		p.until("the history is shown", func() bool {
			return strings.Contains(strings.Join(p.texts("li.lock > .history li"), "\n"), "the holder holds: lease, token 1")
		})
		p.picture("history")
		if bad := eval[[]string](p, contrast); len(bad) > 0 {
			t.Errorf("too little contrast: %q", bad)
		}
	})
}

// TestTheLongestAwaitedKeyComesFirst: whatever it is called.
func TestTheLongestAwaitedKeyComesFirst(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		var names []string
		for i := range 9 {
			names = append(names, fmt.Sprintf("product:%d", 9-i))
		}
		s.keys(names...)
		for _, name := range names {
			s.locked(false, name)
		}
		url, _ := s.serve(web.Options{})
		p := openTab(t, url, 1200, 900)
		for i, name := range names {
			s.locked(true, name)
			p.until(name+" is waited for", func() bool { return p.text("#waiting") == fmt.Sprint(i+1) })
		}
		if got := p.texts("li.lock h3 .key"); strings.Join(got, " ") != strings.Join(names, " ") {
			t.Errorf("in the order %q, want %q", got, names)
		}
		phone := pictures(t, url, "nine", func(p *tab) bool { return p.text("#waiting") == "9" })
		if w := eval[int](phone, longest); w > 375 {
			t.Errorf("with waits of hours the page is %d px wide on a phone", w)
		}
	})
}

// TestFiveHundredKeysAreFewLines: until somebody wants all.
func TestFiveHundredKeysAreFewLines(t *testing.T) {
	s := anyServer(t)
	if s.Flavour != tempserver.MySQL {
		t.Skip("MariaDB shows rows that somebody waits for")
	}
	var names []string
	for i := range 500 {
		names = append(names, fmt.Sprintf("order:%03d", i))
	}
	s.keys(names...)
	s.locked(false, names...)
	s.locked(true, "order:417")
	url, _ := s.serve(web.Options{})
	p := pictures(t, url, "many", func(p *tab) bool { return p.text("#held") == "500" && p.text("#waiting") == "1" })
	if got := p.texts("li.lock h3 .key"); len(got) != 20 || got[0] != "order:417" {
		t.Errorf("shown are %q", got)
	}
	if h := eval[int](p, "document.documentElement.scrollHeight"); h > 6000 {
		t.Errorf("the page is %d px high on a phone", h)
	}
	p.do(chromedp.Click(chromedp.CSS("#all")))
	p.until("all are shown", func() bool { return len(p.texts("li.lock")) == 500 })
}

// TestNoLockSeenIsNotNoLock: that none is seen is said to mean that there is none only if it does.
func TestNoLockSeenIsNotNoLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.keys("quiet")
		if s.Flavour == tempserver.MariaDB {
			s.locked(false, "quiet") // which MariaDB does not show
		}
		url, _ := s.serve(web.Options{})
		unseen := s.Flavour == tempserver.MariaDB
		p := pictures(t, url, "nothing", func(p *tab) bool { // MariaDB answers from a copy
			return p.text("#none") != "" && (p.text("#held-note") != "") == unseen
		})
		if said := strings.Contains(p.text("#none"), "does not mean that there is none"); said != unseen || (p.text("#held") == "0") == unseen {
			t.Errorf("held are %q, %q: %q", p.text("#held"), p.text("#held-note"), p.text("#none"))
		}
	})
}
