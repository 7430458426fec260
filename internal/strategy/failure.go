package strategy

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// ErrWaitOver is the cause with which a wait ends that has lasted as long as the caller
// was ready to wait.
var ErrWaitOver = queue.ErrOver

// ErrSilent is of a caller that does not wait any longer for the server to say anything.
var ErrSilent = errors.New("the server has not answered")

// ErrNoAnswer is what a limit of the driver's own for the server's answer ends with.
var ErrNoAnswer = lockerr.With(lockerr.ErrExhausted, ErrSilent)

// Silent is the error of a caller whose context has ended before the server has answered.
func Silent(ctx context.Context) error { return fmt.Errorf("%w: %w", ErrSilent, ctx.Err()) }

// Terms are what the errors of a strategy say.
type Terms struct {
	Strategy string
	Grants   string // the privileges that the account needs
	Writes   string // what follows if the server takes no writes
	Limits
}

// Failure is the error that callers see. It never matches driver.ErrBadConn.
func (t Terms) Failure(op, key string, err error) *lockerr.Error {
	return &lockerr.Error{Op: op, Key: key, Strategy: t.Strategy, Err: server.HideBadConn(err)}
}

// Heard is whether a caller that asks for a lock has been told that somebody has the key: by the
// server, or by the queue, in which others of its process are in front. What else the server has
// answered, also that it has granted the lock when it was too late, does not say that.
type Heard struct{ atomic.Bool }

// From notes that a lock statement has failed with err because somebody has the key, or was ended
// while it waited.
func (h *Heard) From(err error) {
	if server.Locked(err) || server.Deadlock(err) || server.Interrupted(err) {
		h.Store(true)
	}
}

// Explain is the Failure of a caller that has not got what it has asked for; if Broke,
// driver.ErrBadConn, with which it may try another connection. ctx is the caller's. ask asks the
// server who has it, if nobody has told; nil is not to ask.
func (a *Attempt) Explain(ctx context.Context, t Terms, err error, ask func(context.Context) *lockerr.Holder) error {
	if a.Broke {
		return driver.ErrBadConn
	}
	if a.HeldBy != nil {
		a.Heard.Store(true)
	}
	failed := t.Failure("lock", a.Key, a.reason(ctx, t, err))
	failed.Waited = time.Since(a.Began())
	if a.HeldBy == nil && ask != nil && Ungranted(failed.Err) {
		limit := askTime
		if ctx.Err() != nil {
			limit = t.GiveUp
		}
		own, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
		a.HeldBy = ask(own)
	}
	if !errors.Is(err, lockerr.ErrExhausted) {
		failed.Holder = a.HeldBy
	}
	return failed
}

// askTime is how long a caller that goes on waits for the server to say who has the lock.
const askTime = 100 * time.Millisecond

// Unreached is err of a caller that has not asked for the lock yet, or whose connection has gone without
// it.
func Unreached(err error) error {
	switch {
	case errors.Is(err, lockerr.ErrExhausted):
		return err
	case server.Full(err):
	case server.Gone(err, nil):
		err = fmt.Errorf("the server went away, or the connection broke, and the lock is not held: %w", err)
	case server.Interrupted(err):
		err = fmt.Errorf("the server ended a statement that comes before the lock, by its own limit or a KILL: %w", err)
	default:
		return err
	}
	return lockerr.With(lockerr.ErrExhausted, err)
}

// reason is what a failed attempt that has ended with err is told.
func (a *Attempt) reason(ctx context.Context, t Terms, err error) error {
	silent := !a.Heard.Load() && server.Number(err) == 0
	switch {
	case silent && ctx.Err() == nil && errors.Is(err, ErrWaitOver):
		err = ErrNoAnswer
	case !silent && errors.Is(err, ErrWaitOver) && a.cleaning:
		err = lockerr.ErrLocked
	case !silent && errors.Is(err, ErrWaitOver):
		err = lockerr.ErrTimeout
	case errors.Is(err, lockerr.ErrExhausted), server.Full(err):
		err = Unreached(err)
		if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
			err = fmt.Errorf("%w: %w", err, ended)
		}
	case ctx.Err() != nil && silent:
		err = Silent(ctx)
	case ctx.Err() != nil:
		err = lockerr.With(lockerr.ErrTimeout, ctx.Err())
	case server.Gone(err, nil) && !errors.Is(err, lockerr.ErrLost):
		err = Unreached(err)
	case errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, lockerr.ErrTimeout) && !errors.Is(err, lockerr.ErrLost):
		// A limit of ours, for the server's answer: nobody need have the key. The caller's
		// context goes on, and the error must not say else.
		err = ErrNoAnswer
	default:
		err = t.Refusal(server.Explain(err))
	}
	return err
}

// Refusal adds what to do to the error of a server that refuses statements of the strategy
// altogether. It returns other errors as they are.
func (t Terms) Refusal(err error) error {
	switch {
	case t.Writes != "" && server.Refused(err):
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("the server takes no writes, so %s: %w", t.Writes, err))
	case t.Grants != "" && server.Denied(err):
		return fmt.Errorf("%w; the account needs %s", err, t.Grants)
	case server.Shared(err):
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("MySQL Router shares this connection with other clients; set connection_sharing=0, or connect to a port of it that does not share: %w", err))
	}
	return err
}

// Ungranted reports that another caller has what was asked for.
func Ungranted(err error) bool {
	return errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout)
}

// Sleep waits for d, and reports whether ctx goes on.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
