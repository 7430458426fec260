// Package moving leaves another lock without a moment in which old and new programs run
// together unlocked.
package moving

import (
	"context"
	"database/sql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// OldLock is the lock that the release before takes. *redsync.Mutex is one.
type OldLock interface {
	LockContext(ctx context.Context) error
	UnlockContext(ctx context.Context) (bool, error)
}

// Both runs fn under the old lock and the new one: it excludes programs that take either.
func Both(ctx context.Context, db *sql.DB, old OldLock, key string, fn func(ctx context.Context) error, opts ...lockctx.Option) error {
	if err := old.LockContext(ctx); err != nil {
		return err
	}
	// An error here says nothing of the work: that is committed, or is not.
	defer func() { _, _ = old.UnlockContext(context.WithoutCancel(ctx)) }()
	return mysqllock.Do(ctx, db, key, fn, opts...)
}
