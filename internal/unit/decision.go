package unit

import (
	"cmp"
	"database/sql/driver"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/lockerr"
)

// A decision is what a caller makes of what it has read in a lock context outside a
// transaction, and writes later. It stands as long as the unit of work does that the
// read began, since nobody else can change what was read:
//
//	        read outside a transaction
//	none ───────────────────────────────► standing (scope.decided)
//	                                       │    ▲
//	the unit of work ends: by a commit     │    │ read outside a transaction
//	that may have changed something,       ▼    │
//	or by a rollback                     outstanding (staleRead)
//
// While one is outstanding, what writes fails with lockerr.ErrStaleRead, before anything is
// sent. A read inside a transaction, or a hold, is under a lock that is kept to its
// end, so it is enough for that transaction, and for nothing after it.

// staleRead is what a lock context remembers of an outstanding decision, on all
// handles that it is used with.
type staleRead struct {
	by     atomic.Pointer[string] // what gave the lock back; nil where no decision is outstanding
	inHold atomic.Bool            // it was read under a hold that has ended: what else is standing does not keep it
}

const endOfHold = "the end of a hold"

// holdEnded notes that a hold has ended in which the lock context had read.
func (r *staleRead) holdEnded() {
	by := endOfHold
	r.inHold.Store(true)
	r.by.CompareAndSwap(nil, &by)
}

// renewed notes that the lock context has read again.
func (r *staleRead) renewed() {
	r.by.Store(nil)
	r.inHold.Store(false)
}

// staleReads is the key under which a lock context has its staleRead.
type staleReads struct{}

// relying is what a unit of work remembers of its transaction.
type relying struct {
	changed    string // the last thing in it that may have changed data; "" while nothing has
	fresh      bool   // a query in the caller's transaction, or hold, has returned data
	relied     bool   // a query outside of one has returned data that its row locks keep from being changed
	allowStale bool   // it was begun by AllowStale
	ending     string // what ends it
}

func staleReadOf(hints *hint.Scope) *staleRead {
	return hints.State(staleReads{}, func() any { return &staleRead{} }).(*staleRead)
}

// hasRead notes that a query, st, has returned data. u is the unit that it ran in; nil
// where it ran outside of any, under guards or holds.
func (s *scope) hasRead(st *statement.Statement, u *unit) {
	defer noteHolds(st)
	if u != nil && u.inside() {
		u.fresh = u.fresh || st.Info.Tables
		return
	}
	if s.stale.by.Load() != nil && !st.Info.Tables {
		return // it has shown nothing that could be new
	}
	s.stale.renewed()
	switch {
	case u != nil && len(u.rows) > 0:
		u.relied, s.decided = true, true
	case len(s.guards) > 0:
		s.decided = true
	}
}

// inside reports whether a statement of the unit now runs in a transaction of the
// caller, or in a hold.
func (u *unit) inside() bool { return len(u.stack) > 0 || u.hold != nil }

// endedBy says what has ended the unit.
func (u *unit) endedBy() string {
	if u.cause != nil {
		return "the end of a unit of work that was lost"
	}
	return u.ending
}

// outlivedHold notes that the unit of a hold has ended: nothing runs in the lock context
// that began with the hold any more. In one from before it, what was read in the hold is
// not enough for what is written from now on.
func (u *unit) outlivedHold() {
	switch s := u.scope; {
	case u.hold.alone && s.failed == nil:
		s.failed = u.cause
		if s.failed == nil {
			s.failed = u.error("statement", errHoldEnded)
		}
	case u.fresh:
		s.stale.holdEnded()
	}
}

// outlived notes that the locks under which a decision stood went with by.
func (s *scope) outlived(by string) {
	if s.decided {
		s.decided = false
		s.stale.by.CompareAndSwap(nil, &by)
	}
}

// dropSpent gives the guards back of a unit of work that was lost, or whose context has
// ended. This handle runs nothing in the lock context any more, but others may.
func (s *scope) dropSpent() {
	s.drop(0)
	if s.unit == nil { // else at its end
		s.outlived("the end of a unit of work that was lost")
	}
}

// outlivesHold ends the unit if it was part of a hold around it that has ended, and has
// only read, outside a transaction: its COMMIT would ask for the hold's lock, and its
// snapshot is as old as the hold.
func (u *unit) outlivesHold() {
	if u.state != open || u.cause != nil || u.inside() || u.wrote {
		return
	}
	if slices.ContainsFunc(u.enclosing, func(g *guard) bool { return g.Err() != nil }) {
		_ = u.finish(false)
	}
}

// undecided returns lockerr.ErrStaleRead where st writes and a decision is outstanding. u is
// the unit that it is to run in; nil where that is still to begin.
func (s *scope) undecided(h *hint.Hint, u *unit, st *statement.Statement) error {
	by, inHold := s.stale.by.Load(), s.stale.inHold.Load()
	if h != nil && h.Scope != nil { // of another lock context, where st adds keys to a transaction
		other := staleReadOf(h.Scope)
		by, inHold = cmp.Or(by, other.by.Load()), inHold || other.inHold.Load()
	}
	switch {
	case by == nil, st.Info.Changes == sqltext.ChangesNothing, s.decided && !inHold,
		h != nil && h.AllowStale,
		u != nil && (u.fresh || u.allowStale):
		return nil
	}
	err := lockerr.With(lockerr.ErrStaleRead, fmt.Errorf("the lock under which this was decided was given back by %s; "+
		"put the statements into one transaction or mysqllock.Do, or call lockctx.With again, on the context from before it, and read again", *by))
	if u != nil {
		return u.error(st.Op(), err)
	}
	return s.k.Error(st.Op(), h, err)
}

// changes notes that st may have changed something.
func (u *unit) changes(st *statement.Statement) {
	u.changed = "a statement"
	if u.scope.decided || st.Query || st.Info.Taints {
		u.changed = cmp.Or(sqltext.Verb(st.Text), u.changed)
	}
	if u.inside() {
		u.changed = "a transaction with " + u.changed
	}
}

// ran notes what st has changed and read, which has run well and returned r or res. The
// rows of RETURNING come without a number: that of an upsert which changed nothing is
// there all the same.
func (u *unit) ran(st *statement.Statement, r *statement.Rows, res driver.Result) {
	if st.Info.Changes == sqltext.ChangesCounted {
		n, err := int64(1), error(nil)
		if res != nil {
			n, err = res.RowsAffected()
		} else if r.Empty() {
			n = 0
		}
		if n != 0 || err != nil {
			u.changes(st)
		}
	}
	if st.Reads(r) {
		u.scope.hasRead(st, u)
	}
}
