// Package gorm has the names of the real one, for the tests.
package gorm

import (
	"context"
	"database/sql"
)

type DB struct {
	Error        error
	RowsAffected int64
}

type Session struct {
	DryRun  bool
	Context context.Context
}

type Dialector interface{ Name() string }

type Option interface{}

func Open(d Dialector, opts ...Option) (*DB, error)                            { return nil, nil }
func (db *DB) WithContext(ctx context.Context) *DB                             { return db }
func (db *DB) Session(s *Session) *DB                                          { return db }
func (db *DB) Clauses(conds ...any) *DB                                        { return db }
func (db *DB) Model(v any) *DB                                                 { return db }
func (db *DB) Where(q any, args ...any) *DB                                    { return db }
func (db *DB) Raw(q string, args ...any) *DB                                   { return db }
func (db *DB) Exec(q string, args ...any) *DB                                  { return db }
func (db *DB) Scan(v any) *DB                                                  { return db }
func (db *DB) First(v any, conds ...any) *DB                                   { return db }
func (db *DB) Find(v any, conds ...any) *DB                                    { return db }
func (db *DB) Create(v any) *DB                                                { return db }
func (db *DB) Save(v any) *DB                                                  { return db }
func (db *DB) Update(column string, v any) *DB                                 { return db }
func (db *DB) Begin(opts ...*sql.TxOptions) *DB                                { return db }
func (db *DB) Commit() *DB                                                     { return db }
func (db *DB) Rollback() *DB                                                   { return db }
func (db *DB) DB() (*sql.DB, error)                                            { return nil, nil }
func (db *DB) Transaction(fc func(tx *DB) error, opts ...*sql.TxOptions) error { return nil }
