package hint_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock/internal/hint"
)

type option = func(*hint.Hint)

func shared(h *hint.Hint)           { h.Shared = true }
func slots(n int) option            { return func(h *hint.Hint) { h.Slots, h.HasSlots = n, true } }
func keptBy(strategy string) option { return func(h *hint.Hint) { h.KeepBy(strategy) } }
func with(ctx context.Context, keys []string, opts ...option) (context.Context, *hint.Hint) {
	h := hint.Ask(ctx, keys, opts...)
	return h.With(ctx), h
}

// TestInnerJoinsOuter: With inside With adds keys to the same lock context, and one that
// is there already stays one, as strict as either asks for.
func TestInnerJoinsOuter(t *testing.T) {
	ctx, outer := with(context.Background(), []string{"b"}, shared)
	_, inner := with(ctx, []string{"c", "b", "a"})
	if inner.LockContext != outer.LockContext || outer.LockContext == nil {
		t.Error("the inner With has begun a lock context of its own")
	}
	if got := inner.Keys(); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("keys %v", got)
	}
	if inner.Locks[1].Shared {
		t.Error("a key that is also asked for exclusively is shared")
	}
	if !slices.Equal(outer.Keys(), []string{"b"}) {
		t.Errorf("the outer With asks for %v now", outer.Keys())
	}
	_, few := with(context.Background(), []string{"k"}, slots(5))
	_, fewer := with(few.With(context.Background()), []string{"k"}, slots(2))
	if len(fewer.Locks) != 1 || fewer.Locks[0].Slots != 2 {
		t.Errorf("5 slots, then 2: %+v", fewer.Locks)
	}
	_, both := with(few.With(context.Background()), []string{"k"})
	if len(both.Locks) != 2 || len(both.Keys()) != 1 {
		t.Errorf("slots and the key itself are two locks: %+v", both.Locks)
	}
	row, _ := with(context.Background(), []string{"k"}, keptBy(hint.StrategyRow))
	if _, h := with(row, []string{"k"}, keptBy("one that is added")); len(h.Locks) != 2 {
		t.Errorf("a strategy of which nothing is known is taken for a row lock: %+v", h.Locks)
	}
}

func TestAContextTakenOutOfItsLockContextBeginsAnother(t *testing.T) {
	ctx, outer := with(context.Background(), []string{"k"})
	if _, ok := hint.From(hint.Without(ctx)); ok {
		t.Error("there is a hint after Without")
	}
	if _, h := with(hint.Without(ctx), []string{"k"}); h.LockContext == outer.LockContext {
		t.Error("the lock context outlives Without")
	}
}

func TestInAHoldItsKeysAreKnownButNoHint(t *testing.T) {
	asked := hint.Ask[option](context.Background(), []string{"held"})
	ctx := asked.Inside(context.Background(), "the hold")
	_, h := with(ctx, []string{"k"})
	if !slices.Equal(h.Holds, []any{"the hold"}) || !slices.Equal(h.Keys(), []string{"k"}) {
		t.Errorf("holds %v, keys %v", h.Holds, h.Keys())
	}
	if !h.Has("held") || !h.Has("k") || h.Has("other") {
		t.Error("Has does not tell what is held or asked for")
	}
}

// TestABadHintSaysWhatIsWrong, and an inner With keeps the error of the outer.
func TestABadHintSaysWhatIsWrong(t *testing.T) {
	key := []string{"k"}
	for says, h := range map[string]*hint.Hint{
		"no key":                          hint.Ask[option](context.Background(), nil),
		"empty key":                       hint.Ask[option](context.Background(), []string{""}),
		"longer than 255":                 hint.Ask[option](context.Background(), []string{strings.Repeat("k", 256)}),
		"the context is nil":              hint.Ask[option](nil, key), //nolint:staticcheck // that is what it is about
		"both row and lease":              hint.Ask(context.Background(), key, keptBy("row"), keptBy("lease")),
		"Shared and Slots":                hint.Ask(context.Background(), key, shared, slots(2)),
		"Shared needs a row lock":         hint.Ask(context.Background(), key, shared, keptBy("lease")),
		"Slots needs a row lock or":       hint.Ask(context.Background(), key, slots(2), keptBy("advisory")),
		"1001 slots, want 1 to 1000":      hint.Ask(context.Background(), key, slots(1001)),
		"0 slots, want 1 to 1000":         hint.Ask(context.Background(), key, slots(0)),
		"IfVersion is for one key, and h": hint.Ask(context.Background(), []string{"a", "b"}, func(h *hint.Hint) { h.Version, h.HasVersion = 1, true }),
	} {
		if h.Err == nil || !strings.Contains(h.Err.Error(), says) {
			t.Errorf("%v, want %q", h.Err, says)
			continue
		}
		if _, inner := with(h.With(context.Background()), key); inner.Err == nil {
			t.Errorf("%q is forgotten by an inner With", says)
		}
	}
	ctx, h := context.Background(), (*hint.Hint)(nil)
	for i := range hint.MaxNested + 2 {
		ctx, h = with(ctx, []string{fmt.Sprint("key", i)})
		if early := i <= hint.MaxNested; early != (h.Err == nil) {
			t.Fatalf("With inside With for the %dth time: %v", i, h.Err)
		}
	}
}

// TestLockContextRemembers: State makes once what it is asked for, and Told tells what was told.
func TestLockContextRemembers(t *testing.T) {
	_, h := with(context.Background(), []string{"k"})
	made := 0
	for range 2 {
		dbtest.Equal(t, "%v", h.LockContext.State("handle", func() any { made++; return made }), 1)
	}
	h.LockContext.Tell(hint.ToldToken, "k", 7)
	if n, ok := h.LockContext.Told(hint.ToldToken, "k"); n != 7 || !ok {
		t.Errorf("%d, %v", n, ok)
	}
	if _, ok := h.LockContext.Told(hint.ToldVersion, "k"); ok {
		t.Error("a token was told, not a version")
	}
	h.LockContext.Forget(hint.ToldToken, "k")
	if _, ok := h.LockContext.Told(hint.ToldToken, "k"); ok {
		t.Error("told what was forgotten")
	}
}
