package gormshop

import (
	"context"
	"errors"
	"testing"
	"time"

	driver "github.com/go-sql-driver/mysql"
	"gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/plugin/dbresolver"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestResolver: dbresolver sends reads to another handle, whose data no lock of this one
// protects. What would be decided on them fails.
func TestResolver(t *testing.T) { testshop.Run(t, testResolver) }

func testResolver(t *testing.T, shop *testshop.Shop) {
	db, err := Open(shop.DSN, &gorm.Config{Logger: logger.Discard})
	check(t, err)
	closeLater(t, db)
	other, err := driver.ParseDSN(shop.DSN)
	check(t, err)
	other.DBName += "_replica"
	for _, text := range []string{
		"CREATE DATABASE " + other.DBName, "CREATE TABLE " + other.DBName + ".products LIKE products",
		"INSERT INTO " + other.DBName + ".products (id, stock) VALUES (1, 100)",
	} {
		check(t, db.Exec(text).Error)
	}
	replica, err := Open(other.FormatDSN(), &gorm.Config{Logger: logger.Discard})
	check(t, err)
	closeLater(t, replica)
	pool, err := replica.DB()
	check(t, err)
	check(t, db.Use(dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{mysql.New(mysql.Config{Conn: pool})}})))
	source, err := db.DB()
	check(t, err)

	for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
		t.Run(name, func(t *testing.T) {
			shop.Restock(t, 100)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			sell := func(db *gorm.DB) error {
				var p Product
				if err := db.First(&p, 1).Error; err != nil {
					return err
				}
				p.Stock--
				return db.Save(&p).Error
			}
			for range 5 {
				err := mysqllock.Do(ctx, source, "product:1", func(ctx context.Context) error { return sell(db.WithContext(ctx)) }, opt)
				if !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("in Do: got %v, want %v", err, mysqllock.ErrUnsafe)
				}
				own, end := context.WithCancel(ctx)
				if err := sell(db.WithContext(lockctx.With(own, "product:1", opt))); !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("without a transaction: got %v, want %v", err, mysqllock.ErrUnsafe)
				}
				end()
			}
			shop.Want(t, 100, 0)

			for range 5 {
				check(t, mysqllock.Do(ctx, source, "product:1", func(ctx context.Context) error {
					var p Product
					if err := db.WithContext(ctx).Clauses(dbresolver.Write).First(&p, 1).Error; err != nil {
						return err
					}
					p.Stock--
					return db.WithContext(ctx).Save(&p).Error
				}, opt))
				check(t, db.WithContext(lockctx.With(ctx, "product:1", opt)).Transaction(sell))
			}
			shop.Want(t, 90, 0)
		})
	}
}
