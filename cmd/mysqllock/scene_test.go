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
}

// scene is what is known of it.
type scene struct {
	*scratch
	holder, waiter string               // how their owners begin
	first, last    map[string]time.Time // when each began to wait, at the earliest and at the latest
	page           *httptest.Server
	record         string // the file that a recorder writes
	asker          *sql.DB
	ended          <-chan string  // what the waiter says in the end
	seen           map[string]int // how often each tool has shown who waits for each key
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
			"ls": sc.listed("ls"), "show": sc.listed(append([]string{"show"}, slices.Sorted(maps.Keys(acts()))...)...),
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
		scratch: s, holder: owner(holder.Line()), first: make(map[string]time.Time), last: make(map[string]time.Time),
		seen: make(map[string]int), longest: make(map[string]time.Duration), asker: s.process("asker"),
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
	sc.record = s.file("locks.jsonl")
	s.command("record", "--to", sc.record, "--every", "1s").start()
	if got := dbtest.StartJob(t, "neighbour", dsn).Line(); got != "has split the pages" {
		t.Fatal(got)
	}
	for _, key := range []string{"row", "shared"} {
		s.MustHaveMoved(key)
	}
	ls := sc.listed("ls")
	for key := range acts() {
		dbtest.Soon(t, "somebody waits for "+key, func() bool { return len(ls()[key].waiters) > 0 })
		sc.last[key] = time.Now()
	}
	i, err := inspect.New(s.root, inspect.Options{})
	dbtest.OK(t, err)
	page := web.New(i, web.Options{})
	sc.page = httptest.NewServer(page)
	t.Cleanup(func() { page.Close(); sc.page.Close() })
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
		// The recorder may meet who waits for the row of a lease on the way from the lease to the row.
		if len(is.waiters) > 1 && (tool != "history" || key != "row of a lease") {
			sc.T.Errorf("%s: one waits for %s, and it says %d", tool, key, len(is.waiters))
		}
		what := tool + ", " + key
		if len(is.waiters) > 0 {
			sc.seen[what]++
		}
		sc.longest[what] = max(sc.longest[what], time.Duration(max(is.least, is.known)*float64(time.Millisecond)))
	}
}

// listed is what ls or show says.
func (sc *scene) listed(args ...string) func() map[string]told {
	return func() map[string]told {
		var snap jsonSnapshot
		sc.command(append(args, "--json")...).read(&snap)
		all := make(map[string]told)
		for _, l := range snap.Locks {
			is := all[l.Key]
			is.seen = true
			held, known := l.Held.Get()
			is.nobody = is.nobody || known && !held
			for _, h := range l.Holders {
				is.holders = append(is.holders, h.Program)
			}
			for _, w := range l.Waiters {
				waited, _ := w.Waited.Get()
				is.waiters, is.known, is.least = append(is.waiters, w.Program), max(is.known, waited), max(is.least, w.Least)
			}
			all[l.Key] = is
		}
		for key := range acts() {
			// MariaDB's copy of its row locks is made anew only when nobody has read it for 100 ms, and
			// other tests read it.
			stale := sc.MariaDB() && (strings.HasPrefix(key, "row") || key == "shared")
			if !all[key].seen && !snap.HoldersIncomplete && !stale {
				sc.T.Errorf("%v shows all that is held, and not %s", args, key)
			}
		}
		return all
	}
}

// top is what ls --top says.
func (sc *scene) top() map[string]told {
	var top struct{ Classes []jsonHeat }
	sc.command("ls", "--top", "--json").read(&top)
	all := make(map[string]told)
	for _, c := range top.Classes {
		held, known := c.Held.Get()
		waiting, _ := c.Waiting.Get()
		all[c.Class] = told{least: c.Longest, nobody: known && held == 0, waiters: make([]string, waiting)}
	}
	return all
}

// history is what the record tells of now.
func (sc *scene) history() map[string]told {
	var m record.Moment
	now := time.Now().UTC()
	dbtest.Soon(sc.T, "the recorder has looked", func() bool { _, err := os.Stat(sc.record); return err == nil })
	sc.command("history", "--from", sc.record, "--at", now.Format(time.RFC3339Nano), "--json").read(&m)
	all := make(map[string]told)
	for _, e := range m.Holders {
		is := all[e.Key]
		is.seen, is.holders = true, append(is.holders, e.Program)
		all[e.Key] = is
	}
	for _, e := range m.Waiters {
		is, lasted := all[e.Key], ms(now.Sub(*e.Since))
		is.waiters = append(is.waiters, e.Program)
		if is.least = max(is.least, lasted); !e.Earlier {
			is.known = max(is.known, lasted)
		}
		all[e.Key] = is
	}
	return all
}

// onPage is what the next view of the page of locks says.
func (sc *scene) onPage() map[string]told {
	t := sc.T
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, sc.page.URL+"/page.events", nil)
	dbtest.OK(t, err)
	answer, err := sc.page.Client().Do(r)
	dbtest.OK(t, err)
	defer answer.Body.Close()
	type client struct {
		Program    string
		For, Least float64
	}
	events := bufio.NewScanner(answer.Body)
	events.Buffer(nil, 10<<20)
	asked := time.Now()
	for events.Scan() {
		text, ok := strings.CutPrefix(events.Text(), "data: ")
		var view struct {
			Point struct{ T int64 }
			Locks []struct {
				Key              string
				Holders, Waiters []client
			}
		}
		if !ok || json.Unmarshal([]byte(text), &view) != nil || view.Point.T < asked.UnixMilli() { // hello, or the view before
			continue
		}
		all := make(map[string]told)
		for _, l := range view.Locks {
			is := all[l.Key]
			for _, h := range l.Holders {
				is.holders = append(is.holders, h.Program)
			}
			for _, w := range l.Waiters {
				is.waiters, is.known, is.least = append(is.waiters, w.Program), max(is.known, w.For), max(is.least, w.Least)
			}
			all[l.Key] = is
		}
		return all
	}
	t.Fatalf("the page ended: %v", events.Err())
	return nil
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
