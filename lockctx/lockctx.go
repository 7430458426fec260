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
	"context"
	"errors"
	"fmt"
	"slices"
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
// exclusive row lock that waits as long as the database handle's lockWait.
func With(ctx context.Context, key string, opts ...Option) context.Context {
	return WithKeys(ctx, []string{key}, opts...)
}

// WithKeys is With for several keys, which are taken together: all or none, in
// one statement, and in one order everywhere, so that two programs that name
// the same keys in another order do not deadlock.
func WithKeys(ctx context.Context, keys []string, opts ...Option) context.Context {
	h := &Hint{}
	for _, opt := range opts {
		if opt != nil {
			opt(h)
		}
	}
	h.Keys = slices.Compact(slices.Sorted(slices.Values(keys)))
	h.check()
	if outer, ok := From(ctx); ok {
		h.Scope = outer.Scope
		h.Keys = slices.Compact(slices.Sorted(slices.Values(append(slices.Clone(h.Keys), outer.Keys...))))
		if h.Err == nil {
			h.Err = outer.Err
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

// Row keeps the lock as an InnoDB row lock in the caller's own transaction, so
// that the lock and the write commit together. This is the default.
func Row() Option { return func(h *Hint) { h.Strategy = StrategyRow } }

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

// The strategies, as [Hint] and errors name them.
const (
	StrategyDefault = ""    // the database handle's lockStrategy
	StrategyRow     = "row" // see Row
)

// Hint is what With puts into a context. The driver reads it; applications
// have no use for it.
type Hint struct {
	Keys       []string // of this With and those around it, sorted and unique
	Strategy   string
	Wait       time.Duration
	HasWait    bool // Wait was given
	Retry      int
	AllowStale bool
	Err        error // what is wrong with the hint; nil when it is good
	Scope      *Scope
}

// From returns the hint of the lock context that ctx belongs to.
func From(ctx context.Context) (*Hint, bool) {
	h, _ := ctx.Value(contextKey{}).(*Hint)
	return h, h != nil
}

type contextKey struct{}

func (h *Hint) check() {
	switch {
	case len(h.Keys) == 0:
		h.Err = errors.New("mysqllock: bad hint: no key")
	case h.Wait < 0:
		h.Err = fmt.Errorf("mysqllock: bad hint: negative wait %v", h.Wait)
	case h.Retry < 0:
		h.Err = fmt.Errorf("mysqllock: bad hint: negative retry count %d", h.Retry)
	}
	for _, k := range h.Keys {
		switch {
		case k == "":
			h.Err = errors.New("mysqllock: bad hint: empty key")
		case len(k) > MaxKey:
			h.Err = fmt.Errorf("mysqllock: bad hint: key of %d bytes, longer than %d: %.40q…", len(k), MaxKey, k)
		}
	}
}

// Scope is one lock context: what the outermost With began and all contexts
// below it share. It holds what drivers remember of it.
type Scope struct {
	ctx context.Context // the context that the outermost With was given; its end is the end of the lock context

	mu    sync.Mutex
	state map[any]any
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
