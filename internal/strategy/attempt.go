package strategy

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Attempt is one call that asks for a lock: how long it may wait, where it is in the queue of this
// process, and what its caller is told.
type Attempt struct {
	Key     string // in errors
	Wait    time.Duration
	Waiting Waiting // nil for nobody to ask
	Once    bool    // what follows is one wait for Waiting, until Finish: so the caller is not refused between two waits, and an observer sees one
	Start   time.Time
	Since   time.Time // when the caller began to wait, for those who look, and for its error; before Start if this call is not the first
	Heard   Heard
	Ticket  *queue.Ticket   // nil before there is one, and once another owns it
	First   bool            // nobody of this process was in the queue before it
	HeldBy  *lockerr.Holder // who is known to have it
	Broke   bool            // the connection of the transaction that was to begin with the lock was broken before anything was sent
	Refused []int           // slots that Slot leaves out: found locked, where the server does not tell which are

	vanished int             // how often Vanished was true
	cleaning bool            // it did not want to wait, and waits for the end of a clean-up
	awaited  Leased          // what AwaitLease waited for last
	since    time.Time       // when that began
	endTurn  func()          // ends the turn that AwaitLease gave; nil without one
	waits    context.Context // of the one wait, once it has begun
	end      func()          // ends that; nil without one
}

// Finish ends what the attempt has begun, but for its place in the queue: the turn of AwaitLease, and
// the one wait.
func (a *Attempt) Finish() {
	a.EndTurn()
	if a.end != nil {
		a.end()
	}
}

// Vanished reports that a statement has failed with err since a row is missing that was there, for
// the first few times: make the rows again.
func (a *Attempt) Vanished(err error) bool {
	if !errors.Is(err, keyrow.ErrNoRow) && !server.Missing(err) || a.vanished == 3 {
		return false
	}
	a.vanished++
	return true
}

// Cleaning is for a caller that would not wait, and has found a row locked. It reports whether a
// clean-up is running, which locks unused rows for moments. Then the caller does wait, for that.
func (a *Attempt) Cleaning(ctx context.Context, rows *keyrow.Rows) bool {
	if a.cleaning = rows.Cleaning(ctx); a.cleaning {
		a.Wait = time.Since(a.Start) + cleaningWait
	}
	return a.cleaning
}

// cleaningWait is how long a request without a wait does wait while a clean-up is running.
const cleaningWait = 2 * time.Second

// Began is when the caller began to wait.
func (a *Attempt) Began() time.Time {
	if a.Since.IsZero() {
		return a.Start
	}
	return a.Since
}

// Left is what is left of the wait.
func (a *Attempt) Left() time.Duration { return a.Wait - time.Since(a.Start) }

// begin begins to wait, until done, for a caller that ends the wait after Left by other means.
func (a *Attempt) begin(ctx context.Context) (_ context.Context, done func(), err error) {
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

// Patient begins to wait, until done: it returns a context that ends with the wait.
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

// Enqueue waits until the caller is in front of the queues of keys, or until closed is closed.
// from says whose holder may hand its lock over to the caller: see [queue.Ticket.HandedOver]; nil
// is nobody's.
func (a *Attempt) Enqueue(ctx context.Context, q *queue.Queue, keys []queue.Key, from any, closed <-chan struct{}) (err error) {
	ticket, holder, front := q.TryEnter(keys, a.Wait == 0)
	switch {
	case front:
		a.Ticket, a.First = ticket, true
		return nil
	case a.Wait == 0:
		a.HeldBy = holder
		return lockerr.ErrLocked
	}
	ctx, done, err := a.begin(ctx)
	if err == nil {
		defer done()
		over := time.NewTimer(a.Left()) // it costs less than a derived context
		defer over.Stop()
		a.Ticket, err = q.Enter(ctx, keys, from, queue.Ends{Over: over.C, Closed: closed})
	}
	if err != nil || a.Ticket.HandedOver() != nil {
		a.Heard.Store(true)
	}
	if err == nil {
		return nil
	}
	for _, e := range keys {
		if a.HeldBy == nil {
			a.HeldBy, _ = q.HolderOf(e)
		}
	}
	return err
}

// Leased is a lease on a key's row, and the error of a lock statement that has found one.
type Leased struct {
	Key       string
	Token     string
	Owner     string
	Remaining time.Duration // 0 if nobody knows
}

func (l *Leased) Error() string { return "the key has a lease" }

// Pace is the time between two attempts of a caller that nobody wakes, and announcedPace that of a
// poller that has announced itself.
const Pace, announcedPace = 250 * time.Millisecond, 100 * time.Millisecond

// Pause is how long a poller waits before it asks again.
func Pause(announced bool) time.Duration {
	if announced {
		return announcedPace
	}
	return Pace + rand.N(Pace/5)
}

// AwaitLease waits until the lease may have been released, or until a slot is kept for the caller.
// Then it is the attempt's turn, until EndTurn. The caller's connection is idle meanwhile, and the
// server may end it after a TTL.
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
	if lease.Key == a.awaited.Key && lease.Token == a.awaited.Token { // woken too early: wait before trying again
		if !Sleep(ctx, min(Pace-time.Since(a.since), lease.Remaining)) {
			return context.Cause(ctx)
		}
	}
	a.awaited, a.since = *lease, time.Now()
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

// Slot returns the one of n slots to try next: one that was given back in this process, or else,
// if it may guess, one that nobody of this process has, or else one that free finds among these; -1
// if there is none.
func (a *Attempt) Slot(ctx context.Context, n int, guess bool, free func(ctx context.Context, open []int) (int, error)) (slot int, err error) {
	if slot = a.Ticket.Free(); slot >= 0 && !slices.Contains(a.Refused, slot) {
		return slot, nil
	}
	open := queue.Without(a.Ticket.Untaken(n), a.Refused)
	if guess && len(open) > 0 {
		return open[rand.N(len(open))], nil
	}
	slot = -1
	if len(open) > 0 {
		slot, err = free(ctx, open)
	}
	if err == nil && slot < 0 {
		a.Heard.Store(true)
	}
	return slot, err
}

// Limits say how long a caller may be kept after the end of its context, for the answer to a
// statement that may grant the lock.
type Limits struct {
	GiveUp time.Duration
	Calmly time.Duration // if the wait is over, but not the context
}

// Usual are the limits of most strategies.
var Usual = Limits{GiveUp: 35 * time.Millisecond, Calmly: 200 * time.Millisecond}

// of is how long it is now that ctx has ended.
func (l Limits) of(ctx context.Context) time.Duration {
	if errors.Is(context.Cause(ctx), ErrWaitOver) {
		return l.Calmly
	}
	return l.GiveUp
}

// Answered waits until done is closed, or until ctx has ended and the limit is over. It reports
// whether done is closed; if not, nobody waits for it any more.
func (l Limits) Answered(ctx context.Context, done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	case <-ctx.Done():
	}
	hurry := time.NewTimer(l.of(ctx))
	defer hurry.Stop()
	select {
	case <-done:
		return true
	case <-hurry.C:
		return false
	}
}
