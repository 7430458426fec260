package mysqllock

import (
	"context"
	"database/sql"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// AcquireKeys is [Acquire] for several keys, which are taken together, all or none, and
// in one order everywhere, as by [lockctx.WithKeys]: two programs that name the same keys
// in another order do not deadlock. Row locks and versions are all of one transaction.
// Leases and advisory locks are taken one by one; the wait is for all of them together.
//
// The Hold is lost as soon as one of its keys is. Each key has a token and an expiry of its
// own; those that the Hold tells are of one of them. Where they matter, acquire one key
// inside the hold of the other, in the same order everywhere.
func AcquireKeys(ctx context.Context, db *sql.DB, keys []string, opts ...lockctx.Option) (*Hold, error) {
	k, err := connectorOf(ctx, db)
	if err != nil {
		return nil, err
	}
	if asked := hint.Ask(ctx, keys, opts...); asked.Retry > 0 && asked.Err == nil {
		return nil, badRetry("Retry is for Do, which can run its function again; Acquire cannot")
	}
	return k.acquire(ctx, keys, opts)
}

// DoKeys is [Do] for several keys, which are taken as by [AcquireKeys]: to move stock from
// one product to another, for instance.
func DoKeys(ctx context.Context, db *sql.DB, keys []string, fn func(context.Context) error, opts ...lockctx.Option) error {
	k, err := connectorOf(ctx, db)
	if err != nil {
		return err
	}
	return k.do(ctx, keys, fn, opts)
}
