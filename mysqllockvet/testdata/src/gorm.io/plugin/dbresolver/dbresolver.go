// Package dbresolver has the names of the real one, for the tests.
package dbresolver

import "gorm.io/gorm"

type Config struct {
	Sources, Replicas []gorm.Dialector
}

type Operation string

const Write Operation = "write"

type DBResolver struct{}

func Register(config Config, datas ...interface{}) *DBResolver                  { return nil }
func (dr *DBResolver) Register(config Config, datas ...interface{}) *DBResolver { return dr }
