package mysqllock

import (
	"context"
	"slices"
)

// Tracer is an [Observer] that is also told when something begins, for traces: so what it
// has begun can be the parent of all that is sent to the server for a lock. Like Observe, its
// methods are called within the calls of the application, by several goroutines at a time.
type Tracer interface {
	Observer

	// Asking is called when a lock is asked for, before anything is sent for it. e has Keys,
	// Strategy, Shared and Start. The context that it returns is ctx, or ctx with more values.
	// The lock is taken with that context, and all further calls for this lock get it. An
	// interceptor finds it in the Contexts of intercept.Lock for all statements that the
	// driver adds for the lock; the statements of the application have their own contexts.
	//
	// After it there is one event Acquired, Refused or, only if it has returned another
	// context than ctx, Retried.
	Asking(ctx context.Context, e Event) context.Context

	// Releasing is called when giving back begins, before anything is sent for it. e is as
	// for Asking, but Start is now, and Held is the time since the grant. It is called at
	// most once for a lock, and not if Asking has returned ctx. A lock that is lost, or whose
	// handle is closed, may have its last event without it.
	Releasing(ctx context.Context, e Event)
}

// Observers is an Observer that tells several others, one after the other.
type Observers []Observer

// Observe implements [Observer].
func (o Observers) Observe(ctx context.Context, e Event) {
	for _, each := range o {
		if e.Kind == Retried && !traces(each) {
			continue
		}
		each.Observe(ctx, e)
	}
}

// Asking implements [Tracer].
func (o Observers) Asking(ctx context.Context, e Event) context.Context {
	for _, each := range o {
		if t, ok := each.(Tracer); ok {
			ctx = t.Asking(ctx, e)
		}
	}
	return ctx
}

// Releasing implements [Tracer].
func (o Observers) Releasing(ctx context.Context, e Event) {
	for _, each := range o {
		if t, ok := each.(Tracer); ok {
			t.Releasing(ctx, e)
		}
	}
}

// traces reports whether o wants to know what begins.
func traces(o Observer) bool {
	if all, ok := o.(Observers); ok {
		return slices.ContainsFunc(all, traces)
	}
	_, ok := o.(Tracer)
	return ok
}
