package handle

import (
	"slices"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// known are the traits of all strategies. [Handle.makeStrategies] makes those that lie outside of transactions.
var known = []strategy.Traits{rowlock.Traits, lease.Traits, advisory.Traits, optimistic.Traits}

// Strategies returns the names of the strategies, the default first.
func Strategies() (names []string) {
	for _, t := range known {
		names = append(names, t.Name)
	}
	return names
}

// traitsOf returns the traits of the strategy of that name. The hint has checked the name.
func traitsOf(name string) strategy.Traits {
	return known[slices.IndexFunc(known, func(t strategy.Traits) bool { return t.Name == name })]
}

// Resources returns the resources that keep the locks of hinted, each once, sorted by their rows.
func (h *Handle) Resources(hinted *hint.Hint) ([]strategy.Resource, error) {
	resources := make([]strategy.Resource, len(hinted.Locks))
	for i, lock := range hinted.Locks {
		resource, err := h.Resource(lock)
		if err != nil {
			return nil, err
		}
		resource.LockContext = hinted.LockContext
		resources[i] = resource
	}
	return strategy.Merge(resources), nil
}

// kind completes the kind of a lock by the settings of the handle. Where keys share rows, no lock is shared:
// a caller that holds one key shared, and asks for another key that happens to be on the same row, would
// be refused.
func (h *Handle) kind(kind hint.Kind) hint.Kind {
	if kind.Strategy == hint.StrategyDefault {
		kind.Strategy = h.Settings.Strategy
	}
	if kind.TTL == 0 {
		kind.TTL = h.Settings.TTL
	}
	kind.Shared = kind.Shared && h.Settings.Stripes == 0
	return kind
}

// Resource returns the resource that keeps a lock.
func (h *Handle) Resource(lock hint.Lock) (strategy.Resource, error) {
	if lock.Strategy == hint.StrategyDefault {
		lock.Strategy = h.Settings.Strategy
		if err := lock.Check(); err != nil {
			return strategy.Resource{}, &lockerr.Error{Op: "lock", Key: lock.Key, Strategy: lock.Strategy, Err: err}
		}
	}
	lock.Kind = h.kind(lock.Kind)
	resource := strategy.Resource{Lock: lock, Traits: traitsOf(lock.Strategy), Row: lock.Key}
	switch {
	case !resource.Traits.Table:
	case h.Settings.Stripes > 0:
		resource.Row = keyrow.Stripe(lock.Key, h.Settings.Stripes)
	default:
		resource.Row = keyrow.Name(lock.Key)
	}
	return resource, nil
}

// Strategy returns the strategy of the innermost With, for errors.
func (h *Handle) Strategy(hinted *hint.Hint) string { return h.kind(hinted.Kind).Strategy }

// HoldIsTransaction reports whether a hold with hinted is one transaction, together with all that runs in it.
// Under other strategies a hold may have many transactions.
func (h *Handle) HoldIsTransaction(hinted *hint.Hint) bool {
	t := traitsOf(h.Strategy(hinted))
	return t.Inside || !t.Excludes
}

// Error returns err as the error of a request with hinted.
func (h *Handle) Error(op string, hinted *hint.Hint, err error) error {
	return &lockerr.Error{Op: op, Key: hinted.Names(), Strategy: h.Strategy(hinted), Err: err}
}

// SetupError returns err as the error of a request for which the lock table could not be made ready, or the
// server not be reached.
func (h *Handle) SetupError(hinted *hint.Hint, err error) error {
	return h.Error("lock", hinted, strategy.Unreached(err))
}
