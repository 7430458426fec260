package unit

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// commitLimit bounds a COMMIT or ROLLBACK on a session.
const commitLimit = 30 * time.Second

// commit is a transaction that is about to be committed under guards.
type commit struct {
	link   *pool.Conn
	info   server.Info
	guards []*guard
	wrote  bool           // it may have written
	text   bool           // it was begun as text, so that it can be committed as text
	ends   bool           // the guards end with it, but for those of enclosing holds
	steps  strategy.Check // makes the versions new of rows that are locked and that others compare; the zero value is nothing
	limit  time.Duration
	silent bool         // the connection has a limit on its silence, until the transaction has ended
	send   func() error // sends COMMIT
	sent   func()       // ends the transaction here, if COMMIT was part of a check
	unsure []func(context.Context)
}

// run checks that the guards are still held and commits. refused means that a check has
// failed, so that nothing was committed.
func (c *commit) run() (refused bool, err error) {
	last, err := c.check()
	switch {
	case err != nil:
		return true, err
	case last == nil:
		return false, c.send()
	}
	return c.runLast(*last)
}

// limited is the context for a statement that commits.
func (c *commit) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if c.limit > 0 {
		return context.WithTimeout(ctx, c.limit)
	}
	return ctx, func() {}
}

// check checks the guards, up to one group that can be checked with the COMMIT itself.
func (c *commit) check() (_ *lastCheck, err error) {
	if sabotage.NoFence.Load() {
		c.guards = slices.DeleteFunc(c.guards, func(g *guard) bool { return g.Traits.Excludes })
	}
	for _, g := range c.guards {
		if errors.Is(g.Err(), lockerr.ErrClosed) { // what was lost the server says
			return nil, g.overError("commit")
		}
	}
	var last []lastCheck
	if c.steps.Commit != nil {
		last = append(last, lastCheck{Check: c.steps})
	}
	for _, group := range byStrategy(c.guards) {
		check, err := group.by.Check(group.context(), c.link, group.held, c.wrote)
		if check.Unsure != nil {
			c.unsure = append(c.unsure, check.Unsure)
		}
		if err != nil {
			return nil, group.naming(err)
		}
		if check.Commit != nil {
			last = append(last, lastCheck{check, group})
		}
	}
	return c.fence(last)
}

// fence leaves one of checks to the COMMIT: one that is lasting, or any. A transaction that
// the base driver has begun it commits itself, unless a lock would last.
func (c *commit) fence(checks []lastCheck) (last *lastCheck, err error) {
	at, many := -1, false
	for i, l := range checks {
		switch {
		case l.Lasting && at >= 0 && checks[at].Lasting:
			many = true
		case l.Lasting, c.text && (at < 0 || !checks[at].Lasting):
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
		if err := l.Fence(l.context()); err != nil {
			return nil, l.naming(err)
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

// runLast checks and commits in one statement, if the server has one.
func (c *commit) runLast(last lastCheck) (refused bool, err error) {
	ctx, cancel := c.limited(last.context())
	defer cancel()
	send := last.Commit
	if c.ends && last.Release != nil {
		send = last.Release
	}
	done, unknown, err := send(ctx)
	switch {
	case err != nil:
		return !unknown, last.naming(err)
	case done:
		c.sent()
		return false, nil
	}
	if c.limit == 0 && !c.silent && last.Lasting {
		lift, err := c.limitIdleness(last.places)
		if err != nil {
			return true, strategy.Naming(err, last.places)
		}
		defer lift()
	}
	if err := last.Fence(last.context()); err != nil {
		return true, last.naming(err)
	}
	return false, c.send()
}

// limitIdleness has the server end an application's connection between a fence and
// COMMIT when nothing has been heard of it for a TTL, and with it what the fence has
// locked. Sessions are limited from the beginning, and so are transactions with a row lock.
func (c *commit) limitIdleness(places []strategy.Place) (lift func(), err error) {
	ctx := context.Background()
	least := slices.MinFunc(places, func(a, b strategy.Place) int { return cmp.Compare(a.TTL, b.TTL) })
	if err := c.info.LimitSilence(ctx, c.link.Conn, max(1, int(least.TTL/time.Second))); err != nil {
		return nil, &lockerr.Error{Op: "commit", Key: least.Row, Strategy: least.Strategy, Err: err}
	}
	return func() {
		if c.info.UnlimitSilence(ctx, c.link.Conn) != nil {
			_ = c.link.Conn.Close() // it must not go back with the limit on
		}
	}, nil
}

// awaitEnd returns when the server has done with a COMMIT whose answer was lost, so
// that the guards can be given back.
func (c *commit) awaitEnd() {
	ctx, cancel := context.WithTimeout(context.Background(), commitLimit)
	defer cancel()
	for _, unsure := range c.unsure {
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
