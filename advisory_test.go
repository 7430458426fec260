package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/lockctx"
)

// named asks the server which connection has the named lock of a key; 0 is none.
// Keys and databases of tests are such that names are readable.
func (s *scratch) named(key string) (id int64) {
	s.T.Helper()
	var holder sql.NullInt64
	dbtest.OK(s.T, s.plain.QueryRow("SELECT IS_USED_LOCK(?)", "mysqllock:"+s.Name+"/"+key).Scan(&holder))
	return holder.Int64
}

func (s *scratch) wantNamed(key string, want bool) {
	s.T.Helper()
	if got := s.named(key) != 0; got != want {
		s.T.Errorf("named(%s) = %v, want %v", key, got, want)
	}
}

func TestAdvisoryUnitsOfWork(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockStrategy=advisory")
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "k")

		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		s.wantNamed("k", true)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		s.wantNamed("k", false)
		tx, err = db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
		dbtest.OK(t, tx.Rollback())
		s.wantNamed("k", false)
		s.wantStock(1, 9)

		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 8 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantNamed("k", false)
		s.wantStock(1, 8)

		var n int
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
		s.wantNamed("k", true)
		if st := db.Stats(); st.InUse != 0 {
			t.Errorf("%d connections are pinned", st.InUse)
		}
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		dbtest.OK(t, err)
		s.wantNamed("k", false)
		s.wantStock(1, 7)

		tx, err = db.Begin() // the hint comes late
		dbtest.OK(t, err)
		_, err = tx.ExecContext(lockctx.With(base, "k"), "UPDATE p SET stock = 6 WHERE id = 1")
		dbtest.OK(t, err)
		s.wantNamed("k", true)
		dbtest.OK(t, tx.Commit())
		s.wantNamed("k", false)
		s.wantStock(1, 6)

		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n))
		cancel()
		dbtest.Soon(t, "the end of the context gives it back", func() bool { return s.named("k") == 0 })
	})
}

func TestAdvisoryHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "job", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
			dbtest.OK(t, err)
			s.wantStock(1, 9)
			s.wantNamed("job", true)
			wantToken(t, ctx, 0)
			// Reentrant in its lock context, and a space of its own.
			dbtest.OK(t, mysqllock.Do(ctx, db, "job", func(context.Context) error { return nil }, lockctx.Advisory()))
			dbtest.OK(t, mysqllock.Do(ctx, db, "job", func(ctx context.Context) error {
				s.wantLeased("job", true)
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = 8 WHERE id = 1")
				return err
			}, lockctx.Lease(ttl)))
			s.wantNamed("job", true)
			return nil
		}, lockctx.Advisory()))
		s.wantNamed("job", false)
		s.wantStock(1, 8)

		h, err := mysqllock.Acquire(dbtest.Limited(t), db, "job", lockctx.Advisory())
		dbtest.OK(t, err)
		for _, db := range []*sql.DB{db, other} {
			var e *mysqllock.Error
			err := naming(func() error {
				_, err := mysqllock.Acquire(dbtest.Limited(t), db, "job", lockctx.Advisory(), lockctx.NoWait())
				return err
			})
			if !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Holder == nil || e.Strategy != "advisory" {
				t.Errorf("a second hold returned %v", err)
			}
			err = naming(func() error {
				_, err := mysqllock.Acquire(dbtest.Limited(t), db, "job", lockctx.Advisory(), lockctx.Wait(200*time.Millisecond))
				return err
			})
			if !errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Holder == nil {
				t.Errorf("a second hold that waits returned %v", err)
			}
		}

		// The lock connection is lost: the holder is told, and commits nothing.
		stays := context.WithoutCancel(h.Context())
		tx, err := db.BeginTx(stays, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
		start := time.Now()
		dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", s.named("job")))
		dbtest.Soon(t, "the server has ended the connection", func() bool { return s.named("job") == 0 })
		wantLost(t, "Commit", tx.Commit())
		<-h.Context().Done()
		if took := time.Since(start); took > 30*time.Second || !errors.Is(context.Cause(h.Context()), mysqllock.ErrLost) {
			t.Errorf("the holder was told after %v, with %v", took, context.Cause(h.Context()))
		}
		_, err = db.ExecContext(stays, "UPDATE p SET stock = 1 WHERE id = 1")
		wantLost(t, "Exec", err)
		wantLost(t, "Release", h.Release())
		s.wantStock(1, 8)

		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "job", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 5 WHERE id = 1")
			return err
		}, lockctx.Advisory()))
		s.wantStock(1, 5)
	})
}

// TestAdvisoryHoldLapses: a hold whose context has ended is kept for lockTTL, for
// what still runs in it to stop, or until Release.
func TestAdvisoryHoldLapses(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=3s&lockStrategy=advisory")
		for _, released := range []bool{false, true} {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			h, err := mysqllock.Acquire(ctx, db, "job")
			dbtest.OK(t, err)
			ended := time.Now()
			cancel()
			if named := s.named("job") != 0; !named && time.Since(ended) < 3*time.Second {
				t.Error("it is not kept")
			}
			if released {
				dbtest.OK(t, h.Release())
				s.wantNamed("job", false)
				continue
			}
			dbtest.Soon(t, "it has lapsed", func() bool { return s.named("job") == 0 })
			if kept := time.Since(ended); kept < 3*time.Second {
				t.Errorf("it was kept for %v", kept)
			}
			_ = h.Release()
		}
	})
}

// TestAdvisoryCommitIsChecked: where somebody else has the lock by the time of
// COMMIT, and nobody has noticed.
func TestAdvisoryCommitIsChecked(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		tx, err := db.BeginTx(lockctx.WithKeys(dbtest.Limited(t), []string{"a", "b"}, lockctx.Advisory()), nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
		dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", s.named("b")))
		thief, err := s.plain.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer thief.Close()
		var got int
		dbtest.OK(t, thief.QueryRowContext(dbtest.Limited(t), "SELECT GET_LOCK(?, 60)", "mysqllock:"+s.Name+"/b").Scan(&got))
		wantLost(t, "Commit", tx.Commit())
		s.wantStock(1, 10)
		s.wantNamed("a", false)
	})
}

func TestAdvisoryExcludes(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		handles := []*sql.DB{s.open("lockStrategy=advisory"), s.open("lockStrategy=advisory")}
		const workers, each = 8, 25
		dbtest.Exec(t, s.plain, "UPDATE p SET stock = ? WHERE id = 1", workers*each)
		var all sync.WaitGroup
		for i := range workers {
			db := handles[i%2]
			all.Go(func() {
				for range each {
					ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
					var n int
					ctx = lockctx.With(ctx, "k")
					err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n)
					if err == nil {
						_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
					}
					if err != nil {
						t.Error(err)
					}
					cancel()
				}
			})
		}
		all.Wait()
		s.wantStock(1, 0)
		s.wantNamed("k", false)
	})
}

func TestAdvisoryStatementsPerPath(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{Strategy: "advisory"})
		db.SetMaxOpenConns(1)
		for _, p := range []struct {
			what string
			want int
			run  func() error
		}{
			{"transaction", 3, func() error {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
				if err != nil {
					return err
				}
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
				return tx.Commit()
			}},
			{"Acquire and Release", 2, func() error {
				h, err := mysqllock.Acquire(dbtest.Limited(t), db, "k")
				if err != nil {
					return err
				}
				return h.Release()
			}},
		} {
			tap.Costs(t, p.what, p.want, p.run)
		}
	})
}

// knowsHome waits until the handle knows how to begin a transaction with the lock on its own
// connection.
func (s *scratch) knowsHome(db *sql.DB) {
	s.T.Helper()
	dbtest.Soon(s.T, "it is known how to begin", func() bool {
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(s.T), "known", lockctx.Advisory()), nil)
		dbtest.OK(s.T, err)
		defer tx.Rollback()
		var id int64
		dbtest.OK(s.T, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
		return s.named("known") == id
	})
}

// TestAdvisoryHome: a lock that goes with the transaction is held by its connection, whatever
// runs in it; one that may outlive the transaction is not.
func TestAdvisoryHome(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, params := range []string{"", "&maxConns=8"} {
			db := s.open("lockStrategy=advisory" + params)
			s.knowsHome(db)
			own := func(what string, tx *sql.Tx, key string, want bool) {
				t.Helper()
				var id int64
				dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
				if got := s.named(key) == id; got != want {
					t.Errorf("%s%s: %v, want %v", what, params, got, want)
				}
			}
			// A read outside a transaction decides under one key, and a transaction under
			// another changes nothing: the unit of work goes on, with both.
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			defer cancel()
			ctx = lockctx.With(ctx, "a")
			var stock int
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock))
			tx, err := db.BeginTx(lockctx.With(ctx, "b"), nil)
			dbtest.OK(t, err)
			own("may outlive it", tx, "b", false)
			dbtest.OK(t, tx.Commit())
			s.wantNamed("a", true)
			s.wantNamed("b", true)
			cancel()
			dbtest.Soon(t, "the end of the context gives them back", func() bool { return s.named("a")+s.named("b") == 0 })

			// A hold inside the transaction joins it, and so does a transaction in that.
			ctx = lockctx.With(dbtest.Limited(t), "k")
			tx, err = db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			own("transaction", tx, "k", true)
			dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				inner, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, inner, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				return inner.Commit()
			}))
			own("after the hold", tx, "k", true)
			if err := mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("somebody else: %v", err)
			}
			dbtest.OK(t, tx.Commit())
			s.wantNamed("k", false)
			s.wantStock(1, stock-1)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, lockctx.NoWait()))

			// The caller's context ends, database/sql rolls back, and the connection is used
			// again.
			ctx, cancel = context.WithCancel(dbtest.Limited(t))
			tx, err = db.BeginTx(lockctx.With(ctx, "k"), nil)
			dbtest.OK(t, err)
			own("cancelled", tx, "k", true)
			cancel()
			dbtest.Soon(t, "it is rolled back", func() bool { return s.named("k") == 0 })

			// An error of the server that rolls back; then the lock goes at once, although
			// the caller has not said Rollback yet.
			tx, err = db.BeginTx(lockctx.With(dbtest.Limited(t), "d"), nil)
			dbtest.OK(t, err)
			own("deadlock", tx, "d", true)
			_, err = tx.Exec("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213")
			dbtest.Want(t, err, mysqllock.ErrDeadlock)
			s.wantNamed("d", false)
			dbtest.OK(t, tx.Rollback())
			s.wantStock(1, stock-1)
			dbtest.Exec(t, db, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			dbtest.OK(t, db.Close())
		}
	})
}

// TestAdvisoryHomeIsKept: an idle transaction that holds its lock is kept alive, by pings that
// never come into a statement of the application's; and its loss is noticed.
func TestAdvisoryHomeIsKept(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, params := range []string{"", "&maxConns=8"} {
			db := s.open("lockStrategy=advisory&lockTTL=1s" + params)
			s.knowsHome(db)
			time.Sleep(1500 * time.Millisecond) // as if the connection was silent for too long
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			dbtest.OK(t, err)
			time.Sleep(400 * time.Millisecond)
			dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			time.Sleep(1500 * time.Millisecond)
			stmt, err := tx.Prepare("SELECT id FROM p ORDER BY id")
			dbtest.OK(t, err)
			rows, err := stmt.Query()
			dbtest.OK(t, err)
			n := 0
			for ; rows.Next(); n++ {
				time.Sleep(700 * time.Millisecond) // longer than between two pings
			}
			dbtest.OK(t, rows.Err())
			dbtest.OK(t, rows.Close())
			dbtest.Exec(t, tx, "DO SLEEP(1.5)") // longer than the TTL
			if s.named("k") == 0 || n == 0 {
				t.Errorf("%s: it is not held, or %d rows", params, n)
			}
			dbtest.OK(t, tx.Commit())
			s.wantNamed("k", false)

			tx, err = db.BeginTx(lockctx.With(dbtest.Limited(t), "lost"), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 0 WHERE id = 1")
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", s.named("lost")))
			time.Sleep(1500 * time.Millisecond) // a ping has failed
			_, err = tx.Exec("UPDATE p SET stock = 0 WHERE id = 1")
			dbtest.Want(t, err, mysqllock.ErrLost)
			dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "lost", func(context.Context) error { return nil }, lockctx.NoWait()))
			dbtest.Exec(t, db, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			s.wantStock(1, 10)
			dbtest.OK(t, db.Close())
		}
	})
}

// TestManyAdvisoryHolds of one handle are on two connections, and there is no other.
func TestManyAdvisoryHolds(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const n, goroutines = 2_000, 16
		db := s.open("lockStrategy=advisory")
		holds := make([]*mysqllock.Hold, n)
		var all sync.WaitGroup
		for g := range goroutines {
			all.Go(func() {
				for i := g; i < n; i += goroutines {
					var err error
					if holds[i], err = mysqllock.Acquire(dbtest.Limited(t), db, fmt.Sprint("k", i)); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		all.Wait()
		var connections int
		dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.processlist WHERE db = ? AND id <> CONNECTION_ID()", s.Name).Scan(&connections))
		if connections > 2 {
			t.Errorf("%d holds are on %d connections", n, connections)
		}
		for _, hold := range holds {
			all.Go(func() {
				if err := hold.Release(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	})
}

// cutAtCommit closes a connection soon after a COMMIT has gone out on it, if it is to cut.
// checks is whether the last COMMIT was a part of the check.
type cutAtCommit struct {
	net.Conn
	cuts, checks *atomic.Bool
}

func (c cutAtCommit) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if bytes.Contains(b, []byte("COMMIT")) && !bytes.Contains(b, []byte("CREATE")) {
		c.checks.Store(bytes.Contains(b, []byte("mysqllock_held")))
		if c.cuts.Load() {
			time.AfterFunc(100*time.Millisecond, func() { c.Close() })
		}
	}
	return n, err
}

// TestUnknownCommitUnderAnAdvisoryLock: a lock is not given back while the server may
// still be busy with a COMMIT under it whose answer is lost.
func TestUnknownCommitUnderAnAdvisoryLock(t *testing.T) {
	const sell = "UPDATE p SET stock = stock - 1 WHERE id = 1"
	transaction := func(ctx context.Context, db *sql.DB, before func()) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, sell); err != nil {
			return err
		}
		before()
		return tx.Commit()
	}
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) { // commits are held up for all of it
		var cuts, checks atomic.Bool
		cfg := s.Config()
		cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			var d net.Dialer
			c, err := d.DialContext(ctx, network, addr)
			return cutAtCommit{c, &cuts, &checks}, err
		}
		admin, err := s.plain.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer admin.Close()
		stop := func() {
			_, err := admin.ExecContext(dbtest.Limited(t), "FLUSH TABLES WITH READ LOCK")
			dbtest.OK(t, err)
		}
		unit := func(db *sql.DB) error {
			return transaction(lockctx.With(dbtest.Limited(t), "k", lockctx.Advisory()), db, stop)
		}
		hold := func(db *sql.DB) error {
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return transaction(ctx, db, stop) }, lockctx.Advisory())
		}
		for name, c := range map[string]struct {
			maxConns int
			sold     func(*sql.DB) error
			once     bool // the check and COMMIT are one statement: there is a way, and the connection's id is known
		}{
			"unit of work": {0, unit, s.MariaDB()}, "in a hold": {0, hold, false}, "unit of work, maxConns": {8, unit, true}, "in a hold, maxConns": {8, hold, true},
		} {
			connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: c.maxConns})
			dbtest.OK(t, err)
			db := sql.OpenDB(connector)
			defer db.Close()
			if c.maxConns > 0 {
				dbtest.Soon(t, "the check is a part of the COMMIT", func() bool {
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Advisory()), nil)
					dbtest.OK(t, err)
					dbtest.Exec(t, tx, "UPDATE p SET stock = stock WHERE id = 1")
					dbtest.OK(t, tx.Commit())
					return checks.Load()
				})
			}
			cuts.Store(true)
			err = c.sold(db)
			cuts.Store(false)
			if checks.Load() != c.once {
				t.Errorf("%s: the check was a part of the COMMIT: %v", name, checks.Load())
			}
			var busy int
			dbtest.OK(t, admin.QueryRowContext(dbtest.Limited(t), "SELECT COUNT(*) FROM information_schema.processlist WHERE db = ? AND id <> CONNECTION_ID() AND info LIKE '%COMMIT%' AND info NOT LIKE 'CREATE %'", s.Name).Scan(&busy))
			if err == nil || busy != 0 {
				t.Errorf("%s: %v; %d COMMITs go on", name, err, busy)
			}
			_, err = admin.ExecContext(dbtest.Limited(t), "UNLOCK TABLES")
			dbtest.OK(t, err)
			s.wantStock(1, 10)
		}
	})
}

// TestPollerBeginsAfterItsWait: a caller whose turn ends while others wait for the key, and that
// then finds no connection to wait on, has its transaction after the wait, as everybody has that
// waits: nothing is begun meanwhile that nobody ends.
func TestPollerBeginsAfterItsWait(t *testing.T) {
	begin := func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
			return err
		}
		return tx.Commit()
	}
	exec := func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		return err
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, c := range map[string]struct {
			param string
			sell  func(context.Context, *sql.DB) error
		}{
			"BeginTx": {"", begin}, "Exec": {"", exec}, "BeginTx, maxConns": {"maxConns=8", begin}, "Exec, maxConns": {"maxConns=8", exec},
		} {
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
			db := s.open("lockStrategy=advisory", "lockMaxConns=2", "lockHandOverTime=1ms", "lockWait=1m", c.param)
			s.pollAfterTurn(db, func(ctx context.Context) error { return c.sell(ctx, db) })
			s.wantStock(1, 9)
			s.wantPlainWrites(name, db)
			s.wantClosed(name, db)
		}
	})
}

// pollAfterTurn has sell, under k, wait as a poller after db's turn was over.
func (s *scratch) pollAfterTurn(db *sql.DB, sell func(context.Context) error) {
	t := s.T
	t.Helper()
	under := func(key string) context.Context { return lockctx.With(dbtest.Limited(t), key) }
	rival := func() (get func(key string) error) {
		c, err := s.plain.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		t.Cleanup(func() { c.Close() })
		return func(key string) error {
			text := "DO GET_LOCK('" + lockname.OfAdvisory(s.Name, key) + "', 60)"
			if key == "" {
				text = "DO RELEASE_ALL_LOCKS()"
			}
			_, err := c.ExecContext(dbtest.Limited(t), text)
			return err
		}
	}
	waiting := func() []int64 {
		return dbtest.Column[int64](t, s.plain, "SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' AND INFO LIKE ?",
			"%GET_LOCK('"+lockname.OfAdvisory(s.Name, "k")+"'%")
	}
	polls := func(key string) bool {
		var id sql.NullInt64
		dbtest.OK(t, s.plain.QueryRow("SELECT IS_USED_LOCK(?)", lockname.OfPoller(s.Name, key)).Scan(&id))
		return id.Valid
	}
	first, second, third := rival(), rival(), rival()
	dbtest.OK(t, first("k"))
	dbtest.OK(t, third("l"))
	held, turn, sold, other := make(chan *sql.Tx, 1), make(chan error, 1), make(chan error, 1), make(chan error, 1)
	begin := func(key string) (*sql.Tx, error) { return db.BeginTx(under(key), nil) }
	go func() {
		tx, err := begin("k")
		if err != nil {
			t.Error(err)
		}
		held <- tx
	}()
	dbtest.Soon(t, "one waits in the server", func() bool { return len(waiting()) == 1 })
	go func() { turn <- second("k") }()
	dbtest.Soon(t, "the rival waits", func() bool { return len(waiting()) == 2 })
	dbtest.OK(t, first(""))
	tx := <-held
	go func() { sold <- sell(under("k")) }()
	dbtest.Soon(t, "the next one is in line", func() bool {
		st, err := mysqllock.Stats(db)
		dbtest.OK(t, err)
		return st.Waiters == 1
	})
	time.Sleep(2 * time.Millisecond) // the time after which others have their turn
	dbtest.OK(t, tx.Commit())
	dbtest.OK(t, <-turn)
	dbtest.Soon(t, "the next one waits in the server", func() bool { return len(waiting()) == 1 })
	go func() {
		tx, err := begin("l")
		if err == nil {
			err = tx.Rollback()
		}
		other <- err
	}()
	dbtest.Soon(t, "somebody polls for another key", func() bool { return polls("l") })
	dbtest.Soon(t, "the next one polls", func() bool {
		for _, id := range waiting() {
			_, _ = s.plain.Exec(fmt.Sprintf("KILL QUERY %d", id)) // it may be over
		}
		return polls("k")
	})
	dbtest.OK(t, second(""))
	dbtest.OK(t, <-sold)
	dbtest.OK(t, third(""))
	dbtest.OK(t, <-other)
}

// wantPlainWrites fails the test unless what is written without a lock, on every connection that
// database/sql has kept, is committed at once.
func (s *scratch) wantPlainWrites(what string, db *sql.DB) {
	s.T.Helper()
	var conns []*sql.Conn
	defer func() {
		for _, c := range conns {
			dbtest.OK(s.T, c.Close())
		}
	}()
	for n := range max(db.Stats().Idle, 1) {
		c, err := db.Conn(dbtest.Limited(s.T))
		dbtest.OK(s.T, err)
		conns = append(conns, c)
		_, err = c.ExecContext(dbtest.Limited(s.T), "INSERT INTO p VALUES (?, 7)", 1000+n)
		dbtest.OK(s.T, err)
		var there int
		dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) FROM p WHERE id = ?", 1000+n).Scan(&there))
		if there != 1 {
			s.T.Errorf("%s: a plain INSERT came off, and is not committed", what)
		}
	}
	dbtest.Exec(s.T, s.plain, "DELETE FROM p WHERE id >= 1000")
}

// wantClosed fails the test unless db can be closed.
func (s *scratch) wantClosed(what string, db *sql.DB) {
	s.T.Helper()
	closed := make(chan error, 1)
	go func() { closed <- db.Close() }()
	select {
	case err := <-closed:
		dbtest.OK(s.T, err)
	case <-time.After(dbtest.Patience):
		s.T.Fatalf("%s: Close hangs", what)
	}
}

// TestHotAdvisoryKeys: many goroutines of two handles want a few keys, with too few connections
// to wait on: all are served, and nothing is left on a connection.
func TestHotAdvisoryKeys(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const keys, each = 8, 3
		for id := 5; id <= keys; id++ {
			dbtest.Exec(t, s.plain, "INSERT INTO p VALUES (?, 10)", id)
		}
		for _, param := range []string{"", "maxConns=8"} {
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 0")
			var all sync.WaitGroup
			handles := []*sql.DB{s.open("lockStrategy=advisory", "lockMaxConns=3", "lockWait=2m", param), s.open("lockStrategy=advisory", "lockMaxConns=3", "lockWait=2m", param)}
			for i := range 60 {
				db := handles[i%2]
				all.Go(func() {
					for n := range each {
						id := 1 + (i+n)%keys
						ctx := lockctx.With(dbtest.Limited(t), fmt.Sprint("k", id))
						if i%3 == 0 {
							if _, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = ?", id); err != nil {
								t.Error(err)
							}
							continue
						}
						tx, err := db.BeginTx(ctx, nil)
						if err != nil {
							t.Error(err)
							continue
						}
						_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = ?", id)
						if err = errors.Join(err, tx.Commit()); err != nil {
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			var sum int
			dbtest.OK(t, s.plain.QueryRow("SELECT SUM(stock) FROM p").Scan(&sum))
			if sum != 60*each {
				t.Errorf("%s: %d updates of %d are there", param, sum, 60*each)
			}
			for _, db := range handles {
				s.wantPlainWrites(param, db)
				s.wantClosed(param, db)
			}
		}
	})
}

// TestConnectionsAreLeftForLockConnections: callers whose BEGIN goes out beside the lock leave the
// connections of maxConns to the lock connection that all of them need.
func TestConnectionsAreLeftForLockConnections(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for range 5 {
			db := s.open("lockStrategy=advisory", "lockUnsafe=allow", "maxConns=4") // with which nothing begins in the statement that locks
			var all sync.WaitGroup
			for i := range 12 {
				all.Go(func() {
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), fmt.Sprint("k", i)), nil)
					if err != nil {
						t.Error(err)
						return
					}
					dbtest.OK(t, tx.Commit())
				})
			}
			all.Wait()
			s.wantClosed("callers of 12 keys", db)
		}
	})
}
