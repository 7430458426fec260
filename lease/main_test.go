package lease

import (
	"context"
	"crypto/rand"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"strings"
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
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // connections are killed all the time
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

type testServer struct {
	name    string
	mariadb bool
	temp    *tempserver.Server
}

// onServers runs a test on each server, beside the other tests.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		s := newTestServer(bin, tempserver.Share(t, bin))
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			test(t, s.scratch(t))
		})
	}
}

func newTestServer(bin tempserver.Binary, temp *tempserver.Server) *testServer {
	return &testServer{name: string(bin.Flavour), mariadb: bin.Flavour == tempserver.MariaDB, temp: temp}
}

// scratch is a database of one test, with the lock table.
type scratch struct {
	*testServer
	t        *testing.T
	database string
	table    schema.Table
	db       *sql.DB // what the server says for itself
	info     server.Info
}

func (s *testServer) scratch(t *testing.T) *scratch {
	t.Helper()
	x := &scratch{testServer: s, t: t, database: tempserver.Database(t, s.temp.DSN("")).DBName}
	var err error
	x.db, err = sql.Open("mysql", s.temp.DSN(x.database))
	ok(t, err)
	t.Cleanup(func() { x.db.Close() })
	x.table, err = schema.Parse(x.database + ".mysqllock")
	ok(t, err)
	x.onConn(func(conn driver.Conn) {
		x.info, err = server.Probe(context.Background(), conn)
		ok(t, err)
		_, err = x.table.Ensure(context.Background(), conn, x.info, true)
		ok(t, err)
	})
	return x
}

// onConn runs f with a connection of the driver below.
func (s *scratch) onConn(f func(driver.Conn)) {
	s.t.Helper()
	conn, err := s.db.Conn(context.Background())
	ok(s.t, err)
	defer conn.Close()
	ok(s.t, conn.Raw(func(c any) error {
		f(c.(driver.Conn))
		return nil
	}))
}

// locker is a Locker with pools of its own, like one of another process.
type locker struct {
	*Locker
	s       *scratch
	conns   *pool.Pool
	control *pool.Pool
	tap     *tap
}

const handOvers = 5

type setup struct {
	ttl    time.Duration // 0 is 30 s
	max    int           // connections; 0 is 16
	params string        // of the DSN
	user   string        // "" is root
	table  *schema.Table
	info   *server.Info
}

func (s *scratch) locker(with setup) *locker {
	s.t.Helper()
	if with.ttl == 0 {
		with.ttl = 30 * time.Second
	}
	if with.max == 0 {
		with.max = 16
	}
	if with.table == nil {
		with.table = &s.table
	}
	if with.info == nil {
		with.info = &s.info
	}
	cfg, err := mysql.ParseDSN(s.temp.DSN(s.database) + "?" + with.params)
	ok(s.t, err)
	if with.user != "" {
		cfg.User = with.user
	}
	l := &locker{s: s, tap: &tap{}}
	cfg.DialFunc = l.tap.dial
	connector, err := mysql.NewConnector(cfg)
	ok(s.t, err)
	l.conns, err = pool.New(pool.Config{Connect: connector.Connect, Max: with.max, Idle: with.ttl / 2, Setup: Setup(with.ttl)})
	ok(s.t, err)
	l.control, err = pool.New(pool.Config{
		Connect: connector.Connect, Max: 4, Idle: with.ttl,
		Setup: "SET SESSION autocommit = 1, innodb_lock_wait_timeout = 5, lock_wait_timeout = 5",
	})
	ok(s.t, err)
	l.Locker = New(Config{
		Conns: l.conns, Control: l.control, Queue: new(queue.Queue), Table: *with.table, Namespace: s.database,
		Rows: keyrow.New(keyrow.Config{
			Control: l.control, Table: *with.table, Namespace: s.database, Info: s.info, Auto: true,
		}),
		Owner: "host:1:test", Info: *with.info, TTL: with.ttl, HandOvers: handOvers, HandOverTime: time.Minute,
	})
	s.t.Cleanup(l.close)
	return l
}

// refused is what asking for a lease ends with that somebody has, and who that is:
// it is asked again where a busy server did not say in time.
func (l *locker) refused(r Request) (err error) {
	l.s.t.Helper()
	for range 20 {
		_, err = l.Acquire(limited(l.s.t), r)
		var e *lockerr.Error
		if !errors.As(err, &e) {
			l.s.t.Fatalf("not refused: %v", err)
		}
		if e.Holder != nil {
			break
		}
	}
	return err
}

func (l *locker) close() {
	l.Close()
	l.conns.Close()
	l.control.Close()
}

// inLine waits until so many callers of the process are in line for the key.
func (l *locker) inLine(key string, n int) {
	l.s.t.Helper()
	soon(l.s.t, fmt.Sprintf("%d are in line", n), func() bool { return l.queue.Waiting(key) == n })
}

// request is one for key with a TTL of 30 s that does not wait.
func request(key string) Request {
	return Request{Key: key, TTL: 30 * time.Second, Waiting: func(ctx context.Context) (context.Context, func(), error) {
		return ctx, func() {}, nil
	}}
}

func waiting(key string, wait time.Duration) Request {
	r := request(key)
	r.Wait = wait
	return r
}

func (l *locker) acquire(r Request) *Lease {
	l.s.t.Helper()
	lease, err := l.Acquire(limited(l.s.t), r)
	ok(l.s.t, err)
	return lease
}

// row is what the server has on a key.
type row struct {
	owner string
	token uint64
	live  bool
	left  time.Duration
}

func (s *scratch) row(key string) (r row) {
	s.t.Helper()
	var micros int64
	ok(s.t, s.db.QueryRow("SELECT COALESCE(owner, ''), token, owner IS NOT NULL AND expires > UTC_TIMESTAMP(6),"+
		" TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires) FROM "+s.table.String()+
		" WHERE namespace = "+schema.Literal(s.database)+" AND name = "+schema.Literal(key)).
		Scan(&r.owner, &r.token, &r.live, &micros))
	r.left = time.Duration(micros) * time.Microsecond
	return r
}

// set changes the row of a key by hand.
func (s *scratch) set(key, assignments string) {
	s.t.Helper()
	_, err := s.db.Exec("UPDATE " + s.table.String() + " SET " + assignments +
		" WHERE namespace = " + schema.Literal(s.database) + " AND name = " + schema.Literal(key))
	ok(s.t, err)
}

// steal gives the lease to somebody else.
func (s *scratch) steal(key string) {
	s.set(key, "owner = 'thief#12345678', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR")
}

// threads are the ids of the database's connections but our own for which cond holds.
func (s *scratch) threads(cond string) (ids []int64) {
	s.t.Helper()
	rows, err := s.db.Query("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = '" + s.database +
		"' AND ID <> CONNECTION_ID() AND (" + cond + ")")
	ok(s.t, err)
	defer rows.Close()
	for rows.Next() {
		var id int64
		ok(s.t, rows.Scan(&id))
		ids = append(ids, id)
	}
	ok(s.t, rows.Err())
	return ids
}

// inBell are those that wait for a bell.
func (s *scratch) inBell() []int64 { return s.threads("STATE = 'User lock'") }

func (s *scratch) kill(ids []int64) {
	for _, id := range ids {
		_, _ = s.db.Exec(fmt.Sprintf("KILL CONNECTION %d", id)) // it may have gone
	}
}

// tap sees every statement that a client sends, can cut its connections, and can
// refuse new ones.
type tap struct {
	mu      sync.Mutex
	log     []string
	conns   map[*tapConn]struct{}
	refused bool
	stallAt string        // the answer to a statement that begins so
	stalled chan struct{} // does not arrive before this is closed
}

func (t *tap) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	t.mu.Lock()
	refused := t.refused
	t.mu.Unlock()
	if refused {
		return nil, fmt.Errorf("the test refuses connections")
	}
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &tapConn{Conn: c, tap: t, gone: make(chan struct{})}, nil
}

// stall keeps back the answer to the next statement that begins so, and
// returns a function that lets it arrive.
func (t *tap) stall(begin string) (arrive func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stallAt, t.stalled = begin, make(chan struct{})
	return sync.OnceFunc(func() { close(t.stalled) })
}

// cut ends all connections and refuses new ones.
func (t *tap) cut() {
	t.mu.Lock()
	t.refused = true
	t.mu.Unlock()
	t.cutOpen()
}

// cutOpen ends all connections.
func (t *tap) cutOpen() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.conns {
		c.once.Do(func() { close(c.gone) })
		c.Conn.Close()
	}
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
		return append([]string(nil), t.log...)
	}
}

type tapConn struct {
	net.Conn
	tap     *tap
	stalled <-chan struct{}
	gone    chan struct{}
	once    sync.Once
}

func (c *tapConn) Read(b []byte) (int, error) {
	c.tap.mu.Lock()
	stalled := c.stalled
	c.tap.mu.Unlock()
	if stalled != nil {
		select {
		case <-stalled:
		case <-c.gone:
		}
	}
	return c.Conn.Read(b)
}

func (c *tapConn) Write(b []byte) (int, error) {
	c.tap.mu.Lock()
	if c.tap.conns == nil {
		c.tap.conns = make(map[*tapConn]struct{})
	}
	c.tap.conns[c] = struct{}{}
	const comQuery = 3
	if len(b) > 4 && b[3] == 0 && b[4] == comQuery {
		c.tap.log = append(c.tap.log, string(b[5:]))
		if c.tap.stallAt != "" && strings.HasPrefix(string(b[5:]), c.tap.stallAt) {
			c.stalled, c.tap.stallAt = c.tap.stalled, ""
		}
	}
	c.tap.mu.Unlock()
	return c.Conn.Write(b)
}

func (c *tapConn) Close() error {
	c.tap.mu.Lock()
	delete(c.tap.conns, c)
	c.tap.mu.Unlock()
	c.once.Do(func() { close(c.gone) })
	return c.Conn.Close()
}

// SyscallConn lets the driver see that an idle connection is dead.
func (c *tapConn) SyscallConn() (syscall.RawConn, error) { return c.Conn.(syscall.Conn).SyscallConn() }

// Small things.

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func random() string {
	var b [6]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
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

// limited is a context that ends with the test, or when it hangs.
func limited(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func count(texts []string, begin string) (n int) {
	for _, text := range texts {
		if strings.HasPrefix(text, begin) {
			n++
		}
	}
	return n
}
