package unit

import (
	"context"
	"errors"
	"slices"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// plan is what a hint asks for and its lock context does not hold yet. It is worked out once,
// for a statement or a BEGIN, and passed on to whoever takes it.
type plan struct {
	h        *hint.Hint
	around   []*guard         // of the holds that it is inside of
	missing  []strategy.Place // all that is not held, sorted
	guards   []strategy.Place // of these, what is to be taken outside of the transaction
	rows     []strategy.Place // to be locked in the transaction, all in one request
	slots    []strategy.Place // of each of which one row is to be locked in the transaction
	locks    bool             // something is to be locked, not only remembered
	versions bool             // a version is to be remembered
	compares bool             // the commit compares versions: such, or those that are remembered already

	// With what it is taken: see ready.
	l        *handle.Locks
	by       handle.Caller
	wait     handle.Budget
	requests []request // what is to be locked in the transaction, one after the other
}

// request is what to ask the locker for, and what it is for.
type request struct {
	rowlock.Request
	places []strategy.Place
	seen   *handle.Observation // once it is asked for
}

// plan works out what of h is not held yet.
func (s *scope) plan(h *hint.Hint) (*plan, error) {
	places, err := s.k.Places(h)
	if err != nil {
		return nil, err
	}
	p := &plan{h: h}
	if len(h.Holds) > 0 {
		p.around = enclosing(h)
	}
	for _, place := range places {
		held, err := s.has(place, p.around)
		if err == nil && !held {
			err = p.add(place)
		}
		if err != nil {
			return nil, err
		}
	}
	p.compares = p.versions || len(s.guards) > 0 && s.remembers()
	return p, nil
}

// add adds what is not held, unless something that is wanted already covers it.
func (p *plan) add(place strategy.Place) error {
	sameRow := func(other strategy.Place) bool { return other.Row == place.Row && other.Space() == strategy.Rows }
	if at := slices.IndexFunc(p.rows, sameRow); at >= 0 {
		switch {
		case p.rows[at].Shared:
			return place.Upgrade()
		case place.Slots > 0:
			place.Tell(hint.ToldSlot, 0)
			return nil
		case !place.Traits.Excludes && place.Version == 0: // nobody else can change it
			return nil
		}
	}
	if place.Slots > 0 && slices.ContainsFunc(p.guards, sameRow) {
		place.Tell(hint.ToldSlot, 0)
		return nil
	}
	switch {
	case !place.Traits.Inside:
		p.guards = append(p.guards, place)
	case place.Slots > 0:
		p.slots = append(p.slots, place)
	default:
		p.rows = append(p.rows, place)
	}
	p.missing = append(p.missing, place)
	p.locks = p.locks || place.Traits.Excludes
	p.versions = p.versions || !place.Traits.Excludes
	return nil
}

// inTransaction reports whether anything is to be locked in the transaction.
func (p *plan) inTransaction() bool { return len(p.rows)+len(p.slots) > 0 }

// ready gets ready that with which p is taken, once. pooled: see with.
func (p *plan) ready(ctx context.Context, s *scope, pooled bool) error {
	if p.l != nil {
		return nil
	}
	l, err := p.use(ctx, s)
	if err == nil {
		p.with(s, l, pooled)
	}
	return err
}

// use returns what locks are taken with now, and why what p asks for would never be free, if so.
func (p *plan) use(ctx context.Context, s *scope) (*handle.Locks, error) {
	l, err := s.k.Use(ctx, p.h)
	if err != nil {
		return nil, s.k.SetupError(p.h, err)
	}
	return l, s.k.Taken(p.h.Scope, false, p.missing...)
}

// with has p be taken with l. The wait begins. pooled means that the caller occupies a connection
// of database/sql while it waits.
func (p *plan) with(s *scope, l *handle.Locks, pooled bool) {
	p.l, p.by, p.wait = l, s.caller(pooled), s.k.Budget(p.h)
	ask := func(places []strategy.Place, r rowlock.Request) {
		r.Label, r.Waiting = strategy.Label(places), s.k.WaitingFor(p.by, l.Sought(places...))
		p.requests = append(p.requests, request{Request: r, places: places})
	}
	if len(p.rows) > 0 {
		ask(p.rows, rowlock.Request{Keys: handle.InLine(p.rows)})
	}
	for i := range p.slots {
		ask(p.slots[i:i+1], rowlock.Request{Slots: p.slots[i].SlotRows()})
	}
}

// has reports whether what p asks for is held, by the unit of work or a hold
// around it.
func (s *scope) has(p strategy.Place, around []*guard) (bool, error) {
	keeps := func(g *guard) bool { return g.keeps(s.k, p) }
	if at := slices.IndexFunc(s.guards, keeps); at >= 0 {
		return true, s.guards[at].join(p)
	}
	if at := slices.IndexFunc(around, keeps); at >= 0 {
		if !p.Traits.Excludes {
			return false, &lockerr.Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
				"a hold around has a lease on the key, which keeps others out, but not the transactions that run side by side in the hold"))}
		}
		return true, around[at].join(p)
	}
	if !p.Traits.Table {
		return false, nil
	}
	locked := s.unit.row(p.Row)
	if p.Slots > 0 {
		if slot, ok := s.unit.slotOf(p); ok {
			p.Tell(hint.ToldSlot, uint64(slot))
			return true, nil
		}
	}
	switch {
	case locked == nil:
		return false, nil
	case locked.Shared && !p.Shared:
		return false, p.Upgrade()
	}
	return p.Version == 0, nil // a version that was given is compared all the same
}

// remembers reports whether the unit of work keeps a version, which its commit
// compares.
func (s *scope) remembers() bool {
	return slices.ContainsFunc(s.guards, func(g *guard) bool { return g.version() != 0 })
}

// caller is who asks for a lock in s, which is nil outside of any lock context. pooled
// means that it occupies a connection of database/sql while it waits.
func (s *scope) caller(pooled bool) handle.Caller {
	c := handle.Caller{Pooled: pooled, Has: s.held}
	if s != nil {
		c.Asked = &s.asked
	}
	return c
}

// held returns what a caller has that waits in ctx and s: its tickets, and what others
// can ask k for, too.
func (s *scope) held(ctx context.Context, k *handle.Handle) (tickets []*queue.Ticket, places []strategy.Place) {
	var guards []*guard
	if h, ok := hint.From(ctx); ok {
		guards = enclosing(h) // of other handles, too
	}
	if s != nil {
		guards = slices.Concat(guards, s.guards)
		if s.unit != nil {
			for _, row := range s.unit.rows {
				places = append(places, row.Place)
			}
		}
	}
	for _, g := range guards {
		if g != nil && g.line() != nil {
			tickets = append(tickets, g.line())
			if g.k.Shares(k, g.Strategy) {
				places = append(places, g.Place)
			}
		}
	}
	if s != nil && s.unit != nil {
		tickets = append(tickets, s.unit.tickets...)
	}
	return tickets, places
}

// asks is who asks for a connection under h in s, pooled as for caller. Who is about to wait in
// the server for a lock counts for that, unless it holds something: it may be what another
// one there waits for.
func (s *scope) asks(ctx context.Context, h *hint.Hint, pooled, blocks bool) handle.Caller {
	by := s.caller(pooled)
	if s.holds(h) {
		tickets, _ := s.held(ctx, s.k)
		by.Urgent = slices.ContainsFunc(tickets, (*queue.Ticket).Awaited)
		blocks = false
	}
	by.Waits = blocks
	return by
}

// holds reports whether a caller with h in s holds something.
func (s *scope) holds(h *hint.Hint) bool {
	return s.unit != nil || len(s.guards) > 0 || len(enclosing(h)) > 0
}
