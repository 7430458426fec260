// Package purpose tells, through the context of a statement, that the driver has added the
// statement, and for which purpose. Package intercept shows it to interceptors.
//
// As long as nobody listens, a context is returned as it is, and nothing is allocated.
package purpose

import (
	"context"
	"sync/atomic"
)

// Purpose is what a statement of the driver's own is for.
type Purpose string

// The purposes: see package intercept.
const (
	Take    Purpose = "take"
	Fence   Purpose = "fence"
	End     Purpose = "end"
	Release Purpose = "release"
	Renew   Purpose = "renew"
	Kill    Purpose = "kill"
	Other   Purpose = "other"
)

// Of says what a statement of the driver's own is for.
type Of struct {
	Purpose  Purpose
	Strategy string   // "" if it is for no strategy
	Keys     []string // the rows, or names, that keep the keys; empty if it is for none
	Asked    Asked    // of the locks that it is for
}

// Asked are the contexts of locks, as an observer has returned them when the locks were
// asked for. There are none if no observer returns contexts.
type Asked []context.Context

// In has the marks that are made within ctx say for which locks they are.
func (a Asked) In(ctx context.Context) context.Context {
	if len(a) == 0 || !listening.Load() {
		return ctx
	}
	return context.WithValue(ctx, askedKey{}, a)
}

// AskedIn returns what [Asked.In] put into a context.
func AskedIn(ctx context.Context) Asked {
	if !listening.Load() {
		return nil
	}
	a, _ := ctx.Value(askedKey{}).(Asked)
	return a
}

// AskedBy is [Asked.In] for what each of keys was asked for with.
func AskedBy[K any](ctx context.Context, keys []K, asked func(K) Asked) context.Context {
	if !listening.Load() {
		return ctx
	}
	var all Asked
	for _, k := range keys {
		all = append(all, asked(k)...)
	}
	return all.In(ctx)
}

type (
	key      struct{}
	askedKey struct{}
	holdKey  struct{}
)

// listening is for the whole process: a strategy does not know its handle, and a context
// that nobody looks at costs one allocation.
var listening atomic.Bool

// Listen has statements marked from now on.
func Listen() { listening.Store(true) }

// Listening reports whether somebody looks at each statement by itself.
func Listening() bool { return listening.Load() }

// With marks the statements that are sent with the context. name says what an element of
// keys is called.
func With[K any](ctx context.Context, s Purpose, strategy string, keys []K, name func(K) string) context.Context {
	if !listening.Load() {
		return ctx
	}
	of := &Of{Purpose: s, Strategy: strategy, Keys: make([]string, len(keys)), Asked: AskedIn(ctx)}
	for i, k := range keys {
		of.Keys[i] = name(k)
	}
	return context.WithValue(ctx, key{}, of)
}

// Named is [With] for the names of keys.
func Named(ctx context.Context, s Purpose, strategy string, names ...string) context.Context {
	return With(ctx, s, strategy, names, func(name string) string { return name })
}

// For marks a statement with another purpose, for the keys that the context is for.
func For(ctx context.Context, s Purpose) context.Context {
	was, _ := From(ctx)
	return After(ctx, was, s)
}

// After is [For] for a statement that comes later: was is what the context of an earlier one
// was marked with, or nil.
func After(ctx context.Context, was *Of, s Purpose) context.Context {
	if !listening.Load() {
		return ctx
	}
	of := Of{Purpose: s, Asked: AskedIn(ctx)}
	if was != nil {
		of.Strategy, of.Keys, of.Asked = was.Strategy, was.Keys, was.Asked
	}
	return context.WithValue(ctx, key{}, &of)
}

// Ours marks a statement of the driver's own that is not marked yet.
func Ours(ctx context.Context) context.Context {
	if !listening.Load() {
		return ctx
	}
	if _, marked := From(ctx); marked {
		return ctx
	}
	return context.WithValue(ctx, key{}, &Of{Purpose: Other})
}

// Unattributed marks the statements of what the context's caller waits for, but others use, too.
func Unattributed(ctx context.Context) context.Context {
	if !listening.Load() {
		return ctx
	}
	return context.WithValue(ctx, key{}, &Of{Purpose: Other})
}

// OfHold says that the transaction which is begun with the context is that of a hold: the application has
// not begun it.
func OfHold(ctx context.Context) context.Context {
	if !listening.Load() {
		return ctx
	}
	return context.WithValue(ctx, holdKey{}, true)
}

// IsOfHold reports whether OfHold was called for the context.
func IsOfHold(ctx context.Context) bool { return listening.Load() && ctx.Value(holdKey{}) != nil }

// From returns the mark of a context. ok is false for a statement of the application.
func From(ctx context.Context) (of *Of, ok bool) {
	if !listening.Load() {
		return nil, false
	}
	of, ok = ctx.Value(key{}).(*Of)
	return of, ok
}
