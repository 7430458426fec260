package lockctx_test

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/lockctx"
)

func hint(t *testing.T, ctx context.Context) *lockctx.Hint {
	t.Helper()
	h, ok := lockctx.From(ctx)
	if !ok {
		t.Fatal("there is no hint")
	}
	return h
}

func locks(keys ...string) (out []lockctx.Lock) {
	for _, key := range keys {
		out = append(out, lockctx.Lock{Key: key})
	}
	return out
}

func TestHint(t *testing.T) {
	longest := strings.Repeat("k", lockctx.MaxKey)
	for _, c := range []struct {
		name string
		keys []string
		opts []lockctx.Option
		want lockctx.Hint
	}{
		{"a key", []string{"k"}, nil, lockctx.Hint{Locks: locks("k")}},
		{"the longest", []string{longest}, nil, lockctx.Hint{Locks: locks(longest)}},
		{"any bytes", []string{"\x00\xff'`\n"}, nil, lockctx.Hint{Locks: locks("\x00\xff'`\n")}},
		{"sorted and unique", []string{"b", "a", "b", "B", "a "}, nil, lockctx.Hint{Locks: locks("B", "a", "a ", "b")}},
		{"row", []string{"k"}, []lockctx.Option{lockctx.Row()}, lockctx.Hint{Locks: locks("k"), Kind: lockctx.Kind{Strategy: lockctx.StrategyRow}}},
		{"no wait", []string{"k"}, []lockctx.Option{lockctx.NoWait()}, lockctx.Hint{Locks: locks("k"), HasWait: true}},
		{"wait", []string{"k"}, []lockctx.Option{lockctx.Wait(time.Minute)}, lockctx.Hint{Locks: locks("k"), Wait: time.Minute, HasWait: true}},
		{"the last counts", []string{"k"}, []lockctx.Option{lockctx.Wait(-1), lockctx.NoWait(), lockctx.Wait(2)}, lockctx.Hint{Locks: locks("k"), Wait: 2, HasWait: true}},
		{"lease", []string{"k"}, []lockctx.Option{lockctx.Lease(time.Second), lockctx.MinHold(2), lockctx.MaxHold(time.Minute)}, lockctx.Hint{
			Locks: locks("k"), Kind: lockctx.Kind{Strategy: lockctx.StrategyLease, TTL: time.Second, MinHold: 2, MaxHold: time.Minute},
		}},
		{"the strategy to come", []string{"k"}, []lockctx.Option{lockctx.MinHold(2)}, lockctx.Hint{Locks: locks("k"), Kind: lockctx.Kind{MinHold: 2}}},
		{"retry", []string{"k"}, []lockctx.Option{lockctx.Retry(3)}, lockctx.Hint{Locks: locks("k"), Retry: 3}},
		{"stale", []string{"k"}, []lockctx.Option{lockctx.AllowStale()}, lockctx.Hint{Locks: locks("k"), AllowStale: true}},
		{"optimistic", []string{"k"}, []lockctx.Option{lockctx.Optimistic()}, lockctx.Hint{Locks: locks("k"), Kind: lockctx.Kind{Strategy: lockctx.StrategyOptimistic}}},
		{"version", []string{"k"}, []lockctx.Option{lockctx.IfVersion(7)}, lockctx.Hint{Locks: locks("k"), Kind: lockctx.Kind{Strategy: lockctx.StrategyOptimistic, Version: 7}}},
		{"shared", []string{"k"}, []lockctx.Option{lockctx.Shared()}, lockctx.Hint{Locks: locks("k"), Kind: lockctx.Kind{Shared: true}}},
		{"slots", []string{"k"}, []lockctx.Option{lockctx.Slots(lockctx.MaxSlots)}, lockctx.Hint{Locks: locks("k"), Kind: lockctx.Kind{Slots: lockctx.MaxSlots}}},
		{"slots of a lease", []string{"k"}, []lockctx.Option{lockctx.Slots(1), lockctx.Lease(time.Second), lockctx.MinHold(2)}, lockctx.Hint{
			Locks: locks("k"), Kind: lockctx.Kind{Strategy: lockctx.StrategyLease, TTL: time.Second, MinHold: 2, Slots: 1},
		}},
		{"with a claim that skips", []string{"k"}, []lockctx.Option{lockctx.SkipLocked(), lockctx.NoWait()}, lockctx.Hint{Locks: locks("k"), HasWait: true, Claim: lockctx.Locking{Update: true, SkipLocked: true}}},
		{"shared claim", []string{"k"}, []lockctx.Option{lockctx.SkipLocked(), lockctx.ForShare()}, lockctx.Hint{Locks: locks("k"), Claim: lockctx.Locking{Share: true, SkipLocked: true}}},
		{"claim at once", []string{"k"}, []lockctx.Option{lockctx.ForUpdate(), lockctx.NoWait()}, lockctx.Hint{Locks: locks("k"), HasWait: true, Claim: lockctx.Locking{Update: true, NoWait: true}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := hint(t, lockctx.WithKeys(context.Background(), c.keys, c.opts...))
			if h.Err != nil {
				t.Fatal(h.Err)
			}
			if !slices.Equal(h.Keys(), c.want.Keys()) || h.Kind != c.want.Kind || h.Wait != c.want.Wait ||
				h.HasWait != c.want.HasWait || h.Retry != c.want.Retry || h.AllowStale != c.want.AllowStale ||
				h.Claim != c.want.Claim || h.Scope == nil {
				t.Errorf("the hint is %+v, want %+v", *h, c.want)
			}
			for _, lock := range h.Locks {
				if lock.Kind != c.want.Kind {
					t.Errorf("%q is to be locked by %+v, want %+v", lock.Key, lock.Kind, c.want.Kind)
				}
			}
		})
	}
}

func TestBadHint(t *testing.T) {
	key := []string{"k"}
	for _, c := range []struct {
		name string
		keys []string
		opts []lockctx.Option
		says string
	}{
		{"no keys", nil, nil, "no key"},
		{"empty key", []string{""}, nil, "empty key"},
		{"one of them empty", []string{"a", "", "b"}, nil, "empty key"},
		{"long key", []string{strings.Repeat("k", lockctx.MaxKey+1)}, nil, "key of 256 bytes, longer than 255"},
		{"long in bytes", []string{strings.Repeat("ä", 128)}, nil, "key of 256 bytes"},
		{"very long key", []string{strings.Repeat("\n", 1<<20)}, nil, "key of 1048576 bytes"},
		{"negative wait", key, []lockctx.Option{lockctx.Wait(-time.Second)}, "negative wait -1s"},
		{"most negative wait", key, []lockctx.Option{lockctx.Wait(math.MinInt64)}, "negative wait"},
		{"no TTL", key, []lockctx.Option{lockctx.Lease(0)}, "TTL of 0s, less than 1s"},
		{"short TTL", key, []lockctx.Option{lockctx.Lease(time.Second - 1)}, "TTL of 999.999999ms, less than 1s"},
		{"negative TTL", key, []lockctx.Option{lockctx.Lease(-time.Hour)}, "TTL of -1h0m0s"},
		{"negative MinHold", key, []lockctx.Option{lockctx.Lease(time.Second), lockctx.MinHold(-1)}, "negative MinHold -1ns"},
		{"short MaxHold", key, []lockctx.Option{lockctx.Lease(time.Second), lockctx.MaxHold(time.Millisecond)}, "MaxHold of 1ms, less than 1s"},
		{"MinHold of a row", key, []lockctx.Option{lockctx.Row(), lockctx.MinHold(time.Second)}, "need a lease"},
		{"MinHold of an advisory lock", key, []lockctx.Option{lockctx.Advisory(), lockctx.MinHold(time.Second)}, "need a lease"},
		{"MaxHold of a row", key, []lockctx.Option{lockctx.Row(), lockctx.MaxHold(time.Second)}, "need a lease"},
		{"shared lease", key, []lockctx.Option{lockctx.Lease(time.Second), lockctx.Shared()}, "Shared needs a row lock, and the strategy is lease"},
		{"shared and optimistic", key, []lockctx.Option{lockctx.Shared(), lockctx.Optimistic()}, "Shared needs a row lock"},
		{"advisory slots", key, []lockctx.Option{lockctx.Slots(2), lockctx.Advisory()}, "Slots needs a row lock or a lease, and the strategy is advisory"},
		{"no slots", key, []lockctx.Option{lockctx.Slots(0)}, "0 slots, want 1 to 1000"},
		{"many slots", key, []lockctx.Option{lockctx.Slots(1001)}, "1001 slots"},
		{"shared slots", key, []lockctx.Option{lockctx.Slots(2), lockctx.Shared()}, "exclude each other"},
		{"version 0", key, []lockctx.Option{lockctx.IfVersion(0)}, "version 0"},
		{"version of two", []string{"a", "b"}, []lockctx.Option{lockctx.IfVersion(1)}, "for one key, and here are 2"},
		{"version and MinHold", key, []lockctx.Option{lockctx.IfVersion(1), lockctx.MinHold(1)}, "need a lease, and the strategy is optimistic"},
		{"two claims", key, []lockctx.Option{lockctx.ForUpdate(), lockctx.ForShare()}, "exclude each other"},
		{"claim without Claim", nil, []lockctx.Option{lockctx.ForUpdate()}, "no key"},
		{"negative retries", key, []lockctx.Option{lockctx.Retry(-1)}, "negative retry count -1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := lockctx.WithKeys(context.Background(), c.keys, c.opts...)
			h := hint(t, ctx)
			if h.Err == nil || !strings.Contains(h.Err.Error(), c.says) || !strings.HasPrefix(h.Err.Error(), "mysqllock: bad hint: ") {
				t.Fatalf("the hint's error is %v, want %s", h.Err, c.says)
			}
			if text := h.Err.Error(); len(text) > 300 || strings.Contains(text, "\n") {
				t.Errorf("the error is not for a log line: %q", text)
			}
			// A good hint inside does not make it good.
			if inner := hint(t, lockctx.With(ctx, "good")); inner.Err == nil || inner.Err.Error() != h.Err.Error() {
				t.Errorf("inside, the hint's error is %v", inner.Err)
			}
			if _, ok := lockctx.From(lockctx.Without(ctx)); ok {
				t.Error("Without leaves the bad hint")
			}
		})
	}
}

func TestBadInsideGood(t *testing.T) {
	outer := lockctx.With(context.Background(), "k")
	inner := lockctx.With(outer, "")
	if hint(t, inner).Err == nil {
		t.Error("inside a good hint, a bad one is good")
	}
	if err := hint(t, outer).Err; err != nil {
		t.Errorf("a bad hint inside made the outer one bad: %v", err)
	}
}

func TestKeysAreCopied(t *testing.T) {
	keys := []string{"b", "a"}
	h := hint(t, lockctx.WithKeys(context.Background(), keys))
	if keys[0] != "b" {
		t.Error("the caller's keys were sorted")
	}
	keys[0], keys[1] = "x", "y"
	if !slices.Equal(h.Keys(), []string{"a", "b"}) {
		t.Errorf("the keys changed to %q", h.Keys())
	}
}

func TestNoHint(t *testing.T) {
	if h, ok := lockctx.From(context.Background()); ok || h != nil {
		t.Errorf("a context without a hint has %+v", h)
	}
}

func TestScope(t *testing.T) {
	type mine struct{}
	base, cancel := context.WithCancel(context.WithValue(context.Background(), mine{}, "base"))
	outer := lockctx.With(base, "outer")
	derived, stop := context.WithTimeout(context.WithValue(outer, mine{}, "derived"), time.Hour)
	defer stop()
	inner := lockctx.With(derived, "inner", lockctx.Wait(1))

	scope := hint(t, outer).Scope
	if hint(t, derived).Scope != scope || hint(t, inner).Scope != scope {
		t.Error("what is derived from a lock context is not the same lock context")
	}
	if got := hint(t, inner); !slices.Equal(got.Keys(), []string{"inner", "outer"}) || got.Wait != 1 {
		t.Errorf("the inner hint is %+v", got)
	}
	if got := hint(t, outer); !slices.Equal(got.Keys(), []string{"outer"}) || got.HasWait {
		t.Errorf("the outer hint has become %+v", got)
	}
	if scope.Context() != base {
		t.Error("the scope does not have the context of the outermost With")
	}

	without := lockctx.Without(inner)
	if _, ok := lockctx.From(without); ok {
		t.Error("Without leaves a hint")
	}
	if without.Value(mine{}) != "derived" {
		t.Error("Without loses values")
	}
	again := hint(t, lockctx.With(without, "outer"))
	if again.Scope == scope || again.Scope.Context() != without {
		t.Error("With after Without is the old lock context")
	}
	if hint(t, lockctx.With(base, "outer")).Scope == scope {
		t.Error("two calls of With on one context share a lock context")
	}

	cancel()
	for name, ctx := range map[string]context.Context{"outer": outer, "inner": inner, "without": without, "scope": scope.Context()} {
		if ctx.Err() == nil {
			t.Errorf("%s did not end with the context", name)
		}
	}
}

// TestKindsOfLock: each With says how its own keys are locked; a key that is
// named again stays as it is.
func TestKindsOfLock(t *testing.T) {
	outer := lockctx.With(context.Background(), "b", lockctx.Lease(time.Minute))
	inner := lockctx.WithKeys(outer, []string{"c", "b", "a"}, lockctx.Row())
	h := hint(t, inner)
	want := []string{lockctx.StrategyRow, lockctx.StrategyLease, lockctx.StrategyRow}
	for i, lock := range h.Locks {
		if lock.Key != string(rune('a'+i)) || lock.Strategy != want[i] {
			t.Errorf("lock %d is %+v", i, lock)
		}
	}
	// Advisory locks are a space of their own.
	apart := hint(t, lockctx.WithKeys(inner, []string{"b", "b"}, lockctx.Advisory()))
	if len(apart.Locks) != 4 || apart.Locks[1].Strategy != lockctx.StrategyLease || apart.Locks[2].Strategy != lockctx.StrategyAdvisory || len(apart.Keys()) != 3 {
		t.Errorf("with an advisory lock the hint is %+v", apart)
	}
	if len(h.Locks) != 3 || h.Strategy != lockctx.StrategyRow || h.Named != "" || hint(t, outer).Named != "b" {
		t.Errorf("the hint is %+v", h)
	}
	if len(hint(t, outer).Locks) != 1 {
		t.Error("With changed the hint around it")
	}
}

// TestSameKeyAgain: what is asked for the same key in one lock context.
func TestSameKeyAgain(t *testing.T) {
	both := func(a, b lockctx.Option) []lockctx.Lock {
		return hint(t, lockctx.With(lockctx.With(context.Background(), "k", a), "k", b)).Locks
	}
	plain := lockctx.Wait(1)
	for _, opts := range [][2]lockctx.Option{{lockctx.Shared(), plain}, {plain, lockctx.Shared()}} {
		if got := both(opts[0], opts[1]); len(got) != 1 || got[0].Shared {
			t.Errorf("shared and exclusive is %+v", got)
		}
	}
	for _, opts := range [][2]lockctx.Option{{lockctx.Optimistic(), lockctx.IfVersion(7)}, {lockctx.IfVersion(7), lockctx.Optimistic()}} {
		if got := both(opts[0], opts[1]); len(got) != 1 || got[0].Version != 7 {
			t.Errorf("with a version and without is %+v", got)
		}
	}
	for _, opts := range [][2]lockctx.Option{{lockctx.IfVersion(8), lockctx.IfVersion(7)}, {lockctx.IfVersion(7), lockctx.IfVersion(8)}} {
		if got := both(opts[0], opts[1]); len(got) != 1 || got[0].Version != 7 {
			t.Errorf("two versions are %+v", got)
		}
	}
	for _, other := range []lockctx.Option{lockctx.Slots(2), lockctx.Optimistic()} { // these are not the lock itself
		if got := both(plain, other); len(got) != 2 {
			t.Errorf("the locks are %+v", got)
		}
	}
}

func TestClaim(t *testing.T) {
	ctx := lockctx.Claim(context.Background(), lockctx.SkipLocked())
	h := hint(t, ctx)
	if h.Scope != nil || h.Err != nil || h.Claim != (lockctx.Locking{Update: true, SkipLocked: true}) {
		t.Errorf("the hint is %+v", h)
	}
	inside := hint(t, lockctx.With(ctx, "k"))
	if inside.Claim != h.Claim || inside.Scope == nil || inside.Scope.Context() != ctx {
		t.Errorf("With inside a claim is %+v", inside)
	}
	if other := hint(t, lockctx.Claim(ctx, lockctx.ForShare(), lockctx.NoWait())); other.Claim != (lockctx.Locking{Share: true, NoWait: true}) {
		t.Errorf("a claim inside a claim is %+v", other)
	}
	// What the context asks for otherwise stays.
	locked := lockctx.With(context.Background(), "k", lockctx.NoWait(), lockctx.AllowStale(), lockctx.Lease(time.Minute))
	want := *hint(t, locked)
	want.Claim = lockctx.Locking{Update: true}
	if both := hint(t, lockctx.Claim(locked, lockctx.ForUpdate())); !reflect.DeepEqual(*both, want) {
		t.Errorf("a claim inside With is %+v, want %+v", *both, want)
	}
	hold := lockctx.Ask(context.Background(), []string{"held"}).Inside(context.Background(), new(int))
	if both := hint(t, lockctx.Claim(hold, lockctx.ForUpdate())); both.Hold != hint(t, hold).Hold {
		t.Errorf("a claim inside a hold is %+v", both)
	}
	for says, opts := range map[string][]lockctx.Option{
		"none of":             {lockctx.NoWait()},
		"exclude each other":  {lockctx.ForUpdate(), lockctx.ForShare()},
		"mean nothing":        {lockctx.ForUpdate(), lockctx.Lease(time.Second)},
		"as long as":          {lockctx.ForUpdate(), lockctx.Wait(time.Second)},
		"SkipLocked never":    {lockctx.SkipLocked(), lockctx.NoWait()},
		"options of locks on": {lockctx.SkipLocked(), lockctx.Retry(1)},
	} {
		h := hint(t, lockctx.Claim(context.Background(), opts...))
		if h.Err == nil || !strings.Contains(h.Err.Error(), says) {
			t.Errorf("the hint's error is %v, want %s", h.Err, says)
		}
		if inside := hint(t, lockctx.With(lockctx.Claim(context.Background(), opts...), "k")); inside.Err == nil {
			t.Error("inside a bad claim, a hint is good")
		}
	}
}

func TestInside(t *testing.T) {
	one, two := new(int), new(int)
	ctx := lockctx.Ask(context.Background(), []string{"held"}).Inside(context.Background(), one)
	h := hint(t, ctx)
	if h.Scope != nil || len(h.Locks) != 0 || h.Err != nil || !slices.Equal(h.Holds, []any{one}) {
		t.Errorf("the hint is %+v", h)
	}
	with := hint(t, lockctx.With(ctx, "k"))
	if with.Scope == nil || with.Scope.Context() != ctx || !slices.Equal(with.Holds, []any{one}) || with.Named != "k" || with.Hold != nil || h.Hold != one {
		t.Errorf("With inside a hold is %+v", with)
	}
	if other := hint(t, lockctx.With(ctx, "k")); other.Scope == with.Scope {
		t.Error("two calls of With inside a hold share a lock context")
	}
	k := lockctx.With(ctx, "k")
	both := hint(t, lockctx.Ask(k, []string{"held"}, lockctx.ForShare()).Inside(k, two))
	if !slices.Equal(both.Holds, []any{one, two}) || !slices.Equal(both.Keys(), []string{"k"}) || both.Named != "" || both.Hold != two || !both.Claim.Share {
		t.Errorf("a hold inside is %+v", both)
	}
	if len(hint(t, ctx).Holds) != 1 {
		t.Error("Inside changed the hint around it")
	}
	if _, ok := lockctx.From(lockctx.Without(ctx)); ok {
		t.Error("Without stays inside")
	}
}

func TestScopeTells(t *testing.T) {
	scope := hint(t, lockctx.With(context.Background(), "k")).Scope
	if _, ok := scope.Told(lockctx.Token, "k"); ok {
		t.Error("there is a token before a grant")
	}
	scope.Tell(lockctx.Token, "k", 7)
	scope.Tell(lockctx.Slot, "k", 0)
	if token, ok := scope.Told(lockctx.Token, "k"); token != 7 || !ok {
		t.Errorf("the token is %d, %v", token, ok)
	}
	if slot, ok := scope.Told(lockctx.Slot, "k"); slot != 0 || !ok {
		t.Errorf("the slot is %d, %v", slot, ok)
	}
	if _, ok := scope.Told(lockctx.Version, "k"); ok {
		t.Error("a token is taken for a version")
	}
	scope.Forget(lockctx.Token, "k")
	if _, ok := scope.Told(lockctx.Token, "k"); ok {
		t.Error("the token outlives its lease")
	}
}

func TestScopeState(t *testing.T) {
	scope := hint(t, lockctx.With(context.Background(), "k")).Scope
	made := 0
	fresh := func() any { made++; return new(made) }
	one := scope.State("a", fresh)
	if scope.State("a", fresh) != one || made != 1 {
		t.Errorf("the state was made %d times", made)
	}
	if scope.State("b", fresh) == one {
		t.Error("two keys have one state")
	}
	if other := hint(t, lockctx.With(context.Background(), "k")).Scope.State("a", fresh); other == one {
		t.Error("two lock contexts have one state")
	}
}

func TestConcurrentUse(t *testing.T) {
	outer := lockctx.With(context.Background(), "outer")
	scope := hint(t, outer).Scope
	states := make([]any, 32)
	var all sync.WaitGroup
	for i := range states {
		all.Go(func() {
			ctx := lockctx.WithKeys(outer, []string{fmt.Sprint(i), "shared"}, lockctx.Wait(time.Duration(i)))
			h, ok := lockctx.From(ctx)
			if !ok || h.Scope != scope || h.Wait != time.Duration(i) || len(h.Keys()) != 3 {
				t.Errorf("the hint is %+v", h)
				return
			}
			states[i] = h.Scope.State("a", func() any { return new(i) })
			h.Scope.State(i, func() any { return i })
		})
	}
	all.Wait()
	for i, s := range states {
		if s == nil || s != states[0] {
			t.Errorf("goroutine %d has a state of its own", i)
		}
	}
}
