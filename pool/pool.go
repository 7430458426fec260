// Package pool keeps the connections that database/sql never sees: those on
// which sessions live, and the few from which waiters are killed. It bounds
// them, keeps them alive, and destroys what may still carry a lock. It knows
// no lock SQL.
package pool

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/puddle/v2"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Config says what a Pool holds.
type Config struct {
	Connect func(context.Context) (driver.Conn, error) // opens a connection
	Setup   string                                     // a statement that is run once on each new one
	Max     int                                        // the most connections at a time; at least 1
	Idle    time.Duration                              // an unused connection is closed after this long
}

// Stats counts the pool's connections. Acquired, Waited and WaitTime grow from
// the beginning; the others are how it is now.
type Stats struct {
	Max      int           // the bound, lockMaxConns
	InUse    int           // carrying a unit of work
	Idle     int           // ready
	Opening  int           // being connected
	Acquired int64         // times that one was handed out
	Waited   int64         // times that none was ready and the caller had to wait
	WaitTime time.Duration // sum of the time that callers waited
}

// Pool is a bounded set of connections. It is safe for concurrent use.
type Pool struct {
	conns *puddle.Pool[*Conn]
	idle  time.Duration
	stop  context.CancelFunc
	swept sync.WaitGroup
}

// New returns a pool that has opened nothing yet. Close it to end its one
// goroutine.
func New(cfg Config) (*Pool, error) {
	conns, err := puddle.NewPool(&puddle.Config[*Conn]{
		MaxSize: int32(cfg.Max),
		Constructor: func(ctx context.Context) (c *Conn, err error) {
			for range 3 { // as often as database/sql tries
				if c, err = cfg.open(ctx); err == nil || ctx.Err() != nil || !server.Broken(err) {
					break
				}
			}
			return c, err
		},
		Destructor: func(c *Conn) { _ = c.Close() },
	})
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	p := &Pool{conns: conns, idle: cfg.Idle, stop: stop}
	p.swept.Go(func() { p.sweep(ctx) })
	return p, nil
}

// open opens a connection and sets it up.
func (cfg Config) open(ctx context.Context) (*Conn, error) {
	conn, err := cfg.Connect(ctx)
	if server.Full(err) {
		return nil, fmt.Errorf("%w; locks need connections of their own: let the server have more (max_connections, max_user_connections), or this program fewer (lockMaxConns, SetMaxOpenConns)", err)
	}
	if err != nil {
		return nil, err
	}
	c := Adopt(conn)
	if err = c.identify(ctx); err == nil {
		err = server.Exec(ctx, conn, cfg.Setup)
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("setting up a connection for locks: %w", err)
	}
	return c, nil
}

// Acquire returns a connection that was alive a moment ago, and its turn,
// waiting for one until ctx ends. Release or Destroy it. After Close it returns
// lockerr.ErrClosed.
func (p *Pool) Acquire(ctx context.Context) (*Conn, error) {
	for {
		res, err := p.conns.Acquire(ctx)
		if errors.Is(err, puddle.ErrClosedPool) {
			return nil, lockerr.ErrClosed
		}
		if err != nil {
			return nil, err
		}
		c := res.Value()
		c.res = res
		_ = c.Take(context.Background()) // at most a ping of its last user's is under way
		if c.Silence() < p.idle && c.Fresh(ctx) {
			return c, nil
		}
		c.Destroy()
	}
}

// Ready reports whether Acquire would hand out a connection, or open one, for
// the next caller without waiting for another to give one back.
func (p *Pool) Ready() bool {
	s := p.conns.Stat()
	return s.IdleResources() > 0 || s.TotalResources() < s.MaxResources()
}

// Fresh reports whether the connection can still be used. It asks the driver, which
// looks at the socket without a round trip.
func (c *Conn) Fresh(ctx context.Context) bool {
	if r, ok := c.Conn.(driver.SessionResetter); ok && r.ResetSession(ctx) != nil {
		return false
	}
	return c.Valid()
}

// Stat returns the pool's counts.
func (p *Pool) Stat() Stats {
	s := p.conns.Stat()
	return Stats{
		Max:      int(s.MaxResources()),
		InUse:    int(s.AcquiredResources()),
		Idle:     int(s.IdleResources()),
		Opening:  int(s.ConstructingResources()),
		Acquired: s.AcquireCount(),
		Waited:   s.EmptyAcquireCount(),
		WaitTime: s.EmptyAcquireWaitTime(),
	}
}

// Close closes the connections and waits until those in use are given back.
func (p *Pool) Close() {
	p.stop()
	p.swept.Wait()
	p.conns.Close()
}

// sweep closes connections that nobody has used for a while, before the server
// does.
func (p *Pool) sweep(ctx context.Context) {
	tick := time.NewTicker(p.idle / 2)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			for _, res := range p.conns.AcquireAllIdle() {
				if res.Value().Silence() > p.idle/2 {
					res.Destroy()
				} else {
					res.ReleaseUnused()
				}
			}
		}
	}
}
