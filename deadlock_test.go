package mysqllock_test

import (
	"bufio"
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
	"github.com/mysqllock/mysqllock/lockctx"
)

// kinds of lock that callers nest in opposite orders.
var lockKinds = map[string]lockctx.Option{
	"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(),
}

// nest takes first, waits at the barrier, and takes second inside.
func nest(ctx context.Context, db *sql.DB, keys []string, kinds []lockctx.Option, barrier func()) error {
	return mysqllock.Do(ctx, db, keys[0], func(ctx context.Context) error {
		barrier()
		return mysqllock.Do(ctx, db, keys[1], func(context.Context) error { return nil }, kinds[1])
	}, kinds[0])
}

// oneWins checks that of errors that callers in a circle have got one is a deadlock, and
// the others are none.
func oneWins(t *testing.T, began time.Time, errs ...error) {
	t.Helper()
	lost := 0
	for _, err := range errs {
		if errors.Is(err, mysqllock.ErrDeadlock) {
			lost++
		} else if err != nil {
			t.Errorf("it failed with %v", err)
		}
	}
	if lost != 1 {
		t.Errorf("%d of %d gave way: %v", lost, len(errs), errs)
	}
	if took := time.Since(began); took > 60*time.Second {
		t.Errorf("it took %v", took)
	}
}

// meet returns a barrier for n.
func meet(n int) func() {
	var all sync.WaitGroup
	all.Add(n)
	return func() {
		all.Done()
		all.Wait()
	}
}

// TestOppositeOrders: callers of one process that take two keys in opposite orders, of
// whatever strategies, do not wait for each other to the end.
func TestOppositeOrders(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for x, kindX := range lockKinds {
			for y, kindY := range lockKinds {
				t.Run(x+" "+y, func(t *testing.T) {
					db := s.open("lockWait=2m")
					keys := []string{x + y + " x", x + y + " y"}
					kinds := []lockctx.Option{kindX, kindY}
					barrier := meet(2)
					var errs [2]error
					var all sync.WaitGroup
					began := time.Now()
					all.Go(func() { errs[0] = nest(dbtest.Limited(t), db, keys, kinds, barrier) })
					all.Go(func() {
						errs[1] = nest(dbtest.Limited(t), db, []string{keys[1], keys[0]}, []lockctx.Option{kindY, kindX}, barrier)
					})
					all.Wait()
					oneWins(t, began, errs[:]...)
				})
			}
		}
	})
}

// TestCircle is the same for three, of three strategies.
func TestCircle(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		names := []string{"row", "lease", "advisory"}
		barrier := meet(3)
		errs := make([]error, 3)
		var all sync.WaitGroup
		began := time.Now()
		for i := range names {
			next := (i + 1) % 3
			all.Go(func() {
				errs[i] = nest(dbtest.Limited(t), db, []string{names[i], names[next]}, []lockctx.Option{lockKinds[names[i]], lockKinds[names[next]]}, barrier)
			})
		}
		all.Wait()
		oneWins(t, began, errs...)
	})
}

// TestOppositeOrdersTogether: one side asks for both at once, and has one of them while
// it waits for the other.
func TestOppositeOrdersTogether(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for try := 1; ; try++ {
			began := time.Now()
			errs := s.togetherOpposite()
			if errors.Join(errs[:]...) == nil && try < 10 {
				continue // no circle: a server that stood still had kept others from "a", too
			}
			oneWins(t, began, errs[:]...)
			return
		}
	})
}

// togetherOpposite has a caller that has "b" ask for "a" while another, which asks for both
// at once, has "a" and waits for "b". It returns what both have got.
func (s *scratch) togetherOpposite() (errs [2]error) {
	t, db := s.T, s.open("lockWait=2m")
	holds, waits := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		errs[0] = mysqllock.Do(dbtest.Limited(t), db, "b", func(ctx context.Context) error {
			close(holds)
			<-waits
			return mysqllock.Do(ctx, db, "a", func(context.Context) error { return nil })
		}, lockctx.Lease(30*time.Second))
	})
	<-holds
	all.Go(func() {
		tx, err := db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), []string{"a", "b"}), nil)
		if errs[1] = err; err == nil {
			errs[1] = tx.Commit()
		}
	})
	// A caller is counted as waiting before it has its place in the line of "a", which
	// nothing shows but that others wait behind it.
	dbtest.Soon(t, `"a" is taken`, func() bool {
		err := mysqllock.Do(t.Context(), db, "a", func(context.Context) error { return nil }, lockctx.Wait(time.Second))
		return errors.Is(err, mysqllock.ErrTimeout)
	})
	close(waits)
	all.Wait()
	return errs
}

// TestNoFalseDeadlock: who waits behind a long job while it holds something that others
// want is no deadlock.
func TestNoFalseDeadlock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, kind := range lockKinds {
			db := s.open("lockWait=2m")
			job, err := mysqllock.Acquire(dbtest.Limited(t), db, name+" job", kind)
			dbtest.OK(t, err)
			errs := make([]error, 5)
			var all sync.WaitGroup
			for i := range errs { // in the same order, and each with a hold of its own around
				all.Go(func() {
					errs[i] = mysqllock.Do(dbtest.Limited(t), db, fmt.Sprint(name, " own ", i), func(ctx context.Context) error {
						return nest(ctx, db, []string{name + " first", name + " job"}, []lockctx.Option{kind, kind}, func() {})
					}, kind)
				})
			}
			dbtest.Soon(t, "they wait", func() bool {
				stats, err := mysqllock.Stats(db)
				dbtest.OK(t, err)
				return stats.Waiters == len(errs)
			})
			dbtest.OK(t, job.Release())
			all.Wait()
			for _, err := range errs {
				dbtest.OK(t, err)
			}
		}
	})
}

// TestOppositeOrdersOfProcesses: so do callers of different processes.
func TestOppositeOrdersOfProcesses(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "made"), "DO 1") // the table, before so many ask for it at once
		dbtest.OK(t, err)
		var cases dbtest.Together
		defer cases.Wait()
		for x, kindX := range lockKinds {
			for y, kindY := range lockKinds {
				cases.Run(t, x+" "+y, func(t *testing.T) {
					here := s.open("lockWait=2m")
					keys := []string{x + y + " x", x + y + " y"}
					other := dbtest.StartJob(t, "nest", s.Config().FormatDSN()+"?lockWait=2m")
					other.Tell(x + "|" + y + "|" + keys[0] + "|" + keys[1])
					if got := other.Line(); got != "holds" {
						t.Fatal(got)
					}
					began := time.Now()
					err := nest(dbtest.Limited(t), here, []string{keys[1], keys[0]}, []lockctx.Option{kindY, kindX}, func() { other.Tell("") })
					theirs := error(nil)
					switch got := other.Line(); got {
					case "done":
					case "deadlock":
						theirs = mysqllock.ErrDeadlock
					default:
						theirs = errors.New(got)
					}
					oneWins(t, began, err, theirs)
				})
			}
		}
	})
}

// childNest takes two keys, one inside the other, as its first line says.
func childNest(db *sql.DB, in *bufio.Scanner) {
	in.Scan()
	said := strings.Split(in.Text(), "|")
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	err := nest(ctx, db, said[2:], []lockctx.Option{lockKinds[said[0]], lockKinds[said[1]]}, func() {
		fmt.Println("holds")
		in.Scan()
	})
	switch {
	case err == nil:
		fmt.Println("done")
	case errors.Is(err, mysqllock.ErrDeadlock):
		fmt.Println("deadlock")
	default:
		fmt.Println(err)
	}
}

// TestNoFalseDeadlockOfProcesses: one who waits in descending order behind a long job is
// no deadlock, whatever others wait for in ascending order.
func TestNoFalseDeadlockOfProcesses(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		for name, kind := range lockKinds {
			one, two, three := s.open("lockWait=2m"), s.open("lockWait=2m"), s.open("lockWait=2m")
			job, err := mysqllock.Acquire(dbtest.Limited(t), one, name+" a job", kind)
			dbtest.OK(t, err)
			last, err := mysqllock.Acquire(dbtest.Limited(t), one, name+" z", kind)
			dbtest.OK(t, err)
			var all sync.WaitGroup
			errs := make([]error, 2)
			all.Go(func() {
				errs[0] = nest(dbtest.Limited(t), two, []string{name + " b", name + " a job"}, []lockctx.Option{kind, kind}, func() {})
			})
			all.Go(func() {
				errs[1] = nest(dbtest.Limited(t), three, []string{name + " c", name + " z"}, []lockctx.Option{kind, kind}, func() {})
			})
			for _, db := range []*sql.DB{two, three} {
				dbtest.Soon(t, "they wait", func() bool {
					stats, err := mysqllock.Stats(db)
					dbtest.OK(t, err)
					return stats.Waiters == 1
				})
			}
			time.Sleep(5 * time.Second) // for as long as it takes to look twice
			dbtest.OK(t, last.Release())
			dbtest.OK(t, job.Release())
			all.Wait()
			for _, err := range errs {
				dbtest.OK(t, err)
			}
		}
	})
}
