package unit

import (
	"context"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// plan is what a hint asks for and its lock context does not hold yet. It is worked out once,
// for a statement or a BEGIN, and passed on to whoever takes it.
type plan struct {
	h        *hint.Hint
	around   []*guard         // of the holds that it is inside of
	missing  []strategy.Place // all that is not held, sorted
	guards   []strategy.Place // of these, what is to be taken outside of the transaction
	rows     []strategy.Place // to be locked in the transaction, all in one request
	slots    []strategy.Place // of each of which one row is to be locked in the transaction
	locks    bool             // something is to be locked, not only remembered
	versions bool             // a version is to be remembered
	compares bool             // the commit compares versions: such, or those that are remembered already

	// With what it is taken: see ready.
	l        *handle.Locks
	by       handle.Caller
	wait     handle.Budget
	requests []request // what is to be locked in the transaction, one after the other
}

// request is what to ask the locker for, and what it is for.
type request struct {
	rowlock.Request
	places []strategy.Place
	seen   *handle.Observation // once it is asked for
}

// plan works out what of h is not held yet.
func (s *scope) plan(h *hint.Hint) (*plan, error) {
	places, err := s.k.Places(h)
	if err != nil {
		return nil, err
	}
	p := &plan{h: h}
	if len(h.Holds) > 0 {
		p.around = enclosing(h)
	}
	for _, place := range places {
		held, err := s.has(place, p.around)
		if err == nil && !held {
			err = p.add(place)
		}
		if err != nil {
			return nil, err
		}
	}
	p.compares = p.versions || len(s.guards) > 0 && s.remembers()
	return p, nil
}

// add adds what is not held, unless something that is wanted already covers it.
func (p *plan) add(place strategy.Place) error {
	sameRow := func(other strategy.Place) bool { return other.Row == place.Row && other.Space() == strategy.Rows }
	if at := slices.IndexFunc(p.rows, sameRow); at >= 0 {
		switch {
		case p.rows[at].Shared:
			return place.Upgrade()
		case place.Slots > 0:
			place.Tell(hint.ToldSlot, 0)
			return nil
		case !place.Traits.Excludes && place.Version == 0: // nobody else can change it
			return nil
		}
	}
	if place.Slots > 0 && slices.ContainsFunc(p.guards, sameRow) {
		place.Tell(hint.ToldSlot, 0)
		return nil
	}
	switch {
	case !place.Traits.Inside:
		p.guards = append(p.guards, place)
	case place.Slots > 0:
		p.slots = append(p.slots, place)
	default:
		p.rows = append(p.rows, place)
	}
	p.missing = append(p.missing, place)
	p.locks = p.locks || place.Traits.Excludes
	p.versions = p.versions || !place.Traits.Excludes
	return nil
}

// inTransaction reports whether anything is to be locked in the transaction.
func (p *plan) inTransaction() bool { return len(p.rows)+len(p.slots) > 0 }

// ready gets ready that with which p is taken, once: the wait begins with it. pooled means that
// the caller occupies a connection of database/sql while it waits.
func (p *plan) ready(ctx context.Context, s *scope, pooled bool) error {
	if p.l != nil {
		return nil
	}
	l, err := s.k.Use(ctx, p.h)
	if err != nil {
		return s.k.SetupError(p.h, err)
	}
	if err := s.k.Taken(p.h.Scope, false, p.missing...); err != nil {
		return err
	}
	p.l, p.by, p.wait = l, s.caller(pooled), s.k.Budget(p.h)
	if len(p.rows) > 0 {
		p.requests = append(p.requests, request{places: p.rows, Request: rowlock.Request{
			Label: strategy.Label(p.rows), Keys: handle.InLine(p.rows), Waiting: s.k.WaitingFor(p.by, l.Sought(p.rows...)),
		}})
	}
	for i := range p.slots {
		p.requests = append(p.requests, request{places: p.slots[i : i+1], Request: rowlock.Request{
			Label: p.slots[i].Key, Slots: p.slots[i].SlotRows(), Waiting: s.k.WaitingFor(p.by, l.Sought(p.slots[i])),
		}})
	}
	return nil
}
