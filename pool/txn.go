package pool

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Txn is the transaction on a connection. Its methods need the connection's
// turn.
type Txn struct {
	c  *Conn
	tx driver.Tx // nil where the transaction was begun by text
}

// Begin opens a transaction with what the base driver has for it.
func (c *Conn) Begin(ctx context.Context, opts driver.TxOptions) (*Txn, error) {
	tx, err := Begin(ctx, c.Conn, opts)
	if err != nil {
		return nil, err
	}
	return &Txn{c, tx}, nil
}

// Begun returns the transaction that a statement's text has begun, or that the
// next statement begins where the session is not in autocommit.
func (c *Conn) Begun() *Txn { return &Txn{c: c} }

// Continue returns the transaction that tx has begun on c.
func (c *Conn) Continue(tx driver.Tx) *Txn { return &Txn{c, tx} }

// Commit commits. The wait for the server's answer does not end with any
// context of the caller's: giving up would leave the outcome unknown. It is
// bounded by limit where limit is not 0.
func (t *Txn) Commit(limit time.Duration) error { return t.end("COMMIT", driver.Tx.Commit, limit) }

// Rollback rolls back, bounded like Commit.
func (t *Txn) Rollback(limit time.Duration) error {
	return t.end("ROLLBACK", driver.Tx.Rollback, limit)
}

func (t *Txn) end(text string, byDriver func(driver.Tx) error, limit time.Duration) error {
	var err error
	if t.tx != nil {
		err = byDriver(t.tx)
	} else {
		ctx := context.Background()
		if limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, limit)
			defer cancel()
		}
		err = server.Exec(ctx, t.c.Conn, text)
	}
	if err == nil {
		t.c.Touch()
	}
	return err
}

// Begin begins a transaction on a bare driver connection the way database/sql
// does, also where the driver is too old for options.
func Begin(ctx context.Context, conn driver.Conn, opts driver.TxOptions) (driver.Tx, error) {
	if b, ok := conn.(driver.ConnBeginTx); ok {
		return b.BeginTx(ctx, opts)
	}
	if opts.Isolation != driver.IsolationLevel(sql.LevelDefault) {
		return nil, errors.New("sql: driver does not support non-default isolation level")
	}
	if opts.ReadOnly {
		return nil, errors.New("sql: driver does not support read-only transactions")
	}
	tx, err := conn.Begin() //nolint:staticcheck // for drivers without the context form
	if err == nil && ctx.Err() != nil {
		_ = tx.Rollback()
		return nil, ctx.Err()
	}
	return tx, err
}
