package lockprom_test

import (
	"context"
	"database/sql"

	"github.com/go-sql-driver/mysql"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
	lockprom "github.com/mysqllock/mysqllock/telemetry/prometheus"
)

func Open(cfg *mysql.Config, registry prometheus.Registerer) (*sql.DB, error) {
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
	registry.MustRegister(locks, stats)
	return db, nil
}

// With the registry that promhttp.Handler serves.
func Example() {
	cfg, err := mysql.ParseDSN("app:pw@tcp(127.0.0.1:3306)/shop")
	if err != nil {
		return
	}
	db, err := Open(cfg, prometheus.DefaultRegisterer)
	if err != nil {
		return
	}
	defer db.Close()
	_ = mysqllock.Do(context.Background(), db, "stocktaking", func(context.Context) error { return nil })
}
