package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestMaxConnsHotKey: 100 callers read, decide and write under one key, with 25
// connections. All of them are served.
func TestMaxConnsHotKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 25, "lockWait=2m")
		key := dbtest.Random()
		var callers sync.WaitGroup
		var units atomic.Int32
		for range 100 {
			callers.Go(func() {
				for range 3 {
					if err := stock.Decide(dbtest.Within(t, 2*time.Minute), db, key, 1); err != nil {
						t.Error(err)
						return
					}
					units.Add(1)
				}
			})
		}
		callers.Wait()
		s.wantStock(1, 10-300)
	})
}

// TestMaxConnsFewForManyKeys: many callers on a few keys, with hardly more connections
// than keys, and with fewer. All of them are served, and the server has never more
// connections than allowed.
func TestMaxConnsFewForManyKeys(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, test := range []struct{ callers, keys, conns int }{{24, 4, 6}, {150, 30, 10}, {12, 4, 4}} {
			db := s.limited(t, test.conns, "lockWait=2m")
			base := dbtest.Random()
			dbtest.Exec(t, s.plain, "DELETE FROM p")
			for id := range test.keys {
				dbtest.Exec(t, s.plain, "INSERT INTO p VALUES (?, 0)", id+1)
			}
			const times = 6
			var callers sync.WaitGroup
			for i := range test.callers {
				callers.Go(func() {
					for n := range times {
						key := (i + n) % test.keys
						if err := stock.Sell(dbtest.Within(t, 2*time.Minute), db, i/test.keys+n, fmt.Sprint(base, key), key+1); err != nil {
							t.Errorf("%d callers: %v", test.callers, err)
							return
						}
					}
				})
			}
			callers.Wait()
			for id := range test.keys {
				s.wantStock(id+1, -test.callers*times/test.keys)
			}
			dbtest.Eventually(t, "nothing is in use in the end", func() error {
				st, err := mysqllock.Stats(db)
				if err == nil && (st.MaxConns != test.conns || st.App.Waiting+st.Waiters != 0 || st.App.InUse != 0) {
					err = fmt.Errorf("%+v", st)
				}
				return err
			})
			dbtest.OK(t, db.Close())
		}
	})
}

// TestMaxConnsSecond: units of work that have all connections, and need one more each, end
// with an error that says so.
func TestMaxConnsSecond(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 4, "lockWait=200ms")
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(context.Context) error { return nil }, lockctx.Wait(time.Minute))) // the table is there
		var begun, asked sync.WaitGroup
		begun.Add(3)
		asked.Add(3)
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), dbtest.Random(), lockctx.Wait(20*time.Second)), nil)
				begun.Done()
				if err != nil {
					t.Error(err)
					asked.Done()
					return
				}
				defer tx.Rollback()
				begun.Wait()
				ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), dbtest.Random()))
				defer cancel()
				var n int
				err = db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n)
				dbtest.Want(t, err, mysqllock.ErrExhausted)
				dbtest.Says(t, err, "none of the 4 connections", "maxConns", "3 in use, of which 0 wait in the server", "1 reserved")
				asked.Done()
				asked.Wait()
			})
		}
		all.Wait()
		dbtest.Exec(t, db, "UPDATE p SET stock = 1 WHERE id = 1")
	})
}

// TestMaxConnsInTurn: while connections change hands, units of work queue for one for as long
// as their contexts last, however short their wait for the lock is.
func TestMaxConnsInTurn(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const wait = 3 * time.Second // far longer than a connection takes to change hands, also on a busy machine
		db := s.limited(t, 4, "lockWait="+wait.String())
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(context.Context) error { return nil }, lockctx.Wait(time.Minute))) // the table is there
		var all sync.WaitGroup
		start := time.Now()
		for i := range 75 {
			all.Go(func() {
				work := func(context.Context) error { time.Sleep(200 * time.Millisecond); return nil }
				var err error
				if i%2 == 0 {
					err = mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), work, lockctx.Row())
				} else {
					var tx *sql.Tx
					if tx, err = db.BeginTx(lockctx.With(dbtest.Limited(t), dbtest.Random()), nil); err == nil {
						_ = work(nil)
						err = tx.Commit()
					}
				}
				if err != nil {
					t.Errorf("%d after %v: %v", i%2, time.Since(start), err)
				}
			})
		}
		all.Wait()
		if took := time.Since(start); took <= wait {
			t.Fatalf("nobody had to queue for longer than the wait for a lock: %v", took)
		}
	})
}

// TestMaxConnsQueue: statements without a lock queue for a connection as they do under
// SetMaxOpenConns, until their context ends. Those of a holder go first if another caller waits for its key.
func TestMaxConnsQueue(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE went (id INT AUTO_INCREMENT PRIMARY KEY, who VARCHAR(20) NOT NULL) ENGINE=InnoDB")
		db := s.limited(t, 5)
		key := dbtest.Random()
		var waiter sync.WaitGroup
		defer waiter.Wait()
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error { // a lease: its connection is one of them
			stat := func() mysqllock.PoolStats {
				st, err := mysqllock.Stats(db)
				dbtest.OK(t, err)
				return st
			}
			var open []*sql.Rows
			for range 4 - stat().Leases.InUse {
				rows, err := db.Query("SELECT id FROM p")
				dbtest.OK(t, err)
				open = append(open, rows)
			}
			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			_, err := db.ExecContext(short, "UPDATE p SET stock = 5 WHERE id = 1")
			dbtest.Want(t, err, context.DeadlineExceeded)
			s.wantStock(1, 10)

			waiter.Go(func() {
				err := mysqllock.Do(dbtest.Limited(t), db, key, func(context.Context) error { return nil }, lockctx.Lease(30*time.Second), lockctx.Wait(time.Minute))
				if err != nil {
					t.Error(err)
				}
			})
			dbtest.Soon(t, "the key is waited for", func() bool { return stat().Waiters == 1 })
			done := make(chan struct{}, 2)
			queued := func(name string, f func() error) {
				before := stat().App.Waiting
				go func() {
					if err := f(); err != nil {
						t.Errorf("%s: %v", name, err)
					}
					done <- struct{}{}
				}()
				dbtest.Soon(t, name+" queues", func() bool { return stat().App.Waiting == before+1 })
			}
			queued("another", func() error { _, err := db.Exec("INSERT INTO went (who) VALUES ('another')"); return err })
			queued("the holder", func() error {
				_, err := db.ExecContext(ctx, "INSERT INTO went (who) VALUES ('the holder')")
				return err
			})
			dbtest.OK(t, open[0].Close())
			<-done
			<-done
			var first string // on the server: here the other may be done before the first has said so
			dbtest.OK(t, s.plain.QueryRow("SELECT who FROM went ORDER BY id LIMIT 1").Scan(&first))
			if first != "the holder" {
				t.Errorf("%s went first", first)
			}
			for _, rows := range open {
				dbtest.OK(t, rows.Close())
			}
			return nil
		}, lockctx.Lease(30*time.Second)))
	})
}

// TestMaxConnsState: what belongs to a connection stays with its sql.Conn, or its
// transaction, and a lock never meets what another user has left.
func TestMaxConnsState(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 6)
		conn := conned(t, db)
		dbtest.Exec(t, conn, "SET @x = 1")
		dbtest.Exec(t, conn, "CREATE TEMPORARY TABLE mine (id INT)")
		tx, err := db.Begin()
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "SET @x = 2")
		var others sync.WaitGroup
		for range 4 {
			others.Go(func() {
				for range 20 {
					if _, err := db.Exec("SET @x = 3"); err != nil {
						t.Error(err)
					}
				}
			})
		}
		for range 20 {
			var n int
			dbtest.OK(t, conn.QueryRowContext(dbtest.Limited(t), "SELECT @x + COUNT(*) FROM mine").Scan(&n))
			dbtest.OK(t, tx.QueryRow("SELECT @x * 10 + ?", n).Scan(&n))
			if n != 21 {
				t.Fatalf("a connection has changed hands: %d", n)
			}
		}
		others.Wait()
		dbtest.OK(t, tx.Rollback())
		dbtest.OK(t, conn.Close())

		// A transaction that its user has forgotten, with a snapshot, on the connection that
		// comes next: it is not lost, and no lock reads what it sees.
		key := dbtest.Random()
		var seen int
		dbtest.Exec(t, db, "BEGIN")
		dbtest.OK(t, db.QueryRow("SELECT stock FROM p WHERE id = 1").Scan(&seen))
		dbtest.Exec(t, s.plain, "UPDATE p SET stock = 20 WHERE id = 1")
		read := func() error {
			return mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error {
				return db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&seen)
			}, lockctx.Lease(30*time.Second))
		}
		dbtest.Want(t, read(), mysqllock.ErrUnsafe)
		dbtest.Exec(t, db, "ROLLBACK")
		if err := read(); err != nil || seen != 20 {
			t.Errorf("under a lease an old snapshot was read: %d, %v", seen, err)
		}
	})
}

// TestMaxConnsPrepared: prepared statements run on whichever connection comes.
func TestMaxConnsPrepared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE made (id INT AUTO_INCREMENT PRIMARY KEY, n INT NOT NULL)")
		db := s.limited(t, 6, "lockWait=2m")
		made, err := db.Prepare("INSERT INTO made (n) VALUES (?)")
		dbtest.OK(t, err)
		find, err := db.Prepare("SELECT n FROM made WHERE id = ?")
		dbtest.OK(t, err)
		key := dbtest.Random()
		var callers sync.WaitGroup
		for i := range 20 {
			callers.Go(func() {
				for n := range 10 {
					ctx := dbtest.Within(t, 2*time.Minute)
					if n%2 == 0 {
						ctx = lockctx.With(ctx, key)
					}
					res, err := made.ExecContext(ctx, i*100+n)
					if err != nil {
						t.Error(err)
						return
					}
					id, err := res.LastInsertId()
					if err != nil {
						t.Error(err)
					}
					var got int
					if err := find.QueryRow(id).Scan(&got); err != nil || got != i*100+n {
						t.Errorf("row %d has %d, %v", id, got, err)
					}
				}
			})
		}
		callers.Wait()
		if _, err := made.Exec(); err == nil || !strings.Contains(err.Error(), "expected 1 arguments, got 0") {
			t.Errorf("without its argument: %v", err)
		}
		for i := range 100 { // more than stay prepared
			st, err := db.Prepare(fmt.Sprintf("SELECT %d + ?", i))
			dbtest.OK(t, err)
			defer st.Close()
			var n int
			dbtest.OK(t, st.QueryRow(1).Scan(&n))
			dbtest.OK(t, st.QueryRow(2).Scan(&n))
			if n != i+2 {
				t.Errorf("%d + 2 is %d", i, n)
			}
		}
		var kept int
		dbtest.OK(t, s.plain.QueryRow("SHOW GLOBAL STATUS LIKE 'Prepared_stmt_count'").Scan(new(string), &kept))
		if kept > 6*64+100 { // other tests have some, too
			t.Errorf("%d statements are prepared", kept)
		}
		dbtest.OK(t, made.Close())
		dbtest.OK(t, find.Close())
	})
}

// TestMaxConnsLost: connections that the server has ended are replaced, idle ones without
// an error.
func TestMaxConnsLost(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 5)
		ids := make(map[int]bool)
		var open []*sql.Conn
		for range 4 {
			conn := conned(t, db)
			var id int
			dbtest.OK(t, conn.QueryRowContext(dbtest.Limited(t), "SELECT CONNECTION_ID()").Scan(&id))
			ids[id] = true
			open = append(open, conn)
		}
		for _, conn := range open {
			dbtest.OK(t, conn.Close())
		}
		for id := range ids {
			dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id))
		}
		dbtest.Soon(t, "they have ended", func() bool {
			return !slices.ContainsFunc(s.connections(), func(id int) bool { return ids[id] })
		})
		for range 8 {
			var id int
			dbtest.OK(t, db.QueryRow("SELECT CONNECTION_ID()").Scan(&id))
			if ids[id] {
				t.Errorf("connection %d was ended", id)
			}
		}
	})
}

// TestMaxConnsAbandoned: a statement whose caller has gone does not keep its place, and does not
// go on, whatever sent it. The server itself takes no more than maxConns connections.
func TestMaxConnsAbandoned(t *testing.T) {
	const sleep = "SELECT SLEEP(60)"
	inTx := func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		_, err = tx.ExecContext(ctx, sleep)
		return err
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, hang := range map[string]func(context.Context, *sql.DB) error{
			"text": func(ctx context.Context, db *sql.DB) error {
				_, err := db.ExecContext(ctx, sleep)
				return err
			},
			"prepared": func(ctx context.Context, db *sql.DB) error {
				return db.QueryRowContext(ctx, "SELECT SLEEP(?)", 60).Scan(new(int))
			},
			"transaction": inTx,
			"lock": func(ctx context.Context, db *sql.DB) error {
				return inTx(lockctx.With(ctx, dbtest.Random()), db)
			},
		} {
			t.Run(name, func(t *testing.T) {
				db := s.limited(t, 4) // three, and one for control
				ctx := dbtest.Within(t, 40*time.Second)
				var callers sync.WaitGroup
				for range 3 {
					callers.Go(func() {
						for i := range 40 { // for as many times three seconds, if each place is kept
							short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
							if err := hang(short, db); err == nil {
								t.Error("it did not hang")
							}
							cancel()
							if err := db.QueryRowContext(ctx, "SELECT 1").Scan(new(int)); err != nil {
								t.Errorf("a quick statement after %d that hung: %v", i+1, err)
								return
							}
						}
					})
				}
				callers.Wait()
				dbtest.Soon(t, "nothing hangs on the server any more", func() bool {
					var n int
					dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'SELECT SLEEP(%'", s.Name).Scan(&n))
					return n == 0
				})
			})
		}
	})
}

// TestMaxConnsAbandonedOverASocket: where no statement can be killed, its place is not kept
// for it either.
func TestMaxConnsAbandonedOverASocket(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.at(s.Changed(dbtest.OverSocket(t, s.Server))).open("maxConns=4")
		ctx := dbtest.Within(t, 40*time.Second)
		for i := range 40 { // for as many times three seconds, if each place is kept
			var callers sync.WaitGroup
			for range 3 {
				callers.Go(func() {
					short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
					defer cancel()
					if _, err := db.ExecContext(short, "SELECT SLEEP(5)"); err == nil {
						t.Error("it did not hang")
					}
				})
			}
			callers.Wait()
			if err := db.QueryRowContext(ctx, "SELECT 1").Scan(new(int)); err != nil {
				t.Fatalf("a quick statement after %d times three that hung: %v", i+1, err)
			}
		}
	})
}

// TestMaxConnsBareSocket: connections are used again also where a DialFunc opens them whose
// sockets are only a net.Conn, as those of tunnels are: nobody can look whether the server
// has closed them.
func TestMaxConnsBareSocket(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var opened atomic.Int32
		cfg := s.Config()
		cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			opened.Add(1)
			var d net.Dialer
			c, err := d.DialContext(ctx, network, addr)
			return struct{ net.Conn }{c}, err
		}
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{MaxConns: 8})
		dbtest.OK(t, err)
		db := sql.OpenDB(connector)
		defer db.Close()
		sell := func() {
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			dbtest.OK(t, tx.Commit())
		}
		sell()
		before := opened.Load()
		for range 5 {
			sell()
		}
		if n := opened.Load() - before; n != 0 {
			t.Errorf("%d more connections were opened", n)
		}
	})
}

// TestMaxConnsAreRotated: at their age connections are closed, however busy they are, those of
// units of work, too, and no caller notices. What is idle for long is closed, too.
func TestMaxConnsAreRotated(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 6, "connMaxLifetime=500ms")
		ctx, key := dbtest.Limited(t), dbtest.Random()
		var sold int
		ids := func() (now [3]int) { // of a statement's connection, of a transaction's, and of a session
			dbtest.OK(t, db.QueryRow("SELECT CONNECTION_ID()").Scan(&now[0]))
			tx, err := db.BeginTx(lockctx.With(ctx, key), nil)
			dbtest.OK(t, err)
			dbtest.OK(t, tx.QueryRow("SELECT CONNECTION_ID()").Scan(&now[1]))
			dbtest.OK(t, tx.Commit())
			dbtest.OK(t, mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				return errors.Join(err, db.QueryRowContext(ctx, "SELECT CONNECTION_ID()").Scan(&now[2]))
			}))
			sold++
			return now
		}
		first, changed := ids(), [3]bool{}
		dbtest.Soon(t, "all of them are others", func() bool {
			for i, id := range ids() {
				changed[i] = changed[i] || !slices.Contains(first[:], id)
			}
			return changed == [3]bool{true, true, true}
		})
		s.wantStock(1, 10-sold)
		dbtest.OK(t, db.Close())

		db = s.limited(t, 6, "connMaxIdleTime=200ms")
		dbtest.Exec(t, db, "DO 0")
		dbtest.Soon(t, "what is idle is closed", func() bool {
			st, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return st.App.Idle == 0 && st.App.InUse == 0
		})
	})
}

// TestMaxConnsBesideHolders: callers without a lock get their turn beside more holders than
// there are connections, which never pause; and no lease is lost when the connections break
// while holders want all places.
func TestMaxConnsBesideHolders(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const holders, pings, ttl = 24, 20, 3 * time.Second
		db, tap := s.tapped(mysqllock.Config{MaxConns: 8, Wait: 2 * time.Minute})
		ctx, stop := context.WithCancel(dbtest.Within(t, 2*time.Minute))
		defer stop()
		base := dbtest.Random()
		var begun, working sync.WaitGroup
		var broken atomic.Bool // from then on statements may fail
		begun.Add(holders)
		for i := range holders {
			working.Go(func() {
				begins := sync.OnceFunc(begun.Done)
				defer begins()
				err := mysqllock.Do(dbtest.Within(t, 2*time.Minute), db, fmt.Sprint(base, i), func(held context.Context) error {
					begins()
					for ctx.Err() == nil {
						if _, err := db.ExecContext(held, "UPDATE p SET stock = stock WHERE id = ?", i+100); err != nil && !broken.Load() {
							return err
						}
						if err := context.Cause(held); err != nil {
							return err
						}
					}
					return nil
				}, lockctx.Lease(ttl))
				if err != nil {
					t.Errorf("holder %d: %v", i, err)
				}
			})
		}
		begun.Wait()
		for range pings {
			dbtest.OK(t, db.PingContext(ctx))
			var n int
			dbtest.OK(t, db.QueryRowContext(ctx, "SELECT 1").Scan(&n))
		}
		broken.Store(true)
		tap.Break()
		over := time.After(2 * ttl) // each lease has to be renewed by then
		for waits := true; waits; {
			select {
			case <-over:
				waits = false
			default:
				_, _ = db.ExecContext(ctx, "DO 0")
			}
		}
		stop()
		working.Wait()
	})
}

// TestMaxConnsNoWait: a caller that does not wait gets a free key while as many callers wait in the
// server as may, and others queue to do so.
func TestMaxConnsNoWait(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.limited(t, 8, "lockWait=2m"), s.open()
		ways := map[string]func(ctx context.Context, key string, opts ...lockctx.Option) error{
			"Do": func(ctx context.Context, key string, opts ...lockctx.Option) error {
				return mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
					return err
				}, append(opts, lockctx.Row())...)
			},
			"BeginTx": func(ctx context.Context, key string, opts ...lockctx.Option) error {
				tx, err := db.BeginTx(lockctx.With(ctx, key, opts...), nil)
				if err != nil {
					return err
				}
				_, err = tx.Exec("UPDATE p SET stock = stock - 1 WHERE id = 1")
				return errors.Join(err, tx.Commit())
			},
		}
		sold := 0
		for name, way := range ways {
			base := dbtest.Random()
			const keys = 7 // blockMax is 4
			var taken []string
			for i := range keys {
				taken = append(taken, fmt.Sprint(base, i))
			}
			tx, err := other.BeginTx(lockctx.WithKeys(dbtest.Within(t, 2*time.Minute), taken), nil)
			dbtest.OK(t, err)
			var waiters sync.WaitGroup
			for _, key := range taken {
				waiters.Go(func() {
					if err := way(dbtest.Within(t, 2*time.Minute), key); err != nil {
						t.Errorf("%s: a waiter: %v", name, err)
					}
				})
			}
			dbtest.Soon(t, "those that may not wait in the server queue", func() bool {
				st, err := mysqllock.Stats(db)
				dbtest.OK(t, err)
				return st.App.Waiting+st.Waiting == keys-4
			})
			for range 5 {
				dbtest.OK(t, way(dbtest.Limited(t), base+"free", lockctx.NoWait()))
				dbtest.OK(t, way(dbtest.Limited(t), base+"free too"))
			}
			dbtest.Want(t, way(dbtest.Limited(t), taken[0], lockctx.NoWait()), mysqllock.ErrLocked)
			dbtest.OK(t, tx.Rollback())
			waiters.Wait()
			sold += keys + 10
			s.wantStock(1, 10-sold)
		}
	})
}
