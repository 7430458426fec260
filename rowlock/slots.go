package rowlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// none is where no slot is known to be free.
const none = -1

// beginSlot tries the slot free first, or any one.
func (a *attempt) beginSlot(ctx context.Context, free int) (txn *pool.Txn, err error) {
	try := func(ctx context.Context) (err error) {
		txn, err = a.try(ctx)
		return err
	}
	wait := func(ctx context.Context) (err error) {
		txn, err = a.wait(ctx)
		return err
	}
	if n := len(a.r.Slots); free == none || free >= n {
		free = rand.N(n)
	}
	return txn, a.oneSlot(ctx, free, try, wait, func() bool { return true })
}

// joinSlot tries none that is not seen to be free: on some servers a lock that is
// refused ends the transaction.
func (a *attempt) joinSlot(ctx context.Context) (alive bool, err error) {
	if _, err := a.c.ID(ctx); err != nil {
		return false, err
	}
	alive = true
	try := func(ctx context.Context) error {
		err := a.lock(ctx, a.trySQL())
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
		alive = server.Interrupted(err) && !a.cfg.Info.EndsTransaction(err) || errors.Is(err, errWaitOver) && !a.cfg.Info.RollbackOnTimeout
		return err
	}
	err = a.oneSlot(ctx, none, try, wait, func() bool { return alive })
	if errors.Is(err, errNoRow) {
		a.cfg.Rows.Forget(a.names)
	}
	if server.Locked(err) {
		err = lockerr.ErrLocked
	}
	return alive, err
}

// oneSlot locks one of the slots, slot first where it is not none. try and wait
// run a lock statement for the one that a.keys names; goesOn reports whether
// another may follow one that has failed.
func (a *attempt) oneSlot(ctx context.Context, slot int, try, wait func(context.Context) error, goesOn func() bool) error {
	done := func() {} // ends the turn that await gave
	defer func() { done() }()
	for vanished, lost := 0, 0; ; slot = none {
		var err error
		if slot == none {
			if slot, err = a.freeSlot(ctx); err != nil {
				return err
			}
		}
		if slot != none {
			a.aim(slot)
			err = try(ctx)
			if server.Locked(err) && goesOn() && lost < 3 { // somebody was quicker
				lost++
				continue
			}
		}
		done()
		done = func() {}
		if slot == none || server.Locked(err) && goesOn() {
			var open []int
			var first *leased
			open, first, err = a.survey(ctx)
			switch {
			case err != nil:
			case a.r.Wait == 0 && len(open) == 0:
				return first
			case a.r.Wait == 0:
				a.holder = a.askHolder(ctx, 0)
				return lockerr.ErrLocked
			case len(open) == 0:
				turn, err := a.await(ctx, first)
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
		case errors.As(err, &lease) || server.Interrupted(err): // look again
		case (errors.Is(err, errNoRow) || server.Missing(err)) && vanished < 3:
			vanished++
			a.cfg.Rows.Forget(a.names)
			if err := a.cfg.Rows.Exist(ctx, a.names); err != nil {
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

// freeSlot returns a slot that nobody has, or none. It looks on a connection
// of its own: a search that passes over locked rows leaves gap locks in its
// transaction, which keep others from making rows.
func (a *attempt) freeSlot(ctx context.Context) (int, error) {
	rows, err := a.ask(ctx, a.freeSQL())
	if err != nil || len(rows) == 0 {
		return none, err
	}
	slot, err := strconv.Atoi(rows[0][0])
	if err != nil || slot < 0 || slot >= len(a.r.Slots) {
		return none, errForm
	}
	return slot, nil
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
