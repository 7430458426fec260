package mysqllock_test

import (
	"context"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestSnapshotIsolation: where MariaDB checks snapshots (the default from 11.6 on), a
// statement that meets a row which somebody has changed since its transaction read is
// refused, and the transaction is rolled back whole: that is ErrConflict. A lock that is
// asked for with AllowStale is granted all the same.
func TestSnapshotIsolation(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if !s.MariaDB() {
			return // MySQL has nothing of the kind
		}
		var known bool // from 10.6.18 and 10.11.8 on
		dbtest.OK(t, s.open().QueryRow("SELECT COUNT(*) FROM information_schema.SYSTEM_VARIABLES WHERE VARIABLE_NAME = 'INNODB_SNAPSHOT_ISOLATION'").Scan(&known))
		if !known {
			return
		}
		db := s.open("innodb_snapshot_isolation=ON")
		change := func() { // by somebody who does not ask for the key
			t.Helper()
			_, err := s.open().Exec("UPDATE p SET stock = stock + 10 WHERE id = 1")
			dbtest.OK(t, err)
		}
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(ttl), "optimistic": lockctx.Optimistic()} {
			ctx := lockctx.With(dbtest.Limited(t), "k", opt)
			before := s.stock(1)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			_, err = read(ctx, tx, 1)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 77 WHERE id = 2")
			change()
			_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1")
			if !errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrDeadlock) {
				t.Errorf("%s: the write: %v, want %v", name, err, mysqllock.ErrConflict)
			}
			if err := tx.Commit(); !errors.Is(err, mysqllock.ErrConflict) {
				t.Errorf("%s: Commit: %v, want %v", name, err, mysqllock.ErrConflict)
			}
			s.wantStock(1, before+10)
			if n := s.stock(2); n == 77 {
				t.Errorf("%s: what came before is committed", name)
			}
		}

		// Do runs it again.
		tries := 0
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			n, err := read(ctx, db, 1)
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

		// The row of a late key may be newer than the snapshot.
		tx, err := db.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		_, err = read(dbtest.Limited(t), tx, 1)
		dbtest.OK(t, err)
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.open(), "late", func(context.Context) error { return nil }, lockctx.Lease(ttl)))
		_, err = tx.ExecContext(lockctx.With(dbtest.Limited(t), "late", lockctx.AllowStale()), "UPDATE p SET stock = 5 WHERE id = 2")
		dbtest.OK(t, err)
		s.wantLocked("late", true)
		dbtest.OK(t, tx.Commit())
		s.wantStock(2, 5)
	})
}
