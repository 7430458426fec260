package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
)

// wiretap notes the statements that go to the server. It lies beneath the driver, so it
// needs no privilege, and changes nothing on the server.
type wiretap struct {
	sqlmw.NullInterceptor
	mu         sync.Mutex
	statements []string
}

// open opens a handle on which it listens.
func (w *wiretap) open(dsn string, lock bool) (*sql.DB, error) {
	config, err := mysql.ParseDSN(dsn)
	if err != nil {
		return nil, err
	}
	var connector driver.Connector
	if lock {
		connector, err = mysqllock.NewConnector(config, mysqllock.Config{Base: intercept.With(w)})
	} else if connector, err = mysql.NewConnector(config); err == nil {
		connector, err = intercept.With(w)(connector)
	}
	if err != nil {
		return nil, err
	}
	return sql.OpenDB(connector), nil
}

// listen returns the statements that the server gets while f runs, in order.
func (w *wiretap) listen(f func() error) ([]string, error) {
	w.mu.Lock()
	w.statements = nil
	w.mu.Unlock()
	err := f()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.statements, err
}

// note notes a statement that has run: one with arguments is refused at first, and prepared.
func (w *wiretap) note(text string, err error) {
	if errors.Is(err, driver.ErrSkip) {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.statements = append(w.statements, text)
}

func (w *wiretap) ConnBeginTx(ctx context.Context, conn driver.ConnBeginTx, opts driver.TxOptions) (context.Context, driver.Tx, error) {
	tx, err := conn.BeginTx(ctx, opts)
	w.note("START TRANSACTION", err)
	return ctx, tx, err
}

func (w *wiretap) TxCommit(_ context.Context, tx driver.Tx) error {
	err := tx.Commit()
	w.note("COMMIT", err)
	return err
}

func (w *wiretap) ConnExecContext(
	ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	res, err := conn.ExecContext(ctx, text, args)
	w.note(text, err)
	return res, err
}

func (w *wiretap) ConnQueryContext(
	ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	rows, err := conn.QueryContext(ctx, text, args)
	w.note(text, err)
	return ctx, rows, err
}

func (w *wiretap) StmtExecContext(
	ctx context.Context, stmt driver.StmtExecContext, text string, args []driver.NamedValue,
) (driver.Result, error) {
	res, err := stmt.ExecContext(ctx, args)
	w.note(text, err)
	return res, err
}

func (w *wiretap) StmtQueryContext(
	ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue,
) (context.Context, driver.Rows, error) {
	rows, err := stmt.QueryContext(ctx, args)
	w.note(text, err)
	return ctx, rows, err
}

// compare puts "+ " before what only with has, "- " before what only without
// has and "  " before what both have, keeping the order of both.
func compare(without, with []string) (lines []string) {
	for len(without) > 0 || len(with) > 0 {
		switch {
		case len(with) > 0 && !slices.Contains(without, with[0]):
			lines, with = append(lines, "+ "+with[0]), with[1:]
		case len(without) > 0 && !slices.Contains(with, without[0]):
			lines, without = append(lines, "- "+without[0]), without[1:]
		case len(with) > 0 && len(without) > 0 && with[0] == without[0]:
			lines, with, without = append(lines, "  "+with[0]), with[1:], without[1:]
		case len(with) > 0: // both have it, elsewhere
			lines, with = append(lines, "+ "+with[0]), with[1:]
		default:
			lines, without = append(lines, "- "+without[0]), without[1:]
		}
	}
	return lines
}

var hexLiteral = regexp.MustCompile(`x'([0-9a-fA-F]*)'`)

// readable says what the hexadecimal literals of a statement stand for, as a
// comment; "" where there is none.
func readable(statement string) string {
	var parts []string
	for _, m := range hexLiteral.FindAllStringSubmatch(statement, -1) {
		if text, err := hex.DecodeString(m[1]); err == nil {
			parts = append(parts, fmt.Sprintf("%s is %q", m[0], text))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "-- " + strings.Join(parts, ", ")
}
