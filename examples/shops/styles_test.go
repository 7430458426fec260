package shops

import (
	"context"
	"database/sql"

	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/mysqllock/mysqllock"
	bunshop "github.com/mysqllock/mysqllock/examples/bun"
	gormshop "github.com/mysqllock/mysqllock/examples/gorm"
	"github.com/mysqllock/mysqllock/examples/plain"
	sqlxshop "github.com/mysqllock/mysqllock/examples/sqlx"
)

const product = 1

// sell sells one unit. It is called from many goroutines.
type sell func(context.Context) error

// style is a way to read, decide and write.
type style struct {
	name  string
	sales int // in all
	open  func(dsn string) (sell, error)
}

// The styles that carry no transaction in sight are what the driver is judged
// by, so they sell the most. Far fewer sales would do: without locks most updates
// are lost, see control.
var styles = []style{
	{"sql/QueryExec", 480, openSQL(plain.SellWithoutTransaction)},
	{"sql/BeginTx", 160, openSQL(plain.Sell)},
	{"sql/Prepared", 160, openPrepared},
	{"sql/Do", 160, openSQL(sellInDo)},
	{"sqlx/GetNamedExec", 480, func(dsn string) (sell, error) {
		db, err := sqlxshop.Open(dsn)
		return func(ctx context.Context) error { return sqlxshop.SellWithoutTransaction(ctx, db, product) }, err
	}},
	{"sqlx/BeginTxx", 160, func(dsn string) (sell, error) {
		db, err := sqlxshop.Open(dsn)
		return func(ctx context.Context) error { return sqlxshop.Sell(ctx, db, product) }, err
	}},
	{"gorm/FirstSave", 480, openGORM(gorm.Config{}, gormshop.SellWithoutTransaction)},
	{"gorm/Transaction", 160, openGORM(gorm.Config{}, sellOrder)},
	{"gorm/FirstSave/SkipDefaultTransaction", 160, openGORM(gorm.Config{SkipDefaultTransaction: true}, gormshop.SellWithoutTransaction)},
	{"gorm/FirstSave/PrepareStmt", 160, openGORM(gorm.Config{PrepareStmt: true}, gormshop.SellWithoutTransaction)},
	{"gorm/Transaction/PrepareStmt", 160, openGORM(gorm.Config{PrepareStmt: true}, sellOrder)},
	{"bun/SelectUpdate", 160, func(dsn string) (sell, error) {
		db, err := bunshop.Open(dsn)
		return func(ctx context.Context) error { return bunshop.SellWithoutTransaction(ctx, db, product) }, err
	}},
	{"bun/RunInTx", 160, func(dsn string) (sell, error) {
		db, err := bunshop.Open(dsn)
		return func(ctx context.Context) error { return bunshop.Sell(ctx, db, product, "Ann") }, err
	}},
}

// ownVersions compare a version that is a column of the product itself. Locks do
// not change it, so they are not for a product that others sell under a lock.
var ownVersions = []style{
	{"sqlx/Version", 160, func(dsn string) (sell, error) {
		db, err := sqlxshop.Open(dsn)
		return func(ctx context.Context) error { return sqlxshop.SellByVersion(ctx, db, product) }, err
	}},
	{"gorm/Version", 160, openGORM(gorm.Config{}, func(ctx context.Context, db *gorm.DB, product uint) error {
		return gormshop.SellByVersion(ctx, db, product, "Ann")
	})},
}

// control is the first style with the driver that knows no locks.
var control = style{"control", 480, func(dsn string) (sell, error) {
	db, err := sql.Open("mysql", dsn)
	return func(ctx context.Context) error { return plain.SellWithoutTransaction(ctx, db, product) }, err
}}

func openSQL(f func(context.Context, *sql.DB, int) error) func(string) (sell, error) {
	return func(dsn string) (sell, error) {
		db, err := plain.Open(dsn)
		return func(ctx context.Context) error { return f(ctx, db, product) }, err
	}
}

func openGORM(config gorm.Config, f func(context.Context, *gorm.DB, uint) error) func(string) (sell, error) {
	return func(dsn string) (sell, error) {
		own := config               // GORM writes into it, and handles are opened at the same time
		own.Logger = logger.Discard // it reports slow statements, and waits are slow
		db, err := gormshop.Open(dsn, &own)
		return func(ctx context.Context) error { return f(ctx, db, product) }, err
	}
}

func sellOrder(ctx context.Context, db *gorm.DB, product uint) error {
	return gormshop.Sell(ctx, db, product, "Ann")
}

func sellInDo(ctx context.Context, db *sql.DB, product int) error {
	return mysqllock.Do(ctx, db, "product:1", func(ctx context.Context) error {
		return plain.Sell(ctx, db, product) // joins
	})
}
