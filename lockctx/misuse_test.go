package lockctx_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestNested(t *testing.T) {
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

func TestNilContext(t *testing.T) {
	var none context.Context
	for what, ctx := range map[string]context.Context{
		"With": lockctx.With(none, "k"), "WithKeys": lockctx.WithKeys(none, []string{"a", "b"}),
		"Claim": lockctx.Claim(none, lockctx.ForUpdate()), "With inside": lockctx.With(lockctx.With(none, "k"), "l"),
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

func TestHas(t *testing.T) {
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
		{"a claim", lockctx.Claim(base, lockctx.ForUpdate()), ""},
		{"a claim in a lock context", lockctx.Claim(one, lockctx.ForUpdate()), "a"},
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
