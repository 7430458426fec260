package lease

import (
	"database/sql/driver"
	"errors"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// commits reports whether a statement checks and commits.
func commits(text string) bool {
	return strings.Contains(text, "mysqllock_held") || strings.Contains(text, "mysqllock_done2")
}

// TestKilledCommit: a KILL QUERY that comes between COMMIT and the answer makes no lost
// lease of a transaction that was committed; one that comes before it commits nothing; and
// one that comes right after COMMIT leaves open which it was.
func TestKilledCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		l.makes = true
		_, err := s.db.Exec("CREATE TABLE written (id INT PRIMARY KEY AUTO_INCREMENT)")
		dbtest.OK(t, err)
		written := func() (n int) {
			t.Helper()
			dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM written").Scan(&n))
			return n
		}
		a := l.acquire(request("a"))
		const signal = "SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317;"
		for name, c := range map[string]struct {
			conn      dbtest.Disturbed
			committed bool
			open      bool // which it was
		}{
			"before":      {dbtest.Disturbed{Err: dbtest.Interrupted}, false, false},
			"after":       {dbtest.Disturbed{Err: dbtest.Interrupted, After: true}, true, false},
			"right after": {dbtest.Disturbed{Text: func(text string) string { return strings.Replace(text, "COMMIT;", "COMMIT; "+signal, 1) }}, true, true},
			"at the check": {dbtest.Disturbed{Text: func(text string) string {
				return strings.Replace(text, "IF @mysqllock_held", signal+" IF @mysqllock_held", 1)
			}}, false, false},
		} {
			for _, autocommit := range []string{"1", "0"} {
				t.Run(name+"/autocommit="+autocommit, func(t *testing.T) {
					if c.conn.Text != nil && !l.info.MariaDB {
						return // the text of a procedure is not ours to change
					}
					s.onConn(func(conn driver.Conn) {
						ctx := dbtest.Limited(t)
						before := written()
						dbtest.OK(t, server.Exec(ctx, conn, "SET autocommit = "+autocommit))
						for range 2 { // what the first has left misleads nobody
							dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
							if done, _, err := l.Commit(ctx, pool.Adopt(conn), []*Lease{a}); err != nil || !done {
								t.Fatalf("undisturbed: %v, %v", done, err)
							}
						}
						dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
						dbtest.OK(t, server.Exec(ctx, conn, "INSERT INTO written () VALUES ()"))
						k := c.conn
						k.Conn, k.At = conn, commits
						done, unknown, err := l.Commit(ctx, pool.Adopt(&k), []*Lease{a})
						if is := c.committed && !c.open; done != is || unknown != c.open || (err == nil) != is || err != nil && !unknown && !errors.Is(err, lockerr.ErrLost) {
							t.Errorf("committed %v, unknown %v, %v", done, unknown, err)
						}
						dbtest.OK(t, server.Exec(ctx, conn, "ROLLBACK"))
						if n := written() - before; n == 1 != c.committed {
							t.Errorf("%d are written", n)
						}
					})
				})
			}
		}
		// Behind a Router no user variable says how far it came.
		l.info.Router = true
		s.onConn(func(conn driver.Conn) {
			ctx := dbtest.Limited(t)
			dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
			if done, unknown, err := l.Commit(ctx, pool.Adopt(&dbtest.Disturbed{Conn: conn, At: commits, Err: dbtest.Interrupted, After: true}), []*Lease{a}); done || !unknown {
				t.Errorf("behind a Router: committed %v, %v", done, err)
			}
			dbtest.OK(t, server.Exec(ctx, conn, "ROLLBACK"))
			dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
			k := &dbtest.Disturbed{Conn: conn, At: commits, Err: dbtest.Interrupted, Text: func(string) string { return "DO 1" }, After: true}
			if done, unknown, err := l.Commit(ctx, pool.Adopt(k), []*Lease{a}); done || !errors.Is(err, lockerr.ErrLost) || unknown {
				t.Errorf("behind a Router, before COMMIT: committed %v, %v", done, err)
			}
			dbtest.OK(t, server.Exec(ctx, conn, "ROLLBACK"))
		})
		l.info.Router = false
		// Where the connection is gone as well, nobody knows.
		s.onConn(func(conn driver.Conn) {
			ctx := dbtest.Limited(t)
			dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
			k := &dbtest.Disturbed{Conn: conn, At: commits, Err: dbtest.Interrupted, After: true, Next: mysql.ErrInvalidConn}
			if done, unknown, err := l.Commit(ctx, pool.Adopt(k), []*Lease{a}); done || !unknown {
				t.Errorf("gone: committed %v, %v", done, err)
			}
		})
	})
}
