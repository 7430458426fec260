package pool

import (
	"context"
	"database/sql/driver"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Txn is a transaction on a connection. The caller of its methods has the connection's
// turn.
type Txn struct {
	c  *Conn
	tx driver.Tx   // nil if the transaction was begun as text
	of *purpose.Of // what it was begun as text for; nil if nobody wants to know

	by func(ctx context.Context, c *Conn, text string) error // see BegunLimited; nil without a limit
}

// Begin begins a transaction by the base driver.
func (c *Conn) Begin(ctx context.Context, opts driver.TxOptions) (t *Txn, err error) {
	defer basedriver.Catch(c.Conn, &err)
	tx, err := basedriver.Begin(ctx, c.Conn, opts)
	if err != nil {
		return nil, err
	}
	return &Txn{c: c, tx: tx}, nil
}

// Begun returns the transaction that a statement's text has begun, or that the next
// statement begins because autocommit is off. ctx is the context of that statement.
func (c *Conn) Begun(ctx context.Context) *Txn {
	of, _ := purpose.From(ctx)
	return &Txn{c: c, of: of}
}

// BegunLimited is Begun for a connection that the server ends when it is silent for too long, until
// the transaction has ended. by ends the transaction, by COMMIT or ROLLBACK, and takes that limit off.
func (c *Conn) BegunLimited(ctx context.Context, by func(ctx context.Context, c *Conn, text string) error) *Txn {
	t := c.Begun(ctx)
	t.by = by
	return t
}

// Limited reports whether the server ends the connection when it is silent for too long.
func (t *Txn) Limited() bool { return t.by != nil }

// Continue returns the transaction that tx has begun on c.
func (c *Conn) Continue(tx driver.Tx) *Txn { return &Txn{c: c, tx: tx} }

// AsText reports whether the transaction was begun as text, and not by the base driver,
// which would want to end it.
func (t *Txn) AsText() bool { return t.tx == nil }

// Commit commits. It waits for the server's answer, at most for limit; 0 is no limit. No
// context ends that wait, since the outcome would then be unknown.
func (t *Txn) Commit(limit time.Duration) error { return t.end("COMMIT", limit) }

// Rollback rolls back. limit is as for Commit.
func (t *Txn) Rollback(limit time.Duration) error { return t.end("ROLLBACK", limit) }

func (t *Txn) end(text string, limit time.Duration) (err error) {
	defer basedriver.Catch(t.c.Conn, &err)
	switch {
	case t.tx != nil && text == "COMMIT":
		err = t.tx.Commit()
	case t.tx != nil:
		err = t.tx.Rollback()
	default:
		ctx, cancel := t.ending(limit)
		defer cancel()
		if t.by != nil {
			err = t.by(ctx, t.c, text)
		} else {
			err = server.Exec(ctx, t.c.Conn, text)
		}
	}
	if err == nil {
		t.c.Touch()
	}
	return err
}

// CommitBy commits, as Commit does, a transaction that was begun as text, by a statement that
// does more: send sends it.
func (t *Txn) CommitBy(limit time.Duration, send func(context.Context) error) error {
	ctx, cancel := t.ending(limit)
	defer cancel()
	err := send(ctx)
	if err == nil {
		t.c.Touch()
	}
	return err
}

// ending is the context of the statement that ends the transaction.
func (t *Txn) ending(limit time.Duration) (context.Context, context.CancelFunc) {
	ctx := purpose.After(context.Background(), t.of, purpose.End)
	if limit == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, limit)
}

// Committed ends a transaction that a statement's text has committed. If there was a limit on the
// silence of the connection, the statement has taken it off.
func (t *Txn) Committed() {
	if t.tx != nil {
		_ = t.Commit(0) // there is nothing left to commit; the driver may want to know
	}
	t.c.Touch()
}

// Abandon rolls back what a statement may have begun on c for nothing, within limit, although
// ctx may have ended. If that fails, c is tainted.
func (c *Conn) Abandon(ctx context.Context, limit time.Duration) {
	ctx, cancel := context.WithTimeout(purpose.For(context.WithoutCancel(ctx), purpose.Other), limit)
	defer cancel()
	if server.Exec(ctx, c.Conn, "ROLLBACK") != nil {
		c.Taint()
	}
}
