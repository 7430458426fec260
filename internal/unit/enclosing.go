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

// enclosure is what those inside a hold know of it: contexts carry it, and the scope or
// the unit that it is part of.
type enclosure struct {
	k      *handle.Handle
	cancel context.CancelCauseFunc // ends the hold's context
	alone  bool                    // nothing is left of its lock context when it has ended
	guard  *guard                  // nil for a row lock, and for a version
	stale  *staleRead              // of the lock context around it; nil where there is none, or it keeps the guard
	read   atomic.Bool             // a query in it has returned data
	gone   atomic.Bool             // nothing keeps that from being changed any more
}

// enclosing returns what the holds keep that h is inside of, also those of other
// handles.
func enclosing(h *hint.Hint) (guards []*guard) {
	for _, hold := range h.Holds {
		if hold, ok := hold.(*enclosure); ok {
			guards = append(guards, hold.guard)
		}
	}
	return guards
}

// checkEnclosing returns why nothing can run inside the holds around h any more.
func checkEnclosing(h *hint.Hint) error {
	for _, g := range enclosing(h) {
		if err := g.overError("statement"); err != nil {
			return err
		}
	}
	return nil
}

// reaches returns why holds of other handles, which h is inside of, cannot be checked
// on this one before a commit. The check is a statement, so it takes the same server.
func reaches(ctx context.Context, k *handle.Handle, h *hint.Hint) error {
	for _, hold := range h.Holds {
		hold, ok := hold.(*enclosure)
		if !ok || hold.k == k {
			continue
		}
		g := hold.guard
		if err := g.overError("statement"); err != nil {
			return err
		}
		same, err := k.SameServer(ctx, hold.k)
		if err != nil {
			return k.SetupError(h, err)
		}
		if !same {
			return &lockerr.Error{Op: "statement", Key: g.Key, Strategy: g.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
				"the lock is held through another database handle, and this one leads to another server, or to one that does not say which it is, where the lock cannot be checked before a commit; use the handle that holds it, or lockctx.Without"))}
		}
	}
	return nil
}

// noteHolds notes that a query has returned data in the holds that it ran in.
func noteHolds(st *statement.Statement) {
	for _, h := range st.Holds {
		if h, ok := h.(*enclosure); ok {
			h.read.Store(true)
			if h.gone.Load() { // meanwhile
				h.outlived()
			}
		}
	}
}

// outlived notes that a lease, or an advisory lock, is not held any more. The lock context
// around the hold goes on, but not with what was read in it.
func (e *enclosure) outlived() {
	e.gone.Store(true)
	if e.stale != nil && e.read.Load() {
		e.stale.holdEnded()
	}
}

// Told returns what is told of the innermost lock that ctx is under.
func Told(ctx context.Context, what hint.What) (n uint64, ok bool) {
	h, ok := hint.From(ctx)
	if !ok {
		return 0, false
	}
	if hold, ok := h.Hold.(*enclosure); ok {
		return hold.guard.told(what)
	}
	if h.Named == "" {
		return 0, false
	}
	if n, ok := h.Scope.Told(what, h.Named); ok {
		return n, true
	}
	for _, hold := range h.Holds { // the key may be held around
		if hold, ok := hold.(*enclosure); ok && hold.guard.Key == h.Named {
			if n, ok := hold.guard.told(what); ok {
				return n, true
			}
		}
	}
	return 0, false
}
