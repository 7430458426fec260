package gormshop

import (
	"errors"
	"sync"
	"testing"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

func testSellByVersion(t *testing.T, shop *testshop.Shop) {
	for name, params := range map[string]string{"changed rows": "", "found rows": "?clientFoundRows=true"} {
		for _, config := range []gorm.Config{{}, {SkipDefaultTransaction: true, PrepareStmt: true}} {
			t.Run(name, func(t *testing.T) {
				config.Logger = logger.Discard
				var dbs []*gorm.DB
				for range 2 {
					db, err := Open(shop.DSN+params, &config)
					check(t, err)
					closeLater(t, db)
					dbs = append(dbs, db)
				}
				// A second one comes between read and write.
				shop.Restock(t, 2)
				err := dbs[0].Transaction(func(tx *gorm.DB) error {
					var p VersionedProduct
					check(t, tx.First(&p, 1).Error)
					check(t, SellByVersion(t.Context(), dbs[1], 1, "Bob"))
					return sellVersion(tx, 1, "Ann")
				})
				if !errors.Is(err, mysqllock.ErrConflict) {
					t.Errorf("got %v, want ErrConflict", err)
				}
				shop.Want(t, 1, 1)

				const sales = 96
				shop.Restock(t, sales)
				var all sync.WaitGroup
				for i := range 16 {
					all.Go(func() {
						for range sales / 16 {
							if err := SellByVersion(t.Context(), dbs[i%2], 1, "Ann"); err != nil {
								t.Error(err)
								return
							}
						}
					})
				}
				all.Wait()
				shop.Want(t, 0, sales)
				if err := SellByVersion(t.Context(), dbs[0], 1, "Ann"); !errors.Is(err, ErrSoldOut) {
					t.Errorf("got %v, want %v", err, ErrSoldOut)
				}
			})
		}
	}
}
