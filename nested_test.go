package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// layer takes something with a key of its own, and calls within while it has it.
type layer func(ctx context.Context, db *sql.DB, key string, within func(context.Context) error) error

// holding is a layer of Do with a strategy.
func holding(opt lockctx.Option) layer {
	return func(ctx context.Context, db *sql.DB, key string, within func(context.Context) error) error {
		return mysqllock.Do(ctx, db, key, within, opt)
	}
}

// transacting is a layer of BeginTx, in a lock context if there are options.
func transacting(opts ...lockctx.Option) layer {
	return func(ctx context.Context, db *sql.DB, key string, within func(context.Context) error) error {
		own := ctx
		if len(opts) > 0 {
			own = lockctx.With(ctx, key, opts...)
		}
		tx, err := db.BeginTx(own, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(own, "DO 1"); err != nil {
			return err
		}
		return errors.Join(within(ctx), tx.Commit())
	}
}

var (
	byLease    = lockctx.Lease(30 * time.Second)
	nestsOf    = map[string]layer{"Do row": holding(lockctx.Row()), "BeginTx row": transacting(lockctx.Row()), "BeginTx": transacting()}
	nestedOnes = map[string][]layer{
		"lease": {holding(byLease)}, "advisory": {holding(lockctx.Advisory())},
		"lease, then advisory": {holding(byLease), holding(lockctx.Advisory())}, "advisory, then lease": {holding(lockctx.Advisory()), holding(byLease)},
	}
)

// nestAll has so many callers take the layers at once, one inside of the other, each caller with keys of
// its own, whose rows the handle rows makes before. The error says how many have not got through.
func nestAll(t *testing.T, db, rows *sql.DB, callers int, layers ...layer) error {
	base, errs := dbtest.Random(), make([]error, callers)
	keyOf := func(caller, level int) string { return fmt.Sprint(base, caller, level) }
	// The rows are there. An insert that splits an index page makes locks of a gap of the row locks of
	// others, in which no row can be made: a caller would wait for its own transaction.
	for i := range errs {
		for level := range layers {
			dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), keyOf(i, level+1)), rows, "DO 0")
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), dbtest.Patience/2)
	defer cancel()
	var all sync.WaitGroup
	for i := range errs {
		var call func(ctx context.Context, left []layer) error
		call = func(ctx context.Context, left []layer) error {
			if len(left) == 0 {
				return nil
			}
			return left[0](ctx, db, keyOf(i, len(left)), func(ctx context.Context) error { return call(ctx, left[1:]) })
		}
		all.Go(func() { errs[i] = call(ctx, layers) })
	}
	all.Wait()
	failed := 0
	for _, err := range errs {
		if err != nil {
			failed++
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d have failed: %w", failed, callers, errors.Join(errs...))
	}
	return nil
}

// TestNestedLocksGetThroughAFullBudget: callers that together could have all connections of a new
// handle, and each take a lock inside of that on a lock connection of which there is none yet.
func TestNestedLocksGetThroughAFullBudget(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		rows := s.open()
		for outer, first := range nestsOf {
			for inner, rest := range nestedOnes {
				for _, test := range []struct{ conns, callers int }{{5, 6}, {8, 6}, {25, 24}} {
					t.Run(fmt.Sprintf("%s in %s, maxConns=%d", inner, outer, test.conns), func(t *testing.T) {
						db := s.limited(t, test.conns, "lockWait=5s")
						dbtest.OK(t, nestAll(t, db, rows, test.callers, append([]layer{first}, rest...)...))
					})
				}
			}
		}
	})
}

// TestNestedLocksGetThroughAfterAChange: the same where the server was found to be another one than
// it was, as after a failover, and a lease from before goes on.
func TestNestedLocksGetThroughAfterAChange(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for inner, rest := range nestedOnes {
			db, rows := s.limited(t, 8, "lockWait=5s"), s.open()
			job := stock.Acquire(t, db, "job", byLease)
			for i := range 3 {
				s.change(db, i)
				if err := nestAll(t, db, rows, 6, append([]layer{holding(lockctx.Row())}, rest...)...); err != nil {
					t.Errorf("%s, after change %d: %v", inner, i, err)
				}
			}
			dbtest.OK(t, job.Release())
			dbtest.OK(t, db.Close())
		}
	})
}

// TestHolderGoesBeforeWaitersWithConnections: callers that wait for the key of a holder with all the
// connections that they can have, since each has used its sql.Conn, leave some to the
// holder. A caller that would take one of these is refused.
func TestHolderGoesBeforeWaitersWithConnections(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, opt := range map[string]lockctx.Option{"lease": byLease, "advisory": lockctx.Advisory()} {
			for maxConns, usable := range map[int]int{5: 2, 8: 4} { // half of which may wait
				db := s.limited(t, maxConns)
				waiting, over := context.WithCancel(dbtest.Limited(t))
				var all sync.WaitGroup
				var refused atomic.Int32
				err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					for range usable {
						conn := dbtest.Conn(t, db)
						dbtest.Exec(t, conn, "DO 1")
						all.Go(func() {
							defer conn.Close()
							tx, err := conn.BeginTx(lockctx.With(waiting, "k", opt, lockctx.Wait(time.Hour)), nil)
							if err == nil {
								err = tx.Rollback()
							}
							if errors.Is(err, mysqllock.ErrLocked) && !errors.Is(err, context.Canceled) {
								dbtest.Says(t, err, "sql.Conn", "maxConns")
								refused.Add(1)
							}
						})
					}
					dbtest.Soon(t, "one half waits, and the other is refused", func() bool {
						st, err := mysqllock.Stats(db)
						dbtest.OK(t, err)
						return st.Waiters == usable/2 && int(refused.Load()) == usable/2
					})
					for range 3 {
						own, cancel := context.WithTimeout(ctx, 20*time.Second)
						defer cancel()
						if err := exec(own, db, "UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
							return err
						}
						if _, err := db.ExecContext(own, "DO 1"); err != nil {
							return err
						}
					}
					return nil
				}, opt)
				over()
				all.Wait()
				dbtest.Is(t, fmt.Sprintf("%s, maxConns=%d", name, maxConns), err, nil)
			}
		}
	})
}
