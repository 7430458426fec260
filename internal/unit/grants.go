package unit

import (
	"context"
	"slices"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// grants are the locks and versions that a unit of work holds outside of its transactions. They outlast a transaction
// that has only read, since the caller may write what it has read. What gives them back:
//
//	what                                              function
//	the end of the unit of work                       unit.end
//	the end of the last hold that has joined a grant  ctxState.endJoined, if that comes later
//	the end of the context that bounds the reads      ctxState.dropIfOver, by watch or before the next statement
//	the loss of a grant                               ctxState.lost, or ctxState.check if that sees it first
//	a commit that has failed                          ctxState.dropSpent
//	a unit that could not begin or join after them    ctxState.takeGrants
//
// The turn of the context state guards them.
type grants struct {
	list    []*grant
	joined  []*outerHold    // holds that have joined one of list, and end with it
	owed    string          // what has ended the unit of work while list stayed for the holds in joined; "" for nothing
	until   context.Context // the context that bounds the reads under list; nil if nothing was
	unwatch func() bool     // ends the watch on until; nil for none
	lapsed  bool            // until has ended, while holds in joined go on
}

// add notes that the unit of work holds one more.
func (g *grants) add(one *grant) {
	g.list = append(g.list, one)
	one.noted = one.handle.Enter(one.Resource, true)
	one.tellAll()
}

// drop gives back all but the first keep, and calls released with each. If one was lost meanwhile, drop needs no error:
// what the unit of work did after the loss was not committed. drop returns what has ended the unit of work, if the holds
// in joined have outlasted that, else "".
func (g *grants) drop(keep int, released func(*grant)) (owed string) {
	if len(g.list) == keep {
		return ""
	}
	for _, one := range g.list[keep:] {
		one.Forget(hint.ToldToken)
		one.Forget(hint.ToldSlot)
		_ = one.Release()
		released(one)
		one.noted.Leave()
	}
	if keep > 0 {
		g.list = slices.Clone(g.list[:keep])
		return ""
	}
	for _, hold := range g.joined {
		hold.cancel(hold.grant.overError("statement"))
	}
	if g.unwatch != nil {
		g.unwatch()
	}
	owed = g.owed
	*g = grants{}
	return owed
}

// watch has ended called when end ends, the context that bounds the reads under the grants.
//
// For versions, watch starts nothing, since nobody waits for a version, and the next statement looks at
// end anyway. Then end does not keep this state of a lock context that nobody uses any more. If the grants are
// observed, watch starts for versions, too: the observer is told when end ends.
func (g *grants) watch(end context.Context, observed bool, ended func()) {
	if g.unwatch != nil || len(g.list) == 0 {
		return
	}
	g.until = end
	locks := slices.ContainsFunc(g.list, func(one *grant) bool { return one.Traits.Excludes })
	if end.Done() == nil || !locks && !observed {
		return
	}
	for _, one := range g.list {
		one.noted.Until(end.Done())
	}
	g.unwatch = context.AfterFunc(end, ended)
}

// lapse has the grants end within their TTL, by themselves. It reports whether some do not.
func (g *grants) lapse() (some bool) {
	g.lapsed = true
	for _, one := range g.list {
		if l, ok := one.held.(strategy.Lapsing); ok {
			l.Lapse()
		} else {
			some = true
		}
	}
	return some
}

// isOver reports whether the context has ended that bounds the reads under the grants.
func (g *grants) isOver() bool { return g.until != nil && g.until.Err() != nil && len(g.list) > 0 }
