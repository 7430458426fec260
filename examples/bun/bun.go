// Package bunshop uses mysqllock with bun.
package bunshop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/mysqldialect"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// ErrSoldOut is what a shop says that has nothing left.
var ErrSoldOut = errors.New("sold out")

// Product is what the shop sells.
type Product struct {
	ID    int64 `bun:",pk"`
	Stock int
}

// Order is one unit of a product, sold to one buyer.
type Order struct {
	ID        int64 `bun:",pk,autoincrement"`
	ProductID int64
	Buyer     string
}

// Open opens the shop.
func Open(dsn string) (*bun.DB, error) {
	db, err := sql.Open("mysqllock", dsn)
	if err != nil {
		return nil, err
	}
	return bun.NewDB(db, mysqldialect.New()), nil
}

// Sell sells one unit in a transaction. The lock is taken as it begins, and
// goes with COMMIT or ROLLBACK.
func Sell(ctx context.Context, db *bun.DB, product int64, buyer string) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	return db.RunInTx(ctx, nil, func(ctx context.Context, tx bun.Tx) error {
		p := Product{ID: product}
		if err := tx.NewSelect().Model(&p).WherePK().Scan(ctx); err != nil {
			return err
		}
		if p.Stock == 0 {
			return ErrSoldOut
		}
		p.Stock--
		if _, err := tx.NewUpdate().Model(&p).WherePK().Exec(ctx); err != nil {
			return err
		}
		_, err := tx.NewInsert().Model(&Order{ProductID: product, Buyer: buyer}).Exec(ctx)
		return err
	})
}

// SellWithoutTransaction reads, decides and writes. Scan takes the lock, Exec
// commits and releases it. If nothing is written, the lock goes when the
// context ends: that is what cancel is for.
func SellWithoutTransaction(ctx context.Context, db *bun.DB, product int64) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))

	p := Product{ID: product}
	if err := db.NewSelect().Model(&p).WherePK().Scan(ctx); err != nil {
		return err
	}
	if p.Stock == 0 {
		return ErrSoldOut
	}
	p.Stock--
	_, err := db.NewUpdate().Model(&p).WherePK().Exec(ctx)
	return err
}

// SellAll is a job that must not run twice at a time, wherever it is started.
// All that it does is one transaction: an error, or a panic, undoes it.
// Transactions inside it, such as those of Sell, are savepoints.
func SellAll(ctx context.Context, db *bun.DB, product int64, buyer string) error {
	return mysqllock.Do(ctx, db.DB, "clearance", func(ctx context.Context) error {
		for {
			err := Sell(ctx, db, product, buyer)
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
