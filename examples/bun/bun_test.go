package bunshop

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/uptrace/bun"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestEachFormOfBunIsUnderItsLock(t *testing.T) { testshop.Run(t, testShop) }

func testShop(t *testing.T, shop *testshop.Shop) {
	ctx := t.Context()
	db, another := open(t, shop), open(t, shop)

	t.Run("transaction", func(t *testing.T) {
		shop.Restock(t, 1)
		check(t, Sell(ctx, db, 1, "Ann"))
		shop.Want(t, 0, 1)
		if err := Sell(ctx, db, 1, "Bob"); !errors.Is(err, ErrSoldOut) {
			t.Fatalf("got %v, want %v", err, ErrSoldOut)
		}
		shop.Want(t, 0, 1)
	})

	t.Run("without transaction", func(t *testing.T) {
		shop.Restock(t, 1)
		check(t, SellWithoutTransaction(ctx, db, 1))
		shop.Want(t, 0, 0)
		for range 3 {
			if err := SellWithoutTransaction(ctx, db, 1); !errors.Is(err, ErrSoldOut) {
				t.Fatalf("got %v, want %v", err, ErrSoldOut)
			}
		}
	})

	t.Run("job", func(t *testing.T) {
		shop.Restock(t, 5)
		check(t, SellAll(ctx, db, 1, "Ann"))
		shop.Want(t, 0, 5)
	})

	t.Run("wait that ends", func(t *testing.T) {
		hold, err := mysqllock.Acquire(ctx, another.DB, "product:1")
		check(t, err)
		defer hold.Rollback()
		var got string
		for end := time.Now().Add(time.Minute); time.Now().Before(end) && !strings.HasPrefix(got, "connection "); { // a busy server does not say in time who has it
			_, err = db.BeginTx(lockctx.With(ctx, "product:1", lockctx.Wait(200*time.Millisecond)), nil)
			got = Busy(err)
		}
		if !strings.HasSuffix(got, " has product:1") || !strings.HasPrefix(got, "connection ") {
			t.Errorf("Busy says %q of %v", got, err)
		}
	})

	// bun, too, makes savepoints by SQL text.
	t.Run("nested", func(t *testing.T) {
		shop.Restock(t, 5)
		changedMind := errors.New("changed her mind")
		order := func(ctx context.Context, db bun.IDB, buyer string) {
			o := Order{ProductID: 1, Buyer: buyer}
			_, err := db.NewInsert().Model(&o).Exec(ctx)
			check(t, err)
			if o.ID == 0 {
				t.Error("the order has no id")
			}
		}
		check(t, db.RunInTx(lockctx.With(ctx, "product:1"), nil, func(ctx context.Context, tx bun.Tx) error {
			order(ctx, tx, "Ann")
			err := tx.RunInTx(ctx, nil, func(ctx context.Context, inner bun.Tx) error {
				order(ctx, inner, "Bea")
				return changedMind
			})
			if !errors.Is(err, changedMind) {
				t.Errorf("got %v, want %v", err, changedMind)
			}
			return tx.RunInTx(ctx, nil, func(ctx context.Context, inner bun.Tx) error {
				order(ctx, inner, "Cyd")
				return nil
			})
		}))
		shop.Want(t, 5, 2)
	})
}

func open(t *testing.T, shop *testshop.Shop) *bun.DB {
	t.Helper()
	db, err := Open(shop.LockDSN())
	check(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
