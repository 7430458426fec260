package rowlock_test

import (
	"context"
	"database/sql/driver"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// onServers runs a test on each server, in a database of its own.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		srv := tempserver.Share(t, bin)
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			s := &scratch{t: t, server: srv, database: tempserver.Database(t, srv.DSN("")).DBName}
			var err error
			s.table, err = schema.Parse(s.database + ".locks")
			ok(t, err)
			test(t, s)
		})
	}
}

// scratch is a database of one test.
type scratch struct {
	t        *testing.T
	server   *tempserver.Server
	database string
	table    schema.Table
}

func (s *scratch) connector() driver.Connector {
	s.t.Helper()
	cfg, err := mysql.ParseDSN(s.server.DSN(s.database))
	ok(s.t, err)
	connector, err := mysql.NewConnector(cfg)
	ok(s.t, err)
	return connector
}

func (s *scratch) open() driver.Conn {
	s.t.Helper()
	c, err := s.connector().Connect(s.t.Context())
	ok(s.t, err)
	s.t.Cleanup(func() { c.Close() })
	return c
}

// process is what one process has to take locks with.
type process struct {
	*rowlock.Locker
	*scratch
	conns *pool.Pool
	rows  *keyrow.Rows
	queue *queue.Queue
	bells *bells
}

// process makes one; change may alter its configuration.
func (s *scratch) process(change func(*rowlock.Config)) *process {
	s.t.Helper()
	newPool := func(max int) *pool.Pool {
		p, err := pool.New(pool.Config{Connect: s.connector().Connect, Max: max, Idle: time.Minute, Setup: "SET SESSION autocommit = 1"})
		ok(s.t, err)
		s.t.Cleanup(p.Close)
		return p
	}
	control := newPool(4)
	c := s.open()
	info, err := server.Probe(s.t.Context(), c)
	ok(s.t, err)
	procedure, err := s.table.Ensure(s.t.Context(), c, info, true)
	ok(s.t, err)
	p := &process{scratch: s, conns: newPool(70), queue: new(queue.Queue), bells: &bells{ring: make(chan struct{})}}
	p.rows = keyrow.New(keyrow.Config{Control: control, Table: s.table, Namespace: "app", Info: info, Auto: true, Procedure: procedure})
	cfg := rowlock.Config{
		Table: s.table, Namespace: "app", Owner: "me", TTL: 30 * time.Second, Info: info,
		Control: control, Queue: p.queue, Rows: p.rows, Await: p.bells.await,
	}
	if change != nil {
		change(&cfg)
	}
	p.Locker = rowlock.New(cfg)
	s.t.Cleanup(p.Locker.Close)
	return p
}

// bells is how the tests wake those who wait for a lease.
type bells struct {
	ring  chan struct{} // a token wakes one
	calls atomic.Int32
	cut   atomic.Int32 // calls whose context ended
	turns atomic.Int32 // given and not given back
}

func (b *bells) await(ctx context.Context, key string, atMost time.Duration) (func(), error) {
	b.calls.Add(1)
	select {
	case <-b.ring:
	case <-time.After(atMost):
	case <-ctx.Done():
		b.cut.Add(1)
		return nil, ctx.Err()
	}
	b.turns.Add(1)
	return func() { b.turns.Add(-1) }, nil
}

// exec and query may run on other goroutines than the test's.

func (s *scratch) exec(c driver.Conn, text string) {
	s.t.Helper()
	if err := server.Exec(context.Background(), c, text); err != nil {
		s.t.Errorf("%s: %v", text, err)
	}
}

func (s *scratch) query(c driver.Conn, text string) [][]string {
	s.t.Helper()
	rows, err := server.Query(context.Background(), c, text)
	if err != nil {
		s.t.Errorf("%s: %v", text, err)
	}
	return rows
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// limited is a context that ends when a test hangs.
func limited(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}
