package unit

import (
	"context"

	"github.com/mysqllock/mysqllock/internal/strategy"
)

// takeGrants takes the grants of p for the unit of work, all or none. undo gives them back, if the
// caller's next step fails. lender lends the connection on which the caller goes on; nil for none.
func (cs *ctxState) takeGrants(ctx context.Context, p *plan, lender *strategy.Lender) (undo func(), err error) {
	before := len(cs.grants.list)
	undo = func() { cs.drop(before, nil) }
	if p.wait.Left() == 0 {
		cs.handle.AwaitEnding(ctx, p.outside)
	}
	var versions []strategy.Resource
	for _, resource := range p.outside {
		if resource.Traits.Excludes {
			err = cs.takeLock(ctx, p, resource, lender)
		} else {
			versions = append(versions, resource)
		}
		if err != nil {
			undo()
			return nil, err
		}
	}
	if len(versions) > 0 {
		if err := cs.remember(ctx, p, versions, lender); err != nil {
			undo()
			return nil, err
		}
	}
	return undo, nil
}

// takeLock takes one grant that keeps others out.
func (cs *ctxState) takeLock(ctx context.Context, p *plan, resource strategy.Resource, lender *strategy.Lender) error {
	var taken *grant
	p.asked = true
	known := make(chan struct{}) // closed when taken is set
	taken, err := takeGrant(ctx, cs.handle, p.l, p.asker, resource, p.wait.Left(), lender, func() { <-known; cs.lost(taken) })
	close(known)
	if err != nil {
		return err
	}
	cs.grants.add(taken)
	return nil
}

// remember takes the versions of resources, in one statement. One strategy is enough, since only one
// remembers versions.
func (cs *ctxState) remember(ctx context.Context, p *plan, resources []strategy.Resource, lender *strategy.Lender) error {
	p.asked = true
	seen, ctx := cs.handle.Observe(ctx, resources...)
	taker := p.l.By(resources[0])
	held, err := taker.Take(ctx, strategy.Request{
		Resources: resources, Wait: p.wait.Left(), Wants: cs.handle.WaitingFor(p.asker, p.l.Sought(resources...)), Lends: lender,
	})
	err = strategy.Naming(err, resources)
	seen.Answered(nil, nil, 0, err)
	if err != nil {
		return err
	}
	for i, v := range held {
		g := newGrant(cs.handle, resources[i], taker, v)
		g.seen, seen = seen, nil
		cs.grants.add(g)
	}
	return nil
}
