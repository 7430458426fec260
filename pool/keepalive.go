package pool

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// KeepAlive pings connections that the server would end for being idle, and notices when
// one is lost. It has one goroutine for all connections.
type KeepAlive struct {
	ttl  time.Duration
	idle time.Duration // the server never ends a connection that was silent for less; at most ttl
	stop context.CancelFunc
	done sync.WaitGroup

	mu   sync.Mutex
	kept map[*Conn]func(error)
}

// NewKeepAlive returns a KeepAlive for connections that the server ends after ttl of
// silence, or already after limit if that is not 0. Close ends its goroutine.
func NewKeepAlive(ttl, limit time.Duration) *KeepAlive {
	if limit <= 0 {
		limit = ttl
	}
	ctx, stop := context.WithCancel(context.Background())
	k := &KeepAlive{ttl: ttl, idle: min(ttl, limit), stop: stop, kept: make(map[*Conn]func(error))}
	k.done.Go(func() { k.run(ctx) })
	return k
}

// Keep keeps c alive until Forget. If c is lost, it calls lost once, on a goroutine of its
// own, without the turn of c.
func (k *KeepAlive) Keep(c *Conn, lost func(error)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kept[c] = lost
}

// Forget ends Keep.
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

// Overdue returns an error if the server may have ended c by now: c was silent for nine
// tenths of the TTL, by the local monotonic clock. The rest is a margin, since the server
// counts from the moment when it sent its last answer.
func (k *KeepAlive) Overdue(c *Conn) error {
	if s := c.Silence(); s >= k.ttl-k.ttl/10 {
		return fmt.Errorf("the connection was silent for %v, with a lockTTL of %v", s.Round(time.Millisecond), k.ttl)
	}
	return nil
}

func (k *KeepAlive) run(ctx context.Context) {
	tick := time.NewTicker(k.idle / 8)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		var round sync.WaitGroup
		for _, c := range k.due() {
			round.Go(func() { k.ping(ctx, c) })
		}
		round.Wait()
	}
}

// due returns the connections that have been silent for a third of what they may be.
func (k *KeepAlive) due() (due []*Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for c := range k.kept {
		if c.Silence() >= k.idle/3 {
			due = append(due, c)
		}
	}
	return due
}

// ping pings c, unless a statement is running on it: then the server does not count it as
// idle.
func (k *KeepAlive) ping(ctx context.Context, c *Conn) {
	if !c.TryTurn() {
		return
	}
	k.mu.Lock()
	lost, kept := k.kept[c] // it may have been forgotten, and kept again, meanwhile
	k.mu.Unlock()
	if !kept {
		c.EndTurn()
		return
	}
	err := k.Overdue(c)
	if err == nil {
		pctx, cancel := server.Within(purpose.For(ctx, purpose.Renew), k.ttl/3)
		err = c.Ping(pctx)
		cancel()
	}
	c.EndTurn()
	if err != nil && ctx.Err() == nil {
		k.Forget(c)
		k.done.Go(func() { lost(lockerr.With(lockerr.ErrLost, err)) }) // the other connections must not wait for it
	}
}
