package advisory

import (
	"context"
	"slices"
	"strconv"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/pool"
)

// Traits of advisory locks, for those who choose among strategies.
var Traits = strategy.Traits{Name: hint.StrategyAdvisory, Excludes: true, HearsClose: true}

// Strategy returns the Locker as units of work use it.
func (l *Locker) Strategy() strategy.Strategy { return asStrategy{l} }

type asStrategy struct{ *Locker }

func (k asStrategy) Traits() strategy.Traits { return Traits }

// Take takes one lock.
func (k asStrategy) Take(ctx context.Context, r strategy.Request) ([]strategy.Grant, error) {
	lock, err := k.Acquire(ctx, Request{
		Key: r.Resources[0].Row, Wait: r.Wait, Waiting: r.Wants, Begin: r.Begin, Lost: func(error) { r.Lost() },
	})
	if err != nil {
		return nil, err
	}
	return []strategy.Grant{lock}, nil
}

// Check leaves the check to the COMMIT itself, where it can: on a connection of which it is
// known how to end it, should its answer be lost.
func (k asStrategy) Check(ctx context.Context, c *pool.Conn, held []strategy.Grant, _ bool) (strategy.Check, error) {
	locks := make([]*Lock, len(held))
	for i, h := range held {
		locks[i] = h.(*Lock)
	}
	id := c.KnownID()
	fence := func(ctx context.Context) (err error) {
		if id, err = k.Locker.Check(ctx, c.Conn, locks); err == nil && id != c.KnownID() {
			err = c.SetID(strconv.FormatUint(id, 10))
		}
		return err
	}
	check := strategy.Check{Unsure: func(ctx context.Context) {
		if !slices.ContainsFunc(locks, func(lock *Lock) bool { return lock.txConn != c }) { // c holds them until its COMMIT is over
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, slack)
			defer cancel()
		}
		k.AwaitEnd(ctx, id, locks)
	}}
	if id == 0 || !k.commits() {
		return check, fence(ctx)
	}
	check.Fence = fence
	check.Commit = func(ctx context.Context) (done, unknown bool, err error) {
		return k.Commit(ctx, c, locks, nil)
	}
	if at := slices.IndexFunc(locks, func(lock *Lock) bool { return lock.txConn == c }); at >= 0 {
		check.Release = func(ctx context.Context) (done, unknown bool, err error) {
			return k.Commit(ctx, c, locks, locks[at])
		}
	}
	return check, nil
}
