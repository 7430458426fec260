package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/clause"
	"gorm.io/gorm/logger"

	_ "github.com/mysqllock/mysqllock" // registers the driver "mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Product is what the shop has too few of.
type Product struct {
	ID    uint
	Stock int
}

// Order is one unit of a product, sold to one buyer.
type Order struct {
	ID        uint
	ProductID uint
	Buyer     string `gorm:"size:40"`
}

// The one product that everybody wants, and the key of its lock.
const (
	productID  = 1
	productKey = "product:1"
)

var errSoldOut = errors.New("sold out")

// openShop is the same for both drivers but for the name.
func openShop(driver, dsn string) (*gorm.DB, error) {
	return open(mysql.Config{DriverName: driver, DSN: dsn})
}

// openShopOn opens the shop on a handle that is there already.
func openShopOn(db *sql.DB) (*gorm.DB, error) { return open(mysql.Config{Conn: db}) }

func open(config mysql.Config) (*gorm.DB, error) {
	// What goes wrong is counted and shown once, by the report.
	return gorm.Open(mysql.New(config), &gorm.Config{Logger: logger.Default.LogMode(logger.Silent)})
}

// way is how buyers keep each other out.
type way string

const (
	unlocked  way = "mysql"
	forUpdate way = "mysql, FOR UPDATE"
	locked    way = "mysqllock"
)

func (how way) driver() string {
	if how == locked {
		return "mysqllock"
	}
	return "mysql"
}

// purchase sells one unit and says how long it took until the buyer had read
// the product, which is where a lock makes it wait.
func purchase(ctx context.Context, db *gorm.DB, how way, buyer string) (wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if how == locked {
		ctx = lockctx.With(ctx, productKey) // the one line
	}
	db = db.WithContext(ctx)
	if how == forUpdate {
		return purchaseForUpdate(db, buyer)
	}

	var product Product
	start := time.Now()
	err = db.First(&product, productID).Error
	wait = time.Since(start)
	if err != nil {
		return wait, err
	}
	if product.Stock <= 0 {
		return wait, errSoldOut
	}
	pay()
	product.Stock--
	return wait, db.Transaction(func(tx *gorm.DB) error {
		if err := tx.Save(&product).Error; err != nil {
			return err
		}
		return tx.Create(&Order{ProductID: product.ID, Buyer: buyer}).Error
	})
}

// purchaseForUpdate locks the product's row by hand: the read has to be in the
// transaction, and the payment with it.
func purchaseForUpdate(db *gorm.DB, buyer string) (wait time.Duration, err error) {
	err = db.Transaction(func(tx *gorm.DB) error {
		var product Product
		start := time.Now()
		err := tx.Clauses(clause.Locking{Strength: clause.LockingStrengthUpdate}).First(&product, productID).Error
		wait = time.Since(start)
		if err != nil {
			return err
		}
		if product.Stock <= 0 {
			return errSoldOut
		}
		pay()
		product.Stock--
		if err := tx.Save(&product).Error; err != nil {
			return err
		}
		return tx.Create(&Order{ProductID: product.ID, Buyer: buyer}).Error
	})
	return wait, err
}

// pay stands for the call of a payment service.
func pay() { time.Sleep(time.Millisecond + rand.N(2*time.Millisecond)) }

// tally is what a group of buyers went through.
type tally struct {
	Bought  int             // orders that were committed, as the buyers saw it
	Waits   []time.Duration // of every purchase that was tried, also of those that failed
	Errors  int
	Example string // the first of the errors
	Took    time.Duration
}

func (t *tally) add(other tally) {
	t.Bought += other.Bought
	t.Waits = append(t.Waits, other.Waits...)
	t.Errors += other.Errors
	if t.Example == "" {
		t.Example = other.Example
	}
	t.Took = max(t.Took, other.Took)
}

// maxErrors is how many purchases may fail before a buyer gives up.
const maxErrors = 20

// shopping lets buyers buy, one unit at a time, until everything is sold.
func shopping(ctx context.Context, db *gorm.DB, how way, process string, buyers int) tally {
	var (
		mu    sync.Mutex
		total tally
		wg    sync.WaitGroup
	)
	start := time.Now()
	for i := range buyers {
		wg.Go(func() {
			mine := buy(ctx, db, how, fmt.Sprintf("buyer %d of process %s", i+1, process))
			mu.Lock()
			defer mu.Unlock()
			total.add(mine)
		})
	}
	wg.Wait()
	total.Took = time.Since(start)
	return total
}

func buy(ctx context.Context, db *gorm.DB, how way, buyer string) (mine tally) {
	for mine.Errors < maxErrors && ctx.Err() == nil {
		wait, err := purchase(ctx, db, how, buyer)
		mine.Waits = append(mine.Waits, wait)
		switch {
		case errors.Is(err, errSoldOut):
			return mine
		case err != nil: // as in a shop: nothing was sold, so try again
			mine.Errors++
			if mine.Example == "" {
				mine.Example = fmt.Sprintf("%s: %v", buyer, err)
			}
		default:
			mine.Bought++
		}
	}
	return mine
}
