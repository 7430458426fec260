package inspect_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) { goleak.VerifyTestMain(tempserver.Tests{M: m}) }

// onServers runs a test on each server, in a database of its own, beside others.
func onServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	aloneOnServers(t, test)
}

// onFlavours is onServers without the MariaDB that shows all it can: for what does not depend on
// what a server shows.
func onFlavours(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	t.Parallel()
	onKinds(t, test, mysqlServer, plainMariaDB)
}

// aloneOnServers runs it while no other test runs.
func aloneOnServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Helper()
	onKinds(t, test, mysqlServer, plainMariaDB, equippedMariaDB)
}

func onKinds(t *testing.T, test func(t *testing.T, s *scratch), kinds ...kind) {
	t.Helper()
	on := func(name string, k kind, bin tempserver.Binary, opts ...string) {
		if !slices.Contains(kinds, k) {
			return
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, newScratch(k, dbtest.New(t, bin, tempserver.Share(t, bin, opts...))))
		})
	}
	for _, bin := range tempserver.EachFlavour(tempserver.Require(t)) {
		const durable = "--innodb-flush-log-at-trx-commit=1" // the doctor asks
		if bin.Flavour == tempserver.MySQL {
			on(bin.Name, mysqlServer, bin, durable)
		} else {
			on(bin.Name, plainMariaDB, bin, durable, "--performance-schema=OFF")
			on(bin.Name+", equipped", equippedMariaDB, bin, durable, "--performance-schema=ON", "--plugin-load-add=metadata_lock_info.so")
		}
	}
}

// kind says what a server shows.
type kind int

const (
	mysqlServer kind = iota
	plainMariaDB
	equippedMariaDB // shows all it can
)

// scratch is a database on a server.
type scratch struct {
	*dbtest.Database
	kind kind
	root *sql.DB     // with the driver "mysql"
	copy *serverCopy // nil where there is none
}

func newScratch(k kind, d *dbtest.Database) *scratch {
	s := &scratch{Database: d, kind: k}
	if k != mysqlServer {
		of, _ := copies.LoadOrStore(d.Config().Addr, new(serverCopy))
		s.copy = of.(*serverCopy)
	}
	s.root = s.open("root")
	return s
}

// serverCopy is what a MariaDB shows of transactions, INNODB_TRX. It is made anew only when nobody has read it
// for 100 ms: tests that look beside each other can be shown the old one for ever. Theirs take turns.
type serverCopy struct {
	sync.Mutex
	read time.Time // the last time
}

var (
	copies sync.Map // *serverCopy by the address of the server
	copyOf sync.Map // *serverCopy by *inspect.Inspector
)

// fresh has f read a new copy.
func (sc *serverCopy) fresh(f func()) {
	if sc == nil {
		f()
		return
	}
	sc.Lock()
	defer sc.Unlock()
	time.Sleep(time.Until(sc.read.Add(110 * time.Millisecond)))
	defer func() { sc.read = time.Now() }()
	f()
}

func (s *scratch) mysql() bool { return s.kind == mysqlServer }

// open opens a handle with the plain driver, in another time zone than the
// server's.
func (s *scratch) open(user string) *sql.DB {
	s.T.Helper()
	return s.OpenDB(s.Connector(dbtest.As(user), dbtest.With("time_zone='%2B05:00'")), nil)
}

// process opens a handle with locks, as a process of that name has it.
func (s *scratch) process(user, owner string) *sql.DB {
	s.T.Helper()
	cfg := s.Config()
	cfg.User = user
	return s.OpenDB(mysqllock.NewConnector(cfg, mysqllock.Config{Owner: owner}))
}

// user makes an account that may use the locks, and what else is granted.
func (s *scratch) user(grants ...string) string {
	s.T.Helper()
	name := "u_" + strings.ToLower(rand.Text()[:8])
	account := "'" + name + "'@'%'"
	dbtest.Exec(s.T, s.root, "CREATE USER "+account)
	s.T.Cleanup(func() { dbtest.Exec(s.T, s.root, "DROP USER "+account) })
	for _, grant := range append([]string{"SELECT, INSERT, UPDATE ON " + s.Name + ".*"}, grants...) {
		dbtest.Exec(s.T, s.root, "GRANT "+grant+" TO "+account)
	}
	return name
}

func (s *scratch) inspector(db *sql.DB) *inspect.Inspector {
	s.T.Helper()
	i, err := inspect.New(db, inspect.Options{})
	dbtest.OK(s.T, err)
	copyOf.Store(i, s.copy)
	s.T.Cleanup(func() { copyOf.Delete(i) })
	return i
}

// look takes a snapshot, which must not take long.
func look(t testing.TB, i *inspect.Inspector, keys ...string) (snap *inspect.Snapshot) {
	t.Helper()
	shown, _ := copyOf.Load(i)
	shown.(*serverCopy).fresh(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		var err error
		snap, err = i.Snapshot(ctx, inspect.Filter{Keys: keys})
		dbtest.OK(t, err)
	})
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

// value is what is known, or the zero value.
func value[T any](k inspect.Known[T]) T {
	v, _ := k.Get()
	return v
}

// acquire takes a lock, to be given back at the end.
func (s *scratch) acquire(db *sql.DB, key string, opts ...lockctx.Option) *mysqllock.Hold {
	s.T.Helper()
	hold, err := mysqllock.Acquire(context.Background(), db, key, opts...)
	dbtest.OK(s.T, err)
	s.T.Cleanup(func() { _ = hold.Release() })
	return hold
}

// queue has processes wait for key, one after the other, until the end, and tells
// when each of them was seen to wait.
func (s *scratch) queue(seen func() int, user, key string, n int, opts ...lockctx.Option) (since []time.Time) {
	s.T.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range n {
		db := s.process(user, fmt.Sprintf("waiter-%d", i+1))
		wg.Go(func() {
			hold, err := mysqllock.Acquire(ctx, db, key, append(opts, lockctx.Wait(2*dbtest.Patience))...)
			if err == nil {
				_ = hold.Release()
			}
		})
		dbtest.Soon(s.T, fmt.Sprintf("%d wait for %s", i+1, key), func() bool { return seen() == i+1 })
		since = append(since, time.Now())
	}
	s.T.Cleanup(func() { cancel(); wg.Wait() })
	return since
}
