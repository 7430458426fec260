package gormshop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestMain(m *testing.M) { testshop.Main(m, payAll) }

const payments = 10

// testPayments: each payment is charged once, and has one entry and one row in the audit, also
// with two processes of three callers.
func testPayments(t *testing.T, shop *testshop.Shop) {
	db, err := Open(shop.LockDSN(), &gorm.Config{Logger: logger.Discard})
	check(t, err)
	closeLater(t, db)
	check(t, db.AutoMigrate(&Payment{}, &Entry{}, &Change{}))
	check(t, db.Exec("CREATE TABLE charges (id BIGINT PRIMARY KEY)").Error) // the bank's
	for name, ways := range map[string][]string{
		"Pay":              {"Pay"},
		"PayInSteps":       {"PayInSteps"},
		"WithAloneAndThen": {"WithAlone", "PayInSteps"}, // finishes what is half done
	} {
		t.Run(name, func(t *testing.T) {
			for _, table := range []any{&Payment{}, &Entry{}, &Change{}} {
				check(t, db.Where("1 = 1").Delete(table).Error)
			}
			check(t, db.Exec("DELETE FROM charges").Error)
			for id := range uint(payments) {
				check(t, db.Create(&Payment{ID: id + 1, Amount: 5}).Error)
			}
			for _, way := range ways {
				testshop.Processes(t, 2, way, shop.LockDSN(), shop.DSN)
			}
			count := func(what string, db *gorm.DB) {
				var n int64
				if check(t, db.Count(&n).Error); n != payments {
					t.Errorf("%s: %d, want %d", what, n, payments)
				}
			}
			count("paid", db.Model(&Payment{}).Where("paid"))
			count("charged", db.Table("charges"))
			for what, table := range map[string]any{"entries": &Entry{}, "changes": &Change{}} {
				count(what, db.Model(table))
				count("payments with "+what, db.Model(table).Distinct("payment_id"))
			}
		})
	}
}

// payAll has three callers pay all payments: args are the way, and the DSNs of the shop and of
// the bank.
func payAll(args ...string) error {
	pay := map[string]func(context.Context, *gorm.DB, uint, Charge) error{
		"Pay": Pay, "PayInSteps": PayInSteps, "WithAlone": payWithAlone,
	}[args[0]]
	db, err := Open(args[1], &gorm.Config{Logger: logger.Discard})
	if err != nil {
		return err
	}
	bank, err := sql.Open("mysql", args[2])
	if err != nil {
		return err
	}
	charge := func(ctx context.Context, p Payment) error {
		_, err := bank.ExecContext(ctx, "INSERT INTO charges VALUES (?)", p.ID) // fails if it is there
		return err
	}
	errs := make([]error, 3)
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() {
			for id := range uint(payments) {
				ctx, cancel := context.WithCancel(context.Background())
				if err := pay(ctx, db, id+1, charge); err != nil {
					errs[i] = fmt.Errorf("payment %d: %w", id+1, err)
				}
				cancel()
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// payWithAlone is a program without transactions to which one line was added: the entry is refused,
// since the lock on what was read has been given back, and the error says that the payment is
// committed.
func payWithAlone(ctx context.Context, db *gorm.DB, id uint, charge Charge) error {
	db = db.WithContext(lockctx.With(ctx, paymentKey(id)))
	var p Payment
	if err := db.First(&p, id).Error; err != nil || p.Paid {
		return err
	}
	p.Paid = true
	if err := errors.Join(charge(ctx, p), db.Save(&p).Error); err != nil {
		return err
	}
	err := db.Create(&Entry{PaymentID: id, Amount: p.Amount}).Error
	if !errors.Is(err, mysqllock.ErrStaleRead) || !strings.Contains(err.Error(), "a transaction whose first write was UPDATE; its changes are committed") {
		return fmt.Errorf("got %w, want ErrStaleRead, and that UPDATE is committed", err)
	}
	return nil
}
