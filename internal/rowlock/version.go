package rowlock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// Raise adds one to the versions of keys, which the open transaction on conn has locked. So
// a unit of work that uses one of them optimistically sees that there was a commit. Call
// it right before COMMIT. After an error the transaction must be rolled back.
func (l *Locker) Raise(ctx context.Context, conn driver.Conn, keys []string) error {
	ctx = purpose.Named(ctx, purpose.Fence, hint.StrategyRow, keys...)
	n, err := server.Affected(ctx, conn, l.raiseSQL(keys))
	if err == nil && n != int64(len(keys)) {
		err = fmt.Errorf("%d rows were changed, want %d", n, len(keys))
	}
	if err != nil {
		return fmt.Errorf("raising the versions of keys: %w", err)
	}
	return nil
}

// RaiseAndCommit is Raise and COMMIT in one statement, which gives the locks back. What it returns
// means what it does in Check of package strategy.
func (l *Locker) RaiseAndCommit(ctx context.Context, c *pool.Conn, keys []string) (done, unknown bool, err error) {
	ctx = purpose.Named(ctx, purpose.End, hint.StrategyRow, keys...)
	limit, cancel := context.WithTimeout(ctx, provideLimit)
	l.cfg.Rows.ProvideCommit(limit)
	cancel()
	versions := make([]keyrow.Version, len(keys))
	for i, key := range keys {
		versions[i].Key = key
	}
	outcome, err := l.cfg.Rows.Commit(ctx, c, versions)
	if outcome == server.CheckFailed {
		err = errors.New("a row that was locked is not there any more")
	}
	if err != nil {
		err = fmt.Errorf("raising the versions of keys: %w", err)
	}
	return outcome.Done(), outcome == server.Unknown, err
}

// provideLimit bounds what the first commit of this kind does more.
const provideLimit = time.Second

// raiseSQL changes the rows of keys.
func (l *Locker) raiseSQL(keys []string) string {
	if len(keys) == 1 {
		return "UPDATE " + l.cfg.Table.String() + " SET " + schema.Next + " WHERE " + schema.Row("", l.cfg.Namespace, schema.Literal(keys[0]))
	}
	lines := make([][]string, len(keys))
	for i, key := range keys {
		lines[i] = []string{schema.Literal(key)}
	}
	text := "UPDATE /*+ SET_VAR(sql_big_selects = 1) */ " + schema.List(lines, "n") + " STRAIGHT_JOIN " + l.cfg.Table.String() +
		" ON " + schema.Row("", l.cfg.Namespace, "n") + " SET " + schema.Next
	if l.cfg.Info.Settings { // it takes the scan of the list for a scan of the table
		return "SET STATEMENT sql_safe_updates = 0, sql_big_selects = 1 FOR " + text
	}
	return text
}
