package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// TestACommitNeedsAllItsLeases: what is written commits if, and only if, all leases are held; and
// no row is locked afterwards, although the client does nothing more.
func TestACommitNeedsAllItsLeases(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		l.makeProcedures()
		dbtest.Exec(t, s.db, "CREATE TABLE written (id INT PRIMARY KEY)")
		a, b := l.acquire(request("a")), l.acquire(request("b'\""))
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
				if err != nil || !committed || s.written() != i+1 {
					t.Errorf("committed %v, %v, %d are written; %q", committed, err, s.written(), sent())
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
			dbtest.Equal(t, "%d are written", s.written(), 2)
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

// interrupted is a KILL QUERY within the block that checks and commits, before or after a part of
// it. The text of a procedure is not ours to change.
func interrupted(part string, after bool) dbtest.Disturbed {
	const signal = " SIGNAL SQLSTATE '70100' SET MYSQL_ERRNO = 1317; "
	with := signal + part
	if after {
		with = part + signal
	}
	return dbtest.Disturbed{Text: func(text string) string { return strings.Replace(text, part, with, 1) }}
}

// TestDisturbedCommit: a KILL QUERY that comes between COMMIT and the answer makes no lost
// lease of a transaction that was committed; one that comes before it commits nothing; and
// without an answer nobody says which it was.
func TestDisturbedCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		l.makeProcedures()
		dbtest.Exec(t, s.db, "CREATE TABLE written (id INT PRIMARY KEY AUTO_INCREMENT)")
		a := l.acquire(request("a"))
		cases := dbtest.DisturbedCommits()
		if s.MariaDB() {
			cases["killed right after COMMIT"] = dbtest.DisturbedCommit{Disturbed: interrupted("COMMIT;", true), Committed: true, Unknown: true}
			cases["killed at the check"] = dbtest.DisturbedCommit{Disturbed: interrupted("IF @mysqllock_held", false)}
		}
		for name, c := range cases {
			for _, autocommit := range []string{"1", "0"} {
				s.onConn(func(conn driver.Conn) {
					ctx, what := dbtest.Limited(t), name+", autocommit = "+autocommit
					before := s.written()
					s.Exec(conn, "SET autocommit = "+autocommit)
					for range 2 { // what the first has left misleads nobody
						s.Exec(conn, "START TRANSACTION")
						if done, _, err := l.Commit(ctx, pool.Adopt(conn), []*Lease{a}); err != nil || !done {
							t.Fatalf("undisturbed: %v, %v", done, err)
						}
					}
					s.Exec(conn, "START TRANSACTION")
					s.Exec(conn, "INSERT INTO written () VALUES ()")
					k := c.Disturbed
					k.Conn, k.At = conn, commits
					done, unknown, err := l.Commit(ctx, pool.Adopt(&k), []*Lease{a})
					if done != c.Done || unknown != c.Unknown || (err == nil) != c.Done || errors.Is(err, driver.ErrBadConn) {
						t.Errorf("%s: done %v, unknown %v, %v", what, done, unknown, err)
					}
					if killed := strings.HasPrefix(name, "killed"); err != nil && !unknown && errors.Is(err, lockerr.ErrLost) != killed {
						t.Errorf("%s: %v", what, err)
					}
					s.Exec(conn, "ROLLBACK")
					if n := s.written() - before; n == 1 != c.Committed {
						t.Errorf("%s: %d are written", what, n)
					}
				})
			}
		}
		// Behind a Router no user variable says how far it came.
		l.cfg.Info.Router = true
		s.onConn(func(conn driver.Conn) {
			s.Exec(conn, "START TRANSACTION")
			k := &dbtest.Disturbed{Conn: conn, At: commits, Err: dbtest.Interrupted, After: true}
			if done, unknown, err := l.Commit(dbtest.Limited(t), pool.Adopt(k), []*Lease{a}); done || !unknown {
				t.Errorf("behind a Router: committed %v, %v", done, err)
			}
			s.Exec(conn, "ROLLBACK")
			s.Exec(conn, "START TRANSACTION")
			k.Text = func(string) string { return "DO 1" }
			if done, unknown, err := l.Commit(dbtest.Limited(t), pool.Adopt(k), []*Lease{a}); done || !errors.Is(err, lockerr.ErrLost) || unknown {
				t.Errorf("behind a Router, before COMMIT: committed %v, %v", done, err)
			}
			s.Exec(conn, "ROLLBACK")
		})
	})
}

// written is how many rows are committed.
func (s *scratch) written() int {
	return dbtest.Column[int](s.T, s.db, "SELECT COUNT(*) FROM written")[0]
}

// TestFenceWaitsTooLong: a fence that gets the row when the lease has run out, by the
// server's clock, fails although it began before that. The time zone of the
// application's connection does not matter.
func TestFenceWaitsTooLong(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		multi := s.info
		multi.Topology = "several writers"
		var all dbtest.Together
		defer all.Wait()
		for i, zone := range []string{"SYSTEM", "+00:00", "-11:30", "+13:00"} {
			all.Run(t, zone, func(t *testing.T) {
				l := s.locker(setup{info: [...]*server.Info{&s.info, &multi}[i%2]})
				lease := l.acquire(request(zone))
				tx := s.lockRow(zone)
				dbtest.Exec(t, tx, "UPDATE "+s.table.String()+" SET expires = UTC_TIMESTAMP(6) + INTERVAL 1 SECOND WHERE namespace = ? AND name = ?", s.Name, zone)
				s.onConn(func(conn driver.Conn) {
					ctx := dbtest.Limited(t)
					dbtest.OK(t, server.Exec(ctx, conn, "SET time_zone = '"+zone+"'"))
					defer func() { dbtest.OK(t, server.Exec(ctx, conn, "SET time_zone = DEFAULT")) }()
					dbtest.OK(t, server.Exec(ctx, conn, "START TRANSACTION"))
					defer func() { dbtest.OK(t, server.Exec(ctx, conn, "ROLLBACK")) }()
					time.AfterFunc(1300*time.Millisecond, func() { _ = tx.Commit() })
					dbtest.Is(t, "a fence that got the row too late", l.Fence(ctx, conn, []*Lease{lease}), lockerr.ErrLost)
				})
			})
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
			dbtest.Is(t, "a fence that was answered too late", l.Fence(dbtest.Limited(t), &late{conn, lease}, []*Lease{lease}), lockerr.ErrLost)
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
					dbtest.Is(t, fmt.Sprintf("at %s: what is not held any more is kept", at), fence(), lockerr.ErrLost)
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
		dbtest.Is(t, "beside a live lease", dbtest.Err(thief.Acquire(dbtest.Limited(t), request("k"))), lockerr.ErrLocked)
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

func TestAFenceKeepsTheLeaseUntilItsCommit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if s.info.SnapshotIsolation != s.MariaDB() {
			t.Errorf("the probe tells %+v", s.info)
		}
		multi := s.info
		multi.Topology = "several writers"
		for _, info := range []server.Info{s.info, multi} {
			l := s.locker(setup{info: &info})
			keyA, keyB, keyC := "a"+info.Topology, "b"+info.Topology, "c"+info.Topology
			a, b := l.acquire(request(keyA)), l.acquire(request(keyB))
			s.onConn(func(conn driver.Conn) {
				ctx := dbtest.Limited(t)
				sql := func(text string) {
					t.Helper()
					dbtest.OK(t, server.Exec(ctx, conn, text))
				}
				if info.SnapshotIsolation {
					sql("SET SESSION innodb_snapshot_isolation = ON")
					defer sql("SET SESSION innodb_snapshot_isolation = DEFAULT")
				}
				sql("START TRANSACTION WITH CONSISTENT SNAPSHOT")
				l.renew([]*Lease{a, b}, time.Second) // the rows change after the snapshot
				dbtest.OK(t, l.Fence(ctx, conn, []*Lease{b, a, b}))
				dbtest.OK(t, l.Fence(ctx, conn, nil))
				// Nobody else gets it, even if it runs out.
				dbtest.Exec(t, s.db, "SET SESSION innodb_lock_wait_timeout = 1")
				dbtest.Is(t, "while a fence stands", dbtest.Err(s.locker(setup{}).Acquire(ctx, request(keyA))), lockerr.ErrLocked)
				// It does not hold up renewals, which come through soon after it.
				soonest := time.Minute
				for try := 0; try < 5 && soonest > 4*time.Second; try++ {
					begin := time.Now()
					l.renew([]*Lease{a, b}, 20*time.Second)
					soonest = min(soonest, time.Since(begin))
				}
				if soonest > 4*time.Second { // nor wait for the row, for 5 s
					t.Errorf("a renewal took %v", soonest)
				}
				dbtest.OK(t, errors.Join(a.Err(), b.Err()))
				sql("COMMIT")
			})

			// A release waits for a fence.
			s.onConn(func(conn driver.Conn) {
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
				dbtest.OK(t, l.Fence(dbtest.Limited(t), conn, []*Lease{b}))
				released, begin := make(chan error, 3), time.Now()
				go func() { released <- b.Release() }()
				time.Sleep(1300 * time.Millisecond)
				if !s.row(keyB).live {
					t.Error("released although a fence stands")
				}
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "COMMIT"))
				if err := <-released; err != nil && time.Since(begin) < handoffWait { // it waits no longer, and goes on in the background
					t.Error(err)
				}
				dbtest.Soon(t, "it is released", func() bool { return !s.row(keyB).live })
			})
			dbtest.Is(t, "a fence after the release", l.Fence(dbtest.Limited(t), nil, []*Lease{b}), lockerr.ErrClosed)

			c := l.acquire(request(keyC))
			s.steal(c.key)
			s.onConn(func(conn driver.Conn) {
				dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "START TRANSACTION"))
				defer func() { dbtest.OK(t, server.Exec(dbtest.Limited(t), conn, "ROLLBACK")) }()
				err := l.Fence(dbtest.Limited(t), conn, []*Lease{a, c})
				var e *lockerr.Error
				if !errors.Is(err, lockerr.ErrLost) || !errors.As(err, &e) || e.Op != "commit" || e.Key != c.key {
					t.Errorf("the fence of a lost lease: %v", err)
				}
			})
			dbtest.Is(t, "after its fence failed", c.Err(), lockerr.ErrLost)
			dbtest.OK(t, a.Err())
		}
	})
}
