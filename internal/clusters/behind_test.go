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

// behind: the connections of a handle lead to several nodes, and one of them, on which is read, has not applied the
// last commit yet. Nothing is decided on its data, wherever the version was read.
func behind(t *testing.T, c *cluster) {
	const read, write = "SELECT stock FROM p WHERE id = 1", "UPDATE p SET stock = ? WHERE id = 1"
	repeatable := &sql.TxOptions{Isolation: sql.LevelRepeatableRead} // with options the version is read on a connection of the driver's
	sell := func(db *sql.DB, opts *sql.TxOptions, between func()) error {
		tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "p", lockctx.Optimistic()), opts)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		var stock int
		if err := tx.QueryRow(read).Scan(&stock); err != nil {
			return err
		}
		between()
		if _, err := tx.Exec(write, stock+1); err != nil {
			return err
		}
		return tx.Commit()
	}
	for name, sells := range map[string]struct {
		reads bool // before it is refused
		sell  func(db *sql.DB, leads *sql.Conn, move, between func()) error
	}{
		"version on the session": {true, func(db *sql.DB, _ *sql.Conn, move, between func()) error {
			move()
			return sell(db, nil, between)
		}},
		"version on another connection": {false, func(db *sql.DB, _ *sql.Conn, move, between func()) error {
			move()
			return sell(db, repeatable, between)
		}},
		"second read": {false, func(db *sql.DB, leads *sql.Conn, move, between func()) error {
			ctx := lockctx.With(dbtest.Limited(t), "p", lockctx.Optimistic())
			var stock int
			if err := leads.QueryRowContext(ctx, read).Scan(&stock); err != nil {
				return err
			}
			move()
			if err := db.QueryRowContext(ctx, read).Scan(&stock); err != nil {
				return err
			}
			between()
			_, err := db.ExecContext(ctx, write, stock+1)
			return err
		}},
	} {
		t.Run("optimistic/behind/"+name, func(t *testing.T) {
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

			first := s.open(0)
			dbtest.OK(t, sell(first, nil, func() {}))
			s.wantStock(1, 1, 1)
			// The connection that reads versions is there, on the first node. So are a session and a connection of
			// database/sql, which stay in use: the next ones lead to the second node.
			busy, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "busy", lockctx.Optimistic()), repeatable)
			dbtest.OK(t, err)
			defer busy.Rollback()
			leads, err := db.Conn(t.Context())
			dbtest.OK(t, err)
			defer leads.Close()

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
			dbtest.OK(t, sell(first, nil, func() {}))
			read := false
			err = sells.sell(db, leads, func() { moved.Store(true) }, func() {
				read = true
				release()
				s.wantStock(1, 1, 2)
			})
			dbtest.Is(t, "decided on what another node had changed", err, mysqllock.ErrConflict)
			dbtest.Equal(t, "the data were read before: %v", read, sells.reads)
			release()
			s.wantStock(0, 1, 2)
			s.wantStock(1, 1, 2)
			dbtest.OK(t, sells.sell(db, leads, func() {}, func() {}))
			s.wantStock(0, 1, 3)
		})
	}
}
