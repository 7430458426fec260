package web_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

var strategies = map[string]lockctx.Option{
	"row":      lockctx.Row(),
	"lease":    lockctx.Lease(10 * time.Minute),
	"advisory": lockctx.Advisory(),
}

// contend has one process hold a key, and another wait for it until the end.
func (s *scratch) contend(key string, option lockctx.Option) (holder *sql.DB, hold *mysqllock.Hold, granted <-chan error) {
	s.T.Helper()
	holder = s.process(mysqllock.Config{Owner: "holder"})
	hold = s.acquire(holder, key, option)
	next := s.process(mysqllock.Config{Owner: "next"})
	ctx, cancel := context.WithCancel(context.Background())
	answer := make(chan error, 1)
	var waiting sync.WaitGroup
	waiting.Go(func() {
		h, err := mysqllock.Acquire(ctx, next, key, option, lockctx.Wait(4*patience))
		if err == nil {
			err = h.Release()
		}
		answer <- err
	})
	s.T.Cleanup(func() { cancel(); waiting.Wait() })
	return holder, hold, answer
}

func TestAViewHasAllHoldersAndWaiters(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for strategy, option := range strategies {
			s.contend("the-"+strategy, option)
		}
		_, srv := s.page(web.Options{})
		stream := watch(t, srv)
		hello := stream.next()
		if hello.name != "hello" || hello.data.Release || hello.data.Secret != "" || !hello.data.Seen || hello.data.History == nil {
			t.Errorf("the first event is %+v", hello)
		}
		// Longer than anybody waits for a lease before he asks again.
		d := stream.until("all are waited for, for long", func(e event) bool {
			return e.data.Waiting == 3 && e.data.Held == 3 && e.data.lock("the-lease").Waiters[0].Least > 6000
		})
		for strategy := range strategies {
			l := d.lock("the-" + strategy)
			if l == nil || l.Strategy != strategy || len(l.Holders) != 1 || len(l.Waiters) != 1 || l.Waiting != 1 || !l.Releasable || l.Nameless {
				t.Errorf("%s is %+v", strategy, l)
				continue
			}
			if w := l.Waiters[0]; w.Conn == 0 || w.Least <= 0 || w.Least > d.Longest {
				t.Errorf("%s: the waiter is %+v of at most %d ms", strategy, w, d.Longest)
			}
		}
		if d.Namespace != s.Config().DBName || d.Deadlocks == nil || d.Unshown != 0 || d.Point.N != 3 || d.Point.W != d.Longest {
			t.Errorf("the rest is %+v", d)
		}
		if again := watch(t, srv).next(); len(again.data.History) == 0 {
			t.Error("who comes later is told nothing of what was before")
		}
	})
}

// counted counts the connections that are made.
type counted struct {
	driver.Connector
	made atomic.Int64
}

func (c *counted) Connect(ctx context.Context) (driver.Conn, error) {
	c.made.Add(1)
	return c.Connector.Connect(ctx)
}

// However many look, the server is asked once; and not at all when nobody does.
func TestManyViewersAskTheServerOnce(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		base, err := mysql.NewConnector(s.Config())
		dbtest.OK(t, err)
		connector := &counted{Connector: base}
		db := sql.OpenDB(connector)
		t.Cleanup(func() { db.Close() })
		i, err := inspect.New(db, inspect.Options{})
		dbtest.OK(t, err)
		page, srv := serve(t, i, web.Options{})
		nobody := func() {
			t.Helper()
			dbtest.Soon(t, "nobody is seen to look any more", func() bool { return !page.Looking() })
			for round := 1; ; round++ {
				before := connector.made.Load()
				time.Sleep(2500 * time.Millisecond)
				n := connector.made.Load() - before
				if n == 0 {
					break
				}
				if round == 4 { // the first may see the connection on which it was given up
					t.Fatalf("asked %d times while nobody looks", n)
				}
			}
		}
		nobody()
		began := time.Now()
		var viewers []*stream
		for range 5 {
			viewers = append(viewers, watch(t, srv))
		}
		const looks = 4
		for range looks {
			viewers[0].until("a view", func(e event) bool { return e.name == "view" })
		}
		if n, seconds := connector.made.Load(), int64(time.Since(began).Seconds()); n < looks || n > seconds+2 {
			t.Errorf("asked %d times in %d s while five look", n, seconds)
		}
		for _, v := range viewers {
			v.stop()
		}
		nobody()
		watch(t, srv).until("a view for who comes later", func(e event) bool { return e.name == "view" })
	})
}

// stuck is the http.ResponseWriter of a client that takes nothing.
type stuck struct {
	http.ResponseWriter
	mu       sync.Mutex
	deadline time.Time
	bytes    int
}

func (s *stuck) SetWriteDeadline(d time.Time) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deadline = d
	return nil
}

func (s *stuck) Write(b []byte) (int, error) {
	s.mu.Lock()
	deadline, full := s.deadline, s.bytes > 0
	s.bytes += len(b)
	s.mu.Unlock()
	if !full {
		return len(b), nil
	}
	if deadline.IsZero() {
		deadline = time.Now().Add(time.Hour)
	}
	time.Sleep(time.Until(deadline))
	return 0, os.ErrDeadlineExceeded
}

func (s *stuck) Flush() {}

func TestASlowViewerIsDroppedAndDelaysNobody(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		page, srv := s.page(web.Options{})
		page.SetWriteBound(4 * time.Second) // for which others must not wait
		r := httptest.NewRequest(http.MethodGet, "/page.events", nil)
		r.RemoteAddr, r.Host = "127.0.0.1:5000", "localhost"
		dropped := make(chan bool)
		go func() {
			page.ServeHTTP(&stuck{ResponseWriter: httptest.NewRecorder()}, r)
			close(dropped)
		}()
		other := watch(t, srv)
		for range 3 {
			other.until("a view", func(e event) bool { return e.name == "view" })
		}
		select {
		case <-dropped:
		case <-time.After(patience):
			t.Fatal("who takes nothing is not dropped")
		}
		other.until("a view after that", func(e event) bool { return e.name == "view" })
	})
}

// plain can not flush.
type plain struct{ http.ResponseWriter }

func TestAWriterThatCannotFlushIsRefused(t *testing.T) {
	page := web.New(nowhere(t), web.Options{})
	defer page.Close()
	r := httptest.NewRequest(http.MethodGet, "/page.events", nil)
	r.RemoteAddr, r.Host = "127.0.0.1:5000", "localhost"
	w := httptest.NewRecorder()
	page.ServeHTTP(plain{w}, r)
	if w.Code != http.StatusInternalServerError || !strings.Contains(w.Body.String(), "cannot flush") || page.Looking() {
		t.Errorf("answered with %d: %s", w.Code, w.Body)
	}
}

func TestCloseEndsStreamsAndRefusesNewOnes(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		page, srv := s.page(web.Options{})
		stream := watch(t, srv)
		stream.until("a view", func(e event) bool { return e.name == "view" })
		page.Close()
		page.Close()
		for e := stream.next(); e.name != ""; e = stream.next() {
			if e.name != "view" {
				t.Errorf("after the end there is %+v", e)
			}
		}
		for _, path := range []string{"/", "/page.events"} {
			answer, err := srv.Client().Get(srv.URL + path)
			dbtest.OK(t, err)
			_ = answer.Body.Close()
			if answer.StatusCode != http.StatusServiceUnavailable {
				t.Errorf("after the end %s is %s", path, answer.Status)
			}
		}
	})
}

func TestAFailureIsToldWithoutThePassword(t *testing.T) {
	_, srv := serve(t, nowhere(t), web.Options{})
	d := watch(t, srv).until("it fails", func(e event) bool { return e.name == "failed" })
	if !strings.Contains(d.Error, "127.0.0.1:1") || strings.Contains(d.Error, "secret") {
		t.Errorf("the error is %q", d.Error)
	}
}

func TestLossesOfTheProcessAreShown(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		losses := new(web.Losses)
		db := s.process(mysqllock.Config{Observer: losses})
		_, srv := s.page(web.Options{Losses: losses})
		stream := watch(t, srv)
		if stream.next().data.Seen {
			t.Error("the page takes the process's losses for its own")
		}
		first := stream.until("a view", func(e event) bool { return e.name == "view" })
		if first.Losses.Total != 0 || first.Losses.Recent == nil {
			t.Errorf("the losses are %+v", first.Losses)
		}
		hold := s.acquire(db, "k\n", lockctx.Row())
		dbtest.OK(t, s.acquire(db, "kept", lockctx.Row()).Release())
		var id int
		dbtest.OK(t, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
		dbtest.Exec(t, s.root, fmt.Sprintf("KILL %d", id))
		if err := hold.Release(); !errors.Is(err, lockerr.ErrLost) {
			t.Fatalf("the holder is told %v", err)
		}
		d := stream.until("a loss", func(e event) bool { return e.data.Losses.Total > 0 })
		if l := d.Losses; l.Total != 1 || l.Since != first.Losses.Since || l.Since > first.Point.T || len(l.Recent) != 1 || l.Recent[0].Key != `k\n` || l.Recent[0].Strategy != "row" || !strings.HasPrefix(l.Recent[0].Why, "commit: lock lost: ") {
			t.Errorf("the losses are %+v", l)
		}
	})
}

func TestALeaseThatRunsOutCountsAsLost(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.process(mysqllock.Config{})
		dbtest.OK(t, s.acquire(db, "dead", lockctx.Lease(10*time.Minute)).Release()) // so that there is a row
		live := s.acquire(db, "alive", lockctx.Lease(10*time.Minute))
		ghost := func(left time.Duration) {
			t.Helper()
			dbtest.Exec(t, s.root, "UPDATE mysqllock SET owner = 'ghost:1:batch#0123abcd', expires = UTC_TIMESTAMP(6) + INTERVAL ? SECOND WHERE name LIKE '%dead%'", left.Seconds())
		}
		_, srv := s.page(web.Options{})
		stream := watch(t, srv)
		ghost(time.Minute)
		stream.until("the lease is held", func(e event) bool { return e.data.lock("dead") != nil })
		stream.until("it is not renewed", func(e event) bool {
			ghost(3 * time.Second)
			l := e.data.lock("dead")
			return l != nil && l.Remaining < 30_000
		})
		gone := 0
		d := stream.until("it has run out", func(e event) bool {
			switch {
			case e.name != "view" || e.data.lock("dead") != nil:
				gone = 0
			case gone == 3: // on a slow machine the page has missed the moment: it gets another
				ghost(3 * time.Second)
				gone = 0
			default:
				gone++
			}
			return e.data.Losses.Total > 0
		})
		if l := d.Losses; l.Total != 1 || l.Recent[0].Key != "dead" || l.Recent[0].Who != "ghost:1:batch" {
			t.Errorf("the losses are %+v", l)
		}
		dbtest.OK(t, live.Release())
		d = stream.until("the other is given back", func(e event) bool { return e.data.lock("alive") == nil })
		if d.Losses.Total != 1 {
			t.Errorf("the losses are %+v", d.Losses)
		}
	})
}

func TestADeadlockIsCountedInTheView(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, srv := s.page(web.Options{})
		stream := watch(t, srv)
		stream.until("they are counted", func(e event) bool { return e.data.Deadlocks != nil })
		ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
		defer cancel()
		one, other := s.process(mysqllock.Config{Wait: patience}), s.process(mysqllock.Config{Wait: patience})
		take := func(db *sql.DB, first, second string, met *sync.WaitGroup) error {
			return mysqllock.Do(ctx, db, first, func(ctx context.Context) error {
				met.Done()
				met.Wait()
				return mysqllock.Do(ctx, db, second, func(context.Context) error { return nil })
			})
		}
		var met, ended sync.WaitGroup
		met.Add(2)
		var errs [2]error
		ended.Go(func() { errs[0] = take(one, "a", "b", &met) })
		ended.Go(func() { errs[1] = take(other, "b", "a", &met) })
		ended.Wait()
		if (errs[0] == nil) == (errs[1] == nil) {
			t.Fatalf("of two that wait for each other, the answers are %v and %v", errs[0], errs[1])
		}
		stream.until("one more", func(e event) bool { return e.data.Point.D > 0 })
	})
}

// Where the account may not look, the page says what it does not show, and what
// would show it.
func TestThePageSaysWhatItDoesNotShow(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		name := s.Config().DBName
		for _, text := range []string{"CREATE USER %[1]s", "GRANT SELECT, INSERT, UPDATE ON %[1]s.* TO %[1]s"} {
			dbtest.Exec(t, s.root, fmt.Sprintf(text, name))
		}
		t.Cleanup(func() { _, _ = s.root.Exec("DROP USER " + name) })
		s.acquire(s.process(mysqllock.Config{}), "k", lockctx.Lease(10*time.Minute))
		cfg := s.Config().Clone()
		cfg.User = name
		connector, err := mysql.NewConnector(cfg)
		dbtest.OK(t, err)
		db := sql.OpenDB(connector)
		t.Cleanup(func() { db.Close() })
		i, err := inspect.New(db, inspect.Options{})
		dbtest.OK(t, err)
		_, srv := serve(t, i, web.Options{})
		d := watch(t, srv).until("a view", func(e event) bool { return e.name == "view" })
		if d.lock("k") == nil || len(d.Gaps) == 0 || !strings.HasPrefix(d.Gaps[0].Remedy, "GRANT ") || d.Gaps[0].Why == "" {
			t.Errorf("shown are %+v, and the gaps are %+v", d.Locks, d.Gaps)
		}
	})
}

func TestALockIsReleasedOnlyFromThePage(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.root, "CREATE TABLE work (id INT)")
		type release struct {
			by, key string
			holders int
			reason  string
			err     error
		}
		var released atomic.Pointer[release]
		_, srv := s.page(web.Options{AllowRelease: true, Released: func(r *http.Request, l inspect.Lock, reason string, err error) {
			released.Store(&release{r.Header.Get("X-User"), l.Key, len(l.Holders.List), reason, err})
		}})
		stream := watch(t, srv)
		hello := stream.next().data
		if !hello.Release || len(hello.Secret) < 20 {
			t.Fatalf("the page is told %+v", hello)
		}
		post := func(ref string, header ...string) (int, string) {
			t.Helper()
			r, err := http.NewRequest(http.MethodPost, srv.URL+"/page.release", strings.NewReader(`{"ref":"`+ref+`","reason":"it hangs"}`))
			dbtest.OK(t, err)
			r.Header.Set("Sec-Fetch-Site", "same-origin")
			r.Header.Set("Origin", srv.URL)
			r.Header.Set("X-Mysqllock-Secret", hello.Secret)
			r.Header.Set("X-User", "alice")
			for i := 0; i < len(header); i += 2 {
				r.Header.Set(header[i], header[i+1])
			}
			answer, err := srv.Client().Do(r)
			dbtest.OK(t, err)
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			dbtest.OK(t, err)
			return answer.StatusCode, string(body)
		}
		for strategy, option := range strategies {
			key := "the-" + strategy
			holder, hold, granted := s.contend(key, option)
			alive := func() bool { return true }
			if strategy == "row" { // MySQL then tells the neighbour's thread of the lock
				stream.until("the waiter is in the server", func(e event) bool { l := e.data.lock(key); return l != nil && l.Waiting == 1 })
				_, alive = s.SplitPages("mysqllock", s.Name, key)
				stream.next() // of before
			}
			d := stream.until("one waits", func(e event) bool { l := e.data.lock(key); return l != nil && l.Waiting == 1 && len(l.Holders) == 1 })
			ref := d.lock(key).Ref
			for name, test := range map[string]struct {
				want int
				with []string
			}{
				"no secret":           {403, []string{"X-Mysqllock-Secret", ""}},
				"another secret":      {403, []string{"X-Mysqllock-Secret", hello.Secret[1:] + "A"}},
				"another site":        {403, []string{"Sec-Fetch-Site", "cross-site"}},
				"another port":        {403, []string{"Sec-Fetch-Site", "same-site"}},
				"an old browser's":    {403, []string{"Sec-Fetch-Site", "", "Origin", "http://attacker.example"}},
				"a made-up reference": {409, nil},
			} {
				asked := ref
				if test.with == nil {
					asked = strings.Repeat("0", len(ref))
				}
				if code, text := post(asked, test.with...); code != test.want {
					t.Errorf("%s, %s: %d %s", strategy, name, code, text)
				}
			}
			select {
			case err := <-granted:
				t.Fatalf("%s: released by a request that was refused: %v", strategy, err)
			default:
			}
			if r := released.Load(); r != nil {
				t.Errorf("%s: refused, and told of as %+v", strategy, r)
			}
			if code, text := post(ref); code != 200 || !strings.HasPrefix(text, "Released: ") {
				t.Fatalf("%s: %d %s", strategy, code, text)
			}
			if r := released.Swap(nil); r == nil || *r != (release{"alice", key, 1, "it hangs", nil}) {
				t.Errorf("%s: told of as %+v", strategy, r)
			}
			if !alive() {
				t.Fatal("the connection of a neighbour was ended")
			}
			dbtest.OK(t, <-granted)
			// The hold's own context may have ended by now, and database/sql says no more of it.
			if _, err := holder.ExecContext(context.WithoutCancel(hold.Context()), "INSERT INTO work VALUES (1)"); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("%s: the old holder writes: %v", strategy, err)
			} else if strategy == "lease" && !strings.Contains(err.Error(), "it hangs (on the page of locks, from 127.0.0.1:") {
				t.Errorf("the old holder is told %v", err)
			}
			if code, text := post(ref); code != 409 {
				t.Errorf("%s: released again: %d %s", strategy, code, text)
			}
		}
		if code, _ := post(strings.Repeat("x", 5000)); code != 400 {
			t.Errorf("what is too long is answered with %d", code)
		}
	})
}

func TestAReleaseIsRefusedUnlessItIsAllowed(t *testing.T) {
	_, srv := serve(t, nowhere(t), web.Options{})
	answer, err := srv.Client().Post(srv.URL+"/page.release", "application/json", strings.NewReader(`{"ref":"x"}`))
	dbtest.OK(t, err)
	defer answer.Body.Close()
	if body, _ := io.ReadAll(answer.Body); answer.StatusCode != http.StatusForbidden || !strings.Contains(string(body), "AllowRelease") {
		t.Errorf("answered with %s: %s", answer.Status, body)
	}
}

// TestACircleOfWaitsIsToldOfBothLocks, and counted.
func TestACircleOfWaitsIsToldOfBothLocks(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.MariaDB() {
			t.Skip("it does not tell the processes by default")
		}
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		defer waiting.Wait()
		defer cancel()
		process := func(owner string) *sql.DB { return s.process(mysqllock.Config{Owner: owner, TTL: 10 * patience}) }
		option := map[string]lockctx.Option{"a": lockctx.Row(), "b": lockctx.Lease(10 * patience)}
		s.acquire(process("one:1:shopd"), "a", option["a"])
		s.acquire(process("two:2:shopd"), "b", option["b"])
		for owner, key := range map[string]string{"one:1:shopd": "b", "two:2:shopd": "a"} {
			db := process(owner)
			waiting.Go(func() { _, _ = mysqllock.Acquire(ctx, db, key, option[key], lockctx.Wait(4*patience)) })
		}
		_, srv := s.page(web.Options{})
		watch(t, srv).until("the circle is shown", func(e event) bool {
			a, b := e.data.lock("a"), e.data.lock("b")
			return e.data.Circles == 1 && a.Circle && b.Circle && strings.HasPrefix(a.Why, "a circle of waits: ") && a.Why == b.Why
		})
	})
}

// TestThePageShowsTheLastHourOfALock, from the file of a recorder, and of no other's key.
func TestThePageShowsTheLastHourOfALock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		i, err := inspect.New(s.root, inspect.Options{})
		dbtest.OK(t, err)
		path := filepath.Join(t.TempDir(), "locks.jsonl")
		recorder, err := record.New(i, path, 100*time.Millisecond, 1<<20)
		dbtest.OK(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := dbtest.Go(func() error { return recorder.Run(ctx) })
		s.acquire(s.process(mysqllock.Config{Owner: "the holder"}), "k", lockctx.Lease(10*time.Minute))
		s.acquire(s.process(mysqllock.Config{Owner: "another"}), "other", lockctx.Lease(10*time.Minute))
		_, srv := serve(t, i, web.Options{Record: path})
		d := watch(t, srv).until("both are held", func(e event) bool { return e.data.lock("k") != nil && e.data.lock("other") != nil })
		ask := func(id string) (text string) {
			t.Helper()
			answer, err := srv.Client().Get(srv.URL + "/page.history?id=" + id)
			dbtest.OK(t, err)
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			dbtest.OK(t, err)
			return fmt.Sprint(answer.StatusCode, " ", string(body))
		}
		dbtest.Soon(t, "the history has the holder", func() bool { return strings.Contains(ask(d.lock("k").ID), "the holder holds: lease, token") })
		if text := ask(d.lock("k").ID); strings.Contains(text, "another") || !strings.Contains(text, "the recorder began") || !strings.HasPrefix(text, "200 ") {
			t.Errorf("the history is %s", text)
		}
		cancel()
		dbtest.OK(t, <-done)
		dbtest.OK(t, os.Remove(path))
		if text := ask(d.lock("k").ID); !strings.HasPrefix(text, "502 there is no record") {
			t.Errorf("without a file it says %s", text)
		}
		_, plain := serve(t, i, web.Options{})
		answer, err := plain.Client().Get(plain.URL + "/page.history?id=x")
		dbtest.OK(t, err)
		_ = answer.Body.Close()
		dbtest.Equal(t, "without a record it is %d", answer.StatusCode, http.StatusNotFound)
	})
}
