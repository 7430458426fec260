//go:build unix

package proxies

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// router starts MySQL Router before the server that tests share.
func router(t *testing.T, r tempserver.Routing) (*tempserver.Proxy, *tempserver.Server) {
	t.Helper()
	server := tempserver.Share(t, mysqlServer(t))
	p, err := tempserver.StartRouter(t.Context(), r, server)
	dbtest.OK(t, err)
	t.Cleanup(func() { dbtest.OK(t, p.Stop()) })
	return p, server
}

// mix has other clients of the proxy come and go all the time, each of which takes
// the server's connection that another left idle: so that of a shared connection each
// statement can run on any connection to the server.
func (s *scratch) mix(clients int) {
	ctx, cancel := context.WithCancel(s.Context())
	db := dbtest.Open(s, "mysql", s.proxy)
	db.SetMaxIdleConns(-1)
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				_, _ = db.ExecContext(ctx, "DO SLEEP(0.001)")
			}
		})
	}
	s.Cleanup(func() { cancel(); wg.Wait(); db.Close() })
}

// move has the one connection of db be another one to the server than it was: other
// clients take what connections there are, and keep them.
func (s *scratch) move(db *sql.DB) {
	s.Helper()
	id := func() (id int) {
		dbtest.OK(s.T, db.QueryRowContext(s.Context(), "SELECT CONNECTION_ID()").Scan(&id))
		return id
	}
	others := dbtest.Open(s, "mysql", s.proxy)
	defer others.Close()
	was := id()
	dbtest.Eventually(s, "it moves", func() error {
		conn, err := others.Conn(s.Context())
		dbtest.OK(s.T, err)
		s.Cleanup(func() { conn.Close() })
		_, err = conn.ExecContext(s.Context(), "SET @mine = 1")
		dbtest.OK(s.T, err)
		if id() == was {
			return fmt.Errorf("it is still connection %d", was)
		}
		return nil
	})
}

// TestNoUpdateIsLostBehindMySQLRouter has callers of two handles read, decide and write under a
// lock.
func TestNoUpdateIsLostBehindMySQLRouter(t *testing.T) {
	t.Parallel()
	for _, routing := range []tempserver.Routing{tempserver.Passed, tempserver.Shared} {
		t.Run(string(routing), func(t *testing.T) {
			t.Parallel()
			p, server := router(t, routing)
			for _, strategy := range strategies {
				for _, f := range stock.Forms {
					t.Run(strategy.name+"/"+f.Name, func(t *testing.T) {
						t.Parallel()
						s := newScratch(t, p, server)
						s.mix(2)
						s.exclusive(f, strategy.name != "optimistic", strategy.opt)
					})
				}
			}
		})
	}
}

// exclusive has callers raise a stock, and none of it is lost; nor are two of them
// inside, where alone is set.
func (s *scratch) exclusive(f stock.Form, alone bool, opt lockctx.Option) {
	s.Helper()
	const handles, callers, rounds = 2, 2, 6
	var r stock.Room
	var wg sync.WaitGroup
	for range handles {
		db := s.open("lockWait=1m")
		for range callers {
			wg.Go(func() {
				for done := 0; done < rounds; {
					err := f.Run(dbtest.Within(s, dbtest.Patience), db, r.Think, opt)
					switch {
					case err == nil:
						done++
					case !errors.Is(err, mysqllock.ErrConflict) && !errors.Is(err, mysqllock.ErrDeadlock):
						s.Error(err)
						return
					}
				}
			})
		}
	}
	wg.Wait()
	if alone {
		r.Check(s)
	}
	s.wantStock(1, handles*callers*rounds)
}

// TestGivingUpOnASharedConnectionLeavesNoWaiter in the server, although the connection has
// moved since it told its id.
func TestGivingUpOnASharedConnectionLeavesNoWaiter(t *testing.T) {
	t.Parallel()
	p, server := router(t, tempserver.Shared)
	s := newScratch(t, p, server)
	holder := s.open()
	tx, err := holder.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p"), nil)
	dbtest.OK(t, err)
	defer tx.Rollback()

	db := s.open("lockWait=1m")
	db.SetMaxOpenConns(1)
	for range 5 {
		s.move(db)
		ctx, cancel := context.WithCancel(dbtest.Within(s, dbtest.Patience))
		failed := make(chan error, 1)
		go func() {
			_, err := db.BeginTx(lockctx.With(ctx, "p"), nil)
			failed <- err
		}()
		dbtest.Eventually(s, "it waits in the server", func() error {
			if n := s.waiters(); n != 1 {
				return fmt.Errorf("%d waiters", n)
			}
			return nil
		})
		cancel()
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("error %v, want %v", err, context.Canceled)
		}
		began := time.Now()
		dbtest.Eventually(s, "no waiter is left", func() error {
			if n := s.waiters(); n != 0 {
				return fmt.Errorf("%d waiters", n)
			}
			return nil
		})
		if took := time.Since(began); took > 20*time.Second { // the server's own bound is lockTTL, 30 s
			t.Errorf("a waiter was left for %v", took)
		}
	}
}

// waiters counts those who wait for a row of the lock table.
func (s *scratch) waiters() (n int) {
	s.Helper()
	dbtest.OK(s.T, s.direct.QueryRowContext(s.Context(),
		"SELECT COUNT(*) FROM performance_schema.data_locks WHERE OBJECT_SCHEMA = DATABASE() AND LOCK_STATUS = 'WAITING'").Scan(&n))
	return n
}

// TestALostSharedConnectionCommitsNothing: a holder that says nothing keeps its lock, since the
// driver pings; when its connection to the server ends it commits nothing.
func TestALostSharedConnectionCommitsNothing(t *testing.T) {
	t.Parallel()
	p, server := router(t, tempserver.Shared)
	for _, strategy := range strategies {
		if strategy.name == "optimistic" {
			continue // it holds nothing
		}
		t.Run(strategy.name, func(t *testing.T) {
			t.Parallel()
			s := newScratch(t, p, server)
			s.mix(1)
			db := s.open("lockTTL=2s", "lockNoWait=true")
			other := s.open("lockTTL=2s", "lockNoWait=true")
			hold, err := mysqllock.Acquire(dbtest.Within(s, dbtest.Patience), db, "p", strategy.opt)
			dbtest.OK(t, err)
			time.Sleep(2500 * time.Millisecond) // is what the test is about
			_, err = db.ExecContext(hold.Context(), "UPDATE p SET stock = 1 WHERE id = 1")
			dbtest.OK(t, err)
			_, err = mysqllock.Acquire(dbtest.Within(s, dbtest.Patience), other, "p", strategy.opt)
			dbtest.Want(t, err, mysqllock.ErrLocked)

			if strategy.name == "lease" { // which survives its connection
				dbtest.OK(t, hold.Release())
				s.wantStock(1, 1)
				return
			}
			s.killAll()
			dbtest.Eventually(s, "it is free", func() error {
				next, err := mysqllock.Acquire(dbtest.Within(s, dbtest.Patience), other, "p", strategy.opt)
				if err == nil {
					err = next.Release()
				}
				return err
			})
			// The hold's own context may have ended by now, and database/sql says no more of it.
			_, err = db.ExecContext(context.WithoutCancel(hold.Context()), "UPDATE p SET stock = 7 WHERE id = 2")
			dbtest.Want(t, err, mysqllock.ErrLost)
			dbtest.Want(t, hold.Release(), mysqllock.ErrLost)
			s.wantStock(2, 0)
		})
	}
}

// killAll ends all connections that have the database.
func (s *scratch) killAll() {
	s.Helper()
	for _, id := range dbtest.Column[int](s, s.direct, "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND ID <> CONNECTION_ID()") {
		_, _ = s.direct.ExecContext(s.Context(), fmt.Sprint("KILL ", id)) // it may have ended
	}
}

// TestHoldersOnSharedConnectionsAreKnownByID: that of the connection which has the lock, and
// which its transaction runs on.
func TestHoldersOnSharedConnectionsAreKnownByID(t *testing.T) {
	t.Parallel()
	p, server := router(t, tempserver.Shared)
	for _, strategy := range strategies {
		if strategy.name == "lease" || strategy.name == "optimistic" { // no connection has it
			continue
		}
		t.Run(strategy.name, func(t *testing.T) {
			t.Parallel()
			s := newScratch(t, p, server)
			s.mix(2)
			db := s.open()
			db.SetMaxOpenConns(1)
			var first uint64
			for range 5 {
				s.move(db)
				var id uint64
				tx, err := db.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p", strategy.opt), nil)
				dbtest.OK(t, err)
				dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
				_, err = mysqllock.Acquire(dbtest.Within(s, dbtest.Patience), db, "p", strategy.opt, lockctx.NoWait())
				var e *mysqllock.Error
				if !errors.As(err, &e) || e.Holder == nil {
					t.Fatalf("error %v, want one with the holder", err)
				}
				dbtest.Equal(t, "the holder is connection %d", e.Holder.ConnectionID, id)
				dbtest.OK(t, tx.Commit())
				if first == 0 {
					first = id
				}
				dbtest.Equal(t, "the next transaction runs on connection %d", id, first)
			}
		})
	}
}
