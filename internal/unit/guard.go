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
	"github.com/mysqllock/mysqllock/pool"
)

// guard is a lock that lies outside of the transactions under it: a lease, an
// advisory lock, or a version that their commits compare.
type guard struct {
	held         strategy.Held
	handle.Place                     // Row is the one that keeps it, also with Slots
	by           strategy.Strategy   // that has taken it
	first        string              // with Slots, the row of the first
	seen         *handle.Observation // of the lock; of versions that were asked for together, only the first has it
}

// newGuard returns what was taken for p.
func newGuard(p handle.Place, by strategy.Strategy, held strategy.Held) *guard {
	g := &guard{held: held, Place: p, by: by}
	if p.Slots > 0 {
		g.first, g.Row = p.Row, held.Key()
	}
	return g
}

// Err is nil while it is held.
func (g *guard) Err() error { return g.held.Err() }

// Release gives the guard back.
func (g *guard) Release() error {
	began := time.Now()
	g.seen.Leaving(began)
	err := g.held.Release()
	g.seen.Over(began, err)
	return err
}

// lost notes that the guard is over without having been given back, or that the
// handle was closed.
func (g *guard) lost() {
	cause := g.overError("statement")
	if errors.Is(g.Err(), lockerr.ErrClosed) {
		cause = nil
	}
	g.seen.Over(time.Time{}, cause)
}

// detach takes off the connection of its transaction what that carries for the guard.
func (g *guard) detach() error {
	if a, ok := g.held.(strategy.Attached); ok {
		return a.Detach()
	}
	return nil
}

// token is 0 for what has no token.
func (g *guard) token() uint64 {
	if f, ok := g.held.(strategy.Fenced); ok {
		return f.Token()
	}
	return 0
}

// expiry is the zero time for what has none.
func (g *guard) expiry() time.Time {
	if f, ok := g.held.(strategy.Fenced); ok {
		return f.Expiry()
	}
	return time.Time{}
}

// version is 0 for what has no version.
func (g *guard) version() uint64 {
	if v, ok := g.held.(strategy.Versioned); ok {
		return v.Number()
	}
	return 0
}

// slot is 0 for what has no slots.
func (g *guard) slot() uint64 {
	if s, ok := g.held.(strategy.Slotted); ok {
		return uint64(s.Slot())
	}
	return 0
}

// line is the place in the process's own line; nil without one.
func (g *guard) line() *queue.Ticket {
	if l, ok := g.held.(strategy.Lined); ok {
		return l.Ticket()
	}
	return nil
}

// keeps reports whether the guard is what p asks for. The same key again joins, however
// it is kept, if both are in the table and the guard keeps others out.
func (g *guard) keeps(p handle.Place) bool {
	if !g.Place.Shares(p) {
		return false
	}
	switch {
	case !g.Traits.Excludes || !g.Traits.Table || !p.Traits.Table:
		return g.SameAs(p.Place)
	case p.Slots > 0:
		return slices.Contains(p.SlotRows(), g.Row) || g.first == p.Row // also if there were more of them
	}
	return g.Row == p.Row
}

// keeperOf is the one of guards that keeps p; nil without one.
func keeperOf(p handle.Place, guards []*guard) *guard {
	if at := slices.IndexFunc(guards, func(g *guard) bool { return g.keeps(p) }); at >= 0 {
		return guards[at]
	}
	return nil
}

// join notes what p, which the guard keeps, has to be told, and returns why it
// does not do.
func (g *guard) join(p handle.Place) error {
	if p.Slots > 0 {
		p.Tell(hint.ToldSlot, g.slot())
	}
	return g.again(p)
}

// again returns why the guard, which is held already, does not do for p.
func (g *guard) again(p handle.Place) error {
	switch p.Version {
	case 0, g.version(), g.token() - 1: // the lease itself is the only change since
		return nil
	}
	return &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: lockerr.ErrConflict}
}

// covers reports whether the guard is a lease on the row of a version: nobody
// else can change it.
func (g *guard) covers(version handle.Place) bool { return g.token() != 0 && g.keeps(version) }

// remembered is the place of a version with its number.
func (g *guard) remembered() handle.Place {
	p := g.Place
	p.Version = g.version()
	return p
}

// tellAll lets the application ask for the numbers of what was taken.
func (g *guard) tellAll() {
	if v := g.version(); v != 0 {
		g.Tell(hint.ToldVersion, v)
	}
	if token := g.token(); token != 0 {
		g.Tell(hint.ToldToken, token)
	}
	if g.Slots > 0 {
		g.Tell(hint.ToldSlot, g.slot())
	}
}

// told is a number of the guard of a hold.
func (g *guard) told(what hint.What) (n uint64, ok bool) {
	switch what {
	case hint.ToldToken:
		return g.token(), g.token() != 0
	case hint.ToldSlot:
		return g.slot(), g.Slots > 0
	}
	return 0, false
}

var errHoldEnded = lockerr.With(lockerr.ErrLost, errors.New("its hold has ended"))

// overError is what work under a guard gets that is over; nil while it is held.
func (g *guard) overError(op string) error {
	err := g.Err()
	if err == nil {
		return nil
	}
	if !errors.Is(err, lockerr.ErrLost) {
		err = errHoldEnded
	}
	return &lockerr.Error{Op: op, Key: g.Key, Strategy: g.Strategy, Err: err}
}

// takeGuard takes a lock that keeps others out, for by. lost is called once, on a goroutine of
// its own, when the guard may be lost. begin is the transaction that may begin with it; nil
// for none.
func takeGuard(ctx context.Context, k *handle.Handle, l *handle.Locks, by handle.Caller, p handle.Place, wait time.Duration, begin *strategy.Beginning, lost func()) (*guard, error) {
	seen := k.Observe(ctx, p)
	ctx = seen.Context(ctx)
	of := l.By(p)
	held, err := of.Take(ctx, strategy.Request{
		Places: []strategy.Place{p.Place}, Wait: wait, Wants: k.WaitingFor(by, l.Sought(p)), Begin: begin, Lost: lost,
	})
	if err != nil {
		err = strategy.Naming(err, []strategy.Place{p.Place})
		k.Answered(seen, 0, err)
		return nil, err
	}
	g := newGuard(p, of, held[0])
	g.seen = seen
	k.Answered(seen, g.token(), nil)
	return g, nil
}

// takeGuards takes guards for the unit of work, all or none. undo gives them back,
// where what was to come next fails. pooled means that the caller occupies a
// connection of database/sql while it waits. Versions are read on link, where the
// caller has one without a transaction.
func (s *scope) takeGuards(ctx context.Context, l *handle.Locks, wait handle.Budget, places []handle.Place, link *pool.Conn, pooled bool) (undo func(), err error) {
	return s.takeGuardsWith(ctx, l, wait, places, link, nil, pooled)
}

// takeGuardsWith is takeGuards for one that a transaction may begin with.
func (s *scope) takeGuardsWith(ctx context.Context, l *handle.Locks, wait handle.Budget, places []handle.Place, link *pool.Conn, begin *strategy.Beginning, pooled bool) (undo func(), err error) {
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
		err = s.remember(ctx, l, versions, wait.Left(), link, begin, pooled)
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
// is the transaction on link that may begin with it; nil for none.
func (s *scope) remember(ctx context.Context, l *handle.Locks, places []handle.Place, wait time.Duration, link *pool.Conn, begin *strategy.Beginning, pooled bool) error {
	of := l.Sought(places...)
	r := strategy.Request{Wait: wait, Wants: s.k.WaitingFor(s.caller(pooled), of), Begin: begin}
	for _, p := range places {
		r.Places = append(r.Places, p.Place)
	}
	seen := s.k.Observe(ctx, places...)
	ctx = seen.Context(ctx)
	by := l.By(places[0])
	held, err := takeOn(ctx, link, by, r)
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

// takeOn has r taken on link, unless that is nil.
func takeOn(ctx context.Context, link *pool.Conn, by strategy.Strategy, r strategy.Request) ([]strategy.Held, error) {
	if link != nil {
		if err := link.AwaitTurn(ctx); err != nil {
			return nil, err
		}
		defer link.EndTurn()
		r.Conn = link.Conn
	}
	return by.Take(ctx, r)
}

// add notes that a guard is held.
func (s *scope) add(g *guard) {
	s.guards = append(s.guards, g)
	g.Enter()
	g.tellAll()
	if !s.counted && g.Traits.Excludes {
		s.k.Crowd.Hold()
		s.counted = true
	}
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

// drop gives all guards but the first few back. What was lost meanwhile needs
// no error: nothing that the unit of work did after that was committed.
func (s *scope) drop(keep int) {
	if len(s.guards) == keep {
		return
	}
	for _, g := range s.guards[keep:] {
		g.Forget(hint.ToldToken)
		g.Forget(hint.ToldSlot)
		g.Leave()
		_ = g.Release()
	}
	s.guards = slices.Clone(s.guards[:keep])
	if s.counted && !slices.ContainsFunc(s.guards, func(g *guard) bool { return g.Traits.Excludes }) {
		s.k.Crowd.Done()
		s.counted = false
	}
	if keep > 0 {
		return
	}
	for _, hold := range s.joined {
		hold.cancel(lockerr.ErrLost)
	}
	s.joined = nil
	if s.owed != "" {
		s.outlived(s.owed)
		s.owed = ""
	}
	s.k.Tenures.End(s.tenure)
	s.tenure = nil
	if s.unwatch != nil {
		s.unwatch()
		s.unwatch, s.until = nil, nil
	}
}
