package gormshop

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestEachUseOfGORMIsUnderItsLock: all run on one server of each flavour, which takes longer to
// start than they take.
func TestEachUseOfGORMIsUnderItsLock(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		for name, test := range map[string]func(*testing.T, *testshop.Shop){
			"Shop": testShop, "Audit": testAudit, "Connection": testConnection, "Decisions": testDecisions,
			"Payments": testPayments, "Resolver": testResolver, "StrictPayment": testStrictPayment, "StrictLog": testStrictLog, "Migrate": testMigrate, "SellByVersion": testSellByVersion,
		} {
			t.Run(name, func(t *testing.T) { test(t, shop) })
		}
	})
}

func testShop(t *testing.T, shop *testshop.Shop) {
	onConfigs(t, shop.LockDSN(), func(t *testing.T, db *gorm.DB) {
		u := usage{shop: shop, db: db, another: another(t, shop)}
		t.Run("Sell", u.sell)
		t.Run("SellWithoutTransaction", u.sellWithout)
		t.Run("SellAll", u.sellAll)
		t.Run("Busy", u.busy)
		t.Run("AllOnTheSession", u.session)
		t.Run("Nested", u.nested)
		t.Run("NestedInDo", u.nestedInDo)
		t.Run("DeadlockInDo", u.deadlockInDo)
		t.Run("SavePoint", u.savePoint)
		t.Run("ManualTransaction", u.manual)
		t.Run("QueryInRows", u.queryInRows)
		t.Run("ManyKinds", u.manyKinds)
		u.idle(t)
	})
	t.Run("OpenConn", func(t *testing.T) {
		db, err := OpenConn(another(t, shop))
		check(t, err)
		shop.Restock(t, 1)
		check(t, Sell(t.Context(), db, 1, "Ann"))
		shop.Want(t, 0, 1)
	})
}

// onConfigs runs a test with GORM as it is opened in several ways.
func onConfigs(t *testing.T, dsn string, test func(t *testing.T, db *gorm.DB)) {
	t.Helper()
	for name, config := range map[string]gorm.Config{
		"defaults":    {},
		"skip":        {SkipDefaultTransaction: true},
		"prepare":     {PrepareStmt: true},
		"skipPrepare": {SkipDefaultTransaction: true, PrepareStmt: true},
	} {
		t.Run(name, func(t *testing.T) {
			config.Logger = logger.Discard
			db, err := Open(dsn, &config)
			check(t, err)
			closeLater(t, db)
			test(t, db)
		})
	}
}

// usage is GORM as it was opened in one of several ways.
type usage struct {
	shop    *testshop.Shop
	db      *gorm.DB
	another *sql.DB // stands for another process
}

// locked fails the test unless the key is locked, or not.
func (u usage) locked(t *testing.T, key string, want bool) {
	t.Helper()
	hold, err := mysqllock.Acquire(context.Background(), u.another, key, lockctx.NoWait())
	if err == nil {
		err = hold.Rollback()
	}
	if (err != nil) != want || err != nil && !errors.Is(err, mysqllock.ErrLocked) {
		t.Errorf("locked: got %v, want %v", err, want)
	}
}

func (u usage) sell(t *testing.T) {
	u.shop.Restock(t, 1)
	check(t, Sell(t.Context(), u.db, 1, "Ann"))
	u.shop.Want(t, 0, 1)
	if err := Sell(t.Context(), u.db, 1, "Bob"); !errors.Is(err, ErrSoldOut) {
		t.Errorf("got %v, want %v", err, ErrSoldOut)
	}
	u.shop.Want(t, 0, 1)
	u.locked(t, "product:1", false)
}

func (u usage) sellWithout(t *testing.T) {
	u.shop.Restock(t, 1)
	check(t, SellWithoutTransaction(t.Context(), u.db, 1))
	u.shop.Want(t, 0, 0)
	u.locked(t, "product:1", false)
	for range 3 {
		if err := SellWithoutTransaction(t.Context(), u.db, 1); !errors.Is(err, ErrSoldOut) {
			t.Fatalf("got %v, want %v", err, ErrSoldOut)
		}
	}
}

func (u usage) sellAll(t *testing.T) {
	u.shop.Restock(t, 5)
	check(t, SellAll(t.Context(), u.db, 1, "Ann"))
	u.shop.Want(t, 0, 5)
}

func (u usage) busy(t *testing.T) {
	hold, err := mysqllock.Acquire(t.Context(), u.another, "product:1")
	check(t, err)
	defer hold.Rollback()
	ctx := lockctx.With(t.Context(), "product:1", lockctx.Wait(200*time.Millisecond))
	var got string
	for end := time.Now().Add(time.Minute); time.Now().Before(end) && !strings.HasPrefix(got, "connection "); { // a busy server does not say in time who has it
		err = u.db.WithContext(ctx).Transaction(func(*gorm.DB) error { return errors.New("it ran") })
		got = Busy(err)
	}
	if !strings.HasSuffix(got, " has product:1") || !strings.HasPrefix(got, "connection ") {
		t.Errorf("Busy says %q of %v", got, err)
	}
}

// session: what GORM wraps around Save and Create runs on the connection that
// the read has pinned; elsewhere it would wait for its own lock.
func (u usage) session(t *testing.T) {
	for name, write := range map[string]func(*gorm.DB, *Product) error{
		"Save":    func(db *gorm.DB, p *Product) error { return db.Save(p).Error },
		"Updates": func(db *gorm.DB, p *Product) error { return db.Model(p).Updates(Product{Stock: p.Stock}).Error },
		"Exec": func(db *gorm.DB, p *Product) error {
			return db.Exec("UPDATE products SET stock = ? WHERE id = ?", p.Stock, p.ID).Error
		},
		"Transaction": func(db *gorm.DB, p *Product) error {
			return db.Transaction(func(tx *gorm.DB) error { return tx.Save(p).Error })
		},
	} {
		t.Run(name, func(t *testing.T) {
			u.shop.Restock(t, 9)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			db := u.db.WithContext(lockctx.With(ctx, "product:1"))
			var p Product
			check(t, db.First(&p, 1).Error)
			u.locked(t, "product:1", true)
			session := connection(t, db)

			var wrote int
			const mark = "shop:connection"
			callback := func(tx *gorm.DB) {
				wrote = connection(t, tx.Session(&gorm.Session{NewDB: true, SkipHooks: true}))
			}
			check(t, u.db.Callback().Update().Before("gorm:update").Register(mark, callback))
			defer func() { check(t, u.db.Callback().Update().Remove(mark)) }()
			p.Stock = 4
			check(t, write(db, &p))
			if name != "Exec" && wrote != session {
				t.Errorf("written on connection %d, read on %d", wrote, session)
			}
			u.locked(t, "product:1", false) // although the context has not ended
			u.shop.Want(t, 4, 0)
		})
	}
	t.Run("Create", func(t *testing.T) {
		u.shop.Restock(t, 9)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		db := u.db.WithContext(lockctx.With(ctx, "product:1"))
		var p Product
		check(t, db.First(&p, 1).Error)
		order := Order{ProductID: 1, Buyer: "Ann"}
		check(t, db.Create(&order).Error)
		if order.ID == 0 {
			t.Error("the order has no id")
		}
		u.locked(t, "product:1", false)
		u.shop.Want(t, 9, 1)
	})
}

// deadlockInDo: GORM hides a deadlock behind sql.ErrTxDone of its own rollback, and Do runs
// the function again all the same.
func (u usage) deadlockInDo(t *testing.T) {
	u.shop.Restock(t, 9)
	_, err := u.another.Exec("CREATE PROCEDURE IF NOT EXISTS deadlock() SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'Deadlock found'")
	check(t, err)
	source, err := u.db.DB()
	check(t, err)
	runs := 0
	check(t, mysqllock.Do(t.Context(), source, "product:1", func(ctx context.Context) error {
		tx := u.db.WithContext(ctx).Begin()
		if tx.Error != nil {
			return tx.Error
		}
		if runs++; runs < 3 {
			_ = tx.Exec("CALL deadlock()").Error
			return tx.Rollback().Error
		}
		if err := tx.Exec("UPDATE products SET stock = stock - 1 WHERE id = 1").Error; err != nil {
			return err
		}
		return tx.Commit().Error
	}, lockctx.Retry(3)))
	if runs != 3 {
		t.Errorf("%d runs, want 3", runs)
	}
	u.shop.Want(t, 8, 0)
}

// nested: GORM turns inner transactions into savepoints by SQL text.
func (u usage) nested(t *testing.T) {
	u.shop.Restock(t, 9)
	db := u.db.WithContext(lockctx.With(t.Context(), "product:1"))
	changedMind := errors.New("changed her mind")
	check(t, db.Transaction(func(tx *gorm.DB) error {
		check(t, tx.Create(&Order{ProductID: 1, Buyer: "Ann"}).Error)
		err := tx.Transaction(func(inner *gorm.DB) error {
			check(t, inner.Create(&Order{ProductID: 1, Buyer: "Bea"}).Error)
			return changedMind
		})
		if !errors.Is(err, changedMind) {
			t.Errorf("got %v, want %v", err, changedMind)
		}
		u.locked(t, "product:1", true)
		return tx.Transaction(func(inner *gorm.DB) error {
			return inner.Create(&Order{ProductID: 1, Buyer: "Cyd"}).Error
		})
	}))
	u.locked(t, "product:1", false)
	u.shop.Want(t, 9, 2)
}

// nestedInDo: the same on top of a hold, and with the outer handle, which knows
// nothing of the transaction around it.
func (u usage) nestedInDo(t *testing.T) {
	u.shop.Restock(t, 9)
	pool, err := u.db.DB()
	check(t, err)
	changedMind := errors.New("changed her mind")
	check(t, mysqllock.Do(t.Context(), pool, "product:1", func(ctx context.Context) error {
		db := u.db.WithContext(ctx)
		check(t, db.Create(&Order{ProductID: 1, Buyer: "Ann"}).Error)
		err := db.Transaction(func(tx *gorm.DB) error {
			check(t, tx.Create(&Order{ProductID: 1, Buyer: "Bea"}).Error)
			return changedMind
		})
		if !errors.Is(err, changedMind) {
			t.Errorf("got %v, want %v", err, changedMind)
		}
		return db.Transaction(func(tx *gorm.DB) error {
			err := tx.Transaction(func(inner *gorm.DB) error {
				check(t, inner.Create(&Order{ProductID: 1, Buyer: "Cyd"}).Error)
				return changedMind
			})
			if !errors.Is(err, changedMind) {
				t.Errorf("got %v, want %v", err, changedMind)
			}
			// The outer handle: part of the same transaction all the same.
			return db.Create(&Order{ProductID: 1, Buyer: "Dee"}).Error
		})
	}))
	u.shop.Want(t, 9, 2)

	err = mysqllock.Do(t.Context(), pool, "product:1", func(ctx context.Context) error {
		check(t, u.db.WithContext(ctx).Create(&Order{ProductID: 1, Buyer: "Eve"}).Error)
		return changedMind
	})
	if !errors.Is(err, changedMind) {
		t.Errorf("got %v, want %v", err, changedMind)
	}
	u.shop.Want(t, 9, 2)
}

func (u usage) savePoint(t *testing.T) {
	u.shop.Restock(t, 9)
	tx := u.db.WithContext(lockctx.With(t.Context(), "product:1")).Begin()
	check(t, tx.Error)
	check(t, tx.Create(&Order{ProductID: 1, Buyer: "Ann"}).Error)
	check(t, tx.SavePoint("before_bea").Error)
	check(t, tx.Create(&Order{ProductID: 1, Buyer: "Bea"}).Error)
	check(t, tx.RollbackTo("before_bea").Error)
	check(t, tx.Create(&Order{ProductID: 1, Buyer: "Cyd"}).Error)
	check(t, tx.Commit().Error)
	u.shop.Want(t, 9, 2)
	u.locked(t, "product:1", false)
}

// manual: a transaction that began without the hint never gets the lock.
func (u usage) manual(t *testing.T) {
	u.shop.Restock(t, 9)
	tx := u.db.WithContext(t.Context()).Begin()
	check(t, tx.Error)
	check(t, tx.Create(&Order{ProductID: 1, Buyer: "Ann"}).Error)
	for name, err := range map[string]error{
		"First":  tx.WithContext(lockctx.With(t.Context(), "product:1")).First(new(Product), 1).Error,
		"Update": tx.WithContext(lockctx.With(t.Context(), "product:1")).Model(&Product{ID: 1}).Update("stock", 0).Error,
	} {
		if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "the transaction began without the lock; begin it with the lock context, or put mysqllock.Do around it") {
			t.Errorf("%s: %v", name, err)
		}
	}
	u.locked(t, "product:1", false)
	check(t, tx.Commit().Error)
	u.shop.Want(t, 9, 1)
}

// queryInRows: code that queries while it reads rows works without a lock on
// two connections, and in a lock context on one.
func (u usage) queryInRows(t *testing.T) {
	u.shop.Restock(t, 9)
	check(t, u.db.Create([]*Order{{ProductID: 1, Buyer: "Ann"}, {ProductID: 1, Buyer: "Bea"}}).Error)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	db := u.db.WithContext(lockctx.With(ctx, "product:1"))
	rows, err := db.Model(&Order{}).Rows()
	check(t, err)
	defer rows.Close()
	var n int
	for rows.Next() {
		var order Order
		check(t, db.ScanRows(rows, &order))
		var p Product
		check(t, db.First(&p, order.ProductID).Error)
		n += p.Stock
	}
	check(t, rows.Err())
	if n != 18 {
		t.Errorf("got %d, want 18", n)
	}
	cancel()
	u.released(t, "product:1")
}

// manyKinds: each is a unit of work of its own.
func (u usage) manyKinds(t *testing.T) {
	u.shop.Restock(t, 9)
	in := func() *gorm.DB { return u.db.WithContext(lockctx.With(t.Context(), "product:1")) }
	check(t, in().Create([]*Order{{ProductID: 1, Buyer: "Ann"}, {ProductID: 1, Buyer: "Bea"}, {ProductID: 1, Buyer: "Cyd"}}).Error)
	check(t, in().Where("buyer = ?", "Bea").Delete(&Order{}).Error)
	check(t, in().Model(&Product{}).Where("id = ?", 1).Update("stock", gorm.Expr("stock - ?", 2)).Error)
	u.shop.Want(t, 7, 2)
	u.locked(t, "product:1", false)

	// GORM's own way to find out: nothing would ever release the lock.
	var p Product
	if err := u.db.WithContext(lockctx.With(context.Background(), "product:1")).First(&p, 1).Error; !errors.Is(err, mysqllock.ErrNoEnd) {
		t.Errorf("got %v, want ErrNoEnd", err)
	}
	u.locked(t, "product:1", false)

	ctx, cancel := context.WithCancel(t.Context())
	db := u.db.WithContext(lockctx.With(ctx, "product:1"))
	var count int64
	check(t, db.Model(&Order{}).Count(&count).Error)
	var orders []Order
	check(t, db.Find(&orders).Error)
	if count != 2 || len(orders) != 2 {
		t.Errorf("got %d and %d orders, want 2", count, len(orders))
	}
	if err := db.Where("id = 2").First(&p).Error; !errors.Is(err, gorm.ErrRecordNotFound) {
		t.Errorf("got %v, want ErrRecordNotFound", err)
	}
	first := Order{}
	check(t, db.Where(Order{ProductID: 1, Buyer: "Dee"}).FirstOrCreate(&first).Error)
	u.locked(t, "product:1", false) // created, so committed
	cancel()
	u.shop.Want(t, 7, 3)
}

// released waits until the key is free, which it soon is after a context's end.
func (u usage) released(t *testing.T, key string) {
	t.Helper()
	hold, err := mysqllock.Acquire(context.Background(), u.another, key, lockctx.Wait(time.Minute))
	check(t, err)
	check(t, hold.Rollback())
}

// idle fails the test unless all connections come to be free again.
func (u usage) idle(t *testing.T) {
	t.Helper()
	pool, err := u.db.DB()
	check(t, err)
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		sessions, err := mysqllock.Stats(pool)
		check(t, err)
		if sessions.InUse == 0 && pool.Stats().InUse == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("still in use: %d sessions and %d connections", sessions.InUse, pool.Stats().InUse)
		}
	}
}

func connection(t *testing.T, db *gorm.DB) (id int) {
	t.Helper()
	check(t, db.Raw("SELECT CONNECTION_ID()").Scan(&id).Error)
	return id
}

func another(t *testing.T, shop *testshop.Shop) *sql.DB {
	t.Helper()
	db, err := sql.Open("mysqllock", shop.LockDSN())
	check(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

func closeLater(t *testing.T, db *gorm.DB) {
	t.Helper()
	pool, err := db.DB()
	check(t, err)
	t.Cleanup(func() { pool.Close() })
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
