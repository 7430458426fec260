// Package orm uses GORM and bun.
package orm

import (
	"context"
	"database/sql"

	"github.com/uptrace/bun"
	"gorm.io/driver/mysql"
	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock/lockctx"
)

type Product struct{ ID, Stock int }

type Order struct{ ID int }

type Repo struct {
	db  *gorm.DB
	bun *bun.DB
}

func (r *Repo) sell(ctx context.Context) error {
	ctx = lockctx.With(ctx, "product:1")
	var p Product
	if err := r.db.WithContext(ctx).First(&p).Error; err != nil {
		return err
	}
	p.Stock--
	return r.db.Save(&p).Error // want `Save runs without the lock of line 25: there is no WithContext before it; .*#no-context`
}

func (r *Repo) session(ctx context.Context) error {
	locked := lockctx.With(ctx, "product:1")
	db := r.db.Session(&gorm.Session{Context: locked})
	var p Product
	if err := db.Where("id = 1").First(&p).Error; err != nil {
		return err
	}
	return r.db.WithContext(ctx).Where("id = 1").Save(&p).Error // want `Save runs without the lock of line 35: its context`
}

func (r *Repo) transaction(ctx context.Context) error {
	ctx = lockctx.With(ctx, "product:1")
	return r.db.WithContext(ctx).Transaction(func(tx *gorm.DB) error {
		var p Product
		if err := tx.First(&p).Error; err != nil {
			return err
		}
		if err := r.db.Create(&Order{}).Error; err != nil { // want `Create runs without the lock`
			return err
		}
		return tx.Transaction(func(tx *gorm.DB) error { return tx.Save(&p).Error })
	})
}

func (r *Repo) begin(ctx context.Context) {
	ctx = lockctx.With(ctx, "product:1")
	tx := r.db.Begin() // want `Begin runs without the lock`
	tx.Create(&Order{})
	tx.Commit()
	r.db.WithContext(ctx).Create(&Order{})
}

func (r *Repo) conditions(ctx context.Context, name string) error {
	ctx = lockctx.With(ctx, "product:1")
	q := r.db.WithContext(ctx)
	if name != "" {
		q = q.Where("name = ?", name)
	}
	var p Product
	if err := q.First(&p).Error; err != nil {
		return err
	}
	return q.Save(&p).Error
}

func callback(ctx context.Context, tx *gorm.DB) error {
	ctx = lockctx.With(ctx, "product:1")
	if err := tx.WithContext(ctx).Create(&Order{}).Error; err != nil {
		return err
	}
	return tx.Save(&Order{}).Error // perhaps a transaction
}

func (r *Repo) stored(ctx context.Context) error {
	r.db = r.db.WithContext(lockctx.With(ctx, "product:1"))
	return r.db.Save(&Order{}).Error
}

func driver(ctx context.Context, dsn string) error {
	db, err := gorm.Open(mysql.Open(dsn))
	if err != nil {
		return err
	}
	ctx = lockctx.With(ctx, "product:1")
	return db.WithContext(ctx).Save(&Order{}).Error // want `Save runs without the lock of line 97: its handle was opened with the driver "mysql".*#driver`
}

func otherDriver(ctx context.Context, dsn string) error {
	db, err := sql.Open("mysql", dsn)
	if err != nil {
		return err
	}
	_, err = bun.NewDB(db, nil).NewUpdate().Exec(lockctx.With(ctx, "product:1")) // want `Exec runs without the lock .* driver "mysql"`
	return err
}

func rightDriver(ctx context.Context, dsn string) error {
	db, err := gorm.Open(mysql.New(mysql.Config{DriverName: "mysqllock", DSN: dsn}))
	if err != nil {
		return err
	}
	return db.WithContext(lockctx.With(ctx, "product:1")).Save(&Order{}).Error
}

func (r *Repo) runInTx(ctx context.Context) error {
	locked := lockctx.With(ctx, "product:1")
	return r.bun.RunInTx(locked, nil, func(inner context.Context, tx bun.Tx) error {
		var p Product
		if err := r.bun.NewSelect().Model(&p).Scan(ctx); err != nil { // want `Scan runs without the lock`
			return err
		}
		if err := r.bun.NewSelect().Conn(tx).Model(&p).Scan(ctx); err != nil { // in the transaction
			return err
		}
		_, err := tx.NewUpdate().Model(&p).WherePK().Exec(inner)
		return err
	})
}

func (r *Repo) bunWithoutTx(ctx context.Context) error {
	locked := lockctx.With(ctx, "product:1")
	var p Product
	if err := r.bun.NewSelect().Model(&p).WherePK().Scan(ctx); err != nil { // want `Scan runs without the lock`
		return err
	}
	_, err := r.bun.NewUpdate().Model(&p).WherePK().Exec(locked)
	return err
}
