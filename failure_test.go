package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestFailuresNameTheirState: what the driver refuses by itself is an Error around a
// sentinel.
func TestFailuresNameTheirState(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		want := func(name string, err error, sentinel error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.As(err, &e) || !errors.Is(err, sentinel) {
				t.Errorf("%s: %v (%T), want %v", name, err, err, sentinel)
			}
		}

		// Text has ended the transaction before the key is asked for.
		tx, err := db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "COMMIT")
		var n int
		want("late, after COMMIT", tx.QueryRowContext(lockctx.With(dbtest.Limited(t), "k"), "SELECT stock FROM p WHERE id = 1").Scan(&n), mysqllock.ErrLost)
		_ = tx.Rollback()

		// The context ends while the driver looks whether the transaction is open.
		tx, err = db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "DO 1")
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "k"))
		conn, err := db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		cancel()
		_, err = tx.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 1")
		if !errors.Is(err, context.Canceled) {
			t.Errorf("late, cancelled: %v", err)
		}
		_ = tx.Rollback()

		// BeginTx where a transaction without the lock is open: through Raw.
		dbtest.OK(t, conn.Raw(func(c any) error {
			begins := c.(driver.ConnBeginTx)
			open, err := begins.BeginTx(dbtest.Limited(t), driver.TxOptions{})
			dbtest.OK(t, err)
			_, err = begins.BeginTx(lockctx.With(dbtest.Limited(t), "k"), driver.TxOptions{})
			want("begin in a transaction without the lock", err, mysqllock.ErrUnsafe)
			return open.Rollback()
		}))

		// A statement that was prepared in a transaction, and is run after it.
		hold, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
		dbtest.OK(t, err)
		dbtest.OK(t, conn.Raw(func(c any) error {
			tx, err := c.(driver.ConnBeginTx).BeginTx(hold.Context(), driver.TxOptions{})
			dbtest.OK(t, err)
			st, err := c.(driver.ConnPrepareContext).PrepareContext(hold.Context(), "SELECT 1")
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Rollback())
			_, err = st.(driver.StmtQueryContext).QueryContext(dbtest.Limited(t), nil)
			want("a statement of a transaction that has ended", err, mysqllock.ErrLost)
			return st.Close()
		}))

		// Other options than those of the open transaction.
		_, err = db.BeginTx(hold.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
		want("other options", err, mysqllock.ErrUnsafe)
		inner, err := db.BeginTx(hold.Context(), nil)
		dbtest.OK(t, err)
		want("a hold with an open transaction", hold.Release(), mysqllock.ErrUnsafe)
		_ = inner.Rollback()

		// Out of order.
		ctx = lockctx.With(dbtest.Limited(t), "k")
		outer, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		inner, err = db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		want("out of order", outer.Commit(), mysqllock.ErrUnsafe)
		want("out of order, the inner one", inner.Commit(), mysqllock.ErrUnsafe)
	})
}
