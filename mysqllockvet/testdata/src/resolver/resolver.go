// Package resolver has reads that dbresolver sends to replicas.
package resolver

import (
	"context"

	"gorm.io/gorm"
	"gorm.io/plugin/dbresolver"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

type Product struct{ Stock int }

func open(replica gorm.Dialector) *dbresolver.DBResolver {
	return dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{replica}}) // it knows of Write
}

func onSource(ctx context.Context, db *gorm.DB) *gorm.DB {
	return db.WithContext(ctx).Clauses(dbresolver.Write).Session(&gorm.Session{})
}

func sell(ctx context.Context, db *gorm.DB) error {
	pool, _ := db.DB()
	return mysqllock.Do(ctx, pool, "product:1", func(ctx context.Context) error {
		var p Product
		if err := onSource(ctx, db).First(&p).Error; err != nil {
			return err
		}
		if err := db.WithContext(ctx).First(&p).Error; err != nil { // want `First may read from another handle of dbresolver, without the lock of line 26; .*#dbresolver`
			return err
		}
		return db.WithContext(ctx).Save(&p).Error
	})
}

func inTransaction(ctx context.Context, db *gorm.DB) error {
	return db.WithContext(lockctx.With(ctx, "product:1")).Transaction(func(tx *gorm.DB) error {
		var p Product
		return tx.First(&p).Error
	})
}
