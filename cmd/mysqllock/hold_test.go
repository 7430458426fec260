//go:build unix

package main

import (
	"encoding/json"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// hold starts "hold" with its output going to a file.
func (s *scratch) hold(name string, args ...string) *command {
	s.T.Helper()
	out, err := os.Create(s.file(name))
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { out.Close() })
	c := s.command(append([]string{"hold"}, args...)...)
	c.Cmd.Stdout = out
	return c.start()
}

// says waits for what "hold" writes.
func (s *scratch) says(name string) (text string) {
	s.T.Helper()
	dbtest.Soon(s.T, name+" has the lock", func() bool {
		read, err := os.ReadFile(s.file(name))
		dbtest.OK(s.T, err)
		text = string(read)
		return strings.HasSuffix(text, "\n")
	})
	return text
}

func TestHoldKeepsTheKeyUntilASignalOrLoss(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		first := s.hold("first", "k")
		dbtest.Equal(t, "it says %q", s.says("first"), "1\n")
		s.refused(exitNotAcquired, "held by", "hold", "k", "-n")
		s.refused(exitNotAcquired, "held by", "run", "k", "-n", "--", "true")
		s.refused(exitNotAcquired, "held by", "run", "-n", "k", "--", "true")
		waiting := s.command("hold", "--wait", "1h", "k").start()
		dbtest.Soon(t, "it waits", func() bool { return s.waiters("k") == 1 })
		dbtest.OK(t, waiting.Process.Signal(syscall.SIGTERM))
		waiting.must(exitSignal + int(syscall.SIGTERM))
		dbtest.OK(t, first.Process.Signal(syscall.SIGTERM))
		first.must(0)

		second := s.hold("second", "k", "--slots", "2")
		if line := strings.Fields(s.says("second")); len(line) != 2 {
			t.Errorf("with slots it says %q", line)
		}
		dbtest.OK(t, second.Process.Signal(os.Interrupt))
		second.must(0)

		third := s.hold("third", "k", "--ttl", "12s")
		if token := s.says("third"); token == "1\n" || token == "0\n" {
			t.Errorf("it says %q again", token)
		}
		s.command("release", "k", "--force", "--yes").start().must(0)
		third.fails(exitLost, "lost")
		s.command("hold").start().fails(exitCannotLock, "accepts 1 arg")
		s.command("hold", "k", "--shared", "--slots", "2").start().fails(exitCannotLock, "none of the others can be")
	})
}

// TestThoseWhoShareAKeyExcludeOthers: those who say --shared have it together.
func TestThoseWhoShareAKeyExcludeOthers(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		one, two := s.hold("one", "k", "--shared"), s.hold("two", "k", "--shared")
		if a, b := s.says("one"), s.says("two"); a != "0\n" || b != "0\n" {
			t.Errorf("they say %q and %q", a, b)
		}
		out := s.command("run", "-k", "k", "--shared", "--", "sh", "-c", `echo "$MYSQLLOCK_KEY ${MYSQLLOCK_TOKEN-none}"`)
		out.Env = append(out.Env, "MYSQLLOCK_TOKEN=7") // of a run around this one
		dbtest.Equal(t, "the command says %q", out.start().must(0), "k none\n")
		s.refused(exitNotAcquired, "locked", "run", "-n", "k", "--", "true")
		dbtest.OK(t, one.Process.Signal(syscall.SIGTERM))
		one.must(0)
		s.refused(exitNotAcquired, "locked", "run", "-n", "k", "--", "true")
		dbtest.OK(t, two.Process.Signal(syscall.SIGTERM))
		two.must(0)
		alone := s.hold("alone", "k")
		s.says("alone")
		s.refused(exitNotAcquired, "locked", "run", "--shared", "-n", "k", "--", "true")
		dbtest.OK(t, alone.Process.Signal(syscall.SIGTERM))
		alone.must(0)

		cut := s.run("k", "trap 'echo TERM >>ran' TERM; echo $$ >>ran; while :; do sleep 0.02; done", "--shared", "--ttl", "30s").start()
		dbtest.Soon(t, "it runs", func() bool { return len(lines(t, s.file("ran"))) == 1 })
		var id string
		rows, err := s.root.Query("SELECT id FROM information_schema.processlist WHERE db = ? AND id <> CONNECTION_ID()", s.Name)
		dbtest.OK(t, err)
		var all []string
		for rows.Next() {
			dbtest.OK(t, rows.Scan(&id))
			all = append(all, id)
		}
		dbtest.OK(t, rows.Close())
		for _, id := range all {
			_, _ = s.root.Exec("KILL " + id) // it may be gone
		}
		cut.fails(exitLost, "lost")
		ran := lines(t, s.file("ran"))
		if alive(ran[0]) {
			t.Error("the command runs on without the lock")
		}
		if len(ran) > 1 {
			t.Error("the command has time to end, in which others can have the key")
		}
	})
}

// TestTheExitStatusTellsUnseenFromNobody: whether all is seen is asked in the command whose status
// is looked at, since the row locks that MariaDB doesn't show are those of the whole server, of any
// test.
func TestTheExitStatusTellsUnseenFromNobody(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.command("schema", "apply").start().must(0)
		nobody := func(key string) {
			t.Helper()
			show := s.command("show", key, "--json", "--exit-code").start()
			code := show.code()
			var snap jsonSnapshot
			dbtest.OK(t, json.Unmarshal(show.out.Bytes(), &snap))
			want := exitNobody
			if snap.HoldersIncomplete {
				want = exitNotKnown
			}
			show.must(want)
			if len(snap.Locks) > 0 && len(snap.Locks[0].Holders) > 0 {
				t.Errorf("with status %d it shows %s", code, show.out.String())
			}
		}
		nobody("k")
		s.hold("keeper", "k")
		s.says("keeper")
		s.command("show", "k", "--exit-code").start().must(0)
		s.command("ls", "--exit-code", "--json").start().must(0)
		nobody("other")

		user := s.Name + "_blind"
		dbtest.Exec(t, s.root, "CREATE USER "+user)
		t.Cleanup(func() { dbtest.Exec(t, s.root, "DROP USER "+user) })
		dbtest.Exec(t, s.root, "CREATE TABLE open_table (id INT)")
		if s.MariaDB() {
			dbtest.Exec(t, s.root, "INSERT INTO open_table VALUES (1)")
			tx, err := s.root.Begin()
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "SELECT * FROM open_table FOR UPDATE")
			dbtest.Soon(t, "a transaction is not seen through", func() bool { // the server may answer of 100 ms ago
				return s.command("show", "other", "--exit-code").start().code() == exitNotKnown
			})
			s.command("show", "other", "--exit-code", "--try").start().must(exitNobody)
			dbtest.Exec(t, s.root, "INSERT INTO mysqllock (namespace, name) VALUES ('"+s.Name+"', 'other')")
			dbtest.Exec(t, tx, "SELECT * FROM mysqllock WHERE namespace = '"+s.Name+"' AND name = 'other' FOR UPDATE")
			s.command("show", "other", "--exit-code", "--try").start().must(0)
			dbtest.OK(t, tx.Rollback())
		}
		dbtest.Exec(t, s.root, "GRANT SELECT ON open_table TO "+user) // so that it may use the database
		cfg := s.Config()
		cfg.User, cfg.Passwd = user, ""
		s.command("--dsn", cfg.FormatDSN(), "show", "k", "--exit-code").start().must(exitNotKnown)
		s.command("--dsn", cfg.FormatDSN(), "ls").start().must(0)
	})
}

// TestNoCommandDependsOnTheTextsOfOthers, which other connections run.
func TestNoCommandDependsOnTheTextsOfOthers(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.Neighbours()
		for _, args := range [][]string{nil, {"--shared"}, {"--slots", "2"}} {
			s.command(append(append([]string{"run"}, args...), "-k", "k", "--", "true")...).start().must(0)
		}
		held := s.hold("held", "k")
		s.says("held")
		s.command("run", "-n", "k", "--", "true").start().fails(exitNotAcquired, "held by")
		if out := s.command("ls").start().must(0); !strings.Contains(out, "k") {
			t.Errorf("ls says %q", out)
		}
		s.command("doctor").start().must(0)
		dbtest.OK(t, held.Process.Signal(syscall.SIGTERM))
		held.must(0)
	})
}
