package mysqllocktest_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/DATA-DOG/go-sqlmock"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/mysqllocktest"
)

// The mock sees one transaction, and nothing of the lock.
func Example() {
	base, mock, _ := sqlmock.New()
	defer base.Close()
	mock.ExpectBegin()
	mock.ExpectExec("UPDATE products").WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectCommit()

	locks := mysqllocktest.New()
	db, err := locks.Open(base, mysqllock.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer db.Close()
	err = mysqllock.Do(context.Background(), db, "product:42", func(ctx context.Context) error {
		fmt.Println("held by", locks.Holders("product:42"))
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = 42")
		return err
	})
	fmt.Println(err, mock.ExpectationsWereMet(), locks.Holders("product:42"))
	// Output:
	// held by [process-1]
	// <nil> <nil> []
}

// Another handle is another process. It has the key, so the code under test times out.
func ExampleLocks_Open() {
	locks := mysqllocktest.New()
	db, _ := locks.Open(nil, mysqllock.Config{Wait: 50 * time.Millisecond})
	defer db.Close()
	other, _ := locks.Open(nil, mysqllock.Config{Owner: "billing-7"})
	defer other.Close()
	hold, err := mysqllock.Acquire(context.Background(), other, "product:42")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer hold.Release()

	_, err = db.BeginTx(lockctx.With(context.Background(), "product:42"), nil)
	var e *mysqllock.Error
	if errors.As(err, &e) {
		fmt.Println(errors.Is(err, mysqllock.ErrTimeout), e.Holder.Program)
	}
	// Output: true billing-7
}

// The lease is lost in the midst of the work: its context ends, and Do fails.
func ExampleLocks_Lose() {
	locks := mysqllocktest.New()
	db, _ := locks.Open(nil, mysqllock.Config{})
	defer db.Close()
	err := mysqllock.Do(context.Background(), db, "report", func(ctx context.Context) error {
		locks.Lose("report")
		<-ctx.Done()
		return nil
	}, lockctx.Lease(30*time.Second))
	fmt.Println(errors.Is(err, mysqllock.ErrLost))
	// Output: true
}
