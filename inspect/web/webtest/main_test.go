// Package webtest has a real browser look at package web, on real servers.
package webtest

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.parallel", "8") // they mostly wait
	goleak.VerifyTestMain(tempserver.Tests{M: browsing{m}})
}

// patience is how long something may take that is certain to happen: it is for
// machines that are busy.
const patience = 3 * time.Minute

// browsing are tests that share a browser, which is closed after them.
type browsing struct{ m *testing.M }

func (b browsing) Run() int {
	defer func() {
		if browser.close != nil {
			browser.close()
		}
	}()
	return b.m.Run()
}

var browser struct {
	once  sync.Once
	ctx   context.Context
	close func()
	err   error
}

// startBrowser starts the Chromium that scripts/install-chromium.sh installs.
func startBrowser(t *testing.T) context.Context {
	t.Helper()
	program := ""
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		found, _ := exec.LookPath(name)
		program = cmp.Or(program, found)
	}
	if program == "" {
		const missing = "no Chromium on this machine; scripts/install-chromium.sh installs one"
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	browser.once.Do(func() {
		profile, err := os.MkdirTemp("", "webtest-")
		if err != nil {
			browser.err = err
			return
		}
		options := append(chromedp.DefaultExecAllocatorOptions[:],
			chromedp.ExecPath(program), chromedp.UserDataDir(profile), chromedp.NoSandbox,
			chromedp.Flag("disable-gpu", true), chromedp.Flag("disable-quic", true),
			chromedp.Flag("disable-component-update", true), chromedp.Flag("force-color-profile", "srgb"))
		allocator, stop := chromedp.NewExecAllocator(context.Background(), options...)
		ctx, cancel := chromedp.NewContext(allocator)
		browser.close = func() {
			_ = chromedp.Cancel(ctx) // waits until it has ended
			cancel()
			stop()
			_ = os.RemoveAll(profile)
		}
		browser.ctx, browser.err = ctx, chromedp.Do(ctx)
	})
	dbtest.OK(t, browser.err)
	return browser.ctx
}

// tab is a page in the browser, and what it has done.
type tab struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex
	requests []string // URLs
	failures []string // exceptions, and what the console shows
	expected []string // of failures
}

// openTab opens the URL in a window of this size. At the end of the test nothing
// must have failed in it, and nothing been asked of another host.
func openTab(t *testing.T, url string, width, height int64, features ...*emulation.MediaFeature) *tab {
	t.Helper()
	ctx, closeTab := chromedp.NewContext(startBrowser(t))
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	p := &tab{t: t, ctx: ctx}
	dbtest.OK(t, chromedp.Listen(ctx, func(event any) {
		p.mu.Lock()
		defer p.mu.Unlock()
		switch e := event.(type) {
		case *network.EventRequestWillBeSent:
			p.requests = append(p.requests, e.Request.URL)
		case *runtime.EventExceptionThrown:
			p.failures = append(p.failures, fmt.Sprintf("%+v", e.ExceptionDetails.Exception))
		case *runtime.EventConsoleAPICalled:
			p.failures = append(p.failures, fmt.Sprintf("console.%s", e.Type))
		case *log.EventEntryAdded: // also what the Content-Security-Policy refuses
			p.failures = append(p.failures, fmt.Sprintf("%s: %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL))
		}
	}))
	t.Cleanup(func() {
		closeTab()
		cancel()
		p.mu.Lock()
		defer p.mu.Unlock()
		host := strings.Join(strings.SplitAfter(url, "/")[:3], "")
		for _, r := range p.requests {
			if !strings.HasPrefix(r, host) {
				t.Errorf("the page asks another host: %s", r)
			}
		}
		if len(p.requests) < 4 { // the page, its script, its style and the stream
			t.Errorf("the requests are only %q", p.requests)
		}
		for _, f := range p.failures {
			if !slices.ContainsFunc(p.expected, func(part string) bool { return strings.Contains(f, part) }) {
				t.Errorf("the page has failed: %s", f)
			}
		}
	})
	_, err := chromedp.Call(ctx, network.Enable, network.EnableParams{})
	dbtest.OK(t, err)
	_, err = chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features})
	dbtest.OK(t, err)
	_, err = chromedp.Call(ctx, emulation.SetFocusEmulationEnabled, emulation.SetFocusEmulationEnabledParams{Enabled: true}) // beside other tabs
	dbtest.OK(t, err)
	p.do(chromedp.EmulateViewport(width, height), chromedp.Navigate(url))
	return p
}

func (p *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	dbtest.OK(p.t, chromedp.Do(p.ctx, actions...))
}

// eval returns what a JavaScript expression is.
func eval[T any](p *tab, expression string) T {
	p.t.Helper()
	out, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
	dbtest.OK(p.t, err)
	return out
}

// text is what the first element of that selector shows; "" where there is none.
func (p *tab) text(selector string) string {
	p.t.Helper()
	return eval[string](p, fmt.Sprintf("document.querySelector(%q)?.innerText ?? ''", selector))
}

// texts is what all elements of that selector show.
func (p *tab) texts(selector string) []string {
	p.t.Helper()
	return eval[[]string](p, fmt.Sprintf("[...document.querySelectorAll(%q)].map(e => e.innerText)", selector))
}

// press presses keys, one after the other.
func (p *tab) press(keys ...string) {
	p.t.Helper()
	for _, key := range keys {
		p.do(chromedp.KeyEvent(key))
	}
}

// focused is what has the keyboard: its id, or else its text.
func (p *tab) focused() string {
	p.t.Helper()
	return eval[string](p, "document.activeElement.id || document.activeElement.innerText")
}

// clock is the time of the view that the page shows: beside the light while that is new, and in what the light says
// when it is old.
func (p *tab) clock() string {
	return timeOfDay.FindString(p.text("#state") + " " + p.text("#clock"))
}

var timeOfDay = regexp.MustCompile(`\d\d:\d\d:\d\d UTC`)

// tabTo presses Tab until what is focused begins so. It does not pause between two presses:
// a list that is drawn anew meanwhile may have it begin at the top again, and presses that
// are rarer than the drawings never get to the end.
func (p *tab) tabTo(what string) {
	p.t.Helper()
	var way []string
	for began := time.Now(); time.Since(began) < dbtest.Patience; {
		p.press(kb.Tab)
		at := p.focused()
		if strings.HasPrefix(at, what) {
			return
		}
		way = append(way, at)
	}
	p.t.Fatalf("not within %v: the Tab key leads to %s, its last steps: %q", dbtest.Patience, what, way[max(0, len(way)-40):])
}

// picture keeps a screenshot for people to look at, with go test -artifacts.
func (p *tab) picture(name string) {
	p.t.Helper()
	if flag.Lookup("test.artifacts").Value.String() != "true" {
		return
	}
	png, err := chromedp.Run(p.ctx, chromedp.FullScreenshot(100))
	dbtest.OK(p.t, err)
	dbtest.OK(p.t, os.WriteFile(filepath.Join(p.t.ArtifactDir(), name+".png"), png, 0o644))
}

func (p *tab) until(what string, cond func() bool) {
	p.t.Helper()
	dbtest.Soon(p.t, what, cond)
}

// anyServer is a database on one of the servers.
func anyServer(t *testing.T) *scratch {
	t.Helper()
	t.Parallel()
	bin := tempserver.Require(t)[0]
	return newScratch(dbtest.New(t, bin, tempserver.Share(t, bin)))
}

// scratch is a database on a server.
type scratch struct {
	*dbtest.Database
	root *sql.DB
}

func newScratch(d *dbtest.Database) *scratch { return &scratch{Database: d, root: d.Open("mysql")} }

// process opens a handle with locks, as a process of that name has it. Who waits
// for a row lock asks again after the TTL, and is the last in the queue then: no test
// takes that long.
func (s *scratch) process(c mysqllock.Config) *sql.DB {
	s.T.Helper()
	c.TTL = 10 * patience
	return s.OpenDB(mysqllock.NewConnector(s.Config(), c))
}

// names reports a server that tells who the owners are; on MariaDB that takes
// performance_schema, which is off.
func (s *scratch) names() bool { return s.Flavour == tempserver.MySQL }

// loss is that a process has lost its lock on key.
func (s *scratch) loss(key string) *web.Losses {
	s.T.Helper()
	losses := new(web.Losses)
	db := s.process(mysqllock.Config{Observer: losses})
	hold, err := mysqllock.Acquire(context.Background(), db, key)
	dbtest.OK(s.T, err)
	var id int
	dbtest.OK(s.T, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
	_, err = s.root.Exec(fmt.Sprintf("KILL %d", id))
	dbtest.OK(s.T, err)
	if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
		s.T.Fatalf("released a lock whose connection was killed: %v", err)
	}
	return losses
}

func (s *scratch) inspector() *inspect.Inspector {
	s.T.Helper()
	i, err := inspect.New(s.root, inspect.Options{})
	dbtest.OK(s.T, err)
	return i
}

// serve mounts the page as applications do, and returns its URL.
func (s *scratch) serve(o web.Options) (url string, srv *httptest.Server) {
	s.T.Helper()
	page := web.New(s.inspector(), o)
	mux := http.NewServeMux()
	mux.Handle("/debug/locks/", page)
	srv = httptest.NewServer(mux)
	s.T.Cleanup(func() {
		page.Close()
		srv.Close()
	})
	return srv.URL + "/debug/locks/", srv
}

// acquire takes a lock as a process of that name, to be given back at the end.
func (s *scratch) acquire(owner, key string, opts ...lockctx.Option) *mysqllock.Hold {
	s.T.Helper()
	hold, err := mysqllock.Acquire(context.Background(), s.process(mysqllock.Config{Owner: owner}), key, opts...)
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { _ = hold.Release() })
	return hold
}

// queue has processes wait for the key, one after the other, until the end.
func (s *scratch) queue(key string, option lockctx.Option, owners ...string) {
	s.T.Helper()
	i := s.inspector()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	s.T.Cleanup(func() { cancel(); wg.Wait() })
	for n, owner := range owners {
		db := s.process(mysqllock.Config{Owner: owner})
		wg.Go(func() {
			hold, err := mysqllock.Acquire(ctx, db, key, option, lockctx.Wait(4*patience))
			if err != nil {
				if !errors.Is(err, mysqllock.ErrClosed) { // which it is at the end of the test
					s.T.Errorf("%s, which waits for %s: %v", owner, key, err)
				}
				return
			}
			<-ctx.Done()
			_ = hold.Release()
		})
		dbtest.Soon(s.T, fmt.Sprintf("%d wait for %s", n+1, key), func() bool {
			snap, err := i.Snapshot(ctx, inspect.Filter{Keys: []string{key}})
			dbtest.OK(s.T, err)
			for _, l := range snap.Locks {
				if len(l.Waiters.List) == n+1 {
					return true
				}
			}
			return false
		})
	}
}
