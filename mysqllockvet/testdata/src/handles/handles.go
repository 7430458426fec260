// Package handles sets up database handles in ways that do not go with locks.
package handles

import (
	"gorm.io/gorm"
	"gorm.io/plugin/dbresolver"

	"github.com/mysqllock/mysqllock"
)

func resolver(replica, orders gorm.Dialector) *dbresolver.DBResolver {
	return dbresolver.Register(dbresolver.Config{Replicas: []gorm.Dialector{replica}}). // want `dbresolver sends reads to other handles.*#dbresolver`
												Register(dbresolver.Config{Replicas: []gorm.Dialector{orders}}, "orders") // want `dbresolver sends reads`
}

func config() mysqllock.Config { return mysqllock.Config{MaxConns: 25} }
