package unit

import (
	"context"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/lockerr"
)

// wanted returns which locks of h are not held yet.
func (s *scope) wanted(h *hint.Hint) (handle.Wanted, error) {
	around := enclosing(h)
	return s.k.Wanted(h, func(p handle.Place) (bool, error) { return s.has(p, around) })
}

// has reports whether what p asks for is held, by the unit of work or a hold
// around it.
func (s *scope) has(p handle.Place, around []*guard) (bool, error) {
	keeps := func(g *guard) bool { return g.keeps(p) }
	if at := slices.IndexFunc(s.guards, keeps); at >= 0 {
		return true, s.guards[at].join(p)
	}
	if at := slices.IndexFunc(around, keeps); at >= 0 {
		if !p.Traits.Excludes {
			return false, &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
				"a hold around has a lease on the key, which keeps others out, but not the transactions that run side by side in the hold"))}
		}
		return true, around[at].join(p)
	}
	if !p.Traits.Table {
		return false, nil
	}
	locked := s.unit.row(p.Row)
	if p.Slots > 0 {
		if slot, ok := s.unit.slotOf(p); ok {
			p.Tell(hint.ToldSlot, uint64(slot))
			return true, nil
		}
	}
	switch {
	case locked == nil:
		return false, nil
	case locked.Shared && !p.Shared:
		return false, p.Upgrade()
	}
	return p.Version == 0, nil // a version that was given is compared all the same
}

// remembers reports whether the unit of work keeps a version, which its commit
// compares.
func (s *scope) remembers() bool {
	return slices.ContainsFunc(s.guards, func(g *guard) bool { return g.version() != 0 })
}

// caller is who asks for a lock in s, which is nil outside of any lock context. pooled
// means that it occupies a connection of database/sql while it waits.
func (s *scope) caller(pooled bool) handle.Caller {
	c := handle.Caller{Pooled: pooled, Has: s.held}
	if s != nil {
		c.Asked = &s.asked
	}
	return c
}

// held returns what a caller has that waits in ctx and s: its tickets, and what others
// can ask for.
func (s *scope) held(ctx context.Context) (tickets []*queue.Ticket, places []handle.Place) {
	var guards []*guard
	if h, ok := hint.From(ctx); ok {
		guards = enclosing(h) // of other handles, too
	}
	if s != nil {
		guards = slices.Concat(guards, s.guards)
		if s.unit != nil {
			for _, row := range s.unit.rows {
				places = append(places, row.Place)
			}
		}
	}
	for _, g := range guards {
		if g != nil && g.line() != nil {
			tickets = append(tickets, g.line())
			places = append(places, g.Place)
		}
	}
	if s != nil && s.unit != nil {
		tickets = append(tickets, s.unit.tickets...)
	}
	return tickets, places
}

// holds reports whether a caller with h in s holds something.
func (s *scope) holds(h *hint.Hint) bool {
	return s.unit != nil || len(s.guards) > 0 || len(enclosing(h)) > 0
}
