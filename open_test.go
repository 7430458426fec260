package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// openOnly is a driver around this one that knows no more than Open.
type openOnly struct{ d driver.Driver }

func (o openOnly) Open(dsn string) (driver.Conn, error) { return o.d.Open(dsn) }

func init() { sql.Register("mysqllock-open-only", openOnly{&mysqllock.Driver{}}) }

// TestOpenOnly: the connections of one DSN know of each other's locks, and nothing is
// left on the server once they are closed.
func TestOpenOnly(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, err := sql.Open("mysqllock-open-only", s.Config().FormatDSN())
		dbtest.OK(t, err)
		defer db.Close()
		for _, option := range []lockctx.Option{lockctx.Row(), lockctx.Lease(30 * time.Second)} {
			ctx, cancel := context.WithCancel(dbtest.Limited(t))
			ctx = lockctx.With(ctx, "k", option, lockctx.Wait(5*time.Second))
			n, err := read(ctx, db, 1)
			dbtest.OK(t, err)
			idle, err := db.Conn(dbtest.Limited(t)) // the one that has read
			dbtest.OK(t, err)
			if _, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1); err != nil {
				t.Errorf("on another connection: %v", err)
			}
			dbtest.OK(t, idle.Close())
			cancel()
			s.soonFree("k")
		}

		// A lock is kept while database/sql has no connection.
		db.SetMaxIdleConns(-1)
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		ctx = lockctx.With(ctx, "k")
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		dbtest.Soon(t, "database/sql has none", func() bool { return db.Stats().OpenConnections == 0 })
		time.Sleep(1500 * time.Millisecond) // longer than a connector without connections and locks stays
		s.wantLocked("k", true)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		dbtest.OK(t, err)
		cancel()
		dbtest.OK(t, db.Close())
		dbtest.Soon(t, "nothing is left on the server", func() bool {
			var left int
			dbtest.OK(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ?", s.Config().DBName).Scan(&left))
			return left <= s.plain.Stats().OpenConnections
		})
	})
}
