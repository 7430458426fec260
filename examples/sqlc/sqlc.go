// Package sqlcshop uses mysqllock with the code that sqlc generates from queries.sql.
package sqlcshop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	_ "github.com/mysqllock/mysqllock" // the driver
	"github.com/mysqllock/mysqllock/examples/sqlc/shopdb"
	"github.com/mysqllock/mysqllock/lockctx"
)

//go:generate sqlc generate

// ErrSoldOut is what a shop says that has nothing left.
var ErrSoldOut = errors.New("sold out")

// Sell sells one unit in a transaction. BeginTx takes the lock, and it goes with COMMIT or
// ROLLBACK.
func Sell(ctx context.Context, db *sql.DB, product uint64, buyer string) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()

	shop := shopdb.New(tx)
	stock, err := shop.Stock(ctx, product)
	if err != nil {
		return err
	}
	if stock == 0 {
		return ErrSoldOut
	}
	if err := shop.SetStock(ctx, shopdb.SetStockParams{ID: product, Stock: stock - 1}); err != nil {
		return err
	}
	if err := shop.Order(ctx, shopdb.OrderParams{ProductID: product, Buyer: buyer}); err != nil {
		return err
	}
	return tx.Commit()
}
