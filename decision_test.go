package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// keptAs are the ways to keep a lock, each with its options.
func keptAs() map[string][]lockctx.Option {
	return map[string][]lockctx.Option{
		"row":        {lockctx.Row()},
		"shared":     {lockctx.Shared()},
		"slots":      {lockctx.Slots(1)},
		"lease":      {lockctx.Lease(ttl)},
		"advisory":   {lockctx.Advisory()},
		"optimistic": {lockctx.Optimistic()},
	}
}

// onStrategies runs a test on each server with each strategy. with begins a lock
// context on k.
func onStrategies(t *testing.T, test func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context)) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE TABLE orders (id INT PRIMARY KEY AUTO_INCREMENT, n INT NOT NULL DEFAULT 1) ENGINE=InnoDB")
		db := s.open()
		for name, opts := range keptAs() {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				dbtest.Exec(t, s.plain, "DELETE FROM orders")
				base, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				test(t, s, db, func() context.Context { return lockctx.With(base, "k", opts...) })
			})
		}
	})
}

const order, setStock = "INSERT INTO orders (n) VALUES (1)", "UPDATE p SET stock = ? WHERE id = 1"

func (s *scratch) orders() (n int) {
	s.T.Helper()
	dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) FROM orders").Scan(&n))
	return n
}

// wantStale wants ErrStaleRead that names what gave the lock back.
func wantStale(t *testing.T, what string, err error, by string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.Is(err, mysqllock.ErrStaleRead) || !errors.As(err, &e) || e.Key != "k" || e.Strategy == "" ||
		!strings.Contains(err.Error(), "given back by "+by) {
		t.Errorf("%s: %v, want ErrStaleRead of %q", what, err, by)
	}
}

// TestDecisionOutlivesItsLock: read, write one thing, write another by what was read.
func TestDecisionOutlivesItsLock(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		ctx := with()
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, order)
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, setStock, n-1)
		wantStale(t, "the second write", err, "the commit of INSERT;")
		_, err = db.ExecContext(ctx, setStock, n-1)
		wantStale(t, "the second write again", err, "the commit of INSERT;")
		rows, err := db.QueryContext(ctx, setStock, n-1)
		wantStale(t, "a write by Query", err, "the commit of INSERT;")
		if err == nil {
			rows.Close()
		}
		_, err = db.ExecContext(ctx, "DO SLEEP(0)")
		wantStale(t, "what may write", err, "the commit of INSERT;")
		stmt, err := db.PrepareContext(ctx, setStock)
		dbtest.OK(t, err)
		defer stmt.Close()
		_, err = stmt.ExecContext(ctx, n-1)
		wantStale(t, "a prepared write", err, "the commit of INSERT;")
		s.wantStock(1, 10)

		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		_, err = tx.ExecContext(ctx, setStock, n-1)
		wantStale(t, "the first write of a transaction", err, "the commit of INSERT;")
		_, err = tx.Exec(setStock, n-1)
		wantStale(t, "without the hint", err, "the commit of INSERT;")
		n, err = read(ctx, tx, 1) // under its lock
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, setStock, n-1)
		dbtest.OK(t, tx.Commit())
		s.wantStock(1, 9)

		_, err = db.ExecContext(ctx, setStock, 0)
		wantStale(t, "after a transaction with a read of its own", err, "the commit of INSERT;")
		if _, err = db.QueryContext(ctx, "SELECT nothing FROM p"); err == nil {
			t.Fatal("a column that is not there was read")
		}
		var many int
		if err = db.QueryRowContext(ctx, "SELECT (SELECT id FROM p) FROM p").Scan(&many); err == nil {
			t.Fatal("a subquery with many rows was read")
		}
		_, err = db.ExecContext(ctx, setStock, 0)
		wantStale(t, "after a read that failed", err, "the commit of INSERT;")
		s.wantStock(1, 9)

		n, err = read(ctx, db, 1) // a new unit of work
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, setStock, n-1)
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, order)
		wantStale(t, "after the second unit of work", err, "the commit of UPDATE;")
		_, err = db.ExecContext(with(), order)
		dbtest.OK(t, err)
		s.wantStock(1, 8)
	})
}

// TestStaleReadSendsNothing: neither the lock nor the statement.
func TestStaleReadSendsNothing(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		for name, opts := range keptAs() {
			ctx := lockctx.With(dbtest.Limited(t), "k", opts...)
			_, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			_, err = db.ExecContext(ctx, "UPDATE p SET stock = stock + 1")
			dbtest.OK(t, err)
			tx, err := db.BeginTx(lockctx.Without(ctx), nil)
			dbtest.OK(t, err)
			seen := tap.Since()
			_, err = db.ExecContext(ctx, setStock, 1)
			wantStale(t, name, err, "the commit of UPDATE;")
			_, err = tx.ExecContext(ctx, setStock, 1)
			wantStale(t, name+", a late hint", err, "the commit of UPDATE;")
			for _, c := range seen() { // leases are renewed, and advisory locks looked after, all the time
				if name != "lease" && name != "advisory" || strings.Contains(c.Text, "stock") || strings.Contains(c.Text, "SAVEPOINT") || strings.Contains(c.Text, "START") {
					t.Errorf("%s: the server got %s", name, c.Text)
				}
			}
			dbtest.OK(t, tx.Commit())
		}
	})
}

// TestUnchangedSendsNoCommit: the transaction of the read goes on, until its context
// ends.
func TestUnchangedSendsNoCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{})
		base, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx := lockctx.With(base, "k")
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		seen := tap.Since()
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 10 WHERE id = 1")
		dbtest.OK(t, err)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 10 WHERE id = 1")
		dbtest.OK(t, tx.Commit())
		if log := seen(); len(log) != 2 || log[0].Text != log[1].Text || log[0].Conn != log[1].Conn {
			t.Errorf("want the two UPDATEs, the server got %v", log)
		}
		if err := tx.Rollback(); !errors.Is(err, sql.ErrTxDone) {
			t.Errorf("Rollback after Commit: %v", err)
		}
		s.wantLocked("k", true)
		cancel()
		dbtest.Soon(t, "the end of the context frees the key", func() bool { return !s.locked("k") })
		dbtest.Soon(t, "the session is free", func() bool { st, err := mysqllock.Stats(db); return err == nil && st.InUse == 0 })
		_, err = db.ExecContext(lockctx.With(context.WithoutCancel(ctx), "k"), setStock, 1)
		wantLost(t, "a write after the end", err)
	})
}

// TestBlindWrites: what never reads outside a transaction may write as often as it
// likes.
func TestBlindWrites(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		ctx := with()
		for range 3 {
			_, err := db.ExecContext(ctx, order)
			dbtest.OK(t, err)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			n, err := read(ctx, tx, 1)
			dbtest.OK(t, err)
			n2, err := read(ctx, db, 1) // in the transaction
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, setStock, (n+n2)/2-1)
			dbtest.OK(t, tx.Commit())
		}
		s.wantStock(1, 7)
	})
}

// TestAllowStaleDecides: for those who know.
func TestAllowStaleDecides(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, _ func() context.Context) {
		name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
		ctx := lockctx.With(dbtest.Limited(t), "k", append(keptAs()[name], lockctx.AllowStale())...)
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		for range 3 {
			_, err = db.ExecContext(ctx, order)
			dbtest.OK(t, err)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, order) // without the hint
			dbtest.OK(t, tx.Commit())
		}
		if n := s.orders(); n != 6 {
			t.Errorf("%d orders, want 6", n)
		}
	})
}

// TestNothingChanged: what changed nothing leaves the unit of work open, with its lock.
func TestNothingChanged(t *testing.T) {
	same := map[string]func(ctx context.Context, db *sql.DB) error{
		"update": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, setStock, 10)
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
			stmt, err := db.PrepareContext(ctx, setStock)
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
				_, err = read(ctx, tx, 1)
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
				_, err = tx.ExecContext(ctx, setStock, 10)
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
				_, err = inner.ExecContext(ctx, setStock, 10)
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
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		for what, does := range same {
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
			ctx := with()
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			for range 2 {
				if err := does(ctx, db); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
			}
			if taken := lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait()); !strings.HasSuffix(t.Name(), "/advisory") && !strings.HasSuffix(t.Name(), "/optimistic") {
				if _, err := db.ExecContext(taken, order); !errors.Is(err, mysqllock.ErrLocked) {
					t.Errorf("%s: the lock is free: %v", what, err)
				}
			}
			if _, err = db.ExecContext(ctx, setStock, n-1); err != nil {
				t.Errorf("the write after %s: %v", what, err)
			}
			s.wantStock(1, 9)
			_, err = db.ExecContext(ctx, order)
			wantStale(t, "after "+what, err, "the commit of UPDATE;")
		}
	})
}

// TestMayHaveChanged: what is not known to have changed nothing ends the unit of work.
func TestMayHaveChanged(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		dbtest.Exec(t, s.plain, "SET GLOBAL log_bin_trust_function_creators = 1")
		dbtest.Exec(t, s.plain, "DROP FUNCTION IF EXISTS f")
		dbtest.Exec(t, s.plain, "DROP PROCEDURE IF EXISTS q")
		dbtest.Exec(t, s.plain, "CREATE FUNCTION f() RETURNS INT MODIFIES SQL DATA BEGIN INSERT INTO orders (n) VALUES (2); RETURN 10; END")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE q() INSERT INTO orders (n) VALUES (3)")
		for by, text := range map[string]string{
			"the commit of UPDATE;": "UPDATE p SET stock = f() WHERE id = 1",
			"the commit of CALL;":   "CALL q()",
			"the commit of DO;":     "DO f()",
		} {
			before := s.orders()
			ctx := with()
			_, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			_, err = db.ExecContext(ctx, text)
			dbtest.OK(t, err)
			if s.orders() != before+1 {
				t.Errorf("%s is not committed", text)
			}
			_, err = db.ExecContext(ctx, order)
			wantStale(t, text, err, by)
		}
	})
}

// TestReturning: the rows of RETURNING come without a number, so only none of them says
// that nothing was changed.
func TestReturning(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		if !s.MariaDB() {
			return
		}
		ctx := with()
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
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
		_, err = db.ExecContext(ctx, setStock, n-1)
		wantStale(t, "after what may have changed something", err, "the commit of INSERT;")
	})
}

// TestDecisionUnderATransaction: the COMMIT of a transaction gives the lock back, and
// so does its ROLLBACK.
func TestDecisionUnderATransaction(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		for _, commit := range []bool{true, false} {
			ctx := with()
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			_, err = tx.ExecContext(ctx, order)
			dbtest.OK(t, err)
			_, err = tx.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 2") // as often as it likes
			dbtest.OK(t, err)
			by := "the rollback of a transaction;"
			if commit {
				by = "the commit of a transaction with UPDATE;"
				dbtest.OK(t, tx.Commit())
			} else {
				dbtest.OK(t, tx.Rollback())
			}
			_, err = db.ExecContext(ctx, setStock, n-1)
			wantStale(t, "after the transaction", err, by)
			late, err := db.BeginTx(lockctx.Without(ctx), nil) // begins without the hint
			dbtest.OK(t, err)
			_, err = late.ExecContext(ctx, setStock, n-1)
			wantStale(t, "a late hint", err, by)
			n, err = read(ctx, late, 1)
			dbtest.OK(t, err)
			_, err = late.ExecContext(ctx, setStock, n-1)
			dbtest.OK(t, err)
			dbtest.OK(t, late.Rollback())
			s.wantStock(1, 10)
		}
	})
}

// TestDecisionsInHolds: a hold keeps its lock to the end.
func TestDecisionsInHolds(t *testing.T) {
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			for _, ctx := range []context.Context{ctx, lockctx.With(ctx, "k", keptAs()[name]...)} {
				n, err := read(ctx, db, 1)
				dbtest.OK(t, err)
				_, err = db.ExecContext(ctx, order)
				dbtest.OK(t, err)
				_, err = db.ExecContext(ctx, setStock, n-1)
				dbtest.OK(t, err)
			}
			return nil
		}, keptAs()[name]...))
		s.wantStock(1, 8)

		// In a lock context with a decision from before.
		ctx := with()
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, order)
		dbtest.OK(t, err)
		dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, setStock, n-1)
			wantStale(t, "in a hold", err, "the commit of INSERT;")
			n, err = read(ctx, db, 1)
			dbtest.OK(t, err)
			for range 2 {
				n--
				_, err = db.ExecContext(ctx, setStock, n)
				dbtest.OK(t, err)
			}
			return nil
		}, keptAs()[name]...))
		s.wantStock(1, 6)
	})
}

// TestStock: what the README's first function does with one more line, by many.
func TestStock(t *testing.T) {
	const buyers = 8
	onStrategies(t, func(t *testing.T, s *scratch, db *sql.DB, with func() context.Context) {
		name := t.Name()[strings.LastIndexByte(t.Name(), '/')+1:]
		if name == "shared" {
			return // locks out nobody here
		}
		many := func(sell func() error) (failed int) {
			var mu sync.Mutex
			var wg sync.WaitGroup
			for range buyers {
				wg.Go(func() {
					err := sell()
					for errors.Is(err, mysqllock.ErrConflict) {
						err = sell()
					}
					mu.Lock()
					defer mu.Unlock()
					if errors.Is(err, mysqllock.ErrStaleRead) {
						failed++
					} else if err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			return failed
		}
		body := func(
			ctx context.Context, q interface {
				querier
				dbtest.Execer
			},
		) error {
			n, err := read(ctx, q, 1)
			if err == nil {
				_, err = q.ExecContext(ctx, order)
			}
			if err == nil {
				_, err = q.ExecContext(ctx, setStock, n-1)
			}
			return err
		}
		if n := many(func() error { return body(with(), db) }); n != buyers {
			t.Errorf("%d of %d got ErrStaleRead", n, buyers)
		}
		s.wantStock(1, 10)

		if n := many(func() error {
			ctx := with()
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if err := body(ctx, tx); err != nil {
				return err
			}
			return tx.Commit()
		}); n > 0 {
			t.Errorf("%d transactions got ErrStaleRead", n)
		}
		s.wantStock(1, 10-buyers)

		dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
		if n := many(func() error {
			return mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error { return body(ctx, db) }, keptAs()[name]...)
		}); n > 0 {
			t.Errorf("%d of Do got ErrStaleRead", n)
		}
		s.wantStock(1, 10-buyers)
	})
}

// TestStaleReadOnTwoHandles: a lock context is one on all handles.
func TestStaleReadOnTwoHandles(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		one, two := s.open(), s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		n, err := read(ctx, one, 1)
		dbtest.OK(t, err)
		_, err = one.ExecContext(ctx, setStock, n-1)
		dbtest.OK(t, err)
		_, err = two.ExecContext(ctx, setStock, n-2)
		wantStale(t, "on another handle", err, "the commit of UPDATE;")
		n, err = read(ctx, two, 1)
		dbtest.OK(t, err)
		_, err = two.ExecContext(ctx, setStock, n-1)
		dbtest.OK(t, err)
		s.wantStock(1, 8)
	})
}

// TestStaleReadSaysNoArguments: nor any other part of the statement than its verb.
func TestStaleReadSaysNoArguments(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		_, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, "/* secret */ UPDATE p SET stock = stock + 1 WHERE 'secret' = ?", "secret")
		dbtest.OK(t, err)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = 1 WHERE 'secret' = ?", "secret")
		wantStale(t, "the second write", err, "the commit of UPDATE;")
		if strings.Contains(fmt.Sprint(err), "secret") {
			t.Error(err)
		}
	})
}
