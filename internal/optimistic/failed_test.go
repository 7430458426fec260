package optimistic_test

import (
	"context"
	"database/sql"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAUnitGoesOnAfterAStatementThatHasFailed, and does not conflict with itself.
func TestAUnitGoesOnAfterAStatementThatHasFailed(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		duplicate := "INSERT INTO p VALUES (1, 1)"
		for _, another := range []bool{false, true} {
			ctx := optimistically(t)
			n := stock.MustRead(t, ctx, db, 1)
			for range 2 {
				if _, err := db.ExecContext(ctx, duplicate); err == nil || errors.Is(err, mysqllock.ErrConflict) {
					t.Errorf("a duplicate returned %v", err)
				}
			}
			if another {
				dbtest.ExecIn(t, optimistically(t), other, increment, 50)
			}
			_, err := db.ExecContext(ctx, increment, n+1)
			if another {
				wantConflict(t, "the write", err, "commit")
				s.WantStock(1, 50)
				continue
			}
			dbtest.OK(t, err)
			s.WantStock(1, n+1)
			wantVersion(t, ctx, s.Token("k"))
		}
		// If the failed one meets a conflict, that is its error, and nothing goes on.
		ctx := optimistically(t)
		stock.MustRead(t, ctx, db, 1)
		dbtest.ExecIn(t, optimistically(t), other, increment, 60)
		_, err := db.ExecContext(ctx, duplicate)
		wantConflict(t, "the duplicate", err, "exec")
		_, err = db.ExecContext(ctx, increment, 1)
		wantConflict(t, "the write", err, "exec")
		s.WantStock(1, 60)
	})
}

// TestAStatementThatFailsOnWhatOthersCommittedIsAConflict: two callers both see that a row is
// missing, or is there, and the second one's write fails on what the first one has done.
func TestAStatementThatFailsOnWhatOthersCommittedIsAConflict(t *testing.T) {
	races := map[string]struct {
		theirs, own string
		number      []uint16
	}{
		"duplicate key": {"INSERT INTO child (id, p) VALUES (7, 1)", "INSERT INTO child (id, p) VALUES (7, 2)", []uint16{1062}},
		"deleted row":   {"DELETE FROM parent WHERE id = 3", "INSERT INTO child (id, p) VALUES (8, 3)", []uint16{1452}},
		"referred row":  {"INSERT INTO child (id, p) VALUES (9, 2)", "DELETE FROM parent WHERE id = 2", []uint16{1451}},
		"check":         {"UPDATE parent SET n = 0 WHERE id = 1", "UPDATE parent SET n = n - 1 WHERE id = 1", []uint16{3819, 4025}},
	}
	dbtest.OnEveryServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		fresh := func() {
			for _, text := range []string{
				"DROP TABLE IF EXISTS child", "DROP TABLE IF EXISTS parent",
				"CREATE TABLE parent (id INT PRIMARY KEY, n INT NOT NULL, CHECK (n >= 0))",
				"CREATE TABLE child (id INT PRIMARY KEY, p INT, FOREIGN KEY (p) REFERENCES parent (id))",
				"INSERT INTO parent VALUES (1, 1), (2, 1), (3, 1)",
			} {
				dbtest.Exec(t, s.Plain, text)
			}
		}
		optimistic := func(key string) context.Context { return lockctx.With(dbtest.Limited(t), key, lockctx.Optimistic()) }
		ways := map[string]func(key, own string, meanwhile func()) error{
			"BeginTx": func(key, own string, meanwhile func()) error {
				return stock.InTx(optimistic(key), db, func(tx *sql.Tx) error {
					meanwhile()
					_, err := tx.Exec(own)
					return err
				})
			},
			"read and Exec": func(key, own string, meanwhile func()) error {
				ctx := optimistic(key)
				if _, err := stock.Read(ctx, db, 1); err != nil {
					return err
				}
				meanwhile()
				_, err := db.ExecContext(ctx, own)
				return err
			},
			"prepared": func(key, own string, meanwhile func()) error {
				ctx := optimistic(key)
				return stock.InTx(ctx, db, func(tx *sql.Tx) error {
					st, err := tx.PrepareContext(ctx, own)
					if err != nil {
						return err
					}
					defer st.Close()
					meanwhile()
					_, err = st.ExecContext(ctx)
					return err
				})
			},
			"Do": func(key, own string, meanwhile func()) error {
				return mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error {
					if _, err := stock.Read(ctx, db, 1); err != nil {
						return err
					}
					meanwhile()
					_, err := db.ExecContext(ctx, own)
					return err
				}, lockctx.Optimistic())
			},
		}
		for what, race := range races {
			for how, run := range ways {
				for _, moves := range []bool{true, false} {
					fresh()
					key := what + how
					// Once, so that what the first use of a key does is over.
					dbtest.ExecIn(t, optimistic(key), other, "UPDATE p SET stock = stock + 1 WHERE id = 1")
					err := run(key, race.own, func() {
						if moves {
							dbtest.ExecIn(t, optimistic(key), other, race.theirs)
						} else { // without the key
							dbtest.Exec(t, s.Plain, race.theirs)
						}
					})
					var said *mysql.MySQLError
					if errors.As(err, &said) && said.Number == 1020 && errors.Is(err, mysqllock.ErrConflict) {
						continue // innodb_snapshot_isolation comes first
					}
					if !errors.As(err, &said) || !slices.Contains(race.number, said.Number) || errors.Is(err, mysqllock.ErrConflict) != moves {
						t.Errorf("%s, %s, the version moves: %v: %v", what, how, moves, err)
					}
				}
			}
		}

		// A transaction whose version has not moved goes on after the error.
		fresh()
		tx := dbtest.Begin(t, optimistic("goes on"), db)
		dbtest.Exec(t, tx, "UPDATE parent SET n = 5 WHERE id = 2")
		if _, err := tx.Exec("INSERT INTO parent VALUES (1, 1)"); err == nil {
			t.Error("a row twice")
		}
		dbtest.OK(t, tx.Commit())

		// With Retry both insert, one after the other.
		fresh()
		runs := 0
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "retry", func(ctx context.Context) error {
			var n int
			err := db.QueryRowContext(ctx, "SELECT COUNT(*) FROM child WHERE id = 7").Scan(&n)
			if runs++; runs == 1 {
				dbtest.ExecIn(t, optimistic("retry"), other, "INSERT INTO child VALUES (7, 1)")
			}
			if err != nil || n > 0 {
				return err
			}
			_, err = db.ExecContext(ctx, "INSERT INTO child VALUES (7, 2)")
			return err
		}, lockctx.Optimistic(), lockctx.Retry(2)))
		dbtest.Equal(t, "%d runs", runs, 2)
	})
}

// TestACommitWithoutAnAnswerIsNoConflict: the connection is lost at the COMMIT that sets the version. It has done
// both or neither; the caller is told that nothing is known, and not that somebody else was first. The same goes for
// a row lock that sets a version.
func TestACommitWithoutAnAnswerIsNoConflict(t *testing.T) {
	const add = "UPDATE p SET stock = stock + 1 WHERE id = 1"
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, proxy := s.Proxied(mysqllock.Config{})
		dbtest.Exec(t, db, "SELECT 1") // the handle looks at its server
		inTx := func(ctx context.Context) error {
			return stock.InTx(ctx, db, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, add)
				return err
			})
		}
		exec := func(ctx context.Context) error { _, err := db.ExecContext(ctx, add); return err }
		var stock, token, before int
		both := func() {
			t.Helper()
			dbtest.OK(t, s.Plain.QueryRow("SELECT p.stock, l.token FROM p, mysqllock l WHERE p.id = 1 AND l.name = 'k'").Scan(&stock, &token))
		}
		for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.Row()} {
			for _, do := range []func(context.Context) error{inTx, exec} {
				hint := func() context.Context { return lockctx.With(dbtest.Limited(t), "k", opt, lockctx.Wait(30*time.Second)) }
				dbtest.OK(t, do(hint()))
				both()
				before = stock - token
				proxy.LoseAnswer("COMMIT")
				err := do(hint())
				proxy.Mend()
				if !errors.Is(err, mysqllock.ErrLost) || errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLocked) {
					t.Errorf("without an answer: %v", err)
				}
				tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(30*time.Second)), db) // waits for what is left of it
				if both(); stock-token != before {
					t.Errorf("the stock is %d, and the version %d: of one the COMMIT has made more than of the other, %d", stock, token, before)
				}
				dbtest.OK(t, tx.Rollback())
			}
		}
	})
}

// TestADisturbedCommitIsCalledAConflictOnlyIfItIsOne: each statement that goes out with the COMMIT is interrupted, or
// the connection breaks in place of its answer, and before that another process may set the next version. That proves
// nothing: the caller is told of a success only if there is one, and of a conflict only if the server has said so.
func TestADisturbedCommitIsCalledAConflictOnlyIfItIsOne(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, tap := s.Tapped(mysqllock.Config{})
		other := s.Handle()
		defer server.SetOneByOne(false)
		for _, oneByOne := range []bool{false, true} {
			for _, at := range []string{"INSERT /*+ SET_VAR", "SELECT " + server.Untimed + "IF(ROW_COUNT()", "COMMIT"} {
				for _, fault := range []dbtest.Fault{{Answer: dbtest.Interrupted}, {Lost: true}} {
					for _, raced := range []bool{false, true} {
						server.SetOneByOne(oneByOne) // tests of the other server may set it, too
						dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 10 WHERE id = 1")
						tx := dbtest.Begin(t, optimistically(t), db)
						dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
						first := true
						fault.At = func(text string) bool {
							begins := strings.HasPrefix(text, at) && first
							first = first && !begins
							return begins
						}
						fault.Before = func() {
							if raced && strings.HasPrefix(at, "INSERT") {
								dbtest.ExecIn(t, optimistically(t), other, "UPDATE p SET stock = 20 WHERE id = 2")
							}
						}
						happened := tap.Strike(fault)
						err := tx.Commit()
						hit := happened()
						tap.Strike(dbtest.Fault{At: func(string) bool { return false }})
						dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(context.Context) error { return nil })) // what is left of it is over
						left := dbtest.Column[int](t, s.Plain, "SELECT stock FROM p WHERE id = 1")[0]
						switch sold := left == 9; {
						case (err == nil) == hit, sold && err != nil && !fault.Lost, err == nil && !sold:
							t.Errorf("one by one %v, %s, lost %v, raced %v: %v, and the stock is %d", oneByOne, at, fault.Lost, raced, err, left)
						case err != nil && (!errors.Is(err, mysqllock.ErrLost) || errors.Is(err, mysqllock.ErrConflict)):
							t.Errorf("one by one %v, %s, lost %v, raced %v: %v", oneByOne, at, fault.Lost, raced, err)
						}
					}
				}
			}
		}
	})
}
