package rowlock

import (
	"context"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Join locks further keys in the transaction that is open on c. After an error, alive says that the transaction goes on
// as if Join had not been called; if alive is false, the transaction must be rolled back.
func (l *Locker) Join(ctx context.Context, c *pool.Conn, r Request) (locked Locked, alive bool, err error) {
	ctx = r.taking(ctx)
	a := l.attempt(r)
	defer a.Finish()
	a.c, a.mayHaveSnapshot = c, true
	if alive, err = a.join(ctx); err != nil {
		// After a deadlock the transaction's other locks must become free. A wait that could not be stopped in time has
		// closed the connection.
		alive = alive && !errors.Is(err, lockerr.ErrDeadlock) && c.Valid()
		if !alive && (server.Gone(err, nil) || l.cfg.Info.EndsTransaction(err) && !server.Deadlock(err) && !server.Locked(err)) {
			err = lockerr.With(lockerr.ErrLost, err)
		}
		return Locked{}, alive, a.explain(ctx, err)
	}
	return a.locked, true, nil
}

func (a *attempt) join(ctx context.Context) (alive bool, err error) {
	if err := a.allowed(); err != nil {
		return true, err
	}
	if err := a.l.cfg.Rows.Exist(ctx, a.names); err != nil {
		return true, err
	}
	if len(a.r.Slots) > 0 {
		return a.joinSlot(ctx)
	}
	a.Once = true
	if err := a.unleased(ctx); err != nil {
		return true, err
	}
	// intact reports whether the transaction is as it was before a statement that has failed with err: a statement
	// for one key has locked nothing then, a statement for several keys may have locked some.
	intact := func(err error) bool { return len(a.r.Keys) == 1 && !a.l.cfg.Info.EndsTransaction(err) }
	try := func() error {
		ctx, cancel := server.Within(ctx, pool.AnswerTime)
		defer cancel()
		return a.lock(ctx, a.trySQL()...)
	}
	err = a.clear(ctx, try(), try)
	a.EndTurn()
	err = a.noted(err)
	if err == nil || !server.Locked(err) {
		return false, err
	}
	if a.Wait == 0 {
		if refused := a.refuse(ctx, a.c.KnownID()); refused != nil {
			return intact(err), refused
		}
	}
	if a.l.cfg.Info.EndsTransaction(err) {
		return false, lockerr.ErrLocked
	}
	if _, err := a.c.ID(ctx); err != nil {
		return false, err
	}
	alive, err = a.waitToJoin(ctx, try)
	return alive, a.noted(err)
}

// waitToJoin is join for keys that are locked: it waits for them in the server. try tries once, with NOWAIT.
func (a *attempt) waitToJoin(ctx context.Context, try func() error) (alive bool, err error) {
	for {
		wctx, done, err := a.Patient(ctx)
		if err != nil {
			return len(a.r.Keys) == 1 && !a.l.streams, err
		}
		err = a.clear(wctx, a.block(wctx), try)
		done()
		if err == nil || !server.Interrupted(err) && !server.Locked(err) || a.l.cfg.Info.EndsTransaction(err) {
			return errors.Is(err, strategy.ErrWaitOver) && !a.l.cfg.Info.RollbackOnTimeout && len(a.r.Keys) == 1 && !a.l.streams, err
		}
	}
}

// errCleaned ends a transaction that asks for a further key whose unused row a clean-up has removed since this process made
// it. The transaction has locked the gap where the row was, so nobody can make the row before the transaction is over.
var errCleaned = lockerr.With(lockerr.ErrDeadlock, errors.New("a clean-up has removed the row of the key, which was unused,"+
	" and it is made again once this unit of work is over; run it again"))

// noted returns the error err of a lock statement in an open transaction, and notes if a row is missing.
func (a *attempt) noted(err error) error {
	if !errors.Is(err, keyrow.ErrNoRow) {
		return err
	}
	a.l.cfg.Rows.Forget(a.names)
	return errCleaned
}

// unleased waits until no key has a live lease, of those that ever had one: the open transaction could not unlock such
// a row again. It reads on another connection, since a plain read in the transaction could open its snapshot. After
// that the attempt may have the turn to ask, until endTurn.
func (a *attempt) unleased(ctx context.Context) error {
	names := slices.DeleteFunc(slices.Clone(a.names), func(name string) bool { return !a.l.cfg.Rows.Leased(name) })
	if len(names) == 0 {
		return nil
	}
	for {
		lease, err := a.look(ctx, names)
		if errors.Is(err, errLeaving) && a.Wait > 0 {
			if err := a.rest(ctx, breath); err != nil {
				return err
			}
			continue
		}
		blind := err != nil && ctx.Err() == nil && !errors.Is(err, errLeaving) // the lock statement checks again
		if blind || err == nil && lease == nil {
			return nil
		}
		a.EndTurn()
		if err != nil {
			return err
		}
		if a.Wait == 0 {
			return lease
		}
		if err = a.await(ctx, lease); err != nil {
			return err
		}
		a.keep(ctx)
	}
}

// keep keeps the transaction alive that is idle while its caller waits for a lease.
func (a *attempt) keep(ctx context.Context) {
	if a.c.Silence() > a.l.cfg.TTL/4 {
		_ = a.c.Ping(ctx) // if the connection is lost, its next statement says so
	}
}

// clear follows a lock statement that has ended with err, in a transaction that goes on. If the statement has found an
// expired lease, clear removes the lease from the row and tries again: only this transaction has the row locked by
// now. A shared lock becomes exclusive for that.
func (a *attempt) clear(ctx context.Context, err error, try func() error) error {
	for {
		var found *strategy.Leased
		if !errors.As(err, &found) {
			return err
		}
		rows, failed := a.ask(ctx, a.l.readSQL([]string{found.Key}))
		if failed != nil {
			return failed
		}
		if len(rows) == 1 {
			if lease, err := live(rows[0]); err != nil {
				return err
			} else if lease.Remaining > 0 {
				return lease
			}
		}
		if sabotage.KeepLapsed.Load() {
			return nil
		}
		if err := server.Exec(ctx, a.c.Conn, a.l.clearSQL(found)); err != nil {
			return leaving(err)
		}
		err = try()
	}
}
