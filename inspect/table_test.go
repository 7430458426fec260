package inspect_test

import (
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// The table is missing, made, of an older form, made again, and made by hand.
func TestTable(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		lacks := func(i *inspect.Inspector, what string) {
			t.Helper()
			if _, err := i.CheckTable(t.Context()); err == nil || !strings.Contains(err.Error(), what) {
				t.Errorf("the check says %v, want %q", err, what)
			}
		}
		is := func(i *inspect.Inspector, procedure bool) {
			t.Helper()
			if there, err := i.CheckTable(t.Context()); err != nil || there != procedure {
				t.Errorf("the check says %v and %v", there, err)
			}
		}
		makes := func(i *inspect.Inspector, procedure bool) {
			t.Helper()
			if there, err := i.MakeTable(t.Context()); err != nil || there != procedure {
				t.Errorf("making says %v and %v", there, err)
			}
		}
		lacks(i, "CREATE TABLE")
		makes(i, s.mysql())
		is(i, s.mysql())
		makes(i, s.mysql())

		dbtest.Exec(t, s.root, "ALTER TABLE mysqllock DROP COLUMN versioned")
		lacks(i, "ADD COLUMN versioned")
		makes(i, s.mysql())
		is(i, s.mysql())
		if s.mysql() {
			dbtest.Exec(t, s.root, "DROP PROCEDURE mysqllock_lock1")
			is(i, false)
			makes(i, true)
		}
		dbtest.Exec(t, s.root, "DELETE FROM mysqllock")
		lacks(i, "INSERT")
		makes(i, s.mysql())

		other, err := inspect.New(s.root, inspect.Options{Table: "other"})
		dbtest.OK(t, err)
		lacks(other, "CREATE TABLE")
		for _, statement := range other.Setup(!s.mysql()) {
			dbtest.Exec(t, s.root, statement)
		}
		is(other, s.mysql())

		weak, err := inspect.New(s.open(s.user()), inspect.Options{Table: "third"})
		dbtest.OK(t, err)
		if _, err := weak.MakeTable(t.Context()); err == nil || !strings.Contains(err.Error(), "run with another account:\nCREATE TABLE") {
			t.Errorf("without the right to make it: %v", err)
		}
	})
}
