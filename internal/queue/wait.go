package queue

import (
	"context"
	"time"
)

// Wait begins a wait that ends after left, with the cause over. waiting is called
// first, where there is one: it may refuse, and it may end the wait through the
// context that it returns. done is for when the caller waits no more.
func Wait(ctx context.Context, left time.Duration, over error, waiting func(context.Context) (ctx context.Context, done func(), err error)) (timed context.Context, done func(), err error) {
	ctx, leave, err := Begin(ctx, left, over, waiting)
	if err != nil {
		return nil, nil, err
	}
	timed, cancel := context.WithTimeoutCause(ctx, left, over)
	return timed, func() { cancel(); leave() }, nil
}

// Begin is Wait for a caller who sees to it otherwise that the wait ends after left.
func Begin(ctx context.Context, left time.Duration, over error, waiting func(context.Context) (ctx context.Context, done func(), err error)) (_ context.Context, done func(), err error) {
	switch {
	case left <= 0:
		return nil, nil, over
	case waiting == nil:
		return ctx, func() {}, nil
	}
	return waiting(ctx)
}
