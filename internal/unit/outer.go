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

// outerHold is what those inside a hold know of it: contexts carry it, and the context state or
// the unit that it is part of.
type outerHold struct {
	handle *handle.Handle
	key    string                  // that it was asked for
	cancel context.CancelCauseFunc // ends the hold's context
	alone  bool                    // nothing is left of its lock context when it has ended
	grant  *grant                  // nil for a row lock, and for a version
	stale  *staleRead              // of the lock context around it; nil where there is none, or it keeps the grant
	read   atomic.Bool             // a query in it has returned data
	gone   atomic.Bool             // nothing keeps that from being changed any more
}

// outerGrants returns what the holds keep that h is inside of, also those of other
// handles.
func outerGrants(h *hint.Hint) (grants []*grant) {
	for _, hold := range h.Holds {
		grants = append(grants, hold.(*outerHold).grant)
	}
	return grants
}

// checkOuter returns why nothing can run inside the holds around h any more.
func checkOuter(h *hint.Hint) error {
	for _, hold := range h.Holds {
		hold := hold.(*outerHold)
		if err := hold.grant.overError("statement"); err != nil {
			hold.outlived() // it may not know yet
			return err
		}
	}
	return nil
}

// reaches returns why holds of other handles, which h is inside of, cannot be checked
// on this one before a commit. The check is a statement, so it takes the same server.
func reaches(ctx context.Context, k *handle.Handle, h *hint.Hint) error {
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
		if h.gone.Load() { // meanwhile
			h.outlived()
		}
	}
}

// outlived notes that a lease, or an advisory lock, is not held any more. The lock context
// around the hold goes on, but not with what was read in it.
func (oh *outerHold) outlived() {
	oh.gone.Store(true)
	if oh.stale != nil && oh.read.Load() {
		oh.stale.holdEnded()
	}
}

// Told returns what is told of the innermost lock that ctx is under.
func Told(ctx context.Context, what hint.What) (n uint64, ok bool) {
	h, ok := hint.From(ctx)
	if !ok {
		return 0, false
	}
	if hold, ok := h.Hold.(*outerHold); ok {
		return hold.grant.told(what)
	}
	if h.Named == "" {
		return 0, false
	}
	if n, ok := h.LockContext.Told(what, h.Named); ok {
		return n, true
	}
	for _, hold := range h.Holds { // the key may be held around
		if hold := hold.(*outerHold); hold.grant.Key == h.Named {
			if n, ok := hold.grant.told(what); ok {
				return n, true
			}
		}
	}
	return 0, false
}
