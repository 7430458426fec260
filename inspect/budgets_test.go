package inspect_test

import (
	"database/sql"
	"fmt"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// budgeted opens a handle with maxConns, or without for 0, and keeps it connected.
func (s *scratch) budgeted(user, owner string, maxConns int) *sql.DB {
	s.T.Helper()
	cfg := s.Config()
	cfg.User = user
	db := s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Owner: owner, MaxConns: maxConns}))
	s.acquire(db, owner, lockctx.Advisory())
	return db
}

// TestDoctorAddsUpMaxConns: the doctor compares what all handles may open with what the
// server takes, and says what it cannot see. Other tests have handles on the server, too:
// these have no maxConns.
func TestDoctorAddsUpMaxConns(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		var most int
		dbtest.OK(t, s.root.QueryRow("SELECT @@max_connections").Scan(&most))
		user := s.user()
		s.budgeted("root", "shop-1", 7)
		s.budgeted(user, "shop-2", 9)
		own := s.open(user)

		if s.kind == plainMariaDB {
			for _, db := range []*sql.DB{s.root, own} {
				c := check(diagnose(t, s, db), "maxConns")
				if c.State != inspect.Note || !strings.HasPrefix(c.Detail, "unknown: performance_schema is off") || !strings.Contains(c.Detail, fmt.Sprint("max_connections is ", most)) {
					t.Errorf("without performance_schema: %+v", c)
				}
			}
			return
		}
		says := func(c inspect.Check, state inspect.State, parts ...string) {
			t.Helper()
			if c.State != state {
				t.Errorf("the state is %s, want %s: %+v", c.State, state, c)
			}
			for _, part := range parts {
				if !strings.Contains(c.Detail, part) {
					t.Errorf("the doctor does not say %q: %+v", part, c)
				}
			}
		}
		says(check(diagnose(t, s, own), "maxConns"), inspect.Note,
			"handles of this account that are connected now: 1, which may open 9 connections together", "what handles of other accounts may open is unknown")
		s.budgeted(user, "0-report", 0) // the list names the first three, of all tests
		says(check(diagnose(t, s, s.root), "maxConns"), inspect.Note,
			fmt.Sprintf("handles that are connected now: 2, which may open 16 connections together, of the %d", most), "without maxConns, which may open an unknown number", "0-report")
		c := check(diagnose(t, s, own), "maxConns")
		says(c, inspect.Note, "connections of handles without maxConns, which may open an unknown number: ", "by 0-report", "what handles of other accounts may open is unknown")
		if !strings.HasPrefix(c.Remedy, "GRANT SELECT ON performance_schema") {
			t.Errorf("what would help is %q", c.Remedy)
		}
		dbtest.Exec(t, s.root, c.Remedy) // taken at its word
		own.SetMaxIdleConns(0)
		says(check(diagnose(t, s, own), "maxConns"), inspect.Note, "connected now: 2, which may open 16 ")

		big := s.budgeted("root", "shop-3", most)
		c = check(diagnose(t, s, s.root), "maxConns")
		says(c, inspect.Warning, fmt.Sprintf("3, which may open %d connections together", 16+most))
		if !strings.Contains(c.Remedy, "larger max_connections") {
			t.Errorf("what would help is %q", c.Remedy)
		}
		dbtest.OK(t, big.Close())
	})
}
