package inspect_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// equipped is a MariaDB that shows all it can.
const equipped = "MariaDB, equipped"

// onServers runs a test on each server, in a database of its own, beside others.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	aloneOnServers(t, test)
}

// aloneOnServers runs it while no other test runs.
func aloneOnServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	on := func(name string, srv *tempserver.Server) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newScratch(t, name, srv))
		})
	}
	for _, bin := range tempserver.Require(t) {
		const durable = "--innodb-flush-log-at-trx-commit=1" // the doctor asks
		on(string(bin.Flavour), tempserver.Share(t, bin, durable))
		if bin.Flavour == tempserver.MariaDB {
			on(equipped, tempserver.Share(t, bin, durable, "--performance-schema=ON", "--plugin-load-add=metadata_lock_info.so"))
		}
	}
}

// scratch is a database on a server.
type scratch struct {
	t        testing.TB
	name     string
	base     *mysql.Config
	database string
	root     *sql.DB // with the driver "mysql"
}

func newScratch(t testing.TB, name string, srv *tempserver.Server) *scratch {
	s := &scratch{t: t, name: name, base: tempserver.Database(t, srv.DSN(""))}
	s.database = s.base.DBName
	s.root = s.open("root")
	return s
}

func (s *scratch) mysql() bool { return s.name == string(tempserver.MySQL) }

func (s *scratch) config(user string) *mysql.Config {
	cfg := s.base.Clone()
	cfg.User = user
	return cfg
}

// open opens a handle with the plain driver, in another time zone than the
// server's.
func (s *scratch) open(user string) *sql.DB {
	s.t.Helper()
	cfg := s.config(user)
	cfg.Params = map[string]string{"time_zone": "'+05:00'"}
	connector, err := mysql.NewConnector(cfg)
	ok(s.t, err)
	db := sql.OpenDB(connector)
	s.t.Cleanup(func() { db.Close() })
	return db
}

// process opens a handle with locks, as a process of that name has it.
func (s *scratch) process(user, owner string) *sql.DB {
	s.t.Helper()
	connector, err := mysqllock.NewConnector(s.config(user), mysqllock.Config{Owner: owner})
	ok(s.t, err)
	db := sql.OpenDB(connector)
	s.t.Cleanup(func() { db.Close() })
	return db
}

// user makes an account that may use the locks, and what else is granted.
func (s *scratch) user(grants ...string) string {
	s.t.Helper()
	name := "u_" + strings.ToLower(rand.Text()[:8])
	account := "'" + name + "'@'%'"
	exec(s.t, s.root, "CREATE USER "+account)
	s.t.Cleanup(func() { exec(s.t, s.root, "DROP USER "+account) })
	for _, grant := range append([]string{"SELECT, INSERT, UPDATE ON " + s.database + ".*"}, grants...) {
		exec(s.t, s.root, "GRANT "+grant+" TO "+account)
	}
	return name
}

func (s *scratch) inspector(db *sql.DB) *inspect.Inspector {
	s.t.Helper()
	i, err := inspect.New(db, inspect.Options{})
	ok(s.t, err)
	return i
}

// look takes a snapshot, which must not take long.
func look(t testing.TB, i *inspect.Inspector, keys ...string) *inspect.Snapshot {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	snap, err := i.Snapshot(ctx, inspect.Filter{Keys: keys})
	ok(t, err)
	return snap
}

// find is the lock on key, nil where there is none.
func find(snap *inspect.Snapshot, strategy, key string) *inspect.Lock {
	for _, l := range snap.Locks {
		if l.Strategy == strategy && l.Key == key {
			return &l
		}
	}
	return nil
}

// acquire takes a lock, to be given back at the end.
func (s *scratch) acquire(db *sql.DB, key string, opts ...lockctx.Option) *mysqllock.Hold {
	s.t.Helper()
	hold, err := mysqllock.Acquire(context.Background(), db, key, opts...)
	ok(s.t, err)
	s.t.Cleanup(func() { _ = hold.Release() })
	return hold
}

// queue has processes wait for key, one after the other, until the end, and tells
// when each of them was seen to wait.
func (s *scratch) queue(seen func() int, user, key string, n int, opts ...lockctx.Option) (since []time.Time) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range n {
		db := s.process(user, fmt.Sprintf("waiter-%d", i+1))
		wg.Go(func() {
			hold, err := mysqllock.Acquire(ctx, db, key, append(opts, lockctx.Wait(time.Minute))...)
			if err == nil {
				_ = hold.Release()
			}
		})
		soon(s.t, fmt.Sprintf("%d wait for %s", i+1, key), func() bool { return seen() == i+1 })
		since = append(since, time.Now())
	}
	s.t.Cleanup(func() { cancel(); wg.Wait() })
	return since
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func exec(t testing.TB, db *sql.DB, text string) {
	t.Helper()
	if _, err := db.Exec(text); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
}

// soon waits until cond holds.
func soon(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !cond(); time.Sleep(150 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30s: %s", what)
		}
	}
}
