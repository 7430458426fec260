package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

func (s *scratch) waiters() int { s.T.Helper(); return s.Waiters() }

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

func TestLateLockAfterASnapshotIsRefused(t *testing.T) {
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

func TestEachStatementAfterALostConnectionGetsErrLost(t *testing.T) {
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

func TestGoroutinesTakeTurnsOnOneUnit(t *testing.T) {
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

func TestHeldKeyIsNotAskedForAgain(t *testing.T) {
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

func TestDeadlockEndsTheUnit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 5 WHERE id = 1")
		// The rival has written far more, so the server rolls ours back.
		dbtest.Exec(t, s.plain, "CREATE TABLE fat (id INT AUTO_INCREMENT PRIMARY KEY) ENGINE=InnoDB")
		rival, err := s.plain.Begin()
		dbtest.OK(t, err)
		defer rival.Rollback()
		dbtest.Exec(t, rival, "INSERT INTO fat VALUES (NULL)"+strings.Repeat(", (NULL)", 999))
		dbtest.Exec(t, rival, "UPDATE p SET stock = 6 WHERE id = 2")
		done := make(chan error, 1)
		go func() {
			_, err := rival.Exec("UPDATE p SET stock = 6 WHERE id = 1")
			done <- err
		}()
		_, err = tx.Exec("UPDATE p SET stock = 5 WHERE id = 2")
		if !errors.Is(err, mysqllock.ErrDeadlock) {
			t.Errorf("deadlock: %v", err)
		}
		dbtest.OK(t, <-done)
		if _, err := tx.Exec("UPDATE p SET stock = 77 WHERE id = 4"); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("a statement after the deadlock: %v", err)
		}
		s.wantLocked("k", false)
		if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Commit after the deadlock: %v", err)
		}
		dbtest.OK(t, rival.Rollback())
		s.wantStock(4, 10)
	})
}

// What happens when someone else has the key, gives up, dies or falls silent.
// Two handles stand for two processes: they share nothing in the driver.

func TestNoWaitNamesTheHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice", "lockWait=2m"), s.open("lockWait=2m")
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		defer h.Rollback()
		for _, from := range []*sql.DB{db, other} {
			start := time.Now()
			_, err := from.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil)
			took := time.Since(start)
			var e *mysqllock.Error
			for i := 0; i < 20 && !s.MariaDB() && errors.As(err, &e) && e.Holder == nil; i++ { // a busy server does not say in time
				_, err = from.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()), nil)
			}
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) {
				t.Fatalf("NoWait on a held key: %v", err)
			}
			if took > time.Minute { // the handle waits for longer
				t.Errorf("NoWait took %v", took)
			}
			if e.Key != "k" || e.Strategy != "row" || e.Op != "lock" {
				t.Errorf("the error does not say what it is about: %+v", e)
			}
			if from == db || !s.MariaDB() { // MariaDB shows a holder only after a wait
				if e.Holder == nil || e.Holder.ConnectionID == 0 || e.Holder.Program != "alice" {
					t.Errorf("holder: %+v", e.Holder)
				}
			}
		}
		_, err = mysqllock.Acquire(dbtest.Limited(t), s.open("lockNoWait=true"), "k")
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("lockNoWait on a held key: %v", err)
		}
		for _, from := range []*sql.DB{db, other} {
			_, err = from.ExecContext(lockctx.With(dbtest.Limited(t), "free", lockctx.NoWait()), "UPDATE p SET stock = 9 WHERE id = 1")
			dbtest.OK(t, err)
		}
	})
}

func TestWaitEndsWithTheHolderNamed(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=alice"), s.open()
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
		dbtest.OK(t, err)
		defer tx.Rollback()
		var id uint64
		dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		for _, from := range []*sql.DB{db, other} {
			for _, end := range []string{"wait", "context"} {
				ctx, opt := dbtest.Limited(t), lockctx.Wait(200*time.Millisecond)
				deadline := time.Now().Add(200 * time.Millisecond)
				if end == "context" {
					var cancel context.CancelFunc
					ctx, cancel = context.WithDeadline(ctx, deadline)
					defer cancel()
					opt = lockctx.Wait(time.Minute)
				}
				_, err := mysqllock.Acquire(ctx, from, "k", opt)
				// On a machine that stands still the context may have ended before it is asked for.
				for i := 0; i < 20 && end == "context" && errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, mysqllock.ErrTimeout); i++ {
					deadline = time.Now().Add(200 * time.Millisecond)
					again, cancel := context.WithDeadline(dbtest.Limited(t), deadline)
					_, err = mysqllock.Acquire(again, from, "k", opt)
					cancel()
				}
				var e *mysqllock.Error
				// MariaDB shows a picture of up to 100 ms ago, a busy server none in time.
				for i := 0; i < 20 && from == other && end == "wait" && errors.As(err, &e) && e.Holder == nil; i++ {
					_, err = mysqllock.Acquire(ctx, from, "k", opt)
				}
				if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) {
					t.Fatalf("%s: %v", end, err)
				}
				if got := errors.Is(err, context.DeadlineExceeded); got != (end == "context") {
					t.Errorf("%s: matches DeadlineExceeded: %v (%v)", end, got, err)
				}
				if e.Waited < 150*time.Millisecond {
					t.Errorf("%s: waited %v", end, e.Waited)
				}
				if end == "context" && e.Holder == nil && from == other {
					continue // there is less time to ask
				}
				if e.Holder == nil || e.Holder.ConnectionID != id {
					t.Errorf("%s, same process %v: the holder is %+v, want connection %d", end, from == db, e.Holder, id)
				} else if from == other && e.Holder.Since <= 0 {
					t.Errorf("%s: the holder's age is %v", end, e.Holder.Since)
				}
			}
		}
	})
}

func TestCancelledWaiterLeavesNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		// Nothing else ends the wait in time: neither its own end nor that of its statement.
		db, other := s.open(), s.open("lockWait=10m", "lockTTL=10m")
		for how, wait := range map[string]func(ctx context.Context) error{
			"BeginTx": func(ctx context.Context) error { _, err := other.BeginTx(lockctx.With(ctx, "k"), nil); return err },
			"Query":   func(ctx context.Context) error { _, err := read(lockctx.With(ctx, "k"), other, 1); return err },
			"Exec": func(ctx context.Context) error {
				_, err := other.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 0")
				return err
			},
			"Acquire": func(ctx context.Context) error { _, err := mysqllock.Acquire(ctx, other, "k"); return err },
		} {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
			dbtest.OK(t, err)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			result := make(chan error, 1)
			go func() { result <- wait(ctx) }()
			dbtest.Soon(t, "it waits on the server", func() bool { return s.waiters() == 1 })
			cancel()
			if err := <-result; !errors.Is(err, context.Canceled) {
				t.Errorf("%s: %v", how, err)
			}
			dbtest.Soon(t, "it does not any more", func() bool { return s.waiters() == 0 })
			dbtest.OK(t, h.Release())
			s.wantLocked("k", false)
		}
		s.wantStock(1, 10)
	})
}

func TestCancelAtTheMomentOfRelease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		const rounds = 400
		granted, latest := 0, 1500*time.Microsecond
		for i := range rounds {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
			dbtest.OK(t, err)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			result, was := make(chan error, 1), granted
			go func() {
				tx, err := other.BeginTx(lockctx.With(ctx, "k"), nil)
				if err == nil {
					err = tx.Rollback()
					if errors.Is(err, sql.ErrTxDone) || errors.Is(err, mysqllock.ErrLost) {
						err = nil // the cancellation was quicker, or closed the connection, as it does without a lock
					}
					granted++
				}
				result <- err
			}()
			time.Sleep(time.Duration(rand.IntN(800)) * time.Microsecond)
			var both sync.WaitGroup
			both.Go(func() { time.Sleep(rand.N(latest)); cancel() })
			both.Go(func() { dbtest.OK(t, h.Release()) })
			both.Wait()
			if err := <-result; err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("round %d: %v", i, err)
			}
			if granted > was { // as fast as the machine is just now, so that it is a race
				latest = latest * 49 / 50
			} else {
				latest = min(latest*51/50, 200*time.Millisecond)
			}
			if h, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Wait(20*time.Second)); err != nil {
				t.Fatalf("round %d: the lock is still held: %v", i, err)
			}
			dbtest.OK(t, h.Release())
		}
		if granted < 10 || granted > rounds-10 {
			t.Errorf("%d of %d were granted before the cancellation: the race was not run", granted, rounds)
		}
		dbtest.Soon(t, "no waiter is left", func() bool { return s.waiters() == 0 })
	})
}

func TestHintInsideAHintLocksBothKeys(t *testing.T) {
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

// Who waits on a sql.Conn is never made to try again: database/sql would not.
func TestWaiterOnASQLConnIsServed(t *testing.T) {
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

// TestHintInTransactionOfHold: a transaction under a hold takes other locks as
// well, and tells the lock context that asked.
func TestHintInTransactionOfHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := dbtest.Limited(t)
		for _, outer := range []lockctx.Option{lockctx.Lease(ttl), lockctx.Advisory()} {
			for name, inner := range map[string][]lockctx.Option{
				"row": nil, "shared": {lockctx.Shared()}, "slots": {lockctx.Slots(2)}, "lease": {lockctx.Lease(ttl)},
				"lease slots": {lockctx.Lease(ttl), lockctx.Slots(2)}, "advisory": {lockctx.Advisory()}, "optimistic": {lockctx.Optimistic()},
			} {
				for _, commit := range []bool{true, false} {
					h, err := mysqllock.Acquire(ctx, db, "outer", outer)
					dbtest.OK(t, err)
					tx, err := db.BeginTx(h.Context(), nil)
					dbtest.OK(t, err)
					with := lockctx.With(h.Context(), "inner", inner...)
					_, err = tx.ExecContext(with, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					dbtest.OK(t, err)
					if _, told := mysqllock.Slot(with); told != (name == "slots" || name == "lease slots") {
						t.Errorf("%s: Slot tells %v", name, told)
					}
					if _, told := mysqllock.Version(with); told != (name == "optimistic") {
						t.Errorf("%s: Version tells %v", name, told)
					}
					if commit {
						dbtest.OK(t, tx.Commit())
					} else {
						dbtest.OK(t, tx.Rollback())
					}
					if _, told := mysqllock.Slot(with); told {
						t.Errorf("%s: Slot tells of one that is given back", name)
					}
					dbtest.OK(t, h.Release())
					again, err := mysqllock.Acquire(ctx, s.open(), "inner", lockctx.NoWait())
					dbtest.OK(t, err)
					dbtest.OK(t, again.Release())
				}
			}
		}
		s.wantStock(1, 10+2*7)
	})
}
