package pool

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Txn is a transaction on a session. The caller of its methods has the session's turn.
type Txn struct {
	c        *Conn
	tx       driver.Tx   // of the base driver; nil if the transaction begins and ends by statements
	begunFor *purpose.Of // what the transaction was begun for; nil if nobody wants to know
}

// ByCalls reports whether transactions on the session begin and end by calls of the base driver, as an application may expect that has
// made its own connector.
func (c *Conn) ByCalls() bool { return c.pool != nil && c.pool.cfg.ByCalls }

// Begin begins a transaction. Without options it sends nothing: the session is not in autocommit, so the next statement begins the
// transaction.
func (c *Conn) Begin(ctx context.Context, opts driver.TxOptions) (t *Txn, err error) {
	defer basedriver.Catch(c.Conn, &err)
	if c.ByCalls() {
		t = c.Begun(ctx)
		if t.tx, err = basedriver.Begin(ctx, c.Conn, opts); err != nil {
			return nil, server.Unanswered(ctx, err)
		}
		return t, nil
	}
	text, err := Options(opts)
	if err == nil && text != "" {
		err = server.Exec(ctx, c.Conn, text)
	}
	if err != nil {
		return nil, err
	}
	return c.Begun(ctx), nil
}

// Begun returns a transaction that a statement has begun, or that the next statement begins. ctx is the context of that statement.
func (c *Conn) Begun(ctx context.Context) *Txn {
	begunFor, _ := purpose.From(ctx)
	return &Txn{c: c, begunFor: begunFor}
}

// levels are the isolation levels as SET TRANSACTION names them.
var levels = map[driver.IsolationLevel]string{
	driver.IsolationLevel(sql.LevelReadUncommitted): "READ UNCOMMITTED",
	driver.IsolationLevel(sql.LevelReadCommitted):   "READ COMMITTED",
	driver.IsolationLevel(sql.LevelRepeatableRead):  "REPEATABLE READ",
	driver.IsolationLevel(sql.LevelSerializable):    "SERIALIZABLE",
}

// Options returns the statement that gives the next transaction its options; "" for none.
func Options(opts driver.TxOptions) (text string, err error) {
	var set []string
	if opts.Isolation != driver.IsolationLevel(sql.LevelDefault) {
		level := levels[opts.Isolation]
		if level == "" {
			return "", fmt.Errorf("mysqllock: unsupported isolation level: %v", sql.IsolationLevel(opts.Isolation))
		}
		set = append(set, "ISOLATION LEVEL "+level)
	}
	if opts.ReadOnly {
		set = append(set, "READ ONLY")
	}
	if len(set) == 0 {
		return "", nil
	}
	return "SET TRANSACTION " + strings.Join(set, ", "), nil
}

// Commit commits. It waits for the server's answer, but not longer than limit; 0 for no limit. No context ends that wait, since the
// outcome would then be unknown.
func (t *Txn) Commit(limit time.Duration) error { return t.end("COMMIT", limit) }

// Rollback rolls back. limit is as for Commit.
func (t *Txn) Rollback(limit time.Duration) error { return t.end("ROLLBACK", limit) }

func (t *Txn) end(text string, limit time.Duration) error {
	ctx, cancel := t.endContext(limit)
	defer cancel()
	return t.sendEnd(ctx, text)
}

// sendEnd ends the transaction, by COMMIT or ROLLBACK.
func (t *Txn) sendEnd(ctx context.Context, text string) (err error) {
	defer basedriver.Catch(t.c.Conn, &err)
	switch {
	case t.tx == nil:
		err = server.Exec(ctx, t.c.Conn, text)
	case text == "COMMIT":
		err = t.tx.Commit()
	default:
		err = t.tx.Rollback()
	}
	if err == nil {
		t.c.Touch()
	}
	return err
}

// CommitWith commits, with the statements before in front of COMMIT, and the statements after behind it: see [Conn.Send]. answered is how
// many of all these statements have come through for sure. If sent is false, nothing is committed. limit is as for Commit.
func (t *Txn) CommitWith(ctx context.Context, limit time.Duration, before, after []string) (answered int, sent bool, err error) {
	if _, marked := purpose.From(ctx); !marked {
		ctx = purpose.After(ctx, t.begunFor, purpose.End)
	}
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = server.Within(ctx, limit)
		defer cancel()
	}
	defer func() {
		if err == nil {
			t.c.Touch()
		}
	}()
	if t.tx == nil {
		texts := append(append(append(make([]string, 0, len(before)+1+len(after)), before...), "COMMIT"), after...)
		answers, err := t.c.Send(ctx, texts...)
		return len(answers), t.c.Packs() || len(answers) >= len(before), err
	}
	answers, err := server.SendSingly(ctx, t.c.Conn, before...)
	if err != nil {
		return len(answers), false, err
	}
	if err := t.sendEnd(ctx, "COMMIT"); err != nil {
		return len(before), true, err
	}
	answers, err = server.SendSingly(ctx, t.c.Conn, after...)
	return len(before) + 1 + len(answers), true, err
}

// CommitBy commits as Commit does, but by send, which sends COMMIT together with more.
func (t *Txn) CommitBy(limit time.Duration, send func(context.Context) error) error {
	ctx, cancel := t.endContext(limit)
	defer cancel()
	err := send(ctx)
	if err == nil {
		t.c.Touch()
	}
	return err
}

// endContext returns the context of the statement that ends the transaction.
func (t *Txn) endContext(limit time.Duration) (context.Context, context.CancelFunc) {
	ctx := purpose.After(context.Background(), t.begunFor, purpose.End)
	if limit == 0 {
		return ctx, func() {}
	}
	return server.Within(ctx, limit)
}

// RollBackUnknown rolls back a transaction that a statement may have begun on c for no caller, within limit, even if ctx has
// ended. If that fails, c is tainted.
func (c *Conn) RollBackUnknown(ctx context.Context, limit time.Duration) {
	ctx, cancel := server.Within(purpose.For(context.WithoutCancel(ctx), purpose.Other), limit)
	defer cancel()
	if server.Exec(ctx, c.Conn, "ROLLBACK") != nil {
		c.Taint()
	}
}
