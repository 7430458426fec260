package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The ways to sell the units of a product that all want, as the tables name them: a stock is read, and one less is
// written.
const (
	handLocked  = "hot row, FOR UPDATE by hand"
	lockedFirst = "hot row, lock, then read, by hand" // what a lock that is not that of the row itself cannot do without
	inBegin     = "hot row, BeginTx"
	inHotDo     = "hot row, Do"
	apartJoined = "hot row, read, then write"

	fewEach = "; 17 connections"
)

var (
	hotRowNames = []string{handLocked, lockedFirst, inBegin, inHotDo, apartJoined}
	hotRowFew   = []string{handLocked + fewEach, lockedFirst + fewEach, inBegin + fewEach, inHotDo + fewEach, apartJoined + fewEach}
)

// inRush is for how long a caller in a rush is ready to wait, and rushKeys how many products there are.
const (
	inRush   = time.Second
	rushKeys = 5
)

// hotRows are the ways to sell with as many connections as it takes, and with 17 in each process.
func hotRows(on string) (all []contender) {
	add := func(name string, handy bool, sell func(ctx context.Context, db *sql.DB, key string, id int) error) {
		for _, few := range []bool{false, true} {
			c := contender{Name: name, Server: on, Ours: !handy, Note: "texts with their values in them (`interpolateParams`)"}
			params := ""
			if few {
				c.Name, params = c.Name+fewEach, "&maxConns=17"
			}
			c.open = func(_ context.Context, at addresses, n size) (client, error) {
				var db *sql.DB
				var err error
				if handy {
					db, err = openPlain(at[on], n)
				} else {
					db, err = openOurs(at[on], hint.StrategyRow+params, n)
				}
				if err != nil {
					return nil, err
				}
				if few && handy {
					db.SetMaxOpenConns(17)
					db.SetMaxIdleConns(17)
				}
				return &work{do: func(ctx context.Context, worker int, key string) error {
					if n.Rush == 0 {
						return sell(ctx, db, key, 1)
					}
					id := worker%rushKeys + 1
					ctx, cancel := context.WithTimeout(ctx, n.Rush)
					defer cancel()
					err := sell(ctx, db, fmt.Sprint(product, id), id)
					if err != nil && (ctx.Err() != nil || errors.Is(err, mysqllock.ErrTimeout)) {
						return errGaveUp
					}
					return err
				}, close: []func() error{db.Close}, beside: besideOf(db)}, nil
			}
			all = append(all, c)
		}
	}
	add(handLocked, true, func(ctx context.Context, db *sql.DB, _ string, id int) error {
		return inTx(ctx, db, func(tx *sql.Tx) error { return sellLocking(ctx, tx, " FOR UPDATE", id) })
	})
	add(lockedFirst, true, func(ctx context.Context, db *sql.DB, key string, id int) error {
		return inTx(ctx, db, func(tx *sql.Tx) error {
			if err := lockRow(ctx, tx, key); err != nil {
				return err
			}
			return sellLocking(ctx, tx, "", id)
		})
	})
	add(inBegin, false, func(ctx context.Context, db *sql.DB, key string, id int) error {
		ctx = lockctx.With(ctx, key)
		return inTx(ctx, db, func(tx *sql.Tx) error { return sellLocking(ctx, tx, "", id) })
	})
	add(inHotDo, false, func(ctx context.Context, db *sql.DB, key string, id int) error {
		return mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return sellLocking(ctx, db, "", id) })
	})
	add(apartJoined, false, func(ctx context.Context, db *sql.DB, key string, id int) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return sellLocking(lockctx.With(ctx, key), db, "", id)
	})
	return all
}

func inTx(ctx context.Context, db *sql.DB, do func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if err := do(tx); err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

// sellLocking reads a stock, with the clause for a lock, and writes one less.
func sellLocking(ctx context.Context, q querier, lock string, id int) error {
	var stock int64
	if err := q.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?"+lock, id).Scan(&stock); err != nil {
		return err
	}
	_, err := q.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock-1, id)
	return err
}
