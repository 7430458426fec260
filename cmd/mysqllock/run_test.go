package main

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestRunPassesOutputAndStatusThrough: it is what a new user tries.
func TestRunPassesOutputAndStatusThrough(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		c := s.command("run", "--key", "report", "--", "sh", "-c", `cat; echo "$MYSQLLOCK_KEY $MYSQLLOCK_TOKEN ${MYSQLLOCK_SLOT-none}"; echo bad >&2; exit 7`)
		c.Stdin = strings.NewReader("what it reads\n")
		if out := c.start().must(7); out != "what it reads\nreport 1 none\n" || c.errs.String() != "bad\n" {
			t.Errorf("it wrote %q and %q", out, c.errs.String())
		}
		dbtest.Equal(t, "the second token is %q", s.command("run", "-k", "report", "--", "printenv", "MYSQLLOCK_TOKEN").start().must(0), "2\n")
		if out := s.command("run", "-k", "slots", "--slots", "3", "--", "printenv", "MYSQLLOCK_SLOT").start().must(0); !strings.Contains("0\n1\n2\n", out) || len(out) != 2 {
			t.Errorf("the slot is %q", out)
		}
		var snap jsonSnapshot
		s.command("run", "-k", "long", "--dsn", s.DSN("lockTTL=10m"), "--", os.Args[0], "show", "long", "--json").read(&snap)
		if len(snap.Locks) != 1 || snap.Locks[0].Remaining < ms(5*time.Minute) {
			t.Errorf("the lease is not as long as the DSN says: %+v", snap)
		}
		// What follows the command is its own.
		dbtest.Equal(t, "it echoed %q", s.command("run", "-k", "report", "echo", "--wait", "-n").start().must(0), "--wait -n\n")
	})
}

func TestRunSaysByItsStatusWhatWentWrong(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		dbtest.OK(t, os.WriteFile(s.file("text"), []byte("no program"), 0o755))
		dbtest.OK(t, os.WriteFile(s.file("private"), nil, 0o644))
		hold, err := mysqllock.Acquire(t.Context(), s.process("somebody"), "taken", lockctx.Lease(time.Minute))
		dbtest.OK(t, err)
		defer func() { dbtest.OK(t, hold.Release()) }()

		s.command("run", "-k", "k", "--", "sh", "-c", "kill -KILL $$").start().must(128 + 9)
		for _, code := range []int{1, 2, 3, 7, 125, 255} { // the command's own, also where mysqllock has a meaning for it
			s.command("run", "--ttl", "1m", "k", "--", "sh", "-c", fmt.Sprintf(`test "$MYSQLLOCK_KEY" = k && exit %d`, code)).start().must(code)
		}
		for _, c := range []struct {
			code int
			says string
			args []string
		}{
			{127, "no-such-command: command not found", []string{"-k", "k", "--", "no-such-command"}},
			{127, "./nothing: command not found", []string{"-k", "k", "--", "./nothing"}},
			{126, "private", []string{"-k", "k", "--", "./private"}},
			{126, "text", []string{"-k", "k", "--", "./text"}},
			{125, "no command", []string{"-k", "k"}},
			{125, "key", []string{"--", "true"}},
			{125, "unknown flag", []string{"-k", "k", "--bogus", "--", "true"}},
			{125, "none of the others can be", []string{"-k", "k", "-n", "--wait", "1s", "--", "true"}},
			{125, "--ttl", []string{"-k", "k", "--lease", "10ms", "--", "true"}},
			{125, "--ttl", []string{"--ttl", "10ms", "k", "--", "true"}},
			{125, "-- is missing", []string{"k", "true"}},
			{125, "no command is given", []string{"k", "--"}},
			{125, "255", []string{"-k", strings.Repeat("k", 256), "--", "true"}},
			{125, "--conflict-exit-code", []string{"-k", "k", "-E", "256", "--", "true"}},
			{125, "refused", []string{"--dsn", "root:secret@tcp(127.0.0.1:1)/x", "-k", "k", "--", "true"}},
			{124, "held by somebody", []string{"-k", "taken", "--no-wait", "--", "true"}},
			{124, "waited", []string{"-k", "taken", "--wait", "100ms", "--", "true"}},
			{0, "held by somebody", []string{"-k", "taken", "-n", "-E", "0", "--", "touch", "ran"}},
			{1, "held by somebody", []string{"-k", "taken", "-n", "-E", "1", "--", "touch", "ran"}},
		} {
			s.refused(c.code, c.says, append([]string{"run"}, c.args...)...)
		}
		if c := s.command("run", "-k", "taken", "-n", "-q", "--", "touch", "ran").start(); c.must(124) != "" || c.errs.Len() > 0 {
			t.Errorf("--quiet says %s", c.errs.String())
		}
		if lines := lines(t, s.file("ran")); lines != nil {
			t.Error("the command ran without the lock")
		}
	})
}

// script is a command for run that writes to files in $DIR.
func script(text string) []string { return []string{"--", "sh", "-c", "cd $DIR; " + text} }

func (s *scratch) run(key, text string, flags ...string) *command {
	return s.command(append(append([]string{"run", "--key", key}, flags...), script(text)...)...)
}

func TestTheSecondWaitsAndHasAGreaterToken(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		first := s.run("k", "echo first >>log; until [ -e go ]; do sleep 0.05; done; echo end >>log").start()
		dbtest.Soon(t, "the first runs", func() bool { return len(lines(t, s.file("log"))) == 1 })
		second := s.run("k", "echo second $MYSQLLOCK_TOKEN >>log", "--wait", "1h").start()
		dbtest.Soon(t, "the second waits", func() bool { return s.waiters("k") == 1 })
		dbtest.OK(t, os.WriteFile(s.file("go"), nil, 0o644))
		first.must(0)
		second.must(0)
		dbtest.Equal(t, "the order is %s", strings.Join(lines(t, s.file("log")), ","), "first,end,second 2")
	})
}

// waiters is how many "ls" sees wait for key.
func (s *scratch) waiters(key string) int {
	var snap jsonSnapshot
	s.command("show", key, "--json").read(&snap)
	n := 0
	for _, l := range snap.Locks {
		n += len(l.Waiters)
	}
	return n
}

func TestALineOfTwentyCrontabsRunsOnce(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		var all []*command
		for range 20 {
			all = append(all, s.run("nightly", "echo ran >>log", "--no-wait", "-qE", "0", "--min-hold", "10m").start())
		}
		for _, c := range all {
			if c.must(0); c.errs.Len() > 0 {
				t.Errorf("one says %s", c.errs.String())
			}
		}
		dbtest.Equal(t, "it ran %d times", len(lines(t, s.file("log"))), 1)
		if out := s.command("ls").start().must(0); !strings.Contains(out, "given back, kept until ") {
			t.Errorf("ls does not say that the key is kept:\n%s", out)
		}
		s.refused(exitNotAcquired, ", which has given it back: it is kept for its MinHold", "run", "-n", "nightly", "--", "true")
	})
}

// family is a command that writes down its process and that of a child of its, and
// goes on until it is killed.
const family = "sleep 1000 & echo $$ $! >pids; wait"

func (s *scratch) family() []string {
	var pids []string
	dbtest.Soon(s.T, "the command runs", func() bool {
		if l := lines(s.T, s.file("pids")); len(l) == 1 {
			pids = strings.Fields(l[0])
		}
		return len(pids) == 2
	})
	time.Sleep(2 * time.Second) // its guard is told of it right after its start, which nobody can see
	return pids
}

// TestTheCommandDiesWithAKilledRun: so does all of its group, and the next has the lock when the
// lease is over.
func TestTheCommandDiesWithAKilledRun(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		first := s.run("k", family, "--lease", "12s").start()
		pids := s.family()
		dbtest.OK(t, first.Process.Kill())
		for _, pid := range pids {
			dbtest.Soon(t, "process "+pid+" is gone", func() bool { return !alive(pid) })
		}
		dbtest.Equal(t, "the next has token %q", s.run("k", "echo $MYSQLLOCK_TOKEN", "--wait", "5m").start().must(0), "2\n")
	})
}

// TestSignalsReachTheCommandOrItsWholeGroup: those that would end it reach the group, those that
// tell it something itself alone; and they end the wait for the lock.
func TestSignalsReachTheCommandOrItsWholeGroup(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		text := "trap 'echo USR1 >>log' USR1; trap 'echo USR2 >>log' USR2; trap 'echo HUP >>log' HUP; trap 'echo TERM >>log; exit 3' TERM;" +
			" sh -c \"trap '' HUP; trap 'echo child >>log; exit' TERM; echo ready >>log; while :; do sleep 0.05; done\" & while :; do wait; done"
		c := s.run("k", text).start()
		n := 0
		wrote := func(what string) {
			t.Helper()
			dbtest.Soon(t, "it has got "+what, func() bool {
				l := lines(t, s.file("log"))
				return len(l) > n && strings.Contains(strings.Join(l[n:], ","), what)
			})
			n = len(lines(t, s.file("log")))
		}
		wrote("ready")
		for _, sig := range []syscall.Signal{syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGHUP} {
			dbtest.OK(t, c.Process.Signal(sig))
			wrote(map[syscall.Signal]string{syscall.SIGUSR1: "USR1", syscall.SIGUSR2: "USR2", syscall.SIGHUP: "HUP"}[sig])
		}
		waiting := s.run("k", "echo never", "--wait", "1h").start()
		dbtest.Soon(t, "another waits", func() bool { return s.waiters("k") == 1 })
		dbtest.OK(t, waiting.Process.Signal(syscall.SIGTERM))
		dbtest.Equal(t, "who waited wrote %q", waiting.must(128+15), "")
		dbtest.Soon(t, "nobody waits", func() bool { return s.waiters("k") == 0 })
		dbtest.OK(t, c.Process.Signal(syscall.SIGTERM))
		c.must(3)
		wrote("child")

		c = s.run("k", "echo again >>log; exec sleep 1000").start()
		wrote("again")
		dbtest.OK(t, c.Process.Signal(os.Interrupt))
		c.must(128 + 2)
	})
}

// TestALeaseOutlivesItsServer: what runs under it does not notice.
func TestALeaseOutlivesItsServer(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.run("k", "echo runs >>log; until [ -e go ]; do sleep 0.05; done", "--lease", "2m").start()
		dbtest.Soon(t, "it runs", func() bool { return len(lines(t, s.file("log"))) == 1 })
		dbtest.OK(t, s.Server.Kill())
		dbtest.OK(t, s.Server.Restart(context.Background()))
		s.run("k", "echo too early >>log", "--no-wait").start().must(124)
		dbtest.OK(t, os.WriteFile(s.file("go"), nil, 0o644))
		c.must(0)
		dbtest.Equal(t, "the next has token %q", s.run("k", "echo $MYSQLLOCK_TOKEN", "--wait", "5m").start().must(0), "2\n")
	})
}

// TestWhoCannotRenewStopsItsCommandInTime: before another gets the lock, by force where the command
// does not listen.
func TestWhoCannotRenewStopsItsCommandInTime(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		p := dbtest.StartProxy(t, s.Config().Addr)
		cfg := s.Config()
		cfg.Addr = p.Addr()
		lost := s.run("k", family, "--lease", "20s", "--dsn", cfg.FormatDSN()).start()
		deaf := s.run("deaf", "trap '' TERM; echo deaf >>log; while :; do sleep 0.05; done", "--lease", "8s", "--dsn", cfg.FormatDSN()).start()
		pids := s.family()
		dbtest.Soon(t, "both run", func() bool { return len(lines(t, s.file("log"))) == 1 })
		p.Block()
		next := s.run("k", fmt.Sprintf("for p in %s; do grep -s '^State:.[^Z]' /proc/$p/status >>log; done; echo next >>log", strings.Join(pids, " ")), "--wait", "5m").start()
		lost.fails(exitLost, "lost")
		deaf.fails(exitLost, "the command was stopped")
		next.must(0)
		dbtest.Equal(t, "the log says %s", strings.Join(lines(t, s.file("log")), ","), "deaf,next")
	})
}

// TestATakenLeaseStopsTheCommand: it was taken away by force. What the command leaves of its group
// is stopped, too.
func TestATakenLeaseStopsTheCommand(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		c := s.run("k", "sh -c 'trap \"\" TERM; echo >deaf; while :; do sleep 0.05; done' & until [ -e deaf ]; do sleep 0.05; done; echo $$ $! >pids; wait", "--lease", "18s").start()
		pids := s.family()
		s.command("release", "k", "--force", "--yes").start().must(0)
		c.fails(exitLost, `mysqllock: lock "k"`)
		for _, pid := range pids {
			if alive(pid) {
				t.Errorf("process %s goes on", pid)
			}
		}
	})
}

// TestALateStopLeavesTheCommandNoTime: where mysqllock could not watch the lease, its command
// cannot end in order when somebody else can have the lock.
func TestALateStopLeavesTheCommandNoTime(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		c := s.run("k", "trap 'echo late >>log' TERM; echo runs >>log; while :; do sleep 0.02; done", "--lease", "15s").start()
		dbtest.Soon(t, "it runs", func() bool { return len(lines(t, s.file("log"))) == 1 })
		dbtest.OK(t, c.Process.Signal(syscall.SIGSTOP))
		s.run("k", "echo next >>log", "--wait", "5m").start().must(0)
		dbtest.OK(t, c.Process.Signal(syscall.SIGCONT))
		c.fails(exitLost, "the command was stopped")
		dbtest.Equal(t, "the log says %s", strings.Join(lines(t, s.file("log")), ","), "runs,next")
	})
}

// TestShowTellsOfALeaseThatIsNotRenewed: while it lasts and after.
func TestShowTellsOfALeaseThatIsNotRenewed(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		c := s.run("k", "echo runs >>log; while :; do sleep 0.02; done", "--lease", "12s").start()
		dbtest.Soon(t, "it is renewed", func() bool { return strings.Contains(s.command("show", "k", "--json").start().must(0), `"renewed_ms"`) })
		dbtest.OK(t, c.Process.Signal(syscall.SIGSTOP))
		says := func(what string, args ...string) {
			t.Helper()
			pattern, text := regexp.MustCompile(what), ""
			dbtest.Soon(t, what, func() bool { text = s.command(args...).start().must(0); return pattern.MatchString(text) })
		}
		says(`holds, not renewed for \S+s \(TTL 12s\)(?s:.*)its lease was not renewed when that was due: the program has ended, is frozen,`, "show", "k")
		says(`nobody\s+the lease of \S+ has run out: not renewed for \S+s \(TTL 12s\)`, "show", "k")
		dbtest.OK(t, c.Process.Signal(syscall.SIGCONT))
		c.fails(exitLost, "the command was stopped")
	})
}

func TestTheGraceEndsBeforeTheLeaseDoes(t *testing.T) {
	t.Parallel()
	const hour = time.Hour
	for _, c := range []struct{ ttl, left, least, most time.Duration }{
		{20 * time.Second, hour, 1500 * time.Millisecond, 1500 * time.Millisecond}, // taken by force
		{hour, hour, 3750 * time.Millisecond, 3750 * time.Millisecond},
		{hour, 4 * time.Second, 0, 2750 * time.Millisecond}, // noticed a second late
		{hour, 1250 * time.Millisecond, 0, 0},
		{hour, 0, 0, 0},
		{hour, -hour, 0, 0},
	} {
		if got := grace(c.ttl, time.Now().Add(c.left)); got < c.least || got > c.most {
			t.Errorf("with a lease of %v that ends in %v: %v, want %v to %v", c.ttl, c.left, got, c.least, c.most)
		}
	}
	dbtest.Equal(t, "with a lock that is no lease: %v", grace(30*time.Second, time.Time{}), 0)
}

// TestFlagsOfRunMayStandOnEitherSideOfTheKey; what is wrong there is said.
func TestFlagsOfRunMayStandOnEitherSideOfTheKey(t *testing.T) {
	onOneServer(t, func(t *testing.T, s *scratch) {
		out := s.command("run", "k", "--ttl", "30s", "-n", "--", "sh", "-c", `echo $MYSQLLOCK_KEY "$1"`, "sh", "--ttl").start().must(0)
		dbtest.Equal(t, "the command writes %q", out, "k --ttl\n")
		for text, args := range map[string][]string{
			`-- is missing between the key "k" and the command`: {"run", "k", "--ttl", "30s", "true"},
			`"true" stands between the key "k" and the --`:      {"run", "k", "--ttl", "30s", "true", "--", "true"},
			`the key is given twice`:                            {"run", "k", "--key", "l", "--", "true"},
			`unknown flag: --tll`:                               {"run", "k", "--tll", "30s", "--", "true"},
			`no key is given: mysqllock run KEY`:                {"run", "--ttl", "30s", "--", "true"},
			`no command is given`:                               {"run", "k", "--ttl", "30s", "--"},
			`[no-wait wait] were all set`:                       {"run", "-n", "k", "--wait", "3s", "--", "true"},
			`--ttl is 3ms, want 1s or more`:                     {"run", "k", "--ttl", "3ms", "--", "true"},
		} {
			s.command(args...).start().fails(exitCannotLock, text)
		}
	})
}
