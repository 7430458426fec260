package gormshop

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/ngrok/sqlmw"
	"gorm.io/gorm"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
)

// Audit writes down every statement that goes to the server, those that the driver adds
// for locks included. An interceptor above the driver, or GORM's logger, cannot see these.
type Audit struct {
	sqlmw.NullInterceptor // for the methods that are not needed

	mu    sync.Mutex
	lines []string
}

// OpenAudited opens the shop with an audit of all that it sends.
func OpenAudited(dsn string, audit *Audit, opts ...gorm.Option) (*gorm.DB, error) {
	config, locks, err := mysqllock.ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	locks.Base = intercept.With(audit)
	connector, err := mysqllock.NewConnector(config, locks)
	if err != nil {
		return nil, err
	}
	return OpenConn(sql.OpenDB(connector), opts...)
}

// Lines returns what was written down since the last call.
func (a *Audit) Lines() (lines []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	lines, a.lines = a.lines, nil
	return lines
}

func (a *Audit) note(ctx context.Context, text string, err error) {
	if errors.Is(err, driver.ErrSkip) { // it has arguments, so it comes again as a prepared one
		return
	}
	who := "shop"
	if lock, ok := intercept.Of(ctx); ok {
		who = strings.TrimSpace(fmt.Sprintf("lock: %s %s %s", lock.Step, lock.Strategy, strings.Join(lock.Keys, ", ")))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.lines = append(a.lines, fmt.Sprintf("[%s] %s", who, text))
}

func (a *Audit) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	tx, err := conn.BeginTx(ctx, opts)
	a.note(ctx, "START TRANSACTION", err)
	return ctx, tx, err
}

func (a *Audit) TxCommit(ctx context.Context, tx driver.Tx) error {
	err := tx.Commit()
	a.note(ctx, "COMMIT", err)
	return err
}

func (a *Audit) TxRollback(ctx context.Context, tx driver.Tx) error {
	err := tx.Rollback()
	a.note(ctx, "ROLLBACK", err)
	return err
}

func (a *Audit) ConnExecContext(
	ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	result, err := conn.ExecContext(ctx, text, args)
	a.note(ctx, text, err)
	return result, err
}

func (a *Audit) ConnQueryContext(
	ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	rows, err := conn.QueryContext(ctx, text, args)
	a.note(ctx, text, err)
	return ctx, rows, err
}

func (a *Audit) StmtExecContext(
	ctx context.Context, stmt driver.StmtExecContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	result, err := stmt.ExecContext(ctx, args)
	a.note(ctx, text, err)
	return result, err
}

func (a *Audit) StmtQueryContext(
	ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	rows, err := stmt.QueryContext(ctx, args)
	a.note(ctx, text, err)
	return ctx, rows, err
}
