package rowlock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/schema"
)

// Step takes the versions of keys, which the open transaction on conn has locked,
// one step further, so that whoever keeps one of them optimistically sees that
// there was a commit. It runs right before COMMIT; after an error the transaction
// must be rolled back.
func (l *Locker) Step(ctx context.Context, conn driver.Conn, keys []string) error {
	n, err := changed(ctx, conn, l.stepSQL(keys))
	if err == nil && n != int64(len(keys)) {
		err = fmt.Errorf("%d rows were changed, not %d", n, len(keys))
	}
	if err != nil {
		return fmt.Errorf("taking versions a step further: %w", err)
	}
	return nil
}

// stepSQL changes one row, or each as it is looked up by its primary key: a list
// of names could lock every row of a small table.
func (l *Locker) stepSQL(keys []string) string {
	if len(keys) == 1 {
		return "UPDATE " + l.cfg.Table.String() + " SET token = token + 1, expires = UTC_TIMESTAMP(6) WHERE namespace = " +
			schema.Literal(l.cfg.Namespace) + " AND name = " + schema.Literal(keys[0])
	}
	lines := "SELECT " + schema.Literal(keys[0]) + " AS n"
	for _, key := range keys[1:] {
		lines += " UNION ALL SELECT " + schema.Literal(key)
	}
	text := "UPDATE (" + lines + ") d STRAIGHT_JOIN " + l.cfg.Table.String() + " ON namespace = " + schema.Literal(l.cfg.Namespace) +
		" AND name = n SET token = token + 1, expires = UTC_TIMESTAMP(6)"
	if l.cfg.Info.MariaDB { // it takes the scan of the list for one of the table
		return "SET STATEMENT sql_safe_updates = 0 FOR " + text
	}
	return text
}

// changed runs one statement as text, in one round trip, and returns how many
// rows it has changed.
func changed(ctx context.Context, conn driver.Conn, text string) (int64, error) {
	if e, ok := conn.(driver.ExecerContext); ok {
		result, err := e.ExecContext(ctx, text, nil)
		if err == nil {
			return result.RowsAffected()
		}
		if !errors.Is(err, driver.ErrSkip) {
			return 0, err
		}
	}
	stmt, err := conn.Prepare(text)
	if err != nil {
		return 0, err
	}
	defer stmt.Close()
	var result driver.Result
	if s, ok := stmt.(driver.StmtExecContext); ok {
		result, err = s.ExecContext(ctx, nil)
	} else {
		result, err = stmt.Exec(nil) //nolint:staticcheck // for drivers without the context form
	}
	if err != nil {
		return 0, err
	}
	return result.RowsAffected()
}
