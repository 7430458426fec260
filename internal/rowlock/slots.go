package rowlock

import (
	"context"
	"errors"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// beginSlot begins a transaction, and locks a slot in it.
func (a *attempt) beginSlot(ctx context.Context) (txn *pool.Txn, err error) {
	run := func(lock func(context.Context) (*pool.Txn, error)) func(context.Context) error {
		return func(ctx context.Context) (err error) {
			txn, err = lock(ctx)
			return err
		}
	}
	err = a.takeSlot(ctx, false, run(a.try), run(a.wait))
	return txn, err
}

// joinSlot locks a slot in the transaction that is open. It tries only slots that seem to be free, since on some servers
// a refused lock ends the transaction. alive says that the transaction goes on.
func (a *attempt) joinSlot(ctx context.Context) (alive bool, err error) {
	if _, err := a.c.ID(ctx); err != nil {
		return false, err
	}
	now := func(ctx context.Context) func() error {
		return func() error {
			ctx, cancel := server.Within(ctx, pool.AnswerTime)
			defer cancel()
			return a.lock(ctx, a.trySQL()...)
		}
	}
	try := func(ctx context.Context) error {
		err := a.clear(ctx, now(ctx)(), now(ctx))
		a.txnOver = !server.Locked(err) || a.l.cfg.Info.EndsTransaction(err)
		return err
	}
	wait := func(ctx context.Context) error {
		ctx, done, err := a.Patient(ctx)
		if err != nil {
			return err
		}
		defer done()
		err = a.clear(ctx, a.block(ctx), now(ctx))
		// The server's own limit leaves the transaction as it is; on Galera a KILL ends it.
		stopped := errors.Is(err, strategy.ErrWaitOver) && !a.l.cfg.Info.RollbackOnTimeout && !a.l.streams
		a.txnOver = !stopped && (!server.Interrupted(err) || a.l.cfg.Info.EndsTransaction(err))
		return err
	}
	err = a.noted(a.takeSlot(ctx, true, try, wait))
	if server.Locked(err) {
		err = lockerr.ErrLocked
	}
	return !a.txnOver, err
}

// takeSlot locks one of the slots. try and wait run a lock statement for a.keys. If such a statement ends the open
// transaction, the search ends, too.
func (a *attempt) takeSlot(ctx context.Context, sure bool, try, wait func(context.Context) error) error {
	lock := func(ctx context.Context, slot int, how func(context.Context) error) error {
		a.locked.Slot, a.keys = slot, []Key{{Name: a.r.Slots[slot]}}
		err := how(ctx)
		if a.EndTurn(); err != nil && !a.txnOver {
			err = a.searchOn(ctx, err)
		}
		return err
	}
	s := strategy.Slots{
		Rows: a.r.Slots, Sure: sure,
		Try: func(ctx context.Context, slot int) error { return lock(ctx, slot, try) },
		Ready: func(ctx context.Context) error {
			a.keep(ctx)
			return a.mayBlock(ctx)
		},
		Refuse: func(ctx context.Context) error {
			lease, err := a.look(ctx, a.names)
			switch {
			case errors.Is(err, keyrow.ErrNoRow):
				return a.searchOn(ctx, err)
			case lease != nil:
				a.HeldBy = keyrow.HolderOf(lease.Owner)
			}
			return a.refuse(ctx, 0)
		},
	}
	if a.l.cfg.Info.Kills {
		s.Wait = func(ctx context.Context, slot int) error {
			lease, err := a.look(ctx, []string{a.r.Slots[slot]})
			switch {
			case err != nil:
				return a.searchOn(ctx, err)
			case lease == nil:
				return lock(ctx, slot, wait)
			}
			lease.Remaining = min(lease.Remaining, strategy.SlotWait) // another slot may be free sooner
			if err = a.await(ctx, lease); err != nil && !errors.Is(err, queue.ErrFreed) {
				return err
			}
			return strategy.ErrAgain
		}
	}
	_, err := a.TakeSlot(ctx, &a.l.cfg, s)
	return err
}

// searchOn says how the search goes on after a lock statement, or a look at a slot, has failed with err: it returns
// strategy.ErrTaken or strategy.ErrAgain, or the error that ends the search.
func (a *attempt) searchOn(ctx context.Context, err error) error {
	var lease *strategy.Leased
	if errors.As(err, &lease) { // look removes an expired lease, and then the slot is free
		a.HeldBy = keyrow.HolderOf(lease.Owner)
		if lease, err = a.look(ctx, []string{lease.Key}); lease != nil && err == nil {
			return strategy.ErrTaken
		}
	}
	switch {
	case a.l.taken(err):
		return strategy.ErrTaken
	case errors.Is(err, errLeaving) && a.Wait > 0:
		err = a.rest(ctx, breath)
	case server.Interrupted(err), errors.Is(err, queue.ErrFreed): // look again
		err = nil
	case a.Vanished(err):
		err = a.l.cfg.Rows.Renew(ctx, a.names)
	}
	if err != nil {
		return err
	}
	return strategy.ErrAgain
}
