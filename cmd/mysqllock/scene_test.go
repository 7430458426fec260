package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// act is what the holder has of a key of the scene, and what the waiter wants of it.
type act struct {
	held, wanted []lockctx.Option
	times        int // the holder has it
}

func acts() map[string]act {
	lease, slots := lockctx.Lease(time.Minute), lockctx.Slots(2)
	same := func(times int, options ...lockctx.Option) act { return act{options, options, times} }
	return map[string]act{
		"row": same(1, lockctx.Row()), "lease": same(1, lease), "advisory": same(1, lockctx.Advisory()),
		"row slots": same(2, slots), "lease slots": same(2, lease, slots),
		"shared": {[]lockctx.Option{lockctx.Shared()}, nil, 2}, "row of a lease": {[]lockctx.Option{lease}, nil, 1},
	}
}

// sceneJobs are the processes of the scene: the holder has all keys until it is told to end, and the
// waiter waits for all. Each says its process id first, and the waiter when it begins to wait. The
// neighbour has used other keys, new ones, whose rows split the index pages of the scene's, and has one.
func sceneJobs() dbtest.Jobs {
	return dbtest.Jobs{
		"player": play,
		"holder": func(db *sql.DB, in *bufio.Scanner) {
			fmt.Println(os.Getpid())
			for key, of := range acts() {
				for range of.times {
					if _, err := mysqllock.Acquire(context.Background(), db, key, of.held...); err != nil {
						fmt.Println(key, err)
						return
					}
				}
			}
			fmt.Println("holds")
			in.Scan()
		},
		"waiter": func(db *sql.DB, in *bufio.Scanner) {
			fmt.Println(os.Getpid())
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			for key, of := range acts() {
				fmt.Println(key + "=" + strconv.FormatInt(time.Now().UnixNano(), 10))
				go func() {
					if _, err := mysqllock.Acquire(ctx, db, key, append(of.wanted, lockctx.Wait(time.Hour))...); ctx.Err() == nil {
						fmt.Println("ended:", key, err)
					}
				}()
			}
			in.Scan()
		},
		"neighbour": func(db *sql.DB, in *bufio.Scanner) {
			var tx *sql.Tx
			for _, near := range []string{"rov~", "row!", "sharec~", "shared!", "own"} { // each key of the scene comes between two
				for n := 0; n < 150 && (near != "own" || n == 0); n++ {
					var err error
					tx, err = db.BeginTx(lockctx.With(context.Background(), fmt.Sprintf("%s%03d", near, n)), nil)
					if err == nil && near != "own" {
						err = tx.Commit()
					}
					if err != nil {
						fmt.Println(err)
						return
					}
				}
			}
			fmt.Println("has split the pages")
			in.Scan()
			_ = tx.Rollback()
		},
	}
}

// told is what a tool says of a key.
type told struct {
	seen         bool // it shows the key at all
	least, known float64
	waiters      []string // who they are; "" is not known
	holders      []string
	nobody       bool // holds it

	heldLeast, held float64 // for how long
	inOrder         bool    // the waiters are in the server's queue
	more            bool    // there may be more of them
	circle          bool    // it is in a circle of waits
	left            float64 // of a lease
	text            string  // in which it says more
}

// tools are those that people on call have.
type tools struct {
	*scratch
	page   *httptest.Server
	record string  // the file that a recorder writes
	asker  *sql.DB // a process that asks for keys
}

// tools has a recorder and a page look at the server.
func (s *scratch) tools(o web.Options) *tools {
	s.T.Helper()
	i, err := inspect.New(s.root, inspect.Options{})
	dbtest.OK(s.T, err)
	page := web.New(i, o)
	ts := &tools{scratch: s, page: httptest.NewServer(page), record: s.file("locks.jsonl"), asker: s.process("asker")}
	s.T.Cleanup(func() { page.Close(); ts.page.Close() })
	s.command("record", "--to", ts.record, "--every", "1s").start()
	return ts
}

// scene is what is known of it.
type scene struct {
	*tools
	holder, waiter string               // how their owners begin
	first, last    map[string]time.Time // when each began to wait, at the earliest and at the latest
	ended          <-chan string        // what the waiter says in the end
	seen           map[string]int       // how often each tool has shown who waits for each key
	twice          map[string]int       // how often it has shown more than the one who waits
	longest        map[string]time.Duration
}

// TestNoToolSaysWhatIsNotSo: of seven keys with a holder and a waiter in processes of their own, beside a neighbour's new keys,
// ls, ls --top, show, the page, history and an error say no wait that is longer than it is, nobody as the holder who is not, and
// not that nobody holds. What they know of a wait is all of it. MYSQLLOCK_TEST_SCENE is for how long the scene lasts.
func TestNoToolSaysWhatIsNotSo(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		lasts := 3 * time.Second
		if long, err := time.ParseDuration(os.Getenv("MYSQLLOCK_TEST_SCENE")); err == nil {
			lasts = long
		}
		sc := s.scene(t)
		tools := map[string]func() map[string]told{
			"ls": sc.all("ls"), "show": sc.all(append([]string{"show"}, slices.Sorted(maps.Keys(acts()))...)...),
			"ls --top": sc.top, "the page": sc.onPage, "history": sc.history,
		}
		for start := time.Now(); time.Since(start) < lasts; time.Sleep(min(lasts/5, 900*time.Millisecond)) {
			for tool, says := range tools {
				sc.look(tool, says)
			}
			sc.ask()
		}
		for tool, says := range tools {
			for key := range acts() {
				dbtest.Soon(t, tool+" shows who waits for "+key, func() bool { // one that asks again may not be seen in a few looks
					if sc.seen[tool+", "+key] == 0 {
						sc.look(tool, says)
					}
					return sc.seen[tool+", "+key] > 0
				})
			}
		}
		select {
		case line := <-sc.ended:
			t.Fatal("the waiter says ", line)
		default:
		}
		var table []string
		for _, what := range slices.Sorted(maps.Keys(sc.longest)) {
			table = append(table, fmt.Sprintf("%-22s %2d looks, up to %v", what, sc.seen[what], sc.longest[what].Round(100*time.Millisecond)))
		}
		t.Log("seen to wait:\n" + strings.Join(table, "\n"))
	})
}

// scene begins it.
func (s *scratch) scene(t *testing.T) *scene {
	dsn := s.DSN("lockTTL=60s") // the holder is not to lose any on a slow machine
	holder := dbtest.StartJob(t, "holder", dsn)
	host, err := os.Hostname()
	dbtest.OK(t, err)
	owner := func(pid string) string { return host + ":" + pid + ":" }
	sc := &scene{
		holder: owner(holder.Line()), first: make(map[string]time.Time), last: make(map[string]time.Time),
		seen: make(map[string]int), twice: make(map[string]int), longest: make(map[string]time.Duration),
	}
	if got := holder.Line(); got != "holds" {
		t.Fatal(got)
	}
	waiter := dbtest.StartJob(t, "waiter", dsn)
	sc.waiter = owner(waiter.Line())
	for range acts() {
		key, when, _ := strings.Cut(waiter.Line(), "=")
		nanos, err := strconv.ParseInt(when, 10, 64)
		dbtest.OK(t, err)
		sc.first[key] = time.Unix(0, nanos)
	}
	sc.ended = waiter.Said()
	sc.tools = s.tools(web.Options{})
	if got := dbtest.StartJob(t, "neighbour", dsn).Line(); got != "has split the pages" {
		t.Fatal(got)
	}
	for _, key := range []string{"row", "shared"} {
		s.MustHaveMoved(key)
	}
	ls := sc.all("ls")
	for key := range acts() {
		dbtest.Soon(t, "somebody waits for "+key, func() bool { return len(ls()[key].waiters) > 0 })
		sc.last[key] = time.Now()
	}
	return sc
}

// look compares what a tool says with the truth.
func (sc *scene) look(tool string, says func() map[string]told) {
	sc.T.Helper()
	from := time.Now()
	all := says()
	to := time.Now()
	for key := range acts() {
		// The clocks measure the same time a little differently.
		const timing = 20
		atLeast, atMost := ms(from.Sub(sc.last[key]))-timing, ms(to.Sub(sc.first[key]))+timing
		is := all[key]
		if is.nobody {
			sc.T.Errorf("%s: nobody holds %s", tool, key)
		}
		if is.known > atMost || is.least > atMost || is.known > 0 && is.known < atLeast {
			sc.T.Errorf("%s: the waiter for %s has waited for %.0f to %.0f ms, and it says %.0f, at least %.0f", tool, key, atLeast, atMost, is.known, is.least)
		}
		for _, who := range is.holders {
			if who != "" && !strings.HasPrefix(who, sc.holder) {
				sc.T.Errorf("%s: %s is held by %s, and it says by %s", tool, key, sc.holder, who)
			}
		}
		for _, who := range is.waiters {
			if who != "" && !strings.HasPrefix(who, sc.waiter) {
				sc.T.Errorf("%s: %s waits for %s, and it says that %s does", tool, sc.waiter, key, who)
			}
		}
		what := tool + ", " + key
		// A snapshot is not of one moment: a waiter that asks again meanwhile is seen twice, which is rare. And the
		// recorder may meet the waiter for the row of a lease on its way from the lease to the row.
		if len(is.waiters) > 1 && (tool != "history" || key != "row of a lease") {
			if sc.twice[what]++; sc.twice[what] > 1 {
				sc.T.Errorf("%s: one waits for %s, and it says %d, not for the first time", tool, key, len(is.waiters))
			}
			dbtest.Soon(sc.T, fmt.Sprintf("%s: one waits for %s, and it said %d", tool, key, len(is.waiters)), func() bool {
				return len(says()[key].waiters) <= 1
			})
		}
		if len(is.waiters) > 0 {
			sc.seen[what]++
		}
		sc.longest[what] = max(sc.longest[what], time.Duration(max(is.least, is.known)*float64(time.Millisecond)))
	}
}

// all is what ls or show says, which shows all keys, or says that it may not.
func (sc *scene) all(args ...string) func() map[string]told {
	return func() map[string]told {
		all, incomplete := sc.listed(args...)
		for key := range acts() {
			// MariaDB's copy of its row locks is made anew only when nobody has read it for 100 ms, and
			// other tests read it.
			stale := sc.MariaDB() && (strings.HasPrefix(key, "row") || key == "shared")
			if !all[key].seen && !incomplete && !stale {
				sc.T.Errorf("%v shows all that is held, and not %s", args, key)
			}
		}
		return all
	}
}

// listed is what ls or show says, and whether it says that there may be more holders.
func (ts *tools) listed(args ...string) (map[string]told, bool) {
	ts.T.Helper()
	var snap jsonSnapshot
	ts.command(append(args, "--json")...).read(&snap)
	all := make(map[string]told)
	for _, l := range snap.Locks {
		is := all[l.Key]
		is.seen, is.inOrder, is.more = true, l.InOrder, l.WaitersIncomplete
		held, known := l.Held.Get()
		is.nobody = is.nobody || known && !held
		for _, h := range l.Holders {
			is.holders = append(is.holders, h.Program)
			is.held, is.heldLeast = max(is.held, h.Since), max(is.heldLeast, h.Least)
		}
		for _, w := range l.Waiters {
			waited, _ := w.Waited.Get()
			is.waiters, is.known, is.least = append(is.waiters, w.Program), max(is.known, waited), max(is.least, w.Least)
		}
		is.circle = slices.ContainsFunc(snap.Circles, func(keys []string) bool { return slices.Contains(keys, l.Key) })
		all[l.Key] = is
	}
	return all, snap.HoldersIncomplete
}

// top is what ls --top says.
func (ts *tools) top() map[string]told {
	ts.T.Helper()
	var top struct{ Classes []jsonHeat }
	ts.command("ls", "--top", "--json").read(&top)
	all := make(map[string]told)
	for _, c := range top.Classes {
		held, known := c.Held.Get()
		waiting, counted := c.Waiting.Get()
		all[c.Class] = told{
			seen: true, least: c.Longest, nobody: known && held == 0, waiters: make([]string, waiting),
			more: c.WaitersIncomplete && (waiting > 0 || !counted),
		}
	}
	return all
}

// history is what the record tells of now.
func (ts *tools) history() map[string]told {
	ts.T.Helper()
	now := time.Now().UTC()
	m := ts.moment(now)
	all := make(map[string]told)
	for _, e := range m.Holders {
		is, lasted := all[e.Key], ms(now.Sub(*e.Since))
		is.seen, is.holders, is.text = true, append(is.holders, e.Program), is.text+e.Activity
		if is.heldLeast = max(is.heldLeast, lasted); !e.Earlier {
			is.held = max(is.held, lasted)
		}
		all[e.Key] = is
	}
	for _, e := range m.Waiters {
		is, lasted := all[e.Key], ms(now.Sub(*e.Since))
		is.seen, is.waiters = true, append(is.waiters, e.Program)
		if is.least = max(is.least, lasted); !e.Earlier {
			is.known = max(is.known, lasted)
		}
		all[e.Key] = is
	}
	return all
}

// moment is what the record tells of a time.
func (ts *tools) moment(at time.Time) (m record.Moment) {
	ts.T.Helper()
	dbtest.Soon(ts.T, "the recorder has looked", func() bool { _, err := os.Stat(ts.record); return err == nil })
	ts.command("history", "--from", ts.record, "--at", at.UTC().Format(time.RFC3339Nano), "--json").read(&m)
	return m
}

// viewed is what the tests look at of a view of the page.
type viewed struct {
	Time  time.Time
	Locks []struct {
		Key                          string
		Holders, Waiters             []viewedClient
		InOrder, Circle, WaitersMore bool
		Why                          string
		Remaining                    float64
	}
	Held, Waiting *int
	Losses        struct {
		Recent []struct{ Key, Strategy, Who, Why string }
	}
	Gaps []struct{ What, Why, Remedy string }

	Error string // of a failure
	Since time.Time
	Age   int64 // of hello: that of the view which follows
}

type viewedClient struct {
	Program                          string
	For, Least, Silent, Overdue, TTL float64
}

// onPage is what the next view of the page of locks says.
func (ts *tools) onPage() map[string]told {
	ts.T.Helper()
	all := make(map[string]told)
	for _, l := range ts.view().Locks {
		is := all[l.Key]
		is.seen, is.inOrder, is.circle, is.more, is.text = true, l.InOrder, l.Circle, l.WaitersMore, l.Why
		is.left = max(is.left, l.Remaining)
		for _, h := range l.Holders {
			is.holders = append(is.holders, h.Program)
			is.held, is.heldLeast = max(is.held, h.For), max(is.heldLeast, h.Least)
			switch {
			case h.Overdue > 0:
				is.text += fmt.Sprintf("not renewed yet, ~%v of %v ms", h.Overdue, h.TTL)
			case h.Silent > 0:
				is.text += fmt.Sprintf("not renewed for %v of %v ms", h.Silent, h.TTL)
			}
		}
		for _, w := range l.Waiters {
			is.waiters, is.known, is.least = append(is.waiters, w.Program), max(is.known, w.For), max(is.least, w.Least)
		}
		all[l.Key] = is
	}
	return all
}

// view is the next view of the page for which it has looked since.
func (ts *tools) view() viewed {
	ts.T.Helper()
	asked := time.Now()
	return ts.events(func(event string, v viewed) bool { return event == "view" && !v.Time.Before(asked) })
}

// events reads those of the page up to the first that is the right one.
func (ts *tools) events(right func(event string, v viewed) bool) viewed {
	t := ts.T
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, ts.page.URL+"/page.events", nil)
	dbtest.OK(t, err)
	answer, err := ts.page.Client().Do(r)
	dbtest.OK(t, err)
	defer answer.Body.Close()
	events := bufio.NewScanner(answer.Body)
	events.Buffer(nil, 10<<20)
	event := ""
	for events.Scan() {
		if name, ok := strings.CutPrefix(events.Text(), "event: "); ok {
			event = name
		}
		text, ok := strings.CutPrefix(events.Text(), "data: ")
		if !ok {
			continue
		}
		var v viewed
		dbtest.OK(t, json.Unmarshal([]byte(text), &v))
		if right(event, v) {
			return v
		}
	}
	t.Fatalf("the page ended: %v", events.Err())
	return viewed{}
}

// ask looks at what callers are told that do not wait.
func (sc *scene) ask() {
	var all sync.WaitGroup
	for key, of := range acts() {
		all.Go(func() {
			_, err := mysqllock.Acquire(sc.T.Context(), sc.asker, key, append(of.wanted, lockctx.NoWait())...)
			var e *mysqllock.Error
			switch {
			case !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLocked):
				sc.T.Errorf("%s: %v", key, err)
			case e.Holder != nil && e.Holder.Program != "" && !strings.HasPrefix(e.Holder.Program, sc.holder):
				sc.T.Errorf("%s is held by %s, and the error says %v", key, sc.holder, e.Holder)
			}
		})
	}
	all.Wait()
}
