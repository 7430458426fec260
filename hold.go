package mysqllock

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/unit"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Do and Acquire take their locks at once; a context of lockctx.With takes its locks at the first statement
// that needs them. What either does is in internal/unit; here are several keys, the retries of Do, and what
// users read.

// Hold is a lock that [Acquire] has taken. It is safe for concurrent use.
//
// A process that dies, also of a SIGTERM that it did not handle, commits nothing more. Its row
// locks and advisory locks are free when the server sees its connections end, within
// milliseconds. Its leases last until they expire. At SIGTERM call Release, or db.Close.
//
// A row lock comes with the transaction that keeps it: everything that runs on
// its database handle with its Context is part of that transaction, a BeginTx
// in it is a savepoint, and statements take turns. With [lockctx.Optimistic]
// everything is one transaction, too; it locks nothing, and its commit compares the
// version.
//
// Under a lease, or an advisory lock, transactions are what they are without it,
// and may run side by side. Each is checked right before its COMMIT, those of
// single statements that write, too: where the lock is not ours any more, it is
// rolled back with ErrLost. This holds for what runs with the hold's Context, or with a context
// derived from it, in single statements and in transactions. A transaction that was
// begun with another context is checked if a statement in it uses the hold's. It
// holds on other database handles, too, if they lead to the same server; on those
// that lead elsewhere what may write fails with ErrUnsafe.
type Hold struct {
	hold  *unit.Hold
	outer []*unit.Hold // of other keys, around hold, the outermost first: see AcquireKeys
}

// Acquire takes the lock on key now and keeps it until Release or Rollback. It
// queues before it takes a connection, which for a row lock is one of
// lockMaxConns, so it is the way for hot keys. The options are those of
// [lockctx.With].
//
// When ctx ends, a row lock is rolled back and given back. A lease is not renewed
// any more, and an advisory lock is kept for lockTTL: both end after that time, or
// with Release if that comes first. What still runs under them has that long to
// stop. When the lock is lost, the hold's context ends with the cause ErrLost: for a row lock with its
// connection, for a lease before the server can give it to somebody else.
//
// Inside a lock context that has a transaction open, the hold becomes part of
// it: it is a savepoint, and the key stays locked until that transaction's unit
// of work ends. Inside a hold that has the same key under a lease, or both as
// advisory locks, it joins that.
//
// The errors are those of a statement with a lock context; after any of them nothing is
// locked.
func Acquire(ctx context.Context, db *sql.DB, key string, opts ...lockctx.Option) (*Hold, error) {
	return AcquireKeys(ctx, db, []string{key}, opts...)
}

// AcquireKeys is [Acquire] for several keys, which are taken together, all or none, and
// in one order everywhere, as by [lockctx.WithKeys]: two programs that name the same keys
// in another order do not deadlock. Row locks and versions are all of one transaction.
// Leases and advisory locks are taken one by one; the wait is for all of them together.
//
// The Hold is lost as soon as one of its keys is. Each key has a token and an expiry of its
// own; those that the Hold tells are of one of them. Where they matter, acquire one key
// inside the hold of the other, in the same order everywhere.
func AcquireKeys(ctx context.Context, db *sql.DB, keys []string, opts ...lockctx.Option) (*Hold, error) {
	k, err := handleOf(ctx, db)
	if err != nil {
		return nil, err
	}
	if asked := hint.Ask(ctx, keys, opts...); asked.Retry > 0 && asked.Err == nil {
		return nil, badRetry("Retry is for Do, which can run its function again; Acquire cannot")
	}
	return acquire(ctx, k, keys, opts)
}

// badRetry is the answer to a Retry that would have no effect.
func badRetry(why string) error {
	return &Error{Op: "lock", Err: errors.New("mysqllock: bad hint: " + why)}
}

// Context returns the context in which queries are inside the hold. It ends
// with the hold, and with the context that Acquire was given; if the lock was lost,
// [context.Cause] is an [*Error] with the key and the reason, which matches ErrLost, or
// ErrConflict.
func (h *Hold) Context() context.Context { return h.hold.Context() }

// Token returns the fencing token of the hold's lease. Each grant of a key raises it
// by one, and so does each commit that sets the version of a key which is kept
// optimistically. It never goes back, except where a replica is promoted that lacks
// the last commits of its primary, or a backup is restored. A system outside of the
// database that refuses tokens older than the newest it has seen is safe from a holder
// that has lost its lease. It is 0 for what is not a lease.
func (h *Hold) Token() uint64 { return h.hold.Token() }

// Expiry returns the earliest time at which somebody else can get the hold's lease.
// Stop what must not go on without the lock before that. Each renewal moves it. It is
// in terms of this process's monotonic clock, stays as it was when the hold ends, and is
// the zero time for what is not a lease.
func (h *Hold) Expiry() time.Time { return h.hold.Expiry() }

// Release commits what was done in the hold and gives the lock back. An error
// means that nothing was committed, or, where it says so, that the outcome is
// unknown; a row lock is given back in any case.
//
// Under a lease Release commits nothing: the transactions under it are committed
// already, and one that is still open fails at its commit. Release then ends the hold's context and gives
// the lease back. ErrLost says that the lease had been lost before: work
// done outside of the database may not have been alone. Any other error, with the Op
// "release", says that the server has not let the lease be given back within two seconds: what was
// committed is committed, but the key may stay taken, at most until the time that the error says.
// The driver goes on trying, for as long as the handle is open and two seconds more.
//
// Later calls of Release and Rollback do nothing and return the same.
func (h *Hold) Release() error {
	if err := h.end(true); err != nil {
		return err
	}
	return h.stays()
}

// Rollback undoes what was done in the hold and gives the lock back. What
// transactions under a lease have committed stays. If the lease could not be given back, it
// fails as Release does.
func (h *Hold) Rollback() error {
	if err := h.end(false); err != nil {
		return err
	}
	return h.stays()
}

// stays returns why a key may still be taken; nil if none is.
func (h *Hold) stays() (err error) {
	for _, of := range slices.Concat(h.outer, []*unit.Hold{h.hold}) {
		if of != nil && of.Stays() != nil {
			err = errors.Join(err, of.Stays())
		}
	}
	return err
}

// Token returns the fencing token of the innermost lease that ctx is under: of
// the hold that ctx comes from, or of the key of [lockctx.With], once a
// statement has taken its lease and until its unit of work has ended. ok is
// false where there is none, and for a WithKeys of several keys. See
// [Hold.Token].
func Token(ctx context.Context) (token uint64, ok bool) {
	return unit.Told(ctx, hint.ToldToken)
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
	return unit.Told(ctx, hint.ToldVersion)
}

// Slot returns the number of the slot, 0 to n-1, of the innermost lock with
// [lockctx.Slots] around ctx: of the hold that ctx comes from, or of the
// key of [lockctx.With], once a statement has taken it and until its unit of work
// has ended. ok is false where there is none, and for a WithKeys of several keys.
func Slot(ctx context.Context) (slot int, ok bool) {
	n, ok := unit.Told(ctx, hint.ToldSlot)
	return int(n), ok
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
// When ctx ends, a row lock is rolled back and its key is free at once, before fn has
// returned: another process can run its fn beside what this one still does outside of
// the database. A lease stays until fn returns, at most for its TTL after the end of ctx;
// so does an advisory lock, at most for lockTTL.
//
// With a lease fn is for long work: its transactions, and its single statements
// that write, commit one by one, each only as long as the lease is ours. fn's
// context ends as soon as the lease may be lost; an fn that does not look at it
// goes on, but cannot commit.
// Retry is refused.
//
// If the lock was lost, Do says so whatever fn returns: ErrDeadlock, ErrConflict or
// ErrLost are joined to fn's error, unless that matches them, and Retry goes by them, too.
//
// For the rest Do is [Acquire].
//
// Do, [Acquire] and [Stats] also take a handle that was opened with a wrapper of drivers above
// this one, if the wrapper passes contexts on. The first of them needs a free connection of
// db, and waits for it for at most 10 seconds. On another handle, or if the wrapper drops
// contexts, they fail with [errors.ErrUnsupported].
func Do(ctx context.Context, db *sql.DB, key string, fn func(context.Context) error, opts ...lockctx.Option) error {
	return DoKeys(ctx, db, []string{key}, fn, opts...)
}

// DoKeys is [Do] for several keys, which are taken as by [AcquireKeys]: to move stock from
// one product to another, for instance.
func DoKeys(ctx context.Context, db *sql.DB, keys []string, fn func(context.Context) error, opts ...lockctx.Option) error {
	k, err := handleOf(ctx, db)
	if err != nil {
		return err
	}
	asked := hint.Ask(ctx, keys, opts...)
	retries := asked.Retry
	if asked.LockContext != nil {
		retries = 0 // fn is a part of something
	} else if retries > 0 && asked.Err == nil && !k.HoldIsTransaction(asked) {
		return badRetry("Retry has no effect under " + k.Strategy(asked) + ", where parts of the function are committed")
	}
	for tries := 0; ; tries++ {
		err := do(ctx, k, keys, fn, opts)
		again := errors.Is(err, ErrDeadlock) || server.Deadlock(err)
		if errors.Is(err, ErrConflict) {
			again = asked.Version == 0 // one that was given stays what it is
		}
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
// most half a second; rand.N panics at 0.
func backoff(tries int) time.Duration {
	return rand.N(min(5*time.Millisecond<<min(tries, 7), 500*time.Millisecond))
}

// do runs fn once, under the locks on keys.
func do(ctx context.Context, k *handle.Handle, keys []string, fn func(context.Context) error, opts []lockctx.Option) error {
	h, err := acquire(ctx, k, keys, opts)
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
		return h.withLoss(err)
	}
	return h.end(true) // fn is done, whether the key is free at once or not
}

// withLoss adds to err, which was returned in the hold, how that was lost, unless err
// says it. An ORM may hide it: behind sql.ErrTxDone of its own rollback, for example.
func (h *Hold) withLoss(err error) error {
	for _, of := range slices.Concat(h.outer, []*unit.Hold{h.hold}) {
		if loss := of.Loss(); loss != nil && !says(err, loss) {
			err = errors.Join(err, loss)
		}
	}
	return err
}

// says reports whether err matches the sentinel that tells most of a loss.
func says(err, loss error) bool {
	for _, sentinel := range []error{ErrDeadlock, ErrConflict, ErrLost, ErrClosed} {
		if errors.Is(loss, sentinel) {
			return errors.Is(err, sentinel)
		}
	}
	return false
}

// acquire takes the locks on keys.
func acquire(ctx context.Context, k *handle.Handle, keys []string, opts []lockctx.Option) (*Hold, error) {
	asked := hint.Ask(ctx, keys, opts...)
	if asked.Err != nil || len(keys) == 1 || k.HoldIsTransaction(asked) {
		h, err := unit.Acquire(ctx, k, asked)
		if err != nil {
			return nil, err
		}
		return &Hold{hold: h}, nil
	}
	keys, err := inOrder(k, keys, asked.Kind)
	if err != nil {
		return nil, err
	}
	all, caller := &Hold{}, ctx
	wait, begin := k.Wait(asked), time.Now()
	for _, key := range keys {
		own := hint.Ask(ctx, []string{key}, opts...)
		if wait > 0 { // in what is left of it, which is not nothing: that would mean not to wait
			own.Wait, own.HasWait = max(wait-time.Since(begin), time.Millisecond), true
		}
		h, err := unit.Acquire(ctx, k, own)
		if err != nil {
			if cause := context.Cause(ctx); caller.Err() == nil && errors.Is(cause, ErrLost) {
				err = cause // a lock that it had already is lost, which has ended the wait for this one
			}
			_ = all.Rollback()
			return nil, err
		}
		if all.hold != nil {
			all.outer = append(all.outer, all.hold)
		}
		all.hold, ctx = h, h.Context()
	}
	return all, nil
}

// inOrder returns keys, each once, in the order of their rows, in which lockctx.WithKeys
// takes them, too.
func inOrder(k *handle.Handle, keys []string, kind hint.Kind) ([]string, error) {
	rows := make(map[string]string, len(keys))
	for _, key := range keys {
		p, err := k.Resource(hint.Lock{Key: key, Kind: kind})
		if err != nil {
			return nil, err
		}
		rows[key] = p.Row
	}
	ordered := slices.Clone(keys)
	slices.SortFunc(ordered, func(a, b string) int {
		return strings.Compare(rows[a]+"\x00"+a, rows[b]+"\x00"+b)
	})
	return slices.Compact(ordered), nil
}

// end ends the holds of all keys, the innermost first. There is none if acquire has failed at the first key.
func (h *Hold) end(commit bool) error {
	if len(h.outer) == 0 {
		if h.hold == nil {
			return nil
		}
		return h.hold.End(commit)
	}
	errs := []error{h.hold.End(commit)}
	for _, outer := range slices.Backward(h.outer) {
		errs = append(errs, outer.End(commit))
	}
	return errors.Join(errs...)
}
