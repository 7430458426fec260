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

// testDecisions: what was read outside a transaction is good for the first commit
// that changes something, and no longer.
func testDecisions(t *testing.T, shop *testshop.Shop) {
	onConfigs(t, shop.DSN, func(t *testing.T, db *gorm.DB) {
		u := usage{shop: shop, db: db, another: another(t, shop)}
		for strategy, opt := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(time.Minute), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
		} {
			with := func(t *testing.T) *gorm.DB {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				t.Cleanup(cancel)
				return db.WithContext(lockctx.With(ctx, "product:1", opt))
			}
			t.Run(strategy, func(t *testing.T) {
				t.Run("LogThenSave", func(t *testing.T) { u.logThenSave(t, with(t)) })
				t.Run("SaveInLoop", func(t *testing.T) { u.saveInLoop(t, with(t)) })
				t.Run("SaveUnchanged", func(t *testing.T) { u.saveUnchanged(t, with(t), strategy == "row" || strategy == "lease") })
				t.Run("InTransaction", func(t *testing.T) { u.inTransaction(t, with(t)) })
			})
		}
		u.idle(t)
	})
}

func stale(t *testing.T, err error) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.Is(err, mysqllock.ErrStaleRead) || !errors.As(err, &e) || e.Key != "product:1" {
		t.Errorf("got %v, want ErrStaleRead", err)
	}
}

// logThenSave: First, Create, Save. Save is too late.
func (u usage) logThenSave(t *testing.T, db *gorm.DB) {
	u.shop.Restock(t, 9)
	var p Product
	check(t, db.First(&p, 1).Error)
	check(t, db.Create(&Order{ProductID: 1, Buyer: "Ann"}).Error)
	p.Stock--
	stale(t, db.Save(&p).Error)
	stale(t, db.Model(&p).Update("stock", p.Stock).Error)
	stale(t, db.Delete(&p).Error)
	stale(t, db.Exec("UPDATE products SET stock = ? WHERE id = 1", p.Stock).Error)
	stale(t, db.Transaction(func(tx *gorm.DB) error { return tx.Save(&p).Error }))
	u.shop.Want(t, 9, 1)

	check(t, db.First(&p, 1).Error)
	p.Stock--
	check(t, db.Save(&p).Error)
	u.shop.Want(t, 8, 1)
}

// saveInLoop: Find, and a Save of each.
func (u usage) saveInLoop(t *testing.T, db *gorm.DB) {
	u.shop.Restock(t, 9)
	check(t, u.db.Save(&Product{ID: 2, Stock: 9}).Error)
	check(t, u.db.Save(&Product{ID: 3, Stock: 9}).Error)
	defer func() { check(t, u.db.Delete(&Product{}, []int{2, 3}).Error) }()
	var all []Product
	check(t, db.Order("id").Find(&all).Error)
	if len(all) != 3 {
		t.Fatalf("%d products", len(all))
	}
	for i, p := range all {
		p.Stock--
		if err := db.Save(&p).Error; i == 0 {
			check(t, err)
		} else {
			stale(t, err)
		}
	}
	u.shop.Want(t, 8, 0)
}

// saveUnchanged: UPDATE affects no row, so Save sends an upsert of all columns as
// well. Both are under the lock, and where the server says that the upsert has changed
// nothing, what follows them is, too. On MariaDB, GORM has it return the id in place of
// a number, so there it ends the unit of work.
func (u usage) saveUnchanged(t *testing.T, db *gorm.DB, visible bool) {
	u.shop.Restock(t, 9)
	var p Product
	check(t, db.First(&p, 1).Error)
	upserts := 0
	const mark = "shop:upsert"
	check(t, u.db.Callback().Create().Before("gorm:create").Register(mark, func(*gorm.DB) {
		upserts++
		if visible { // to a row lock
			u.locked(t, "product:1", true)
		}
	}))
	check(t, db.Save(&p).Error)
	check(t, u.db.Callback().Create().Remove(mark))
	if upserts != 1 {
		t.Errorf("%d upserts", upserts)
	}
	var version string
	check(t, u.another.QueryRow("SELECT VERSION()").Scan(&version))
	if strings.Contains(version, "MariaDB") {
		u.locked(t, "product:1", false)
		stale(t, db.Save(&p).Error)
		check(t, db.First(&p, 1).Error)
	} else {
		if visible {
			u.locked(t, "product:1", true)
		}
		check(t, db.Save(&p).Error)
	}
	p.Stock--
	check(t, db.Save(&p).Error)
	u.locked(t, "product:1", false)
	u.shop.Want(t, 8, 0)
	stale(t, db.Save(&p).Error)
}

// inTransaction: the same as logThenSave, as it should be.
func (u usage) inTransaction(t *testing.T, db *gorm.DB) {
	sell := func(tx *gorm.DB) error {
		var p Product
		check(t, tx.First(&p, 1).Error)
		check(t, tx.Create(&Order{ProductID: 1, Buyer: "Ann"}).Error)
		p.Stock--
		return tx.Transaction(func(inner *gorm.DB) error { return inner.Save(&p).Error }) // a savepoint by text
	}
	u.shop.Restock(t, 9)
	check(t, db.Transaction(sell))
	check(t, db.Transaction(sell))
	u.shop.Want(t, 7, 2)

	pool, err := u.db.DB()
	check(t, err)
	check(t, mysqllock.Do(t.Context(), pool, "product:1", func(ctx context.Context) error { return sell(u.db.WithContext(ctx)) }))
	u.shop.Want(t, 6, 3)

	// After a decision from before, in nested transactions that read.
	var p Product
	check(t, db.First(&p, 1).Error)
	check(t, db.Create(&Order{ProductID: 1, Buyer: "Bea"}).Error)
	check(t, db.Transaction(func(tx *gorm.DB) error { return tx.Transaction(sell) }))
	u.shop.Want(t, 5, 5)
}
