package lease

import (
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestHeirBehindRowLock: a caller to whom a lease is handed over while somebody has locked
// its row waits no longer than it wants to, and hears that its wait is over.
func TestHeirBehindRowLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		l := s.locker(setup{})
		first := l.acquire(request("k"))
		type outcome struct {
			err  error
			took time.Duration
		}
		successor := make(chan outcome, 1)
		go func() {
			began := time.Now()
			lease, err := l.Acquire(dbtest.Limited(t), waiting("k", 1500*time.Millisecond))
			took := time.Since(began)
			if err == nil {
				err = errors.Join(errors.New("it was granted"), lease.Release())
			}
			successor <- outcome{err, took}
		}()
		l.inLine("k", 1)
		tx, err := s.db.Begin()
		dbtest.OK(t, err)
		defer tx.Rollback()
		_, err = tx.Exec("SELECT 1 FROM " + s.table.String() + " WHERE namespace = " + schema.Literal(s.Name) + " AND name = x'6b' FOR UPDATE")
		dbtest.OK(t, err)
		given := make(chan error, 1)
		go func() { given <- first.Release() }()
		got := <-successor
		if !errors.Is(got.err, lockerr.ErrTimeout) || server.Number(got.err) != 0 {
			t.Errorf("the successor got %v", got.err)
		}
		if got.took > 15*time.Second { // the lease would have lasted for longer
			t.Errorf("it waited %v", got.took)
		}
		dbtest.OK(t, tx.Rollback())
		<-given
		dbtest.OK(t, l.acquire(waiting("k", 20*time.Second)).Release())
	})
}
