package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestIdleHoldNoticesThatItsConnectionIsLost: at once, not when a ping is due, after a third of lockTTL.
func TestIdleHoldNoticesThatItsConnectionIsLost(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=10m")
		h := stock.Acquire(t, db, "k")
		var id int
		dbtest.OK(t, db.QueryRowContext(h.Context(), "SELECT CONNECTION_ID()").Scan(&id))
		dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id))
		select {
		case <-h.Context().Done():
			cause := context.Cause(h.Context())
			var e *mysqllock.Error
			if !errors.Is(cause, mysqllock.ErrLost) || !errors.As(cause, &e) || e.Key != "k" || e.Held <= 0 || e.ConnectionID != uint64(id) {
				t.Errorf("the cause is %v", cause)
			}
		case <-time.After(time.Minute):
			t.Error("it does not notice")
		}
		dbtest.Want(t, h.Release(), mysqllock.ErrLost)
	})
}

func TestHoldOutlivesItsTTL(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		open := func(ttl time.Duration) *sql.DB { return s.open("lockTTL=" + ttl.String()) }
		outlive := func(ttl time.Duration) { time.Sleep(ttl * 5 / 4) }
		var cases dbtest.Together
		defer cases.Wait()
		cases.Run(t, "a hold", func(t *testing.T) {
			dbtest.AtItsPace(t, 2*time.Second, func(ttl time.Duration) error {
				db := open(ttl)
				return mysqllock.Do(dbtest.Limited(t), db, "hold", func(ctx context.Context) error {
					outlive(ttl)
					if err := context.Cause(ctx); err != nil {
						return err
					}
					s.wantLocked("hold", true)
					return exec(ctx, db, "UPDATE p SET stock = 9 WHERE id = 1")
				})
			})
			s.wantStock(1, 9)
		})
		cases.Run(t, "a transaction on the application's own connection", func(t *testing.T) {
			dbtest.AtItsPace(t, 2*time.Second, func(ttl time.Duration) error {
				return stock.InTx(lockctx.With(dbtest.Limited(t), "tx"), open(ttl), func(tx *sql.Tx) error {
					outlive(ttl)
					_, err := tx.Exec("UPDATE p SET stock = 8 WHERE id = 2")
					return err
				})
			})
			s.wantStock(2, 8)
		})
	})
}

func TestCloseEndsEverything(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		ctx := lockctx.With(dbtest.Limited(t), "k")
		stock.MustRead(t, ctx, db, 1)
		h, leased := stock.Acquire(t, db, "h"), stock.Acquire(t, db, "leased", lockctx.Lease(time.Minute))
		dbtest.ExecIn(t, h.Context(), db, "UPDATE p SET stock = 1 WHERE id = 1")
		waits := make(chan error, 1)
		go func() {
			_, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
			waits <- err
		}()
		busy := make(chan error, 1)
		go func() {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "busy")
			if err == nil {
				_, err = db.ExecContext(h.Context(), "DO SLEEP(100)")
			}
			busy <- err
		}()
		dbtest.Soon(t, "a statement runs on a session", func() bool {
			var n int
			dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO = 'DO SLEEP(100)'", s.Name).Scan(&n))
			return n == 1
		})
		start := time.Now()
		dbtest.OK(t, db.Close())
		if took := time.Since(start); took > time.Minute {
			t.Errorf("Close took %v, as long as a statement on a session", took)
		}
		switch err := <-busy; { // its caller's context has not ended
		case !errors.Is(err, mysqllock.ErrLost), !errors.Is(err, mysqllock.ErrClosed), errors.Is(err, context.Canceled):
			t.Errorf("a statement that Close has ended: %v", err)
		}
		dbtest.Is(t, "a waiter of a closed handle", <-waits, mysqllock.ErrClosed)
		dbtest.Soon(t, "the holder of a lease is told", func() bool { return errors.Is(context.Cause(leased.Context()), mysqllock.ErrLost) })
		dbtest.Is(t, "what it is told", context.Cause(leased.Context()), mysqllock.ErrClosed)
		if err := h.Release(); err == nil {
			t.Error("a hold was committed after its handle was closed")
		}
		s.wantLocked("k", false)
		s.wantLocked("h", false)
		s.wantLeased("leased", false)
		s.wantStock(1, 10)
		dbtest.Is(t, "Acquire on a closed handle", dbtest.Err(mysqllock.Acquire(dbtest.Limited(t), db, "k")), mysqllock.ErrClosed)
		dbtest.Soon(t, "no connection is left", func() bool {
			var n int
			dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID()", s.Name).Scan(&n))
			return n == 0
		})
	})
}

// losses are ways in which the transaction of a hold is lost, and what Do is to say then.
func (s *scratch) losses() map[string]loss {
	for _, number := range []int{1213, 1020} {
		dbtest.Exec(s.T, s.plain, fmt.Sprintf("CREATE PROCEDURE IF NOT EXISTS fails_%d() SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = %[1]d, MESSAGE_TEXT = 'as the server says it'", number))
	}
	fails := func(number int) func(context.Context, execer) {
		return func(ctx context.Context, on execer) {
			if _, err := on.ExecContext(ctx, fmt.Sprintf("CALL fails_%d()", number)); err == nil {
				s.T.Errorf("no error %d", number)
			}
		}
	}
	return map[string]loss{
		"deadlock":        {fails(1213), mysqllock.ErrDeadlock},
		"changed":         {fails(1020), mysqllock.ErrConflict},
		"lost connection": {s.killOwn, mysqllock.ErrLost},
	}
}

type loss struct {
	meet func(ctx context.Context, on execer)
	want error
}

type execer interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// killOwn ends the connection on which statements with ctx run.
func (s *scratch) killOwn(ctx context.Context, on execer) {
	var id int
	dbtest.OK(s.T, on.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&id))
	dbtest.Exec(s.T, s.plain, fmt.Sprintf("KILL %d", id))
	if _, err := on.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1"); err == nil {
		s.T.Error("a write on a connection that was killed")
	}
}

// in are the ways in which the functions of these tests use a hold.
func (s *scratch) in(db *sql.DB) map[string]func(ctx context.Context, meet func(context.Context, execer)) {
	return map[string]func(context.Context, func(context.Context, execer)){
		"single statements": func(ctx context.Context, meet func(context.Context, execer)) { meet(ctx, db) },
		"a transaction": func(ctx context.Context, meet func(context.Context, execer)) {
			tx := dbtest.Begin(s.T, ctx, db)
			meet(ctx, tx)
			_ = tx.Rollback() // sql.ErrTxDone: it is what GORM returns
		},
		"a transaction that is left open": func(ctx context.Context, meet func(context.Context, execer)) {
			tx := dbtest.Begin(s.T, ctx, db)
			meet(ctx, tx)
		},
		"an inner Do": func(ctx context.Context, meet func(context.Context, execer)) {
			_ = mysqllock.Do(ctx, db, "inner", func(ctx context.Context) error { meet(ctx, db); return nil })
		},
	}
}

func TestDoTellsALossThatItsFunctionHides(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for what, loss := range s.losses() {
			for how, use := range s.in(db) {
				for kind, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
					if kind == "optimistic" && how == "an inner Do" {
						continue // its row lock goes with no version
					}
					for _, returned := range []error{nil, sql.ErrTxDone, context.Canceled} {
						name := fmt.Sprintf("%s in %s, %s, %v", what, how, kind, returned)
						err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
							use(ctx, loss.meet)
							var e *mysqllock.Error
							if cause := context.Cause(ctx); !errors.As(cause, &e) || !errors.Is(cause, loss.want) {
								t.Errorf("%s: the cause of the hold's context is %v", name, cause)
							} else if kind == "row" && !strings.Contains(e.Key, "k") {
								t.Errorf("%s: the cause has the key %q", name, e.Key)
							}
							return returned
						}, opt)
						if !errors.Is(err, loss.want) || returned != nil && !errors.Is(err, returned) {
							t.Errorf("%s: Do returned %v", name, err)
						}
					}
				}
			}
		}
		s.wantStock(1, 10)
	})
}

func TestInnerDoTellsALossThatItsFunctionHides(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for what, loss := range s.losses() {
			for how, use := range s.in(db) {
				for _, returned := range []error{nil, sql.ErrTxDone} {
					name := fmt.Sprintf("%s in %s, %v", what, how, returned)
					ctx := lockctx.With(dbtest.Limited(t), "k")
					tx := dbtest.Begin(t, ctx, db)
					err := mysqllock.Do(ctx, db, "j", func(ctx context.Context) error { use(ctx, loss.meet); return returned })
					if !errors.Is(err, loss.want) || returned != nil && !errors.Is(err, returned) {
						t.Errorf("%s: Do returned %v", name, err)
					}
					if err := tx.Commit(); err == nil {
						t.Errorf("%s: the transaction around it was committed", name)
					}
				}
			}
		}
	})
}

func TestRetryRunsAgainAfterADeadlockThatIsHidden(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		all := s.losses()
		delete(all, "lost connection")
		for what, loss := range all {
			for how, use := range s.in(db) {
				for _, returned := range []error{nil, sql.ErrTxDone} {
					runs := 0
					err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
						if runs++; runs < 3 {
							use(ctx, loss.meet)
							return returned
						}
						return exec(ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
					}, lockctx.Retry(3))
					if err != nil || runs != 3 {
						t.Errorf("%s in %s, %v: %d runs, %v", what, how, returned, runs, err)
					}
				}
			}
		}
		s.wantStock(1, 10-2*2*4)
	})
}

// TestDoTellsALostLease: its function returns what its statement said, or nothing of it.
func TestDoTellsALostLease(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		const ttl = 9 * time.Second // nobody finds out for a third of that
		db := s.open("lockTTL=" + ttl.String())
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "made", func(context.Context) error { return nil }, lockctx.Lease(ttl))) // makes the table
		lose := map[string]func(key string){
			"lease": s.steal,
			"advisory": func(key string) {
				dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", s.named(key)))
			},
		}
		var cases dbtest.Together
		defer cases.Wait()
		for kind, opt := range map[string]lockctx.Option{"lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory()} {
			for how, run := range map[string]func(context.Context, *sql.DB, string, func(context.Context) error) error{
				"one key": func(ctx context.Context, db *sql.DB, key string, f func(context.Context) error) error {
					return mysqllock.Do(ctx, db, key, f, opt)
				},
				"two keys": func(ctx context.Context, db *sql.DB, key string, f func(context.Context) error) error {
					return mysqllock.DoKeys(ctx, db, []string{key, key + "2"}, f, opt)
				},
				"inside another": func(ctx context.Context, db *sql.DB, key string, f func(context.Context) error) error {
					return mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return mysqllock.Do(ctx, db, key+"2", f) }, opt)
				},
				"joined": func(ctx context.Context, db *sql.DB, key string, f func(context.Context) error) error {
					return mysqllock.Do(ctx, db, key, func(ctx context.Context) error { return mysqllock.Do(ctx, db, key, f, opt) }, opt)
				},
			} {
				cases.Run(t, kind+", "+how, func(t *testing.T) {
					key := "k" + dbtest.Random()
					db := s.open("lockTTL=" + ttl.String()) // no other locks are on the connections that it loses
					err := run(dbtest.Limited(t), db, key, func(ctx context.Context) error {
						lose[kind](key)
						<-ctx.Done()
						var e *mysqllock.Error
						if cause := context.Cause(ctx); !errors.As(cause, &e) || e.Key != key && how != "two keys" || e.Key == "" || e.Strategy != kind || e.Held <= 0 || !errors.Is(e, mysqllock.ErrLost) {
							t.Errorf("the cause is %v", cause)
						}
						return ctx.Err()
					})
					var e *mysqllock.Error
					if !errors.Is(err, mysqllock.ErrLost) || !errors.Is(err, context.Canceled) || !errors.As(err, &e) || e.Key == "" {
						t.Errorf("Do returned %v", err)
					}
				})
			}
		}
	})
}

// TestTheEndOfTheCallersContextIsNoLoss: what a function returns then is all that Do says, and
// an observer is told of no loss.
func TestTheEndOfTheCallersContextIsNoLoss(t *testing.T) {
	const slow = "UPDATE p SET stock = stock + SLEEP(10) WHERE id = 1" // which its end has to end
	mine := errors.New("mine")
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		told := new(witness)
		db, _ := s.tapped(mysqllock.Config{Observer: told})
		for kind, opt := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
		} {
			write := func(ctx context.Context, text string) error { return exec(ctx, db, text) }
			for how, fn := range map[string]func(ctx context.Context, cancel func()) error{
				"between statements": func(ctx context.Context, cancel func()) error {
					dbtest.OK(t, write(ctx, takeOne))
					cancel()
					<-ctx.Done()
					return mine
				},
				"in a statement": func(ctx context.Context, cancel func()) error {
					time.AfterFunc(50*time.Millisecond, cancel)
					return write(ctx, slow)
				},
				"of one statement": func(ctx context.Context, _ func()) error {
					ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
					defer cancel()
					return write(ctx, slow)
				},
				"before the commit": func(ctx context.Context, cancel func()) error {
					dbtest.OK(t, write(ctx, takeOne))
					cancel()
					<-ctx.Done()
					return nil
				},
			} {
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				err := mysqllock.Do(ctx, db, kind, func(ctx context.Context) error { return fn(ctx, cancel) }, opt)
				cancel()
				want := map[string]error{"between statements": mine, "of one statement": context.DeadlineExceeded}[how]
				if want == nil {
					want = context.Canceled
				}
				committed := how == "before the commit" && (kind == "lease" || kind == "advisory")
				if committed && err != nil || !committed && !errors.Is(err, want) || errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("%s, %s: Do returned %v", kind, how, err)
				}
			}
		}
		dbtest.OK(t, db.Close())
		for _, e := range told.events {
			if e.Kind == mysqllock.Lost || e.Kind == mysqllock.Released && e.Err != nil {
				t.Errorf("an observer is told: %v %v", e.Kind, e.Err)
			}
		}
	})
}

// TestReleaseSaysThatTheKeyStaysTaken: a lease that the server does not let go is told to who
// releases it, or rolls it back; Do, whose function has done its work, does not fail for it. When
// the server lets it go, the key is free.
func TestReleaseSaysThatTheKeyStaysTaken(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, lease := s.open(), lockctx.Lease(time.Hour)
		for name, give := range map[string]func(ctx context.Context, key string, refuse func()) error{
			"Release": func(ctx context.Context, key string, refuse func()) error {
				h, err := mysqllock.Acquire(ctx, db, key, lease)
				dbtest.OK(t, err)
				refuse()
				return h.Release()
			},
			"Rollback": func(ctx context.Context, key string, refuse func()) error {
				h, err := mysqllock.Acquire(ctx, db, key, lease)
				dbtest.OK(t, err)
				refuse()
				return h.Rollback()
			},
			"Do": func(ctx context.Context, key string, refuse func()) error {
				return mysqllock.Do(ctx, db, key, func(context.Context) error { refuse(); return nil }, lease)
			},
		} {
			err := give(dbtest.Limited(t), name, func() {
				dbtest.Exec(t, s.plain, "CREATE TRIGGER refuses BEFORE UPDATE ON mysqllock FOR EACH ROW"+
					" SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1290, MESSAGE_TEXT = 'refused by the test'")
			})
			if !s.leased(name) {
				t.Fatalf("%s: nothing is shown, since the lease is given back", name)
			}
			if name == "Do" {
				dbtest.OK(t, err)
			} else {
				dbtest.Says(t, err, `release "`+name+`" (lease)`, "may stay taken for up to", "refused by the test")
			}
			dbtest.Exec(t, s.plain, "DROP TRIGGER refuses")
			dbtest.Soon(t, "the key is free", func() bool { return !s.leased(name) })
		}
	})
}

// TestAnErrorSaysThatItsHolderIsThisProcess where it is, and where it is the lock context that asks.
func TestAnErrorSaysThatItsHolderIsThisProcess(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		short := lockctx.Wait(300 * time.Millisecond)
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory()} {
			held := func(what string, who *sql.DB, ctx context.Context, want, same bool, opts ...lockctx.Option) {
				t.Helper()
				err := naming(func() error { return exec(lockctx.With(ctx, "k", append(opts, opt)...), who, stock.SetStock, 1) })
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Holder == nil {
					t.Errorf("%s, %s: %v", name, what, err)
					return
				}
				if e.Holder.ThisProcess != want || e.Holder.ThisContext != same ||
					strings.Contains(err.Error(), "held by this process") != want || strings.Contains(err.Error(), "this very lock context") != same {
					t.Errorf("%s, %s: %v", name, what, err)
				}
			}
			outer := dbtest.Limited(t)
			dbtest.OK(t, mysqllock.Do(outer, db, "k", func(context.Context) error {
				held("the context from before Do", db, outer, true, false, short)
				held("at once", db, outer, true, false, lockctx.NoWait())
				held("another handle", other, outer, false, false, short)
				return nil
			}, opt))

			ctx := lockctx.With(outer, "around", opt)
			h, err := mysqllock.Acquire(ctx, db, "k", opt)
			dbtest.OK(t, err)
			if name != "row" { // which joins
				held("the lock context around a hold", db, ctx, true, true, short)
				held("another lock context", db, outer, true, false, short)
			}
			dbtest.OK(t, h.Release())

			free, err := db.ExecContext(lockctx.With(outer, "k", opt, lockctx.NoWait()), stock.SetStock, 10)
			if err != nil {
				t.Errorf("%s: after the hold: %v, %v", name, free, err)
			}
			h, err = mysqllock.Acquire(outer, other, "k", opt)
			dbtest.OK(t, err)
			err = naming(func() error { return exec(lockctx.With(outer, "k", opt, short), db, stock.SetStock, 1) })
			if !errors.Is(err, mysqllock.ErrTimeout) || strings.Contains(err.Error(), "this process") {
				t.Errorf("%s, held by another handle after ours: %v", name, err)
			}
			dbtest.OK(t, h.Rollback())
		}
	})
}

// A hold that runs out inside a lock context leaves what is around it alone.
func TestInnerHoldThatRunsOutLeavesTheOuterAlone(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "b"), "DO 1") // the table is there
		dbtest.OK(t, err)
		outer := lockctx.With(dbtest.Limited(t), "a")
		short, cancel := context.WithTimeout(outer, 100*time.Millisecond)
		defer cancel()
		err = mysqllock.Do(short, db, "b", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() })
		if err == nil {
			t.Error("Do succeeded although its context had ended")
		}
		dbtest.Soon(t, "the inner lock is free", func() bool { return !s.locked("b") })
		dbtest.ExecIn(t, outer, db, "UPDATE p SET stock = 2 WHERE id = 1")
	})
}

// TestReleaseUnderAStatementSaysThatItsTransactionIsOpen still.
func TestReleaseUnderAStatementSaysThatItsTransactionIsOpen(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		h := stock.Acquire(t, db, "k")
		tx := dbtest.Begin(t, h.Context(), db)
		done, writes := make(chan error, 1), make(chan struct{})
		go func() {
			begins := sync.OnceFunc(func() { close(writes) })
			for {
				if _, err := tx.Exec("UPDATE p SET stock = 1 WHERE id = 1"); err != nil {
					done <- err
					return
				}
				begins()
			}
		}()
		<-writes
		if err := h.Release(); err == nil || !strings.Contains(err.Error(), "still open") {
			t.Errorf("Release with a transaction open: %v", err)
		}
		<-done
		tx.Rollback()
		s.wantStock(1, 10)
	})
}

// TestSlotEndsWithItsLease: nobody need release a slot whose lease has run out.
func TestSlotEndsWithItsLease(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=1m")
		one := []lockctx.Option{lockctx.Lease(time.Second), lockctx.Slots(1)}
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		_, err := mysqllock.Acquire(ctx, db, "lapses", one...)
		dbtest.OK(t, err)
		cancel()
		stock.Acquire(t, db, "is over", append(one, lockctx.MaxHold(time.Second))...)
		for _, key := range []string{"lapses", "is over"} {
			h := stock.Acquire(t, db, key, lockctx.Lease(ttl), lockctx.Slots(1))
			dbtest.OK(t, h.Release())
		}
	})
}

// TestVersionInsideALeaseIsRefused: a lease keeps others out, but not the transactions in
// its hold, so no version is compared under it.
func TestVersionInsideALeaseIsRefused(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())
		stock.MustRead(t, ctx, db, 1)
		v, _ := mysqllock.Version(ctx)
		h := stock.Acquire(t, db, "k", lockctx.Lease(ttl))
		defer h.Release()
		for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.IfVersion(v)} {
			_, err := db.ExecContext(lockctx.With(h.Context(), "k", opt), "UPDATE p SET stock = 1 WHERE id = 1")
			dbtest.Is(t, "a version inside a lease on the key", err, mysqllock.ErrUnsafe)
		}
		s.wantStock(1, 10)
	})
}
