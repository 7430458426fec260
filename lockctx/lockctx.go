// Package lockctx makes lock contexts. Statements that run with a lock
// context on a database opened with the driver "mysqllock" run under its
// lock; every other driver ignores it.
//
//	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
//	defer cancel()
//	ctx = lockctx.With(ctx, "product:42")
//
// # The lock context
//
// The context that With returns, and every context derived from it, is one
// lock context. What runs in it, from its first statement to its first commit,
// is one unit of work and shares its locks. So each unit of work needs a lock
// context of its own: two goroutines that share one do not exclude each other.
// With inside a lock context adds keys to the same unit of work: what runs with
// the inner context runs under the keys of both. If none is held yet, all are
// taken together. The same key again joins.
//
// What a query reads outside a transaction is good for the first commit that may have
// changed something. That commit gives the lock back, and what writes after it, without
// a new read, fails with ErrStaleRead; what was committed before stays. So With without a
// transaction is for one write. For more use mysqllock.Do, or a transaction.
//
// A lock that a reading query took outside a transaction is given back, at the
// latest, when the context that was given to the outermost With ends. Derive
// the context that ends first, and call With on it. If that context can never end, the
// lock goes with the context of the query.
//
// # Bad hints
//
// With never fails and never panics: a bad key or option, options that exclude each
// other or would have no effect, and a nil context are returned as an error, "bad hint", by
// the first statement that runs with the context. Of several options Wait and NoWait the
// last one counts.
package lockctx

import (
	"context"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
)

// MaxKey is the longest key, in bytes.
const MaxKey = hint.MaxKey

// MaxSlots is the most slots that a key can have: see [Slots].
const MaxSlots = hint.MaxSlots

// Option says how a lock is asked for.
type Option func(*hint.Hint)

// With returns a context in which statements run under the lock on key, any
// string of 1 to 255 bytes. Keys are compared byte by byte; they are never
// part of SQL text other than as hex literals. Without options it is an
// exclusive lock of the database handle's lockStrategy, a row lock unless it
// says otherwise, that waits as long as the handle's lockWait.
func With(ctx context.Context, key string, opts ...Option) context.Context {
	return WithKeys(ctx, []string{key}, opts...)
}

// WithKeys is With for several keys, which are taken together, all or none,
// and in one order everywhere, so that two programs that name the same keys in
// another order do not deadlock. Row locks are taken in one statement, leases
// one by one; if a later one is not granted, those taken before are given back.
// Keys with [Slots] come after those without.
func WithKeys(ctx context.Context, keys []string, opts ...Option) context.Context {
	h := hint.Ask(ctx, keys, opts...)
	h.NoRetry("Retry is for mysqllock.Do, which can run its function again; With cannot")
	return h.With(ctx)
}

// Has reports whether ctx asks for key, by With, or is that of a hold on it. It lets
// code insist on what its caller has to see to:
//
//	func (r *Products) SetStock(ctx context.Context, id, stock int) error {
//		if !lockctx.Has(ctx, fmt.Sprintf("product:%d", id)) {
//			return errors.New("SetStock needs the lock on its product")
//		}
//
// It says nothing about whether the lock is held at the moment: statements that run
// with ctx take it, or fail. For a bad hint it is false.
func Has(ctx context.Context, key string) bool {
	h, ok := hint.From(ctx)
	return ok && h.Err == nil && h.Has(key)
}

// MaxNested is how often With may add keys inside With. What nests more is a loop that
// piles keys up by mistake: each turn asks for the keys of all turns before, so that a
// loop over 1000 rows would ask for half a million locks; 64 turns take a few
// hundred milliseconds already. The same key again does not count, nor does the number
// of keys in one WithKeys.
const MaxNested = hint.MaxNested

// Without returns a context that is no lock context: a statement that runs with it
// takes no lock and is not moved to another connection. A statement of an
// explicit sql.Tx stays in its transaction all the same.
func Without(ctx context.Context) context.Context {
	return hint.Without(ctx)
}

// Row keeps the lock as an InnoDB row lock in the caller's own transaction, so
// that the lock and the write commit together. This is the default of
// lockStrategy.
func Row() Option { return func(h *hint.Hint) { h.KeepBy(hint.StrategyRow) } }

// Lease keeps the lock as a lease: a row of the lock table with its holder and an
// expiry, by the server's clock. The lease is renewed every third of ttl while its
// holder lives, and outlives transactions and connections; a holder that has fallen
// silent loses it after ttl, at least one second. A holder that has lost its lease
// cannot commit: the statement that commits a transaction under the lease checks it
// first, on the transaction's own connection, and keeps it from being taken until
// COMMIT is through.
//
// A process that dies, also of a SIGTERM that it did not handle, leaves its leases until they
// expire: nobody else has the key for up to ttl. So at SIGTERM end the contexts of the holds
// (signal.NotifyContext) and wait until they have returned, or call [database/sql.DB.Close],
// before main returns: both give leases back at once.
//
// Leases and row locks on the same key exclude each other.
func Lease(ttl time.Duration) Option {
	return func(h *hint.Hint) {
		h.KeepBy(hint.StrategyLease)
		h.TTL, h.HasTTL = ttl, true
	}
}

// Advisory keeps the lock as a named lock of the server (GET_LOCK) on one of a
// few connections that the handle shares among all such locks. It needs no table
// and writes nothing, so it is the cheapest for many short locks, and it is held
// as long as its connection lives. If the connection is closed, the holder is told
// within a second. If the network falls silent, it is told before the server frees
// the lock, and after lockTTL at the latest. Each COMMIT under the lock asks the server
// right before, on the same connection, whether it is still ours; unlike with a lease,
// nothing keeps it from being lost between that and COMMIT.
//
// A transaction of BeginTx without options, or of a single Exec, under a key that nobody else in the
// process wants, holds the lock on its own connection: if that lock is lost, so is the transaction. A
// loss is noticed by the next statement, or within half of lockTTL.
//
// Advisory locks are a space of their own: they do not exclude row locks and
// leases on the same key.
func Advisory() Option { return func(h *hint.Hint) { h.KeepBy(hint.StrategyAdvisory) } }

// Optimistic locks nothing. The first statement of the unit of work remembers
// the key's version, and its commit compares and sets it in the same transaction:
// where somebody else has committed under the key meanwhile, or holds it, the
// unit is rolled back with ErrConflict, to be run again from its first read on;
// [Retry] lets mysqllock.Do do that. It suits rare conflicts, and long times to
// think: see mysqllock.Version. A unit that has only read needs no commit and
// changes no version.
//
// Row locks and leases on the same key are seen: a unit that begins while
// somebody has a lease on it waits as for a lock, and the commits of their units
// count. Advisory locks are not.
//
// In one lock context Optimistic goes with no other strategy, for whatever key: the
// statement with the second strategy fails with ErrUnsafe.
func Optimistic() Option { return func(h *hint.Hint) { h.KeepBy(hint.StrategyOptimistic) } }

// IfVersion is [Optimistic] with the version that an earlier unit of work has
// seen, in another request for instance: see mysqllock.Version. The commit fails
// with ErrConflict where somebody has committed under the key since. It is for
// one key. 0 is a bad hint: no key has that version.
func IfVersion(version uint64) Option {
	return func(h *hint.Hint) {
		h.KeepBy(hint.StrategyOptimistic)
		h.Version, h.HasVersion = version, true
	}
}

// Shared lets many hold the key at a time, as long as all of them say so: many
// readers, or one writer. It is for units of work that rely on what the key
// protects and do not change it. Who holds a key shared cannot ask for it
// without Shared in the same unit of work: two who did would wait for each other,
// so it is refused. Ask for the exclusive lock from the beginning.
//
// Requests are granted in the order in which they come, so that readers do not
// starve a writer: see the documentation of package rowlock. It needs a row lock.
// With lockStripes the lock is exclusive, since two keys on one row look the same.
func Shared() Option { return func(h *hint.Hint) { h.Shared = true } }

// Slots lets up to n hold the key at a time, in all processes together: a
// counting semaphore. mysqllock.Slot tells which of the slots, 0 to n-1, a holder
// has. Slots(1) is the lock itself, and somebody who holds the key without Slots
// has slot 0.
//
// n may be changed while the key is in use. While programs differ, the larger n
// counts; when the surplus holders have left, the smaller one does.
//
// Who waits for one waits for any of them, though not in a strict order among
// processes. Where lockStripes has keys share rows they share their slots, too.
//
// It needs a row lock or a lease. An n below 1 or above [MaxSlots] is a bad hint.
func Slots(n int) Option { return func(h *hint.Hint) { h.Slots, h.HasSlots = n, true } }

// MinHold keeps a lease for d after its release: nobody gets the key earlier.
// It is for scheduled jobs that take less time than the clocks of the machines
// that start them differ by. A lease that was lost, or whose process died, is not
// kept longer. It needs a lease; a negative d is a bad hint.
func MinHold(d time.Duration) Option { return func(h *hint.Hint) { h.MinHold = d } }

// MaxHold is the longest time that a lease is kept by renewing it, counted from
// its grant, so that a holder that hangs does not keep the key for ever. Then
// the holder is told, as of any lost lease, and its commits fail with ErrLost.
// 0 is no limit. It needs a lease; less than a second is a bad hint.
func MaxHold(d time.Duration) Option { return func(h *hint.Hint) { h.MaxHold = d } }

// NoWait fails with ErrLocked at once if someone else holds the key. If this process is
// just giving the key back, since the context of a unit of work has ended, NoWait waits
// for that, for at most a second.
func NoWait() Option { return Wait(0) }

// Wait is the longest time to queue for the lock, in place of the database
// handle's lockWait; 0 is NoWait. A negative wait is a bad hint. The wait also
// ends with the context. To queue for one of the handle's connections is no part of it.
func Wait(d time.Duration) Option {
	return func(h *hint.Hint) { h.Wait, h.HasWait = d, true }
}

// WaitForever queues until the lock is granted or the context ends, however long that
// takes: for workers that have nothing else to do. A caller that waits for a row lock in
// BeginTx or Exec occupies a connection of the pool meanwhile; mysqllock.Do and Acquire
// do not.
func WaitForever() Option { return Wait(hint.Forever) }

// Retry lets mysqllock.Do run its function again, up to n times and after a
// short random pause, when the server broke a deadlock by rolling it back, or
// when somebody else has changed the version of a key kept by [Optimistic].
// Under a lease or an advisory lock parts of the function are committed, so there, and
// for With and Acquire, it is a bad hint; so is a negative n. Where Do is inside a lock
// context its function is a part of something, and is not run again.
func Retry(n int) Option { return func(h *hint.Hint) { h.Retry = n } }

// AllowStale says that what runs with the context may rely on data that is older
// than its lock, for code that knows that it does not matter. There are two cases.
//
// A further lock may be asked for in a transaction that has already read, under the lock
// that it began with, at REPEATABLE READ or above. Plain reads in it then show the data as it was before the
// lock was granted; only locking reads and writes see the newest. Without AllowStale
// such a lock fails with ErrStaleSnapshot.
//
// A statement may write after the commit that gave back the lock under which the
// lock context has read outside a transaction. Without AllowStale it fails with
// ErrStaleRead.
func AllowStale() Option { return func(h *hint.Hint) { h.AllowStale = true } }
