package mysqllock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lease"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Hold is a lock that [Acquire] has taken. It is safe for concurrent use.
//
// A row lock comes with the transaction that keeps it: everything that runs on
// its database handle with its Context is part of that transaction, a BeginTx
// in it is a savepoint, and statements take turns. So it is with
// [lockctx.Optimistic], where the transaction locks nothing and its commit compares
// the version.
//
// Under a lease, or an advisory lock, transactions are what they are without it,
// and may run side by side. Each is checked right before its COMMIT, those of
// single statements that write, too: where the lock is not ours any more, it is
// rolled back with ErrLost. This holds for what runs with the hold's Context, or with a context
// derived from it, in single statements and in transactions; for a transaction
// that was begun otherwise, from the first statement in it that does.
type Hold struct {
	k      *connector
	ctx    context.Context
	cancel context.CancelCauseFunc
	scope  *scope
	unit   *unit // the unit that the hold owns; nil where it is nested in another, and for a lease
	nested *tx   // its savepoint there

	guard *guard      // nil for a row lock, and for a version
	stop  func() bool // ends the watch on the end of Acquire's context; nil where the guard is another's
	left  sync.Once   // the crowd knows that nobody holds the guard any more

	mu     sync.Mutex
	over   bool
	err    error
	lapsed *time.Timer // gives the guard back; nil while Acquire's context goes on
}

// Acquire takes the lock on key now and keeps it until Release or Rollback. It
// queues before it takes a connection, which for a row lock is one of
// lockMaxConns, so it is the way for hot keys. The options are those of
// [lockctx.With].
//
// When ctx ends, a row lock is rolled back and given back. A lease is not renewed
// any more, and an advisory lock is kept for lockTTL, so that they end by then or,
// before that, with Release: what still runs under them has that long to stop. When the lock is lost, the
// hold's context ends with the cause ErrLost: for a row lock with its
// connection, for a lease before the server can give it to somebody else.
//
// Inside a lock context that has a transaction open, the hold becomes part of
// it: it is a savepoint, and the key stays locked until that transaction's unit
// of work ends. Inside a hold that has the same key under a lease, or both as
// advisory locks, it joins that.
//
// The errors are those of a statement with a hint; after any of them nothing is
// locked.
func Acquire(ctx context.Context, db *sql.DB, key string, opts ...lockctx.Option) (*Hold, error) {
	k, err := connectorOf(db)
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	hint := lockctx.Ask(ctx, []string{key}, opts...)
	if hint.Err != nil {
		return nil, &Error{Op: "lock", Err: hint.Err}
	}
	own, cancel := context.WithCancelCause(ctx)
	h := &Hold{k: k, cancel: cancel}
	if k.inTransaction(hint) {
		h.ctx = hint.With(own)
		err = h.open(hint)
	} else {
		err = h.openGuard(ctx, own, hint)
	}
	if err != nil {
		cancel(err)
		return nil, err
	}
	if h.ctx == nil {
		h.ctx = hint.Inside(own, h)
	}
	return h, nil
}

// inTransaction reports whether a hold with h is a transaction.
func (k *connector) inTransaction(h *lockctx.Hint) bool {
	strategy := k.strategy(h)
	return strategy == lockctx.StrategyRow || strategy == lockctx.StrategyOptimistic
}

// open opens a transaction with the lock, or joins the open unit of work of its
// lock context.
func (h *Hold) open(hint *lockctx.Hint) (err error) {
	h.scope = h.k.scope(hint.Scope)
	if err := h.scope.take(h.ctx); err != nil {
		return err
	}
	defer h.scope.give()
	if err := h.scope.check(hint); err != nil {
		return err
	}
	if h.scope.unit != nil {
		return h.nest(hint)
	}
	h.unit, err = h.k.openSession(h.ctx, h.ctx, h.scope, hint, h)
	return err
}

// nest joins the open unit of work.
func (h *Hold) nest(hint *lockctx.Hint) error {
	u := h.scope.unit
	if err := u.join(h.ctx, h.k, hint); err != nil {
		return err
	}
	h.nested = &tx{ctx: h.ctx}
	return u.nest(h.ctx, h.nested, driver.TxOptions{})
}

// openGuard takes a lease or an advisory lock, unless a hold around it has it, or
// joins the open transaction of its lock context, where it sets h.ctx.
func (h *Hold) openGuard(ctx, own context.Context, hint *lockctx.Hint) error {
	p, err := h.k.place(lockctx.Lock{Key: hint.Named, Kind: hint.Kind})
	if err != nil {
		return err
	}
	if err := h.k.checkAround(hint); err != nil {
		return err
	}
	around := h.k.around(hint)
	has := func(g *guard) bool { return g.keeps(p) }
	var s *scope
	if hint.Scope != nil {
		s = h.k.scope(hint.Scope)
		if err := s.take(ctx); err != nil {
			return err
		}
		defer s.give()
		if err := s.check(nil); err != nil {
			return err
		}
		if s.unit != nil {
			h.ctx, h.scope = hint.With(own), s
			if err := h.nest(hint); err != nil {
				return err
			}
			there := slices.Concat(s.guards, around)
			if at := slices.IndexFunc(there, has); at >= 0 {
				h.guard = there[at]
			}
			return nil
		}
	}
	if at := slices.IndexFunc(around, has); at >= 0 {
		h.guard = around[at]
		return nil
	}
	if s != nil {
		if at := slices.IndexFunc(s.guards, has); at >= 0 {
			h.guard = s.guards[at]
			s.joined = append(s.joined, h)
			return nil
		}
	}
	l, err := h.k.use(ctx, hint)
	if err != nil {
		return h.k.setupError(hint, err)
	}
	h.mu.Lock() // until h.guard is set, for lost
	defer h.mu.Unlock()
	if h.guard, err = h.k.takeGuard(ctx, l, s, p, h.k.wait(hint), false, h.lost); err != nil {
		return err
	}
	h.k.crowd.hold()
	h.stop = context.AfterFunc(ctx, h.lapse)
	return nil
}

// lost ends the hold of a guard that may be lost.
func (h *Hold) lost() {
	h.k.doubt.Store(true)
	h.cancel(ErrLost)
	h.leave()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.guard != nil {
		h.guard.lost()
	}
}

// leave tells the crowd that nobody holds the guard any more.
func (h *Hold) leave() { h.left.Do(h.k.crowd.done) }

// lapse has the guard end within the TTL, unless Release comes before: what runs
// in the hold has that long to stop.
func (h *Hold) lapse() {
	if l, ok := h.guard.keeper.(*lease.Lease); ok {
		l.Lapse()
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.over {
		h.lapsed = time.AfterFunc(h.k.settings.ttl, func() {
			_ = h.guard.Release()
			h.leave()
		})
	}
}

// Context returns the context in which queries are inside the hold. It ends
// with the hold, and with the context that Acquire was given; where the lock
// was lost, [context.Cause] is ErrLost.
func (h *Hold) Context() context.Context { return h.ctx }

// Token returns the fencing token of the hold's lease: for each key it grows by
// one with each grant, and each commit that sets a version of a key which is kept
// optimistically, too, and never goes back. A system outside of the database that
// refuses tokens older than the newest it has seen is safe from a holder that
// has lost its lease. It is 0 for what is not a lease.
func (h *Hold) Token() uint64 {
	if h.guard == nil {
		return 0
	}
	return h.guard.token()
}

// Expiry returns when the server can give the hold's lease to somebody else, at the
// earliest, if it is not renewed before: by then whatever must not go on without
// the lock has to be stopped. It moves with each renewal, is in terms of this
// process's monotonic clock, and stays as it was when the hold ends. It is the zero
// time for what is not a lease.
func (h *Hold) Expiry() time.Time {
	if h.guard == nil {
		return time.Time{}
	}
	return h.guard.expiry()
}

// Release commits what was done in the hold and gives the lock back. An error
// means that nothing was committed, or, where it says so, that the outcome is
// unknown; the lock is given back in any case.
//
// Transactions under a lease have committed by themselves before; one that is
// still open cannot any more. Release then ends the hold's context and gives
// the lease back. ErrLost says that it had been lost before, so that what was
// done outside of the database may not have been alone.
//
// Later calls of Release and Rollback do nothing and return the same.
func (h *Hold) Release() error { return h.end(true) }

// Rollback undoes what was done in the hold and gives the lock back. What
// transactions under a lease have committed stays.
func (h *Hold) Rollback() error { return h.end(false) }

func (h *Hold) end(commit bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return h.err
	}
	h.over = true
	if h.scope == nil {
		h.err = h.endGuard(commit)
	} else {
		h.err = h.endUnit(commit)
	}
	return h.err
}

func (h *Hold) endGuard(commit bool) error {
	lost := h.guard.overError("release")
	h.cancel(ErrClosed)
	if h.stop != nil {
		h.stop()
		if h.lapsed != nil {
			h.lapsed.Stop()
		}
		h.leave()
		// What could not be given back runs out: nothing is wrong with what was
		// done in the hold.
		if err := h.guard.Release(); lost == nil && errors.Is(err, ErrLost) {
			lost = naming(err, []place{h.guard.place})
		}
	}
	if !commit {
		return nil
	}
	return lost
}

func (h *Hold) endUnit(commit bool) (err error) {
	_ = h.scope.take(context.Background())
	u := h.unit
	if u == nil {
		u = h.nested.u
	}
	// What stands against a commit, although nothing is lost.
	var obstacle error
	switch {
	case u.over || !commit:
	case h.ctx.Err() != nil:
		obstacle = u.error("commit", lockerr.With(ErrLost, context.Cause(h.ctx)))
	case h.nested == nil && len(u.stack) > 0:
		obstacle = u.error("commit", errors.New("a transaction that was begun in the hold is still open; the hold is rolled back"))
	}
	commit = commit && obstacle == nil
	if h.nested != nil {
		err = u.endTx(h.nested, commit)
	} else {
		for _, open := range u.stack {
			open.failed = u.error("statement", errors.New("its hold has ended"))
		}
		u.stack = nil
		err = u.finish(commit)
	}
	switch {
	case obstacle != nil:
		err = obstacle
	case !commit && errors.Is(err, ErrLost):
		err = nil // what was lost is rolled back already
	}
	h.scope.give()
	h.cancel(ErrClosed)
	return err
}

// Token returns the fencing token of the innermost lease that ctx is under: of
// the hold that ctx comes from, or of the key of [lockctx.With], once a
// statement has taken its lease and until its unit of work has ended. ok is
// false where there is none, and for a WithKeys of several keys. See
// [Hold.Token].
func Token(ctx context.Context) (token uint64, ok bool) {
	return told(ctx, lockctx.Token, func(g *guard) (uint64, bool) { return g.token(), g.token() != 0 })
}

// Version returns the version of the key of [lockctx.With] that the unit of work
// of ctx has remembered, with [lockctx.Optimistic], at its first statement; once
// it has committed, the one that its commit has set. ok is false before that,
// without Optimistic, and for a WithKeys of several keys.
//
// It can be carried to another request and given back there, to
// [lockctx.IfVersion]: in a hidden field of a form, for instance, that shows what
// was read under it. A version is never 0.
func Version(ctx context.Context) (version uint64, ok bool) {
	return told(ctx, lockctx.Version, func(*guard) (uint64, bool) { return 0, false })
}

// Slot returns which of its slots, 0 to n-1, the innermost lock with
// [lockctx.Slots] that ctx is under has: of the hold that ctx comes from, or of the
// key of [lockctx.With], once a statement has taken it and until its unit of work
// has ended. ok is false where there is none, and for a WithKeys of several keys.
func Slot(ctx context.Context) (slot int, ok bool) {
	n, ok := told(ctx, lockctx.Slot, func(g *guard) (uint64, bool) { return uint64(g.slot), g.Slots > 0 })
	return int(n), ok
}

// told returns what is told of the innermost lock that ctx is under.
func told(ctx context.Context, what lockctx.What, of func(*guard) (uint64, bool)) (n uint64, ok bool) {
	h, ok := lockctx.From(ctx)
	if !ok {
		return 0, false
	}
	if hold, ok := h.Hold.(*Hold); ok {
		return of(hold.guard)
	}
	if h.Named == "" {
		return 0, false
	}
	if n, ok := h.Scope.Told(what, h.Named); ok {
		return n, true
	}
	for _, hold := range h.Holds { // the key may be held around
		if hold, ok := hold.(*Hold); ok && hold.guard.Key == h.Named {
			if n, ok := of(hold.guard); ok {
				return n, true
			}
		}
	}
	return 0, false
}

// Do runs fn under the lock on key: the lock is taken, fn is called with a
// context in which queries on db are inside it, and the lock is given back when
// fn has returned or panicked; the error, or the panic, goes on to the caller.
//
// With a row lock everything that fn did is one transaction, committed when fn
// returns nil, and rolled back on an error, a panic and the end of ctx. So it is
// with [lockctx.Optimistic], where nothing is locked and the commit fails with
// ErrConflict if somebody else has committed under the key meanwhile. With
// [lockctx.Retry], fn runs again after a conflict or a deadlock, so it must not
// have effects outside the transaction.
//
// With a lease fn is for long work: its transactions, and its single statements
// that write, commit one by one, each only as long as the lease is ours. fn's
// context ends as soon as the lease may be lost; an fn that does not look at it
// goes on, but cannot commit. Then Do returns ErrLost where fn returned nil.
// Retry has no effect.
//
// For the rest Do is [Acquire].
func Do(ctx context.Context, db *sql.DB, key string, fn func(context.Context) error, opts ...lockctx.Option) error {
	k, err := connectorOf(db)
	if err != nil {
		return err
	}
	hint := lockctx.Ask(context.Background(), []string{key}, opts...)
	retries := hint.Retry
	if outer, ok := lockctx.From(ctx); ok && outer.Scope != nil || !k.inTransaction(hint) {
		retries = 0 // fn is a part of something, or parts of it are committed
	}
	for tries := 0; ; tries++ {
		err := do(ctx, db, key, fn, opts)
		again := errors.Is(err, ErrDeadlock) || server.Deadlock(err) ||
			errors.Is(err, ErrConflict) && hint.Version == 0 // a version that was given stays what it is
		if !again || tries >= retries {
			return err
		}
		pause := time.NewTimer(backoff(tries))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return err
		}
	}
}

// backoff is a random pause of up to 5 ms, doubled with each try, and of at
// most half a second.
func backoff(tries int) time.Duration {
	return rand.N(min(5*time.Millisecond<<min(tries, 7), 500*time.Millisecond))
}

func do(ctx context.Context, db *sql.DB, key string, fn func(context.Context) error, opts []lockctx.Option) error {
	h, err := Acquire(ctx, db, key, opts...)
	if err != nil {
		return err
	}
	returned := false
	defer func() {
		if !returned { // fn panicked, or ended its goroutine
			_ = h.Rollback()
		}
	}()
	err = fn(h.Context())
	returned = true
	if err != nil {
		_ = h.Rollback()
		return err
	}
	return h.Release()
}
