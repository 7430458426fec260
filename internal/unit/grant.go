package unit

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// grant is a lock that lies outside of transactions: a lease, or an advisory lock. Or it is a version that
// their commits compare.
type grant struct {
	held              strategy.Grant
	handle            *handle.Handle       // the handle that has taken the grant
	strategy.Resource                      // with Slots, too, Row is the row that keeps the grant
	taker             strategy.Strategy    // the strategy that has taken the grant
	since             time.Time            // when the grant was taken
	first             string               // with Slots, the row of the first slot
	seen              *handle.Observation  // of the lock; only the first of versions that were asked for together has one
	noted             *handle.Held         // the handle's note of the lock, until it is given back
	lasted            func() time.Duration // how long the grant was held: until its end by force, or else until the first call of lasted

	mu     sync.Mutex
	inside []*outerHold // holds in the lock context that has the grant, which end with it
}

// enter notes a hold that ends with the grant.
func (g *grant) enter(h *outerHold) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside = append(g.inside, h)
}

// leave takes back what enter has noted, if it has.
func (g *grant) leave(h *outerHold) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside = slices.DeleteFunc(g.inside, func(other *outerHold) bool { return other == h })
}

// cancelInside ends the contexts of the holds inside. It waits for nobody: what runs under the grant may take long.
func (g *grant) cancelInside(cause error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, h := range g.inside {
		h.cancel(cause)
	}
}

// newGrant returns the grant that the strategy taker has taken for resource.
func newGrant(k *handle.Handle, resource strategy.Resource, taker strategy.Strategy, held strategy.Grant) *grant {
	g := &grant{held: held, handle: k, Resource: resource, taker: taker, since: time.Now()}
	g.lasted = sync.OnceValue(func() time.Duration {
		var taken interface{ TakenAt() time.Time }
		if errors.As(g.Err(), &taken) {
			return max(taken.TakenAt().Sub(g.since), time.Microsecond)
		}
		return time.Since(g.since)
	})
	if resource.Slots > 0 {
		g.first, g.Row = resource.Row, held.Key()
	}
	return g
}

// Err returns why the grant is not held any more; nil while it is held.
func (g *grant) Err() error { return g.held.Err() }

// Release gives the grant back.
func (g *grant) Release() error {
	began := time.Now()
	g.seen.Leaving(began)
	err := g.held.Release()
	g.seen.Over(began, err)
	return err
}

// lost notes that the grant is over and was not given back, or that the handle was closed.
func (g *grant) lost() {
	cause := g.overError("statement")
	if errors.Is(g.Err(), lockerr.ErrClosed) {
		cause = nil
	}
	g.ended(cause)
}

// ended notes that the server does not have the lock any more. loss is what has cost it; nil for no loss.
func (g *grant) ended(loss error) {
	g.noted.Leave()
	g.seen.Over(time.Time{}, loss)
}

// detach removes from the connection of the transaction what that carries for the grant.
func (g *grant) detach() error {
	if a, ok := g.held.(strategy.Attached); ok {
		return a.Detach()
	}
	return nil
}

// token returns the fencing token; 0 for a grant without one.
func (g *grant) token() uint64 {
	if f, ok := g.held.(strategy.Fenced); ok {
		return f.Token()
	}
	return 0
}

// expiry returns when the grant expires; the zero time for a grant that does not.
func (g *grant) expiry() time.Time {
	if f, ok := g.held.(strategy.Fenced); ok {
		return f.Expiry()
	}
	return time.Time{}
}

// version returns the number of the version; 0 for a grant that is none.
func (g *grant) version() uint64 {
	if v, ok := g.held.(strategy.Versioned); ok {
		return v.Number()
	}
	return 0
}

// slot returns the number of the slot; 0 for a grant without slots.
func (g *grant) slot() uint64 {
	if s, ok := g.held.(strategy.Slotted); ok {
		return uint64(s.Slot())
	}
	return 0
}

// ticket returns the grant's place in the queue of this process; nil without one.
func (g *grant) ticket() *queue.Ticket {
	if l, ok := g.held.(strategy.Queued); ok {
		return l.Ticket()
	}
	return nil
}

// keeps reports whether the grant is the lock for which resource asks k. If the same key is asked for by another
// strategy, the grant is still that lock if both keep the key in the table and the grant keeps others
// out.
func (g *grant) keeps(k *handle.Handle, resource strategy.Resource) bool {
	if !g.handle.Shares(k, g.Strategy) {
		return false
	}
	switch {
	case !g.Traits.Excludes || !g.Traits.Table || !resource.Traits.Table:
		return g.SameAs(resource)
	case resource.Slots > 0:
		return slices.Contains(resource.SlotRows(), g.Row) || g.first == resource.Row // the same key, also if the grant was taken with more slots
	}
	return g.Row == resource.Row
}

// keeperOf returns which of grants is the lock for which resource asks k; nil if none is.
func keeperOf(k *handle.Handle, resource strategy.Resource, grants []*grant) *grant {
	if i := slices.IndexFunc(grants, func(g *grant) bool { return g.keeps(k, resource) }); i >= 0 {
		return grants[i]
	}
	return nil
}

// join tells resource, which the grant keeps, its slot. It returns why the grant is not enough for resource; nil if it is.
func (g *grant) join(resource strategy.Resource) error {
	if resource.Slots > 0 {
		resource.Tell(hint.ToldSlot, g.slot())
	}
	if resource.Version == 0 || resource.Version == g.version() {
		return nil
	}
	return &lockerr.Error{Op: "lock", Key: resource.Key, Strategy: resource.Strategy, Err: lockerr.ErrConflict}
}

// tellAll tells the lock context the numbers of the grant, which the application may ask for.
func (g *grant) tellAll() {
	if v := g.version(); v != 0 {
		g.Tell(hint.ToldVersion, v)
	}
	if token := g.token(); token != 0 {
		g.Tell(hint.ToldToken, token)
	}
	if g.Slots > 0 {
		g.Tell(hint.ToldSlot, g.slot())
	}
}

// number returns a number of the grant of a hold.
func (g *grant) number(what hint.What) (n uint64, ok bool) {
	switch what {
	case hint.ToldToken:
		return g.token(), g.token() != 0
	case hint.ToldSlot:
		return g.slot(), g.Slots > 0
	}
	return 0, false
}

var (
	errHoldEnded    = lockerr.With(lockerr.ErrLost, errors.New("its hold has ended"))
	errHandleClosed = lockerr.With(lockerr.ErrLost, lockerr.ErrClosed) // the close of the handle has ended the hold
)

// overError returns the error of work under a grant that is over; nil while the grant is held.
func (g *grant) overError(op string) error {
	err := g.Err()
	if err == nil {
		return nil
	}
	e := &lockerr.Error{Op: op, Key: g.Key, Strategy: g.Strategy, Err: errHoldEnded}
	switch {
	case errors.Is(err, lockerr.ErrLost):
		e.Err, e.Held = err, g.lasted()
	case g.handle.Closed():
		e.Err = errHandleClosed
	}
	return e
}

// takeGrant takes a lock that keeps others out, for asker. lost is called once, on a goroutine of
// its own, when the grant may be lost. lender lends the connection on which the caller goes on; nil for none.
func takeGrant(
	ctx context.Context, k *handle.Handle, l *handle.Locks, asker handle.Caller,
	resource strategy.Resource, wait time.Duration, lender *strategy.Lender, lost func(),
) (*grant, error) {
	seen, ctx := k.Observe(ctx, resource)
	resources := []strategy.Resource{resource}
	taker := l.By(resource)
	request := strategy.Request{Resources: resources, Wait: wait, Wants: k.WaitingFor(asker, l.Sought(resource)), Lends: lender, Lost: lost}
	held, err := taker.Take(ctx, request)
	if err != nil {
		err = strategy.Naming(err, resources)
		seen.Answered(nil, nil, 0, err)
		return nil, err
	}
	g := newGrant(k, resource, taker, held[0])
	g.seen = seen
	seen.Answered(nil, g.ticket(), g.token(), nil)
	return g, nil
}
