package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockerr"
)

// nest begins a transaction of the caller in the unit, with the locks that h asks for; h is nil without a
// hint. The first one is the unit's own transaction, unless a hold owns that. Any other is a savepoint.
func (u *unit) nest(ctx context.Context, h *hint.Hint, t *inner, opts driver.TxOptions) error {
	if h != nil {
		if err := u.join(ctx, h); err != nil {
			return err
		}
	}
	if opts != (driver.TxOptions{}) && opts != u.opts {
		return u.error("begin", lockerr.With(lockerr.ErrUnsafe, errors.New(
			"its unit of work has a transaction with other options open; only the outermost BeginTx can choose them")))
	}
	if u.cause != nil {
		return u.cause
	}
	t.shape, t.u, t.opts = txUnit, u, u.opts
	if u.inside() {
		u.savepoints.saves++
		t.shape, t.save, t.younger = txSavepoint, fmt.Sprintf("mysqllock_%d", u.savepoints.saves), len(u.rowLocks.rows) > 0
		if err := u.text(ctx, "begin", "SAVEPOINT "+t.save); err != nil {
			return err
		}
	}
	u.stack = append(u.stack, t)
	return nil
}

// usable returns why the transaction cannot be used any more; nil if it can.
func (i *inner) usable() error {
	switch {
	case i.failed != nil:
		return i.failed
	case i.u.cause != nil:
		return i.u.cause
	case i.u.state == stateEnded:
		return i.u.error("statement", lockerr.With(lockerr.ErrLost, errors.New("its unit of work has ended")))
	}
	return nil
}

// endTx ends a transaction of the caller: the unit's own, or a savepoint in it. ctx is that with which
// the transaction was begun.
func (u *unit) endTx(ctx context.Context, t *inner, commit bool) error {
	op := "rollback"
	if commit {
		op = "commit"
	}
	switch {
	case t.failed != nil:
		return t.failed
	case u.state == stateEnded:
		return u.cause
	case u.cause != nil: // transactions inside t may end later: database/sql ends them with their context
		u.failFrom(slices.Index(u.stack, t)+1, u.cause)
	}
	last := len(u.stack) - 1
	if u.stack[last] != t {
		err := u.error(op, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"transactions of one lock context must end in the reverse order in which they began, so goroutines cannot have them side by side "+
				"(under lockctx.Lease they can, or with a lock context for each); the whole unit of work is rolled back")))
		if !commit && ctx.Err() != nil { // then database/sql has ended t, whatever is open in it
			err = u.error("statement", lockerr.With(lockerr.ErrLost, errContextEnded))
		}
		u.cancelHolds(err)
		u.failFrom(0, err)
		if _ = u.finish(false); u.cause == nil {
			u.cause = err // for the hold whose unit it is
		}
		return err
	}
	u.stack = u.stack[:last]
	switch {
	case t.shape == txSavepoint:
		return u.endSavepoint(op, t, commit)
	case commit && u.atCommit.refused != nil:
		_ = u.finish(false)
		return u.atCommit.refused
	case commit:
		return u.commitOrKeep()
	}
	return u.finish(false)
}

// failFrom takes the caller's transactions from index first on out of the unit. What is still to be done in
// them fails with why.
func (u *unit) failFrom(first int, why error) {
	for _, t := range u.stack[first:] {
		t.failed = why
	}
	u.stack = u.stack[:first]
}

// endSavepoint ends a transaction that is a savepoint.
func (u *unit) endSavepoint(op string, t *inner, commit bool) error {
	if commit && u.cause == nil && u.stream.open != nil && u.stream.open.Streaming() {
		return nil // the savepoint goes with the transaction
	}
	u.cutStream()
	var err error
	if commit {
		err = u.text(context.Background(), op, "RELEASE SAVEPOINT "+t.save)
	} else {
		err = u.goBack(op, t)
	}
	if err != nil {
		u.fail(err, false) // the changes in the savepoint must not be committed by an outer transaction
	}
	return err
}
