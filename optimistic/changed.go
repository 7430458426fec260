package optimistic

import (
	"database/sql"
	"errors"

	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Changed is for a version that is a column of the caller's own table. It returns
// lockerr.ErrConflict where a statement has changed no row:
//
//	err := optimistic.Changed(db.ExecContext(ctx,
//		"UPDATE product SET stock = ?, version = version + 1 WHERE id = ? AND version = ?", stock, id, version))
//
// The statement itself must change the version. Else one that sets what is there
// already counts no row, and is taken for a conflict; with clientFoundRows in the
// DSN it counts the row, and the others' versions still fit. A row that was
// deleted is a conflict, too.
//
// More than one row counts as changed: that the condition finds a single one, by
// its primary key, is up to the statement. INSERT … ON DUPLICATE KEY UPDATE is
// not for Changed: it has no condition, and writes the row whatever its version.
//
// After a conflict begin a new transaction before reading again. At REPEATABLE
// READ the same one goes on showing the row as it was in its snapshot, with the
// version that fits no more; only a locking read would show the newest.
func Changed(result sql.Result, err error) error {
	if err != nil {
		return err
	}
	return ChangedRows(result.RowsAffected())
}

// ChangedRows is [Changed] for who has the number of affected rows, as ORMs give
// it:
//
//	tx := gdb.Model(&Product{}).Where("id = ? AND version = ?", id, version).
//		Updates(map[string]any{"stock": stock, "version": version + 1})
//	err := optimistic.ChangedRows(tx.RowsAffected, tx.Error)
func ChangedRows(n int64, err error) error {
	if err == nil && n < 1 {
		err = &lockerr.Error{
			Op: "exec", Strategy: lockctx.StrategyOptimistic,
			Err: lockerr.With(lockerr.ErrConflict, errors.New("no row has the version any more")),
		}
	}
	return err
}
