package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"maps"
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

// TestMaxConnsServesAllWithFewConnectionsForManyKeys: many callers on a few keys, with hardly more connections than
// keys, and with fewer. The server has never more connections than allowed.
func TestMaxConnsServesAllWithFewConnectionsForManyKeys(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for _, test := range []struct{ callers, keys, conns int }{{24, 4, 6}, {60, 30, 10}, {12, 4, 6}} {
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

// TestMaxConnsRefusesASecondConnectionWhereAllAreUsed, with an error that says so: units of work have all of them,
// and need one more each.
func TestMaxConnsRefusesASecondConnectionWhereAllAreUsed(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 6, "lockWait=200ms")
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(context.Context) error {
			return nil
		}, lockctx.Wait(time.Minute))) // the table is there
		var begun, asked sync.WaitGroup
		begun.Add(3)
		asked.Add(3)
		var all sync.WaitGroup
		for range 3 {
			all.Go(func() {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), dbtest.Random(), lockctx.Wait(time.Minute)), nil)
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
				dbtest.Says(t, err, "none of the 6 connections", "maxConns", "3 in use, of which 0 wait in the server", "3 kept")
				asked.Done()
				asked.Wait()
			})
		}
		all.Wait()
		dbtest.Exec(t, db, "UPDATE p SET stock = 1 WHERE id = 1")
	})
}

// TestMaxConnsLetsUnitsQueueForAsLongAsTheirContextsLast while connections change hands, however short their wait for
// the lock is.
func TestMaxConnsLetsUnitsQueueForAsLongAsTheirContextsLast(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.AtItsPace(t, 3*time.Second, func(wait time.Duration) error { // far longer than a connection takes to change hands
			db := s.limited(t, 6, "lockWait="+wait.String())
			defer db.Close()
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, dbtest.Random(), func(context.Context) error {
				return nil
			}, lockctx.Wait(time.Minute))) // the table is there
			errs := make([]error, 75)
			var all sync.WaitGroup
			start := time.Now()
			for i := range errs {
				all.Go(func() {
					work := func(context.Context) error { time.Sleep(wait / 15); return nil }
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
						errs[i] = fmt.Errorf("%d after %v: %w", i%2, time.Since(start), err)
					}
				})
			}
			all.Wait()
			if took := time.Since(start); took <= wait {
				t.Fatalf("nobody had to queue for longer than the wait for a lock: %v", took)
			}
			return errors.Join(errs...)
		})
	})
}

// TestMaxConnsLetsStatementsQueueUntilTheirContextEnds, those without a lock, for a connection, as they do under
// SetMaxOpenConns. Those of a holder go first if another caller waits for its key.
func TestMaxConnsLetsStatementsQueueUntilTheirContextEnds(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE went (id INT AUTO_INCREMENT PRIMARY KEY, who VARCHAR(20) NOT NULL) ENGINE=InnoDB")
		db := s.limited(t, 7)
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
			for range 4 {
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
				err := mysqllock.Do(dbtest.Limited(t), db, key, func(context.Context) error {
					return nil
				}, lockctx.Lease(30*time.Second), lockctx.Wait(time.Minute))
				if err != nil {
					t.Error(err)
				}
			})
			dbtest.Soon(t, "the key is waited for", func() bool { return stat().Waiters == 1 })
			done := make(chan struct{}, 2)
			queued := func(name string, f func() error) {
				waiting := func() int { st := stat(); return st.App.Waiting + st.Waiting } // a statement of the holder's takes a session
				before := waiting()
				go func() {
					if err := f(); err != nil {
						t.Errorf("%s: %v", name, err)
					}
					done <- struct{}{}
				}()
				dbtest.Soon(t, name+" queues", func() bool { return waiting() == before+1 })
			}
			queued("another", func() error { _, err := db.Exec("INSERT INTO went (who) VALUES ('another')"); return err })
			queued("the holder", func() error { return exec(ctx, db, "INSERT INTO went (who) VALUES ('the holder')") })
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

// TestWhatBelongsToAConnectionStaysWithItsUser: what belongs to a connection stays with its sql.Conn, or its
// transaction, and a lock never meets what another user has left.
func TestWhatBelongsToAConnectionStaysWithItsUser(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 6)
		conn := dbtest.Conn(t, db)
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

// TestMaxConnsReplacesConnectionsThatTheServerHasEnded, idle ones without an error.
func TestMaxConnsReplacesConnectionsThatTheServerHasEnded(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.limited(t, 7)
		db.SetMaxIdleConns(4)
		ids := make(map[int]bool)
		var open []*sql.Conn
		for range 4 {
			conn := dbtest.Conn(t, db)
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

// TestMaxConnsKeepsNoPlaceForAnAbandonedStatement, whatever sent it, nor does it go on: its caller has gone. The
// server itself takes no more than maxConns connections.
func TestMaxConnsKeepsNoPlaceForAnAbandonedStatement(t *testing.T) {
	const sleep = "SELECT SLEEP(60)"
	inTx := func(ctx context.Context, db *sql.DB) error {
		return stock.InTx(ctx, db, func(tx *sql.Tx) error { return exec(ctx, tx, sleep) })
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for name, hang := range map[string]func(context.Context, *sql.DB) error{
			"text": func(ctx context.Context, db *sql.DB) error { return exec(ctx, db, sleep) },
			"prepared": func(ctx context.Context, db *sql.DB) error {
				return db.QueryRowContext(ctx, "SELECT SLEEP(?)", 60).Scan(new(int))
			},
			"transaction": inTx,
			"lock": func(ctx context.Context, db *sql.DB) error {
				return inTx(lockctx.With(ctx, dbtest.Random()), db)
			},
		} {
			t.Run(name, func(t *testing.T) {
				db := s.limited(t, 6) // three, and those that are kept
				ctx := dbtest.Within(t, 100*time.Second)
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
			})
		}
		dbtest.Soon(t, "nothing hangs on the server any more", func() bool {
			var n int
			dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'SELECT SLEEP(%'", s.Name).Scan(&n))
			return n == 0
		})
	})
}

// TestMaxConnsKeepsNoPlaceForAnAbandonedStatementOverASocket either, where none can be killed.
func TestMaxConnsKeepsNoPlaceForAnAbandonedStatementOverASocket(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.at(s.Changed(dbtest.OverSocket(t, s.Server))).open("maxConns=6")
		ctx := dbtest.Within(t, 100*time.Second)
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

// TestMaxConnsUsesConnectionsOfABareSocketAgain: a DialFunc opens sockets that are only a net.Conn, as those of
// tunnels are, and nobody can look whether the server has closed them.
func TestMaxConnsUsesConnectionsOfABareSocketAgain(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
			tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			dbtest.OK(t, tx.Commit())
		}
		dbtest.Soon(t, "no more connections are opened", func() bool { // the driver's own may come later
			before := opened.Load()
			for range 5 {
				sell()
			}
			return opened.Load() == before
		})
	})
}

// TestMaxConnsGivesCallersWithoutALockTheirTurnBesideHolders that are more than there are connections, and never
// pause; and no lease is lost when the connections break while holders want all places.
func TestMaxConnsGivesCallersWithoutALockTheirTurnBesideHolders(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.AtItsPace(t, 3*time.Second, func(ttl time.Duration) error { return s.besideHolders(ttl) })
	})
}

// besideHolders returns what becomes of holders of leases that last for ttl.
func (s *scratch) besideHolders(ttl time.Duration) error {
	const holders, pings = 24, 20
	t := s.T
	db, tap := s.tapped(mysqllock.Config{MaxConns: 8, Wait: 2 * time.Minute})
	defer db.Close()
	ctx, stop := context.WithCancel(dbtest.Within(t, 2*time.Minute))
	defer stop()
	base := dbtest.Random()
	var begun, working sync.WaitGroup
	var broken atomic.Bool // from then on statements may fail
	var errs [holders]error
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
				errs[i] = fmt.Errorf("holder %d: %w", i, err)
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
	return errors.Join(errs[:]...)
}

// TestMaxConnsGivesAFreeKeyToOneThatDoesNotWait while as many callers wait in the server as may, and others queue to
// do so.
func TestMaxConnsGivesAFreeKeyToOneThatDoesNotWait(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.limited(t, 8, "lockWait=2m"), s.open()
		ways := map[string]func(ctx context.Context, key string, opts ...lockctx.Option) error{
			"Do": func(ctx context.Context, key string, opts ...lockctx.Option) error {
				return mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					return exec(ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
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
			const keys = 7 // blockMax is 2
			var taken []string
			for i := range keys {
				taken = append(taken, fmt.Sprint(base, i))
			}
			tx := dbtest.Begin(t, lockctx.WithKeys(dbtest.Within(t, 2*time.Minute), taken), other)
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
				return st.App.Waiting+st.Waiting == keys-2
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

// TestMaxConnsGivesNoConnectionAwayThatIsAskedThroughRaw whether it is valid.
func TestMaxConnsGivesNoConnectionAwayThatIsAskedThroughRaw(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=6")
		conn := dbtest.Conn(t, db)
		valid := func() {
			t.Helper()
			dbtest.OK(t, conn.Raw(func(dc any) error {
				if !dc.(driver.Validator).IsValid() {
					return errors.New("it is not valid")
				}
				return nil
			}))
			other := dbtest.Conn(t, db) // has it now, if anybody can
			dbtest.Exec(t, other, "SET @x = 2")
			dbtest.OK(t, other.Close())
		}
		mine := func() {
			t.Helper()
			var x int
			if err := conn.QueryRowContext(dbtest.Limited(t), "SELECT @x").Scan(&x); err != nil || x != 1 {
				t.Errorf("@x is %d, %v", x, err)
			}
		}
		dbtest.Exec(t, conn, "SET @x = 1")
		valid()
		mine()
		tx := dbtest.Begin(t, dbtest.Limited(t), conn)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
		valid()
		dbtest.OK(t, tx.Rollback())
		s.wantStock(1, 10)
		mine()
	})
}

// TestMaxConnsKeepsWhatTextsHaveLeft: with the one connection that SetMaxOpenConns allows,
// what plain SQL text has left there is not lost with maxConns, whatever comes in between, and
// a lock gets the same answer.
func TestMaxConnsKeepsWhatTextsHaveLeft(t *testing.T) {
	leaves := map[string]struct{ leave, look, end string }{
		"a transaction":     {"BEGIN", "SELECT COUNT(*) FROM p WHERE id = 99", "COMMIT"},
		"autocommit off":    {"SET autocommit = 0", "SELECT @@autocommit", "SET autocommit = 1"},
		"a user variable":   {"SET @left = 5", "SELECT @left", "SET @left = NULL"},
		"a setting":         {"SET SESSION group_concat_max_len = 2000", "SELECT @@group_concat_max_len", "SET SESSION group_concat_max_len = DEFAULT"},
		"a temporary table": {"CREATE TEMPORARY TABLE left_here (id INT)", "SELECT COUNT(*) FROM left_here", "DROP TEMPORARY TABLE left_here"},
		"locked tables":     {"LOCK TABLES p WRITE", "SELECT COUNT(*) FROM p", "UNLOCK TABLES"},
		"a named lock":      {"DO GET_LOCK('left here', 0)", "SELECT IS_USED_LOCK('left here') = CONNECTION_ID()", "DO RELEASE_LOCK('left here')"},
		"PREPARE":           {"PREPARE left_here FROM 'SELECT 7'", "EXECUTE left_here", "DEALLOCATE PREPARE left_here"},
		"an isolation":      {"SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE", "SELECT COUNT(*) FROM p", "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"},
		"XA":                {"XA START 'left'", "SELECT COUNT(*) FROM p", "XA END 'left'"},
	}
	between := map[string]func(ctx context.Context, db *sql.DB) error{
		"nothing": func(context.Context, *sql.DB) error { return nil },
		"Exec": func(ctx context.Context, db *sql.DB) error {
			return exec(ctx, db, "UPDATE p SET stock = stock - 1 WHERE id = 2")
		},
		"BeginTx": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			return tx.Rollback()
		},
		"a read": func(ctx context.Context, db *sql.DB) error {
			_, err := stock.Read(ctx, db, 1)
			return err
		},
		"a statement": func(ctx context.Context, db *sql.DB) error {
			st, err := db.PrepareContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = ?")
			if err != nil {
				return err
			}
			defer st.Close()
			_, err = st.ExecContext(ctx, 3)
			return err
		},
	}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		options := []lockctx.Option{lockctx.Row(), lockctx.Lease(10 * time.Second), lockctx.Advisory(), lockctx.Optimistic()}
		for i, left := range slices.Sorted(maps.Keys(leaves)) {
			for j, name := range slices.Sorted(maps.Keys(between)) {
				text, hinted := leaves[left], between[name]
				for k, option := range options {
					if k != (i+j)%len(options) && !dbtest.Long(false, true) {
						continue // each pair of two of these is run
					}
					answers := func(params string) (all []string) {
						db := dbtest.Open(t, "mysqllock", s.DSN(params))
						defer db.Close()
						db.SetMaxOpenConns(1)
						note := func(err error) { all = append(all, fmt.Sprint(err == nil, errors.Is(err, mysqllock.ErrUnsafe))) }
						_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "made"), "DO 1")
						note(err)
						_, err = db.ExecContext(dbtest.Limited(t), text.leave)
						note(err)
						_, err = db.ExecContext(dbtest.Limited(t), "UPDATE p SET stock = 50 WHERE id = 1")
						note(err)
						ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), left+name, option, lockctx.Wait(time.Second)))
						note(hinted(ctx, db))
						cancel()
						var n sql.NullString
						note(db.QueryRowContext(dbtest.Limited(t), text.look).Scan(&n))
						all = append(all, n.String)
						_, err = db.ExecContext(dbtest.Limited(t), "UPDATE p SET stock = stock + 1 WHERE id = 1")
						note(err)
						_, err = db.ExecContext(dbtest.Limited(t), text.end)
						note(err)
						if left == "XA" {
							_, err = db.ExecContext(dbtest.Limited(t), "XA COMMIT 'left' ONE PHASE")
							note(err)
						}
						if left == "autocommit off" {
							_, err = db.ExecContext(dbtest.Limited(t), "COMMIT")
							note(err)
						}
						return append(all, fmt.Sprint(s.stock(1), s.stock(2), s.stock(3)))
					}
					for try := 1; ; try++ {
						dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
						want := answers("lockWait=1s")
						dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
						got := answers("lockWait=1s&maxConns=6")
						if slices.Equal(got, want) {
							break
						}
						if try == 4 { // a server that stands still for a second is not the point
							t.Errorf("%s, %s: %v, and without maxConns %v", left, name, got, want)
							break
						}
					}
				}
			}
		}
	})
}

// TestMaxConnsChecksTheConnectionThatALockGets, on which plain SQL text has left something: what a read of it under a lock
// would show may be older than the lock, or may be rolled back. It is refused as without maxConns.
func TestMaxConnsChecksTheConnectionThatALockGets(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE begins() BEGIN START TRANSACTION; SELECT COUNT(*) FROM p; END")
		for _, c := range []struct {
			leave  string
			option lockctx.Option
		}{
			{"SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED", lockctx.Optimistic()},
			{"SET SESSION timestamp = 1000000", lockctx.Optimistic()},
			{"SET SESSION timestamp = 1000000", lockctx.Lease(ttl)},
			{"CALL begins()", lockctx.Optimistic()},
			{"CALL begins()", lockctx.Lease(ttl)},
		} {
			for _, params := range []string{"", "maxConns=6"} {
				db := s.open(params)
				if params == "" {
					db.SetMaxOpenConns(1)
				}
				dbtest.OK(t, exec(lockctx.With(dbtest.Limited(t), "made", c.option), db, "DO 1"))
				dbtest.Exec(t, db, c.leave)
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				_, err := stock.Read(lockctx.With(ctx, c.leave+params, c.option), db, 1)
				dbtest.Is(t, c.leave+" "+params, err, mysqllock.ErrUnsafe)
				cancel()
			}
		}
	})
}

// TestMaxConnsRefusesALockOnlyToWhomeverHasLockedTables: another connection of database/sql that has left something has
// the same real connection after that, and locks tables on it.
func TestMaxConnsRefusesALockOnlyToWhomeverHasLockedTables(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=8")
		ctx := dbtest.Limited(t)
		one, two := dbtest.Conn(t, db), dbtest.Conn(t, db)
		dbtest.Exec(t, one, "SET NAMES utf8mb4")
		dbtest.OK(t, one.Close())
		dbtest.Exec(t, two, "LOCK TABLES p READ")
		dbtest.Is(t, "the one that has locked tables", exec(lockctx.With(ctx, "k"), two, "UPDATE p SET stock = 1 WHERE id = 1"), mysqllock.ErrUnsafe)
		tx, err := db.BeginTx(lockctx.With(ctx, "k"), nil)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())
		dbtest.Exec(t, two, "UNLOCK TABLES")
		dbtest.OK(t, exec(lockctx.With(ctx, "k"), two, "UPDATE p SET stock = 1 WHERE id = 1"))
	})
}

// TestMaxConnsLooksAtNoConnectionThatAnotherUses: units of work begin while what other callers run leaves something on the
// connection that the caller had before. The race detector is to see it.
func TestMaxConnsLooksAtNoConnectionThatAnotherUses(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=8")
		ctx := dbtest.Limited(t)
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() {
				for n := range 50 {
					err := exec(ctx, db, "SET NAMES utf8mb4")
					if err == nil {
						err = exec(lockctx.With(ctx, fmt.Sprint(i)), db, "DO 1")
					}
					if err != nil {
						t.Errorf("%d: %v", n, err)
					}
				}
			})
		}
		all.Wait()
	})
}

// TestACallerWithoutASessionIsToldSo, and not that somebody has the key.
func TestACallerWithoutASessionIsToldSo(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockMaxConns=1")
		h := stock.Acquire(t, db, "a")
		wanted := func(name, strategy string, err error, ended error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.As(err, &e) || !errors.Is(err, mysqllock.ErrExhausted) ||
				errors.Is(err, mysqllock.ErrTimeout) || errors.Is(err, mysqllock.ErrLocked) {
				t.Errorf("%s: %v", name, err)
				return
			}
			if e.Strategy != strategy || e.Key != "b" || e.Holder != nil || !strings.Contains(err.Error(), "all 1 connections for sessions are in use (lockMaxConns)") {
				t.Errorf("%s: %v", name, err)
			}
			if ended != nil && !errors.Is(err, ended) || ended == nil && errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s: %v, want it to match %v", name, err, ended)
			}
		}
		for strategy, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "optimistic": lockctx.Optimistic()} {
			_, err := mysqllock.Acquire(dbtest.Limited(t), db, "b", opt, lockctx.Wait(100*time.Millisecond))
			wanted("Acquire", strategy, err, nil)
			_, err = mysqllock.Acquire(dbtest.Limited(t), db, "b", opt, lockctx.NoWait())
			wanted("Acquire, NoWait", strategy, err, nil)
			ctx, cancel := context.WithTimeout(dbtest.Limited(t), 2*time.Second)
			wanted("Do, deadline", strategy, mysqllock.Do(ctx, db, "b", func(context.Context) error { return nil }, opt), context.DeadlineExceeded)
			cancel()
		}
		// A read outside a transaction needs a session.
		ctx, cancel := context.WithCancel(lockctx.With(dbtest.Limited(t), "b", lockctx.Wait(100*time.Millisecond)))
		var n int
		wanted("query", "row", db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n), nil)
		cancel()

		// A key that somebody has is locked, all the same.
		_, err := mysqllock.Acquire(dbtest.Limited(t), db, "a", lockctx.NoWait())
		dbtest.Is(t, "a held key", err, mysqllock.ErrLocked)
		dbtest.OK(t, h.Release())
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "b", func(context.Context) error { return nil }))
	})
}

// BenchmarkMaxConnsBeside compares what a budget of 10 connections must not slow down to the
// plain driver with as many, or to a handle without a budget where the plain driver has no such
// thing. An operation is one of 4 callers', beside what goes on meanwhile.
func BenchmarkMaxConnsBeside(b *testing.B) {
	read := func(ctx context.Context, db *sql.DB, _ int) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		return db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(new(int))
	}
	hang := func(ctx context.Context, db *sql.DB, _ int) {
		ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
		defer cancel()
		_, _ = db.ExecContext(ctx, "SELECT SLEEP(60)")
	}
	work := func(ctx context.Context, db *sql.DB) error {
		return db.QueryRowContext(ctx, "SELECT SLEEP(0.005)").Scan(new(int))
	}
	held := func(ctx context.Context, db *sql.DB, i int) {
		_ = mysqllock.Do(ctx, db, fmt.Sprint("held", i), func(ctx context.Context) error { return work(ctx, db) }, lockctx.Lease(time.Minute))
	}
	unheld := func(ctx context.Context, db *sql.DB, _ int) { _ = work(ctx, db) }
	waits := func(ctx context.Context, db *sql.DB, i int) {
		_ = mysqllock.Do(ctx, db, fmt.Sprint("taken", i), func(context.Context) error { return nil })
	}
	own := func(opts ...lockctx.Option) func(context.Context, *sql.DB, int) error {
		return func(ctx context.Context, db *sql.DB, i int) error {
			return stock.InTx(lockctx.With(ctx, fmt.Sprint("own", i), opts...), db, func(tx *sql.Tx) error {
				return exec(ctx, tx, "UPDATE p SET stock = stock - 1 WHERE id = 3")
			})
		}
	}
	prepare := func(ctx context.Context, db *sql.DB, _ int) error {
		st, err := db.PrepareContext(ctx, "SELECT stock FROM p WHERE id = ?")
		if err != nil {
			return err
		}
		return errors.Join(st.QueryRowContext(ctx, 1).Scan(new(int)), st.Close())
	}
	for _, d := range dbtest.Each(b) {
		s := newScratch(d)
		local := s.at(s.Changed(dbtest.OverSocket(b, s.Server)))
		plain := func(s *scratch) *sql.DB {
			db := s.Open("mysql")
			db.SetMaxOpenConns(10)
			db.SetMaxIdleConns(10)
			return db
		}
		unbounded := func(s *scratch) *sql.DB { return s.open("lockWait=1m") }
		budget := func(s *scratch) *sql.DB { return s.open("lockWait=1m", "maxConns=10") }
		wrapped := func(s *scratch) *sql.DB {
			return s.wrapped(wrappers["without Validator"], "lockWait=1m", "maxConns=10")
		}
		for i := range 4 {
			tx := dbtest.Begin(b, lockctx.With(context.Background(), fmt.Sprint("taken", i)), s.open())
			b.Cleanup(func() { dbtest.OK(b, tx.Rollback()) })
		}
		for _, c := range []struct {
			name   string
			via    *scratch
			open   func(*scratch) *sql.DB
			others int
			other  func(ctx context.Context, db *sql.DB, i int) // again and again
			do     func(ctx context.Context, db *sql.DB, i int) error
		}{
			{"reads beside 4 that time out, plain driver", s, plain, 4, hang, read},
			{"reads beside 4 that time out, maxConns=10", s, budget, 4, hang, read},
			{"reads beside 4 that time out, plain driver over a socket", local, plain, 4, hang, read},
			{"reads beside 4 that time out, maxConns=10 over a socket", local, budget, 4, hang, read},
			{"reads beside 24 that work, plain driver", s, plain, 24, unheld, read},
			{"reads beside 24 that work under leases, maxConns=10", s, budget, 24, held, read},
			{"prepare and read, plain driver", s, plain, 0, nil, prepare},
			{"prepare and read, maxConns=10", s, budget, 0, nil, prepare},
			{"NoWait beside 4 that wait, no budget", s, unbounded, 4, waits, own(lockctx.NoWait())},
			{"NoWait beside 4 that wait, maxConns=10", s, budget, 4, waits, own(lockctx.NoWait())},
			{"optimistic, no budget", s, unbounded, 0, nil, own(lockctx.Optimistic())},
			{"optimistic, maxConns=10", s, budget, 0, nil, own(lockctx.Optimistic())},
			{"BeginTx, no budget", s, unbounded, 0, nil, own()},
			{"BeginTx, maxConns=10", s, budget, 0, nil, own()},
			{"BeginTx beneath a wrapper, maxConns=10", s, wrapped, 0, nil, own()},
		} {
			b.Run(string(d.Flavour)+"/"+c.name, func(b *testing.B) {
				db := c.open(c.via)
				defer db.Close()
				ctx, cancel := context.WithCancel(context.Background())
				var others, callers sync.WaitGroup
				for i := range c.others {
					others.Go(func() {
						for ctx.Err() == nil {
							c.other(ctx, db, i)
						}
					})
				}
				var next atomic.Int64
				b.ResetTimer()
				for range 4 {
					callers.Go(func() {
						for i := int(next.Add(1)); i <= b.N; i = int(next.Add(1)) {
							if err := c.do(ctx, db, i); err != nil {
								b.Error(err)
								return
							}
						}
					})
				}
				callers.Wait()
				b.StopTimer()
				cancel()
				others.Wait()
			})
		}
	}
}
