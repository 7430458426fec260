package unit

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// wanted returns which locks of h are not held yet.
func (s *scope) wanted(h *hint.Hint) (handle.Wanted, error) {
	around := enclosing(h)
	return s.k.Wanted(h, func(p handle.Place) (bool, error) { return s.has(p, around) })
}

// has reports whether what p asks for is held, by the unit of work or a hold
// around it.
func (s *scope) has(p handle.Place, around []*guard) (bool, error) {
	keeps := func(g *guard) bool { return g.keeps(p) }
	if at := slices.IndexFunc(s.guards, keeps); at >= 0 {
		return true, s.guards[at].join(p)
	}
	if at := slices.IndexFunc(around, keeps); at >= 0 {
		if !p.Traits.Excludes {
			return false, &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
				"a hold around has a lease on the key, which keeps others out, but not the transactions that run side by side in the hold"))}
		}
		return true, around[at].join(p)
	}
	if !p.Traits.Table {
		return false, nil
	}
	locked := s.unit.row(p.Row)
	if p.Slots > 0 {
		if slot, ok := s.unit.slotOf(p); ok {
			p.Tell(hint.ToldSlot, uint64(slot))
			return true, nil
		}
	}
	switch {
	case locked == nil:
		return false, nil
	case locked.Shared && !p.Shared:
		return false, p.Upgrade()
	}
	return p.Version == 0, nil // a version that was given is compared all the same
}

// remembers reports whether the unit of work keeps a version, which its commit
// compares.
func (s *scope) remembers() bool {
	return slices.ContainsFunc(s.guards, func(g *guard) bool { return g.version() != 0 })
}

// caller is who asks for a lock in s, which is nil outside of any lock context. pooled
// means that it occupies a connection of database/sql while it waits.
func (s *scope) caller(pooled bool) handle.Caller {
	c := handle.Caller{Pooled: pooled, Has: s.held}
	if s != nil {
		c.Asked = &s.asked
	}
	return c
}

// held returns what a caller has that waits in ctx and s: its tickets, and what others
// can ask for.
func (s *scope) held(ctx context.Context) (tickets []*queue.Ticket, places []handle.Place) {
	var guards []*guard
	if h, ok := hint.From(ctx); ok {
		guards = enclosing(h) // of other handles, too
	}
	if s != nil {
		guards = slices.Concat(guards, s.guards)
		if s.unit != nil {
			for _, row := range s.unit.rows {
				places = append(places, row.Place)
			}
		}
	}
	for _, g := range guards {
		if g != nil && g.line() != nil {
			tickets = append(tickets, g.line())
			places = append(places, g.Place)
		}
	}
	if s != nil && s.unit != nil {
		tickets = append(tickets, s.unit.tickets...)
	}
	return tickets, places
}

// asks is who asks for a connection under h in s, pooled as for caller. Who is about to wait in
// the server for a lock counts for that, unless it holds something: it may be what another
// one there waits for.
func (s *scope) asks(ctx context.Context, h *hint.Hint, pooled, blocks bool) handle.Caller {
	by := s.caller(pooled)
	if s.holds(h) {
		tickets, _ := s.held(ctx)
		by.Urgent = slices.ContainsFunc(tickets, (*queue.Ticket).Awaited)
		blocks = false
	}
	by.Waits = blocks
	return by
}

// holds reports whether a caller with h in s holds something.
func (s *scope) holds(h *hint.Hint) bool {
	return s.unit != nil || len(s.guards) > 0 || len(enclosing(h)) > 0
}

// takeGuards takes guards for the unit of work, all or none. undo gives them back,
// where what was to come next fails. pooled means that the caller occupies a
// connection of database/sql while it waits. Versions are read on what is lent.
func (s *scope) takeGuards(ctx context.Context, l *handle.Locks, wait handle.Budget, places []handle.Place, on lent, pooled bool) (undo func(), err error) {
	return s.takeGuardsWith(ctx, l, wait, places, on, nil, pooled)
}

// takeGuardsWith is takeGuards for one that a transaction may begin with.
func (s *scope) takeGuardsWith(ctx context.Context, l *handle.Locks, wait handle.Budget, places []handle.Place, on lent, begin *strategy.Beginning, pooled bool) (undo func(), err error) {
	before := len(s.guards)
	undo = func() { s.drop(before) }
	if wait.None() {
		s.k.Tenures.Settle(ctx, places)
	}
	var versions []handle.Place
	for _, p := range places {
		if p.Traits.Excludes {
			err = s.takeLock(ctx, l, p, wait.Left(), begin, pooled)
		} else {
			versions = append(versions, p)
		}
		if err != nil {
			undo()
			return nil, err
		}
	}
	versions, err = s.uncovered(versions)
	if err == nil && len(versions) > 0 {
		err = s.remember(ctx, l, versions, wait.Left(), on, begin, pooled)
	}
	if err != nil {
		undo()
		return nil, err
	}
	return undo, nil
}

// takeLock takes one guard that keeps others out. begin is as for takeGuard.
func (s *scope) takeLock(ctx context.Context, l *handle.Locks, p handle.Place, wait time.Duration, begin *strategy.Beginning, pooled bool) error {
	var taken *guard
	known := make(chan struct{}) // closed when taken is set
	taken, err := takeGuard(ctx, s.k, l, s.caller(pooled), p, wait, begin, func() { <-known; s.lost(taken) })
	close(known)
	if err != nil {
		return s.k.Refused(err, []handle.Place{p})
	}
	s.add(taken)
	return s.unchanged(taken)
}

// remember notes the versions of places, in one statement: one strategy alone compares. begin
// is the transaction on the connection lent that may begin with it; nil for none.
func (s *scope) remember(ctx context.Context, l *handle.Locks, places []handle.Place, wait time.Duration, on lent, begin *strategy.Beginning, pooled bool) error {
	of := l.Sought(places...)
	r := strategy.Request{Wait: wait, Wants: s.k.WaitingFor(s.caller(pooled), of), Begin: begin}
	for _, p := range places {
		r.Places = append(r.Places, p.Place)
	}
	seen := s.k.Observe(ctx, places...)
	ctx = seen.Context(ctx)
	by := l.By(places[0])
	held, err := on.take(ctx, by, r)
	err = s.k.Refused(strategy.Naming(err, r.Places), places)
	s.k.Answered(seen, 0, err)
	if err != nil {
		return err
	}
	for i, v := range held {
		g := newGuard(places[i], by, v)
		g.seen, seen = seen, nil
		s.add(g)
	}
	return nil
}

// unchanged returns ErrConflict if a lease that was taken just now comes after somebody
// has changed what the unit of work has remembered before.
func (s *scope) unchanged(taken *guard) error {
	for _, g := range s.guards {
		if g.version() != 0 && taken.covers(g.Place) {
			return taken.again(g.remembered())
		}
	}
	return nil
}

// uncovered returns those of places whose versions a lease of the unit of work
// does not stand for.
func (s *scope) uncovered(places []handle.Place) (rest []handle.Place, err error) {
	for _, p := range places {
		at := slices.IndexFunc(s.guards, func(g *guard) bool { return g.covers(p) })
		if at < 0 {
			rest = append(rest, p)
			continue
		}
		if err := s.guards[at].again(p); err != nil {
			return nil, err
		}
	}
	return rest, nil
}
