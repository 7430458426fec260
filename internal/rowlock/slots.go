package rowlock

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// none stands for no slot.
const none = -1

// FreeSlot is for [strategy.Config.FreeSlot]. It does not make rows: a missing row is not free. A
// server without SKIP LOCKED tells about leases only. If no control connection is free for a
// second, the error matches ErrLocked.
func (l *Locker) FreeSlot(ctx context.Context, rows []string, open []int) (int, error) {
	return l.attempt(Request{Slots: rows}).freeSlot(ctx, open)
}

// beginSlot first tries the slot that is kept for the ticket, or any slot.
func (a *attempt) beginSlot(ctx context.Context) (*pool.Txn, error) {
	b := &slotBegun{attempt: a}
	err := (&slotSearch{attempt: a, in: b, guess: true}).run(ctx)
	return b.txn, err
}

// joinSlot tries only slots that seem to be free: on some servers a refused lock ends the
// transaction.
func (a *attempt) joinSlot(ctx context.Context) (alive bool, err error) {
	if _, err := a.c.ID(ctx); err != nil {
		return false, err
	}
	j := &slotJoined{attempt: a, alive: true}
	err = (&slotSearch{attempt: a, in: j}).run(ctx)
	if errors.Is(err, keyrow.ErrNoRow) {
		a.cfg.Rows.Forget(a.names)
	}
	if server.Locked(err) {
		err = lockerr.ErrLocked
	}
	return j.alive, err
}

// slotLock runs lock statements for the slot that the attempt aims at.
type slotLock interface {
	try(context.Context) error // fails at once if somebody has locked the slot
	wait(context.Context) error
	goesOn() bool // after one that has failed, another may follow
}

// slotBegun locks a slot in a transaction of its own.
type slotBegun struct {
	*attempt
	txn *pool.Txn
}

func (b *slotBegun) try(ctx context.Context) (err error) {
	b.txn, err = b.attempt.try(ctx)
	return err
}

func (b *slotBegun) wait(ctx context.Context) (err error) {
	b.txn, err = b.attempt.wait(ctx)
	return err
}

func (b *slotBegun) goesOn() bool { return true }

// slotJoined locks a slot in a transaction that is open.
type slotJoined struct {
	*attempt
	alive bool // the transaction goes on
}

func (j *slotJoined) lockNow(ctx context.Context) func() error {
	return func() error { return j.lock(ctx, j.trySQL(), false) }
}

func (j *slotJoined) try(ctx context.Context) error {
	again := j.lockNow(ctx)
	err := j.clear(ctx, again(), again)
	j.alive = server.Locked(err) && !j.cfg.Info.EndsTransaction(err)
	return err
}

func (j *slotJoined) wait(ctx context.Context) error {
	ctx, done, err := j.Patient(ctx)
	if err != nil {
		return err
	}
	defer done()
	err = j.clear(ctx, j.block(ctx), j.lockNow(ctx))
	// The server's own limit leaves the transaction as it is; on Galera a KILL ends it.
	j.alive = server.Interrupted(err) && !j.cfg.Info.EndsTransaction(err) || errors.Is(err, strategy.ErrWaitOver) && !j.cfg.Info.RollbackOnTimeout && !j.streams
	return err
}

func (j *slotJoined) goesOn() bool { return j.alive }

// slotSearch looks for a slot that can be locked, and locks it.
type slotSearch struct {
	*attempt
	in    slotLock
	guess bool // a slot may be tried although it may not be free
	lost  int  // how often in a row another caller was quicker
}

func (s *slotSearch) run(ctx context.Context) error {
	defer s.EndTurn()
	for {
		again, err := s.round(ctx)
		if !again {
			return err
		}
		s.guess = false
	}
}

// round tries a slot that seems to be free. If there is none it waits for one.
func (s *slotSearch) round(ctx context.Context) (again bool, err error) {
	slot, err := s.Slot(ctx, len(s.r.Slots), s.guess, s.freeSlot)
	if err != nil {
		return false, err
	}
	if slot != none {
		s.aim(slot)
		err = s.in.try(ctx)
		taken := s.taken(err) && s.in.goesOn()
		switch {
		case taken && !s.cfg.Info.Kills: // a wait for it could not be ended when another one is free
			s.Refused = append(s.Refused, slot)
			return true, nil
		case taken && s.lost < 3:
			s.lost++
			return true, nil
		}
		if s.EndTurn(); !taken {
			return s.answered(ctx, err)
		}
	}
	s.EndTurn()
	unleased, first, err := s.survey(ctx)
	if err != nil {
		return s.answered(ctx, err)
	}
	if s.Wait == 0 {
		if len(unleased) == 0 {
			return false, first
		}
		if err := s.refuse(ctx, 0); err != nil {
			return false, err
		}
	}
	open := queue.Without(unleased, s.Ticket.Taken())
	if !s.cfg.Info.Kills && len(open) > 0 { // to wait for one in the server would be to miss the others
		first = nil
	}
	if len(open) == 0 || !s.cfg.Info.Kills {
		if err := s.pause(ctx, first); err != nil {
			return false, err
		}
		s.Refused = nil
		s.keep(ctx)
		return true, nil
	}
	s.aim(open[rand.N(len(open))])
	err = s.in.wait(ctx)
	s.lost = 0
	return s.answered(ctx, err)
}

// answered decides what follows a lock statement, or a look at the slots, that has ended
// with err.
func (s *slotSearch) answered(ctx context.Context, err error) (again bool, _ error) {
	var lease *strategy.Leased
	switch {
	case err == nil || !s.in.goesOn():
		return false, err
	case errors.As(err, &lease):
		err = s.pass(ctx, lease)
	case server.Interrupted(err) || errors.Is(err, queue.ErrFreed) || s.outrun(err): // look again
		return true, nil
	case s.Vanished(err):
		err = s.cfg.Rows.Renew(ctx, s.names)
	default:
		return false, err
	}
	return err == nil, err
}

// pass is for a lease that a lock statement has found on a slot. It removes an expired one,
// so that the next search sees the slot's state.
func (a *attempt) pass(ctx context.Context, found *strategy.Leased) error {
	_, err := a.look(ctx, []string{found.Key})
	if errors.Is(err, errLeaving) && a.Wait > 0 {
		return a.rest(ctx, slice/5)
	}
	return err
}

// aim makes the next lock statement one for slot.
func (a *attempt) aim(slot int) {
	a.locked.Slot = slot
	a.keys = []Key{{Name: a.r.Slots[slot]}}
}

// freeSlot returns one of slots that is free, or none. It searches on a control connection:
// a search that passes over locked rows leaves gap locks in its transaction, and then no
// one could make rows there.
func (a *attempt) freeSlot(ctx context.Context, slots []int) (int, error) {
	rows, err := a.ask(ctx, a.freeSQL(slots))
	if server.Interrupted(err) { // the whole table is locked
		return none, nil
	}
	switch {
	case err != nil:
		return none, err
	case len(rows) == 0:
		return none, nil
	}
	slot, err := strconv.Atoi(rows[0][0])
	if err != nil || slot < 0 || slot >= len(a.r.Slots) {
		return none, errForm
	}
	return slot, nil
}

// pause waits until a slot may be free, if none can be waited for in the server.
// Then it may be the attempt's turn, until endTurn.
func (a *attempt) pause(ctx context.Context, first *strategy.Leased) (err error) {
	a.Heard.Store(true)
	if first != nil {
		err = a.await(ctx, first)
	} else { // the callers before this one hold all of them
		err = a.sleep(ctx)
	}
	if errors.Is(err, queue.ErrFreed) {
		return nil
	}
	return err
}

func (a *attempt) sleep(ctx context.Context) error {
	if err := a.mayBlock(ctx); err != nil {
		return err
	}
	ctx, stop, err := a.Patient(ctx)
	if err != nil {
		return err
	}
	defer stop()
	return a.Ticket.AwaitFreed(ctx, slice)
}

// survey returns the slots without a lease, and the lease that expires first. Another lease
// may be released earlier, so the remaining time is cut to a short wait.
func (a *attempt) survey(ctx context.Context) (open []int, first *strategy.Leased, err error) {
	rows, err := a.ask(ctx, a.readSQL(a.names))
	if err != nil {
		return nil, nil, err
	}
	if len(rows) < len(a.names) {
		return nil, nil, keyrow.ErrNoRow
	}
	for _, row := range rows {
		lease, err := live(row)
		if err != nil {
			return nil, nil, err
		}
		if lease.Remaining == 0 {
			open = append(open, slices.Index(a.r.Slots, row[0]))
		} else if first == nil || lease.Remaining < first.Remaining {
			first = lease
		}
	}
	if first != nil {
		first.Remaining = min(first.Remaining, slice)
	}
	return open, first, nil
}
