package gormshop

import (
	"context"

	"gorm.io/gorm"
	"gorm.io/plugin/dbresolver"
)

// OnSource is db.WithContext for lock contexts where dbresolver sends reads to replicas: what
// runs on it reads from the source, under the lock and with what was written there before.
func OnSource(ctx context.Context, db *gorm.DB) *gorm.DB {
	return db.WithContext(ctx).Clauses(dbresolver.Write).Session(&gorm.Session{})
}
