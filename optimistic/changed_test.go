package optimistic_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/optimistic"
)

func TestChanged(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		s.exec(s.own, "CREATE TABLE product (id INT PRIMARY KEY, stock INT NOT NULL, version INT NOT NULL) ENGINE=InnoDB")
		for _, params := range []string{"", "clientFoundRows=true"} {
			s.exec(s.own, "REPLACE INTO product VALUES (1, 10, 1), (2, 10, 1)")
			db := sql.OpenDB(s.connector(params, nil))
			defer db.Close()
			update := func(where string, args ...any) error {
				return optimistic.Changed(db.ExecContext(limited(t), "UPDATE product SET stock = 10, version = version + 1 WHERE "+where, args...))
			}
			ok(t, update("id = ? AND version = ?", 1, 1)) // the stock is what it was
			for _, old := range []int{1, 3} {
				err := update("id = ? AND version = ?", 1, old)
				var said *lockerr.Error
				if !errors.Is(err, lockerr.ErrConflict) || !errors.As(err, &said) || said.Strategy != lockctx.StrategyOptimistic {
					t.Errorf("%s: version %d: %v", params, old, err)
				}
			}
			if err := update("id = 7 AND version = 1"); !errors.Is(err, lockerr.ErrConflict) {
				t.Errorf("%s: no row: %v", params, err)
			}
			ok(t, update("id IN (1, 2)"))
			if err := update("no = 7"); err == nil || errors.Is(err, lockerr.ErrConflict) {
				t.Errorf("%s: a statement that fails: %v", params, err)
			}

			// The same transaction shows the row as it was, which a new one does not.
			tx, err := db.BeginTx(limited(t), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			ok(t, err)
			version := func(tx *sql.Tx) (n int) {
				ok(t, tx.QueryRow("SELECT version FROM product WHERE id = 1").Scan(&n))
				return n
			}
			before := version(tx)
			ok(t, update("id = ? AND version = ?", 1, before))
			if err := optimistic.Changed(tx.Exec("UPDATE product SET version = version + 1 WHERE id = 1 AND version = ?", before)); !errors.Is(err, lockerr.ErrConflict) {
				t.Errorf("%s: it was changed meanwhile: %v", params, err)
			}
			if got := version(tx); got != before {
				t.Errorf("%s: %d where %d was expected", params, got, before)
			}
			ok(t, tx.Rollback())
		}
	})
}

func TestChangedRows(t *testing.T) {
	failed := context.Canceled
	for _, test := range []struct {
		n         int64
		err, want error
	}{{0, nil, lockerr.ErrConflict}, {-1, nil, lockerr.ErrConflict}, {1, nil, nil}, {2, nil, nil}, {0, failed, failed}, {1, failed, failed}} {
		if err := optimistic.ChangedRows(test.n, test.err); !errors.Is(err, test.want) || test.err != nil && errors.Is(err, lockerr.ErrConflict) {
			t.Errorf("%d rows, %v: %v", test.n, test.err, err)
		}
	}
}
