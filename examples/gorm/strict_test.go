package gormshop

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Bill is paid once, with a row in the ledger for it. Its hook writes a row, too.
type Bill struct {
	ID   uint
	Paid bool
}

// AfterUpdate is GORM's hook.
func (b *Bill) AfterUpdate(tx *gorm.DB) error { return tx.Create(&BillAudit{BillID: b.ID}).Error }

// LedgerRow says that a bill is paid.
type LedgerRow struct{ ID, BillID uint }

// BillAudit says that a bill was changed.
type BillAudit struct{ ID, BillID uint }

const bills = 10

// bank counts what it is told to charge.
type bank struct {
	mu      sync.Mutex
	charged map[uint]int
}

func (b *bank) charge(bill uint) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.charged[bill]++
}

// payWithout has one line more than a program without locks.
func payWithout(ctx context.Context, db *gorm.DB, bank *bank, bill uint) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	ctx = lockctx.With(ctx, fmt.Sprintf("bill:%d", bill))
	return pay(db.WithContext(ctx), bank, bill)
}

// payInTransaction is what the error of payWithout says in strict mode.
func payInTransaction(ctx context.Context, db *gorm.DB, bank *bank, bill uint) error {
	ctx = lockctx.With(ctx, fmt.Sprintf("bill:%d", bill))
	return db.WithContext(ctx).Transaction(func(tx *gorm.DB) error { return pay(tx, bank, bill) })
}

func pay(db *gorm.DB, bank *bank, bill uint) error {
	var b Bill
	if err := db.First(&b, bill).Error; err != nil || b.Paid {
		return err
	}
	bank.charge(bill)
	b.Paid = true
	if err := db.Save(&b).Error; err != nil {
		return err
	}
	return db.Create(&LedgerRow{BillID: bill}).Error
}

// testStrictPayment: a payment that loses its lock in the middle pays bills without a row in
// the ledger. In strict mode nothing of it is committed, and in a transaction it is right.
func testStrictPayment(t *testing.T, shop *testshop.Shop) {
	for how, config := range map[string]gorm.Config{
		"defaults": {},
		"skip":     {SkipDefaultTransaction: true},
		"prepare":  {PrepareStmt: true},
	} {
		t.Run(how, func(t *testing.T) {
			config.Logger = logger.Discard
			open := func(params string) *gorm.DB {
				db, err := Open(shop.LockDSN()+params, &config)
				check(t, err)
				closeLater(t, db)
				return db
			}
			plain := open("")
			check(t, plain.AutoMigrate(&Bill{}, &LedgerRow{}, &BillAudit{}))
			const require = "&lockRequire=bills,ledger_*,bill_audits"

			// all has two processes, as it were, pay all bills twice each.
			all := func(t *testing.T, params string, pay func(context.Context, *gorm.DB, *bank, uint) error) (b *bank, errs []error, paid, ledger, audits int64) {
				for _, table := range []string{"bills", "ledger_rows", "bill_audits"} {
					check(t, plain.Exec("DELETE FROM "+table).Error)
				}
				for id := range uint(bills) {
					check(t, plain.Create(&Bill{ID: id + 1}).Error)
				}
				b = &bank{charged: make(map[uint]int)}
				var mu sync.Mutex
				var callers sync.WaitGroup
				for _, db := range []*gorm.DB{open(params), open(params)} {
					for i := range uint(bills * 2) {
						callers.Go(func() {
							err := pay(t.Context(), db, b, i/2+1)
							mu.Lock()
							defer mu.Unlock()
							errs = append(errs, err)
						})
					}
				}
				callers.Wait()
				check(t, plain.Model(&Bill{}).Where("paid").Count(&paid).Error)
				check(t, plain.Model(&LedgerRow{}).Count(&ledger).Error)
				check(t, plain.Model(&BillAudit{}).Count(&audits).Error)
				return b, errs, paid, ledger, audits
			}
			t.Run("without strict mode", func(t *testing.T) {
				if _, _, paid, ledger, _ := all(t, "", payWithout); paid == ledger {
					t.Errorf("%d bills are paid, and %d are in the ledger: this shows nothing", paid, ledger)
				}
			})
			t.Run("refused", func(t *testing.T) {
				_, errs, paid, ledger, audits := all(t, require, payWithout)
				if paid+ledger+audits != 0 {
					t.Errorf("%d bills, %d rows of the ledger and %d audits were committed", paid, ledger, audits)
				}
				for _, err := range errs {
					if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "strict_test.go:") || !strings.Contains(err.Error(), "mysqllock.Do") {
						t.Errorf("a payment ends with %v", err)
					}
				}
			})
			t.Run("in a transaction", func(t *testing.T) {
				b, errs, paid, ledger, audits := all(t, require, payInTransaction)
				check(t, errors.Join(errs...))
				if paid != bills || ledger != bills || audits != bills {
					t.Errorf("%d bills are paid, %d are in the ledger, with %d audits", paid, ledger, audits)
				}
				for bill, times := range b.charged {
					if times != 1 {
						t.Errorf("bill %d was charged %d times", bill, times)
					}
				}
			})
			t.Run("no lock at all", func(t *testing.T) {
				db := open(require)
				for what, err := range map[string]error{
					"Save":       db.Save(&Bill{ID: 1, Paid: true}).Error,
					"Create":     db.Create(&LedgerRow{BillID: 1}).Error,
					"Updates":    db.Model(&Bill{}).Where("id = 1").Updates(map[string]any{"paid": true}).Error,
					"Delete":     db.Delete(&Bill{ID: 1}).Error,
					"Exec":       db.Exec("UPDATE bills SET paid = 1").Error,
					"a map":      db.Table("bills").Where("id = 1").Update("paid", true).Error,
					"Connection": db.Connection(func(tx *gorm.DB) error { return tx.Save(&Bill{ID: 1}).Error }),
				} {
					if !errors.Is(err, mysqllock.ErrNoLock) || !strings.Contains(err.Error(), "strict_test.go:") {
						t.Errorf("%s: %v", what, err)
					}
				}
			})
		})
	}
}

// testStrictLog: in log mode each line that saves a bill is told once, although GORM has one text
// for all of them.
func testStrictLog(t *testing.T, shop *testshop.Shop) {
	base, err := mysql.ParseDSN(shop.DSN)
	check(t, err)
	var told []string
	connector, err := mysqllock.NewConnector(base, mysqllock.Config{Require: "log:bills", Observer: observer(func(e mysqllock.Event) {
		told = append(told, e.Err.Error())
	})})
	check(t, err)
	db, err := OpenConn(sql.OpenDB(connector), &gorm.Config{Logger: logger.Discard})
	check(t, err)
	closeLater(t, db)
	check(t, db.AutoMigrate(&Bill{}, &BillAudit{}))
	for range 3 {
		check(t, db.Save(&Bill{ID: 1, Paid: true}).Error)
		check(t, db.Save(&Bill{ID: 2, Paid: true}).Error)
	}
	if len(told) != 2 || told[0] == told[1] || !strings.Contains(told[0], "strict_test.go:") || !strings.Contains(told[1], "strict_test.go:") {
		t.Errorf("told %q", told)
	}
}

// observer is told of what is advised.
type observer func(mysqllock.Event)

func (o observer) Observe(_ context.Context, e mysqllock.Event) {
	if e.Kind == mysqllock.Advised {
		o(e)
	}
}
