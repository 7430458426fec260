package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The rules of a lock context: one test for each cell of the table.

type querier = stock.Querier

func read(ctx context.Context, db querier, id int) (int, error) { return stock.Read(ctx, db, id) }

func TestBeginTxLocksOnItsOwnConnection(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		ctx := lockctx.With(dbtest.Limited(t), "k")
		warm, err := db.BeginTx(ctx, nil) // the table, the row, the connections
		dbtest.OK(t, err)
		dbtest.OK(t, warm.Rollback())

		seen := tap.Since()
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		s.wantLocked("k", true)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		s.wantStock(1, 10)
		dbtest.OK(t, tx.Commit())
		s.wantLocked("k", false)
		s.wantStock(1, 9)
		log := seen()
		if len(log) != 3 || log[0].Conn != log[1].Conn || log[1].Conn != log[2].Conn {
			t.Errorf("want BEGIN with lock, UPDATE, COMMIT on one connection; the server got %v", log)
		}

		tx, err = db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 8 WHERE id = 1")
		dbtest.OK(t, tx.Rollback())
		s.wantLocked("k", false)
		s.wantStock(1, 9)
	})
}

func TestBeginTxRunsOnTheSession(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, commit := range []bool{true, false} {
			db, tap := s.tapped(mysqllock.Config{})
			ctx := lockctx.With(dbtest.Limited(t), "k")
			_, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			if _, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable}); err == nil || !strings.Contains(err.Error(), "options") {
				t.Errorf("other options than the session's: %v", err)
			}
			seen := tap.Since()
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1") // a context without the hint
			s.wantLocked("k", true)
			if commit {
				dbtest.OK(t, tx.Commit())
			} else {
				dbtest.OK(t, tx.Rollback())
			}
			s.wantLocked("k", false)
			s.wantStock(1, 9)
			if log := seen(); len(log) != 2 {
				t.Errorf("want UPDATE and COMMIT or ROLLBACK, the server got %v", log)
			}
		}
	})
}

func TestNestedBeginTxIsASavepoint(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, session := range []bool{false, true} {
			t.Run(fmt.Sprintf("session=%v", session), func(t *testing.T) {
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				db := s.open()
				ctx := lockctx.With(dbtest.Limited(t), "k")
				if session {
					_, err := read(ctx, db, 1)
					dbtest.OK(t, err)
				}
				outer, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, outer, "UPDATE p SET stock = 1 WHERE id = 1")
				inner, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, inner, "UPDATE p SET stock = 2 WHERE id = 2")
				dbtest.OK(t, inner.Rollback())
				inner, err = db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, inner, "UPDATE p SET stock = 3 WHERE id = 3")
				innermost, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, innermost, "UPDATE p SET stock = 4 WHERE id = 4")
				dbtest.OK(t, innermost.Commit())
				dbtest.OK(t, inner.Commit())
				s.wantStock(3, 10)
				s.wantLocked("k", true)
				dbtest.OK(t, outer.Commit())
				s.wantLocked("k", false)
				s.wantStock(1, 1)
				s.wantStock(2, 10)
				s.wantStock(3, 3)
				s.wantStock(4, 4)
			})
		}
	})
}

func TestTransactionsEndInReverseOrder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		outer, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, outer, "UPDATE p SET stock = 1 WHERE id = 1")
		inner, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, inner, "UPDATE p SET stock = 2 WHERE id = 2")
		for _, err := range []error{outer.Commit(), inner.Commit()} {
			if err == nil || !strings.Contains(err.Error(), "reverse order") {
				t.Errorf("Commit out of order: %v", err)
			}
		}
		s.wantStock(1, 10)
		s.wantStock(2, 10)
		s.wantLocked("k", false)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 5 WHERE id = 1")
		dbtest.OK(t, err)
	})
}

func TestExecOutsideATransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantStock(1, 9)
		s.wantLocked("k", false)
		seen := tap.Since()
		res, err := db.ExecContext(ctx, "UPDATE p SET stock = 8")
		dbtest.OK(t, err)
		if n, _ := res.RowsAffected(); n != 4 {
			t.Errorf("RowsAffected = %d, want 4", n)
		}
		if log := seen(); len(log) != 3 {
			t.Errorf("want BEGIN with lock, UPDATE, COMMIT; the server got %v", log)
		}

		// With a session open: on it, then COMMIT, and the lock is free.
		ctx = lockctx.With(dbtest.Limited(t), "k")
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		s.wantLocked("k", true)
		seen = tap.Since()
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 7 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantLocked("k", false)
		s.wantStock(1, 7)
		if log := seen(); len(log) != 2 || log[1].Text != "COMMIT" {
			t.Errorf("want UPDATE, COMMIT; the server got %v", log)
		}

		// A statement that fails keeps the session, and with it the lock.
		ctx = lockctx.With(dbtest.Limited(t), "k")
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		if _, err := db.ExecContext(ctx, "INSERT INTO p VALUES (1, 1)"); err == nil || errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("duplicate key: %v", err)
		}
		s.wantLocked("k", true)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 6 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantLocked("k", false)
	})
}

func TestQueryThatWritesOutsideATransaction(t *testing.T) {
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

		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		dbtest.OK(t, db.QueryRowContext(ctx, "CALL take()").Scan(&n))
		s.wantStock(1, 8)
		s.wantLocked("k", false)
	})
}

func TestReadPinsASession(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		lctx := lockctx.With(ctx, "k")
		_, err := read(lctx, db, 1)
		dbtest.OK(t, err)
		s.wantLocked("k", true)
		seen := tap.Since()
		for range 3 {
			var n, id int
			dbtest.OK(t, db.QueryRowContext(lctx, "SELECT stock, CONNECTION_ID() FROM p WHERE id = 1").Scan(&n, &id))
		}
		if log := seen(); len(log) != 3 {
			t.Errorf("3 reads on the session sent %v", log)
		}
		s.wantLocked("k", true)
		cancel()
		dbtest.Soon(t, "the lock is free after the context has ended", func() bool { return !s.locked("k") })
		if _, err := db.ExecContext(lctx, "UPDATE p SET stock = 1"); err == nil {
			t.Error("a statement ran in a lock context that has ended")
		}
		s.wantStock(1, 10)
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
				_, err := db.BeginTx(lctx, nil)
				dbtest.OK(t, err)
				want = 10
			}
			s.wantStock(1, 10)
			cancel()
			dbtest.Soon(t, "the lock is free after the context has ended", func() bool { return !s.locked("k") })
			s.wantStock(1, want)
		}
	})
}

func TestLateHintLocksInItsTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=100ms")
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx, err := db.BeginTx(context.Background(), nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 2") // no plain read: the snapshot is not taken
		_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantLocked("k", true)
		s.wantStock(1, 10)
		// A statement in the lock context, outside the sql.Tx, runs in it too.
		n, err := read(ctx, db, 1)
		if dbtest.OK(t, err); n != 1 {
			t.Errorf("read %d beside the transaction, want 1", n)
		}
		dbtest.OK(t, tx.Commit())
		s.wantLocked("k", false)
		s.wantStock(1, 1)

		// Not granted: the transaction goes on without the lock.
		other, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
		for try := 1; ; try++ {
			tx, err = db.BeginTx(context.Background(), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 5 WHERE id = 2")
			if _, err = tx.ExecContext(ctx, "UPDATE p SET stock = 5 WHERE id = 1"); !errors.Is(err, mysqllock.ErrTimeout) {
				t.Errorf("late hint on a held key: %v", err)
			}
			err := tx.Commit()
			if err == nil {
				break
			}
			if !errors.Is(err, mysqllock.ErrLost) || try == 5 { // the server was too slow to answer
				t.Fatal(err)
			}
		}
		dbtest.OK(t, other.Rollback())
		s.wantStock(1, 1)
		s.wantStock(2, 5)

		// With a session of the lock context open, it stays on its connection.
		ctx = lockctx.With(dbtest.Limited(t), "k")
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		tx, err = db.BeginTx(context.Background(), nil)
		dbtest.OK(t, err)
		_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 2 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantLocked("k", true)
		dbtest.OK(t, tx.Rollback())
		s.wantStock(1, 1)
		s.wantLocked("k", true)
	})
}

func TestStaleSnapshot(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		begin := func(o *sql.TxOptions) *sql.Tx {
			tx, err := db.BeginTx(context.Background(), o)
			dbtest.OK(t, err)
			_, err = read(context.Background(), tx, 1)
			dbtest.OK(t, err)
			return tx
		}
		late := func(tx *sql.Tx, opts ...lockctx.Option) error {
			defer tx.Rollback()
			_, err := read(lockctx.With(dbtest.Limited(t), "k", opts...), tx, 1)
			return err
		}
		if err := late(begin(nil)); !errors.Is(err, mysqllock.ErrStaleSnapshot) {
			t.Errorf("after a plain read at REPEATABLE READ: %v", err)
		}
		dbtest.OK(t, late(begin(nil), lockctx.AllowStale()))
		dbtest.OK(t, late(begin(&sql.TxOptions{Isolation: sql.LevelReadCommitted})))
		tx, err := db.Begin()
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "START TRANSACTION WITH CONSISTENT SNAPSHOT")
		if err := late(tx); !errors.Is(err, mysqllock.ErrStaleSnapshot) {
			t.Errorf("after START TRANSACTION WITH CONSISTENT SNAPSHOT: %v", err)
		}

		// The same for a second key of a unit that has read.
		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		if _, err = read(lockctx.With(ctx, "k2"), db, 1); !errors.Is(err, mysqllock.ErrStaleSnapshot) {
			t.Errorf("a second key after a read: %v", err)
		}
		s.wantLocked("k", true)
		_, err = read(lockctx.With(ctx, "k2", lockctx.AllowStale()), db, 1)
		dbtest.OK(t, err)
		s.wantLocked("k2", true)
	})
}

func TestFreshDataUnderTheLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, how := range []string{"BeginTx", "session", "Do"} {
			holder, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			dbtest.OK(t, err)
			_, err = holder.Exec("UPDATE p SET stock = stock - 1 WHERE id = 1")
			dbtest.OK(t, err)
			want := s.stock(1) - 1
			got := make(chan any, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				defer cancel()
				lctx := lockctx.With(ctx, "k")
				var n int
				var err error
				switch how {
				case "BeginTx":
					var tx *sql.Tx
					if tx, err = db.BeginTx(lctx, nil); err == nil {
						n, err = read(ctx, tx, 1)
						tx.Rollback()
					}
				case "session":
					n, err = read(lctx, db, 1)
				case "Do":
					err = mysqllock.Do(ctx, db, "k", func(ctx context.Context) (err error) {
						n, err = read(ctx, db, 1)
						return err
					})
				}
				if err != nil {
					got <- err
					return
				}
				got <- n
			}()
			time.Sleep(30 * time.Millisecond) // so that it waits; without it the test is only weaker
			dbtest.OK(t, holder.Commit())
			if n := <-got; n != want {
				t.Errorf("%s: read %v under the lock, want %d", how, n, want)
			}
		}
	})
}

func TestNoEnd(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(context.Background(), "k")
		if _, err := read(ctx, db, 1); !errors.Is(err, mysqllock.ErrNoEnd) {
			t.Errorf("a read in a context without an end: %v", err)
		}
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, err)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())

		// The end may also be the query's own. Whoever writes later in the same
		// lock context would write what it decided without the lock.
		qctx, cancel := context.WithCancel(ctx)
		_, err = read(qctx, db, 1)
		dbtest.OK(t, err)
		s.wantLocked("k", true)
		cancel()
		dbtest.Soon(t, "the lock is free", func() bool { return !s.locked("k") })
		dbtest.Soon(t, "the lock context is spent", func() bool {
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1")
			return errors.Is(err, mysqllock.ErrLost)
		})
		s.wantStock(1, 9)
	})
}

func TestLostConnection(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		id := func(ctx context.Context, q querier) (id int) {
			dbtest.OK(t, q.QueryRowContext(ctx, "SELECT CONNECTION_ID() FROM p LIMIT 1").Scan(&id))
			return id
		}
		t.Run("session", func(t *testing.T) {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id(ctx, db)))
			dbtest.Soon(t, "the server has freed the lock", func() bool { return !s.locked("k") })
			for range 3 {
				if _, err := db.ExecContext(ctx, "UPDATE p SET stock = 0"); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("Exec on a lost session: %v", err)
				}
				if _, err := read(ctx, db, 1); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("Query on a lost session: %v", err)
				}
				if _, err := db.BeginTx(ctx, nil); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("BeginTx on a lost session: %v", err)
				}
			}
			s.wantStock(1, 10)
		})
		t.Run("transaction", func(t *testing.T) {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 0")
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id(ctx, tx)))
			dbtest.Soon(t, "the server has freed the lock", func() bool { return !s.locked("k") })
			for range 2 {
				if _, err := tx.Exec("UPDATE p SET stock = 0"); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("Exec in a lost transaction: %v", err)
				}
				if _, err := db.ExecContext(ctx, "UPDATE p SET stock = 0"); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("Exec beside a lost transaction: %v", err)
				}
			}
			if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("Commit of a lost transaction: %v", err)
			}
			s.wantStock(1, 10)
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = 10") // its end was seen: a new unit may begin
			dbtest.OK(t, err)
		})
		t.Run("rollback", func(t *testing.T) {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 0")
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id(ctx, tx)))
			dbtest.OK(t, tx.Rollback()) // what was lost is rolled back
			s.wantStock(1, 10)
		})
		t.Run("commit", func(t *testing.T) {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 0")
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id(ctx, tx)))
			dbtest.Soon(t, "the server has freed the lock", func() bool { return !s.locked("k") })
			if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("Commit of a lost transaction: %v", err)
			}
			s.wantStock(1, 10)
		})
	})
}

func TestRowsAreReadAhead(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		defer tx.Rollback()
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
		_, err = read(lctx, db, 1)
		dbtest.OK(t, err)
		s.wantLocked("k", true)

		// Closed early, by the caller and by the end of the context.
		rows, err = db.QueryContext(lctx, many)
		dbtest.OK(t, err)
		rows.Next()
		dbtest.OK(t, rows.Close())
		_, err = read(lctx, db, 1)
		dbtest.OK(t, err)
		rows, err = db.QueryContext(lctx, many)
		dbtest.OK(t, err)
		defer rows.Close()
		cancel()
		dbtest.Soon(t, "the lock is free", func() bool { return !s.locked("k") })
	})
}

func TestGoroutinesTakeTurns(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				for range 20 {
					var err error
					switch i % 3 {
					case 0:
						_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
					case 1:
						_, err = db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					default:
						_, err = read(ctx, db, 1)
					}
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		s.wantStock(1, 10)
		dbtest.OK(t, tx.Commit())
		s.wantStock(1, 10+11*20)
	})
}

func TestReentranceAndSecondKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		seen := tap.Since()
		_, err = db.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, err)
		if log := seen(); len(log) != 1 {
			t.Errorf("the same key again sent %v", log)
		}
		_, err = db.ExecContext(lockctx.WithKeys(ctx, []string{"k2", "k3", "k"}), "UPDATE p SET stock = 8 WHERE id = 1")
		dbtest.OK(t, err)
		for _, key := range []string{"k", "k2", "k3"} {
			s.wantLocked(key, true)
		}
		// Another lock context's hint in a statement of this transaction, too.
		_, err = tx.ExecContext(lockctx.With(dbtest.Limited(t), "k4"), "UPDATE p SET stock = 7 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantLocked("k4", true)
		dbtest.OK(t, tx.Commit())
		for _, key := range []string{"k", "k2", "k3", "k4"} {
			s.wantLocked(key, false)
		}
		s.wantStock(1, 7)
	})
}

func TestPreparedStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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

		ctx := lockctx.With(dbtest.Limited(t), "k")
		var n int
		dbtest.OK(t, get.QueryRowContext(ctx, 1).Scan(&n))
		s.wantLocked("k", true)
		_, err = set.ExecContext(ctx, n-1, 1)
		dbtest.OK(t, err)
		s.wantLocked("k", false)
		s.wantStock(1, 9)

		_, err = set.ExecContext(lockctx.With(dbtest.Limited(t), "k"), 8, 1) // alone
		dbtest.OK(t, err)
		s.wantStock(1, 8)
		s.wantLocked("k", false)

		for _, session := range []bool{false, true} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			if session {
				_, err := read(ctx, db, 1)
				dbtest.OK(t, err)
			}
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			_, err = tx.StmtContext(ctx, set).ExecContext(ctx, 7, 1)
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
			s.wantStock(1, 8)
			dbtest.OK(t, tx.Rollback())
			s.wantLocked("k", false)
		}
	})
}

func TestWithout(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err := db.ExecContext(lockctx.Without(ctx), "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, err)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
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

func TestStatementsThatWouldEndTheLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for _, text := range []string{"COMMIT", "BEGIN", "CREATE TABLE q (id INT)", "SET autocommit = 1", "LOCK TABLES p WRITE"} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			if _, err := db.ExecContext(ctx, text); !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("%s alone: %v", text, err)
			}
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			if _, err := tx.Exec(text); !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("%s in the transaction: %v", text, err)
			}
			s.wantLocked("k", true)
			dbtest.Exec(t, tx, "SAVEPOINT mine")
			dbtest.Exec(t, tx, "ROLLBACK TO SAVEPOINT mine")
			dbtest.OK(t, tx.Rollback())
		}
		if _, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), &sql.TxOptions{ReadOnly: true}); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("a READ ONLY transaction: %v", err)
		}
		conn, err := db.Conn(context.Background())
		dbtest.OK(t, err)
		defer conn.Close()
		dbtest.Exec(t, conn, "BEGIN")
		if _, err := conn.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 1"); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("a hint in a transaction begun by text: %v", err)
		}
		dbtest.Exec(t, conn, "ROLLBACK")
		_, err = conn.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 1")
		dbtest.OK(t, err)
	})
}

func TestDeadlockEndsTheUnit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for try := 1; !s.deadlockEndsTheUnit(); try++ {
			if try == 20 {
				t.Fatal("the server always breaks the deadlock on the other side")
			}
		}
	})
}

// deadlockEndsTheUnit is false where the server has chosen the other side.
func (s *scratch) deadlockEndsTheUnit() bool {
	t := s.T
	db := s.open()
	ctx := lockctx.With(dbtest.Limited(t), "k")
	_, err := read(ctx, db, 1)
	dbtest.OK(t, err)
	tx, err := db.BeginTx(ctx, nil)
	dbtest.OK(t, err)
	dbtest.Exec(t, tx, "UPDATE p SET stock = 5 WHERE id = 1")
	rival, err := s.plain.Begin()
	dbtest.OK(t, err)
	defer rival.Rollback()
	// The rival has written more, so the server prefers to roll ours back.
	dbtest.Exec(t, rival, "CREATE TEMPORARY TABLE IF NOT EXISTS fat (id INT PRIMARY KEY, t TEXT)")
	for id := 2; id <= 4; id++ { // one by one: a scan would wait for row 1
		dbtest.Exec(t, rival, "UPDATE p SET stock = 6 WHERE id = ?", id)
	}
	done := make(chan error, 1)
	go func() {
		_, err := rival.Exec("UPDATE p SET stock = 6 WHERE id = 1")
		done <- err
	}()
	dbtest.Soon(t, "the rival waits", func() bool {
		select {
		case err := <-done:
			t.Fatalf("the rival did not wait: %v", err)
		default:
		}
		var n int
		dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'UPDATE p SET stock = 6 WHERE id = 1%'", s.Name).Scan(&n))
		return n == 1
	})
	time.Sleep(20 * time.Millisecond)
	_, err = tx.Exec("UPDATE p SET stock = 5 WHERE id = 2")
	if err == nil { // the server chose the other one
		t.Logf("the server broke the deadlock on the other side: %v", <-done)
		dbtest.OK(t, tx.Rollback())
		return false
	}
	dbtest.OK(t, <-done)
	if !errors.Is(err, mysqllock.ErrDeadlock) {
		t.Errorf("deadlock: %v", err)
	}
	if _, err := tx.Exec("UPDATE p SET stock = 77 WHERE id = 4"); !errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("a statement after the deadlock: %v", err)
	}
	s.wantLocked("k", false)
	if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("Commit after the deadlock: %v", err)
	}
	dbtest.OK(t, rival.Rollback())
	s.wantStock(4, 10)
	return true
}

func TestBadHints(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		base := dbtest.Limited(t)
		for name, ctx := range map[string]context.Context{
			"empty key":     lockctx.With(base, ""),
			"longer than":   lockctx.With(base, strings.Repeat("k", 256)),
			"negative wait": lockctx.With(base, "k", lockctx.Wait(-1)),
			"negative retr": lockctx.With(base, "k", lockctx.Retry(-1)),
			"no key":        lockctx.WithKeys(base, nil),
		} {
			var errs []error
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 0")
			errs = append(errs, err)
			_, err = read(ctx, db, 1)
			errs = append(errs, err)
			_, err = db.BeginTx(ctx, nil)
			errs = append(errs, err)
			_, err = db.PrepareContext(ctx, "SELECT 1")
			errs = append(errs, err)
			for i, err := range errs {
				if err == nil || !strings.Contains(err.Error(), name) {
					t.Errorf("%s, call %d: %v", name, i, err)
				}
			}
		}
		s.wantStock(1, 10)
	})
}
