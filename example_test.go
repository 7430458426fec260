package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// These compile in every test run; the programs in examples/ are run, too.

func Example() {
	dsn := "app:pw@tcp(127.0.0.1:3306)/shop?lockWait=5s"
	db, err := sql.Open("mysqllock", dsn)
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, "product:42")
	tx, err := db.BeginTx(ctx, nil) // takes the lock
	if err != nil {
		log.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = 42 AND stock > 0"); err != nil {
		log.Fatal(err)
	}
	if err := tx.Commit(); err != nil { // gives it back
		log.Fatal(err)
	}
}

func ExampleDo() {
	var db *sql.DB // opened with "mysqllock"
	ctx := context.Background()

	err := mysqllock.Do(ctx, db, "nightly-report", func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, "INSERT INTO reports (day) VALUES (CURRENT_DATE)")
		return err
	}, lockctx.NoWait())

	var e *mysqllock.Error
	if errors.Is(err, mysqllock.ErrLocked) && errors.As(err, &e) && e.Holder != nil {
		fmt.Println("already running:", e.Holder)
	}
}

func ExampleDo_lease() {
	var db *sql.DB // opened with "mysqllock"
	var order func(ctx context.Context, token uint64) error
	ctx := context.Background()

	err := mysqllock.Do(ctx, db, "restock", func(ctx context.Context) error {
		token, _ := mysqllock.Token(ctx) // for systems outside of the database
		return order(ctx, token)         // may take minutes
	}, lockctx.Lease(30*time.Second))
	if errors.Is(err, mysqllock.ErrLost) {
		log.Print("another process may have restocked since")
	}
}

func Example_readDecideWrite() {
	var db *sql.DB // opened with "mysqllock"

	sell := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		ctx = lockctx.With(ctx, "product:42")
		var stock int
		if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 42").Scan(&stock); err != nil { // takes the lock
			return err
		}
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 42", stock-1) // commits, and gives the lock back
		return err
	}
	if err := sell(context.Background()); err != nil {
		log.Fatal(err)
	}
}

func ExampleAcquire() {
	var db *sql.DB // opened with "mysqllock"

	hold, err := mysqllock.Acquire(context.Background(), db, "import", lockctx.Wait(time.Minute))
	if err != nil {
		log.Fatal(err)
	}
	defer hold.Rollback() // does nothing after Release
	if _, err := db.ExecContext(hold.Context(), "DELETE FROM staging"); err != nil {
		log.Fatal(err)
	}
	if err := hold.Release(); err != nil { // commits
		log.Fatal(err)
	}
}
