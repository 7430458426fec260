package rowlock_test

import (
	"context"
	"database/sql/driver"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
)

// session takes a connection that is not in autocommit, as sessions are.
func (p *process) session(ctx context.Context) (*pool.Conn, error) {
	c, err := p.conns.Acquire(ctx)
	if err == nil {
		err = server.Exec(ctx, c.Conn, "SET autocommit = 0")
	}
	return c, err
}

// gone is a context that has ended without a sign of it.
type gone struct {
	context.Context
	is atomic.Bool
}

func (g *gone) Err() error {
	if g.is.Load() {
		return context.Canceled
	}
	return g.Context.Err()
}

// TestHandOverToOneThatGoes: the next caller goes at the moment at which the lock is handed
// over to it. Then the caller behind it has the lock, or nobody has, and the session is free.
func TestHandOverToOneThatGoes(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(func(c *rowlock.Config) { c.HandOvers, c.HandOverTime = 30, time.Minute })
		begin := func(ctx context.Context, inherited func(*pool.Conn)) (*rowlock.Grant, error) {
			return p.Begin(ctx, driver.TxOptions{}, true, rowlock.Request{
				Keys: []rowlock.Key{{Name: "k"}}, Wait: time.Minute, Conn: p.session, Inherit: inherited,
			})
		}
		for _, behind := range []bool{true, false} {
			first, err := begin(dbtest.Limited(t), func(*pool.Conn) { t.Error("the first has inherited") })
			dbtest.OK(t, err)
			ctx, over, got := &gone{Context: dbtest.Limited(t)}, make(chan error, 1), make(chan *rowlock.Grant, 1)
			go func() {
				_, err := begin(ctx, func(*pool.Conn) { t.Error("one that has gone has inherited") })
				over <- err
			}()
			dbtest.Soon(t, "it waits", func() bool { return p.queue.Waiting("k") == 1 })
			var session *pool.Conn
			if behind {
				go func() {
					grant, err := begin(dbtest.Limited(t), func(c *pool.Conn) { session = c })
					if err != nil {
						t.Error(err)
					}
					got <- grant
				}()
				dbtest.Soon(t, "the next one waits", func() bool { return p.queue.Waiting("k") == 2 })
			}
			ctx.is.Store(true)
			if !first.Succession.Keeps(dbtest.Limited(t)) {
				t.Fatal("the lock cannot be handed over")
			}
			first.Succession.HandOver(func() { t.Error("the session is broken") })
			dbtest.Want(t, <-over, context.Canceled)
			if behind {
				last := <-got
				if session == nil {
					t.Error("the one behind has a session of its own")
				}
				last.Succession.HandOver(func() { t.Error("the session is broken") }) // to nobody
			}
			if n := p.conns.Stat().InUse; n != 0 {
				t.Errorf("behind %v: %d sessions are in use", behind, n)
			}
			again, err := begin(dbtest.Limited(t), func(*pool.Conn) {})
			dbtest.OK(t, err)
			again.Succession.HandOver(func() {})
		}
	})
}
