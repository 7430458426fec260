package advisory_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestWithLeavesTheStrategyToTheHandle. Inside or around one that says it, it takes both where they do not exclude
// each other, and one where they do.
func TestWithLeavesTheStrategyToTheHandle(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for strategy, want := range map[string][2]bool{"advisory": {true, true}, "row": {true, false}} {
			db, key := s.Handle("lockStrategy="+strategy), "k"+strategy
			for _, ctx := range []context.Context{
				lockctx.With(lockctx.With(dbtest.Limited(t), key, lockctx.Row()), key),
				lockctx.With(lockctx.With(dbtest.Limited(t), key), key, lockctx.Row()),
			} {
				tx := dbtest.Begin(t, ctx, db)
				s.WantLocked(key, want[0])
				s.WantNamed(key, want[1])
				dbtest.OK(t, tx.Commit())
			}
		}
		db := s.Handle("lockStrategy=advisory")
		tx := dbtest.Begin(t, lockctx.With(lockctx.With(dbtest.Limited(t), "twice"), "twice", lockctx.Advisory(), lockctx.Wait(time.Minute)), db)
		dbtest.OK(t, tx.Commit())
	})
}

// TestAdvisoryHoldLapses: a hold whose context has ended is kept for lockTTL, for
// what still runs in it to stop, or until Release.
func TestAdvisoryHoldLapses(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, released := range []bool{false, true} {
			dbtest.AtItsPace(t, 3*time.Second, func(ttl time.Duration) error {
				db := s.Handle("lockStrategy=advisory&lockTTL=" + ttl.String())
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				h, err := mysqllock.Acquire(ctx, db, "job")
				dbtest.OK(t, err)
				ended := time.Now()
				cancel()
				if named := s.Named("job") != 0; !named && time.Since(ended) < ttl {
					return errors.New("it is not kept")
				}
				if released {
					err := h.Release()
					s.WantNamed("job", false)
					if after := time.Since(ended); err == nil && after >= ttl { // it may have lapsed
						err = fmt.Errorf("it is free after %v", after)
					}
					return err
				}
				dbtest.Soon(t, "it has lapsed", func() bool { return s.Named("job") == 0 })
				_ = h.Release()
				if kept := time.Since(ended); kept < ttl {
					return fmt.Errorf("it was kept for %v", kept)
				}
				return nil
			})
		}
	})
}

// TestASessionHoldsTheLockOfItsTransaction: a lock that ends with the transaction is held by its session, whatever
// runs in it; one that may outlive the transaction is not.
func TestASessionHoldsTheLockOfItsTransaction(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, params := range []string{"", "&maxConns=8"} {
			db := s.Handle("lockStrategy=advisory" + params)
			own := func(what string, tx *sql.Tx, key string, want bool) {
				t.Helper()
				var id int64
				dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
				if got := s.Named(key) == id; got != want {
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
			tx := dbtest.Begin(t, lockctx.With(ctx, "b"), db)
			own("may outlive it", tx, "b", false)
			dbtest.OK(t, tx.Commit())
			s.WantNamed("a", true)
			s.WantNamed("b", true)
			cancel()
			dbtest.Soon(t, "the end of the context gives them back", func() bool { return s.Named("a")+s.Named("b") == 0 })

			// A hold inside the transaction joins it, and so does a transaction in that.
			ctx = lockctx.With(dbtest.Limited(t), "k")
			tx = dbtest.Begin(t, ctx, db)
			own("transaction", tx, "k", true)
			dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				inner := dbtest.Begin(t, ctx, db)
				dbtest.Exec(t, inner, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				return inner.Commit()
			}))
			own("after the hold", tx, "k", true)
			dbtest.Is(t, "somebody else", mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, lockctx.NoWait()), mysqllock.ErrLocked)
			dbtest.OK(t, tx.Commit())
			s.WantNamed("k", false)
			s.WantStock(1, stock-1)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil }, lockctx.NoWait()))

			// The caller's context ends, database/sql rolls back, and the connection is used
			// again.
			ctx, cancel = context.WithCancel(dbtest.Limited(t))
			tx = dbtest.Begin(t, lockctx.With(ctx, "k"), db)
			own("cancelled", tx, "k", true)
			cancel()
			dbtest.Soon(t, "it is rolled back", func() bool { return s.Named("k") == 0 })

			// An error of the server that rolls back; then the lock goes at once, although
			// the caller has not said Rollback yet.
			tx = dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "d"), db)
			own("deadlock", tx, "d", true)
			_, err := tx.Exec("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213")
			dbtest.Want(t, err, mysqllock.ErrDeadlock)
			s.WantNamed("d", false)
			dbtest.OK(t, tx.Rollback())
			s.WantStock(1, stock-1)
			dbtest.Exec(t, db, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			dbtest.OK(t, db.Close())
		}
	})
}

// TestASessionWithALockIsKeptAlive: an idle transaction that holds its lock is kept alive, by pings that
// never come into a statement of the application's; and its loss is noticed.
func TestASessionWithALockIsKeptAlive(t *testing.T) {
	idle := func(t *testing.T, s *stock.Shop, params string, ttl time.Duration) error {
		db := s.Handle("lockStrategy=advisory&lockTTL=" + ttl.String() + params)
		time.Sleep(ttl * 6 / 5) // as if the connection was silent for too long
		err := stock.InTx(lockctx.With(dbtest.Limited(t), "k"), db, func(tx *sql.Tx) error {
			time.Sleep(ttl * 3 / 10)
			if _, err := tx.Exec("UPDATE p SET stock = 9 WHERE id = 1"); err != nil {
				return err
			}
			time.Sleep(ttl * 6 / 5)
			stmt, err := tx.Prepare("SELECT id FROM p WHERE id <= 2 ORDER BY id")
			if err != nil {
				return err
			}
			rows, err := stmt.Query()
			if err != nil {
				return err
			}
			n := 0
			for ; rows.Next(); n++ {
				time.Sleep(ttl * 7 / 10) // longer than between two pings
			}
			if err := errors.Join(rows.Err(), rows.Close()); err != nil {
				return err
			}
			if _, err := tx.Exec(fmt.Sprintf("DO SLEEP(%.1f)", (ttl * 6 / 5).Seconds())); err != nil { // longer than the TTL
				return err
			}
			if s.Named("k") == 0 || n != 2 {
				return fmt.Errorf("it is not held, or %d rows", n)
			}
			return nil
		})
		if err != nil {
			return err
		}
		ended := time.Now()
		s.WantNamed("k", false)
		if after := time.Since(ended); after > ttl/2 { // the server may have ended its connection
			return fmt.Errorf("it is free %v after the commit", after)
		}
		return nil
	}
	kept := func(t *testing.T, s *stock.Shop, params string) {
		dbtest.AtItsPace(t, time.Second, func(ttl time.Duration) error { return idle(t, s, params, ttl) })
		s.WantStock(1, 9)

		db := s.Handle("lockStrategy=advisory&lockTTL=3s" + params)
		tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "lost"), db)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 0 WHERE id = 1")
		dbtest.Exec(t, s.Plain, fmt.Sprintf("KILL %d", s.Named("lost")))
		time.Sleep(1200 * time.Millisecond) // a ping has failed
		_, err := tx.Exec("UPDATE p SET stock = 0 WHERE id = 1")
		dbtest.Want(t, err, mysqllock.ErrLost)
		dbtest.Want(t, tx.Commit(), mysqllock.ErrLost)
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "lost", func(context.Context) error { return nil }, lockctx.NoWait()))
		dbtest.Exec(t, db, "UPDATE p SET stock = stock + 1 WHERE id = 1")
		s.WantStock(1, 10)
		dbtest.OK(t, db.Close())
	}
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var both dbtest.Together
		defer both.Wait()
		for _, params := range []string{"", "&maxConns=8"} {
			both.Run(t, params, func(t *testing.T) { kept(t, stock.NewShop(s.Beside(t)), params) })
		}
	})
}

// cutAtCommit closes a connection soon after a COMMIT has gone out on it, if it is to cut.
type cutAtCommit struct {
	net.Conn
	cuts *atomic.Bool
}

func (c cutAtCommit) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if bytes.Contains(b, []byte("COMMIT")) && c.cuts.Load() {
		time.AfterFunc(100*time.Millisecond, func() { c.Close() })
	}
	return n, err
}

const sell = "UPDATE p SET stock = stock - 1 WHERE id = 1"

// TestALockIsKeptWhileACommitUnderItIsUnknown: the server may still be busy with it, and its answer is lost.
func TestALockIsKeptWhileACommitUnderItIsUnknown(t *testing.T) {
	transaction := func(ctx context.Context, db *sql.DB, before func()) error {
		return stock.InTx(ctx, db, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, sell); err != nil {
				return err
			}
			before()
			return nil
		})
	}
	dbtest.OnOwnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) { // commits are held up for all of it
		var cuts atomic.Bool
		cfg := s.Config()
		cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			var d net.Dialer
			c, err := d.DialContext(ctx, network, addr)
			return cutAtCommit{c, &cuts}, err
		}
		admin, err := s.Plain.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
		defer admin.Close()
		stop := func() {
			dbtest.ExecIn(t, dbtest.Limited(t), admin, "FLUSH TABLES WITH READ LOCK")
		}
		unit := func(db *sql.DB) error {
			return transaction(lockctx.With(dbtest.Limited(t), "k", lockctx.Advisory()), db, stop)
		}
		hold := func(db *sql.DB) error {
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return transaction(ctx, db, stop) }, lockctx.Advisory())
		}
		for name, sold := range map[string]func(*sql.DB) error{"unit of work": unit, "in a hold": hold} {
			for _, maxConns := range []int{0, 8} {
				connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: maxConns})
				dbtest.OK(t, err)
				db := sql.OpenDB(connector)
				defer db.Close()
				cuts.Store(true)
				err = sold(db)
				cuts.Store(false)
				var busy int
				dbtest.OK(t, admin.QueryRowContext(dbtest.Limited(t), "SELECT COUNT(*) FROM information_schema.processlist"+
					" WHERE db = ? AND id <> CONNECTION_ID() AND info LIKE '%COMMIT%'", s.Name).Scan(&busy))
				if err == nil || busy != 0 {
					t.Errorf("%s, maxConns %d: %v; %d COMMITs go on", name, maxConns, err, busy)
				}
				dbtest.ExecIn(t, dbtest.Limited(t), admin, "UNLOCK TABLES")
				s.WantStock(1, 10)
			}
		}
	})
}

// TestADisturbedCommitIsCalledASuccessOnlyIfItIsOne: each statement that goes out with the COMMIT under an advisory
// lock is interrupted, or the connection breaks in place of its answer. Others get the lock only once that cannot
// change any more.
func TestADisturbedCommitIsCalledASuccessOnlyIfItIsOne(t *testing.T) {
	t.Cleanup(func() { server.SetOneByOne(false) })
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		var tap dbtest.Tap
		cfg := s.Config()
		tap.On(cfg)
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Strategy: "advisory"})
		dbtest.OK(t, err)
		db := sql.OpenDB(connector)
		defer db.Close()
		under := func() context.Context { return lockctx.With(dbtest.Limited(t), "k") }
		for _, oneByOne := range []bool{false, true} {
			for _, at := range []string{takes, "COMMIT", "SELECT " + server.Untimed + "RELEASE_LOCK"} {
				for _, fault := range []dbtest.Fault{{Answer: dbtest.Interrupted}, {Lost: true}} {
					server.SetOneByOne(oneByOne) // tests of the other server may set it, too
					tx := dbtest.Begin(t, under(), db)
					dbtest.Exec(t, tx, sell)
					fault.At = func(text string) bool { return strings.HasPrefix(text, at) }
					happened := tap.Strike(fault)
					err := tx.Commit()
					left := dbtest.Column[int](t, s.Plain, "SELECT stock FROM p WHERE id = 1")[0]
					sold := left == 9
					switch released := at == "SELECT "+server.Untimed+"RELEASE_LOCK"; {
					case err == nil && !sold, sold && happened() && !released && !fault.Lost:
						t.Errorf("%s, lost %v: %v, and the stock is %d", at, fault.Lost, err, left)
					case (err == nil) != (!happened() || released), err != nil && !errors.Is(err, mysqllock.ErrLost):
						t.Errorf("%s, lost %v: %v", at, fault.Lost, err)
					}
					tap.Strike(dbtest.Fault{At: func(string) bool { return false }})
					dbtest.OK(t, mysqllock.Do(under(), db, "k", func(context.Context) error { s.WantStock(1, left); return nil }))
					s.WantNamed("k", false)
					dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10 WHERE id = 1")
				}
			}
		}
	})
}

// TestPollerBeginsAfterItsWait: a caller whose turn ends while others wait for the key, and that
// then finds no connection to wait on, has its transaction after the wait, as everybody has that
// waits: nothing is begun meanwhile that nobody ends.
func TestPollerBeginsAfterItsWait(t *testing.T) {
	begin := func(ctx context.Context, db *sql.DB) error {
		return stock.InTx(ctx, db, func(tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			return err
		})
	}
	exec := func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
		return err
	}
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, c := range map[string]struct {
			param string
			sell  func(context.Context, *sql.DB) error
		}{
			"BeginTx": {"", begin}, "Exec": {"", exec}, "BeginTx, maxConns": {"maxConns=8", begin}, "Exec, maxConns": {"maxConns=8", exec},
		} {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
			db := s.Handle("lockStrategy=advisory", "lockMaxConns=2", "lockHandOverTime=1ms", "lockWait=1m", c.param)
			pollAfterTurn(s, db, func(ctx context.Context) error { return c.sell(ctx, db) })
			s.WantStock(1, 9)
			wantPlainWrites(s, name, db)
			wantClosed(s, name, db)
		}
	})
}

// pollAfterTurn has sell, under k, wait as a poller after db's turn was over.
func pollAfterTurn(s *stock.Shop, db *sql.DB, sell func(context.Context) error) {
	t := s.T
	t.Helper()
	under := func(key string) context.Context { return lockctx.With(dbtest.Limited(t), key) }
	another := func() (get func(key string) error) {
		c, err := s.Plain.Conn(dbtest.Limited(t))
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
	waiting := func(key string) []int64 { // in the server
		return dbtest.Column[int64](t, s.Plain, "SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' AND INFO LIKE ?",
			"%GET_LOCK('"+lockname.OfAdvisory(s.Name, key)+"'%")
	}
	waiters := func() int {
		st, err := mysqllock.Stats(db)
		dbtest.OK(t, err)
		return st.Waiters
	}
	first, second, third := another(), another(), another()
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
	dbtest.Soon(t, "one waits in the server", func() bool { return len(waiting("k")) == 1 })
	go func() { turn <- second("k") }()
	dbtest.Soon(t, "the other waits", func() bool { return len(waiting("k")) == 2 })
	dbtest.OK(t, first(""))
	tx := <-held
	go func() { sold <- sell(under("k")) }()
	dbtest.Soon(t, "the next one is in the queue", func() bool { return waiters() == 1 })
	time.Sleep(2 * time.Millisecond) // the time after which others have their turn
	dbtest.OK(t, tx.Commit())
	dbtest.OK(t, <-turn)
	dbtest.Soon(t, "the next one waits in the server", func() bool { return len(waiting("k")) == 1 })
	go func() {
		tx, err := begin("l")
		if err == nil {
			err = tx.Rollback()
		}
		other <- err
	}()
	dbtest.Soon(t, "somebody polls for another key", func() bool { return waiters() == 2 })
	dbtest.Soon(t, "the next one polls, since the other one has the connection to wait on", func() bool {
		for _, id := range waiting("k") {
			_, _ = s.Plain.Exec(fmt.Sprintf("KILL QUERY %d", id)) // it may be over
		}
		return len(waiting("l")) == 1
	})
	dbtest.OK(t, second(""))
	dbtest.OK(t, <-sold)
	dbtest.OK(t, third(""))
	dbtest.OK(t, <-other)
}

// wantPlainWrites fails the test unless what is written without a lock, on every connection that
// database/sql has kept, is committed at once.
func wantPlainWrites(s *stock.Shop, what string, db *sql.DB) {
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
		dbtest.Exec(s.T, c, "INSERT INTO p VALUES (?, 7)", 1000+n)
		var there int
		dbtest.OK(s.T, s.Plain.QueryRow("SELECT COUNT(*) FROM p WHERE id = ?", 1000+n).Scan(&there))
		if there != 1 {
			s.T.Errorf("%s: a plain INSERT came off, and is not committed", what)
		}
	}
	dbtest.Exec(s.T, s.Plain, "DELETE FROM p WHERE id >= 1000")
}

// wantClosed fails the test unless db can be closed.
func wantClosed(s *stock.Shop, what string, db *sql.DB) {
	s.T.Helper()
	closed := dbtest.Go(db.Close)
	select {
	case err := <-closed:
		dbtest.OK(s.T, err)
	case <-time.After(dbtest.Patience):
		s.T.Fatalf("%s: Close hangs", what)
	}
}

// TestConnectionsAreLeftForLockConnections: callers that are about to begin a transaction leave the
// connections of maxConns to the lock connection that all of them need.
func TestConnectionsAreLeftForLockConnections(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for range 5 {
			db := s.Handle("lockStrategy=advisory", "lockUnsafe=allow", "maxConns=6") // with which no session holds a lock
			var all sync.WaitGroup
			for i := range 12 {
				all.Go(func() {
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), fmt.Sprint("k", i)), nil)
					if err != nil {
						t.Error(err)
						return
					}
					if err := tx.Commit(); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			wantClosed(s, "callers of 12 keys", db)
		}
	})
}
