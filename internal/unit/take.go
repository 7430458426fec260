package unit

import (
	"context"
	"slices"

	"github.com/mysqllock/mysqllock/internal/strategy"
)

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
