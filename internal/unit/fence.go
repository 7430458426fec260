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
	guards []*guard
	wrote  bool           // it may have written
	text   bool           // it was begun as text, so that it can be committed as text
	ends   bool           // the guards end with it, but for those of enclosing holds
	steps  strategy.Check // makes the versions new of rows that are locked and that others compare; the zero value is nothing
	limit  time.Duration  // of the COMMIT; 0 for none
	silent bool           // the connection has a limit on its silence, until the transaction has ended

	limited bool // pass has set such a limit: see lift
	unsure  []func(context.Context)
}

// fence returns what is checked before the unit's COMMIT; nil for nothing.
func (u *unit) fence() (*fence, error) {
	guards, err := u.checked()
	if err != nil {
		return nil, err
	}
	var steps strategy.Check
	if u.wrote && u.steps {
		steps = u.stepVersions()
	}
	if len(guards) == 0 && steps.Commit == nil {
		return nil, nil
	}
	return &fence{
		link: u.link, info: u.l.Info(), guards: guards, wrote: u.wrote, text: u.txn.AsText(), ends: u.endsGuards(), steps: steps,
		limit: u.limit, silent: u.txn.Limited(),
	}, nil
}

// checked returns the guards that a commit checks. A version whose key the unit has
// under a lease, too, needs no comparison.
func (u *unit) checked() (guards []*guard, err error) {
	all := slices.Concat(u.scope.guards, u.enclosing)
	for _, g := range all {
		if g.version() == 0 {
			guards = append(guards, g)
			continue
		}
		if !u.wrote || !slices.Contains(u.scope.guards, g) {
			continue
		}
		p := g.remembered()
		if at := slices.IndexFunc(all, func(lease *guard) bool { return lease.covers(u.scope.k, p) }); at >= 0 {
			if err := all[at].again(p); err != nil {
				return nil, err
			}
			g.Forget(hint.ToldVersion) // the lease has made it another
			continue
		}
		u.compared = append(u.compared, g)
		guards = append(guards, g)
	}
	return guards, nil
}

// stepVersions is what makes the versions new of the rows that are locked and that others
// compare.
func (u *unit) stepVersions() (c strategy.Check) {
	var rows []string
	for name, r := range u.rows {
		if r.steps() && !slices.ContainsFunc(u.compared, func(g *guard) bool { return g.Row == name }) {
			rows = append(rows, name)
		}
	}
	if len(rows) == 0 {
		return c
	}
	slices.Sort(rows)
	under := func(ctx context.Context) context.Context { return handle.Under(ctx, u.seen...) }
	c.Fence = func(ctx context.Context) error { return u.l.Step(under(ctx), u.link.Conn, rows) }
	c.Commit = func(ctx context.Context) (done, unknown bool, err error) {
		return u.l.StepAndCommit(under(ctx), u.link, rows)
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

// check checks the guards, up to one group that can be checked with the COMMIT itself.
func (f *fence) check() (_ *lastCheck, err error) {
	if sabotage.NoFence.Load() {
		f.guards = slices.DeleteFunc(f.guards, func(g *guard) bool { return g.Traits.Excludes })
	}
	for _, g := range f.guards {
		if errors.Is(g.Err(), lockerr.ErrClosed) { // what was lost the server says
			return nil, g.overError("commit")
		}
	}
	var last []lastCheck
	if f.steps.Commit != nil {
		last = append(last, lastCheck{Check: f.steps})
	}
	for _, group := range byStrategy(f.guards) {
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
	guardGroup
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
	least := slices.MinFunc(f.guards, func(a, b *guard) int { return cmp.Compare(a.TTL, b.TTL) })
	if err := f.info.LimitSilence(context.Background(), f.link.Conn, max(1, int(least.TTL/time.Second))); err != nil {
		return &lockerr.Error{Op: "commit", Key: least.Key, Strategy: least.Strategy, Err: err}
	}
	f.limited = true
	return nil
}

// lift takes that limit off when COMMIT was sent.
func (f *fence) lift() {
	if f.limited && f.info.UnlimitSilence(context.Background(), f.link.Conn) != nil {
		_ = f.link.Conn.Close() // it must not go back with the limit on
	}
}

// awaitEnd returns when the server has done with a COMMIT whose answer was lost, so
// that the guards can be given back.
func (f *fence) awaitEnd() {
	ctx, cancel := context.WithTimeout(context.Background(), commitLimit)
	defer cancel()
	for _, unsure := range f.unsure {
		unsure(ctx)
	}
}

// guardGroup are the guards of one strategy: of other handles, too, and from before a
// failover.
type guardGroup struct {
	by     strategy.Strategy
	held   []strategy.Held
	places []strategy.Place
	seen   []*handle.Observation
}

// context is that of the statements which check the guards.
func (g guardGroup) context() context.Context {
	return handle.Under(context.Background(), g.seen...)
}

// byStrategy groups guards by who has taken them. Those that keep others out come first.
func byStrategy(guards []*guard) (groups []guardGroup) {
	for _, excludes := range []bool{true, false} {
		for _, g := range guards {
			if g.Traits.Excludes != excludes {
				continue
			}
			at := slices.IndexFunc(groups, func(group guardGroup) bool { return group.by == g.by })
			if at < 0 {
				at = len(groups)
				groups = append(groups, guardGroup{by: g.by})
			}
			groups[at].held = append(groups[at].held, g.held)
			groups[at].places = append(groups[at].places, g.Place)
			if g.seen.Traced() {
				groups[at].seen = append(groups[at].seen, g.seen)
			}
		}
	}
	return groups
}

// naming puts the caller's keys into an error.
func (g guardGroup) naming(err error) error {
	var e *lockerr.Error
	if at := slices.IndexFunc(g.places, func(p strategy.Place) bool { return errors.As(err, &e) && e.Key == p.Row }); at >= 0 {
		return strategy.Naming(err, g.places[at:at+1])
	}
	return strategy.Naming(err, g.places)
}
