package plain

import (
	"context"
	"database/sql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// ReadCatalogue has read run beside other readers, of all processes, and not while the catalogue is built anew.
func ReadCatalogue(ctx context.Context, db *sql.DB, read func(context.Context) error) error {
	return mysqllock.Do(ctx, db, "catalogue", read, lockctx.Shared())
}

// BuildCatalogue has build run alone.
func BuildCatalogue(ctx context.Context, db *sql.DB, build func(context.Context) error) error {
	return mysqllock.Do(ctx, db, "catalogue", build)
}
