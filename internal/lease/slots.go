package lease

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Slot is a lease on one of the rows of a key's slots.
type Slot struct {
	*Grant
	slot   int
	ticket *queue.Ticket // the place in the process's own queue for slots
}

// Slot returns the number of the slot.
func (s *Slot) Slot() int { return s.slot }

// Ticket returns nil: callers wait for any slot, so nobody waits for this one.
func (s *Slot) Ticket() *queue.Ticket { return nil }

// Release gives the slot back.
func (s *Slot) Release() error {
	defer s.ticket.Leave()
	return s.Grant.Release()
}

// acquireSlot takes a lease on one of the rows of the resource. At most as many callers of this process as there are slots try
// at the same time.
func (l *Locker) acquireSlot(ctx context.Context, r strategy.Request) (_ *Slot, err error) {
	resource := r.Resources[0]
	a := &slotAttempt{
		Attempt: strategy.Attempt{Key: resource.Key, Wait: r.Wait, Waiting: r.Wants, Short: l.short, Start: time.Now(), Once: true},
		l:       l, p: resource, rows: resource.SlotRows(), ctx: ctx,
	}
	defer a.Finish()
	if err := l.cfg.Rows.Exist(ctx, slices.Sorted(slices.Values(a.rows))); err != nil {
		return nil, a.explain(err)
	}
	if err := a.Enqueue(ctx, l.cfg.Queue, []queue.Key{{Name: resource.Row, Slots: resource.Slots}}, nil, nil); err != nil {
		return nil, a.explain(err)
	}
	ticket := a.Ticket
	a.lost = func() { // the caller need not release a lost lease
		ticket.Leave()
		r.Lost()
	}
	slot, err := a.TakeSlot(ctx, &l.cfg, strategy.Slots{
		Rows: a.rows, Try: a.try, Wait: a.wait, Ready: func(context.Context) error { return nil }, Refuse: a.refuse,
	})
	if err != nil {
		ticket.Leave()
		return nil, a.explain(err)
	}
	ticket.Holds(slot)
	ticket.Granted(&lockerr.Holder{Program: l.cfg.Owner})
	return &Slot{a.held, slot, ticket}, nil
}

// slotAttempt is one call of acquireSlot.
type slotAttempt struct {
	strategy.Attempt
	l    *Locker
	p    strategy.Resource
	rows []string // the rows of the slots
	ctx  context.Context
	lost func()
	held *Grant
}

// try takes a lease on a slot. If that is refused, the slot's row may have a row lock, which not every server shows.
func (sa *slotAttempt) try(ctx context.Context, slot int) error { return sa.acquire(ctx, slot, 0) }

// wait waits for a slot for a while.
func (sa *slotAttempt) wait(ctx context.Context, slot int) error {
	ctx, done, err := sa.Patient(ctx)
	if err != nil {
		return err
	}
	defer done()
	own, cancel := server.Within(ctx, 2*strategy.SlotWait)
	defer cancel()
	own, stop := sa.Ticket.UntilFreed(own)
	defer stop()
	switch err := sa.acquire(own, slot, strategy.SlotWait); {
	case err != nil && ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil && own.Err() != nil:
		return strategy.ErrAgain
	default:
		return err
	}
}

// acquire takes a lease on the row of a slot.
func (sa *slotAttempt) acquire(ctx context.Context, slot int, wait time.Duration) (err error) {
	r := leaseOn(sa.p, sa.rows[slot], wait, nil, sa.lost)
	r.Since = sa.Began()
	sa.held, err = sa.l.Acquire(ctx, r)
	var e *lockerr.Error
	if errors.As(err, &e) && e.Holder != nil {
		sa.HeldBy = e.Holder
	}
	if errors.Is(err, lockerr.ErrLocked) {
		sa.Heard.Store(true)
		return strategy.ErrTaken
	}
	return err
}

// refuse is for a caller that does not wait.
func (sa *slotAttempt) refuse(ctx context.Context) error {
	if sa.Cleaning(ctx, sa.l.cfg.Rows) {
		return nil
	}
	return lockerr.ErrLocked
}

// explain turns a failure into the error that callers see.
func (sa *slotAttempt) explain(err error) error {
	var e *lockerr.Error
	if errors.As(err, &e) { // the error of one of the slots
		if sa.ctx.Err() == nil && !strategy.Ungranted(err) {
			return err
		}
		err = e.Err
	}
	return sa.Explain(sa.ctx, terms, err, nil)
}
