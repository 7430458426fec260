//go:build unix

package clusters

import (
	"context"
	"database/sql"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// endpoint is a name behind which there is another server after a failover.
type endpoint struct {
	mu    sync.Mutex
	addr  string
	conns []net.Conn
}

func (e *endpoint) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", e.addr)
	if err == nil {
		e.conns = append(e.conns, conn)
	}
	return conn, err
}

// move makes the endpoint lead elsewhere, and ends what it has led to.
func (e *endpoint) move(addr string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, conn := range e.conns {
		conn.Close()
	}
	e.addr, e.conns = addr, nil
}

// behind opens the scratch database through an endpoint.
func (s *scratch) behind(e *endpoint) *sql.DB { return s.dialed(e.dial, "") }

// balanced opens it so that each connection leads to the next node.
func (s *scratch) balanced(param string) *sql.DB {
	var next atomic.Int32
	return s.dialed(func(ctx context.Context, _, _ string) (net.Conn, error) {
		node := s.Nodes[int(next.Add(1))%len(s.Nodes)]
		return new(net.Dialer).DialContext(ctx, "tcp", node.Addr())
	}, param)
}

func (s *scratch) dialed(dial func(ctx context.Context, network, addr string) (net.Conn, error), param string) *sql.DB {
	s.Helper()
	cfg, err := mysql.ParseDSN(s.DSN(0, s.database) + "?" + param)
	dbtest.OK(s.T, err)
	cfg.DialFunc = dial
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Wait: dbtest.Patience})
	dbtest.OK(s.T, err)
	db := sql.OpenDB(connector)
	s.Cleanup(func() { db.Close() })
	return db
}

// lose takes a lock, and loses it as the endpoint moves.
func lose(s *scratch, db *sql.DB, e *endpoint, addr string) {
	s.Helper()
	tx, err := db.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p"), nil)
	dbtest.OK(s.T, err)
	e.move(addr)
	dbtest.Want(s.T, tx.Commit(), mysqllock.ErrLost)
}

// movedToSecondary: a handle notices that its server is not the primary any more,
// and that it is again.
func movedToSecondary(t *testing.T, c *cluster) {
	t.Run("moved", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		primary := s.Nodes[s.primary()].Addr()
		e := &endpoint{addr: primary}
		db := s.behind(e)
		lose(s, db, e, s.Nodes[1].Addr())
		for _, f := range stock.Forms {
			// Where the server does not tell within 3 s what it is now, it is asked for the lock, and refuses that.
			err := dbtest.Until(func() error { return f.Run(dbtest.Within(s, dbtest.Patience), db, func() {}) }, func(err error) bool {
				dbtest.Want(t, err, mysqllock.ErrUnsafe)
				return !server.Refused(err) && !errors.Is(err, server.ErrReadOnly)
			})
			wantUnsafe(t, err, "secondary of a Group Replication group")
		}
		e.move(primary)
		dbtest.Eventually(s, "it works again", func() error { return stock.Forms[0].Run(dbtest.Within(s, dbtest.Patience), db, func() {}) })
		s.wantStock(0, 1, 1)
	})
}

// movedToCluster: a handle whose server was one takes locks on all nodes once it
// is a cluster's.
func movedToCluster(t *testing.T, c *cluster) {
	t.Run("moved", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		bins := tempserver.EachFlavour(tempserver.RequireOwn(t)) // the last is of the cluster's version
		single, err := tempserver.Start(t.Context(), bins[len(bins)-1])
		dbtest.OK(t, err)
		t.Cleanup(func() { dbtest.OK(t, single.Stop()) })
		dbtest.Exec(s, dbtest.Open(s, "mysql", single.DSN("")), "CREATE DATABASE "+s.database)

		e := &endpoint{addr: single.Addr()}
		db := s.behind(e)
		lose(s, db, e, s.Nodes[0].Addr())
		tx, err := db.BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p"), nil)
		dbtest.OK(t, err)
		_, err = s.open(1).BeginTx(lockctx.With(dbtest.Within(s, dbtest.Patience), "p", lockctx.NoWait()), nil)
		dbtest.Want(t, err, mysqllock.ErrLocked)
		dbtest.OK(t, tx.Rollback())
	})
}
