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

// lapse makes key's row that of a lease which has run out and was never given back.
func (s *scratch) lapse(db *sql.DB, key string) {
	s.T.Helper()
	ctx := lockctx.With(dbtest.Limited(s.T), key)
	_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 3") // the row is there
	dbtest.OK(s.T, err)
	dbtest.Exec(s.T, s.plain, "UPDATE mysqllock SET owner = 'dead:1:x#0a1b2c3d', token = token + 1, expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ? AND name = ?", s.Name, key)
}

// fenced is a transaction that has passed the fence of key's lease: its COMMIT is on
// its way.
func (s *scratch) fenced(key string) *sql.Tx {
	s.T.Helper()
	tx, err := s.plain.Begin()
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { _ = tx.Rollback() })
	dbtest.Exec(s.T, tx, "UPDATE p SET stock = 1 WHERE id = 1")
	_, err = tx.Exec("SELECT 1 FROM mysqllock WHERE namespace = ? AND name = ? LOCK IN SHARE MODE", s.Name, key)
	dbtest.OK(s.T, err)
	return tx
}

// grants are the ways to the row lock on k. Each runs under the lock until it is told
// to end.
var grants = map[string]func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error{
	"BeginTx": func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error {
		return begun(lockctx.With(ctx, "k", opts...), db, held, nil)
	},
	"BeginTx at an isolation level": func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error {
		return begun(lockctx.With(ctx, "k", opts...), db, held, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	},
	"several keys": func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error {
		return begun(lockctx.WithKeys(ctx, []string{"a", "k", "z"}, opts...), db, held, nil)
	},
	"a session": func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		var n int
		err := db.QueryRowContext(lockctx.With(ctx, "k", opts...), "SELECT stock FROM p WHERE id = 1").Scan(&n)
		if err == nil {
			held()
		}
		return err
	},
	"Do": func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error {
		return mysqllock.Do(ctx, db, "k", func(context.Context) error { held(); return nil }, opts...)
	},
	"a hint that comes late": func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err = tx.ExecContext(lockctx.With(ctx, "k", opts...), "UPDATE p SET stock = stock WHERE id = 2"); err != nil {
			return err
		}
		held()
		return tx.Commit()
	},
}

func begun(ctx context.Context, db *sql.DB, held func(), opts *sql.TxOptions) error {
	tx, err := db.BeginTx(ctx, opts)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	held()
	return tx.Commit()
}

// TestGrantAfterALapsedLease: a lease has run out while the last COMMIT under it is on
// its way. Whoever locks the row, shared or not, is granted the lock when that has
// arrived, and takes the lease off the row first.
func TestGrantAfterALapsedLease(t *testing.T) {
	for name, grant := range grants {
		for _, shared := range []bool{false, true} {
			what, opts := name, []lockctx.Option(nil)
			if shared {
				what, opts = name+", shared", append(opts, lockctx.Shared())
			}
			t.Run(what, func(t *testing.T) {
				dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
					db := s.open()
					for range 2 { // the second time the key is known to have had leases
						s.lapse(db, "k")
						last := s.fenced("k")
						err := grant(dbtest.Limited(t), db, func() { t.Error("granted while the last COMMIT is on its way") }, append(opts, lockctx.NoWait())...)
						if !errors.Is(err, mysqllock.ErrLocked) {
							t.Errorf("NoWait: %v", err)
						}
						committed := make(chan struct{})
						time.AfterFunc(300*time.Millisecond, func() { close(committed); _ = last.Commit() })
						granted := false
						err = grant(dbtest.Limited(t), db, func() {
							granted = true
							select {
							case <-committed:
							default:
								t.Error("granted before the last COMMIT")
							}
						}, append(opts, lockctx.Wait(20*time.Second))...)
						refused := name == "a hint that comes late" && errors.Is(err, mysqllock.ErrLocked)
						if err != nil && !refused || err == nil && !granted {
							t.Errorf("granted %v: %v", granted, err)
						}
						if !granted {
							continue
						}
						var owner sql.NullString
						dbtest.OK(t, s.plain.QueryRow("SELECT owner FROM mysqllock WHERE namespace = ? AND name = 'k'", s.Name).Scan(&owner))
						if owner.Valid {
							t.Errorf("the lease is on the row still, of %s", owner.String)
						}
					}
				})
			})
		}
	}
}

// TestLapsedLeaseDoesNotCommit: whoever has had the key after a lease ran out, by
// whichever row lock, is the end of it: nothing under it commits, even where the
// server's clock is set back afterwards, so that it seems to last.
func TestLapsedLeaseDoesNotCommit(t *testing.T) {
	for name, grant := range grants {
		for _, opts := range [][]lockctx.Option{nil, {lockctx.Shared()}} {
			t.Run(name, func(t *testing.T) {
				dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
					holder, other := s.open(), s.open()
					hold, err := mysqllock.Acquire(dbtest.Limited(t), holder, "k", lockctx.Lease(time.Minute))
					dbtest.OK(t, err)
					defer hold.Release()
					dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ? AND name = 'k'", s.Name)
					dbtest.OK(t, grant(dbtest.Limited(t), other, func() {}, opts...))
					dbtest.Exec(t, s.plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE WHERE namespace = ? AND name = 'k'", s.Name)
					_, err = holder.ExecContext(hold.Context(), "UPDATE p SET stock = 1 WHERE id = 1")
					wantLost(t, "the holder's write", err)
					s.wantStock(1, 10)
				})
			})
		}
	}
}

// TestSlotsAfterALapsedLease is the same for the slots of a key.
func TestSlotsAfterALapsedLease(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		do := func(wait lockctx.Option) error {
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, lockctx.Slots(2), wait)
		}
		dbtest.OK(t, do(lockctx.NoWait()))
		dbtest.Exec(t, s.plain, "UPDATE mysqllock SET owner = 'dead:1:x#0a1b2c3d', token = token + 1, expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ?", s.Name)
		for range 4 {
			dbtest.OK(t, do(lockctx.NoWait()))
		}
		dbtest.Exec(t, s.plain, "UPDATE mysqllock SET owner = 'dead:1:x#0a1b2c3d', token = token + 1, expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ?", s.Name)
		var all []*sql.Tx
		for i, name := range dbtest.Column[string](t, s.plain, "SELECT name FROM mysqllock WHERE namespace = ?", s.Name) {
			tx, err := s.plain.Begin()
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = ?", i+1)
			_, err = tx.Exec("SELECT 1 FROM mysqllock WHERE namespace = ? AND name = ? LOCK IN SHARE MODE", s.Name, name)
			dbtest.OK(t, err)
			all = append(all, tx)
		}
		if err := do(lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("while COMMITs are on their way: %v", err)
		}
		for _, tx := range all {
			time.AfterFunc(300*time.Millisecond, func() { _ = tx.Commit() })
		}
		dbtest.OK(t, do(lockctx.Wait(20*time.Second)))
	})
}

// TestClockOfTheApplication: SET timestamp on the application's connection lets nobody
// in beside a live lease, nor keeps anybody out when it is over.
func TestClockOfTheApplication(t *testing.T) {
	for name, grant := range grants {
		t.Run(name, func(t *testing.T) {
			dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
				for _, timestamp := range []string{"2100000000", "1000000000"} {
					db := s.open("timestamp=" + timestamp)
					for _, opts := range [][]lockctx.Option{nil, {lockctx.Shared()}} {
						hold, err := mysqllock.Acquire(dbtest.Limited(t), s.open(), "k", lockctx.Lease(time.Minute), lockctx.Wait(20*time.Second))
						dbtest.OK(t, err)
						err = grant(dbtest.Limited(t), db, func() { t.Error("granted beside a lease") }, append(opts, lockctx.NoWait())...)
						if !errors.Is(err, mysqllock.ErrLocked) {
							t.Errorf("beside a lease, at %s: %v", timestamp, err)
						}
						dbtest.OK(t, hold.Release())
						dbtest.OK(t, grant(dbtest.Limited(t), db, func() {}, append(opts, lockctx.NoWait())...))
						s.lapse(db, "k")
						dbtest.OK(t, grant(dbtest.Limited(t), db, func() {}, append(opts, lockctx.NoWait())...))
					}
					err := grant(dbtest.Limited(t), db, func() {}, lockctx.Optimistic())
					dbtest.OK(t, err)
				}
			})
		})
	}
}
