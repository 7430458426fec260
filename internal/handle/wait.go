package handle

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Caller describes a caller that waits for a lock, or for a connection.
type Caller struct {
	Pooled bool       // the caller occupies a connection of database/sql
	Beside bool       // it occupies that connection for as long as it needs the session that it asks for
	Urgent bool       // others of this process wait for what the caller holds
	Waits  bool       // the caller is about to wait in the server, on the connection that it asks for
	Prefer *pool.Conn // the connection that suits the caller best; nil for none
	Keeps  *pool.Conn // the connection that the caller keeps while it waits: of its sql.Conn, or its unit of work; nil for none
	Holds  bool       // the caller's unit of work holds a lock
	Asked  *bool      // a caller of the lock context was made to try again; guarded by starvationGuard.mu
	// Has returns what the caller has: its tickets, and the resources for which others can ask the handle, too.
	Has func(context.Context, *Handle) ([]*queue.Ticket, []strategy.Resource)
}

// beginWait notes that asker waits for sought from now on, until done. The context that it returns ends with ctx, with a
// circle of waits, and when the handle is closed, unless the strategy ends the wait by itself then.
func (h *Handle) beginWait(ctx context.Context, asker Caller, sought Sought) (_ context.Context, done func(), err error) {
	ctx, leave, err := h.noteWait(ctx, asker, sought)
	if err != nil || sought.hearsClose() {
		return ctx, leave, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(h.ctx, func() { cancel(lockerr.ErrClosed) })
	return ctx, func() { stop(); cancel(nil); leave() }, nil
}

// noteWait is beginWait without the end of the handle.
func (h *Handle) noteWait(ctx context.Context, asker Caller, sought Sought) (_ context.Context, done func(), err error) {
	waits := func() {}
	if sought.queue != nil {
		tickets, has := asker.Has(ctx, h)
		if len(tickets) > 0 || len(sought.resources) > 1 { // else the caller can be in nobody's way
			w := &queue.Wanted{Queue: sought.queue, Holds: tickets, Keys: QueueKeys(sought.resources)}
			var ok bool
			if waits, ok = w.Wait(); !ok {
				return nil, nil, queue.ErrDeadlock
			}
			ctx = w.In(ctx)
			if held := sought.l.held(has); len(held) > 0 {
				own, end := context.WithCancelCause(ctx)
				forget := waits
				var watched sync.WaitGroup
				watched.Go(func() { sought.l.watchCircles(own, held, sought.resources, end) })
				ctx, waits = own, func() { end(nil); watched.Wait(); forget() }
			}
		}
	}
	leave := func() {}
	switch {
	case asker.Pooled && !h.Bounded():
		if ctx, leave, err = h.StarvationGuard.enter(ctx, asker.Asked); err != nil {
			refused := lockerr.ErrLocked
			if sought.l == nil { // the caller waits for a session, whatever the key
				refused = lockerr.ErrExhausted
			}
			err = lockerr.With(refused, err)
		}
	case asker.Keeps == nil:
	case asker.Holds:
		asker.Keeps.BlockHolding()
		leave = asker.Keeps.Unblocked
	case asker.Keeps.Block():
		leave = asker.Keeps.Unblocked
	default:
		err = errKeepsConn
	}
	if err != nil {
		waits()
		return nil, nil, err
	}
	h.waiters.Add(1)
	return ctx, func() { leave(); waits(); h.waiters.Add(-1) }, nil
}

// errKeepsConn refuses a caller that would wait with a connection that it cannot give back. Enough callers do
// that already: the holder needs a connection.
var errKeepsConn = lockerr.With(lockerr.ErrLocked, errors.New(
	"the caller would wait with the connection of its sql.Conn, and the others of maxConns are kept for holders; lock on the sql.DB"))

// Wait returns the longest time that a caller with hinted is ready to queue.
func (h *Handle) Wait(hinted *hint.Hint) time.Duration {
	if hinted.HasWait {
		return hinted.Wait
	}
	return h.Settings.Wait
}

// Budget is how long a caller queues in all, for whatever it waits.
type Budget struct {
	wait  time.Duration
	start time.Time
}

// Budget returns the Budget of a caller with hinted, which begins now.
func (h *Handle) Budget(hinted *hint.Hint) Budget { return Budget{h.Wait(hinted), time.Now()} }

// Left returns the rest of the wait. It is never 0, which would mean not to wait, unless the caller has asked
// for that.
func (b Budget) Left() time.Duration {
	if b.wait == 0 {
		return 0
	}
	return max(b.wait-time.Since(b.start), time.Millisecond)
}

// WaitingFor returns the function that asker calls before it waits for sought.
func (h *Handle) WaitingFor(asker Caller, sought Sought) strategy.Waiting {
	return func(ctx context.Context) (context.Context, func(), error) { return h.beginWait(ctx, asker, sought) }
}

// Sought is what a caller waits for: rows of the table, or advisory locks. It knows where the callers of this
// process queue up for them.
type Sought struct {
	l         *Locks
	queue     *queue.Queue // nil for slots, and for a session
	resources []strategy.Resource
}

// hearsClose reports whether the wait ends by itself when the handle is closed.
func (s Sought) hearsClose() bool { return len(s.resources) > 0 && s.resources[0].Traits.HearsClose }

// Sought returns what a caller waits for that asks for resources of one strategy. For slots it has no queue,
// since no single holder of a slot is in the way.
func (l *Locks) Sought(resources ...strategy.Resource) Sought {
	sought := Sought{l: l, resources: resources}
	if resources[0].Slots == 0 {
		sought.queue = l.queueOf(resources[0])
	}
	return sought
}

// QueueKeys returns the keys by which callers queue up for resources.
func QueueKeys(resources []strategy.Resource) (out []queue.Key) {
	for _, resource := range resources {
		out = append(out, queue.Key{Name: resource.Row, Shared: resource.Shared, Slots: resource.Slots})
	}
	return out
}
