//go:build unix

package clusters

import (
	"context"
	"database/sql"
	"net"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// behind: of a handle whose connections lead to several nodes, one tells the version, and
// another, which has not applied the last commit yet, shows the data. Nothing is decided
// on that.
func behind(t *testing.T, c *cluster) {
	t.Run("optimistic/behind", func(t *testing.T) {
		// It holds up a node, so it does not run beside others.
		s := c.scratch(t)
		cfg, err := mysql.ParseDSN(s.DSN(0, s.database))
		dbtest.OK(t, err)
		other, err := mysql.ParseDSN(s.DSN(1, s.database))
		dbtest.OK(t, err)
		var moved atomic.Bool
		cfg.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			if moved.Load() {
				addr = other.Addr
			}
			return new(net.Dialer).DialContext(ctx, network, addr)
		}
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
		dbtest.OK(t, err)
		db := sql.OpenDB(connector)
		defer db.Close()

		sell := func(ctx context.Context, db *sql.DB, between func()) error {
			return mysqllock.Do(ctx, db, "p", func(ctx context.Context) error {
				var stock int
				if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock); err != nil {
					return err
				}
				between()
				_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", stock+1)
				return err
			}, lockctx.Optimistic())
		}
		first := s.open(0)
		dbtest.OK(t, sell(dbtest.Limited(t), first, func() {}))
		s.wantStock(1, 1, 1)
		// The connection that reads versions is there, on the first node; the next one
		// leads to the second.
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "p", lockctx.Optimistic()), nil)
		dbtest.OK(t, err)
		dbtest.OK(t, tx.Rollback())

		held, err := s.plain[1].Conn(t.Context())
		dbtest.OK(t, err)
		defer held.Close()
		_, err = held.ExecContext(t.Context(), "FLUSH TABLES WITH READ LOCK") // it applies nothing meanwhile
		dbtest.OK(t, err)
		released := false
		release := func() {
			if !released {
				released = true
				_, err := held.ExecContext(t.Context(), "UNLOCK TABLES")
				dbtest.OK(t, err)
			}
		}
		defer release()
		dbtest.OK(t, sell(dbtest.Limited(t), first, func() {}))
		moved.Store(true)
		err = sell(dbtest.Limited(t), db, func() {
			release()
			s.wantStock(1, 1, 2)
		})
		dbtest.Is(t, "decided on what another node had changed", err, mysqllock.ErrConflict)
		release()
		s.wantStock(0, 1, 2)
		s.wantStock(1, 1, 2)
		dbtest.OK(t, sell(dbtest.Limited(t), db, func() {}))
		s.wantStock(0, 1, 3)
	})
}
