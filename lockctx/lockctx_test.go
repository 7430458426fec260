package lockctx_test

import (
	"context"
	"fmt"
	"math"
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
	} {
		t.Run(c.name, func(t *testing.T) {
			h := hint(t, lockctx.WithKeys(context.Background(), c.keys, c.opts...))
			if h.Err != nil {
				t.Fatal(h.Err)
			}
			if !slices.Equal(h.Keys(), c.want.Keys()) || h.Kind != c.want.Kind || h.Wait != c.want.Wait ||
				h.HasWait != c.want.HasWait || h.Retry != c.want.Retry || h.AllowStale != c.want.AllowStale {
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

func TestInside(t *testing.T) {
	one, two := new(int), new(int)
	ctx := lockctx.Inside(context.Background(), one)
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
	both := hint(t, lockctx.Inside(lockctx.With(ctx, "k"), two))
	if !slices.Equal(both.Holds, []any{one, two}) || !slices.Equal(both.Keys(), []string{"k"}) || both.Named != "" || both.Hold != two {
		t.Errorf("a hold inside is %+v", both)
	}
	if len(hint(t, ctx).Holds) != 1 {
		t.Error("Inside changed the hint around it")
	}
	if _, ok := lockctx.From(lockctx.Without(ctx)); ok {
		t.Error("Without stays inside")
	}
}

func TestScopeToken(t *testing.T) {
	scope := hint(t, lockctx.With(context.Background(), "k")).Scope
	if _, ok := scope.Token("k"); ok {
		t.Error("there is a token before a grant")
	}
	scope.SetToken("k", 7)
	if token, ok := scope.Token("k"); token != 7 || !ok {
		t.Errorf("the token is %d, %v", token, ok)
	}
	scope.SetToken("k", 0)
	if _, ok := scope.Token("k"); ok {
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
