package mysqllock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestCleanUpCostsNobodyALock: callers that would not wait for anybody get their
// locks beside a clean-up, which finds rows unused that only row locks use.
func TestCleanUpCostsNobodyALock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const callers, rounds = 4, 2
		keys := dbtest.Long(50, 150)
		db := s.open()
		look, err := inspect.New(s.plain, inspect.Options{})
		dbtest.OK(t, err)
		name := func(caller, key int) string { return fmt.Sprintf("%d %d", caller, key) }
		kinds := []lockctx.Option{lockctx.Row(), lockctx.Lease(30 * time.Second), lockctx.Shared(), lockctx.Slots(2)}
		var removed, granted atomic.Int64
		for range rounds {
			for caller := range callers { // each has keys of its own
				var all []string
				for key := range keys {
					all = append(all, name(caller, key))
				}
				dbtest.OK(t, mysqllock.DoKeys(dbtest.Limited(t), db, all, func(context.Context) error { return nil }))
			}
			dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = '2001-01-01' WHERE namespace <> ''")
			var all sync.WaitGroup
			for caller, kind := range kinds {
				all.Go(func() {
					for key := range keys {
						take := func() error {
							return mysqllock.Do(dbtest.Limited(t), db, name(caller, key), func(context.Context) error { return nil }, lockctx.NoWait(), kind)
						}
						err := take()
						// A clean-up is waited for, but not forever: a server that stands still is not the point.
						for try := 0; try < 20 && waitedFor(err, time.Second); try++ {
							err = take()
						}
						if err != nil {
							t.Errorf("key %s: %v", name(caller, key), err)
						}
						granted.Add(1)
					}
				})
			}
			for range 3 {
				done, err := look.Clean(dbtest.Limited(t), inspect.CleanUp{Unused: time.Hour})
				if err != nil {
					t.Error(err)
				}
				removed.Add(int64(done.Removed))
			}
			all.Wait()
		}
		t.Logf("%d rows were removed beside %d locks", removed.Load(), granted.Load())
	})
}

// waitedFor reports that err is that of a caller that has waited for so long.
func waitedFor(err error, least time.Duration) bool {
	var e *mysqllock.Error
	return errors.As(err, &e) && errors.Is(err, mysqllock.ErrLocked) && e.Waited >= least
}

// TestAFurtherKeyWhoseRowIsGoneRunsTheUnitAgain: a clean-up has removed the row since this process made it, and the open
// transaction cannot make it.
func TestAFurtherKeyWhoseRowIsGoneRunsTheUnitAgain(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, opts := range map[string][]lockctx.Option{"row": {lockctx.Row()}, "slots": {lockctx.Slots(2)}} {
			further := func(ctx context.Context) error {
				return mysqllock.Do(ctx, db, "further "+name, func(context.Context) error { return nil }, opts...)
			}
			dbtest.OK(t, further(dbtest.Limited(t)))
			for _, retry := range [][]lockctx.Option{nil, {lockctx.Retry(3)}} {
				dbtest.Exec(t, s.plain, "DELETE FROM mysqllock WHERE name LIKE '%further%'")
				times := 0
				err := mysqllock.Do(dbtest.Limited(t), db, "first", func(ctx context.Context) error {
					times++
					return further(ctx)
				}, retry...)
				if retry == nil && name == "row" { // a slot is looked for outside of the transaction
					dbtest.Is(t, name, err, mysqllock.ErrDeadlock)
				} else if dbtest.OK(t, err); times > 2 {
					t.Errorf("%s: it was run %d times", name, times)
				}
				dbtest.OK(t, further(dbtest.Limited(t)))
			}
		}
	})
}

// TestNoWaitWaitsForACleanUp, and for nobody else.
func TestNoWaitWaitsForACleanUp(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		nothing := func(context.Context) error { return nil }
		for _, kind := range []lockctx.Option{lockctx.Row(), lockctx.Shared(), lockctx.Lease(30 * time.Second), lockctx.Optimistic()} {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing, kind))
			lock := func() (unlock func()) {
				dbtest.Exec(t, s.plain, "UPDATE mysqllock SET versioned = 0 WHERE name = 'k'") // a version changes that first
				tx, err := s.plain.Begin()
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "SELECT 1 FROM mysqllock WHERE namespace = DATABASE() AND name = 'k' FOR UPDATE")
				return func() { dbtest.OK(t, tx.Rollback()) }
			}
			noWait := func() error { return mysqllock.Do(dbtest.Limited(t), db, "k", nothing, kind, lockctx.NoWait()) }
			unlock := lock()
			dbtest.Is(t, "without a clean-up", noWait(), mysqllock.ErrLocked)
			unlock()
			for began := time.Now(); ; {
				unlock = lock()
				dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE WHERE namespace = ''") // as a clean-up does
				var all sync.WaitGroup
				all.Go(func() {
					time.Sleep(50 * time.Millisecond)
					unlock()
				})
				err := noWait()
				all.Wait()
				if err == nil {
					break
				}
				if time.Since(began) > dbtest.Patience { // a machine that stands still may keep it locked for longer than is waited
					t.Errorf("where a clean-up has it: %v", err)
					break
				}
			}
			unlock = lock()
			if err := noWait(); !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) {
				t.Errorf("where somebody else has it: %v", err)
			}
			unlock()
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing, kind))
			dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = '2001-01-01' WHERE namespace = ''")
		}
	})
}
