package gormshop

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

// testConnection: no lock is taken over GORM's Connection once a default database was chosen there, which the
// lock's own connection lacks. It is for those after it. A tenant has a handle of its own.
func testConnection(t *testing.T, shop *testshop.Shop) {
	onConfigs(t, shop.DSN, func(t *testing.T, db *gorm.DB) {
		shop.Restock(t, 10)
		for _, text := range []string{
			"DROP DATABASE IF EXISTS tenant", "CREATE DATABASE tenant", "CREATE TABLE tenant.products LIKE products",
			"INSERT INTO tenant.products (id, stock) VALUES (1, 100)",
		} {
			check(t, db.Exec(text).Error)
		}
		var own string
		check(t, db.Raw("SELECT DATABASE()").Scan(&own).Error)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		first := lockctx.With(ctx, "product:1")
		lock := lockctx.With(ctx, "product:1")
		check(t, db.Connection(func(tx *gorm.DB) error { // before, it reads and writes under a lock as any handle
			var p Product
			if err := tx.WithContext(first).First(&p, 1).Error; err != nil {
				return err
			}
			p.Stock++
			if err := tx.WithContext(first).Save(&p).Error; err != nil {
				return err
			}
			if err := tx.Exec("USE tenant").Error; err != nil {
				return err
			}
			for name, err := range map[string]error{
				"First": tx.WithContext(lock).First(new(Product), 1).Error,
				"Save":  tx.WithContext(lock).Save(&Product{ID: 1, Stock: 7}).Error,
			} {
				if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "USE") || !strings.Contains(err.Error(), "default database into the DSN") {
					t.Errorf("%s: %v", name, err)
				}
			}
			p = Product{}
			if err := tx.WithContext(ctx).First(&p, 1).Error; err != nil || p.Stock != 100 {
				t.Errorf("without the lock it reads %d, %v", p.Stock, err)
			}
			return tx.Exec("USE " + own).Error
		}))
		check(t, db.WithContext(lock).Transaction(func(tx *gorm.DB) error {
			var p Product
			if err := tx.First(&p, 1).Error; err != nil {
				return err
			}
			p.Stock--
			return tx.Save(&p).Error
		}))
		var tenant int
		check(t, db.Raw("SELECT stock FROM tenant.products").Scan(&tenant).Error)
		if tenant != 100 || shop.Stock(t) != 10 {
			t.Errorf("the stocks of tenant and shop are %d and %d, want 100 and 10", tenant, shop.Stock(t))
		}
	})
}
