package strategy

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
)

// Killable is a statement that the server is told to end if its caller leaves. It runs on Conn, and has Mark in its
// text.
type Killable struct {
	Limits
	Conn    *pool.Conn
	Mark    string
	Control *pool.Pool            // has the connection for KILL; nil if nothing can be killed
	Freed   <-chan struct{}       // ends the wait, too
	Stops   func(context.Context) // called before the statement is killed because its context has ended; nil for nothing

	// Ends is for servers on which nothing can be killed: within this time the server ends the statement by
	// itself, and a caller whose wait is over waits for that. 0 is not to wait.
	Ends time.Duration
}

// Run runs do, which sends the statement, apart from ctx: at the end of a context the driver closes the socket, and
// the statement would go on to wait on the server. If ctx ends before the answer, Run kills the statement, again
// and again until it is answered or the limit is over; stopped is true then. If the KILL does not help in time, or
// might hit a later statement, Run closes the connection; usable is false then.
func (k Killable) Run(ctx context.Context, do func(context.Context) error) (stopped, usable bool, err error) {
	own, abandon := context.WithCancel(context.WithoutCancel(ctx))
	defer abandon()
	answer := make(chan error, 1)
	go func() { answer <- do(own) }()
	select {
	case err := <-answer:
		return false, true, err
	case <-k.Freed:
	case <-ctx.Done():
	}
	if k.Control == nil {
		return k.letEnd(ctx, answer, abandon)
	}
	kctx := ctx // a caller that goes on has time
	if ctx.Err() != nil {
		var cancel context.CancelFunc
		kctx, cancel = server.Within(context.WithoutCancel(ctx), k.after(ctx))
		defer cancel()
		if k.Stops != nil {
			k.Stops(kctx)
		}
	}
	for late := false; ; {
		late = k.kill(kctx) || late
		again := time.NewTimer(k.GiveUp / 5)
		select {
		case err := <-answer:
			again.Stop()
			if late { // the KILL could hit the next statement
				_ = k.Conn.Close()
			}
			return true, !late, err
		case <-kctx.Done():
			again.Stop()
			abandon()
			err := <-answer
			_ = k.Conn.Close() // the statement may have been granted the lock
			return true, false, err
		case <-again.C: // the statement may have reached the server only after the KILL
		}
	}
}

// letEnd stops a statement that cannot be killed. It closes the connection, so that the server gives back at once a
// lock that it grants after that.
func (k Killable) letEnd(ctx context.Context, answer <-chan error, abandon func()) (stopped, usable bool, err error) {
	if k.Ends > 0 && errors.Is(context.Cause(ctx), ErrWaitOver) {
		select {
		case err := <-answer:
			return true, true, err
		case <-time.After(k.Ends):
		}
	}
	abandon()
	err = <-answer
	_ = k.Conn.Close()
	return true, false, err
}

// kill kills the statement. It does not wait for long: a control connection that hangs must not keep the caller
// from its answer.
func (k Killable) kill(ctx context.Context) (late bool) {
	ctx, cancel := server.Within(ctx, killTime)
	defer cancel()
	return k.Control.KillQuery(ctx, k.Mark)
}

// killTime is how long a KILL may take.
const killTime = 500 * time.Millisecond
