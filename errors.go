package mysqllock

import (
	"database/sql"
	"errors"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// The states in which a lock fails. Test for them with errors.Is; what
// [lockerr] says of each holds here.
var (
	ErrLocked        = lockerr.ErrLocked
	ErrTimeout       = lockerr.ErrTimeout
	ErrExhausted     = lockerr.ErrExhausted
	ErrNoAnswer      = lockerr.ErrNoAnswer
	ErrLost          = lockerr.ErrLost
	ErrDeadlock      = lockerr.ErrDeadlock
	ErrConflict      = lockerr.ErrConflict
	ErrNoEnd         = lockerr.ErrNoEnd
	ErrStaleSnapshot = lockerr.ErrStaleSnapshot
	ErrStaleRead     = lockerr.ErrStaleRead
	ErrNoLock        = lockerr.ErrNoLock
	ErrUnsafe        = lockerr.ErrUnsafe
	ErrClosed        = lockerr.ErrClosed
)

// Error is what every failure of a lock looks like.
type Error = lockerr.Error

// Holder says who has a key.
type Holder = lockerr.Holder

// Changed is for a version column in your own table. It returns ErrConflict if a
// statement has changed no row:
//
//	err := mysqllock.Changed(db.ExecContext(ctx,
//		"UPDATE product SET stock = ?, version = version + 1 WHERE id = ? AND version = ?", stock, id, version))
//
// The statement must change the version. A statement that sets only the values that the
// row already has counts no row, which would look like a conflict; with clientFoundRows in
// the DSN it counts the row, but then the versions of others still match. A deleted row is
// a conflict, too.
//
// The statement must find one row, by its primary key: Changed accepts any number of rows
// above zero. Do not use Changed with INSERT … ON DUPLICATE KEY UPDATE, which has no
// condition and writes the row whatever its version is.
//
// After a conflict, begin a new transaction before you read again. At REPEATABLE READ the
// old one still shows the row of its snapshot, with the old version. MariaDB from 11.6 on
// sees that the row is newer than the snapshot, and rolls the transaction back (error
// 1020): that is ErrConflict, too.
func Changed(result sql.Result, err error) error {
	if err != nil {
		return ChangedRows(0, err)
	}
	return ChangedRows(result.RowsAffected())
}

// ChangedRows is [Changed] for the number of affected rows, as ORMs return it:
//
//	tx := gdb.Model(&Product{}).Where("id = ? AND version = ?", id, version).
//		Updates(map[string]any{"stock": stock, "version": version + 1})
//	err := mysqllock.ChangedRows(tx.RowsAffected, tx.Error)
func ChangedRows(n int64, err error) error {
	switch {
	case err == nil && n < 1:
		err = errors.New("no row with that version: it was changed or deleted meanwhile")
	case !server.Changed(err) || errors.Is(err, ErrConflict):
		return err
	}
	return &Error{Op: "exec", Strategy: hint.StrategyOptimistic, Err: lockerr.With(ErrConflict, err)}
}
