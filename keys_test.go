package mysqllock_test

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
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAHoldOfSeveralLeasesIsLostWithOne of them, and commits nothing more.
func TestAHoldOfSeveralLeasesIsLostWithOne(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, stolen := range []string{"a", "b", "c"} {
			db := s.open()
			h, err := mysqllock.AcquireKeys(dbtest.Limited(t), db, []string{"c", "b", "a"}, lockctx.Lease(time.Minute))
			dbtest.OK(t, err)
			dbtest.ExecIn(t, h.Context(), db, takeOne)
			before := s.stock(1)
			s.steal(stolen)
			_, err = db.ExecContext(h.Context(), takeOne)
			dbtest.Want(t, err, mysqllock.ErrLost)
			dbtest.Want(t, h.Release(), mysqllock.ErrLost)
			s.wantStock(1, before)
			dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) WHERE owner IS NOT NULL")
		}
	})
}

// TestSeveralLeasesOfWhichOneIsLostMeanwhileAreLost, and are no timeout: the caller still waits for another one.
func TestSeveralLeasesOfWhichOneIsLostMeanwhileAreLost(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, opt := s.open(), lockctx.Lease(3*time.Second)
		held := stock.Acquire(t, s.open(), "b", lockctx.Lease(time.Minute))
		ended := dbtest.Go(func() error {
			h, err := mysqllock.AcquireKeys(dbtest.Limited(t), db, []string{"a", "b"}, opt, lockctx.Wait(time.Minute))
			if err == nil {
				err = h.Release()
			}
			return err
		})
		dbtest.Soon(t, "it waits for the other one", func() bool {
			stats, err := mysqllock.Stats(db)
			return err == nil && stats.Waiters == 1 && s.leased("a")
		})
		s.steal("a")
		dbtest.Is(t, "it ended", <-ended, mysqllock.ErrLost)
		dbtest.OK(t, held.Release())
	})
}

// kind is a lock on a key of its own, and how to take it away from others.
type kind struct {
	key   string
	opts  []lockctx.Option
	holds int              // that take all of it; 0 where it locks nothing
	by    []lockctx.Option // what the holds are; nil is opts
}

func (k kind) hold(t *testing.T, db *sql.DB, wait time.Duration) (release func()) {
	t.Helper()
	var holds []*mysqllock.Hold
	opts := k.opts
	if k.by != nil {
		opts = k.by
	}
	for range k.holds {
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, k.key, append(slices.Clone(opts), lockctx.Wait(wait))...)
		if err != nil {
			t.Errorf("%s is not free: %v", k.key, err)
			break
		}
		holds = append(holds, h)
	}
	return func() {
		t.Helper()
		for _, h := range holds {
			dbtest.OK(t, h.Release())
		}
	}
}

// TestNoneOfSeveralLocksStaysWhereOneIsRefused, of whatever kinds they are, and the same lock context may ask again.
func TestNoneOfSeveralLocksStaysWhereOneIsRefused(t *testing.T) {
	lease := lockctx.Lease(ttl)
	options := func(opts ...lockctx.Option) []lockctx.Option { return opts }
	row := func(key string) kind { return kind{key, options(lockctx.Row()), 1, nil} }
	leased := func(key string) kind { return kind{key, options(lease), 1, nil} }
	advisory := func(key string) kind { return kind{key, options(lockctx.Advisory()), 1, nil} }
	shared := func(key string) kind { return kind{key, options(lockctx.Shared()), 1, options(lockctx.Row())} }
	slots := func(key string) kind { return kind{key, options(lockctx.Row(), lockctx.Slots(2)), 2, nil} }
	leasedSlots := func(key string) kind { return kind{key, options(lease, lockctx.Slots(2)), 2, nil} }
	optimistic := func(key string) kind { return kind{key, options(lockctx.Optimistic()), 0, nil} }
	unread := func(key string) kind { return kind{key, options(lockctx.Optimistic()), 1, options(lease)} } // a lease is waited for
	const byBeginTx, byExec, byRead, byJoining = "BeginTx", "Exec", "Query, then Exec", "a hint in a transaction of another key"
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other, third := s.open(), s.open(), s.open()
		for number, test := range []struct {
			name string
			free []kind
			held kind
		}{
			{"row", []kind{row("a")}, row("b")},
			{"row, the first held", []kind{row("b")}, row("a")},
			{"shared", []kind{shared("a")}, shared("b")},
			{"lease", []kind{leased("a")}, leased("b")},
			{"advisory", []kind{advisory("a")}, advisory("b")},
			{"optimistic", []kind{optimistic("a")}, unread("b")},
			{"slots", []kind{slots("a")}, slots("b")},
			{"slots of leases", []kind{leasedSlots("a")}, leasedSlots("b")},
			{"row and slots", []kind{row("b")}, slots("a")},
			{"row and lease", []kind{row("a")}, leased("b")},
			{"lease and row", []kind{leased("a")}, row("b")},
			{"lease and slots", []kind{leased("a")}, slots("b")},
			{"advisory and slots of leases", []kind{advisory("a")}, leasedSlots("b")},
			{"all, and slots", []kind{row("a"), leased("b"), advisory("c"), shared("d"), leasedSlots("f"), slots("g")}, slots("h")},
			{"all, and row", []kind{row("a"), leased("b"), advisory("c"), shared("d"), leasedSlots("f"), slots("g")}, row("h")},
		} {
			for i, way := range []string{byBeginTx, byExec, byRead, byJoining} {
				if s.MariaDB() != ((i+number)%2 == 0) && !dbtest.Long(false, true) {
					continue // it is run on the other server
				}
				if way == byJoining && test.name == "optimistic" {
					continue // it is refused: a version goes with no lock
				}
				end := []string{"NoWait", "Wait", "cancel"}[(i+number)%3]
				what := fmt.Sprintf("%s, by %s, %s", test.name, way, end)
				for _, k := range append(slices.Clone(test.free), test.held) { // rows and versions are there
					dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), k.key, k.opts...), db, "DO 0")
				}
				const wait = ttl * 2 / 3 // a busy server may not have given back in the moments that a caller gives it, and a lease lasts longer
				release := test.held.hold(t, other, wait)
				base, cancel := context.WithCancel(dbtest.Limited(t))
				first := base
				if way == byJoining {
					first = lockctx.With(base, "first "+dbtest.Random(), lockctx.Advisory())
				}
				ctx := first
				for _, k := range append(slices.Clone(test.free), test.held) {
					wait := lockctx.Wait(20 * time.Second)
					switch end {
					case "NoWait":
						wait = lockctx.NoWait()
					case "Wait":
						wait = lockctx.Wait(200 * time.Millisecond)
					case "cancel":
						if k.key == test.held.key {
							time.AfterFunc(60*time.Millisecond, cancel)
						}
					}
					ctx = lockctx.With(ctx, k.key, append(slices.Clone(k.opts), wait)...)
				}
				ask := func() (err error) {
					switch way {
					case byBeginTx:
						var tx *sql.Tx
						if tx, err = db.BeginTx(ctx, nil); err == nil {
							err = tx.Rollback()
						}
					case byExec:
						_, err = db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
					case byRead:
						_, err = read(ctx, db, 1)
					default:
						tx, begun := db.BeginTx(first, nil)
						if begun != nil { // it was cancelled before
							return begun
						}
						_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
						if failed := tx.Rollback(); err == nil {
							err = failed
						}
					}
					return err
				}
				err := stock.Told(ask)
				switch {
				case !errors.Is(err, mysqllock.ErrLocked) && !errors.Is(err, context.Canceled):
					t.Errorf("%s: %v", what, err)
				case end == "cancel" && !errors.Is(err, context.Canceled) && way != byJoining: // several row locks of a transaction that is open are not waited for
					t.Errorf("%s: %v", what, err)
				}
				for _, k := range test.free {
					k.hold(t, third, wait)()
				}
				release()
				test.held.hold(t, third, wait)()
				if end != "cancel" {
					if err := ask(); err != nil {
						t.Errorf("%s: once more in the same lock context: %v", what, err)
					}
				}
				cancel()
				for _, k := range append(slices.Clone(test.free), test.held) { // a read gives them back with the context
					if way == byRead {
						k.hold(t, third, wait)()
					}
				}
				if t.Failed() {
					t.Fatal(what)
				}
			}
		}
	})
}

// TestAUnitWhoseSlotIsRefusedKeepsItsLease and goes on.
func TestAUnitWhoseSlotIsRefusedKeepsItsLease(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		h := stock.Acquire(t, other, "b", lockctx.Row())
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "job", lockctx.Lease(ttl))
		stock.MustRead(t, ctx, db, 1)
		more := lockctx.With(lockctx.With(ctx, "a", lockctx.Row()), "b", lockctx.Row(), lockctx.Slots(1), lockctx.NoWait())
		_, err := db.BeginTx(more, nil)
		dbtest.Is(t, "BeginTx", err, mysqllock.ErrLocked)
		_, err = db.ExecContext(more, "UPDATE p SET stock = 0 WHERE id = 1")
		dbtest.Is(t, "Exec", err, mysqllock.ErrLocked)
		_, err = read(more, db, 1)
		dbtest.Is(t, "Query", err, mysqllock.ErrLocked)
		s.wantLeased("job", true)
		s.wantLocked("a", false)
		dbtest.OK(t, h.Release())
		tx := dbtest.Begin(t, more, db)
		s.wantLocked("b", true)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		s.wantLeased("job", false)
		s.wantStock(1, 9)
	})
}

// TestWaitIsForAllTogether: several locks are waited for no longer than one.
func TestWaitIsForAllTogether(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		const wait = 2 * time.Second
		for _, strategies := range [][2]lockctx.Option{{lockctx.Row(), lockctx.Row()}, {lockctx.Lease(ttl), lockctx.Row()}, {lockctx.Lease(ttl), lockctx.Lease(ttl)}} {
			for began := time.Now(); ; { // a busy machine may delay one
				first := stock.Acquire(t, other, "a", strategies[0])
				second := stock.Acquire(t, other, "b", strategies[1])
				released := make(chan error, 1)
				time.AfterFunc(wait*2/3, func() { released <- first.Release() })
				base := lockctx.With(dbtest.Limited(t), "first")
				ctx := lockctx.With(lockctx.With(base, "a", strategies[0]), "b", strategies[1], lockctx.Slots(1), lockctx.Wait(wait))
				tx, err := db.BeginTx(base, nil)
				dbtest.OK(t, err)
				start := time.Now()
				_, err = tx.ExecContext(ctx, "DO 0")
				took := time.Since(start)
				tx.Rollback()
				dbtest.OK(t, <-released)
				dbtest.OK(t, second.Release())
				if !errors.Is(err, mysqllock.ErrTimeout) && !errors.Is(err, mysqllock.ErrNoAnswer) { // a busy server may not have answered
					t.Fatalf("after %v, with a wait of %v: %v", took, wait, err)
				}
				if took <= wait*3/2 && errors.Is(err, mysqllock.ErrTimeout) {
					break
				}
				if time.Since(began) > dbtest.Patience {
					t.Fatalf("it never took less than %v, with a wait of %v; at last %v", wait*3/2, wait, took)
				}
			}
		}
	})
}

// TestNoLimitIsTooSmallForVeryManyKeys of one unit of work, be it one of a procedure's parameter or of a statement,
// whether the keys are free or waited for.
func TestNoLimitIsTooSmallForVeryManyKeys(t *testing.T) {
	all := map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic()}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		first, second := s.open(), s.open()
		for _, c := range []struct {
			n, length int
			kept      map[string]lockctx.Option
		}{{200, 255, all}, {1600, 12, map[string]lockctx.Option{"row": lockctx.Row()}}} {
			var keys []string
			for i := range c.n {
				keys = append(keys, fmt.Sprintf("%s%0*d", dbtest.Random()[:4], c.length-4, i))
			}
			for how, opt := range c.kept {
				for range 2 {
					tx, err := first.BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys, opt), nil)
					if err != nil {
						t.Errorf("%d keys, %s: %v", c.n, how, err)
						break
					}
					dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					if err := tx.Commit(); err != nil {
						t.Errorf("%d keys, %s: COMMIT: %v", c.n, how, err)
					}
				}
				if how == "optimistic" {
					continue
				}
				held := stock.Acquire(t, first, keys[0], opt)
				over := make(chan error, 1)
				go func() {
					tx, err := second.BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys, opt, lockctx.Wait(dbtest.Patience)), nil)
					if err == nil {
						err = tx.Rollback()
					}
					over <- err
				}()
				dbtest.Soon(t, "it waits", func() bool {
					stats, err := mysqllock.Stats(second)
					return err == nil && stats.Waiters > 0 || len(over) > 0
				})
				dbtest.OK(t, held.Release())
				if err := <-over; err != nil {
					t.Errorf("%d keys, %s: after a wait: %v", c.n, how, err)
				}
			}
		}
	})
}

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

// nesting is a caller that takes two keys, one inside the other.
type nesting struct {
	db    *sql.DB
	keys  []string
	kinds []lockctx.Option
}

// opposite is one that takes them in the opposite order.
func (n nesting) opposite(db *sql.DB) nesting {
	return nesting{db, []string{n.keys[1], n.keys[0]}, []lockctx.Option{n.kinds[1], n.kinds[0]}}
}

// circle has callers wait for each other in a circle, once each has its first key, and checks that
// one of them gives way.
func circle(t testing.TB, callers ...nesting) (errs []error) {
	t.Helper()
	began, errs, met := time.Now(), make([]error, len(callers)), meet(int32(len(callers)))
	var all sync.WaitGroup
	for i, c := range callers {
		all.Go(func() {
			defer met.leave()
			errs[i] = nest(dbtest.Limited(t), c.db, c.keys, c.kinds, met.come)
		})
	}
	all.Wait()
	oneWins(t, began, errs...)
	return errs
}

// oneWins checks that of errors that callers in a circle have got one is a deadlock, and
// the others are none.
func oneWins(t testing.TB, began time.Time, errs ...error) {
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

// meeting is a barrier. Nobody waits at it any more once one of those that it is for has left.
type meeting struct {
	missing atomic.Int32
	over    func()
	all     chan struct{} // closed when all have come, or one has left
}

// meet returns a barrier for n.
func meet(n int32) *meeting {
	m := &meeting{all: make(chan struct{})}
	m.missing.Store(n)
	m.over = sync.OnceFunc(func() { close(m.all) })
	return m
}

// come waits until all have come.
func (m *meeting) come() {
	if m.missing.Add(-1) == 0 {
		m.over()
	}
	<-m.all
}

// leave is for each of them, at its end: it may have failed before it came.
func (m *meeting) leave() { m.over() }

// TestOneOfACircleOfCallersGivesWay: callers of one process that take keys in opposite orders, or in
// a circle, of whatever strategies, do not wait for each other to the end.
func TestOneOfACircleOfCallersGivesWay(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		for x, kindX := range lockKinds {
			for y, kindY := range lockKinds {
				t.Run(x+" "+y, func(t *testing.T) {
					one := nesting{db, []string{x + y + " x", x + y + " y"}, []lockctx.Option{kindX, kindY}}
					circle(t, one, one.opposite(db))
				})
			}
		}
		var three []nesting
		names := []string{"row", "lease", "advisory"}
		for i, name := range names {
			next := names[(i+1)%3]
			three = append(three, nesting{db, []string{name, next}, []lockctx.Option{lockKinds[name], lockKinds[next]}})
		}
		circle(t, three...)
	})
}

// TestOneWinsWhereOppositeOrdersAskForBothAtOnce: one side does, and has one of the two while it waits for the other.
func TestOneWinsWhereOppositeOrdersAskForBothAtOnce(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
	// A caller is counted as waiting before it has its place in the queue of "a", which
	// nothing shows but that others wait behind it.
	dbtest.Soon(t, `"a" is taken`, func() bool {
		err := mysqllock.Do(t.Context(), db, "a", func(context.Context) error { return nil }, lockctx.Wait(time.Second))
		return errors.Is(err, mysqllock.ErrTimeout)
	})
	close(waits)
	all.Wait()
	return errs
}

// TestAWaitBehindALongJobIsNoDeadlock, although the waiter holds something that others want.
func TestAWaitBehindALongJobIsNoDeadlock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for name, kind := range lockKinds {
			db := s.open("lockWait=2m")
			job := stock.Acquire(t, db, name+" job", kind)
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

// TestOneOfACircleOfProcessesGivesWay, as callers of one process do.
func TestOneOfACircleOfProcessesGivesWay(t *testing.T) {
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

// findsADeadlock waits until two processes have found a deadlock of their own: by then they have
// looked twice, as those have that wait since before.
func (s *scratch) findsADeadlock(name string, params ...string) {
	s.T.Helper()
	params, lease := append(params, "lockWait=2m"), lockctx.Lease(30*time.Second)
	one := nesting{s.open(params...), []string{name + " x", name + " y"}, []lockctx.Option{lease, lease}}
	errs := circle(s.T, one, one.opposite(s.open(params...)))
	if text := fmt.Sprint(errs); !strings.Contains(text, "as connection ") {
		s.T.Errorf("the other side is not named: %s", text)
	}
}

// TestAWaitInDescendingOrderIsNoDeadlock behind a long job of another process, whatever others wait for in ascending
// order.
func TestAWaitInDescendingOrderIsNoDeadlock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, kind := range lockKinds {
			one, two, three := s.open("lockWait=2m"), s.open("lockWait=2m"), s.open("lockWait=2m")
			job := stock.Acquire(t, one, name+" a job", kind)
			last := stock.Acquire(t, one, name+" z", kind)
			var all sync.WaitGroup
			nested := func(db *sql.DB, keys ...string) {
				if err := nest(dbtest.Limited(t), db, keys, []lockctx.Option{kind, kind}, func() {}); err != nil {
					t.Errorf("%s: %v", keys, err)
				}
			}
			all.Go(func() { nested(two, name+" b", name+" a job") })
			all.Go(func() { nested(three, name+" c", name+" z") })
			for _, db := range []*sql.DB{two, three} {
				dbtest.Soon(t, "they wait", func() bool {
					stats, err := mysqllock.Stats(db)
					dbtest.OK(t, err)
					return stats.Waiters == 1
				})
			}
			s.findsADeadlock(name + " real") // in as many looks as the others had
			dbtest.OK(t, last.Release())
			dbtest.OK(t, job.Release())
			all.Wait()
		}
	})
}

// TestOneOfACircleThroughLeasesGivesWay: two callers that do not share a queue each have what the other waits for,
// and one of them waits for a lease that it wants no lease on.
func TestOneOfACircleThroughLeasesGivesWay(t *testing.T) {
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
					said := strings.Fields(strings.ReplaceAll(c, ",", ""))
					keys := strings.Fields(order)
					for i, key := range keys {
						keys[i] = key + " " + c + order
					}
					circle(t, nesting{s.open("lockOwner=one", "lockWait=2m"), keys, []lockctx.Option{kinds[said[0]], kinds[said[1]]}},
						nesting{s.open("lockOwner=two", "lockWait=2m"), []string{keys[1], keys[0]}, []lockctx.Option{kinds[said[2]], kinds[said[3]]}})
				})
			}
		}
	})
}

// TestOneOfACircleOfOpenTransactionsGivesWay: they wait for further keys.
func TestOneOfACircleOfOpenTransactionsGivesWay(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, keys := range [][]string{{"x", "y"}, {"y", "x"}} {
			t.Run(keys[0]+keys[1], func(t *testing.T) {
				one, two := s.open("lockOwner=one", "lockWait=2m"), s.open("lockOwner=two", "lockWait=2m")
				met := meet(2)
				var errs [2]error
				var all sync.WaitGroup
				began := time.Now()
				all.Go(func() {
					defer met.leave()
					errs[0] = nest(dbtest.Limited(t), one, keys, []lockctx.Option{lockctx.Lease(30 * time.Second), lockctx.Row()}, met.come)
				})
				all.Go(func() {
					defer met.leave()
					tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), keys[1]), two)
					defer func() { _ = tx.Rollback() }()
					met.come()
					_, errs[1] = tx.ExecContext(lockctx.With(dbtest.Limited(t), keys[0]), "UPDATE p SET stock = stock + 1 WHERE id = 1")
				})
				all.Wait()
				oneWins(t, began, errs[:]...)
			})
		}
	})
}

// TestTheSameKeyInTwoLockTablesIsNoDeadlock: these are two keys.
func TestTheSameKeyInTwoLockTablesIsNoDeadlock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		var cases dbtest.Together
		defer cases.Wait()
		for _, name := range []string{"row", "lease"} {
			cases.Run(t, name, func(t *testing.T) {
				kind := lockKinds[name]
				one, two := s.open("lockTable=one", "lockWait=1m"), s.open("lockTable=two", "lockWait=1m")
				a, b := name+" a", name+" b"
				jobOne := stock.Acquire(t, one, b, kind)
				jobTwo := stock.Acquire(t, two, a, kind)
				var errs [2]error
				var all sync.WaitGroup
				all.Go(func() {
					errs[0] = nest(dbtest.Limited(t), one, []string{a, b}, []lockctx.Option{kind, kind}, func() {})
				})
				all.Go(func() {
					errs[1] = nest(dbtest.Limited(t), two, []string{b, a}, []lockctx.Option{kind, kind}, func() {})
				})
				for _, db := range []*sql.DB{one, two} {
					dbtest.Soon(t, "they wait", func() bool {
						stats, err := mysqllock.Stats(db)
						dbtest.OK(t, err)
						return stats.Waiters == 1
					})
				}
				s.findsADeadlock(name+" real", "lockTable=one") // in as many looks as the others had
				dbtest.OK(t, jobOne.Release())
				dbtest.OK(t, jobTwo.Release())
				all.Wait()
				dbtest.OK(t, errors.Join(errs[:]...))
			})
		}
	})
}

// TestKeyAndItsSlotsAreOneLock: the key, and slots of it, in one hint are one lock.
func TestKeyAndItsSlotsAreOneLock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		row, leased := []lockctx.Option(nil), []lockctx.Option{lockctx.Lease(ttl)}
		slots := func(n int, opts ...lockctx.Option) []lockctx.Option {
			return append(opts, lockctx.Slots(n), lockctx.Wait(20*time.Second))
		}
		for name, c := range map[string]struct {
			key, slots []lockctx.Option
		}{
			"row and row slots": {row, slots(2)}, "row and lease slots": {row, slots(2, lockctx.Lease(ttl))},
			"lease and row slots": {leased, slots(2, lockctx.Row())}, "lease and lease slots": {leased, slots(2, lockctx.Lease(ttl))},
		} {
			for _, params := range []string{"lockWait=20s", "lockWait=20s&lockNamespace=striped&lockStripes=1"} {
				keys := [2]string{name, name}
				if params != "lockWait=20s" {
					keys[1] += " too" // another key on the same row
				}
				db, other := s.open(params), s.open(params)
				ctx := lockctx.With(lockctx.With(dbtest.Limited(t), keys[0], c.key...), keys[1], c.slots...)
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					t.Errorf("%s, %s: %v", name, params, err)
					continue
				}
				dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
				h, err := mysqllock.Acquire(dbtest.Limited(t), other, keys[1], slots(2)...)
				if err != nil {
					t.Errorf("%s, %s: the other slot: %v", name, params, err)
				} else {
					dbtest.OK(t, h.Release())
				}
				dbtest.OK(t, tx.Commit())
			}
		}

		// Fewer slots than are held.
		db := s.open("lockWait=20s")
		for range 2 {
			h := stock.Acquire(t, db, "k", lockctx.Slots(2))
			defer h.Release()
		}
		for _, opt := range []lockctx.Option{lockctx.Row(), lockctx.Lease(ttl)} {
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Slots(3), opt)
			tx := dbtest.Begin(t, ctx, db)
			dbtest.ExecIn(t, lockctx.With(ctx, "k", lockctx.Slots(2), opt), tx, "UPDATE p SET stock = 1 WHERE id = 1")
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestErrorNamesTheHolderOfASlot: who is refused a lease slot is told who has one.
func TestErrorNamesTheHolderOfASlot(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=one"), s.open("lockOwner=two")
		h := stock.Acquire(t, db, "k", lockctx.Lease(ttl), lockctx.Slots(1))
		for _, db := range []*sql.DB{db, other} {
			for _, opt := range []lockctx.Option{lockctx.NoWait(), lockctx.Wait(300 * time.Millisecond)} {
				err := naming(func() error {
					_, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(ttl), lockctx.Slots(1), opt)
					return err
				})
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Key != "k" || e.Holder == nil || e.Holder.Program != "one" {
					t.Errorf("the error is %v", err)
				}
			}
		}
		dbtest.OK(t, h.Release())
	})
}

// TestOlderOfTwoVersionsCounts: of two that are given, the older one counts.
func TestOlderOfTwoVersionsCounts(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		var versions [2]uint64
		for i := range versions {
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())
			dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			versions[i], _ = mysqllock.Version(ctx)
		}
		ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "k", lockctx.IfVersion(versions[1])), "k", lockctx.IfVersion(versions[0]))
		dbtest.Is(t, "an older version inside a newer one", dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = 99 WHERE id = 1")), mysqllock.ErrConflict)
		s.wantStock(1, 8)
	})
}

// TestAVersionIsRefusedOverAnOlderSnapshot: a transaction that text has begun may show what is older than the
// version.
func TestAVersionIsRefusedOverAnOlderSnapshot(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		conn := dbtest.Conn(t, db)
		dbtest.Exec(t, conn, "BEGIN")
		stock.MustRead(t, dbtest.Limited(t), conn, 2)
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())
		stock.MustRead(t, ctx, db, 2)
		dbtest.Is(t, "a second read on another connection", dbtest.Err(read(ctx, conn, 1)), mysqllock.ErrUnsafe)
		dbtest.Exec(t, conn, "ROLLBACK")
	})
}

// TestConflictEndsTheUnit: also where it comes after a statement that failed.
func TestConflictEndsTheUnit(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "v", lockctx.Optimistic())
		stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "v"), db, "UPDATE p SET stock = 3 WHERE id = 1")
		if _, err := db.ExecContext(ctx, "INSERT INTO p VALUES (1, 1)"); err == nil {
			t.Error("a duplicate was inserted")
		}
		dbtest.Is(t, "a statement after the conflict", dbtest.Err(db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")), mysqllock.ErrConflict)
		s.wantStock(1, 3)
	})
}

// TestWaitForAVersionKeepsNobodyFromOtherKeys: who waits until a key can first be kept optimistically
// does not keep others from other keys.
func TestWaitForAVersionKeepsNobodyFromOtherKeys(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		a := stock.Acquire(t, db, "a")
		b := stock.Acquire(t, db, "b")
		waits := make(chan error, 1)
		go func() {
			_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "a", lockctx.Optimistic(), lockctx.Wait(2*time.Minute)), "UPDATE p SET stock = 1 WHERE id = 1")
			waits <- err
		}()
		dbtest.Soon(t, "it waits", func() bool { return s.waiters() == 1 })
		time.AfterFunc(100*time.Millisecond, func() { b.Release() })
		start := time.Now()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "b", lockctx.Optimistic()), "UPDATE p SET stock = 1 WHERE id = 2")
		if took := time.Since(start); err != nil || took > time.Minute { // the other waits for longer
			t.Errorf("a key that is free: %v after %v", err, took)
		}
		dbtest.OK(t, a.Release())
		dbtest.OK(t, <-waits)
	})
}

// TestProcessWithoutStripesIsRefusedOnceOthersHaveThem: a process whose keys have rows of their own is refused as
// soon as others have keys share rows, although it was there before.
func TestProcessWithoutStripesIsRefusedOnceOthersHaveThem(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		own, striped := s.open(), s.open("lockStripes=4")
		h := stock.Acquire(t, own, "x", lockctx.Advisory())
		dbtest.OK(t, h.Release())
		h = stock.Acquire(t, striped, "k")
		defer h.Release()
		dbtest.Is(t, "a row of its own", dbtest.Err(mysqllock.Acquire(dbtest.Limited(t), own, "k")), mysqllock.ErrUnsafe)
	})
}

// TestSeveralSecondKeysAreWaitedFor: several keys that join a transaction are waited for, too.
func TestSeveralSecondKeysAreWaitedFor(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		for wait := 30 * time.Second; ; {
			h := stock.Acquire(t, other, "c")
			tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "a"), db)
			if wait > time.Second {
				time.AfterFunc(300*time.Millisecond, func() { h.Release() })
			}
			_, err := tx.ExecContext(lockctx.WithKeys(dbtest.Limited(t), []string{"b", "c"}, lockctx.Wait(wait)), "UPDATE p SET stock = 9 WHERE id = 1")
			if wait > time.Second {
				dbtest.OK(t, err)
				dbtest.OK(t, tx.Commit())
				wait = 200 * time.Millisecond
				continue
			}
			wantLost(t, "Commit", tx.Commit()) // some of the keys may have been locked
			for _, key := range []string{"a", "b"} {
				s.wantLocked(key, false)
			}
			dbtest.OK(t, h.Release())
			if errors.Is(err, mysqllock.ErrTimeout) {
				return
			}
			if wait *= 2; !errors.Is(err, mysqllock.ErrNoAnswer) || wait > time.Minute/2 { // a busy server may not have answered
				t.Fatalf("a wait that ends: %v", err)
			}
		}
	})
}
