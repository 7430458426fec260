package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAQueryThatWritesCommitsOutsideATransaction, and gives its lock back.
func TestAQueryThatWritesCommitsOutsideATransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE take() BEGIN UPDATE p SET stock = stock - 1 WHERE id = 1; SELECT stock FROM p WHERE id = 1; END")
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		var n int
		dbtest.OK(t, db.QueryRowContext(ctx, "CALL take()").Scan(&n))
		if n != 9 {
			t.Errorf("CALL returned %d, want 9", n)
		}
		s.wantStock(1, 9)
		s.wantLocked("k", false)

		stock.MustRead(t, ctx, db, 1)
		dbtest.OK(t, db.QueryRowContext(ctx, "CALL take()").Scan(&n))
		s.wantStock(1, 8)
		s.wantLocked("k", false)
	})
}

func TestContextEndCommitsFinishedStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "SET GLOBAL log_bin_trust_function_creators = 1")
		dbtest.Exec(t, s.plain, "CREATE FUNCTION take() RETURNS INT MODIFIES SQL DATA BEGIN UPDATE p SET stock = stock - 1 WHERE id = 1; RETURN 1; END")
		dbtest.Exec(t, s.plain, "CREATE VIEW taken AS SELECT take() AS n")
		db := s.open()
		for _, open := range []bool{false, true} {
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			lctx := lockctx.With(ctx, "k")
			var n int
			dbtest.OK(t, db.QueryRowContext(lctx, "SELECT n FROM taken").Scan(&n)) // reads, as far as its text tells
			want := 9
			if open {
				dbtest.Begin(t, lctx, db)
				want = 10
			}
			s.wantStock(1, 10)
			cancel()
			dbtest.Soon(t, "the lock is free after the context has ended", func() bool { return !s.locked("k") })
			s.wantStock(1, want)
		}
	})
}

func TestRowsAreReadAhead(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx := dbtest.Begin(t, ctx, db)
		for _, q := range []interface {
			QueryContext(context.Context, string, ...any) (*sql.Rows, error)
			QueryRowContext(context.Context, string, ...any) *sql.Row
		}{db, tx} {
			rows, err := q.QueryContext(ctx, "SELECT id FROM p ORDER BY id")
			dbtest.OK(t, err)
			n := 0
			for rows.Next() {
				var id, stock int
				dbtest.OK(t, rows.Scan(&id))
				dbtest.OK(t, q.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = ?", id).Scan(&stock))
				n += stock
			}
			dbtest.OK(t, rows.Err())
			dbtest.OK(t, rows.Close())
			if n != 40 {
				t.Errorf("the sum is %d, want 40", n)
			}
		}
	})
}

func TestManyRowsAreStreamed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		lctx := lockctx.With(ctx, "k")
		const many = "SELECT REPEAT('x', 1000000) FROM p a, p b ORDER BY a.id" // 16 MB
		rows, err := db.QueryContext(lctx, many)
		dbtest.OK(t, err)
		if _, err := read(lctx, db, 1); err == nil || !strings.Contains(err.Error(), "still being read") {
			t.Errorf("a query beside streamed rows: %v", err)
		}
		n := 0
		for rows.Next() {
			var text string
			if dbtest.OK(t, rows.Scan(&text)); len(text) == 1000000 {
				n++
			}
		}
		dbtest.OK(t, rows.Err())
		dbtest.OK(t, rows.Close())
		if n != 16 {
			t.Errorf("%d rows, want 16", n)
		}
		stock.MustRead(t, lctx, db, 1)
		s.wantLocked("k", true)

		// Closed early, by the caller and by the end of the context.
		rows, err = db.QueryContext(lctx, many)
		dbtest.OK(t, err)
		rows.Next()
		dbtest.OK(t, rows.Close())
		stock.MustRead(t, lctx, db, 1)
		rows, err = db.QueryContext(lctx, many)
		dbtest.OK(t, err)
		defer rows.Close()
		cancel()
		dbtest.Soon(t, "the lock is free", func() bool { return !s.locked("k") })
	})
}

// TestPreparingTakesNoLock: and what is prepared runs in a transaction under a lock, as what is prepared
// there does.
func TestPreparingTakesNoLock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 0") // makes the table
		dbtest.OK(t, err)
		get, err := db.Prepare("SELECT stock FROM p WHERE id = ?")
		dbtest.OK(t, err)
		defer get.Close()
		set, err := db.PrepareContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = ? WHERE id = ?")
		dbtest.OK(t, err)
		defer set.Close()
		s.wantLocked("k", false) // preparing takes no lock

		var n int
		for _, session := range []bool{false, true} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			if session {
				stock.MustRead(t, ctx, db, 1)
			}
			tx := dbtest.Begin(t, ctx, db)
			_, err := tx.StmtContext(ctx, set).ExecContext(ctx, 7, 1)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Stmt(get).QueryRow(1).Scan(&n))
			own, err := tx.Prepare("SELECT stock FROM p WHERE id = ?")
			dbtest.OK(t, err)
			var m int
			dbtest.OK(t, own.QueryRow(1).Scan(&m))
			if n != 7 || m != 7 {
				t.Errorf("session=%v: read %d and %d in the transaction, want 7", session, n, m)
			}
			if _, err := own.Query(1, 2); err == nil || !strings.Contains(err.Error(), "expected 1 arguments, got 2") {
				t.Errorf("wrong number of arguments: %v", err)
			}
			if _, err := tx.Prepare("SELEKT"); err == nil {
				t.Error("Prepare of nonsense succeeded")
			}
			s.wantStock(1, 10)
			dbtest.OK(t, tx.Rollback())
			s.wantLocked("k", false)
		}
	})
}

// TestPreparedOutlivesTheHold: a statement of the handle that was used in a transaction of Do, as
// GORM does with PrepareStmt, and one of a sql.Conn that was prepared there, run on without the lock
// afterwards. database/sql uses again what was prepared on the connection of that transaction.
func TestPreparedOutlivesTheHold(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, maxConns := range []int{0, 8} {
			db, tap := s.tapped(mysqllock.Config{MaxConns: maxConns})
			get := func(st *sql.Stmt) {
				t.Helper()
				var n int
				if dbtest.OK(t, st.QueryRowContext(dbtest.Limited(t), 1).Scan(&n)); n != 10 {
					t.Errorf("maxConns=%d: read %d, want 10", maxConns, n)
				}
			}
			of, err := db.Prepare("SELECT stock FROM p WHERE id = ?")
			dbtest.OK(t, err)
			defer of.Close()
			conn := dbtest.Conn(t, db) // has what it was prepared on, so that the transaction has another one
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				tx := dbtest.Begin(t, ctx, db)
				get(tx.StmtContext(ctx, of))
				return tx.Commit()
			}))
			tap.Costs(t, fmt.Sprintf("with maxConns=%d, a statement that has run", maxConns), 1, func() error { get(of); return nil })
			var own *sql.Stmt
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) (err error) {
				tx := dbtest.Begin(t, ctx, conn)
				own, err = conn.PrepareContext(ctx, "SELECT stock FROM p WHERE id = ?")
				dbtest.OK(t, err)
				return tx.Commit()
			}))
			tap.Costs(t, fmt.Sprintf("with maxConns=%d, a statement that was prepared there", maxConns), 1, func() error { get(own); return nil })
			dbtest.OK(t, own.Close())
		}
	})
}

func TestWithoutTakesNoLock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		dbtest.ExecIn(t, lockctx.Without(ctx), db, "UPDATE p SET stock = 9 WHERE id = 1")
		tx := dbtest.Begin(t, ctx, db)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 8 WHERE id = 1")
		n, err := read(lockctx.Without(ctx), db, 1)
		if dbtest.OK(t, err); n != 9 {
			t.Errorf("a statement without the hint read %d, so it was moved into the transaction", n)
		}
		n, err = read(lockctx.Without(ctx), tx, 1)
		if dbtest.OK(t, err); n != 8 {
			t.Errorf("a statement of the transaction read %d, so it left it", n)
		}
		dbtest.OK(t, tx.Rollback())
	})
}

// forQuery is the context of a single query, which has ended when that is over.
func forQuery(ctx context.Context, does func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return does(ctx)
}

// perQuery reads, decides and writes, each with a context of its own.
func perQuery(ctx context.Context, db *sql.DB, write func(ctx context.Context, n int) error) error {
	var n int
	err := forQuery(ctx, func(ctx context.Context) (err error) {
		n, err = read(ctx, db, 1)
		return err
	})
	if err != nil {
		return err
	}
	return forQuery(ctx, func(ctx context.Context) error { return write(ctx, n-1) })
}

// TestUnitOutlivesTheContextOfItsQuery: the unit of work lives as long as its lock context, whatever
// becomes of the contexts of its queries. One that never ends leaves the lock to the
// context of the query that took it, and that is the same in each run.
func TestUnitOutlivesTheContextOfItsQuery(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		writes := map[string]func(ctx context.Context, n int) error{
			"Exec": func(ctx context.Context, n int) error { return exec(ctx, db, stock.SetStock, n) },
			"BeginTx": func(ctx context.Context, n int) error {
				return stock.InTx(ctx, db, func(tx *sql.Tx) error { return exec(ctx, tx, stock.SetStock, n) })
			},
			"Do": func(ctx context.Context, n int) error {
				return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return exec(ctx, db, stock.SetStock, n) })
			},
		}
		for name, opts := range stock.KeptAs() {
			for how, write := range writes {
				if (name == "shared" || name == "optimistic") && how == "Do" {
					continue // asks for more than its lock context has, or for a lock beside its version
				}
				t.Run(name+" "+how, func(t *testing.T) {
					for range dbtest.Long(6, 15) {
						dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
						ends, cancel := context.WithCancel(context.Background())
						err := perQuery(lockctx.With(ends, "k", opts...), db, write)
						cancel()
						dbtest.OK(t, err)
						s.wantStock(1, 9)

						err = perQuery(lockctx.With(context.Background(), "k", opts...), db, write)
						if name == "optimistic" { // holds nothing
							dbtest.OK(t, err)
							s.wantStock(1, 8)
							continue
						}
						stock.WantError(t, "a lock context that never ends", err, mysqllock.ErrLost, "the lock context never ends")
						s.wantStock(1, 9)
					}
				})
			}
		}
	})
}

// TestAReadWhoseContextEndsInATransactionIsDecidedOnNoMore: it has taken the lock, in a lock context that never ends.
func TestAReadWhoseContextEndsInATransactionIsDecidedOnNoMore(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, opts := range stock.KeptAs() {
			if name == "optimistic" {
				continue
			}
			t.Run(name, func(t *testing.T) {
				for range dbtest.Long(6, 10) {
					ctx := lockctx.With(context.Background(), "k", opts...)
					one, cancel := context.WithCancel(ctx)
					stock.MustRead(t, one, db, 1)
					tx := dbtest.Begin(t, ctx, db)
					cancel()
					err := tx.Commit() // changes nothing, so the lock would stay
					if name == "lease" || name == "advisory" {
						dbtest.OK(t, err) // they are the transaction's until its end
					} else {
						stock.WantError(t, "Commit", err, mysqllock.ErrLost, "the lock context never ends")
					}
					_, err = db.ExecContext(ctx, stock.SetStock, 9)
					stock.WantError(t, "a write", err, mysqllock.ErrLost, "the lock context never ends")
				}
				err := mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error {
					return nil
				}, append(stock.KeptAs()[name], lockctx.Wait(ttl/2))...)
				if err != nil {
					t.Errorf("nobody has the key, and it is not free: %v", err)
				}
				s.wantStock(1, 10)
			})
		}
	})
}

// TestAStatementKilledAtItsCommitHasNotCommitted, and nobody is told that it has: FLUSH TABLES WITH READ LOCK, as of
// a backup, holds up the COMMIT of a statement that does more than that, and KILL QUERY ends it there, so that the
// server rolls the transaction back.
func TestAStatementKilledAtItsCommitHasNotCommitted(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) { // which stand still meanwhile
		db, tap := s.tapped(mysqllock.Config{MaxConns: 20}) // else the next caller waits in MariaDB, and FLUSH TABLES for that
		admin, err := s.plain.Conn(dbtest.Limited(t))       // for the lock that it keeps, in turns
		dbtest.OK(t, err)
		defer admin.Close()
		ask := func(text string) (n int) {
			t.Helper()
			dbtest.OK(t, s.plain.QueryRowContext(dbtest.Limited(t), text).Scan(&n))
			return n
		}
		const sell = "UPDATE p SET stock = stock - 1 WHERE id = 1"
		transaction := func(ctx context.Context, stop func()) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			dbtest.Exec(t, tx, sell)
			stop()
			return tx.Commit()
		}
		next := make(chan error, 1)
		for _, c := range []struct {
			what string
			with string // what the statement has in it
			run  func(stop func()) error
		}{
			{"advisory", "; COMMIT", func(stop func()) error {
				return transaction(lockctx.With(dbtest.Limited(t), "k", lockctx.Advisory()), stop)
			}},
			{"advisory, Do", "; COMMIT", func(stop func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return transaction(ctx, stop) }, lockctx.Advisory())
			}},
			{"lease, Do", "; COMMIT", func(stop func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return transaction(ctx, stop) }, lockctx.Lease(ttl))
			}},
			{"row, handed over", "COMMIT; SELECT ", func(stop func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					go func() {
						next <- mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil })
					}()
					dbtest.Soon(t, "a caller is in the queue", func() bool {
						stats, err := mysqllock.Stats(db)
						return err == nil && stats.Waiters > 0
					})
					_, err := db.ExecContext(ctx, sell)
					stop()
					return err
				})
			}},
		} {
			// Without a disturbance first, and until the statement is known that commits.
			for warm := 0; ; warm++ {
				seen := tap.Texts()
				dbtest.OK(t, c.run(func() {}))
				if c.what == "row, handed over" {
					dbtest.OK(t, <-next)
				}
				if texts := strings.Join(seen(), "\n"); strings.Contains(texts, c.with) || s.MariaDB() && warm == 3 {
					break
				} else if warm == 50 {
					t.Fatalf("%s: %s", c.what, texts)
				}
				time.Sleep(10 * time.Millisecond)
			}
			stock := ask("SELECT stock FROM p WHERE id = 1")
			result := make(chan error, 1)
			go func() {
				result <- c.run(func() { dbtest.Exec(t, admin, "FLUSH TABLES WITH READ LOCK") })
			}()
			const held = " FROM information_schema.PROCESSLIST WHERE STATE LIKE 'Waiting for % lock' AND INFO LIKE '%COMMIT%' AND INFO NOT LIKE 'CREATE%' AND ID <> CONNECTION_ID()"
			dbtest.Soon(t, c.what+": COMMIT is held up", func() bool { return ask("SELECT COUNT(*)"+held) == 1 })
			id := ask("SELECT ID" + held)
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL QUERY %d", id))
			dbtest.Soon(t, c.what+": it is killed", func() bool { return ask("SELECT COUNT(*)"+held) == 0 })
			dbtest.Exec(t, admin, "UNLOCK TABLES")
			if err := <-result; err == nil || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s: %v", c.what, err)
			}
			if c.what == "row, handed over" {
				dbtest.OK(t, <-next)
			}
			if n := ask("SELECT stock FROM p WHERE id = 1"); n != stock {
				t.Errorf("%s: the stock was %d and is %d", c.what, stock, n)
			}
		}
	})
}

// TestLeasesAreCommittedInEachCharacterSet of the connection, and of the program that was the first to take one.
func TestLeasesAreCommittedInEachCharacterSet(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, first := range []string{"charset=binary", "character_set_connection=binary", "charset=latin1", "character_set_connection=utf16"} {
			s := newScratch(s.Beside(t))
			for _, params := range []string{first, "charset=utf8mb4", "charset=binary", "character_set_connection=utf16"} {
				db := s.open(params)
				err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					return exec(ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				}, lockctx.Lease(ttl))
				if err != nil {
					t.Errorf("%s after %s: %v", params, first, err)
				}
			}
			s.wantStock(1, 6)
		}
	})
}

// TestACommitWaitsForALockedRowAsLongAsItsLeaseLasts, and not only for the application's own limit.
func TestACommitWaitsForALockedRowAsLongAsItsLeaseLasts(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "made"), s.open(), "DO 1")
		db := s.user("SELECT, UPDATE ON $db.p", "SELECT, INSERT, UPDATE ON $db.mysqllock").open("innodb_lock_wait_timeout=1")
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			tx, err := s.plain.Begin()
			dbtest.OK(t, err)
			var n int
			dbtest.OK(t, tx.QueryRow("SELECT 1 FROM mysqllock WHERE name = 'k' FOR UPDATE").Scan(&n))
			time.AfterFunc(2500*time.Millisecond, func() { _ = tx.Rollback() })
			return dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 2"))
		}, lockctx.Lease(20*time.Second)))
		s.wantStock(2, 9)
	})
}

// TestCloseEndsWhileUnitsAskForMoreKeys: none of them waits for Close, which waits for them.
func TestCloseEndsWhileUnitsAskForMoreKeys(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for range 3 {
			db := s.open()
			var asking sync.WaitGroup
			var asked atomic.Int32
			for i := range 16 {
				hold, err := mysqllock.Acquire(context.Background(), db, fmt.Sprintf("hold %d", i))
				dbtest.OK(t, err)
				asking.Go(func() {
					for n := 0; ; n++ {
						ctx := lockctx.With(hold.Context(), fmt.Sprintf("more %d %d", i, n%20))
						if _, err := db.ExecContext(ctx, "DO 1"); err != nil {
							return
						}
						asked.Add(1)
					}
				})
			}
			dbtest.Soon(t, "they ask", func() bool { return asked.Load() >= 16 })
			closed := make(chan struct{})
			go func() {
				_ = db.Close()
				asking.Wait()
				close(closed)
			}()
			select {
			case <-closed:
			case <-time.After(time.Minute):
				t.Fatal("Close, or a caller, hangs")
			}
		}
	})
}

// big makes a table whose rows are too many to be read ahead.
func (s *scratch) big() {
	s.T.Helper()
	dbtest.Exec(s.T, s.plain, "CREATE TABLE big (id INT PRIMARY KEY, v LONGTEXT) ENGINE=InnoDB")
	for i := range 20 {
		dbtest.Exec(s.T, s.plain, "INSERT INTO big VALUES (?, REPEAT('x', 1000000))", i)
	}
}

func TestDeadlockAmongStreamedRowsEndsTheUnit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.big()
		db := s.open()
		dbtest.Exec(t, s.plain, "CREATE TABLE w (id INT PRIMARY KEY AUTO_INCREMENT, v INT) ENGINE=InnoDB")
		other, err := s.plain.Begin()
		dbtest.OK(t, err)
		defer other.Rollback()
		for range 50 { // has written more, so the server rolls ours back
			dbtest.Exec(t, other, "INSERT INTO w (v) VALUES (1), (2), (3), (4), (5)")
		}
		dbtest.Exec(t, other, "UPDATE big SET v = 'y' WHERE id = 19")
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
		rows, err := tx.Query("SELECT id, v FROM big ORDER BY id FOR UPDATE")
		dbtest.OK(t, err)
		defer rows.Close()
		cycle := make(chan struct{})
		go func() {
			defer close(cycle)
			other.Exec("UPDATE p SET stock = 5 WHERE id = 1")
		}()
		for rows.Next() {
		}
		if rows.Err() == nil {
			t.Fatal("there was no deadlock")
		}
		dbtest.OK(t, rows.Close())
		<-cycle
		dbtest.OK(t, other.Rollback())
		dbtest.Is(t, "a statement after the deadlock", dbtest.Err(tx.Exec("UPDATE p SET stock = 77 WHERE id = 2")), mysqllock.ErrLost)
		tx.Rollback()
		s.wantStock(2, 10)
		s.wantStock(1, 10)
	})
}

func TestProcedureThatCommitsLosesTheLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE leaky() BEGIN UPDATE p SET stock = stock - 1 WHERE id = 1; COMMIT; END")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE fine() BEGIN UPDATE p SET stock = stock - 1 WHERE id = 1; SELECT stock FROM p WHERE id = 1; END")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE failing() BEGIN SIGNAL SQLSTATE '45000'; END")
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
		dbtest.Exec(t, tx, "CALL fine()")
		if _, err := tx.Exec("CALL failing()"); err == nil || errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("a procedure that fails: %v", err)
		}
		s.wantLocked("k", true)
		dbtest.Exec(t, tx, "CALL leaky()") // whether it has ended the transaction is asked before the next statement
		dbtest.Is(t, "the next statement", dbtest.Err(tx.Exec("UPDATE p SET stock = 99 WHERE id = 2")), mysqllock.ErrLost)
		tx.Rollback()
		s.wantStock(2, 10)

		for what, next := range map[string]func(context.Context, *sql.Tx) error{
			"commit": func(_ context.Context, tx *sql.Tx) error { return tx.Commit() },
			"a look at what it left, and commit": func(_ context.Context, tx *sql.Tx) error {
				var n int
				dbtest.OK(t, tx.QueryRow("SELECT ROW_COUNT()").Scan(&n))
				return tx.Commit()
			},
			"savepoint": func(ctx context.Context, _ *sql.Tx) error { _, err := db.BeginTx(ctx, nil); return err },
			"another key": func(ctx context.Context, tx *sql.Tx) error {
				return exec(lockctx.With(ctx, "other", lockctx.AllowStale()), tx, "UPDATE p SET stock = 99 WHERE id = 2")
			},
			"a text that goes back": func(_ context.Context, tx *sql.Tx) error { _, err := tx.Exec("ROLLBACK TO SAVEPOINT mine"); return err },
		} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			tx := dbtest.Begin(t, ctx, db)
			dbtest.Exec(t, tx, "SAVEPOINT mine")
			dbtest.Exec(t, tx, "CALL leaky()")
			dbtest.Is(t, what+" after a procedure that commits", next(ctx, tx), mysqllock.ErrLost)
			tx.Rollback()
			s.wantStock(2, 10)
		}
		// Outside of a transaction COMMIT follows at once.
		for _, text := range []string{"CALL leaky()", "CALL leaky_and_failing()"} {
			dbtest.Exec(t, s.plain, "CREATE PROCEDURE IF NOT EXISTS leaky_and_failing() BEGIN COMMIT; SIGNAL SQLSTATE '45000'; END")
			dbtest.Is(t, fmt.Sprintf("%s outside of a transaction", text), dbtest.Err(db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), text)), mysqllock.ErrLost)
		}
	})
}

func TestStmtCloseDoesNotHangWhileItsRowsStream(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.big()
		db := s.open()
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
		st, err := tx.Prepare("SELECT id, v FROM big WHERE id >= ?")
		dbtest.OK(t, err)
		rows, err := st.Query(0)
		dbtest.OK(t, err)
		rows.Next()
		done := make(chan error, 1)
		go func() {
			st.Close() // waits for the rows or not, but for nothing else
			done <- rows.Close()
		}()
		select {
		case err := <-done:
			dbtest.OK(t, err)
		case <-time.After(time.Minute):
			t.Fatal("Stmt.Close and Rows.Close hang")
		}
		stock.MustRead(t, dbtest.Limited(t), tx, 1)
		dbtest.OK(t, tx.Commit())
	})
}

func TestInnerRollbackCutsRowsOffWithAnError(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.big()
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		outer := dbtest.Begin(t, ctx, db)
		inner := dbtest.Begin(t, ctx, db)
		dbtest.Exec(t, inner, "UPDATE p SET stock = 66 WHERE id = 1")
		rows, err := outer.QueryContext(ctx, "SELECT id, v FROM big")
		dbtest.OK(t, err)
		defer rows.Close()
		rows.Next()
		dbtest.OK(t, inner.Rollback())
		for rows.Next() {
		}
		if rows.Err() == nil {
			t.Error("rows that were cut off end as if they were complete")
		}
		dbtest.OK(t, rows.Close())
		dbtest.OK(t, outer.Commit())
		s.wantStock(1, 10)
	})
}

func TestStatementsOfAUnitLeaveNothingPrepared(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		other, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "other"), nil)
		dbtest.OK(t, err)
		stock.MustRead(t, ctx, db, 1)
		var id int
		for range 50 {
			stock.MustRead(t, dbtest.Limited(t), other, 1)
			stock.MustRead(t, ctx, db, 1)
		}
		// A session whose statements are counted by itself.
		var name string
		var n int
		for q, ctx := range map[querier]context.Context{other: dbtest.Limited(t), db: ctx} {
			dbtest.OK(t, q.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id))
			var prepared, closed int
			dbtest.OK(t, q.QueryRowContext(ctx, "SHOW SESSION STATUS LIKE 'Com_stmt_prepare'").Scan(&name, &prepared))
			dbtest.OK(t, q.QueryRowContext(ctx, "SHOW SESSION STATUS LIKE 'Com_stmt_close'").Scan(&name, &closed))
			n = prepared - closed
			if prepared < 50 || n > 1 {
				t.Errorf("connection %d: %d statements prepared, %d closed", id, prepared, closed)
			}
		}
		dbtest.OK(t, other.Rollback())
	})
}
