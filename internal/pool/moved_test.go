package pool_test

import (
	"context"
	"database/sql"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAConnectionThatAFailoverEndsIsNotEndedElsewhere, on the server that is there now, where somebody else's has the
// same id.
func TestAConnectionThatAFailoverEndsIsNotEndedElsewhere(t *testing.T) {
	t.Parallel()
	for _, bin := range tempserver.EachFlavour(tempserver.RequireOwn(t)) {
		t.Run(bin.Name, func(t *testing.T) {
			t.Parallel()
			var servers [2]*stock.Shop
			for i := range servers {
				srv, err := tempserver.Start(dbtest.Limited(t), bin)
				dbtest.OK(t, err)
				t.Cleanup(func() { srv.Stop() })
				servers[i] = stock.NewShop(dbtest.New(t, bin, srv))
			}
			from, to := servers[0], servers[1]
			dbtest.Exec(t, to.Plain, "CREATE DATABASE "+from.Name)
			var (
				mu    sync.Mutex
				leads = from // where the handle's connections lead
				conns []net.Conn
			)
			cfg := from.Config()
			cfg.Logger = &mysql.NopLogger{}
			cfg.DialFunc = func(ctx context.Context, _, _ string) (net.Conn, error) {
				mu.Lock()
				defer mu.Unlock()
				conn, err := new(net.Dialer).DialContext(ctx, "tcp", leads.Server.Addr())
				conns = append(conns, conn)
				return conn, err
			}
			k, err := mysqllock.NewConnector(cfg, mysqllock.Config{})
			dbtest.OK(t, err)
			db := sql.OpenDB(k)
			defer db.Close()
			db.SetMaxIdleConns(0)

			id := func(q stock.Querier) (id int) {
				dbtest.OK(t, q.QueryRowContext(dbtest.Limited(t), "SELECT CONNECTION_ID()").Scan(&id))
				return id
			}
			one := func(s *stock.Shop) *sql.Conn { // of its own
				s.Plain.SetMaxIdleConns(0)
				conn, err := s.Plain.Conn(dbtest.Limited(t))
				dbtest.OK(t, err)
				t.Cleanup(func() { conn.Close() })
				return conn
			}
			begin := func() *sql.Tx {
				tx := dbtest.Begin(t, lockctx.With(dbtest.Limited(t), "k"), db)
				return tx
			}
			// Ids are given one after the other, so one of both servers is behind.
			dbtest.OK(t, begin().Rollback())
			tx, other := begin(), one(to)
			for id(tx) != id(other) {
				if id(tx) < id(other) {
					dbtest.OK(t, tx.Rollback())
					tx = begin()
				} else {
					dbtest.OK(t, other.Close())
					other = one(to)
				}
			}

			shared := id(tx)
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _ = other.ExecContext(context.Background(), "DO SLEEP(60)")
			}()
			dbtest.Soon(t, "somebody else's statement runs", func() bool {
				var n int
				dbtest.OK(t, to.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO = 'DO SLEEP(60)'").Scan(&n))
				return n == 1
			})
			mu.Lock()
			leads = to
			for _, conn := range conns {
				conn.Close()
			}
			mu.Unlock()
			stock.WantLost(t, "a commit on a connection that has ended", tx.Commit())
			dbtest.OK(t, db.Close())                                   // waits for what is done in the background
			_, _ = to.Plain.Exec(fmt.Sprintf("KILL QUERY %d", shared)) // before it has slept
			<-done
			if err := other.PingContext(dbtest.Limited(t)); err != nil {
				t.Errorf("somebody else's connection was ended: %v", err)
			}
		})
	}
}
