package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"

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
func (c *Conn) runLate(ctx context.Context, s *ctxState, h *hint.Hint, st *statement.Statement) (driver.Rows, driver.Result, error) {
	t := c.tx
	if t.under != nil && t.under != s.unit {
		return nil, nil, c.k.Error(st.Op(), h, lockerr.With(lockerr.ErrLost, errors.New(
			"an earlier statement of this transaction ran under the lock of a unit of work that is another, or has ended; begin the transaction with the lock context")))
	}
	if err := s.undecided(h, s.unit, st); err != nil {
		return nil, nil, err
	}
	if err := c.fit(ctx, st.Op(), h); err != nil {
		return nil, nil, err
	}
	if err := c.asks(ctx, h, st, nil); err != nil {
		return nil, nil, err
	}
	p, err := s.plan(h)
	if err != nil {
		return nil, nil, err
	}
	if err := p.ready(ctx, s, false); err != nil {
		return nil, nil, err
	}
	levels, err := c.levels(ctx, p.l, t.levels)
	if err == nil && p.versions {
		err = p.l.Dirty(levels)
	}
	if err != nil {
		return nil, nil, c.k.Error(st.Op(), h, noRetry(err))
	}
	// What it has read under the unit is as new as the lock.
	if p.l.StaleSnapshot(t.read && t.under == nil, p.versions, h, levels) {
		return nil, nil, c.k.Error(st.Op(), h, lockerr.With(lockerr.ErrStaleSnapshot, errors.New(
			"begin the transaction with the lock context, or say lockctx.AllowStale()")))
	}
	if s.unit != nil {
		return c.runUnder(ctx, s.unit, p, st)
	}
	undo, err := s.takeGrants(ctx, p, lent{}, nil)
	if err != nil {
		return nil, nil, err
	}
	if t.u, err = c.joinLate(ctx, s, p); err != nil {
		undo()
		return nil, nil, err
	}
	if err := t.u.verify(ctx); err != nil {
		t.u.fail(err, false)
		return nil, nil, err
	}
	return c.runIn(ctx, t.u, st)
}

// runUnder runs a statement of a transaction that began without the hint, under
// the locks that the lock context holds in a unit of work elsewhere.
func (c *Conn) runUnder(ctx context.Context, u *unit, p *plan, st *statement.Statement) (driver.Rows, driver.Result, error) {
	refuse := func(why string) (driver.Rows, driver.Result, error) {
		return nil, nil, c.k.Error(st.Op(), p.h, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the lock context has a unit of work open elsewhere, "+why+"; begin the transaction with the lock context")))
	}
	t := c.tx
	switch {
	case len(p.missing) > 0:
		return refuse("which does not hold all of these keys")
	case u.inside() && (t.changed || st.Info.Changes != sqltext.ChangesNothing):
		return refuse("in a transaction or a hold, which goes on after the commit of this one and may not see what it has changed")
	case u.raises || u.ctxState.remembers():
		return refuse("whose commit is to set a version")
	}
	if err := u.join(ctx, p.h); err != nil { // the keys are held: for the holds around
		return nil, nil, err
	}
	t.read = t.read || st.Info.Snapshot
	t.under, t.hint = u, p.h
	u.wrote = u.wrote || st.MayWrite()
	r, res, err := c.runHere(ctx, st)
	if err == nil && st.Query {
		noteHolds(st)
	}
	return r, res, err
}

// joinLate makes the open transaction, which began without the hint, that of a
// unit of work, and takes its row locks.
func (c *Conn) joinLate(ctx context.Context, s *ctxState, p *plan) (*unit, error) {
	t := c.tx
	if p.wait.Left() == 0 {
		c.k.AwaitEnding(ctx, slices.Concat(p.rows, p.slots))
	}
	if err := c.link.AwaitTurn(ctx); err != nil {
		return nil, err
	}
	defer c.link.EndTurn()
	granted, alive, err := c.lockLate(ctx, p)
	if err != nil {
		return nil, c.failedLate(p.h, noRetry(err), alive)
	}
	u := c.newUnit(s, p, c.link.Continue(t.base), t.opts)
	for i, r := range p.requests {
		u.granted(r, nil, granted[i])
	}
	u.hasOlder = p.inTransaction()
	if c.unlimit != "" {
		u.l.KeepAlive.Keep(c.link, u.lostBehind)
	}
	u.read, u.wrote, u.changed, u.stack = t.read, true, "a transaction", []*inner{&t.inner} // it may have written before
	u.levels = t.levels
	u.endsWith(t.ctx)
	return u, nil
}

// lockLate takes row locks in the open transaction. alive: after an error it goes on as
// if nothing had been asked for.
func (c *Conn) lockLate(ctx context.Context, p *plan) (granted []rowlock.Locked, alive bool, err error) {
	if err := c.openLate(ctx, p.l, p.inTransaction()); err != nil {
		err = c.k.Error("lock", p.h, noRetry(err))
		c.k.Suspect(err)
		return nil, false, err
	}
	granted = make([]rowlock.Locked, len(p.requests))
	asked := 0
	for ; asked < len(p.requests) && err == nil; asked++ {
		r := &p.requests[asked]
		seen, own := c.k.Observe(ctx, r.resources...)
		r.seen, r.Wait = seen, p.wait.Left()
		granted[asked], alive, err = p.l.Join(own, c.link, r.Request)
		alive = alive && asked == 0
	}
	for _, r := range p.requests[:asked] { // where one was refused, those before it were granted for nothing
		r.seen.Answered(c.link, nil, 0, err)
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
	if !c.link.Valid() || c.tx.txn().Rollback(0) != nil {
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
