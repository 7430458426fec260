package pool

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Keeper pings connections that the server would end for being idle, and
// notices when one can no longer be relied on. It has one goroutine, however
// many connections it keeps.
type Keeper struct {
	ttl  time.Duration
	stop context.CancelFunc
	done sync.WaitGroup

	mu   sync.Mutex
	kept map[*Conn]func(error)
}

// NewKeeper returns a keeper for connections that the server ends after ttl of
// silence. Close it to end its goroutine.
func NewKeeper(ttl time.Duration) *Keeper {
	ctx, stop := context.WithCancel(context.Background())
	k := &Keeper{ttl: ttl, stop: stop, kept: make(map[*Conn]func(error))}
	k.done.Go(func() { k.run(ctx) })
	return k
}

// Keep keeps c alive until Forget. When c has to be given up, lost is called,
// once, without the turn, on a goroutine of its own.
func (k *Keeper) Keep(c *Conn, lost func(error)) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.kept[c] = lost
}

// Forget ends Keep.
func (k *Keeper) Forget(c *Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.kept, c)
}

// Close ends the keeper, and waits for what it has told to be done with it.
func (k *Keeper) Close() {
	k.stop()
	k.done.Wait()
}

// Overdue returns an error where the server may by now have ended c: it was
// silent for nearly the TTL, by the local monotonic clock. The rest is for the
// time that the last answer was under way, since the server counts from when it
// sent it.
func (k *Keeper) Overdue(c *Conn) error {
	if s := c.Silence(); s >= k.ttl-k.ttl/10 {
		return fmt.Errorf("the connection was silent for %v, with a lockTTL of %v", s.Round(time.Millisecond), k.ttl)
	}
	return nil
}

func (k *Keeper) run(ctx context.Context) {
	tick := time.NewTicker(k.ttl / 8)
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

// due returns the connections that have been silent for a third of the TTL.
func (k *Keeper) due() (due []*Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for c := range k.kept {
		if c.Silence() >= k.ttl/3 {
			due = append(due, c)
		}
	}
	return due
}

// ping leaves a connection alone on which a statement runs: the server does
// not count that as idle.
func (k *Keeper) ping(ctx context.Context, c *Conn) {
	if !c.TryTake() {
		return
	}
	k.mu.Lock()
	lost, kept := k.kept[c] // it may have been given back, and kept again, while we looked
	k.mu.Unlock()
	if !kept {
		c.Give()
		return
	}
	err := k.Overdue(c)
	if err == nil {
		pctx, cancel := context.WithTimeout(ctx, k.ttl/3)
		err = c.Ping(pctx)
		cancel()
	}
	c.Give()
	if err != nil && ctx.Err() == nil {
		k.Forget(c)
		k.done.Go(func() { lost(lockerr.With(lockerr.ErrLost, err)) }) // others must not wait for it
	}
}
