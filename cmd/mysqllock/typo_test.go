package main

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/inspect/web"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTyposAreNoCalm: with a wrong table, namespace or key no tool says that all is calm, but what may be
// wrong; a table that was dropped is told, too. MariaDB counts transactions of all tests, so no other runs.
func TestTyposAreNoCalm(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		hold := s.keep("k", lockctx.Lease(5*time.Minute))
		says := func(code int, want []string, args ...string) {
			t.Helper()
			var out string
			dbtest.Soon(t, strings.Join(args, " "), func() bool { // MariaDB shows the transactions of tests before this one for a while
				c := s.command(args...).start()
				got := c.code()
				out = c.out.String()
				return got == code
			})
			for _, text := range want {
				if !strings.Contains(out, text) {
					t.Errorf("%q does not say %q:\n%s", args, text, out)
				}
			}
			if code == exitNotKnown && nobody(out) {
				t.Errorf("%q says that nobody holds:\n%s", args, out)
			}
		}
		table := []string{"does not exist: its name is wrong", "`" + s.Name + "`.`mysqllock`"}
		namespace := []string{`keys of the namespace "shpo"`, `has keys of "` + s.Name + `"`}
		says(exitNotKnown, table, "ls", "--exit-code", "--table", "mysqlock")
		says(exitNotKnown, table, "show", "k", "--exit-code", "--table", "mysqlock")
		says(exitNotKnown, namespace, "ls", "--exit-code", "--namespace", "shpo")
		says(exitNotKnown, namespace, "show", "k", "--exit-code", "--namespace", "shpo")
		says(exitNobody, []string{"nobody", "never used here"}, "show", "kk", "--exit-code")
		says(0, []string{"holds"}, "show", "k", "--exit-code")
		says(0, table, "ls", "--top", "--table", "mysqlock")
		says(0, namespace, "ls", "--top", "--namespace", "shpo")
		const spelling = "never used here: the lock table has no row for it"
		s.command("release", "kk", "--force", "--yes").start().fails(exitFailure, spelling)
		s.command("release", "k", "--force", "--yes", "--namespace", "shpo").start().fails(exitFailure, spelling)
		s.command("release", "k", "--force", "--yes", "--table", "mysqlock").start().fails(exitFailure, "nobody is seen to hold")
		s.typosInRecord()
		s.typosOnPage(inspect.Options{Table: "mysqlock"}, table)
		s.typosOnPage(inspect.Options{Namespace: "shpo"}, namespace)
		s.command("show", "").start().fails(exitFailure, "a key has 1 to 255 bytes")
		s.command("release", "--force", "--yes", "").start().fails(exitFailure, "a key has 1 to 255 bytes")

		dbtest.OK(t, hold.Release())
		says(exitNobody, []string{"Nobody holds"}, "ls", "--exit-code")
		dbtest.Exec(t, s.root, "DROP TABLE mysqllock")
		says(exitNotKnown, []string{"it was dropped"}, "ls", "--exit-code")
	})
}

// typosOnPage looks at a page with a wrong table or namespace.
func (s *scratch) typosOnPage(o inspect.Options, want []string) {
	s.T.Helper()
	i, err := inspect.New(s.root, o)
	dbtest.OK(s.T, err)
	page := web.New(i, web.Options{})
	ts := &tools{scratch: s, page: httptest.NewServer(page)}
	defer func() { page.Close(); ts.page.Close() }()
	v := ts.view()
	for _, text := range want {
		if !strings.Contains(fmt.Sprintf("%+v", v.Gaps), text) {
			s.T.Errorf("with %+v the page does not say %q: %+v", o, text, v)
		}
	}
	if v.Held != nil && *v.Held == 0 || v.Waiting != nil && *v.Waiting == 0 {
		s.T.Errorf("with %+v the page says that nobody holds, or waits: %+v", o, v)
	}
}

// typosInRecord asks a record for what is not in it.
func (s *scratch) typosInRecord() {
	s.T.Helper()
	path := s.file("locks.jsonl")
	recorder := s.command("record", "--to", path).start()
	history := func(args ...string) string {
		return s.command(append([]string{"history", "--from", path}, args...)...).start().must(0)
	}
	dbtest.Soon(s.T, "the holder is recorded", func() bool { return len(lines(s.T, path)) > 0 && strings.Contains(history("k"), "the holder") })
	for _, args := range [][]string{{"kk"}, {"--namespace", "shpo"}, {"--namespace", "shpo", "k"}} {
		if out := history(args...); !strings.Contains(out, "see whether it is spelt right") {
			s.T.Errorf("history %q says\n%s", args, out)
		}
	}
	dbtest.OK(s.T, recorder.Process.Signal(syscall.SIGTERM))
	recorder.must(0)
}
