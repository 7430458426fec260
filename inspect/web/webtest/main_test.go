// Package webtest has a real browser look at package web, on real servers.
package webtest

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
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
	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
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
	ok(t, browser.err)
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
	ok(t, chromedp.Listen(ctx, func(event any) {
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
	ok(t, err)
	_, err = chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features})
	ok(t, err)
	_, err = chromedp.Call(ctx, emulation.SetFocusEmulationEnabled, emulation.SetFocusEmulationEnabledParams{Enabled: true}) // beside other tabs
	ok(t, err)
	p.do(chromedp.EmulateViewport(width, height), chromedp.Navigate(url))
	return p
}

func (p *tab) do(actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ok(p.t, chromedp.Do(p.ctx, actions...))
}

// eval returns what a JavaScript expression is.
func eval[T any](p *tab, expression string) T {
	p.t.Helper()
	out, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](expression))
	ok(p.t, err)
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

// tabTo presses Tab until what is focused begins so.
func (p *tab) tabTo(what string) {
	p.t.Helper()
	for range 30 {
		if p.press(kb.Tab); strings.HasPrefix(p.focused(), what) {
			return
		}
	}
	p.t.Fatalf("the Tab key does not lead to %q", what)
}

// picture keeps a screenshot for people to look at, with go test -artifacts.
func (p *tab) picture(name string) {
	p.t.Helper()
	if flag.Lookup("test.artifacts").Value.String() != "true" {
		return
	}
	png, err := chromedp.Run(p.ctx, chromedp.FullScreenshot(100))
	ok(p.t, err)
	ok(p.t, os.WriteFile(filepath.Join(p.t.ArtifactDir(), name+".png"), png, 0o644))
}

func (p *tab) until(what string, cond func() bool) {
	p.t.Helper()
	soon(p.t, what, cond)
}

// onServers runs a test on each server, in a database of its own.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			test(t, newScratch(t, bin))
		})
	}
}

// anyServer is a database on one of the servers.
func anyServer(t *testing.T) *scratch {
	t.Helper()
	t.Parallel()
	return newScratch(t, tempserver.Require(t)[0])
}

// scratch is a database on a server.
type scratch struct {
	t       *testing.T
	flavour tempserver.Flavour
	server  *tempserver.Server
	config  *mysql.Config
	root    *sql.DB
}

func newScratch(t *testing.T, bin tempserver.Binary) *scratch {
	t.Helper()
	s := &scratch{t: t, flavour: bin.Flavour, server: tempserver.Share(t, bin)}
	s.config = tempserver.Database(t, s.server.DSN(""))
	base, err := mysql.NewConnector(s.config)
	ok(t, err)
	s.root = s.open(base)
	return s
}

func (s *scratch) open(connector driver.Connector) *sql.DB {
	s.t.Helper()
	db := sql.OpenDB(connector)
	s.t.Cleanup(func() { db.Close() })
	return db
}

// process opens a handle with locks, as a process of that name has it. Who waits
// for a row lock asks again after the TTL, and is the last in line then: no test
// takes that long.
func (s *scratch) process(c mysqllock.Config) *sql.DB {
	s.t.Helper()
	c.TTL = 10 * patience
	connector, err := mysqllock.NewConnector(s.config, c)
	ok(s.t, err)
	return s.open(connector)
}

// names reports a server that tells who the owners are; on MariaDB that takes
// performance_schema, which is off.
func (s *scratch) names() bool { return s.flavour == tempserver.MySQL }

// loss is that a process has lost its lock on key.
func (s *scratch) loss(key string) *web.Losses {
	s.t.Helper()
	losses := new(web.Losses)
	db := s.process(mysqllock.Config{Observer: losses})
	hold, err := mysqllock.Acquire(context.Background(), db, key)
	ok(s.t, err)
	var id int
	ok(s.t, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
	_, err = s.root.Exec(fmt.Sprintf("KILL %d", id))
	ok(s.t, err)
	if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
		s.t.Fatalf("released a lock whose connection was killed: %v", err)
	}
	return losses
}

func (s *scratch) inspector() *inspect.Inspector {
	s.t.Helper()
	i, err := inspect.New(s.root, inspect.Options{})
	ok(s.t, err)
	return i
}

// serve mounts the page as applications do, and returns its URL.
func (s *scratch) serve(o web.Options) (url string, srv *httptest.Server) {
	s.t.Helper()
	page := web.New(s.inspector(), o)
	mux := http.NewServeMux()
	mux.Handle("/debug/locks/", page)
	srv = httptest.NewServer(mux)
	s.t.Cleanup(func() {
		page.Close()
		srv.Close()
	})
	return srv.URL + "/debug/locks/", srv
}

// acquire takes a lock as a process of that name, to be given back at the end.
func (s *scratch) acquire(owner, key string, opts ...lockctx.Option) *mysqllock.Hold {
	s.t.Helper()
	hold, err := mysqllock.Acquire(context.Background(), s.process(mysqllock.Config{Owner: owner}), key, opts...)
	ok(s.t, err)
	s.t.Cleanup(func() { _ = hold.Release() })
	return hold
}

// queue has processes wait for the key, one after the other, until the end.
func (s *scratch) queue(key string, option lockctx.Option, owners ...string) {
	s.t.Helper()
	i := s.inspector()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	s.t.Cleanup(func() { cancel(); wg.Wait() })
	for n, owner := range owners {
		db := s.process(mysqllock.Config{Owner: owner})
		wg.Go(func() {
			hold, err := mysqllock.Acquire(ctx, db, key, option, lockctx.Wait(4*patience))
			if err == nil {
				<-ctx.Done()
				_ = hold.Release()
			}
		})
		soon(s.t, fmt.Sprintf("%d wait for %s", n+1, key), func() bool {
			snap, err := i.Snapshot(ctx, inspect.Filter{Keys: []string{key}})
			ok(s.t, err)
			for _, l := range snap.Locks {
				if len(l.Waiters) == n+1 {
					return true
				}
			}
			return false
		})
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// soon waits until cond holds.
func soon(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !cond(); time.Sleep(150 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
