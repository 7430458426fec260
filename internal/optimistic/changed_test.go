package optimistic_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
)

func TestAStatementThatChangedNoRowIsAConflict(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.Exec(s.own, "CREATE TABLE product (id INT PRIMARY KEY, stock INT NOT NULL, version INT NOT NULL) ENGINE=InnoDB")
		all := []string{"", "clientFoundRows=true"}
		checked := s.checksSnapshots()
		if s.info.SnapshotIsolation {
			all = append(all, "innodb_snapshot_isolation=ON")
		}
		for _, params := range all {
			s.Exec(s.own, "REPLACE INTO product VALUES (1, 10, 1), (2, 10, 1)")
			db := sql.OpenDB(s.Connector(dbtest.With(params)))
			defer db.Close()
			update := func(where string, args ...any) error {
				return mysqllock.Changed(db.ExecContext(dbtest.Limited(t), "UPDATE product SET stock = 10, version = version + 1 WHERE "+where, args...))
			}
			dbtest.OK(t, update("id = ? AND version = ?", 1, 1)) // the stock is what it was
			for _, old := range []int{1, 3} {
				err := update("id = ? AND version = ?", 1, old)
				var said *lockerr.Error
				if !errors.Is(err, lockerr.ErrConflict) || !errors.As(err, &said) || said.Strategy != hint.StrategyOptimistic {
					t.Errorf("%s: version %d: %v", params, old, err)
				}
			}
			dbtest.Is(t, params+": no row", update("id = 7 AND version = 1"), lockerr.ErrConflict)
			dbtest.OK(t, update("id IN (1, 2)"))
			if err := update("no = 7"); err == nil || errors.Is(err, lockerr.ErrConflict) {
				t.Errorf("%s: a statement that fails: %v", params, err)
			}

			// The same transaction shows the row as it was, which a new one does not.
			tx, err := db.BeginTx(dbtest.Limited(t), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			dbtest.OK(t, err)
			version := func(tx *sql.Tx) (n int) {
				dbtest.OK(t, tx.QueryRow("SELECT version FROM product WHERE id = 1").Scan(&n))
				return n
			}
			before := version(tx)
			dbtest.OK(t, update("id = ? AND version = ?", 1, before))
			dbtest.Is(t, params+": it was changed meanwhile", mysqllock.Changed(tx.Exec("UPDATE product SET version = version + 1 WHERE id = 1 AND version = ?", before)), lockerr.ErrConflict)
			if checked || params == "innodb_snapshot_isolation=ON" { // it has ended the transaction
				before++
			}
			if got := version(tx); got != before {
				t.Errorf("%s: %d where %d was expected", params, got, before)
			}
			dbtest.OK(t, tx.Rollback())
		}
	})
}

func TestNoChangedRowIsAConflictUnlessTheStatementFailed(t *testing.T) {
	failed := context.Canceled
	newer := &mysql.MySQLError{Number: 1020}
	for _, test := range []struct {
		n         int64
		err, want error
	}{{0, nil, lockerr.ErrConflict}, {-1, nil, lockerr.ErrConflict}, {1, nil, nil}, {2, nil, nil}, {0, failed, failed}, {1, failed, failed}, {0, newer, lockerr.ErrConflict}, {0, newer, newer}} {
		if err := mysqllock.ChangedRows(test.n, test.err); !errors.Is(err, test.want) || errors.Is(test.err, failed) && errors.Is(err, lockerr.ErrConflict) {
			t.Errorf("%d rows, %v: %v", test.n, test.err, err)
		}
	}
}
