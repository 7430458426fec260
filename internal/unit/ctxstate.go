package unit

import (
	"context"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
)

// ctxState is what one database handle remembers of one lock context: its unit of work. The statements
// of the lock context take turns. The turn guards all fields but turn and asked.
type ctxState struct {
	turn  chan struct{} // holds a token while a statement of the lock context runs
	asked bool          // a waiting statement was told to try again on another connection; guarded by starvationGuard.mu

	unit    *unit           // the open transaction of the unit of work
	latest  *unit           // unit, or the last one before it
	grants  []*grant        // locks and versions outside of the transaction, which the unit of work holds with or without one
	joined  []*outerHold    // holds that have joined one of grants, and end with the grants
	owed    string          // what has ended the unit of work while grants stayed for the holds in joined; "" for nothing
	until   context.Context // the context that bounds what was read under grants; nil for none
	unwatch func() bool     // ends the watch on until; nil for none
	failed  error           // why no other unit may begin: a unit was lost behind the caller's back

	decision
	handle  *handle.Handle
	lockCtx *hint.LockContext // nil if the caller's context asks for no lock, and only has holds around it
}

func newCtxState(k *handle.Handle) *ctxState {
	return &ctxState{turn: make(chan struct{}, 1), decision: decision{stale: &staleRead{}}, handle: k}
}

// ctxStateOf returns what the handle k remembers of lockCtx. lockCtx is nil if the caller's context asks
// for no lock, and only has holds around it: then nothing is remembered from one transaction to the next.
func ctxStateOf(k *handle.Handle, lockCtx *hint.LockContext) *ctxState {
	if lockCtx == nil {
		return newCtxState(k)
	}
	stale := staleReadOf(lockCtx)
	return lockCtx.State(k, func() any {
		s := newCtxState(k)
		s.stale, s.lockCtx = stale, lockCtx
		return s
	}).(*ctxState)
}

func (cs *ctxState) take(ctx context.Context) error {
	select {
	case cs.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// tryTake is take for a caller that does not wait. It reports whether the caller has the turn.
func (cs *ctxState) tryTake() bool {
	select {
	case cs.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

func (cs *ctxState) give() { <-cs.turn }

// add notes that the unit of work holds g.
func (cs *ctxState) add(g *grant) {
	cs.grants = append(cs.grants, g)
	g.noted = cs.handle.Enter(g.Resource, true)
	g.tellAll()
}

// drop gives all grants but the first keep back. If a grant was lost meanwhile, drop needs no error: what
// the unit of work did after the loss was not committed. u is the unit that ends with the grants; nil
// for none.
func (cs *ctxState) drop(keep int, u *unit) {
	if len(cs.grants) == keep {
		return
	}
	for _, g := range cs.grants[keep:] {
		g.Forget(hint.ToldToken)
		g.Forget(hint.ToldSlot)
		_ = g.Release()
		if u != nil {
			u.detach(g) // after the release, since the release wakes waiters
		}
		g.noted.Leave()
	}
	cs.grants = slices.Clone(cs.grants[:keep])
	if keep > 0 {
		return
	}
	for _, hold := range cs.joined {
		hold.cancel(hold.grant.overError("statement"))
	}
	cs.joined = nil
	if cs.owed != "" {
		cs.outlived(cs.owed)
		cs.owed = ""
	}
	if cs.until = nil; cs.unwatch != nil {
		cs.unwatch()
		cs.unwatch = nil
	}
}

// part notes the end of a hold that had joined one of the grants. If the unit of work has ended before,
// the grants stay until the last such hold ends.
func (cs *ctxState) part(h *outerHold) {
	_ = cs.take(context.Background())
	defer cs.give()
	cs.joined = slices.DeleteFunc(cs.joined, func(other *outerHold) bool { return other == h })
	if len(cs.joined) == 0 && cs.owed != "" {
		cs.drop(0, nil)
	}
}

// watch gives the grants back when end ends. end is the context that bounds what was read under them.
//
// For versions, watch starts nothing, since nobody waits for a version, and the next statement looks at
// end anyway. Then end does not keep this state of a lock context that nobody uses any more. With an
// observer watch starts for versions, too: the observer is told when end ends.
func (cs *ctxState) watch(end context.Context) {
	if cs.unwatch != nil || len(cs.grants) == 0 {
		return
	}
	cs.until = end
	locks := slices.ContainsFunc(cs.grants, func(g *grant) bool { return g.Traits.Excludes })
	if end.Done() == nil || !locks && cs.handle.Settings.Observe == nil {
		return
	}
	for _, g := range cs.grants {
		g.noted.Until(end.Done())
	}
	cs.unwatch = context.AfterFunc(end, func() {
		_ = cs.take(context.Background())
		defer cs.give()
		cs.inTime()
	})
}

// inTime gives the grants back if the context has ended that bounds what was read under them. While a
// transaction is open, they wait for its end.
func (cs *ctxState) inTime() {
	if cs.unit == nil && cs.until != nil && cs.until.Err() != nil && len(cs.grants) > 0 {
		g := cs.grants[0]
		cs.failed = &lockerr.Error{Op: "statement", Key: g.Key, Strategy: g.Strategy, Err: lockerr.With(lockerr.ErrLost, whatEnded(cs.until))}
		cs.dropSpent()
	}
}

// dropSpent gives the grants back of a unit of work that was lost, or whose context has ended. This
// handle runs nothing more in the lock context, but other handles may.
func (cs *ctxState) dropSpent() {
	cs.drop(0, nil)
	if cs.unit == nil { // else unit.end notes it
		cs.outlived("the end of a unit of work that was lost")
	}
}

// ofQuery is the context of a query that has taken a lock in a lock context that never ends. The lock then
// ends with the context of the query.
type ofQuery struct{ context.Context }

// whatEnded returns an error that says which context has ended, of those that may bound the reads.
func whatEnded(end context.Context) error {
	if _, ok := end.(ofQuery); ok {
		return errors.New("the context of the query that took the lock has ended, and the lock context never ends, " +
			"so that the lock went with it; " +
			"call lockctx.With on a context that ends, by context.WithCancel or WithTimeout, " +
			"and derive those of single queries from what it returns")
	}
	return errContextEnded
}

var errContextEnded = errors.New("the lock context has ended")
