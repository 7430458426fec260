package optimistic_test

import (
	"database/sql/driver"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/optimistic"
)

// TestTableLocked: while somebody has locked the whole table, what the server ends by its
// own limit has a sentinel, and the key.
func TestTableLocked(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process()
		p.remember(nil, "known")
		version := p.remember(nil, "committed")
		c, committing := s.Connect(), s.Connect()
		s.Exec(c, "SET SESSION lock_wait_timeout = 1")
		s.Exec(committing, "BEGIN")
		other := s.Connect()
		s.Exec(other, "LOCK TABLES "+s.table.String()+" WRITE")
		for _, wait := range []time.Duration{0, 20 * time.Second} {
			for _, conn := range []driver.Conn{nil, c} {
				for _, key := range []string{"known", "new"} {
					if key == "new" && (wait > 0 || conn != nil) {
						continue // it is made on a connection of its own, whoever asks
					}
					_, err := p.Remember(dbtest.Limited(t), adopt(conn), optimistic.Request{Keys: []string{key}, Wait: wait})
					var e *lockerr.Error
					if !errors.As(err, &e) || e.Key != key || !errors.Is(err, lockerr.ErrLocked) || !errors.Is(err, lockerr.ErrTimeout) {
						t.Errorf("%s with a wait of %v, on its own connection %v: %v", key, wait, conn == nil, err)
					}
				}
			}
		}
		began := time.Now()
		done, unknown, err := p.Commit(dbtest.Limited(t), adopt(committing), version)
		if d := time.Since(began); done || unknown || !errors.Is(err, lockerr.ErrLocked) || d > 10*time.Second {
			t.Errorf("the commit, after %v: %v, %v, %v", d, done, unknown, err)
		}
		p.wantConflict(committing, version...)
		s.Exec(other, "UNLOCK TABLES")
		p.remember(nil, "known", "new")
	})
}
