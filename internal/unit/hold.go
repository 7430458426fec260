package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Hold is a lock that Acquire has taken: see mysqllock.Hold. Its holdShape says how it is kept.
type Hold struct {
	outer    outerHold
	shape    holdShape
	ctx      context.Context
	ctxState *ctxState   // of the hold's lock context; has the unit, or the grant that the hold has joined
	unit     *unit       // the unit that the hold owns, or in which it is nested
	nested   *inner      // the hold's transaction in unit
	stop     func() bool // ends the watch on Acquire's context; nil without a grant of its own

	mu     sync.Mutex
	ended  bool
	err    error
	loss   error       // see Loss
	stays  error       // see Stays
	lapsed *time.Timer // gives the grant back after a TTL; nil while Acquire's context goes on
}

// holdShape is what keeps the lock of a Hold, and so what End does:
//
//	shape       what keeps the lock                              End
//	holdUnit    a unit of work, begun for the hold               commits or rolls back
//	holdNested  the unit of work that was open in the context    releases a savepoint, or goes back to it
//	holdGrant   a grant of its own                               gives the grant back
//	holdJoined  a grant that the context's unit of work has had  leaves it to that, or gives it back: see ctxState.endJoined
//	holdInside  a grant of a hold around                         leaves it to that hold
type holdShape int

const (
	holdUnit holdShape = iota
	holdNested
	holdGrant
	holdJoined
	holdInside
)

// inUnit reports whether a transaction keeps the hold's lock.
func (hs holdShape) inUnit() bool { return hs == holdUnit || hs == holdNested }

// Acquire takes the lock that a hint asks for. The hint is used up then.
func Acquire(ctx context.Context, k *handle.Handle, asked *hint.Hint) (_ *Hold, err error) {
	if asked.Err != nil {
		return nil, &lockerr.Error{Op: "lock", Err: asked.Err}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := checkReachable(ctx, k, asked); err != nil {
		return nil, err
	}
	own, cancel := context.WithCancelCause(ctx)
	h := &Hold{outer: outerHold{handle: k, key: asked.Named, cancel: cancel}}
	if k.HoldIsTransaction(asked) {
		h.outer.alone = asked.LockContext == nil
		h.ctx = asked.With(own)
		err = h.openUnit(asked)
	} else {
		err = h.openGrant(ctx, own, asked)
	}
	if err != nil {
		cancel(err)
		return nil, err
	}
	if !h.shape.inUnit() {
		h.ctx = asked.Inside(own, &h.outer)
	}
	return h, nil
}

// openUnit opens a transaction with the lock, or joins the unit of work that is open in the lock context.
func (h *Hold) openUnit(asked *hint.Hint) (err error) {
	h.ctxState = ctxStateOf(h.outer.handle, asked.LockContext)
	if err := h.ctxState.takeTurn(h.ctx); err != nil {
		return err
	}
	defer h.ctxState.giveTurn()
	if err := h.ctxState.check(asked); err != nil {
		return err
	}
	if h.ctxState.unit != nil {
		return h.nest(asked)
	}
	p, err := h.ctxState.plan(asked)
	if err != nil {
		return err
	}
	h.shape = holdUnit
	h.unit, err = h.ctxState.openUnit(h.ctx, p, opening{op: "lock", end: h.ctx, hold: &h.outer})
	return err
}

// nest makes the hold a transaction in the open unit of work.
func (h *Hold) nest(asked *hint.Hint) error {
	h.shape, h.unit, h.nested = holdNested, h.ctxState.unit, &inner{hold: &h.outer}
	return h.unit.nest(h.ctx, asked, h.nested, driver.TxOptions{})
}

// openGrant takes a lease or an advisory lock, unless a hold around already has it. If a transaction is
// open in the lock context, the hold joins that, and openGrant sets h.ctx.
func (h *Hold) openGrant(ctx, own context.Context, asked *hint.Hint) error {
	resource, err := h.outer.handle.Resource(hint.Lock{Key: asked.Named, Kind: asked.Kind})
	if err != nil {
		return err
	}
	if err := checkOuter(asked); err != nil {
		return err
	}
	around := outerGrants(asked)
	var cs *ctxState
	if asked.LockContext != nil {
		cs = ctxStateOf(h.outer.handle, asked.LockContext)
		if err := cs.takeTurn(ctx); err != nil {
			return err
		}
		defer cs.giveTurn()
		if err := cs.check(nil); err != nil {
			return err
		}
		if cs.unit != nil {
			h.ctx, h.ctxState = asked.With(own), cs
			err := h.nest(asked)
			h.outer.grant = keeperOf(h.outer.handle, resource, slices.Concat(cs.grants.list, around)) // nest may have taken the grant
			if err == nil && h.outer.grant != nil {
				h.outer.grant.enter(&h.outer)
			}
			return err
		}
	}
	if h.outer.grant = keeperOf(h.outer.handle, resource, around); h.outer.grant != nil {
		h.shape = holdInside
		return nil
	}
	if cs != nil {
		if h.outer.grant = keeperOf(h.outer.handle, resource, cs.grants.list); h.outer.grant != nil {
			h.shape, h.ctxState = holdJoined, cs
			cs.grants.joined = append(cs.grants.joined, &h.outer)
			h.outer.grant.enter(&h.outer)
			return nil
		}
	}
	return h.takeGrant(ctx, cs, asked, resource)
}

// takeGrant takes the lock for the hold itself. cs is of the lock context that asks; nil without one.
func (h *Hold) takeGrant(ctx context.Context, cs *ctxState, asked *hint.Hint, resource strategy.Resource) error {
	start := time.Now()
	l, err := locksFor(ctx, h.outer.handle, asked, true, resource)
	if err != nil {
		h.outer.handle.Refused(ctx, start, err, resource)
		return err
	}
	if h.outer.handle.Wait(asked) == 0 {
		h.outer.handle.AwaitEnding(ctx, []strategy.Resource{resource})
	}
	h.mu.Lock() // until h.grant is set, for lost
	defer h.mu.Unlock()
	h.outer.grant, err = takeGrant(ctx, h.outer.handle, l, cs.caller(false), resource, h.outer.handle.Wait(asked), nil, h.lost)
	if err != nil {
		return h.outer.handle.Recognised(err, asked.LockContext, resource)
	}
	if asked.LockContext != nil {
		h.outer.stale = staleReadOf(asked.LockContext)
	}
	h.shape, h.outer.grant.noted = holdGrant, h.outer.handle.EnterHold(h.outer.grant.Resource, asked.LockContext)
	h.stop = context.AfterFunc(ctx, h.lapse)
	return nil
}

// lost is called when the hold's own grant may be lost. It ends the hold.
func (h *Hold) lost() {
	h.outer.handle.Doubt()
	h.mu.Lock() // while End has the mutex, the context has ended
	defer h.mu.Unlock()
	if h.outer.grant != nil {
		h.outer.outlived() // before the caller hears of the loss and writes
		h.outer.cancel(h.outer.grant.overError("statement"))
		h.outer.grant.lost()
	}
}

// lapse is called when Acquire's context ends. The grant then ends within the TTL, unless Release comes
// before: statements in the hold have that long to stop.
func (h *Hold) lapse() {
	if l, ok := h.outer.grant.held.(strategy.Lapsing); ok {
		l.Lapse()
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.ended {
		h.lapsed = time.AfterFunc(h.outer.handle.Settings.TTL, func() {
			h.outer.outlived()
			_ = h.outer.grant.Release()
			h.outer.grant.noted.Leave()
		})
	}
}

// Context returns the context in which queries are inside the hold: see mysqllock.Hold, also for
// Token and Expiry.
func (h *Hold) Context() context.Context { return h.ctx }

// Token returns the fencing token; 0 if the hold has no lease.
func (h *Hold) Token() uint64 {
	if h.outer.grant == nil {
		return 0
	}
	return h.outer.grant.token()
}

// Expiry returns the earliest time at which somebody else can get the lease; the zero time if the hold
// has no lease.
func (h *Hold) Expiry() time.Time {
	if h.outer.grant == nil {
		return time.Time{}
	}
	return h.outer.grant.expiry()
}

// End commits the statements in the hold, or rolls them back, and gives the lock back.
func (h *Hold) End(commit bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.ended {
		return h.err
	}
	h.ended = true
	if h.outer.grant != nil {
		h.outer.grant.leave(&h.outer)
	}
	if h.shape.inUnit() {
		h.err = h.endUnit(commit)
	} else {
		h.err = h.endGrant(commit)
	}
	return h.err
}

// Loss returns how the hold's lock was lost, or a lock around it; nil if none was. It is for holds that
// have ended. The end of the caller's own context is no loss.
func (h *Hold) Loss() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.loss
}

// Stays returns why the key may still be locked although the hold has ended; nil if the key is free, or
// somebody else's. The error says nothing against the statements in the hold.
func (h *Hold) Stays() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stays
}

// close ends the hold's context with a cause. If a loss has ended that context before, close notes the
// loss.
func (h *Hold) close(cause error) {
	var lost *lockerr.Error
	if before := context.Cause(h.ctx); errors.As(before, &lost) {
		h.loss = before
	}
	h.outer.cancel(cause)
}

func (h *Hold) endGrant(commit bool) error {
	lost := h.outer.grant.overError("release")
	h.close(&lockerr.Error{Op: "statement", Key: h.outer.grant.Key, Strategy: h.outer.grant.Strategy, Err: lockerr.ErrClosed})
	h.outer.outlived()
	switch h.shape {
	case holdJoined:
		h.ctxState.endJoined(&h.outer)
	case holdGrant:
		h.stop()
		if h.lapsed != nil {
			h.lapsed.Stop()
		}
		err := h.outer.grant.Release()
		h.outer.grant.noted.Leave()
		switch {
		case err == nil:
		case !errors.Is(err, lockerr.ErrLost):
			h.stays = strategy.Naming(err, []strategy.Resource{h.outer.grant.Resource})
		case lost == nil:
			lost = strategy.Naming(err, []strategy.Resource{h.outer.grant.Resource})
		}
	}
	if h.loss == nil {
		h.loss = lost
	}
	if !commit {
		return nil
	}
	return lost
}

func (h *Hold) endUnit(commit bool) (err error) {
	_ = h.ctxState.takeTurn(context.Background())
	defer h.ctxState.giveTurn()
	u := h.unit
	closed := u.error("statement", lockerr.ErrClosed)
	defer func() {
		if h.close(closed); u.givenUp {
			h.loss = nil
		}
	}()
	// obstacle is what stands against a commit although nothing is lost.
	var obstacle error
	switch {
	case u.state == stateEnded || u.cause != nil || !commit:
	case h.ctx.Err() != nil:
		obstacle = u.error("commit", endOf(h.ctx))
	case h.shape == holdUnit && len(u.stack) > 0:
		obstacle = u.error("commit", lockerr.With(lockerr.ErrUnsafe, errors.New("a transaction that was begun in the hold is "+
			"still open; the hold is rolled back")))
	}
	commit = commit && obstacle == nil
	if h.shape == holdUnit && len(u.stack) > 0 {
		u.failFrom(0, u.error("statement", errHoldEnded))
	}
	switch {
	case h.shape == holdNested:
		err = u.endTx(h.ctx, h.nested, commit)
	case commit:
		err = u.commitOrKeep()
	default:
		err = u.finish(false)
	}
	switch {
	case obstacle != nil:
		err = obstacle
	case !commit && errors.Is(err, lockerr.ErrLost):
		err = nil // the lost transaction is rolled back already
	case errors.Is(err, errContextEnded) && h.ctx.Err() != nil:
		err = u.error("commit", endOf(h.ctx))
	}
	return err
}

// endOf returns what has ended ctx: the end of a hold around it, if the cause says so.
func endOf(ctx context.Context) error {
	if cause := context.Cause(ctx); fromLock(cause) {
		return cause
	}
	return ctx.Err()
}

// fromLock reports whether a context has ended with its lock.
func fromLock(cause error) bool {
	var e *lockerr.Error
	return errors.As(cause, &e)
}
