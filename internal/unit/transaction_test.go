package unit_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

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
			dbtest.OK(t, of.QueryRowContext(dbtest.Limited(t), "SELECT @@"+idleLimit+", @@GLOBAL."+idleLimit).Scan(&limit, &global))
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
			"one under a lease, too": func() {
				tx := dbtest.Begin(t, lockctx.With(lockctx.With(dbtest.Limited(t), "lease", lockctx.Lease(time.Minute)), "k"), conn)
				dbtest.OK(t, tx.Commit())
			},
		} {
			lock()
			if limit, global := limits(conn); limit != global {
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

// TestAnIdleLimitOfTheApplicationStays: one that it sets after a transaction with a row lock.
func TestAnIdleLimitOfTheApplicationStays(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		conn := dbtest.Conn(t, s.Handle())
		dbtest.OK(t, dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), conn).Commit())
		dbtest.Exec(t, conn, "SET SESSION "+idleLimit+" = 77")
		tx := dbtest.Begin(t, dbtest.Limited(t), conn)
		dbtest.Equal(t, "the limit is %d", dbtest.Column[int](t, tx, "SELECT @@"+idleLimit)[0], 77)
		dbtest.OK(t, tx.Rollback())
	})
}

// idleLimit is the variable that limits the silence of a session: for its life.
const idleLimit = "wait_timeout"

// TestEveryLockedTransactionHasAnIdleLimit, however it began.
func TestEveryLockedTransactionHasAnIdleLimit(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockTTL=20s")
		check := func(what string, tx *sql.Tx) {
			t.Helper()
			n := dbtest.Column[int](t, tx, "SELECT @@"+idleLimit)[0]
			if n != 20 {
				t.Errorf("%s: %s is %d, want 20", what, idleLimit, n)
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
		dbtest.Soon(t, "it waits", func() bool { st, err := mysqllock.Stats(db); return err == nil && st.Waiters == 1 })
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
		}
	})
}
