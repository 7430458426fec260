package gormshop

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	driver "github.com/go-sql-driver/mysql"
	"gorm.io/driver/mysql"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"
	"gorm.io/plugin/dbresolver"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
	"github.com/mysqllock/mysqllock/lockctx"
)

// testResolver: dbresolver sends reads to another handle, whose data no lock of this one
// protects. What would be decided on them fails, if that handle has the driver "mysqllock". With
// "mysql" it is not seen. OnSource is right with both.
func testResolver(t *testing.T, shop *testshop.Shop) {
	other, err := driver.ParseDSN(shop.DSN)
	check(t, err)
	other.DBName += "_replica"
	for i, name := range []string{"mysqllock", "mysql"} {
		t.Run(name, func(t *testing.T) {
			db, err := Open(shop.DSN, &gorm.Config{Logger: logger.Discard})
			check(t, err)
			closeLater(t, db)
			if i == 0 {
				for _, text := range []string{
					"CREATE DATABASE " + other.DBName, "CREATE TABLE " + other.DBName + ".products LIKE products",
					"INSERT INTO " + other.DBName + ".products (id, stock) VALUES (1, 100)",
				} {
					check(t, db.Exec(text).Error)
				}
			}
			pool, err := sql.Open(name, other.FormatDSN())
			check(t, err)
			t.Cleanup(func() { check(t, pool.Close()) })
			check(t, db.Use(dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{mysql.New(mysql.Config{Conn: pool})}})))
			for strategy, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
				t.Run(strategy, func(t *testing.T) { testReplica(t, shop, db, name == "mysqllock", opt) })
			}
		})
	}
}

func testReplica(t *testing.T, shop *testshop.Shop, db *gorm.DB, told bool, opt lockctx.Option) {
	source, err := db.DB()
	check(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	sell := func(db *gorm.DB) error {
		var p Product
		if err := db.First(&p, 1).Error; err != nil {
			return err
		}
		p.Stock--
		return db.Save(&p).Error
	}
	inDo := func(on func(context.Context, *gorm.DB) *gorm.DB) error {
		return mysqllock.Do(ctx, source, "product:1", func(ctx context.Context) error { return sell(on(ctx, db)) }, opt)
	}
	byWith := func(on func(context.Context, *gorm.DB) *gorm.DB) error {
		own, end := context.WithCancel(ctx)
		defer end()
		return sell(on(lockctx.With(own, "product:1", opt), db))
	}
	anywhere := func(ctx context.Context, db *gorm.DB) *gorm.DB { return db.WithContext(ctx) }
	shop.Restock(t, 50) // the replica says 100
	for what, err := range map[string]error{"in Do": inDo(anywhere), "without a transaction": byWith(anywhere)} {
		switch {
		case !told:
			check(t, err)
		case !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "Clauses(dbresolver.Write)"):
			t.Errorf("%s: got %v, want %v, and what to do", what, err, mysqllock.ErrUnsafe)
		}
	}
	if told {
		shop.Want(t, 50, 0)
	} else {
		shop.Want(t, 99, 0)
	}

	shop.Restock(t, 50)
	for range 5 {
		check(t, inDo(OnSource))
		check(t, byWith(OnSource))
		check(t, db.WithContext(lockctx.With(ctx, "product:1", opt)).Transaction(sell))
		check(t, OnSource(lockctx.With(ctx, "product:1", opt), db).Transaction(sell))
	}
	shop.Want(t, 30, 0)
}
