package unit

import (
	"context"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
)

// ctxState is what one database handle remembers of one lock context: its unit of
// work. Its statements take turns. All fields but turn and asked are guarded by
// the turn.
type ctxState struct {
	turn  chan struct{} // holds a token while a statement of the lock context runs
	asked bool          // a wait was made to try again on another connection; guarded by starvationGuard.mu

	unit    *unit           // the open transaction of the unit of work
	latest  *unit           // that one, or the last that there was
	grants  []*grant        // what else the unit of work holds, with or without a transaction
	joined  []*outerHold    // holds that joined one of grants, and end with them
	owed    string          // what has ended the unit of work, whose grants stay for those in joined; "" for nothing
	until   context.Context // bounds what was read under grants; nil without one
	unwatch func() bool     // ends the watch on its end; nil without one
	failed  error           // why no other unit may begin: one was lost behind the caller's back

	decision
	handle  *handle.Handle
	lockCtx *hint.LockContext // its lock context; nil for what only has holds around it
}

func newCtxState(k *handle.Handle) *ctxState {
	return &ctxState{turn: make(chan struct{}, 1), decision: decision{stale: &staleRead{}}, handle: k}
}

// ctxStateOf returns what is remembered of the lock context. Where there is nothing
// to lock, because the context only has holds around it, every transaction
// stands for itself.
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

// tryTake is take without a wait.
func (cs *ctxState) tryTake() bool {
	select {
	case cs.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

func (cs *ctxState) give() { <-cs.turn }

// add notes that a grant is held.
func (cs *ctxState) add(g *grant) {
	cs.grants = append(cs.grants, g)
	g.noted = cs.handle.Enter(g.Resource, true)
	g.tellAll()
}

// drop gives all grants but the first few back. What was lost meanwhile needs
// no error: nothing that the unit of work did after that was committed. u is the unit that
// ends with them; nil for none.
func (cs *ctxState) drop(keep int, u *unit) {
	if len(cs.grants) == keep {
		return
	}
	for _, g := range cs.grants[keep:] {
		g.Forget(hint.ToldToken)
		g.Forget(hint.ToldSlot)
		_ = g.Release()
		if u != nil {
			u.detach(g) // after the release, since it wakes waiters
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

// part notes that a hold that had joined one of the grants has ended. If the unit of
// work has ended meanwhile, the grants go with the last such hold.
func (cs *ctxState) part(h *outerHold) {
	_ = cs.take(context.Background())
	defer cs.give()
	cs.joined = slices.DeleteFunc(cs.joined, func(other *outerHold) bool { return other == h })
	if len(cs.joined) == 0 && cs.owed != "" {
		cs.drop(0, nil)
	}
}

// watch gives the grants back when end ends, the context that bounds what was read under
// them. Nobody waits for a version: it is enough that the next statement looks, so end
// does not keep what is remembered of a lock context that nobody uses any more. An
// observer is told when end ends.
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

// inTime gives the grants back if the context that bounds the reads under them has
// ended. A transaction gives them back at its own end.
func (cs *ctxState) inTime() {
	if cs.unit == nil && cs.until != nil && cs.until.Err() != nil && len(cs.grants) > 0 {
		g := cs.grants[0]
		cs.failed = &lockerr.Error{Op: "statement", Key: g.Key, Strategy: g.Strategy, Err: lockerr.With(lockerr.ErrLost, whatEnded(cs.until))}
		cs.dropSpent()
	}
}

// dropSpent gives the grants back of a unit of work that was lost, or whose context has
// ended. This handle runs nothing in the lock context any more, but others may.
func (cs *ctxState) dropSpent() {
	cs.drop(0, nil)
	if cs.unit == nil { // else at its end
		cs.outlived("the end of a unit of work that was lost")
	}
}

// ofQuery is the context of a query that has taken a lock in a lock context which never
// ends: the lock goes with the query's.
type ofQuery struct{ context.Context }

// whatEnded says for an error which context it was that bounded the reads.
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
