package shops

import (
	"context"
	"errors"
	"strings"
	"testing"

	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	gormshop "github.com/mysqllock/mysqllock/examples/gorm"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	sqlxshop "github.com/mysqllock/mysqllock/examples/sqlx"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAVersionBesideALockIsRefused with GORM and sqlx, in words, and nothing is written.
func TestAVersionBesideALockIsRefused(t *testing.T) {
	const says = `lock "product:1" (optimistic): not safe here: the lock context also asks for "stock", by the strategy row, and an optimistic version goes with no lock; ` +
		"keep both keys by one strategy, or give each a lock context of its own"
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		shop.Restock(t, 10)
		ctx := lockctx.With(lockctx.With(context.Background(), "product:1", lockctx.Optimistic()), "stock")
		g, err := gormshop.Open(shop.LockDSN())
		if err != nil {
			t.Fatal(err)
		}
		x, err := sqlxshop.Open(shop.LockDSN())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			x.Close()
			if db, err := g.DB(); err == nil {
				db.Close()
			}
		})
		const write = "UPDATE products SET stock = stock - 1 WHERE id = 1"
		for way, f := range map[string]func() error{
			"gorm, Exec": func() error { return g.WithContext(ctx).Exec(write).Error },
			"gorm, Transaction": func() error {
				return g.WithContext(ctx).Transaction(func(tx *gorm.DB) error { return tx.Exec(write).Error })
			},
			"gorm, First": func() error { return g.WithContext(ctx).First(&gormshop.Product{}, 1).Error },
			"sqlx, Exec":  func() error { _, err := x.ExecContext(ctx, write); return err },
			"sqlx, Get": func() error {
				return x.GetContext(ctx, &sqlxshop.Product{}, "SELECT id, stock FROM products WHERE id = 1")
			},
			"sqlx, Beginx": func() error {
				tx, err := x.BeginTxx(ctx, nil)
				if err == nil {
					err = errors.Join(errors.New("it has begun"), tx.Rollback())
				}
				return err
			},
		} {
			if err := f(); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: %v", way, err)
			}
		}
		shop.Want(t, 10, 0)
	})
}
