//go:build unix

package clusters

import (
	"context"
	"database/sql"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
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
	ok(s.T, err)
	cfg.DialFunc = dial
	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Wait: patience})
	ok(s.T, err)
	db := sql.OpenDB(connector)
	s.Cleanup(func() { db.Close() })
	return db
}

// lose takes a lock, and loses it as the endpoint moves.
func lose(s *scratch, db *sql.DB, e *endpoint, addr string) {
	s.Helper()
	tx, err := db.BeginTx(lockctx.With(s.limited(), "p"), nil)
	ok(s.T, err)
	e.move(addr)
	want(s.T, tx.Commit(), mysqllock.ErrLost)
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
		for _, f := range forms {
			wantUnsafe(t, f.run(s.limited(), db, func() {}), "secondary of a Group Replication group")
		}
		e.move(primary)
		s.eventually("it works again", func() error { return forms[0].run(s.limited(), db, func() {}) })
		s.wantStock(0, 1, 1)
	})
}

// movedToCluster: a handle whose server was one takes locks on all nodes once it
// is a cluster's.
func movedToCluster(t *testing.T, c *cluster) {
	t.Run("moved", func(t *testing.T) {
		t.Parallel()
		s := c.scratch(t)
		bins := tempserver.Require(t)
		single, err := tempserver.Start(t.Context(), bins[len(bins)-1])
		ok(t, err)
		t.Cleanup(func() { ok(t, single.Stop()) })
		s.exec(s.opened("mysql", single.DSN("")), "CREATE DATABASE "+s.database)

		e := &endpoint{addr: single.Addr()}
		db := s.behind(e)
		lose(s, db, e, s.Nodes[0].Addr())
		tx, err := db.BeginTx(lockctx.With(s.limited(), "p"), nil)
		ok(t, err)
		_, err = s.open(1).BeginTx(lockctx.With(s.limited(), "p", lockctx.NoWait()), nil)
		want(t, err, mysqllock.ErrLocked)
		ok(t, tx.Rollback())
	})
}
