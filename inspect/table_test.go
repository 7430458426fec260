package inspect_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// The table is missing, made, of an older form, made again, and made by hand.
func TestTable(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		lacks := func(i *inspect.Inspector, what string) {
			t.Helper()
			if _, err := i.CheckTable(t.Context()); err == nil || !strings.Contains(err.Error(), what) {
				t.Errorf("the check says %v, want %q", err, what)
			}
		}
		is := func(i *inspect.Inspector) {
			t.Helper()
			if without, err := i.CheckTable(t.Context()); err != nil || len(without) > 0 {
				t.Errorf("the check says %v and %v", without, err)
			}
		}
		makes := func(i *inspect.Inspector) {
			t.Helper()
			if without, err := i.MakeTable(t.Context()); err != nil || len(without) > 0 {
				t.Errorf("making says %v and %v", without, err)
			}
		}
		lacks(i, "CREATE TABLE")
		makes(i)
		is(i)
		makes(i)

		dbtest.Exec(t, s.root, "ALTER TABLE mysqllock DROP COLUMN versioned")
		lacks(i, "ADD COLUMN versioned")
		makes(i)
		is(i)
		dbtest.Exec(t, s.root, "DELETE FROM mysqllock")
		lacks(i, "INSERT")
		makes(i)

		other, err := inspect.New(s.root, inspect.Options{Table: "other"})
		dbtest.OK(t, err)
		lacks(other, "CREATE TABLE")
		for _, statement := range other.Setup(!s.mysql()) {
			dbtest.Exec(t, s.root, statement)
		}
		is(other)

		weak, err := inspect.New(s.open(s.user()), inspect.Options{Table: "third"})
		dbtest.OK(t, err)
		if _, err := weak.MakeTable(t.Context()); err == nil || !strings.Contains(err.Error(), "run with another account:\nCREATE TABLE") {
			t.Errorf("without the right to make it: %v", err)
		}
	})
}

// TestTableOfAnOlderVersion: a table without the columns that only tell more is as it should
// be, which the check mentions. They are added if the account may, and if nobody uses the table.
func TestTableOfAnOlderVersion(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		_, err := i.MakeTable(t.Context())
		dbtest.OK(t, err)
		dbtest.Exec(t, s.root, dropTold)
		user := s.user()
		weak := s.inspector(s.open(user))
		dbtest.Exec(t, s.root, "GRANT EXECUTE ON "+s.Name+".* TO '"+user+"'@'%'")
		without := func(look func(context.Context) ([]inspect.Lack, error), why string) {
			t.Helper()
			got, err := look(t.Context())
			dbtest.OK(t, err)
			if why == "" && len(got) == 0 {
				return
			}
			if len(got) != 1 || !strings.Contains(got[0].Why, why) || !strings.HasPrefix(got[0].Columns, "ALTER TABLE `"+s.Name+"`.`mysqllock` ADD COLUMN granted_at") {
				t.Errorf("missing are %+v, want the columns: %s", got, why)
			}
		}
		without(i.CheckTable, "an older version has made the table")
		without(weak.MakeTable, "could not be added: Error 1142")
		if c := check(diagnose(t, s, s.root), "lock table"); c.State == inspect.Failure {
			t.Errorf("the doctor says %+v", c)
		}
		tx, err := s.root.Begin()
		dbtest.OK(t, err)
		defer tx.Rollback()
		dbtest.Exec(t, tx, "SELECT 1 FROM mysqllock FOR UPDATE")
		without(i.MakeTable, "could not be added: Error 1205")
		dbtest.OK(t, tx.Rollback())
		without(i.MakeTable, "")
		without(i.CheckTable, "")
	})
}

const dropTold = "ALTER TABLE mysqllock DROP COLUMN granted_at, DROP COLUMN ttl, DROP COLUMN renewed_token, DROP COLUMN released"

// TestProcedures: each that the account cannot call is listed, with the reason, and what is
// missing is made.
func TestProcedures(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		if !s.mysql() {
			t.Skip("MariaDB needs none")
		}
		i := s.inspector(s.root)
		_, err := i.MakeTable(t.Context())
		dbtest.OK(t, err)
		name := func(procedure string) string { return "`" + s.Name + "`.`mysqllock_" + procedure + "`" }
		// without has the check, or making, list these lacks alone.
		without := func(what string, look func(context.Context) ([]inspect.Lack, error), want ...inspect.Lack) {
			t.Helper()
			got, err := look(t.Context())
			dbtest.OK(t, err)
			if len(got) != len(want) {
				t.Fatalf("%s: %d reasons: %v", what, len(got), got)
			}
			for j, l := range got {
				if !slices.Equal(l.Procedures, want[j].Procedures) || !strings.Contains(l.Why, want[j].Why) || !slices.Equal(l.Grants, want[j].Grants) {
					t.Errorf("%s: %+v, want %+v", what, l, want[j])
				}
			}
		}
		drop := func(procedures ...string) {
			for _, p := range procedures {
				dbtest.Exec(t, s.root, "DROP PROCEDURE mysqllock_"+p)
			}
		}
		drop("lock2", "done3", "held3")
		without("three are dropped", i.CheckTable, inspect.Lack{Procedures: []string{name("lock2"), name("done3"), name("held3")}, Why: "not there"})
		without("made again", i.MakeTable)
		without("made again", i.CheckTable)

		drop("wait2")
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_wait2() SELECT 1")
		without("another has the name", i.MakeTable, inspect.Lack{Procedures: []string{name("wait2")}, Why: "another procedure"})
		drop("wait2", "pass1")
		user := s.user()
		weak := s.inspector(s.open(user))
		var all, grants []string
		for _, p := range i.Setup(false)[2:] {
			p, _, _ = strings.Cut(strings.TrimPrefix(p, "CREATE PROCEDURE `mysqllock_"), "`")
			p = name(p)
			all, grants = append(all, p), append(grants, "GRANT EXECUTE ON PROCEDURE "+p+" TO '"+user+"'@'%'")
		}
		denied := inspect.Lack{Procedures: all, Why: "no privilege EXECUTE, and the server does not say whether it exists", Grants: grants}
		without("no EXECUTE", weak.CheckTable, denied)
		without("no EXECUTE and no CREATE ROUTINE", weak.MakeTable, denied)
		if c := check(diagnose(t, s, s.open(user)), "procedures"); c.State != inspect.Note || c.Remedy != strings.Join(grants, ";\n") {
			t.Errorf("the doctor says %+v", c)
		}

		without("wait2 and pass1 are missing", i.MakeTable)
		for _, grant := range grants {
			dbtest.Exec(t, s.root, grant)
		}
		without("granted", weak.CheckTable)
		drop("pass1")
		without("one is missing", weak.CheckTable, inspect.Lack{Procedures: []string{name("pass1")}, Why: "no privilege EXECUTE", Grants: []string{"GRANT EXECUTE ON PROCEDURE " + name("pass1") + " TO '" + user + "'@'%'"}})
		dbtest.Exec(t, s.root, "GRANT EXECUTE ON "+s.Name+".* TO '"+user+"'@'%'")
		without("one is missing, with EXECUTE on all", weak.CheckTable, inspect.Lack{Procedures: []string{name("pass1")}, Why: "not there"})
		without("it may not be made", weak.MakeTable, inspect.Lack{Procedures: []string{name("pass1")}, Why: "could not be made: Error 1044"})
		if c := check(diagnose(t, s, s.root), "procedures"); c.State != inspect.Note || !strings.Contains(c.Detail, "pass1") || !strings.Contains(c.Remedy, "CREATE ROUTINE") {
			t.Errorf("the doctor says %+v", c)
		}
	})
}
