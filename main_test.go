package mysqllock_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run against every server that is found on this machine, and
// against the one that MYSQLLOCK_TEST_DSN names, one subtest tree each.

func TestMain(m *testing.M) {
	if child := os.Getenv("MYSQLLOCK_TEST_CHILD"); child != "" {
		os.Exit(runChild(child))
	}
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// testServer is a real server with a scratch database for each test.
type testServer struct {
	name    string
	dsn     string // without a database
	mariadb bool
	temp    *tempserver.Server // nil for MYSQLLOCK_TEST_DSN
}

func testServers(t *testing.T) (all []*testServer) {
	t.Helper()
	for _, bin := range tempserver.Require(t) {
		all = append(all, newTestServer(string(bin.Flavour), bin, tempserver.Share(t, bin)))
	}
	if dsn := os.Getenv("MYSQLLOCK_TEST_DSN"); dsn != "" {
		db, err := sql.Open("mysql", dsn)
		ok(t, err)
		defer db.Close()
		var version string
		ok(t, db.QueryRow("SELECT VERSION()").Scan(&version))
		all = append(all, &testServer{name: "own", dsn: dsn, mariadb: strings.Contains(version, "MariaDB")})
	}
	return all
}

func newTestServer(name string, bin tempserver.Binary, temp *tempserver.Server) *testServer {
	return &testServer{name: name, dsn: temp.DSN(""), mariadb: bin.Flavour == tempserver.MariaDB, temp: temp}
}

// onServers runs a test on each server, beside the other tests.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Parallel()
	for _, s := range testServers(t) {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			test(t, s.scratch(t))
		})
	}
}

// onOwnServers is onServers with servers of the test's own, started with opts: to
// change their settings, or to stop them.
func onOwnServers(t *testing.T, test func(t *testing.T, s *scratch), opts ...string) {
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			srv, err := tempserver.Start(limited(t), bin, opts...)
			ok(t, err)
			t.Cleanup(func() { srv.Stop() })
			test(t, newTestServer(string(bin.Flavour), bin, srv).scratch(t))
		})
	}
}

// scratch is a database of one test, with a table p (id, stock) that has a few
// products of stock 10.
type scratch struct {
	*testServer
	t        *testing.T
	database string
	plain    *sql.DB // with the driver "mysql": what the server says for itself
}

func (s *testServer) scratch(t *testing.T) *scratch {
	t.Helper()
	cfg := tempserver.Database(t, s.dsn)
	x := &scratch{testServer: s, t: t, database: cfg.DBName}
	var err error
	x.plain, err = sql.Open("mysql", cfg.FormatDSN())
	ok(t, err)
	t.Cleanup(func() { x.plain.Close() })
	exec(t, x.plain, "CREATE TABLE p (id INT PRIMARY KEY, stock INT NOT NULL) ENGINE=InnoDB")
	exec(t, x.plain, "INSERT INTO p VALUES (1, 10), (2, 10), (3, 10), (4, 10)")
	return x
}

func (s *scratch) cfg() *mysql.Config {
	cfg, err := mysql.ParseDSN(s.dsn)
	ok(s.t, err)
	cfg.DBName = s.database
	return cfg
}

// open opens the scratch database with the driver under test. params are added
// to the DSN, such as "lockWait=1s".
func (s *scratch) open(params ...string) *sql.DB {
	s.t.Helper()
	dsn := s.cfg().FormatDSN()
	sep := "?"
	if strings.Contains(dsn, "?") {
		sep = "&"
	}
	db, err := sql.Open("mysqllock", dsn+sep+strings.Join(params, "&"))
	ok(s.t, err)
	s.t.Cleanup(func() { db.Close() })
	return db
}

// tapped opens it through a tap on its connections.
func (s *scratch) tapped(c mysqllock.Config) (*sql.DB, *tap) {
	s.t.Helper()
	tp := &tap{}
	cfg := s.cfg()
	cfg.DialFunc = tp.dial
	connector, err := mysqllock.NewConnector(cfg, c)
	ok(s.t, err)
	db := sql.OpenDB(connector)
	s.t.Cleanup(func() { db.Close() })
	return db, tp
}

func (s *scratch) stock(id int) (n int) {
	s.t.Helper()
	ok(s.t, s.plain.QueryRow("SELECT stock FROM p WHERE id = ?", id).Scan(&n))
	return n
}

// locked asks the server whether the key's row is locked, by trying.
func (s *scratch) locked(key string) bool {
	s.t.Helper()
	tx, err := s.plain.Begin()
	ok(s.t, err)
	defer tx.Rollback()
	var n int
	row := tx.QueryRow("SELECT COUNT(*) FROM mysqllock WHERE namespace = ? AND name = ?", s.database, key)
	ok(s.t, row.Scan(&n))
	if n == 0 {
		return false
	}
	err = tx.QueryRow("SELECT 1 FROM mysqllock WHERE namespace = x'" + hex.EncodeToString([]byte(s.database)) +
		"' AND name = x'" + hex.EncodeToString([]byte(key)) + "' FOR UPDATE SKIP LOCKED").Scan(&n)
	if errors.Is(err, sql.ErrNoRows) {
		return true
	}
	ok(s.t, err)
	return false
}

func (s *scratch) wantLocked(key string, want bool) {
	s.t.Helper()
	if got := s.locked(key); got != want {
		s.t.Errorf("locked(%s) = %v, want %v", key, got, want)
	}
}

func (s *scratch) wantStock(id, want int) {
	s.t.Helper()
	if got := s.stock(id); got != want {
		s.t.Errorf("stock of %d is %d, want %d", id, got, want)
	}
}

// tap sees every command that a client sends, as the server does.
type tap struct {
	mu    sync.Mutex
	conns int
	log   []command
}

type command struct {
	conn int    // which connection, counted from 1
	text string // the SQL, or the command's name in brackets
}

func (t *tap) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.conns++
	return &tapConn{Conn: c, tap: t, n: t.conns}, nil
}

// since clears what was seen and returns a function that tells what is seen
// from now on.
func (t *tap) since() func() []command {
	t.mu.Lock()
	defer t.mu.Unlock()
	from := len(t.log)
	return func() []command {
		t.mu.Lock()
		defer t.mu.Unlock()
		return slices.Clone(t.log[from:])
	}
}

// costs runs f once, so that rows and connections are there, and counts the
// commands of the next time. On a busy machine what follows a release may come
// later than usual, and what keeps a connection in between: it counts again then.
func (t *tap) costs(tb testing.TB, what string, want int, f func() error) {
	tb.Helper()
	ok(tb, f())
	for round := time.Duration(1); ; round++ {
		time.Sleep(round * 5 * time.Millisecond)
		seen := t.since()
		ok(tb, f())
		time.Sleep(round * 5 * time.Millisecond)
		log := seen()
		if len(log) == want {
			return
		}
		if round == 6 {
			tb.Errorf("%s: %d statements, want %d: %v", what, len(log), want, log)
			return
		}
	}
}

type tapConn struct {
	net.Conn
	tap *tap
	n   int
}

func (c *tapConn) Write(b []byte) (int, error) {
	// A packet with sequence number 0 from the client begins a command.
	if len(b) > 4 && b[3] == 0 {
		names := map[byte]string{1: "[quit]", 14: "[ping]", 23: "[execute]", 25: "[close]"}
		text, known := names[b[4]]
		switch {
		case b[4] == 3:
			text = string(b[5:])
		case b[4] == 22:
			text = "[prepare] " + string(b[5:])
		case !known:
			text = fmt.Sprintf("[command %d]", b[4])
		}
		c.tap.mu.Lock()
		c.tap.log = append(c.tap.log, command{c.n, text})
		c.tap.mu.Unlock()
	}
	return c.Conn.Write(b)
}

// Small things.

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type execer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

func exec(t testing.TB, db execer, text string, args ...any) {
	t.Helper()
	if _, err := db.ExecContext(context.Background(), text, args...); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

func random() string {
	var b [6]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// naming runs what is refused, again where a busy server did not say in time who
// has the lock.
func naming(refused func() error) (err error) {
	for range 20 {
		var e *mysqllock.Error
		if err = refused(); !errors.As(err, &e) || e.Holder != nil {
			break
		}
	}
	return err
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
