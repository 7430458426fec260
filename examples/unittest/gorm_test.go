package unittest

import (
	"testing"

	"github.com/DATA-DOG/go-sqlmock"
	"gorm.io/driver/mysql"
	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestATransactionOfGORMHasItsLock: GORM is on the handle of the test.
func TestATransactionOfGORMHasItsLock(t *testing.T) {
	shop, mock, locks := newShop(t, mysqllock.Config{})
	mock.ExpectBegin()
	mock.ExpectQuery("SELECT .* FROM `products`").WillReturnRows(sqlmock.NewRows([]string{"id", "stock"}).AddRow(42, 3))
	mock.ExpectExec("UPDATE `products`").WithArgs(2, 42).WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectCommit()
	db, err := gorm.Open(mysql.New(mysql.Config{Conn: shop.DB, SkipInitializeWithVersion: true}))
	must(t, err)
	type Product struct{ ID, Stock int }
	err = db.WithContext(lockctx.With(t.Context(), "product:42")).Transaction(func(tx *gorm.DB) error {
		var p Product
		if err := tx.First(&p, 42).Error; err != nil {
			return err
		}
		if len(locks.Holders("product:42")) != 1 {
			t.Error("the lock is not held")
		}
		p.Stock--
		return tx.Save(&p).Error
	})
	must(t, err)
}
