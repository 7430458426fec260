package schema

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Drop drops the table, unless a lock on it is held or waited for: then the error matches
// lockerr.ErrLocked. LOCK TABLES waits for all transactions that use the table, and keeps others
// out, so that no lease is granted between the look at the leases and DROP TABLE. How long it waits
// is the connection's lock_wait_timeout. Drop refuses a table that has not the columns of ours.
//
// conn has no open transaction, and must be closed after an error: the table may still be locked.
func (t Table) Drop(ctx context.Context, conn driver.Conn) error {
	s, err := t.state(ctx, conn)
	switch {
	case err != nil:
		return err
	case s.engine == "":
		return fmt.Errorf("the lock table %s does not exist, or the account lacks privileges on it", t)
	case s.engine == view || !s.ours():
		return fmt.Errorf("%s is not a lock table of this version, so it is not dropped", t)
	}
	if err := server.Exec(ctx, conn, "LOCK TABLES "+t.String()+" WRITE"); err != nil {
		return notDropped(err)
	}
	live, err := server.Query(ctx, conn, "SELECT 1 FROM "+t.String()+" WHERE "+Live("")+" LIMIT 1")
	if err == nil && len(live) > 0 {
		return lockerr.With(lockerr.ErrLocked, errors.New("a lease is held"))
	}
	if err == nil {
		err = server.Exec(ctx, conn, "DROP TABLE "+t.String())
	}
	return notDropped(err)
}

// notDropped says what can be done about an error of Drop.
func notDropped(err error) error {
	switch {
	case server.Denied(err):
		return fmt.Errorf("%w; the account needs SELECT, LOCK TABLES and DROP", err)
	case server.Locked(err):
		return lockerr.With(lockerr.ErrLocked, fmt.Errorf("a transaction uses the lock table, which locks its rows or reads it: %w", err))
	}
	return err
}

// ours reports whether a table has the columns that the driver needs.
func (s state) ours() bool {
	return s.adding(laterColumns) == "" && slices.Contains(s.columns, "namespace") && slices.Contains(s.columns, "name")
}
