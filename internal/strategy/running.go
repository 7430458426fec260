package strategy

import (
	"context"
	"sync"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Running are the calls of a strategy, and their work in the background, until the strategy is
// closed. Whoever is within a call, from Enter to Done, may have Go do something that Close waits
// for.
type Running struct {
	sync.WaitGroup
	Ctx  context.Context // ends, because of ErrClosed, when the strategy is closed
	stop context.CancelCauseFunc
	mu   sync.Mutex // nobody enters while Ctx ends
}

// NewRunning returns a Running that goes on.
func NewRunning() *Running {
	r := new(Running)
	r.Ctx, r.stop = context.WithCancelCause(context.Background())
	return r
}

// Enter begins a call, unless the strategy is closed. Done ends it.
func (r *Running) Enter() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Ctx.Err() != nil {
		return lockerr.ErrClosed
	}
	r.Add(1)
	return nil
}

// Background runs f, unless the strategy is closed.
func (r *Running) Background(f func(context.Context)) {
	if r.Enter() == nil {
		go func() {
			defer r.Done()
			f(r.Ctx)
		}()
	}
}

// Stop ends Ctx, and lets nobody enter any more. It reports whether it was the first to do so.
// Wait returns when all has ended.
func (r *Running) Stop() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.Ctx.Err() == nil
	r.stop(lockerr.ErrClosed)
	return first
}

// Until returns a context that also ends, because of ErrClosed, when the strategy is closed.
func (r *Running) Until(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.Ctx, func() { end(lockerr.ErrClosed) })
	return ctx, func(cause error) {
		stop()
		end(cause)
	}
}
