package mysqllocktest

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"regexp"

	"github.com/mysqllock/mysqllock/internal/basedriver"
	"github.com/mysqllock/mysqllock/internal/fakeserver"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/purpose"
)

// conn is a connection of the driver: one to the fake server for the driver's own statements,
// and one of the application's database for the rest. Both are in the same transaction.
type conn struct {
	locks *fakeserver.Conn
	db    *sql.DB
	held  *sql.Conn   // of db, from the first use on
	base  driver.Conn // of held

	tx    driver.Tx         // of base
	later *driver.TxOptions // of a transaction that begins on base when its lock is granted
}

var errNoBase = errors.New("mysqllocktest: the handle has no database for the statements of the application: Open was called with nil")

// connect returns the connection of the application's database.
func (c *conn) connect(ctx context.Context) (driver.Conn, error) {
	if c.db == nil {
		return nil, errNoBase
	}
	if c.base != nil {
		return c.base, nil
	}
	held, err := c.db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	c.held = held
	return c.base, held.Raw(func(base any) error {
		c.base = base.(driver.Conn)
		return nil
	})
}

// run returns the connection for a statement of the application, in the transaction that is open.
func (c *conn) run(ctx context.Context) (driver.Conn, error) {
	open, err := c.locks.InTransaction()
	if err != nil {
		return nil, err
	}
	base, err := c.connect(ctx)
	if err == nil && open {
		err = c.begin(ctx, driver.TxOptions{})
	}
	return base, err
}

// begin begins the transaction of the application's database, unless it has begun.
func (c *conn) begin(ctx context.Context, opts driver.TxOptions) error {
	if c.tx != nil || c.db == nil {
		return nil
	}
	base, err := c.connect(ctx)
	if err != nil {
		return err
	}
	if b, ok := base.(driver.ConnBeginTx); ok {
		c.tx, err = b.BeginTx(ctx, opts)
	} else {
		c.tx, err = base.Begin() //nolint:staticcheck // for drivers without the context form
	}
	return err
}

// end ends the transaction on both sides. It commits if both can.
func (c *conn) end(commit bool) error {
	_, lost := c.locks.InTransaction()
	err := c.endBase(commit && lost == nil)
	text := "ROLLBACK"
	if commit && err == nil {
		text = "COMMIT"
	}
	_, ended := c.locks.ExecContext(context.Background(), text, nil)
	return cmp.Or(lost, err, ended)
}

func (c *conn) endBase(commit bool) error {
	tx := c.tx
	c.tx, c.later = nil, nil
	switch {
	case tx == nil:
		return nil
	case commit:
		return tx.Commit()
	}
	return tx.Rollback()
}

// BeginTx begins a transaction on both sides. One in which a row lock is to be taken may be
// rolled back and begun again until the key is free. The application's database sees it only
// when the lock has been granted, and that of a hold only with its first statement.
func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if _, err := c.locks.BeginTx(ctx, driver.TxOptions{}); err != nil {
		return nil, err
	}
	if purpose.IsOfHold(ctx) {
		return tx{c}, nil
	}
	if of, ours := purpose.From(ctx); ours && of.Purpose == purpose.Take && of.Strategy == hint.StrategyRow {
		c.later = &opts
		return tx{c}, nil
	}
	if err := c.begin(ctx, opts); err != nil {
		return nil, cmp.Or(err, c.end(false))
	}
	return tx{c}, nil
}

func (c *conn) Begin() (driver.Tx, error) { return c.BeginTx(context.Background(), driver.TxOptions{}) }

type tx struct{ c *conn }

func (t tx) Commit() error   { return t.c.end(true) }
func (t tx) Rollback() error { return t.c.end(false) }

func (c *conn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	if _, ours := purpose.From(ctx); ours {
		return c.execOwn(ctx, text, args)
	}
	base, err := c.run(ctx)
	if err != nil {
		return nil, err
	}
	return basedriver.Exec(ctx, base, text, args)
}

// savepoint is a statement about the savepoint of an inner transaction. The driver has others,
// for locks alone.
var savepoint = regexp.MustCompile(`^(?:RELEASE |ROLLBACK TO )?SAVEPOINT mysqllock_\d+$`)

// execOwn runs a statement of the driver's. What ends a transaction, or an inner one, is for both
// sides.
func (c *conn) execOwn(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	switch {
	case text == "COMMIT", text == "ROLLBACK":
		return driver.ResultNoRows, c.end(text == "COMMIT")
	case savepoint.MatchString(text):
		result, err := c.locks.ExecContext(ctx, text, args)
		if err != nil || c.db == nil {
			return result, err
		}
		base, err := c.run(ctx)
		if err != nil {
			return nil, err
		}
		return basedriver.Exec(ctx, base, text, args)
	}
	result, err := c.locks.ExecContext(ctx, text, args)
	if err == nil && text == "START TRANSACTION" {
		err = c.begin(ctx, driver.TxOptions{})
	}
	return result, err
}

func (c *conn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	if _, ours := purpose.From(ctx); !ours {
		base, err := c.run(ctx)
		if err != nil {
			return nil, err
		}
		return basedriver.Query(ctx, base, text, args)
	}
	rows, err := c.locks.QueryContext(ctx, text, args)
	if err == nil && c.later != nil && c.locks.HasLock() {
		opts := *c.later
		c.later = nil
		err = c.begin(ctx, opts)
	}
	if err != nil {
		return nil, err
	}
	return rows, nil
}

func (c *conn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	if _, ours := purpose.From(ctx); ours {
		return c.locks.Prepare(text)
	}
	base, err := c.run(ctx)
	if err != nil {
		return nil, err
	}
	s, err := basedriver.Prepare(ctx, base, text)
	if err != nil {
		return nil, err
	}
	return &stmt{s, c}, nil
}

func (c *conn) Prepare(text string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), text)
}

// stmt is a prepared statement of the application's.
type stmt struct {
	driver.Stmt
	c *conn
}

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	if _, err := s.c.run(ctx); err != nil {
		return nil, err
	}
	return basedriver.StmtExec(ctx, s.Stmt, args)
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if _, err := s.c.run(ctx); err != nil {
		return nil, err
	}
	return basedriver.StmtQuery(ctx, s.Stmt, args)
}

func (s *stmt) CheckNamedValue(v *driver.NamedValue) error { return check(s.Stmt, v) }

// CheckNamedValue has the application's database say which values it takes.
func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	base, err := c.connect(context.Background())
	if err != nil {
		return driver.ErrSkip // the statement will say why
	}
	return check(base, v)
}

func check(by any, v *driver.NamedValue) error {
	if checker, ok := by.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

func (c *conn) Ping(ctx context.Context) error {
	if _, err := c.locks.InTransaction(); err != nil {
		return err
	}
	if _, ours := purpose.From(ctx); ours || c.db == nil {
		return nil
	}
	base, err := c.connect(ctx)
	if err != nil {
		return err
	}
	if p, ok := base.(driver.Pinger); ok {
		return p.Ping(ctx)
	}
	return nil
}

func (c *conn) ResetSession(ctx context.Context) error {
	if err := c.locks.ResetSession(ctx); err != nil {
		return err
	}
	if r, ok := c.base.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

func (c *conn) IsValid() bool {
	v, ok := c.base.(driver.Validator)
	return c.locks.IsValid() && (!ok || v.IsValid())
}

func (c *conn) Close() error {
	err := c.endBase(false)
	err = cmp.Or(c.locks.Close(), err)
	if c.held != nil {
		err = cmp.Or(err, c.held.Close())
	}
	return err
}
