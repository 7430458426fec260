package lease_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/lockctx"
)

// wakeUp is the id of the connection that has the wake-up lock of the lease on key.
func wakeUp(s *stock.Shop, key string) (id sql.NullInt64) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT IS_USED_LOCK(?)", lockname.OfWakeUp(s.Name, key)).Scan(&id))
	return id
}

// takesLease is what the command begins with that takes a lease on a session, and givesLease that which commits what
// is under it.
const takesLease = "DO LAST_INSERT_ID(0)"

func givesLease(s *stock.Shop) string {
	if s.MariaDB() {
		return "SET STATEMENT max_statement_time"
	}
	return "SELECT /*+ MAX_EXECUTION_TIME"
}

// TestNothingIsLeftOfTheLeaseOfATransaction, nor of the wake-up lock, however the transaction ends. While it is open
// its lease is there for all to see, and its own session has the wake-up lock, but with options of the transaction.
func TestNothingIsLeftOfTheLeaseOfATransaction(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		lease := lockctx.Lease(time.Minute)
		for _, opts := range []*sql.TxOptions{nil, {Isolation: sql.LevelReadCommitted}, {ReadOnly: true}} {
			for name, end := range map[string]func(*sql.Tx, context.CancelFunc) error{
				"commit":   func(tx *sql.Tx, _ context.CancelFunc) error { return tx.Commit() },
				"rollback": func(tx *sql.Tx, _ context.CancelFunc) error { return tx.Rollback() },
				"cancel": func(tx *sql.Tx, cancel context.CancelFunc) error {
					cancel()
					dbtest.Soon(t, "it is rolled back", func() bool { return errors.Is(tx.Commit(), sql.ErrTxDone) })
					return nil
				},
				"text": func(tx *sql.Tx, _ context.CancelFunc) error {
					_, err := tx.Exec("UPDATE p SET stock = stock")
					return errors.Join(tx.Rollback(), onlyUnwritable(err, opts))
				},
			} {
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				tx, err := db.BeginTx(lockctx.With(ctx, "k", lease), opts)
				dbtest.OK(t, err)
				s.WantLeased("k", true)
				var id int64
				dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
				if has := wakeUp(s, "k"); !has.Valid || (has.Int64 == id) != (opts == nil) {
					t.Errorf("%s, %v: %v has the wake-up lock, the transaction is on %d", name, opts, has, id)
				}
				dbtest.Is(t, name+": another process", dbtest.Err(mysqllock.Acquire(dbtest.Limited(t), other, "k", lease, lockctx.NoWait())), mysqllock.ErrLocked)
				dbtest.OK(t, end(tx, cancel))
				dbtest.Soon(t, name+": it is given back", func() bool { return !s.Leased("k") && !wakeUp(s, "k").Valid })
				cancel()
			}
		}
	})
}

// onlyUnwritable is err unless the transaction is to be read-only.
func onlyUnwritable(err error, opts *sql.TxOptions) error {
	if opts != nil && opts.ReadOnly {
		return nil
	}
	return err
}

// TestALostAnswerUnderALeaseCommitsNothingTwice, be it the one to BeginTx or to Commit, and the lease is free long
// before it would expire.
func TestALostAnswerUnderALeaseCommitsNothingTwice(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{})
		lease := lockctx.Lease(10 * time.Minute)
		run := func(end func(*sql.Tx) error) error {
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lease), nil)
			if err != nil {
				return err
			}
			dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			return end(tx)
		}
		dbtest.OK(t, run((*sql.Tx).Commit))
		before := s.Token("k")

		arrive := tap.Stall(takesLease)
		over := dbtest.Go(func() error { return run((*sql.Tx).Commit) })
		dbtest.Soon(t, "it is granted", func() bool { return s.Token("k") == before+1 })
		tap.Break()
		dbtest.OK(t, <-over) // on another connection
		arrive()
		s.WantStock(1, 8)

		arrive = tap.Stall(givesLease(s))
		over = dbtest.Go(func() error { return run((*sql.Tx).Commit) })
		dbtest.Soon(t, "it is committed", func() bool { return s.Stock(1) == 7 })
		tap.Break()
		stock.WantLost(t, "Commit", <-over)
		arrive()
		dbtest.Soon(t, "it is free", func() bool { return !s.Leased("k") && !wakeUp(s, "k").Valid })
		dbtest.OK(t, run((*sql.Tx).Commit))
		s.WantStock(1, 6)

		arrive = tap.Delay(givesLease(s))
		over = dbtest.Go(func() error {
			return run(func(tx *sql.Tx) error {
				since := tap.Texts()
				go func() {
					dbtest.Soon(t, "it is sent", func() bool { return len(since()) > 0 })
					tap.Break()
				}()
				return tx.Commit()
			})
		})
		stock.WantLost(t, "Commit", <-over)
		dbtest.Soon(t, "it is free", func() bool { return !s.Leased("k") })
		dbtest.OK(t, run((*sql.Tx).Commit))
		arrive() // whatever comes of it: not a commit under a lease that another has had
		s.WantStock(1, 5)
	})
}

// TestALeaseCostsItsNumberOfStatements, on these paths, for a key whose row is there. The golden files of the matrix
// have the others.
func TestALeaseCostsItsNumberOfStatements(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		lease := lockctx.Lease(time.Minute)
		for name, c := range map[string]mysqllock.Config{"unbounded": {}, "bounded": {MaxConns: 8}} {
			db, tap := s.Tapped(c)
			hold := stock.Acquire(t, db, "hold", lease)
			with := func(keys []string, opts ...lockctx.Option) context.Context {
				return lockctx.WithKeys(dbtest.Limited(t), keys, append(opts, lease)...)
			}
			costs := func(what string, want int, ctx context.Context, opts *sql.TxOptions, end func(*sql.Tx) error) {
				t.Helper()
				run := func() error {
					tx, err := db.BeginTx(ctx, opts)
					if err != nil {
						return err
					}
					var n int
					dbtest.OK(t, tx.QueryRow("SELECT stock FROM p WHERE id = 1").Scan(&n))
					return end(tx)
				}
				for range 8 { // every slot's row is there
					dbtest.OK(t, run())
				}
				tap.Costs(t, name+": "+what, want, run)
			}
			commit, rollback, readOnly := (*sql.Tx).Commit, (*sql.Tx).Rollback, &sql.TxOptions{ReadOnly: true}
			one, none := []string{"k"}, context.Background()
			costs("no lock", 3, none, nil, commit)
			costs("the lease, a read, COMMIT with the release", 3, with(one), nil, commit)
			costs("with an isolation level", 5, with(one), &sql.TxOptions{Isolation: sql.LevelReadCommitted}, commit)
			costs("a read-only one releases after COMMIT", 5, with(one), readOnly, commit)
			costs("ROLLBACK, the release, and the wake-up lock", 5, with(one), nil, rollback)
			costs("a slot", 4, with(one, lockctx.Slots(5)), nil, commit)
			costs("in a hold: the read, and the fence with COMMIT", 2, hold.Context(), nil, commit)
			costs("a read-only one in a hold: no fence", 3, hold.Context(), readOnly, commit)
			costs("a row lock in a hold", 3, lockctx.With(hold.Context(), "row"), nil, commit)
			tap.Costs(t, name+": Exec in a hold: fence with COMMIT", 2, func() error {
				_, err := db.ExecContext(hold.Context(), "UPDATE p SET stock = stock + 1 WHERE id = 1")
				return err
			})
			tap.Costs(t, name+": query in a hold", 1, func() error {
				var n int
				return db.QueryRowContext(hold.Context(), "SELECT stock FROM p WHERE id = 1").Scan(&n)
			})
			dbtest.OK(t, hold.Release())
		}
	})
}
