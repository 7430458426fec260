package lockotel_test

import (
	"context"
	"database/sql"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	lockotel "github.com/mysqllock/mysqllock/telemetry/otel"
)

// With the providers that the application has made global.
func Example() {
	open := func(dsn string) (*sql.DB, error) {
		cfg, err := mysql.ParseDSN(dsn)
		if err != nil {
			return nil, err
		}
		locks, err := lockotel.New(lockotel.Options{Attributes: lockotel.Server(cfg)})
		if err != nil {
			return nil, err
		}
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Observer: locks})
		if err != nil {
			return nil, err
		}
		db := sql.OpenDB(connector)
		_, err = locks.Watch(db, cfg.DBName)
		return db, err
	}

	db, err := open("app:pw@tcp(127.0.0.1:3306)/shop")
	if err != nil {
		return
	}
	defer db.Close()
	_ = mysqllock.Do(context.Background(), db, "stocktaking", func(context.Context) error { return nil })
}
