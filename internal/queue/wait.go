package queue

import (
	"context"
	"time"
)

// Once makes one wait of all waits of a request: waiting is called at the first of them,
// and its done by end. So the caller is not refused between two waits, and an observer
// sees one wait. waiting may be nil.
func Once(waiting func(context.Context) (ctx context.Context, done func(), err error)) (once func(context.Context) (ctx context.Context, done func(), err error), end func()) {
	if waiting == nil {
		return nil, func() {}
	}
	var all context.Context
	leave := func() {}
	once = func(ctx context.Context) (context.Context, func(), error) {
		if all == nil {
			first, done, err := waiting(ctx)
			if err != nil {
				return nil, nil, err
			}
			all, leave = first, done
		}
		return all, func() {}, context.Cause(all)
	}
	return once, func() { leave() }
}

// Wait begins a wait that ends after left, with the cause over. If waiting is not nil, it
// is called first: it may refuse the wait, or end it later through the context that it
// returns. Call done when the wait is over.
func Wait(ctx context.Context, left time.Duration, over error, waiting func(context.Context) (ctx context.Context, done func(), err error)) (timed context.Context, done func(), err error) {
	ctx, leave, err := Begin(ctx, left, over, waiting)
	if err != nil {
		return nil, nil, err
	}
	timed, cancel := context.WithTimeoutCause(ctx, left, over)
	return timed, func() { cancel(); leave() }, nil
}

// Begin is Wait for a caller that ends the wait after left by other means.
func Begin(ctx context.Context, left time.Duration, over error, waiting func(context.Context) (ctx context.Context, done func(), err error)) (_ context.Context, done func(), err error) {
	switch {
	case left <= 0:
		return nil, nil, over
	case waiting == nil:
		return ctx, func() {}, nil
	}
	return waiting(ctx)
}
