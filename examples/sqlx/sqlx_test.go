package sqlxshop

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestEachFormOfSqlxIsUnderItsLock(t *testing.T) { testshop.Run(t, testShop) }

func testShop(t *testing.T, shop *testshop.Shop) {
	ctx := t.Context()
	db, another := open(t, shop), open(t, shop)

	for name, sell := range map[string]func(context.Context, *sqlx.DB, int) error{
		"transaction":         Sell,
		"without transaction": SellWithoutTransaction,
	} {
		t.Run(name, func(t *testing.T) {
			shop.Restock(t, 1)
			check(t, sell(ctx, db, 1))
			shop.Want(t, 0, 0)
			for range 3 {
				if err := sell(ctx, db, 1); !errors.Is(err, ErrSoldOut) {
					t.Fatalf("got %v, want %v", err, ErrSoldOut)
				}
			}
		})
	}

	t.Run("job", func(t *testing.T) {
		shop.Restock(t, 5)
		check(t, SellAll(ctx, db, 1))
		shop.Want(t, 0, 0)
	})

	t.Run("wait that ends", func(t *testing.T) {
		hold, err := mysqllock.Acquire(ctx, another.DB, "product:1")
		check(t, err)
		defer hold.Rollback()
		var got string
		for end := time.Now().Add(time.Minute); time.Now().Before(end) && !strings.HasPrefix(got, "connection "); { // a busy server does not say in time who has it
			_, err = db.BeginTxx(lockctx.With(ctx, "product:1", lockctx.Wait(200*time.Millisecond)), nil)
			got = Busy(err)
		}
		if !strings.HasSuffix(got, " has product:1") || !strings.HasPrefix(got, "connection ") {
			t.Errorf("Busy says %q of %v", got, err)
		}
	})

	t.Run("rebind, In, Select, Preparex", func(t *testing.T) {
		shop.Restock(t, 5)
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		ctx = lockctx.With(ctx, "product:1")
		query, args, err := sqlx.In("SELECT id, stock FROM products WHERE id IN (?)", []int{1, 2, 3})
		check(t, err)
		var all []Product
		check(t, db.SelectContext(ctx, &all, db.Rebind(query), args...))
		if len(all) != 1 || all[0].Stock != 5 {
			t.Errorf("got %v, want one product of stock 5", all)
		}
		stmt, err := db.PreparexContext(ctx, "SELECT id, stock FROM products WHERE id = ?")
		check(t, err)
		defer stmt.Close()
		var p Product
		check(t, stmt.GetContext(ctx, &p, 1))
		named, err := db.PrepareNamedContext(ctx, "UPDATE products SET stock = :stock WHERE id = :id")
		check(t, err)
		defer named.Close()
		p.Stock = 3
		_, err = named.ExecContext(ctx, p)
		check(t, err)
		shop.Want(t, 3, 0)
		if hold, err := mysqllock.Acquire(ctx, another.DB, "product:1", lockctx.NoWait()); err != nil {
			t.Errorf("after the write: %v", err)
		} else {
			check(t, hold.Rollback())
		}
	})

	t.Run("no lock", func(t *testing.T) {
		shop.Restock(t, 5)
		lock := lockctx.With(ctx, "product:1")
		refused := func(err error, says string) {
			t.Helper()
			if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), says) {
				t.Errorf("got %v, want ErrUnsafe that says %q", err, says)
			}
		}
		tx, err := db.BeginTxx(ctx, nil)
		check(t, err)
		const began = "the transaction began without the lock; begin it with the lock context, or put mysqllock.Do around it"
		refused(tx.GetContext(lock, new(Product), "SELECT id, stock FROM products WHERE id = 1"), began)
		_, err = tx.NamedExecContext(lock, "UPDATE products SET stock = :stock WHERE id = :id", Product{ID: 1})
		refused(err, began)
		check(t, tx.Commit())

		conn, err := db.Connx(ctx)
		check(t, err)
		_, err = conn.ExecContext(ctx, "SET SESSION sort_buffer_size = 300000")
		check(t, err)
		refused(conn.GetContext(lock, new(Product), "SELECT id, stock FROM products WHERE id = 1"), "SET sort_buffer_size")
		_, err = conn.BeginTxx(lock, nil)
		refused(err, "put session variables and the default database into the DSN")
		check(t, conn.Close())
		for range 3 {
			tx, err := db.BeginTxx(lock, nil)
			check(t, err)
			check(t, tx.Rollback())
		}
		shop.Want(t, 5, 0)
	})
}

func open(t *testing.T, shop *testshop.Shop) *sqlx.DB {
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
