package unit_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestDDLInAHoldRunsIfNoTransactionHasTheLock, and stops when the lock is lost.
func TestDDLInAHoldRunsIfNoTransactionHasTheLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		columns := func() int {
			return len(dbtest.Column[string](t, s.Plain, "SELECT column_name FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name = 'p'"))
		}
		had := columns()
		for name, opt := range grantHolds() {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				dbtest.ExecIn(t, ctx, db, "ALTER TABLE p ADD "+name+" INT, ALGORITHM=INPLACE")
				for _, text := range []string{"COMMIT", "BEGIN", "SET autocommit = 0", "LOCK TABLES p WRITE", "DROP TABLE p; BEGIN"} {
					_, err := db.ExecContext(ctx, text)
					stock.WantError(t, text, err, mysqllock.ErrUnsafe, "without a check of the lock")
					dbtest.Says(t, err, `exec "k" (`+name+`)`) // and not that of a handle's default
				}
				tx := dbtest.Begin(t, ctx, db)
				_, err := tx.ExecContext(ctx, "ALTER TABLE p DROP "+name)
				stock.WantError(t, "in a transaction", err, mysqllock.ErrUnsafe, "run DDL outside of them")
				dbtest.OK(t, tx.Rollback())
				dbtest.OK(t, mysqllock.Do(ctx, db, "row", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, "ALTER TABLE p DROP "+name)
					stock.WantError(t, "in a row lock", err, mysqllock.ErrUnsafe, "mysqllock.Do with lockctx.Lease")
					return nil
				}))
				return nil
			}, opt))
		}
		if n := columns(); n != had+2 {
			t.Errorf("the table has %d columns, not two more than %d", n, had)
		}
		err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			s.Steal("k")
			_, err := db.ExecContext(context.WithoutCancel(ctx), "ALTER TABLE p ADD late INT") // before anybody has noticed
			stock.WantLost(t, "under a lease that was stolen", err)
			return nil
		}, lockctx.Lease(stock.TTL))
		stock.WantLost(t, "Do", err)
		err = mysqllock.Do(dbtest.Limited(t), db, "other", func(ctx context.Context) error {
			inTheWay := dbtest.Begin(t, context.Background(), s.Plain)
			dbtest.Exec(t, inTheWay, "UPDATE p SET stock = stock WHERE id = 1")
			altered := make(chan error)
			go func() {
				_, err := db.ExecContext(ctx, "ALTER TABLE p ADD late INT")
				altered <- err
			}()
			altering := func() bool {
				return len(dbtest.Column[string](t, s.Plain, "SELECT id FROM information_schema.processlist WHERE info LIKE 'ALTER TABLE p ADD late%'")) > 0
			}
			dbtest.Soon(t, "it waits", altering)
			s.Steal("other")
			if err := <-altered; err == nil {
				t.Error("it went on")
			}
			dbtest.Soon(t, "it has stopped", func() bool { return !altering() })
			dbtest.OK(t, inTheWay.Rollback())
			_, err := db.ExecContext(context.WithoutCancel(ctx), "ALTER TABLE p ADD late INT")
			stock.WantLost(t, "afterwards", err)
			return nil
		}, lockctx.Lease(stock.TTL))
		stock.WantLost(t, "Do", err)
		dbtest.Equal(t, "the table has %d columns", columns(), had+2)
	})
}

// TestLockTableIsDropped: a row lock keeps the table, under other locks nothing is committed
// any more, and the next caller makes it anew.
func TestLockTableIsDropped(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(stock.TTL), "optimistic": lockctx.Optimistic()} {
			before, dropped := s.Stock(1), make(chan error, 1)
			waits := func() bool {
				return len(dbtest.Column[string](t, s.Plain, "SELECT id FROM information_schema.processlist WHERE info LIKE 'DROP TABLE%' AND state LIKE '%metadata lock'")) > 0
			}
			err := mysqllock.Do(dbtest.Limited(t), db, name, func(ctx context.Context) error {
				stock.MustRead(t, ctx, db, 1)
				go func() {
					_, err := s.Plain.Exec("DROP TABLE mysqllock")
					dropped <- err
				}()
				if name == "row" {
					dbtest.Soon(t, "DROP waits", waits)
				} else {
					dbtest.OK(t, <-dropped)
					dropped <- nil
				}
				_, err := db.ExecContext(ctx, stock.SetStock, before-1)
				return err
			}, opt)
			if name == "row" {
				dbtest.OK(t, err)
				s.WantStock(1, before-1)
			} else {
				stock.WantLost(t, name, err)
				s.WantStock(1, before)
			}
			dbtest.OK(t, <-dropped)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, name+", later", func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, stock.SetStock, 5)
				return err
			}, opt))
			s.WantStock(1, 5)
		}
	})
}

// TestAnEndedHoldRefusesWhatGoesOnWithItsContext, which was kept from ending.
func TestAnEndedHoldRefusesWhatGoesOnWithItsContext(t *testing.T) {
	withStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		opts := stock.KeptAs()[t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]]
		for _, rollback := range []bool{false, true} {
			h := stock.Acquire(t, db, "k", opts...)
			ctx := context.WithoutCancel(h.Context())
			n := stock.MustRead(t, ctx, db, 1)
			if rollback {
				dbtest.OK(t, h.Rollback())
			} else {
				dbtest.OK(t, h.Release())
			}
			const says = "its hold has ended"
			_, err := db.ExecContext(ctx, stock.SetStock, n-1)
			stock.WantError(t, "Exec", err, mysqllock.ErrLost, says)
			_, err = db.BeginTx(ctx, nil)
			stock.WantError(t, "BeginTx", err, mysqllock.ErrLost, says)
			err = mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }, opts...)
			stock.WantError(t, "Do", err, mysqllock.ErrLost, says)
		}
		s.WantStock(1, 10)

		// The context of Acquire has ended, and nobody has called Release.
		base, cancel := context.WithCancel(dbtest.Limited(t))
		h, err := mysqllock.Acquire(base, db, "k", opts...)
		dbtest.OK(t, err)
		ctx := context.WithoutCancel(h.Context())
		cancel()
		if name := t.Name(); !strings.HasSuffix(name, "lease") && !strings.HasSuffix(name, "advisory") { // these run out
			dbtest.Soon(t, "the hold has ended", func() bool {
				_, err := db.ExecContext(ctx, "DO 0")
				return errors.Is(err, mysqllock.ErrLost)
			})
		}
		_ = h.Rollback()
	})
}

// TestALockContextGoesOnAfterAHoldWithoutItsReads: the hold was taken in it, and what was read there decides nothing
// after it.
func TestALockContextGoesOnAfterAHoldWithoutItsReads(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
				ctx := lockctx.With(dbtest.Limited(t), "k", opt)
				var n int
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) (err error) {
					n, err = stock.Read(ctx, db, 1)
					return err
				}, opt))
				_, err := db.ExecContext(ctx, stock.SetStock, n-1)
				wantStale(t, "after the hold", err, "the end of a hold;")
				n = stock.MustRead(t, ctx, db, 1)
				dbtest.ExecIn(t, ctx, db, stock.SetStock, n-1)
				s.WantStock(1, 9)

				ctx = lockctx.With(dbtest.Limited(t), "k", opt)
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, stock.SetStock, 5) // reads nothing
					return err
				}, opt))
				dbtest.ExecIn(t, ctx, db, stock.SetStock, 6)
			})
		}
	})
}

// TestAHoldThatJoinsKeepsTheLockToItsEnd, that of the lock context around it.
func TestAHoldThatJoinsKeepsTheLockToItsEnd(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for name, opt := range map[string]lockctx.Option{"lease": lockctx.Lease(stock.TTL), "advisory": lockctx.Advisory()} {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
				excluded := func() {
					t.Helper()
					err := mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait())
					stock.WantError(t, "somebody else in the hold", err, mysqllock.ErrLocked, "")
				}
				const more = "UPDATE p SET stock = stock + 1 WHERE id = 2"
				units := map[string]func(ctx context.Context) error{
					"a statement": func(ctx context.Context) error {
						_, err := db.ExecContext(ctx, more)
						return err
					},
					"a transaction": func(ctx context.Context) error {
						tx := dbtest.Begin(t, ctx, db)
						dbtest.ExecIn(t, ctx, tx, more)
						return tx.Commit()
					},
					"a rollback": func(ctx context.Context) error {
						tx := dbtest.Begin(t, ctx, db)
						return tx.Rollback()
					},
				}
				for what, unit := range units {
					ctx := lockctx.With(dbtest.Limited(t), "k", opt)
					n := stock.MustRead(t, ctx, db, 1)
					err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
						for range 2 {
							if err := unit(ctx); err != nil {
								return err
							}
							excluded()
						}
						if ctx.Err() != nil {
							t.Errorf("%s: the hold's context has ended: %v", what, context.Cause(ctx))
						}
						return mysqllock.Do(ctx, db, "k", unit, opt) // joins, too
					}, opt)
					if err != nil {
						t.Errorf("%s: %v", what, err)
					}
					dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait()))
					_, err = db.ExecContext(ctx, stock.SetStock, n-1)
					stock.WantError(t, what, err, mysqllock.ErrStaleRead, "")
					n = stock.MustRead(t, ctx, db, 1)
					dbtest.ExecIn(t, ctx, db, stock.SetStock, n-1)
				}

				// What has changed nothing in the hold leaves the lock where it was.
				ctx := lockctx.With(dbtest.Limited(t), "k", opt)
				n := stock.MustRead(t, ctx, db, 1)
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := stock.Read(ctx, db, 2)
					return err
				}, opt))
				excluded()
				dbtest.ExecIn(t, ctx, db, stock.SetStock, n-1)
				s.WantStock(1, 6)
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait()))
			})
		}
	})
}

// TestAHoldThatJoinsKeepsTheLockPastTheEndOfItsContext, for as long as its function is at work, as any other hold does.
func TestAHoldThatJoinsKeepsTheLockPastTheEndOfItsContext(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for name, opt := range map[string]lockctx.Option{"lease": lockctx.Lease(stock.TTL), "advisory": lockctx.Advisory()} {
			taken := func() error {
				return mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait())
			}
			ends, cancel := context.WithCancel(dbtest.Limited(t))
			ctx := lockctx.With(ends, "k", opt)
			stock.MustRead(t, ctx, db, 1)
			err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				cancel()
				for began := time.Now(); time.Since(began) < 300*time.Millisecond; {
					dbtest.Is(t, name+": somebody else while the function is at work", taken(), mysqllock.ErrLocked)
				}
				return ctx.Err()
			}, opt)
			dbtest.Is(t, name, err, context.Canceled)
			dbtest.Soon(t, "it is free", func() bool { return taken() == nil })
		}
	})
}

// TestAHoldThatJoinsIsToldOfALossBesideALongStatement of its lock context.
func TestAHoldThatJoinsIsToldOfALossBesideALongStatement(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, opt := s.Handle(), lockctx.Lease(3*time.Second)
		ctx := lockctx.With(dbtest.Limited(t), "k", opt)
		stock.MustRead(t, ctx, db, 1)
		var long sync.WaitGroup
		defer long.Wait()
		err := mysqllock.Do(ctx, db, "k", func(inside context.Context) error {
			var over atomic.Bool
			long.Go(func() {
				_, _ = db.ExecContext(ctx, "SELECT SLEEP(12)")
				over.Store(true)
			})
			dbtest.Soon(t, "it runs", func() bool {
				return len(dbtest.Column[int](t, s.Plain, "SELECT 1 FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT SLEEP(12)%'")) > 0
			})
			s.Steal("k")
			<-inside.Done()
			if over.Load() {
				t.Error("it is told at the end of the statement")
			}
			return context.Cause(inside)
		}, opt)
		dbtest.Is(t, "Do", err, mysqllock.ErrLost)
	})
}

// TestAHoldThatEndsLeavesItsLockToATransactionThatHasBegun: the hold had joined the lock of the lock context, and a write
// has ended the unit of work before the transaction.
func TestAHoldThatEndsLeavesItsLockToATransactionThatHasBegun(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for name, opt := range map[string]lockctx.Option{"lease": lockctx.Lease(stock.TTL), "advisory": lockctx.Advisory()} {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
			ctx := lockctx.With(dbtest.Limited(t), "k", opt)
			stock.MustRead(t, ctx, db, 1)
			h, err := mysqllock.Acquire(ctx, db, "k", opt)
			dbtest.OK(t, err)
			dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = stock + 1 WHERE id = 2")
			tx := dbtest.Begin(t, ctx, db)
			n := stock.MustRead(t, ctx, tx, 1)
			dbtest.OK(t, h.Release())
			free := func() error {
				return mysqllock.Do(dbtest.Limited(t), other, "k", func(context.Context) error { return nil }, opt, lockctx.NoWait())
			}
			stock.WantError(t, name+": somebody else beside the transaction", free(), mysqllock.ErrLocked, "")
			dbtest.ExecIn(t, ctx, tx, stock.SetStock, n-1)
			dbtest.OK(t, tx.Commit())
			s.WantStock(1, 9)
			dbtest.OK(t, free())
		}
	})
}

// TestAKeyInAnotherContextsTransactionIsLockedOnlyThere: a statement of its own lock context has made it part of that
// transaction, which that lock context is told to use.
func TestAKeyInAnotherContextsTransactionIsLockedOnlyThere(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockWait=2m")
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(stock.TTL), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic()} {
			t.Run(name, func(t *testing.T) {
				a, b := lockctx.With(dbtest.Limited(t), "a", opt), lockctx.With(dbtest.Limited(t), "b", opt)
				tx := dbtest.Begin(t, a, db)
				for range 2 {
					dbtest.ExecIn(t, b, tx, stock.SetStock, 1)
				}
				began := time.Now()
				const says = "use that transaction"
				_, err := stock.Read(b, db, 2)
				stock.WantError(t, "a read", err, mysqllock.ErrUnsafe, says)
				_, err = db.ExecContext(b, stock.SetStock, 2)
				stock.WantError(t, "a write", err, mysqllock.ErrUnsafe, says)
				_, err = db.BeginTx(b, nil)
				stock.WantError(t, "a transaction", err, mysqllock.ErrUnsafe, says)
				if took := time.Since(began); took > time.Minute { // lockWait is longer
					t.Errorf("they waited: %v", took)
				}
				dbtest.OK(t, tx.Commit())
				dbtest.ExecIn(t, b, db, stock.SetStock, 3)
				s.WantStock(1, 3)
			})
		}
	})
}

// TestNobodyWritesInAnotherContextsTransactionUnderAVersion under which it has read: the other lock context would
// remember the version as it is by then.
func TestNobodyWritesInAnotherContextsTransactionUnderAVersion(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for name, opts := range stock.KeptAs() {
			for _, key := range []string{"k", "other"} {
				write := func(ctx context.Context) error {
					dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
					n := stock.MustRead(t, ctx, db, 1)
					dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k"), other, stock.SetStock, 5)
					tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), key, opts...), db)
					defer tx.Rollback()
					_, err := tx.ExecContext(ctx, stock.SetStock, n-1)
					says := "an optimistic version goes with no lock"
					if name == "optimistic" {
						says = "use that transaction"
					}
					stock.WantError(t, name+" on "+key, err, mysqllock.ErrUnsafe, says)
					dbtest.OK(t, tx.Commit())
					s.WantStock(1, 5)
					return nil
				}
				dbtest.OK(t, write(lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())))
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", write, lockctx.Optimistic()))
			}
		}
	})
}

// TestContextEndsTransactionAroundDo: database/sql rolls that back while the Do in it is still at
// work, which is told of the context, and of nothing that its program has done wrong.
func TestContextEndsTransactionAroundDo(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for name, opts := range stock.KeptAs() {
			ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "k", opts...))
			tx := dbtest.Begin(t, ctx, db)
			dbtest.ExecIn(t, ctx, tx, stock.SetStock, 1)
			err := mysqllock.Do(ctx, db, "inside", func(context.Context) error {
				cancel()
				_, err := s.Plain.ExecContext(dbtest.Limited(t), stock.SetStock, 2) // waits for the rollback
				return err
			}, opts...)
			if !errors.Is(err, context.Canceled) || errors.Is(err, mysqllock.ErrUnsafe) || errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s: got %v, want %v", name, err, context.Canceled)
			}
			s.WantStock(1, 2)
		}
	})
}

// wantEndOfHold wants ErrStaleRead that says that a hold has ended.
func wantEndOfHold(t *testing.T, what string, err error) {
	t.Helper()
	stock.WantError(t, what, err, mysqllock.ErrStaleRead, "given back by the end of a hold;")
}

// grantHolds are the holds that have no transaction, by their names.
func grantHolds() map[string]lockctx.Option {
	return map[string]lockctx.Option{"lease": lockctx.Lease(stock.TTL), "advisory": lockctx.Advisory()}
}

// inHolds runs a test with each of the holds that have no transaction,
// and in a lock context of each strategy around it, on the key k. with begins that one;
// keys are what the hold can be on.
func inHolds(t *testing.T, test func(t *testing.T, s *stock.Shop, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string)) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE TABLE orders (id INT PRIMARY KEY AUTO_INCREMENT, n INT NOT NULL DEFAULT 1) ENGINE=InnoDB")
		db := s.Handle()
		for name, opt := range grantHolds() {
			for around, opts := range stock.KeptAs() {
				t.Run(name+" in "+around, func(t *testing.T) {
					dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
					keys := []string{"k", "other"}
					if name == "lease" && around == "optimistic" {
						keys = keys[1:] // no version is compared in a lease on its key
					}
					test(t, s, db, func() (context.Context, func()) {
						ctx, cancel := context.WithCancel(dbtest.Limited(t))
						return lockctx.With(ctx, "k", opts...), cancel
					}, opt, keys)
				})
			}
		}
	})
}

// TestReadOutlivesALease: and an advisory lock. What was read in it does not decide on
// what is written after it.
func TestReadOutlivesALease(t *testing.T) {
	inHolds(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		reads := map[string]func(ctx context.Context) (int, error){
			"a query": func(ctx context.Context) (int, error) { return stock.Read(ctx, db, 1) },
			"a transaction": func(ctx context.Context) (int, error) {
				tx := dbtest.Begin(t, ctx, db)
				defer tx.Rollback()
				var n int
				return n, tx.QueryRow("SELECT stock FROM p WHERE id = 1").Scan(&n) // without the hint
			},
			"a sql.Conn": func(ctx context.Context) (int, error) {
				conn, err := db.Conn(ctx)
				dbtest.OK(t, err)
				defer conn.Close()
				return stock.Read(ctx, conn, 1)
			},
			"a prepared statement": func(ctx context.Context) (n int, err error) {
				stmt, err := db.PrepareContext(ctx, "SELECT stock FROM p WHERE id = ?")
				dbtest.OK(t, err)
				defer stmt.Close()
				return n, stmt.QueryRowContext(ctx, 1).Scan(&n)
			},
			"a locking read": func(ctx context.Context) (n int, err error) {
				return n, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1 FOR UPDATE").Scan(&n)
			},
			"a hold in the hold": func(ctx context.Context) (n int, err error) {
				return n, mysqllock.Do(ctx, db, "third", func(ctx context.Context) (err error) {
					n, err = stock.Read(ctx, db, 1)
					return err
				}, opt)
			},
		}
		for n, key := range keys {
			for what, does := range reads {
				for i, rollback := range []bool{false, true} {
					if !some(i+n, len(what), 2) {
						continue
					}
					ctx, cancel := with()
					h, err := mysqllock.Acquire(ctx, db, key, opt)
					dbtest.OK(t, err)
					_, err = does(h.Context())
					if err != nil {
						t.Fatalf("%s: %v", what, err)
					}
					if rollback {
						dbtest.OK(t, h.Rollback())
					} else {
						dbtest.OK(t, h.Release())
					}
					what := what + " under " + key
					_, err = db.ExecContext(ctx, stock.SetStock, 9)
					stock.WantError(t, what, err, mysqllock.ErrStaleRead, "given back by the ")
					tx := dbtest.Begin(t, ctx, db)
					_, err = tx.ExecContext(ctx, stock.SetStock, 9)
					stock.WantError(t, what+", in a transaction", err, mysqllock.ErrStaleRead, "given back by the ")
					dbtest.OK(t, tx.Rollback())
					err = mysqllock.Do(ctx, db, "next", func(ctx context.Context) error {
						_, err := db.ExecContext(ctx, stock.SetStock, 9)
						return err
					}, opt)
					stock.WantError(t, what+", in another hold", err, mysqllock.ErrStaleRead, "given back by the ")
					s.WantStock(1, 10)
					n := stock.MustRead(t, ctx, db, 1)
					if _, err = db.ExecContext(ctx, stock.SetStock, n-1); err != nil {
						t.Errorf("%s, after a new read: %v", what, err)
					}
					s.WantStock(1, 9)
					dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
					cancel()
				}
			}
		}
	})
}

// TestALockContextGoesOnAfterAHoldWithoutReads, and in it.
func TestALockContextGoesOnAfterAHoldWithoutReads(t *testing.T) {
	inHolds(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		const more = "UPDATE p SET stock = stock + 1 WHERE id = 1"
		for _, key := range keys {
			ctx, cancel := with()
			for range 2 {
				dbtest.OK(t, mysqllock.Do(ctx, db, key, func(context.Context) error { return nil }, opt))
				dbtest.OK(t, mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, more)
					return err
				}, opt))
				dbtest.ExecIn(t, ctx, db, more)
			}
			s.WantStock(1, 14)
			dbtest.OK(t, mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
				n := stock.MustRead(t, ctx, db, 1)
				_, err := db.ExecContext(ctx, stock.SetStock, n-4)
				return err
			}, opt))
			stock.MustRead(t, ctx, db, 2) // new
			dbtest.ExecIn(t, ctx, db, more)
			cancel()
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
		}
	})
}

// TestNothingGoesOnAfterAHoldWithoutALockContext. What the program does with other contexts is its own.
func TestNothingGoesOnAfterAHoldWithoutALockContext(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for _, opt := range grantHolds() {
			ctx := dbtest.Limited(t)
			dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				_, err := stock.Read(ctx, db, 1)
				return err
			}, opt))
			dbtest.ExecIn(t, ctx, db, stock.SetStock, 9)
			dbtest.ExecIn(t, lockctx.With(ctx, "k", opt), db, stock.SetStock, 8)
			dbtest.OK(t, mysqllock.Do(ctx, db, "outer", func(ctx context.Context) error {
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := stock.Read(ctx, db, 1)
					return err
				}, opt))
				_, err := db.ExecContext(lockctx.Without(ctx), stock.SetStock, 7)
				return err
			}, opt))
		}
	})
}

// TestAReadBeforeAHoldDoesNotStandForOneInIt: what the lock context has read itself does not keep what was read in a
// hold from being changed after it, unless the hold's lock became its own.
func TestAReadBeforeAHoldDoesNotStandForOneInIt(t *testing.T) {
	inHolds(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		ctx, cancel := with()
		defer cancel()
		stock.MustRead(t, ctx, db, 2)
		dbtest.OK(t, mysqllock.Do(ctx, db, "other", func(ctx context.Context) error {
			_, err := stock.Read(ctx, db, 1)
			return err
		}, opt, lockctx.AllowStale())) // in the transaction that has read, of a row lock
		taken := mysqllock.Do(dbtest.Limited(t), db, "other", func(context.Context) error { return nil }, opt, lockctx.NoWait())
		_, err := db.ExecContext(ctx, stock.SetStock, 9)
		if taken == nil {
			wantEndOfHold(t, "the lock of the hold is free", err)
			stock.MustRead(t, ctx, db, 1)
			_, err = db.ExecContext(ctx, stock.SetStock, 9)
		}
		dbtest.OK(t, err)
		s.WantStock(1, 9)
	})
}

// TestRowHoldInALeaseGivesItsRowBack: a hold with a row lock, in a lock context that has read under a
// lease, gives its row back at its end.
func TestRowHoldInALeaseGivesItsRowBack(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for name, opt := range grantHolds() {
			ctx := lockctx.With(dbtest.Limited(t), "k", opt)
			stock.MustRead(t, ctx, db, 2)
			dbtest.OK(t, mysqllock.Do(ctx, db, "other", func(ctx context.Context) error {
				_, err := stock.Read(ctx, db, 1)
				return err
			}, lockctx.Row()))
			_, err := db.ExecContext(ctx, stock.SetStock, 9)
			wantEndOfHold(t, name, err)
			stock.MustRead(t, ctx, db, 1)
			dbtest.ExecIn(t, ctx, db, stock.SetStock, 9)
		}
	})
}

// TestReadOutlivesALostHold: that was lost, and that nobody has released.
func TestReadOutlivesALostHold(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		h, err := mysqllock.Acquire(ctx, db, "k", lockctx.Lease(stock.TTL))
		dbtest.OK(t, err)
		stock.MustRead(t, h.Context(), db, 1)
		s.Steal("k")
		select {
		case <-h.Context().Done():
		case <-time.After(time.Minute):
			t.Fatal("the hold does not hear that its lease is lost")
		}
		dbtest.Soon(t, "the process knows that the lease is lost", func() bool {
			_, err := db.ExecContext(context.WithoutCancel(h.Context()), "DO 0")
			return errors.Is(err, mysqllock.ErrLost)
		})
		_, err = db.ExecContext(ctx, stock.SetStock, 9)
		wantEndOfHold(t, "before Release", err)
		s.WantStock(1, 10)
		dbtest.Is(t, "Release", h.Release(), mysqllock.ErrLost)
	})
}

// TestATransactionAfterAHoldDoesNotAskForItsLock, although a read in the hold has begun the lock context's unit of
// work.
func TestATransactionAfterAHoldDoesNotAskForItsLock(t *testing.T) {
	inHolds(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		for _, key := range keys {
			for _, conned := range []bool{false, true} {
				ctx, cancel := with()
				conn, err := db.Conn(ctx)
				dbtest.OK(t, err)
				var q interface {
					stock.Querier
					BeginTx(ctx context.Context, opts *sql.TxOptions) (*sql.Tx, error)
				} = db
				if conned {
					q = conn
				}
				dbtest.OK(t, mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := stock.Read(ctx, q, 2)
					return err
				}, opt))
				dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 20 WHERE id = 2")
				tx := dbtest.Begin(t, ctx, q)
				n := stock.MustRead(t, ctx, tx, 2)
				if n != 20 {
					t.Errorf("the transaction reads %d, as it was in the hold, want 20", n)
				}
				dbtest.ExecIn(t, ctx, tx, stock.SetStock, n-1)
				dbtest.OK(t, tx.Commit())
				s.WantStock(1, 19)
				dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
				dbtest.OK(t, conn.Close())
				cancel()
			}
		}
	})
}

// TestATransactionLeftOpenInAHoldIsNotCommitted: it was begun in it, and has written.
func TestATransactionLeftOpenInAHoldIsNotCommitted(t *testing.T) {
	inHolds(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() (context.Context, func()), opt lockctx.Option, keys []string) {
		for _, key := range keys {
			ctx, cancel := with()
			h, err := mysqllock.Acquire(ctx, db, key, opt)
			dbtest.OK(t, err)
			tx := dbtest.Begin(t, context.WithoutCancel(h.Context()), db)
			dbtest.Exec(t, tx, stock.SetStock, 9)
			dbtest.OK(t, h.Release())
			stock.WantError(t, "the commit", tx.Commit(), mysqllock.ErrLost, "its hold has ended")
			s.WantStock(1, 10)
			cancel()
		}
	})
}

// TestADoWhoseWorkWasRolledBackByAnotherEndSaysSo: transactions in it have ended in another order than the reverse, and
// the function has not looked at the error.
func TestADoWhoseWorkWasRolledBackByAnotherEndSaysSo(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		unmoved := errors.New("the function's own")
		rolledBack := map[string]func(ctx context.Context){
			"a transaction left open in an inner Do": func(ctx context.Context) {
				err := mysqllock.Do(ctx, db, "stock", func(ctx context.Context) error {
					_, err := db.BeginTx(ctx, nil)
					return cmp.Or(err, unmoved)
				})
				dbtest.Is(t, "the inner Do", err, unmoved)
			},
			"transactions side by side": func(ctx context.Context) {
				one, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				two, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				_, _ = one.Rollback(), two.Rollback()
			},
		}
		for name, end := range rolledBack {
			for _, around := range []context.Context{dbtest.Limited(t), lockctx.With(dbtest.Limited(t), "around")} {
				err := mysqllock.Do(around, db, "order", func(ctx context.Context) error {
					dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
					end(ctx)
					if _, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 2"); err == nil {
						t.Errorf("%s: a write after that", name)
					}
					return nil
				})
				dbtest.Is(t, name, err, mysqllock.ErrUnsafe)
				s.WantStock(1, 10)
				s.WantStock(2, 10)
			}
		}
	})
}

// TestInnerHoldsStopNobody: goroutines that share a hold, as under a leader's lease, take
// holds of their own in it, one after the other. The end of one which has read stops
// neither its own goroutine nor those that write beside it.
func TestInnerHoldsStopNobody(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for name, outer := range grantHolds() {
			for inner, opts := range stock.KeptAs() {
				if inner == "shared" {
					continue // does not keep the others out
				}
				t.Run(inner+" in "+name, func(t *testing.T) {
					if inner == "optimistic" {
						opts = append(opts, lockctx.Retry(100))
					}
					dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 0")
					const rounds = 5
					dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "job", func(ctx context.Context) error {
						g, ctx := errgroup.WithContext(ctx)
						for id := range 2 {
							g.Go(func() error {
								for range rounds {
									if err := mysqllock.Do(ctx, db, "product", func(ctx context.Context) error {
										n, err := stock.Read(ctx, db, 1)
										if err != nil {
											return err
										}
										_, err = db.ExecContext(ctx, stock.SetStock, n+1)
										return err
									}, opts...); err != nil {
										return err
									}
									if _, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = ?", 3+id); err != nil {
										return err
									}
								}
								return nil
							})
						}
						return g.Wait()
					}, outer))
					s.WantStock(1, 2*rounds)
					s.WantStock(3, rounds)
					s.WantStock(4, rounds)
				})
			}
		}
	})
}

// TestANewHandleGoesOnWhereHoldsHaveAllConnections: a transaction in a hold needs none.
func TestANewHandleGoesOnWhereHoldsHaveAllConnections(t *testing.T) {
	_, db, _ := openWith(t, mysqllock.Config{MaxConns: 6})
	const callers = 3 // three connections are kept
	var all, inside sync.WaitGroup
	inside.Add(callers)
	for i := range callers {
		all.Go(func() {
			err := mysqllock.Do(t.Context(), db, fmt.Sprint("k", i), func(ctx context.Context) error {
				inside.Done()
				inside.Wait()
				ctx, cancel := context.WithTimeout(ctx, time.Minute/2)
				defer cancel()
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				return tx.Commit()
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// TestNoSavepointBeginsOnceTheContextOfItsHoldHasEnded: a transaction of the lock context that has joined the hold's
// transaction begins no other one.
func TestNoSavepointBeginsOnceTheContextOfItsHoldHasEnded(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for range 20 {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			own, cancel := context.WithCancel(ctx)
			h, err := mysqllock.Acquire(own, db, "k")
			dbtest.OK(t, err)
			conn, err := db.Conn(ctx)
			dbtest.OK(t, err)
			tx := dbtest.Begin(t, ctx, conn)
			cancel() // the watch on it, and BeginTx, ask for the turn of the lock context
			_, err = conn.BeginTx(ctx, nil)
			dbtest.Is(t, "BeginTx", err, mysqllock.ErrLost)
			dbtest.OK(t, tx.Rollback())
			dbtest.OK(t, h.Rollback())
			dbtest.OK(t, conn.Close())
		}
	})
}

// TestAReadBesideAHoldDoesNotStandForOneInIt: the lock context reads itself while the hold is open.
func TestAReadBesideAHoldDoesNotStandForOneInIt(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for name, opt := range grantHolds() {
			ctx := lockctx.With(dbtest.Limited(t), "k", opt)
			dbtest.OK(t, mysqllock.Do(ctx, db, "other", func(in context.Context) error {
				stock.MustRead(t, in, db, 1)
				stock.MustRead(t, ctx, db, 2)
				return nil
			}, opt))
			_, err := db.ExecContext(ctx, stock.SetStock, 9)
			wantEndOfHold(t, name, err)
		}
	})
}
