package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
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

// goesBack is a program that locks k in a transaction, reads the stock, goes back to
// a savepoint that is older than the lock, and writes what it has decided all the
// same. Between going back and the write it calls meanwhile.
type goesBack func(s *stock.Shop, db *sql.DB, meanwhile func()) error

// leased returns a lock context whose transactions have no row lock to begin with: one of k comes second.
func leased(s *stock.Shop) (outer, k context.Context) {
	outer = lockctx.With(dbtest.Limited(s.T), "other "+dbtest.Random(), lockctx.Lease(30*time.Second))
	return outer, lockctx.With(outer, "k", lockctx.Row(), lockctx.AllowStale())
}

// asText goes back by back, in a transaction that asks for k as its second key. before runs before the
// savepoint; hintedWrite is whether the write has the lock context.
func asText(before, savepoint, back string, hintedWrite bool) goesBack {
	return func(s *stock.Shop, db *sql.DB, meanwhile func()) error {
		outer, ctx := leased(s)
		tx, err := db.BeginTx(outer, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if before != "" {
			dbtest.Exec(s.T, tx, before)
		}
		dbtest.Exec(s.T, tx, savepoint)
		n, err := stock.Read(ctx, tx, 1)
		if err != nil {
			return err
		}
		_, berr := tx.Exec(back)
		meanwhile()
		write := context.Background()
		if hintedWrite {
			write = ctx
		}
		return errors.Join(berr, decide(write, tx, n), tx.Commit())
	}
}

// decide writes what was decided when the stock was n.
func decide(ctx context.Context, db dbtest.Execer, n int) error {
	_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
	return err
}

// prepared goes back by a prepared statement.
func prepared(s *stock.Shop, db *sql.DB, meanwhile func()) error {
	outer, ctx := leased(s)
	tx, err := db.BeginTx(outer, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	dbtest.Exec(s.T, tx, "SAVEPOINT a")
	n, err := stock.Read(ctx, tx, 1)
	if err != nil {
		return err
	}
	var berr error
	back, err := tx.Prepare("ROLLBACK TO a")
	if err == nil {
		_, berr = back.Exec()
	} else if !s.MariaDB() { // MySQL does not prepare it
		_, err = tx.Exec("ROLLBACK TO a")
	}
	meanwhile()
	return errors.Join(err, berr, decide(ctx, tx, n), tx.Commit())
}

// nested goes back by the Rollback of a transaction inside one that holds another
// key in another way.
func nested(opts ...lockctx.Option) goesBack {
	return func(s *stock.Shop, db *sql.DB, meanwhile func()) error {
		outer := lockctx.With(dbtest.Limited(s.T), "other "+dbtest.Random(), opts...)
		tx, err := db.BeginTx(outer, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		n, err := insideNested(outer, db, meanwhile)
		return errors.Join(err, decide(outer, tx, n), tx.Commit())
	}
}

func insideNested(outer context.Context, db *sql.DB, meanwhile func()) (n int, err error) {
	inner := lockctx.With(outer, "k", lockctx.Row())
	tx, err := db.BeginTx(outer, nil)
	if err != nil {
		return 0, err
	}
	if n, err = stock.Read(inner, tx, 1); err != nil {
		return 0, errors.Join(err, tx.Rollback())
	}
	err = tx.Rollback()
	meanwhile()
	return n, err
}

var allGoBack = map[string]goesBack{
	"text":               asText("", "SAVEPOINT a", "ROLLBACK TO a", true),
	"text, write plain":  asText("", "SAVEPOINT a", "ROLLBACK TO a", false),
	"text, long":         asText("", "SAVEPOINT `A b`", "/* c */ rollback WORK to savepoint `a B`", true),
	"text, several":      asText("", "SAVEPOINT a", "DO 1; SAVEPOINT b; ROLLBACK TO a", true),
	"text, reused":       asText("SAVEPOINT a", "SAVEPOINT a", "ROLLBACK TO SAVEPOINT a", true),
	"text, after others": asText("SAVEPOINT a", "SAVEPOINT b", "ROLLBACK TO a", true),
	"text, released":     asText("SAVEPOINT a", "SAVEPOINT b", "RELEASE SAVEPOINT b; ROLLBACK TO a", true),
	"prepared":           prepared,
	"lease":              nested(lockctx.Lease(30 * time.Second)),
	"advisory":           nested(lockctx.Advisory()),
}

// TestGoingBackFreesNoDecision: another program has the key when it is free.
func TestGoingBackFreesNoDecision(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, program := range allGoBack {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10 WHERE id = 1")
			db, other := s.Handle("multiStatements=true"), s.Handle()
			var done sync.WaitGroup
			took := 0
			meanwhile := func() {
				free := !s.Locked("k")
				change := func() {
					tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), other)
					dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 4 WHERE id = 1")
					dbtest.OK(t, tx.Commit())
				}
				took += 4
				if free {
					change()
				} else {
					done.Go(change)
				}
			}
			err := program(s, db, meanwhile)
			done.Wait()
			if err == nil {
				took++
			} else if !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%s: %v", name, err)
			}
			if n := s.Stock(1); n != 10-took {
				t.Errorf("%s: %d of 10 are left, and %d were taken; the program got: %v", name, n, took, err)
			}
		}
	})
}

// TestWhoeverCommitsAfterGoingBackHasDecidedUnderTheLock, of many callers, too.
func TestWhoeverCommitsAfterGoingBackHasDecidedUnderTheLock(t *testing.T) {
	rounds := 3
	if long {
		rounds = 20
	}
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		for name, program := range allGoBack {
			dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 1000 WHERE id = 1")
			var took atomic.Int64
			var all sync.WaitGroup
			for range 2 {
				db := s.Handle("multiStatements=true", "lockWait=2m")
				for range 3 {
					all.Go(func() {
						for range rounds {
							if program(s, db, func() {}) == nil {
								took.Add(1)
							}
						}
					})
				}
				all.Go(func() {
					for range rounds {
						err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
							n, err := stock.Read(ctx, db, 1)
							return errors.Join(err, decide(ctx, db, n))
						})
						if err != nil {
							t.Error(err)
							return
						}
						took.Add(1)
					}
				})
			}
			all.Wait()
			if n := s.Stock(1); n != 1000-int(took.Load()) {
				t.Errorf("%s: %d of 1000 are left, and %d were taken", name, n, took.Load())
			}
		}
	})
}

// TestGoingBackKeepsWhatIsHeld: nothing is lost where the lock stays, and nothing is
// asked where that is sure.
func TestGoingBackKeepsWhatIsHeld(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		// InnoDB has a part in it already.
		for _, before := range []string{"INSERT INTO p VALUES (90, 1)", "UPDATE p SET stock = 3 WHERE id = 2"} {
			db := s.Handle()
			err := asText(before, "SAVEPOINT a", "ROLLBACK TO a", true)(s, db, func() { s.WantLocked("k", true) })
			if err != nil {
				t.Errorf("after %s: %v", before, err)
			}
			s.WantLocked("k", false)
		}
		s.WantStock(2, 3)

		// The savepoint is younger than the lock.
		db, tap := s.Tapped(mysqllock.Config{})
		outer, ctx := leased(s)
		second := func(begin context.Context) {
			tx := dbtest.Begin(t, begin, db)
			dbtest.ExecIn(t, ctx, tx, "DO 1")
			dbtest.Exec(t, tx, "SAVEPOINT a")
			dbtest.Exec(t, tx, "INSERT INTO p VALUES (91, 1)")
			dbtest.Exec(t, tx, "ROLLBACK TO a")
			s.WantLocked("k", true)
			inner := dbtest.Begin(t, ctx, db)
			dbtest.OK(t, inner.Rollback())
			s.WantLocked("k", true)
			dbtest.OK(t, tx.Commit())
			s.WantLocked("k", false)
		}
		second(outer)
		seen := tap.Since()
		second(outer)
		second(ctx)
		for _, sent := range seen() {
			if sent.Text == rollbacksSQL {
				t.Error("it is asked whether going back to a savepoint that is younger than the lock frees it")
			}
		}

		// One that there is not changes nothing.
		tx := dbtest.Begin(t, outer, db)
		dbtest.ExecIn(t, ctx, tx, "DO 1")
		if _, err := tx.Exec("ROLLBACK TO nowhere"); err == nil || errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("back to a savepoint that is not there: %v", err)
		}
		s.WantLocked("k", true)
		dbtest.OK(t, tx.Commit())
	})
}

const rollbacksSQL = "SHOW SESSION STATUS LIKE 'Handler_rollback'"

// TestGoingBackSaysWhy: the error says what to do, and the outer transaction ends.
func TestGoingBackSaysWhy(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		outer, ctx := leased(s)
		tx := dbtest.Begin(t, outer, db)
		dbtest.Exec(t, tx, "SAVEPOINT a")
		stock.MustRead(t, ctx, tx, 1)
		dbtest.Exec(t, tx, "ROLLBACK TO a")
		_, err := tx.Exec("UPDATE p SET stock = 1 WHERE id = 1") // before which it is asked what that did
		var e *mysqllock.Error
		if !errors.Is(err, mysqllock.ErrLost) || !errors.As(err, &e) || !strings.Contains(e.Key, "k") || e.Strategy != "row" {
			t.Fatalf("going back behind the lock: %v", err)
		}
		t.Log(err)
		for _, text := range []string{"UPDATE p SET stock = 1 WHERE id = 1", "SAVEPOINT b"} {
			dbtest.Is(t, fmt.Sprintf("%s after that", text), dbtest.Err(tx.Exec(text)), mysqllock.ErrLost)
		}
		dbtest.Is(t, "the commit after that", tx.Commit(), mysqllock.ErrLost)
		s.WantLocked("k", false)
		s.WantStock(1, 10)
		dbtest.OK(t, asText("UPDATE p SET stock = 10 WHERE id = 2", "SAVEPOINT a", "ROLLBACK TO a", true)(s, db, func() {})) // the connection is good
	})
}
