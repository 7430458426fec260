package unit_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// inTx are the ways in which a statement with ctx comes in a transaction.
var inTx = map[string]func(ctx context.Context, tx *sql.Tx) error{
	"a write": func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 1")
		return err
	},
	"a write with an argument": func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = ?", 1)
		return err
	},
	"a read": func(ctx context.Context, tx *sql.Tx) error { _, err := stock.Read(ctx, tx, 1); return err },
	"a locking read": func(ctx context.Context, tx *sql.Tx) error {
		return tx.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1 FOR UPDATE").Scan(new(int))
	},
	"a statement that was prepared": func(ctx context.Context, tx *sql.Tx) error {
		stmt, err := tx.Prepare("UPDATE p SET stock = ? WHERE id = 1")
		if err != nil {
			return err
		}
		defer stmt.Close()
		_, err = stmt.ExecContext(ctx, 0)
		return err
	},
}

// TestATransactionThatBeganWithoutTheLockNeverGetsIt: a statement with the lock context is refused in it, whatever the
// lock context holds elsewhere. Nothing of it is sent, and the transaction goes on.
func TestATransactionThatBeganWithoutTheLockNeverGetsIt(t *testing.T) {
	around := map[string]func(ctx context.Context, db *sql.DB, option lockctx.Option, does func(context.Context)) error{
		"a lock that is not held": func(ctx context.Context, _ *sql.DB, option lockctx.Option, does func(context.Context)) error {
			does(lockctx.With(ctx, "k", option))
			return nil
		},
		"a lock that is held since a read": func(ctx context.Context, db *sql.DB, option lockctx.Option, does func(context.Context)) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			ctx = lockctx.With(ctx, "k", option)
			_, err := stock.Read(ctx, db, 1)
			does(ctx)
			return err
		},
		"a lock that another transaction holds": func(ctx context.Context, db *sql.DB, option lockctx.Option, does func(context.Context)) error {
			ctx = lockctx.With(ctx, "k", option)
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			does(ctx)
			return tx.Commit()
		},
		"a lock of Do": func(ctx context.Context, db *sql.DB, option lockctx.Option, does func(context.Context)) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { does(ctx); return nil }, option)
		},
		"another lock in Do": func(ctx context.Context, db *sql.DB, option lockctx.Option, does func(context.Context)) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { does(lockctx.With(ctx, "other", option)); return nil }, option)
		},
	}
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, most := range []int{0, 8} {
			db, tap := s.Tapped(mysqllock.Config{MaxConns: most})
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil })) // makes the lock table
			n := 0
			for kind, option := range everyStrategy {
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, option))
				for name, around := range around {
					for way, does := range inTx {
						if n++; !some(n, len(kind), 3) {
							continue
						}
						what := way + " under " + name + ", " + kind
						dbtest.OK(t, around(dbtest.Limited(t), db, option, func(ctx context.Context) {
							tx := dbtest.Begin(t, lockctx.Without(ctx), db)
							before := s.Stock(2)
							dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 1 WHERE id = 2")
							held, seen := s.Locked("other"), tap.Texts()
							stock.WantError(t, what, does(ctx, tx), mysqllock.ErrUnsafe, "the transaction began without the lock; begin it with the lock context, or put mysqllock.Do around it")
							for _, sent := range seen() {
								if sent != "[prepare] UPDATE p SET stock = ? WHERE id = 1" && sent != "DO 0" { // a lock that is held is kept alive
									t.Errorf("%s: %s was sent", what, sent)
								}
							}
							dbtest.OK(t, tx.Commit())
							s.WantStock(2, before+1)
							if s.Locked("other") != held {
								t.Errorf("%s: the lock was taken", what)
							}
						}))
						s.WantStock(1, 10)
					}
				}
			}
			dbtest.OK(t, db.Close())
		}
	})
}
