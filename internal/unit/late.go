package unit

import (
	"context"
	"database/sql/driver"
	"errors"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// runLate runs a statement of a transaction that began without the hint: the
// lock is taken in that transaction first.
func (c *Conn) runLate(ctx context.Context, s *scope, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	t := c.tx
	if t.under != nil && t.under != s.unit {
		return nil, nil, c.k.Error(st.Op(), h, lockerr.With(lockerr.ErrLost, errors.New(
			"an earlier statement of this transaction ran under the lock of a unit of work that is another, or has ended; begin the transaction with the lock context")))
	}
	if err := s.undecided(h, s.unit, st); err != nil {
		return nil, nil, err
	}
	if err := c.fit(st.Op(), h); err != nil {
		return nil, nil, err
	}
	w, err := s.wanted(h)
	if err != nil {
		return nil, nil, err
	}
	l, err := c.k.Use(ctx, h)
	if err != nil {
		return nil, nil, c.k.SetupError(h, err)
	}
	levels, err := c.levels(ctx, l, t.levels)
	if err == nil && w.Versions() {
		err = l.Dirty(levels)
	}
	if err != nil {
		return nil, nil, c.k.Error(st.Op(), h, noRetry(err))
	}
	// What it has read under the unit is as new as the lock.
	if l.StaleSnapshot(t.read && t.under == nil, h, w, levels) {
		return nil, nil, c.k.Error(st.Op(), h, lockerr.With(lockerr.ErrStaleSnapshot, errors.New(
			"begin the transaction with the lock context, or say lockctx.AllowStale()")))
	}
	if s.unit != nil {
		return c.runUnder(ctx, s.unit, h, w, st)
	}
	wait := c.k.Budget(h)
	undo, err := s.takeGuards(ctx, l, wait, w.Guards, lent{}, false)
	if err != nil {
		return nil, nil, err
	}
	if t.u, err = c.joinLate(ctx, l, s, h, c.k.Requests(l, s.caller(false), wait, w)); err != nil {
		undo()
		return nil, nil, err
	}
	if err := t.u.verify(ctx); err != nil {
		t.u.fail(err, false)
		return nil, nil, err
	}
	return t.u.run(ctx, st)
}

// runUnder runs a statement of a transaction that began without the hint, under
// the locks that the lock context holds in a unit of work elsewhere.
func (c *Conn) runUnder(ctx context.Context, u *unit, h *hint.Hint, w handle.Wanted, st *statement.Statement) (driver.Rows, driver.Result, error) {
	refuse := func(why string) (driver.Rows, driver.Result, error) {
		return nil, nil, c.k.Error(st.Op(), h, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the lock context has a unit of work open elsewhere, "+why+"; begin the transaction with the lock context")))
	}
	t := c.tx
	switch {
	case !w.Nothing():
		return refuse("which does not hold all of these keys")
	case u.inside() && (t.changed || st.Info.Changes != sqltext.ChangesNothing):
		return refuse("in a transaction or a hold, which goes on after the commit of this one and may not see what it has changed")
	case u.steps() || u.scope.remembers():
		return refuse("whose commit is to set a version")
	}
	if err := u.join(ctx, c.k, h); err != nil { // the keys are held: for the holds around
		return nil, nil, err
	}
	t.read = t.read || st.Info.Snapshot
	t.under, t.hint = u, h
	u.wrote = u.wrote || st.MayWrite()
	r, res, err := c.runHere(ctx, st)
	if err == nil && st.Query {
		noteHolds(st)
	}
	return r, res, err
}

// joinLate makes the open transaction, which began without the hint, that of a
// unit of work, and takes its row locks.
func (c *Conn) joinLate(ctx context.Context, l *handle.Locks, s *scope, h *hint.Hint, requests []handle.Request) (*unit, error) {
	t := c.tx
	for _, r := range requests {
		if r.None() {
			c.k.Tenures.Settle(ctx, r.Places)
		}
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return nil, err
	}
	defer c.link.EndTurn()
	granted, alive, err := c.lockLate(ctx, l, h, requests)
	if err != nil {
		return nil, c.failedLate(h, noRetry(err), alive)
	}
	u := c.newUnit(l, s, h, c.link.Continue(t.base), t.opts)
	for i, r := range requests {
		u.granted(r, nil, granted[i])
	}
	u.hasOlder = len(requests) > 0
	if c.unlimit != "" {
		l.KeepAlive.Keep(c.link, u.lostBehind)
	}
	u.read, u.wrote, u.changed, u.stack = t.read, true, "a transaction", []*inner{&t.inner} // it may have written before
	u.levels = t.levels
	u.endsWith(t.ctx)
	return u, nil
}

// lockLate takes row locks in the open transaction. alive: after an error it goes on as
// if nothing had been asked for.
func (c *Conn) lockLate(ctx context.Context, l *handle.Locks, h *hint.Hint, requests []handle.Request) (granted []rowlock.Locked, alive bool, err error) {
	if err = c.openLate(ctx, l, len(requests) > 0); err != nil {
		err = c.k.Error("lock", h, noRetry(err))
	}
	granted = make([]rowlock.Locked, len(requests))
	for i := range requests {
		if err != nil {
			break
		}
		r := &requests[i]
		r.Seen = c.k.Observe(ctx, r.Places...)
		granted[i], alive, err = l.Join(r.Seen.Context(ctx), c.link, r.Now())
		if err == nil {
			r.Seen.TakenBy(c.link, nil)
		}
		alive = alive && i == 0
	}
	for _, r := range requests { // where one was refused, those before it were granted for nothing
		c.k.Answered(r.Seen, 0, c.k.Refused(err, r.Places))
	}
	return granted, alive, err
}

// failedLate sees to the transaction in which no lock was granted because of err.
func (c *Conn) failedLate(h *hint.Hint, err error, alive bool) error {
	if alive && c.link.Valid() && c.tidy() != nil {
		alive = false
	}
	if alive && c.link.Valid() { // its driver closes a connection that answers too late
		return err
	}
	c.tx.failed = c.k.Error("statement", h, lockerr.With(lockerr.ErrLost, err))
	if !c.link.Valid() || c.tx.base.Rollback() != nil {
		c.bad.Store(true)
	}
	return err
}

// openLate makes sure that the transaction is still open in which a lock is to
// be taken: COMMIT as text, DDL, a procedure or a swallowed deadlock may have
// ended it while nobody looked. For row locks it also sets the limit on idleness
// that Begin would have.
func (c *Conn) openLate(ctx context.Context, l *handle.Locks, rows bool) error {
	limit := l.IdleLimit()
	limited := rows && limit > 0
	if limited {
		c.unlimit = l.Info().SetIdleLimit(l.Info().IdleLimit)
	}
	timed, cancel := context.WithTimeout(ctx, pool.AnswerTime)
	defer cancel()
	stays, err := savepointStays(timed, c.link.Conn, "mysqllock_late")
	if err == nil && rows && l.Info().Optimists {
		err = server.Pessimist(timed, c.link.Conn)
	}
	if err == nil && !stays {
		return lockerr.With(lockerr.ErrLost, errors.New("the transaction had ended before it asked for the lock"))
	}
	if err == nil && limited {
		err = server.Exec(ctx, c.link.Conn, l.Info().SetIdleLimit(limit))
	}
	if err != nil && ctx.Err() != nil { // the driver has closed the connection, perhaps after an answer
		return strategy.Silent(ctx)
	}
	return err
}
