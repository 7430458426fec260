package main

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The work with few connections, as the tables name it. Each goroutine reads a product's
// stock, thinks for a millisecond, and writes it.
const (
	decidedInDo   = "Do, as many connections as it takes"
	decided       = "read, then write; maxConns=25"
	onFourKeys    = "four keys, maxConns=100"
	onFourKeysFew = "four keys, maxConns=6"
	apart         = "read, then write; unlocked"
	apartLocked   = "read, then write; mysqllock"
	wrote         = "a write; unlocked"
	wroteLocked   = "a write; mysqllock"
	wroteJoined   = "a write; a lock in one text with it, by hand" // the least that a lock in front of it can cost
	queryBounded  = "query, SetMaxOpenConns(25)"
	queryBudget   = "query, maxConns=25"
	fullPlain     = "transaction, SetMaxOpenConns(25)"
	fullLocked    = "transaction, maxConns=25, every other one locked"
)

var (
	oneKeyNames   = []string{decidedInDo, decided}
	fourKeysNames = []string{onFourKeys, onFourKeysFew}
	boundedNames  = []string{queryBounded, queryBudget}
	fullNames     = []string{fullPlain, fullLocked}
	apartNames    = []string{apart, apartLocked}
	wroteNames    = []string{wrote, wroteLocked, wroteJoined}
)

// fewConnections are those who share one budget of connections, and what they are
// compared with.
func fewConnections(on string) (all []contender) {
	add := func(name string, open func(address string, n size) (*sql.DB, error), do func(ctx context.Context, db *sql.DB, worker int) error) {
		all = append(all, contender{
			Name: name, Server: on, Ours: !slices.Contains([]string{apart, wrote, wroteJoined, queryBounded, fullPlain}, name),
			open: func(_ context.Context, at addresses, n size) (client, error) {
				db, err := open(at[on], n)
				if err != nil {
					return nil, err
				}
				return &work{
					do:    func(ctx context.Context, worker int, _ string) error { return do(ctx, db, worker) },
					close: []func() error{db.Close},
				}, nil
			},
		})
	}
	bounded := func(maxConns int) func(string, size) (*sql.DB, error) {
		return func(address string, n size) (*sql.DB, error) {
			return openOurs(address, fmt.Sprintf("%s&maxConns=%d", hint.StrategyRow, maxConns), n)
		}
	}
	unbounded := func(address string, n size) (*sql.DB, error) { return openOurs(address, hint.StrategyRow, n) }

	add(decidedInDo, unbounded, func(ctx context.Context, db *sql.DB, _ int) error { return decideInDo(ctx, db, product, 1) })
	add(decided, bounded(25), func(ctx context.Context, db *sql.DB, _ int) error { return decide(ctx, db, product, 1) })
	for name, maxConns := range map[string]int{onFourKeys: 100, onFourKeysFew: 6} {
		add(name, bounded(maxConns), func(ctx context.Context, db *sql.DB, worker int) error {
			id := worker%4 + 1
			return [...]func(context.Context, *sql.DB, string, int) error{decide, decideInDo, decideInTx}[worker/4%3](ctx, db, fmt.Sprint(product, id), id)
		})
	}
	query := func(ctx context.Context, db *sql.DB, _ int) error { return readStock(ctx, db) }
	add(apart, openPlain, func(ctx context.Context, db *sql.DB, _ int) error { return sellAfter(ctx, db, 1, 0) })
	add(apartLocked, unbounded, func(ctx context.Context, db *sql.DB, _ int) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return sellAfter(lockctx.With(ctx, product), db, 1, 0)
	})
	add(wrote, openPlain, func(ctx context.Context, db *sql.DB, _ int) error { return write(ctx, db) })
	add(wroteLocked, unbounded, func(ctx context.Context, db *sql.DB, _ int) error { return write(lockctx.With(ctx, product), db) })
	severally := func(address string, n size) (*sql.DB, error) {
		return openBy(dsn(address)+"&multiStatements=true&autocommit=0", n)
	}
	add(wroteJoined, severally, func(ctx context.Context, db *sql.DB, _ int) error {
		_, err := db.ExecContext(ctx, "SELECT name FROM rows_to_lock WHERE name = '"+product+"' FOR UPDATE NOWAIT;"+
			" UPDATE products SET stock = stock - 1 WHERE id = 1; SELECT ROW_COUNT(); COMMIT")
		return err
	})
	plain := func(address string, n size) (*sql.DB, error) {
		db, err := openPlain(address, n)
		if err == nil {
			db.SetMaxOpenConns(25)
			db.SetMaxIdleConns(25)
		}
		return db, err
	}
	add(queryBounded, plain, query)
	add(queryBudget, bounded(25), query)
	add(fullPlain, plain, func(ctx context.Context, db *sql.DB, worker int) error { return transact(ctx, db, worker+1) })
	add(fullLocked, bounded(25), func(ctx context.Context, db *sql.DB, worker int) error {
		if worker%2 == 0 {
			ctx = lockctx.With(ctx, fmt.Sprint(product, worker))
		}
		return transact(ctx, db, worker+1)
	})
	return all
}

type querier interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

// sellOne reads a stock, thinks, and writes it.
func sellOne(ctx context.Context, q querier, id int) error {
	return sellAfter(ctx, q, id, time.Millisecond)
}

// sellAfter is sellOne for somebody who thinks for longer, or not at all.
func sellAfter(ctx context.Context, q querier, id int, thinks time.Duration) error {
	var stock int64
	if err := q.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", id).Scan(&stock); err != nil {
		return err
	}
	time.Sleep(thinks)
	_, err := q.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = ?", stock-1, id)
	return err
}

// write is one statement without arguments, which the driver can put beside its own in one text.
func write(ctx context.Context, q querier) error {
	_, err := q.ExecContext(ctx, "UPDATE products SET stock = stock - 1 WHERE id = 1")
	return err
}

func decide(ctx context.Context, db *sql.DB, key string, id int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return sellOne(lockctx.With(ctx, key), db, id)
}

func decideInDo(ctx context.Context, db *sql.DB, key string, id int) error {
	return mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return sellOne(ctx, db, id) })
}

func decideInTx(ctx context.Context, db *sql.DB, key string, id int) error {
	return transactAfter(lockctx.With(ctx, key), db, id, time.Millisecond)
}

// transact reads a stock and writes it in a transaction, under a lock if ctx has a hint.
func transact(ctx context.Context, db *sql.DB, id int) error { return transactAfter(ctx, db, id, 0) }

func transactAfter(ctx context.Context, db *sql.DB, id int, thinks time.Duration) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := sellAfter(ctx, tx, id, thinks); err != nil {
		return err
	}
	return tx.Commit()
}
