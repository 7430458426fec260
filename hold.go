package mysqllock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Hold is a lock that [Acquire] has taken, with the transaction that keeps it.
// Everything that runs on its database handle with its Context is part of that
// transaction: a BeginTx in it is a savepoint. It is safe for concurrent use,
// but statements in it take turns.
type Hold struct {
	ctx    context.Context
	cancel context.CancelCauseFunc
	scope  *scope
	unit   *unit // the unit that the hold owns; nil where it is nested in another
	nested *tx   // its savepoint there

	mu   sync.Mutex
	over bool
	err  error
}

// Acquire takes the lock on key now and keeps it until Release or Rollback. It
// queues before it takes a connection, which is one of lockMaxConns, so it is
// the way for hot keys. The options are those of [lockctx.With].
//
// When ctx ends, the hold is rolled back. When its connection is lost, the
// hold's context ends with the cause ErrLost. Inside a lock context that has a
// unit of work open, the hold becomes part of it: it is a savepoint, and the
// key stays locked until that unit ends.
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
	own, cancel := context.WithCancelCause(ctx)
	h := &Hold{ctx: lockctx.With(own, key, opts...), cancel: cancel}
	if err := h.open(k); err != nil {
		cancel(err)
		return nil, err
	}
	return h, nil
}

func (h *Hold) open(k *connector) error {
	hint, _ := lockctx.From(h.ctx)
	if hint.Err != nil {
		return &Error{Op: "lock", Err: hint.Err}
	}
	h.scope = k.scope(hint.Scope)
	if err := h.scope.take(h.ctx); err != nil {
		return err
	}
	defer h.scope.give()
	if h.scope.failed != nil {
		return h.scope.failed
	}
	if u := h.scope.unit; u != nil {
		if err := u.join(h.ctx, k, hint); err != nil {
			return err
		}
		h.nested = &tx{ctx: h.ctx}
		return u.nest(h.ctx, h.nested, driver.TxOptions{})
	}
	var err error
	h.unit, err = k.openSession(h.ctx, h.ctx, h.scope, hint, h)
	return err
}

// Context returns the context in which queries are inside the hold. It ends
// with the hold, and with the context that Acquire was given; where the lock
// was lost, [context.Cause] is ErrLost.
func (h *Hold) Context() context.Context { return h.ctx }

// Release commits what was done in the hold and gives the lock back. An error
// means that nothing was committed, or, where it says so, that the outcome is
// unknown; the lock is given back in any case. Later calls of Release and
// Rollback do nothing and return the same.
func (h *Hold) Release() error { return h.end(true) }

// Rollback undoes what was done in the hold and gives the lock back.
func (h *Hold) Rollback() error { return h.end(false) }

func (h *Hold) end(commit bool) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.over {
		return h.err
	}
	h.over = true
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
		h.err = u.endTx(h.nested, commit)
	} else {
		for _, open := range u.stack {
			open.failed = u.error("statement", errors.New("its hold has ended"))
		}
		u.stack = nil
		h.err = u.finish(commit)
	}
	switch {
	case obstacle != nil:
		h.err = obstacle
	case !commit && errors.Is(h.err, ErrLost):
		h.err = nil // what was lost is rolled back already
	}
	h.scope.give()
	h.cancel(ErrClosed)
	return h.err
}

// Do runs fn under the lock on key: the lock is taken, fn is called with a
// context in which queries on db are inside it, and everything that fn did is
// committed, in one transaction, when it returns nil. An error of fn, a panic,
// and the end of ctx roll it back; the error, or the panic, goes on to the
// caller.
//
// With [lockctx.Retry], fn runs again after a deadlock, so it must not have
// effects outside the transaction. For the rest Do is [Acquire].
func Do(ctx context.Context, db *sql.DB, key string, fn func(context.Context) error, opts ...lockctx.Option) error {
	hint, _ := lockctx.From(lockctx.With(context.Background(), key, opts...))
	_, inside := lockctx.From(ctx)
	for tries := 0; ; tries++ {
		err := do(ctx, db, key, fn, opts)
		deadlock := errors.Is(err, ErrDeadlock) || server.Deadlock(err)
		if !deadlock || inside || tries >= hint.Retry {
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
