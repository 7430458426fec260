package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

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
