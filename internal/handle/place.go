package handle

import (
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Place is where a handle keeps a lock that a hint asks for.
type Place struct {
	strategy.Place
	k     *Handle     // that asks
	hints *hint.Scope // of the lock context that asks; nil if nobody will ask what it is told
}

// Tell lets the application ask for a number of the keys.
func (p Place) Tell(what hint.What, n uint64) {
	if p.hints != nil {
		p.hints.Tell(what, p.Key, n)
		for _, key := range p.Also {
			p.hints.Tell(what, key, n)
		}
	}
}

// Forget takes back what tell has told.
func (p Place) Forget(what hint.What) {
	if p.hints != nil {
		p.hints.Forget(what, p.Key)
		for _, key := range p.Also {
			p.hints.Forget(what, key)
		}
	}
}

// bare are places without what is the handle's.
func bare(places []Place) (out []strategy.Place) {
	for _, p := range places {
		out = append(out, p.Place)
	}
	return out
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

// Place returns where a lock is kept.
func (k *Handle) Place(lock hint.Lock) (Place, error) {
	if lock.Strategy == hint.StrategyDefault {
		lock.Strategy = k.Settings.Strategy
		if err := lock.Check(); err != nil {
			return Place{}, &lockerr.Error{Op: "lock", Key: lock.Key, Strategy: lock.Strategy, Err: err}
		}
	}
	lock.Kind = k.kind(lock.Kind)
	p := Place{Place: strategy.Place{Lock: lock, Traits: traitsOf(lock.Strategy), Row: lock.Key}, k: k}
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

// HoldIsTransaction reports whether a hold with h is a transaction.
func (k *Handle) HoldIsTransaction(h *hint.Hint) bool {
	return traitsOf(k.Strategy(h)).Transaction()
}
