package optimistic_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockerr"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) {
	_ = mysql.SetLogger(&mysql.NopLogger{}) // connections are cut on purpose
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// scratch is a database of one test, with the lock table, and with counters that
// the keys of the same names protect.
type scratch struct {
	*dbtest.Database
	table schema.Table
	info  server.Info
	own   driver.Conn // for looks at how things are
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	s := &scratch{Database: d, own: d.Connect()}
	var err error
	s.table, err = schema.Parse(d.Name + ".locks")
	dbtest.OK(d.T, err)
	s.info, err = server.Probe(d.T.Context(), s.own)
	dbtest.OK(d.T, err)
	err = s.table.Ensure(d.T.Context(), s.own, s.info, true)
	dbtest.OK(d.T, err)
	s.Exec(s.own, "CREATE TABLE counter (name VARCHAR(255) PRIMARY KEY, n INT NOT NULL) ENGINE=InnoDB")
	s.Exec(s.own, "INSERT INTO counter VALUES ('k', 0), ('l', 0)")
	return s
}

// checksSnapshots reports whether a write of a row that has changed since the snapshot
// fails (1020), as it does by default on MariaDB from 11.6 on.
func (s *scratch) checksSnapshots() bool {
	s.T.Helper()
	return s.info.SnapshotIsolation && s.Query(s.own, "SELECT @@innodb_snapshot_isolation")[0][0] == "1"
}

// process is what one process has to keep keys with.
type process struct {
	*optimistic.Locker
	*scratch
	leases  *lease.Locker
	rows    *keyrow.Rows
	control *pool.Pool
}

const (
	namespace = "app"
	owner     = "host:1:test"
	ttl       = 30 * time.Second
)

// control is what its connections that nobody else has begin with.
const control = "SET SESSION autocommit = 1, innodb_lock_wait_timeout = 5, lock_wait_timeout = 1"

// process makes one. change may alter its configuration.
func (s *scratch) process(change ...func(*strategy.Config)) *process {
	s.T.Helper()
	p := &process{scratch: s}
	p.control = s.pool(4, control)
	rows := keyrow.Config{Control: p.control, Table: s.table, Namespace: namespace, Info: s.info, Auto: true}
	p.rows = keyrow.New(rows)
	cfg := strategy.Config{Config: rows, Rows: p.rows, TTL: ttl}
	of := cfg
	of.Conns, of.Queue, of.Owner = s.pool(8, lease.Setup(ttl)), new(queue.Queue), owner
	p.leases = lease.New(of)
	s.T.Cleanup(p.leases.Close)
	cfg.Await = p.leases.Await
	for _, change := range change {
		change(&cfg)
	}
	p.Locker = optimistic.New(cfg)
	return p
}

// pool has at most max connections.
func (s *scratch) pool(max int, setup string) *pool.Pool {
	s.T.Helper()
	made := pool.New(pool.Config{Connect: s.Connector().Connect, Max: max, Idle: time.Minute, Setup: setup})
	s.T.Cleanup(made.Close)
	return made
}

// remember does so with a wait of 20 s.
func (p *process) remember(conn driver.Conn, keys ...string) []*optimistic.Version {
	p.T.Helper()
	versions, err := p.rememberOn(dbtest.Limited(p.T), conn, optimistic.Request{Keys: keys, Wait: 20 * time.Second})
	dbtest.OK(p.T, err)
	return versions
}

// rememberOn is Remember for a caller that lends conn, unless that is nil. It makes sure that conn is given back where it should.
func (p *process) rememberOn(ctx context.Context, conn driver.Conn, r optimistic.Request) ([]*optimistic.Version, error) {
	if conn == nil {
		return p.Remember(ctx, r)
	}
	gets, puts := 0, 0
	r.Lends = &strategy.Lender{
		Get: func(context.Context) (*pool.Conn, error) { gets++; return pool.Adopt(conn), nil },
		Put: func() { puts++ },
	}
	versions, err := p.Remember(ctx, r)
	if gets > 1 || puts > gets || err != nil && puts != gets {
		p.T.Errorf("lent %d times, given back %d times: %v", gets, puts, err)
	}
	return versions, err
}

// send is a form in which what goes out with a COMMIT is sent.
type send func(ctx context.Context, conn driver.Conn, texts ...string) (answers [][][]string, err error)

var forms = map[string]send{"packet": server.SendPacket, "single": server.SendSingly}

// check is what goes out with a COMMIT.
func (p *process) check(versions ...*optimistic.Version) strategy.Check {
	p.T.Helper()
	held := make([]strategy.Grant, len(versions))
	for i, v := range versions {
		held[i] = v
	}
	check, err := p.Check(dbtest.Limited(p.T), nil, held, strategy.Commit{Wrote: true, Ends: true})
	dbtest.OK(p.T, err)
	return check
}

// compare sends what comes in front of COMMIT.
func (p *process) compare(c driver.Conn, versions []*optimistic.Version) error {
	p.T.Helper()
	check := p.check(versions...)
	answers, err := server.SendSingly(dbtest.Limited(p.T), c, check.Before...)
	if err != nil {
		err = check.Failed(dbtest.Limited(p.T), len(answers), err)
	}
	return err
}

// within remembers in at most wait.
func (p *process) within(ctx context.Context, wait time.Duration, keys ...string) error {
	_, err := p.Remember(ctx, optimistic.Request{Keys: keys, Wait: wait})
	return err
}

// told is within for a short wait: again where a busy server has not answered in time.
func (p *process) told(wait time.Duration, keys ...string) error {
	p.T.Helper()
	return dbtest.Until(func() error {
		return p.within(dbtest.Limited(p.T), wait, keys...)
	}, func(err error) bool { return !errors.Is(err, lockerr.ErrNoAnswer) })
}

// begun is c, in a transaction that has just begun.
func (s *scratch) begun(c driver.Conn) driver.Conn {
	s.T.Helper()
	s.Exec(c, "START TRANSACTION")
	return c
}

// wantCommit and wantConflict are how a transaction on c with versions is to end.
func (p *process) wantCommit(c driver.Conn, versions ...*optimistic.Version) {
	p.T.Helper()
	if err := p.compare(c, versions); err != nil {
		p.T.Error(err)
	}
	p.Exec(c, "COMMIT")
}

func (p *process) wantConflict(c driver.Conn, versions ...*optimistic.Version) {
	p.T.Helper()
	began := time.Now()
	dbtest.Is(p.T, "no conflict", p.compare(c, versions), lockerr.ErrConflict)
	if d := time.Since(began); d > 30*time.Second {
		p.T.Errorf("it took %v", d)
	}
	p.Exec(c, "ROLLBACK")
}

// where is the condition for a key's row.
func where(key string) string {
	return " WHERE namespace = " + schema.Literal(namespace) + " AND name = " + schema.Literal(key)
}

// set changes the row of a key by hand.
func (s *scratch) set(key, assignments string) {
	s.T.Helper()
	s.Exec(s.own, "UPDATE "+s.table.String()+" SET "+assignments+where(key))
}

// row is "token versioned owner" of a key; "" where it has none.
func (s *scratch) row(key string) string {
	s.T.Helper()
	rows := s.Query(s.own, "SELECT CONCAT(token, ' ', versioned, ' ', COALESCE(owner, 'nobody')) FROM "+s.table.String()+where(key))
	if len(rows) == 0 {
		return ""
	}
	return rows[0][0]
}

func (s *scratch) wantRow(key, want string) {
	s.T.Helper()
	if got := s.row(key); got != want {
		s.T.Errorf("the row of %s is %q, want %q", key, got, want)
	}
}

// lock locks the row of a key in a transaction on a connection of its own.
func (s *scratch) lock(key, how string) (c driver.Conn, versioned bool) {
	s.T.Helper()
	c = s.Connect()
	s.Exec(c, "BEGIN")
	rows := s.Query(c, "SELECT versioned FROM "+s.table.String()+where(key)+" "+how)
	if len(rows) != 1 {
		s.T.Fatalf("%s has no row", key)
	}
	return c, rows[0][0] == "1"
}

// counter reads one as c sees it.
func (s *scratch) counter(c driver.Conn, name string) int {
	s.T.Helper()
	rows := s.Query(c, "SELECT n FROM counter WHERE name = '"+name+"'")
	if len(rows) != 1 {
		return -1
	}
	n, err := strconv.Atoi(rows[0][0])
	if err != nil {
		s.T.Error(err)
	}
	return n
}

func setCounter(name string, n int) string {
	return fmt.Sprintf("UPDATE counter SET n = %d WHERE name = '%s'", n, name)
}

// busy are the statements, of other connections on the database, that are
// running and contain text.
func (s *scratch) busy(text string) int {
	s.T.Helper()
	return len(s.Query(s.own, "SELECT 1 FROM information_schema.PROCESSLIST WHERE DB = '"+s.Name+
		"' AND ID <> CONNECTION_ID() AND COMMAND <> 'Sleep' AND INFO LIKE '%"+text+"%'"))
}

// failing is a connection on which every statement fails.
type failing struct{ err error }

func (f failing) ExecContext(context.Context, string, []driver.NamedValue) (driver.Result, error) {
	return nil, f.err
}
func (f failing) Prepare(string) (driver.Stmt, error) { return nil, f.err }
func (f failing) Begin() (driver.Tx, error)           { return nil, f.err }
func (f failing) Close() error                        { return nil }
