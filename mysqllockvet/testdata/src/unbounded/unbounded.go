// Package unbounded has handles without maxConns: database/sql bounds them.
package unbounded

import (
	"database/sql"
	"time"

	"github.com/mysqllock/mysqllock"
)

func open(dsn string) (*sql.DB, mysqllock.Config) {
	db, _ := sql.Open("mysqllock", dsn)
	db.SetConnMaxLifetime(time.Hour)
	db.SetConnMaxIdleTime(time.Minute)
	return db, mysqllock.Config{}
}
