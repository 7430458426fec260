package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// What fails is an answer of the server all the same: a unit of work whose statement
// has failed late is not silent.

func TestLateFailureIsNoSilence(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=5s")
		blocker, err := s.open().BeginTx(lockctx.With(context.Background(), "taken"), nil)
		dbtest.OK(t, err)
		t.Cleanup(func() { blocker.Rollback() })
		dbtest.Exec(t, blocker, "UPDATE p SET stock = 10 WHERE id = 4")
		failing := map[string]func(ctx context.Context) error{
			"a duplicate key": func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, "INSERT INTO p SELECT 1, SLEEP(5.1)")
				return err
			},
			"a read that fails": func(ctx context.Context) error {
				var n int
				return db.QueryRowContext(ctx, "SELECT SLEEP(5.1), (SELECT id FROM p)").Scan(&n, &n)
			},
			"rows that fail": func(ctx context.Context) error {
				rows, err := db.QueryContext(ctx, "SELECT id, IF(id = 2, SLEEP(5.1), 0), IF(id = 2, (SELECT p2.id FROM p p2 WHERE p2.id < 10 + SLEEP(0)), 0) FROM p")
				if err != nil {
					return err
				}
				defer rows.Close()
				for rows.Next() {
				}
				return rows.Err()
			},
			"a lock wait": func(ctx context.Context) error {
				if _, err := db.ExecContext(ctx, "SET SESSION innodb_lock_wait_timeout = 6"); err != nil {
					return nil
				}
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 4")
				return err
			},
			"a key that is not granted": func(ctx context.Context) error {
				_, err := db.ExecContext(lockctx.With(ctx, "taken", lockctx.Wait(5100*time.Millisecond)), "DO 1")
				return err
			},
			"a key that is not granted to a transaction": func(ctx context.Context) error {
				_, err := db.BeginTx(lockctx.With(ctx, "taken", lockctx.Wait(5100*time.Millisecond)), nil)
				return err
			},
		}
		var cases dbtest.Together
		defer cases.Wait()
		row := 100
		for name, fail := range failing {
			row++ // one of its own: none that has changed since its snapshot
			row := row
			cases.Run(t, name, func(t *testing.T) {
				key := "k " + name
				unit := func() error {
					return mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error {
						err := fail(ctx)
						if err == nil || errors.Is(err, mysqllock.ErrLost) {
							t.Errorf("it fails with %v", err)
						}
						_, err = db.ExecContext(ctx, "INSERT INTO p VALUES (?, 1)", row)
						return err
					})
				}
				err := unit()
				// Nor is it the silence if the server was too slow to refuse a key in time.
				for try := 1; try < 5 && errors.Is(err, mysqllock.ErrLost) && !strings.Contains(err.Error(), "silent"); try++ {
					err = unit()
				}
				if err != nil {
					t.Errorf("what comes after it: %v", err)
				}
				s.soonFree(key)
			})
		}
	})
}

// TestLateHintIsKeptAlive: MariaDB ends transactions that are idle, in which a lock
// was taken, so the driver pings them.
func TestLateHintIsKeptAlive(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=6s")
		var cases dbtest.Together
		defer cases.Wait()
		idle := func(what string, after func(tx *sql.Tx)) {
			cases.Run(t, what, func(t *testing.T) {
				var tx *sql.Tx
				for try := 1; ; try++ {
					var err error
					tx, err = db.BeginTx(context.Background(), nil)
					dbtest.OK(t, err)
					defer tx.Rollback()
					after(tx)
					if !isLost(tx) || try == 20 { // a server that was too slow to refuse a hint in time
						break
					}
				}
				time.Sleep(8 * time.Second)
				if _, err := tx.Exec("UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
					t.Errorf("after a pause of more than the TTL: %v", err)
				}
				if err := tx.Commit(); err != nil {
					t.Errorf("the commit after a pause of more than the TTL: %v", err)
				}
			})
		}
		idle("granted", func(tx *sql.Tx) {
			_, err := tx.ExecContext(lockctx.With(context.Background(), "k"), "DO 1")
			dbtest.OK(t, err)
		})
		blocker, err := s.open().BeginTx(lockctx.With(context.Background(), "taken"), nil)
		dbtest.OK(t, err)
		t.Cleanup(func() { blocker.Rollback() })
		refused := func(opts ...lockctx.Option) func(tx *sql.Tx) {
			return func(tx *sql.Tx) {
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				if _, err := tx.ExecContext(lockctx.With(ctx, "taken", opts...), "DO 1"); !errors.Is(err, mysqllock.ErrLocked) {
					t.Errorf("a key that somebody has: %v", err)
				}
				if s.MariaDB() && !isLost(tx) {
					var limit, global int
					dbtest.OK(t, tx.QueryRow("SELECT @@idle_transaction_timeout, @@GLOBAL.idle_transaction_timeout").Scan(&limit, &global))
					if limit != global {
						t.Errorf("a late hint that was refused leaves a limit of %d s, and it was %d before", limit, global)
					}
				}
			}
		}
		idle("refused", refused(lockctx.NoWait()))
		idle("not granted in time", refused(lockctx.Wait(50*time.Millisecond)))
		idle("refused, then granted", func(tx *sql.Tx) {
			refused(lockctx.NoWait())(tx)
			_, err := tx.ExecContext(lockctx.With(context.Background(), "free"), "DO 1")
			dbtest.OK(t, err)
		})
	})
}

// isLost reports that a transaction is.
func isLost(tx *sql.Tx) bool {
	_, err := tx.Exec("DO 1")
	return errors.Is(err, mysqllock.ErrLost)
}
