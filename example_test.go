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
	db, err := sql.Open("mysqllock", "app:pw@tcp(127.0.0.1:3306)/shop?lockWait=5s")
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

	err := mysqllock.Do(context.Background(), db, "nightly-report", func(ctx context.Context) error {
		_, err := db.ExecContext(ctx, "INSERT INTO reports (day) VALUES (CURRENT_DATE)")
		return err
	}, lockctx.NoWait())

	var e *mysqllock.Error
	if errors.Is(err, mysqllock.ErrLocked) && errors.As(err, &e) && e.Holder != nil {
		fmt.Println("already running:", e.Holder)
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
