package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// onStrategies runs a test on each server with each strategy. with begins a lock
// context on k.
func onStrategies(t *testing.T, test func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context)) {
	dbtest.OnServers(t, stock.NewShop, eachStrategy(test))
}

// withStrategies is onStrategies for what the driver does by itself.
func withStrategies(t *testing.T, test func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context)) {
	dbtest.OnOneServer(t, stock.NewShop, eachStrategy(test))
}

func eachStrategy(test func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context)) func(*testing.T, *stock.Shop) {
	return func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE TABLE orders (id INT PRIMARY KEY AUTO_INCREMENT, n INT NOT NULL DEFAULT 1) ENGINE=InnoDB")
		db := s.Handle()
		for name, opts := range stock.KeptAs() {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
				dbtest.Exec(t, s.Plain, "DELETE FROM orders")
				base, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				test(t, s, db, func() context.Context { return lockctx.With(base, "k", opts...) })
			})
		}
	}
}

const order = "INSERT INTO orders (n) VALUES (1)"

func orders(s *stock.Shop) (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.Plain.QueryRow("SELECT COUNT(*) FROM orders").Scan(&n))
	return n
}

// wantStale wants ErrStaleRead that names what gave the lock back.
func wantStale(t *testing.T, what string, err error, by string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.Is(err, mysqllock.ErrStaleRead) || !errors.As(err, &e) || e.Key != "k" || e.Strategy == "" ||
		!strings.Contains(err.Error(), "given back by "+by) || strings.Contains(by, "commit") != strings.Contains(err.Error(), "its changes are committed") {
		t.Errorf("%s: %v, want ErrStaleRead of %q", what, err, by)
	}
}

// TestDecisionOutlivesItsLock: read, write one thing, write another by what was read.
func TestDecisionOutlivesItsLock(t *testing.T) {
	withStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		ctx := with()
		n := stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, ctx, db, order)
		_, err := db.ExecContext(ctx, stock.SetStock, n-1)
		wantStale(t, "the second write", err, "the commit of INSERT;")
		_, err = db.ExecContext(ctx, stock.SetStock, n-1)
		wantStale(t, "the second write again", err, "the commit of INSERT;")
		rows, err := db.QueryContext(ctx, stock.SetStock, n-1)
		wantStale(t, "a write by Query", err, "the commit of INSERT;")
		if err == nil {
			rows.Close()
		}
		_, err = db.ExecContext(ctx, "DO SLEEP(0)")
		wantStale(t, "what may write", err, "the commit of INSERT;")
		stmt, err := db.PrepareContext(ctx, stock.SetStock)
		dbtest.OK(t, err)
		defer stmt.Close()
		_, err = stmt.ExecContext(ctx, n-1)
		wantStale(t, "a prepared write", err, "the commit of INSERT;")
		s.WantStock(1, 10)

		tx := dbtest.Begin(t, ctx, db)
		_, err = tx.ExecContext(ctx, stock.SetStock, n-1)
		wantStale(t, "the first write of a transaction", err, "the commit of INSERT;")
		_, err = tx.Exec(stock.SetStock, n-1)
		wantStale(t, "without the hint", err, "the commit of INSERT;")
		n, err = stock.Read(ctx, tx, 1) // under its lock
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, stock.SetStock, n-1)
		dbtest.OK(t, tx.Commit())
		s.WantStock(1, 9)

		_, err = db.ExecContext(ctx, stock.SetStock, 0)
		wantStale(t, "after a transaction with a read of its own", err, "the commit of INSERT;")
		if _, err = db.QueryContext(ctx, "SELECT nothing FROM p"); err == nil {
			t.Fatal("a column that is not there was read")
		}
		var many int
		if err = db.QueryRowContext(ctx, "SELECT (SELECT id FROM p) FROM p").Scan(&many); err == nil {
			t.Fatal("a subquery with many rows was read")
		}
		_, err = db.ExecContext(ctx, stock.SetStock, 0)
		wantStale(t, "after a read that failed", err, "the commit of INSERT;")
		s.WantStock(1, 9)

		n, err = stock.Read(ctx, db, 1) // a new unit of work
		dbtest.OK(t, err)
		dbtest.ExecIn(t, ctx, db, stock.SetStock, n-1)
		_, err = db.ExecContext(ctx, order)
		wantStale(t, "after the second unit of work", err, "the commit of UPDATE;")
		dbtest.ExecIn(t, with(), db, order)
		s.WantStock(1, 8)
	})
}

// TestStaleReadSendsNothing: neither the lock nor the statement.
func TestStaleReadSendsNothing(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{})
		for name, opts := range stock.KeptAs() {
			ctx := lockctx.With(dbtest.Limited(t), "k", opts...)
			stock.MustRead(t, ctx, db, 1)
			dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = stock + 1")
			seen := tap.Since()
			_, err := db.ExecContext(ctx, stock.SetStock, 1)
			wantStale(t, name, err, "the commit of UPDATE;")
			for _, c := range seen() { // leases are renewed, and advisory locks looked after, all the time
				if name != "lease" && name != "advisory" || strings.Contains(c.Text, "stock") || strings.Contains(c.Text, "SAVEPOINT") || strings.Contains(c.Text, "START") {
					t.Errorf("%s: the server got %s", name, c.Text)
				}
			}
		}
	})
}

// TestUnchangedDoesNotCommit: the transaction of the read goes on, until its context ends, also if the write that changes nothing
// has a COMMIT behind it.
func TestUnchangedDoesNotCommit(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{})
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "k")
		stock.MustRead(t, ctx, db, 1)
		seen := tap.Since()
		const update = "UPDATE p SET stock = 10 WHERE id = 1"
		dbtest.ExecIn(t, ctx, db, update)
		tx := dbtest.Begin(t, ctx, db)
		dbtest.Exec(t, tx, update)
		dbtest.OK(t, tx.Commit())
		if log := seen(); len(log) != 2 || !strings.Contains(log[0].Text, update+"\n; "+server.Counted+"; COMMIT") || log[1].Text != update || log[0].Conn != log[1].Conn {
			t.Errorf("want the two UPDATEs, the server got %v", log)
		}
		dbtest.Is(t, "Rollback after Commit", tx.Rollback(), sql.ErrTxDone)
		s.WantLocked("k", true)
		cancel()
		dbtest.Soon(t, "the end of the context frees the key", func() bool { return !s.Locked("k") })
		dbtest.Soon(t, "the session is free", func() bool { st, err := mysqllock.Stats(db); return err == nil && st.InUse == 0 })
		_, err := db.ExecContext(lockctx.With(context.WithoutCancel(ctx), "k"), stock.SetStock, 1)
		stock.WantLost(t, "a write after the end", err)
	})
}

// TestWritesWithoutAReadAreNotLimited: what never reads outside a transaction may write as often as it
// likes.
func TestWritesWithoutAReadAreNotLimited(t *testing.T) {
	withStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		ctx := with()
		for range 3 {
			dbtest.ExecIn(t, ctx, db, order)
			tx := dbtest.Begin(t, ctx, db)
			n := stock.MustRead(t, ctx, tx, 1)
			n2, err := stock.Read(ctx, db, 1) // in the transaction
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, stock.SetStock, (n+n2)/2-1)
			dbtest.OK(t, tx.Commit())
		}
		s.WantStock(1, 7)
	})
}

// TestAllowStaleDecides: for those who know.
func TestAllowStaleDecides(t *testing.T) {
	withStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, _ func() context.Context) {
		name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
		ctx := lockctx.With(dbtest.Limited(t), "k", append(stock.KeptAs()[name], lockctx.AllowStale())...)
		stock.MustRead(t, ctx, db, 1)
		for range 3 {
			dbtest.ExecIn(t, ctx, db, order)
			tx := dbtest.Begin(t, ctx, db)
			dbtest.Exec(t, tx, order) // without the hint
			dbtest.OK(t, tx.Commit())
		}
		dbtest.Equal(t, "%d orders", orders(s), 6)
	})
}

// TestStatementThatChangesNothingKeepsTheUnitOpen: what changed nothing leaves the unit of work open, with its lock.
func TestStatementThatChangesNothingKeepsTheUnitOpen(t *testing.T) {
	same := map[string]func(ctx context.Context, db *sql.DB) error{
		"update": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, stock.SetStock, 10)
			return err
		},
		"update of no row": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "DELETE FROM p WHERE id = 77")
			return err
		},
		"ignored": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "INSERT IGNORE INTO p (id, stock) VALUES (1, 3)")
			return err
		},
		"upsert": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "INSERT INTO `p` (`id`,`stock`) VALUES (?,?) ON DUPLICATE KEY UPDATE `stock`=VALUES(`stock`)", 1, 10)
			return err
		},
		"prepared": func(ctx context.Context, db *sql.DB) error {
			stmt, err := db.PrepareContext(ctx, stock.SetStock)
			if err != nil {
				return err
			}
			defer stmt.Close()
			_, err = stmt.ExecContext(ctx, 10)
			return err
		},
		"refused": func(ctx context.Context, db *sql.DB) error {
			if _, err := db.ExecContext(ctx, "INSERT INTO p (id, stock) VALUES (1, 3)"); err == nil {
				return errors.New("a duplicate was inserted")
			}
			return nil
		},
		"transaction that reads": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err == nil {
				_, err = stock.Read(ctx, tx, 1)
			}
			if err == nil {
				err = tx.Commit()
			}
			return err
		},
		"transaction": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err == nil {
				_, err = tx.ExecContext(ctx, "SAVEPOINT a")
			}
			if err == nil {
				_, err = tx.ExecContext(ctx, stock.SetStock, 10)
			}
			if err == nil {
				_, err = tx.ExecContext(ctx, "RELEASE SAVEPOINT a")
			}
			if err == nil {
				err = tx.Commit()
			}
			return err
		},
		"nested transaction": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			inner, err := db.BeginTx(ctx, nil)
			if err == nil {
				_, err = inner.ExecContext(ctx, stock.SetStock, 10)
			}
			return errors.Join(err, inner.Commit(), tx.Commit())
		},
		"empty transaction": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err == nil {
				err = tx.Commit()
			}
			return err
		},
	}
	onStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		for what, does := range same {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
			ctx := with()
			n := stock.MustRead(t, ctx, db, 1)
			for range 2 {
				if err := does(ctx, db); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
			}
			if taken := lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()); !strings.HasSuffix(t.Name(), "/advisory") && !strings.HasSuffix(t.Name(), "/optimistic") {
				dbtest.Is(t, what+": the lock is free", dbtest.Err(db.ExecContext(taken, order)), mysqllock.ErrLocked)
			}
			if _, err := db.ExecContext(ctx, stock.SetStock, n-1); err != nil {
				t.Errorf("the write after %s: %v", what, err)
			}
			s.WantStock(1, 9)
			_, err := db.ExecContext(ctx, order)
			wantStale(t, "after "+what, err, "the commit of UPDATE;")
		}
	})
}

// TestStatementThatMayHaveChangedSomethingEndsTheUnit: what is not known to have changed nothing ends the unit of work.
func TestStatementThatMayHaveChangedSomethingEndsTheUnit(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		dbtest.Exec(t, s.Plain, "SET GLOBAL log_bin_trust_function_creators = 1")
		dbtest.Exec(t, s.Plain, "DROP FUNCTION IF EXISTS f")
		dbtest.Exec(t, s.Plain, "DROP PROCEDURE IF EXISTS q")
		dbtest.Exec(t, s.Plain, "CREATE FUNCTION f() RETURNS INT MODIFIES SQL DATA BEGIN INSERT INTO orders (n) VALUES (2); RETURN 10; END")
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE q() INSERT INTO orders (n) VALUES (3)")
		for by, text := range map[string]string{
			"the commit of UPDATE;": "UPDATE p SET stock = f() WHERE id = 1",
			"the commit of CALL;":   "CALL q()",
			"the commit of DO;":     "DO f()",
		} {
			before := orders(s)
			ctx := with()
			stock.MustRead(t, ctx, db, 1)
			dbtest.ExecIn(t, ctx, db, text)
			if orders(s) != before+1 {
				t.Errorf("%s is not committed", text)
			}
			_, err := db.ExecContext(ctx, order)
			wantStale(t, text, err, by)
		}
	})
}

// TestRowsOfReturningMayHaveChangedSomething: the rows of RETURNING come without a number, so only none of them says
// that nothing was changed.
func TestRowsOfReturningMayHaveChangedSomething(t *testing.T) {
	withStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		if !s.MariaDB() {
			return
		}
		ctx := with()
		n := stock.MustRead(t, ctx, db, 1)
		returning := func(text string) (rows int) {
			r, err := db.QueryContext(ctx, text)
			dbtest.OK(t, err)
			defer r.Close()
			for r.Next() {
				rows++
			}
			dbtest.OK(t, r.Err())
			return rows
		}
		if rows := returning("DELETE FROM orders WHERE id < 0 RETURNING id"); rows != 0 {
			t.Fatalf("%d rows", rows)
		}
		if rows := returning("INSERT INTO p (id, stock) VALUES (1, 10) ON DUPLICATE KEY UPDATE stock = VALUES(stock) RETURNING id"); rows != 1 {
			t.Fatalf("%d rows", rows)
		}
		_, err := db.ExecContext(ctx, stock.SetStock, n-1)
		wantStale(t, "after what may have changed something", err, "the commit of INSERT;")
	})
}

// TestTheEndOfATransactionGivesTheLockOfADecisionBack, its COMMIT as well as its ROLLBACK.
func TestTheEndOfATransactionGivesTheLockOfADecisionBack(t *testing.T) {
	withStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		for _, commit := range []bool{true, false} {
			ctx := with()
			n := stock.MustRead(t, ctx, db, 1)
			tx := dbtest.Begin(t, ctx, db)
			dbtest.ExecIn(t, ctx, tx, order)
			dbtest.ExecIn(t, ctx, tx, "UPDATE p SET stock = stock + 1 WHERE id = 2") // as often as it likes
			by := "the rollback of a transaction;"
			if commit {
				by = "the commit of a transaction whose first write was INSERT;"
				dbtest.OK(t, tx.Commit())
			} else {
				dbtest.OK(t, tx.Rollback())
			}
			_, err := db.ExecContext(ctx, stock.SetStock, n-1)
			wantStale(t, "after the transaction", err, by)
			next := dbtest.Begin(t, ctx, db)
			_, err = next.ExecContext(ctx, stock.SetStock, n-1)
			wantStale(t, "in the next one", err, by)
			n = stock.MustRead(t, ctx, next, 1)
			dbtest.ExecIn(t, ctx, next, stock.SetStock, n-1)
			dbtest.OK(t, next.Rollback())
			s.WantStock(1, 10)
		}
	})
}

// TestHoldKeepsItsDecisionsToTheEnd: a hold keeps its lock to the end.
func TestHoldKeepsItsDecisionsToTheEnd(t *testing.T) {
	withStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, with func() context.Context) {
		name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			for _, ctx := range []context.Context{ctx, lockctx.With(ctx, "k", stock.KeptAs()[name]...)} {
				n := stock.MustRead(t, ctx, db, 1)
				dbtest.ExecIn(t, ctx, db, order)
				dbtest.ExecIn(t, ctx, db, stock.SetStock, n-1)
			}
			return nil
		}, stock.KeptAs()[name]...))
		s.WantStock(1, 8)

		// In a lock context with a decision from before.
		ctx := with()
		n := stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, ctx, db, order)
		dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, stock.SetStock, n-1)
			wantStale(t, "in a hold", err, "the commit of INSERT;")
			n = stock.MustRead(t, ctx, db, 1)
			for range 2 {
				n--
				dbtest.ExecIn(t, ctx, db, stock.SetStock, n)
			}
			return nil
		}, stock.KeptAs()[name]...))
		s.WantStock(1, 6)
	})
}

// TestAReadIsStaleOnEveryHandle: a lock context is one on all of them.
func TestAReadIsStaleOnEveryHandle(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		one, two := s.Handle(), s.Handle()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		n := stock.MustRead(t, ctx, one, 1)
		dbtest.ExecIn(t, ctx, one, stock.SetStock, n-1)
		_, err := two.ExecContext(ctx, stock.SetStock, n-2)
		wantStale(t, "on another handle", err, "the commit of UPDATE;")
		n = stock.MustRead(t, ctx, two, 1)
		dbtest.ExecIn(t, ctx, two, stock.SetStock, n-1)
		s.WantStock(1, 8)
	})
}

// TestStaleReadSaysNoArguments: nor any other part of the statement than its verb.
func TestStaleReadSaysNoArguments(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, ctx, db, "/* secret */ UPDATE p SET stock = stock + 1 WHERE 'secret' = ?", "secret")
		_, err := db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE 'secret' = ?", "secret")
		wantStale(t, "the second write", err, "the commit of UPDATE;")
		if strings.Contains(fmt.Sprint(err), "secret") {
			t.Error(err)
		}
	})
}

// decider is a caller that reads a counter and writes what it has read plus one, with
// whatever else it does in between. A write that the driver lets through and that did
// not count is a decision on stale data.
type decider struct {
	t     *testing.T
	db    *sql.DB
	on    beginner // db, or a sql.Conn of it
	r     *rand.Rand
	ctx   context.Context
	opts  []lockctx.Option
	seen  int // what the last read outside a transaction has shown, with what was written since; -1 without one
	log   []string
	wrote int // increments that are committed
}

func (d *decider) did(format string, args ...any) {
	d.log = append(d.log, fmt.Sprintf(format, args...))
}

type handle interface {
	stock.Querier
	dbtest.Execer
}

type beginner interface {
	handle
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}

// look reads the counter.
func (d *decider) look(ctx context.Context, q handle) (int, error) {
	n, err := stock.Read(ctx, q, 1)
	d.did("read %d, %v", n, err)
	return n, err
}

// write writes seen+1. It may be refused.
func (d *decider) write(ctx context.Context, q handle, seen int) error {
	_, err := q.ExecContext(ctx, stock.SetStock, seen+1)
	d.did("write %d, %v", seen+1, err)
	return err
}

// other is a statement that has nothing to do with the counter.
func (d *decider) other(ctx context.Context, q handle) (err error) {
	texts := []string{
		order, order, "UPDATE p SET stock = stock WHERE id = 1", "DELETE FROM orders WHERE id < 0",
		"INSERT INTO p (id, stock) VALUES (1, 1)", "SAVEPOINT a", "DO SLEEP(0)", "SELECT LAST_INSERT_ID()", "SELECT 1",
	}
	text := texts[d.r.IntN(len(texts))]
	if strings.HasPrefix(text, "SELECT") {
		var n int
		err = q.QueryRowContext(ctx, text).Scan(&n)
	} else {
		_, err = q.ExecContext(ctx, text)
	}
	d.did("%s, %v", text, err)
	if errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLost) {
		return err
	}
	return nil
}

// transaction does some of it in one.
func (d *decider) transaction() error {
	tx, err := d.on.BeginTx(d.ctx, nil)
	d.did("begin, %v", err)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	seen, wrote := d.seen, 0
	for range d.r.IntN(5) {
		switch d.r.IntN(3) {
		case 0:
			if seen, err = d.look(d.ctx, tx); err != nil {
				return err
			}
		case 1:
			if seen < 0 {
				continue
			}
			if err := d.write(d.ctx, tx, seen); err == nil {
				seen++
				wrote++
			} else if !errors.Is(err, mysqllock.ErrStaleRead) {
				return err
			}
		default:
			if err := d.other(d.ctx, tx); err != nil {
				return err
			}
		}
	}
	if d.r.IntN(3) == 0 {
		d.did("rollback")
		return tx.Rollback()
	}
	err = tx.Commit()
	d.did("commit, %v", err)
	if err == nil {
		if d.wrote += wrote; wrote > 0 && d.seen >= 0 {
			d.seen = seen
		}
	}
	return err
}

// unit does a few things in one lock context.
func (d *decider) unit() error {
	base, cancel := context.WithCancel(dbtest.Limited(d.t))
	defer cancel()
	d.ctx, d.seen, d.log = lockctx.With(base, "k", d.opts...), -1, nil
	d.on = d.db
	if d.r.IntN(3) == 0 {
		conn, err := d.db.Conn(base)
		if err != nil {
			return err
		}
		defer conn.Close()
		d.on = conn
		d.did("sql.Conn")
	}
	for range 2 + d.r.IntN(7) {
		var err error
		switch d.r.IntN(5) {
		case 0:
			d.seen, err = d.look(d.ctx, d.on)
		case 1, 2:
			if d.seen < 0 {
				continue
			}
			if err = d.write(d.ctx, d.on, d.seen); err == nil {
				d.seen++
				d.wrote++
			}
		case 3:
			err = d.other(d.ctx, d.on)
		default:
			err = d.transaction()
		}
		if err != nil && !errors.Is(err, mysqllock.ErrStaleRead) {
			return err
		}
	}
	return nil
}

// TestNoDecisionIsLost has many callers decide and write in any order.
func TestNoDecisionIsLost(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *stock.Shop, db *sql.DB, _ func() context.Context) {
		name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
		if name == "shared" {
			return // keeps nobody out here
		}
		dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 0 WHERE id = 1")
		seed, units := rand.Uint64(), 20
		if long {
			units = 200
		}
		var wg sync.WaitGroup
		var mu sync.Mutex
		wrote, refused := 0, 0
		for g := range 4 {
			wg.Go(func() {
				d := &decider{t: t, db: db, r: rand.New(rand.NewPCG(seed, uint64(g))), opts: stock.KeptAs()[name]}
				for range units {
					err := d.unit()
					if strings.Contains(strings.Join(d.log, "; "), "stale read") {
						mu.Lock()
						refused++
						mu.Unlock()
					}
					if err != nil && !errors.Is(err, mysqllock.ErrConflict) && !errors.Is(err, mysqllock.ErrDeadlock) {
						t.Errorf("seed %d: %v, after %s", seed, err, strings.Join(d.log, "; "))
						return
					}
				}
				mu.Lock()
				defer mu.Unlock()
				wrote += d.wrote
			})
		}
		wg.Wait()
		if n := s.Stock(1); n != wrote || refused == 0 || wrote == 0 {
			t.Errorf("seed %d: the counter is %d after %d increments; %d units were refused something", seed, n, wrote, refused)
		}
	})
}

type shower interface {
	dbtest.Execer
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}

// TestWhateverShowsDataOpensADecision outside a transaction, also where it is no SELECT, or leaves the data in a
// variable.
func TestWhateverShowsDataOpensADecision(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE get_stock(n INT) SELECT stock FROM p WHERE id = n")
		dbtest.Exec(t, s.Plain, "CREATE PROCEDURE out_stock(OUT n INT) SELECT stock INTO n FROM p WHERE id = 1")
		db := s.Handle("multiStatements=true")
		const write = "UPDATE p SET stock = 7 WHERE id = 1"
		type path struct {
			name    string
			mariadb bool
			shows   func(context.Context, shower) error
			write   string
		}
		query := func(text string) func(context.Context, shower) error {
			return func(ctx context.Context, c shower) error {
				rows, err := c.QueryContext(ctx, text)
				if err != nil {
					return err
				}
				for rows.Next() {
				}
				return errors.Join(rows.Err(), rows.Close())
			}
		}
		run := func(text string) func(context.Context, shower) error {
			return func(ctx context.Context, c shower) error {
				_, err := c.ExecContext(ctx, text)
				return err
			}
		}
		shown := []path{
			{"CALL", false, query("CALL get_stock(1)"), write},
			{"several statements", false, query("SELECT stock FROM p WHERE id = 1; SET @a = 1"), write},
			{"several statements, one writes", false, query("SELECT stock FROM p WHERE id = 1; UPDATE p SET stock = 8 WHERE id = 2"), write},
			{"DELETE RETURNING", true, query("DELETE FROM p WHERE id = 4 RETURNING stock"), write},
			{"a sequence", true, query("SELECT stock, NEXT VALUE FOR sq FROM p"), write},
		}
		left := []path{
			{"INTO a variable", false, run("SELECT stock INTO @n FROM p WHERE id = 1"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"SELECT assigns", false, run("SELECT @n := stock FROM p WHERE id = 1"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"SET", false, run("SET @n = (SELECT stock FROM p WHERE id = 1)"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"OUT parameter", false, run("CALL out_stock(@n)"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"temporary table", false, run("CREATE TEMPORARY TABLE tt AS SELECT stock FROM p WHERE id = 1"), "UPDATE p SET stock = (SELECT stock FROM tt) - 1 WHERE id = 1"},
		}
		if s.MariaDB() {
			dbtest.Exec(t, s.Plain, "CREATE SEQUENCE sq")
		}
		order := func(ctx context.Context, c shower) error {
			return run("INSERT INTO p VALUES (90, 1) ON DUPLICATE KEY UPDATE stock = stock + 1")(ctx, c)
		}
		check := func(p path, c shower, opts ...lockctx.Option) {
			t.Helper()
			if p.mariadb && !s.MariaDB() {
				return
			}
			ctx := lockctx.With(dbtest.Limited(t), "k", opts...)
			dbtest.OK(t, p.shows(ctx, c))
			err := order(ctx, c)
			if err == nil { // it was the first commit
				_, err = c.ExecContext(ctx, p.write)
			}
			dbtest.Is(t, p.name, err, mysqllock.ErrStaleRead)
			dbtest.Exec(t, s.Plain, "REPLACE INTO p VALUES (4, 10)")
		}
		for _, opts := range [][]lockctx.Option{{lockctx.Row()}, {lockctx.Lease(stock.TTL)}, {lockctx.Advisory()}, {lockctx.Optimistic()}} {
			for _, p := range shown {
				check(p, db, opts...)
			}
		}
		for _, p := range left {
			c := dbtest.Conn(t, db)
			ctx := lockctx.With(dbtest.Limited(t), "k")
			dbtest.OK(t, p.shows(ctx, c))
			err := order(ctx, c)
			if err == nil {
				_, err = c.ExecContext(ctx, p.write)
			}
			dbtest.Is(t, "over a sql.Conn, "+p.name, err, mysqllock.ErrStaleRead)
			dbtest.OK(t, c.Close())
		}

		// What shows nothing decides nothing, and what reads no table of the
		// application's is no new read.
		db = s.Handle()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		for range 2 {
			dbtest.OK(t, run("CALL get_stock(1)")(ctx, db))
		}
		for _, text := range []string{"SELECT 1 FROM DUAL", "SELECT 1 FROM information_schema.tables LIMIT 1"} {
			ctx := lockctx.With(dbtest.Limited(t), text)
			dbtest.OK(t, query("SELECT stock FROM p WHERE id = 1")(ctx, db))
			dbtest.OK(t, order(ctx, db))
			dbtest.OK(t, query(text)(ctx, db))
			dbtest.Is(t, "after "+text, order(ctx, db), mysqllock.ErrStaleRead)
		}
	})
}

// TestADecisionIsWrittenOnNoOtherHandleOnceItsLockIsGone: the handle under whose lock the lock context has read has
// given it back, or lost it.
func TestADecisionIsWrittenOnNoOtherHandleOnceItsLockIsGone(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		one, two := s.Handle(), s.Handle()
		over := map[string]func(cancel func()){
			"row":        func(cancel func()) { cancel() },
			"lease":      func(cancel func()) { cancel() },
			"advisory":   func(cancel func()) { cancel() },
			"optimistic": func(cancel func()) { cancel() },
			"lost lease": func(func()) { s.Steal("k") },
			"lost advisory": func(func()) {
				dbtest.Exec(t, s.Plain, fmt.Sprintf("KILL %d", s.Named("k")))
			},
		}
		opts := stock.KeptAs()
		opts["lost lease"], opts["lost advisory"] = opts["lease"], opts["advisory"]
		for name, ends := range over {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10")
				base, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				ctx := lockctx.With(base, "k", opts[name]...)
				n := stock.MustRead(t, ctx, one, 1)
				ends(cancel)
				ctx = context.WithoutCancel(ctx)
				dbtest.Soon(t, "the handle knows", func() bool {
					_, err := stock.Read(ctx, one, 2)
					return errors.Is(err, mysqllock.ErrLost)
				})
				if name == "lost lease" { // the thief has written, and has gone
					dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = '', expires = UTC_TIMESTAMP(6)")
				}
				dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 110 WHERE id = 1")
				for what, write := range map[string]func() error{
					"a statement": func() error { _, err := two.ExecContext(ctx, stock.SetStock, n-1); return err },
					"a transaction": func() error {
						tx := dbtest.Begin(t, ctx, two)
						defer tx.Rollback()
						if _, err := tx.ExecContext(ctx, stock.SetStock, n-1); err != nil {
							return err
						}
						return tx.Commit()
					},
				} {
					dbtest.Is(t, what, write(), mysqllock.ErrStaleRead)
				}
				dbtest.Equal(t, "the stock is %d", s.Stock(1), 110)
			})
		}
	})
}
