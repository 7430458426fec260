package unit

import (
	"context"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// has reports whether what p asks for is held, by the unit of work or a hold
// around it.
func (s *scope) has(p strategy.Place, around []*guard) (bool, error) {
	keeps := func(g *guard) bool { return g.keeps(s.k, p) }
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
// can ask k for, too.
func (s *scope) held(ctx context.Context, k *handle.Handle) (tickets []*queue.Ticket, places []strategy.Place) {
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
			if g.k.Shares(k, g.Strategy) {
				places = append(places, g.Place)
			}
		}
	}
	if s != nil && s.unit != nil {
		tickets = append(tickets, s.unit.tickets...)
	}
	return tickets, places
}

// asks is who asks for a connection under h in s, pooled as for caller. Who is about to wait in
// the server for a lock counts for that, unless it holds something: it may be what another
// one there waits for.
func (s *scope) asks(ctx context.Context, h *hint.Hint, pooled, blocks bool) handle.Caller {
	by := s.caller(pooled)
	if s.holds(h) {
		tickets, _ := s.held(ctx, s.k)
		by.Urgent = slices.ContainsFunc(tickets, (*queue.Ticket).Awaited)
		blocks = false
	}
	by.Blocks = blocks
	return by
}

// holds reports whether a caller with h in s holds something.
func (s *scope) holds(h *hint.Hint) bool {
	return s.unit != nil || len(s.guards) > 0 || len(enclosing(h)) > 0
}

// takeGuards takes the guards of p for the unit of work, all or none. undo gives them back,
// where what was to come next fails. Versions are read on what is lent. begin is the transaction
// that may begin with what is taken; nil for none.
func (s *scope) takeGuards(ctx context.Context, p *plan, on lent, begin *strategy.Beginning) (undo func(), err error) {
	before := len(s.guards)
	undo = func() { s.drop(before) }
	if p.wait.Left() == 0 {
		s.k.Tenures.Settle(ctx, p.guards)
	}
	var versions []strategy.Place
	for _, place := range p.guards {
		if place.Traits.Excludes {
			err = s.takeLock(ctx, p, place, begin)
		} else {
			versions = append(versions, place)
		}
		if err != nil {
			undo()
			return nil, err
		}
	}
	versions, err = s.uncovered(versions)
	if err == nil && len(versions) > 0 {
		err = s.remember(ctx, p, versions, on, begin)
	}
	if err != nil {
		undo()
		return nil, err
	}
	return undo, nil
}

// takeLock takes one guard that keeps others out.
func (s *scope) takeLock(ctx context.Context, p *plan, place strategy.Place, begin *strategy.Beginning) error {
	var taken *guard
	known := make(chan struct{}) // closed when taken is set
	taken, err := takeGuard(ctx, s.k, p.l, p.by, place, p.wait.Left(), begin, func() { <-known; s.lost(taken) })
	close(known)
	if err != nil {
		return err
	}
	s.add(taken)
	return s.unchanged(taken)
}

// remember notes the versions of places, in one statement: one strategy alone compares.
func (s *scope) remember(ctx context.Context, p *plan, places []strategy.Place, on lent, begin *strategy.Beginning) error {
	seen, ctx := s.k.Observe(ctx, places...)
	by := p.l.By(places[0])
	held, err := on.take(ctx, by, strategy.Request{
		Places: places, Wait: p.wait.Left(), Wants: s.k.WaitingFor(p.by, p.l.Sought(places...)), Begin: begin,
	})
	err = strategy.Naming(err, places)
	seen.Answered(nil, nil, 0, err)
	if err != nil {
		return err
	}
	for i, v := range held {
		g := newGuard(s.k, places[i], by, v)
		g.seen, seen = seen, nil
		s.add(g)
	}
	return nil
}

// unchanged returns ErrConflict if a lease that was taken just now comes after somebody
// has changed what the unit of work has remembered before.
func (s *scope) unchanged(taken *guard) error {
	for _, g := range s.guards {
		if g.version() != 0 && taken.covers(g.k, g.Place) {
			return taken.again(g.remembered())
		}
	}
	return nil
}

// uncovered returns those of places whose versions a lease of the unit of work
// does not stand for.
func (s *scope) uncovered(places []strategy.Place) (rest []strategy.Place, err error) {
	for _, p := range places {
		at := slices.IndexFunc(s.guards, func(g *guard) bool { return g.covers(s.k, p) })
		if at < 0 {
			rest = append(rest, p)
			continue
		}
		if err := s.guards[at].again(p); err != nil {
			return nil, err
		}
	}
	return rest, nil
}
