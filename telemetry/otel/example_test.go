package lockotel_test

import (
	"context"
	"database/sql"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	lockotel "github.com/mysqllock/mysqllock/telemetry/otel"
)

func Open(cfg *mysql.Config) (*sql.DB, error) {
	locks, err := lockotel.New(lockotel.Options{Attributes: lockotel.Server(cfg)})
	if err != nil {
		return nil, err
	}
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Observer: locks})
	if err != nil {
		return nil, err
	}
	db := sql.OpenDB(connector)
	_, err = locks.Watch(db, cfg.DBName) // the connections by use, and who waits
	return db, err
}

// With the providers that the application has made global.
func Example() {
	cfg, err := mysql.ParseDSN("app:pw@tcp(127.0.0.1:3306)/shop")
	if err != nil {
		return
	}
	db, err := Open(cfg)
	if err != nil {
		return
	}
	defer db.Close()
	_ = mysqllock.Do(context.Background(), db, "stocktaking", func(context.Context) error { return nil })
}
