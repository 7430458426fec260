package rowlock_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"go.uber.org/goleak"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

// The tests run against every server that is found on this machine.

func TestMain(m *testing.M) {
	dbtest.Jobs{"slots": childSlots}.Run()
	goleak.VerifyTestMain(tempserver.Tests{M: m})
}

// scratch is a database of one test.
type scratch struct {
	*dbtest.Database
	table schema.Table
}

func newScratch(d *dbtest.Database) *scratch {
	d.T.Helper()
	table, err := schema.Parse(d.Name + ".locks")
	dbtest.OK(d.T, err)
	return &scratch{Database: d, table: table}
}

// process is what one process has to take locks with.
type process struct {
	*rowlock.Locker
	*scratch
	conns   *pool.Pool // of sessions
	rows    *keyrow.Rows
	queue   *queue.Queue
	cfg     strategy.Config
	wakeUps *wakeUps
}

// process makes one; change may alter its configuration.
func (s *scratch) process(change func(*strategy.Config)) *process {
	s.T.Helper()
	newPool := func(autocommit, max int) *pool.Pool {
		p := pool.New(pool.Config{
			Connect: s.Connector(func(cfg *mysql.Config) { cfg.MultiStatements = autocommit == 0 }).Connect,
			Several: func(context.Context, *pool.Conn) (bool, error) { return autocommit == 0, nil },
			Setup:   fmt.Sprintf("SET SESSION autocommit = %d", autocommit), Max: max, Idle: time.Minute,
		})
		s.T.Cleanup(p.Close)
		return p
	}
	control := newPool(1, 4)
	c := s.Connect()
	info, err := server.Probe(s.T.Context(), c)
	dbtest.OK(s.T, err)
	dbtest.OK(s.T, s.table.Ensure(s.T.Context(), c, info, true))
	p := &process{scratch: s, conns: newPool(0, 70), queue: new(queue.Queue), wakeUps: &wakeUps{wake: make(chan struct{})}}
	rows := keyrow.Config{Control: control, Table: s.table, Namespace: "app", Info: info, Auto: true}
	p.rows = keyrow.New(rows)
	cfg := strategy.Config{Config: rows, Rows: p.rows, Owner: "me", TTL: 30 * time.Second, Queue: p.queue, Await: p.wakeUps.await}
	if change != nil {
		change(&cfg)
	}
	p.cfg, p.Locker = cfg, rowlock.New(cfg)
	s.T.Cleanup(p.Locker.Close)
	return p
}

// wakeUps are how the tests wake those who wait for a lease.
type wakeUps struct {
	wake  chan struct{} // a token wakes one
	calls atomic.Int32
	cut   atomic.Int32 // calls whose context ended
	turns atomic.Int32 // given and not given back
}

func (w *wakeUps) await(ctx context.Context, key string, _ time.Time, atMost time.Duration) (func(), error) {
	w.calls.Add(1)
	select {
	case <-w.wake:
	case <-time.After(atMost):
	case <-ctx.Done():
		w.cut.Add(1)
		return nil, ctx.Err()
	}
	w.turns.Add(1)
	return func() { w.turns.Add(-1) }, nil
}
