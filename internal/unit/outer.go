package unit

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// outerHold is what others know of a hold: the contexts inside it, and the context state or unit that it
// is part of.
type outerHold struct {
	handle *handle.Handle
	key    string                  // the key that Acquire was asked for
	cancel context.CancelCauseFunc // ends the hold's context
	alone  bool                    // the lock context began with the hold, and nothing runs in it after the hold
	grant  *grant                  // nil for a row lock, and for a version
	stale  *staleRead              // of the lock context around; nil if there is none, or if the lock context itself keeps the grant
	read   atomic.Bool             // a query in the hold has returned data
	gone   atomic.Bool             // nothing keeps others from changing that data any more
}

// outerGrants returns the grants of the holds around h, also those of other handles.
func outerGrants(h *hint.Hint) (grants []*grant) {
	for _, hold := range h.Holds {
		grants = append(grants, hold.(*outerHold).grant)
	}
	return grants
}

// checkOuter returns why nothing more can run inside the holds around h; nil if statements can run.
func checkOuter(h *hint.Hint) error {
	for _, hold := range h.Holds {
		hold := hold.(*outerHold)
		if err := hold.grant.overError("statement"); err != nil {
			hold.outlived() // the hold may not have been told of the loss yet
			return err
		}
	}
	return nil
}

// checkReachable returns why a COMMIT on the handle k cannot check holds around h that are of other handles; nil
// if it can. The check is a statement beside COMMIT, so both handles must lead to the same server.
func checkReachable(ctx context.Context, k *handle.Handle, h *hint.Hint) error {
	for _, hold := range h.Holds {
		hold := hold.(*outerHold)
		if hold.handle == k {
			continue
		}
		g := hold.grant
		if err := g.overError("statement"); err != nil {
			return err
		}
		same, err := k.SameServer(ctx, hold.handle)
		if err != nil {
			return k.SetupError(h, err)
		}
		if !same {
			return &lockerr.Error{Op: "statement", Key: g.Key, Strategy: g.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
				"the lock is held through another database handle, and this one leads to another server, "+
					"or to one that does not say which it is, where the lock cannot be checked before a commit; "+
					"use the handle that holds it, or lockctx.Without"))}
		}
	}
	return nil
}

// noteHolds notes that a query has returned data in the holds that it ran in.
func noteHolds(st *statement.Statement) {
	for _, h := range st.Holds {
		h := h.(*outerHold)
		h.read.Store(true)
		if h.gone.Load() { // the lock was lost meanwhile
			h.outlived()
		}
	}
}

// outlived notes that the hold's lease or advisory lock is not held any more. The lock context around the
// hold goes on, but no decision may be based on a read in the hold.
func (oh *outerHold) outlived() {
	oh.gone.Store(true)
	if oh.stale != nil && oh.read.Load() {
		oh.stale.holdEnded()
	}
}

// Told returns a number of the innermost lock around ctx; what says which number.
func Told(ctx context.Context, what hint.What) (n uint64, ok bool) {
	h, ok := hint.From(ctx)
	if !ok {
		return 0, false
	}
	if hold, ok := h.Hold.(*outerHold); ok {
		return hold.grant.number(what)
	}
	if h.Named == "" {
		return 0, false
	}
	if n, ok := h.LockContext.Told(what, h.Named); ok {
		return n, true
	}
	for _, hold := range h.Holds { // a hold around may have the key
		if hold := hold.(*outerHold); hold.grant.Key == h.Named {
			if n, ok := hold.grant.number(what); ok {
				return n, true
			}
		}
	}
	return 0, false
}
