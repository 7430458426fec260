package rowlock

import (
	"context"
	"database/sql/driver"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Step takes the versions of keys, which the open transaction on conn has locked,
// one step further, so that whoever keeps one of them optimistically sees that
// there was a commit. It runs right before COMMIT; after an error the transaction
// must be rolled back.
func (l *Locker) Step(ctx context.Context, conn driver.Conn, keys []string) error {
	n, err := server.Affected(ctx, conn, l.stepSQL(keys))
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
