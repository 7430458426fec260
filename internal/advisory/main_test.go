package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockerr"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// scratch is a namespace on a server.
type scratch struct {
	*dbtest.Database
	namespace string
}

func newScratch(d *dbtest.Database) *scratch { return &scratch{Database: d, namespace: d.Name} }

// other is another namespace, for t.
func (s *scratch) other(t testing.TB) *scratch {
	return &scratch{Database: s.For(t), namespace: "t_" + dbtest.Random()}
}

// config leads to no database.
func (s *scratch) config() *mysql.Config {
	cfg := s.Config()
	cfg.DBName = ""
	return cfg
}

func (s *scratch) open() driver.Conn { return s.Connect(dbtest.NoDatabase) }

// process is what one process has to take locks with.
type process struct {
	*advisory.Locker
	*scratch
	conns *pool.Pool
	sent  *atomic.Int64 // statements on conns
	locks strategy.Config
}

// settings is how a process differs from the others.
type settings struct {
	conns   int // most connections; 0 is 8
	ttl     time.Duration
	connect func(context.Context) (driver.Conn, error)
	seen    []sqlmw.Interceptor // see the statements on conns
	change  func(*strategy.Config)
}

func (s *scratch) process(set settings) *process {
	s.T.Helper()
	if set.conns == 0 {
		set.conns = 8
	}
	if set.ttl == 0 {
		set.ttl = 30 * time.Second
	}
	count := new(counting)
	p := &process{scratch: s, sent: &count.sent}
	if set.connect == nil {
		cfg := s.config()
		cfg.ReadTimeout = set.ttl * 9 / 10
		set.connect = dbtest.Connector(s.T, cfg).Connect
	}
	counted, err := intercept.With(append([]sqlmw.Interceptor{count}, set.seen...)...)(connector{connect: set.connect})
	dbtest.OK(s.T, err)
	newPool := func(connect func(context.Context) (driver.Conn, error), setup string, max int) *pool.Pool {
		p := pool.New(pool.Config{Connect: connect, Max: max, Idle: time.Minute, Setup: setup})
		s.T.Cleanup(p.Close)
		return p
	}
	info, err := server.Probe(s.T.Context(), s.open())
	dbtest.OK(s.T, err)
	p.conns = newPool(counted.Connect, advisory.Setup(set.ttl), set.conns)
	p.locks = strategy.Config{
		Config: keyrow.Config{
			Control: newPool(s.Connector(dbtest.NoDatabase).Connect, "SET SESSION autocommit = 1", 4), Namespace: s.namespace, Info: info,
		},
		Conns: p.conns, Queue: new(queue.Queue), Owner: "me", TTL: set.ttl, ReadTimeout: set.ttl * 9 / 10,
		HandOvers: 10, HandOverTime: 10 * time.Millisecond,
	}
	if set.change != nil {
		set.change(&p.locks)
	}
	p.Locker = advisory.New(p.locks)
	s.T.Cleanup(p.Locker.Close)
	return p
}

// acquire takes a lock, which must be granted.
func (p *process) acquire(key string, wait time.Duration) *advisory.Grant {
	p.T.Helper()
	lock, err := p.Acquire(p.T.Context(), request(key, wait))
	if err != nil {
		p.T.Errorf("%s: %v", key, err) // it may be another goroutine than the test's, which waits for the lock
	}
	return lock
}

// acquiring takes a lock in the background, which must be granted.
func (p *process) acquiring(key string, wait time.Duration) <-chan *advisory.Grant {
	got := make(chan *advisory.Grant, 1)
	go func() { got <- p.acquire(key, wait) }()
	return got
}

// asking asks for a lock in the background, and tells how that ended.
func (p *process) asking(ctx context.Context, r advisory.Request) <-chan error {
	return dbtest.Go(func() error { return dbtest.Err(p.Acquire(ctx, r)) })
}

// held fails the test unless the server says that the lock's connection has it.
func (p *process) held(c driver.Conn, lock *advisory.Grant) {
	p.T.Helper()
	if id := p.holder(c, lock.Key()); id != fmt.Sprint(lock.ConnectionID()) {
		p.T.Errorf("connection %q has %s, not %d", id, lock.Key(), lock.ConnectionID())
	}
}

// told is what asking for a lock with a short wait ends with: it is asked again where a busy
// server has not answered within the wait.
func (p *process) told(key string, wait time.Duration) error {
	p.T.Helper()
	return dbtest.Until(func() error {
		_, err := p.Acquire(p.T.Context(), request(key, wait))
		return err
	}, func(err error) bool { return !errors.Is(err, lockerr.ErrNoAnswer) })
}

// inQueue waits until so many callers of the process are in the queue for the key.
func (p *process) inQueue(key string, n int) {
	p.T.Helper()
	dbtest.Soon(p.T, fmt.Sprintf("%d are in the queue", n), func() bool { return p.locks.Queue.Waiting(key) == n })
}

func request(key string, wait time.Duration) advisory.Request {
	return advisory.Request{Key: key, Wait: wait}
}

// mysqlConn is what the tests wrap.
type mysqlConn interface {
	driver.Conn
	driver.ExecerContext
	driver.QueryerContext
	driver.Validator
	driver.SessionResetter
}

// connector opens connections by a function.
type connector struct {
	driver.Connector
	connect func(context.Context) (driver.Conn, error)
}

func (c connector) Connect(ctx context.Context) (driver.Conn, error) { return c.connect(ctx) }

// counting counts statements.
type counting struct {
	sqlmw.NullInterceptor
	sent, prepared atomic.Int64 // prepared are those that run prepared
}

func (c *counting) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	c.sent.Add(1)
	return c.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

func (c *counting) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	c.sent.Add(1)
	return c.NullInterceptor.ConnQueryContext(ctx, conn, text, args)
}

func (c *counting) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	c.sent.Add(1)
	return c.NullInterceptor.ConnPrepareContext(ctx, conn, text)
}

func (c *counting) StmtQueryContext(ctx context.Context, stmt driver.StmtQueryContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	c.sent.Add(1)
	c.prepared.Add(1)
	return c.NullInterceptor.StmtQueryContext(ctx, stmt, text, args)
}

// holder is the id of the connection that the server says has the lock; "" where
// nobody has.
func (s *scratch) holder(c driver.Conn, key string) string {
	s.T.Helper()
	return s.One(c, "SELECT IS_USED_LOCK('"+advisory.Name(s.namespace, key)+"')")
}

// free waits until nobody has the lock.
func (s *scratch) free(c driver.Conn, key string) {
	s.T.Helper()
	dbtest.Soon(s.T, "the lock is free", func() bool { return s.holder(c, key) == "" })
}

// waiters are the connections that wait for a lock on key.
func (s *scratch) waiters(c driver.Conn, key string) (ids []string) {
	s.T.Helper()
	rows, err := server.Query(context.Background(), c, "SELECT ID FROM information_schema.PROCESSLIST WHERE STATE = 'User lock' AND INFO LIKE '%GET_LOCK(\\'"+
		advisory.Name(s.namespace, key)+"%'")
	if err != nil {
		s.T.Error(err)
	}
	for _, row := range rows {
		ids = append(ids, row[0])
	}
	return ids
}
