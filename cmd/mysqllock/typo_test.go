package main

import (
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTyposAreNoCalm: with a wrong table, namespace or key nobody is told that all is calm, but what may be
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
		s.command("show", "").start().fails(exitFailure, "a key has 1 to 255 bytes")
		s.command("release", "--force", "--yes", "").start().fails(exitFailure, "a key has 1 to 255 bytes")

		dbtest.OK(t, hold.Release())
		says(exitNobody, []string{"Nobody holds"}, "ls", "--exit-code")
		dbtest.Exec(t, s.root, "DROP TABLE mysqllock")
		says(exitNotKnown, []string{"it was dropped"}, "ls", "--exit-code")
	})
}
