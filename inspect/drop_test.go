package inspect_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// drop has i drop the lock table, after MariaDB has made its copy anew.
func drop(t *testing.T, i *inspect.Inspector) (done inspect.Dropped, err error) {
	t.Helper()
	shown, _ := copyOf.Load(i)
	shown.(*serverCopy).fresh(func() { done, err = i.DropTable(t.Context()) })
	return done, err
}

// refusesToDrop checks that i does not drop the table, which is in use.
func (s *scratch) refusesToDrop(t *testing.T, i *inspect.Inspector, says ...string) {
	t.Helper()
	_, err := drop(t, i)
	if !errors.Is(err, mysqllock.ErrLocked) {
		t.Errorf("it is in use, and dropping says %v", err)
		return
	}
	for _, text := range says {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("dropping says %v, want %q", err, text)
		}
	}
	dbtest.Exec(t, s.root, "SELECT 1 FROM mysqllock")
}

// TestATableInUseIsNotDropped: it is dropped when no lock on it is held or waited for, of whatever strategy and namespace.
// Alone, since tests beside it hold advisory locks whose names do not tell the namespace.
func TestATableInUseIsNotDropped(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		i, db := s.inspector(s.root), s.process("root", "holder")
		if _, err := drop(t, i); err == nil || !strings.Contains(err.Error(), "there is no table `"+s.Name+"`.`mysqllock`") {
			t.Errorf("dropping a table that does not exist says %v", err)
		}
		_, err := i.MakeTable(t.Context())
		dbtest.OK(t, err)
		held := func(says []string, key string, opts ...lockctx.Option) {
			t.Helper()
			hold, err := mysqllock.Acquire(t.Context(), db, key, opts...)
			dbtest.OK(t, err)
			s.refusesToDrop(t, i, says...)
			dbtest.OK(t, hold.Release())
		}
		var row, named []string
		if s.mysql() {
			row = []string{`row lock on "k" of namespace`, "is held by holder, connection"}
		}
		held(row, "k")
		held(row, "k", lockctx.Shared())
		held([]string{`the lease on "k"`, "is held by holder"}, "k", lockctx.Lease(time.Minute))
		if s.kind != plainMariaDB { // which lists no named locks
			named = []string{`advisory lock on "k"`, "is held by holder, connection"}
			held(named, "k", lockctx.Advisory())
			held([]string{`advisory lock "mysqllock:order_7#`, "run DROP TABLE `" + s.Name + "`.`mysqllock` yourself"}, "Order 7", lockctx.Advisory())
		}

		// Waiters, of whom MariaDB without the plugin shows the lock.
		hold := s.acquire(db, "k", lockctx.Advisory())
		waiting := func() int {
			if l := find(look(t, i), "advisory", "k"); l != nil {
				return len(l.Waiters.List)
			}
			return 0
		}
		s.queue(waiting, "root", "k", 1, lockctx.Advisory())
		s.refusesToDrop(t, i, `advisory lock on "k"`)
		dbtest.OK(t, hold.Release())
		dbtest.Soon(t, "the waiter has had it", func() bool { return find(look(t, i), "advisory", "k") == nil })

		// A reader of the table, and another namespace.
		tx := dbtest.Begin(t, t.Context(), s.root)
		dbtest.Exec(t, tx, "SELECT 1 FROM mysqllock")
		s.refusesToDrop(t, i, "a transaction uses the lock table")
		dbtest.OK(t, tx.Rollback())
		elsewhere := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{Namespace: "elsewhere"}))
		hold = s.acquire(elsewhere, "k", lockctx.Lease(time.Minute))
		s.refusesToDrop(t, i, `of namespace "elsewhere"`)
		dbtest.OK(t, hold.Release())

		// An advisory lock of a namespace that the table does not have is another application's.
		other := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{Namespace: "unrelated"}))
		hold = s.acquire(other, "k", lockctx.Advisory())
		second, err := inspect.New(s.root, inspect.Options{Table: "other"})
		dbtest.OK(t, err)
		_, err = second.MakeTable(t.Context())
		dbtest.OK(t, err)
		dbtest.Exec(t, s.root, "CREATE PROCEDURE mysqllock_lock2() COMMENT 'mysqllock' DO 0")
		done, err := drop(t, i)
		dbtest.OK(t, err)
		if of := "`" + s.Name + "`."; done.Table != of+"`mysqllock`" || !slices.Equal(done.Tables, []string{of + "`other`"}) ||
			!slices.Equal(done.Procedures, []string{of + "`mysqllock_lock2`"}) || (done.Unseen != "") != (s.kind == plainMariaDB) {
			t.Errorf("dropped is %+v", done)
		}
		if left := tables(t, s); !slices.Equal(left, []string{"other"}) {
			t.Errorf("the tables are %q", left)
		}
		if _, err := drop(t, i); err == nil || !strings.Contains(err.Error(), "lock tables of this database: `"+s.Name+"`.`other`") {
			t.Errorf("dropping it again says %v", err)
		}
		dbtest.OK(t, hold.Release()) // which needs no table
		s.acquire(db, "k")           // makes it again
	})
}

func tables(t *testing.T, s *scratch) (names []string) {
	t.Helper()
	rows, err := s.root.QueryContext(t.Context(), "SHOW TABLES")
	dbtest.OK(t, err)
	defer rows.Close()
	for rows.Next() {
		var name string
		dbtest.OK(t, rows.Scan(&name))
		names = append(names, name)
	}
	dbtest.OK(t, rows.Err())
	return names
}

// TestATableOfSomeoneElseIsNotDropped: one of that name which is no lock table, and one that the account may not
// drop.
func TestATableOfSomeoneElseIsNotDropped(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		i := s.inspector(s.root)
		for _, make := range []string{"CREATE VIEW mysqllock AS SELECT 1 AS id", "CREATE TABLE mysqllock (id INT, expires INT)"} {
			dbtest.Exec(t, s.root, make)
			if _, err := drop(t, i); err == nil || errors.Is(err, mysqllock.ErrLocked) || len(tables(t, s)) != 1 {
				t.Errorf("after %s, dropping says %v", make, err)
			}
			dbtest.Exec(t, s.root, strings.Replace(make[:strings.Index(make, " mysqllock")], "CREATE", "DROP", 1)+" mysqllock")
		}
		_, err := i.MakeTable(t.Context())
		dbtest.OK(t, err)
		user := s.user()
		weak := s.inspector(s.open(user))
		for _, grant := range []string{"LOCK TABLES", "DROP"} {
			if _, err := drop(t, weak); err == nil || !strings.Contains(err.Error(), "needs SELECT, LOCK TABLES and DROP") {
				t.Errorf("without %s, dropping says %v", grant, err)
			}
			dbtest.Exec(t, s.root, "GRANT "+grant+" ON "+s.Name+".* TO '"+user+"'@'%'")
		}
		done, err := drop(t, weak)
		if err != nil || len(tables(t, s)) > 0 || (done.Unseen != "") != (s.kind != equippedMariaDB) {
			t.Errorf("with the rights, dropping says %+v and %v", done, err)
		}
	})
}
