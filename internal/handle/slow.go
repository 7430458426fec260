package handle

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// askBound is how long the question may take who holds a lock.
const askBound = time.Second

// askIfSlow notes the holder, for the observer, if the caller waits for longer than SlowWait. It asks in the
// background. As long as the caller does not wait in the server yet, no holder may be found: then askIfSlow
// asks again after twice the time.
func (o *Observation) askIfSlow() {
	after := o.k.Settings.SlowWait
	if after == 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.slow = time.AfterFunc(after, func() {
		after *= 2
		holder, keeper := o.askHolder()
		o.blame(holder, keeper, after)
	})
}

// askHolder returns who has one of the locks; nil if nobody knows. If the holder is a caller of this process,
// askHolder returns its ticket, too.
func (o *Observation) askHolder() (*lockerr.Holder, *queue.Ticket) {
	ctx, cancel := server.Within(o.k.ctx, askBound)
	defer cancel()
	select {
	case o.k.asking <- struct{}{}: // control connections are for other work, too
		defer func() { <-o.k.asking }()
	case <-ctx.Done():
		return nil, nil
	}
	o.mu.Lock()
	answered := o.answered
	o.mu.Unlock()
	if answered {
		return nil, nil
	}
	return o.k.holder(ctx, o.resources)
}

// takenBy notes which connection, and which place in the process's own queue, were granted the locks; both may
// be nil. The holder that askHolder finds may be this caller itself, and is recognised by them.
func (o *Observation) takenBy(c *pool.Conn, t *queue.Ticket) {
	if o.ticket = t; c != nil {
		o.connID = c.KnownID()
	}
}

// blame notes who keeps the caller waiting, and the ticket of that holder, keeper; nil if it is of another
// process. If no holder is known, the question is asked again after the time again.
func (o *Observation) blame(h *lockerr.Holder, keeper *queue.Ticket, again time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.holder, o.keeper = h, keeper; h == nil && !o.answered {
		o.slow.Reset(again)
	}
}

// blamed ends the questions, and returns who has kept the caller waiting, as far as is known. err is why the
// caller got no lock, if it got none.
func (o *Observation) blamed(err error) *lockerr.Holder {
	var h *lockerr.Holder
	if o.slow != nil {
		o.mu.Lock()
		o.slow.Stop()
		h, o.answered = o.holder, true
		keeper := o.keeper
		o.mu.Unlock()
		switch {
		case h == nil:
		case keeper != nil && keeper == o.ticket,
			keeper == nil && h.ConnectionID != 0 && h.ConnectionID == o.connID: // one with a ticket may have handed its session over
			h = nil // the holder is the caller itself
		}
	}
	if e := (*lockerr.Error)(nil); errors.As(err, &e) && e.Holder != nil {
		return e.Holder // the holder at the end of the wait
	}
	return h
}

// holder does the work of askHolder.
func (h *Handle) holder(ctx context.Context, resources []strategy.Resource) (*lockerr.Holder, *queue.Ticket) {
	l := h.locks.Load()
	if l == nil {
		return nil, nil
	}
	for _, resource := range resources {
		holder, keeper := l.queueOf(resource).HolderOf(QueueKeys([]strategy.Resource{resource})[0]) // in this process
		if holder == nil {
			holder = l.holder(ctx, resource)
			leased := resource.Traits.Table && resource.Traits.Excludes && !resource.Traits.Inside
			if holder != nil && leased && holder.ConnectionID != 0 && holder.Program == h.Settings.Owner {
				holder = nil // a statement of ours that takes the lease locks its row for a moment
			}
		}
		if holder != nil {
			e := &lockerr.Error{Holder: holder, Err: lockerr.ErrLocked}
			_ = h.Recognised(e, resources[0].LockContext, resources...)
			return e.Holder, keeper
		}
	}
	return nil, nil
}

// holder asks the server who has resource; nil if it does not know.
func (l *Locks) holder(ctx context.Context, resource strategy.Resource) *lockerr.Holder {
	rows := []string{resource.Row}
	if resource.Slots > 0 {
		rows = resource.SlotRows()
	}
	switch {
	case !resource.Traits.Table:
		return l.By(resource).Holder(ctx, resource.Row)
	case resource.Slots == 0:
		if h := l.leases.Holder(ctx, resource.Row); h != nil { // rows wait for leases
			return h
		}
	}
	return l.RowLocks.Holder(ctx, rows)
}
