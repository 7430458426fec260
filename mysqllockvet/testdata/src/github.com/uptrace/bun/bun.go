// Package bun has the names of the real one, for the tests.
package bun

import (
	"context"
	"database/sql"
)

type DB struct{ *sql.DB }

type Tx struct{ *sql.Tx }

type IConn interface {
	Exec(string, ...any) (sql.Result, error)
}

type SelectQuery struct{}

type UpdateQuery struct{}

type InsertQuery struct{}

func NewDB(db *sql.DB, dialect any) *DB                                          { return nil }
func (db *DB) NewSelect() *SelectQuery                                           { return nil }
func (db *DB) NewUpdate() *UpdateQuery                                           { return nil }
func (db *DB) NewInsert() *InsertQuery                                           { return nil }
func (tx Tx) NewSelect() *SelectQuery                                            { return nil }
func (tx Tx) NewUpdate() *UpdateQuery                                            { return nil }
func (db *DB) BeginTx(ctx context.Context, opts *sql.TxOptions) (Tx, error)      { return Tx{}, nil }
func (q *SelectQuery) Model(v any) *SelectQuery                                  { return q }
func (q *SelectQuery) Conn(db IConn) *SelectQuery                                { return q }
func (q *SelectQuery) WherePK() *SelectQuery                                     { return q }
func (q *SelectQuery) Scan(ctx context.Context, dest ...any) error               { return nil }
func (q *UpdateQuery) Model(v any) *UpdateQuery                                  { return q }
func (q *UpdateQuery) WherePK() *UpdateQuery                                     { return q }
func (q *UpdateQuery) Set(text string, args ...any) *UpdateQuery                 { return q }
func (q *InsertQuery) Model(v any) *InsertQuery                                  { return q }
func (q *UpdateQuery) Exec(ctx context.Context, dest ...any) (sql.Result, error) { return nil, nil }
func (q *InsertQuery) Exec(ctx context.Context, dest ...any) (sql.Result, error) { return nil, nil }

func (db *DB) RunInTx(ctx context.Context, opts *sql.TxOptions, fn func(context.Context, Tx) error) error {
	return nil
}
