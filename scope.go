package mysqllock

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/lease"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// scope is what one database handle remembers of one lock context: its unit of
// work. Its statements take turns. All fields but turn and asked are guarded by
// the turn.
type scope struct {
	turn  chan struct{} // holds a token while a statement of the lock context runs
	asked bool          // a wait was made to try again on another connection; guarded by crowd.mu

	unit    *unit          // the open transaction of the unit of work
	leases  []*lease.Lease // that the unit of work holds, with or without a transaction
	unwatch func() bool    // ends the watch on the end of the lock context; nil without one
	failed  error          // why no other unit may begin: one was lost behind the caller's back

	k     *connector
	hints *lockctx.Scope // shows the tokens; nil where the context only has holds around it
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

// around returns the leases of the holds of this handle that h is inside of.
func (k *connector) around(h *lockctx.Hint) (leases []*lease.Lease) {
	for _, hold := range h.Holds {
		if hold, ok := hold.(*Hold); ok && hold.k == k {
			leases = append(leases, hold.lease)
		}
	}
	return leases
}

// wanted returns which keys of h are not held yet: those to be locked by row
// locks, and those by leases.
func (k *connector) wanted(s *scope, h *lockctx.Hint) (rows []string, leases []lockctx.Lock, err error) {
	around := k.around(h)
	for _, lock := range h.Locks {
		has := func(l *lease.Lease) bool { return l.Key() == lock.Key }
		if s.unit != nil && s.unit.has(lock.Key) || slices.ContainsFunc(s.leases, has) || slices.ContainsFunc(around, has) {
			continue
		}
		switch lock.Kind = k.kind(lock.Kind); {
		case lock.Strategy == lockctx.StrategyLease:
			leases = append(leases, lock)
		case lock.MinHold != 0 || lock.MaxHold != 0:
			return nil, nil, &Error{Op: "lock", Key: lock.Key, Strategy: lock.Strategy, Err: errors.New("bad hint: MinHold and MaxHold need a lease")}
		default:
			rows = append(rows, lock.Key)
		}
	}
	return rows, leases, nil
}

// wait is the longest time that h is ready to queue.
func (k *connector) wait(h *lockctx.Hint) time.Duration {
	if h.HasWait {
		return h.Wait
	}
	return k.settings.wait
}

// lease takes leases for the unit of work, all or none. undo gives them back,
// where what was to come next fails. carried means that the caller occupies a
// connection of database/sql while it waits.
func (s *scope) lease(ctx context.Context, l *locks, h *lockctx.Hint, wanted []lockctx.Lock, carried bool) (undo func(), err error) {
	before, start := len(s.leases), time.Now()
	undo = func() { s.drop(before) }
	for _, lock := range wanted {
		var taken *lease.Lease
		known := make(chan struct{}) // closed when taken is set
		r := s.k.leaseRequest(s, h, lock, carried)
		if r.Wait > 0 {
			r.Wait = max(r.Wait-time.Since(start), time.Millisecond)
		}
		r.Lost = func(cause error) { <-known; s.lost(taken, cause) }
		taken, err = l.leases.Acquire(ctx, r)
		close(known)
		if err != nil {
			undo()
			return nil, err
		}
		if len(s.leases) == 0 {
			s.k.crowd.hold()
		}
		s.leases = append(s.leases, taken)
		s.hints.SetToken(lock.Key, taken.Token())
	}
	return undo, nil
}

func (k *connector) leaseRequest(s *scope, h *lockctx.Hint, lock lockctx.Lock, carried bool) lease.Request {
	return lease.Request{
		Key: lock.Key, TTL: lock.TTL, MinHold: lock.MinHold, MaxHold: lock.MaxHold, Wait: k.wait(h),
		Waiting: func(ctx context.Context) (context.Context, func(), error) { return k.waiting(ctx, s, carried) },
	}
}

// drop gives all leases but the first few back. What was lost meanwhile needs
// no error: nothing that the unit of work did after that was committed.
func (s *scope) drop(keep int) {
	if len(s.leases) == keep {
		return
	}
	for _, l := range s.leases[keep:] {
		s.hints.SetToken(l.Key(), 0)
		_ = l.Release()
	}
	if s.leases = slices.Clone(s.leases[:keep]); keep > 0 {
		return
	}
	s.k.crowd.done()
	if s.unwatch != nil {
		s.unwatch()
		s.unwatch = nil
	}
}

// watch gives the leases back when end does, the context that bounds what was
// read under them.
func (s *scope) watch(end context.Context) {
	if s.unwatch != nil || len(s.leases) == 0 {
		return
	}
	s.unwatch = context.AfterFunc(end, func() {
		_ = s.take(context.Background())
		defer s.give()
		if s.unit == nil && len(s.leases) > 0 { // a transaction gives them back at its own end
			s.failed = &Error{Op: "statement", Key: s.leases[0].Key(), Strategy: lockctx.StrategyLease, Err: lockerr.With(ErrLost, errEnded)}
			s.drop(0)
		}
	})
}

var errEnded = errors.New("the lock context, or the context of the query that took the lock, has ended")

// lost is called when a lease of the unit of work may be lost.
func (s *scope) lost(l *lease.Lease, cause error) {
	_ = s.take(context.Background())
	defer s.give()
	if slices.Contains(s.leases, l) {
		s.fail(cause)
	}
}

// fail ends the unit of work, which has lost a lease.
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
	for _, l := range s.leases {
		if err := l.Err(); err != nil {
			s.fail(err)
			return err
		}
	}
	if s.failed != nil {
		return s.failed
	}
	if h != nil {
		for _, l := range s.k.around(h) {
			if err := l.Err(); err != nil {
				return lockerr.With(ErrLost, err)
			}
		}
	}
	return nil
}
