package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Corners in which a lock, a write or a connection could slip through.

// big makes a table whose rows are too many to be read ahead.
func (s *scratch) big() {
	s.T.Helper()
	dbtest.Exec(s.T, s.plain, "CREATE TABLE big (id INT PRIMARY KEY, v LONGTEXT) ENGINE=InnoDB")
	for i := range 20 {
		dbtest.Exec(s.T, s.plain, "INSERT INTO big VALUES (?, REPEAT('x', 1000000))", i)
	}
}

func TestDeadlockAmongStreamedRows(t *testing.T) {
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
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
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
		if _, err := tx.Exec("UPDATE p SET stock = 77 WHERE id = 2"); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("a statement after the deadlock: %v", err)
		}
		tx.Rollback()
		s.wantStock(2, 10)
		s.wantStock(1, 10)
	})
}

func TestWithInsideWith(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "tenant"), "product")
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		s.wantLocked("tenant", true)
		s.wantLocked("product", true)
		dbtest.OK(t, tx.Rollback())
	})
}

func TestForeignTransactionOutlivesTheLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, how := range []string{"context", "kill"} {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			defer cancel()
			lctx := lockctx.With(ctx, "k")
			tx, err := db.Begin()
			dbtest.OK(t, err)
			var id string
			dbtest.OK(t, db.QueryRowContext(lctx, "SELECT CONNECTION_ID() FROM p LIMIT 1").Scan(&id))
			_, err = tx.ExecContext(lctx, "UPDATE p SET stock = 0 WHERE id = 2")
			dbtest.OK(t, err)
			if how == "context" {
				cancel()
			} else {
				dbtest.Exec(t, s.plain, "KILL "+id)
			}
			dbtest.Soon(t, "the lock is free", func() bool { return !s.locked("k") })
			if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s: Commit after the lock has gone: %v", how, err)
			}
			s.wantStock(2, 10)
		}
	})
}

func TestProcedureThatCommits(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE leaky() BEGIN UPDATE p SET stock = stock - 1 WHERE id = 1; COMMIT; END")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE fine() BEGIN UPDATE p SET stock = stock - 1 WHERE id = 1; SELECT stock FROM p WHERE id = 1; END")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE failing() BEGIN SIGNAL SQLSTATE '45000'; END")
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "CALL fine()")
		if _, err := tx.Exec("CALL failing()"); err == nil || errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("a procedure that fails: %v", err)
		}
		s.wantLocked("k", true)
		dbtest.Exec(t, tx, "CALL leaky()") // whether it has ended the transaction is asked before the next statement
		if _, err := tx.Exec("UPDATE p SET stock = 99 WHERE id = 2"); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("the next statement: %v", err)
		}
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
				_, err := tx.ExecContext(lockctx.With(ctx, "other", lockctx.AllowStale()), "UPDATE p SET stock = 99 WHERE id = 2")
				return err
			},
			"a text that goes back": func(_ context.Context, tx *sql.Tx) error { _, err := tx.Exec("ROLLBACK TO SAVEPOINT mine"); return err },
		} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "SAVEPOINT mine")
			dbtest.Exec(t, tx, "CALL leaky()")
			if err := next(ctx, tx); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s after a procedure that commits: %v", what, err)
			}
			tx.Rollback()
			s.wantStock(2, 10)
		}
		// Outside of a transaction COMMIT follows at once.
		for _, text := range []string{"CALL leaky()", "CALL leaky_and_failing()"} {
			dbtest.Exec(t, s.plain, "CREATE PROCEDURE IF NOT EXISTS leaky_and_failing() BEGIN COMMIT; SIGNAL SQLSTATE '45000'; END")
			if _, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), text); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s outside of a transaction: %v", text, err)
			}
		}
	})
}

// MariaDB's limit on the idleness of locked transactions does not reach others.
func TestIdleLimitStaysWithLockedTransactions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=3s")
		h, err := mysqllock.Acquire(dbtest.Limited(t), s.open(), "held")
		dbtest.OK(t, err)
		defer h.Rollback()
		conn, err := db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		for i, begin := range []func() error{
			func() error { // a lock that was not granted, then BeginTx
				_, err := conn.BeginTx(lockctx.With(dbtest.Limited(t), "held", lockctx.NoWait()), nil)
				if !errors.Is(err, mysqllock.ErrLocked) {
					t.Errorf("NoWait: %v", err)
				}
				tx, err := conn.BeginTx(dbtest.Limited(t), nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 3")
				time.Sleep(3500 * time.Millisecond)
				return tx.Commit()
			},
			func() error { // a lock that was granted, then BEGIN as text
				_, err := conn.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 1 WHERE id = 1")
				dbtest.OK(t, err)
				dbtest.Exec(t, conn, "BEGIN")
				dbtest.Exec(t, conn, "UPDATE p SET stock = 2 WHERE id = 3")
				time.Sleep(3500 * time.Millisecond)
				_, err = conn.ExecContext(dbtest.Limited(t), "COMMIT")
				return err
			},
		} {
			if err := begin(); err != nil {
				t.Errorf("%d: a transaction without a hint that was idle: %v", i, err)
			}
			s.wantStock(3, 1+i)
		}
	})
}

func TestStmtCloseWhileItsRowsStream(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.big()
		db := s.open()
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
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
		_, err = read(dbtest.Limited(t), tx, 1)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Commit())
	})
}

func TestInnerRollbackWhileRowsStream(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		s.big()
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		outer, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		inner, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
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

// A lock is where its handle's database is, wherever USE has led a connection.
func TestUseDoesNotMoveTheLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		there := newScratch(s.Beside(t))
		h, err := mysqllock.Acquire(dbtest.Limited(t), s.open("lockNamespace=app"), "k")
		dbtest.OK(t, err)
		defer h.Rollback()
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), there.open("lockNamespace=app"), "k", func(context.Context) error { return nil }))
		conn, err := s.open("lockNamespace=app").Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		dbtest.Exec(t, conn, "USE "+there.Name)
		if _, err := conn.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil); !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("a second holder of the key, after USE: %v", err)
		}
	})
}

func TestAutocommitOffAndOn(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		conn, err := s.open().Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		hinted := func() error {
			_, err := conn.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 2 WHERE id = 1")
			return err
		}
		dbtest.Exec(t, conn, "SET autocommit = 0")
		dbtest.Exec(t, conn, "UPDATE p SET stock = 1 WHERE id = 2")
		if err := hinted(); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("with autocommit off: %v", err)
		}
		dbtest.Exec(t, conn, "COMMIT")
		dbtest.Exec(t, conn, "SET autocommit = 1")
		dbtest.OK(t, hinted())
		dbtest.Exec(t, conn, "START TRANSACTION")
		if err := hinted(); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("in a transaction begun by text: %v", err)
		}
		tx, err := conn.BeginTx(dbtest.Limited(t), nil) // commits it
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, hinted())
	})
}

func TestNoPreparedStatementIsLeft(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		foreign, err := db.Begin()
		dbtest.OK(t, err)
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		var id int
		for range 50 {
			_, err := read(ctx, foreign, 1)
			dbtest.OK(t, err)
			_, err = read(ctx, db, 1)
			dbtest.OK(t, err)
		}
		// A session whose statements are counted by itself.
		var name string
		var n int
		for _, q := range []querier{foreign, db} {
			dbtest.OK(t, q.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id))
			var prepared, closed int
			dbtest.OK(t, q.QueryRowContext(ctx, "SHOW SESSION STATUS LIKE 'Com_stmt_prepare'").Scan(&name, &prepared))
			dbtest.OK(t, q.QueryRowContext(ctx, "SHOW SESSION STATUS LIKE 'Com_stmt_close'").Scan(&name, &closed))
			n = prepared - closed
			if prepared < 50 || n > 1 {
				t.Errorf("connection %d: %d statements prepared, %d closed", id, prepared, closed)
			}
		}
		dbtest.OK(t, foreign.Rollback())
	})
}

func TestDroppedTableOfAKnownKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for range 2 {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { s.wantLocked("k", true); return nil }))
			dbtest.Exec(t, s.plain, "DROP TABLE mysqllock")
		}
	})
}

func TestHolderIsNotTheWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		h, err := mysqllock.Acquire(dbtest.Limited(t), other, "b")
		dbtest.OK(t, err)
		defer h.Rollback()
		var id uint64
		dbtest.OK(t, other.QueryRowContext(h.Context(), "SELECT CONNECTION_ID()").Scan(&id))
		var e *mysqllock.Error
		dbtest.Soon(t, "the holder is shown", func() bool {
			_, err = db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), []string{"a", "b"}, lockctx.Wait(150*time.Millisecond)), nil)
			return errors.As(err, &e) && e.Holder != nil
		})
		if e.Holder.ConnectionID != id {
			t.Errorf("the holder is said to be %v, it is connection %d", e.Holder, id)
		}
	})
}

// A hold that runs out inside a lock context leaves what is around it alone.
func TestInnerHoldRunsOut(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "b"), "DO 1") // the table is there
		dbtest.OK(t, err)
		outer := lockctx.With(dbtest.Limited(t), "a")
		short, cancel := context.WithTimeout(outer, 100*time.Millisecond)
		defer cancel()
		err = mysqllock.Do(short, db, "b", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		if err == nil {
			t.Error("Do succeeded although its context had ended")
		}
		dbtest.Soon(t, "the inner lock is free", func() bool { return !s.locked("b") })
		_, err = db.ExecContext(outer, "UPDATE p SET stock = 2 WHERE id = 1")
		dbtest.OK(t, err)
	})
}

func TestHoldEndsUnderAStatement(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		tx, err := db.BeginTx(h.Context(), nil)
		dbtest.OK(t, err)
		done := make(chan error, 1)
		go func() {
			for {
				if _, err := tx.Exec("UPDATE p SET stock = 1 WHERE id = 1"); err != nil {
					done <- err
					return
				}
			}
		}()
		time.Sleep(10 * time.Millisecond)
		if err := h.Release(); err == nil || !strings.Contains(err.Error(), "still open") {
			t.Errorf("Release with a transaction open: %v", err)
		}
		<-done
		tx.Rollback()
		s.wantStock(1, 10)
	})
}

// Who waits on a sql.Conn is never made to try again: database/sql would not.
func TestWaiterOnASQLConn(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		time.AfterFunc(500*time.Millisecond, func() { h.Release() })
		conn, err := db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		tx, err := conn.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())
	})
}

// slowDial takes its time to connect for those who wait for a lock.
type slowDial struct{ sqlmw.NullInterceptor }

func (slowDial) ConnectorConnect(ctx context.Context, k driver.Connector) (driver.Conn, error) {
	if _, ok := hint.From(ctx); ok {
		time.Sleep(100 * time.Millisecond)
	}
	return k.Connect(ctx)
}

// A connection that is opened for somebody else is not taken for a sign that
// the pool is full.
func TestUnboundedPoolIsNotTakenForFull(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{Base: intercept.With(slowDial{})}))
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		first := make(chan error, 1)
		begin := func(opts ...lockctx.Option) error {
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", opts...), nil)
			if err == nil {
				err = tx.Rollback()
			}
			return err
		}
		go func() { first <- begin() }()
		time.Sleep(190 * time.Millisecond) // it dialled, waited 50 ms, was asked, and dials again
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var n int
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT 1").Scan(&n))
		if err := begin(lockctx.Wait(300 * time.Millisecond)); !errors.Is(err, mysqllock.ErrTimeout) {
			t.Errorf("another waiter: %v, want ErrTimeout", err)
		}
		dbtest.OK(t, h.Release())
		dbtest.OK(t, <-first)
	})
}

// A transaction that something has ended unseen is not taken for one that can
// hold a lock.
func TestLateHintInAnEndedTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, text := range []string{"COMMIT", "CREATE TABLE q (id INT)"} {
			tx, err := db.Begin()
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, text)
			if _, err := tx.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 0 WHERE id = 1"); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("a late hint after %s: %v", text, err)
			}
			dbtest.OK(t, tx.Rollback())
			s.wantStock(1, 10)
		}
	})
}

// foreign begins a transaction elsewhere that has set the stock of 1 to 0 under the
// lock of a session of ctx.
func foreign(t *testing.T, ctx context.Context, db *sql.DB) *sql.Tx {
	t.Helper()
	_, err := read(ctx, db, 2)
	dbtest.OK(t, err)
	tx, err := db.Begin()
	dbtest.OK(t, err)
	_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1")
	dbtest.OK(t, err)
	return tx
}

// A transaction whose statements ran under a session's lock does not take
// another lock for it.
func TestForeignTransactionUnderALockThatHasGone(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx := foreign(t, ctx, db)
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 3") // gives the lock back
		dbtest.OK(t, err)
		if _, err = tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 4"); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("the next statement: %v", err)
		}
		if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Commit: %v", err)
		}
		s.wantStock(1, 10)
	})
}

// Its Commit does not wait for a statement that waits for its rows.
func TestForeignTransactionInTheWay(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx := foreign(t, ctx, db)
		done := make(chan error, 1)
		go func() {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			done <- err
		}()
		dbtest.Soon(t, "the session waits for the transaction's row", func() bool {
			var n int
			dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'UPDATE p SET stock = stock - 1%'", s.Name).Scan(&n))
			return n == 1
		})
		if err := tx.Commit(); err == nil || !strings.Contains(err.Error(), "still running") {
			t.Errorf("Commit: %v", err)
		}
		dbtest.OK(t, <-done)
		s.wantStock(1, 9)
	})
}

// Every locked transaction on MariaDB has its limit, however it began.
func TestIdleLimitOfEveryLockedTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if !s.MariaDB() {
			return // MySQL has none
		}
		db := s.open("lockTTL=20s")
		check := func(what string, tx *sql.Tx) {
			t.Helper()
			var n int
			dbtest.OK(t, tx.QueryRow("SELECT @@idle_transaction_timeout").Scan(&n))
			if n != 20 {
				t.Errorf("%s: idle_transaction_timeout is %d, want 20", what, n)
			}
		}
		begin := func(ctx context.Context, opts *sql.TxOptions) *sql.Tx {
			tx, err := db.BeginTx(ctx, opts)
			dbtest.OK(t, err)
			t.Cleanup(func() { tx.Rollback() })
			return tx
		}
		first := begin(lockctx.With(dbtest.Limited(t), "k"), nil)
		check("first", first)
		waiter := make(chan *sql.Tx)
		go func() { waiter <- begin(lockctx.With(dbtest.Limited(t), "k"), nil) }()
		time.Sleep(100 * time.Millisecond)
		dbtest.OK(t, first.Commit())
		check("waited", <-waiter)
		check("with an isolation level", begin(lockctx.With(dbtest.Limited(t), "k2"), &sql.TxOptions{Isolation: sql.LevelReadCommitted}))
		late := begin(dbtest.Limited(t), nil)
		_, err := late.ExecContext(lockctx.With(dbtest.Limited(t), "k3"), "UPDATE p SET stock = 1 WHERE id = 1")
		dbtest.OK(t, err)
		check("late hint", late)
	})
}

// endsAtAnswer is a client's connection on which a context ends when the answer to
// a statement has arrived: the driver closes it then all the same.
type endsAtAnswer struct {
	net.Conn
	text   string
	end    *context.CancelFunc
	asked  bool
	closed chan struct{}
	once   sync.Once
}

func (c *endsAtAnswer) Write(b []byte) (int, error) {
	c.asked = c.asked || *c.end != nil && bytes.Contains(b, []byte(c.text))
	return c.Conn.Write(b)
}

func (c *endsAtAnswer) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.asked {
		c.asked = false
		(*c.end)()
		<-c.closed
	}
	return n, err
}

func (c *endsAtAnswer) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// Who gives up while a late lock is asked for is told so, and not that a
// connection was lost, and the transaction with it.
func TestLateHintGivenUp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, text := range []string{"SAVEPOINT mysqllock_late", "RELEASE SAVEPOINT mysqllock_late"} {
			var end context.CancelFunc
			cfg := s.Config()
			cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
				var d net.Dialer
				c, err := d.DialContext(ctx, network, addr)
				return &endsAtAnswer{Conn: c, text: text, end: &end, closed: make(chan struct{})}, err
			}
			connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
			dbtest.OK(t, err)
			db := sql.OpenDB(connector)
			defer db.Close()
			_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 0") // sets everything up
			dbtest.OK(t, err)
			tx, err := db.Begin()
			dbtest.OK(t, err)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			defer cancel()
			end = cancel
			_, err = tx.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 1 WHERE id = 1")
			if !errors.Is(err, context.Canceled) || errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("given up at %s: %v", text, err)
			}
			if err := tx.Commit(); err == nil {
				t.Error("what is left of it was committed")
			}
			s.wantStock(1, 10)
			s.wantLocked("k", false)
		}
	})
}
