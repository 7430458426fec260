package unit

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// epilogue is what goes out with the COMMIT of a unit. In front of COMMIT, statements make sure that all
// locks are still held. Behind COMMIT, statements give back the locks that end with the transaction.
type epilogue struct {
	parts         []part
	before, after []string
}

// part is what one strategy adds to an epilogue.
type part struct {
	strategy.Check
	grantGroup
	first int // index in before of the first of its statements
}

// epilogue returns what goes out with the unit's COMMIT; nil for nothing. A READ ONLY transaction has
// none, since it can write nothing.
func (u *unit) epilogue() (*epilogue, error) {
	if u.opts.ReadOnly {
		return nil, nil
	}
	grants, e := u.grantsToCheck(), new(epilogue)
	if u.past.wrote && u.rowLocks.raises {
		e.add(u.raiseVersions(), grantGroup{seen: u.rowLocks.seen})
	}
	for _, g := range grants {
		if errors.Is(g.Err(), lockerr.ErrClosed) { // g was given back; whether a grant was lost, the server's answer says
			return nil, g.overError("commit")
		}
	}
	how := strategy.Commit{Wrote: u.past.wrote, Ends: u.endsGrants()}
	for _, group := range byStrategy(grants) {
		how := how
		how.Ends = how.Ends && !slices.ContainsFunc(group.grants, func(g *grant) bool { return !slices.Contains(u.ctxState.grants.list, g) })
		check, err := group.taker.Check(group.context(context.Background()), u.session, group.held, how)
		if err != nil {
			e.tellParts(strategy.Failed)
			return nil, group.naming(err)
		}
		e.add(check, group)
	}
	if len(e.parts) == 0 {
		return nil, nil
	}
	return e, nil
}

// add adds a part, unless it is empty.
func (e *epilogue) add(check strategy.Check, group grantGroup) {
	if len(check.Before)+len(check.After) == 0 && check.Ended == nil && check.Unsure == nil {
		return
	}
	e.parts = append(e.parts, part{check, group, len(e.before)})
	e.before, e.after = append(e.before, check.Before...), append(e.after, check.After...)
}

// grantsToCheck returns the grants that a commit checks.
func (u *unit) grantsToCheck() (grants []*grant) {
	for _, g := range u.grants() {
		switch {
		case g.version() == 0:
			grants = append(grants, g)
		case u.past.wrote && slices.Contains(u.ctxState.grants.list, g):
			u.atCommit.compared = append(u.atCommit.compared, g)
			grants = append(grants, g)
		}
	}
	if sabotage.NoFence.Load() {
		grants = slices.DeleteFunc(grants, func(g *grant) bool { return g.Traits.Excludes })
	}
	return grants
}

// raiseVersions returns the statement that raises versions: those of the locked rows whose versions
// others compare.
func (u *unit) raiseVersions() (c strategy.Check) {
	var rows []string
	for name, r := range u.rowLocks.rows {
		if r.raises() {
			rows = append(rows, name)
		}
	}
	if len(rows) > 0 {
		slices.Sort(rows)
		c.Before = []string{u.l.RowLocks.Raise(rows)}
		c.Failed = func(_ context.Context, _ int, err error) error {
			return fmt.Errorf("raising the versions of keys: %w", err)
		}
	}
	return c
}

// send sends COMMIT with the epilogue. refused means that nothing was committed, for sure.
func (e *epilogue) send(u *unit) (refused bool, err error) {
	ctx := e.context()
	answered, sent, err := u.txn.CommitWith(ctx, u.limit, e.before, e.after)
	for err != nil && answered < len(e.before) && e.sendsAgain(answered, err) {
		var more int
		more, sent, err = u.txn.CommitWith(ctx, u.limit, e.before[answered:], e.after)
		answered += more
	}
	commit := len(e.before)
	switch {
	case err == nil:
		e.tellParts(strategy.Committed)
		return false, nil
	case answered > commit:
		e.tellParts(strategy.OnlyCommitted)
		if !u.session.Valid() {
			u.breakLink()
		}
		return false, nil
	case answered < commit && server.ReadOnlyTransactions(err): // all transactions of the connection are READ ONLY: nothing was written
		e.tellParts(strategy.Failed)
		u.atCommit.compared = nil
		return false, u.txn.Commit(u.limit)
	case !sent && server.Number(err) == 0:
		refused = true
	default:
		var unknown bool
		if unknown, err = server.Uncommitted(ctx, u.session.Conn, err); unknown {
			e.tellParts(strategy.Unknown)
			return false, err
		}
		refused = true
	}
	e.tellParts(strategy.Failed)
	if answered < commit {
		p, index := e.part(answered)
		err = p.naming(p.Failed(p.context(ctx), index, err))
	}
	return refused, err
}

// part returns the part from which the statement before[i] has come, and the index of the statement in
// that part.
func (e *epilogue) part(i int) (p part, index int) {
	for _, p := range slices.Backward(e.parts) {
		if p.first <= i && len(p.Before) > 0 {
			return p, i - p.first
		}
	}
	return part{}, 0
}

// sendsAgain reports whether the statement before[i], which has failed with err, is to be sent again together
// with those behind it.
func (e *epilogue) sendsAgain(i int, err error) bool {
	p, index := e.part(i)
	return p.Again != nil && p.Again(index, err)
}

// tellParts tells all parts how the COMMIT has ended.
func (e *epilogue) tellParts(o strategy.Outcome) {
	for _, p := range e.parts {
		if p.Ended != nil {
			p.Ended(o)
		}
	}
}

// awaitEnd waits, after the answer to a COMMIT was lost, until the server has done with the COMMIT. Then
// the grants can be given back.
func (e *epilogue) awaitEnd() {
	ctx, cancel := server.Within(context.Background(), commitLimit)
	defer cancel()
	for _, p := range e.parts {
		if p.Unsure != nil {
			p.Unsure(p.context(ctx))
		}
	}
}

// context returns the context with which the epilogue's statements are sent.
func (e *epilogue) context() context.Context {
	var seen []*handle.Observation
	var resources []strategy.Resource
	for _, p := range e.parts {
		seen, resources = append(seen, p.seen...), append(resources, p.resources...)
	}
	return handle.Committing(resources, seen)
}

// grantGroup are the grants that one strategy of one handle has taken on one server. Grants of other handles, and from
// before a failover, are in groups of their own.
type grantGroup struct {
	taker     strategy.Strategy
	grants    []*grant
	held      []strategy.Grant
	resources []strategy.Resource
	seen      []*handle.Observation
}

// context returns the context of statements that check the grants.
func (g grantGroup) context(ctx context.Context) context.Context { return handle.Under(ctx, g.seen...) }

// byStrategy groups grants by the strategy that has taken them. Groups that keep others out come first.
func byStrategy(grants []*grant) (groups []grantGroup) {
	for _, excludes := range []bool{true, false} {
		for _, g := range grants {
			if g.Traits.Excludes != excludes {
				continue
			}
			i := slices.IndexFunc(groups, func(group grantGroup) bool { return group.taker == g.taker })
			if i < 0 {
				i = len(groups)
				groups = append(groups, grantGroup{taker: g.taker})
			}
			groups[i].grants = append(groups[i].grants, g)
			groups[i].held = append(groups[i].held, g.held)
			groups[i].resources = append(groups[i].resources, g.Resource)
			if g.seen.Traced() {
				groups[i].seen = append(groups[i].seen, g.seen)
			}
		}
	}
	return groups
}

// naming puts the caller's keys into an error.
func (g grantGroup) naming(err error) error {
	var e *lockerr.Error
	named := func(resource strategy.Resource) bool { return errors.As(err, &e) && e.Key == resource.Row }
	if i := slices.IndexFunc(g.resources, named); i >= 0 {
		return strategy.Naming(err, g.resources[i:i+1])
	}
	return strategy.Naming(err, g.resources)
}
