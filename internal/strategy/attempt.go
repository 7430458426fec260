package strategy

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Attempt is one call that asks for a lock: how long it may wait, its place in the queue of this process, and
// what its caller is told.
type Attempt struct {
	Key       string // as errors name it
	Wait      time.Duration
	Waiting   Waiting      // called before each wait; nil for none
	Short     func() error // returns which bound leaves the caller no connection to ask on; Short, or its result, may be nil for none
	Start     time.Time
	Since     time.Time // when the caller began to wait, as others and its error see it; before Start if this call is not the first
	Heard     Heard
	Ticket    *queue.Ticket   // nil before there is one, and once another caller owns it
	GoesAhead func() bool     // says whether Enqueue is over when the caller is the next of its process: see [queue.Ends]
	First     bool            // nobody of this process was in the queue before it
	HeldBy    *lockerr.Holder // who is known to have the lock

	// Once has Waiting called for the first wait alone, which counts as going on until Finish. So the caller is not
	// refused between two waits, and an observer sees one wait.
	Once bool

	vanished  time.Time       // when Vanished was true first
	cleaning  bool            // the caller did not want to wait, and waits for the end of a clean-up
	awaited   Leased          // what AwaitLease waited for last
	awaitedAt time.Time       // when AwaitLease began to wait for awaited
	endTurn   func()          // ends the turn that AwaitLease gave; nil without one
	waits     context.Context // of the one wait, once it has begun
	end       func()          // ends the one wait; nil without one
}

// Finish ends the turn that AwaitLease gave, and the one wait. The caller keeps its place in the queue.
func (a *Attempt) Finish() {
	a.EndTurn()
	if a.end != nil {
		a.end()
	}
}

// Vanished reports whether a statement has failed with err since a row is missing that was there, so that the
// caller must make its rows again. Clean-ups without a pause may remove an unused row again and again: the
// caller tries again for as long as it waits, and at least for cleaningWait.
func (a *Attempt) Vanished(err error) bool {
	if !errors.Is(err, keyrow.ErrNoRow) && !server.Missing(err) {
		return false
	}
	if a.vanished.IsZero() {
		a.vanished = time.Now()
	}
	return a.Left() > 0 || time.Since(a.vanished) < cleaningWait
}

// Cleaning is for a caller that would not wait, and has found a row locked. It reports whether a clean-up is
// running, which locks unused rows for moments. If so, the caller does wait, for the end of the clean-up.
func (a *Attempt) Cleaning(ctx context.Context, rows *keyrow.Rows) bool {
	if a.cleaning = rows.Cleaning(ctx); a.cleaning {
		a.Wait = time.Since(a.Start) + cleaningWait
	}
	return a.cleaning
}

// cleaningWait is how long a caller that would not wait does wait while a clean-up is running, and for how long
// it makes rows again that vanish.
const cleaningWait = 2 * time.Second

// Began returns when the caller began to wait.
func (a *Attempt) Began() time.Time {
	if a.Since.IsZero() {
		return a.Start
	}
	return a.Since
}

// Left returns the rest of the wait.
func (a *Attempt) Left() time.Duration { return a.Wait - time.Since(a.Start) }

// begin begins a wait, which lasts until done. The caller sees to it by itself that the wait ends after Left.
func (a *Attempt) begin(ctx context.Context) (_ context.Context, done func(), err error) {
	if a.Heard.Load() {
		a.Ticket.Told()
	}
	switch {
	case a.Left() <= 0:
		return nil, nil, ErrWaitOver
	case a.Waiting == nil:
		return ctx, func() {}, nil
	case !a.Once:
		return a.Waiting(ctx)
	case a.waits == nil:
		if a.waits, a.end, err = a.Waiting(ctx); err != nil {
			return nil, nil, err
		}
	}
	return a.waits, func() {}, context.Cause(a.waits)
}

// Patient begins a wait, which lasts until done. The context that it returns ends when the wait is over.
func (a *Attempt) Patient(ctx context.Context) (_ context.Context, done func(), err error) {
	if a.Wait == 0 {
		return nil, nil, lockerr.ErrLocked
	}
	ctx, leave, err := a.begin(ctx)
	if err != nil {
		return nil, nil, err
	}
	timed, cancel := context.WithTimeoutCause(ctx, a.Left(), ErrWaitOver)
	return timed, func() { cancel(); leave() }, nil
}

// Enqueue waits until the caller is in front of the queues of keys, or until closed is closed. giver identifies the
// holders that may hand their lock over to the caller: see [queue.Ticket.HandedOver]; nil if none may.
func (a *Attempt) Enqueue(ctx context.Context, q *queue.Queue, keys []queue.Key, giver any, closed <-chan struct{}) (err error) {
	ticket, holder, front := q.TryEnter(keys, a.Wait == 0)
	switch {
	case front:
		a.Ticket, a.First = ticket, true
		return nil
	case a.Wait == 0:
		a.HeldBy = holder
		return lockerr.ErrLocked
	}
	var inFront queue.InFront
	done := func() {}
	if a.Left() > 0 { // else Enter only finds out whether the callers in front know who has the key
		ctx, done, err = a.begin(ctx)
	}
	if err == nil {
		defer done()
		a.Ticket, err = q.Enter(ctx, keys, giver, queue.Ends{At: a.Start.Add(a.Wait), Closed: closed, InFront: &inFront, GoesAhead: a.GoesAhead})
	}
	if inFront.Taken || err == nil && a.Ticket.HandedOver() != nil {
		a.Heard.Store(true)
	}
	if err == nil {
		return nil
	}
	if a.HeldBy == nil {
		a.HeldBy, _ = q.HolderOf(keys...)
	}
	if !inFront.Asks && a.HeldBy == nil && !a.Heard.Load() && a.Short != nil {
		if short := a.Short(); short != nil {
			return fmt.Errorf("%w; callers of this process wait in front of this one: %w", short, err)
		}
	}
	return err
}

// Leased is a lease on a key's row. It is the error of a lock statement that has found a lease.
type Leased struct {
	Key       string
	Token     string
	Owner     string
	Remaining time.Duration // how long the lease lasts; 0 if nobody knows
}

func (l *Leased) Error() string { return "the key has a lease" }

// Pace is how long a caller that nobody wakes waits before it looks again. pollPace is that of a poller, which is a
// caller for which there is no connection to wait on: nobody leaves the lock to a poller.
const Pace, pollPace = 250 * time.Millisecond, 100 * time.Millisecond

// RetryPause is the pause before a release that has failed is tried again.
const RetryPause = 250 * time.Millisecond

// OpeningTime is how long a caller waits for one more connection, before it goes back to those that there are.
const OpeningTime = 250 * time.Millisecond

// Pause returns how long a caller waits before it asks again.
func Pause(polls bool) time.Duration {
	pace := Pace
	if polls {
		pace = pollPace
	}
	return pace + rand.N(pace/5)
}

// Sleep waits for d. It returns false if ctx ends before.
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

// AwaitLease waits until the lease may have been released, or until a slot is kept for the caller. Then the caller
// has the turn to ask for the lock, until EndTurn. Its connection is idle while it waits, and the server may end
// that connection after a TTL.
func (a *Attempt) AwaitLease(ctx context.Context, cfg *Config, lease *Leased) error {
	a.Heard.Store(true)
	a.HeldBy = keyrow.HolderOf(lease.Owner)
	ctx, stop, err := a.Patient(ctx)
	if err != nil {
		return err
	}
	defer stop()
	ctx, cancel := a.Ticket.UntilFreed(ctx)
	defer cancel()
	if lease.Key == a.awaited.Key && lease.Token == a.awaited.Token { // the caller was woken too early: it waits before it tries again
		if !Sleep(ctx, min(Pace-time.Since(a.awaitedAt), lease.Remaining)) {
			return context.Cause(ctx)
		}
	}
	a.awaited, a.awaitedAt = *lease, time.Now()
	a.endTurn, err = cfg.Await(ctx, lease.Key, a.Began(), max(min(lease.Remaining, cfg.TTL/3), time.Millisecond))
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// EndTurn lets the next waiter for the same lease try.
func (a *Attempt) EndTurn() {
	if a.endTurn != nil {
		a.endTurn()
		a.endTurn = nil
	}
}

// Limits say how long a caller is kept after the end of its context, for the answer to a statement that may have
// been granted the lock.
type Limits struct {
	GiveUp time.Duration
	Calmly time.Duration // if the wait is over, but the caller's context goes on
}

// Usual are the limits of most strategies.
var Usual = Limits{GiveUp: 35 * time.Millisecond, Calmly: 200 * time.Millisecond}

// after returns the limit that applies now that ctx has ended.
func (l Limits) after(ctx context.Context) time.Duration {
	if errors.Is(context.Cause(ctx), ErrWaitOver) {
		return l.Calmly
	}
	return l.GiveUp
}

// Answered waits until done is closed, or until ctx has ended and the limit is over. It reports whether done is
// closed. If not, the caller does not wait for the answer any more.
func (l Limits) Answered(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	hurry := time.NewTimer(l.after(ctx))
	defer hurry.Stop()
	select {
	case <-done:
		return true
	case <-hurry.C:
		return false
	}
}

// ErrWaitOver is the cause with which a wait ends that has lasted as long as the caller was ready to wait.
var ErrWaitOver = queue.ErrOver

// NoAnswer returns the error of a caller that could not be told, because of err, whether somebody has the key.
func NoAnswer(err error) error {
	var silence server.Silence
	var network *net.OpError
	switch {
	case errors.Is(err, lockerr.ErrNoAnswer):
		return err
	case errors.As(err, &silence):
		return fmt.Errorf("%w for %v", lockerr.ErrNoAnswer, silence.For.Round(time.Millisecond))
	case errors.As(err, &network): // a network timeout matches context.DeadlineExceeded, but no context has ended
		err = errors.New(err.Error())
	}
	return lockerr.With(lockerr.ErrNoAnswer, err)
}

// Silent returns the error of a caller whose context has ended before the server has answered.
func Silent(ctx context.Context) error { return NoAnswer(ctx.Err()) }

// Terms are what the errors of a strategy say about that strategy.
type Terms struct {
	Strategy string
	Grants   string // the privileges that the account needs
	Writes   string // what follows if the server takes no writes
	Limits
}

// Failure returns err as callers see it. The result never matches driver.ErrBadConn.
func (t Terms) Failure(op, key string, err error) *lockerr.Error {
	return &lockerr.Error{Op: op, Key: key, Strategy: t.Strategy, Err: server.HideBadConn(err)}
}

// Heard says whether a caller that asks for a lock knows that somebody has the key: from the server, or from the
// callers of its process in front of it in the queue. Other answers of the server do not say so, not even that
// it has granted the lock too late.
type Heard struct{ atomic.Bool }

// From notes that somebody has the key, if err says so, the error of a lock statement. A limit of its own ends a
// statement while it waits. A KILL may come to one that does not wait, and says nothing of the key.
func (h *Heard) From(err error) {
	limit := server.Interrupted(err) && server.Number(err) != server.QueryInterrupted
	if server.Locked(err) || server.Deadlock(err) || limit {
		h.Store(true)
	}
}

// Explain returns the Failure of a caller that has not got the lock, because of err. ctx is the caller's. If no
// holder is known, Explain calls ask, which asks the server for the holder; nil for not to ask.
func (a *Attempt) Explain(ctx context.Context, t Terms, err error, ask func(context.Context) *lockerr.Holder) error {
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
		own, cancel := server.Within(context.WithoutCancel(ctx), limit)
		defer cancel()
		a.HeldBy = ask(own)
	}
	if !errors.Is(failed.Err, lockerr.ErrExhausted) && !errors.Is(failed.Err, lockerr.ErrNoAnswer) {
		failed.Holder = a.HeldBy
	}
	return failed
}

// askTime is how long a caller whose context goes on waits for the server to say who has the lock.
const askTime = 100 * time.Millisecond

// Unreached turns err into the error of a caller that has not asked for the lock yet, or has lost its connection
// without having the lock. It is the part of the rule of reason that needs no attempt.
func Unreached(err error) error {
	switch {
	case errors.Is(err, lockerr.ErrExhausted), errors.Is(err, lockerr.ErrNoAnswer):
		return err
	case server.Full(err):
		return lockerr.With(lockerr.ErrExhausted, err)
	case server.Interrupted(err):
		return NoAnswer(fmt.Errorf("it ended a statement for the lock, by its own limit or a KILL: %w", err))
	case errors.As(err, new(*net.OpError)), errors.As(err, new(server.Silence)):
		return NoAnswer(err)
	case server.Gone(err, nil):
		return NoAnswer(fmt.Errorf("it went away, or the connection broke, and the lock is not held: %w", err))
	}
	return err
}

// reason returns what the caller of a failed attempt is told; err has ended the attempt. One rule decides for all
// strategies:
//
//	somebody is known to have the key        ErrTimeout; to a caller that would not wait, ErrLocked
//	there was no connection to ask on        ErrExhausted, which says what bounds connections
//	the server was asked, and said nothing   ErrNoAnswer, also if it ended the statement by a KILL; by a limit, if the
//	                                         statement does not wait (else somebody has the key: see Heard.From)
//	the server has said something else       what the server has said
//
// The error matches an error of a context only if the caller's own context has ended.
func (a *Attempt) reason(ctx context.Context, t Terms, err error) error {
	ended, over := ctx.Err(), errors.Is(err, ErrWaitOver)
	if ended != nil && Ungranted(err) {
		return lockerr.With(lockerr.ErrTimeout, ended)
	}
	ofContext := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	short := errors.Is(err, lockerr.ErrExhausted) || server.Full(err)
	silent := over || errors.Is(err, lockerr.ErrNoAnswer) || errors.As(err, new(server.Silence)) || server.Gone(err, nil) ||
		server.Number(err) == 0 && (ofContext || ended != nil)
	killed := server.Interrupted(err) && !server.Locked(err)
	waitEnded := over || ended != nil || a.Left() <= 0
	taken := false // somebody is known to have the key, and therefore the caller has no lock
	switch {
	case server.Interrupted(err) && (ended != nil || a.Wait > 0 && a.Left() <= 0): // the statement has waited to the end
		taken = true
	case a.Heard.Load():
		taken = killed || waitEnded && (short || silent)
	}
	switch {
	case decided(err) && (ended == nil || !errors.Is(err, lockerr.ErrLost)): // the end of the caller's context is no loss
		return t.Refusal(server.Explain(err))
	case taken && ended == nil && (a.Wait == 0 || over && a.cleaning):
		return lockerr.ErrLocked
	case taken && killed && !waitEnded:
		return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("the server ended the wait, by its own limit or a KILL: %w", err))
	case taken:
		return lockerr.With(lockerr.ErrTimeout, ended)
	case short:
		err = Unreached(err)
	case silent && ended != nil:
		err = NoAnswer(ended)
	case over, silent && ofContext:
		err = lockerr.ErrNoAnswer
	case silent, killed:
		err = Unreached(err)
	default:
		err = t.Refusal(server.Explain(err))
	}
	if ended != nil && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", err, ended)
	}
	return err
}

// decided reports whether err itself says what has become of the attempt.
func decided(err error) bool {
	for _, known := range []error{
		lockerr.ErrLost, lockerr.ErrDeadlock, lockerr.ErrClosed, lockerr.ErrUnsafe, lockerr.ErrConflict,
		lockerr.ErrStaleSnapshot, lockerr.ErrLocked, lockerr.ErrTimeout,
	} {
		if errors.Is(err, known) {
			return true
		}
	}
	return false
}

// Refusal adds what to do to an error of a server that refuses all statements of the strategy. It returns other
// errors as they are.
func (t Terms) Refusal(err error) error {
	switch {
	case t.Writes != "" && server.ReadOnlyTransactions(err):
		return server.RefusedReadOnly(err)
	case t.Writes != "" && server.Refused(err):
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("the server takes no writes, so %s: %w", t.Writes, err))
	case t.Grants != "" && server.Denied(err):
		return fmt.Errorf("%w; the account needs %s", err, t.Grants)
	case server.Shared(err):
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("MySQL Router shares this connection with other clients;"+
			" set connection_sharing=0, or connect to a port of it that does not share: %w", err))
	}
	return err
}

// Ungranted reports whether err says that another caller has the lock.
func Ungranted(err error) bool {
	return errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout)
}
