package lease

import (
	"database/sql/driver"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// TestCommit: what is written commits if, and only if, all leases are held; and no row
// is locked afterwards, although the client does nothing more.
func TestCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		l.makes = true
		_, err := s.db.Exec("CREATE TABLE written (id INT PRIMARY KEY)")
		dbtest.OK(t, err)
		a, b := l.acquire(request("a")), l.acquire(request("b'\""))
		written := func() (n int) {
			t.Helper()
			dbtest.OK(t, s.db.QueryRow("SELECT COUNT(*) FROM written").Scan(&n))
			return n
		}
		s.onConn(func(conn driver.Conn) {
			ctx := dbtest.Limited(t)
			insert := func(id string) {
				t.Helper()
				dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
				dbtest.OK(t, server.Exec(ctx, conn, "INSERT INTO written VALUES ("+id+")"))
			}
			for i, leases := range [][]*Lease{{a}, {b, a, b}} {
				insert(string(rune('1' + i)))
				sent := l.tap.Texts()
				committed, _, err := l.Commit(ctx, pool.Adopt(conn), leases)
				if err != nil || !committed || written() != i+1 {
					t.Errorf("committed %v, %v, %d are written; %q", committed, err, written(), sent())
				}
				if rows, err := server.Query(ctx, conn, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = "+schema.Literal(s.Name)+" FOR UPDATE NOWAIT"); err != nil || len(rows) != 2 {
					t.Errorf("of the rows %d are free: %v", len(rows), err)
				}
			}
			for _, zone := range []string{"-11:00", "+13:00", "SYSTEM"} { // and whatever the clock is set to
				dbtest.OK(t, server.Exec(ctx, conn, "SET time_zone = '"+zone+"', timestamp = 2100000000"))
				dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
				if committed, _, err := l.Commit(ctx, pool.Adopt(conn), []*Lease{a}); err != nil || !committed {
					t.Errorf("%s: %v, %v", zone, committed, err)
				}
				dbtest.OK(t, server.Exec(ctx, conn, "SET time_zone = DEFAULT, timestamp = DEFAULT"))
			}

			c := l.acquire(request("c"))
			s.steal("c")
			insert("3")
			committed, unknown, err := l.Commit(ctx, pool.Adopt(conn), []*Lease{a, c})
			var e *lockerr.Error
			if committed || !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Key != "c" || unknown {
				t.Errorf("a stolen one: committed %v, %v", committed, err)
			}
			dbtest.OK(t, server.Exec(ctx, conn, "ROLLBACK"))

			d := l.acquire(request("d"))
			s.set("d", "expires = UTC_TIMESTAMP(6)")
			insert("4")
			if committed, unknown, err = l.Commit(ctx, pool.Adopt(conn), []*Lease{d}); committed || unknown || !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("one that has run out: committed %v, %v", committed, err)
			}
			dbtest.OK(t, server.Exec(ctx, conn, "ROLLBACK"))
			if written() != 2 {
				t.Errorf("%d are written", written())
			}
		})
		dbtest.OK(t, errors.Join(a.Release(), b.Release()))

		// Without the procedure, and where only a write is a fence, it leaves that to others.
		other := s.locker(setup{})
		other.noCommit.Store(true)
		other.provided.Do(func() error { return nil })
		if s.MariaDB() {
			other.info.Topology = server.Galera
		}
		a = other.acquire(request("a"))
		s.onConn(func(conn driver.Conn) {
			if committed, _, err := other.Commit(dbtest.Limited(t), pool.Adopt(conn), []*Lease{a}); committed || err != nil {
				t.Errorf("committed %v, %v", committed, err)
			}
		})
	})
}
