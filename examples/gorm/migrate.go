package gormshop

import (
	"context"
	"time"

	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Migrate makes the tables of models. Of replicas that start at once one does so, and the others
// wait: AutoMigrate alone first asks whether a table is there, and creates it when another replica
// has done so (error 1050). DDL needs a lease, since it would end a transaction.
func Migrate(ctx context.Context, db *gorm.DB, models ...any) error {
	pool, err := db.DB()
	if err != nil {
		return err
	}
	return mysqllock.Do(ctx, pool, "migrations", func(ctx context.Context) error {
		return db.WithContext(ctx).AutoMigrate(models...)
	}, lockctx.Lease(30*time.Second), lockctx.Wait(time.Hour))
}
