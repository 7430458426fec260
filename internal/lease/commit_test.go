package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

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
		l.makeProcedures()
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
		other.cfg.Procedures.Set(other.cfg.Table.CommitProcedure(), false)
		if s.MariaDB() {
			other.cfg.Info.Topology = server.Galera
		}
		a = other.acquire(request("a"))
		s.onConn(func(conn driver.Conn) {
			if committed, _, err := other.Commit(dbtest.Limited(t), pool.Adopt(conn), []*Lease{a}); committed || err != nil {
				t.Errorf("committed %v, %v", committed, err)
			}
		})
	})
}

// commits reports whether a statement checks and commits.
func commits(text string) bool {
	return strings.Contains(text, "mysqllock_held") || strings.Contains(text, "mysqllock_done3")
}

// TestKilledCommit: a KILL QUERY that comes between COMMIT and the answer makes no lost
// lease of a transaction that was committed; one that comes before it commits nothing; and
// one that comes right after COMMIT leaves open which it was.
func TestKilledCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		l.makeProcedures()
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
					if c.conn.Text != nil && !l.cfg.Info.MariaDB {
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
		l.cfg.Info.Router = true
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
		l.cfg.Info.Router = false
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

// TestFenceWaitsTooLong: a fence that gets the row when the lease has run out, by the
// server's clock, fails although it began before that. The time zone of the
// application's connection does not matter.
func TestFenceWaitsTooLong(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		multi := s.info
		multi.Topology = "several writers"
		for i, zone := range []string{"SYSTEM", "+00:00", "-11:30", "+13:00"} {
			l := s.locker(setup{info: [...]*server.Info{&s.info, &multi}[i%2]})
			lease := l.acquire(request("k"))
			tx, err := s.db.Begin()
			dbtest.OK(t, err)
			_, err = tx.Exec("UPDATE " + s.table.String() + " SET expires = UTC_TIMESTAMP(6) + INTERVAL 1 SECOND WHERE namespace = " +
				schema.Literal(s.Name) + " AND name = x'6b'")
			dbtest.OK(t, err)
			s.onConn(func(conn driver.Conn) {
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "SET time_zone = '"+zone+"'"))
				defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "SET time_zone = DEFAULT")) }()
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
				defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "ROLLBACK")) }()
				time.AfterFunc(1300*time.Millisecond, func() { _ = tx.Commit() })
				if err := l.Fence(dbtest.Limited(t), conn, []*Lease{lease}); !errors.Is(err, lockerr.ErrLost) {
					t.Errorf("%s: a fence that got the row too late: %v", zone, err)
				}
			})
			l.close()
			s.set("k", "owner = NULL")
		}
	})
}

// late answers the fence when a lease is over for its holder.
type late struct {
	driver.Conn
	lease *Lease
}

func (c *late) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
	time.Sleep(c.lease.left() + time.Millisecond)
	return rows, err
}

// TestFenceIsAnsweredTooLate: a holder whose lease runs out, by its own clock, while
// it waits for the answer does not commit.
func TestFenceIsAnsweredTooLate(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := waiting("k", 20*time.Second)
		r.TTL = time.Second
		lease := l.acquire(r)
		l.mu.Lock()
		lease.due = time.Time{} // no renewal
		l.mu.Unlock()
		s.set("k", "expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
		s.onConn(func(conn driver.Conn) {
			dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
			defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "ROLLBACK")) }()
			if err := l.Fence(dbtest.Limited(t), &late{conn, lease}, []*Lease{lease}); !errors.Is(err, lockerr.ErrLost) {
				t.Errorf("a fence that was answered too late: %v", err)
			}
		})
	})
}

// TestFenceWhereTheClockIsSet: SET timestamp on the application's connection does not
// lose a lease that is held, nor keep one that is not.
func TestFenceWhereTheClockIsSet(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		multi := s.info
		multi.Topology = "several writers"
		for _, info := range []server.Info{s.info, multi} {
			for _, at := range []string{"UNIX_TIMESTAMP() + 1800", "UNIX_TIMESTAMP() + 15000000", "UNIX_TIMESTAMP() - 1800", "UNIX_TIMESTAMP() - 15000000", "1"} {
				l := s.locker(setup{info: &info})
				lease := l.acquire(request("k"))
				s.onConn(func(conn driver.Conn) {
					fence := func() error {
						dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
						defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "ROLLBACK")) }()
						return l.Fence(dbtest.Limited(t), conn, []*Lease{lease})
					}
					dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "SET timestamp = "+at))
					defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "SET timestamp = DEFAULT")) }()
					if err := fence(); err != nil {
						t.Errorf("at %s: %v", at, err)
					}
					s.set("k", "owner = NULL")
					if err := fence(); !errors.Is(err, lockerr.ErrLost) {
						t.Errorf("at %s: what is not held any more is kept: %v", at, err)
					}
				})
				l.close()
			}
		}
	})
}

// TestClockOfTheDSN: a timestamp in the DSN moves neither the time at which leases are
// taken nor that at which they end.
func TestClockOfTheDSN(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		holder := s.locker(setup{})
		lease := holder.acquire(request("k"))
		thief := s.locker(setup{params: "timestamp=2100000000"})
		if _, err := thief.Acquire(dbtest.Limited(t), request("k")); !errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("beside a live lease: %v", err)
		}
		dbtest.OK(t, lease.Release())
		old := s.locker(setup{params: "timestamp=1000000000"})
		lease = old.acquire(request("k"))
		if r := s.row("k"); !r.live || r.left > 30*time.Second {
			t.Errorf("the row is %+v", r)
		}
		old.renew([]*Lease{lease}, time.Second)
		dbtest.OK(t, lease.Err())
		dbtest.OK(t, lease.Release())
	})
}
