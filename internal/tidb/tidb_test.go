// Package tidb tests the driver on TiDB, where "make engines" has built it.
package tidb

import (
	"bufio"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/engine"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// server is the one of all tests.
var server *tempserver.Proxy

func TestMain(m *testing.M) {
	dbtest.Jobs{"count": countJob, "hold": holdJob, "lease": leaseJob}.Run()
	if _, err := tempserver.Built(); err != nil || os.Getenv("MYSQLLOCK_TEST_SERVERS") == "0" {
		fmt.Println("nothing was tested on TiDB:", err)
		return
	}
	goleak.VerifyTestMain(onTiDB{m})
}

// onTiDB runs tests with a server, which is gone when goleak looks.
type onTiDB struct{ m *testing.M }

func (o onTiDB) Run() (code int) {
	var err error
	if server, err = tempserver.StartTiDB(context.Background()); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("these tests run on TiDB")
	code = o.m.Run()
	if err := server.Stop(); err != nil {
		fmt.Println(err)
		return 1
	}
	return code
}

// scratch is a database with a counter and its ledger, and without transactions of READ COMMITTED.
type scratch struct {
	t   *testing.T
	dsn string
}

func newScratch(t *testing.T) scratch {
	t.Parallel()
	s := scratch{t, tempserver.Database(t, server.DSN("")).FormatDSN()}
	db := dbtest.Open(t, "mysql", s.dsn)
	dbtest.Exec(t, db, "CREATE TABLE c (id INT PRIMARY KEY, n INT)")
	dbtest.Exec(t, db, "CREATE TABLE ledger (id BIGINT AUTO_INCREMENT PRIMARY KEY, n INT)")
	dbtest.Exec(t, db, "INSERT INTO c VALUES (1, 0), (2, 0)")
	return s
}

func (s scratch) with(params ...string) string {
	sep := "?"
	if strings.Contains(s.dsn, "?") {
		sep = "&"
	}
	return s.dsn + sep + strings.Join(params, "&")
}

func (s scratch) handle(params ...string) *sql.DB {
	s.t.Helper()
	return dbtest.Open(s.t, "mysqllock", s.with(append(params, "lockWait=30s")...))
}

type runner interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

const read = "SELECT n FROM c WHERE id = 1"

// count reads the counter and writes the next number, there and into the ledger.
func count(ctx context.Context, on runner) error {
	var n int
	if err := on.QueryRowContext(ctx, read).Scan(&n); err != nil {
		return err
	}
	return write(ctx, on, n+1)
}

func write(ctx context.Context, on runner, n int) error {
	_, err := on.ExecContext(ctx, "UPDATE c SET n = ? WHERE id = 1", n)
	if err == nil {
		_, err = on.ExecContext(ctx, "INSERT INTO ledger (n) VALUES (?)", n)
	}
	return err
}

// ways are the ways to count. What locks late sees nothing that is older than its lock.
func ways() map[string]engine.Way {
	all := engine.Ways(func(began, ctx context.Context, db dbtest.Beginner) error {
		var opts *sql.TxOptions
		if began != ctx {
			opts = &sql.TxOptions{Isolation: sql.LevelReadCommitted}
		}
		tx, err := db.BeginTx(began, opts)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := count(ctx, tx); err != nil {
			return err
		}
		return tx.Commit()
	})
	return all
}

// countJob counts in one process, in the way that its parent says.
func countJob(db *sql.DB, in *bufio.Scanner) {
	in.Scan()
	name := in.Text()
	way := ways()[name]
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for range engine.Callers(name) {
		all.Go(func() {
			for range engine.Times {
				if err := way(ctx, db); err != nil {
					fmt.Println(err)
					return
				}
			}
		})
	}
	all.Wait()
	fmt.Println("done")
}

// TestNothingIsLost has two processes count.
func TestNothingIsLost(t *testing.T) {
	for way := range ways() {
		t.Run(way, func(t *testing.T) {
			s := newScratch(t)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.handle(), "k", func(context.Context) error { return nil })) // a transaction does not see a table that is younger
			began := time.Now()
			children := []*dbtest.Child{dbtest.StartJob(t, "count", s.with("lockWait=30s")), dbtest.StartJob(t, "count", s.with("lockWait=30s", "maxConns=20"))}
			for _, c := range children {
				c.Tell(way)
			}
			for _, c := range children {
				if line := c.Line(); line != "done" {
					t.Error(line)
				}
			}
			db := dbtest.Open(t, "mysql", s.dsn)
			want := 2 * engine.Callers(way) * engine.Times
			n := dbtest.Column[int](t, db, read)[0]
			entries := dbtest.Column[int](t, db, "SELECT COUNT(*) FROM ledger")[0]
			different := dbtest.Column[int](t, db, "SELECT COUNT(DISTINCT n) FROM ledger")[0]
			if n != want || entries != want || different != want {
				t.Errorf("the counter is %d, with %d entries of which %d differ; want %d", n, entries, different, want)
			}
			t.Logf("%d in %v", want, time.Since(began).Round(time.Millisecond))
		})
	}
}

func TestWhatDoesNotHoldIsRefusedInWords(t *testing.T) {
	is := "TiDB " + dbtest.Column[string](t, dbtest.Open(t, "mysql", server.DSN("")), "SELECT VERSION()")[0]
	begin := func(o ...lockctx.Option) func(context.Context, *sql.DB) error {
		return func(ctx context.Context, db *sql.DB) error {
			return stock.InTx(lockctx.With(ctx, "k", o...), db, func(*sql.Tx) error { return nil })
		}
	}
	for what, c := range map[string]struct {
		params []string // of handles, each of which is told so; nil for one without
		ask    func(context.Context, *sql.DB) error
		is     error
		says   string
	}{
		"advisory": {nil, begin(lockctx.Advisory()), mysqllock.ErrUnsafe, "advisory locks need GET_LOCK, which does not work on " + is + "; use a row lock"},
		"shared":   {nil, begin(lockctx.Shared()), mysqllock.ErrUnsafe, "shared row locks need FOR SHARE, which does not work on " + is + "; leave out lockctx.Shared"},
		"REPEATABLE READ": {nil, func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(lockctx.With(ctx, "k"), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
			if err == nil {
				err = tx.Rollback()
			}
			return err
		}, mysqllock.ErrUnsafe, "on " + is + " a Repeatable Read transaction takes its snapshot when it begins, before it has the lock; say sql.LevelDefault or sql.LevelReadCommitted, with which it is READ COMMITTED"},
		"lease, optimistic": {
			optimists, begin(lockctx.Lease(engine.Lease)), mysqllock.ErrUnsafe,
			"tidb_txn_mode is not pessimistic, so that fences of leases exclude nobody before COMMIT; say tidb_txn_mode=pessimistic in the DSN",
		},
	} {
		t.Run(what, func(t *testing.T) {
			s := newScratch(t)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.handle(), "k", func(context.Context) error { return nil }))
			if c.params == nil {
				c.params = []string{"lockTTL=1m"}
			}
			for _, param := range c.params {
				err := c.ask(dbtest.Limited(t), s.handle(param))
				if !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("%s: got %v\nwant %s", param, err, c.says)
				}
			}
		})
	}
}

// optimists have transactions be optimistic: TiDB takes no word for that one, too.
var optimists = []string{"tidb_txn_mode=%27optimistic%27", "tidb_txn_mode=%27%27"}

// TestNoSettingHasALockExcludeNobody, not the optimistic mode, nor noop functions.
func TestNoSettingHasALockExcludeNobody(t *testing.T) {
	for _, mode := range optimists {
		for _, way := range []string{"row, BeginTx", "row, Do", "optimistic, BeginTx"} {
			t.Run(way+", "+mode, func(t *testing.T) {
				s := newScratch(t)
				params := []string{mode, "tidb_enable_noop_functions=1"}
				db := s.handle(params...)
				ctx := dbtest.Limited(t)
				var all sync.WaitGroup
				for range 4 {
					db := s.handle(params...) // no two are in one queue of a process
					all.Go(func() {
						for range 5 {
							if err := ways()[way](ctx, db); err != nil {
								t.Error(err)
							}
						}
					})
				}
				all.Wait()
				dbtest.Equal(t, "the counter is %d", dbtest.Column[int](t, db, read)[0], 20)
			})
		}
	}
}

// TestAWaitEndsAndLeavesNothingLocked; a request without a wait is refused at once.
func TestAWaitEndsAndLeavesNothingLocked(t *testing.T) {
	s := newScratch(t)
	holder, other := s.handle(), s.handle()
	begin := func(ctx context.Context, o ...lockctx.Option) (*sql.Tx, error) {
		return other.BeginTx(lockctx.With(ctx, "k", o...), nil)
	}
	tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), holder)
	_, err := begin(dbtest.Limited(t), lockctx.NoWait())
	dbtest.Want(t, err, mysqllock.ErrLocked)
	for name, wait := range map[string]time.Duration{"of less than a second": 300 * time.Millisecond, "of more": 1300 * time.Millisecond} {
		began := time.Now()
		_, err = begin(dbtest.Limited(t), lockctx.Wait(wait))
		dbtest.Want(t, err, mysqllock.ErrTimeout)
		if took := time.Since(began); took < wait || took > wait+time.Minute {
			t.Errorf("a wait %s took %v", name, took)
		}
	}
	ctx, cancel := context.WithCancel(dbtest.Limited(t))
	waits := make(chan error)
	go func() {
		_, err := begin(ctx)
		waits <- err
	}()
	dbtest.Soon(t, "it waits", func() bool {
		stats, err := mysqllock.Stats(other)
		return err == nil && stats.Waiters > 0
	})
	cancel() // it would wait for lockWait
	dbtest.Want(t, <-waits, context.Canceled)

	waiter := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "first"), other)
	dbtest.Exec(t, waiter, "UPDATE c SET n = 7 WHERE id = 2")
	_, err = waiter.ExecContext(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(300*time.Millisecond)), "UPDATE c SET n = 8 WHERE id = 2")
	dbtest.Want(t, err, mysqllock.ErrTimeout)
	dbtest.OK(t, waiter.Commit())
	dbtest.Equal(t, "a transaction that has waited in vain has committed %d", dbtest.Column[int](t, other, "SELECT n FROM c WHERE id = 2")[0], 7)

	dbtest.OK(t, tx.Commit())
	tx, err = begin(dbtest.Limited(t), lockctx.Wait(5*time.Second))
	dbtest.OK(t, err)
	dbtest.OK(t, tx.Commit())
}

// holdJob holds a key in the way that its parent says, and commits when it is told to.
func holdJob(db *sql.DB, in *bufio.Scanner) {
	in.Scan()
	ctx := lockctx.With(context.Background(), "k")
	work := func(ctx context.Context) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "UPDATE c SET n = n + 1 WHERE id = 1"); err != nil {
			return err
		}
		fmt.Println("held")
		in.Scan()
		return tx.Commit()
	}
	var err error
	if in.Text() == "Do" {
		err = mysqllock.Do(context.Background(), db, "k", work)
	} else {
		err = work(ctx)
	}
	fmt.Println(errors.Is(err, mysqllock.ErrLost), err)
}

// afterHolder has a process hold the lock in job, sends it the signal, and says how long take took
// after that. A holder that goes on is told that it has lost the lock.
func (s scratch) afterHolder(job, way string, signal syscall.Signal, take func(*sql.DB) error) (took time.Duration) {
	t := s.t
	t.Helper()
	child := dbtest.StartJob(t, job, s.with("lockTTL=2s"))
	child.Tell(way)
	if line := child.Line(); line != "held" {
		t.Fatal(line)
	}
	dbtest.OK(t, child.Signal(signal))
	db := s.handle("lockTTL=2s")
	began := time.Now()
	dbtest.OK(t, take(db))
	took = time.Since(began)
	if signal == syscall.SIGSTOP {
		dbtest.OK(t, child.Signal(syscall.SIGCONT))
		child.Tell("commit")
		if line := child.Line(); !strings.HasPrefix(line, "true ") {
			t.Errorf("the former holder is told %s", line)
		}
	}
	return took
}

// TestTheLockOfAHolderThatStopsIsFree, and the holder commits nothing. It is killed, or stands still for longer than
// lockTTL.
func TestTheLockOfAHolderThatStopsIsFree(t *testing.T) {
	for _, way := range []string{"BeginTx", "Do"} {
		for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			t.Run(fmt.Sprint(way, " ", signal), func(t *testing.T) {
				s := newScratch(t)
				took := s.afterHolder("hold", way, signal, func(db *sql.DB) error {
					return stock.InTx(lockctx.With(dbtest.Limited(t), "k"), db, func(tx *sql.Tx) error {
						_, err := tx.Exec("UPDATE c SET n = n + 10 WHERE id = 1")
						return err
					})
				})
				if took > time.Minute { // without a limit of its own TiDB ends no idle transaction
					t.Errorf("it was free after %v", took)
				}
				dbtest.Equal(t, "the counter is %d", dbtest.Column[int](t, s.handle(), read)[0], 10)
			})
		}
	}
}

func TestAHolderWhoseConnectionIsKilledCommitsNothing(t *testing.T) {
	for _, verb := range []string{"KILL QUERY ", "KILL "} {
		t.Run(verb, func(t *testing.T) {
			s := newScratch(t)
			db := s.handle()
			tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
			id := dbtest.Column[string](t, tx, "SELECT CONNECTION_ID()")[0]
			dbtest.Exec(t, tx, "UPDATE c SET n = 1 WHERE id = 1")
			failed := make(chan error)
			go func() {
				_, err := tx.Exec("SELECT SLEEP(20)")
				failed <- err
			}()
			plain := dbtest.Open(t, "mysql", s.dsn)
			dbtest.Soon(t, "it runs", func() bool {
				return dbtest.Column[int](t, plain, "SELECT COUNT(*) FROM information_schema.processlist WHERE ID = "+id+" AND INFO LIKE 'SELECT SLEEP%'")[0] == 1
			})
			dbtest.Exec(t, plain, verb+id)
			first := <-failed
			second := tx.Commit()
			n := dbtest.Column[int](t, plain, read)[0]
			if verb == "KILL " && !errors.Is(first, mysqllock.ErrLost) || (n == 1) != (second == nil) {
				t.Errorf("its statement: %v, its commit: %v, the counter is %d", first, second, n)
			}
			dbtest.OK(t, stock.InTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(5*time.Second)), db, func(*sql.Tx) error { return nil }))
		})
	}
}

// kills counts the statements that end others.
type kills struct {
	sqlmw.NullInterceptor
	sent atomic.Int32
}

func (k *kills) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	if lock, ok := intercept.Of(ctx); ok && lock.Step == intercept.Kill {
		k.sent.Add(1)
	}
	rows, err := conn.QueryContext(ctx, text, args)
	return ctx, rows, err
}

// TestNothingIsKilled: a statement that is given up goes on, also with maxConns: a KILL can end the
// server.
func TestNothingIsKilled(t *testing.T) {
	s := newScratch(t)
	cfg, err := mysql.ParseDSN(s.dsn)
	dbtest.OK(t, err)
	var k kills
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: 8, Base: intercept.With(&k)})
	dbtest.OK(t, err)
	db := sql.OpenDB(connector)
	ctx := dbtest.Limited(t)
	for _, lock := range []bool{false, true} {
		within, cancel := context.WithCancel(ctx)
		if lock {
			within = lockctx.With(within, "k")
		}
		tx := dbtest.Begin(t, within, db)
		plain := dbtest.Open(t, "mysql", s.dsn)
		over := dbtest.Go(func() error {
			_, err := tx.ExecContext(within, "DO SLEEP(2)")
			return err
		})
		dbtest.Soon(t, "it runs", func() bool {
			return dbtest.Column[int](t, plain, "SELECT COUNT(*) FROM information_schema.processlist WHERE INFO LIKE 'DO SLEEP%'")[0] > 0
		})
		cancel()
		dbtest.Want(t, <-over, context.Canceled)
	}
	dbtest.OK(t, db.Close())
	dbtest.Equal(t, "%d statements look for what to end", k.sent.Load(), 0)
}

// TestNothingAfterALateUniquenessCheckIsCommittedByItself: TiDB can be told to end a transaction at any statement
// that fails.
func TestNothingAfterALateUniquenessCheckIsCommittedByItself(t *testing.T) {
	s := newScratch(t)
	ctx := lockctx.With(dbtest.Limited(t), "k")
	tx := dbtest.Begin(t, ctx, s.handle("tidb_constraint_check_in_place_pessimistic=0"))
	dbtest.Exec(t, tx, "INSERT INTO c VALUES (1, 5)") // there is one
	_, err := tx.Exec("UPDATE c SET n = 6 WHERE id = 1")
	dbtest.Want(t, err, mysqllock.ErrLost)
	_, err = tx.Exec("UPDATE c SET n = 7 WHERE id = 2")
	dbtest.Want(t, err, mysqllock.ErrLost)
	dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
	dbtest.Equal(t, "a transaction that was ended has committed %d", dbtest.Column[int](t, dbtest.Open(t, "mysql", s.dsn), "SELECT n FROM c WHERE id = 2")[0], 0)
}
