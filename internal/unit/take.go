package unit

import (
	"context"
	"slices"

	"github.com/mysqllock/mysqllock/internal/strategy"
)

// takeGrants takes the grants of p for the unit of work, all or none. undo gives them back,
// where what was to come next fails. Versions are read on what is lent. begin is the transaction
// that may begin with what is taken; nil for none.
func (s *ctxState) takeGrants(ctx context.Context, p *plan, on lent, begin *strategy.Beginning) (undo func(), err error) {
	before := len(s.grants)
	undo = func() { s.drop(before, nil) }
	if p.wait.Left() == 0 {
		s.k.AwaitEnding(ctx, p.outside)
	}
	var versions []strategy.Resource
	for _, resource := range p.outside {
		if resource.Traits.Excludes {
			err = s.takeLock(ctx, p, resource, begin)
		} else {
			versions = append(versions, resource)
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

// takeLock takes one grant that keeps others out.
func (s *ctxState) takeLock(ctx context.Context, p *plan, resource strategy.Resource, begin *strategy.Beginning) error {
	var taken *grant
	known := make(chan struct{}) // closed when taken is set
	taken, err := takeGrant(ctx, s.k, p.l, p.by, resource, p.wait.Left(), begin, func() { <-known; s.lost(taken) })
	close(known)
	if err != nil {
		return err
	}
	s.add(taken)
	return s.unchanged(taken)
}

// remember notes the versions of resources, in one statement: one strategy alone compares.
func (s *ctxState) remember(ctx context.Context, p *plan, resources []strategy.Resource, on lent, begin *strategy.Beginning) error {
	seen, ctx := s.k.Observe(ctx, resources...)
	by := p.l.By(resources[0])
	held, err := on.take(ctx, by, strategy.Request{
		Resources: resources, Wait: p.wait.Left(), Wants: s.k.WaitingFor(p.by, p.l.Sought(resources...)), Begin: begin,
	})
	err = strategy.Naming(err, resources)
	seen.Answered(nil, nil, 0, err)
	if err != nil {
		return err
	}
	for i, v := range held {
		g := newGrant(s.k, resources[i], by, v)
		g.seen, seen = seen, nil
		s.add(g)
	}
	return nil
}

// unchanged returns ErrConflict if a lease that was taken just now comes after somebody
// has changed what the unit of work has remembered before.
func (s *ctxState) unchanged(taken *grant) error {
	for _, g := range s.grants {
		if g.version() != 0 && taken.covers(g.k, g.Resource) {
			return taken.again(g.remembered())
		}
	}
	return nil
}

// uncovered returns those of resources whose versions a lease of the unit of work
// does not stand for.
func (s *ctxState) uncovered(resources []strategy.Resource) (rest []strategy.Resource, err error) {
	for _, p := range resources {
		at := slices.IndexFunc(s.grants, func(g *grant) bool { return g.covers(s.k, p) })
		if at < 0 {
			rest = append(rest, p)
			continue
		}
		if err := s.grants[at].again(p); err != nil {
			return nil, err
		}
	}
	return rest, nil
}
