package lease_test

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
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// fenced is a transaction that has passed the fence of key's lease: its COMMIT is on
// its way.
func fenced(s *stock.Shop, key string) *sql.Tx {
	s.T.Helper()
	tx, err := s.Plain.Begin()
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { _ = tx.Rollback() })
	dbtest.Exec(s.T, tx, "UPDATE p SET stock = 1 WHERE id = 1")
	dbtest.Exec(s.T, tx, "SELECT 1 FROM mysqllock WHERE namespace = ? AND name = ? LOCK IN SHARE MODE", s.Name, key)
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
	"a second key": func(ctx context.Context, db *sql.DB, held func(), opts ...lockctx.Option) error {
		ctx = lockctx.With(ctx, "first "+dbtest.Random(), lockctx.Advisory())
		return stock.InTx(ctx, db, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(lockctx.With(ctx, "k", opts...), "UPDATE p SET stock = stock WHERE id = 2"); err != nil {
				return err
			}
			held()
			return nil
		})
	},
}

// granting is one of grants, shared or not.
type granting func(db *sql.DB, held func(), opts ...lockctx.Option) error

// eachGrant runs a test on each server with each of grants, exclusive and shared.
func eachGrant(t *testing.T, test func(t *testing.T, s *stock.Shop, name string, grant granting)) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, grant := range grants {
			for kind, own := range map[string][]lockctx.Option{"exclusive": nil, "shared": {lockctx.Shared()}} {
				t.Run(name+", "+kind, func(t *testing.T) {
					test(t, s, name, func(db *sql.DB, held func(), opts ...lockctx.Option) error {
						return grant(dbtest.Limited(t), db, held, append(slices.Clone(own), opts...)...)
					})
				})
			}
		}
	})
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

// TestAGrantAfterALapsedLeaseWaitsForItsLastCommit, which was on its way when the lease ran out. Whoever locks the
// row, shared or not, takes the lease off the row first.
func TestAGrantAfterALapsedLeaseWaitsForItsLastCommit(t *testing.T) {
	eachGrant(t, func(t *testing.T, s *stock.Shop, name string, grant granting) {
		db := s.Handle()
		for range 2 { // the second time the key is known to have had leases
			s.Lapse(db, "k")
			last := fenced(s, "k")
			err := grant(db, func() { t.Error("granted while the last COMMIT is on its way") }, lockctx.NoWait())
			dbtest.Is(t, "NoWait", err, mysqllock.ErrLocked)
			committed := make(chan struct{})
			time.AfterFunc(100*time.Millisecond, func() { close(committed); _ = last.Commit() })
			granted := false
			err = grant(db, func() {
				granted = true
				select {
				case <-committed:
				default:
					t.Error("granted before the last COMMIT")
				}
			}, lockctx.Wait(20*time.Second))
			refused := name == "a second key" && errors.Is(err, mysqllock.ErrLocked)
			if err != nil && !refused || err == nil && !granted {
				t.Errorf("granted %v: %v", granted, err)
			}
			if !granted {
				continue
			}
			var owner sql.NullString
			dbtest.OK(t, s.Plain.QueryRow("SELECT owner FROM mysqllock WHERE namespace = ? AND name = 'k'", s.Name).Scan(&owner))
			if owner.Valid {
				t.Errorf("the lease is on the row still, of %s", owner.String)
			}
		}
	})
}

// TestLapsedLeaseDoesNotCommit: whoever has had the key after a lease ran out, by
// whichever row lock, is the end of it: nothing under it commits, even where the
// server's clock is set back afterwards, so that it seems to last.
func TestLapsedLeaseDoesNotCommit(t *testing.T) {
	eachGrant(t, func(t *testing.T, s *stock.Shop, _ string, grant granting) {
		holder, other := s.Handle(), s.Handle()
		hold := stock.Acquire(t, holder, "k", lockctx.Lease(time.Minute))
		defer hold.Release()
		dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ? AND name = 'k'", s.Name)
		dbtest.OK(t, grant(other, func() {}))
		dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET expires = UTC_TIMESTAMP(6) + INTERVAL 1 MINUTE WHERE namespace = ? AND name = 'k'", s.Name)
		_, err := holder.ExecContext(hold.Context(), "UPDATE p SET stock = 1 WHERE id = 1")
		stock.WantLost(t, "the holder's write", err)
		s.WantStock(1, 10)
	})
}

// TestSlotsAfterALapsedLeaseWaitForItsLastCommit, as the key itself does.
func TestSlotsAfterALapsedLeaseWaitForItsLastCommit(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		do := func(wait lockctx.Option) error {
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, lockctx.Slots(2), wait)
		}
		dbtest.OK(t, do(lockctx.NoWait()))
		dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = 'dead:1:x#0a1b2c3d', token = token + 1, expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ?", s.Name)
		for range 4 {
			dbtest.OK(t, do(lockctx.NoWait()))
		}
		dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = 'dead:1:x#0a1b2c3d', token = token + 1, expires = UTC_TIMESTAMP(6) - INTERVAL 1 SECOND WHERE namespace = ?", s.Name)
		var all []*sql.Tx
		for i, name := range dbtest.Column[string](t, s.Plain, "SELECT name FROM mysqllock WHERE namespace = ?", s.Name) {
			tx := dbtest.Begin(t, context.Background(), s.Plain)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = ?", i+1)
			dbtest.Exec(t, tx, "SELECT 1 FROM mysqllock WHERE namespace = ? AND name = ? LOCK IN SHARE MODE", s.Name, name)
			all = append(all, tx)
		}
		dbtest.Is(t, "while COMMITs are on their way", do(lockctx.NoWait()), mysqllock.ErrLocked)
		for _, tx := range all {
			time.AfterFunc(300*time.Millisecond, func() { _ = tx.Commit() })
		}
		dbtest.OK(t, do(lockctx.Wait(20*time.Second)))
	})
}

// TestTheApplicationsClockLetsNobodyInBesideALiveLease, nor keeps anybody out when it is over. SET timestamp has set
// it.
func TestTheApplicationsClockLetsNobodyInBesideALiveLease(t *testing.T) {
	eachGrant(t, func(t *testing.T, s *stock.Shop, name string, grant granting) {
		for _, timestamp := range []string{"2100000000", "1000000000"} {
			db := s.Handle("timestamp=" + timestamp)
			hold := stock.Acquire(t, s.Handle(), "k", lockctx.Lease(time.Minute), lockctx.Wait(20*time.Second))
			err := grant(db, func() { t.Error("granted beside a lease") }, lockctx.NoWait())
			dbtest.Is(t, fmt.Sprintf("beside a lease, at %s", timestamp), err, mysqllock.ErrLocked)
			dbtest.OK(t, hold.Release())
			dbtest.OK(t, grant(db, func() {}, lockctx.NoWait()))
			s.Lapse(db, "k")
			dbtest.OK(t, grant(db, func() {}, lockctx.NoWait()))
			if name != "a second key" { // a version goes with no lock
				dbtest.OK(t, grants[name](dbtest.Limited(t), db, func() {}, lockctx.Optimistic()))
			}
		}
	})
}

// freeze has a host wait for the row lock on k, which somebody has locked for a moment,
// and stand still as soon as it has begun to wait. After that the row is free.
func freeze(s *stock.Shop, grant func(context.Context, *sql.DB, func(), ...lockctx.Option) error, opts ...lockctx.Option) {
	s.T.Helper()
	moment, err := s.Plain.Begin()
	dbtest.OK(s.T, err)
	defer moment.Rollback()
	dbtest.Exec(s.T, moment, "SELECT 1 FROM mysqllock WHERE namespace = ? AND name = 'k' FOR UPDATE", s.Name)
	v := dbtest.NewVanishing(" */ CONNECTION_ID()", " */ token, owner")
	close(v.Armed)
	base := s.Config()
	base.DialFunc = v.Dial
	connector, err := mysqllock.NewConnector(base, mysqllock.Config{})
	dbtest.OK(s.T, err)
	db := sql.OpenDB(connector)
	var all sync.WaitGroup
	ctx, cancel := context.WithCancel(s.T.Context())
	all.Go(func() { _ = grant(ctx, db, func() {}, opts...) })
	s.T.Cleanup(func() {
		close(v.Over)
		cancel()
		all.Wait()
		db.Close()
	})
	v.Await(s.T)
	// The server ends the wait by itself after a second or so. A machine that stands still
	// for as long does not see it: this waiter is granted nothing then.
	for end := time.Now().Add(time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		var n int
		dbtest.OK(s.T, s.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID() AND COMMAND <> 'Sleep' AND INFO LIKE '%/* mysqllock %'", s.Name).Scan(&n))
		if n > 0 {
			break
		}
	}
	dbtest.OK(s.T, moment.Commit())
}

// keeps holds a lease on key beside what is done, until it has been renewed twice after that.
func keeps(s *stock.Shop, key string, done func()) {
	s.T.Helper()
	err := mysqllock.Do(s.T.Context(), s.Handle(), key, func(ctx context.Context) error {
		done()
		for range 2 {
			was := s.Expires(key)
			dbtest.Soon(s.T, "it is renewed, or lost", func() bool { return ctx.Err() != nil || s.Expires(key) != was })
		}
		return context.Cause(ctx)
	}, lockctx.Lease(12*time.Second))
	if err != nil {
		s.T.Errorf("the lease was lost: %v", err)
	}
}

// TestAFrozenWaiterKeepsNoLeaseFromBeingRenewed: one that waits for a row lock on the key, in
// any way, and stands still when the server grants it.
func TestAFrozenWaiterKeepsNoLeaseFromBeingRenewed(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		s.Lapse(s.Handle(), "k")
		keeps(s, "k", func() {
			for name, grant := range grants {
				if name == "a second key" {
					continue // it may have written already, so the server cannot end its transaction
				}
				freeze(s, grant, lockctx.Wait(time.Minute))
				freeze(s, grant, lockctx.Wait(time.Minute), lockctx.Shared())
			}
		})
	})
}

// TestAWaiterForOneKeyDoesNotLockTheLeasedRowOfAnother that it wants, too.
func TestAWaiterForOneKeyDoesNotLockTheLeasedRowOfAnother(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		s.Lapse(s.Handle(), "a")
		s.Lapse(s.Handle(), "k")
		held := dbtest.Begin(t, lockctx.With(s.T.Context(), "k"), s.Handle())
		defer held.Rollback()
		waiter := s.Handle()
		result := make(chan error, 1)
		keeps(s, "a", func() {
			go func() {
				result <- begun(lockctx.WithKeys(t.Context(), []string{"a", "k"}, lockctx.Wait(time.Minute)), waiter, func() {}, nil)
			}()
		})
		dbtest.OK(t, held.Rollback())
		dbtest.OK(t, <-result)
	})
}

// TestAWaitLeavesSettingsAsTheyWere for the transaction that is granted the lock, and for the next one.
func TestAWaitLeavesSettingsAsTheyWere(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		s.Lapse(s.Handle(), "k")
		db := s.Handle("lockMaxConns=1")
		settings := func(wait time.Duration) (seen string, err error) {
			err = stock.InTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(wait)), db, func(tx *sql.Tx) error {
				return tx.QueryRow("SELECT CONCAT_WS(' ', @@SESSION.innodb_lock_wait_timeout, @@SESSION.lock_wait_timeout, @@SESSION.wait_timeout)").Scan(&seen)
			})
			return seen, err
		}
		before, err := settings(time.Minute)
		dbtest.OK(t, err)
		held := dbtest.Begin(t, lockctx.With(t.Context(), "k"), s.Handle())
		dbtest.Is(t, "a wait", stock.Told(func() error { return dbtest.Err(settings(300 * time.Millisecond)) }), mysqllock.ErrTimeout)
		time.AfterFunc(300*time.Millisecond, func() { _ = held.Rollback() })
		for _, after := range []string{"a wait that is granted the lock", "a wait before"} {
			now, err := settings(time.Minute)
			dbtest.OK(t, err)
			dbtest.Equal(t, "settings after "+after+": %s", now, before)
		}
	})
}
