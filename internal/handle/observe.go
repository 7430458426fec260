package handle

import (
	"container/list"
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// These are the kinds of events, as mysqllock.EventKind has them.
const (
	Acquired = iota + 1
	Refused
	Released
	Lost
	Advised
	LongHold
	Retried
)

// Event is something that has happened to a lock: see mysqllock.Event.
type Event struct {
	Kind     int
	Keys     []string
	Strategy string
	Shared   bool

	Leadership bool

	Start    time.Time
	Duration time.Duration
	Held     time.Duration
	Token    uint64
	Long     bool
	Holder   *lockerr.Holder
	Err      error
}

// Observation follows locks that are asked for, and then held: the handle counts how long, and an observer is
// told. A nil Observation follows nothing.
type Observation struct {
	k         *Handle
	resources []strategy.Resource
	wait      *list.Element // the place in Handle.waits; nil for a leadership

	tell      func(context.Context, Event) // nil without an observer; then the fields below are not set
	releasing func(context.Context, Event) // tells that giving back begins; nil if the observer is no Tracer
	ctx       context.Context              // the caller's context, or what Settings.Asking has made of that
	traced    bool                         // Settings.Asking has made ctx
	event     Event                        // the event as the locks were asked for
	granted   time.Time
	after     time.Duration // after which the observer is told that the hold still lasts; 0 for never

	slow   *time.Timer   // asks who holds the locks; nil for nobody to ask
	connID uint64        // with slow: the connection that was granted the locks; 0 if that is not known
	ticket *queue.Ticket // with slow: the place in the queue that was granted them; nil for none

	mu       sync.Mutex
	holder   *lockerr.Holder // who has kept the caller waiting; nil if that is not known
	keeper   *queue.Ticket   // the ticket of holder; nil if the holder is in another process
	answered bool            // with slow: the caller waits no more

	longHold *time.Timer // tells of a LongHold
	long     bool        // the observer was told of a LongHold
	ended    bool
	leaves   bool // the observer was told that giving back has begun
}

// Observe begins to follow locks that are asked for now; there must be at least one resource. It returns the
// context with which to take the locks: it has what the observer has put into it.
func (h *Handle) Observe(ctx context.Context, resources ...strategy.Resource) (*Observation, context.Context) {
	o := &Observation{k: h, resources: resources, tell: h.Settings.Observe, ctx: ctx, releasing: h.Settings.Releasing}
	leads := resources[0].Leadership
	if !leads {
		o.wait = h.waits.begin()
	}
	if o.tell == nil {
		return o, ctx
	}
	locks := resources[0].Traits.Excludes && !leads // versions and leaderships may last
	if locks {
		o.after = h.Settings.LongHold
	}
	o.event = Event{Strategy: resources[0].Strategy, Shared: true, Leadership: leads, Start: time.Now()}
	for _, resource := range resources {
		o.event.Keys = append(append(o.event.Keys, resource.Key), resource.Also...)
		o.event.Shared = o.event.Shared && resource.Shared
	}
	if asking := h.Settings.Asking; asking != nil {
		o.ctx = asking(ctx, o.event)
		o.traced = o.ctx != ctx
	}
	if locks {
		o.askIfSlow()
	}
	if o.traced {
		return o, o.asked().In(o.ctx)
	}
	return o, ctx
}

// Refused tells the observer of locks that were asked for at start, and for which the request failed with err
// before the server or a queue was asked.
func (h *Handle) Refused(ctx context.Context, start time.Time, err error, resources ...strategy.Resource) {
	for len(resources) > 0 {
		other := func(resource strategy.Resource) bool { return resource.Strategy != resources[0].Strategy }
		same := slices.DeleteFunc(slices.Clone(resources), other)
		resources = slices.DeleteFunc(slices.Clone(resources), func(resource strategy.Resource) bool { return !other(resource) })
		seen, _ := h.Observe(ctx, same...)
		seen.event.Start = start
		seen.Answered(nil, nil, 0, err)
	}
}

// Within is for locks that are taken with a context derived from the observed one: it returns ctx with what the
// observer has put into its context. end frees the returned context.
func (o *Observation) Within(ctx context.Context) (_ context.Context, end func()) {
	if !o.traced {
		return ctx, func() {}
	}
	own, cancel := context.WithCancelCause(o.asked().In(o.ctx))
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	return own, func() {
		stop()
		cancel(nil)
	}
}

// Traced reports whether the observer has put something into the context of the locks.
func (o *Observation) Traced() bool { return o != nil && o.traced }

// asked returns what the marks of statements say: that these are for the locks.
func (o *Observation) asked() purpose.Asked {
	if !o.Traced() {
		return nil
	}
	return purpose.Asked{o.ctx}
}

// Under returns a context for statements of the driver's own that are for all of the observed locks.
func Under(ctx context.Context, all ...*Observation) context.Context {
	return purpose.AskedBy(ctx, all, (*Observation).asked)
}

// Listening reports whether an interceptor looks at each statement by itself.
func Listening() bool { return purpose.Listening() }

// ForHold returns the context of the transaction of a hold. The application has not begun that transaction.
func ForHold(ctx context.Context) context.Context { return purpose.OfHold(ctx) }

// Committing returns the context of what goes out with the COMMIT of a transaction under resources; all are the
// observations of these. Without resources it is the context of a plain COMMIT.
func Committing(resources []strategy.Resource, all []*Observation) context.Context {
	ctx := Under(context.Background(), all...)
	if len(resources) == 0 {
		return ctx
	}
	return purpose.With(ctx, purpose.Fence, resources[0].Strategy, resources, func(resource strategy.Resource) string { return resource.Row })
}

// Answered notes whether the locks of o were granted, for the observer: to which connection and which place in
// the queue, both of which may be nil, and with what token. A failure says something of the server, too, and
// may name this handle as the holder. If the caller tries another connection, the answer is still to come.
func (o *Observation) Answered(conn *pool.Conn, ticket *queue.Ticket, token uint64, err error) {
	if errors.Is(err, driver.ErrBadConn) && statement.ForOne() { // the error that the caller gets
		err = &lockerr.Error{Op: "begin", Key: strategy.Label(o.resources), Strategy: o.resources[0].Strategy, Err: ErrUnusable}
	}
	if err != nil {
		o.k.Suspect(err)
		_ = o.k.Recognised(err, o.resources[0].LockContext, o.resources...)
	}
	o.k.waits.end(o.wait)
	again := errors.Is(err, errYield) || errors.Is(err, driver.ErrBadConn)
	if o.tell == nil {
		return
	}
	if o.slow != nil && err == nil {
		o.takenBy(conn, ticket)
	}
	holder := o.blamed(err)
	if again {
		if o.traced {
			e := o.event
			e.Kind, e.Err, e.Duration = Retried, err, time.Since(e.Start)
			o.tell(o.ctx, e)
		}
		return
	}
	o.event.Token = token
	o.granted = time.Now()
	e := o.event
	e.Kind, e.Err, e.Duration, e.Holder = Acquired, err, o.granted.Sub(e.Start), holder
	if err != nil {
		e.Kind = Refused
	}
	o.tell(o.ctx, e)
	if err == nil && o.after > 0 {
		o.mu.Lock()
		defer o.mu.Unlock()
		if !o.ended {
			o.longHold = time.AfterFunc(o.after, o.goesOn)
		}
	}
}

// goesOn tells the observer that the locks are held for long, unless they are given back just now.
func (o *Observation) goesOn() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return
	}
	o.long = true
	e := o.event
	e.Kind, e.Start, e.Long = LongHold, time.Now(), true
	e.Held = e.Start.Sub(o.granted)
	o.tell(o.ctx, e)
}

// Leaving notes that giving back begins now.
func (o *Observation) Leaving(now time.Time) {
	if !o.Traced() {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended || o.leaves {
		return
	}
	o.leaves = true
	e := o.event
	e.Start, e.Held = now, now.Sub(o.granted)
	o.releasing(o.ctx, e)
}

// Over notes that the locks are held no more. The first call counts. began is zero
// if the caller does not know when giving back began.
func (o *Observation) Over(began time.Time, err error) {
	if o == nil {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended {
		return
	}
	o.ended = true
	if o.tell == nil {
		return
	}
	if o.longHold != nil {
		o.longHold.Stop()
	}
	now := time.Now()
	if began.IsZero() {
		began = now
	}
	e := o.event
	e.Kind, e.Err, e.Long = Released, err, o.long
	if errors.Is(err, lockerr.ErrLost) {
		e.Kind = Lost
	}
	e.Start, e.Duration, e.Held = began, now.Sub(began), began.Sub(o.granted)
	o.tell(o.ctx, e)
}

// ages has the times at which things began that still last. The zero value has none.
type ages struct {
	mu     sync.Mutex
	begins list.List // when each began, the oldest first
}

// begin notes something that lasts from now on, until end is called with the returned element.
func (a *ages) begin() *list.Element {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.begins.PushBack(time.Now())
}

// end forgets something that has lasted; e may be nil, for nothing.
func (a *ages) end(e *list.Element) {
	if e == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.begins.Remove(e)
}

// oldest returns for how long the oldest thing has lasted; 0 if there is none.
func (a *ages) oldest() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	if first := a.begins.Front(); first != nil {
		return time.Since(first.Value.(time.Time))
	}
	return 0
}

// advise tells the observer how the handle should be set up.
func (h *Handle) advise(err error) {
	if h.Settings.Observe != nil {
		h.Settings.Observe(context.Background(), Event{Kind: Advised, Start: time.Now(), Err: err})
	}
}
