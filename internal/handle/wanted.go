package handle

import (
	"slices"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// Wanted is what of a hint is not held yet.
type Wanted struct {
	Rows   []Place // to be locked in the transaction, sorted
	Slots  []Place // of each of which one row is to be locked in the transaction
	Guards []Place // to be taken outside of it, sorted
}

// Nothing reports whether all is held.
func (w Wanted) Nothing() bool { return !w.InTransaction() && len(w.Guards) == 0 }

// InTransaction reports whether anything is to be locked in the transaction.
func (w Wanted) InTransaction() bool { return len(w.Rows)+len(w.Slots) > 0 }

// Locks reports whether anything is to be locked, not only remembered.
func (w Wanted) Locks() bool {
	return w.InTransaction() || slices.ContainsFunc(w.Guards, func(p Place) bool { return p.Traits.Excludes })
}

// Versions reports whether a version is to be remembered: of what was read before,
// it says nothing.
func (w Wanted) Versions() bool {
	return slices.ContainsFunc(w.Guards, func(p Place) bool { return !p.Traits.Excludes })
}

// Wanted returns which locks of h are not held yet: has reports what the caller holds.
func (k *Handle) Wanted(h *hint.Hint, has func(Place) (bool, error)) (w Wanted, err error) {
	places, err := k.places(h)
	if err != nil {
		return Wanted{}, err
	}
	for _, p := range places {
		held, err := has(p)
		if err == nil && !held {
			err = k.beside(p)
		}
		if err == nil && !held {
			err = w.add(p)
		}
		if err != nil {
			return Wanted{}, err
		}
	}
	return w, nil
}

// places returns where the locks of h are kept, each once, sorted by their rows.
func (k *Handle) places(h *hint.Hint) (places []Place, err error) {
	var all []strategy.Place
	for _, lock := range h.Locks {
		p, err := k.Place(lock)
		if err != nil {
			return nil, err
		}
		all = append(all, p.Place)
	}
	for _, p := range strategy.Merge(all) {
		places = append(places, Place{p, k, h.Scope})
	}
	return places, nil
}

// add adds what is not held to what is wanted, unless something that is wanted
// already covers it.
func (w *Wanted) add(p Place) error {
	sameRow := func(other Place) bool { return other.Row == p.Row && other.Space() == strategy.Rows }
	if at := slices.IndexFunc(w.Rows, sameRow); at >= 0 {
		switch {
		case w.Rows[at].Shared:
			return p.Upgrade()
		case p.Slots > 0:
			p.Tell(hint.ToldSlot, 0)
			return nil
		case !p.Traits.Excludes && p.Version == 0: // nobody else can change it
			return nil
		}
	}
	if p.Slots > 0 && slices.ContainsFunc(w.Guards, sameRow) {
		p.Tell(hint.ToldSlot, 0)
		return nil
	}
	switch {
	case !p.Traits.Inside:
		w.Guards = append(w.Guards, p)
	case p.Slots > 0:
		w.Slots = append(w.Slots, p)
	default:
		w.Rows = append(w.Rows, p)
	}
	return nil
}
