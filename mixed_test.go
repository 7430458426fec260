package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// What several kinds of lock mean for each other in one lock context, in a hold,
// and in two processes.

// TestHintInTransactionOfHold: a transaction under a hold takes other locks as
// well, and tells the lock context that asked.
func TestHintInTransactionOfHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := dbtest.Limited(t)
		for _, outer := range []lockctx.Option{lockctx.Lease(ttl), lockctx.Advisory()} {
			for name, inner := range map[string][]lockctx.Option{
				"row": nil, "shared": {lockctx.Shared()}, "slots": {lockctx.Slots(2)}, "lease": {lockctx.Lease(ttl)},
				"lease slots": {lockctx.Lease(ttl), lockctx.Slots(2)}, "advisory": {lockctx.Advisory()}, "optimistic": {lockctx.Optimistic()},
			} {
				for _, commit := range []bool{true, false} {
					h, err := mysqllock.Acquire(ctx, db, "outer", outer)
					dbtest.OK(t, err)
					tx, err := db.BeginTx(h.Context(), nil)
					dbtest.OK(t, err)
					with := lockctx.With(h.Context(), "inner", inner...)
					_, err = tx.ExecContext(with, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					dbtest.OK(t, err)
					if _, told := mysqllock.Slot(with); told != (name == "slots" || name == "lease slots") {
						t.Errorf("%s: Slot tells %v", name, told)
					}
					if _, told := mysqllock.Version(with); told != (name == "optimistic") {
						t.Errorf("%s: Version tells %v", name, told)
					}
					if commit {
						dbtest.OK(t, tx.Commit())
					} else {
						dbtest.OK(t, tx.Rollback())
					}
					if _, told := mysqllock.Slot(with); told {
						t.Errorf("%s: Slot tells of one that is given back", name)
					}
					dbtest.OK(t, h.Release())
					again, err := mysqllock.Acquire(ctx, s.open(), "inner", lockctx.NoWait())
					dbtest.OK(t, err)
					dbtest.OK(t, again.Release())
				}
			}
		}
		s.wantStock(1, 10+2*7)
	})
}

// TestKeyAndItsSlots: the key, and slots of it, in one hint are one lock.
func TestKeyAndItsSlots(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
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
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Slots(2))
			dbtest.OK(t, err)
			defer h.Release()
		}
		for _, opt := range []lockctx.Option{lockctx.Row(), lockctx.Lease(ttl)} {
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Slots(3), opt)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			_, err = tx.ExecContext(lockctx.With(ctx, "k", lockctx.Slots(2), opt), "UPDATE p SET stock = 1 WHERE id = 1")
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestSlotEndsWithItsLease: nobody need release a slot whose lease has run out.
func TestSlotEndsWithItsLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=1m")
		one := []lockctx.Option{lockctx.Lease(time.Second), lockctx.Slots(1)}
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		_, err := mysqllock.Acquire(ctx, db, "lapses", one...)
		dbtest.OK(t, err)
		cancel()
		_, err = mysqllock.Acquire(dbtest.Limited(t), db, "is over", append(one, lockctx.MaxHold(time.Second))...)
		dbtest.OK(t, err)
		for _, key := range []string{"lapses", "is over"} {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, key, lockctx.Lease(ttl), lockctx.Slots(1))
			dbtest.OK(t, err)
			dbtest.OK(t, h.Release())
		}
	})
}

// TestSlotHolder: who is refused a lease slot is told who has one.
func TestSlotHolder(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open("lockOwner=one"), s.open("lockOwner=two")
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(ttl), lockctx.Slots(1))
		dbtest.OK(t, err)
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

// TestVersionInsideLease: a lease keeps others out, but not the transactions in
// its hold, so no version is compared under it.
func TestVersionInsideLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		v, _ := mysqllock.Version(ctx)
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(ttl))
		dbtest.OK(t, err)
		defer h.Release()
		for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.IfVersion(v)} {
			_, err = db.ExecContext(lockctx.With(h.Context(), "k", opt), "UPDATE p SET stock = 1 WHERE id = 1")
			if !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Errorf("a version inside a lease on the key: %v", err)
			}
		}
		s.wantStock(1, 10)
	})
}

// TestVersionsThatDisagree: of two that are given, the older one counts.
func TestVersionsThatDisagree(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		var versions [2]uint64
		for i := range versions {
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			dbtest.OK(t, err)
			versions[i], _ = mysqllock.Version(ctx)
		}
		ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "k", lockctx.IfVersion(versions[1])), "k", lockctx.IfVersion(versions[0]))
		if _, err := db.ExecContext(ctx, "UPDATE p SET stock = 99 WHERE id = 1"); !errors.Is(err, mysqllock.ErrConflict) {
			t.Errorf("an older version inside a newer one: %v", err)
		}
		s.wantStock(1, 8)
	})
}

// TestReadBeforeSession: what a transaction has read before it comes under a
// session's lock is older than the lock.
func TestReadBeforeSession(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "k")
		tx := dbtest.Begin(t, base, db)
		_, err := read(base, tx, 1) // the snapshot
		dbtest.OK(t, err)
		_, err = db.ExecContext(lockctx.With(base, "k"), "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, err)
		_, err = read(ctx, db, 2) // the session
		dbtest.OK(t, err)
		if n, err := read(ctx, tx, 1); !errors.Is(err, mysqllock.ErrStaleSnapshot) {
			t.Errorf("it reads %d, %v", n, err)
		}
	})
}

// TestOldSnapshotUnderVersion: a transaction that text has begun may show what is
// older than the version.
func TestOldSnapshotUnderVersion(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		conn, err := db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer conn.Close()
		dbtest.Exec(t, conn, "BEGIN")
		_, err = read(dbtest.Limited(t), conn, 2)
		dbtest.OK(t, err)
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())
		_, err = read(ctx, db, 2)
		dbtest.OK(t, err)
		if _, err := read(ctx, conn, 1); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("a second read on another connection: %v", err)
		}
		dbtest.Exec(t, conn, "ROLLBACK")
	})
}

// TestConflictEndsTheUnit: also where it comes after a statement that failed.
func TestConflictEndsTheUnit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "l", lockctx.Lease(ttl)), "v", lockctx.Optimistic())
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "v"), "UPDATE p SET stock = 3 WHERE id = 1")
		dbtest.OK(t, err)
		if _, err = db.ExecContext(ctx, "INSERT INTO p VALUES (1, 1)"); err == nil {
			t.Error("a duplicate was inserted")
		}
		if _, err = db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1"); !errors.Is(err, mysqllock.ErrConflict) {
			t.Errorf("a statement after the conflict: %v", err)
		}
		s.wantLeased("l", false)
		s.wantStock(1, 3)
	})
}

// TestMarkingKeepsNobody: who waits until a key can first be kept optimistically
// does not keep others from other keys.
func TestMarkingKeepsNobody(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		a, err := mysqllock.Acquire(dbtest.Limited(t), db, "a")
		dbtest.OK(t, err)
		b, err := mysqllock.Acquire(dbtest.Limited(t), db, "b")
		dbtest.OK(t, err)
		waits := make(chan error, 1)
		go func() {
			_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "a", lockctx.Optimistic(), lockctx.Wait(2*time.Minute)), "UPDATE p SET stock = 1 WHERE id = 1")
			waits <- err
		}()
		dbtest.Soon(t, "it waits", func() bool { return s.waiters() == 1 })
		time.AfterFunc(100*time.Millisecond, func() { b.Release() })
		start := time.Now()
		_, err = db.ExecContext(lockctx.With(dbtest.Limited(t), "b", lockctx.Optimistic()), "UPDATE p SET stock = 1 WHERE id = 2")
		if took := time.Since(start); err != nil || took > time.Minute { // the other waits for longer
			t.Errorf("a key that is free: %v after %v", err, took)
		}
		dbtest.OK(t, a.Release())
		dbtest.OK(t, <-waits)
	})
}

// TestStripesComeLate: a process whose keys have rows of their own is refused as
// soon as others have keys share rows, although it was there before.
func TestStripesComeLate(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		own, striped := s.open(), s.open("lockStripes=4")
		h, err := mysqllock.Acquire(dbtest.Limited(t), own, "x", lockctx.Advisory())
		dbtest.OK(t, err)
		dbtest.OK(t, h.Release())
		h, err = mysqllock.Acquire(dbtest.Limited(t), striped, "k")
		dbtest.OK(t, err)
		defer h.Release()
		if _, err := mysqllock.Acquire(dbtest.Limited(t), own, "k"); !errors.Is(err, mysqllock.ErrUnsafe) {
			t.Errorf("a row of its own: %v", err)
		}
	})
}

// TestSeveralKeysLate: several keys that join a transaction are waited for, too.
func TestSeveralKeysLate(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		for _, wait := range []time.Duration{10 * time.Second, 200 * time.Millisecond} {
			h, err := mysqllock.Acquire(dbtest.Limited(t), other, "c")
			dbtest.OK(t, err)
			tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "a"), db)
			if wait > time.Second {
				time.AfterFunc(300*time.Millisecond, func() { h.Release() })
			}
			_, err = tx.ExecContext(lockctx.WithKeys(dbtest.Limited(t), []string{"b", "c"}, lockctx.Wait(wait)), "UPDATE p SET stock = 9 WHERE id = 1")
			if wait > time.Second {
				dbtest.OK(t, err)
				dbtest.OK(t, tx.Commit())
				continue
			}
			if !errors.Is(err, mysqllock.ErrTimeout) {
				t.Errorf("a wait that ends: %v", err)
			}
			wantLost(t, "Commit", tx.Commit()) // some of the keys may have been locked
			for _, key := range []string{"a", "b"} {
				s.wantLocked(key, false)
			}
			dbtest.OK(t, h.Release())
		}
	})
}
