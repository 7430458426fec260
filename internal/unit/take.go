package unit

import (
	"context"

	"github.com/mysqllock/mysqllock/internal/strategy"
)

// takeGrants takes the grants of p for the unit of work, all or none. undo gives them back,
// where what was to come next fails. on lends the connection on which the caller goes on; nil for none.
func (s *ctxState) takeGrants(ctx context.Context, p *plan, on *strategy.Lender) (undo func(), err error) {
	before := len(s.grants)
	undo = func() { s.drop(before, nil) }
	if p.wait.Left() == 0 {
		s.k.AwaitEnding(ctx, p.outside)
	}
	var versions []strategy.Resource
	for _, resource := range p.outside {
		if resource.Traits.Excludes {
			err = s.takeLock(ctx, p, resource, on)
		} else {
			versions = append(versions, resource)
		}
		if err != nil {
			undo()
			return nil, err
		}
	}
	if len(versions) > 0 {
		if err := s.remember(ctx, p, versions, on); err != nil {
			undo()
			return nil, err
		}
	}
	return undo, nil
}

// takeLock takes one grant that keeps others out.
func (s *ctxState) takeLock(ctx context.Context, p *plan, resource strategy.Resource, on *strategy.Lender) error {
	var taken *grant
	p.asked = true
	known := make(chan struct{}) // closed when taken is set
	taken, err := takeGrant(ctx, s.k, p.l, p.by, resource, p.wait.Left(), on, func() { <-known; s.lost(taken) })
	close(known)
	if err != nil {
		return err
	}
	s.add(taken)
	return nil
}

// remember notes the versions of resources, in one statement: one strategy alone compares.
func (s *ctxState) remember(ctx context.Context, p *plan, resources []strategy.Resource, on *strategy.Lender) error {
	p.asked = true
	seen, ctx := s.k.Observe(ctx, resources...)
	by := p.l.By(resources[0])
	held, err := by.Take(ctx, strategy.Request{
		Resources: resources, Wait: p.wait.Left(), Wants: s.k.WaitingFor(p.by, p.l.Sought(resources...)), Lends: on,
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
