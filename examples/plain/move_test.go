package plain

import (
	"errors"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// TestMovesInBothDirectionsLoseNothing: on two handles, which stand for processes. None of them is the victim of a deadlock.
func TestMovesInBothDirectionsLoseNothing(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		db := open(t, shop)
		shop.Restock(t, 30)
		if _, err := db.ExecContext(t.Context(), "REPLACE INTO products (id, stock) VALUES (2, 30)"); err != nil {
			t.Fatal(err)
		}
		var all sync.WaitGroup
		for range 2 {
			db := open(t, shop)
			for n := range 8 {
				all.Go(func() {
					for range 10 {
						from := 1 + n%2
						if err := Move(t.Context(), db, from, 3-from, 7); err != nil && !errors.Is(err, ErrSoldOut) {
							t.Error(err)
						}
					}
				})
			}
		}
		all.Wait()
		var stock, least int
		if err := db.QueryRowContext(t.Context(), "SELECT SUM(stock), MIN(stock) FROM products").Scan(&stock, &least); err != nil {
			t.Fatal(err)
		}
		if stock != 60 || least < 0 {
			t.Errorf("%d units are left of 60, and %d at the least", stock, least)
		}
	})
}
