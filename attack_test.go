package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// preparer is a *sql.DB, *sql.Conn or *sql.Tx.
type preparer interface {
	dbtest.Execer
	Prepare(text string) (*sql.Stmt, error)
}

// preparing prepares on a sql.Conn with a context of its own.
type preparing struct {
	*sql.Conn
	t *testing.T
}

func (c preparing) Prepare(text string) (*sql.Stmt, error) {
	return c.PrepareContext(dbtest.Limited(c.t), text)
}

// TestMaxConnsPreparedMeans: what is prepared means what it means at that time on that
// connection, not what the same text meant before USE or SET.
func TestMaxConnsPreparedMeans(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		tenant := newScratch(s.Beside(t))
		dbtest.Exec(t, tenant.plain, "UPDATE p SET stock = 77")
		db := s.open("maxConns=4")
		const stock = "SELECT stock FROM p WHERE id = ?"
		run := func(st *sql.Stmt, want string, arg any) {
			t.Helper()
			var got string
			if err := st.QueryRow(arg).Scan(&got); err != nil || got != want {
				t.Errorf("got %s, %v, want %s", got, err, want)
			}
		}
		means := func(on preparer, text, want string, arg any) *sql.Stmt {
			t.Helper()
			st, err := on.Prepare(text)
			dbtest.OK(t, err)
			t.Cleanup(func() { st.Close() })
			run(st, want, arg)
			return st
		}
		conn := preparing{conned(t, db), t}
		before := means(conn, stock, "10", 1)
		dbtest.Exec(t, conn, "USE "+tenant.Name)
		means(conn, stock, "77", 1)
		run(before, "10", 1)
		dbtest.Exec(t, conn, "USE "+s.Name)
		means(conn, stock, "10", 1)
		dbtest.Exec(t, conn, "SET sql_mode = 'PIPES_AS_CONCAT'")
		means(conn, "SELECT 'a' || ?", "ab", "b")
		dbtest.Exec(t, conn, "SET sql_mode = DEFAULT")
		means(conn, "SELECT 'a' || ?", "0", "0")

		for _, at := range []*scratch{s, tenant, s} {
			of, err := db.Prepare(stock)
			dbtest.OK(t, err)
			defer of.Close()
			tx, err := conn.BeginTx(dbtest.Limited(t), nil)
			dbtest.OK(t, err)
			dbtest.Exec(t, tx, "USE "+at.Name)
			want := map[*scratch]string{s: "10", tenant: "77"}[at]
			means(tx, stock, want, 1)
			run(tx.Stmt(of), want, 1)
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestMaxConnsPreparedInTransactions: a statement of db.Prepare runs in one transaction
// under a lock after the other, also where it was first prepared in one of them.
func TestMaxConnsPreparedInTransactions(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=4")
		less, err := db.Prepare("UPDATE p SET stock = stock - ? WHERE id = 1")
		dbtest.OK(t, err)
		defer less.Close()
		conned(t, db) // occupies what it was prepared on
		for range 3 {
			ctx := lockctx.With(dbtest.Limited(t), "p")
			tx, err := db.BeginTx(ctx, nil)
			dbtest.OK(t, err)
			st := tx.StmtContext(ctx, less)
			for range 2 {
				_, err := st.ExecContext(ctx, 1)
				dbtest.OK(t, err)
			}
			dbtest.OK(t, tx.Commit())
		}
		s.wantStock(1, 10-6)
	})
}

// TestMaxConnsRawValid: code that asks through Raw whether the connection of a sql.Conn is
// valid does not give it away.
func TestMaxConnsRawValid(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=4")
		conn := conned(t, db)
		valid := func() {
			t.Helper()
			dbtest.OK(t, conn.Raw(func(dc any) error {
				if !dc.(driver.Validator).IsValid() {
					return errors.New("it is not valid")
				}
				return nil
			}))
			other := conned(t, db) // has it now, if anybody can
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
		tx, err := conn.BeginTx(dbtest.Limited(t), nil)
		dbtest.OK(t, err)
		dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
		valid()
		dbtest.OK(t, tx.Rollback())
		s.wantStock(1, 10)
		mine()
	})
}

// TestMaxConnsPreparedKeepsNoTypesOfOthers: two statements of one text answer as on the plain
// driver, whatever the types of their arguments. The server keeps those of the first execution
// with what it has prepared.
func TestMaxConnsPreparedKeepsNoTypesOfOthers(t *testing.T) {
	values := []any{int64(-7), 1.5, "abc", []byte("12x"), nil, true, time.Date(2026, 11, 26, 1, 2, 3, 0, time.UTC), uint64(1 << 63), ""}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		answers := func(driver string, first, second any) (all []string) {
			db := dbtest.Open(t, driver, s.DSN(map[string]string{"mysqllock": "maxConns=4", "mysql": "timeout=10s"}[driver]))
			defer db.Close()
			db.SetMaxOpenConns(1)
			for _, value := range []any{first, second, first} {
				st, err := db.Prepare("SELECT ?, CONCAT(?, 'z'), ? + 1")
				dbtest.OK(t, err)
				defer st.Close()
				var row [3]sql.NullString
				if err := st.QueryRow(value, value, 1).Scan(&row[0], &row[1], &row[2]); err != nil {
					all = append(all, err.Error())
				}
				all = append(all, fmt.Sprint(row))
			}
			return all
		}
		for _, first := range values {
			for _, second := range values {
				if got, want := answers("mysqllock", first, second), answers("mysql", first, second); !slices.Equal(got, want) {
					t.Errorf("%#v, then %#v: %v, and on the plain driver %v", first, second, got, want)
				}
			}
		}
	})
}

// TestMaxConnsPreparedCostsOneCommand: a statement that is used again stays prepared where it
// has run, also for other users of its text with arguments of the same types.
func TestMaxConnsPreparedCostsOneCommand(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{MaxConns: 4})
		for range 2 {
			st, err := db.Prepare("SELECT stock FROM p WHERE id = ?")
			dbtest.OK(t, err)
			tap.Costs(t, "a query by a statement that has run", 1, func() error {
				_, err := stock.Read(dbtest.Limited(t), byStatement{st}, 1)
				return err
			})
			dbtest.OK(t, st.Close())
		}
	})
}

// byStatement runs a statement, whatever the text.
type byStatement struct{ *sql.Stmt }

func (b byStatement) QueryRowContext(ctx context.Context, _ string, args ...any) *sql.Row {
	return b.Stmt.QueryRowContext(ctx, args...)
}

// TestMaxConnsPrepareWaitsForNobody: while all connections are in use, statements can be
// prepared, and run when one is free. Callers that hold a transaction each, and prepare
// through the handle, as an ORM with a cache of statements does, all come through.
func TestMaxConnsPrepareWaitsForNobody(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=4")
		var held []*sql.Tx
		for {
			ctx, cancel := context.WithTimeout(dbtest.Limited(t), 300*time.Millisecond)
			tx, err := db.BeginTx(context.WithoutCancel(ctx), nil)
			if err == nil {
				held = append(held, tx)
			}
			cancel()
			if len(held) == 3 { // one is reserved for what the driver itself sends
				break
			}
			dbtest.OK(t, err)
		}
		st, err := db.PrepareContext(dbtest.Limited(t), "SELECT stock FROM p WHERE id = ?")
		dbtest.OK(t, err)
		defer st.Close()
		var got int
		dbtest.OK(t, held[0].StmtContext(dbtest.Limited(t), st).QueryRow(1).Scan(&got))
		for _, tx := range held {
			dbtest.OK(t, tx.Rollback())
		}
		if err := st.QueryRow(1).Scan(&got); err != nil || got != 10 {
			t.Errorf("%d, %v", got, err)
		}
		if _, err := st.Query(1, 2); err == nil {
			t.Error("an argument too many is no error")
		}
		var callers sync.WaitGroup
		for i := range 20 {
			callers.Go(func() {
				tx, err := db.BeginTx(dbtest.Limited(t), nil)
				if err != nil {
					t.Error(err)
					return
				}
				defer tx.Rollback()
				st, err := db.PrepareContext(dbtest.Limited(t), fmt.Sprintf("SELECT stock + %d FROM p WHERE id = ?", i))
				if err != nil {
					t.Error(err)
					return
				}
				defer st.Close()
				if err := tx.StmtContext(dbtest.Limited(t), st).QueryRow(1).Scan(new(int)); err != nil {
					t.Error(err)
				}
			})
		}
		callers.Wait()
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
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 2")
			return err
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
		for left, text := range leaves {
			for name, hinted := range between {
				for _, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(10 * time.Second), lockctx.Advisory(), lockctx.Optimistic()} {
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
					dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
					want := answers("lockWait=1s")
					dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
					if got := answers("lockWait=1s&maxConns=4"); !slices.Equal(got, want) {
						t.Errorf("%s, %s: %v, and without maxConns %v", left, name, got, want)
					}
				}
			}
		}
	})
}
