package mysqllock_test

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestOppositeOrdersThroughLeases: two callers that do not share a line each have what
// the other waits for, and one of them waits for a lease that it wants no lease on.
func TestOppositeOrdersThroughLeases(t *testing.T) {
	kinds := map[string]lockctx.Option{
		"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "shared": lockctx.Shared(), "version": lockctx.Optimistic(),
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "made"), "DO 1") // the table, before so many ask for it at once
		dbtest.OK(t, err)
		var cases dbtest.Together
		defer cases.Wait()
		for _, c := range []string{ // what one has and wants, what the other has and wants
			"lease row, row row", "lease lease, row row", "lease shared, row row", "lease row, shared row",
			"lease row, row shared", "lease lease, row lease", "row row, lease row", "lease row, lease row",
			"lease version, lease version",
		} {
			for _, order := range []string{"x y", "y x"} {
				cases.Run(t, c+" "+order, func(t *testing.T) {
					one, two := s.open("lockOwner=one", "lockWait=2m"), s.open("lockOwner=two", "lockWait=2m")
					said := strings.Fields(strings.ReplaceAll(c, ",", ""))
					keys := strings.Fields(order)
					for i, key := range keys {
						keys[i] = key + " " + c + order
					}
					barrier := meet(2)
					var errs [2]error
					var all sync.WaitGroup
					began := time.Now()
					all.Go(func() {
						errs[0] = nest(dbtest.Limited(t), one, keys, []lockctx.Option{kinds[said[0]], kinds[said[1]]}, barrier)
					})
					all.Go(func() {
						errs[1] = nest(dbtest.Limited(t), two, []string{keys[1], keys[0]}, []lockctx.Option{kinds[said[2]], kinds[said[3]]}, barrier)
					})
					all.Wait()
					oneWins(t, began, errs[:]...)
				})
			}
		}
	})
}

// TestOppositeOrdersOfTransactions is the same for further keys of an open transaction.
func TestOppositeOrdersOfTransactions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, keys := range [][]string{{"x", "y"}, {"y", "x"}} {
			t.Run(keys[0]+keys[1], func(t *testing.T) {
				one, two := s.open("lockOwner=one", "lockWait=2m"), s.open("lockOwner=two", "lockWait=2m")
				barrier := meet(2)
				var errs [2]error
				var all sync.WaitGroup
				began := time.Now()
				all.Go(func() {
					errs[0] = nest(dbtest.Limited(t), one, keys, []lockctx.Option{lockctx.Lease(30 * time.Second), lockctx.Row()}, barrier)
				})
				all.Go(func() {
					tx, err := two.BeginTx(lockctx.With(dbtest.Limited(t), keys[1]), nil)
					dbtest.OK(t, err)
					defer func() { _ = tx.Rollback() }()
					barrier()
					_, errs[1] = tx.ExecContext(lockctx.With(dbtest.Limited(t), keys[0]), "UPDATE p SET stock = stock + 1 WHERE id = 1")
				})
				all.Wait()
				oneWins(t, began, errs[:]...)
			})
		}
	})
}

// TestNoFalseDeadlockOfTables: the same key in two lock tables is two keys.
func TestNoFalseDeadlockOfTables(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var cases dbtest.Together
		defer cases.Wait()
		for _, name := range []string{"row", "lease"} {
			cases.Run(t, name, func(t *testing.T) {
				kind := lockKinds[name]
				one, two := s.open("lockTable=one", "lockWait=1m"), s.open("lockTable=two", "lockWait=1m")
				a, b := name+" a", name+" b"
				jobOne, err := mysqllock.Acquire(dbtest.Limited(t), one, b, kind)
				dbtest.OK(t, err)
				jobTwo, err := mysqllock.Acquire(dbtest.Limited(t), two, a, kind)
				dbtest.OK(t, err)
				var errs [2]error
				var all sync.WaitGroup
				all.Go(func() {
					errs[0] = nest(dbtest.Limited(t), one, []string{a, b}, []lockctx.Option{kind, kind}, func() {})
				})
				all.Go(func() {
					errs[1] = nest(dbtest.Limited(t), two, []string{b, a}, []lockctx.Option{kind, kind}, func() {})
				})
				time.Sleep(7 * time.Second) // for as long as it takes to look twice
				dbtest.OK(t, jobOne.Release())
				dbtest.OK(t, jobTwo.Release())
				all.Wait()
				dbtest.OK(t, errors.Join(errs[:]...))
			})
		}
	})
}
