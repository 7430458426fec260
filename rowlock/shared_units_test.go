package rowlock_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Many readers or one writer.

// TestReadersOfAHandleRunSideBySide: 64 readers take no longer than their connections make
// them.
func TestReadersOfAHandleRunSideBySide(t *testing.T) {
	const readers, reading = 64, 100 * time.Millisecond
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, test := range []struct {
			name  string
			conns int // of database/sql; 0 is unlimited
			param string
			do    bool
		}{
			{"BeginTx", 0, "lockMaxConns=16", false},
			{"BeginTx on 8 connections", 8, "lockMaxConns=16", false},
			{"Do", 0, "lockMaxConns=64", true},
			{"Do on 8 sessions", 0, "lockMaxConns=8", true},
			{"Do on 8 sessions, with 2 connections", 2, "lockMaxConns=8", true},
		} {
			db := s.Handle(test.param)
			db.SetMaxOpenConns(test.conns)
			db.SetMaxIdleConns(readers)
			limit, took := readers*reading/2, time.Duration(0)
			for round := 0; round < 2 || took > limit && round < 12; round++ { // the first opens connections, and the machine may be busy
				start := time.Now()
				var all sync.WaitGroup
				for range readers {
					all.Go(func() {
						ctx, err := dbtest.Limited(t), error(nil)
						if test.do {
							err = mysqllock.Do(ctx, db, "k", func(context.Context) error { time.Sleep(reading); return nil }, lockctx.Shared())
						} else {
							var tx *sql.Tx
							if tx, err = db.BeginTx(lockctx.With(ctx, "k", lockctx.Shared()), nil); err == nil {
								time.Sleep(reading)
								err = tx.Commit()
							}
						}
						if err != nil {
							t.Error(err)
						}
					})
				}
				all.Wait()
				took = time.Since(start)
			}
			if took > limit {
				t.Errorf("%s: %d readers of %v each took %v", test.name, readers, reading, took)
			}
			t.Logf("%s: %v", test.name, took)
			dbtest.OK(t, db.Close())
		}
	})
}

// TestSharedIsNotRaised: who has the key shared is refused the exclusive lock,
// and keeps what it has.
func TestSharedIsNotRaised(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		shared := func(db *sql.DB) error {
			h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Shared(), lockctx.NoWait())
			if err == nil {
				dbtest.OK(t, h.Release())
			}
			return err
		}
		wantRefused := func(what string, err error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &e) || e.Key != "k" {
				t.Errorf("%s: %v", what, err)
			}
			dbtest.OK(t, shared(other))
		}
		ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Shared())
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		_, err = tx.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a statement of the transaction", err)
		_, err = db.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a statement beside it", err)
		_, err = db.BeginTx(lockctx.With(ctx, "k"), nil)
		wantRefused("BeginTx", err)
		wantRefused("Do", mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }))
		_, err = tx.ExecContext(lockctx.With(ctx, "k", lockctx.Slots(3)), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a slot", err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		s.WantStock(1, 9)

		// Asked for both before anything is locked, it is exclusive; and who has
		// that has the key shared, too.
		for _, ctx := range []context.Context{
			lockctx.With(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), "k"),
			lockctx.With(lockctx.With(dbtest.Limited(t), "k"), "k", lockctx.Shared()),
		} {
			tx, err = db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			if err := shared(other); !errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("shared beside exclusive: %v", err)
			}
			dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }, lockctx.Shared()))
			dbtest.OK(t, tx.Commit())
		}
		s.WantLocked("k", false)

		// Slots of a key that is asked for shared in the same breath.
		tx, err = db.BeginTx(lockctx.With(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), "k", lockctx.Slots(3)), nil)
		if err == nil {
			dbtest.OK(t, tx.Rollback())
		}
		wantRefused("shared and a slot", err)
		s.WantLocked("k", false)
	})
}

// TestSharedNeedsARowLock: it is never quietly another lock.
func TestSharedNeedsARowLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, strategy := range []string{hint.StrategyLease, hint.StrategyAdvisory, hint.StrategyOptimistic} {
			db := s.Handle("lockStrategy=" + strategy)
			_, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), nil)
			if err == nil || errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("a handle with lockStrategy=%s: %v", strategy, err)
			}
			_, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Shared())
			if err == nil {
				t.Errorf("Acquire on a handle with lockStrategy=%s went through", strategy)
			}
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared(), lockctx.Row()), nil)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestSharedAndLeases: who shares the key waits for a lease on it, and a lease
// for who shares it.
func TestSharedAndLeases(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(stock.TTL))
		dbtest.OK(t, err)
		_, err = other.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared(), lockctx.NoWait()), nil)
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("shared, beside a lease: %v", err)
		}
		granted := make(chan *sql.Tx)
		go func() {
			tx, err := other.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Shared()), nil)
			if err != nil {
				t.Error(err)
			}
			granted <- tx
		}()
		time.Sleep(50 * time.Millisecond)
		dbtest.OK(t, h.Release())
		tx := <-granted
		_, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(stock.TTL), lockctx.Wait(100*time.Millisecond))
		if !errors.Is(err, mysqllock.ErrTimeout) {
			t.Errorf("a lease, beside one who shares: %v", err)
		}
		s.WantLeased("k", false)
		dbtest.OK(t, tx.Commit())
		h, err = mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Lease(stock.TTL))
		dbtest.OK(t, err)
		dbtest.OK(t, h.Release())
	})
}

// TestStatementsOfSharedLocksAndSlots: a shared lock and a free slot cost what an
// exclusive lock does; in a transaction that is open a free slot is looked for first.
func TestStatementsOfSharedLocksAndSlots(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{})
		db.SetMaxOpenConns(1)
		late := 6
		if s.MariaDB() {
			late = 8 // the limit on idleness is put off and on
		}
		update := func(tx *sql.Tx, err error) error {
			if err == nil {
				dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
				err = tx.Commit()
			}
			return err
		}
		type path struct {
			what string
			want int
			run  func() error
		}
		var paths []path
		for _, kind := range []struct {
			name       string
			want, late int
			opts       []lockctx.Option
		}{
			{"exclusive", 3, late, nil},
			{"shared", 3, late, []lockctx.Option{lockctx.Shared()}},
			{"slots", 3, late + 1, []lockctx.Option{lockctx.Slots(5)}},
			{"lease", 3, 8, []lockctx.Option{lockctx.Lease(time.Minute)}},
			{"slots, lease", 5, 8, []lockctx.Option{lockctx.Lease(time.Minute), lockctx.Slots(5)}},
		} {
			with := func() context.Context { return lockctx.With(dbtest.Limited(t), "k", kind.opts...) }
			paths = append(
				paths,
				path{kind.name + ": transaction", kind.want, func() error { return update(db.BeginTx(with(), nil)) }},
				path{kind.name + ": Exec", kind.want, func() error {
					_, err := db.ExecContext(with(), "UPDATE p SET stock = 2 WHERE id = 1")
					return err
				}},
				path{kind.name + ": late hint", kind.late, func() error {
					tx, err := db.BeginTx(context.Background(), nil)
					if err == nil {
						_, err = tx.ExecContext(with(), "UPDATE p SET stock = 3 WHERE id = 1")
					}
					if err == nil {
						err = tx.Commit()
					}
					return err
				}},
			)
			if !strings.Contains(kind.name, "lease") {
				paths = append(paths, path{kind.name + ": Acquire and Release", 2, func() error {
					h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", kind.opts...)
					if err == nil {
						err = h.Release()
					}
					return err
				}})
			}
		}
		for _, p := range paths {
			for range 8 { // every slot's row and its connection are there
				dbtest.OK(t, p.run())
			}
			tap.Costs(t, p.what, p.want, p.run)
		}
	})
}
