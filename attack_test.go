package mysqllock_test

import (
	"database/sql"
	"database/sql/driver"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
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
