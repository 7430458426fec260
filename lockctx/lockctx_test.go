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

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

func asked(t *testing.T, ctx context.Context) *hint.Hint {
	t.Helper()
	h, ok := hint.From(ctx)
	if !ok {
		t.Fatal("there is no hint")
	}
	return h
}

func locks(keys ...string) (out []hint.Lock) {
	for _, key := range keys {
		out = append(out, hint.Lock{Key: key})
	}
	return out
}

func TestAHintSaysWhatItsOptionsAskFor(t *testing.T) {
	longest := strings.Repeat("k", lockctx.MaxKey)
	for _, c := range []struct {
		name string
		keys []string
		opts []lockctx.Option
		want hint.Hint
	}{
		{"a key", []string{"k"}, nil, hint.Hint{Locks: locks("k")}},
		{"the longest", []string{longest}, nil, hint.Hint{Locks: locks(longest)}},
		{"any bytes", []string{"\x00\xff'`\n"}, nil, hint.Hint{Locks: locks("\x00\xff'`\n")}},
		{"sorted and unique", []string{"b", "a", "b", "B", "a "}, nil, hint.Hint{Locks: locks("B", "a", "a ", "b")}},
		{"row", []string{"k"}, []lockctx.Option{lockctx.Row()}, hint.Hint{Locks: locks("k"), Kind: hint.Kind{Strategy: hint.StrategyRow}}},
		{"no wait", []string{"k"}, []lockctx.Option{lockctx.NoWait()}, hint.Hint{Locks: locks("k"), HasWait: true}},
		{"wait", []string{"k"}, []lockctx.Option{lockctx.Wait(time.Minute)}, hint.Hint{Locks: locks("k"), Wait: time.Minute, HasWait: true}},
		{"the last counts", []string{"k"}, []lockctx.Option{lockctx.Wait(-1), lockctx.NoWait(), lockctx.Wait(2)}, hint.Hint{Locks: locks("k"), Wait: 2, HasWait: true}},
		{"lease", []string{"k"}, []lockctx.Option{lockctx.Lease(time.Second), lockctx.MinHold(2), lockctx.MaxHold(time.Minute)}, hint.Hint{
			Locks: locks("k"), Kind: hint.Kind{Strategy: hint.StrategyLease, TTL: time.Second, MinHold: 2, MaxHold: time.Minute},
		}},
		{"the strategy to come", []string{"k"}, []lockctx.Option{lockctx.MinHold(2)}, hint.Hint{Locks: locks("k"), Kind: hint.Kind{MinHold: 2}}},
		{"no retry", []string{"k"}, []lockctx.Option{lockctx.Retry(0)}, hint.Hint{Locks: locks("k")}},
		{"the same strategy", []string{"k"}, []lockctx.Option{lockctx.Lease(time.Minute), lockctx.Lease(time.Second)}, hint.Hint{
			Locks: locks("k"), Kind: hint.Kind{Strategy: hint.StrategyLease, TTL: time.Second},
		}},
		{"optimistic by version", []string{"k"}, []lockctx.Option{lockctx.Optimistic(), lockctx.IfVersion(7)}, hint.Hint{Locks: locks("k"), Kind: hint.Kind{Strategy: hint.StrategyOptimistic, Version: 7}}},
		{"stale", []string{"k"}, []lockctx.Option{lockctx.AllowStale()}, hint.Hint{Locks: locks("k"), AllowStale: true}},
		{"optimistic", []string{"k"}, []lockctx.Option{lockctx.Optimistic()}, hint.Hint{Locks: locks("k"), Kind: hint.Kind{Strategy: hint.StrategyOptimistic}}},
		{"version", []string{"k"}, []lockctx.Option{lockctx.IfVersion(7)}, hint.Hint{Locks: locks("k"), Kind: hint.Kind{Strategy: hint.StrategyOptimistic, Version: 7}}},
		{"shared", []string{"k"}, []lockctx.Option{lockctx.Shared()}, hint.Hint{Locks: locks("k"), Kind: hint.Kind{Shared: true}}},
		{"slots", []string{"k"}, []lockctx.Option{lockctx.Slots(lockctx.MaxSlots)}, hint.Hint{Locks: locks("k"), Kind: hint.Kind{Slots: lockctx.MaxSlots}}},
		{"slots of a lease", []string{"k"}, []lockctx.Option{lockctx.Slots(1), lockctx.Lease(time.Second), lockctx.MinHold(2)}, hint.Hint{
			Locks: locks("k"), Kind: hint.Kind{Strategy: hint.StrategyLease, TTL: time.Second, MinHold: 2, Slots: 1},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := asked(t, lockctx.WithKeys(context.Background(), c.keys, c.opts...))
			if h.Err != nil {
				t.Fatal(h.Err)
			}
			if !slices.Equal(h.Keys(), c.want.Keys()) || h.Kind != c.want.Kind || h.Wait != c.want.Wait ||
				h.HasWait != c.want.HasWait || h.Retry != c.want.Retry || h.AllowStale != c.want.AllowStale ||
				h.LockContext == nil {
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

func TestABadHintSaysWhatIsWrong(t *testing.T) {
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
		{"retries", key, []lockctx.Option{lockctx.Retry(1)}, "Retry is for mysqllock.Do"},
		{"a row and a lease", key, []lockctx.Option{lockctx.Row(), lockctx.Lease(time.Second)}, "say both row and lease"},
		{"a lease and a row", key, []lockctx.Option{lockctx.Lease(time.Second), lockctx.Row()}, "say both lease and row"},
		{"there and back", key, []lockctx.Option{lockctx.Row(), lockctx.Advisory(), lockctx.Row()}, "say both"},
		{"a version and a lease", key, []lockctx.Option{lockctx.IfVersion(1), lockctx.Lease(time.Second)}, "say both optimistic and lease"},
		{"advisory and optimistic", key, []lockctx.Option{lockctx.Advisory(), lockctx.Optimistic()}, "say both advisory and optimistic"},
		{"negative retries", key, []lockctx.Option{lockctx.Retry(-1)}, "negative retry count -1"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx := lockctx.WithKeys(context.Background(), c.keys, c.opts...)
			h := asked(t, ctx)
			if h.Err == nil || !strings.Contains(h.Err.Error(), c.says) || !strings.HasPrefix(h.Err.Error(), "mysqllock: bad hint: ") {
				t.Fatalf("the hint's error is %v, want %s", h.Err, c.says)
			}
			if text := h.Err.Error(); len(text) > 300 || strings.Contains(text, "\n") {
				t.Errorf("the error is not for a log line: %q", text)
			}
			// A good hint inside does not make it good.
			if inner := asked(t, lockctx.With(ctx, "good")); inner.Err == nil || inner.Err.Error() != h.Err.Error() {
				t.Errorf("inside, the hint's error is %v", inner.Err)
			}
			if _, ok := hint.From(lockctx.Without(ctx)); ok {
				t.Error("Without leaves the bad hint")
			}
		})
	}
}

func TestABadHintInsideAGoodOneIsBad(t *testing.T) {
	outer := lockctx.With(context.Background(), "k")
	inner := lockctx.With(outer, "")
	if asked(t, inner).Err == nil {
		t.Error("inside a good hint, a bad one is good")
	}
	if err := asked(t, outer).Err; err != nil {
		t.Errorf("a bad hint inside made the outer one bad: %v", err)
	}
}

func TestKeysAreCopied(t *testing.T) {
	keys := []string{"b", "a"}
	h := asked(t, lockctx.WithKeys(context.Background(), keys))
	if keys[0] != "b" {
		t.Error("the caller's keys were sorted")
	}
	keys[0], keys[1] = "x", "y"
	if !slices.Equal(h.Keys(), []string{"a", "b"}) {
		t.Errorf("the keys changed to %q", h.Keys())
	}
}

func TestAPlainContextHasNoHint(t *testing.T) {
	if h, ok := hint.From(context.Background()); ok || h != nil {
		t.Errorf("a context without a hint has %+v", h)
	}
}

func TestWhatIsDerivedIsTheSameLockContext(t *testing.T) {
	type mine struct{}
	base, cancel := context.WithCancel(context.WithValue(context.Background(), mine{}, "base"))
	outer := lockctx.With(base, "outer")
	derived, stop := context.WithTimeout(context.WithValue(outer, mine{}, "derived"), time.Hour)
	defer stop()
	inner := lockctx.With(derived, "inner", lockctx.Wait(1))

	shared := asked(t, outer).LockContext
	if asked(t, derived).LockContext != shared || asked(t, inner).LockContext != shared {
		t.Error("what is derived from a lock context is not the same lock context")
	}
	if got := asked(t, inner); !slices.Equal(got.Keys(), []string{"inner", "outer"}) || got.Wait != 1 {
		t.Errorf("the inner hint is %+v", got)
	}
	if got := asked(t, outer); !slices.Equal(got.Keys(), []string{"outer"}) || got.HasWait {
		t.Errorf("the outer hint has become %+v", got)
	}
	if shared.Context() != base {
		t.Error("the lock context does not have the context of the outermost With")
	}

	without := lockctx.Without(inner)
	if _, ok := hint.From(without); ok {
		t.Error("Without leaves a hint")
	}
	if without.Value(mine{}) != "derived" {
		t.Error("Without loses values")
	}
	again := asked(t, lockctx.With(without, "outer"))
	if again.LockContext == shared || again.LockContext.Context() != without {
		t.Error("With after Without is the old lock context")
	}
	if asked(t, lockctx.With(base, "outer")).LockContext == shared {
		t.Error("two calls of With on one context share a lock context")
	}

	cancel()
	for name, ctx := range map[string]context.Context{"outer": outer, "inner": inner, "without": without, "lock context": shared.Context()} {
		if ctx.Err() == nil {
			t.Errorf("%s did not end with the context", name)
		}
	}
}

// TestEachWithSaysHowItsOwnKeysAreLocked; a key that is named again stays as it is.
func TestEachWithSaysHowItsOwnKeysAreLocked(t *testing.T) {
	outer := lockctx.With(context.Background(), "b", lockctx.Lease(time.Minute))
	inner := lockctx.WithKeys(outer, []string{"c", "b", "a"}, lockctx.Row())
	h := asked(t, inner)
	want := []string{hint.StrategyRow, hint.StrategyLease, hint.StrategyRow}
	for i, lock := range h.Locks {
		if lock.Key != string(rune('a'+i)) || lock.Strategy != want[i] {
			t.Errorf("lock %d is %+v", i, lock)
		}
	}
	// Advisory locks are a space of their own.
	apart := asked(t, lockctx.WithKeys(inner, []string{"b", "b"}, lockctx.Advisory()))
	if len(apart.Locks) != 4 || apart.Locks[1].Strategy != hint.StrategyLease || apart.Locks[2].Strategy != hint.StrategyAdvisory || len(apart.Keys()) != 3 {
		t.Errorf("with an advisory lock the hint is %+v", apart)
	}
	if len(h.Locks) != 3 || h.Strategy != hint.StrategyRow || h.Named != "" || asked(t, outer).Named != "b" {
		t.Errorf("the hint is %+v", h)
	}
	if len(asked(t, outer).Locks) != 1 {
		t.Error("With changed the hint around it")
	}
}

// TestTheStricterOfTwoHintsForAKeyCounts, in one lock context.
func TestTheStricterOfTwoHintsForAKeyCounts(t *testing.T) {
	both := func(a, b lockctx.Option) []hint.Lock {
		return asked(t, lockctx.With(lockctx.With(context.Background(), "k", a), "k", b)).Locks
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

func TestAContextInsideAHoldKnowsItsHolds(t *testing.T) {
	one, two := new(int), new(int)
	ctx := hint.Ask[lockctx.Option](context.Background(), []string{"held"}).Inside(context.Background(), one)
	h := asked(t, ctx)
	if h.LockContext != nil || len(h.Locks) != 0 || h.Err != nil || !slices.Equal(h.Holds, []any{one}) {
		t.Errorf("the hint is %+v", h)
	}
	with := asked(t, lockctx.With(ctx, "k"))
	if with.LockContext == nil || with.LockContext.Context() != ctx || !slices.Equal(with.Holds, []any{one}) || with.Named != "k" || with.Hold != nil || h.Hold != one {
		t.Errorf("With inside a hold is %+v", with)
	}
	if other := asked(t, lockctx.With(ctx, "k")); other.LockContext == with.LockContext {
		t.Error("two calls of With inside a hold share a lock context")
	}
	k := lockctx.With(ctx, "k")
	both := asked(t, hint.Ask[lockctx.Option](k, []string{"held"}).Inside(k, two))
	if !slices.Equal(both.Holds, []any{one, two}) || !slices.Equal(both.Keys(), []string{"k"}) || both.Named != "" || both.Hold != two {
		t.Errorf("a hold inside is %+v", both)
	}
	if len(asked(t, ctx).Holds) != 1 {
		t.Error("Inside changed the hint around it")
	}
	if _, ok := hint.From(lockctx.Without(ctx)); ok {
		t.Error("Without stays inside")
	}
}

func TestLockContextTells(t *testing.T) {
	shared := asked(t, lockctx.With(context.Background(), "k")).LockContext
	if _, ok := shared.Told(hint.ToldToken, "k"); ok {
		t.Error("there is a token before a grant")
	}
	shared.Tell(hint.ToldToken, "k", 7)
	shared.Tell(hint.ToldSlot, "k", 0)
	if token, ok := shared.Told(hint.ToldToken, "k"); token != 7 || !ok {
		t.Errorf("the token is %d, %v", token, ok)
	}
	if slot, ok := shared.Told(hint.ToldSlot, "k"); slot != 0 || !ok {
		t.Errorf("the slot is %d, %v", slot, ok)
	}
	if _, ok := shared.Told(hint.ToldVersion, "k"); ok {
		t.Error("a token is taken for a version")
	}
	shared.Forget(hint.ToldToken, "k")
	if _, ok := shared.Told(hint.ToldToken, "k"); ok {
		t.Error("the token outlives its lease")
	}
}

func TestALockContextMakesEachStateOnce(t *testing.T) {
	shared := asked(t, lockctx.With(context.Background(), "k")).LockContext
	made := 0
	fresh := func() any { made++; n := made; return &n }
	one := shared.State("a", fresh)
	if shared.State("a", fresh) != one || made != 1 {
		t.Errorf("the state was made %d times", made)
	}
	if shared.State("b", fresh) == one {
		t.Error("two keys have one state")
	}
	if other := asked(t, lockctx.With(context.Background(), "k")).LockContext.State("a", fresh); other == one {
		t.Error("two lock contexts have one state")
	}
}

func TestALockContextMayBeUsedConcurrently(t *testing.T) {
	outer := lockctx.With(context.Background(), "outer")
	shared := asked(t, outer).LockContext
	states := make([]any, 32)
	var all sync.WaitGroup
	for i := range states {
		all.Go(func() {
			ctx := lockctx.WithKeys(outer, []string{fmt.Sprint(i), "shared"}, lockctx.Wait(time.Duration(i)))
			h, ok := hint.From(ctx)
			if !ok || h.LockContext != shared || h.Wait != time.Duration(i) || len(h.Keys()) != 3 {
				t.Errorf("the hint is %+v", h)
				return
			}
			states[i] = h.LockContext.State("a", func() any { n := i; return &n })
			h.LockContext.State(i, func() any { return i })
		})
	}
	all.Wait()
	for i, s := range states {
		if s == nil || s != states[0] {
			t.Errorf("goroutine %d has a state of its own", i)
		}
	}
}

func TestHintsNestedInALoopAreRefused(t *testing.T) {
	for what, n := range map[string]int{"as many as may be": lockctx.MaxNested, "one too many": lockctx.MaxNested + 1, "many": 1000} {
		ctx := lockctx.With(context.Background(), "k")
		for i := range n {
			ctx = lockctx.With(ctx, fmt.Sprint(i))
			ctx = lockctx.With(ctx, fmt.Sprint(i)) // joins
		}
		h := asked(t, ctx)
		if bad := n > lockctx.MaxNested; bad != (h.Err != nil) || bad && !strings.Contains(h.Err.Error(), "in a loop") {
			t.Errorf("%s: %v", what, h.Err)
		}
		if h.Err != nil && len(h.Err.Error()) > 400 {
			t.Errorf("%s: %q is long", what, h.Err)
		}
	}
	keys := make([]string, 5000)
	for i := range keys {
		keys[i] = fmt.Sprint("key ", i)
	}
	ctx := lockctx.With(lockctx.WithKeys(context.Background(), keys), "one more")
	if h := asked(t, ctx); h.Err != nil || len(h.Locks) != len(keys)+1 {
		t.Errorf("%d keys in one WithKeys: %d locks, %v", len(keys), len(h.Locks), h.Err)
	}
	each := context.Background()
	for i := range 1000 {
		if h := asked(t, lockctx.With(each, fmt.Sprint(i))); h.Err != nil || len(h.Locks) != 1 {
			t.Fatalf("a context of its own for each: %d locks, %v", len(h.Locks), h.Err)
		}
	}
}

func TestANilContextIsABadHint(t *testing.T) {
	var none context.Context
	for what, ctx := range map[string]context.Context{
		"With": lockctx.With(none, "k"), "WithKeys": lockctx.WithKeys(none, []string{"a", "b"}),
		"With inside": lockctx.With(lockctx.With(none, "k"), "l"),
	} {
		if h := asked(t, ctx); h.Err == nil || !strings.Contains(h.Err.Error(), "bad hint: the context is nil") {
			t.Errorf("%s: %v", what, h.Err)
		}
	}
	if _, ok := hint.From(lockctx.Without(none)); ok {
		t.Error("Without makes a hint")
	}
	if _, ok := hint.From(none); ok || lockctx.Has(none, "k") {
		t.Error("nil has a hint")
	}
}

func TestHasTellsTheKeysOfHintsAndHolds(t *testing.T) {
	base := context.Background()
	one := lockctx.With(base, "a")
	two := lockctx.WithKeys(one, []string{"b", "c"}, lockctx.Shared())
	hold := hint.Ask(one, []string{"h"}, lockctx.Lease(1e9))
	held := hold.Inside(one, "hold")
	for _, c := range []struct {
		what string
		ctx  context.Context
		has  string
	}{
		{"none", base, ""},
		{"one", one, "a"},
		{"two", two, "abc"},
		{"derived", context.WithoutCancel(two), "abc"},
		{"advisory", lockctx.With(base, "c", lockctx.Advisory()), "c"},
		{"optimistic", lockctx.With(base, "c", lockctx.Optimistic()), "c"},
		{"slots", lockctx.With(base, "c", lockctx.Slots(3)), "c"},
		{"without", lockctx.Without(two), ""},
		{"a hold", held, "ah"},
		{"in a hold", lockctx.With(held, "b"), "abh"},
		{"a bad hint", lockctx.With(one, ""), ""},
		{"a bad option", lockctx.With(base, "a", lockctx.Wait(-1)), ""},
	} {
		for _, key := range []string{"a", "b", "c", "h", "A", ""} {
			want := key != "" && strings.Contains(c.has, key)
			if got := lockctx.Has(c.ctx, key); got != want {
				t.Errorf("%s: Has(%q) = %v", c.what, key, got)
			}
		}
	}
}
