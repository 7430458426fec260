package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// KeepAlive pings connections that the server would end for being idle, and notices when a connection is lost. If the server or the
// network has closed the socket, as a KILL does, it notices within [glance]; otherwise when a ping is not answered. It has one
// goroutine for all connections, and one for each ping.
type KeepAlive struct {
	ttl  time.Duration
	idle time.Duration // the server never ends a connection after a shorter silence; at most ttl
	stop context.CancelFunc
	done sync.WaitGroup

	mu   sync.Mutex
	kept map[*Conn]func(error)
}

// NewKeepAlive returns a KeepAlive for connections that the server ends after ttl of silence; or already after limit, if that is not
// 0. Close ends its goroutine.
func NewKeepAlive(ttl, limit time.Duration) *KeepAlive {
	if limit <= 0 {
		limit = ttl
	}
	ctx, stop := context.WithCancel(context.Background())
	k := &KeepAlive{ttl: ttl, idle: min(ttl, limit), stop: stop, kept: make(map[*Conn]func(error))}
	k.done.Go(func() { k.run(ctx) })
	return k
}

// Keep keeps c alive until Forget. If c is lost, Keep calls lost once, on a goroutine of its own, which does not have the turn of c.
func (k *KeepAlive) Keep(c *Conn, lost func(error)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kept[c] = lost
}

// Forget ends what Keep has begun.
func (k *KeepAlive) Forget(c *Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.kept, c)
}

// Close ends the pings, and waits for the calls of lost to return.
func (k *KeepAlive) Close() {
	k.stop()
	k.done.Wait()
}

// Overdue returns an error if the server may have ended c by now: c was silent for nine tenths of the TTL, by the local monotonic
// clock. The last tenth is a margin, since the server counts from the moment when it sent its last answer.
func (k *KeepAlive) Overdue(c *Conn) error {
	if s := c.Silence(); s >= k.ttl-k.ttl/10 {
		return fmt.Errorf("the connection was silent for %v, with a lockTTL of %v", s.Round(time.Millisecond), k.ttl)
	}
	return nil
}

// glance is how often KeepAlive looks at the sockets. That sends nothing.
const glance = 500 * time.Millisecond

func (k *KeepAlive) run(ctx context.Context) {
	tick := time.NewTicker(min(glance, k.idle/8))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, c := range k.conns() {
			if c.Silence() >= k.idle/3 {
				k.done.Go(func() { k.check(ctx, c, k.ping) }) // an unanswered ping has the turn of c, and does not keep others from being checked
			} else if c.Own() {
				k.check(ctx, c, checkSocket)
			}
		}
	}
}

// conns returns the connections that are kept.
func (k *KeepAlive) conns() []*Conn {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Collect(maps.Keys(k.kept))
}

// check checks c by checker, unless a statement is running on c: then the server does not count c as idle, and the statement itself finds
// out if c is lost.
func (k *KeepAlive) check(ctx context.Context, c *Conn, checker func(context.Context, *Conn) error) {
	if !c.TryTurn() {
		return
	}
	k.mu.Lock()
	lost, kept := k.kept[c] // c may have been forgotten, and kept again, meanwhile
	k.mu.Unlock()
	if !kept {
		c.EndTurn()
		return
	}
	err := checker(ctx, c)
	c.EndTurn()
	if err != nil && ctx.Err() == nil {
		k.Forget(c)
		k.done.Go(func() { lost(lockerr.With(lockerr.ErrLost, err)) }) // the other connections must not wait for lost
	}
}

// ping asks the server.
func (k *KeepAlive) ping(ctx context.Context, c *Conn) error {
	if err := k.Overdue(c); err != nil {
		return err
	}
	ctx, cancel := server.Within(purpose.For(ctx, purpose.Renew), k.ttl/3)
	defer cancel()
	return c.Ping(ctx)
}

// checkSocket looks whether the socket is still open, and sends nothing.
func checkSocket(ctx context.Context, c *Conn) error {
	if !c.Fresh(ctx) {
		return errors.New("the connection was closed by the server, or on the way to it")
	}
	return nil
}
