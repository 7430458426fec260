// Package vitess tests the driver on Vitess with one shard, where "make engines" has built it.
package vitess

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/engine"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	is "github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// one has a keyspace of one shard, for all tests; sharded has one of two.
var one, sharded *tempserver.Proxy

func TestMain(m *testing.M) {
	dbtest.Jobs{"count": countJob, "hold": holdJob}.Run()
	if _, err := tempserver.VitessBuilt(); err != nil || os.Getenv("MYSQLLOCK_TEST_SERVERS") == "0" {
		fmt.Println("nothing was tested on Vitess:", err)
		return
	}
	goleak.VerifyTestMain(onVitess{m})
}

// onVitess runs tests with servers, which are gone when goleak looks.
type onVitess struct{ m *testing.M }

func (o onVitess) Run() (code int) {
	for at, several := range map[**tempserver.Proxy]bool{&one: false, &sharded: true} {
		p, err := tempserver.StartVitess(context.Background(), several)
		if err != nil {
			fmt.Println(err)
			return 1
		}
		defer func() {
			if err := p.Stop(); err != nil {
				fmt.Println(err)
				code = 1
			}
		}()
		*at = p
	}
	fmt.Println("these tests run on Vitess")
	return o.m.Run()
}

// scratch is a counter and its ledger, whose names and whose lock table's end in id: a further
// database would be a further shard.
type scratch struct {
	t  *testing.T
	id string
}

func newScratch(t *testing.T) scratch {
	t.Parallel()
	s := scratch{t, dbtest.Random()}
	db := s.plain()
	dbtest.Exec(t, db, "CREATE TABLE "+s.in("c")+" (id INT PRIMARY KEY, n INT)")
	dbtest.Exec(t, db, "CREATE TABLE "+s.in("ledger")+" (id BIGINT AUTO_INCREMENT PRIMARY KEY, n INT)")
	dbtest.Exec(t, db, "INSERT INTO "+s.in("c")+" VALUES (1, 0), (2, 0)")
	return s
}

func (s scratch) in(table string) string { return table + "_" + s.id }

func (s scratch) plain(params ...string) *sql.DB {
	s.t.Helper()
	return dbtest.Open(s.t, "mysql", one.DSN("shop")+"?"+strings.Join(params, "&"))
}

func (s scratch) dsn(params ...string) string {
	return one.DSN("shop") + "?lockTable=" + s.in("locks") + "&" + strings.Join(append(params, "lockWait=30s"), "&")
}

func (s scratch) handle(params ...string) *sql.DB {
	s.t.Helper()
	return dbtest.Open(s.t, "mysqllock", s.dsn(params...))
}

// tapped is a handle whose statements go through the tap.
func (s scratch) tapped(tap *dbtest.Tap) *sql.DB {
	s.t.Helper()
	return engine.Tapped(s.t, one.DSN("shop"), tap, mysqllock.Config{Table: s.in("locks")})
}

// counted has the counter and its ledger be of n.
func (s scratch) counted(n int) {
	s.t.Helper()
	db := s.plain()
	got := dbtest.Column[int](s.t, db, "SELECT n FROM "+s.in("c")+" WHERE id = 1")[0]
	all := dbtest.Column[int](s.t, db, "SELECT n FROM "+s.in("ledger"))
	different := make(map[int]bool)
	for _, entry := range all {
		different[entry] = true
	}
	if got != n || len(all) != n || len(different) != n {
		s.t.Errorf("the counter is %d, with %d entries of which %d differ; want %d", got, len(all), len(different), n)
	}
}

type runner interface {
	QueryRowContext(context.Context, string, ...any) *sql.Row
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

// count reads the counter and writes the next number, there and, after between, into the ledger.
func (s scratch) count(ctx context.Context, on runner, between func()) error {
	var n int
	if err := on.QueryRowContext(ctx, "SELECT n FROM "+s.in("c")+" WHERE id = 1").Scan(&n); err != nil {
		return err
	}
	if _, err := on.ExecContext(ctx, "UPDATE "+s.in("c")+" SET n = ? WHERE id = 1", n+1); err != nil {
		return err
	}
	between()
	insert := func() error {
		_, err := on.ExecContext(ctx, "INSERT INTO "+s.in("ledger")+" (n) VALUES (?)", n+1)
		return err
	}
	err := insert()
	if err != nil && insert() == nil {
		err = fmt.Errorf("what followed was done: %s", err.Error())
	}
	return err
}

// write writes the next number in a transaction.
func (s scratch) write(ctx context.Context, db dbtest.Beginner, n int) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err = tx.ExecContext(ctx, "UPDATE "+s.in("c")+" SET n = ? WHERE id = 1", n); err == nil {
		_, err = tx.ExecContext(ctx, "INSERT INTO "+s.in("ledger")+" (n) VALUES (?)", n)
	}
	if ended := tx.Commit(); err == nil || ended == nil {
		err = ended
	}
	return err
}

// inTx counts in a transaction that begins with began, and whose statements have the context ctx.
func (s scratch) inTx(began, ctx context.Context, db dbtest.Beginner, between func()) error {
	tx, err := db.BeginTx(began, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	err = s.count(ctx, tx, between)
	if ended := tx.Commit(); err == nil || ended == nil { // which an error must not pass
		err = ended
	}
	return err
}

// ways are the ways to count. In each, between runs in the middle of the transaction.
func (s scratch) ways(between func()) map[string]engine.Way {
	all := engine.Ways(func(began, ctx context.Context, db dbtest.Beginner) error { return s.inTx(began, ctx, db, between) })
	all["row, read, decide, write"] = func(ctx context.Context, db *sql.DB) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ctx = lockctx.With(ctx, "k")
		var n int
		if err := db.QueryRowContext(ctx, "SELECT n FROM "+s.in("c")+" WHERE id = 1").Scan(&n); err != nil {
			return err
		}
		between()
		return s.write(ctx, db, n+1)
	}
	all["row, Do without a transaction"] = func(ctx context.Context, db *sql.DB) error {
		return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return s.count(ctx, db, between) })
	}
	all["row, prepared"] = func(ctx context.Context, db *sql.DB) error {
		insert, err := db.PrepareContext(ctx, "INSERT INTO "+s.in("ledger")+" (n) VALUES (?)")
		if err != nil {
			return err
		}
		defer insert.Close()
		ctx = lockctx.With(ctx, "k")
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		var n int
		if err := tx.QueryRowContext(ctx, "SELECT n FROM "+s.in("c")+" WHERE id = 1").Scan(&n); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, "UPDATE "+s.in("c")+" SET n = ? WHERE id = 1", n+1); err != nil {
			return err
		}
		between()
		_, err = tx.StmtContext(ctx, insert).ExecContext(ctx, n+1)
		if ended := tx.Commit(); err == nil || ended == nil {
			err = ended
		}
		return err
	}
	return all
}

// add counts once.
func (s scratch) add() {
	dbtest.OK(s.t, s.ways(func() {})["row, BeginTx"](dbtest.Limited(s.t), s.handle()))
}

// countJob counts in one process, in the way and the scratch that its parent says.
func countJob(db *sql.DB, in *bufio.Scanner) {
	in.Scan()
	id, way, _ := strings.Cut(in.Text(), " ")
	count := scratch{id: id}.ways(func() {})[way]
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	var all sync.WaitGroup
	for range engine.Callers(way) {
		all.Go(func() {
			for range engine.Times {
				if err := count(ctx, db); err != nil {
					fmt.Println(err)
					return
				}
			}
		})
	}
	all.Wait()
	fmt.Println("done")
}

// holdJob counts in the way and the scratch that its parent says, and stops in the middle until it is
// told to go on.
func holdJob(db *sql.DB, in *bufio.Scanner) {
	in.Scan()
	id, way, _ := strings.Cut(in.Text(), " ")
	s := scratch{id: id}
	work := func(ctx context.Context) error {
		return s.inTx(ctx, ctx, db, func() {
			fmt.Println("held")
			in.Scan()
		})
	}
	var err error
	if strings.HasSuffix(way, "Do") {
		err = mysqllock.Do(context.Background(), db, "k", work, holding[way])
	} else {
		err = work(lockctx.With(context.Background(), "k", holding[way]))
	}
	fmt.Println(errors.Is(err, mysqllock.ErrLost), err)
}

// holding are ways to count while others wait for the lock.
var holding = map[string]lockctx.Option{
	"row, BeginTx":   lockctx.Row(),
	"row, Do":        lockctx.Row(),
	"lease, BeginTx": lockctx.Lease(2 * time.Second),
	"lease, Do":      lockctx.Lease(2 * time.Second),
}

// tabletLimit is the limit on the age of transactions that a session may ask of the tablet for, in
// milliseconds; without it the tablet's own is 30 seconds.
const tabletLimit = "transaction_timeout=1500"

// TestATransactionThatTheTabletEndsIsLost: none of it is committed, though what follows in it would be if it were
// sent, and its lock is free.
func TestATransactionThatTheTabletEndsIsLost(t *testing.T) {
	for way := range (scratch{}).ways(nil) {
		if way == engine.Mixed {
			continue
		}
		t.Run(way, func(t *testing.T) {
			s := newScratch(t)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.handle(), "k", func(context.Context) error { return nil }))
			plain, ran := s.plain(), 0
			err := s.ways(func() {
				if ran++; ran == 1 {
					dbtest.Soon(t, "the tablet ends the transaction", func() bool { return len(s.locked(plain)) == 0 })
				}
			})[way](dbtest.Limited(t), s.handle(tabletLimit))
			if !errors.Is(err, mysqllock.ErrLost) || ran != 1 {
				t.Errorf("after %d: %v", ran, err)
			}
			s.counted(0)
			s.add()
			s.counted(1)
		})
	}
}

// TestACommitIsToldThatTheTabletHasEndedItsTransaction, whatever it checks before.
func TestACommitIsToldThatTheTabletHasEndedItsTransaction(t *testing.T) {
	for name, option := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(engine.Lease), "optimistic": lockctx.Optimistic()} {
		t.Run(name, func(t *testing.T) {
			s := newScratch(t)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), s.handle(), "k", func(context.Context) error { return nil }, lockctx.Optimistic()))
			ctx := lockctx.With(dbtest.Limited(t), "k", option)
			tx := dbtest.Begin(t, ctx, s.handle(tabletLimit))
			dbtest.OK(t, s.count(ctx, tx, func() {}))
			dbtest.Soon(t, "the tablet ends the transaction", func() bool { return len(s.locked(s.plain())) == 0 })
			dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
			s.counted(0)
			s.add()
		})
	}
}

// TestStatementsAreRefusedOnceTheTabletHasEndedTheirTransaction, whatever has met its end.
func TestStatementsAreRefusedOnceTheTabletHasEndedTheirTransaction(t *testing.T) {
	for name, c := range map[string]struct {
		meet func(s scratch, ctx context.Context, tx *sql.Tx) error
	}{
		"a statement that runs at its end": {func(s scratch, ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "SELECT SLEEP(30)")
			return err
		}},
		"a wait for a further lock": {func(s scratch, ctx context.Context, tx *sql.Tx) error {
			hold, err := mysqllock.Acquire(dbtest.Limited(s.t), s.handle(), "other")
			dbtest.OK(s.t, err)
			defer hold.Release()
			dbtest.Soon(s.t, "the tablet ends the transaction", func() bool { return len(s.locked(s.plain())) == 1 })
			_, err = tx.ExecContext(lockctx.With(ctx, "other", lockctx.Wait(100*time.Millisecond)), "SELECT 1")
			return err
		}},
		"a savepoint": {func(s scratch, ctx context.Context, tx *sql.Tx) error {
			dbtest.Soon(s.t, "the tablet ends the transaction", func() bool { return len(s.locked(s.plain())) == 0 })
			_, err := tx.ExecContext(ctx, "SAVEPOINT a")
			return err
		}},
		"a query": {func(s scratch, ctx context.Context, tx *sql.Tx) error {
			dbtest.Soon(s.t, "the tablet ends the transaction", func() bool { return len(s.locked(s.plain())) == 0 })
			return tx.QueryRowContext(ctx, "SELECT n FROM "+s.in("c")).Scan(new(int))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScratch(t)
			ctx := lockctx.With(dbtest.Limited(t), "k")
			dbtest.OK(t, mysqllock.Do(ctx, s.handle(), "other", func(context.Context) error { return nil }))
			tx := dbtest.Begin(t, ctx, s.handle(tabletLimit))
			dbtest.ExecIn(t, ctx, tx, "UPDATE "+s.in("c")+" SET n = 5")
			dbtest.Want(t, c.meet(s, ctx, tx), mysqllock.ErrLost)
			for _, of := range []context.Context{ctx, context.Background()} {
				_, err := tx.ExecContext(of, "UPDATE "+s.in("c")+" SET n = 6")
				dbtest.Want(t, err, mysqllock.ErrLost)
			}
			dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
			s.counted(0)
		})
	}
}

// TestNothingRunsOverASQLConnOnceTheTabletHasEndedItsTransaction: nothing of the lock context does any more.
// Statements without it run on the connection of the sql.Conn, which the transaction never used.
func TestNothingRunsOverASQLConnOnceTheTabletHasEndedItsTransaction(t *testing.T) {
	s := newScratch(t)
	end, cancel := context.WithCancel(dbtest.Limited(t))
	defer cancel()
	ctx := lockctx.With(end, "k")
	c, err := s.handle(tabletLimit).Conn(ctx)
	dbtest.OK(t, err)
	defer c.Close()
	dbtest.OK(t, c.QueryRowContext(ctx, "SELECT n FROM "+s.in("c")).Scan(new(int)))
	plain := s.plain()
	dbtest.Soon(t, "the tablet ends the transaction", func() bool { return len(s.locked(plain)) == 0 })
	for range 2 {
		_, err := c.ExecContext(ctx, "UPDATE "+s.in("c")+" SET n = 6")
		dbtest.Want(t, err, mysqllock.ErrLost)
		dbtest.ExecIn(t, context.Background(), c, "UPDATE "+s.in("c")+" SET n = 5 WHERE id = 2")
	}
	s.counted(0)
	dbtest.Equal(t, "without the lock context %d is written", dbtest.Column[int](t, plain, "SELECT n FROM "+s.in("c")+" WHERE id = 2")[0], 5)
}

// locked are the connections that have locked something of the scratch's tables.
func (s scratch) locked(db *sql.DB) []string {
	return dbtest.Column[string](s.t, db, "SELECT DISTINCT THREAD_ID FROM performance_schema.data_locks WHERE OBJECT_NAME LIKE '%"+s.id+"'")
}

// TestNothingIsLost has two processes count.
func TestNothingIsLost(t *testing.T) {
	for way := range (scratch{}).ways(nil) {
		t.Run(way, func(t *testing.T) {
			s := newScratch(t)
			began := time.Now()
			children := []*dbtest.Child{dbtest.StartJob(t, "count", s.dsn()), dbtest.StartJob(t, "count", s.dsn("maxConns=20"))}
			for _, c := range children {
				c.Tell(s.id + " " + way)
			}
			for _, c := range children {
				if line := c.Line(); line != "done" {
					t.Error(line)
				}
			}
			want := 2 * engine.Callers(way) * engine.Times
			s.counted(want)
			t.Logf("%d in %v", want, time.Since(began).Round(time.Millisecond))
		})
	}
}

// TestTheLockOfAHolderThatStopsIsFree, and the holder commits nothing. It is killed, or stands still for longer than
// its TTL or the tablet's limit.
func TestTheLockOfAHolderThatStopsIsFree(t *testing.T) {
	for way := range holding {
		for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			t.Run(fmt.Sprint(way, " ", signal), func(t *testing.T) {
				s := newScratch(t)
				child := dbtest.StartJob(t, "hold", s.dsn(tabletLimit))
				child.Tell(s.id + " " + way)
				if line := child.Line(); line != "held" {
					t.Fatal(line)
				}
				dbtest.OK(t, child.Signal(signal))
				dbtest.OK(t, s.ways(func() {})[strings.ReplaceAll(way, "Do", "BeginTx")](dbtest.Limited(t), s.handle()))
				if signal == syscall.SIGSTOP {
					dbtest.OK(t, child.Signal(syscall.SIGCONT))
					child.Tell("commit")
					if line := child.Line(); !strings.HasPrefix(line, "true ") {
						t.Errorf("the former holder is told %s", line)
					}
				}
				s.counted(1)
			})
		}
	}
}

// TestAHolderOfAStolenLeaseCommitsNothing: the lease is released by force. Once the fence has found
// the lease, nobody gets it before the COMMIT.
func TestAHolderOfAStolenLeaseCommitsNothing(t *testing.T) {
	is.SetOneByOne(true) // so that there is a moment between the fence and COMMIT
	t.Cleanup(func() { is.SetOneByOne(false) })
	for name, c := range map[string]struct {
		at   func(text string) bool // when it is stolen
		lost bool                   // it can be
	}{
		"before the fence": {func(text string) bool { return strings.Contains(text, "FOR SHARE") }, true},
		"after the fence":  {func(text string) bool { return text == "COMMIT" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScratch(t)
			other := s.plain()
			var tap dbtest.Tap
			db := s.tapped(&tap)
			var stolen error
			var happened func() bool
			err := s.ways(func() {
				happened = tap.Strike(dbtest.Fault{At: c.at, Before: func() {
					tx := dbtest.Begin(t, context.Background(), other)
					defer tx.Rollback()
					row := "FROM " + s.in("locks") + " WHERE namespace = 'shop' AND name = 'k'"
					if stolen = tx.QueryRow("SELECT 1 " + row + " FOR UPDATE NOWAIT").Scan(new(int)); stolen == nil {
						dbtest.Exec(t, tx, "UPDATE "+s.in("locks")+" SET token = token + 1, owner = NULL WHERE namespace = 'shop' AND name = 'k'")
						stolen = tx.Commit()
					}
				}})
			})["lease, BeginTx"](dbtest.Limited(t), db)
			if !happened() || c.lost != errors.Is(err, mysqllock.ErrLost) || c.lost != (stolen == nil) || !c.lost && (err != nil || !is.Locked(stolen)) {
				t.Errorf("the commit: %v, the thief: %v", err, stolen)
			}
			s.counted(map[bool]int{true: 0, false: 1}[c.lost])
		})
	}
}

// TestLeaseIsRenewed: for longer than its TTL, also behind somebody who locks its row, and several at
// a time, which no other key hears of; then it is free.
func TestLeaseIsRenewed(t *testing.T) {
	s := newScratch(t)
	plain := s.plain()
	engine.LeasesAreRenewed(t, s.handle(), s.handle(), func() (unlock func()) {
		tx := dbtest.Begin(t, context.Background(), plain)
		dbtest.Exec(t, tx, "SELECT 1 FROM "+s.in("locks")+" WHERE namespace = 'shop' AND name = 'k1' FOR UPDATE")
		return func() { dbtest.OK(t, tx.Rollback()) }
	})
}

// TestALostAnswerToACommitLeavesNothing of what the COMMIT has granted or released.
func TestALostAnswerToACommitLeavesNothing(t *testing.T) {
	s := newScratch(t)
	var tap dbtest.Tap
	engine.LostAnswersLeaveNothing(t, &tap, s.tapped(&tap), s.handle())
}

// TestAWaitEndsAndLeavesNothingWaitingOrGranted, also one that is given up; a request without a
// wait is refused at once.
func TestAWaitEndsAndLeavesNothingWaitingOrGranted(t *testing.T) {
	for kind, option := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(engine.Lease), "row, slot": lockctx.Slots(1), "row, shared": lockctx.Shared()} {
		t.Run(kind, func(t *testing.T) {
			s := newScratch(t)
			holder, other := s.handle(), s.handle()
			begin := func(ctx context.Context, o lockctx.Option) (*sql.Tx, error) {
				return other.BeginTx(lockctx.With(ctx, "k", option, o), nil)
			}
			own := option
			if kind == "row, shared" {
				own = lockctx.Row()
			}
			tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k", own), holder)
			_, err := begin(dbtest.Limited(t), lockctx.NoWait())
			dbtest.Want(t, err, mysqllock.ErrLocked)
			for _, wait := range []time.Duration{300 * time.Millisecond, 1300 * time.Millisecond} {
				began := time.Now()
				_, err = begin(dbtest.Limited(t), lockctx.Wait(wait))
				dbtest.Want(t, err, mysqllock.ErrTimeout)
				if took := time.Since(began); took < wait {
					t.Errorf("a wait of %v took %v", wait, took)
				}
			}
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			waits := make(chan error, 4)
			for range cap(waits) {
				go func() {
					_, err := begin(ctx, lockctx.Wait(time.Minute))
					waits <- err
				}()
			}
			dbtest.Soon(t, "they wait", func() bool {
				stats, err := mysqllock.Stats(other)
				return err == nil && stats.Waiters == cap(waits)
			})
			cancel()
			for range cap(waits) {
				dbtest.Want(t, <-waits, context.Canceled)
			}
			dbtest.OK(t, tx.Commit())
			tx = dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k", own, lockctx.Wait(10*time.Second)), holder)
			dbtest.OK(t, tx.Commit())
		})
	}
}

// TestATransactionGoesOnAfterAWaitInVain for a further lock.
func TestATransactionGoesOnAfterAWaitInVain(t *testing.T) {
	s := newScratch(t)
	hold := stock.Acquire(t, s.handle(), "k")
	defer hold.Release()
	waiter := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "first"), s.handle())
	dbtest.Exec(t, waiter, "UPDATE "+s.in("c")+" SET n = 7 WHERE id = 2")
	for _, o := range []lockctx.Option{lockctx.NoWait(), lockctx.Wait(300 * time.Millisecond), lockctx.Wait(1300 * time.Millisecond)} {
		_, err := waiter.ExecContext(lockctx.With(dbtest.Limited(t), "k", o), "UPDATE "+s.in("c")+" SET n = 8 WHERE id = 2")
		dbtest.Want(t, err, mysqllock.ErrLocked)
	}
	dbtest.OK(t, waiter.Commit())
	dbtest.Equal(t, "a transaction that has waited in vain has committed %d", dbtest.Column[int](t, s.plain(), "SELECT n FROM "+s.in("c")+" WHERE id = 2")[0], 7)
}

// TestGoingBackToAnOlderSavepointIsRefused: it may be older than the lock, and nothing shows
// whether that frees the lock. Going back to a younger one keeps it.
func TestGoingBackToAnOlderSavepointIsRefused(t *testing.T) {
	s := newScratch(t)
	db := s.handle()
	ctx := lockctx.With(dbtest.Limited(t), "k")
	tx := dbtest.Begin(t, ctx, db)
	for _, text := range []string{"SAVEPOINT a", "UPDATE " + s.in("c") + " SET n = 7 WHERE id = 2", "ROLLBACK TO SAVEPOINT a"} {
		dbtest.ExecIn(t, ctx, tx, text)
	}
	_, err := mysqllock.Acquire(dbtest.Limited(t), s.handle(), "k", lockctx.NoWait())
	dbtest.Want(t, err, mysqllock.ErrLocked)
	dbtest.OK(t, tx.Commit())

	outer := lockctx.With(dbtest.Limited(t), "l", lockctx.Lease(engine.Lease))
	ctx = lockctx.With(outer, "k", lockctx.Row())
	second := dbtest.Begin(t, outer, db)
	defer second.Rollback()
	dbtest.Exec(t, second, "SAVEPOINT a")
	dbtest.ExecIn(t, ctx, second, "UPDATE "+s.in("c")+" SET n = 8 WHERE id = 2")
	_, err = second.ExecContext(ctx, "ROLLBACK TO SAVEPOINT a")
	dbtest.Want(t, err, mysqllock.ErrUnsafe)
	dbtest.OK(t, second.Commit())
	dbtest.Equal(t, "%d is committed", dbtest.Column[int](t, s.plain(), "SELECT n FROM "+s.in("c")+" WHERE id = 2")[0], 8)
}

// TestEachOfManyKeysHasOneHolderAtATime: each key has one holder at a time.
func TestEachOfManyKeysHasOneHolderAtATime(t *testing.T) {
	for way, opts := range engine.Exclusive {
		t.Run(way, func(t *testing.T) {
			s := newScratch(t)
			engine.ManyKeys(t, []*sql.DB{s.handle(), s.handle("maxConns=12")}, opts...)
		})
	}
}

func TestAsManyCallersHoldAsThereAreSlots(t *testing.T) {
	for kind, option := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(engine.Lease)} {
		t.Run(kind, func(t *testing.T) {
			s := newScratch(t)
			ctx := dbtest.Limited(t)
			const slots = 4
			holder, other := s.handle(), s.handle()
			var held []*mysqllock.Hold
			for i := range slots {
				h, err := mysqllock.Acquire(ctx, []*sql.DB{holder, other}[i%2], "k", option, lockctx.Slots(slots), lockctx.NoWait())
				dbtest.OK(t, err)
				held = append(held, h)
			}
			_, err := mysqllock.Acquire(ctx, s.handle(), "k", option, lockctx.Slots(slots), lockctx.NoWait())
			dbtest.Want(t, err, mysqllock.ErrLocked)
			for _, h := range held {
				dbtest.OK(t, h.Release())
			}
			h, err := mysqllock.Acquire(ctx, s.handle(), "k", option, lockctx.Slots(slots), lockctx.NoWait())
			dbtest.OK(t, err)
			dbtest.OK(t, h.Release())
		})
	}
}

func TestWhatDoesNotHoldIsRefusedInWords(t *testing.T) {
	s := newScratch(t)
	is := "Vitess " + dbtest.Column[string](t, s.plain(), "SELECT @@version")[0]
	begin := func(db *sql.DB, o ...lockctx.Option) error {
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", o...), nil)
		if err == nil {
			err = tx.Rollback()
		}
		return err
	}
	at := func(dsn string) *sql.DB { return dbtest.Open(t, "mysqllock", dsn) }
	for says, err := range map[string]error{
		"advisory locks need GET_LOCK, which does not work on " + is + "; use a row lock": begin(s.handle(), lockctx.Advisory()),
		"the server is " + is + ", which has 2 shards (shop/-80, shop/80- …);":            begin(at(sharded.DSN("shop"))),
		"which has 2 shards":                        begin(at(sharded.DSN("shop")), lockctx.Lease(engine.Lease)),
		"they commit one after the other":           begin(at(sharded.DSN("shop")), lockctx.Optimistic()),
		`whose database here is "shop@replica"`:     begin(at(one.DSN("shop@replica"))),
		`whose database here is "shop:0"; say only`: begin(at(one.DSN("shop:0"))),
	} {
		if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), says) {
			t.Errorf("got %v\nwant %s", err, says)
		}
	}
	dbtest.OK(t, begin(at(one.DSN("shop@primary")+"?lockTable="+s.in("locks"))))
}

// TestDoctorSaysWhichStrategiesHold, and who looks for holders is told that none is shown.
func TestDoctorSaysWhichStrategiesHold(t *testing.T) {
	s := newScratch(t)
	i, err := inspect.New(s.handle(), inspect.Options{})
	dbtest.OK(t, err)
	d, err := i.Doctor(dbtest.Limited(t))
	dbtest.OK(t, err)
	for _, v := range d.Verdicts {
		if want := v.Strategy != "advisory"; v.Safe != want {
			t.Errorf("%+v", v)
		}
	}
	_, err = i.Snapshot(dbtest.Limited(t), inspect.Filter{})
	dbtest.Says(t, err, "does not show who holds row locks")
}
