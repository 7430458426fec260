package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestLsAndShowTellTheHolderAndItsQueue: of a key that one holds and five wait for, what is shown
// is what the test knows, for each strategy. MariaDB shows row locks from a copy that it renews
// when nobody has looked for 100 ms, so nobody else may.
func TestLsAndShowTellTheHolderAndItsQueue(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		for strategy, option := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(5 * time.Minute), "advisory": lockctx.Advisory(),
		} {
			t.Run(strategy, func(t *testing.T) {
				s := *s
				s.Database = s.For(t)
				key := "contended-" + strategy
				hold, err := mysqllock.Acquire(context.Background(), s.process("the holder"), key, option)
				dbtest.OK(t, err)
				ctx, cancel := context.WithCancel(context.Background())
				var waiting sync.WaitGroup
				t.Cleanup(func() { cancel(); waiting.Wait(); dbtest.OK(t, hold.Release()) })
				var names []string
				var begun, since []time.Time // between which each has begun to wait
				for i := range 5 {
					names = append(names, fmt.Sprintf("waiter %d", i+1))
					db := s.process(names[i])
					begun = append(begun, time.Now())
					waiting.Go(func() {
						if hold, err := mysqllock.Acquire(ctx, db, key, option, lockctx.Wait(time.Hour)); err == nil {
							_ = hold.Release()
						}
					})
					dbtest.Soon(t, names[i]+" waits", func() bool {
						time.Sleep(150 * time.Millisecond)
						return s.waiters(key) == i+1
					})
					since = append(since, time.Now())
				}
				// Who waits for an advisory lock asks anew now and then, and is not seen for a moment.
				var asked, told time.Time
				var l jsonLock
				dbtest.Soon(t, "ls shows all", func() bool {
					time.Sleep(150 * time.Millisecond)
					asked = time.Now()
					var snap jsonSnapshot
					s.command("ls", "--json").read(&snap)
					told = time.Now()
					i := slices.IndexFunc(snap.Locks, func(l jsonLock) bool { return l.Key == key && l.Strategy == strategy })
					if i < 0 {
						return false
					}
					l = snap.Locks[i]
					return len(l.Waiters) == len(names) && !slices.ContainsFunc(l.Waiters, func(w jsonWaiter) bool { return w.Waited.IsZero() })
				})
				token, _ := l.Token.Get()
				if len(l.Holders) != 1 || l.Holders[0].Program != "the holder" || token != hold.Token() || l.Namespace != s.Name {
					t.Errorf("the holder: %+v", l)
				}
				if lease := strategy == "lease"; (l.Expires != nil) != lease || (l.Remaining > 0) != lease || l.Remaining > ms(5*time.Minute) {
					t.Errorf("the lease: %+v", l)
				}
				var shown []string
				for _, w := range l.Waiters {
					shown = append(shown, w.Program)
					waited, _ := w.Waited.Get() // in all, however often it has asked again since
					if i := slices.Index(names, w.Program); i >= 0 && (waited < ms(asked.Sub(since[i])) || waited > ms(told.Sub(begun[i])) || w.Least != waited) {
						t.Errorf("%s has waited for %v to %v ms: %+v", w.Program, ms(asked.Sub(since[i])), ms(told.Sub(begun[i])), w)
					}
				}
				if !slices.IsSorted(shown) { // nobody has asked again for the row, so that it is the server's queue; of others the longest wait is first
					t.Errorf("in the queue are %v", shown)
				}
				if l.InOrder != (strategy == "row") {
					t.Errorf("that they are in order is %v", l.InOrder)
				}
				if slices.Sort(shown); !slices.Equal(shown, names) {
					t.Errorf("the waiters are %v", shown)
				}
				var out string
				dbtest.Eventually(t, "show has all", func() error {
					out = s.command("show", key).start().must(0)
					for _, want := range append(names, "KEY ", "the holder", "holds", map[bool]string{true: "waits, 5.", false: "waits  "}[strategy == "row"]) {
						if !strings.Contains(out, want) {
							return fmt.Errorf("no %q:\n%s", want, out)
						}
					}
					return nil
				})
				if strings.Contains(out, "\x1b") {
					t.Errorf("show has colours:\n%q", out)
				}
			})
		}
	})
}

// TestAWatchGoesOnWhenTheServerWasGone: it finds keys of any bytes, and with --by-wait the longest
// wait is first.
func TestAWatchGoesOnWhenTheServerWasGone(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		key := "any\x00\xff"
		_, err := mysqllock.Acquire(t.Context(), s.process("holder"), key, lockctx.Lease(5*time.Minute))
		dbtest.OK(t, err)
		if out := s.command("show", "--hex", "0x"+hex.EncodeToString([]byte(key)), "--exit-code").start().must(0); !strings.Contains(out, "holds") {
			t.Errorf("the key in hexadecimal: %s", out)
		}
		s.command("show", "--hex", "xyz").start().fails(1, "hexadecimal")
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		defer func() { cancel(); waiting.Wait() }()
		_, err = mysqllock.Acquire(t.Context(), s.process("holder"), "z", lockctx.Lease(5*time.Minute))
		dbtest.OK(t, err)
		db := s.process("waiter")
		waiting.Go(func() { _, _ = mysqllock.Acquire(ctx, db, "z", lockctx.Lease(5*time.Minute), lockctx.Wait(time.Hour)) })
		dbtest.Soon(t, "it waits", func() bool { return s.waiters("z") == 1 })
		if out := s.command("ls", "--by-wait").start().must(0); strings.Index(out, "\nz ") > strings.Index(out, "--hex 616e7900ff") {
			t.Errorf("the longest wait is not first: %s", out)
		}

		cfg := s.Config()
		there := cfg.Addr
		proxy := dbtest.StartProxy(t, there)
		cfg.Addr = proxy.Addr()
		r, w := io.Pipe()
		defer r.Close()
		waiting.Go(func() {
			_ = (&looking{at: &target{dsn: cfg.FormatDSN()}, json: true, watch: 100 * time.Millisecond}).do(ctx, w)
		})
		in := bufio.NewScanner(r)
		for _, step := range []struct{ server, want string }{{there, `"locks":`}, {"127.0.0.1:1", `"error":`}, {there, `"locks":`}} {
			proxy.TurnTo(step.server)
			for in.Scan() && !strings.Contains(in.Text(), step.want) {
			}
			if !strings.Contains(in.Text(), step.want) {
				t.Fatalf("with %s it ends with %q", step.server, in.Text())
			}
		}
	})
}

// TestASilentServerIsNoCalm: the server does not answer, from the beginning, or in the middle. A command says soon what it waits
// for, and fails. The page and history tell what was before, and since when nothing is known; a caller is told that nobody knows.
func TestASilentServerIsNoCalm(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		s.keep("k", lockctx.Lease(5*time.Minute))
		var commands []*command
		says := make(map[*command]string)
		for _, asks := range []string{"", "FROM `" + s.Name + "`.`mysqllock`"} {
			for _, args := range [][]string{{"ls"}, {"ls", "--top"}, {"show", "k"}, {"release", "k", "--force", "--yes"}, {"doctor"}} {
				cfg := s.Config()
				proxy := dbtest.StartProxy(t, cfg.Addr)
				cfg.Addr = proxy.Addr()
				since := "has not answered since "
				if asks == "" {
					proxy.Block()
					since = "has not answered for "
				} else {
					proxy.BlockAt(asks)
				}
				commands = append(commands, s.command(append(args, "--dsn", cfg.FormatDSN())...).start())
				says[commands[len(commands)-1]] = since
			}
		}
		s.behindSilence()
		for _, c := range commands {
			c.must(exitFailure)
			lines := strings.Split(strings.TrimSpace(c.errs.String()), "\n")
			if len(lines) != 2 || !strings.Contains(lines[0], "127.0.0.1:") || !strings.Contains(lines[0], says[c]) || !strings.Contains(lines[1], says[c]) {
				t.Errorf("%v says %q", c.Args[1:], lines)
			}
		}
	})
}

// behindSilence looks at the tools that have looked before the server fell silent. What a browser shows is in webtest.
func (s *scratch) behindSilence() {
	t := s.T
	t.Helper()
	proxy := dbtest.StartProxy(t, s.Config().Addr)
	ts := newScratch(s.Changed(func(cfg *mysql.Config) { cfg.Net, cfg.Addr = "tcp", proxy.Addr() })).tools(web.Options{})
	dbtest.Soon(t, "the holder is recorded", func() bool { return len(ts.moment(time.Now()).Holders) == 1 })
	if len(ts.view().Locks) != 1 {
		t.Error("the page does not show the holder")
	}
	proxy.Block()
	silent := time.Now()
	_, err := mysqllock.Acquire(t.Context(), ts.asker, "k", lockctx.Lease(5*time.Minute), lockctx.NoWait())
	if !errors.Is(err, mysqllock.ErrNoAnswer) || errors.Is(err, mysqllock.ErrLocked) {
		t.Errorf("a caller is told %v", err)
	}
	dbtest.Says(t, err, "the server has not answered")
	failed := ts.events(func(event string, _ viewed) bool { return event == "failed" })
	if !strings.Contains(failed.Error, "has not answered since "+failed.Since.Format(time.TimeOnly)+" UTC") || failed.Since.After(silent.Add(time.Second)) {
		t.Errorf("the page says %+v of a server that is silent since %v", failed, silent)
	}
	if old := ts.events(func(event string, _ viewed) bool { return event == "hello" }); old.Age < 1 || old.Age < time.Since(silent).Milliseconds()-5000 {
		t.Errorf("what the page shows to who comes later is %d ms old, and the server has been silent for %v", old.Age, time.Since(silent))
	}
	var m record.Moment
	dbtest.Soon(t, "history does not know what is so now", func() bool { m = ts.moment(time.Now()); return !m.Known })
	if !slices.ContainsFunc(m.Around, func(e record.Event) bool {
		return e.What == record.Failed && strings.Contains(e.Text, "has not answered since")
	}) {
		t.Errorf("history does not tell why: %+v", m.Around)
	}
	if m = ts.moment(silent.Add(3 * time.Second)); m.Known { // longer than from one look to the next
		t.Errorf("of a time at which the recorder waited for an answer history tells %+v", m)
	}
}

// TestOutputIsWritten: what could not be written is a failure, and the name of the program is said once.
func TestOutputIsWritten(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		s.command("schema", "apply").start().must(0)
		for _, args := range [][]string{{"ls"}, {"ls", "--top"}, {"ls", "--json"}, {"show", "k"}, {"doctor"}, {"schema", "print"}, {"man"}, {"--help"}} {
			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			if err != nil {
				t.Skip(err)
			}
			c := s.command(args...)
			c.Cmd.Stdout = full
			c.start().fails(exitFailure, "no space left on device")
			full.Close()
		}
		for _, args := range [][]string{{"schema", "check"}, {"schema", "apply"}, {"ls"}} {
			c := s.command(append(args, "--dsn", "root@tcp(127.0.0.1:1)/shop")...)
			c.start().fails(exitFailure, "connect")
			if n := strings.Count(c.errs.String(), "mysqllock: "); n != 1 {
				t.Errorf("%q names the program %d times: %s", args, n, c.errs.String())
			}
		}
	})
}

// TestShowSaysThatAWaiterWasOvertaken: a waiter for a row asks anew after its lockTTL, and is behind one that
// came later.
func TestShowSaysThatAWaiterWasOvertaken(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.keep("k", lockctx.Row())
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		defer waiting.Wait()
		defer cancel()
		for n, ttl := range []time.Duration{5 * time.Second, 10 * time.Minute} {
			db := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{Owner: fmt.Sprint("waiter ", n), TTL: ttl}))
			waiting.Go(func() { _, _ = mysqllock.Acquire(ctx, db, "k", lockctx.Row(), lockctx.Wait(time.Hour)) })
			dbtest.Soon(t, "it waits", func() bool {
				time.Sleep(150 * time.Millisecond) // MariaDB tells from a copy
				return s.waiters("k") == n+1
			})
		}
		dbtest.Soon(t, "the one that came later is the first, and that is said", func() bool {
			time.Sleep(150 * time.Millisecond)
			out := s.command("show", "k").start().must(0)
			said := strings.Contains(out, overtaken)
			first, second := strings.Index(out, "waiter 1"), strings.Index(out, "waiter 0")
			if said && second < first {
				t.Errorf("it says so of\n%s", out)
			}
			return said
		})
	})
}
