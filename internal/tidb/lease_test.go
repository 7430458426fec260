package tidb

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/engine"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	is "github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// tapped is a handle whose statements go through the tap.
func (s scratch) tapped(tap *dbtest.Tap) *sql.DB {
	s.t.Helper()
	return engine.Tapped(s.t, s.dsn, tap, mysqllock.Config{})
}

// leaseJob holds a lease for two seconds or longer, as its parent says, and counts when it is
// told to.
func leaseJob(db *sql.DB, in *bufio.Scanner) {
	in.Scan()
	work := func(ctx context.Context) error {
		return stock.InTx(ctx, db, func(tx *sql.Tx) error {
			fmt.Println("held")
			in.Scan()
			return count(ctx, tx)
		})
	}
	var err error
	if in.Text() == "Do" {
		err = mysqllock.Do(context.Background(), db, "k", work, lockctx.Lease(2*time.Second))
	} else {
		err = work(lockctx.With(context.Background(), "k", lockctx.Lease(2*time.Second)))
	}
	fmt.Println(errors.Is(err, mysqllock.ErrLost), err)
}

// TestTheLeaseOfAHolderThatStopsIsFreeAfterItsTTL and not before, and the holder commits nothing. It is killed, or
// stands still for longer than that.
func TestTheLeaseOfAHolderThatStopsIsFreeAfterItsTTL(t *testing.T) {
	for _, way := range []string{"BeginTx", "Do"} {
		for _, signal := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
			t.Run(fmt.Sprint(way, " ", signal), func(t *testing.T) {
				s := newScratch(t)
				took := s.afterHolder("lease", way, signal, func(db *sql.DB) error {
					ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(engine.Lease))
					return stock.InTx(ctx, db, func(tx *sql.Tx) error { return count(ctx, tx) })
				})
				if took < time.Second || took > time.Minute {
					t.Errorf("it was free after %v", took)
				}
				s.counted(1)
			})
		}
	}
}

// counted has the counter and its ledger be of n.
func (s scratch) counted(n int) {
	s.t.Helper()
	db := dbtest.Open(s.t, "mysql", s.dsn)
	if got, entries := dbtest.Column[int](s.t, db, read)[0], dbtest.Column[int](s.t, db, "SELECT COUNT(*) FROM ledger")[0]; got != n || entries != n {
		s.t.Errorf("the counter is %d, with %d entries; want %d", got, entries, n)
	}
}

const steal = "UPDATE mysqllock SET token = token + 1, owner = NULL WHERE name = 'k'"

// TestAHolderOfAStolenLeaseCommitsNothing, whether it can know of it or not: the lease is
// released by force. Once the fence has found the lease, nobody gets it before the COMMIT.
func TestAHolderOfAStolenLeaseCommitsNothing(t *testing.T) {
	is.SetOneByOne(true) // so that there is a moment between the fence and COMMIT
	t.Cleanup(func() { is.SetOneByOne(false) })
	for name, c := range map[string]struct {
		at   func(text string) bool // when it is stolen
		lost bool                   // it can be
	}{
		"before the fence": {func(text string) bool { return strings.Contains(text, "FOR UPDATE WAIT") }, true},
		"after the fence":  {func(text string) bool { return text == "COMMIT" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScratch(t)
			other := dbtest.Open(t, "mysql", s.with("innodb_lock_wait_timeout=1"))
			var tap dbtest.Tap
			db := s.tapped(&tap)
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(engine.Lease))
			var stolen error
			var happened func() bool
			err := stock.InTx(ctx, db, func(tx *sql.Tx) error {
				happened = tap.Strike(dbtest.Fault{At: c.at, Before: func() {
					tx := dbtest.Begin(t, context.Background(), other)
					if _, stolen = tx.Exec(steal); stolen == nil {
						stolen = tx.Commit()
					}
					_ = tx.Rollback()
				}})
				return count(ctx, tx)
			})
			if !happened() || c.lost != errors.Is(err, mysqllock.ErrLost) || c.lost != (stolen == nil) || !c.lost && (err != nil || !is.Locked(stolen)) {
				t.Errorf("the commit: %v, the thief: %v", err, stolen)
			}
			if c.lost {
				s.counted(0)
			} else {
				s.counted(1)
			}
		})
	}
}

// TestLeaseIsRenewed: for longer than its TTL, also behind somebody who locks its row, and several
// at a time; then it is free.
func TestLeaseIsRenewed(t *testing.T) {
	s := newScratch(t)
	plain := dbtest.Open(t, "mysql", s.dsn)
	engine.LeasesAreRenewed(t, s.handle(), s.handle(), func() (unlock func()) {
		tx := dbtest.Begin(t, context.Background(), plain)
		dbtest.Exec(t, tx, "SELECT 1 FROM mysqllock WHERE name = 'k1' FOR UPDATE")
		return func() { dbtest.OK(t, tx.Rollback()) }
	})
}

// TestALeaseAndARowLockExcludeEachOther on one key.
func TestALeaseAndARowLockExcludeEachOther(t *testing.T) {
	s := newScratch(t)
	db, other := s.handle(), s.handle()
	ctx := dbtest.Limited(t)
	h, err := mysqllock.Acquire(ctx, db, "k", lockctx.Lease(engine.Lease))
	dbtest.OK(t, err)
	_, err = mysqllock.Acquire(ctx, other, "k", lockctx.NoWait())
	dbtest.Want(t, err, mysqllock.ErrLocked)
	dbtest.OK(t, h.Release())
	row, err := mysqllock.Acquire(ctx, other, "k", lockctx.NoWait())
	dbtest.OK(t, err)
	_, err = mysqllock.Acquire(ctx, db, "k", lockctx.Lease(engine.Lease), lockctx.NoWait())
	dbtest.Want(t, err, mysqllock.ErrLocked)
	began := time.Now()
	_, err = mysqllock.Acquire(ctx, db, "k", lockctx.Lease(engine.Lease), lockctx.Wait(700*time.Millisecond))
	dbtest.Want(t, err, mysqllock.ErrTimeout)
	if took := time.Since(began); took < 700*time.Millisecond || took > time.Minute {
		t.Errorf("the wait took %v", took)
	}
	dbtest.OK(t, row.Release())

	// One that was not released is over when it has expired.
	lapsed, err := mysqllock.Acquire(ctx, db, "k", lockctx.Lease(engine.Lease))
	dbtest.OK(t, err)
	dbtest.Exec(t, dbtest.Open(t, "mysql", s.dsn), "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) WHERE name = 'k'")
	row, err = mysqllock.Acquire(ctx, other, "k", lockctx.NoWait())
	dbtest.OK(t, err)
	dbtest.OK(t, row.Release())
	dbtest.Want(t, lapsed.Release(), mysqllock.ErrLost)
}

// TestALostAnswerToACommitLeavesNothing of what the COMMIT has granted or released.
func TestALostAnswerToACommitLeavesNothing(t *testing.T) {
	s := newScratch(t)
	var tap dbtest.Tap
	engine.LostAnswersLeaveNothing(t, &tap, s.tapped(&tap), s.handle())
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

// TestTokensGrowBesideCleanUps: so do those of keys whose rows a clean-up removes between two holders.
func TestTokensGrowBesideCleanUps(t *testing.T) {
	s := newScratch(t)
	db, other, i := s.handle(), s.handle(), s.inspector(s.dsn)
	warm := stock.Acquire(t, db, "k", lockctx.Lease(engine.Lease)) // there is a table now
	dbtest.OK(t, warm.Release())
	ctx, stop := context.WithCancel(dbtest.Limited(t))
	var removed int
	var cleaner sync.WaitGroup
	cleaner.Go(func() {
		for ctx.Err() == nil {
			done, err := i.Clean(ctx, inspect.CleanUp{})
			removed += done.Removed
			if err != nil && ctx.Err() == nil && !errors.Is(err, mysqllock.ErrLocked) { // by programs that make rows
				t.Error(err)
			}
		}
	})
	engine.ManyKeys(t, []*sql.DB{db, other}, engine.Exclusive["lease"]...)
	stop()
	cleaner.Wait()
	if removed < 12 {
		t.Errorf("only %d rows were removed", removed)
	}
}

// TestAsManyCallersHoldAsThereAreSlots, and a slot that is free is found although the others
// are locked.
func TestAsManyCallersHoldAsThereAreSlots(t *testing.T) {
	for kind, option := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(engine.Lease)} {
		t.Run(kind, func(t *testing.T) {
			s := newScratch(t)
			ctx := dbtest.Limited(t)
			const slots = 6
			take := func(db *sql.DB, o lockctx.Option) (*mysqllock.Hold, error) {
				return mysqllock.Acquire(ctx, db, "k", option, lockctx.Slots(slots), o)
			}
			holder, other := s.handle(), s.handle()
			var held []*mysqllock.Hold
			for range slots - 1 {
				h, err := take(holder, lockctx.NoWait())
				dbtest.OK(t, err)
				held = append(held, h)
			}
			for range 10 {
				h, err := take(other, lockctx.NoWait())
				dbtest.OK(t, err)
				dbtest.OK(t, h.Release())
			}
			last, err := take(other, lockctx.NoWait())
			dbtest.OK(t, err)
			_, err = take(s.handle(), lockctx.NoWait())
			dbtest.Want(t, err, mysqllock.ErrLocked)
			for _, h := range append(held, last) {
				dbtest.OK(t, h.Release())
			}

			var inside, most atomic.Int32
			var all sync.WaitGroup
			for range 4 {
				db := s.handle() // no two are in one queue of a process
				for range 3 {
					all.Go(func() {
						for range 3 {
							err := mysqllock.Do(ctx, db, "two", func(context.Context) error {
								n := inside.Add(1)
								defer inside.Add(-1)
								for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
								}
								time.Sleep(20 * time.Millisecond)
								return nil
							}, option, lockctx.Slots(2))
							if err != nil {
								t.Error(err)
							}
						}
					})
				}
			}
			all.Wait()
			if most.Load() != 2 {
				t.Errorf("%d were inside at a time, want 2", most.Load())
			}
		})
	}
}

// TestASlotThatARowLockHasIsNotFreeForALease, and one beside it is found.
func TestASlotThatARowLockHasIsNotFreeForALease(t *testing.T) {
	s := newScratch(t)
	a, b := dbtest.Open(t, "mysqllock", s.with("lockOwner=a")), dbtest.Open(t, "mysqllock", s.with("lockOwner=b"))
	for range 5 {
		hold := stock.Acquire(t, a, "six", lockctx.Slots(6))
		defer hold.Release()
	}
	for range 20 {
		hold := stock.Acquire(t, b, "six", lockctx.Lease(10*time.Second), lockctx.Slots(6), lockctx.NoWait())
		dbtest.OK(t, hold.Release())
	}
	hold := stock.Acquire(t, a, "one", lockctx.Slots(1))
	defer hold.Release()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err := mysqllock.Acquire(ctx, b, "one", lockctx.Lease(10*time.Second), lockctx.Slots(1), lockctx.Wait(time.Second))
	if !errors.Is(err, mysqllock.ErrTimeout) || ctx.Err() != nil {
		t.Errorf("a caller that waits for a second, of 30 (%v): %v", ctx.Err(), err)
	}
}

// TestEachLockCostsItsNumberOfStatements in a transaction. It tells what that takes beside one
// with FOR UPDATE by hand: the medians of transactions that took turns.
func TestEachLockCostsItsNumberOfStatements(t *testing.T) {
	s := newScratch(t)
	dbtest.Exec(t, dbtest.Open(t, "mysql", s.dsn), "CREATE TABLE locks (name VARBINARY(255) PRIMARY KEY)")
	dbtest.Exec(t, dbtest.Open(t, "mysql", s.dsn), "INSERT INTO locks VALUES ('k')")
	var tap dbtest.Tap
	db := s.tapped(&tap)
	ctx := dbtest.Limited(t)
	add := func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "UPDATE c SET n = n + 1 WHERE id = 1")
		return err
	}
	under := func(o lockctx.Option) func() error {
		own := lockctx.With(ctx, fmt.Sprintf("%T %[1]v", o), o) // a key that was kept optimistically costs others its version
		return func() error { return stock.InTx(own, db, add) }
	}
	ways := []struct {
		name string
		cost int
		do   func() error
		took []time.Duration
	}{
		{name: "FOR UPDATE by hand", cost: 4, do: func() error {
			return stock.InTx(ctx, db, func(tx *sql.Tx) error {
				if err := tx.QueryRowContext(ctx, "SELECT name FROM locks WHERE name = 'k' FOR UPDATE").Scan(new(string)); err != nil {
					return err
				}
				return add(tx)
			})
		}},
		{name: "row", cost: 3, do: under(lockctx.Row())},
		{name: "row, Do", cost: 3, do: func() error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, "UPDATE c SET n = n + 1 WHERE id = 1")
				return err
			})
		}},
		{name: "lease", cost: 5, do: under(lockctx.Lease(engine.Lease))},
		{name: "optimistic", cost: 3, do: under(lockctx.Optimistic())},
	}
	warm, rounds := 3, dbtest.Long(20, 200)
	for round := range warm + rounds {
		for i := range ways {
			began := time.Now()
			dbtest.OK(t, ways[i].do())
			if round >= warm {
				ways[i].took = append(ways[i].took, time.Since(began))
			}
		}
	}
	for i := range ways {
		slices.Sort(ways[i].took)
		median := ways[i].took[rounds/2]
		t.Logf("%s: %v, %.2f of by hand", ways[i].name, median, float64(median)/float64(ways[0].took[rounds/2]))
		tap.Costs(t, ways[i].name, ways[i].cost, ways[i].do)
	}
}
