package unit

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// commitOrKeep ends the unit after a commit of its caller, or after a statement outside of a transaction.
// If nothing was changed, a decision of the caller still stands, and its lock is kept: that of the
// transaction that the read has begun, or the grants.
func (u *unit) commitOrKeep() error {
	cs := u.ctxState
	if u.relying.changed != "" || !cs.decision.readStands || u.cause != nil {
		return u.finish(true)
	}
	if u.relying.relied {
		u.cutStream()
		if err := u.takeLink(context.Background(), "commit"); err != nil {
			return u.finish(true)
		}
		u.giveTurn()
		return nil
	}
	u.keep = true
	err := u.finish(true)
	if cs.failed != nil {
		cs.dropSpent()
	}
	cs.dropIfOver()
	return err
}

// finish commits the unit or rolls it back, and ends it.
func (u *unit) finish(commit bool) error {
	if u.state == stateEnded {
		return u.cause
	}
	u.relying.ending = "the rollback of a transaction"
	if commit {
		u.relying.ending = byCommit + cmp.Or(u.relying.changed, "a transaction")
	}
	u.cutStream()
	if err := u.session.AwaitTurn(context.Background()); err != nil {
		return err
	}
	defer u.giveTurn()
	defer u.end()
	if u.stream.broken != nil {
		u.afterRows()
	}
	if commit && len(u.atCommit.doubts) > 0 {
		ctx, cancel := server.Within(context.Background(), commitLimit)
		_ = u.resolveDoubts(ctx, "commit")
		cancel()
	}
	if u.cause != nil {
		return u.cause
	}
	if u.ctxState.handle.Settings.Observe != nil {
		u.rowLocks.leaving = time.Now()
		for _, seen := range u.rowLocks.seen {
			seen.Leaving(u.rowLocks.leaving)
		}
	}
	var err error
	switch {
	case u.mayPassOnAsItIs():
		u.passOn()
	case commit:
		err = u.sendCommit()
	default:
		if err = u.txn.Rollback(u.limit); err != nil {
			err = u.unfinished("rollback", err, false, nil)
		}
	}
	return err
}

// sendCommit commits, with the checks of grants. The caller has the connection's turn, and ends the unit.
func (u *unit) sendCommit() error {
	refused, err := false, error(nil)
	var e *epilogue
	if u.atCommit.last == nil {
		if err = u.overdue(); err == nil {
			e, err = u.epilogue()
			refused = err != nil
		}
	}
	switch {
	case u.atCommit.last != nil:
		err = u.lastSent()
	case err != nil:
	case e != nil:
		refused, err = e.send(u)
	default:
		err = u.sendText()
	}
	if err == nil {
		u.newVersions()
		return nil
	}
	err = u.unfinished("commit", err, refused, e)
	if u.ctxState.grants.until != nil || u.life.until != nil && u.hold == nil {
		u.ctxState.failed = u.cause // a read under the lock must not decide on a write without it
	}
	return err
}

// lastSent takes the place of COMMIT where a write has taken the COMMIT along.
func (u *unit) lastSent() error {
	switch {
	case u.atCommit.last.err != nil:
		return u.atCommit.last.err
	case u.atCommit.last.locked:
		u.passOn()
	case !u.session.Clean() || !u.session.Valid():
		u.breakLink()
	}
	return nil
}

// sendText sends COMMIT, if possible in one text with the lock of the next caller.
func (u *unit) sendText() error {
	if !u.mayPassOn() || !u.rowLocks.handoff.LocksNext() {
		return u.txn.Commit(u.limit)
	}
	return u.txn.CommitBy(u.limit, func(ctx context.Context) error {
		locked, err := u.rowLocks.handoff.CommitAndLock(ctx)
		switch {
		case locked:
			u.passOn()
		case err == nil && !u.session.Clean():
			u.breakLink()
		}
		return err
	})
}

// mayPassOn reports whether the session may go to the next caller that wants what the unit has locked: the
// unit has locked nothing else, and nothing is to be checked before its COMMIT.
func (u *unit) mayPassOn() bool {
	return u.rowLocks.handoff != nil && len(u.rowLocks.rows) == 1 && len(u.ctxState.grants.list) == 0 && len(u.outer) == 0
}

// mayPassOnAsItIs reports whether the transaction may go to the next caller without a COMMIT, since nothing
// has run in it.
func (u *unit) mayPassOnAsItIs() bool {
	return !u.past.touched && u.mayPassOn() && u.overdue() == nil && u.rowLocks.handoff.PassesAsItIs(context.Background())
}

// passOn hands the session over to the next caller, with the lock, when the unit has ended.
func (u *unit) passOn() {
	u.rowLocks.tickets = nil
	u.next = func() { u.rowLocks.handoff.Give(u.kill) }
}

// unfinished cleans up after a COMMIT or ROLLBACK that has failed with err, and returns the error for the
// caller. refused: the transaction is not committed, for sure. e is the epilogue of the COMMIT; nil for
// none.
func (u *unit) unfinished(op string, err error, refused bool, e *epilogue) error {
	u.ctxState.handle.Suspect(err)
	if op == "commit" && errors.Is(err, driver.ErrBadConn) && u.overran != nil { // that end has closed the connection: nothing was sent
		u.givenUp = true
		u.breakLink()
		u.cause = u.error(op, lockerr.With(lockerr.ErrLost, u.overran))
		return u.error(op, u.overran)
	}
	if op == "commit" && !refused && server.Unknown(err, u.session.Conn) {
		err = fmt.Errorf("the transaction may be committed: %w", err)
	}
	if (refused || server.Number(err) != 0) && !server.Gone(err, u.session.Conn) {
		// The rest of the transaction must be rolled back: the server has refused to commit it, or a
		// grant is not held any more.
		switch {
		case errors.Is(err, lockerr.ErrConflict):
		case server.Changed(err):
			err = lockerr.With(lockerr.ErrConflict, err)
		case server.Deadlock(err):
			err = lockerr.With(lockerr.ErrDeadlock, err)
		}
		if u.txn.Rollback(u.limit) != nil {
			u.breakLink()
		}
	} else {
		u.breakLink()
		if !refused && e != nil {
			e.awaitEnd()
		}
	}
	var said *lockerr.Error
	if !errors.As(err, &said) || !errors.Is(err, lockerr.ErrLost) && !errors.Is(err, lockerr.ErrConflict) {
		err = u.error(op, lockerr.With(lockerr.ErrLost, err))
	}
	u.cause = err
	for _, g := range u.atCommit.compared {
		g.seen.Over(u.rowLocks.leaving, err)
	}
	return err
}

// newVersions notes the versions that a COMMIT has set.
func (u *unit) newVersions() {
	for _, g := range u.atCommit.compared {
		if v, ok := g.held.(strategy.Versioned); ok {
			g.held = v.Next()
			g.Tell(hint.ToldVersion, g.version())
		}
	}
}

// finishIfOver ends the unit if the context has ended that bounds the reads in it. The watch on that context
// does the same, but may still wait for its turn.
func (u *unit) finishIfOver() {
	if u.state == stateEnded || u.life.until == nil || u.life.until.Err() == nil {
		return
	}
	// Without an open transaction of the caller, the unit has only finished autocommit statements: to
	// roll back would undo what the caller saw succeed.
	lost := u.cause != nil
	commit := !u.inside() && !lost
	err := u.finish(commit)
	if err == nil || !commit && !lost { // a transaction that could not be rolled back has ended with its connection
		u.cause = u.error("statement", lockerr.With(lockerr.ErrLost, whatEnded(u.life.until)))
	}
	if u.hold == nil { // after a hold the lock context around it goes on
		u.ctxState.failed = u.cause
	}
}

// contextEnded is called when the context ends that bounds the reads in the unit.
func (u *unit) contextEnded() {
	_ = u.ctxState.takeTurn(context.Background())
	defer u.ctxState.giveTurn()
	u.finishIfOver()
}

// endForClose ends a unit whose database handle is being closed.
func (u *unit) endForClose(cause error) {
	_ = u.ctxState.takeTurn(context.Background())
	defer u.ctxState.giveTurn()
	if u.state != stateEnded {
		_ = u.finish(false)
		u.cause = u.error("statement", cause)
		u.ctxState.failed = u.cause
		u.cancelHolds(u.cause)
	}
}

// outlivesHold ends the unit if a hold around it has ended and the unit has only read, outside a
// transaction. Its COMMIT would ask for the lock of that hold, and its snapshot is as old as the hold.
func (u *unit) outlivesHold() {
	if u.state != stateOpen || u.cause != nil || u.inside() || u.past.wrote {
		return
	}
	if slices.ContainsFunc(u.outer, func(g *grant) bool { return g.Err() != nil }) {
		_ = u.finish(false)
	}
}
