// Package sqlx has the names of the real one, for the tests.
package sqlx

import (
	"context"
	"database/sql"
)

type DB struct{ *sql.DB }

type Tx struct{ *sql.Tx }

type Queryer interface {
	Query(string, ...any) (*sql.Rows, error)
}

type QueryerContext interface {
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}

func Connect(driver, dsn string) (*DB, error)                                   { return nil, nil }
func Get(q Queryer, dest any, query string, args ...any) error                  { return nil }
func (*DB) Get(dest any, query string, args ...any) error                       { return nil }
func (*DB) Select(dest any, query string, args ...any) error                    { return nil }
func (*DB) MustExec(query string, args ...any) sql.Result                       { return nil }
func (*DB) NamedExec(query string, arg any) (sql.Result, error)                 { return nil, nil }
func (*DB) Beginx() (*Tx, error)                                                { return nil, nil }
func (*DB) MustBegin() *Tx                                                      { return nil }
func (*DB) BeginTxx(ctx context.Context, opts *sql.TxOptions) (*Tx, error)      { return nil, nil }
func (*DB) GetContext(ctx context.Context, d any, query string, a ...any) error { return nil }
func (*DB) NamedExecContext(ctx context.Context, query string, arg any) (sql.Result, error) {
	return nil, nil
}
func (*Tx) Get(dest any, query string, args ...any) error                             { return nil }
func (*Tx) GetContext(ctx context.Context, dest any, query string, args ...any) error { return nil }
func (*Tx) MustExec(query string, args ...any) sql.Result                             { return nil }

func GetContext(ctx context.Context, q QueryerContext, dest any, query string, args ...any) error {
	return nil
}
