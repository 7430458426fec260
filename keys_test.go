package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// severalKeptAs are the strategies for several keys at a time.
func severalKeptAs() map[string]lockctx.Option {
	return map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory()}
}

// TestAcquireKeys: all keys are taken, or none, and all are given back.
func TestAcquireKeys(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		for name, opt := range severalKeptAs() {
			t.Run(name, func(t *testing.T) {
				free := func(key string) error {
					h, err := mysqllock.Acquire(dbtest.Limited(t), other, key, opt, lockctx.NoWait())
					if err != nil {
						return err
					}
					return h.Release()
				}
				wantFree := func(keys ...string) {
					t.Helper()
					for _, key := range keys {
						// Where it has just been given back, that may take a moment.
						dbtest.Eventually(t, key+" is free", func() error { return free(key) })
					}
				}
				h, err := mysqllock.AcquireKeys(dbtest.Limited(t), db, []string{"b", "a", "b", "c"}, opt)
				dbtest.OK(t, err)
				for _, key := range []string{"a", "b", "c"} {
					dbtest.Want(t, free(key), mysqllock.ErrLocked)
					if !lockctx.Has(h.Context(), key) {
						t.Errorf("the hold's context does not have %s", key)
					}
				}
				dbtest.OK(t, h.Release())
				dbtest.OK(t, h.Rollback()) // does nothing any more
				wantFree("a", "b", "c")

				holder, err := mysqllock.Acquire(dbtest.Limited(t), other, "b", opt)
				dbtest.OK(t, err)
				for _, wait := range []lockctx.Option{lockctx.NoWait(), lockctx.Wait(10 * time.Millisecond)} {
					_, err = mysqllock.AcquireKeys(dbtest.Limited(t), db, []string{"c", "b", "a"}, opt, wait)
					// The wait may be over before a connection is ready to ask on.
					if !errors.Is(err, mysqllock.ErrLocked) && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("while another has b: %v", err)
					}
					wantFree("a", "c")
				}
				dbtest.OK(t, holder.Release())

				for _, keys := range [][]string{nil, {""}, {"a", ""}} {
					_, err = mysqllock.AcquireKeys(dbtest.Limited(t), db, keys, opt)
					var e *mysqllock.Error
					if !errors.As(err, &e) {
						t.Errorf("the keys %q: %v", keys, err)
					}
				}
				wantFree("a")
			})
		}
	})
}

// TestDoKeys: what is moved from one product to another, in both directions, by many, is
// neither lost nor made, and nobody waits in a circle.
func TestDoKeys(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		for name, opt := range severalKeptAs() {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				db, other := s.open(), s.open()
				var all sync.WaitGroup
				for i := range 8 {
					all.Go(func() {
						on, keys := db, []string{"product:1", "product:2"}
						from, to := 1, 2
						if i%2 == 1 {
							on, keys = other, []string{"product:2", "product:1"}
							from, to = to, from
						}
						for range 5 {
							err := mysqllock.DoKeys(dbtest.Limited(t), on, keys, func(ctx context.Context) error {
								a, err := read(ctx, on, from)
								if err != nil {
									return err
								}
								b, err := read(ctx, on, to)
								if err != nil {
									return err
								}
								if _, err := on.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", a-1, from); err != nil {
									return err
								}
								_, err = on.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = ?", b+1, to)
								return err
							}, opt, lockctx.WaitForever())
							if err != nil {
								t.Error(err)
							}
						}
					})
				}
				all.Wait()
				s.wantStock(1, 10)
				s.wantStock(2, 10)

				undone := errors.New("undone")
				err := mysqllock.DoKeys(dbtest.Limited(t), db, []string{"product:1", "product:2"}, func(context.Context) error { return undone }, opt)
				dbtest.Want(t, err, undone)
			})
		}
	})
}

// TestKeysLost: a hold of several leases is lost with one of them, and commits nothing more.
func TestKeysLost(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		for _, stolen := range []string{"a", "b", "c"} {
			db := s.open()
			h, err := mysqllock.AcquireKeys(dbtest.Limited(t), db, []string{"c", "b", "a"}, lockctx.Lease(time.Minute))
			dbtest.OK(t, err)
			_, err = db.ExecContext(h.Context(), takeOne)
			dbtest.OK(t, err)
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

// TestAllOrNothing: where one of several locks, of whatever kinds, is not
// granted, none stays locked, and the same lock context may ask again.
func TestAllOrNothing(t *testing.T) {
	lease := lockctx.Lease(10 * time.Second)
	options := func(opts ...lockctx.Option) []lockctx.Option { return opts }
	row := func(key string) kind { return kind{key, options(lockctx.Row()), 1, nil} }
	leased := func(key string) kind { return kind{key, options(lease), 1, nil} }
	advisory := func(key string) kind { return kind{key, options(lockctx.Advisory()), 1, nil} }
	shared := func(key string) kind { return kind{key, options(lockctx.Shared()), 1, options(lockctx.Row())} }
	slots := func(key string) kind { return kind{key, options(lockctx.Row(), lockctx.Slots(2)), 2, nil} }
	leasedSlots := func(key string) kind { return kind{key, options(lease, lockctx.Slots(2)), 2, nil} }
	optimistic := func(key string) kind { return kind{key, options(lockctx.Optimistic()), 0, nil} }
	unread := func(key string) kind { return kind{key, options(lockctx.Optimistic()), 1, options(lease)} } // a lease is waited for
	const byBeginTx, byExec, byRead, byLateHint = "BeginTx", "Exec", "Query, then Exec", "a hint in a transaction begun without it"
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
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
			{"lease and optimistic", []kind{leased("a")}, unread("b")},
			{"all, and slots", []kind{row("a"), leased("b"), advisory("c"), shared("d"), optimistic("e"), leasedSlots("f"), slots("g")}, slots("h")},
			{"all, and row", []kind{row("a"), leased("b"), advisory("c"), shared("d"), optimistic("e"), leasedSlots("f"), slots("g")}, row("h")},
		} {
			for i, way := range []string{byBeginTx, byExec, byRead, byLateHint} {
				end := []string{"NoWait", "Wait", "cancel"}[(i+number)%3]
				what := fmt.Sprintf("%s, by %s, %s", test.name, way, end)
				for _, k := range append(slices.Clone(test.free), test.held) { // rows and versions are there
					_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), k.key, k.opts...), "DO 0")
					dbtest.OK(t, err)
				}
				release := test.held.hold(t, other, 0)
				base, cancel := context.WithCancel(dbtest.Limited(t))
				ctx := base
				for _, k := range append(slices.Clone(test.free), test.held) {
					wait := lockctx.Wait(20 * time.Second)
					switch end {
					case "NoWait":
						wait = lockctx.NoWait()
					case "Wait":
						wait = lockctx.Wait(60 * time.Millisecond)
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
						tx, begun := db.Begin()
						dbtest.OK(t, begun)
						_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1")
						if failed := tx.Rollback(); err == nil {
							err = failed
						}
					}
					return err
				}
				err := ask()
				switch {
				case !errors.Is(err, mysqllock.ErrLocked) && !errors.Is(err, context.Canceled):
					t.Errorf("%s: %v", what, err)
				case end == "cancel" && !errors.Is(err, context.Canceled) && way != byLateHint: // several row locks of a transaction that is open are not waited for
					t.Errorf("%s: %v", what, err)
				}
				var wait time.Duration
				if end != "NoWait" { // a busy server may not have answered in the moments that a caller gives it
					wait = 10 * time.Second
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
						k.hold(t, third, 10*time.Second)()
					}
				}
				if t.Failed() {
					t.Fatal(what)
				}
			}
		}
	})
}

// TestSlotRefusedUnderALease: a unit of work that goes on keeps what it had.
func TestSlotRefusedUnderALease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		h, err := mysqllock.Acquire(dbtest.Limited(t), other, "b", lockctx.Row())
		dbtest.OK(t, err)
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "job", lockctx.Lease(ttl))
		_, err = read(ctx, db, 1)
		dbtest.OK(t, err)
		more := lockctx.With(lockctx.With(ctx, "a", lockctx.Row()), "b", lockctx.Row(), lockctx.Slots(1), lockctx.NoWait())
		_, err = db.BeginTx(more, nil)
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("BeginTx: %v", err)
		}
		_, err = db.ExecContext(more, "UPDATE p SET stock = 0 WHERE id = 1")
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("Exec: %v", err)
		}
		_, err = read(more, db, 1)
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("Query: %v", err)
		}
		s.wantLeased("job", true)
		s.wantLocked("a", false)
		dbtest.OK(t, h.Release())
		tx, err := db.BeginTx(more, nil)
		dbtest.OK(t, err)
		s.wantLocked("b", true)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		s.wantLeased("job", false)
		s.wantStock(1, 9)
	})
}

// TestWaitIsForAllTogether: several locks are waited for no longer than one.
func TestWaitIsForAllTogether(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		const wait = 2 * time.Second
		for _, strategies := range [][2]lockctx.Option{{lockctx.Row(), lockctx.Row()}, {lockctx.Lease(ttl), lockctx.Row()}, {lockctx.Lease(ttl), lockctx.Lease(ttl)}} {
			for round := 1; ; round++ { // a busy machine may delay one
				first, err := mysqllock.Acquire(dbtest.Limited(t), other, "a", strategies[0])
				dbtest.OK(t, err)
				second, err := mysqllock.Acquire(dbtest.Limited(t), other, "b", strategies[1])
				dbtest.OK(t, err)
				time.AfterFunc(wait*2/3, func() { dbtest.OK(t, first.Release()) })
				ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "a", strategies[0]), "b", strategies[1], lockctx.Slots(1), lockctx.Wait(wait))
				tx, err := db.Begin()
				dbtest.OK(t, err)
				start := time.Now()
				_, err = tx.ExecContext(ctx, "DO 0")
				took := time.Since(start)
				tx.Rollback()
				dbtest.OK(t, second.Release())
				if !errors.Is(err, mysqllock.ErrTimeout) {
					t.Fatalf("after %v, with a wait of %v: %v", took, wait, err)
				}
				if took <= wait*3/2 {
					break
				}
				if round == 6 {
					t.Fatalf("of %d times it never took less than %v, with a wait of %v; at last %v", round, wait*3/2, wait, took)
				}
			}
		}
	})
}

// TestVeryManyKeys: no parameter of a procedure, and no limit of a statement, is too small for
// the keys of one unit of work, whether they are free or waited for.
func TestVeryManyKeys(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		first, second := s.open(), s.open()
		for _, c := range []struct{ n, length int }{{200, 255}, {1600, 12}} {
			var keys []string
			for i := range c.n {
				keys = append(keys, fmt.Sprintf("%s%0*d", dbtest.Random()[:4], c.length-4, i))
			}
			for how, opt := range everyStrategy {
				for range 2 {
					tx, err := first.BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys, opt), nil)
					if err != nil {
						t.Errorf("%d keys, %s: %v", c.n, how, err)
						break
					}
					_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
					dbtest.OK(t, err)
					if err := tx.Commit(); err != nil {
						t.Errorf("%d keys, %s: COMMIT: %v", c.n, how, err)
					}
				}
				if how == "optimistic" {
					continue
				}
				held, err := mysqllock.Acquire(dbtest.Limited(t), first, keys[0], opt)
				dbtest.OK(t, err)
				over := make(chan error, 1)
				go func() {
					tx, err := second.BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys, opt, lockctx.Wait(time.Minute)), nil)
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
