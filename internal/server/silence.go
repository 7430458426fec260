package server

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Silence is the error of a statement that the server has not answered within For, a limit of the
// driver's own.
type Silence struct{ For time.Duration }

func (s Silence) Error() string {
	return fmt.Sprintf("the server has not answered for %v", s.For.Round(time.Millisecond))
}

// Within returns a context for statements of the driver's own, which ends after limit. The limit is
// not the caller's, who must not get context.DeadlineExceeded for it: the cause is a [Silence], and
// so is the error of what this package and package pool send.
func Within(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, limit, Silence{limit})
}

// Unanswered returns the error of a statement with ctx: the Silence that has ended ctx in place of
// err, unless err is the server's answer.
func Unanswered(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil || Number(err) != 0 {
		return err
	}
	if cause := context.Cause(ctx); errors.As(cause, new(Silence)) {
		return cause
	}
	return err
}

// EndOf returns why ctx has ended: a Silence, or ctx.Err().
func EndOf(ctx context.Context) error { return Unanswered(ctx, ctx.Err()) }
