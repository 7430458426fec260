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

var errFull = errors.New("all slots are taken")

func (a *attempt) beginSlot(ctx context.Context) (txn *pool.Txn, err error) {
	try := func(ctx context.Context) (err error) {
		txn, err = a.try(ctx)
		return err
	}
	wait := func(ctx context.Context) (err error) {
		txn, err = a.wait(ctx)
		return err
	}
	return txn, a.oneSlot(ctx, false, try, wait)
}

func (a *attempt) joinSlot(ctx context.Context) (alive bool, err error) {
	if _, err := a.c.ID(ctx); err != nil {
		return false, err
	}
	alive = true
	try := func(ctx context.Context) error {
		err := a.lock(ctx, a.trySQL())
		alive = errors.Is(err, errFull)
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
	err = a.oneSlot(ctx, true, try, wait)
	if errors.Is(err, errNoRow) {
		a.cfg.Rows.Forget(a.names)
	}
	return alive, err
}

// oneSlot locks one of the slots. try tries all of a.choice, and wait waits for
// the one in a.keys. What they lock in a transaction of the caller's, which
// joined says, stays locked when they fail.
func (a *attempt) oneSlot(ctx context.Context, joined bool, try, wait func(context.Context) error) error {
	leases := make(map[string]*leased) // that are known to be live
	look := joined                     // for leases, before the next attempt
	done := func() {}                  // ends the turn that await gave
	defer func() { done() }()
	for vanished := 0; ; {
		if look {
			found, seen, err := a.look(ctx)
			if err != nil {
				return err
			}
			if seen {
				clear(leases)
			}
			for _, lease := range found {
				leases[lease.key] = lease
			}
		}
		a.choose(leases)
		if len(a.choice) == 0 {
			first := firstToEnd(leases)
			if a.r.Wait == 0 {
				return first
			}
			done()
			next, err := a.await(ctx, first)
			if err != nil {
				done = func() {}
				return err
			}
			done = next
			clear(leases)
			if joined {
				a.keep(ctx)
			}
			continue
		}
		err := try(ctx)
		done()
		done = func() {}
		if errors.Is(err, errFull) && a.r.Wait > 0 {
			a.locked.Slot = a.choice[0]
			a.keys, a.choice = []Key{{Name: a.r.Slots[a.choice[0]]}}, nil
			if err = wait(ctx); server.Interrupted(err) && !(joined && a.cfg.Info.EndsTransaction(err)) {
				continue
			}
		}
		var lease *leased
		switch {
		case errors.Is(err, errFull):
			a.holder = a.askHolder(ctx, 0)
			return lockerr.ErrLocked
		case errors.As(err, &lease) && !joined:
			leases[lease.key], look = lease, true
		case (errors.Is(err, errNoRow) || server.Missing(err)) && !joined && vanished < 3:
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

// choose makes all slots the choice that have no lease, from a random one on:
// those who all began with the first would be in each other's way.
func (a *attempt) choose(leases map[string]*leased) {
	n := len(a.r.Slots)
	first := rand.N(n)
	a.choice = make([]int, 0, n)
	for i := range n {
		slot := (first + i) % n
		if leases[a.r.Slots[slot]] == nil {
			a.choice = append(a.choice, slot)
		}
	}
}

// firstToEnd is for a wait until the first of the leases ends, as far as that is
// known: another may be given back before, so it is looked at again soon.
func firstToEnd(leases map[string]*leased) *leased {
	var first *leased
	for _, lease := range leases {
		if first == nil || lease.remaining < first.remaining {
			first = lease
		}
	}
	soon := *first
	soon.remaining = min(soon.remaining, slice)
	return &soon
}

// recheck is after how many grants that have passed over a slot it is looked
// whether its row has vanished.
const recheck = 16

// chosen reads which of the slots is locked. A row that is not there is passed
// over like one that is locked, and its gap is locked, in which nobody could
// make it, or another key's row.
func (a *attempt) chosen(ctx context.Context, rows [][]string) ([]Key, error) {
	slot := -1
	if len(rows) > 0 {
		if len(rows[0]) < 6 {
			return nil, errForm
		}
		var err error
		if slot, err = strconv.Atoi(rows[0][5]); err != nil || !slices.Contains(a.choice, slot) {
			return nil, errForm
		}
	}
	if slot < 0 || slot != a.choice[0] && a.passed.Add(1)%recheck == 0 {
		count, err := a.ask(ctx, a.countSQL())
		if err == nil && len(count) == 1 && count[0][0] != strconv.Itoa(len(a.names)) {
			return nil, errNoRow
		}
	}
	if slot < 0 {
		return nil, errFull
	}
	a.locked.Slot = slot
	return []Key{{Name: a.r.Slots[slot]}}, nil
}
