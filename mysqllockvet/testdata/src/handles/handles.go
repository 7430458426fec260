// Package handles sets up database handles in ways that do not go with locks.
package handles

import (
	"database/sql"
	"time"

	"gorm.io/gorm"
	"gorm.io/plugin/dbresolver"

	"github.com/mysqllock/mysqllock"
)

func resolver(replica, orders gorm.Dialector) *dbresolver.DBResolver {
	return dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{replica}}). // want `dbresolver sends reads to other handles.*#dbresolver`
												Register(dbresolver.Config{Replicas: []gorm.Dialector{orders}}, "orders") // want `dbresolver sends reads`
}

func open(dsn string) *sql.DB {
	db, _ := sql.Open("mysqllock", "app@tcp(db:3306)/shop?parseTime=true&maxConns=25")
	db.SetConnMaxLifetime(time.Hour)   // want `SetConnMaxLifetime ends only the light connections.*connMaxLifetime.*#max-conns`
	db.SetConnMaxIdleTime(time.Minute) // want `SetConnMaxIdleTime ends only.*connMaxIdleTime`
	db.SetMaxIdleConns(25)

	other, _ := sql.Open("mysqllock", dsn+"&maxConns=25")
	other.SetConnMaxLifetime(time.Hour) // want `SetConnMaxLifetime`

	plain, _ := sql.Open("mysql", dsn)
	plain.SetConnMaxLifetime(time.Hour)
	unbounded, _ := sql.Open("mysqllock", "app@tcp(db:3306)/shop?maxConns=0")
	unbounded.SetConnMaxLifetime(time.Hour)
	return db
}

func config() mysqllock.Config { return mysqllock.Config{MaxConns: 25} }

func limit(db *gorm.DB) {
	pool, _ := db.DB()
	pool.SetConnMaxLifetime(time.Hour) // want `SetConnMaxLifetime`
}
