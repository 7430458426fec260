package lockprom_test

import (
	"context"
	"database/sql"

	"github.com/go-sql-driver/mysql"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
	lockprom "github.com/mysqllock/mysqllock/telemetry/prometheus"
)

// With the registry that promhttp.Handler serves.
func Example() {
	open := func(dsn string) (*sql.DB, error) {
		cfg, err := mysql.ParseDSN(dsn)
		if err != nil {
			return nil, err
		}
		locks := lockprom.New()
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Observer: locks})
		if err != nil {
			return nil, err
		}
		db := sql.OpenDB(connector)
		stats, err := lockprom.NewStatsCollector(db)
		if err != nil {
			return nil, err
		}
		prometheus.MustRegister(locks, stats)
		return db, nil
	}

	db, err := open("app:pw@tcp(127.0.0.1:3306)/shop")
	if err != nil {
		return
	}
	defer db.Close()
	_ = mysqllock.Do(context.Background(), db, "stocktaking", func(context.Context) error { return nil })
}
