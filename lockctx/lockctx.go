// Package lockctx puts a lock hint into a context. Statements that run with
// such a context on a database opened with the driver "mysqllock" run under
// the lock; every other driver ignores it.
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
// the inner context runs under the keys of both, taken together where none is
// held yet. The same key again joins.
//
// A lock that a reading query took outside a transaction is given back, at the
// latest, when the context that was given to the outermost With ends. Derive
// the context that ends first, and call With on it.
//
// # Bad hints
//
// With never fails and never panics: a bad key or option is returned as an
// error by the first statement that runs with the context.
package lockctx

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// MaxKey is the longest key, in bytes.
const MaxKey = 255

// Option says how a lock is asked for.
type Option func(*Hint)

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
// one by one; what was taken is given back where a later one is not granted.
// Keys with [Slots] come after those without.
func WithKeys(ctx context.Context, keys []string, opts ...Option) context.Context {
	return Ask(ctx, keys, opts...).With(ctx)
}

// Ask returns the hint that [WithKeys] puts into ctx, for a driver that may have
// no use for the context. It has a Scope where ctx is in a lock context.
func Ask(ctx context.Context, keys []string, opts ...Option) *Hint {
	h := apply(opts)
	for _, key := range keys {
		h.add(Lock{key, h.Kind})
	}
	h.check()
	if len(h.Locks) == 1 {
		h.Named = h.Locks[0].Key
	}
	outer, inside := From(ctx)
	if inside {
		h.Holds = outer.Holds
		if h.Claim == (Locking{}) {
			h.Claim = outer.Claim
		}
		if h.Err == nil {
			h.Err = outer.Err
		}
	}
	if inside && outer.Scope != nil {
		h.Scope = outer.Scope
		own := h.Locks
		h.Locks = slices.Clone(outer.Locks) // the same key again joins
		for _, lock := range own {
			h.add(lock)
		}
	}
	return h
}

// With returns ctx with the hint that [Ask] has made for it. Where ctx is in no
// lock context, a new one begins.
func (h *Hint) With(ctx context.Context) context.Context {
	if h.Scope == nil {
		h.Scope = &Scope{ctx: ctx}
	}
	return context.WithValue(ctx, contextKey{}, h)
}

// Inside returns ctx, for which [Ask] has made the hint, as the context of hold,
// which a driver keeps beyond single transactions: statements in it run under what
// ctx asks for, and claim rows as the hint says. The hint is of no use after that.
func (h *Hint) Inside(ctx context.Context, hold any) context.Context {
	claim := h.Claim
	*h = Hint{}
	if outer, ok := From(ctx); ok {
		*h = *outer
	}
	h.Claim = claim
	h.Holds, h.Hold, h.Named = append(slices.Clone(h.Holds), hold), hold, ""
	return context.WithValue(ctx, contextKey{}, h)
}

// apply returns what options say.
func apply(opts []Option) *Hint {
	h := &Hint{}
	for _, opt := range opts {
		if opt != nil {
			opt(h)
		}
	}
	h.Claim.Update = h.Claim.Update || h.Claim.SkipLocked && !h.Claim.Share
	h.Claim.NoWait = h.claims() && !h.Claim.SkipLocked && h.HasWait && h.Wait == 0
	return h
}

func (h *Hint) claims() bool { return h.Claim.Update || h.Claim.Share }

// Claim returns a context in which the caller's own SELECTs lock the rows that
// they return, as opts say: [ForUpdate], [ForShare], [SkipLocked], [NoWait]. It
// names no key, takes no other options, and leaves the locks that ctx asks for
// as they are. Without one of the first three it is a bad hint.
//
//	tx, err := db.BeginTx(ctx, nil)
//	rows, err := tx.QueryContext(lockctx.Claim(ctx, lockctx.SkipLocked()),
//		"SELECT id FROM tasks WHERE state = 'new' ORDER BY id LIMIT 10")
func Claim(ctx context.Context, opts ...Option) context.Context {
	asked := apply(opts)
	h := &Hint{}
	if outer, ok := From(ctx); ok {
		*h = *outer
	}
	h.Claim = asked.Claim
	if h.Err == nil {
		h.Err = asked.checkClaim()
	}
	return context.WithValue(ctx, contextKey{}, h)
}

// Without returns a context without the hint: a statement that runs with it
// takes no lock and is not moved to another connection. A statement of an
// explicit sql.Tx stays in its transaction all the same.
func Without(ctx context.Context) context.Context {
	return context.WithValue(ctx, contextKey{}, (*Hint)(nil))
}

// Row keeps the lock as an InnoDB row lock in the caller's own transaction, so
// that the lock and the write commit together. This is the default of
// lockStrategy.
func Row() Option { return func(h *Hint) { h.Strategy = StrategyRow } }

// Lease keeps the lock as a lease: a row of the lock table with its holder and
// an expiry, by the server's clock. The lease is renewed every third of ttl as
// long as its holder lives, and outlives transactions and connections; a holder
// that has fallen silent loses it after ttl, at least one second. Whoever has
// lost its lease cannot commit: every transaction under the lease checks it
// right before its COMMIT, on its own connection, which costs one round trip,
// and keeps it from being taken until COMMIT is through.
//
// Leases and row locks on the same key exclude each other.
func Lease(ttl time.Duration) Option {
	return func(h *Hint) { h.Strategy, h.TTL, h.hasTTL = StrategyLease, ttl, true }
}

// Advisory keeps the lock as a named lock of the server (GET_LOCK) on one of a
// few connections that the handle shares among all such locks. It needs no table
// and writes nothing, so it is the cheapest for many short locks, and it is held
// as long as its connection lives: a holder is told within a second when that is
// closed, and before the server frees the lock, at the latest after lockTTL, where
// the network falls silent. Right before each COMMIT under it the server is asked, on the same
// connection, whether the lock is still ours; unlike with a lease, nothing keeps
// it from being lost between that and COMMIT.
//
// Advisory locks are a space of their own: they do not exclude row locks and
// leases on the same key.
func Advisory() Option { return func(h *Hint) { h.Strategy = StrategyAdvisory } }

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
func Optimistic() Option { return func(h *Hint) { h.Strategy = StrategyOptimistic } }

// IfVersion is [Optimistic] with the version that an earlier unit of work has
// seen, in another request for instance: see mysqllock.Version. The commit fails
// with ErrConflict where somebody has committed under the key since. It is for
// one key. 0 is a bad hint: no key has that version.
func IfVersion(version uint64) Option {
	return func(h *Hint) { h.Strategy, h.Version, h.hasVersion = StrategyOptimistic, version, true }
}

// Shared lets many hold the key at a time, as long as all of them say so: many
// readers, or one writer. It is for units of work that rely on what the key
// protects and do not change it. Who holds a key shared cannot ask for it
// without Shared in the same unit of work: two who did would wait for each other,
// so it is refused. Ask for the exclusive lock from the beginning.
//
// Requests are granted in the order in which they come, so that readers do not
// starve a writer: see the documentation of package rowlock. It needs a row lock.
// Where lockStripes has keys share rows the lock is exclusive: else a key that
// is on the same row by chance would be taken for the same key asked for again.
func Shared() Option { return func(h *Hint) { h.Shared = true } }

// Slots lets up to n hold the key at a time, in all processes together: a
// counting semaphore. mysqllock.Slot tells which of the slots, 0 to n-1, a holder
// has. Slots(1) is the lock itself, and somebody who holds the key without Slots
// has slot 0.
//
// n may be changed while the key is in use: there are never more holders than
// the larger n, and as soon as those have left that are too many, never more
// than the smaller.
//
// Who waits for one waits for any of them, though not in a strict order among
// processes. Where lockStripes has keys share rows they share their slots, too.
//
// It needs a row lock or a lease. An n below 1 or above [MaxSlots] is a bad hint.
func Slots(n int) Option { return func(h *Hint) { h.Slots, h.hasSlots = n, true } }

// ForUpdate makes the caller's own SELECTs lock the rows that they return or
// count until the transaction ends, as if they said FOR UPDATE: for code that has
// no way to say so. They must run in a transaction. Only a single plain SELECT is
// changed; other statements that read rows fail with an error that says why, and
// what writes runs as it is.
//
// The server may lock more than that: all rows that it has to sort for ORDER BY
// where no index has them in order, and those that OFFSET takes away. Under
// REPEATABLE READ it also locks the rows that it has looked at, and the gaps
// between them, so that inserts beside them wait; for a table of tasks use READ
// COMMITTED (measured on MySQL 9.7 and MariaDB 10.11). Not locked are the tables
// of subqueries, and views that group or that the server keeps as a temporary
// table. How long it waits for rows that somebody else has locked is the server's
// innodb_lock_wait_timeout; Wait has no effect on it, and a SELECT whose context
// ends meanwhile is not killed on the server. With [NoWait], in the same With or
// Claim, it fails with ErrLocked at once.
//
// MySQL asks for more than the privilege SELECT: UPDATE, DELETE or LOCK TABLES.
func ForUpdate() Option { return func(h *Hint) { h.Claim.Update = true } }

// ForShare is [ForUpdate] with FOR SHARE: others may read the rows, and lock
// them so, too, but not change them. Where an index has all columns that the
// SELECT names, only its entries are locked, and other columns of the row can be
// changed: name one that is not in the index.
func ForShare() Option { return func(h *Hint) { h.Claim.Share = true } }

// SkipLocked leaves out the rows that somebody else has locked: workers that
// share a table of tasks each claim others. Alone it means [ForUpdate], too.
//
// With ORDER BY and LIMIT it needs an index that has the rows in order: else the
// first worker locks all of them to sort them, and others get none. Fewer rows
// than LIMIT, or none, do not mean that the table is done: others may have them.
// MariaDB has it from 10.6 on.
func SkipLocked() Option { return func(h *Hint) { h.Claim.SkipLocked = true } }

// MinHold keeps a lease for d after its release: nobody gets the key earlier.
// It is for scheduled jobs that finish faster than the clocks of the machines
// differ that start them. A lease that was lost, or whose process died, is not
// kept longer. It needs a lease; a negative d is a bad hint.
func MinHold(d time.Duration) Option { return func(h *Hint) { h.MinHold = d } }

// MaxHold is the longest time that a lease is kept by renewing it, counted from
// its grant, so that a holder that hangs does not keep the key for ever. Then
// the holder is told, as of any lost lease, and its commits fail with ErrLost.
// 0 is no limit. It needs a lease; less than a second is a bad hint.
func MaxHold(d time.Duration) Option { return func(h *Hint) { h.MaxHold = d } }

// NoWait fails with ErrLocked at once where someone else holds the key, or a row
// that [ForUpdate] or [ForShare] is to lock.
func NoWait() Option { return Wait(0) }

// Wait is the longest time to queue for the lock, in place of the database
// handle's lockWait; 0 is NoWait. A negative wait is a bad hint. The wait also
// ends with the context. It is for keys; see ForUpdate for claims.
func Wait(d time.Duration) Option {
	return func(h *Hint) { h.Wait, h.HasWait = d, true }
}

// Retry lets mysqllock.Do run its function again, up to n times and after a
// short random pause, when the server broke a deadlock by rolling it back, or
// when somebody else has changed the version of a key kept by [Optimistic].
// Elsewhere it has no effect. A negative n is a bad hint.
func Retry(n int) Option { return func(h *Hint) { h.Retry = n } }

// AllowStale permits a lock to be asked for first in a transaction that has
// already read at REPEATABLE READ or above. Plain reads in it then show the
// data as it was before the lock was granted; only locking reads and writes
// see the newest. Without it such a lock fails with ErrStaleSnapshot.
func AllowStale() Option { return func(h *Hint) { h.AllowStale = true } }

// The strategies, as [Kind] and errors name them.
const (
	StrategyDefault    = ""           // the database handle's lockStrategy
	StrategyRow        = "row"        // see Row
	StrategyLease      = "lease"      // see Lease
	StrategyAdvisory   = "advisory"   // see Advisory
	StrategyOptimistic = "optimistic" // see Optimistic
)

// Kind is how a key is to be locked.
type Kind struct {
	Strategy         string
	TTL              time.Duration // 0 is the database handle's lockTTL
	MinHold, MaxHold time.Duration
	Shared           bool
	Slots            int    // how many may hold the key; 0 is without Slots
	Version          uint64 // that it must have; 0 is the one it has at the first statement
}

// Check returns what is wrong with the kind; nil where nothing is, or where that
// depends on the database handle's lockStrategy.
func (k Kind) Check() error {
	needs := func(what string, strategies ...string) error {
		if k.Strategy == StrategyDefault || slices.Contains(strategies, k.Strategy) {
			return nil
		}
		return fmt.Errorf("mysqllock: bad hint: %s, and the strategy is %s", what, k.Strategy)
	}
	switch {
	case k.MinHold != 0 || k.MaxHold != 0:
		return needs("MinHold and MaxHold need a lease", StrategyLease)
	case k.Shared:
		return needs("Shared needs a row lock", StrategyRow)
	case k.Slots != 0:
		return needs("Slots needs a row lock or a lease", StrategyRow, StrategyLease)
	}
	return nil
}

// MaxSlots is the most slots that a key can have.
const MaxSlots = 1000

// Locking is how the caller's own SELECTs lock rows; the zero value is not.
type Locking struct {
	Update, Share, SkipLocked, NoWait bool
}

// Lock is a key and how it is to be locked.
type Lock struct {
	Key string
	Kind
}

// Hint is what With puts into a context. The driver reads it; applications
// have no use for it.
type Hint struct {
	Kind              // of the innermost With
	Locks      []Lock // of this With and those around it, sorted by key, each once in each space
	Named      string // the key of the innermost With, where it names a single one
	Holds      []any  // what ctx is inside of (see Inside), outermost first
	Hold       any    // the last of them, where no With came after it
	Wait       time.Duration
	HasWait    bool // Wait was given
	Retry      int
	AllowStale bool
	Claim      Locking
	Err        error  // what is wrong with the hint; nil when it is good
	Scope      *Scope // nil where there is nothing to lock

	hasTTL, hasSlots, hasVersion bool
}

// Keys returns the keys, sorted.
func (h *Hint) Keys() []string {
	keys := make([]string, len(h.Locks))
	for i, lock := range h.Locks {
		keys[i] = lock.Key
	}
	return slices.Compact(keys)
}

// add puts a lock in its place, unless its key is there. One that is asked for
// shared and exclusive is exclusive, the version that one With names counts for
// all, and of two numbers of slots the lower one.
func (h *Hint) add(lock Lock) {
	at, there := slices.BinarySearchFunc(h.Locks, lock, func(a, b Lock) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), cmp.Compare(a.space(), b.space()))
	})
	switch {
	case !there:
		h.Locks = slices.Insert(h.Locks, at, lock)
	case h.Locks[at].Shared && !lock.Shared, lock.Slots < h.Locks[at].Slots,
		lock.Version != 0 && (lock.Version < h.Locks[at].Version || h.Locks[at].Version == 0):
		h.Locks[at] = lock
	}
}

// From returns the hint of the lock context that ctx belongs to.
func From(ctx context.Context) (*Hint, bool) {
	h, _ := ctx.Value(contextKey{}).(*Hint)
	return h, h != nil
}

type contextKey struct{}

// space tells apart the locks that do not, or may not, exclude each other on the
// same key: what the default means is known to the database handle.
func (l Lock) space() int {
	switch {
	case l.Slots > 0:
		return 4
	case l.Strategy == StrategyOptimistic:
		return 3
	case l.Strategy == StrategyDefault:
		return 2
	case l.Strategy == StrategyAdvisory:
		return 1
	}
	return 0
}

func (h *Hint) check() {
	bad := func(format string, args ...any) { h.Err = fmt.Errorf("mysqllock: bad hint: "+format, args...) }
	switch {
	case len(h.Locks) == 0:
		bad("no key")
	case h.Wait < 0:
		bad("negative wait %v", h.Wait)
	case h.Retry < 0:
		bad("negative retry count %d", h.Retry)
	case h.hasTTL && h.TTL < time.Second:
		bad("TTL of %v, less than 1s", h.TTL)
	case h.MinHold < 0:
		bad("negative MinHold %v", h.MinHold)
	case h.MaxHold != 0 && h.MaxHold < time.Second:
		bad("MaxHold of %v, less than 1s", h.MaxHold)
	case h.hasSlots && (h.Slots < 1 || h.Slots > MaxSlots):
		bad("%d slots, want 1 to %d", h.Slots, MaxSlots)
	case h.hasSlots && h.Shared:
		bad("Shared and Slots exclude each other")
	case h.hasVersion && h.Version == 0:
		bad("no key has the version 0")
	case h.hasVersion && len(h.Locks) > 1:
		bad("IfVersion is for one key, and here are %d", len(h.Locks))
	case h.claims() && h.checkClaim() != nil:
		h.Err = h.checkClaim()
	default:
		h.Err = h.Kind.Check()
	}
	for _, lock := range h.Locks {
		switch n := len(lock.Key); {
		case n == 0:
			bad("empty key")
		case n > MaxKey:
			bad("key of %d bytes, longer than %d: %.40q…", n, MaxKey, lock.Key)
		}
	}
}

// checkClaim returns what is wrong with a claim.
func (h *Hint) checkClaim() error {
	bad := func(format string, args ...any) error { return fmt.Errorf("mysqllock: bad hint: "+format, args...) }
	keyless := len(h.Locks) == 0
	switch {
	case h.Claim.Update && h.Claim.Share:
		return bad("ForUpdate and ForShare exclude each other")
	case keyless && !h.claims():
		return bad("a claim that says none of ForUpdate, ForShare and SkipLocked")
	case keyless && (h.Kind != Kind{} || h.Retry != 0 || h.AllowStale || h.hasTTL || h.hasSlots || h.hasVersion):
		return bad("a claim names no key, so options of locks on keys mean nothing")
	case keyless && h.HasWait && (h.Wait != 0 || h.Claim.SkipLocked):
		return bad("a claim waits as long as the server's innodb_lock_wait_timeout; NoWait fails at once, SkipLocked never waits")
	}
	return nil
}

// Scope is one lock context: what the outermost With began and all contexts
// below it share. It holds what drivers remember of it.
type Scope struct {
	ctx context.Context // the context that the outermost With was given; its end is the end of the lock context

	mu    sync.Mutex
	state map[any]any
	notes map[note]uint64
}

// note names what drivers tell of a key.
type note struct {
	what What
	key  string
}

// What a number that drivers tell of a key is.
type What int

// What drivers tell of the keys that the unit of work holds.
const (
	Token   What = iota // of the lease
	Version             // that was remembered, or set by the last commit
	Slot                // the number of the slot
)

// Context returns the context that was given to the outermost With.
func (s *Scope) Context() context.Context { return s.ctx }

// State returns what is remembered under key, made by fresh where there is
// nothing yet. It is safe for concurrent use.
func (s *Scope) State(key any, fresh func() any) any {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.state[key]
	if !ok {
		if s.state == nil {
			s.state = make(map[any]any)
		}
		v = fresh()
		s.state[key] = v
	}
	return v
}

// Tell notes a number of key for the application to ask. It is safe for
// concurrent use.
func (s *Scope) Tell(what What, key string, n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.notes == nil {
		s.notes = make(map[note]uint64)
	}
	s.notes[note{what, key}] = n
}

// Forget removes what Tell has noted. It is safe for concurrent use.
func (s *Scope) Forget(what What, key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.notes, note{what, key})
}

// Told returns what Tell has noted. It is safe for concurrent use.
func (s *Scope) Told(what What, key string) (n uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, ok = s.notes[note{what, key}]
	return n, ok
}
