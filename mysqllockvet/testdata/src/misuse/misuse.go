// Package misuse has lock contexts that are used in the wrong way.
package misuse

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock/lockctx"
)

type Product struct{ Stock int }

func thrownAway(ctx context.Context, db *sql.DB) {
	lockctx.With(ctx, "product:1")     // want `nothing uses the context that With returns, so nothing is locked; .*#unused`
	_ = lockctx.With(ctx, "product:1") // want `nothing uses`
	ctx = lockctx.With(ctx, "a")       // want `nothing uses`
	db.Exec("UPDATE products SET stock = 1")
}

func loop(ctx context.Context, db *sql.DB, ids []int) {
	for _, id := range ids {
		ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", id)) // want `With is called in a loop on the context that it returned before.*#loop`
		db.ExecContext(ctx, "UPDATE products SET stock = 1")
	}
}

func sameKey(ctx context.Context, db *sql.DB, id int) {
	key := fmt.Sprint(id)
	for range 3 {
		ctx = lockctx.With(ctx, "product:1")
		ctx = lockctx.With(ctx, key)
		db.ExecContext(ctx, "UPDATE products SET stock = 1")
	}
}

func ownInLoop(ctx context.Context, db *sql.DB, ids []int) {
	for _, id := range ids {
		ctx := lockctx.With(ctx, fmt.Sprintf("product:%d", id))
		db.ExecContext(ctx, "UPDATE products SET stock = 1")
	}
}

func timeout(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1") // want `the lock that QueryRowContext on line 53 takes is kept until the context that With was given here ends, .*#timeout`
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return db.QueryRowContext(ctx, "SELECT stock FROM products").Err()
}

func timeoutOfTx(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1") // a transaction ends with its own context
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	tx.QueryRowContext(ctx, "SELECT stock FROM products")
	return tx.Commit()
}

func timeoutTwice(ctx context.Context, db *sql.DB) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	ctx, stop := context.WithTimeout(lockctx.With(ctx, "product:1"), time.Second)
	defer stop()
	return db.QueryRowContext(ctx, "SELECT stock FROM products").Err()
}

func timeoutOfNothing(db *sql.DB) error {
	ctx, cancel := context.WithTimeout(lockctx.With(context.Background(), "product:1"), time.Second)
	defer cancel() // with a context that never ends the lock goes with the query's
	return db.QueryRowContext(ctx, "SELECT stock FROM products").Err()
}

func goroutines(ctx context.Context, db *sql.DB) {
	ctx = lockctx.With(ctx, "product:1")
	var all sync.WaitGroup
	for range 10 {
		all.Add(1)
		go func() { // want `several goroutines use the lock context of line 84, .*#goroutines`
			defer all.Done()
			db.ExecContext(ctx, "UPDATE products SET stock = stock - 1")
		}()
	}
	all.Wait()
}

func group(ctx context.Context, db *sql.DB, ids []int) error {
	g, ctx := errgroup.WithContext(lockctx.With(ctx, "product:1"))
	for _, id := range ids {
		g.Go(func() error { // want `several goroutines use the lock context of line 97`
			ctx := lockctx.With(ctx, fmt.Sprint(id))
			_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock - 1")
			return err
		})
	}
	return g.Wait()
}

func two(ctx context.Context, db *sql.DB) {
	ctx = lockctx.With(ctx, "product:1")
	go write(ctx, db)
	go write(ctx, db) // want `several goroutines use the lock context`
}

func write(ctx context.Context, db *sql.DB) {
	db.ExecContext(ctx, "UPDATE products SET stock = stock - 1")
}

func eachWithItsOwn(ctx context.Context, db *sql.DB) {
	for range 10 {
		go func() {
			ctx := lockctx.With(ctx, "product:1")
			db.ExecContext(ctx, "UPDATE products SET stock = stock - 1")
		}()
		locked := lockctx.With(ctx, "product:1")
		go write(locked, db)
	}
}

func one(ctx context.Context, db *sql.DB) {
	ctx = lockctx.With(ctx, "product:1")
	go write(ctx, db)
}

func onlyReads(ctx context.Context, db *sql.DB) {
	ctx = lockctx.With(ctx, "product:1")
	for range 10 {
		go db.QueryContext(ctx, "SELECT stock FROM products")
	}
}

func stale(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1")
	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM products").Scan(&stock); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, "INSERT INTO orders VALUES (1)"); err != nil {
		return err
	}
	_, err := db.ExecContext(ctx, "UPDATE products SET stock = ?", stock-1) // want `ExecContext writes after the commit of ExecContext on line 147 .*ErrStaleRead; .*#stale-read`
	return err
}

func staleGorm(ctx context.Context, db *gorm.DB) error {
	db = db.WithContext(lockctx.With(ctx, "product:1"))
	var p Product
	if err := db.First(&p).Error; err != nil {
		return err
	}
	if err := db.Save(&p).Error; err != nil {
		return err
	}
	return db.Create(&struct{ ID int }{}).Error // want `Create writes after the commit of Save`
}

func staleLoop(ctx context.Context, db *sql.DB, ids []int) error {
	ctx = lockctx.With(ctx, "product:1")
	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM products").Scan(&stock); err != nil {
		return err
	}
	for _, id := range ids {
		if _, err := db.ExecContext(ctx, "INSERT INTO orders VALUES (?)", id); err != nil { // want `ExecContext writes after the commit of ExecContext`
			return err
		}
	}
	return nil
}

func readAgain(ctx context.Context, db *sql.DB, helper func(context.Context)) {
	ctx = lockctx.With(ctx, "product:1")
	db.QueryRowContext(ctx, "SELECT stock FROM products")
	db.ExecContext(ctx, "INSERT INTO orders VALUES (1)")
	db.QueryRowContext(ctx, "SELECT stock FROM products")
	db.ExecContext(ctx, "UPDATE products SET stock = 1")
	helper(ctx) // may read
	db.ExecContext(ctx, "UPDATE products SET stock = 2")
}

func allowed(ctx context.Context, db *sql.DB) {
	ctx = lockctx.With(ctx, "product:1", lockctx.AllowStale())
	db.QueryRowContext(ctx, "SELECT stock FROM products")
	db.ExecContext(ctx, "INSERT INTO orders VALUES (1)")
	db.ExecContext(ctx, "UPDATE products SET stock = 1")
}

func orElse(ctx context.Context, db *sql.DB, double func(error) bool) error {
	ctx = lockctx.With(ctx, "product:1")
	db.QueryRowContext(ctx, "SELECT stock FROM products")
	_, err := db.ExecContext(ctx, "INSERT INTO orders VALUES (1)")
	if double(err) { // nothing was written
		_, err = db.ExecContext(ctx, "UPDATE orders SET n = n + 1")
	}
	return err
}

func orInsert(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1")
	db.QueryRowContext(ctx, "SELECT stock FROM products")
	res, err := db.ExecContext(ctx, "UPDATE orders SET n = n + 1")
	if err != nil {
		return err
	}
	if n, _ := res.RowsAffected(); n == 0 { // nothing was changed
		_, err = db.ExecContext(ctx, "INSERT INTO orders VALUES (1)")
	}
	return err
}

func retry(ctx context.Context, db *sql.DB) (err error) {
	ctx = lockctx.With(ctx, "product:1")
	db.QueryRowContext(ctx, "SELECT stock FROM products")
	for range 3 {
		if _, err := db.ExecContext(ctx, "INSERT INTO orders VALUES (1)"); err == nil {
			return nil
		}
	}
	return err
}

func writesOnly(ctx context.Context, db *sql.DB) {
	ctx = lockctx.With(ctx, "product:1")
	db.ExecContext(ctx, "INSERT INTO orders VALUES (1)")
	db.ExecContext(ctx, "UPDATE products SET stock = 1")
}

func inTransaction(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1")
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	tx.QueryRowContext(ctx, "SELECT stock FROM products")
	tx.ExecContext(ctx, "INSERT INTO orders VALUES (1)")
	tx.ExecContext(ctx, "UPDATE products SET stock = 1")
	return tx.Commit()
}

func shared(ctx context.Context, db *sql.DB) error {
	ctx = lockctx.With(ctx, "product:1", lockctx.Shared(), lockctx.Wait(time.Second))
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	tx.QueryRow("SELECT stock FROM products WHERE id = 1")
	tx.Exec("INSERT INTO orders VALUES (1)")
	tx.ExecContext(ctx, "UPDATE products SET stock = 1") // want `ExecContext writes what was read under the Shared lock of line 251, .*#shared`
	return tx.Commit()
}

func sharedAround(ctx context.Context, db *sql.DB) {
	ctx = lockctx.With(ctx, "catalogue", lockctx.Shared())
	ctx = lockctx.With(ctx, "product:1")
	db.QueryRowContext(ctx, "SELECT stock FROM products")
	db.ExecContext(ctx, "UPDATE products SET stock = 1")
}

func advisory(ctx context.Context, db *sql.DB, id int) {
	a := lockctx.With(ctx, fmt.Sprintf("order:%d", id), lockctx.Advisory()) // want `the advisory lock on this key does not exclude .*#advisory`
	db.ExecContext(a, "UPDATE orders SET n = 1")
}

func row(ctx context.Context, db *sql.DB, id int) {
	b := lockctx.With(ctx, fmt.Sprintf("order:%d", id), lockctx.Row())
	db.ExecContext(b, "UPDATE orders SET n = 1")
}

func sameKeyAlone(ctx context.Context, db *sql.DB, id int) {
	key := fmt.Sprint(id)
	for range 3 {
		ctx = lockctx.With(ctx, key)
		db.ExecContext(ctx, "UPDATE products SET stock = 1")
	}
}

func twoInLoop(ctx context.Context, db *sql.DB, ids []int) {
	for _, id := range ids {
		ctx = lockctx.With(ctx, "products")
		ctx = lockctx.With(ctx, fmt.Sprint(id)) // want `With is called in a loop`
		db.ExecContext(ctx, "UPDATE products SET stock = 1")
	}
}
