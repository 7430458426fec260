package gormshop

import (
	"context"
	"fmt"
	"time"

	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Payment is what a customer owes.
type Payment struct {
	ID     uint
	Amount int
	Paid   bool
}

// AfterUpdate is a hook, which GORM runs in the transaction that it begins around each Save.
func (p *Payment) AfterUpdate(tx *gorm.DB) error {
	return tx.Create(&Change{PaymentID: p.ID}).Error
}

// Change is a row of the audit.
type Change struct{ ID, PaymentID uint }

// Entry is a line of the ledger: one for each payment that is paid.
type Entry struct {
	ID, PaymentID uint
	Amount        int
}

// A Charge has the bank take the money. The payment's id is its idempotency key, since no lock
// undoes what is outside of the database.
type Charge func(ctx context.Context, p Payment) error

func paymentKey(id uint) string { return fmt.Sprintf("payment:%d", id) }

// Pay charges a payment once, however many processes try. All that it writes is one transaction.
func Pay(ctx context.Context, db *gorm.DB, id uint, charge Charge) error {
	pool, err := db.DB()
	if err != nil {
		return err
	}
	return mysqllock.Do(ctx, pool, paymentKey(id), func(ctx context.Context) error {
		db := db.WithContext(ctx)
		var p Payment
		if err := db.First(&p, id).Error; err != nil || p.Paid {
			return err
		}
		if err := charge(ctx, p); err != nil {
			return err
		}
		p.Paid = true
		if err := db.Save(&p).Error; err != nil {
			return err
		}
		return db.Create(&Entry{PaymentID: id, Amount: p.Amount}).Error
	})
}

// PayInSteps is Pay without a transaction. Each write commits by itself, and needs a read of
// its own before it. A call that is cut off between the two writes leaves a payment without its
// entry; so it first looks what is there, and the next call finishes.
func PayInSteps(ctx context.Context, db *gorm.DB, id uint, charge Charge) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	db = db.WithContext(lockctx.With(ctx, paymentKey(id)))

	var p Payment
	if err := db.First(&p, id).Error; err != nil { // takes the lock
		return err
	}
	if !p.Paid {
		if err := charge(ctx, p); err != nil {
			return err
		}
		p.Paid = true
		if err := db.Save(&p).Error; err != nil { // commits, and gives the lock back
			return err
		}
	}
	var entries int64
	// This takes the lock, if it is not held.
	if err := db.Model(&Entry{}).Where("payment_id = ?", id).Count(&entries).Error; err != nil || entries > 0 {
		return err
	}
	return db.Create(&Entry{PaymentID: id, Amount: p.Amount}).Error
}
