package advisory_test

import (
	"context"
	"crypto/rand"
	"database/sql/driver"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/pool"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// onServers runs a test on each server, in a namespace of its own.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		srv := tempserver.Share(t, bin)
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			test(t, newScratch(t, srv.Addr()))
		})
	}
}

// scratch is a namespace on a server.
type scratch struct {
	t         testing.TB
	addr      string
	namespace string
}

func newScratch(t testing.TB, addr string) *scratch {
	return &scratch{t: t, addr: addr, namespace: "t_" + rand.Text()[:8]}
}

func (s *scratch) config() *mysql.Config {
	cfg := mysql.NewConfig()
	cfg.User, cfg.Net, cfg.Addr = "root", "tcp", s.addr
	cfg.Logger = &mysql.NopLogger{}
	return cfg
}

func (s *scratch) connector(cfg *mysql.Config) driver.Connector {
	s.t.Helper()
	connector, err := mysql.NewConnector(cfg)
	ok(s.t, err)
	return connector
}

// wrapped opens connections with something around them.
func (s *scratch) wrapped(wrap func(mysqlConn) driver.Conn) func(context.Context) (driver.Conn, error) {
	s.t.Helper()
	base := s.connector(s.config())
	return func(ctx context.Context) (driver.Conn, error) {
		c, err := base.Connect(ctx)
		if err != nil {
			return nil, err
		}
		return wrap(c.(mysqlConn)), nil
	}
}

func (s *scratch) open() driver.Conn {
	s.t.Helper()
	c, err := s.connector(s.config()).Connect(s.t.Context())
	ok(s.t, err)
	s.t.Cleanup(func() { c.Close() })
	return c
}

// process is what one process has to take locks with.
type process struct {
	*advisory.Locker
	*scratch
	conns *pool.Pool
	sent  *atomic.Int64 // statements on conns
	locks advisory.Config
}

// settings is how a process differs from the others.
type settings struct {
	conns   int // most connections; 0 is 8
	ttl     time.Duration
	connect func(context.Context) (driver.Conn, error)
	change  func(*advisory.Config)
}

func (s *scratch) process(set settings) *process {
	s.t.Helper()
	if set.conns == 0 {
		set.conns = 8
	}
	if set.ttl == 0 {
		set.ttl = 30 * time.Second
	}
	p := &process{scratch: s, sent: new(atomic.Int64)}
	if set.connect == nil {
		cfg := s.config()
		cfg.ReadTimeout = set.ttl * 9 / 10
		set.connect = s.connector(cfg).Connect
	}
	counted := func(ctx context.Context) (driver.Conn, error) {
		c, err := set.connect(ctx)
		if err != nil {
			return nil, err
		}
		return &countingConn{c.(mysqlConn), p.sent}, nil
	}
	newPool := func(connect func(context.Context) (driver.Conn, error), setup string, max int) *pool.Pool {
		p, err := pool.New(pool.Config{Connect: connect, Max: max, Idle: time.Minute, Setup: setup})
		ok(s.t, err)
		s.t.Cleanup(p.Close)
		return p
	}
	info, err := server.Probe(s.t.Context(), s.open())
	ok(s.t, err)
	p.conns = newPool(counted, advisory.Setup(set.ttl), set.conns)
	p.locks = advisory.Config{
		Conns: p.conns, Control: newPool(s.connector(s.config()).Connect, "SET SESSION autocommit = 1", 4),
		Queue: new(queue.Queue), Namespace: s.namespace, Owner: "me", Info: info, TTL: set.ttl, ReadTimeout: set.ttl * 9 / 10,
		HandOvers: 10, HandOverTime: 10 * time.Millisecond,
	}
	if set.change != nil {
		set.change(&p.locks)
	}
	p.Locker = advisory.New(p.locks)
	s.t.Cleanup(p.Locker.Close)
	return p
}

// acquire takes a lock, which must be granted.
func (p *process) acquire(key string, wait time.Duration) *advisory.Lock {
	p.t.Helper()
	lock, err := p.Acquire(p.t.Context(), request(key, wait))
	if err != nil {
		p.t.Errorf("%s: %v", key, err) // it may be another goroutine than the test's, which waits for the lock
	}
	return lock
}

// inLine waits until so many callers of the process are in line for the key.
func (p *process) inLine(key string, n int) {
	p.t.Helper()
	eventually(p.t, fmt.Sprintf("%d are in line", n), func() bool { return p.locks.Queue.Waiting(key) == n })
}

func request(key string, wait time.Duration) advisory.Request {
	return advisory.Request{Key: key, Wait: wait, Waiting: func(ctx context.Context) (context.Context, func(), error) {
		return ctx, func() {}, nil
	}}
}

// mysqlConn is what the tests wrap.
type mysqlConn interface {
	driver.Conn
	driver.ExecerContext
	driver.QueryerContext
	driver.Validator
	driver.SessionResetter
}

// countingConn counts statements.
type countingConn struct {
	mysqlConn
	sent *atomic.Int64
}

func (c *countingConn) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.sent.Add(1)
	return c.mysqlConn.ExecContext(ctx, text, args)
}

func (c *countingConn) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.sent.Add(1)
	return c.mysqlConn.QueryContext(ctx, text, args)
}

func (c *countingConn) Prepare(text string) (driver.Stmt, error) {
	c.sent.Add(1)
	stmt, err := c.mysqlConn.Prepare(text)
	if err != nil {
		return nil, err
	}
	return &countingStmt{stmt.(mysqlStmt), c.sent}, nil
}

type mysqlStmt interface {
	driver.Stmt
	driver.StmtQueryContext
}

type countingStmt struct {
	mysqlStmt
	sent *atomic.Int64
}

func (s *countingStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	s.sent.Add(1)
	return s.mysqlStmt.QueryContext(ctx, args)
}

// exec and query may run on other goroutines than the test's.

func (s *scratch) exec(c driver.Conn, text string) {
	s.t.Helper()
	if err := server.Exec(context.Background(), c, text); err != nil {
		s.t.Errorf("%s: %v", text, err)
	}
}

// one is the only value of a statement's answer.
func (s *scratch) one(c driver.Conn, text string) string {
	s.t.Helper()
	rows, err := server.Query(context.Background(), c, text)
	if err != nil || len(rows) != 1 {
		s.t.Errorf("%s: %v, %v", text, rows, err)
		return ""
	}
	return rows[0][0]
}

// holder is the id of the connection that the server says has the lock; "" where
// nobody has.
func (s *scratch) holder(c driver.Conn, key string) string {
	s.t.Helper()
	return s.one(c, "SELECT IS_USED_LOCK('"+advisory.Name(s.namespace, key)+"')")
}

// free waits until nobody has the lock.
func (s *scratch) free(c driver.Conn, key string) {
	s.t.Helper()
	eventually(s.t, "the lock is free", func() bool { return s.holder(c, key) == "" })
}

// waiters are the connections that wait for a lock on key.
func (s *scratch) waiters(c driver.Conn, key string) (ids []string) {
	s.t.Helper()
	rows, err := server.Query(context.Background(), c, "SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' AND INFO LIKE '%GET_LOCK(\\'"+
		advisory.Name(s.namespace, key)+"%'")
	if err != nil {
		s.t.Error(err)
	}
	for _, row := range rows {
		ids = append(ids, row[0])
	}
	return ids
}

func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !is(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it never came to be that %s", what)
		}
	}
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// proxy passes bytes on to a server, until it is told to fall silent, or to let
// no answer through.
type proxy struct {
	listener net.Listener
	target   string
	silent   atomic.Bool
	mute     atomic.Bool
	all      sync.WaitGroup
	mu       sync.Mutex
	conns    []net.Conn
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	ok(t, err)
	p := &proxy{listener: listener, target: target}
	p.all.Go(p.accept)
	t.Cleanup(func() {
		listener.Close()
		p.mu.Lock()
		for _, c := range p.conns {
			c.Close()
		}
		p.mu.Unlock()
		p.all.Wait()
	})
	return p
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		target, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, client, target)
		p.mu.Unlock()
		p.all.Go(func() { p.pass(client, target, p.silent.Load) })
		p.all.Go(func() { p.pass(target, client, func() bool { return p.silent.Load() || p.mute.Load() }) })
	}
}

// pass drops what comes while it is to be silent, also that a side has closed.
func (p *proxy) pass(from, to net.Conn, silent func() bool) {
	buf := make([]byte, 4096)
	for {
		n, err := from.Read(buf)
		if silent() {
			if err != nil {
				return
			}
			continue
		}
		if err != nil {
			to.Close()
			return
		}
		if _, err := to.Write(buf[:n]); err != nil {
			from.Close()
			return
		}
	}
}
