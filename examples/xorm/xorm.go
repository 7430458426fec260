// Package xormshop uses mysqllock with xorm.
package xormshop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"xorm.io/xorm"
	"xorm.io/xorm/core"

	_ "github.com/mysqllock/mysqllock" // the driver
	"github.com/mysqllock/mysqllock/lockctx"
)

// ErrSoldOut is what a shop says that has nothing left.
var ErrSoldOut = errors.New("sold out")

// Product is what the shop sells.
type Product struct {
	ID    int64 `xorm:"pk 'id'"`
	Stock int
}

// TableName is where products are.
func (Product) TableName() string { return "products" }

// Order is one unit of a product, sold to one buyer.
type Order struct {
	ID        int64 `xorm:"pk autoincr 'id'"`
	ProductID int64 `xorm:"'product_id'"`
	Buyer     string
}

// TableName is where orders are.
func (Order) TableName() string { return "orders" }

// Open opens the shop. xorm chooses its dialect by the first name, and gets its
// connections from the driver "mysqllock".
func Open(dsn string) (*xorm.Engine, error) {
	db, err := sql.Open("mysqllock", dsn)
	if err != nil {
		return nil, err
	}
	return xorm.NewEngineWithDB("mysql", dsn, core.FromDB(db))
}

// Sell sells one unit in a transaction. Begin takes the lock, and it goes with COMMIT or
// ROLLBACK. Engine.Transaction passes no context on, so it would lock nothing.
func Sell(ctx context.Context, db *xorm.Engine, product int64, buyer string) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	tx := db.NewSession().Context(ctx)
	defer tx.Close() // rolls back what is not committed
	if err := tx.Begin(); err != nil {
		return err
	}
	p := Product{ID: product}
	if _, err := tx.Get(&p); err != nil {
		return err
	}
	if p.Stock == 0 {
		return ErrSoldOut
	}
	p.Stock--
	if _, err := tx.ID(p.ID).Cols("stock").Update(&p); err != nil {
		return err
	}
	if _, err := tx.Insert(&Order{ProductID: product, Buyer: buyer}); err != nil {
		return err
	}
	return tx.Commit()
}
