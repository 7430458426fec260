package main

import (
	"context"
	"database/sql"
	"errors"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The business transactions, as the tables name them.
const (
	unlocked = "unlocked"
	noHint   = "mysqllock, no hint"
	product  = "product" // the key

	inDo = row + ", Do" // in place of BeginTx

	// The least of each kind: plain SQL without waiting, cancelling, or a look at whether
	// the lock is held, in procedures.
	leastRow     = "a row lock in a procedure with BEGIN"
	leastLease   = "two notes of a lease, with BEGIN and with COMMIT"
	leastVersion = "a version, read with BEGIN and raised with COMMIT"
	leastNamed   = "a named lock in a procedure with BEGIN, another with COMMIT"
)

var leasts = selling(leastRow, leastLease, leastVersion, leastNamed)

// busyNames are the ways to sell a product that all sell.
var busyNames = selling(unlocked, row, inDo, lease, advisory, forUpdate, getLock, redsyncTuned, redisTuned)

func selling(names ...string) []string {
	for i, name := range names {
		names[i] = "transaction, " + name
	}
	return names
}

// work is a contender's client that does all of its work in Lock.
type work struct {
	do     func(ctx context.Context, worker int, key string) error
	close  []func() error
	beside *beside // nil where nothing is measured beside it
}

func (w *work) Lock(ctx context.Context, worker int, key string) (func() error, error) {
	return func() error { return nil }, w.do(ctx, worker, key)
}

func (w *work) Close() (err error) {
	for _, c := range w.close {
		err = errors.Join(err, c())
	}
	return err
}

// transactions are ways to sell one product: BEGIN, UPDATE, COMMIT, with a lock
// and without.
func transactions(on string) (all []contender) {
	transaction := func(name string, ours bool, open func(address string, n size) (*sql.DB, error), do func(context.Context, *sql.DB, string) error) {
		all = append(all, contender{
			Name: "transaction, " + name, Server: on, Ours: ours,
			open: func(_ context.Context, at addresses, n size) (client, error) {
				db, err := open(at[on], n)
				if err != nil {
					return nil, err
				}
				return &work{do: func(ctx context.Context, _ int, key string) error { return do(ctx, db, key) }, close: []func() error{db.Close}}, nil
			},
		})
	}
	sellAlone := func(ctx context.Context, db *sql.DB, _ string) error { return sell(ctx, db, nil) }

	transaction(unlocked, false, openPlain, sellAlone)
	transaction(noHint, true, openUnhinted, sellAlone)
	hinted := func(ctx context.Context, db *sql.DB, key string) error { return sell(lockctx.With(ctx, key), db, nil) }
	for _, s := range strategies {
		transaction(s.name, true, func(address string, n size) (*sql.DB, error) { return openOurs(address, s.params, n) }, hinted)
	}
	// A key of its own: one that was once kept optimistically costs the others a
	// statement more, for its version.
	transaction(optimistic, true, func(address string, n size) (*sql.DB, error) { return openOurs(address, hint.StrategyOptimistic, n) },
		func(ctx context.Context, db *sql.DB, key string) error { return hinted(ctx, db, "optimistic "+key) })
	transaction(inDo, true, func(address string, n size) (*sql.DB, error) { return openOurs(address, hint.StrategyRow, n) },
		func(ctx context.Context, db *sql.DB, key string) error {
			return mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return takeOne(ctx, db) })
		})
	least := func(name, begin, end string) {
		transaction(name, false, openPlain, func(ctx context.Context, db *sql.DB, _ string) error { return sellBetween(ctx, db, begin, end) })
	}
	least(leastRow, "CALL begin_row()", "COMMIT")
	least(leastLease, "CALL begin_lease()", "CALL commit_lease()")
	least(leastVersion, "CALL begin_version()", "CALL commit_version()")
	least(leastNamed, "CALL begin_named()", "CALL commit_named()")
	transaction(forUpdate, false, openPlain, func(ctx context.Context, db *sql.DB, key string) error {
		return sell(ctx, db, func(tx *sql.Tx) error { return lockRow(ctx, tx, key) })
	})
	transaction(getLock, false, openPlain, sellOnPinned)
	for _, rival := range append(sqlRivals(on), otherRivals()...) {
		switch rival.Name {
		case insertDelete, redsyncTuned, redisTuned, etcdMutex:
			all = append(all, around(rival, on))
		}
	}
	return all
}

// around is the transaction in a rival's lock.
func around(rival contender, on string) contender {
	return contender{
		Name: "transaction, " + rival.Name, Server: on, needs: []string{rival.Server},
		open: func(ctx context.Context, at addresses, n size) (client, error) {
			db, err := openPlain(at[on], n)
			if err != nil {
				return nil, err
			}
			locks, err := rival.open(ctx, at, n)
			if err != nil {
				return nil, errors.Join(err, db.Close())
			}
			return &work{do: func(ctx context.Context, worker int, key string) error {
				release, err := locks.Lock(ctx, worker, key)
				if err != nil {
					return err
				}
				return errors.Join(sell(ctx, db, nil), release())
			}, close: []func() error{locks.Close, db.Close}}, nil
		},
	}
}

type beginner interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}

// sell is the business transaction. lock, if any, comes first in it.
func sell(ctx context.Context, db beginner, lock func(*sql.Tx) error) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if lock != nil {
		err = lock(tx)
	}
	if err == nil {
		err = takeOne(ctx, tx)
	}
	if err != nil {
		return errors.Join(err, tx.Rollback())
	}
	return tx.Commit()
}

func takeOne(ctx context.Context, on querier) error {
	_, err := on.ExecContext(ctx, "UPDATE products SET stock = stock - ? WHERE id = ?", 1, 1)
	return err
}

// sellBetween is the business transaction, which these statements begin and end.
func sellBetween(ctx context.Context, db *sql.DB, begin, end string) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err = conn.ExecContext(ctx, begin); err == nil {
		if err = takeOne(ctx, conn); err == nil {
			_, err = conn.ExecContext(ctx, end)
		}
	}
	return err
}

func sellOnPinned(ctx context.Context, db *sql.DB, key string) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := getLockOn(ctx, conn, key); err != nil {
		return err
	}
	err = sell(ctx, conn, nil)
	_, released := conn.ExecContext(ctx, "DO RELEASE_LOCK(?)", key)
	return errors.Join(err, released)
}

// plainWork is a query by primary key, on the plain driver and on ours without a
// hint. The transactions have the same pair.
func plainWork(on string) (all []contender) {
	query := func(name string, open func(address string, n size) (*sql.DB, error)) {
		all = append(all, contender{
			Name: "query, " + name, Server: on, Ours: name == noHint,
			open: func(_ context.Context, at addresses, n size) (client, error) {
				db, err := open(at[on], n)
				if err != nil {
					return nil, err
				}
				return &work{do: func(ctx context.Context, _ int, _ string) error { return readStock(ctx, db) }, close: []func() error{db.Close}}, nil
			},
		})
	}
	query(unlocked, openPlain)
	query(noHint, openUnhinted)
	return all
}

func openUnhinted(address string, n size) (*sql.DB, error) {
	return openOurs(address, hint.StrategyRow, n)
}
