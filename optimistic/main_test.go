package optimistic_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lease"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/optimistic"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // connections are cut on purpose
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// onServers runs a test on each server, in a database of its own.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		srv := tempserver.Share(t, bin)
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			test(t, newScratch(t, srv))
		})
	}
}

// scratch is a database of one test, with the lock table, and with counters that
// the keys of the same names protect.
type scratch struct {
	t         *testing.T
	server    *tempserver.Server
	database  string
	table     schema.Table
	info      server.Info
	procedure bool
	own       driver.Conn // for looks at how things are
}

func newScratch(t *testing.T, srv *tempserver.Server) *scratch {
	s := &scratch{t: t, server: srv, database: tempserver.Database(t, srv.DSN("")).DBName}
	var err error
	s.table, err = schema.Parse(s.database + ".locks")
	ok(t, err)
	s.own = s.connect("")
	s.info, err = server.Probe(t.Context(), s.own)
	ok(t, err)
	s.procedure, err = s.table.Ensure(t.Context(), s.own, s.info, true)
	ok(t, err)
	s.exec(s.own, "CREATE TABLE counter (name VARCHAR(255) PRIMARY KEY, n INT NOT NULL) ENGINE=InnoDB")
	s.exec(s.own, "INSERT INTO counter VALUES ('k', 0), ('l', 0)")
	return s
}

// connect opens a connection; params are those of a DSN.
func (s *scratch) connect(params string) driver.Conn {
	s.t.Helper()
	c, err := s.connector(params, nil).Connect(s.t.Context())
	ok(s.t, err)
	s.t.Cleanup(func() { c.Close() })
	return c
}

func (s *scratch) connector(params string, tp *tap) driver.Connector {
	s.t.Helper()
	cfg, err := mysql.ParseDSN(s.server.DSN(s.database) + "?" + params)
	ok(s.t, err)
	if tp != nil {
		cfg.DialFunc = tp.dial
	}
	connector, err := mysql.NewConnector(cfg)
	ok(s.t, err)
	return connector
}

// process is what one process has to keep keys with.
type process struct {
	*optimistic.Locker
	*scratch
	leases  *lease.Locker
	locks   *rowlock.Locker
	rows    *keyrow.Rows
	control *pool.Pool
	queue   *queue.Queue
	tap     *tap // on the connections of control
}

const (
	namespace = "app"
	owner     = "host:1:test"
	ttl       = 30 * time.Second
)

// control is what its connections that nobody else has begin with.
const control = "SET SESSION autocommit = 1, innodb_lock_wait_timeout = 5, lock_wait_timeout = 2"

// process makes one. change may alter its configuration.
func (s *scratch) process(change ...func(*optimistic.Config)) *process {
	s.t.Helper()
	p := &process{scratch: s, queue: new(queue.Queue), tap: new(tap)}
	newPool := func(c driver.Connector, max int, setup string) *pool.Pool {
		made, err := pool.New(pool.Config{Connect: c.Connect, Max: max, Idle: time.Minute, Setup: setup})
		ok(s.t, err)
		s.t.Cleanup(made.Close)
		return made
	}
	p.control = newPool(s.connector("", p.tap), 4, control)
	p.rows = keyrow.New(keyrow.Config{Control: p.control, Table: s.table, Namespace: namespace, Info: s.info, Auto: true, Procedure: s.procedure})
	p.leases = lease.New(lease.Config{
		Conns: newPool(s.connector("", nil), 8, lease.Setup(ttl)), Control: p.control, Rows: p.rows, Queue: p.queue,
		Table: s.table, Namespace: namespace, Owner: owner, Info: s.info, TTL: ttl,
	})
	s.t.Cleanup(p.leases.Close)
	p.locks = rowlock.New(rowlock.Config{
		Table: s.table, Namespace: namespace, Owner: owner, TTL: ttl, Info: s.info, Control: p.control, Queue: p.queue, Rows: p.rows, Await: p.leases.Await,
	})
	s.t.Cleanup(p.locks.Close)
	cfg := optimistic.Config{
		Table: s.table, Namespace: namespace, Info: s.info, Control: p.control, Rows: p.rows, TTL: ttl, Await: p.leases.Await,
	}
	for _, change := range change {
		change(&cfg)
	}
	p.Locker = optimistic.New(cfg)
	return p
}

// remember does so with a wait of 20 s.
func (p *process) remember(conn driver.Conn, keys ...string) []*optimistic.Version {
	p.t.Helper()
	versions, err := p.Remember(limited(p.t), conn, optimistic.Request{Keys: keys, Wait: 20 * time.Second})
	if err != nil {
		p.t.Fatal(err)
	}
	return versions
}

// within remembers in at most wait.
func (p *process) within(ctx context.Context, wait time.Duration, keys ...string) error {
	_, err := p.Remember(ctx, nil, optimistic.Request{Keys: keys, Wait: wait})
	return err
}

// wantCommit and wantConflict are how a transaction on c with versions is to end.
func (p *process) wantCommit(c driver.Conn, versions ...*optimistic.Version) {
	p.t.Helper()
	if err := p.Commit(limited(p.t), c, versions); err != nil {
		p.t.Error(err)
	}
	p.exec(c, "COMMIT")
}

func (p *process) wantConflict(c driver.Conn, versions ...*optimistic.Version) {
	p.t.Helper()
	began := time.Now()
	if err := p.Commit(limited(p.t), c, versions); !errors.Is(err, lockerr.ErrConflict) {
		p.t.Errorf("no conflict: %v", err)
	}
	if d := time.Since(began); d > 8*time.Second {
		p.t.Errorf("it took %v", d)
	}
	p.exec(c, "ROLLBACK")
}

// where is the condition for a key's row.
func where(key string) string {
	return " WHERE namespace = " + schema.Literal(namespace) + " AND name = " + schema.Literal(key)
}

// set changes the row of a key by hand.
func (s *scratch) set(key, assignments string) {
	s.t.Helper()
	s.exec(s.own, "UPDATE "+s.table.String()+" SET "+assignments+where(key))
}

// row is "token versioned owner" of a key; "" where it has none.
func (s *scratch) row(key string) string {
	s.t.Helper()
	rows := s.query(s.own, "SELECT CONCAT(token, ' ', versioned, ' ', COALESCE(owner, 'nobody')) FROM "+s.table.String()+where(key))
	if len(rows) == 0 {
		return ""
	}
	return rows[0][0]
}

func (s *scratch) wantRow(key, want string) {
	s.t.Helper()
	if got := s.row(key); got != want {
		s.t.Errorf("the row of %s is %q, want %q", key, got, want)
	}
}

// lock locks the row of a key in a transaction on a connection of its own.
func (s *scratch) lock(key, how string) (c driver.Conn, versioned bool) {
	s.t.Helper()
	c = s.connect("")
	s.exec(c, "BEGIN")
	rows := s.query(c, "SELECT versioned FROM "+s.table.String()+where(key)+" "+how)
	if len(rows) != 1 {
		s.t.Fatalf("%s has no row", key)
	}
	return c, rows[0][0] == "1"
}

// counter reads one as c sees it.
func (s *scratch) counter(c driver.Conn, name string) int {
	s.t.Helper()
	rows := s.query(c, "SELECT n FROM counter WHERE name = '"+name+"'")
	if len(rows) != 1 {
		return -1
	}
	n, err := strconv.Atoi(rows[0][0])
	if err != nil {
		s.t.Error(err)
	}
	return n
}

func setCounter(name string, n int) string {
	return fmt.Sprintf("UPDATE counter SET n = %d WHERE name = '%s'", n, name)
}

// busy are the statements, of other connections on the database, that are
// running and contain text.
func (s *scratch) busy(text string) int {
	s.t.Helper()
	return len(s.query(s.own, "SELECT 1 FROM information_schema.PROCESSLIST WHERE DB = '"+s.database+
		"' AND ID <> CONNECTION_ID() AND COMMAND <> 'Sleep' AND INFO LIKE '%"+text+"%'"))
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

// tap sees every statement that a client sends.
type tap struct {
	mu  sync.Mutex
	log []string
}

func (t *tap) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &tapConn{Conn: c, tap: t}, nil
}

// since clears what was seen and returns a function that tells what is seen
// from now on.
func (t *tap) since() func() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.log = nil
	return func() []string {
		t.mu.Lock()
		defer t.mu.Unlock()
		return slices.Clone(t.log)
	}
}

type tapConn struct {
	net.Conn
	tap *tap
}

func (c *tapConn) Write(b []byte) (int, error) {
	const comQuery, comPrepare = 3, 22
	if len(b) > 4 && b[3] == 0 && (b[4] == comQuery || b[4] == comPrepare) {
		c.tap.mu.Lock()
		c.tap.log = append(c.tap.log, string(b[5:]))
		c.tap.mu.Unlock()
	}
	return c.Conn.Write(b)
}

// SyscallConn lets the driver see that an idle connection is dead.
func (c *tapConn) SyscallConn() (syscall.RawConn, error) { return c.Conn.(syscall.Conn).SyscallConn() }

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

// soon waits until cond holds.
func soon(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !cond(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30s: %s", what)
		}
	}
}

func (s *scratch) connectAs(user string) driver.Conn {
	s.t.Helper()
	cfg, err := mysql.ParseDSN(s.server.DSN(s.database))
	ok(s.t, err)
	cfg.User, cfg.Passwd = user, ""
	connector, err := mysql.NewConnector(cfg)
	ok(s.t, err)
	c, err := connector.Connect(s.t.Context())
	ok(s.t, err)
	s.t.Cleanup(func() { c.Close() })
	return c
}

// failing is a connection on which every statement fails.
type failing struct{ err error }

func (c failing) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, c.err
}
func (c failing) Prepare(string) (driver.Stmt, error) { return nil, c.err }
func (c failing) Begin() (driver.Tx, error)           { return nil, c.err }
func (c failing) Close() error                        { return nil }
