package inspect_test

import (
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestTheDoctorSaysWhatAnAccountLacks: before a deployment, with and without a lock table, it says
// what the account will not be able to do, and what would help. It makes nothing.
func TestTheDoctorSaysWhatAnAccountLacks(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		user := s.user()
		account := "'" + user + "'@'%'"
		rights := func(grants string) *inspect.Diagnosis {
			t.Helper()
			dbtest.Exec(t, s.root, "REVOKE ALL PRIVILEGES, GRANT OPTION FROM "+account)
			dbtest.Exec(t, s.root, "GRANT "+grants+" ON "+s.Name+".* TO "+account)
			return diagnose(t, s, s.open(user))
		}
		exists := func() (n int) {
			dbtest.OK(t, s.root.QueryRow("SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = ?", s.Name).Scan(&n))
			return n
		}
		for _, table := range []bool{false, true} {
			if table {
				dbtest.OK(t, s.acquire(s.process("root", "holder"), "k", lockctx.Row()).Release())
			}
			d := rights("EXECUTE")
			if safe(d) != "advisory" || check(d, "privileges").State != inspect.Failure || !strings.Contains(check(d, "privileges").Remedy, "GRANT SELECT, INSERT, UPDATE ON") {
				t.Errorf("table %v, no rights: safe are %q: %+v", table, safe(d), d.Checks)
			}
			d = rights("SELECT, INSERT, UPDATE")
			c := check(d, "lock table")
			if table && safe(d) != "row lease advisory optimistic" {
				t.Errorf("with all it needs: safe are %q: %+v", safe(d), d.Checks)
			}
			if !table && (safe(d) != "advisory" || c.State != inspect.Failure || !strings.Contains(c.Remedy, "GRANT CREATE ON") || !strings.Contains(c.Remedy, "CREATE TABLE")) {
				t.Errorf("it may not make the table: safe are %q: %+v", safe(d), d.Checks)
			}
			for _, one := range d.Checks {
				if !table && one.Name == "visibility" && strings.Contains(one.Detail, "may not see it") {
					t.Errorf("there is no table, and it says: %+v", one)
				}
			}
			d = rights("SELECT, INSERT, UPDATE, CREATE")
			if c := check(d, "lock table"); safe(d) != "row lease advisory optimistic" || !table && (c.State != inspect.Warning || !strings.Contains(c.Detail, "may make it")) {
				t.Errorf("table %v, it may make one: safe are %q: %+v", table, safe(d), d.Checks)
			}
			if n := exists(); (n == 1) != table {
				t.Errorf("there are %d tables", n)
			}
		}
	})
}
