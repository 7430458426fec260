package intercept_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// sell is the application's work under a lock, in a transaction. Its statements say that
// they are the application's.
func sell(ctx context.Context, db *sql.DB) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var stock int
	if err := tx.QueryRowContext(ctx, "SELECT stock FROM shop WHERE id = 1 /* app */").Scan(&stock); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "UPDATE shop SET stock = ? WHERE id = 1 /* app */", stock-1); err != nil {
		return err
	}
	return tx.Commit()
}

// buy is the same without a transaction of the application's.
func buy(ctx context.Context, db *sql.DB) error {
	_, err := db.ExecContext(ctx, "UPDATE shop SET stock = stock - 1 WHERE id = 1 /* app */")
	return err
}

// TestAnInterceptorTellsLockStatementsFromOthers: it sees the statements of a lock with the key,
// the strategy and the step, and none of the application's with any; the other way round, none that
// the driver adds looks like the application's.
func TestAnInterceptorTellsLockStatementsFromOthers(t *testing.T) {
	const take, fence, end = intercept.Take, intercept.Fence, intercept.End
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for strategy, c := range map[string]struct {
			option lockctx.Option
			steps  []intercept.Step
		}{
			"row":        {lockctx.Row(), []intercept.Step{take}},
			"lease":      {lockctx.Lease(20 * time.Second), []intercept.Step{take, fence}}, // which releases, too
			"advisory":   {lockctx.Advisory(), []intercept.Step{take, fence}},              // the same
			"optimistic": {lockctx.Optimistic(), []intercept.Step{take, fence}},
		} {
			seen := new(spy)
			db := s.open(mysqllock.Config{}, seen)
			for how, work := range map[string]func(context.Context, *sql.DB) error{"transaction": sell, "statement": buy} {
				seen.since()
				ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "a key", c.option))
				dbtest.OK(t, work(ctx, db))
				cancel() // gives back what lies outside of the transaction
				for _, step := range c.steps {
					dbtest.Soon(t, strategy+" "+string(step)+" of a "+how, func() bool { return seen.saw(strategy, step, "a key") })
				}
				if strategy == "row" && how == "transaction" {
					dbtest.Soon(t, "the commit", func() bool { return seen.saw("row", end, "a key") || seen.saw("", end) })
				}
				for _, sent := range seen.since() {
					if app := strings.Contains(sent.text, "/* app */"); app == sent.ours {
						if sent.ours || !slices.Contains([]string{"BEGIN", "COMMIT", "CLOSE"}, sent.text) {
							t.Errorf("%s, %s: %v", strategy, how, sent)
						}
					}
				}
			}
		}
	})
}

// TestStatementsThatComeByThemselvesAreToldApart, too: KILL and renewals.
func TestStatementsThatComeByThemselvesAreToldApart(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		seen := new(spy)
		db := s.open(mysqllock.Config{}, seen)
		hold, err := mysqllock.Acquire(dbtest.Limited(t), db, "leased", lockctx.Lease(6*time.Second))
		dbtest.OK(t, err)
		dbtest.Soon(t, "the lease is renewed", func() bool { return seen.saw("lease", intercept.Renew, "leased") })
		dbtest.OK(t, hold.Release())

		held, err := mysqllock.Acquire(dbtest.Limited(t), db, "row")
		dbtest.OK(t, err)
		defer held.Release()
		other := s.open(mysqllock.Config{}, seen) // another process, as far as the lock can tell
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "row", lockctx.Wait(time.Minute)))
		over := make(chan error)
		go func() { over <- buy(ctx, other) }()
		dbtest.Soon(t, "it waits in the server", func() bool {
			stats, err := mysqllock.Stats(other)
			return err == nil && stats.Waiters == 1
		})
		dbtest.Soon(t, "the waiter's statement runs", func() bool {
			var n int
			err := db.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID()"+
				" AND INFO LIKE '%/* mysqllock ________________________ %'", s.Name).Scan(&n)
			return err == nil && n > 0
		})
		cancel()
		dbtest.Is(t, "the waiter", <-over, context.Canceled)
		// On a busy machine it is killed after its caller was told.
		dbtest.Soon(t, "it is taken off the server", func() bool { return seen.saw("row", intercept.Kill, "row") })
	})
}

func TestARowThatKeysShareIsCalledAStripe(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		seen := new(spy)
		db := s.open(mysqllock.Config{Stripes: 1}, seen)
		dbtest.OK(t, buy(lockctx.With(dbtest.Limited(t), "a key"), db))
		if !seen.saw("row", intercept.Take, "stripe 0") {
			t.Errorf("seen were%v", seen)
		}
	})
}

// TestAnInterceptorGetsAContextThatGoesOn at the end of a transaction, and of a prepared statement, with the values
// of the caller's.
func TestAnInterceptorGetsAContextThatGoesOn(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		seen := new(spy)
		db := s.open(mysqllock.Config{}, seen)
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		p, err := db.PrepareContext(ctx, "SELECT 1 /* app */")
		dbtest.OK(t, err)
		dbtest.Begin(t, ctx, db)
		cancel()
		dbtest.OK(t, p.Close())
		dbtest.Soon(t, "database/sql has rolled back", func() bool { return strings.Contains(seen.String(), "ROLLBACK") })
		for _, sent := range seen.since() {
			if sent.err != nil {
				t.Errorf("%v has a context that is over: %v", sent, sent.err)
			}
		}
	})
}

// TestNothingBeyondPackageDriverIsLost that go-sql-driver/mysql has.
func TestNothingBeyondPackageDriverIsLost(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open(mysqllock.Config{}, sqlmw.NullInterceptor{}, sqlmw.NullInterceptor{})
		c := dbtest.Conn(t, db)
		dbtest.OK(t, c.Raw(func(raw any) error {
			res, err := raw.(driver.ExecerContext).ExecContext(t.Context(), "UPDATE shop SET stock = 5", nil)
			if err != nil {
				return err
			}
			if all, ok := res.(mysql.Result); !ok || !slices.Equal(all.AllRowsAffected(), []int64{1}) {
				t.Errorf("the result is %T", res)
			}
			conn := raw.(driver.Conn)
			depth := 0
			for {
				u, ok := conn.(interface{ Unwrap() driver.Conn })
				if !ok {
					break
				}
				conn, depth = u.Unwrap(), depth+1
			}
			if depth != 3 { // the driver, and one for each interceptor
				t.Errorf("unwrapped %d times, down to %T", depth, conn)
			}
			return nil
		}))
	})
}

// closer is a connector that wants to be closed.
type closer struct {
	driver.Connector
	closed *atomic.Int32
}

func (c closer) Close() error {
	c.closed.Add(1)
	return errors.New("closed by the test")
}

// TestEachConnectorIsClosedOnce: those that Base has returned are closed with the handle, and With
// hands Close on.
func TestEachConnectorIsClosedOnce(t *testing.T) {
	var made, closed atomic.Int32
	wrap := func(k driver.Connector) (driver.Connector, error) {
		made.Add(1)
		return intercept.With(sqlmw.NullInterceptor{})(closer{k, &closed})
	}
	for how, open := range map[string]func() (driver.Connector, error){
		"NewConnector": func() (driver.Connector, error) {
			return mysqllock.NewConnector(mysql.NewConfig(), mysqllock.Config{Base: wrap})
		},
		"Wrap": func() (driver.Connector, error) {
			k, err := mysql.NewConnector(mysql.NewConfig())
			dbtest.OK(t, err)
			return mysqllock.Wrap(k, mysqllock.Config{Base: wrap})
		},
	} {
		made.Store(0)
		closed.Store(0)
		k, err := open()
		dbtest.OK(t, err)
		if err := k.(io.Closer).Close(); err == nil || !strings.Contains(err.Error(), "closed by the test") {
			t.Errorf("%s: Close returns %v", how, err)
		}
		if made.Load() == 0 || closed.Load() != made.Load() {
			t.Errorf("%s: %d connectors were made, Close was called %d times", how, made.Load(), closed.Load())
		}
	}
	plain, err := mysql.NewConnector(mysql.NewConfig())
	dbtest.OK(t, err)
	shown, err := intercept.With(sqlmw.NullInterceptor{})(plain)
	dbtest.OK(t, err)
	if _, ok := shown.(io.Closer); ok {
		t.Error("a connector claims a Close that its base has not")
	}
	if shown.Driver() != plain.Driver() {
		t.Errorf("the driver is %T", shown.Driver())
	}
}

// TestABadBaseIsAnErrorOfTheConnector: what Base says is wrong, or a connector that is nil.
func TestABadBaseIsAnErrorOfTheConnector(t *testing.T) {
	wrong := errors.New("wrong")
	for _, base := range []func(driver.Connector) (driver.Connector, error){
		func(driver.Connector) (driver.Connector, error) { return nil, wrong },
		func(driver.Connector) (driver.Connector, error) { return nil, nil },
	} {
		_, err := mysqllock.NewConnector(mysql.NewConfig(), mysqllock.Config{Base: base})
		dbtest.Says(t, err, "Config.Base")
	}
}

// TestALockStatementThatBreaksIsNoLock: what an interceptor returns is what the server might have.
func TestALockStatementThatBreaksIsNoLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		f := new(fault)
		db := s.open(mysqllock.Config{}, f)
		dbtest.OK(t, buy(lockctx.With(dbtest.Limited(t), "a key", lockctx.Lease(20*time.Second)), db))
		f.step.Store(string(intercept.Fence))
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "a key", lockctx.Lease(20*time.Second)))
		defer cancel()
		err := buy(ctx, db)
		if err == nil || f.hits.Load() == 0 {
			t.Errorf("committed with %v after %d faults", err, f.hits.Load())
		}
		var stock int
		dbtest.OK(t, db.QueryRow("SELECT stock FROM shop /* app */").Scan(&stock))
		if stock != 9 {
			t.Errorf("the stock is %d, want 9", stock)
		}
	})
}

// fault fails the statements of one step.
type fault struct {
	sqlmw.NullInterceptor
	step atomic.Value
	hits atomic.Int32
}

func (f *fault) hit(ctx context.Context) error {
	if lock, _ := intercept.Of(ctx); string(lock.Step) == f.step.Load() {
		f.hits.Add(1)
		return &mysql.MySQLError{Number: 1105, Message: "failed by the test"}
	}
	return nil
}

func (f *fault) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if err := f.hit(ctx); err != nil {
		return ctx, nil, err
	}
	return f.NullInterceptor.ConnQueryContext(ctx, conn, text, args)
}

func (f *fault) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	if err := f.hit(ctx); err != nil {
		return nil, err
	}
	return f.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

// TestTheDriverDoesNotDependOnSqlmw: a program that does not import this package does not have it.
func TestTheDriverDoesNotDependOnSqlmw(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "..").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if strings.Contains(string(out), "sqlmw") || !strings.Contains(string(out), "github.com/mysqllock/mysqllock\n") {
		t.Errorf("the driver depends on\n%s", out)
	}
}
