package rowlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// none is where no slot is known to be free.
const none = -1

// FreeSlot looks for one of rows that nobody has locked and that has no live
// lease, but for those whose indexes are in except. It does not make rows: one that
// is not there is not free. A server without SKIP LOCKED tells of leases only. Where
// there is no connection to look on, the error is ErrLocked after a second.
func (l *Locker) FreeSlot(ctx context.Context, rows []string, except ...int) (i int, ok bool, err error) {
	a := l.attempt(Request{Slots: rows})
	i, err = a.freeSlot(ctx, without(a.all(), except))
	return i, err == nil && i != none, err
}

// all returns the indexes of the slots.
func (a *attempt) all() []int {
	all := make([]int, len(a.r.Slots))
	for i := range all {
		all[i] = i
	}
	return all
}

// untaken returns those of slots that no other caller of this process has, or is to
// have before this one.
func (a *attempt) untaken(slots []int) []int {
	if a.ticket == nil {
		return slots
	}
	return without(slots, a.ticket.Taken())
}

func without(slots, except []int) (rest []int) {
	for _, i := range slots {
		if !slices.Contains(except, i) {
			rest = append(rest, i)
		}
	}
	return rest
}

// freed is closed when the ticket has a slot to tell of. In a transaction that
// goes on there is no ticket.
func (a *attempt) freed() <-chan struct{} {
	if a.ticket == nil {
		return nil
	}
	return a.ticket.Freed()
}

// untilFreed returns a context that also ends with errFreed.
func (a *attempt) untilFreed(ctx context.Context) (context.Context, func()) {
	freed := a.freed()
	if freed == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-freed:
			cancel(errFreed)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// waitingOnce calls waiting at the first wait, for all that follow until the
// attempt's end: between them a caller is not to be refused.
func (a *attempt) waitingOnce(waiting func(context.Context) (context.Context, func(), error)) func(context.Context) (context.Context, func(), error) {
	var all context.Context
	return func(ctx context.Context) (context.Context, func(), error) {
		if all == nil {
			first, done, err := waiting(ctx)
			if err != nil {
				return nil, nil, err
			}
			all, a.end = first, done
		}
		return all, func() {}, context.Cause(all)
	}
}

// beginSlot tries the slot first that the ticket tells of, or any one.
func (a *attempt) beginSlot(ctx context.Context) (txn *pool.Txn, err error) {
	try := func(ctx context.Context) (err error) {
		txn, err = a.try(ctx)
		return err
	}
	wait := func(ctx context.Context) (err error) {
		txn, err = a.wait(ctx)
		return err
	}
	return txn, a.oneSlot(ctx, true, try, wait, func() bool { return true })
}

// joinSlot tries none that is not seen to be free: on some servers a lock that is
// refused ends the transaction.
func (a *attempt) joinSlot(ctx context.Context) (alive bool, err error) {
	if _, err := a.c.ID(ctx); err != nil {
		return false, err
	}
	alive = true
	try := func(ctx context.Context) error {
		err := a.lock(ctx, a.trySQL(), false)
		alive = server.Locked(err) && !a.cfg.Info.EndsTransaction(err)
		return err
	}
	wait := func(ctx context.Context) error {
		ctx, done, err := a.waiting(ctx)
		if err != nil {
			return err
		}
		defer done()
		err = a.block(ctx)
		// The server's own bound leaves the transaction as it is; on Galera a KILL ends it.
		alive = server.Interrupted(err) && !a.cfg.Info.EndsTransaction(err) || errors.Is(err, errWaitOver) && !a.cfg.Info.RollbackOnTimeout && !a.streams()
		return err
	}
	err = a.oneSlot(ctx, false, try, wait, func() bool { return alive })
	if errors.Is(err, errNoRow) {
		a.cfg.Rows.Forget(a.names)
	}
	if server.Locked(err) {
		err = lockerr.ErrLocked
	}
	return alive, err
}

// oneSlot locks one of the slots. guess means that one may be tried first of which
// it is not known whether it is free. try and wait run a lock statement for the one
// that a.keys names; goesOn reports whether another may follow one that has failed.
func (a *attempt) oneSlot(ctx context.Context, guess bool, try, wait func(context.Context) error, goesOn func() bool) error {
	done := func() {} // ends the turn that await gave
	defer func() { done() }()
	for vanished, lost := 0, 0; ; guess = false {
		slot, err := a.nextSlot(ctx, guess)
		if err != nil {
			return err
		}
		if slot != none {
			a.aim(slot)
			err = try(ctx)
			if a.taken(err) && goesOn() && lost < 3 { // somebody was quicker
				lost++
				continue
			}
		}
		done()
		done = func() {}
		if slot == none || a.taken(err) && goesOn() {
			var unleased []int
			var first *leased
			unleased, first, err = a.survey(ctx)
			open := a.untaken(unleased)
			switch {
			case err != nil:
			case a.r.Wait == 0 && len(unleased) == 0:
				return first
			case a.r.Wait == 0:
				a.holder = a.askHolder(ctx, 0)
				return lockerr.ErrLocked
			case len(open) == 0:
				turn, err := a.pause(ctx, first)
				if err != nil {
					return err
				}
				done = turn
				a.keep(ctx)
				continue
			default:
				a.aim(open[rand.N(len(open))])
				err, lost = wait(ctx), 0
			}
		}
		var lease *leased
		switch {
		case err == nil || !goesOn():
			return err
		case errors.As(err, &lease) || server.Interrupted(err) || errors.Is(err, errFreed) || a.outrun(err): // look again
		case (errors.Is(err, errNoRow) || server.Missing(err)) && vanished < 3:
			vanished++
			if err := a.cfg.Rows.Renew(ctx, a.names); err != nil {
				return err
			}
		default:
			return err
		}
	}
}

// aim makes slot what the next lock statement is for.
func (a *attempt) aim(slot int) {
	a.locked.Slot = slot
	a.keys = []Key{{Name: a.r.Slots[slot]}}
}

// nextSlot returns the slot to try next, or none.
func (a *attempt) nextSlot(ctx context.Context, guess bool) (int, error) {
	if a.ticket != nil {
		if slot := a.ticket.Free(); slot != none {
			return slot, nil
		}
	}
	open := a.untaken(a.all())
	if guess && len(open) > 0 {
		return open[rand.N(len(open))], nil
	}
	return a.freeSlot(ctx, open)
}

// freeSlot returns one of slots that nobody has, or none. It looks on a connection
// of its own: a search that passes over locked rows leaves gap locks in its
// transaction, which keep others from making rows.
func (a *attempt) freeSlot(ctx context.Context, slots []int) (int, error) {
	if len(slots) == 0 {
		return none, nil
	}
	rows, err := a.ask(ctx, a.freeSQL(slots))
	if server.Interrupted(err) { // somebody has locked the whole table
		return none, nil
	}
	if err != nil || len(rows) == 0 {
		return none, err
	}
	slot, err := strconv.Atoi(rows[0][0])
	if err != nil || slot < 0 || slot >= len(a.r.Slots) {
		return none, errForm
	}
	return slot, nil
}

// pause waits until a slot may be free, where none can be waited for in the
// server. done is for after the attempt that follows.
func (a *attempt) pause(ctx context.Context, first *leased) (done func(), err error) {
	if first != nil {
		done, err = a.await(ctx, first)
	} else { // the callers before this one have all of them
		done, err = func() {}, a.sleep(ctx)
	}
	if errors.Is(err, errFreed) {
		return func() {}, nil
	}
	return done, err
}

func (a *attempt) sleep(ctx context.Context) error {
	ctx, stop, err := a.waiting(ctx)
	if err != nil {
		return err
	}
	defer stop()
	select {
	case <-a.freed():
		return errFreed
	case <-time.After(slice):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// survey returns the slots that have no lease, and the lease which ends first,
// as far as that is known. Another may be given back before, so that one is to
// be waited for not long.
func (a *attempt) survey(ctx context.Context) (open []int, first *leased, err error) {
	rows, err := a.ask(ctx, a.surveySQL())
	if err != nil {
		return nil, nil, err
	}
	if len(rows) < len(a.names) {
		return nil, nil, errNoRow
	}
	for _, row := range rows {
		lease := live(row[0], row)
		if lease == nil {
			open = append(open, slices.Index(a.r.Slots, row[0]))
		} else if first == nil || lease.remaining < first.remaining {
			first = lease
		}
	}
	if first != nil {
		first.remaining = min(first.remaining, slice)
	}
	return open, first, nil
}
