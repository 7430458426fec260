package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// functions makes looks(), which has a SELECT of its own, and stores(), which has an
// INSERT.
func functions(s *stock.Shop, t *testing.T) {
	t.Helper()
	dbtest.Exec(t, s.Plain, "CREATE TABLE logged (id INT)")
	dbtest.Exec(t, s.Plain, "CREATE FUNCTION looks(a INT) RETURNS INT READS SQL DATA BEGIN DECLARE v INT; SELECT stock INTO v FROM p WHERE id = a; RETURN v; END")
	dbtest.Exec(t, s.Plain, "CREATE FUNCTION stores(a INT) RETURNS INT DETERMINISTIC BEGIN INSERT INTO logged VALUES (a); RETURN a; END")
}

// TestASecondKeyAfterASnapshotIsRefused, and one after a statement that took none is good.
func TestASecondKeyAfterASnapshotIsRefused(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		functions(s, t)
		dbtest.Exec(t, s.Plain, "CREATE TABLE other (n INT)")
		dbtest.Exec(t, s.Plain, "INSERT INTO other VALUES (1)")
		db := s.Handle()
		for _, c := range []struct {
			text    string
			refused bool
		}{
			{"INSERT INTO logged VALUES (looks(1))", true},
			{"INSERT INTO logged SET id = looks(1)", true},
			{"UPDATE p SET stock = stock WHERE id = looks(1)", true},
			{"UPDATE p SET stock = looks(2) WHERE id = 2", true},
			{"DELETE FROM logged WHERE id = `looks`(1)", true},
			{"REPLACE INTO logged VALUES (looks(1))", true},
			{"SELECT looks(1) FOR UPDATE", true},
			{"SELECT id FROM p WHERE id = 2 AND looks(1) > 0 FOR UPDATE", true},
			{"SET @x = looks(1)", true},
			{"DO looks(1)", true},
			{"SELECT looks(1)", true},
			{"SELECT stock FROM p WHERE id = 1", true},
			{"/* c */ SELECT stock FROM p", true},
			{"INSERT INTO logged (id) VALUES (1)", false},
			{"INSERT INTO logged(id) SELECT MAX(stock) FROM p", false},
			{"UPDATE p SET stock = (SELECT COUNT(*) FROM logged) WHERE id = 2", false},
			{"UPDATE p SET stock = GREATEST(stock, 1) WHERE id IN (2, 3)", false},
			{"DELETE FROM logged WHERE id IN (SELECT stock FROM p)", false},
			{"SELECT stock FROM p WHERE id = 2 FOR UPDATE", false},
			{"SELECT COUNT(*) FROM p LOCK IN SHARE MODE", false},
		} {
			first := lockctx.With(dbtest.Limited(t), "first")
			tx := dbtest.Begin(t, first, db)
			dbtest.Exec(t, tx, c.text)
			dbtest.Exec(t, s.Plain, "UPDATE other SET n = n + 1")
			var seen, is int
			dbtest.OK(t, s.Plain.QueryRow("SELECT n FROM other").Scan(&is))
			err := tx.QueryRowContext(lockctx.With(first, "k"), "SELECT n FROM other").Scan(&seen)
			if errors.Is(err, mysqllock.ErrStaleSnapshot) != c.refused || !c.refused && err != nil {
				t.Errorf("%q: %v", c.text, err)
			}
			if err == nil && seen != is {
				t.Errorf("%q: read %d under the lock, it is %d", c.text, seen, is)
			}
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestWhetherASecondKeyIsRefusedFollowsTheIsolationLevel, wherever that is set.
func TestWhetherASecondKeyIsRefusedFollowsTheIsolationLevel(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		variable := "transaction_isolation"
		if s.MariaDB() {
			variable = "tx_isolation"
		}
		committed, repeatable := s.Handle(variable+"='READ-COMMITTED'"), s.Handle()
		for _, db := range []*sql.DB{committed, repeatable} {
			db.SetMaxOpenConns(1) // so that texts before a transaction run on its connection of database/sql
		}
		for _, c := range []struct {
			db      *sql.DB
			texts   []string
			opts    *sql.TxOptions
			inside  []string
			refused bool
		}{
			{db: repeatable, refused: true},
			{db: committed},
			{db: committed, texts: []string{"SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"}}, // on another connection
			{db: committed, texts: []string{"SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"}},
			{db: committed, opts: &sql.TxOptions{Isolation: sql.LevelRepeatableRead}, refused: true},
			{db: committed, inside: []string{"SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"}},
			{db: repeatable, opts: &sql.TxOptions{Isolation: sql.LevelReadCommitted}},
			{db: repeatable, texts: []string{"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"}, refused: true},
			{db: repeatable, texts: []string{"SET TRANSACTION ISOLATION LEVEL READ COMMITTED"}, refused: true},
			{db: repeatable, inside: []string{"SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"}, refused: true},
		} {
			for _, text := range c.texts {
				dbtest.Exec(t, c.db, text)
			}
			first := lockctx.With(dbtest.Limited(t), "first")
			tx, err := c.db.BeginTx(first, c.opts)
			dbtest.OK(t, err)
			for _, text := range c.inside {
				dbtest.Exec(t, tx, text)
			}
			n := dbtest.Column[int](t, tx, "SELECT stock FROM p WHERE id = 1")[0]
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = stock + 1 WHERE id = 4")
			err = tx.QueryRowContext(lockctx.With(first, "k"), "SELECT stock FROM p WHERE id = 4").Scan(&n)
			if errors.Is(err, mysqllock.ErrStaleSnapshot) != c.refused {
				t.Errorf("%q, %v, %q: %v", c.texts, c.opts, c.inside, err)
			}
			if err == nil && n != s.Stock(4) {
				t.Errorf("%q, %v, %q: read %d under the lock, it is %d", c.texts, c.opts, c.inside, n, s.Stock(4))
			}
			dbtest.OK(t, tx.Rollback())
			dbtest.Exec(t, c.db, "SET SESSION TRANSACTION ISOLATION LEVEL "+map[*sql.DB]string{committed: "READ COMMITTED", repeatable: "REPEATABLE READ"}[c.db])
		}
	})
}

// TestAReadThatFailsLeavesItsSnapshot: the server keeps it, so a second key is not granted over it.
func TestAReadThatFailsLeavesItsSnapshot(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for _, query := range []string{
			"SELECT CAST(stock AS UNSIGNED) + 18446744073709551615 FROM p WHERE id = 1",         // 1690
			"SELECT (SELECT p2.id FROM p p2 WHERE p2.id < 10 + p.id) FROM p WHERE p.stock >= 0", // 1242
		} {
			first := lockctx.With(dbtest.Limited(t), "first")
			tx := dbtest.Begin(t, first, db)
			var n int
			if err := tx.QueryRowContext(first, query).Scan(&n); server.Number(err) == 0 {
				t.Fatalf("%s: %v", query, err)
			}
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = stock + 1 WHERE id = 4")
			err := tx.QueryRowContext(lockctx.With(first, "k"), "SELECT stock FROM p WHERE id = 4").Scan(&n)
			dbtest.Is(t, query, err, mysqllock.ErrStaleSnapshot)
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestASelectWhoseFunctionWritesIsAWrite: durable when it has returned, and the lock is given
// back; under a lease, fenced.
func TestASelectWhoseFunctionWritesIsAWrite(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		functions(s, t)
		db := s.Handle()
		logged := func() int { return dbtest.Column[int](t, s.Plain, "SELECT COUNT(*) FROM logged")[0] }
		for _, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(stock.TTL), lockctx.Advisory(), lockctx.Optimistic()} {
			for _, query := range []string{"SELECT stores(1)", "SELECT stores(id) FROM p WHERE id = 1", "/* c */ SELECT id FROM p WHERE id = 1 AND `stores`(1) = 1"} {
				for _, after := range []bool{false, true} { // a read
					ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "k", option))
					var n int
					if after {
						dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
					}
					before := logged()
					dbtest.OK(t, db.QueryRowContext(ctx, query).Scan(&n))
					if got := logged(); got <= before || n != 1 {
						t.Errorf("%q: returned %d, others see %d more rows", query, n, got-before)
					}
					other := lockctx.With(dbtest.Limited(t), "k", option, lockctx.NoWait())
					if _, err := db.ExecContext(other, "UPDATE p SET stock = stock WHERE id = 3"); err != nil {
						t.Errorf("%q: the lock is still held: %v", query, err)
					}
					// It has read, too, and its lock is gone.
					dbtest.Is(t, fmt.Sprintf("%q, then a write", query), dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1")), mysqllock.ErrStaleRead)
					cancel()
				}
			}
		}

		// In transactions it is one of their statements.
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
		before := logged()
		dbtest.Exec(t, tx, "SELECT stores(1)")
		if logged() != before {
			t.Error("seen before COMMIT")
		}
		dbtest.OK(t, tx.Rollback())
		if logged() != before {
			t.Error("seen after ROLLBACK")
		}
	})
}

// TestASelectThatWritesIsNotCommittedUnderALostLease, which somebody else has taken.
func TestASelectThatWritesIsNotCommittedUnderALostLease(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		functions(s, t)
		db := s.Handle()
		hold := stock.Acquire(t, db, "k", lockctx.Lease(30*time.Second))
		defer hold.Release()
		dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET token = token + 1 WHERE name = 'k'")
		var n int
		err := db.QueryRowContext(hold.Context(), "SELECT stores(1)").Scan(&n)
		dbtest.Is(t, "the error", err, mysqllock.ErrLost)
		dbtest.OK(t, s.Plain.QueryRow("SELECT COUNT(*) FROM logged").Scan(&n))
		if n != 0 {
			t.Error("written without the lease")
		}
	})
}

// TestNoVersionIsGivenToReadUncommitted: it would say nothing of what may be rolled back.
func TestNoVersionIsGivenToReadUncommitted(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		variable := "transaction_isolation"
		if s.MariaDB() {
			variable = "tx_isolation"
		}
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE dirty() SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
		uncommitted, db := s.Handle(variable+"='READ-UNCOMMITTED'"), s.Handle()
		hint := func() context.Context { return lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic()) }
		dirty := &sql.TxOptions{Isolation: sql.LevelReadUncommitted}
		refused := func(name string, err error) {
			t.Helper()
			dbtest.Is(t, name, err, mysqllock.ErrUnsafe)
		}
		_, err := db.BeginTx(hint(), dirty)
		refused("BeginTx", err)
		ctx := hint()
		var n int
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
		_, err = db.BeginTx(ctx, dirty)
		refused("BeginTx after a read", err)
		_, err = db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic(), lockctx.IfVersion(1)), dirty)
		refused("BeginTx with a version", err)
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "row"), dirty)
		dbtest.OK(t, err)
		refused("joined", tx.QueryRowContext(hint(), "SELECT stock FROM p WHERE id = 1").Scan(&n))
		dbtest.OK(t, tx.Rollback())

		refused("session: query", uncommitted.QueryRowContext(hint(), "SELECT stock FROM p WHERE id = 1").Scan(&n))
		_, err = uncommitted.ExecContext(hint(), "UPDATE p SET stock = stock WHERE id = 1")
		refused("session: exec", err)
		_, err = uncommitted.BeginTx(hint(), nil)
		refused("session: BeginTx", err)
		refused("session: Do", mysqllock.Do(dbtest.Limited(t), uncommitted, "k", func(context.Context) error { return nil }, lockctx.Optimistic()))
		tx, err = uncommitted.BeginTx(hint(), &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())

		for _, text := range []string{
			"SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED", "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED",
			"/* c */ SET SESSION " + variable + " = 'READ-UNCOMMITTED'", "SET @@session." + variable + " = 0", "CALL dirty()",
		} {
			db := s.Handle()
			db.SetMaxOpenConns(1)
			dbtest.Exec(t, db, text)
			tx, err := db.BeginTx(hint(), nil) // on a session, which has the level of the DSN
			if err != nil {
				t.Errorf("%s: BeginTx: %v", text, err)
			} else {
				dbtest.OK(t, tx.Rollback())
			}
			if text[:5] != "SET T" {
				refused(text+": query", db.QueryRowContext(hint(), "SELECT stock FROM p WHERE id = 1").Scan(&n))
			}
		}

		// The level of the next transaction is none of the query's, be it the first one or a later one.
		db = s.Handle()
		db.SetMaxOpenConns(1)
		before, unsure := s.Stock(1), dbtest.Begin(t, t.Context(), s.Plain)
		dbtest.Exec(t, unsure, "UPDATE p SET stock = stock + 1 WHERE id = 1")
		for ctx, read := hint(), 0; read < 3; read++ {
			dbtest.Exec(t, db, "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
			if n := stock.MustRead(t, ctx, db, 1); n != before {
				t.Errorf("read %d shows %d, and committed is %d", read, n, before)
			}
		}
		dbtest.OK(t, unsure.Rollback())

		// Nor is it that of the version.
		unsure = dbtest.Begin(t, t.Context(), s.Plain)
		dbtest.Exec(t, unsure, "UPDATE mysqllock SET token = token + 1 WHERE name = 'k'")
		dbtest.Exec(t, db, "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
		decided := hint()
		n = stock.MustRead(t, decided, db, 1)
		dbtest.OK(t, unsure.Rollback())
		dbtest.ExecIn(t, decided, db, stock.SetStock, n)

		// Other strategies keep others from writing at all.
		for _, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(10 * time.Second), lockctx.Advisory()} {
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", option), dirty)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestARowNewerThanTheSnapshotIsAConflict: where MariaDB checks snapshots (the default from
// 11.6 on), a statement that meets a row which somebody has changed since its transaction read
// is refused, and the transaction is rolled back whole: that is ErrConflict. A lock that is
// asked for with AllowStale is granted all the same.
func TestARowNewerThanTheSnapshotIsAConflict(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		if !s.MariaDB() {
			return // MySQL has nothing of the kind
		}
		var known bool // from 10.6.18 and 10.11.8 on
		dbtest.OK(t, s.Handle().QueryRow("SELECT COUNT(*) FROM information_schema.SYSTEM_VARIABLES WHERE VARIABLE_NAME = 'INNODB_SNAPSHOT_ISOLATION'").Scan(&known))
		if !known {
			return
		}
		db := s.Handle("innodb_snapshot_isolation=ON")
		change := func() { // by somebody who does not ask for the key
			t.Helper()
			_, err := s.Handle().Exec("UPDATE p SET stock = stock + 10 WHERE id = 1")
			dbtest.OK(t, err)
		}
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(stock.TTL), "optimistic": lockctx.Optimistic()} {
			ctx := lockctx.With(dbtest.Limited(t), "k", opt)
			before := s.Stock(1)
			tx := dbtest.Begin(t, ctx, db)
			stock.MustRead(t, ctx, tx, 1)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 77 WHERE id = 2")
			change()
			_, err := tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1")
			if !errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrDeadlock) {
				t.Errorf("%s: the write: %v, want %v", name, err, mysqllock.ErrConflict)
			}
			dbtest.Is(t, name+": Commit", tx.Commit(), mysqllock.ErrConflict)
			s.WantStock(1, before+10)
			if n := s.Stock(2); n == 77 {
				t.Errorf("%s: what came before is committed", name)
			}
		}

		// Do runs it again.
		tries := 0
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			n, err := stock.Read(ctx, db, 1)
			if err != nil {
				return err
			}
			if tries++; tries == 1 {
				change()
			}
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n+1)
			return err
		}, lockctx.Retry(2)))
		if tries != 2 {
			t.Errorf("Do has run %d times", tries)
		}

		// The row of a second key may be newer than the snapshot.
		first := lockctx.With(dbtest.Limited(t), "first")
		tx := dbtest.Begin(t, first, db)
		stock.MustRead(t, dbtest.Limited(t), tx, 1)
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.Handle(), "second", func(context.Context) error { return nil }, lockctx.Lease(stock.TTL)))
		dbtest.ExecIn(t, lockctx.With(first, "second", lockctx.AllowStale()), tx, "UPDATE p SET stock = 5 WHERE id = 2")
		s.WantLocked("second", true)
		dbtest.OK(t, tx.Commit())
		s.WantStock(2, 5)
	})
}
