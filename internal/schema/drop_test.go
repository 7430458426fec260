package schema_test

import (
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestDropLetsNoLeaseBeGranted: a lease is there before the table is locked, and keeps it; or it is refused until the table
// is gone.
func TestDropLetsNoLeaseBeGranted(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		root, other := s.open(), s.open()
		s.setup(root)
		s.Exec(other, "SET SESSION lock_wait_timeout = 1")
		grant := func() error {
			return server.Exec(t.Context(), other, "INSERT INTO "+s.table.String()+
				" (namespace, name, owner, expires) VALUES ('app', 'k', 'x', UTC_TIMESTAMP(6) + INTERVAL 1 HOUR)")
		}
		c := &stopBefore{s.open(), "LOCK TABLES", func() { dbtest.OK(t, grant()) }}
		if err := s.table.Drop(t.Context(), c); !errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("with a lease it says %v", err)
		}
		dbtest.OK(t, c.Close())
		s.Exec(root, "UPDATE "+s.table.String()+" SET owner = NULL")
		dropped := false
		c = &stopBefore{s.open(), "DROP TABLE", func() {
			dropped = true
			if err := grant(); !server.Locked(err) {
				t.Errorf("a lease is granted while the table is dropped: %v", err)
			}
		}}
		dbtest.OK(t, s.table.Drop(t.Context(), c))
		if err := grant(); !dropped || !server.Missing(err) {
			t.Errorf("the table is not gone: %v", err)
		}
		if err := s.table.Drop(t.Context(), c); err == nil || errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("dropping it again says %v", err)
		}
	})
}

// TestDropWaitsForNoTransaction: while one uses the table, it stays.
func TestDropWaitsForNoTransaction(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		root, c := s.open(), s.open()
		s.setup(root)
		s.Exec(root, "BEGIN")
		s.Exec(root, "SELECT 1 FROM "+s.table.String()+" FOR UPDATE")
		s.Exec(c, "SET SESSION lock_wait_timeout = 1")
		began := time.Now()
		if err := s.table.Drop(t.Context(), c); !errors.Is(err, lockerr.ErrLocked) || time.Since(began) > dbtest.Patience {
			t.Errorf("it says %v", err)
		}
		s.Exec(root, "ROLLBACK")
		dbtest.OK(t, s.table.Drop(t.Context(), c))
	})
}
