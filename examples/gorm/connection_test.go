package gormshop

import (
	"context"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

// testConnection: what runs under a lock in GORM's Connection stays on that
// connection, with the default database that was chosen there.
func testConnection(t *testing.T, shop *testshop.Shop) {
	onConfigs(t, shop.DSN, func(t *testing.T, db *gorm.DB) {
		shop.Restock(t, 10)
		for _, text := range []string{
			"DROP DATABASE IF EXISTS tenant", "CREATE DATABASE tenant", "CREATE TABLE tenant.products LIKE products",
			"INSERT INTO tenant.products (id, stock) VALUES (1, 100)",
		} {
			check(t, db.Exec(text).Error)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		check(t, db.Connection(func(tx *gorm.DB) error {
			if err := tx.Exec("USE tenant").Error; err != nil {
				return err
			}
			tx = tx.WithContext(lockctx.With(ctx, "product:1"))
			for range 3 {
				var p Product
				if err := tx.First(&p, 1).Error; err != nil {
					return err
				}
				p.Stock--
				if err := tx.Save(&p).Error; err != nil {
					return err
				}
			}
			return nil
		}))
		var tenant int
		check(t, db.Raw("SELECT stock FROM tenant.products").Scan(&tenant).Error)
		if tenant != 97 || shop.Stock(t) != 10 {
			t.Errorf("the stocks of tenant and shop are %d and %d, want 97 and 10", tenant, shop.Stock(t))
		}
	})
}
