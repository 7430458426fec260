package mysqllock_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestKilledAtCommit: FLUSH TABLES WITH READ LOCK, as of a backup, holds up the COMMIT of a
// statement that does more than that, and KILL QUERY ends it there: the server rolls the
// transaction back, and nobody is told that it has committed.
func TestKilledAtCommit(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) { // which stand still meanwhile
		db, tap := s.tapped(mysqllock.Config{})
		admin, err := s.plain.Conn(dbtest.Limited(t)) // for the lock that it keeps, in turns
		dbtest.OK(t, err)
		defer admin.Close()
		ask := func(text string) (n int) {
			t.Helper()
			dbtest.OK(t, s.plain.QueryRowContext(dbtest.Limited(t), text).Scan(&n))
			return n
		}
		const sell = "UPDATE p SET stock = stock - 1 WHERE id = 1"
		transaction := func(ctx context.Context, stop func()) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			dbtest.Exec(t, tx, sell)
			stop()
			return tx.Commit()
		}
		next := make(chan error, 1)
		for _, c := range []struct {
			what string
			with string // what the statement has in it
			run  func(stop func()) error
		}{
			{"advisory", "held", func(stop func()) error {
				return transaction(lockctx.With(dbtest.Limited(t), "k", lockctx.Advisory()), stop)
			}},
			{"advisory, Do", "held", func(stop func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return transaction(ctx, stop) }, lockctx.Advisory())
			}},
			{"lease, Do", "done2", func(stop func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return transaction(ctx, stop) }, lockctx.Lease(ttl))
			}},
			{"row, handed over", "pass1", func(stop func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					go func() {
						next <- mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil })
					}()
					dbtest.Soon(t, "somebody is in line", func() bool {
						stats, err := mysqllock.Stats(db)
						return err == nil && stats.Waiters > 0
					})
					_, err := db.ExecContext(ctx, sell)
					stop()
					return err
				})
			}},
		} {
			// Without a disturbance first, and until the statement is known that commits.
			for warm := 0; ; warm++ {
				seen := tap.Texts()
				dbtest.OK(t, c.run(func() {}))
				if c.what == "row, handed over" {
					dbtest.OK(t, <-next)
				}
				if texts := strings.Join(seen(), "\n"); strings.Contains(texts, "mysqllock_"+c.with) || s.MariaDB() && warm == 3 {
					break
				} else if warm == 50 {
					t.Fatalf("%s: %s", c.what, texts)
				}
				time.Sleep(10 * time.Millisecond)
			}
			stock := ask("SELECT stock FROM p WHERE id = 1")
			result := make(chan error, 1)
			go func() {
				result <- c.run(func() { dbtest.Exec(t, admin, "FLUSH TABLES WITH READ LOCK") })
			}()
			const held = " FROM information_schema.PROCESSLIST WHERE STATE LIKE 'Waiting for % lock' AND INFO LIKE '%COMMIT%' AND INFO NOT LIKE 'CREATE%' AND ID <> CONNECTION_ID()"
			dbtest.Soon(t, c.what+": COMMIT is held up", func() bool { return ask("SELECT COUNT(*)"+held) == 1 })
			id := ask("SELECT ID" + held)
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL QUERY %d", id))
			dbtest.Soon(t, c.what+": it is killed", func() bool { return ask("SELECT COUNT(*)"+held) == 0 })
			dbtest.Exec(t, admin, "UNLOCK TABLES")
			if err := <-result; err == nil || errors.Is(err, driver.ErrBadConn) {
				t.Errorf("%s: %v", c.what, err)
			}
			if c.what == "row, handed over" {
				dbtest.OK(t, <-next)
			}
			if n := ask("SELECT stock FROM p WHERE id = 1"); n != stock {
				t.Errorf("%s: the stock was %d and is %d", c.what, stock, n)
			}
		}
	})
}
