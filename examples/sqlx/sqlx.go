// Package sqlxshop uses mysqllock with sqlx.
package sqlxshop

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jmoiron/sqlx"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// ErrSoldOut is what a shop says that has nothing left.
var ErrSoldOut = errors.New("sold out")

// Product is what the shop sells.
type Product struct {
	ID    int
	Stock int
}

// sqlx knows the usual drivers by name; of another one, Rebind and In have to
// be told how it writes parameters.
func init() { sqlx.BindDriver("mysqllock", sqlx.QUESTION) }

// Open opens the shop.
func Open(dsn string) (*sqlx.DB, error) {
	return sqlx.Open("mysqllock", dsn)
}

// Sell sells one unit in a transaction. The lock is taken as it begins, and
// goes with COMMIT or ROLLBACK.
func Sell(ctx context.Context, db *sqlx.DB, product int) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	tx, err := db.BeginTxx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()

	var p Product
	if err := tx.GetContext(ctx, &p, "SELECT id, stock FROM products WHERE id = ?", product); err != nil {
		return err
	}
	if p.Stock == 0 {
		return ErrSoldOut
	}
	p.Stock--
	if _, err := tx.NamedExecContext(ctx, "UPDATE products SET stock = :stock WHERE id = :id", p); err != nil {
		return err
	}
	return tx.Commit()
}

// SellWithoutTransaction reads, decides and writes. GetContext takes the lock,
// NamedExecContext commits and releases it. If nothing is written, the lock
// goes when the context ends: that is what cancel is for.
func SellWithoutTransaction(ctx context.Context, db *sqlx.DB, product int) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))

	var p Product
	if err := db.GetContext(ctx, &p, "SELECT id, stock FROM products WHERE id = ?", product); err != nil {
		return err
	}
	if p.Stock == 0 {
		return ErrSoldOut
	}
	p.Stock--
	_, err := db.NamedExecContext(ctx, "UPDATE products SET stock = :stock WHERE id = :id", p)
	return err
}

// SellAll is a job that must not run twice at a time, wherever it is started.
// All that it does is one transaction: an error, or a panic, undoes it.
// Transactions inside it, such as those of Sell, are savepoints.
func SellAll(ctx context.Context, db *sqlx.DB, product int) error {
	return mysqllock.Do(ctx, db.DB, "clearance", func(ctx context.Context) error {
		for {
			err := Sell(ctx, db, product)
			if errors.Is(err, ErrSoldOut) {
				return nil
			}
			if err != nil {
				return err
			}
		}
	})
}

// Busy says who has the lock that a caller did not get.
func Busy(err error) string {
	var e *mysqllock.Error
	if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrLocked) {
		return ""
	}
	if e.Holder == nil {
		return "someone has " + e.Key
	}
	return fmt.Sprintf("%s has %s", e.Holder, e.Key)
}
