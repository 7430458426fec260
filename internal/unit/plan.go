package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// plan is the locks and versions of a hint that its lock context does not hold yet. It is made once for a
// statement or a BEGIN, and passed on until they are taken.
type plan struct {
	h        *hint.Hint
	around   []*grant            // grants of the holds around
	missing  []strategy.Resource // all that is to be taken, sorted
	outside  []strategy.Resource // those of missing that are to be taken outside of the transaction
	rows     []strategy.Resource // those that are to be locked in the transaction, all in one request
	slots    []strategy.Resource // those with slots: one row of each is to be locked in the transaction
	locks    bool                // at least one of missing is a lock, and not a version
	versions bool                // at least one of missing is a version
	compares bool                // the commit is to compare versions: of missing, or remembered before
	start    time.Time           // when the plan was made
	asked    bool                // a lock of the plan was asked for, and that tells the observer

	// What the locks are taken with: see ready.
	keeps    *pool.Conn // the connection that the caller has in its hand while it waits; nil for none
	l        *handle.Locks
	asker    handle.Caller
	wait     handle.Budget
	requests []request // for rows and slots, to be sent one after the other
}

// request asks the locker for row locks. resources are what the rows are for.
type request struct {
	rowlock.Request
	resources []strategy.Resource
	seen      *handle.Observation // nil before the locks are asked for
}

// plan returns a plan of what h asks for and is not held yet.
func (cs *ctxState) plan(h *hint.Hint) (*plan, error) {
	resources, err := cs.handle.Resources(h)
	if err != nil {
		return nil, err
	}
	if err := cs.checkMixed(resources); err != nil {
		return nil, err
	}
	p := &plan{h: h, start: time.Now(), around: outerGrants(h)}
	for _, resource := range resources {
		held, err := cs.holdsAlready(resource, p.around)
		if err == nil && !held {
			err = p.add(resource)
		}
		if err != nil {
			return nil, err
		}
	}
	p.compares = p.versions || len(cs.grants.list) > 0 && cs.remembers()
	return p, nil
}

// checkMixed returns lockerr.ErrUnsafe if resources and what the unit of work holds are not all locks, or all
// versions.
func (cs *ctxState) checkMixed(resources []strategy.Resource) error {
	var locked, version *strategy.Resource
	note := func(resource *strategy.Resource) {
		if resource.Traits.Excludes {
			locked = resource
		} else {
			version = resource
		}
	}
	for i := range resources {
		note(&resources[i])
	}
	for _, g := range cs.grants.list {
		note(&g.Resource)
	}
	if cs.unit != nil {
		for _, r := range cs.unit.rowLocks.rows {
			note(&r.Resource)
		}
	}
	if locked == nil || version == nil {
		return nil
	}
	return &lockerr.Error{Op: "lock", Key: version.Key, Strategy: version.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"the lock context also asks for %q, by the strategy %s, and an optimistic version goes with no lock; "+
			"keep both keys by one strategy, or give each a lock context of its own, "+
			"by lockctx.With on the context from before the other one", locked.Key, locked.Strategy))}
}

// add adds a resource that is not held, unless something in the plan covers it already.
func (p *plan) add(resource strategy.Resource) error {
	sameRow := func(other strategy.Resource) bool { return other.Row == resource.Row && other.Space() == strategy.Rows }
	if i := slices.IndexFunc(p.rows, sameRow); i >= 0 {
		switch {
		case p.rows[i].Shared:
			return resource.Upgrade()
		case resource.Slots > 0:
			resource.Tell(hint.ToldSlot, 0)
			return nil
		}
	}
	if resource.Slots > 0 && slices.ContainsFunc(p.outside, sameRow) {
		resource.Tell(hint.ToldSlot, 0)
		return nil
	}
	switch {
	case !resource.Traits.Inside:
		p.outside = append(p.outside, resource)
	case resource.Slots > 0:
		p.slots = append(p.slots, resource)
	default:
		p.rows = append(p.rows, resource)
	}
	p.missing = append(p.missing, resource)
	p.locks = p.locks || resource.Traits.Excludes
	p.versions = p.versions || !resource.Traits.Excludes
	return nil
}

// refused tells an observer that p has failed with err before any of its locks was asked for. It does
// nothing if err is nil.
func (p *plan) refused(ctx context.Context, k *handle.Handle, err error) {
	if err == nil || p.asked || len(p.missing) == 0 || errors.Is(err, driver.ErrBadConn) { // after ErrBadConn database/sql tries again
		return
	}
	p.asked = true
	k.Refused(ctx, p.start, err, p.missing...)
}

// inTransaction reports whether anything is to be locked in the transaction.
func (p *plan) inTransaction() bool { return len(p.rows)+len(p.slots) > 0 }

// prepare prepares what p is taken with, once. pooled: see prepareWith.
func (p *plan) prepare(ctx context.Context, cs *ctxState, pooled bool) error {
	if p.l != nil {
		return nil
	}
	l, err := locksFor(ctx, cs.handle, p.h, false, p.missing...)
	if err == nil {
		p.prepareWith(cs, l, pooled)
	}
	return err
}

// locksFor returns the Locks with which h takes locks now. It fails if one of resources would never be
// free: see Handle.Taken.
func locksFor(
	ctx context.Context, k *handle.Handle, h *hint.Hint, onlyElsewhere bool, resources ...strategy.Resource,
) (*handle.Locks, error) {
	l, err := k.Use(ctx, h)
	if err != nil {
		return nil, k.SetupError(h, err)
	}
	return l, k.Taken(h.LockContext, onlyElsewhere, resources...)
}

// prepareWith prepares p to be taken with l. The caller's wait begins. pooled: the caller occupies a connection
// of database/sql while it waits.
func (p *plan) prepareWith(cs *ctxState, l *handle.Locks, pooled bool) {
	p.l, p.asker, p.wait = l, cs.caller(pooled), cs.handle.Budget(p.h)
	if p.keeps != nil {
		p.asker.Keeps = p.keeps
	}
	ask := func(resources []strategy.Resource, r rowlock.Request) {
		r.Label, r.Waiting = strategy.Label(resources), cs.handle.WaitingFor(p.asker, l.Sought(resources...))
		p.requests = append(p.requests, request{Request: r, resources: resources})
	}
	if len(p.rows) > 0 {
		ask(p.rows, rowlock.Request{Keys: handle.QueueKeys(p.rows)})
	}
	for i := range p.slots {
		ask(p.slots[i:i+1], rowlock.Request{Slots: p.slots[i].SlotRows()})
	}
}

// holdsAlready reports whether the lock that resource asks for is held, by the unit of work or by a hold around.
func (cs *ctxState) holdsAlready(resource strategy.Resource, around []*grant) (bool, error) {
	keeps := func(g *grant) bool { return g.keeps(cs.handle, resource) }
	i := slices.IndexFunc(cs.grants.list, keeps)
	if !resource.Traits.Excludes && (i < 0 || cs.grants.list[i].LockContext != resource.LockContext) {
		// The lock context may have remembered a version elsewhere before, whatever is held here.
		if err := cs.handle.Taken(resource.LockContext, false, resource); err != nil {
			return false, err
		}
	}
	if i >= 0 {
		return true, cs.grants.list[i].join(resource)
	}
	if i := slices.IndexFunc(around, keeps); i >= 0 {
		if !resource.Traits.Excludes {
			return false, &lockerr.Error{Op: "lock", Key: resource.Key, Strategy: resource.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
				"a hold around has a lease on the key, which keeps others out, but not the transactions that run side by side in the hold"))}
		}
		return true, around[i].join(resource)
	}
	if !resource.Traits.Table {
		return false, nil
	}
	locked := cs.unit.row(resource.Row)
	if resource.Slots > 0 {
		if slot, ok := cs.unit.slotOf(resource); ok {
			resource.Tell(hint.ToldSlot, uint64(slot))
			return true, nil
		}
	}
	switch {
	case locked == nil:
		return false, nil
	case locked.Shared && !resource.Shared:
		return false, resource.Upgrade()
	}
	return true, nil
}

// remembers reports whether the unit of work keeps versions, which its commit compares.
func (cs *ctxState) remembers() bool {
	return slices.ContainsFunc(cs.grants.list, func(g *grant) bool { return g.version() != 0 })
}

// caller returns the caller that asks for a lock in cs; cs is nil outside of any lock context. pooled: the
// caller occupies a connection of database/sql while it waits.
func (cs *ctxState) caller(pooled bool) handle.Caller {
	c := handle.Caller{Pooled: pooled, Has: cs.heldBy}
	if cs != nil {
		c.Asked = &cs.asked
		if cs.unit != nil {
			c.Keeps, c.Holds = cs.unit.session, true
		}
	}
	return c
}

// heldBy returns what a caller has that waits with ctx in cs: its tickets, and the resources for which others
// can ask k, too.
func (cs *ctxState) heldBy(ctx context.Context, k *handle.Handle) (tickets []*queue.Ticket, resources []strategy.Resource) {
	var grants []*grant
	if h, ok := hint.From(ctx); ok {
		grants = outerGrants(h) // of other handles, too
	}
	if cs != nil {
		grants = slices.Concat(grants, cs.grants.list)
		if cs.unit != nil {
			for _, row := range cs.unit.rowLocks.rows {
				resources = append(resources, row.Resource)
			}
		}
	}
	for _, g := range grants {
		if g != nil && g.ticket() != nil {
			tickets = append(tickets, g.ticket())
			if g.handle.Shares(k, g.Strategy) {
				resources = append(resources, g.Resource)
			}
		}
	}
	if cs != nil && cs.unit != nil {
		tickets = append(tickets, cs.unit.rowLocks.tickets...)
	}
	return tickets, resources
}

// connCaller returns the caller that asks for a connection under h. pooled is as for caller. blocks: the caller is
// about to wait for a lock in the server. It is counted for that only if it holds nothing: else a
// caller that waits there may wait for it.
func (cs *ctxState) connCaller(ctx context.Context, h *hint.Hint, pooled, blocks bool) handle.Caller {
	asker := cs.caller(pooled)
	if cs.holdsAny(h) {
		tickets, _ := cs.heldBy(ctx, cs.handle)
		asker.Urgent = slices.ContainsFunc(tickets, (*queue.Ticket).Awaited)
		blocks = false
	}
	asker.Waits = blocks
	return asker
}

// holdsAny reports whether a caller with h in cs holds something.
func (cs *ctxState) holdsAny(h *hint.Hint) bool {
	return cs.unit != nil || len(cs.grants.list) > 0 || len(h.Holds) > 0
}
