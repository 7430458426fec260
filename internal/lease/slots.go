package lease

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"time"

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
	ticket *queue.Ticket // the place in the process's own queue for slots
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

// acquireSlot takes a lease on one of the rows of the resource. As many callers of this
// process as there are slots try at a time.
func (l *Locker) acquireSlot(ctx context.Context, r strategy.Request) (_ *Slot, err error) {
	p := r.Resources[0]
	a := &slotAttempt{
		Attempt: strategy.Attempt{Key: p.Key, Wait: r.Wait, Waiting: r.Wants, Start: time.Now()},
		Locker:  l, p: p, rows: p.SlotRows(), ctx: ctx, leave: func() {},
	}
	a.Once = true
	defer a.Finish()
	defer func() { a.leave() }()
	if err := l.cfg.Rows.Exist(ctx, slices.Sorted(slices.Values(a.rows))); err != nil {
		return nil, &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: err}
	}
	if err := a.Enqueue(ctx, l.cfg.Queue, []queue.Key{{Name: p.Row, Slots: p.Slots}}, nil, nil); err != nil {
		return nil, a.explain(err)
	}
	ticket := a.Ticket
	a.lost = func() { // nobody need release what is lost
		ticket.Leave()
		r.Lost()
	}
	held, slot, err := a.search()
	if err != nil {
		ticket.Leave()
		return nil, a.explain(err)
	}
	ticket.Holds(slot)
	ticket.Granted(&lockerr.Holder{Program: l.cfg.Owner})
	return &Slot{held, slot, ticket}, nil
}

// slotAttempt is one call of acquireSlot.
type slotAttempt struct {
	strategy.Attempt
	*Locker
	p       strategy.Resource
	rows    []string // of the slots
	ctx     context.Context
	lost    func()
	patient context.Context // of the wait, once it has begun
	leave   func()          // ends it
}

// mayWait begins the wait, or goes on with it.
func (a *slotAttempt) mayWait() (err error) {
	if a.patient != nil {
		return context.Cause(a.patient)
	}
	ctx, leave, err := a.Patient(a.ctx)
	if err == nil {
		a.patient, a.leave = ctx, leave
	}
	return err
}

// search takes the slot that somebody of this process has given back, or any one at
// first, else one that the server says is free. Where none is it waits for any one
// of them for a while, or until somebody of this process gives one back.
func (a *slotAttempt) search() (g *Lease, slot int, err error) {
	free := func(ctx context.Context, open []int) (int, error) {
		slot, err := a.cfg.FreeSlot(ctx, a.rows, open)
		if err != nil && a.Wait > 0 && errors.Is(err, lockerr.ErrLocked) { // a caller that is ready to wait is not refused because nobody could look
			return -1, nil
		}
		return slot, err
	}
	for tries := 1; ; tries++ {
		slot, err := a.Slot(a.ctx, len(a.rows), tries == 1, free)
		if err != nil {
			return nil, 0, err
		}
		if slot >= 0 {
			if g, err = a.one(a.ctx, slot, 0); err == nil || !errors.Is(err, lockerr.ErrLocked) {
				return g, slot, err
			}
			a.Refused = append(a.Refused, slot) // a row lock has it, perhaps, which not every server shows
			continue
		}
		a.Refused = nil
		if a.Wait == 0 {
			a.Cleaning(a.ctx, a.cfg.Rows)
		}
		if err := a.mayWait(); err != nil {
			return nil, 0, err
		}
		if g, slot, err = a.waitFor(); g != nil || err != nil {
			return g, slot, err
		}
	}
}

// waitFor waits for any one of the slots for a while. It returns no lease where it is time to look
// at the others.
func (a *slotAttempt) waitFor() (*Lease, int, error) {
	open := a.Ticket.Untaken(len(a.rows))
	if len(open) == 0 { // those who have them are here: they tell
		return nil, 0, a.Ticket.AwaitFreed(a.patient, slotSlice)
	}
	slot := open[rand.N(len(open))]
	ctx, cancel := context.WithTimeout(a.patient, 2*slotSlice)
	defer cancel()
	ctx, stop := a.Ticket.UntilFreed(ctx)
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
	r := leaseOn(a.p, a.rows[slot], wait, nil, a.lost)
	r.Since = a.Began()
	held, err := a.Acquire(ctx, r)
	var e *lockerr.Error
	if errors.As(err, &e) && e.Holder != nil {
		a.HeldBy = e.Holder
	}
	if errors.Is(err, lockerr.ErrLocked) {
		a.Heard.Store(true)
	}
	return held, err
}

// explain turns a failure into the error that callers see.
func (a *slotAttempt) explain(err error) error {
	var e *lockerr.Error
	switch {
	case a.ctx.Err() == nil && errors.As(err, &e) && !strategy.Ungranted(err):
		return err
	case a.patient != nil && a.patient.Err() != nil: // and not what that has ended
		err = context.Cause(a.patient)
	case errors.As(err, &e): // of one of the slots
		err = e.Err
	}
	return a.Explain(a.ctx, terms, err, nil)
}
