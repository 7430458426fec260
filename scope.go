package mysqllock

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/lease"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// scope is what one database handle remembers of one lock context: its unit of
// work. Its statements take turns. All fields but turn and asked are guarded by
// the turn.
type scope struct {
	turn  chan struct{} // holds a token while a statement of the lock context runs
	asked bool          // a wait was made to try again on another connection; guarded by crowd.mu

	unit    *unit       // the open transaction of the unit of work
	guards  []guard     // what else the unit of work holds, with or without a transaction
	joined  []*Hold     // holds that joined one of guards, and end with them
	unwatch func() bool // ends the watch on the end of the lock context; nil without one
	failed  error       // why no other unit may begin: one was lost behind the caller's back

	k     *connector
	hints *lockctx.Scope // shows the tokens; nil where the context only has holds around it
}

// guard is a lock that lies outside of the transactions under it: a lease, or an
// advisory lock.
type guard interface {
	Key() string
	Err() error // nil while it is held
	Release() error
}

var (
	_ guard = (*lease.Lease)(nil)
	_ guard = (*advisory.Lock)(nil)
)

func isAdvisory(g guard) bool {
	_, ok := g.(*advisory.Lock)
	return ok
}

func strategyOf(g guard) string {
	if isAdvisory(g) {
		return lockctx.StrategyAdvisory
	}
	return lockctx.StrategyLease
}

// tokenOf is 0 for what has no token.
func tokenOf(g guard) uint64 {
	if l, ok := g.(*lease.Lease); ok {
		return l.Token()
	}
	return 0
}

func (k *connector) newScope(hints *lockctx.Scope) *scope {
	return &scope{turn: make(chan struct{}, 1), k: k, hints: hints}
}

// scope returns what is remembered of the lock context. Where there is nothing
// to lock, because the context only has holds around it, every transaction
// stands for itself.
func (k *connector) scope(hints *lockctx.Scope) *scope {
	if hints == nil {
		return k.newScope(nil)
	}
	return hints.State(k, func() any { return k.newScope(hints) }).(*scope)
}

func (s *scope) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *scope) give() { <-s.turn }

// names are the keys of a hint, for errors.
func names(h *lockctx.Hint) string { return strings.Join(h.Keys(), ", ") }

// strategy is how the keys of the innermost With are locked, for errors.
func (k *connector) strategy(h *lockctx.Hint) string { return k.kind(h.Kind).Strategy }

// kind completes how a key is to be locked with what the handle says.
func (k *connector) kind(kind lockctx.Kind) lockctx.Kind {
	if kind.Strategy == lockctx.StrategyDefault {
		kind.Strategy = k.settings.strategy
	}
	if kind.TTL == 0 {
		kind.TTL = k.settings.ttl
	}
	return kind
}

// around returns what the holds of this handle keep that h is inside of.
func (k *connector) around(h *lockctx.Hint) (guards []guard) {
	for _, hold := range h.Holds {
		if hold, ok := hold.(*Hold); ok && hold.k == k {
			guards = append(guards, hold.guard)
		}
	}
	return guards
}

// wanted returns which keys of h are not held yet: those to be locked by row
// locks, and those by guards.
func (k *connector) wanted(s *scope, h *lockctx.Hint) (rows []string, guards []lockctx.Lock, err error) {
	around := k.around(h)
	same := func(a, b lockctx.Lock) bool {
		return a.Key == b.Key && (a.Strategy == lockctx.StrategyAdvisory) == (b.Strategy == lockctx.StrategyAdvisory)
	}
	var seen []lockctx.Lock
	for _, lock := range h.Locks {
		lock.Kind = k.kind(lock.Kind)
		has := func(g guard) bool { return holds(g, lock) }
		if slices.ContainsFunc(seen, func(other lockctx.Lock) bool { return same(other, lock) }) {
			continue // one With says it, another leaves it to the handle
		}
		seen = append(seen, lock)
		switch {
		case slices.ContainsFunc(s.guards, has) || slices.ContainsFunc(around, has):
		case lock.Strategy == lockctx.StrategyAdvisory:
			guards = append(guards, lock)
		case s.unit != nil && s.unit.has(lock.Key):
		case lock.Strategy == lockctx.StrategyLease:
			guards = append(guards, lock)
		case lock.MinHold != 0 || lock.MaxHold != 0:
			return nil, nil, &Error{Op: "lock", Key: lock.Key, Strategy: lock.Strategy, Err: errors.New("bad hint: MinHold and MaxHold need a lease")}
		default:
			rows = append(rows, lock.Key)
		}
	}
	return rows, guards, nil
}

// holds reports whether g is what lock asks for: the key again joins, however it
// is kept, but for advisory locks, which are a space of their own.
func holds(g guard, lock lockctx.Lock) bool {
	return g.Key() == lock.Key && isAdvisory(g) == (lock.Strategy == lockctx.StrategyAdvisory)
}

// wait is the longest time that h is ready to queue.
func (k *connector) wait(h *lockctx.Hint) time.Duration {
	if h.HasWait {
		return h.Wait
	}
	return k.settings.wait
}

// guard takes guards for the unit of work, all or none. undo gives them back,
// where what was to come next fails. carried means that the caller occupies a
// connection of database/sql while it waits.
func (s *scope) guard(ctx context.Context, l *locks, h *lockctx.Hint, wanted []lockctx.Lock, carried bool) (undo func(), err error) {
	before, start := len(s.guards), time.Now()
	undo = func() { s.drop(before) }
	for _, lock := range wanted {
		wait := s.k.wait(h)
		if wait > 0 {
			wait = max(wait-time.Since(start), time.Millisecond)
		}
		var taken guard
		known := make(chan struct{}) // closed when taken is set
		taken, err = l.take(ctx, s, lock, wait, carried, func() { <-known; s.lost(taken) })
		close(known)
		if err != nil {
			undo()
			return nil, err
		}
		if len(s.guards) == 0 {
			s.k.crowd.hold()
		}
		s.guards = append(s.guards, taken)
		if token := tokenOf(taken); token != 0 {
			s.hints.SetToken(lock.Key, token)
		}
	}
	return undo, nil
}

// take takes a guard. lost is called once, on a goroutine of its own, when it
// may be lost.
func (l *locks) take(ctx context.Context, s *scope, lock lockctx.Lock, wait time.Duration, carried bool, lost func()) (guard, error) {
	waiting := func(ctx context.Context) (context.Context, func(), error) { return s.k.waiting(ctx, s, carried) }
	told := func(error) { lost() }
	if lock.Strategy == lockctx.StrategyAdvisory {
		g, err := l.advisories.Acquire(ctx, advisory.Request{Key: lock.Key, Wait: wait, Waiting: waiting, Lost: told})
		if err != nil {
			return nil, err
		}
		return g, nil
	}
	g, err := l.leases.Acquire(ctx, lease.Request{
		Key: lock.Key, TTL: lock.TTL, MinHold: lock.MinHold, MaxHold: lock.MaxHold, Wait: wait, Waiting: waiting, Lost: told,
	})
	if err != nil {
		return nil, err
	}
	return g, nil
}

// fence checks, right before the transaction on link commits, that guards are
// still ours. Leases are kept so until the transaction has ended.
func (l *locks) fence(link *pool.Conn, guards ...guard) error {
	if fenceOff.Load() {
		return nil
	}
	var leases []*lease.Lease
	var advisories []*advisory.Lock
	for _, g := range guards {
		switch g := g.(type) {
		case *lease.Lease:
			leases = append(leases, g)
		case *advisory.Lock:
			advisories = append(advisories, g)
		}
	}
	var err error
	if len(advisories) > 0 {
		err = l.advisories.Check(context.Background(), link.Conn, advisories)
	}
	if len(leases) > 0 && err == nil {
		err = l.leases.Fence(context.Background(), link.Conn, leases)
	}
	return err
}

// fenceOff is for tests that show what the fence prevents.
var fenceOff atomic.Bool

// drop gives all guards but the first few back. What was lost meanwhile needs
// no error: nothing that the unit of work did after that was committed.
func (s *scope) drop(keep int) {
	if len(s.guards) == keep {
		return
	}
	for _, g := range s.guards[keep:] {
		if tokenOf(g) != 0 {
			s.hints.SetToken(g.Key(), 0)
		}
		_ = g.Release()
	}
	if s.guards = slices.Clone(s.guards[:keep]); keep > 0 {
		return
	}
	s.k.crowd.done()
	for _, hold := range s.joined {
		hold.cancel(ErrLost)
	}
	s.joined = nil
	if s.unwatch != nil {
		s.unwatch()
		s.unwatch = nil
	}
}

// watch gives the guards back when end does, the context that bounds what was
// read under them.
func (s *scope) watch(end context.Context) {
	if s.unwatch != nil || len(s.guards) == 0 {
		return
	}
	s.unwatch = context.AfterFunc(end, func() {
		_ = s.take(context.Background())
		defer s.give()
		if s.unit == nil && len(s.guards) > 0 { // a transaction gives them back at its own end
			s.failed = &Error{Op: "statement", Key: s.guards[0].Key(), Strategy: strategyOf(s.guards[0]), Err: lockerr.With(ErrLost, errEnded)}
			s.drop(0)
		}
	})
}

var errEnded = errors.New("the lock context, or the context of the query that took the lock, has ended")

// lost is called when a guard of the unit of work may be lost.
func (s *scope) lost(g guard) {
	_ = s.take(context.Background())
	defer s.give()
	if slices.Contains(s.guards, g) {
		s.fail(overError("statement", g))
	}
}

// fail ends the unit of work, which has lost a guard.
func (s *scope) fail(cause error) {
	if s.unwatch != nil {
		s.failed = cause // what was decided under it must not be written without it
	}
	if s.unit != nil {
		s.unit.fail(cause, false)
	}
	s.drop(0)
}

// check returns why nothing can run in the lock context any more, or inside the
// holds around it.
func (s *scope) check(h *lockctx.Hint) error {
	for _, g := range s.guards {
		if err := overError("statement", g); err != nil {
			s.fail(err)
			return err
		}
	}
	if s.failed != nil {
		return s.failed
	}
	if h != nil {
		for _, g := range s.k.around(h) {
			if err := overError("statement", g); err != nil {
				return err
			}
		}
	}
	return nil
}

// overError is what work under a guard gets that is over; nil where it is held.
func overError(op string, g guard) error {
	err := g.Err()
	if err == nil {
		return nil
	}
	if !errors.Is(err, ErrLost) {
		err = lockerr.With(ErrLost, errors.New("its hold has ended"))
	}
	return &Error{Op: op, Key: g.Key(), Strategy: strategyOf(g), Err: err}
}
