package web_test

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"flag"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// What a browser shows is in the module webtest.

func TestMain(m *testing.M) {
	flag.Parse()
	_ = flag.Set("test.parallel", "16") // they mostly wait
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// patience is how long something may take that is certain to happen: it is for
// machines that are busy.
const patience = 60 * time.Second

// scratch is a database on a server.
type scratch struct {
	*dbtest.Database
	root *sql.DB
}

func newScratch(d *dbtest.Database) *scratch { return &scratch{Database: d, root: d.Open("mysql")} }

// process opens a handle with locks.
func (s *scratch) process(c mysqllock.Config) *sql.DB {
	s.T.Helper()
	return s.OpenDB(mysqllock.NewConnector(s.Config(), c))
}

// acquire takes a lock, to be given back at the end.
func (s *scratch) acquire(db *sql.DB, key string, opts ...lockctx.Option) *mysqllock.Hold {
	s.T.Helper()
	hold, err := mysqllock.Acquire(context.Background(), db, key, opts...)
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { _ = hold.Release() })
	return hold
}

// page is a Handler that is served.
func (s *scratch) page(o web.Options) (*web.Handler, *httptest.Server) {
	s.T.Helper()
	i, err := inspect.New(s.root, inspect.Options{})
	dbtest.OK(s.T, err)
	return serve(s.T, i, o)
}

func serve(t testing.TB, i *inspect.Inspector, o web.Options) (*web.Handler, *httptest.Server) {
	page := web.New(i, o)
	srv := httptest.NewServer(page)
	t.Cleanup(func() {
		page.Close()
		srv.Close()
	})
	return page, srv
}

// nowhere is an Inspector of a server that there is none.
func nowhere(t *testing.T) *inspect.Inspector {
	t.Helper()
	db, err := sql.Open("mysql", "root:secret@tcp(127.0.0.1:1)/shop")
	dbtest.OK(t, err)
	t.Cleanup(func() { db.Close() })
	i, err := inspect.New(db, inspect.Options{})
	dbtest.OK(t, err)
	return i
}

// event is one of a stream.
type event struct {
	name string
	data data
}

// data is what the tests look at of what the page is told.
type data struct {
	Release bool
	Secret  string
	Seen    bool
	History []json.RawMessage
	Age     int64
	Error   string

	Namespace string
	Locks     []lock
	Unshown   int
	Held      int
	Waiting   int
	Longest   int64
	Deadlocks *uint64
	Circles   int
	Losses    struct {
		Total  uint64
		Since  int64
		Recent []struct{ Key, Strategy, Who, Why string }
	}
	Gaps  []struct{ What, Why, Remedy string }
	Point struct {
		T, W, N, D int64
	}
}

type lock struct {
	ID, Ref, Strategy, Key string
	Remaining              int64
	Token                  uint64
	Nameless, Releasable   bool
	Circle                 bool
	Why                    string
	Waiting                int
	Holders, Waiters       []struct {
		Program, User string
		Conn          uint64
		For, Least    int64
	}
}

func (d data) lock(key string) *lock {
	for _, l := range d.Locks {
		if l.Key == key {
			return &l
		}
	}
	return nil
}

// stream is one of events that is read.
type stream struct {
	t    *testing.T
	body *bufio.Scanner
	stop func()
}

func watch(t *testing.T, srv *httptest.Server) *stream {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, srv.URL+"/page.events", nil)
	dbtest.OK(t, err)
	answer, err := srv.Client().Do(r)
	dbtest.OK(t, err)
	if answer.StatusCode != http.StatusOK || answer.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("the stream is %s, %v", answer.Status, answer.Header)
	}
	s := &stream{t, bufio.NewScanner(answer.Body), func() { cancel(); _ = answer.Body.Close() }}
	s.body.Buffer(nil, 10<<20)
	t.Cleanup(s.stop)
	return s
}

// next returns the next event; one without a name where the stream has ended.
func (s *stream) next() (e event) {
	s.t.Helper()
	for s.body.Scan() {
		line := s.body.Text()
		if name, ok := strings.CutPrefix(line, "event: "); ok {
			e.name = name
		} else if text, ok := strings.CutPrefix(line, "data: "); ok {
			if err := json.Unmarshal([]byte(text), &e.data); err != nil {
				s.t.Fatalf("%q: %v", text, err)
			}
		} else if line == "" {
			return e
		}
	}
	if err := s.body.Err(); err != nil {
		s.t.Errorf("the stream did not end, but broke off: %v", err)
	}
	return event{}
}

// until reads events until one satisfies cond.
func (s *stream) until(what string, cond func(event) bool) data {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; {
		e := s.next()
		if e.name == "" || time.Now().After(deadline) {
			s.t.Fatalf("not within %v, or before the stream has ended: %s", patience, what)
		}
		if cond(e) {
			return e.data
		}
	}
}
