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
func TestMakeTableMendsWhatCheckTableFinds(t *testing.T) {
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
			if lack, err := i.CheckTable(t.Context()); err != nil || lack != (inspect.Lack{}) {
				t.Errorf("the check says %v and %v", lack, err)
			}
		}
		makes := func(i *inspect.Inspector) {
			t.Helper()
			if lack, err := i.MakeTable(t.Context()); err != nil || lack != (inspect.Lack{}) {
				t.Errorf("making says %v and %v", lack, err)
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
		for _, statement := range other.Setup() {
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

// TestATableOfAnOlderVersionIsAsItShouldBe: it is without the columns that only tell more, which the check mentions.
// They are added if the account may, and if nobody uses the table.
func TestATableOfAnOlderVersionIsAsItShouldBe(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		_, err := i.MakeTable(t.Context())
		dbtest.OK(t, err)
		dbtest.Exec(t, s.root, dropTold)
		weak := s.inspector(s.open(s.user()))
		without := func(look func(context.Context) (inspect.Lack, error), why string) {
			t.Helper()
			got, err := look(t.Context())
			dbtest.OK(t, err)
			if why == "" && got == (inspect.Lack{}) {
				return
			}
			if !strings.Contains(got.Why, why) || !strings.HasPrefix(got.Columns, "ALTER TABLE `"+s.Name+"`.`mysqllock` ADD COLUMN granted_at") {
				t.Errorf("missing are %+v, want the columns: %s", got, why)
			}
		}
		without(i.CheckTable, "an earlier version has made the table")
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

// TestProceduresOfAnEarlierVersionAreDropped: they are told, and the table stays as it is.
func TestProceduresOfAnEarlierVersionAreDropped(t *testing.T) {
	onFlavours(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		_, err := i.MakeTable(t.Context())
		dbtest.OK(t, err)
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_take1() COMMENT 'mysqllock' DO 0")
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_give3() COMMENT 'of someone else' DO 0")
		want := []string{"`" + s.Name + "`.`mysqllock_take1`"}
		if dropped, err := i.DropProcedures(t.Context()); err != nil || !slices.Equal(dropped, want) {
			t.Errorf("dropped are %q, %v, want %q", dropped, err, want)
		}
		if dropped, err := i.DropProcedures(t.Context()); err != nil || len(dropped) > 0 {
			t.Errorf("dropped again are %q, %v", dropped, err)
		}
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_take1() COMMENT 'mysqllock' DO 0")
		weak := s.inspector(s.open(s.user("EXECUTE ON " + s.Name + ".*")))
		if _, err := weak.DropProcedures(t.Context()); err == nil || !strings.Contains(err.Error(), "ALTER ROUTINE") {
			t.Errorf("without the right: %v", err)
		}
	})
}
