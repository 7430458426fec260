package unittest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/DATA-DOG/go-sqlmock"
	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/mysqllocktest"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newShop returns a shop on a mock, and the locks that it takes.
func newShop(t *testing.T, c mysqllock.Config) (*Shop, sqlmock.Sqlmock, *mysqllocktest.Locks) {
	base, mock, err := sqlmock.New()
	must(t, err)
	locks := mysqllocktest.New()
	db, err := locks.Open(base, c)
	must(t, err)
	t.Cleanup(func() {
		db.Close()
		base.Close()
		must(t, mock.ExpectationsWereMet())
	})
	return &Shop{DB: db}, mock, locks
}

// expectSale expects the statements of one sale. The first takes a while, so that those of another
// caller come in between if nothing keeps them out.
func expectSale(mock sqlmock.Sqlmock, stock int) *sqlmock.ExpectedCommit {
	mock.ExpectBegin()
	mock.ExpectQuery("SELECT stock").WithArgs(42).WillDelayFor(5 * time.Millisecond).
		WillReturnRows(sqlmock.NewRows([]string{"stock"}).AddRow(stock))
	mock.ExpectExec("UPDATE products").WithArgs(stock-1, 42).WillReturnResult(sqlmock.NewResult(0, 1))
	return mock.ExpectCommit()
}

func TestASaleGivesItsLockBack(t *testing.T) {
	shop, mock, locks := newShop(t, mysqllock.Config{})
	expectSale(mock, 3)
	must(t, shop.Sell(t.Context(), 42))
	if holders := locks.Holders("product:42"); len(holders) > 0 {
		t.Errorf("the lock is still held by %q", holders)
	}
}

func TestAnEmptyStockSellsNothing(t *testing.T) {
	shop, mock, _ := newShop(t, mysqllock.Config{})
	mock.ExpectBegin()
	mock.ExpectQuery("SELECT stock").WithArgs(42).WillReturnRows(sqlmock.NewRows([]string{"stock"}).AddRow(0))
	mock.ExpectRollback()
	if err := shop.Sell(t.Context(), 42); !errors.Is(err, ErrSoldOut) {
		t.Errorf("got %v", err)
	}
}

func TestARestockAddsToTheStock(t *testing.T) {
	shop, mock, _ := newShop(t, mysqllock.Config{})
	mock.ExpectBegin()
	mock.ExpectExec("UPDATE products").WithArgs(5, 42).WillReturnResult(sqlmock.NewResult(0, 1))
	mock.ExpectCommit()
	must(t, shop.Restock(t.Context(), 42, 5))
}

// TestTwoBuyersBuyOneAfterTheOther: the mock expects their statements in order. Without the lock
// they would mix.
func TestTwoBuyersBuyOneAfterTheOther(t *testing.T) {
	shop, mock, _ := newShop(t, mysqllock.Config{})
	expectSale(mock, 2)
	expectSale(mock, 1)
	errs := make(chan error)
	for range 2 {
		go func() { errs <- shop.Sell(t.Context(), 42) }()
	}
	for range 2 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// TestAnotherProcessHasTheKey: the shop gives up, sends nothing, and says who has it.
func TestAnotherProcessHasTheKey(t *testing.T) {
	shop, _, locks := newShop(t, mysqllock.Config{Wait: 50 * time.Millisecond})
	other, err := locks.Open(nil, mysqllock.Config{Owner: "billing-7"})
	must(t, err)
	defer other.Close()
	hold, err := mysqllock.Acquire(t.Context(), other, "product:42")
	must(t, err)
	defer hold.Release()

	err = shop.Restock(t.Context(), 42, 5)
	var e *mysqllock.Error
	if !errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Holder.Program != "billing-7" {
		t.Errorf("got %v", err)
	}
}

// TestALostLeaseStoresNothing: the work is told.
func TestALostLeaseStoresNothing(t *testing.T) {
	shop, _, locks := newShop(t, mysqllock.Config{})
	err := shop.Report(t.Context(), func(ctx context.Context) (int, error) {
		locks.Lose("report")
		<-ctx.Done()
		return 7, nil
	})
	if !errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("got %v", err)
	}
}
