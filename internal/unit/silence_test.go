package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestOnlySessionsHaveALimitOnSilence: each locked transaction has a wait_timeout of lockTTL, whatever one before it has
// set and however that has ended; the connection of the application has its own.
func TestOnlySessionsHaveALimitOnSilence(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		plain := s.Open("mysql")
		dbtest.Exec(t, plain, "CREATE TABLE filler (id INT PRIMARY KEY)")
		waits := func(of dbtest.Queryer) int { return dbtest.Column[int](t, of, "SELECT @@SESSION.wait_timeout")[0] }
		row := func() context.Context { return lockctx.With(dbtest.Limited(t), "k") }
		begin := func(c *sql.Conn, ctx context.Context) *sql.Tx {
			tx := dbtest.Begin(t, ctx, c)
			dbtest.Equal(t, "the transaction has a wait_timeout of %d s", waits(tx), 20)
			return tx
		}
		write := func(tx *sql.Tx) { dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 1 WHERE id = 1") }
		for name, end := range map[string]func(c *sql.Conn){
			"commit":   func(c *sql.Conn) { tx := begin(c, row()); write(tx); dbtest.OK(t, tx.Commit()) },
			"rollback": func(c *sql.Conn) { tx := begin(c, row()); write(tx); dbtest.OK(t, tx.Rollback()) },
			"context": func(c *sql.Conn) {
				ctx, cancel := context.WithCancel(row())
				tx := begin(c, ctx)
				write(tx)
				cancel()
				dbtest.Soon(t, "the transaction ends", func() bool { return !s.Locked("k") })
			},
			"deadlock": func(c *sql.Conn) {
				other := dbtest.Begin(t, dbtest.Limited(t), plain)
				for i := range 50 { // the server ends the smaller transaction
					dbtest.Exec(t, other, "INSERT INTO filler VALUES (?)", i)
				}
				dbtest.Exec(t, other, "UPDATE p SET stock = stock + 1 WHERE id = 2")
				tx := begin(c, row())
				write(tx)
				done := make(chan error, 1)
				go func() {
					_, err := other.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
					done <- err
				}()
				_, err := tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 2")
				dbtest.Want(t, err, mysqllock.ErrDeadlock)
				_ = tx.Rollback()
				dbtest.OK(t, <-done)
				dbtest.OK(t, other.Rollback())
			},
			"wait_timeout set in it": func(c *sql.Conn) {
				tx := begin(c, row())
				dbtest.Exec(t, tx, "SET SESSION wait_timeout = 25")
				dbtest.OK(t, tx.Commit())
			},
			"not granted": func(c *sql.Conn) {
				h := stock.Acquire(t, s.Handle(), "k")
				for _, option := range []lockctx.Option{lockctx.NoWait(), lockctx.Wait(300 * time.Millisecond)} {
					_, err := c.BeginTx(lockctx.With(dbtest.Limited(t), "k", option), nil)
					if !errors.Is(err, mysqllock.ErrLocked) && !errors.Is(err, mysqllock.ErrNoAnswer) { // the server need not have answered within the wait
						t.Errorf("a key that somebody has: %v", err)
					}
				}
				dbtest.OK(t, h.Rollback())
			},
			"lease": func(c *sql.Conn) {
				dbtest.OK(t, begin(c, lockctx.With(lockctx.With(dbtest.Limited(t), "lease", lockctx.Lease(time.Minute)), "k")).Commit())
			},
			"lost lease": func(c *sql.Conn) {
				key := dbtest.Random()
				tx := begin(c, lockctx.With(lockctx.With(dbtest.Limited(t), key, lockctx.Lease(time.Minute)), "k"))
				write(tx)
				s.Steal(key)
				dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
			},
			"versioned row": func(c *sql.Conn) {
				ctx := lockctx.With(dbtest.Limited(t), "both", lockctx.Optimistic())
				dbtest.ExecIn(t, ctx, s.Handle(), "UPDATE p SET stock = stock + 1 WHERE id = 1")
				tx := begin(c, lockctx.With(dbtest.Limited(t), "both"))
				write(tx)
				dbtest.OK(t, tx.Commit())
			},
			"advisory lock": func(c *sql.Conn) {
				tx := begin(c, lockctx.With(lockctx.With(dbtest.Limited(t), "named", lockctx.Advisory()), "k"))
				write(tx)
				dbtest.OK(t, tx.Commit())
			},
		} {
			for params, want := range map[string]int{"lockWait=5s": 28800, "wait_timeout=77": 77} {
				if want != 77 && name != "commit" && name != "rollback" {
					continue
				}
				db := s.Handle("lockTTL=20s", params)
				db.SetMaxOpenConns(1)
				const id = "SELECT CONNECTION_ID()"
				before := dbtest.Column[int](t, db, id)[0]
				c := dbtest.Conn(t, db)
				end(c)
				dbtest.OK(t, c.Close())
				if dbtest.Column[int](t, db, id)[0] != before {
					t.Errorf("%s, %s: it is another connection", name, params)
				}
				if n := waits(db); n != want {
					t.Errorf("%s, %s: wait_timeout is %d s", name, params, n)
				}
				c = dbtest.Conn(t, db)
				dbtest.OK(t, begin(c, row()).Commit())
				dbtest.OK(t, c.Close())
			}
		}
	})
}

// TestIdleTransactionIsKeptAlive: a transaction that is idle for longer than lockTTL stays, in a
// process that lives.
func TestIdleTransactionIsKeptAlive(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.AtItsPace(t, 2*time.Second, func(ttl time.Duration) error {
			db := s.Handle("lockTTL=" + ttl.String())
			return stock.InTx(lockctx.With(dbtest.Limited(t), "k"), db, func(tx *sql.Tx) error {
				if _, err := tx.Exec("UPDATE p SET stock = 3 WHERE id = 1"); err != nil {
					return err
				}
				time.Sleep(ttl * 5 / 2)
				if !s.Locked("k") {
					return errors.New("the key is free")
				}
				return nil
			})
		})
		s.WantStock(1, 3)
	})
}
