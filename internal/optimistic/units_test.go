package optimistic_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Optimistic locks: each entry point, what conflicts, and that nothing is lost.

// wantConflict checks the error of a unit of work that met somebody else's.
func wantConflict(t *testing.T, what string, err error, op string) {
	t.Helper()
	var e *mysqllock.Error
	var by *mysql.MySQLError
	changed := errors.As(err, &by) && by.Number == 1020 // the server may have seen it before the commit
	switch {
	case !errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLost) || !errors.As(err, &e):
		t.Errorf("%s returned %v, want ErrConflict", what, err)
	case e.Op != op && (!changed || e.Op != "exec") || e.Key != "k" || e.Strategy != "optimistic":
		t.Errorf("%s returned op %q, key %q, strategy %q", what, e.Op, e.Key, e.Strategy)
	}
}

func wantVersion(t *testing.T, ctx context.Context, want uint64) {
	t.Helper()
	if version, ok := mysqllock.Version(ctx); version != want || ok != (want != 0) {
		t.Errorf("the version is %d, %v, want %d", version, ok, want)
	}
}

// optimistically is a new lock context.
func optimistically(t *testing.T, opts ...lockctx.Option) context.Context {
	return lockctx.With(dbtest.Limited(t), "k", append([]lockctx.Option{lockctx.Optimistic()}, opts...)...)
}

func TestEveryWayConflictsWithEveryKindOfOther(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		add := func(ctx context.Context) {
			t.Helper()
			dbtest.ExecIn(t, ctx, other, "UPDATE p SET stock = stock + 100 WHERE id = 1")
		}
		others := map[string]func(){
			"optimistic": func() { add(optimistically(t)) },
			"row":        func() { add(lockctx.With(dbtest.Limited(t), "k")) },
			"row, session": func() {
				ctx := lockctx.With(dbtest.Limited(t), "k")
				stock.MustRead(t, ctx, other, 1)
				add(ctx)
			},
			"slots": func() { add(lockctx.With(dbtest.Limited(t), "k", lockctx.Slots(1))) },
			"lease": func() { add(lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(stock.TTL))) },
			"lease, Do": func() {
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(ctx context.Context) error { add(ctx); return nil }, lockctx.Lease(stock.TTL)))
			},
			"row, Do": func() {
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), other, "k", func(ctx context.Context) error { add(ctx); return nil }))
			},
		}
		for name, unit := range units(lockctx.Optimistic()) {
			before := s.Stock(1)
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			s.WantStock(1, before+1)
			for another, commits := range others {
				before := s.Stock(1)
				err := unit(dbtest.Limited(t), db, commits)
				wantConflict(t, name+" beside "+another, err, "commit")
				s.WantStock(1, before+100)
			}
		}
		if st := db.Stats(); st.InUse != 0 {
			t.Errorf("%d connections are in use", st.InUse)
		}
	})
}

// TestACommitWithAVersionWaitsForNoHolder of its key.
func TestACommitWithAVersionWaitsForNoHolder(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle("lockWait=2m"), s.Handle()
		for holder, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "shared": lockctx.Shared(), "lease": lockctx.Lease(stock.TTL)} {
			for name, unit := range units(lockctx.Optimistic()) {
				dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
				before := s.Stock(1)
				var h *mysqllock.Hold
				var start time.Time
				err := unit(dbtest.Limited(t), db, func() {
					h = stock.Acquire(t, other, "k", opt)
					start = time.Now()
				})
				if took := time.Since(start); took > time.Minute { // the handle waits for longer
					t.Errorf("%s waited %v for a %s", name, took, holder)
				}
				wantConflict(t, name+" with a "+holder, err, "commit")
				if errors.Is(err, mysqllock.ErrLocked) != (holder != "lease") {
					t.Errorf("%s with a %s returned %v", name, holder, err)
				}
				dbtest.OK(t, h.Release())
				s.WantStock(1, before)
			}
		}
	})
}

// TestOnlyACommittedWriteMakesANewVersion: what tells versions, what makes new ones, and what
// needs none.
func TestOnlyACommittedWriteMakesANewVersion(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockStrategy=optimistic")
		ctx := lockctx.With(dbtest.Limited(t), "k")
		wantVersion(t, ctx, 0)
		n := stock.MustRead(t, ctx, db, 1)
		first := s.Token("k")
		wantVersion(t, ctx, first)
		if st := db.Stats(); st.InUse != 0 {
			t.Errorf("%d connections are pinned", st.InUse)
		}
		s.WantLocked("k", false)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		wantVersion(t, ctx, first+1)
		dbtest.Equal(t, "the version is %d", s.Token("k"), first+1)
		// The next unit of work, of another lock context: it does not rely on the read.
		ctx = lockctx.With(dbtest.Limited(t), "k")
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		wantVersion(t, ctx, first+2)
		s.WantStock(1, 8)

		// What only reads, and what is rolled back, changes no version.
		for what, unit := range map[string]func(ctx context.Context) error{
			"a query": func(ctx context.Context) error { _, err := stock.Read(ctx, db, 1); return err },
			"a transaction that reads": func(ctx context.Context) error {
				tx := dbtest.Begin(t, ctx, db)
				stock.MustRead(t, ctx, tx, 1)
				return tx.Commit()
			},
			"a READ ONLY transaction": func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
				dbtest.OK(t, err)
				stock.MustRead(t, ctx, tx, 1)
				if _, err := tx.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 1"); err == nil {
					t.Error("a READ ONLY transaction has written")
				}
				return tx.Commit()
			},
			"a transaction that is rolled back": func(ctx context.Context) error {
				tx := dbtest.Begin(t, ctx, db)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
				return tx.Rollback()
			},
			"a transaction of nothing": func(ctx context.Context) error {
				tx := dbtest.Begin(t, ctx, db)
				return tx.Commit()
			},
			"Do that reads": func(ctx context.Context) error {
				return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { _, err := stock.Read(ctx, db, 1); return err })
			},
			"Do that fails": func(ctx context.Context) error {
				err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = 1 WHERE id = 1")
					return sql.ErrNoRows
				})
				dbtest.Is(t, "Do", err, sql.ErrNoRows)
				return nil
			},
			"a hold that is rolled back": func(ctx context.Context) error {
				h, err := mysqllock.Acquire(ctx, db, "k")
				dbtest.OK(t, err)
				dbtest.ExecIn(t, h.Context(), db, "UPDATE p SET stock = 1 WHERE id = 1")
				return h.Rollback()
			},
		} {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			dbtest.OK(t, unit(ctx))
			if now := s.Token("k"); now != first+2 {
				t.Errorf("%s: the version is %d, want %d", what, now, first+2)
				first = now - 2
			}
			wantVersion(t, ctx, first+2)
		}
		s.WantStock(1, 8)

		// A read needs no end, nor does what comes after it.
		ctx = lockctx.With(context.Background(), "k")
		n = stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		// A context of the query alone ends nothing: there is nothing to give back.
		ctx = lockctx.With(context.Background(), "k")
		query, cancel := context.WithCancel(ctx)
		n = stock.MustRead(t, query, db, 1)
		cancel()
		time.Sleep(50 * time.Millisecond)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		s.WantStock(1, 6)

		// The end of the lock context ends the unit of work.
		base, end := context.WithCancel(dbtest.Limited(t))
		ctx = lockctx.With(base, "k")
		stock.MustRead(t, ctx, db, 1)
		end()
		ended := context.WithoutCancel(ctx)
		dbtest.Soon(t, "the unit of work has ended", func() bool {
			_, err := stock.Read(ended, db, 1)
			return errors.Is(err, mysqllock.ErrLost)
		})
		_, err := db.ExecContext(ended, "UPDATE p SET stock = 1 WHERE id = 1")
		stock.WantLost(t, "a write after the end of the lock context", err)
		s.WantStock(1, 6)
	})
}

// TestAVersionOfAnotherUnitIsGoodForOneCommit: IfVersion carries it over.
func TestAVersionOfAnotherUnitIsGoodForOneCommit(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		shown := func() uint64 {
			t.Helper()
			ctx := optimistically(t)
			stock.MustRead(t, ctx, other, 1)
			version, there := mysqllock.Version(ctx)
			if !there {
				t.Fatal("no version")
			}
			return version
		}
		stale := shown()
		for range 2 {
			dbtest.ExecIn(t, optimistically(t), other, "UPDATE p SET stock = stock + 100 WHERE id = 1")
		}
		calls := 0
		for name, unit := range units(lockctx.IfVersion(stale)) {
			before := s.Stock(1)
			calls = 0
			wantConflict(t, name+" with a version of old", unit(dbtest.Limited(t), db, func() { calls++ }), "commit")
			if calls != 1 { // no retry makes it new
				t.Errorf("%s ran %d times", name, calls)
			}
			s.WantStock(1, before)
		}
		for name := range units() {
			version := shown()
			before := s.Stock(1)
			unit := units(lockctx.IfVersion(version))[name]
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			s.WantStock(1, before+1)
			wantConflict(t, name+" with the same version again", unit(dbtest.Limited(t), db, func() {}), "commit")
			wantConflict(t, name+" with a version to come", units(lockctx.IfVersion(version + 7))[name](dbtest.Limited(t), db, func() {}), "commit")
			s.WantStock(1, before+1)
		}

		// Clean-up removes the row: no version of the old one is one of the next.
		for _, version := range []uint64{shown(), shown()} {
			dbtest.Exec(t, s.Plain, "UPDATE mysqllock f JOIN mysqllock r ON r.name = 'k' SET f.token = GREATEST(f.token, r.token) WHERE f.namespace = '' AND f.name = ''")
			dbtest.Exec(t, s.Plain, "DELETE FROM mysqllock WHERE name = 'k'")
			for _, db := range []*sql.DB{db, s.Handle()} {
				_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k", lockctx.IfVersion(version)), increment, 1)
				wantConflict(t, "a version of a row that was removed", err, "commit")
				if next := shown(); next <= version {
					t.Errorf("the version goes from %d to %d", version, next)
				}
			}
		}

		// A key that was never used has no version.
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "new", lockctx.IfVersion(1)), increment, 1)
		dbtest.Is(t, "a key that was never used", err, mysqllock.ErrConflict)
	})
}

// TestOptimisticConflictStays: what was decided on data that has changed is not
// written by trying again; only a new lock context can.
func TestOptimisticConflictStays(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for name, write := range map[string]func(ctx context.Context) error{
			"Exec": func(ctx context.Context) error { _, err := db.ExecContext(ctx, increment, 1); return err },
			"BeginTx": func(ctx context.Context) error {
				return stock.InTx(ctx, db, func(tx *sql.Tx) error {
					_, err := tx.Exec(increment, 1)
					return err
				})
			},
			"Do": func(ctx context.Context) error {
				return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, increment, 1)
					return err
				}, lockctx.Optimistic(), lockctx.Retry(3))
			},
		} {
			ctx := optimistically(t)
			stock.MustRead(t, ctx, db, 1)
			dbtest.ExecIn(t, optimistically(t), other, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			before := s.Stock(1)
			for try := range 3 {
				what := fmt.Sprintf("%s, try %d", name, try)
				err := write(ctx)
				if !errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("%s returned %v, want ErrConflict", what, err)
				}
				dbtest.Is(t, fmt.Sprintf("a read after %s", what), dbtest.Err(stock.Read(ctx, db, 1)), mysqllock.ErrConflict)
			}
			s.WantStock(1, before)
			dbtest.OK(t, write(optimistically(t)))
			s.WantStock(1, 1)
		}

		// A transaction that has read nothing outside of itself can be begun again.
		ctx := optimistically(t)
		for try := range 2 {
			tx := dbtest.Begin(t, ctx, db)
			n := stock.MustRead(t, ctx, tx, 1)
			if try == 0 {
				dbtest.ExecIn(t, optimistically(t), other, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			}
			_, err := tx.Exec(increment, n+1)
			if err == nil {
				err = tx.Commit()
			} else {
				_ = tx.Rollback()
			}
			if try == 0 {
				wantConflict(t, "Commit", err, "commit")
				continue
			}
			dbtest.OK(t, err)
			s.WantStock(1, n+1)
		}
	})
}

// TestAVersionDoesNotComeAgainInATableMadeAnew: who has read before the table was dropped, or emptied, does not commit, however
// many commits there were since.
func TestAVersionDoesNotComeAgainInATableMadeAnew(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for _, how := range []string{"DROP TABLE mysqllock", "TRUNCATE TABLE mysqllock"} {
			for i := range 2 {
				dbtest.ExecIn(t, optimistically(t), other, increment, i)
			}
			ctx := optimistically(t)
			n := stock.MustRead(t, ctx, db, 1)
			before, last := s.Token("k"), n
			dbtest.Exec(t, s.Plain, how)
			for range 3 {
				last++
				dbtest.ExecIn(t, optimistically(t), other, increment, last)
				if after := s.Token("k"); after <= before {
					t.Errorf("%s: the version was %d, and is %d", how, before, after)
				}
			}
			_, err := db.ExecContext(ctx, increment, n+10)
			dbtest.Is(t, how, err, mysqllock.ErrConflict)
			s.WantStock(1, last)
		}
	})
}

// TestOptimisticInTransactions: second keys, and transactions in transactions.
func TestOptimisticInTransactions(t *testing.T) {
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		// It has read before: what it has seen may be older than the version.
		first := lockctx.With(dbtest.Limited(t), "first", lockctx.Optimistic())
		asks := func(opts ...lockctx.Option) context.Context {
			return lockctx.With(first, "k", append(opts, lockctx.Optimistic())...)
		}
		tx := dbtest.Begin(t, first, db)
		n := stock.MustRead(t, context.Background(), tx, 1)
		dbtest.Is(t, "a second key after a read", dbtest.Err(tx.ExecContext(asks(), increment, n+1)), mysqllock.ErrStaleSnapshot)
		dbtest.OK(t, tx.Rollback())
		tx, err := db.BeginTx(first, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		dbtest.OK(t, err)
		stock.MustRead(t, context.Background(), tx, 1)
		n = stock.MustRead(t, asks(), tx, 1)
		dbtest.Exec(t, tx, increment, n+1)
		dbtest.OK(t, tx.Commit())
		s.WantStock(1, n+1)
		// Nor does a version say anything of what was read before it, wherever it is
		// from.
		for _, opt := range []lockctx.Option{lockctx.AllowStale(), lockctx.IfVersion(s.Token("k"))} {
			tx = dbtest.Begin(t, first, db)
			stock.MustRead(t, context.Background(), tx, 1)
			_, err = tx.ExecContext(asks(opt, lockctx.AllowStale()), increment, n+2)
			dbtest.Is(t, "a second key after a read, with AllowStale,", err, mysqllock.ErrStaleSnapshot)
			dbtest.OK(t, tx.Rollback())
		}
		s.WantStock(1, n+1)

		// A savepoint that is rolled back takes what it wrote along.
		ctx := optimistically(t)
		conn, err := db.Conn(ctx)
		dbtest.OK(t, err)
		defer conn.Close()
		outer := dbtest.Begin(t, ctx, conn)
		dbtest.Exec(t, outer, "UPDATE p SET stock = 1 WHERE id = 2")
		inner := dbtest.Begin(t, ctx, conn)
		dbtest.Exec(t, inner, increment, 77)
		dbtest.OK(t, inner.Rollback())
		dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { // joins
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE id = 3")
			return err
		}, lockctx.Optimistic()))
		s.WantStock(3, 10)
		dbtest.OK(t, outer.Commit())
		s.WantStock(1, n+1)
		s.WantStock(2, 1)
		s.WantStock(3, 1)

		// Two keys, one of them another's: neither is written under, nor changed.
		both := func() context.Context {
			return lockctx.WithKeys(dbtest.Limited(t), []string{"k", "l"}, lockctx.Optimistic())
		}
		dbtest.ExecIn(t, both(), db, increment, 6)
		for _, key := range []string{"k", "l"} {
			tx := dbtest.Begin(t, both(), db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), key, lockctx.Optimistic()), other, increment, 7)
			k, l := s.Token("k"), s.Token("l")
			err = tx.Commit()
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrConflict) || !errors.As(err, &e) || e.Key != "k, l" {
				t.Errorf("two keys, %s is changed: %v", key, err)
			}
			if s.Token("k") != k || s.Token("l") != l {
				t.Error("a commit that was refused has changed a version")
			}
		}
		s.WantStock(4, 10)
		// A second key that joins.
		ctx = optimistically(t)
		tx = dbtest.Begin(t, ctx, db)
		k, l := s.Token("k"), s.Token("l")
		dbtest.ExecIn(t, lockctx.With(ctx, "l", lockctx.Optimistic()), tx, increment, 8)
		dbtest.OK(t, tx.Commit())
		if s.Token("k") != k+1 || s.Token("l") != l+1 {
			t.Error("a commit under two keys has not changed both versions")
		}
	})
}

// TestOptimisticWaitsForALease: its holder may commit until it gives it back.
func TestOptimisticWaitsForALease(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle("lockWait=2m"), s.Handle()
		for name, unit := range units(lockctx.Optimistic()) {
			h := stock.Acquire(t, other, "k", lockctx.Lease(stock.TTL))
			ended := make(chan time.Time, 1)
			before := s.Stock(1)
			go func() {
				time.Sleep(100 * time.Millisecond)
				_, err := other.ExecContext(h.Context(), "UPDATE p SET stock = stock + 100 WHERE id = 1")
				ended <- time.Now()
				if err = errors.Join(err, h.Release()); err != nil {
					t.Error(err)
				}
			}()
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			if at := <-ended; time.Since(at) > time.Minute {
				t.Errorf("%s was through %v after the lease", name, time.Since(at))
			}
			s.WantStock(1, before+101)
		}

		h := stock.Acquire(t, other, "k", lockctx.Lease(time.Minute))
		before := s.Stock(1)
		var e *mysqllock.Error
		for name, unit := range units(lockctx.Optimistic(), lockctx.NoWait()) {
			start := time.Now()
			err := unit(dbtest.Limited(t), db, func() {})
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) ||
				e.Op != "lock" || e.Key != "k" || e.Strategy != "optimistic" || e.Holder == nil || time.Since(start) > time.Minute {
				t.Errorf("%s with NoWait returned %v", name, err)
			}
		}
		for name, unit := range units(lockctx.Optimistic(), lockctx.Wait(100*time.Millisecond)) {
			err := stock.Naming(func() error { return unit(dbtest.Limited(t), db, func() {}) })
			if !errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Holder == nil || e.Waited < 50*time.Millisecond { // what came before the wait counts against it
				t.Errorf("%s with a short wait returned %v", name, err)
			}
		}
		// A caller whose context ends gets away.
		for name, unit := range units(lockctx.Optimistic()) {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			result := dbtest.Go(func() error { return unit(ctx, db, func() {}) })
			time.Sleep(100 * time.Millisecond)
			start := time.Now()
			cancel()
			err := <-result
			if took := time.Since(start); !errors.Is(err, context.Canceled) || took > time.Minute {
				t.Errorf("%s returned %v, %v after the end of its context", name, err, took)
			}
		}
		dbtest.OK(t, h.Release())
		s.WantStock(1, before)
		dbtest.Soon(t, "no connection is in use", func() bool {
			st, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return db.Stats().InUse == 0 && st.InUse == 0
		})
		dbtest.OK(t, units(lockctx.Optimistic(), lockctx.NoWait())["BeginTx"](dbtest.Limited(t), db, func() {}))

		// A handle that is closed ends the wait, too.
		h = stock.Acquire(t, other, "k", lockctx.Lease(time.Minute))
		closing := s.Handle()
		result := dbtest.Go(func() error { return dbtest.Err(closing.ExecContext(optimistically(t), increment, 1)) })
		time.Sleep(200 * time.Millisecond)
		dbtest.OK(t, closing.Close())
		if err := <-result; err == nil {
			t.Error("a closed handle has written")
		}
		dbtest.OK(t, h.Release())
	})
}

// TestRowLocksRaise: the commit of a row lock counts where, and only where, the key
// was kept optimistically, and it has written.
func TestRowLocksRaise(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k"), db, "DO 1") // makes the row
		for _, versioned := range []bool{false, true} {
			if versioned {
				stock.MustRead(t, optimistically(t), db, 1)
			}
			for name, unit := range units(lockctx.Row()) {
				before := s.Token("k")
				err := unit(dbtest.Limited(t), db, func() {})
				dbtest.OK(t, err)
				after := s.Token("k")
				if versioned && after != before+1 || !versioned && after != before {
					t.Errorf("%s, versioned %v: the version goes from %d to %d", name, versioned, before, after)
				}
			}
			before := s.Token("k")
			tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
			stock.MustRead(t, dbtest.Limited(t), tx, 1)
			dbtest.OK(t, tx.Commit())
			tx = dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			dbtest.OK(t, tx.Commit())
			tx = dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			dbtest.OK(t, tx.Rollback())
			if after := s.Token("k"); after != before {
				t.Errorf("versioned %v: what has not written, or is shared, changes the version", versioned)
			}
		}

		// What a transaction has written before it asks for the key counts, too.
		for what, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
			before := s.Token("k")
			first := lockctx.With(dbtest.Limited(t), "first", opt)
			tx := dbtest.Begin(t, first, db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 4")
			stock.MustRead(t, lockctx.With(first, "k", opt), tx, 1)
			dbtest.OK(t, tx.Commit())
			if after := s.Token("k"); after != before+1 {
				t.Errorf("%s, written before the hint: the version goes from %d to %d", what, before, after)
			}
		}
	})
}

// TestAVersionIsRefusedInATransactionOfText, whose snapshot may be older than the version.
func TestAVersionIsRefusedInATransactionOfText(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for _, begin := range []string{"BEGIN", "SET autocommit = 0"} {
			for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.IfVersion(1)} {
				conn := dbtest.Conn(t, db)
				dbtest.Exec(t, conn, begin)
				stock.MustRead(t, dbtest.Limited(t), conn, 1)
				dbtest.ExecIn(t, optimistically(t), other, "UPDATE p SET stock = stock + 1 WHERE id = 1")
				if n, err := stock.Read(lockctx.With(dbtest.Limited(t), "k", opt), conn, 1); !errors.Is(err, mysqllock.ErrUnsafe) {
					t.Errorf("after %s: %d, %v", begin, n, err)
				}
				dbtest.Exec(t, conn, "ROLLBACK")
				dbtest.Exec(t, conn, "SET autocommit = 1")
				stock.MustRead(t, optimistically(t), conn, 1)
				dbtest.OK(t, conn.Close())
			}
		}
	})
}

// TestAVersionGoesWithNoLockInOneLockContext: the second hint is refused, whichever it is, before
// anything is sent, and what came first goes on.
func TestAVersionGoesWithNoLockInOneLockContext(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{Wait: 30 * time.Second})
		const write = "UPDATE p SET stock = stock + 1 WHERE id = 1"
		exec := func(ctx context.Context, db dbtest.Execer) error { return dbtest.Err(db.ExecContext(ctx, write)) }
		refused := func(what, locked, by string, f func() error) {
			t.Helper()
			says := fmt.Sprintf(`: not safe here: the lock context also asks for %q, by the strategy %s, and an optimistic version goes with no lock; `+
				`keep both keys by one strategy, or give each a lock context of its own, by lockctx.With on the context from before the other one`, locked, by)
			for round := 1; ; round++ {
				since := tap.Since()
				err := f()
				if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), says) {
					t.Errorf("%s: got  %v\nwant %s", what, err, says)
					return
				}
				if sent := since(); len(sent) == 0 {
					return
				} else if round == 25 { // a connection may have been kept alive in between
					t.Errorf("%s: %v were sent", what, sent)
					return
				}
			}
		}
		stock.MustRead(t, optimistically(t), db, 1)
		for name, c := range map[string]struct {
			by  string
			opt lockctx.Option
		}{
			"row": {"row", lockctx.Row()}, "shared": {"row", lockctx.Shared()}, "slots": {"row", lockctx.Slots(2)},
			"lease": {"lease", lockctx.Lease(stock.TTL)}, "lease slots": {"lease", func(h *hint.Hint) { lockctx.Lease(stock.TTL)(h); lockctx.Slots(2)(h) }},
			"advisory": {"advisory", lockctx.Advisory()},
		} {
			locked := func(ctx context.Context, key string) context.Context { return lockctx.With(ctx, key, c.opt) }
			versioned := func(ctx context.Context) context.Context { return lockctx.With(ctx, "k", lockctx.Optimistic()) }
			for _, key := range []string{"k", "l"} {
				for order, ctx := range map[string]context.Context{
					"the version first": locked(optimistically(t), key), "the lock first": versioned(locked(dbtest.Limited(t), key)),
				} {
					for way, f := range map[string]func() error{
						"Exec":    func() error { return exec(ctx, db) },
						"Query":   func() error { return dbtest.Err(stock.Read(ctx, db, 1)) },
						"BeginTx": func() error { return dbtest.Err(db.BeginTx(ctx, nil)) },
						"Do": func() error {
							return mysqllock.Do(ctx, db, "k", func(context.Context) error { return errors.New("it has run") }, lockctx.Optimistic())
						},
					} {
						refused(fmt.Sprintf("%s on %s, %s, %s", name, key, order, way), key, c.by, f)
					}
				}
			}

			// In what has begun with the other one, also by a lock context of its own.
			before := s.Stock(1)
			ctx := optimistically(t)
			tx := dbtest.Begin(t, ctx, db)
			refused(name+" in a transaction with a version", "l", c.by, func() error { return exec(locked(ctx, "l"), tx) })
			refused(name+" of its own in a transaction with a version", "l", c.by, func() error { return exec(locked(dbtest.Limited(t), "l"), tx) })
			dbtest.OK(t, exec(ctx, tx))
			dbtest.OK(t, tx.Commit())
			ctx = optimistically(t)
			stock.MustRead(t, ctx, db, 1)
			refused(name+" after a read with a version", "l", c.by, func() error { return exec(locked(ctx, "l"), db) })
			dbtest.OK(t, exec(ctx, db))
			ctx = locked(dbtest.Limited(t), "l")
			tx = dbtest.Begin(t, ctx, db)
			refused("a version in a transaction under "+name, "l", c.by, func() error { return exec(versioned(ctx), tx) })
			refused("a version of its own in a transaction under "+name, "l", c.by, func() error { return exec(optimistically(t), tx) })
			dbtest.OK(t, exec(ctx, tx))
			dbtest.OK(t, tx.Commit())
			s.WantStock(1, before+3)
		}

		// A lock context inside of a hold is another one.
		before := s.Stock(1)
		for _, opt := range []lockctx.Option{lockctx.Lease(stock.TTL), lockctx.Advisory()} {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "job", func(ctx context.Context) error {
				return exec(lockctx.With(ctx, "k", lockctx.Optimistic()), db)
			}, opt))
		}
		s.WantStock(1, before+2)
	})
}

func TestKeysOfOneRowConflictButNeverWithThemselves(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle("lockStripes=1"), s.Handle("lockStripes=1")
		write := func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		}
		with := func(ctx context.Context, key string, opts ...lockctx.Option) context.Context {
			return lockctx.With(ctx, key, opts...)
		}
		for name, unit := range units(lockctx.Optimistic()) {
			before := s.Stock(1)
			dbtest.OK(t, unit(dbtest.Limited(t), db, func() {}))
			s.WantStock(1, before+1)
			for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.Row(), lockctx.Lease(stock.TTL)} {
				wantConflict(t, name, unit(dbtest.Limited(t), db, func() { dbtest.OK(t, write(with(dbtest.Limited(t), "other", opt), other)) }), "commit")
			}
		}
		// Of two versions each has to be right.
		ctx := optimistically(t)
		stock.MustRead(t, ctx, db, 1)
		version, _ := mysqllock.Version(ctx)
		dbtest.OK(t, write(with(ctx, "other", lockctx.Optimistic()), db))
		wantVersion(t, ctx, version+1)
		for _, versions := range [][2]uint64{{version, version + 1}, {version + 1, version}} {
			ctx := with(with(dbtest.Limited(t), "k", lockctx.IfVersion(versions[0])), "other", lockctx.IfVersion(versions[1]))
			dbtest.Is(t, fmt.Sprintf("versions %v, and it is %d", versions, version+1), write(ctx, db), mysqllock.ErrConflict)
		}
	})
}

// TestDoRunsAgainAfterAConflict as often as Retry says, and not with a version that was given,
// which stays what it is.
func TestDoRunsAgainAfterAConflict(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		for _, c := range []struct {
			first     lockctx.Option
			conflicts int // of the first runs
			runs      int
			want      error
		}{
			{lockctx.Optimistic(), 2, 3, nil},
			{lockctx.Optimistic(), 9, 3, mysqllock.ErrConflict},
			{lockctx.IfVersion(1_000_000), 9, 1, mysqllock.ErrConflict},
		} {
			runs := 0
			err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				n, err := stock.Read(ctx, db, 1)
				if runs++; runs <= c.conflicts {
					dbtest.ExecIn(t, optimistically(t), other, "UPDATE p SET stock = stock + 1 WHERE id = 2")
				}
				if err == nil {
					_, err = db.ExecContext(ctx, increment, n+1)
				}
				return err
			}, c.first, lockctx.Retry(2))
			if runs != c.runs || !errors.Is(err, c.want) {
				t.Errorf("%d conflicts: %d runs, want %d: %v", c.conflicts, runs, c.runs, err)
			}
		}
		s.WantStock(1, 11)
	})
}

// TestAVersionCostsItsNumberOfStatements, on these paths, for a key whose row is there, and marked. The golden files
// of the matrix have the others.
func TestAVersionCostsItsNumberOfStatements(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{})
		db.SetMaxOpenConns(1)
		const add = "UPDATE p SET stock = stock + 1 WHERE id = 1"
		read := func(ctx context.Context, db stock.Querier) error { // not prepared
			var n int
			return db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n)
		}
		costs := func(what string, want int, opts *sql.TxOptions, writes bool, end func(*sql.Tx) error, keys []string, how ...lockctx.Option) {
			t.Helper()
			tap.Costs(t, what, want, func() error {
				ctx := lockctx.WithKeys(dbtest.Limited(t), keys, how...)
				tx, err := db.BeginTx(ctx, opts)
				dbtest.OK(t, err)
				if writes {
					dbtest.Exec(t, tx, add)
				} else {
					dbtest.OK(t, read(ctx, tx))
				}
				return end(tx)
			})
		}
		k, commit := []string{"k"}, (*sql.Tx).Commit
		costs("transaction that reads", 3, nil, false, commit, k, lockctx.Optimistic())
		costs("READ ONLY transaction", 3+1, &sql.TxOptions{ReadOnly: true}, false, commit, k, lockctx.Optimistic())
		costs("transaction of two keys", 3, nil, true, commit, []string{"k", "l"}, lockctx.Optimistic())
		costs("transaction that is rolled back", 3, nil, true, (*sql.Tx).Rollback, k, lockctx.Optimistic())
		version := lockctx.IfVersion(s.Token("k"))
		tap.Costs(t, "with a version that was given", 1+2, func() error {
			ctx := lockctx.With(dbtest.Limited(t), "k", version)
			dbtest.OK(t, read(ctx, db))
			_, err := db.ExecContext(ctx, add)
			version = lockctx.IfVersion(s.Token("k"))
			return err
		})
		tap.Costs(t, "query, query, Exec", 3+2, func() error {
			ctx := optimistically(t)
			for range 2 {
				dbtest.OK(t, read(ctx, db))
			}
			_, err := db.ExecContext(ctx, add)
			return err
		})
		// Row locks cost no statement more on keys that are kept optimistically.
		costs("row, transaction", 3, nil, true, commit, k)
		costs("row, transaction that reads", 3, nil, false, commit, k)
		tap.Costs(t, "row, read and write", 3, func() error {
			ctx := lockctx.With(dbtest.Limited(t), "k")
			dbtest.OK(t, read(ctx, db))
			_, err := db.ExecContext(ctx, add)
			return err
		})
	})
}
