package handle

import (
	"slices"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// known are the strategies that there are. One that lies outside of transactions is
// made in [Handle.makeStrategies], too.
var known = []strategy.Traits{rowlock.Traits, lease.Traits, advisory.Traits, optimistic.Traits}

// Strategies are the names of the strategies, the default first.
func Strategies() (names []string) {
	for _, t := range known {
		names = append(names, t.Name)
	}
	return names
}

// traitsOf returns the traits of the strategy of that name, which the hint has checked.
func traitsOf(name string) strategy.Traits {
	return known[slices.IndexFunc(known, func(t strategy.Traits) bool { return t.Name == name })]
}

// Resources returns where the locks of h are kept, each once, sorted by their rows.
func (k *Handle) Resources(h *hint.Hint) ([]strategy.Resource, error) {
	resources := make([]strategy.Resource, len(h.Locks))
	for i, lock := range h.Locks {
		p, err := k.Resource(lock)
		if err != nil {
			return nil, err
		}
		p.LockContext = h.LockContext
		resources[i] = p
	}
	return strategy.Merge(resources), nil
}

// kind completes how a key is to be locked with what the handle says. Where keys
// share rows, nothing else is shared: who holds one key shared and asks for
// another one, which happens to be on the same row, would be refused.
func (k *Handle) kind(kind hint.Kind) hint.Kind {
	if kind.Strategy == hint.StrategyDefault {
		kind.Strategy = k.Settings.Strategy
	}
	if kind.TTL == 0 {
		kind.TTL = k.Settings.TTL
	}
	kind.Shared = kind.Shared && k.Settings.Stripes == 0
	return kind
}

// Resource returns where a lock is kept.
func (k *Handle) Resource(lock hint.Lock) (strategy.Resource, error) {
	if lock.Strategy == hint.StrategyDefault {
		lock.Strategy = k.Settings.Strategy
		if err := lock.Check(); err != nil {
			return strategy.Resource{}, &lockerr.Error{Op: "lock", Key: lock.Key, Strategy: lock.Strategy, Err: err}
		}
	}
	lock.Kind = k.kind(lock.Kind)
	p := strategy.Resource{Lock: lock, Traits: traitsOf(lock.Strategy), Row: lock.Key}
	switch {
	case !p.Traits.Table:
	case k.Settings.Stripes > 0:
		p.Row = keyrow.Stripe(lock.Key, k.Settings.Stripes)
	default:
		p.Row = keyrow.Name(lock.Key)
	}
	return p, nil
}

// Strategy is how the keys of the innermost With are locked, for errors.
func (k *Handle) Strategy(h *hint.Hint) string { return k.kind(h.Kind).Strategy }

// HoldIsTransaction reports whether a hold with h is one transaction, with all that runs in it.
// Under other strategies a hold goes beyond single transactions.
func (k *Handle) HoldIsTransaction(h *hint.Hint) bool {
	t := traitsOf(k.Strategy(h))
	return t.Inside || !t.Excludes
}

// Error is err of what was asked for with h.
func (k *Handle) Error(op string, h *hint.Hint, err error) error {
	return &lockerr.Error{Op: op, Key: h.Names(), Strategy: k.Strategy(h), Err: err}
}

// SetupError is a failure to get the lock table ready, or to reach the server
// for it.
func (k *Handle) SetupError(h *hint.Hint, err error) error {
	return k.Error("lock", h, strategy.Unreached(err))
}
