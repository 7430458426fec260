package unit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// check returns why nothing more can run in the lock context, or inside the holds around it. If a hold
// has ended, check also ends the unit of work that a read has begun in it.
func (cs *ctxState) check(h *hint.Hint) error {
	if cs.unit != nil && cs.unit.life.until != nil {
		cs.unit.finishIfOver()
	}
	if cs.unit != nil && len(cs.unit.outer) > 0 {
		cs.unit.outlivesHold()
	}
	if cs.grants.until != nil {
		cs.dropIfOver()
	}
	if cs.unit != nil && cs.unit.cause != nil { // it says more than the end of a grant that was kept on its session
		return cs.unit.cause
	}
	for _, g := range cs.grants.list {
		if err := g.overError("statement"); err != nil {
			cs.fail(err)
			return err
		}
	}
	if cs.failed != nil {
		return beginAgain(cs.failed)
	}
	if h == nil || len(h.Holds) == 0 {
		return nil
	}
	return checkOuter(h)
}

// beginAgain adds to err, after which nothing more runs in a lock context, what to do about it.
func beginAgain(err error) error {
	var e *lockerr.Error
	if !errors.As(err, &e) || errors.Is(err, lockerr.ErrClosed) || errors.Is(err, errHoldEnded) {
		return err
	}
	told := *e
	told.Err = fmt.Errorf("%w; nothing runs in this lock context any more: begin again with lockctx.With", e.Err)
	return &told
}

// checkDecision returns lockerr.ErrStaleRead if st writes and a decision is outstanding. In strict mode it
// also returns what st lacks. u is the unit in which st is to run; nil if that is still to begin.
func (cs *ctxState) checkDecision(h *hint.Hint, u *unit, st *statement.Statement) error {
	var relies *relying
	if u != nil {
		relies = &u.relying
	}
	err := cs.decision.checkWrite(h, cs.lockCtx, relies, st)
	writes := st.Info.Changes != sqltext.ChangesNothing
	mayBeStale := h != nil && h.AllowStale || relies != nil && (relies.fresh || relies.allowStale)
	if err == nil && writes && !mayBeStale {
		if reader := cs.decision.stale.reader.Load(); reader != nil && reader != cs.handle || cs.handle.ReadElsewhere(cs.lockCtx) {
			err = errReadElsewhere
		}
	}
	switch {
	case err == nil && cs.handle.Settings.Required != nil:
		return cs.checkRequired(h, u, st)
	case err == nil:
		return nil
	}
	return cs.error(h, u, st, err)
}

// error completes the error err of a statement that is to run in u; u is nil if that is still to begin.
func (cs *ctxState) error(h *hint.Hint, u *unit, st *statement.Statement, err error) error {
	if u != nil {
		return u.error(st.Op(), err)
	}
	return cs.handle.Error(st.Op(), h, err)
}

// checkRequired returns what a statement under a lock lacks for strict mode, if it writes a table that needs
// a lock. Outside of a hold the first write after a read commits alone, and so gives back the lock under
// which the caller has decided: strict mode refuses that, too, and u can then only be rolled back.
func (cs *ctxState) checkRequired(h *hint.Hint, u *unit, st *statement.Statement) error {
	if st.Info.Kind == sqltext.Read || st.Info.Changes == sqltext.ChangesNothing {
		return nil
	}
	r := cs.handle.Settings.Required
	table := r.Writes(st.Text)
	if table == "" {
		return nil
	}
	lacks := func(sentinel error, why string) error {
		if err := cs.handle.Lacks(sentinel, table, why); err != nil {
			return cs.error(h, u, st, err)
		}
		return nil
	}
	alone, shared := cs.keysOf(h, u)
	if len(alone) == 0 {
		return lacks(lockerr.ErrNoLock, "under a lock that others have at the same time; leave lockctx.Shared and Slots out")
	}
	if r.Key != nil {
		if err := r.Key(table, alone); err != nil {
			why := "under a lock that Config.RequireKey does not accept: " + err.Error()
			if len(shared) > 0 {
				why += fmt.Sprintf("; others may hold %s at the same time, so it does not count; "+
					"leave lockctx.Shared and Slots out", strings.Join(shared, ", "))
			}
			return lacks(lockerr.ErrNoLock, why)
		}
	}
	switch {
	case !cs.decision.readStands, h != nil && (h.AllowStale || h.Hold != nil),
		u != nil && (u.relying.fresh || u.relying.allowStale || u.inHold()):
		return nil
	}
	err := lacks(lockerr.ErrUnsafe, "after a read outside a transaction, so that its commit would give the lock back, "+
		"and what follows would be refused; "+
		"put the read and all writes into mysqllock.Do, or into one transaction")
	if u != nil && len(u.stack) > 0 {
		u.atCommit.refused = err
	}
	return err
}

// keysOf returns the keys under whose locks a statement with h in u runs, sorted: the keys that nobody else
// holds at the same time (alone), and those that others may hold, too (shared). h is nil without a hint. u is
// nil if the unit is still to begin.
func (cs *ctxState) keysOf(h *hint.Hint, u *unit) (alone, shared []string) {
	add := func(resource strategy.Resource, keys ...string) {
		if keys = append(append(keys, resource.Key), resource.Also...); resource.Shared || resource.Slots > 1 {
			shared = append(shared, keys...)
		} else {
			alone = append(alone, keys...)
		}
	}
	if h != nil {
		resources, _ := cs.handle.Resources(h) // the statement itself fails with this error
		for _, resource := range resources {
			add(resource)
		}
		for _, hold := range h.Holds {
			hold := hold.(*outerHold)
			add(hold.grant.Resource, hold.key)
		}
	}
	if u != nil {
		for _, row := range u.rowLocks.rows {
			add(row.Resource)
		}
		for _, g := range u.grants() {
			add(g.Resource)
		}
	}
	slices.Sort(alone)
	slices.Sort(shared)
	alone = slices.Compact(alone)
	held := func(key string) bool { return slices.Contains(alone, key) }
	return alone, slices.DeleteFunc(slices.Compact(shared), held)
}

// errReadElsewhere and errHeldElsewhere are for programs that read through one database handle and write
// through another one, as GORM's dbresolver does: read and write are under two locks, or under none.
var (
	errReadElsewhere = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"the lock context has read through another database handle, under a lock that is another one, "+
			"or is not kept to the end of this statement; "+
			"read through the handle that writes (with GORM's dbresolver by Clauses(dbresolver.Write)), in a transaction, or with lockctx.Without"))
	errHeldElsewhere = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"the lock context holds a lock through another database handle, and what this query reads is not under that; "+
			"read through the handle that holds it (with GORM's dbresolver by Clauses(dbresolver.Write)), or with lockctx.Without"))
)

// lost is called when g, a grant of the unit of work, may be lost. It ends the unit of work.
func (cs *ctxState) lost(g *grant) {
	cs.handle.Doubt()
	g.cancelInside(g.overError("statement"))
	_ = cs.takeTurn(context.Background())
	defer cs.giveTurn()
	if slices.Contains(cs.grants.list, g) {
		g.lost()
		cs.fail(g.overError("statement"))
	}
}

// fail ends the unit of work after the loss of a grant. cause is the error of what comes later.
func (cs *ctxState) fail(cause error) {
	if cs.grants.until != nil {
		cs.failed = cause // a decision under the grant must not be written without it
	}
	if cs.unit != nil {
		cs.unit.fail(cause, false)
	}
	cs.dropSpent()
}
