//go:build unix

package proxies

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestNoUpdateIsLostAsThePrimaryChangesBehindAProxy of a group with a single primary.
func TestNoUpdateIsLostAsThePrimaryChangesBehindAProxy(t *testing.T) {
	t.Parallel()
	tempserver.RequireProxies(t)
	tempserver.RequireCluster(t, tempserver.GroupSinglePrimary)
	c, err := tempserver.StartCluster(t.Context(), tempserver.GroupSinglePrimary)
	dbtest.OK(t, err)
	t.Cleanup(func() { dbtest.OK(t, c.Stop()) })

	split, err := tempserver.StartRouter(t.Context(), tempserver.Split, c.Nodes...)
	dbtest.OK(t, err)
	t.Run("split", func(t *testing.T) {
		t.Cleanup(func() { dbtest.OK(t, split.Stop()) })
		for _, strategy := range strategies {
			t.Run(strategy.name, func(t *testing.T) {
				s := newScratch(t, split, c.Nodes[0])
				s.everywhere(c)
				for _, params := range []string{"", "lockUnsafe=allow"} {
					db := s.open(params)
					for _, f := range stock.Forms {
						err := f.Run(dbtest.Within(s, dbtest.Patience), db, func() {}, strategy.opt)
						dbtest.Want(t, err, mysqllock.ErrUnsafe)
						dbtest.Says(t, err, "access_mode=auto", "port for reads and writes")
					}
				}
				s.wantStock(1, 0)
			})
		}
	})

	// The primary changes behind each. In the end it dies.
	router, err := tempserver.StartRouter(t.Context(), tempserver.Primary, c.Nodes...)
	dbtest.OK(t, err)
	ends, err := tempserver.StartHAProxy(t.Context(), true, c.Nodes...)
	dbtest.OK(t, err)
	proxies := []struct {
		name string
		*tempserver.Proxy
	}{{"Router", router}, {"HAProxy", ends}}
	for _, p := range proxies {
		t.Cleanup(func() { dbtest.OK(t, p.Stop()) })
	}
	failover := func(name string, do func() (primary *tempserver.Server)) {
		t.Run(name, func(t *testing.T) {
			var over []func(primary *tempserver.Server)
			for _, p := range proxies {
				s := newScratch(t, p.Proxy, primary(t, c))
				over = append(over, s.failover(p.name))
			}
			next := do()
			for _, check := range over {
				check(next)
			}
		})
	}
	failover("switch", func() *tempserver.Server {
		direct := dbtest.Open(t, "mysql", primary(t, c).DSN(""))
		var uuid, answer string
		dbtest.OK(t, dbtest.Open(t, "mysql", c.DSN(1, "")).QueryRow("SELECT @@server_uuid").Scan(&uuid))
		dbtest.OK(t, direct.QueryRow("SELECT group_replication_set_as_primary('"+uuid+"', 1)").Scan(&answer))
		return primary(t, c)
	})
	failover("kill", func() *tempserver.Server {
		dbtest.OK(t, primary(t, c).Kill())
		return primary(t, c)
	})
}

// everywhere waits until all nodes have the database.
func (s *scratch) everywhere(c *tempserver.Cluster) {
	s.Helper()
	for i := range c.Nodes {
		node := dbtest.Open(s, "mysql", c.DSN(i, s.database))
		dbtest.Eventually(s, "a node has the database", func() error {
			var n int
			return node.QueryRow("SELECT COUNT(*) FROM p HAVING COUNT(*) = 2").Scan(&n)
		})
	}
}

// primary waits until a node of the group takes writes.
func primary(t *testing.T, c *tempserver.Cluster) *tempserver.Server {
	t.Helper()
	for began := time.Now(); time.Since(began) < dbtest.Patience; time.Sleep(50 * time.Millisecond) {
		for i, node := range c.Nodes {
			var readOnly bool
			var state string
			err := dbtest.Open(t, "mysql", c.DSN(i, "")).QueryRow("SELECT @@super_read_only, (SELECT MEMBER_STATE FROM"+
				" performance_schema.replication_group_members WHERE MEMBER_ID = @@server_uuid)").Scan(&readOnly, &state)
			if err == nil && !readOnly && state == "ONLINE" {
				return node
			}
		}
	}
	t.Fatalf("there is no primary within %v", dbtest.Patience)
	return nil
}

// failover begins units of work of all strategies that a group allows, and callers that
// raise a stock. What it returns is for after the primary has changed.
func (s *scratch) failover(name string) (check func(*tempserver.Server)) {
	db := s.open("lockWait=1m", "lockTTL=5s")

	// Those who are inside as the primary changes.
	type unit struct {
		name string
		ctx  context.Context
		tx   *sql.Tx
	}
	var units []unit
	for i, strategy := range strategies {
		if strategy.name == "advisory" { // refused on any group
			continue
		}
		ctx := lockctx.With(dbtest.Within(s, dbtest.Patience), strategy.name, strategy.opt)
		tx, err := db.BeginTx(ctx, nil)
		dbtest.OK(s.T, err)
		_, err = tx.ExecContext(ctx, "INSERT INTO p VALUES (?, 1)", 10+i)
		dbtest.OK(s.T, err)
		units = append(units, unit{strategy.name, ctx, tx})
	}

	// Those who come and go.
	var done atomic.Int64
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for range 2 {
		db := s.open("lockWait=10s", "lockTTL=5s")
		for i := range 2 {
			wg.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					opt := []lockctx.Option{lockctx.Row(), lockctx.Lease(5 * time.Second)}[i]
					var r stock.Room
					if stock.Forms[0].Run(dbtest.Within(s, dbtest.Patience), db, r.Think, opt) == nil {
						done.Add(1)
					} else {
						time.Sleep(10 * time.Millisecond)
					}
				}
			})
		}
	}
	dbtest.Eventually(s, "they work", func() error {
		if done.Load() < 5 {
			return errors.New("not yet")
		}
		return nil
	})

	return func(primary *tempserver.Server) {
		s.Helper()
		s.direct = dbtest.Open(s, "mysql", primary.DSN(s.database))
		for _, u := range units {
			// Until the proxy has ended its connection, the former primary answers that it takes no writes.
			_, err := u.tx.ExecContext(u.ctx, "UPDATE p SET stock = 2 WHERE id = 2")
			if err != nil && !server.Refused(err) && !errors.Is(err, mysqllock.ErrLost) {
				s.Errorf("%s: %s: error %v, want %v", name, u.name, err, mysqllock.ErrLost)
			}
			if err = u.tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
				s.Errorf("%s: %s: error %v of COMMIT on the former primary, want %v", name, u.name, err, mysqllock.ErrLost)
			}
		}
		was := done.Load()
		dbtest.Eventually(s, "they work again", func() error {
			if done.Load() < was+5 {
				return fmt.Errorf("%d times", done.Load()-was)
			}
			return nil
		})
		close(stop)
		wg.Wait()
		s.wantStock(2, 0)
		if got := int64(s.stock(1)); got < done.Load() {
			s.Errorf("%s: stock %d, want at least %d", name, got, done.Load())
		}
		for i := range strategies {
			var n int
			dbtest.OK(s.T, s.direct.QueryRow("SELECT COUNT(*) FROM p WHERE id = ?", 10+i).Scan(&n))
			if n != 0 {
				s.Errorf("%s: %s: something of it is committed", name, strategies[i].name)
			}
		}
	}
}
