package strategy

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// Killable is a statement that the server is told to end if its caller leaves: on Conn, with Mark in its text.
type Killable struct {
	Limits
	Conn    *pool.Conn
	Mark    string
	Control *pool.Pool            // from which it is killed; nil where nothing can be
	Freed   <-chan struct{}       // ends the wait, too
	Stops   func(context.Context) // is called before it is killed for the end of its context; nil for nothing

	// Ends is within how long the server ends it by itself, for which a caller whose wait is over waits if
	// nothing can be killed; 0 is not.
	Ends time.Duration
}

// Run runs do, which is the statement, apart from ctx: at the end of a context the driver closes
// the socket, which would leave the waiter on the server. If ctx ends before the answer, Run kills
// the statement until it is answered, within the limit: stopped is true then. If that does not
// help, or is not sure, it closes the connection, and usable is false.
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
		kctx, cancel = server.Within(context.WithoutCancel(ctx), k.of(ctx))
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

// letEnd is for what cannot be killed. If the connection is closed, what is granted after that is
// given back at once.
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

// kill kills the statement. It does not wait long, so that a control connection that hangs does
// not keep the caller from its answer.
func (k Killable) kill(ctx context.Context) (late bool) {
	ctx, cancel := server.Within(ctx, killTime)
	defer cancel()
	return k.Control.KillQuery(ctx, k.Mark)
}

// killTime is how long a KILL may take.
const killTime = 500 * time.Millisecond
