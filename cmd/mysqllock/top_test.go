package main

import (
	"context"
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestWhatAnAccountCannotSeeIsNotNobody: to no account does a tool say that nobody holds a key, or
// waits for one, if it cannot see that. Each of the keys is held and waited for.
func TestWhatAnAccountCannotSeeIsNotNobody(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		ctx, cancel := context.WithCancel(context.Background())
		var waiting sync.WaitGroup
		defer waiting.Wait()
		defer cancel()
		keys := map[string]lockctx.Option{"the-row": lockctx.Row(), "the-lease": lockctx.Lease(time.Minute), "the-advisory": lockctx.Advisory()}
		for key, option := range keys {
			s.keep(key, option)
			db := s.process("the waiter")
			waiting.Go(func() {
				if h, err := mysqllock.Acquire(ctx, db, key, option, lockctx.Wait(time.Hour)); err == nil {
					_ = h.Release()
				}
			})
			dbtest.Soon(t, "one waits for "+key, func() bool {
				time.Sleep(150 * time.Millisecond)
				return s.waiters(key) == 1
			})
		}
		for n, grant := range []string{"EXECUTE ON " + s.Name + ".*", "SELECT ON " + s.Name + ".*", "SELECT, INSERT, UPDATE ON " + s.Name + ".*", "PROCESS ON *.*", "SELECT ON performance_schema.*"} {
			user := fmt.Sprint("u", n, "_", s.Name)
			dbtest.Exec(t, s.root, "CREATE USER "+user)
			t.Cleanup(func() { dbtest.Exec(t, s.root, "DROP USER "+user) })
			dbtest.Exec(t, s.root, "GRANT EXECUTE ON "+s.Name+".* TO "+user) // to be let in
			dbtest.Exec(t, s.root, "GRANT "+grant+" TO "+user)
			cfg := s.Config()
			cfg.User = user
			command := func(args ...string) *command { return s.command(append(args, "--dsn", cfg.FormatDSN())...).start() }
			for key := range keys {
				c := command("show", key, "--exit-code")
				if code := c.code(); code != 0 && code != exitNotKnown || nobody(c.out.String()) {
					t.Errorf("%s: show %s ends with %d and says\n%s", grant, key, code, c.out.String())
				}
			}
			for line := range strings.Lines(command("ls", "--top").must(0)) {
				if words := strings.Fields(line); strings.HasPrefix(line, "the-") && slices.Contains(words, "0") {
					t.Errorf("%s: ls --top says %s", grant, line)
				}
			}
			if out := command("ls").must(0); nobody(out) {
				t.Errorf("%s: ls says\n%s", grant, out)
			}
			s.calmTo(user, grant)
		}
	})
}

// calmTo fails the test if the page or history tells an account that nobody holds a key, or waits for one.
func (s *scratch) calmTo(user, grant string) {
	t := s.T
	t.Helper()
	i, err := inspect.New(s.OpenDB(s.Connector(dbtest.As(user)), nil), inspect.Options{})
	dbtest.OK(t, err)
	page := web.New(i, web.Options{})
	ts := &tools{scratch: s, page: httptest.NewServer(page)}
	defer func() { page.Close(); ts.page.Close() }()
	v := ts.view()
	if v.Held != nil && *v.Held == 0 || v.Waiting != nil && *v.Waiting == 0 || len(v.Locks) < 3 && len(v.Gaps) == 0 {
		t.Errorf("%s: the page says %+v", grant, v)
	}
	path := s.file(user + ".jsonl")
	recorder, err := record.New(i, path, time.Second, 1<<20)
	dbtest.OK(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := dbtest.Go(func() error { return recorder.Run(ctx) })
	defer func() { cancel(); dbtest.OK(t, <-ended) }()
	var m *record.Moment
	dbtest.Soon(t, "it is recorded", func() bool {
		m, err = record.At(path, time.Now(), time.Minute, "")
		return err == nil && m.Known
	})
	var out strings.Builder
	printMoment(&out, m, nil)
	if len(m.Holders) < 3 && !strings.Contains(out.String(), "not seen: ") {
		t.Errorf("%s: history says\n%s", grant, out.String())
	}
}

// nobody reports that locks are said to be nobody's.
func nobody(out string) bool {
	out, _, _ = strings.Cut(out, "not shown: ")
	return strings.Contains(strings.ToLower(out), "nobody")
}

// TestTopTellsLocksByTheClassOfTheirKeys: those for which somebody waits come first.
func TestTopTellsLocksByTheClassOfTheirKeys(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		hold := func(key string, options ...lockctx.Option) {
			h, err := mysqllock.Acquire(context.Background(), s.process("the holder"), key, options...)
			dbtest.OK(t, err)
			t.Cleanup(func() { dbtest.OK(t, h.Release()) })
		}
		for _, key := range []string{"a:1", "a:2", "b:1", "c"} {
			hold(key, lockctx.Advisory())
		}
		for range 2 {
			hold("s", lockctx.Lease(5*time.Minute), lockctx.Slots(2))
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		db := s.process("the waiter")
		go func() {
			defer close(done)
			if h, err := mysqllock.Acquire(ctx, db, "b:1", lockctx.Advisory(), lockctx.Wait(time.Hour)); err == nil {
				_ = h.Release()
			}
		}()
		t.Cleanup(func() { cancel(); <-done })
		var snap struct {
			Locks   []jsonLock
			Classes []jsonHeat
		}
		dbtest.Soon(t, "the waiter is shown", func() bool {
			s.command("ls", "--json", "--top", "--class", "a:*,b:*").read(&snap)
			return slices.ContainsFunc(snap.Classes, func(h jsonHeat) bool { n, _ := h.Waiting.Get(); return n > 0 })
		})
		if snap.Classes[0].Longest <= 0 {
			t.Errorf("the longest wait is of %v ms", snap.Classes[0].Longest)
		}
		snap.Classes[0].Longest = 0
		n, none := inspect.Value[int], inspect.Known[int]{}
		if want := []jsonHeat{{"b:*", n(1), n(1), n(1), 0, true}, {"other", n(3), n(3), none, 0, true}, {"a:*", n(2), n(2), none, 0, true}}; !slices.Equal(snap.Classes, want) || snap.Locks != nil {
			t.Errorf("the classes are %+v, want %+v", snap, want)
		}
		var lines []string
		dbtest.Soon(t, "the waiter is shown to people", func() bool { // it asks anew now and then
			lines = strings.Split(strings.TrimSpace(s.command("ls", "--top").start().must(0)), "\n")
			return len(lines) > 5 && strings.Contains(lines[1], "the holder")
		})
		for i, want := range []string{"KEYS LOCKS HELD WAITING LONGEST WAIT FOR", "b:1 1 1 ≥ 1", "s 2 2 ≥ 0", "a:1 1 1 ≥ 0", "a:2 1 1 ≥ 0", "c 1 1 ≥ 0"} {
			if got := strings.Join(strings.Fields(lines[i]), " "); !strings.HasPrefix(got, want) {
				t.Errorf("line %d is %q, want %q", i, got, want)
			}
		}
		if !slices.ContainsFunc(lines, func(line string) bool { return line == ownLines }) {
			t.Errorf("what is not counted is not said: %q", lines)
		}
		s.command("ls", "--class", "a:*").start().fails(exitFailure, "--top")
	})
}

// TestNobodyIsToldThatNobodyWaitsBehindACrashedHolder: the first waiter behind its lease waits for nothing in the
// server, so MariaDB does not show it by default.
func TestNobodyIsToldThatNobodyWaitsBehindACrashedHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		holder := s.hold("holder", "k", "--ttl", "10m")
		dbtest.Equal(t, "it says %q", s.says("holder"), "1\n")
		waiter := s.command("hold", "--wait", "1h", "k").start()
		dbtest.Soon(t, "it waits", func() bool { return s.waiters("k") == 1 })
		dbtest.OK(t, holder.Process.Kill())
		if s.MariaDB() {
			dbtest.Soon(t, "it waits for nothing in the server", func() bool { return s.waiters("k") == 0 })
		}
		var snap struct {
			WaitersIncomplete bool `json:"waiters_incomplete"`
			Classes           []jsonHeat
		}
		s.command("ls", "--top", "--json").read(&snap)
		if len(snap.Classes) != 1 || snap.Classes[0].Waiting == inspect.Value(0) || !snap.Classes[0].WaitersIncomplete || !snap.WaitersIncomplete {
			t.Errorf("ls --top --json says %+v", snap)
		}
		lines := strings.Split(s.command("ls", "--top").start().must(0), "\n")
		column := strings.Index(lines[0], "WAITING")
		if cells := []rune(lines[1]); string(cells[0]) != "k" || !strings.HasPrefix(string(cells[column:]), "≥ ") {
			t.Errorf("ls --top says %q", lines)
		}
		dbtest.OK(t, waiter.Process.Signal(syscall.SIGTERM))
		waiter.must(exitSignal + int(syscall.SIGTERM))
	})
}

// TestTopTellsBoundsOfWaits: where one that is not seen may have waited for longer. Who waits for a slot waits for any.
func TestTopTellsBoundsOfWaits(t *testing.T) {
	lock := inspect.Lock{
		Strategy: "lease", Key: "export", Slot: 1, Slotted: true, Stripe: -1, Holders: held(inspect.Holder{Client: inspect.Client{Program: "batch"}}),
		Waiters: inspect.Seen[inspect.Waiter]{List: []inspect.Waiter{{Least: time.Second, Waited: inspect.Value(time.Second)}}, More: true},
	}
	snap := &inspect.Snapshot{Locks: []inspect.Lock{lock}}
	var b strings.Builder
	printTop(&b, false, 0, snap, nil)
	if want := "export  1      1     ≥ 1      ≥ 1s          batch, and the other slots"; !strings.Contains(b.String(), want) {
		t.Errorf("no %q in\n%s", want, b.String())
	}
	b.Reset()
	printLocks(&b, false, 0, snap, false, false)
	for _, want := range []string{"export [slot 1]    lease            holds", "export [any slot]  lease            waits"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	for what, want := range map[string]string{record.Holds: "export [slot 1]", record.WaitsUnseen: "export [any slot]"} {
		dbtest.Equal(t, "history calls it %s", nameOf(record.Event{What: what, Key: "export", Slot: &lock.Slot}), want)
	}
	snap.Locks[0].Slotted, snap.Locks[0].Waiters.More = false, false
	b.Reset()
	printTop(&b, false, 0, snap, nil)
	if want := "export  1      1     1        1s            batch\n"; !strings.Contains(b.String(), want) {
		t.Errorf("no %q in\n%s", want, b.String())
	}
}
