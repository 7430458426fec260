package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
)

// texts is what is known of a connection from the plain SQL texts that have run on
// it: they begin and end transactions that the driver has not begun, and set
// isolation levels.
type texts struct {
	state   sqltext.State  // autocommit, and whether a transaction is open
	sure    bool           // state knows how the connection began
	session sqltext.Levels // that transactions have from now on; 0 for those of a new connection
	next    sqltext.Levels // that the next transaction has in place of them; 0 for none
}

// What BeginTx does to the state of a connection, and Commit and Rollback.
var (
	beginEffect = sqltext.Look("BEGIN").Effect
	endEffect   = sqltext.Look("COMMIT").Effect
)

// note remembers what a text has done that has run on the connection. A query may
// have further results, of statements of which nobody knows yet whether they run.
func (t *texts) note(info sqltext.Info, query bool, err error) {
	if errors.Is(err, driver.ErrSkip) { // nothing has run
		return
	}
	whole := err == nil && !query
	does := info.Effect != (sqltext.Effect{})
	if does {
		t.ran(info.Effect, whole)
	}
	switch {
	case info.Next != 0:
		t.next = info.Next
	case does && whole && sqltext.Idle.After(info.Effect) == sqltext.Open:
		t.next = 0 // that was it
	case t.next != 0:
		t.next = sqltext.AnyLevel // that may have been the transaction which it was for
	}
	if info.Session != 0 {
		t.session = info.Session
	}
	if !whole && info.Session|info.Next != 0 {
		t.session, t.next = sqltext.AnyLevel, 0
		if info.Next != 0 {
			t.next = sqltext.AnyLevel
		}
	}
}

// ran notes the effect of what has run, wholly or not.
func (t *texts) ran(e sqltext.Effect, whole bool) {
	if whole {
		t.state = t.state.After(e)
	} else {
		t.state = t.state.Within(e)
	}
}

// begins returns the isolation levels of a transaction that begins now with opts. 0
// stands for those of a new connection.
//
// A statement that reads a table, and comes before the transaction, uses up those that
// are for one transaction only: between says that there is one.
func (t *texts) begins(opts driver.TxOptions, between bool) sqltext.Levels {
	next := t.next
	t.next = 0
	switch opts.Isolation {
	case 0: // sql.LevelDefault
	case 1:
		return sqltext.ReadUncommitted
	case 2:
		return sqltext.ReadCommitted
	default:
		return sqltext.RepeatableRead
	}
	switch {
	case next == 0:
		return t.session
	case between:
		return sqltext.AnyLevel
	}
	return next
}

// askState asks the server for the state of a connection.
func askState(ctx context.Context, base driver.Conn) (sqltext.State, error) {
	rows, err := server.Query(ctx, base, "SELECT @@autocommit")
	if err != nil {
		return 0, err
	}
	if len(rows) != 1 || len(rows[0]) != 1 {
		return 0, errors.New("the server answers the question for @@autocommit in an unexpected shape")
	}
	if rows[0][0] != "1" {
		return sqltext.Manual, nil
	}
	switch stays, err := savepointStays(ctx, base, "mysqllock_open"); {
	case err == nil && !stays:
		return sqltext.Idle, nil
	case err == nil || server.Number(err) != 0: // as in an XA transaction that has ended and is to be prepared
		return sqltext.Open, nil
	default:
		return 0, err
	}
}

// savepointStays reports whether a savepoint of that name outlives its statement, as it
// does in a transaction only.
func savepointStays(ctx context.Context, base driver.Conn, name string) (bool, error) {
	for _, text := range []string{"SAVEPOINT " + name, "RELEASE SAVEPOINT " + name} {
		if err := server.Exec(ctx, base, text); err != nil {
			if server.NoSavepoint(err) {
				err = nil
			}
			return false, err
		}
	}
	return true, nil
}
