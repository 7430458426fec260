package lease

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// slotSlice is how long a caller waits for one slot before it looks at the others
// again.
const slotSlice = 250 * time.Millisecond

// Slot is a lease on one of the rows of a key's slots.
type Slot struct {
	*Lease
	slot   int
	ticket *queue.Ticket // the place in the process's own line for slots
}

// Slot returns which of the slots it is.
func (s *Slot) Slot() int { return s.slot }

// Ticket returns nil: who waits for a slot waits for any, so nobody waits for this one.
func (s *Slot) Ticket() *queue.Ticket { return nil }

// Release gives the slot back.
func (s *Slot) Release() error {
	defer s.ticket.Leave()
	return s.Lease.Release()
}

// acquireSlot takes a lease on one of the rows of the place. As many callers of this
// process as there are slots try at a time.
func (l *Locker) acquireSlot(ctx context.Context, r strategy.Request) (_ *Slot, err error) {
	p := r.Places[0]
	a := &slotAttempt{Locker: l, p: p, rows: p.SlotRows(), ctx: ctx, wait: r.Wait, waiting: r.Wants, start: time.Now()}
	defer func() { a.done() }()
	if err := l.rows.Exist(ctx, slices.Sorted(slices.Values(a.rows))); err != nil {
		return nil, &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: err}
	}
	ticket, err := a.lineUp()
	if err != nil {
		return nil, a.explain(err)
	}
	a.lost = func() { // nobody need release what is lost
		ticket.Leave()
		r.Lost()
	}
	held, slot, err := a.search(ticket)
	if err != nil {
		ticket.Leave()
		return nil, a.explain(err)
	}
	ticket.Holds(slot)
	ticket.Granted(&lockerr.Holder{Program: l.program})
	return &Slot{held, slot, ticket}, nil
}

// slotAttempt is one call of acquireSlot.
type slotAttempt struct {
	*Locker
	p       strategy.Place
	rows    []string // of the slots
	ctx     context.Context
	wait    time.Duration
	waiting strategy.Waiting
	lost    func()
	start   time.Time
	heard   strategy.Heard
	patient context.Context // of the wait, once it has begun
	leave   func()
	holder  *lockerr.Holder // of a slot
	cleaned time.Time       // until when a clean-up is waited for; zero is not
}

// mayWait begins the wait, or goes on with it: a caller that waits is counted
// once, from the beginning to the end.
func (a *slotAttempt) mayWait() error {
	if a.patient != nil {
		return context.Cause(a.patient)
	}
	if a.wait == 0 {
		return lockerr.ErrLocked
	}
	ctx, leave, err := queue.Wait(a.ctx, a.wait-time.Since(a.start), strategy.ErrWaitOver, a.waiting)
	if err == nil {
		a.patient, a.leave = ctx, leave
	}
	return err
}

func (a *slotAttempt) done() {
	if a.leave != nil {
		a.leave()
	}
}

// lineUp takes a place in the line of this process.
func (a *slotAttempt) lineUp() (*queue.Ticket, error) {
	entries := []queue.Entry{{Key: a.p.Row, Slots: a.p.Slots}}
	ticket, holder, ok := a.queue.TryEnterAs(entries, a.wait == 0)
	if ok {
		return ticket, nil
	}
	a.holder = holder
	if err := a.mayWait(); err != nil {
		return nil, err
	}
	ticket, err := a.queue.EnterAs(a.patient, entries)
	if err != nil {
		a.heard.Store(true)
		a.holder, _ = a.queue.HolderOf(entries[0])
		return nil, context.Cause(a.patient)
	}
	return ticket, nil
}

// search takes the slot that somebody of this process has given back, or any one at
// first, else one that the server says is free. Where none is it waits for any one
// of them for a while, or until somebody of this process gives one back.
func (a *slotAttempt) search(ticket *queue.Ticket) (g *Lease, slot int, err error) {
	for tries := 1; ; tries++ {
		slot, err := a.likely(ticket, tries)
		if err != nil {
			return nil, 0, err
		}
		if slot >= 0 {
			if g, err = a.one(a.ctx, slot, 0); err == nil || !errors.Is(err, lockerr.ErrLocked) || a.wait == 0 && tries == 3 {
				return g, slot, err
			}
			continue
		}
		if a.wait == 0 && a.cleaning() {
			continue
		}
		if err := a.mayWait(); err != nil {
			return nil, 0, err
		}
		if g, slot, err = a.waitFor(ticket); g != nil || err != nil {
			return g, slot, err
		}
	}
}

// likely returns a slot that is free, as far as is known here, or on the server; -1
// where there is none.
func (a *slotAttempt) likely(ticket *queue.Ticket, tries int) (slot int, err error) {
	if slot = ticket.Free(); slot < 0 && tries == 1 {
		slot = a.any(ticket)
	}
	if slot >= 0 {
		return slot, nil
	}
	slot, found, err := a.freeSlot(a.ctx, a.rows, ticket.Taken()...)
	if err == nil && !found {
		a.heard.Store(true)
	}
	switch {
	case err != nil && (a.wait == 0 || !errors.Is(err, lockerr.ErrLocked)):
		return -1, err
	case err != nil || !found: // a caller that is ready to wait is not refused because nobody could look
		return -1, nil
	}
	return slot, nil
}

// cleaning reports, after a pause, whether a clean-up may be what has the slots locked,
// which nobody is to be refused for.
func (a *slotAttempt) cleaning() bool {
	if a.cleaned.IsZero() && a.Locker.rows.Cleaning(a.ctx) {
		a.cleaned = time.Now().Add(keyrow.CleaningWait)
	}
	if !time.Now().Before(a.cleaned) {
		return false
	}
	time.Sleep(keyrow.CleaningWait / 100)
	return true
}

// any returns one of the slots that nobody else of this process has, or is to
// have first; -1 where there is none.
func (a *slotAttempt) any(ticket *queue.Ticket) int {
	open := ticket.Untaken(len(a.rows))
	if len(open) == 0 {
		return -1
	}
	return open[rand.N(len(open))]
}

// waitFor waits for any one of the slots for a while. It returns no guard where
// it is time to look at the others.
func (a *slotAttempt) waitFor(ticket *queue.Ticket) (*Lease, int, error) {
	slot := a.any(ticket)
	if slot < 0 { // those who have them are here: they tell
		return nil, 0, ticket.AwaitFreed(a.patient, slotSlice)
	}
	ctx, cancel := context.WithTimeout(a.patient, 2*slotSlice)
	defer cancel()
	ctx, stop := ticket.UntilFreed(ctx)
	defer stop()
	g, err := a.one(ctx, slot, slotSlice)
	switch {
	case err == nil:
		return g, slot, nil
	case a.patient.Err() != nil:
		return nil, 0, context.Cause(a.patient)
	case ctx.Err() != nil || errors.Is(err, lockerr.ErrLocked):
		return nil, 0, nil
	}
	return nil, 0, err
}

// one takes a lease on one of the rows.
func (a *slotAttempt) one(ctx context.Context, slot int, wait time.Duration) (*Lease, error) {
	held, err := a.Acquire(ctx, leaseOn(a.p, a.rows[slot], wait, nil, a.lost))
	var e *lockerr.Error
	if errors.As(err, &e) && e.Holder != nil {
		a.holder = e.Holder
	}
	if errors.Is(err, lockerr.ErrLocked) {
		a.heard.Store(true)
	}
	return held, err
}

// explain turns a failure into the error that callers see.
func (a *slotAttempt) explain(err error) error {
	var e *lockerr.Error
	switch {
	case a.ctx.Err() == nil && !strategy.Ungranted(err) && !errors.Is(err, strategy.ErrWaitOver):
		return err
	case a.patient != nil && a.patient.Err() != nil: // and not what that has ended
		err = context.Cause(a.patient)
	case errors.As(err, &e): // of one of the slots
		err = e.Err
	}
	failed := terms.Untaken(a.ctx, a.p.Key, a.start, &a.heard, err)
	failed.Holder = a.holder
	return failed
}
