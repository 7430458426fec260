// Package mysqllock has the names of the real one, for the tests.
package mysqllock

import (
	"context"
	"database/sql"

	"github.com/mysqllock/mysqllock/lockctx"
)

type Config struct{ MaxConns int }

type Hold struct{}

func (*Hold) Context() context.Context { return nil }
func (*Hold) Release() error           { return nil }
func (*Hold) Rollback() error          { return nil }

func Acquire(ctx context.Context, db *sql.DB, key string, opts ...lockctx.Option) (*Hold, error) {
	return nil, nil
}

func Do(ctx context.Context, db *sql.DB, key string, fn func(context.Context) error, opts ...lockctx.Option) error {
	return nil
}

func AcquireKeys(ctx context.Context, db *sql.DB, keys []string, opts ...lockctx.Option) (*Hold, error) {
	return nil, nil
}

func DoKeys(ctx context.Context, db *sql.DB, keys []string, fn func(context.Context) error, opts ...lockctx.Option) error {
	return nil
}
