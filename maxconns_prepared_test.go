package mysqllock_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestMaxConnsRunsPreparedStatementsOnAnyConnection that comes.
func TestMaxConnsRunsPreparedStatementsOnAnyConnection(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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

func (p preparing) Prepare(text string) (*sql.Stmt, error) {
	return p.PrepareContext(dbtest.Limited(p.t), text)
}

// TestMaxConnsPreparedMeansWhatItMeansAtThatTime on that connection, not what the same text meant before USE or SET.
func TestMaxConnsPreparedMeansWhatItMeansAtThatTime(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		tenant := newScratch(s.Beside(t))
		dbtest.Exec(t, tenant.plain, "UPDATE p SET stock = 77")
		db := s.open("maxConns=6")
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
		conn := preparing{dbtest.Conn(t, db), t}
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
			tx := dbtest.Begin(t, dbtest.Limited(t), conn)
			dbtest.Exec(t, tx, "USE "+at.Name)
			want := map[*scratch]string{s: "10", tenant: "77"}[at]
			means(tx, stock, want, 1)
			run(tx.Stmt(of), want, 1)
			dbtest.OK(t, tx.Rollback())
		}
	})
}

// TestMaxConnsPreparedRunsInOneTransactionAfterTheOther under a lock, also where it was first prepared in one of
// them.
func TestMaxConnsPreparedRunsInOneTransactionAfterTheOther(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=6")
		less, err := db.Prepare("UPDATE p SET stock = stock - ? WHERE id = 1")
		dbtest.OK(t, err)
		defer less.Close()
		dbtest.Conn(t, db) // occupies what it was prepared on
		for range 3 {
			ctx := lockctx.With(dbtest.Limited(t), "p")
			tx := dbtest.Begin(t, ctx, db)
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

// TestMaxConnsPreparedKeepsNoTypesOfOthers: two statements of one text answer as on the plain
// driver, whatever the types of their arguments. The server keeps those of the first execution
// with what it has prepared.
func TestMaxConnsPreparedKeepsNoTypesOfOthers(t *testing.T) {
	values := []any{int64(-7), 1.5, "abc", []byte("12x"), nil, true, time.Date(2026, 11, 26, 1, 2, 3, 0, time.UTC), uint64(1 << 63), ""}
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		answer := func(db *sql.DB, value any) string {
			st, err := db.Prepare("SELECT ?, CONCAT(?, 'z'), ? + 1")
			dbtest.OK(t, err)
			t.Cleanup(func() { st.Close() }) // not before others of its text have run
			var row [3]sql.NullString
			err = st.QueryRow(value, value, 1).Scan(&row[0], &row[1], &row[2])
			return fmt.Sprint(row, err)
		}
		plain := make([]string, len(values))
		for i, value := range values {
			plain[i] = answer(s.plain, value)
		}
		for i, first := range values {
			for j, second := range values {
				db := s.open("maxConns=6")
				db.SetMaxOpenConns(1)
				for k, value := range []any{first, second, first} {
					if got, want := answer(db, value), plain[[]int{i, j, i}[k]]; got != want {
						t.Errorf("%#v, then %#v, number %d: %v, and on the plain driver %v", first, second, k, got, want)
					}
				}
				dbtest.OK(t, db.Close())
			}
		}
	})
}

// TestMaxConnsPreparedCostsOneCommand: a statement that is used again stays prepared where it
// has run, also for other users of its text with arguments of the same types.
func TestMaxConnsPreparedCostsOneCommand(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, tap := s.tapped(mysqllock.Config{MaxConns: 6})
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
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("maxConns=6")
		var held []*sql.Tx
		for {
			ctx, cancel := context.WithTimeout(dbtest.Limited(t), 300*time.Millisecond)
			tx, err := db.BeginTx(context.WithoutCancel(ctx), nil)
			if err == nil {
				held = append(held, tx)
			}
			cancel()
			if len(held) == 3 { // three are kept
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
		if _, err := st.Query(1, 2); err == nil || !strings.Contains(err.Error(), "expected 1 arguments, got 2") {
			t.Errorf("with an argument too many: %v", err)
		}
		if err := st.QueryRow(1).Scan(&got); err != nil || got != 10 {
			t.Errorf("%d, %v", got, err)
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
