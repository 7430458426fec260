package unit

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
)

// ctxState is what one database handle remembers of one lock context: its unit of work. The statements
// of the lock context take turns. The turn guards all fields but turn and asked.
type ctxState struct {
	turn  chan struct{} // holds a token while a statement of the lock context runs
	asked bool          // a waiting statement was told to try again on another connection; guarded by starvationGuard.mu

	unit   *unit  // the open transaction of the unit of work
	latest *unit  // unit, or the last one before it
	grants grants // locks and versions outside of the transaction, which the unit of work holds with or without one
	failed error  // why no other unit may begin: a unit was lost behind the caller's back

	decision decision
	handle   *handle.Handle
	lockCtx  *hint.LockContext // nil if the caller's context asks for no lock, and only has holds around it
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
		cs := newCtxState(k)
		cs.decision.stale, cs.lockCtx = stale, lockCtx
		return cs
	}).(*ctxState)
}

func (cs *ctxState) takeTurn(ctx context.Context) error {
	select {
	case cs.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// tryTakeTurn is takeTurn for a caller that does not wait. It reports whether the caller has the turn.
func (cs *ctxState) tryTakeTurn() bool {
	select {
	case cs.turn <- struct{}{}:
		return true
	default:
		return false
	}
}

func (cs *ctxState) giveTurn() { <-cs.turn }

// drop gives back all grants but the first keep. u is the unit that ends with the grants; nil for none.
func (cs *ctxState) drop(keep int, u *unit) {
	released := func(g *grant) {
		if u != nil {
			u.detach(g) // after the release, since the release wakes waiters
		}
	}
	if owed := cs.grants.drop(keep, released); owed != "" {
		cs.decision.outlived(owed)
	}
}

// endJoined notes the end of a hold that had joined one of the grants. If the unit of work has ended before,
// the grants stay until the last such hold ends.
func (cs *ctxState) endJoined(h *outerHold) {
	_ = cs.takeTurn(context.Background())
	defer cs.giveTurn()
	cs.grants.joined = slices.DeleteFunc(cs.grants.joined, func(other *outerHold) bool { return other == h })
	switch {
	case len(cs.grants.joined) > 0 || cs.grants.owed == "":
	case cs.unit != nil: // a unit that has begun since is under the grants, and ends them
		cs.grants.owed = ""
	default:
		cs.drop(0, nil)
	}
}

// watch gives the grants back when end ends, the context that bounds the reads under them.
func (cs *ctxState) watch(end context.Context) {
	cs.grants.watch(end, cs.handle.Settings.Observe != nil, func() {
		_ = cs.takeTurn(context.Background())
		defer cs.giveTurn()
		cs.dropIfOver()
	})
}

// dropIfOver gives the grants back if the context has ended that bounds the reads under them. While a
// transaction is open, they wait for its end; while a hold has joined them, for its end, but at most for their TTL.
func (cs *ctxState) dropIfOver() {
	if cs.unit != nil || !cs.grants.isOver() {
		return
	}
	g, cause := cs.grants.list[0], lockerr.With(lockerr.ErrLost, whatEnded(cs.grants.until))
	cs.failed = &lockerr.Error{Op: "statement", Key: g.Key, Strategy: g.Strategy, Err: cause}
	if len(cs.grants.joined) == 0 {
		cs.dropSpent()
		return
	}
	if cs.grants.owed == "" {
		cs.grants.owed = "the end of its lock context"
	}
	if cs.grants.lapsed || !cs.grants.lapse() {
		return
	}
	time.AfterFunc(cs.handle.Settings.TTL, func() {
		_ = cs.takeTurn(context.Background())
		defer cs.giveTurn()
		if slices.Contains(cs.grants.list, g) {
			cs.dropSpent()
		}
	})
}

// dropSpent gives the grants back of a unit of work that was lost, or whose context has ended. This
// handle runs nothing more in the lock context, but other handles may.
func (cs *ctxState) dropSpent() {
	cs.drop(0, nil)
	if cs.unit == nil { // else unit.end notes it
		cs.decision.outlived("the end of a unit of work that was lost")
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
