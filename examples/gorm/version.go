package gormshop

import (
	"context"
	"errors"

	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
)

// VersionedProduct is a product whose version is a column of its own table: no
// lock table takes part, and all who write it must change the version.
type VersionedProduct struct {
	ID      uint
	Stock   int
	Version uint
}

// TableName is that of Product.
func (VersionedProduct) TableName() string { return "products" }

// SellByVersion sells one unit if nobody else has written the product since it
// was read, and begins again if somebody has.
func SellByVersion(ctx context.Context, db *gorm.DB, product uint, buyer string) error {
	for {
		err := db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
			return sellVersion(tx, product, buyer)
		})
		if !errors.Is(err, mysqllock.ErrConflict) && !errors.Is(err, mysqllock.ErrDeadlock) {
			return err
		}
	}
}

// sellVersion is for a transaction of its own: after a conflict the same one goes
// on showing the product as it was.
func sellVersion(tx *gorm.DB, product uint, buyer string) error {
	var p VersionedProduct
	if err := tx.First(&p, product).Error; err != nil {
		return err
	}
	if p.Stock == 0 {
		return ErrSoldOut
	}
	update := tx.Model(&p).Where("version = ?", p.Version).
		Updates(map[string]any{"stock": p.Stock - 1, "version": gorm.Expr("version + 1")})
	if err := mysqllock.ChangedRows(update.RowsAffected, update.Error); err != nil {
		return err
	}
	return tx.Create(&Order{ProductID: p.ID, Buyer: buyer}).Error
}
