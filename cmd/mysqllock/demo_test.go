package main

import (
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// The demo shows an exact sale, and leaves the database as it was: also a lock table
// that programs use, and without one.
func TestTheDemoLeavesTheDatabaseAsItWas(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		for _, used := range []bool{false, true} {
			if used {
				dbtest.Exec(t, s.root, "CREATE TABLE IF NOT EXISTS mysqllock (mine INT)") // not one that the driver knows
			}
			before := s.made()
			out := s.command("demo", "--dsn", s.DSN("lockNamespace=mine")).start().must(0)
			if !strings.Contains(out, "without a lock: ") || !strings.Contains(out, "60 seats sold of 60, exact") {
				t.Errorf("it shows\n%s", out)
			}
			if after := s.made(); after != before {
				t.Errorf("it has left %q, before there was %q", after, before)
			}
		}
	})
}

// made is all that there is in the database.
func (s *scratch) made() (names string) {
	s.T.Helper()
	dbtest.OK(s.T, s.root.QueryRow(`SELECT COALESCE(GROUP_CONCAT(name ORDER BY name), '') FROM (
		SELECT CAST(TABLE_NAME AS CHAR) AS name FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE()
		UNION ALL SELECT CAST(ROUTINE_NAME AS CHAR) FROM information_schema.ROUTINES WHERE ROUTINE_SCHEMA = DATABASE()) AS made`).Scan(&names))
	return names
}
