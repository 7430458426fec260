// Package gormshop uses mysqllock with GORM. Nothing but the driver's name and
// a lock context tells the code from that of any shop.
package gormshop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"gorm.io/driver/mysql"
	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// ErrSoldOut is what a shop says that has nothing left.
var ErrSoldOut = errors.New("sold out")

// Product is what the shop sells.
type Product struct {
	ID    uint
	Stock int
}

// Order is one unit of a product, sold to one buyer.
type Order struct {
	ID        uint
	ProductID uint
	Buyer     string
}

// Open opens the shop by the driver's name.
func Open(dsn string, opts ...gorm.Option) (*gorm.DB, error) {
	return gorm.Open(mysql.New(mysql.Config{DriverName: "mysqllock", DSN: dsn}), opts...)
}

// OpenConn opens the shop on a handle that is there already, as it comes from
// sql.OpenDB and mysqllock.NewConnector or mysqllock.Wrap.
func OpenConn(db *sql.DB, opts ...gorm.Option) (*gorm.DB, error) {
	return gorm.Open(mysql.New(mysql.Config{Conn: db}), opts...)
}

// Sell sells one unit in a transaction. The lock is taken as it begins, and
// goes with COMMIT or ROLLBACK.
func Sell(ctx context.Context, db *gorm.DB, product uint, buyer string) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("product:%d", product))
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		var p Product
		if err := tx.First(&p, product).Error; err != nil {
			return err
		}
		if p.Stock == 0 {
			return ErrSoldOut
		}
		p.Stock--
		if err := tx.Save(&p).Error; err != nil {
			return err
		}
		return tx.Create(&Order{ProductID: p.ID, Buyer: buyer}).Error
	})
}

// SellWithoutTransaction reads, decides and writes once. First takes the lock, Save commits
// and releases it; another Save would need another First. If nothing is saved, the lock goes
// when the context ends: that is what cancel is for.
func SellWithoutTransaction(ctx context.Context, db *gorm.DB, product uint) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	db = db.WithContext(lockctx.With(ctx, fmt.Sprintf("product:%d", product)))

	var p Product
	if err := db.First(&p, product).Error; err != nil {
		return err
	}
	if p.Stock == 0 {
		return ErrSoldOut
	}
	p.Stock--
	return db.Save(&p).Error
}

// SellAll is a job that must not run twice at a time, wherever it is started.
// All that it does is one transaction: an error, or a panic, undoes it.
// Transactions inside it, such as those of Sell, are savepoints.
func SellAll(ctx context.Context, db *gorm.DB, product uint, buyer string) error {
	pool, err := db.DB()
	if err != nil {
		return err
	}
	return mysqllock.Do(ctx, pool, "clearance", func(ctx context.Context) error {
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

// Busy says who has the lock that a caller did not get. GORM hands on the
// driver's errors as they are.
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
