package sqlcshop

import (
	"context"
	"database/sql"
	"testing"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

func TestNoMoreIsSoldThanThereIs(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		db, err := sql.Open("mysqllock", shop.LockDSN())
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		shop.Race(t, ErrSoldOut, func(ctx context.Context) error { return Sell(ctx, db, 1, "Ann") })
	})
}
