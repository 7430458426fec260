package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Many readers or one writer.

// TestSharedByEachWay: readers go together, and nobody beside a writer, however
// they ask.
func TestSharedByEachWay(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		exec(t, s.plain, sectionsTable)
		other, db := startChild(t, "crew", s.childDSN()), s.open()
		highest := 0
		for _, way := range allWays {
			for round := 1; ; round++ {
				all, sum := s.work(other, db, crew{Way: way, Workers: 4, Length: 400 * time.Millisecond, Keys: 1, Most: 1, Shared: 75, Think: 10 * time.Millisecond})
				most := wantExclusion(t, all)
				writers := len(slices.DeleteFunc(slices.Clone(all), func(x section) bool { return x.shared }))
				highest = max(highest, most)
				t.Logf("%s: %d sections, %d of writers, at most %d at the same time; longest wait %v", way, len(all), writers, most, sum.Longest)
				if most >= 2 && writers > 0 { // a busy machine may need another try
					break
				}
				if round == 10 {
					t.Fatalf("%s: at most %d readers at the same time, and %d writers", way, most, writers)
				}
			}
		}
		if highest < 5 { // more than a process has workers
			t.Errorf("at most %d readers at the same time", highest)
		}
	})
}

// TestReadersSideBySide: 64 readers take no longer than their connections make
// them.
func TestReadersSideBySide(t *testing.T) {
	const readers, reading = 64, 100 * time.Millisecond
	onServers(t, func(t *testing.T, s *scratch) {
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
			db := s.open(test.param)
			db.SetMaxOpenConns(test.conns)
			db.SetMaxIdleConns(readers)
			limit, took := readers*reading/2, time.Duration(0)
			for round := 0; round < 2 || took > limit && round < 12; round++ { // the first opens connections, and the machine may be busy
				start := time.Now()
				var all sync.WaitGroup
				for range readers {
					all.Go(func() {
						ctx, err := limited(t), error(nil)
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
			ok(t, db.Close())
		}
	})
}

// TestWriterAmongReaders: among a steady stream of readers in two processes a
// writer, in one of them or in a third, gets in before many more have.
func TestWriterAmongReaders(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		exec(t, s.plain, sectionsTable)
		other, db, third := startChild(t, "crew", s.childDSN()), s.open(), s.open()
		for _, db := range []*sql.DB{db, third} { // connections, and what comes with the first lock
			_, err := db.ExecContext(lockctx.With(limited(t), "k00"), "DO 0")
			ok(t, err)
		}
		const workers = 8
		type wait struct{ asked, granted int64 }
		var waits []wait
		var writer sync.WaitGroup
		writer.Go(func() {
			time.Sleep(300 * time.Millisecond)
			for i := range 40 {
				asked := time.Now().UnixMicro()
				tx, err := []*sql.DB{db, third}[i%2].BeginTx(lockctx.With(limited(t), "k00"), nil)
				if err != nil {
					t.Error(err)
					return
				}
				waits = append(waits, wait{asked, time.Now().UnixMicro()})
				exec(t, tx, "INSERT INTO sections (k, shared, slot, slots, who, began, ended) VALUES ('k00', FALSE, -1, 0, 'writer', ?, ?)", waits[i].granted, time.Now().UnixMicro())
				ok(t, tx.Commit())
				time.Sleep(20 * time.Millisecond)
			}
		})
		all, _ := s.work(other, db, crew{Way: byBeginTx, Workers: workers, Length: 3 * time.Second, Keys: 1, Most: 1, Shared: 100, Think: 10 * time.Millisecond})
		writer.Wait()
		wantExclusion(t, s.sections())
		var grants []int
		var longest int64
		for _, w := range waits {
			n := 0
			for _, x := range all {
				if x.shared && w.asked < x.began && x.began < w.granted {
					n++
				}
			}
			grants, longest = append(grants, n), max(longest, w.granted-w.asked)
		}
		slices.Sort(grants)
		// Without a queue it would never get in. A machine that stands still for a
		// moment delays a writer that has not yet asked the server.
		if n := len(grants); n == 0 || grants[n*3/4] > 10*workers {
			t.Errorf("while a writer waited, %v readers of %d workers got in", grants, 2*workers)
		}
		t.Logf("readers that began while a writer waited: %v; longest wait %v; %d readers", grants, time.Duration(longest)*time.Microsecond, len(all))
	})
}

// TestSharedIsNotRaised: who has the key shared is refused the exclusive lock,
// and keeps what it has.
func TestSharedIsNotRaised(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		shared := func(db *sql.DB) error {
			h, err := mysqllock.Acquire(limited(t), db, "k", lockctx.Shared(), lockctx.NoWait())
			if err == nil {
				ok(t, h.Release())
			}
			return err
		}
		wantRefused := func(what string, err error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &e) || e.Key != "k" {
				t.Errorf("%s: %v", what, err)
			}
			ok(t, shared(other))
		}
		ctx := lockctx.With(limited(t), "k", lockctx.Shared())
		tx, err := db.BeginTx(ctx, nil)
		ok(t, err)
		_, err = tx.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a statement of the transaction", err)
		_, err = db.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a statement beside it", err)
		_, err = db.BeginTx(lockctx.With(ctx, "k"), nil)
		wantRefused("BeginTx", err)
		wantRefused("Do", mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }))
		_, err = tx.ExecContext(lockctx.With(ctx, "k", lockctx.Slots(3)), "UPDATE p SET stock = 0 WHERE id = 1")
		wantRefused("a slot", err)
		exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		ok(t, tx.Commit())
		s.wantStock(1, 9)

		// Asked for both before anything is locked, it is exclusive; and who has
		// that has the key shared, too.
		for _, ctx := range []context.Context{
			lockctx.With(lockctx.With(limited(t), "k", lockctx.Shared()), "k"),
			lockctx.With(lockctx.With(limited(t), "k"), "k", lockctx.Shared()),
		} {
			tx, err = db.BeginTx(ctx, nil)
			ok(t, err)
			if err := shared(other); !errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("shared beside exclusive: %v", err)
			}
			ok(t, mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }, lockctx.Shared()))
			ok(t, tx.Commit())
		}
		s.wantLocked("k", false)

		// Slots of a key that is asked for shared in the same breath.
		tx, err = db.BeginTx(lockctx.With(lockctx.With(limited(t), "k", lockctx.Shared()), "k", lockctx.Slots(3)), nil)
		if err == nil {
			ok(t, tx.Rollback())
		}
		wantRefused("shared and a slot", err)
		s.wantLocked("k", false)
	})
}

// TestSharedNeedsARowLock: it is never quietly another lock.
func TestSharedNeedsARowLock(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		for _, strategy := range []string{lockctx.StrategyLease, lockctx.StrategyAdvisory, lockctx.StrategyOptimistic} {
			db := s.open("lockStrategy=" + strategy)
			_, err := db.BeginTx(lockctx.With(limited(t), "k", lockctx.Shared()), nil)
			if err == nil || errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("a handle with lockStrategy=%s: %v", strategy, err)
			}
			_, err = mysqllock.Acquire(limited(t), db, "k", lockctx.Shared())
			if err == nil {
				t.Errorf("Acquire on a handle with lockStrategy=%s went through", strategy)
			}
			tx, err := db.BeginTx(lockctx.With(limited(t), "k", lockctx.Shared(), lockctx.Row()), nil)
			ok(t, err)
			ok(t, tx.Rollback())
		}
	})
}

// TestSharedAndLeases: who shares the key waits for a lease on it, and a lease
// for who shares it.
func TestSharedAndLeases(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		h, err := mysqllock.Acquire(limited(t), db, "k", lockctx.Lease(ttl))
		ok(t, err)
		_, err = other.BeginTx(lockctx.With(limited(t), "k", lockctx.Shared(), lockctx.NoWait()), nil)
		if !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("shared, beside a lease: %v", err)
		}
		granted := make(chan *sql.Tx)
		go func() {
			tx, err := other.BeginTx(lockctx.With(limited(t), "k", lockctx.Shared()), nil)
			if err != nil {
				t.Error(err)
			}
			granted <- tx
		}()
		time.Sleep(50 * time.Millisecond)
		ok(t, h.Release())
		tx := <-granted
		_, err = mysqllock.Acquire(limited(t), db, "k", lockctx.Lease(ttl), lockctx.Wait(100*time.Millisecond))
		if !errors.Is(err, mysqllock.ErrTimeout) {
			t.Errorf("a lease, beside one who shares: %v", err)
		}
		s.wantLeased("k", false)
		ok(t, tx.Commit())
		h, err = mysqllock.Acquire(limited(t), db, "k", lockctx.Lease(ttl))
		ok(t, err)
		ok(t, h.Release())
	})
}

// TestStatementsOfSharedLocksAndSlots: a shared lock and a free slot cost what an
// exclusive lock does; in a transaction that is open a free slot is looked for first.
func TestStatementsOfSharedLocksAndSlots(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		db.SetMaxOpenConns(1)
		late := 6
		if s.mariadb {
			late = 8 // the limit on idleness is put off and on
		}
		update := func(tx *sql.Tx, err error) error {
			if err == nil {
				exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
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
			{"lease", 6, 8, []lockctx.Option{lockctx.Lease(time.Minute)}},
			{"slots, lease", 6, 8, []lockctx.Option{lockctx.Lease(time.Minute), lockctx.Slots(5)}},
		} {
			with := func() context.Context { return lockctx.With(limited(t), "k", kind.opts...) }
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
			if kind.want != 6 {
				paths = append(paths, path{kind.name + ": Acquire and Release", 2, func() error {
					h, err := mysqllock.Acquire(limited(t), db, "k", kind.opts...)
					if err == nil {
						err = h.Release()
					}
					return err
				}})
			}
		}
		for _, p := range paths {
			for range 8 { // every slot's row and its connection are there
				ok(t, p.run())
			}
			tap.costs(t, p.what, p.want, p.run)
		}
	})
}
