// Package unit has what happens in a lock context: units of work, holds, connections, and commits.
//
// In this list a file uses the files in its own line and below it. Only three types name one from above: a
// context state its unit, a Conn its Tx, and a unit the plan with which it begins.
//
//	stmt.go, hold.go                          what database/sql and Acquire call
//	exec.go, route.go                         a statement, and which way it goes
//	read.go, here.go                          a statement outside of transactions, under a lock, and without one
//	tx.go                                     transactions of the caller
//	begin.go                                  a unit begins, on a session
//	conn.go, use.go, unconnected.go           a connection of the application, a use of it, and a call that gets none
//	join.go, nest.go                          more locks, and savepoints, in a unit
//	plan.go, take.go, check.go                which locks a hint needs in addition, how they are taken, and why they end
//	finish.go                                 a unit ends: COMMIT and ROLLBACK
//	commit.go, last.go                        what goes out with COMMIT, and a write that goes out with COMMIT
//	run.go                                    statements in a unit
//	unit.go                                   a unit, and its states
//	ctxstate.go                               what a handle remembers of a lock context
//	savepoint.go                              savepoints in SQL text
//	outer.go, grants.go                       holds around, and the grants of a unit of work
//	grant.go, decision.go                     a grant, and reads under grants
package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// unit is the open transaction of a unit of work, with the locks that it holds. The turn of its context
// state guards all of it. To use the session takes the connection's own turn, too.
type unit struct {
	// The session, and the transaction on it that holds the locks.
	l       *handle.Locks
	session *pool.Conn
	txn     *pool.Txn
	opts    driver.TxOptions
	levels  sqltext.Levels // isolation levels that the transaction may have; 0 for those of a new connection
	since   time.Time      // when the unit began, with its locks granted
	limit   time.Duration  // of COMMIT and ROLLBACK; 0 for none, as without a lock
	next    func()         // hands the session over to the next caller that wants the same key; nil if it goes back to the pool

	// The lock context and the holds around the unit, and the caller's transactions in it.
	ctxState *ctxState
	heldHint *hint.Hint // the last hint all of whose locks the unit has
	outer    []*grant   // grants of the holds around
	hold     *outerHold // the hold that ends the unit, in place of a commit in it; nil for none
	stack    []*inner   // open transactions of the caller, outermost first

	state   state
	cause   error // why the unit is lost, or how it ended badly; nil while all is well
	overran error // the end of a statement's context that came before its answer, although it has run well: see unit.run
	givenUp bool  // the end of the caller's own context has cost the connection: no loss of the lock, but later statements get cause
	keep    bool  // the grants of the unit of work outlive the unit: who ends it says so before that

	rowLocks   rowLocks
	savepoints savepoints
	stream     stream
	life       lifetime
	past       past
	relying    relying // what the transaction means for decisions
	atCommit   atCommit
}

// past is what has run in the transaction of a unit, beside the lock statement that began it.
type past struct {
	touched  bool     // a statement, or perhaps: see unit.takeLink
	snapshot snapshot // what the transaction has its snapshot from
	wrote    bool     // a statement that may have written: see unit.send
}

// snapshot says what a transaction has its snapshot from, if it keeps one:
//
//	snapshot         it is from                         more locks
//	noSnapshot       nothing, so there is none yet      may join
//	versionSnapshot  the read of a version, which       may join, after a ROLLBACK: see unit.mayJoin
//	                 began the transaction
//	readSnapshot     a plain read; or that of a         are refused: ErrStaleSnapshot
//	                 version, and a statement behind it
type snapshot int

const (
	noSnapshot snapshot = iota
	versionSnapshot
	readSnapshot
)

// read notes that st has run in the transaction, well or not.
func (s *snapshot) read(st *statement.Statement) {
	if st.Info.Snapshot {
		*s = readSnapshot
	}
}

// used notes that a statement runs in the transaction, which can then not be given up any more.
func (s *snapshot) used() {
	if *s == versionSnapshot {
		*s = readSnapshot
	}
}

// atCommit is what the COMMIT of a unit goes by.
type atCommit struct {
	// refused: why the caller's transaction can only be rolled back; nil if it may commit. checkRequired sets it.
	refused error
	// doubts ask what earlier statements have done to the transaction. unit.send adds them, unit.resolveDoubts asks them.
	doubts []func(context.Context) error
	// compared are the grants whose versions the COMMIT compares and sets. unit.grantsToCheck sets them.
	compared []*grant
	// last is what came of a write that took the COMMIT along; nil for none. unit.runLast sets it, or newUnit for a unit that began
	// with the write.
	last *lastWrite
}

// rowLocks are the row locks of a unit.
type rowLocks struct {
	rows    map[string]*row
	raises  bool             // a commit is to raise the version of at least one row
	handoff *rowlock.Handoff // to the next caller that wants the same key; nil if there can be none
	tickets []*queue.Ticket
	seen    []*handle.Observation
	leaving time.Time // when giving back began; only set with an observer
}

// stream is the rows that are still being read from the connection of a unit.
type stream struct {
	open   *statement.Rows // rows that hold the connection's turn; nil for none
	broken error           // what went wrong while rows were read; guarded by the connection's turn
}

// txShape says what a transaction of the caller is. database/sql ends the transaction, or the Hold that
// has it:
//
//	shape        what it is              its Commit sends                      its Rollback sends
//	txPlain      the base driver's       what the base driver sends            the same
//	txUnit       that of a unit of work  COMMIT: see unit.commitOrKeep         ROLLBACK
//	txSavepoint  a savepoint in one      RELEASE SAVEPOINT                     ROLLBACK TO SAVEPOINT
type txShape int

const (
	txPlain txShape = iota
	txUnit
	txSavepoint
)

// inner is a transaction of the caller in a unit, or the part of a plain transaction that both kinds have.
type inner struct {
	shape   txShape
	opts    driver.TxOptions
	u       *unit      // the unit around; nil for a plain transaction
	save    string     // the savepoint's name
	younger bool       // the savepoint is younger than a row lock, so going back to it frees no lock
	failed  error      // why nothing can be done in the transaction any more
	hold    *outerHold // of the Hold that has the transaction; nil for one of BeginTx
}

// lifetime is what ends a unit if nothing else does before.
type lifetime struct {
	until context.Context // bounds the reads in the unit; nil if its caller ends it: a transaction of BeginTx, one statement
	stop  func() bool     // ends the watch on until
	ends  <-chan struct{} // Done of the context that gives back what the unit holds, if nothing does before
}

// state is where a unit is in its life:
//
//	        newUnit              lose                     end
//	none ───────────► open ─────────────────► lost ────────────────► ended
//	                   │                  the transaction is rolled    ▲
//	                   │ end              back, the caller's end of    │
//	                   └────────────────► it is still to come ────────┘
//	                     by finish, which commits or rolls back
//
// While a unit is open, its transaction holds the locks. Once the unit is lost, nothing runs in it
// any more, and statements and commits get the cause. Once it has ended, its connection
// is somebody else's. These functions end a unit:
//
//	function       at                                        sends                grants of the unit of work
//	commitOrKeep   a commit, a statement outside of one      COMMIT               end; stay for a read, if nothing has changed
//	endTx          a rollback                                ROLLBACK             end
//	runAlone       the end of its only statement; inPart     COMMIT; or ROLLBACK  as for commitOrKeep; stay if it fails
//	runDefinition  the check of holds before DDL             COMMIT               it has none
//	lockRest       a key that is not granted                 ROLLBACK             stay
//	opener.begin   a node that is behind                     ROLLBACK             end
//	finishIfOver   its context's end; if something is open   COMMIT; or ROLLBACK  end; the lock context, too, unless a hold owns it
//	outlivesHold   the end of a hold around what only reads  ROLLBACK             end
//	endForClose    the handle's close                        ROLLBACK             end; the lock context, too
//	lose           a loss                                    ROLLBACK, if it can  end when it ends: see the picture
//	unfinished     a COMMIT or ROLLBACK that fails           ROLLBACK, if it can  end
//
// Grants that holds have joined end with the last of these holds: see ctxState.endJoined. The session goes back to the pool,
// or with its lock to the next caller. It is closed if the transaction may still be open: see unit.breakLink.
type state int

const (
	stateOpen state = iota
	stateLost
	stateEnded
)

// row is a row of the lock table that a unit has locked.
type row struct {
	*handle.Held
	versioned bool // others compare versions of the row
}

// raises reports whether a commit is to raise the row's version.
func (r *row) raises() bool { return r.versioned && !r.Shared }

// commitLimit bounds a COMMIT or ROLLBACK that the application has not called.
const commitLimit = 30 * time.Second

// newUnit returns the unit that o opens, with the transaction txn on its session.
func newUnit(o *opener, txn *pool.Txn) *unit {
	u := &unit{
		l: o.p.l, session: o.session, txn: txn, opts: o.opts, levels: o.levels, since: time.Now(),
		ctxState: o.ctxState, heldHint: o.p.h, hold: o.hold,
		rowLocks: rowLocks{rows: make(map[string]*row)}, life: lifetime{until: o.end}, outer: o.p.around,
		relying: relying{allowStale: o.p.h.AllowStale}, past: past{touched: o.last != nil}, atCommit: atCommit{last: o.last},
	}
	if u.levels == 0 {
		u.levels = u.l.LockedLevel()
	}
	if u.life.until != nil {
		u.limit = commitLimit
	}
	o.ctxState.unit, o.ctxState.latest = u, u
	return u
}

// inside reports whether a statement of the unit now runs in a transaction of the
// caller, or in a hold.
func (u *unit) inside() bool { return len(u.stack) > 0 || u.hold != nil }

// inHold reports whether a hold commits what a statement of the unit writes now, and no transaction in the
// hold.
func (u *unit) inHold() bool {
	return u.hold != nil || slices.ContainsFunc(u.stack, func(t *inner) bool { return t.hold != nil })
}

// granted notes the rows that were locked for r. The ticket is nil if nobody has queued up for them.
func (u *unit) granted(r request, ticket *queue.Ticket, locked rowlock.Locked) {
	if ticket == nil { // as in a transaction that was open before
		ticket = u.l.Claim(r.resources)
	}
	u.rowLocks.tickets = append(u.rowLocks.tickets, ticket)
	u.rowLocks.seen = append(u.rowLocks.seen, r.seen)
	for _, resource := range r.resources {
		name := resource.Row
		if resource.Slots > 0 {
			name = r.Slots[locked.Slot]
			resource.Tell(hint.ToldSlot, uint64(locked.Slot))
		}
		held := u.ctxState.handle.Enter(resource, u.life.until != nil)
		held.Until(u.life.ends)
		r := &row{held, slices.Contains(locked.Versioned, name)}
		u.rowLocks.rows[name], u.rowLocks.raises = r, u.rowLocks.raises || r.raises()
	}
}

// row returns the row of that name, if the unit has locked it. u may be nil: a nil unit has locked none.
func (u *unit) row(name string) *row {
	if u == nil {
		return nil
	}
	return u.rowLocks.rows[name]
}

// slotOf returns which slot of resource the unit has locked.
func (u *unit) slotOf(resource strategy.Resource) (slot int, ok bool) {
	if u == nil {
		return 0, false
	}
	for name, r := range u.rowLocks.rows {
		if slot := slices.Index(r.SlotRows(), name); r.Slots > 0 && r.Resource.Row == resource.Row {
			return slot, true // also if the unit has locked it as one of more slots
		}
	}
	r := u.rowLocks.rows[resource.Row] // the key itself is the first slot
	return 0, r != nil && !r.Shared
}

// giveTurn ends the turn to use the session. If the unit has ended in this turn, the session goes back to the
// pool, or to the next caller.
func (u *unit) giveTurn() {
	switch {
	case u.state != stateEnded:
		u.session.EndTurn()
	case u.next != nil:
		u.next()
	default:
		u.session.Release()
	}
}

// untilClosed returns a context that also ends when the handle is closed, to end a statement that is under
// way then. A unit that its caller ends does not need that: database/sql waits for the statements of
// its transactions.
func (u *unit) untilClosed(ctx context.Context) (context.Context, func()) {
	if u.life.until == nil {
		return ctx, func() {}
	}
	return u.l.UntilClosed(ctx)
}

// lose marks the unit as lost and rolls back its transaction, if the connection is still there; gone says
// that it is not. Later statements get lockerr.ErrLost. The caller has the connection's turn.
func (u *unit) lose(cause error, gone bool) {
	if u.cause != nil || u.state != stateOpen {
		return
	}
	u.state, u.cause = stateLost, cause
	conflict := errors.Is(cause, lockerr.ErrConflict)
	if !errors.Is(cause, lockerr.ErrLost) && !conflict {
		u.cause = u.error("statement", lockerr.With(lockerr.ErrLost, cause))
	}
	if gone || !u.session.Valid() || u.txn.Rollback(commitLimit) != nil {
		u.breakLink()
	}
	u.detach(u.ctxState.grants.list...)
	for _, g := range u.ctxState.grants.list {
		if g.Err() != nil { // the grant was kept on the connection
			g.ended(u.loss())
		}
	}
	u.freeLocks()
	u.cancelHolds(u.cause)
	// Outside of a transaction, the application would not hear of the loss otherwise.
	noTransaction := u.life.until != nil && len(u.stack) == 0 && !u.keep
	conflictAfterReads := conflict && (u.life.until != nil || u.ctxState.grants.until != nil)
	if u.hold == nil && (noTransaction || conflictAfterReads) {
		u.ctxState.failed = u.cause // a decision in the unit must not be written without its lock
	}
	if len(u.stack) == 0 {
		u.end()
	}
}

// cancelHolds ends the contexts of the holds that end badly with the unit, because of cause.
func (u *unit) cancelHolds(cause error) {
	if u.hold != nil {
		u.hold.cancel(cause)
	}
	for _, t := range u.stack {
		if t.hold != nil {
			t.hold.cancel(cause)
		}
	}
}

// breakLink gives up a session that may still carry the lock.
func (u *unit) breakLink() {
	u.ctxState.handle.Doubt()
	u.session.Taint()
	u.kill()
}

// kill tells the server to end the session. The session may be busy with a statement whose caller has gone,
// and would keep the lock until that is done.
func (u *unit) kill() {
	if u.l.Info().Kills {
		u.l.Background(func(ctx context.Context) { _ = u.l.Control.KillConnection(ctx, u.session) })
	}
}

// freeLocks gives back the tickets and notes of the unit's row locks, so that waiters may try. It does not touch
// the caller's transactions.
func (u *unit) freeLocks() {
	for _, t := range u.rowLocks.tickets {
		t.Leave()
	}
	u.rowLocks.tickets = nil
	for _, r := range u.rowLocks.rows {
		r.Leave()
	}
	for _, seen := range u.rowLocks.seen {
		seen.Over(u.rowLocks.leaving, u.loss())
	}
	u.rowLocks.seen = nil
}

// loss returns what has cost the unit its locks; nil for nothing.
func (u *unit) loss() error {
	if u.givenUp {
		return nil
	}
	return u.cause
}

// detach removes from the connection what that carries for grants, once the transaction has ended.
func (u *unit) detach(grants ...*grant) {
	for _, g := range grants {
		if g.detach() != nil {
			u.breakLink()
		}
	}
}

// end takes the unit out of its context state, after its transaction has ended. The caller has the
// connection's turn, and calls giveTurn next.
func (u *unit) end() {
	if u.state == stateEnded {
		return
	}
	u.state = stateEnded
	u.freeLocks()
	for _, r := range u.rowLocks.rows {
		r.Forget(hint.ToldSlot) // the key itself is the first slot, too: see plan.add
	}
	u.l.KeepAlive.Forget(u.session)
	if u.life.stop != nil { // see watchEnd
		u.life.stop()
		u.l.Forget(u)
	}
	grants := u.ctxState.grants.list
	if u.ctxState.unit == u {
		u.ctxState.unit = nil
		switch {
		case u.keep:
		case len(u.ctxState.grants.joined) > 0:
			u.ctxState.grants.owed = u.endedBy()
		default: // see endsGrants
			u.ctxState.drop(0, u)
			if u.ctxState.decision.readStands {
				u.ctxState.decision.outlived(u.endedBy())
			}
		}
	}
	u.detach(grants...)
	if u.hold != nil {
		u.outlivedHold()
	}
}

// endsGrants reports whether the grants of the unit of work end with the unit.
func (u *unit) endsGrants() bool {
	return u.ctxState.unit == u && !u.keep && len(u.ctxState.grants.joined) == 0
}

// endedBy returns what has ended the unit, as errors say it.
func (u *unit) endedBy() string {
	if u.cause != nil {
		return "the end of a unit of work that was lost"
	}
	return u.relying.ending
}

// outlivedHold notes that the unit of a hold has ended. If the lock context began with the hold, nothing
// runs in it any more. If the lock context is older than the hold, the reads in the hold are not enough
// for later writes.
func (u *unit) outlivedHold() {
	switch cs := u.ctxState; {
	case u.hold.alone && cs.failed == nil:
		cs.failed = u.cause
		if cs.failed == nil {
			cs.failed = u.error("statement", errHoldEnded)
		}
	case u.relying.fresh:
		cs.decision.stale.holdEnded()
	}
}

// lostBehind is what the keep-alive calls when it finds the connection lost while no statement runs.
func (u *unit) lostBehind(cause error) {
	_ = u.ctxState.takeTurn(context.Background())
	defer u.ctxState.giveTurn()
	u.fail(cause, true)
}

// fail is lose for callers that do not have the connection's turn.
func (u *unit) fail(cause error, gone bool) {
	if u.state == stateEnded || u.cause != nil {
		return
	}
	u.cutStream()
	_ = u.session.AwaitTurn(context.Background())
	defer u.giveTurn()
	var said *lockerr.Error
	if !errors.As(cause, &said) {
		cause = u.error("statement", cause)
	}
	u.lose(cause, gone)
}

// cutStream closes rows that are still being read, so that the connection can be used.
func (u *unit) cutStream() {
	if u.stream.open != nil {
		ended := errors.New("the unit of work ended while its rows were being read")
		_ = u.stream.open.CutOff(u.error("query", lockerr.With(lockerr.ErrLost, ended)))
		u.stream.open = nil
	}
}

// grants returns the grants of the unit of work, and those of the holds around.
func (u *unit) grants() []*grant { return slices.Concat(u.ctxState.grants.list, u.outer) }

func (u *unit) error(op string, err error) error {
	var keys []string
	strategy := hint.StrategyRow
	for _, r := range u.rowLocks.rows {
		keys = append(keys, r.Key)
	}
	for _, g := range u.grants() {
		if len(keys) == 0 {
			strategy = g.Strategy
		}
		keys = append(keys, g.Key)
	}
	slices.Sort(keys)
	e := &lockerr.Error{Op: op, Key: strings.Join(slices.Compact(keys), ", "), Strategy: strategy, Err: err}
	if errors.Is(err, lockerr.ErrLost) && u.state == stateOpen && strategy == hint.StrategyRow {
		e.Held, e.ConnectionID = time.Since(u.since), u.session.KnownID()
	}
	return e
}

// noteEnd notes that the unit ends with ctx, at the latest.
func (u *unit) noteEnd(ctx context.Context) {
	u.life.ends = ctx.Done()
	for _, r := range u.rowLocks.rows {
		r.Until(u.life.ends)
	}
	for _, g := range u.ctxState.grants.list {
		g.noted.Until(u.life.ends)
	}
}
