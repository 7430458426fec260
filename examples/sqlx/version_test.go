package sqlxshop

import (
	"errors"
	"sync"
	"testing"

	"github.com/jmoiron/sqlx"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

func TestNoSaleByVersionIsLost(t *testing.T) { testshop.Run(t, testSellByVersion) }

func testSellByVersion(t *testing.T, shop *testshop.Shop) {
	for name, params := range map[string]string{"changed rows": "", "found rows": "?clientFoundRows=true"} {
		t.Run(name, func(t *testing.T) {
			var dbs []*sqlx.DB
			for range 2 {
				db, err := Open(shop.DSN + params)
				check(t, err)
				t.Cleanup(func() { db.Close() })
				dbs = append(dbs, db)
			}
			// A second one comes between read and write, and changes no more than the version.
			shop.Restock(t, 2)
			write := "UPDATE products SET stock = 2, version = version + 1 WHERE id = 1 AND version = ?"
			for _, conflict := range []bool{false, true} {
				err := mysqllock.Changed(dbs[0].ExecContext(t.Context(), write, 1))
				if errors.Is(err, mysqllock.ErrConflict) != conflict || !conflict && err != nil {
					t.Errorf("conflict %v: %v", conflict, err)
				}
			}

			const sales = 96
			shop.Restock(t, sales)
			var all sync.WaitGroup
			for i := range 16 {
				all.Go(func() {
					for range sales / 16 {
						if err := SellByVersion(t.Context(), dbs[i%2], 1); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			all.Wait()
			shop.Want(t, 0, 0)
			if err := SellByVersion(t.Context(), dbs[0], 1); !errors.Is(err, ErrSoldOut) {
				t.Errorf("got %v, want %v", err, ErrSoldOut)
			}
		})
	}
}
