package unit

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// fence is what is checked right before the COMMIT of a transaction.
type fence struct {
	link   *pool.Conn
	info   server.Info
	grants []*grant
	wrote  bool           // it may have written
	text   bool           // it was begun as text, so that it can be committed as text
	ends   bool           // the grants end with it, but for those of outer holds
	raises strategy.Check // makes the versions new of rows that are locked and that others compare; the zero value is nothing
	limit  time.Duration  // of the COMMIT; 0 for none
	silent bool           // the connection has a limit on its silence, until the transaction has ended

	lasting []strategy.Resource // what a check is [strategy.Check.Lasting] for
	limited bool                // pass has set such a limit: see lift
	unsure  []func(context.Context)
}

// fence returns what is checked before the unit's COMMIT; nil for nothing.
func (u *unit) fence() (*fence, error) {
	grants, err := u.checked()
	if err != nil {
		return nil, err
	}
	var raises strategy.Check
	if u.wrote && u.raises {
		raises = u.raiseVersions()
	}
	if len(grants) == 0 && raises.Commit == nil {
		return nil, nil
	}
	return &fence{
		link: u.link, info: u.l.Info(), grants: grants, wrote: u.wrote, text: u.txn.AsText(), ends: u.endsGrants(), raises: raises,
		limit: u.limit, silent: u.txn.Limited(),
	}, nil
}

// checked returns the grants that a commit checks. A version whose key the unit has
// under a lease, too, needs no comparison.
func (u *unit) checked() (grants []*grant, err error) {
	all := slices.Concat(u.ctxState.grants, u.outer)
	for _, g := range all {
		if g.version() == 0 {
			grants = append(grants, g)
			continue
		}
		if !u.wrote || !slices.Contains(u.ctxState.grants, g) {
			continue
		}
		p := g.remembered()
		if at := slices.IndexFunc(all, func(lease *grant) bool { return lease.covers(u.ctxState.k, p) }); at >= 0 {
			if err := all[at].again(p); err != nil {
				return nil, err
			}
			g.Forget(hint.ToldVersion) // the lease has made it another
			continue
		}
		u.compared = append(u.compared, g)
		grants = append(grants, g)
	}
	return grants, nil
}

// raiseVersions is what makes the versions new of the rows that are locked and that others
// compare.
func (u *unit) raiseVersions() (c strategy.Check) {
	var rows []string
	for name, r := range u.rows {
		if r.raises() && !slices.ContainsFunc(u.compared, func(g *grant) bool { return g.Row == name }) {
			rows = append(rows, name)
		}
	}
	if len(rows) == 0 {
		return c
	}
	slices.Sort(rows)
	under := func(ctx context.Context) context.Context { return handle.Under(ctx, u.seen...) }
	c.Fence = func(ctx context.Context) error { return u.l.Raise(under(ctx), u.link.Conn, rows) }
	c.Commit = func(ctx context.Context) (done, unknown bool, err error) {
		return u.l.RaiseAndCommit(under(ctx), u.link, rows)
	}
	return c
}

// pass makes the checks. done: the last of them has committed, else COMMIT is still to be sent.
// refused: a check has failed, so that nothing was committed. After it comes lift.
func (f *fence) pass() (done, refused bool, err error) {
	last, err := f.check()
	if err != nil || last == nil {
		return false, err != nil, err
	}
	ctx := last.context()
	if f.limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, f.limit)
		defer cancel()
	}
	send := last.Commit
	if f.ends && last.Release != nil {
		send = last.Release
	}
	done, unknown, err := send(ctx)
	if err != nil {
		return false, !unknown, last.naming(err)
	}
	if done {
		return true, false, nil
	}
	err = f.alone(*last)
	return false, err != nil, err
}

// check checks the grants, up to one group that can be checked with the COMMIT itself.
func (f *fence) check() (_ *lastCheck, err error) {
	if sabotage.NoFence.Load() {
		f.grants = slices.DeleteFunc(f.grants, func(g *grant) bool { return g.Traits.Excludes })
	}
	for _, g := range f.grants {
		if errors.Is(g.Err(), lockerr.ErrClosed) { // what was lost the server says
			return nil, g.overError("commit")
		}
	}
	var last []lastCheck
	if f.raises.Commit != nil {
		last = append(last, lastCheck{Check: f.raises})
	}
	for _, group := range byStrategy(f.grants) {
		check, err := group.by.Check(group.context(), f.link, group.held, f.wrote)
		if check.Unsure != nil {
			f.unsure = append(f.unsure, check.Unsure)
		}
		if err != nil {
			return nil, group.naming(err)
		}
		if check.Commit != nil {
			last = append(last, lastCheck{check, group})
		}
		if check.Lasting {
			f.lasting = append(f.lasting, group.resources...)
		}
	}
	return f.leave(last)
}

// leave leaves one of checks to the COMMIT: one that is lasting, or any. A transaction that
// the base driver has begun it commits itself, unless a lock would last.
func (f *fence) leave(checks []lastCheck) (last *lastCheck, err error) {
	at, many := -1, false
	for i, l := range checks {
		switch {
		case l.Lasting && at >= 0 && checks[at].Lasting:
			many = true
		case l.Lasting, f.text && (at < 0 || !checks[at].Lasting):
			at = i
		}
	}
	if many {
		at = -1
	}
	for i, l := range checks {
		if i == at {
			continue
		}
		if err := f.alone(l); err != nil {
			return nil, err
		}
	}
	if at < 0 {
		return nil, nil
	}
	return &checks[at], nil
}

// lastCheck is a check that can be part of the COMMIT.
type lastCheck struct {
	strategy.Check
	grantGroup
}

// alone makes a check apart from the COMMIT.
func (f *fence) alone(l lastCheck) error {
	if l.Lasting && f.limit == 0 && !f.silent && !f.limited {
		if err := f.limitIdleness(); err != nil {
			return err
		}
	}
	return l.naming(l.Fence(l.context()))
}

// limitIdleness has the server end an application's connection between a fence and
// COMMIT when nothing has been heard of it for a TTL, and with it what the fences have
// locked. Sessions are limited from the beginning, and so are transactions with a row lock.
func (f *fence) limitIdleness() error {
	least := slices.MinFunc(f.lasting, func(a, b strategy.Resource) int { return cmp.Compare(a.TTL, b.TTL) })
	if err := f.info.LimitSilence(context.Background(), f.link.Conn, max(1, int(least.TTL/time.Second))); err != nil {
		return &lockerr.Error{Op: "commit", Key: least.Key, Strategy: least.Strategy, Err: err}
	}
	f.limited = true
	return nil
}

// lift takes that limit off when COMMIT was sent.
func (f *fence) lift() {
	if f.limited && f.info.UnlimitSilence(context.Background(), f.link.Conn) != nil {
		_ = f.link.Close() // it must not go back with the limit on
	}
}

// awaitEnd returns when the server has done with a COMMIT whose answer was lost, so
// that the grants can be given back.
func (f *fence) awaitEnd() {
	ctx, cancel := context.WithTimeout(context.Background(), commitLimit)
	defer cancel()
	for _, unsure := range f.unsure {
		unsure(ctx)
	}
}

// grantGroup are the grants of one strategy: of other handles, too, and from before a
// failover.
type grantGroup struct {
	by        strategy.Strategy
	held      []strategy.Grant
	resources []strategy.Resource
	seen      []*handle.Observation
}

// context is that of the statements which check the grants.
func (g grantGroup) context() context.Context {
	return handle.Under(context.Background(), g.seen...)
}

// byStrategy groups grants by who has taken them. Those that keep others out come first.
func byStrategy(grants []*grant) (groups []grantGroup) {
	for _, excludes := range []bool{true, false} {
		for _, g := range grants {
			if g.Traits.Excludes != excludes {
				continue
			}
			at := slices.IndexFunc(groups, func(group grantGroup) bool { return group.by == g.by })
			if at < 0 {
				at = len(groups)
				groups = append(groups, grantGroup{by: g.by})
			}
			groups[at].held = append(groups[at].held, g.held)
			groups[at].resources = append(groups[at].resources, g.Resource)
			if g.seen.Traced() {
				groups[at].seen = append(groups[at].seen, g.seen)
			}
		}
	}
	return groups
}

// naming puts the caller's keys into an error.
func (g grantGroup) naming(err error) error {
	var e *lockerr.Error
	if at := slices.IndexFunc(g.resources, func(p strategy.Resource) bool { return errors.As(err, &e) && e.Key == p.Row }); at >= 0 {
		return strategy.Naming(err, g.resources[at:at+1])
	}
	return strategy.Naming(err, g.resources)
}
