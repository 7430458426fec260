// Package entshop uses mysqllock with ent. It has no generated code: a generated client
// does what is done here with the same driver, dialect.Driver.
package entshop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"entgo.io/ent/dialect"
	entsql "entgo.io/ent/dialect/sql"

	_ "github.com/mysqllock/mysqllock" // the driver
	"github.com/mysqllock/mysqllock/lockctx"
)

// ErrSoldOut is what a shop says that has nothing left.
var ErrSoldOut = errors.New("sold out")

// Open opens the shop, for ent.NewClient(ent.Driver(…)).
func Open(dsn string) (*entsql.Driver, error) {
	db, err := sql.Open("mysqllock", dsn)
	if err != nil {
		return nil, err
	}
	return entsql.OpenDB(dialect.MySQL, db), nil
}

// Sell sells one unit in a transaction. Tx takes the lock, and it goes with COMMIT or
// ROLLBACK.
func Sell(ctx context.Context, db dialect.Driver, product int, buyer string) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	tx, err := db.Tx(ctx) // of a generated client: client.Tx(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback()

	stock, err := stockOf(ctx, tx, product)
	if err != nil {
		return err
	}
	if stock == 0 {
		return ErrSoldOut
	}
	text, args := mysql.Update("products").Set("stock", stock-1).Where(entsql.EQ("id", product)).Query()
	if err := tx.Exec(ctx, text, args, nil); err != nil {
		return err
	}
	text, args = mysql.Insert("orders").Columns("product_id", "buyer").Values(product, buyer).Query()
	if err := tx.Exec(ctx, text, args, nil); err != nil {
		return err
	}
	return tx.Commit()
}

var mysql = entsql.Dialect(dialect.MySQL)

func stockOf(ctx context.Context, tx dialect.Tx, product int) (int, error) {
	text, args := mysql.Select("stock").From(entsql.Table("products")).Where(entsql.EQ("id", product)).Query()
	var rows entsql.Rows
	if err := tx.Query(ctx, text, args, &rows); err != nil {
		return 0, err
	}
	defer rows.Close()
	return entsql.ScanInt(rows)
}
