package unit

import (
	"context"
	"fmt"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// join adds to the unit what of a hint it does not hold yet.
func (u *unit) join(ctx context.Context, k *handle.Handle, h *hint.Hint) error {
	for _, g := range enclosing(h) {
		if !slices.Contains(u.enclosing, g) {
			u.enclosing = append(u.enclosing, g)
		}
	}
	w, err := u.scope.wanted(h)
	if err != nil || w.Nothing() {
		return err
	}
	if _, err := k.Use(ctx, h); err != nil {
		return k.SetupError(h, err)
	}
	if err := u.ready(ctx, h, w); err != nil {
		return err
	}
	wait := k.Budget(h)
	undo, err := u.scope.takeGuards(ctx, u.l, wait, w.Guards, lent{}, false)
	if err != nil {
		return err
	}
	if w.Versions() {
		if err := u.verify(ctx); err != nil {
			undo()
			return err
		}
	}
	for i, r := range k.Requests(u.l, u.scope.caller(false), wait, w) {
		if err := u.lock(ctx, r, i == 0); err != nil {
			if u.state != ended {
				undo()
			}
			return err
		}
	}
	return nil
}

// ready returns why what the unit has read, or may read, is of no use with the locks
// that it is to have beside its own.
func (u *unit) ready(ctx context.Context, h *hint.Hint, w handle.Wanted) error {
	if err := u.knowLevels(ctx); err != nil {
		return err
	}
	if w.Versions() {
		if err := u.l.Dirty(u.levels); err != nil {
			return u.error("lock", err)
		}
	}
	if u.l.StaleSnapshot(u.read, h, w, u.levels) {
		return u.error("lock", lockerr.With(lockerr.ErrStaleSnapshot, fmt.Errorf(
			"it has read before it asks for %s; ask for all keys at once (lockctx.WithKeys), or say lockctx.AllowStale()", handle.Names(h))))
	}
	return nil
}

// verify makes sure that the transaction shows nothing that is older than what was
// remembered for it on another connection.
func (u *unit) verify(ctx context.Context) error {
	for _, g := range u.scope.guards {
		v, ok := g.held.(strategy.Verified)
		if !ok {
			continue
		}
		if err := u.takeLink(ctx, "lock"); err != nil {
			return err
		}
		err := v.Verify(ctx, u.link.Conn)
		u.give()
		if err != nil {
			return u.error("lock", noRetry(err))
		}
	}
	return nil
}

// knowLevels makes sure of the isolation level where what ran on the connection
// before leaves all of them possible.
func (u *unit) knowLevels(ctx context.Context) error {
	home := u.home()
	if u.levels != sqltext.AnyLevel || home == nil || home.texts.session != sqltext.AnyLevel {
		return nil
	}
	if err := u.takeLink(ctx, "lock"); err != nil {
		return err
	}
	defer u.give()
	levels, err := home.askLevels(ctx, u.l)
	if err != nil {
		return u.check(ctx, "lock", err)
	}
	u.levels = levels
	return nil
}

// lockRest takes the row locks that requests ask for after the first of them. If
// one is not granted the unit is over as if it had not begun: the guards that it
// began with stay, and the lock context may try again.
func (u *unit) lockRest(ctx context.Context, requests []handle.Request) error {
	u.keep = true
	for _, r := range requests[min(1, len(requests)):] {
		if err := u.lock(ctx, r, true); err != nil {
			_ = u.finish(false)
			return err
		}
	}
	u.keep = false
	return nil
}

// lock takes row locks in the open transaction. If they are not granted it goes
// on where that was the first thing it was asked for.
func (u *unit) lock(ctx context.Context, r handle.Request, first bool) error {
	if r.None() {
		u.scope.k.Tenures.Settle(ctx, r.Places)
	}
	if err := u.takeLink(ctx, "lock"); err != nil {
		return err
	}
	defer u.give()
	ctx, release := u.on.untilClosed(ctx)
	defer release()
	r.Seen = u.scope.k.Observe(ctx, r.Places...)
	ctx = r.Seen.Context(ctx)
	locked, alive, err := u.l.Join(ctx, u.link, r.Now())
	if err == nil {
		r.Seen.TakenBy(u.link, nil)
	}
	u.scope.k.Answered(r.Seen, 0, u.scope.k.Refused(err, r.Places))
	if err == nil {
		u.hasOlder = u.hasOlder || len(u.rows) == 0
		u.granted(r, nil, locked)
		return nil
	}
	if !alive || !first {
		gone := server.Gone(err, u.link.Conn)
		err = noRetry(err)
		u.lose(err, gone)
	}
	return err
}
