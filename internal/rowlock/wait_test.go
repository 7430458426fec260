package rowlock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// dawdler sends one of the statements for a lock only when its context has ended, or after
// a while if it has none that ends.
type dawdler struct {
	sqlmw.NullInterceptor
	mu   sync.Mutex
	left int // statements that are sent at once before that one
}

func (d *dawdler) pause(ctx context.Context) {
	l, ok := intercept.Of(ctx)
	if !ok || l.Step == intercept.Kill {
		return
	}
	d.mu.Lock()
	at := d.left == 0
	d.left--
	d.mu.Unlock()
	if !at {
		return
	}
	select {
	case <-ctx.Done():
	case <-time.After(200 * time.Millisecond):
	}
}

func (d *dawdler) ConnExecContext(ctx context.Context, c driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	d.pause(ctx)
	return c.ExecContext(ctx, text, args)
}

func (d *dawdler) ConnQueryContext(ctx context.Context, c driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	d.pause(ctx)
	rows, err := c.QueryContext(ctx, text, args)
	return ctx, rows, err
}

// TestAWaitIsToldToBeOverWhicheverStatementIsSlow: a caller waits for less time than that takes. The context that
// ends is not the caller's, and is no business of its.
func TestAWaitIsToldToBeOverWhicheverStatementIsSlow(t *testing.T) {
	const key = "k"
	acquire := func(opts ...lockctx.Option) func(context.Context, *sql.DB, lockctx.Option) error {
		return func(ctx context.Context, db *sql.DB, wait lockctx.Option) error {
			h, err := mysqllock.Acquire(ctx, db, key, append(opts, wait)...)
			if err == nil {
				err = h.Rollback()
			}
			return err
		}
	}
	begin := func(opts ...lockctx.Option) func(context.Context, *sql.DB, lockctx.Option) error {
		return func(ctx context.Context, db *sql.DB, wait lockctx.Option) error {
			tx, err := db.BeginTx(lockctx.With(ctx, key, append(opts, wait)...), nil)
			if err == nil {
				err = tx.Rollback()
			}
			return err
		}
	}
	join := func(ctx context.Context, db *sql.DB, wait lockctx.Option) error {
		ctx = lockctx.With(ctx, "first "+dbtest.Random())
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		_, err = tx.ExecContext(lockctx.With(ctx, key, wait), "UPDATE p SET stock = stock WHERE id = 1")
		return err
	}
	lease := lockctx.Lease(30 * time.Second)
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var all sync.WaitGroup // subtests would wait for each other
		for _, test := range []struct {
			name   string
			holder []lockctx.Option
			ask    func(context.Context, *sql.DB, lockctx.Option) error
		}{
			{"Acquire", nil, acquire()},
			{"BeginTx", nil, begin()},
			{"joining", nil, join},
			{"shared", nil, begin(lockctx.Shared())},
			{"behind a lease", []lockctx.Option{lease}, begin()},
			{"joining behind a lease", []lockctx.Option{lease}, join},
			{"lease", []lockctx.Option{lease}, acquire(lease)},
			{"lease behind a row lock", nil, begin(lease)},
			{"advisory", []lockctx.Option{lockctx.Advisory()}, begin(lockctx.Advisory())},
		} {
			own := "lockNamespace=" + dbtest.Random()
			held := stock.Acquire(t, s.Handle(own), key, test.holder...)
			defer held.Rollback()
			all.Go(func() {
				// A busy machine may have been too slow for so many statements: that is the end
				// only if it is so again and again.
				const tries = 20
				slow := 0
				for short := 0; short < tries; {
					d := &dawdler{left: slow}
					cfg, c, err := mysqllock.ParseDSN(s.DSN(own))
					if err != nil {
						t.Error(err)
						return
					}
					c.Base = intercept.With(d)
					db := s.OpenDB(mysqllock.NewConnector(cfg, c))
					err = test.ask(dbtest.Limited(t), db, lockctx.Wait(50*time.Millisecond))
					silent := errors.Is(err, mysqllock.ErrNoAnswer) // nothing was answered within the wait
					if !silent && !errors.Is(err, mysqllock.ErrTimeout) || errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("%s, statement %d: %v", test.name, slow, err)
					}
					if err := db.Close(); err != nil {
						t.Errorf("%s: %v", test.name, err)
					}
					d.mu.Lock()
					if short++; d.left < 0 && !silent {
						short = 0
						slow++
					} else if slow >= 5 && !silent {
						short = tries
					}
					d.mu.Unlock()
				}
				if slow < 5 {
					t.Errorf("%s: only %d statements were slow", test.name, slow)
				}
			})
		}
		all.Wait()
	})
}

// sleeper sends the first statement that waits in the server only when the session has been ended
// for its silence.
type sleeper struct {
	sqlmw.NullInterceptor
	slept atomic.Bool
}

func (s *sleeper) ConnQueryContext(ctx context.Context, c driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if l, ok := intercept.Of(ctx); ok && l.Step == intercept.Take && !strings.Contains(text, "NOWAIT") && !s.slept.Swap(true) {
		time.Sleep(2 * time.Second) // lockTTL is a second
	}
	rows, err := c.QueryContext(ctx, text, args)
	return ctx, rows, err
}

// TestACallerThatStandsStillBeforeItsWaitWaitsElsewhere, on another session: in the server, and for longer than its
// own may be silent.
func TestACallerThatStandsStillBeforeItsWaitWaitsElsewhere(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		holder := s.Handle()
		for _, params := range []string{"lockTTL=1s", "lockTTL=1s&maxConns=6"} {
			held := stock.Acquire(t, holder, "k")
			slow := new(sleeper)
			cfg, c, err := mysqllock.ParseDSN(s.DSN(params))
			dbtest.OK(t, err)
			c.Base = intercept.With(slow)
			db := s.OpenDB(mysqllock.NewConnector(cfg, c))
			got := make(chan error)
			go func() {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(time.Minute)), nil)
				if err == nil {
					err = tx.Rollback()
				}
				got <- err
			}()
			dbtest.Soon(t, "it stands still", slow.slept.Load)
			dbtest.Soon(t, "it waits on another connection", func() bool { return s.Waiters() == 1 })
			dbtest.OK(t, held.Release())
			dbtest.OK(t, <-got)
		}
	})
}

// TestATransactionOutlivesTheServersOwnIdleLimit: it is kept alive where the server ends idle ones sooner than the
// TTL.
func TestATransactionOutlivesTheServersOwnIdleLimit(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		if !s.MariaDB() {
			return // which has no such limit
		}
		var cases dbtest.Together
		defer cases.Wait()
		for i, limit := range []string{"idle_transaction_timeout=6", "idle_write_transaction_timeout=6"} {
			cases.Run(t, limit, func(t *testing.T) {
				db := s.Handle(limit)
				h := stock.Acquire(t, db, "held "+limit)
				dbtest.ExecIn(t, h.Context(), db, "UPDATE p SET stock = stock - 1 WHERE id = ?", 2*i+1)
				tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "begun "+limit), db)
				dbtest.Exec(t, tx, fmt.Sprintf("UPDATE p SET stock = stock - 1 WHERE id = %d", 2*i+2))
				time.Sleep(8500 * time.Millisecond)
				if err := h.Release(); err != nil {
					t.Errorf("a hold: %v", err)
				}
				if err := tx.Commit(); err != nil {
					t.Errorf("a transaction: %v", err)
				}
			})
		}
	})
}

// breaker breaks the connection of the first statement that waits, and notes what the others say.
type breaker struct {
	sqlmw.NullInterceptor
	after  time.Duration
	broken atomic.Bool
	said   chan string
}

func (b *breaker) ConnQueryContext(ctx context.Context, c driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if _, ok := server.ReadWaits(text); ok && b.broken.CompareAndSwap(false, true) {
		time.Sleep(b.after)
		return ctx, nil, driver.ErrBadConn
	} else if ok {
		select {
		case b.said <- text:
		default:
		}
	}
	rows, err := c.QueryContext(ctx, text, args)
	return ctx, rows, err
}

// TestAWaitGoesOnAfterALostConnection: a caller whose connection was lost before it waited has
// waited on: its statement says since when, and so does its error.
func TestAWaitGoesOnAfterALostConnection(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		held := stock.Acquire(t, s.Handle(), "k", lockctx.Slots(1))
		defer held.Rollback()
		dbtest.AtItsPace(t, 300*time.Millisecond, func(after time.Duration) error {
			b := &breaker{after: after, said: make(chan string, 1)}
			cfg, c, err := mysqllock.ParseDSN(s.DSN())
			dbtest.OK(t, err)
			c.Base = intercept.With(b)
			_, err = mysqllock.Acquire(t.Context(), s.OpenDB(mysqllock.NewConnector(cfg, c)), "k", lockctx.Slots(1), lockctx.Wait(3*after))
			if errors.Is(err, mysqllock.ErrNoAnswer) || len(b.said) == 0 {
				return fmt.Errorf("it has not waited on: %w", err)
			}
			var e *mysqllock.Error
			if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrTimeout) || e.Waited < 5*after/2 {
				t.Errorf("the error is %v", err)
			}
			if waited, ok := server.ReadWaits(<-b.said); !ok || waited < after {
				t.Errorf("after a connection that broke it has waited for %v", waited)
			}
			return nil
		})
	})
}
