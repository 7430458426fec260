package purpose

import (
	"context"
	"slices"
	"testing"
)

// TestNothingIsMarkedUntilSomebodyListens, and nothing allocated. There is one test, since
// nobody ever stops listening.
func TestNothingIsMarkedUntilSomebodyListens(t *testing.T) {
	ctx := t.Context()
	keys := []string{"b", "a"}
	asked := Asked{ctx}
	mark := func() {
		c := Named(ctx, Take, "row", keys[0], keys[1])
		c = With(c, Fence, "lease", keys, func(key string) string { return key })
		c = AskedBy(asked.In(c), keys, func(string) Asked { return asked })
		if c = Ours(Unattributed(For(c, Kill))); c != ctx {
			t.Error("the context has been marked")
		}
	}
	if n := testing.AllocsPerRun(100, mark); n != 0 {
		t.Errorf("%v allocations although nobody listens", n)
	}

	Listen()
	for _, c := range []struct {
		ctx  context.Context
		want Of
	}{
		{Named(ctx, Take, "row", "b", "a"), Of{Purpose: Take, Strategy: "row", Keys: keys}},
		{With(ctx, Fence, "lease", keys, func(key string) string { return key + "!" }), Of{Purpose: Fence, Strategy: "lease", Keys: []string{"b!", "a!"}}},
		{For(Named(ctx, Take, "row", keys...), Kill), Of{Purpose: Kill, Strategy: "row", Keys: keys}},
		{For(ctx, End), Of{Purpose: End}},
		{Ours(ctx), Of{Purpose: Other}},
		{Ours(Named(ctx, Take, "row", keys...)), Of{Purpose: Take, Strategy: "row", Keys: keys}},
		{Unattributed(Named(ctx, Take, "row", keys...)), Of{Purpose: Other}},
	} {
		got, ok := From(c.ctx)
		if !ok || got.Purpose != c.want.Purpose || got.Strategy != c.want.Strategy || !slices.Equal(got.Keys, c.want.Keys) {
			t.Errorf("marked as %+v, want %+v", got, c.want)
		}
	}
	later, _ := From(Named(asked.In(ctx), Take, "row", "a"))
	for name, c := range map[string]context.Context{
		"of the lock": asked.In(ctx), "of its statements": Named(asked.In(ctx), Take, "row", "a"),
		"of the next step": For(Named(asked.In(ctx), Take, "row", "a"), Kill), "of a later one": After(context.Background(), later, End),
		"of several locks": AskedBy(context.Background(), keys[:1], func(string) Asked { return asked }),
	} {
		if of, _ := From(For(c, Release)); !slices.Equal(of.Asked, asked) {
			t.Errorf("the context %s is for %v", name, of.Asked)
		}
	}
	if of, ok := From(ctx); ok {
		t.Errorf("a context of the application is marked as %+v", of)
	}
}
