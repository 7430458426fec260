// Package hint is what a context carries of a lock: the keys and options that
// package lockctx puts there, and what database handles remember of the lock
// context. The driver reads it; applications only see lockctx.
package hint

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

// The strategies, as [Kind] and errors name them.
const (
	StrategyDefault    = ""           // the database handle's lockStrategy
	StrategyRow        = "row"        // see lockctx.Row
	StrategyLease      = "lease"      // see lockctx.Lease
	StrategyAdvisory   = "advisory"   // see lockctx.Advisory
	StrategyOptimistic = "optimistic" // see lockctx.Optimistic
)

// Kind is how a key is to be locked.
type Kind struct {
	Strategy         string
	TTL              time.Duration // 0 is the database handle's lockTTL
	MinHold, MaxHold time.Duration
	Shared           bool
	Slots            int    // how many may hold the key; 0 is without Slots
	Version          uint64 // that it must have; 0 is the one it has at the first statement
	Leadership       bool   // it is asked for by package leader: to wait for it, and to hold it, for long is the purpose
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

// Lock is a key and how it is to be locked.
type Lock struct {
	Key string
	Kind
}

// Hint is what lockctx.With puts into a context.
type Hint struct {
	Kind               // of the innermost With; without one, of the hold that ctx is inside of
	Locks       []Lock // of this With and those around it, sorted by key, each once in each space
	Named       string // the key of the innermost With, where it names a single one
	Holds       []any  // what ctx is inside of (see Inside), outermost first
	Hold        any    // the last of them, where no With came after it
	Wait        time.Duration
	HasWait     bool // Wait was given
	Retry       int
	AllowStale  bool
	Err         error        // what is wrong with the hint; nil when it is good
	LockContext *LockContext // nil where there is nothing to lock

	HasTTL, HasSlots, HasVersion bool     // the option was given, whatever its value
	other                        string   // a strategy that another option has named; "" without one
	nested                       int      // how often With has added keys inside With
	held                         []string // the keys of Holds
}

// MaxNested is how often With may add keys inside With: see lockctx.MaxNested.
const MaxNested = 64

// Forever is the longest wait: far longer than any process lives, and short enough to be
// added to the time of day.
const Forever = 100 * 365 * 24 * time.Hour

// Ask returns the hint for keys that is to be put into ctx, for a driver that may
// not need the context. It has a LockContext if ctx is in a lock context.
func Ask[Option ~func(*Hint)](ctx context.Context, keys []string, opts ...Option) *Hint {
	h := apply(opts)
	for _, key := range keys {
		h.add(Lock{key, h.Kind})
	}
	h.check()
	if ctx == nil && h.Err == nil {
		h.Err = bad("the context is nil")
	}
	if len(h.Locks) == 1 {
		h.Named = h.Locks[0].Key
	}
	outer, inside := From(ctx)
	if inside {
		h.Holds, h.held = outer.Holds, outer.held
		if h.Err == nil {
			h.Err = outer.Err
		}
	}
	if inside && outer.LockContext != nil {
		h.LockContext = outer.LockContext
		own := h.Locks
		h.Locks = slices.Clone(outer.Locks) // the same key again joins
		for _, lock := range own {
			h.add(lock)
		}
		h.nested = outer.nested
		if len(h.Locks) > len(outer.Locks) {
			h.nested++
		}
		if h.nested > MaxNested && h.Err == nil {
			h.Err = bad("With inside With has added keys %d times, more than %d: ctx = lockctx.With(ctx, key) in a loop asks for "+
				"all keys before as well; derive each context from the one outside of the loop, or name all keys in one WithKeys", h.nested, MaxNested)
		}
	}
	return h
}

// With returns ctx with the hint that [Ask] has made for it. Where ctx is in no
// lock context, a new one begins.
func (h *Hint) With(ctx context.Context) context.Context {
	ctx = orBackground(ctx)
	if h.LockContext == nil {
		h.LockContext = &LockContext{ctx: ctx}
	}
	return context.WithValue(ctx, contextKey{}, h)
}

// Inside returns ctx, for which [Ask] has made the hint, as the context of hold,
// which a driver keeps beyond single transactions: statements in it run under what
// ctx asks for. The hint is of no use after that.
func (h *Hint) Inside(ctx context.Context, hold any) context.Context {
	kind, key := h.Kind, h.Named
	*h = Hint{}
	if outer, ok := From(ctx); ok {
		*h = *outer
	}
	if len(h.Locks) == 0 {
		h.Kind = kind
	}
	h.Holds, h.Hold, h.Named = append(slices.Clone(h.Holds), hold), hold, ""
	h.held = append(slices.Clone(h.held), key)
	return context.WithValue(ctx, contextKey{}, h)
}

// NoRetry makes the hint a bad one, for the reason why, if it asks for a retry.
func (h *Hint) NoRetry(why string) {
	if h.Retry > 0 && h.Err == nil {
		h.Err = bad("%s", why)
	}
}

// apply returns what options say.
func apply[Option ~func(*Hint)](opts []Option) *Hint {
	h := &Hint{}
	for _, opt := range opts {
		if opt != nil {
			opt(h)
		}
	}
	return h
}

// Without returns ctx without a hint.
func Without(ctx context.Context) context.Context {
	return context.WithValue(orBackground(ctx), contextKey{}, (*Hint)(nil))
}

// Has reports whether the hint asks for key, or is inside a hold of it.
func (h *Hint) Has(key string) bool {
	return slices.Contains(h.Keys(), key) || slices.Contains(h.held, key)
}

// orBackground returns ctx, or what can carry a hint in place of nil.
func orBackground(ctx context.Context) context.Context {
	if ctx == nil {
		return context.Background()
	}
	return ctx
}

// KeepBy notes the strategy that an option names.
func (h *Hint) KeepBy(strategy string) {
	if h.Strategy != StrategyDefault && h.Strategy != strategy {
		h.other = h.Strategy
	}
	h.Strategy = strategy
}

// Keys returns the keys, sorted.
func (h *Hint) Keys() []string {
	keys := make([]string, len(h.Locks))
	for i, lock := range h.Locks {
		keys[i] = lock.Key
	}
	return slices.Compact(keys)
}

// Names are the keys for errors: what is asked for, or else what ctx is inside of.
func (h *Hint) Names() string {
	if len(h.Locks) == 0 {
		return strings.Join(h.held, ", ")
	}
	return strings.Join(h.Keys(), ", ")
}

// add puts a lock in its place, unless its key is there. One that is asked for
// shared and exclusive is exclusive, the version that one With names counts for
// all, and of two numbers of slots the lower one.
func (h *Hint) add(lock Lock) {
	at, there := slices.BinarySearchFunc(h.Locks, lock, func(a, b Lock) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), strings.Compare(a.space(), b.space()))
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
	if ctx == nil {
		return nil, false
	}
	h, _ := ctx.Value(contextKey{}).(*Hint)
	return h, h != nil
}

type contextKey struct{}

// space tells apart the locks that do not, or may not, exclude each other on the
// same key: what the default means is known to the database handle.
func (l Lock) space() string {
	switch {
	case l.Slots > 0:
		return "slots"
	case l.Strategy == StrategyRow || l.Strategy == StrategyLease: // they exclude each other
		return "rows"
	}
	return "strategy " + l.Strategy
}

// bad is what is wrong with a hint.
func bad(format string, args ...any) error {
	return fmt.Errorf("mysqllock: bad hint: "+format, args...)
}

// check sets Err if something is wrong with the hint as a whole. A bad key comes before a bad option.
func (h *Hint) check() {
	refuse := func(format string, args ...any) { h.Err = bad(format, args...) }
	switch {
	case len(h.Locks) == 0:
		refuse("no key")
	case h.Wait < 0:
		refuse("negative wait %v", h.Wait)
	case h.Retry < 0:
		refuse("negative retry count %d", h.Retry)
	case h.other != "":
		refuse("a key is kept in one way, and the options say both %s and %s", h.other, h.Strategy)
	case h.HasTTL && h.TTL < time.Second:
		refuse("TTL of %v, less than 1s", h.TTL)
	case h.MinHold < 0:
		refuse("negative MinHold %v", h.MinHold)
	case h.MaxHold != 0 && h.MaxHold < time.Second:
		refuse("MaxHold of %v, less than 1s", h.MaxHold)
	case h.HasSlots && (h.Slots < 1 || h.Slots > MaxSlots):
		refuse("%d slots, want 1 to %d", h.Slots, MaxSlots)
	case h.HasSlots && h.Shared:
		refuse("Shared and Slots exclude each other")
	case h.HasVersion && h.Version == 0:
		refuse("no key has the version 0")
	case h.HasVersion && len(h.Locks) > 1:
		refuse("IfVersion is for one key, and here are %d", len(h.Locks))
	default:
		h.Err = h.Kind.Check()
	}
	for _, lock := range h.Locks {
		switch n := len(lock.Key); {
		case n == 0:
			refuse("empty key")
		case n > MaxKey:
			refuse("key of %d bytes, longer than %d: %.40q…", n, MaxKey, lock.Key)
		}
	}
}

// LockContext is one lock context: what the outermost With began and all contexts
// below it share. It holds what drivers remember of it.
type LockContext struct {
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
	ToldToken   What = iota // of the lease
	ToldVersion             // that was remembered, or set by the last commit
	ToldSlot                // the number of the slot
)

// Context returns the context that was given to the outermost With.
func (lc *LockContext) Context() context.Context { return lc.ctx }

// State returns what is remembered under key, made by fresh where there is
// nothing yet. It is safe for concurrent use.
func (lc *LockContext) State(key any, fresh func() any) any {
	lc.mu.Lock()
	defer lc.mu.Unlock()
	v, ok := lc.state[key]
	if !ok {
		if lc.state == nil {
			lc.state = make(map[any]any)
		}
		v = fresh()
		lc.state[key] = v
	}
	return v
}

// Tell notes a number of key for the application to ask. It is safe for
// concurrent use.
func (lc *LockContext) Tell(what What, key string, n uint64) {
	lc.mu.Lock()
	defer lc.mu.Unlock()
	if lc.notes == nil {
		lc.notes = make(map[note]uint64)
	}
	lc.notes[note{what, key}] = n
}

// Forget removes what Tell has noted. It is safe for concurrent use.
func (lc *LockContext) Forget(what What, key string) {
	lc.mu.Lock()
	defer lc.mu.Unlock()
	delete(lc.notes, note{what, key})
}

// Told returns what Tell has noted. It is safe for concurrent use.
func (lc *LockContext) Told(what What, key string) (n uint64, ok bool) {
	lc.mu.Lock()
	defer lc.mu.Unlock()
	n, ok = lc.notes[note{what, key}]
	return n, ok
}
