package unit_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestForeignTransactionOutlivesTheLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for _, how := range []string{"context", "kill"} {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			defer cancel()
			lctx := lockctx.With(ctx, "k")
			tx := dbtest.Begin(t, context.Background(), db)
			var id string
			dbtest.OK(t, db.QueryRowContext(lctx, "SELECT CONNECTION_ID() FROM p LIMIT 1").Scan(&id))
			dbtest.ExecIn(t, lctx, tx, "UPDATE p SET stock = 0 WHERE id = 2")
			if how == "context" {
				cancel()
			} else {
				dbtest.Exec(t, s.Plain, "KILL "+id)
			}
			dbtest.Soon(t, "the lock is free", func() bool { return !s.Locked("k") })
			dbtest.Is(t, how+": Commit after the lock has gone", tx.Commit(), mysqllock.ErrLost)
			s.WantStock(2, 10)
		}
	})
}

// TestIdleLimitStaysWithLockedTransactions: the limit on the idleness of locked transactions does
// not reach others.
func TestIdleLimitStaysWithLockedTransactions(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockTTL=13s")
		h := stock.Acquire(t, s.Handle(), "held")
		defer h.Rollback()
		conn := dbtest.Conn(t, db)
		type transaction interface {
			dbtest.Execer
			QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
		}
		limits := func(of transaction) (limit, global int) {
			dbtest.Exec(t, of, "UPDATE p SET stock = 1 WHERE id = 3")
			dbtest.OK(t, of.QueryRowContext(dbtest.Limited(t), "SELECT @@"+idleLimit(s)+", @@GLOBAL."+idleLimit(s)).Scan(&limit, &global))
			return limit, global
		}
		for before, lock := range map[string]func(){
			"a lock that was not granted": func() {
				_, err := conn.BeginTx(lockctx.With(dbtest.Limited(t), "held", lockctx.NoWait()), nil)
				dbtest.Want(t, err, mysqllock.ErrLocked)
			},
			"a write under a lock": func() {
				dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k"), conn, "UPDATE p SET stock = 1 WHERE id = 1")
			},
			"a transaction under a lock": func() {
				tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), conn)
				if limit, _ := limits(tx); limit != 13 {
					t.Errorf("a transaction that holds a lock has a limit of %d s", limit)
				}
				dbtest.OK(t, tx.Commit())
			},
			"one that was rolled back": func() {
				tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), conn)
				dbtest.OK(t, tx.Rollback())
			},
			"one that also commits a version": func() {
				ctx := lockctx.With(dbtest.Limited(t), "version", lockctx.Optimistic())
				tx := dbtest.Begin(t, lockctx.With(ctx, "k"), conn)
				dbtest.ExecIn(t, ctx, tx, "UPDATE p SET stock = stock + 1 WHERE id = 2")
				dbtest.OK(t, tx.Commit())
			},
			"one under a lease, too": func() {
				tx := dbtest.Begin(t, lockctx.With(lockctx.With(dbtest.Limited(t), "lease", lockctx.Lease(time.Minute)), "k"), conn)
				dbtest.OK(t, tx.Commit())
			},
		} {
			lock()
			if limit, global := limits(conn); limit != global && !s.MariaDB() {
				t.Errorf("after %s the connection has a limit of %d s, and others have %d", before, limit, global)
			}
			tx := dbtest.Begin(t, dbtest.Limited(t), conn)
			if limit, global := limits(tx); limit != global {
				t.Errorf("BeginTx after %s: the limit is %d s, and that of others %d", before, limit, global)
			}
			dbtest.OK(t, tx.Commit())
			lock()
			dbtest.Exec(t, conn, "BEGIN")
			if limit, global := limits(conn); limit != global {
				t.Errorf("BEGIN as text after %s: the limit is %d s, and that of others %d", before, limit, global)
			}
			dbtest.Exec(t, conn, "COMMIT")
		}
	})
}

// A transaction that something has ended unseen is not taken for one that can
// hold a lock.
func TestLateHintInAnEndedTransaction(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for _, text := range []string{"COMMIT", "CREATE TABLE q (id INT)"} {
			tx := dbtest.Begin(t, context.Background(), db)
			dbtest.Exec(t, tx, text)
			dbtest.Is(t, fmt.Sprintf("a late hint after %s", text), dbtest.Err(tx.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "UPDATE p SET stock = 0 WHERE id = 1")), mysqllock.ErrLost)
			dbtest.OK(t, tx.Rollback())
			s.WantStock(1, 10)
		}
	})
}

// TestLateHintBesideRows: a hint in a transaction whose rows are still being read is refused, and loses
// nothing: they are read on, and then there is the lock.
func TestLateHintBesideRows(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(time.Minute), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic()} {
			hint := lockctx.With(dbtest.Limited(t), "k"+name, opt)
			dbtest.ExecIn(t, hint, db, "DO 0") // sets everything up
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10 WHERE id = 1")
			tx := dbtest.Begin(t, context.Background(), db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			rows, err := tx.Query("SELECT id FROM p ORDER BY id FOR UPDATE")
			dbtest.OK(t, err)
			const less = "UPDATE p SET stock = stock - 3 WHERE id = 1"
			if _, err := tx.ExecContext(hint, less); !errors.Is(err, mysqllock.ErrExhausted) || errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s: %v", name, err)
			}
			n := 0
			for rows.Next() {
				n++
			}
			if rows.Err() != nil || n != 4 {
				t.Errorf("%s: %d rows, %v", name, n, rows.Err())
			}
			dbtest.ExecIn(t, hint, tx, less)
			dbtest.OK(t, tx.Commit())
			s.WantStock(1, 8)
		}
	})
}

// foreign begins a transaction elsewhere that has set the stock of 1 to 0 under the
// lock of a session of ctx.
func foreign(t *testing.T, ctx context.Context, db *sql.DB) *sql.Tx {
	t.Helper()
	stock.MustRead(t, ctx, db, 2)
	tx := dbtest.Begin(t, context.Background(), db)
	dbtest.ExecIn(t, ctx, tx, "UPDATE p SET stock = 0 WHERE id = 1")
	return tx
}

// A transaction whose statements ran under a session's lock does not take
// another lock for it.
func TestForeignTransactionUnderALockThatHasGone(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx := foreign(t, ctx, db)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = 9 WHERE id = 3") // gives the lock back
		dbtest.Is(t, "the next statement", dbtest.Err(tx.ExecContext(ctx, "UPDATE p SET stock = 0 WHERE id = 4")), mysqllock.ErrLost)
		dbtest.Is(t, "Commit", tx.Commit(), mysqllock.ErrLost)
		s.WantStock(1, 10)
	})
}

// Its Commit does not wait for a statement that waits for its rows.
func TestForeignTransactionInTheWay(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		tx := foreign(t, ctx, db)
		done := make(chan error, 1)
		go func() {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			done <- err
		}()
		dbtest.Soon(t, "the session waits for the transaction's row", func() bool {
			return dbtest.Column[int](t, s.Plain, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE 'UPDATE p SET stock = stock - 1%'", s.Name)[0] == 1
		})
		if err := tx.Commit(); err == nil || !strings.Contains(err.Error(), "still running") {
			t.Errorf("Commit: %v", err)
		}
		dbtest.OK(t, <-done)
		s.WantStock(1, 9)
	})
}

// idleLimit is the variable that limits the idleness of a locked transaction.
func idleLimit(s *stock.Shop) string {
	if s.MariaDB() {
		return "idle_transaction_timeout"
	}
	return "wait_timeout" // of the connection, until the transaction has ended
}

// Every locked transaction has its limit, however it began; on MySQL, not with a late hint.
func TestIdleLimitOfEveryLockedTransaction(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockTTL=20s")
		check := func(what string, tx *sql.Tx) {
			t.Helper()
			n := dbtest.Column[int](t, tx, "SELECT @@"+idleLimit(s))[0]
			if n != 20 {
				t.Errorf("%s: %s is %d, want 20", what, idleLimit(s), n)
			}
		}
		begin := func(ctx context.Context, opts *sql.TxOptions) *sql.Tx {
			tx, err := db.BeginTx(ctx, opts)
			dbtest.OK(t, err)
			t.Cleanup(func() { tx.Rollback() })
			return tx
		}
		first := begin(lockctx.With(dbtest.Limited(t), "k"), nil)
		check("first", first)
		waiter := make(chan *sql.Tx)
		go func() { waiter <- begin(lockctx.With(dbtest.Limited(t), "k"), nil) }()
		time.Sleep(100 * time.Millisecond)
		dbtest.OK(t, first.Commit())
		check("waited", <-waiter)
		check("with an isolation level", begin(lockctx.With(dbtest.Limited(t), "k2"), &sql.TxOptions{Isolation: sql.LevelReadCommitted}))
		check("two keys", begin(lockctx.WithKeys(dbtest.Limited(t), []string{"k4", "k5"}), nil))
		check("slots", begin(lockctx.With(dbtest.Limited(t), "k6", lockctx.Slots(2)), nil))
		check("shared", begin(lockctx.With(dbtest.Limited(t), "k7", lockctx.Shared()), nil))
		reads := begin(lockctx.With(dbtest.Limited(t), "k8", lockctx.Shared()), &sql.TxOptions{ReadOnly: true, Isolation: sql.LevelSerializable})
		check("read-only", reads)
		if !s.MariaDB() {
			const is = "SELECT CONCAT(ACCESS_MODE, ' ', ISOLATION_LEVEL) FROM performance_schema.events_transactions_current WHERE THREAD_ID = PS_CURRENT_THREAD_ID()"
			dbtest.Equal(t, "the transaction is %s", dbtest.Column[string](t, reads, is)[0], "READ ONLY SERIALIZABLE")
			return
		}
		late := begin(dbtest.Limited(t), nil)
		dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k3"), late, "UPDATE p SET stock = 1 WHERE id = 1")
		check("late hint", late)
	})
}

// endsAtAnswer is a client's connection on which a context ends when the answer to
// a statement has arrived: the driver closes it then all the same.
type endsAtAnswer struct {
	net.Conn
	text   string
	end    *context.CancelFunc
	asked  bool
	closed chan struct{}
	once   sync.Once
}

func (c *endsAtAnswer) Write(b []byte) (int, error) {
	c.asked = c.asked || *c.end != nil && bytes.Contains(b, []byte(c.text))
	return c.Conn.Write(b)
}

func (c *endsAtAnswer) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.asked {
		c.asked = false
		(*c.end)()
		<-c.closed
	}
	return n, err
}

func (c *endsAtAnswer) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

// Who gives up while a late lock is asked for is told so, and not that a
// connection was lost, and the transaction with it.
func TestLateHintGivenUp(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for _, text := range []string{"SAVEPOINT mysqllock_late", "RELEASE SAVEPOINT mysqllock_late"} {
			var end context.CancelFunc
			cfg := s.Config()
			cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
				var d net.Dialer
				c, err := d.DialContext(ctx, network, addr)
				return &endsAtAnswer{Conn: c, text: text, end: &end, closed: make(chan struct{})}, err
			}
			connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
			dbtest.OK(t, err)
			db := sql.OpenDB(connector)
			defer db.Close()
			dbtest.ExecIn(t, lockctx.With(dbtest.Limited(t), "k"), db, "DO 0") // sets everything up
			tx := dbtest.Begin(t, context.Background(), db)
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			defer cancel()
			end = cancel
			_, err = tx.ExecContext(lockctx.With(ctx, "k"), "UPDATE p SET stock = 1 WHERE id = 1")
			if !errors.Is(err, context.Canceled) || errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("given up at %s: %v", text, err)
			}
			if err := tx.Commit(); err == nil {
				t.Error("what is left of it was committed")
			}
			s.WantStock(1, 10)
			s.WantLocked("k", false)
		}
	})
}

// TestReadBeforeASessionsLockIsStale: what a transaction has read before it comes under a
// session's lock is older than the lock.
func TestReadBeforeASessionsLockIsStale(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "k")
		tx := dbtest.Begin(t, base, db)
		stock.MustRead(t, base, tx, 1) // the snapshot
		dbtest.ExecIn(t, lockctx.With(base, "k"), db, "UPDATE p SET stock = 9 WHERE id = 1")
		stock.MustRead(t, ctx, db, 2) // the session
		if n, err := stock.Read(ctx, tx, 1); !errors.Is(err, mysqllock.ErrStaleSnapshot) {
			t.Errorf("it reads %d, %v", n, err)
		}
	})
}
