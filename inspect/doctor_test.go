package inspect_test

import (
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// check is the first that is about name.
func check(d *inspect.Diagnosis, name string) inspect.Check {
	for _, c := range d.Checks {
		if c.Name == name {
			return c
		}
	}
	return inspect.Check{}
}

func diagnose(t *testing.T, s *scratch, db *sql.DB) *inspect.Diagnosis {
	t.Helper()
	d, err := s.inspector(db).Doctor(t.Context())
	dbtest.OK(t, err)
	return d
}

func safe(d *inspect.Diagnosis) string {
	var out []string
	for _, v := range d.Verdicts {
		if v.Safe {
			out = append(out, v.Strategy)
		}
	}
	return strings.Join(out, " ")
}

func TestTheDoctorSaysWhichStrategiesAreSafe(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		if c := check(diagnose(t, s, s.root), "lock table"); c.State != inspect.Warning || !strings.Contains(c.Remedy, "CREATE TABLE") {
			t.Errorf("without a table: %+v", c)
		}
		var n int
		dbtest.OK(t, s.root.QueryRow("SELECT COUNT(*) FROM information_schema.TABLES WHERE TABLE_SCHEMA = ?", s.Name).Scan(&n))
		if n != 0 {
			t.Errorf("the doctor has made %d tables", n)
		}
		hold := s.acquire(s.process("root", "holder"), "k", lockctx.Lease(30*time.Second))
		dbtest.OK(t, hold.Release())
		d := diagnose(t, s, s.root)
		if got := safe(d); got != "row lease advisory optimistic" || len(d.Verdicts) != 4 {
			t.Errorf("safe are %s: %+v", got, d.Verdicts)
		}
		for _, name := range []string{"server", "topology", "lock table", "privileges", "proxy", "connections", "durability", "clock"} {
			if c := check(d, name); c.State != inspect.OK || c.Detail == "" {
				t.Errorf("%s: %+v", name, c)
			}
		}

		if c := check(d, "several statements"); c.State != inspect.Note || !strings.Contains(c.Detail, "one by one") || !strings.Contains(c.Detail, "1064") {
			t.Errorf("without multiStatements: %+v", c)
		}
		several := s.OpenDB(s.Connector(dbtest.As("root"), dbtest.With("multiStatements=true")), nil)
		if c := check(diagnose(t, s, several), "several statements"); c.State != inspect.OK || !strings.Contains(c.Detail, "in one text") {
			t.Errorf("with multiStatements: %+v", c)
		}
		if c := check(d, "encryption"); c.State != inspect.Note || !strings.Contains(c.Remedy, "tls=true") {
			t.Errorf("in the clear: %+v", c)
		}
		if s.mysql() {
			encrypted := s.OpenDB(s.Connector(dbtest.As("root"), dbtest.With("tls=skip-verify")), nil)
			if c := check(diagnose(t, s, encrypted), "encryption"); c.State != inspect.OK || !strings.HasPrefix(c.Detail, "TLSv1") {
				t.Errorf("with TLS: %+v", c)
			}
		}

		user := s.user()
		d = diagnose(t, s, s.open(user))
		if c := check(d, "privileges"); c.State != inspect.Note || !strings.Contains(c.Remedy, "GRANT DELETE ON") {
			t.Errorf("without DELETE: %+v", c)
		}
		if c := check(d, "visibility"); c.State != inspect.Note || !strings.Contains(c.Remedy, "GRANT ") {
			t.Errorf("without further rights: %+v", c)
		}
		dbtest.Exec(t, s.root, "REVOKE UPDATE ON "+s.Name+".* FROM '"+user+"'@'%'")
		d = diagnose(t, s, s.open(user))
		if c := check(d, "privileges"); c.State != inspect.Failure || !strings.Contains(c.Remedy, "GRANT UPDATE ON") || safe(d) != "advisory" {
			t.Errorf("without UPDATE: %+v, safe are %s", c, safe(d))
		}
		dbtest.Exec(t, s.root, "DELETE FROM mysqllock WHERE name = ''")
		if c := check(diagnose(t, s, s.root), "lock table"); c.State != inspect.Warning || !strings.Contains(c.Detail, "high-water") {
			t.Errorf("without the high-water mark: %+v", c)
		}
		dbtest.Exec(t, s.root, "ALTER TABLE mysqllock ENGINE = MyISAM")
		d = diagnose(t, s, s.root)
		if c := check(d, "lock table"); c.State != inspect.Failure || safe(d) != "advisory" {
			t.Errorf("with MyISAM: %+v, safe are %s", c, safe(d))
		}
	})
}
