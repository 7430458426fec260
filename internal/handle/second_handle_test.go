package handle_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// writers are ways to write with ctx.
var writers = map[string]func(ctx context.Context, db *sql.DB) error{
	"Exec": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		return err
	},
	"BeginTx": func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		_, err = tx.Exec("UPDATE p SET stock = stock - 1 WHERE id = 1")
		return errors.Join(err, tx.Commit())
	},
	"a prepared statement": func(ctx context.Context, db *sql.DB) error {
		st, err := db.PrepareContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		if err != nil {
			return err
		}
		defer st.Close()
		_, err = st.ExecContext(ctx)
		return err
	},
	"Conn": func(ctx context.Context, db *sql.DB) error {
		c, err := db.Conn(context.Background())
		if err != nil {
			return err
		}
		defer c.Close()
		_, err = c.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		return err
	},
	"another key": func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(lockctx.With(ctx, "other"), "UPDATE p SET stock = stock - 1 WHERE id = 1")
		return err
	},
}

// second opens the same database in several ways.
func second(s *stock.Shop) map[string]*sql.DB {
	wrapped, _ := s.Tapped(mysqllock.Config{})
	return map[string]*sql.DB{
		"the same DSN":      s.Handle(),
		"NewConnector":      wrapped,
		"another table":     s.Handle("lockTable=locks2"),
		"another namespace": s.Handle("lockNamespace=elsewhere"),
		"stripes":           s.Handle("lockStripes=8", "lockTable=locks3"),
	}
}

func TestLeaseIsFencedOnAnotherHandle(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for which, db2 := range second(s) {
			for how, write := range writers {
				db := s.Handle()
				key := "k " + dbtest.Random()
				h, err := mysqllock.Acquire(dbtest.Limited(t), db, key, lockctx.Lease(30*time.Second))
				dbtest.OK(t, err)
				before := s.Stock(1)
				if err := write(h.Context(), db2); err != nil {
					t.Errorf("%s, %s, under the lease: %v", which, how, err)
				}
				s.WantStock(1, before-1)
				n, err := stock.Read(h.Context(), db2, 1)
				if err != nil || n != before-1 {
					t.Errorf("%s: a read under the lease: %d, %v", which, n, err)
				}
				s.Steal(key)
				dbtest.Is(t, fmt.Sprintf("%s, %s, after the lease was stolen", which, how), write(h.Context(), db2), mysqllock.ErrLost)
				s.WantStock(1, before-1)
				if err := h.Release(); !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("%s, %s: the release says %v", which, how, err)
				}
				if _, err := stock.Read(h.Context(), db2, 1); err == nil {
					t.Errorf("%s: a read after the release", which)
				}
			}
		}
	})
}

func TestAdvisoryLockIsCheckedOnAnotherHandle(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, db2 := s.Handle(), s.Handle()
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", lockctx.Advisory())
		dbtest.OK(t, err)
		for how, write := range writers {
			before := s.Stock(1)
			if err := write(h.Context(), db2); err != nil {
				t.Errorf("%s under the lock: %v", how, err)
			}
			s.WantStock(1, before-1)
		}
		// With the hold's own context, which may end before the commit, database/sql would
		// roll back first.
		tx := dbtest.Begin(t, context.WithoutCancel(h.Context()), db2)
		before := s.Stock(1)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
		var id uint64
		dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		s.KillAllBut(id)
		dbtest.Is(t, "the commit after the lock was lost", tx.Commit(), mysqllock.ErrLost)
		s.WantStock(1, before)
		_ = h.Release()
	})
}

// TestTheSameKeyJoinsOnAnotherHandle, deeper.
func TestTheSameKeyJoinsOnAnotherHandle(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, db2 := s.Handle(), s.Handle()
		for name, opt := range map[string]lockctx.Option{"lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory()} {
			err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				return mysqllock.Do(ctx, db2, "k", func(ctx context.Context) error {
					return errors.Join(writers["Exec"](ctx, db), writers["Exec"](ctx, db2))
				}, opt)
			}, opt, lockctx.NoWait())
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		s.WantStock(1, 6)
		err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			return writers["BeginTx"](lockctx.With(ctx, "k"), db2)
		}, lockctx.Lease(30*time.Second))
		dbtest.OK(t, err)
		s.WantStock(1, 5)
	})
}

// TestAHoldRefusesWritesOnAnotherServer: there is no fence.
func TestAHoldRefusesWritesOnAnotherServer(t *testing.T) {
	t.Parallel()
	servers := dbtest.Each(t)
	if len(servers) < 2 {
		t.Skip("one server")
	}
	for _, opt := range []lockctx.Option{lockctx.Lease(30 * time.Second), lockctx.Advisory()} {
		here, there := stock.NewShop(servers[0].Beside(t)), stock.NewShop(servers[1].Beside(t))
		db, db2 := here.Handle(), there.Handle()
		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", opt)
		dbtest.OK(t, err)
		for how, write := range writers {
			err := write(h.Context(), db2)
			if !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "lockctx.Without") {
				t.Errorf("%s on another server: %v", how, err)
			}
		}
		there.WantStock(1, 10)
		if _, err := stock.Read(h.Context(), db2, 1); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "lockctx.Without") {
			t.Errorf("a read on another server: %v", err)
		}
		var one int
		dbtest.OK(t, db2.QueryRowContext(h.Context(), "SELECT 1").Scan(&one)) // nobody decides on that
		n, err := stock.Read(lockctx.Without(h.Context()), db2, 1)
		if err != nil || n != 10 {
			t.Errorf("a read on another server without the lock: %d, %v", n, err)
		}
		dbtest.OK(t, writers["BeginTx"](lockctx.Without(h.Context()), db2))
		there.WantStock(1, 9)
		dbtest.Is(t, "Acquire on another server", dbtest.Err(mysqllock.Acquire(h.Context(), db2, "k2", opt)), mysqllock.ErrUnsafe)
		dbtest.OK(t, h.Context().Err())
		dbtest.OK(t, h.Release())
	}
}

// TestAKeyThatOneHandleHasIsNotAskedForByAnother, which would wait for its own program.
func TestAKeyThatOneHandleHasIsNotAskedForByAnother(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, db2 := s.Handle("lockWait=2m"), s.Handle("lockWait=2m")
		refused := func(what string, f func() error) {
			t.Helper()
			began := time.Now()
			err := f()
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &e) || e.Key != "k" || !strings.Contains(err.Error(), "handle") {
				t.Errorf("%s: %v", what, err)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("%s took %v", what, took)
			}
		}
		asks := map[string]func(ctx context.Context, db *sql.DB) error{
			"read":    func(ctx context.Context, db *sql.DB) error { _, err := stock.Read(ctx, db, 1); return err },
			"Exec":    writers["Exec"],
			"BeginTx": writers["BeginTx"],
			"Acquire": func(ctx context.Context, db *sql.DB) error {
				return mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil })
			},
		}
		for name, opt := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
		} {
			for how, ask := range asks {
				if how == "Acquire" && name != "row" {
					continue // asks for a row lock
				}
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				ctx = lockctx.With(ctx, "k", opt)
				_, err := stock.Read(ctx, db, 1)
				dbtest.OK(t, err)
				refused(name+", read here, "+how+" there", func() error { return ask(ctx, db2) })
				dbtest.OK(t, writers["Exec"](ctx, db)) // the first has it as before
				ctx = lockctx.With(dbtest.Limited(t), "k", opt)
				tx := dbtest.Begin(t, ctx, db2)
				refused(name+", a transaction there, "+how+" here", func() error { return ask(ctx, db) })
				dbtest.OK(t, tx.Rollback())
				if err := writers["Exec"](ctx, db); err != nil {
					t.Errorf("%s: after the unit of work has ended: %v", name, err)
				}
				cancel()
			}
		}
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
			err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
				for how, ask := range asks {
					if how == "Acquire" && name != "row" {
						continue
					}
					refused("Do, "+name+", "+how, func() error { return ask(ctx, db2) })
				}
				return writers["Exec"](lockctx.Without(ctx), db2)
			}, opt)
			if err != nil {
				t.Errorf("Do, %s: %v", name, err)
			}
		}
		slot := lockctx.With(dbtest.Limited(t), "k", lockctx.Slots(1))
		tx := dbtest.Begin(t, slot, db)
		refused("slots", func() error { return writers["Exec"](slot, db2) })
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, writers["Exec"](slot, db2))
	})
}

// TestReadsOfAnotherHandleAreRefused: reads go to a handle of another server, which is not
// read-only, and writes to this one, as with GORM's dbresolver. Both have locks of their own.
func TestReadsOfAnotherHandleAreRefused(t *testing.T) {
	t.Parallel()
	servers := dbtest.Each(t)
	if len(servers) < 2 {
		t.Skip("one server")
	}
	for name, opt := range map[string]lockctx.Option{
		"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
	} {
		here, there := stock.NewShop(servers[0].Beside(t)), stock.NewShop(servers[1].Beside(t))
		source, replica := here.Handle(), there.Handle()
		unsafe := func(what string, err error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrUnsafe) || !errors.As(err, &e) || e.Key != "k" || !strings.Contains(err.Error(), "handle") {
				t.Errorf("%s, %s: %v", name, what, err)
			}
		}
		for range 5 {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), source, "k", func(ctx context.Context) error {
				_, err := stock.Read(ctx, replica, 1)
				unsafe("a read in Do", err)
				_, err = stock.Read(lockctx.Without(ctx), replica, 1)
				return err
			}, opt))
			for how, write := range writers {
				if how == "another key" {
					continue
				}
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				ctx = lockctx.With(ctx, "k", opt)
				_, err := stock.Read(ctx, replica, 1)
				dbtest.OK(t, err)
				unsafe("a read, then "+how, write(ctx, source))
				cancel()
			}
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			ctx = lockctx.With(ctx, "k", opt)
			tx := dbtest.Begin(t, ctx, source)
			_, err := stock.Read(ctx, replica, 1)
			unsafe("a read beside a transaction", err)
			dbtest.OK(t, tx.Rollback())
			_, err = stock.Read(ctx, source, 1)
			dbtest.OK(t, err)
			_, err = stock.Read(ctx, replica, 1)
			unsafe("a read after a read", err)
			dbtest.OK(t, writers["Exec"](ctx, source))
			cancel()
			here.WantStock(1, 9)
			dbtest.Exec(t, here.Plain, "UPDATE p SET stock = 10")
		}
	}
}

// TestLocksInTwoTablesAreNoConflict: they are not the same lock.
func TestLocksInTwoTablesAreNoConflict(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for which, db2 := range second(s) {
			if which == "the same DSN" || which == "NewConnector" {
				continue
			}
			for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "optimistic": lockctx.Optimistic()} {
				db := s.Handle()
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				ctx = lockctx.With(ctx, "k", opt)
				tx := dbtest.Begin(t, ctx, db)
				if err := writers["Exec"](ctx, db2); err != nil {
					t.Errorf("%s, %s: %v", which, name, err)
				}
				dbtest.OK(t, tx.Rollback())
				cancel()
			}
		}
	})
}

// TestAReadUnderAVersionIsNotWrittenWhereItsKeyIsAnotherLock: a transaction, or Do, has read it. On such a handle its
// version would not be compared.
func TestAReadUnderAVersionIsNotWrittenWhereItsKeyIsAnotherLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for which, db2 := range second(s) {
			if which == "the same DSN" || which == "NewConnector" {
				continue
			}
			db := s.Handle()
			before := s.Stock(1)
			for how, write := range writers {
				what := which + ", " + how
				if how == "another key" {
					continue // its row lock goes with no version
				}
				ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Optimistic())
				tx := dbtest.Begin(t, ctx, db)
				_, err := stock.Read(ctx, tx, 1)
				dbtest.OK(t, err)
				dbtest.Is(t, what+", after a read in a transaction", write(ctx, db2), mysqllock.ErrUnsafe)
				dbtest.OK(t, tx.Commit())
				if err := write(ctx, db2); err != nil {
					t.Errorf("%s, after the transaction: %v", what, err)
				}
				before--
				dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					if _, err := stock.Read(ctx, db, 1); err != nil {
						return err
					}
					dbtest.Is(t, what+", after a read in Do", write(ctx, db2), mysqllock.ErrUnsafe)
					return nil
				}, lockctx.Optimistic()))
				s.WantStock(1, before)
			}
		}
	})
}

// TestAHandleIsAskedAgainAfterAFailoverBeforeItIsRefused: it has not looked since its endpoint leads to another
// server.
func TestAHandleIsAskedAgainAfterAFailoverBeforeItIsRefused(t *testing.T) {
	t.Parallel()
	servers := dbtest.Each(t)
	if len(servers) < 2 {
		t.Skip("one server")
	}
	old, now := stock.NewShop(servers[0]), stock.NewShop(servers[1])
	dbtest.Exec(t, old.Plain, "CREATE DATABASE IF NOT EXISTS "+now.Name)
	t.Cleanup(func() { dbtest.Exec(t, old.Plain, "DROP DATABASE "+now.Name) })
	var address atomic.Pointer[string]
	first := old.Config().Addr
	address.Store(&first)
	cfg := now.Config()
	cfg.DialFunc = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, network, *address.Load())
	}
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
	dbtest.OK(t, err)
	moved := sql.OpenDB(connector)
	t.Cleanup(func() { moved.Close() })
	moved.SetMaxIdleConns(0)
	dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k"), moved, "DO 1")

	h, err := mysqllock.Acquire(dbtest.Limited(t), now.Handle(), "k", lockctx.Lease(30*time.Second))
	dbtest.OK(t, err)
	defer h.Release()
	dbtest.Is(t, "before the failover", writers["Exec"](h.Context(), moved), mysqllock.ErrUnsafe)
	address.Store(&cfg.Addr)
	if err := writers["Exec"](h.Context(), moved); err != nil {
		t.Errorf("after the failover: %v", err)
	}
	now.WantStock(1, 9)
	now.Steal("k")
	dbtest.Is(t, "after the lease was stolen", writers["Exec"](h.Context(), moved), mysqllock.ErrLost)
	now.WantStock(1, 9)
}
