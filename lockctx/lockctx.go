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
func WithKeys(ctx context.Context, keys []string, opts ...Option) context.Context {
	h := &Hint{}
	for _, opt := range opts {
		if opt != nil {
			opt(h)
		}
	}
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
	} else {
		h.Scope = &Scope{ctx: ctx}
	}
	return context.WithValue(ctx, contextKey{}, h)
}

// Without returns a context without the hint: a statement that runs with it
// takes no lock and is not moved to another connection. A statement of an
// explicit sql.Tx stays in its transaction all the same.
func Without(ctx context.Context) context.Context {
	return context.WithValue(ctx, contextKey{}, (*Hint)(nil))
}

// Inside returns a context whose statements run inside hold, which a driver
// keeps beyond single transactions. A driver calls it; applications have no use
// for it.
func Inside(ctx context.Context, hold any) context.Context {
	h := &Hint{}
	if outer, ok := From(ctx); ok {
		*h = *outer
	}
	h.Holds, h.Hold, h.Named = append(slices.Clone(h.Holds), hold), hold, ""
	return context.WithValue(ctx, contextKey{}, h)
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

// NoWait fails with ErrLocked at once where someone else holds the key.
func NoWait() Option { return Wait(0) }

// Wait is the longest time to queue for the lock, in place of the database
// handle's lockWait; 0 is NoWait. A negative wait is a bad hint. The wait also
// ends with the context.
func Wait(d time.Duration) Option {
	return func(h *Hint) { h.Wait, h.HasWait = d, true }
}

// Retry lets mysqllock.Do run its function again, up to n times and after a
// short random pause, when the server broke a deadlock by rolling it back.
// Elsewhere it has no effect. A negative n is a bad hint.
func Retry(n int) Option { return func(h *Hint) { h.Retry = n } }

// AllowStale permits a lock to be asked for first in a transaction that has
// already read at REPEATABLE READ or above. Plain reads in it then show the
// data as it was before the lock was granted; only locking reads and writes
// see the newest. Without it such a lock fails with ErrStaleSnapshot.
func AllowStale() Option { return func(h *Hint) { h.AllowStale = true } }

// The strategies, as [Kind] and errors name them.
const (
	StrategyDefault  = ""         // the database handle's lockStrategy
	StrategyRow      = "row"      // see Row
	StrategyLease    = "lease"    // see Lease
	StrategyAdvisory = "advisory" // see Advisory
)

// Kind is how a key is to be locked.
type Kind struct {
	Strategy         string
	TTL              time.Duration // 0 is the database handle's lockTTL
	MinHold, MaxHold time.Duration
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
	Err        error  // what is wrong with the hint; nil when it is good
	Scope      *Scope // nil where there is nothing to lock

	hasTTL bool
}

// Keys returns the keys, sorted.
func (h *Hint) Keys() []string {
	keys := make([]string, len(h.Locks))
	for i, lock := range h.Locks {
		keys[i] = lock.Key
	}
	return slices.Compact(keys)
}

// add puts a lock in its place, unless its key is there.
func (h *Hint) add(lock Lock) {
	at, there := slices.BinarySearchFunc(h.Locks, lock, func(a, b Lock) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), cmp.Compare(a.space(), b.space()))
	})
	if !there {
		h.Locks = slices.Insert(h.Locks, at, lock)
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
	switch l.Strategy {
	case StrategyDefault:
		return 2
	case StrategyAdvisory:
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
	case (h.Strategy == StrategyRow || h.Strategy == StrategyAdvisory) && (h.MinHold != 0 || h.MaxHold != 0):
		bad("MinHold and MaxHold need a lease, and the strategy is %s", h.Strategy)
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

// Scope is one lock context: what the outermost With began and all contexts
// below it share. It holds what drivers remember of it.
type Scope struct {
	ctx context.Context // the context that the outermost With was given; its end is the end of the lock context

	mu     sync.Mutex
	state  map[any]any
	tokens map[string]uint64
}

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

// SetToken notes the token of the lease on key that the unit of work holds; 0
// notes that it holds none any more. It is safe for concurrent use.
func (s *Scope) SetToken(key string, token uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if token == 0 {
		delete(s.tokens, key)
		return
	}
	if s.tokens == nil {
		s.tokens = make(map[string]uint64)
	}
	s.tokens[key] = token
}

// Token returns what SetToken has noted. It is safe for concurrent use.
func (s *Scope) Token(key string) (token uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	token, ok = s.tokens[key]
	return token, ok
}
