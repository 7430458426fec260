package lease

import (
	"context"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/pool"
)

// Traits of leases, for those who choose among strategies.
var Traits = strategy.Traits{Name: hint.StrategyLease, Table: true, Excludes: true}

// Strategy returns the Locker as units of work use it.
func (l *Locker) Strategy() strategy.Strategy { return asStrategy{l} }

type asStrategy struct{ *Locker }

func (k asStrategy) Traits() strategy.Traits { return Traits }

// Take takes one lease, or one of a key's slots.
func (k asStrategy) Take(ctx context.Context, r strategy.Request) ([]strategy.Grant, error) {
	if r.Resources[0].Slots > 0 {
		s, err := k.acquireSlot(ctx, r)
		if err != nil {
			return nil, err
		}
		return []strategy.Grant{s}, nil
	}
	p := r.Resources[0]
	ask := leaseOn(p, p.Row, r.Wait, r.Wants, r.Lost)
	ask.Begin = r.Begin
	held, err := k.Acquire(ctx, ask)
	if err != nil {
		return nil, err
	}
	return []strategy.Grant{held}, nil
}

// leaseOn asks for a lease on row, as the resource says.
func leaseOn(p strategy.Resource, row string, wait time.Duration, waiting strategy.Waiting, lost func()) Request {
	return Request{
		Key: row, TTL: p.TTL, MinHold: p.MinHold, MaxHold: p.MaxHold, Wait: wait, Waiting: waiting,
		Lost: func(error) { lost() },
	}
}

// Check leaves the check to the COMMIT itself.
func (k asStrategy) Check(_ context.Context, c *pool.Conn, held []strategy.Grant, _ bool) (strategy.Check, error) {
	var leases []*Lease
	for _, h := range held {
		switch h := h.(type) {
		case *Lease:
			leases = append(leases, h)
		case *Slot:
			leases = append(leases, h.Lease)
		}
	}
	check := strategy.Check{
		Commit:  func(ctx context.Context) (done, unknown bool, err error) { return k.Commit(ctx, c, leases) },
		Fence:   func(ctx context.Context) error { return k.Fence(ctx, c.Conn, leases) },
		Lasting: true,
	}
	if len(leases) == 1 && leases[0].txConn != nil && leases[0].txConn.Conn == c.Conn && k.begins() { // it was taken with BEGIN
		check.Release = func(ctx context.Context) (done, unknown bool, err error) {
			return k.CommitAndRelease(ctx, c, leases[0])
		}
	}
	return check, nil
}
