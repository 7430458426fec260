package lease

import (
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
)

// TestExpiryWithMaxHold: the last renewals are for less than the TTL, and Expiry is not
// later than the server's.
func TestExpiryWithMaxHold(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		r := request("k")
		r.TTL, r.MaxHold = 30*time.Second, 30*time.Second+500*time.Millisecond
		lease := l.acquire(r)
		for range 3 {
			expiry, left := lease.Expiry(), s.row("k").left
			if late := time.Until(expiry) - left; late > 0 {
				t.Errorf("Expiry is %v later than the server's, in %v", late, left)
			}
			time.Sleep(800 * time.Millisecond)
			l.renew([]*Lease{lease}, 10*time.Second)
			dbtest.OK(t, lease.Err())
		}
		dbtest.OK(t, lease.Release())
	})
}

// TestStatementTimeLimit: a limit of the account, or of the server, on the time of
// statements is none for a wait.
func TestStatementTimeLimit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		params := "max_execution_time=100"
		if s.MariaDB() {
			params = "max_statement_time=0.1"
		}
		l := s.locker(setup{params: params})
		lease := l.acquire(request("k"))
		tx, err := s.db.Begin()
		dbtest.OK(t, err)
		lock := "SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = x'6b' FOR UPDATE"
		_, err = tx.Exec(lock)
		dbtest.OK(t, err)
		time.AfterFunc(300*time.Millisecond, func() { _ = tx.Commit() })
		dbtest.OK(t, lease.Release())

		tx, err = s.db.Begin()
		dbtest.OK(t, err)
		_, err = tx.Exec(lock)
		dbtest.OK(t, err)
		time.AfterFunc(500*time.Millisecond, func() { _ = tx.Commit() })
		lease = l.acquire(waiting("k", 20*time.Second))
		next := make(chan error, 1)
		other := s.locker(setup{params: params})
		go func() {
			lease, err := other.Acquire(dbtest.Limited(t), waiting("k", 20*time.Second))
			if err == nil {
				err = lease.Release()
			}
			next <- err
		}()
		dbtest.Soon(t, "another process waits", func() bool { return len(s.inWakeUp()) == 1 })
		time.Sleep(300 * time.Millisecond)
		dbtest.OK(t, errors.Join(lease.Release(), <-next))
	})
}
