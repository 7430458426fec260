package owncode

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/examples/plain"
	"github.com/mysqllock/mysqllock/lockctx"
)

// fake is a store without a server. It fails what comes without the product's lock.
type fake struct{ stock map[int]int }

func (f fake) check(ctx context.Context, product int) error {
	if key := fmt.Sprintf("product:%d", product); !lockctx.Has(ctx, key) {
		return fmt.Errorf("without the lock %q", key)
	}
	return nil
}

func (f fake) Stock(ctx context.Context, product int) (int, error) {
	return f.stock[product], f.check(ctx, product)
}

func (f fake) SetStock(ctx context.Context, product, stock int) error {
	f.stock[product] = stock
	return f.check(ctx, product)
}

// Without a server: each call has a context with the right key.
func TestReturnIsLocked(t *testing.T) {
	f := fake{map[int]int{7: 1}}
	if err := Return(t.Context(), f, 7); err != nil || f.stock[7] != 2 {
		t.Errorf("stock %d, %v", f.stock[7], err)
	}
}

// With a server: a container, or one of compose.yaml.
func TestBuyersExcludeEachOtherOnAServer(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		db, another := open(t, shop), open(t, shop)
		// Many at once, and nothing is lost. Take the driver "mysql", which takes no locks,
		// to see it fail.
		t.Run("at once", func(t *testing.T) {
			const buyers = 20
			shop.Restock(t, buyers)
			start, errs := make(chan struct{}), make(chan error)
			for range buyers {
				go func() {
					<-start
					errs <- plain.Sell(t.Context(), db, 1)
				}()
			}
			close(start)
			for range buyers {
				if err := <-errs; err != nil {
					t.Error(err)
				}
			}
			shop.Want(t, 0, 0)
		})
		// Somebody else has the lock: the test, by a handle of its own.
		t.Run("busy", func(t *testing.T) {
			hold, err := mysqllock.Acquire(t.Context(), another, "stocktaking")
			if err != nil {
				t.Fatal(err)
			}
			defer hold.Rollback()
			err = plain.Stocktaking(t.Context(), db, 1, func() (int, error) { return 0, nil })
			if !errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("got %v, want %v", err, mysqllock.ErrLocked)
			}
		})
	})
}

func open(t *testing.T, shop *testshop.Shop) *sql.DB {
	t.Helper()
	db, err := plain.Open(shop.DSN)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}
