package mysqllock

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/lease"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/optimistic"
	"github.com/mysqllock/mysqllock/pool"
)

// scope is what one database handle remembers of one lock context: its unit of
// work. Its statements take turns. All fields but turn and asked are guarded by
// the turn.
type scope struct {
	turn  chan struct{} // holds a token while a statement of the lock context runs
	asked bool          // a wait was made to try again on another connection; guarded by crowd.mu

	unit    *unit       // the open transaction of the unit of work
	guards  []*guard    // what else the unit of work holds, with or without a transaction
	counted bool        // the crowd knows that one of them is held
	joined  []*Hold     // holds that joined one of guards, and end with them
	unwatch func() bool // ends the watch on the end of the lock context; nil without one
	endless bool        // what is watched never ends: there are only versions
	failed  error       // why no other unit may begin: one was lost behind the caller's back

	k *connector
}

// place is where the handle keeps a lock that a hint asks for.
type place struct {
	lockctx.Lock                // completed by what the handle says
	row          string         // of the lock table that keeps it; with Slots, that keeps the first of them; of an advisory lock, the key
	also         []string       // other keys of the hint that are kept there
	hints        *lockctx.Scope // of the lock context that asks; nil where nobody will ask what it is told
}

// tell lets the application ask for a number of the keys.
func (p place) tell(what lockctx.What, n uint64) {
	if p.hints != nil {
		p.hints.Tell(what, p.Key, n)
		for _, key := range p.also {
			p.hints.Tell(what, key, n)
		}
	}
}

// forget takes back what tell has told.
func (p place) forget(what lockctx.What) {
	if p.hints != nil {
		p.hints.Forget(what, p.Key)
		for _, key := range p.also {
			p.hints.Forget(what, key)
		}
	}
}

// slots are the rows of the slots.
func (p place) slots() []string {
	rows := make([]string, p.Slots)
	for i := range rows {
		rows[i] = keyrow.SlotName(p.row, i)
	}
	return rows
}

// space tells apart the locks that do not exclude each other on the same row,
// and those that do but mean different things.
func (p place) space() int {
	switch {
	case p.Slots > 0:
		return 3
	case p.Strategy == lockctx.StrategyOptimistic:
		return 2
	case p.Strategy == lockctx.StrategyAdvisory:
		return 1
	}
	return 0
}

// guard is a lock that lies outside of the transactions under it: a lease, an
// advisory lock, or a version that their commits compare.
type guard struct {
	keeper
	place                // row is the one that keeps it, also with Slots
	of     string        // with Slots, the row of the first
	slot   int           // with Slots, which
	ticket *queue.Ticket // with Slots, the place in the process's own line
	seen   *observation  // of the lock; of versions that were asked for together, only the first has it
}

// keeper is how a strategy keeps a guard.
type keeper interface {
	Err() error // nil while it is held
	Release() error
}

var (
	_ keeper = (*lease.Lease)(nil)
	_ keeper = (*advisory.Lock)(nil)
	_ keeper = (*optimistic.Version)(nil)
)

// Release gives the guard back.
func (g *guard) Release() error {
	defer g.ticket.Leave()
	began := g.seen.leaving()
	err := g.keeper.Release()
	g.seen.over(began, err)
	return err
}

// lost notes that the guard is over without having been given back, or that the
// handle was closed.
func (g *guard) lost() {
	cause := g.overError("statement")
	if errors.Is(g.Err(), ErrClosed) {
		cause = nil
	}
	g.seen.over(time.Time{}, cause)
}

// token is 0 for what has no token.
func (g *guard) token() uint64 {
	if l, ok := g.keeper.(*lease.Lease); ok {
		return l.Token()
	}
	return 0
}

// expiry is the zero time for what has none.
func (g *guard) expiry() time.Time {
	if l, ok := g.keeper.(*lease.Lease); ok {
		return l.Expiry()
	}
	return time.Time{}
}

// version is nil for what has none.
func (g *guard) version() *optimistic.Version {
	v, _ := g.keeper.(*optimistic.Version)
	return v
}

// keeps reports whether the guard is what p asks for: the key again joins, however it
// is kept, but for advisory locks, which are a space of their own, and versions.
func (g *guard) keeps(p place) bool {
	switch {
	case g.Strategy != lockctx.StrategyLease || p.Strategy == lockctx.StrategyAdvisory:
		return g.row == p.row && g.space() == p.space()
	case p.Slots > 0:
		return slices.Contains(p.slots(), g.row) || g.of == p.row // also where there were more of them
	}
	return g.row == p.row
}

func (k *connector) newScope() *scope {
	return &scope{turn: make(chan struct{}, 1), k: k}
}

// scope returns what is remembered of the lock context. Where there is nothing
// to lock, because the context only has holds around it, every transaction
// stands for itself.
func (k *connector) scope(hints *lockctx.Scope) *scope {
	if hints == nil {
		return k.newScope()
	}
	return hints.State(k, func() any { return k.newScope() }).(*scope)
}

func (s *scope) take(ctx context.Context) error {
	select {
	case s.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *scope) give() { <-s.turn }

// names are the keys of a hint, for errors.
func names(h *lockctx.Hint) string { return strings.Join(h.Keys(), ", ") }

// strategy is how the keys of the innermost With are locked, for errors.
func (k *connector) strategy(h *lockctx.Hint) string { return k.kind(h.Kind).Strategy }

// kind completes how a key is to be locked with what the handle says. Where keys
// share rows, nothing else is shared: who holds one key shared and asks for
// another one, which happens to be on the same row, would be refused.
func (k *connector) kind(kind lockctx.Kind) lockctx.Kind {
	if kind.Strategy == lockctx.StrategyDefault {
		kind.Strategy = k.settings.strategy
	}
	if kind.TTL == 0 {
		kind.TTL = k.settings.ttl
	}
	kind.Shared = kind.Shared && k.settings.stripes == 0
	return kind
}

// place returns where a lock is kept.
func (k *connector) place(lock lockctx.Lock) (place, error) {
	if lock.Strategy == lockctx.StrategyDefault {
		lock.Strategy = k.settings.strategy
		if err := lock.Check(); err != nil {
			return place{}, &Error{Op: "lock", Key: lock.Key, Strategy: lock.Strategy, Err: err}
		}
	}
	lock.Kind = k.kind(lock.Kind)
	p := place{Lock: lock}
	switch {
	case lock.Strategy == lockctx.StrategyAdvisory:
		p.row = lock.Key
	case k.settings.stripes > 0:
		p.row = keyrow.Stripe(lock.Key, k.settings.stripes)
	default:
		p.row = keyrow.Name(lock.Key)
	}
	return p, nil
}

// around returns what the holds of this handle keep that h is inside of.
func (k *connector) around(h *lockctx.Hint) (guards []*guard) {
	for _, hold := range h.Holds {
		if hold, ok := hold.(*Hold); ok && hold.k == k {
			guards = append(guards, hold.guard)
		}
	}
	return guards
}

// wanted is what of a hint is not held yet.
type wanted struct {
	rows   []place // to be locked in the transaction, sorted
	slots  []place // of each of which one row is to be locked in the transaction
	guards []place // to be taken outside of it, sorted
}

func (w wanted) nothing() bool { return !w.inTransaction() && len(w.guards) == 0 }

func (w wanted) inTransaction() bool { return len(w.rows)+len(w.slots) > 0 }

// locks reports whether anything is to be locked, not only remembered.
func (w wanted) locks() bool {
	return w.inTransaction() || slices.ContainsFunc(w.guards, func(p place) bool { return p.Strategy != lockctx.StrategyOptimistic })
}

// versions reports whether a version is to be remembered: of what was read before,
// it says nothing.
func (w wanted) versions() bool {
	return slices.ContainsFunc(w.guards, func(p place) bool { return p.Strategy == lockctx.StrategyOptimistic })
}

// remembers reports whether the unit of work keeps a version, which its commit
// compares.
func (s *scope) remembers() bool {
	return slices.ContainsFunc(s.guards, func(g *guard) bool { return g.version() != nil })
}

// wanted returns which locks of h are not held yet.
func (k *connector) wanted(s *scope, h *lockctx.Hint) (w wanted, err error) {
	places, err := k.places(h)
	if err != nil {
		return wanted{}, err
	}
	around := k.around(h)
	for _, p := range places {
		held, err := s.has(p, around)
		if err == nil && !held {
			err = w.add(p)
		}
		if err != nil {
			return wanted{}, err
		}
	}
	return w, nil
}

// places returns where the locks of h are kept, sorted by their rows, each once:
// one With says how a key is locked, and another leaves it to the handle; and
// several keys can share a row.
func (k *connector) places(h *lockctx.Hint) (places []place, err error) {
	for _, lock := range h.Locks {
		p, err := k.place(lock)
		if err != nil {
			return nil, err
		}
		p.hints = h.Scope
		at := slices.IndexFunc(places, func(other place) bool { return other.row == p.row && other.space() == p.space() })
		if at < 0 {
			places = append(places, p)
			continue
		}
		one := &places[at]
		if one.Key != p.Key {
			one.also = append(one.also, p.Key)
			if one.Strategy == lockctx.StrategyRow && p.Strategy == lockctx.StrategyLease {
				one.Kind = p.Kind // it has a token
			}
		}
		one.Shared = one.Shared && p.Shared
		one.Slots = min(one.Slots, p.Slots)
		one.Version = older(one.Version, p.Version)
	}
	slices.SortFunc(places, func(a, b place) int {
		return cmp.Or(strings.Compare(a.row, b.row), cmp.Compare(a.space(), b.space()))
	})
	return places, nil
}

// older is the older of two versions, of which 0 is none: it is still the version
// if nothing has changed.
func older(a, b uint64) uint64 { return cmp.Or(min(a, b), max(a, b)) }

// has reports whether what p asks for is held, by the unit of work or a hold
// around it.
func (s *scope) has(p place, around []*guard) (bool, error) {
	keeps := func(g *guard) bool { return g.keeps(p) }
	if at := slices.IndexFunc(s.guards, keeps); at >= 0 {
		return true, s.guards[at].join(p)
	}
	if at := slices.IndexFunc(around, keeps); at >= 0 {
		if p.Strategy == lockctx.StrategyOptimistic {
			return false, &Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: lockerr.With(ErrUnsafe, errors.New(
				"a hold around has a lease on the key, which keeps others out, but not the transactions that run side by side in the hold"))}
		}
		return true, around[at].join(p)
	}
	if p.Strategy == lockctx.StrategyAdvisory {
		return false, nil
	}
	locked := s.unit.row(p.row)
	if p.Slots > 0 {
		if slot, ok := s.unit.slotOf(p); ok {
			p.tell(lockctx.Slot, uint64(slot))
			return true, nil
		}
	}
	switch {
	case locked == nil:
		return false, nil
	case locked.Shared && !p.Shared:
		return false, p.upgrade()
	}
	return p.Version == 0, nil // a version that was given is compared all the same
}

// join notes what p, which the guard keeps, has to be told, and returns why it
// does not do.
func (g *guard) join(p place) error {
	if p.Slots > 0 {
		p.tell(lockctx.Slot, uint64(g.slot))
	}
	return g.again(p)
}

// add adds what is not held to what is wanted, unless something that is wanted
// already covers it.
func (w *wanted) add(p place) error {
	sameRow := func(other place) bool { return other.row == p.row && other.space() == 0 }
	if at := slices.IndexFunc(w.rows, sameRow); at >= 0 {
		switch {
		case w.rows[at].Shared:
			return p.upgrade()
		case p.Slots > 0:
			p.tell(lockctx.Slot, 0)
			return nil
		case p.Strategy == lockctx.StrategyOptimistic && p.Version == 0: // nobody else can change it
			return nil
		}
	}
	if p.Slots > 0 && slices.ContainsFunc(w.guards, sameRow) {
		p.tell(lockctx.Slot, 0)
		return nil
	}
	switch {
	case p.Strategy != lockctx.StrategyRow:
		w.guards = append(w.guards, p)
	case p.Slots > 0:
		w.slots = append(w.slots, p)
	default:
		w.rows = append(w.rows, p)
	}
	return nil
}

// upgrade is the answer to somebody who holds a key shared and asks for more.
func (p place) upgrade() error {
	return &Error{Op: "lock", Key: p.Key, Strategy: lockctx.StrategyRow, Err: lockerr.With(ErrUnsafe, errors.New(
		"this unit of work holds the key shared and asks for it exclusively, which two at a time would do for ever; ask for the exclusive lock from the beginning"))}
}

// again returns why the guard, which is held already, does not do for p.
func (g *guard) again(p place) error {
	version := p.Version
	switch {
	case version == 0,
		g.version() != nil && g.version().Number() == version,
		g.token() == version+1: // the lease itself is the only change since
		return nil
	}
	return &Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: ErrConflict}
}

// wait is the longest time that h is ready to queue.
func (k *connector) wait(h *lockctx.Hint) time.Duration {
	if h.HasWait {
		return h.Wait
	}
	return k.settings.wait
}

// patience is how long a caller queues in all, for whatever it has to wait.
type patience struct {
	wait  time.Duration
	start time.Time
}

// patience is that of a caller with h, from now on.
func (k *connector) patience(h *lockctx.Hint) patience { return patience{k.wait(h), time.Now()} }

// left is what is left of the wait: not nothing, which would mean not to wait, unless
// that is what was asked for.
func (p patience) left() time.Duration {
	if p.wait == 0 {
		return 0
	}
	return max(p.wait-time.Since(p.start), time.Millisecond)
}

// guard takes guards for the unit of work, all or none. undo gives them back,
// where what was to come next fails. carried means that the caller occupies a
// connection of database/sql while it waits. Versions are read on link, where the
// caller has one without a transaction.
func (s *scope) guard(ctx context.Context, l *locks, wait patience, places []place, link *pool.Conn, carried bool) (undo func(), err error) {
	before := len(s.guards)
	undo = func() { s.drop(before) }
	var versions []place
	for _, p := range places {
		if p.Strategy == lockctx.StrategyOptimistic {
			versions = append(versions, p)
			continue
		}
		var taken *guard
		known := make(chan struct{}) // closed when taken is set
		taken, err = s.k.takeGuard(ctx, l, s, p, wait.left(), carried, func() { <-known; s.lost(taken) })
		close(known)
		if err == nil {
			s.add(taken)
			err = s.unchanged(taken)
		}
		if err != nil {
			undo()
			return nil, err
		}
	}
	versions, err = s.uncovered(versions)
	if err == nil {
		locked, seen := len(s.guards), s.k.observe(ctx, versions...)
		err = s.remember(ctx, l, versions, wait.left(), link, carried)
		s.k.answered(seen, 0, err)
		if err == nil && seen != nil {
			s.guards[locked].seen = seen
		}
	}
	if err != nil {
		undo()
		return nil, err
	}
	return undo, nil
}

// takeGuard takes a lease or an advisory lock; s and lost are those of take.
func (k *connector) takeGuard(ctx context.Context, l *locks, s *scope, p place, wait time.Duration, carried bool, lost func()) (*guard, error) {
	seen := k.observe(ctx, p)
	g, err := k.take(ctx, l, s, p, wait, carried, lost)
	if err != nil {
		k.answered(seen, 0, err)
		return nil, err
	}
	g.seen = seen
	k.answered(seen, g.token(), nil)
	return g, nil
}

// add notes that a guard is held.
func (s *scope) add(g *guard) {
	s.guards = append(s.guards, g)
	if v := g.version(); v != nil {
		g.tell(lockctx.Version, v.Number())
		return
	}
	if !s.counted {
		s.k.crowd.hold()
		s.counted = true
	}
	if token := g.token(); token != 0 {
		g.tell(lockctx.Token, token)
	}
	if g.Slots > 0 {
		g.tell(lockctx.Slot, uint64(g.slot))
	}
}

// unchanged returns ErrConflict where a lease that was taken just now comes after
// somebody has changed what the unit of work has remembered before.
func (s *scope) unchanged(taken *guard) error {
	for _, g := range s.guards {
		if g.version() != nil && taken.covers(g.place) {
			return taken.again(g.remembered())
		}
	}
	return nil
}

// covers reports whether the guard is a lease on the row of a version: nobody
// else can change it.
func (g *guard) covers(version place) bool { return g.token() != 0 && g.keeps(version) }

// remembered is the place of a version with its number.
func (g *guard) remembered() place {
	p := g.place
	p.Version = g.version().Number()
	return p
}

// uncovered returns those of places whose versions a lease of the unit of work
// does not stand for.
func (s *scope) uncovered(places []place) (rest []place, err error) {
	for _, p := range places {
		at := slices.IndexFunc(s.guards, func(g *guard) bool { return g.covers(p) })
		if at < 0 {
			rest = append(rest, p)
			continue
		}
		if err := s.guards[at].again(p); err != nil {
			return nil, err
		}
	}
	return rest, nil
}

// remember notes the versions of places, in one statement.
func (s *scope) remember(ctx context.Context, l *locks, places []place, wait time.Duration, link *pool.Conn, carried bool) error {
	at := make(map[string]place) // by row
	r := optimistic.Request{Wait: wait, Waiting: s.k.waitingFor(s, carried)}
	for _, p := range places {
		if p.Version != 0 {
			s.add(&guard{keeper: l.versions.Given(p.row, p.Version), place: p})
			continue
		}
		at[p.row] = p
		r.Keys = append(r.Keys, p.row)
	}
	if len(r.Keys) == 0 {
		return nil
	}
	var base driver.Conn
	if link != nil {
		if err := link.Take(ctx); err != nil {
			return err
		}
		defer link.Give()
		base = link.Conn
	}
	versions, err := l.versions.Remember(ctx, base, r)
	if err != nil {
		return naming(err, places)
	}
	for _, v := range versions {
		s.add(&guard{keeper: v, place: at[v.Key()]})
	}
	return nil
}

// naming puts the caller's keys into an error, in place of the rows that keep
// them.
func naming(err error, places []place) error {
	var e *Error
	if errors.As(err, &e) && e.Key != "" {
		e.Key = label(places)
	}
	return err
}

// label is what errors call the keys of places.
func label(places []place) string {
	if len(places) == 1 {
		return places[0].Key
	}
	keys := make([]string, len(places))
	for i, p := range places {
		keys[i] = p.Key
	}
	slices.Sort(keys)
	return strings.Join(slices.Compact(keys), ", ")
}

// take takes a guard for s, which is nil outside of any lock context. lost is called
// once, on a goroutine of its own, when the guard may be lost.
func (k *connector) take(ctx context.Context, l *locks, s *scope, p place, wait time.Duration, carried bool, lost func()) (*guard, error) {
	switch {
	case p.Slots > 0:
		return l.takeSlot(ctx, p, wait, k.waitingFor(s, carried), lost)
	case p.Strategy == lockctx.StrategyLease:
		return l.takeLease(ctx, p, wait, k.waitingFor(s, carried), lost)
	}
	lock, err := l.advisories.Acquire(ctx, advisory.Request{
		Key: p.row, Wait: wait,
		Waiting: func(ctx context.Context) (context.Context, func(), error) { return k.counted(ctx, s, carried) },
		Lost:    func(error) { lost() },
	})
	if err != nil {
		return nil, naming(err, []place{p})
	}
	return &guard{keeper: lock, place: p}, nil
}

// takeLease is take for a lease on one row.
func (l *locks) takeLease(ctx context.Context, p place, wait time.Duration, waiting waiting, lost func()) (*guard, error) {
	held, err := l.leases.Acquire(ctx, lease.Request{
		Key: p.row, TTL: p.TTL, MinHold: p.MinHold, MaxHold: p.MaxHold, Wait: wait, Waiting: waiting,
		Lost: func(error) { lost() },
	})
	if err != nil {
		return nil, naming(err, []place{p})
	}
	return &guard{keeper: held, place: p}, nil
}

// waiting is called before a caller begins to wait. It may refuse, and end the wait
// through the context that it returns; done follows.
type waiting = func(context.Context) (ctx context.Context, done func(), err error)

// waitingFor is what callers of the lock context are asked before they wait.
func (k *connector) waitingFor(s *scope, carried bool) waiting {
	return func(ctx context.Context) (context.Context, func(), error) { return k.waiting(ctx, s, carried) }
}

// slotSlice is how long a caller waits for one slot before it looks at the others
// again.
const slotSlice = 250 * time.Millisecond

// takeSlot takes a lease on one of the rows of p. As many callers of this process
// as there are slots try at a time.
func (l *locks) takeSlot(ctx context.Context, p place, wait time.Duration, waiting waiting, lost func()) (_ *guard, err error) {
	a := &slotAttempt{locks: l, p: p, rows: p.slots(), ctx: ctx, wait: wait, waiting: waiting, start: time.Now()}
	defer func() { a.done() }()
	if err := l.rows.Exist(ctx, slices.Sorted(slices.Values(a.rows))); err != nil {
		return nil, &Error{Op: "lock", Key: p.Key, Strategy: p.Strategy, Err: err}
	}
	ticket, err := a.lineUp()
	if err != nil {
		return nil, a.explain(err)
	}
	a.lost = func() { // nobody need release what is lost
		ticket.Leave()
		lost()
	}
	g, slot, err := a.take(ticket)
	if err != nil {
		ticket.Leave()
		return nil, a.explain(err)
	}
	ticket.Holds(slot)
	ticket.Granted(&Holder{Program: l.owner})
	g.Slots, g.of, g.slot, g.ticket = p.Slots, p.row, slot, ticket
	return g, nil
}

// slotAttempt is one call of takeSlot.
type slotAttempt struct {
	*locks
	p       place
	rows    []string // of the slots
	ctx     context.Context
	wait    time.Duration
	waiting waiting
	lost    func()
	start   time.Time
	patient context.Context // of the wait, once it has begun
	leave   func()
	holder  *Holder // of a slot
}

// mayWait begins the wait, or goes on with it: a caller that waits is counted
// once, from the beginning to the end.
func (a *slotAttempt) mayWait() error {
	if a.patient != nil {
		return context.Cause(a.patient)
	}
	if a.wait == 0 {
		return ErrLocked
	}
	ctx, leave, err := queue.Wait(a.ctx, a.wait-time.Since(a.start), ErrTimeout, a.waiting)
	if err == nil {
		a.patient, a.leave = ctx, leave
	}
	return err
}

func (a *slotAttempt) done() {
	if a.leave != nil {
		a.leave()
	}
}

// lineUp takes a place in the line of this process.
func (a *slotAttempt) lineUp() (*queue.Ticket, error) {
	places := []queue.Place{{Key: a.p.row, Slots: a.p.Slots}}
	ticket, holder, ok := a.line.TryEnterAs(places, a.wait == 0)
	if ok {
		return ticket, nil
	}
	a.holder = holder
	if err := a.mayWait(); err != nil {
		return nil, err
	}
	ticket, err := a.line.EnterAs(a.patient, places)
	if err != nil {
		a.holder = a.line.HolderOf(places[0])
		return nil, context.Cause(a.patient)
	}
	return ticket, nil
}

// take takes the slot that somebody of this process has given back, or any one at
// first, else one that the server says is free. Where none is it waits for any one
// of them for a while, or until somebody of this process gives one back.
func (a *slotAttempt) take(ticket *queue.Ticket) (g *guard, slot int, err error) {
	for tries := 1; ; tries++ {
		found := true
		if slot = ticket.Free(); slot < 0 && tries == 1 {
			slot = a.any(ticket)
		}
		if slot < 0 {
			if slot, found, err = a.FreeSlot(a.ctx, a.rows, ticket.Taken()...); err != nil {
				return nil, 0, err
			}
		}
		if found {
			if g, err = a.one(a.ctx, slot, 0); err == nil || !errors.Is(err, ErrLocked) || a.wait == 0 && tries == 3 {
				return g, slot, err
			}
			continue
		}
		if err := a.mayWait(); err != nil {
			return nil, 0, err
		}
		if g, slot, err = a.waitFor(ticket); g != nil || err != nil {
			return g, slot, err
		}
	}
}

// any returns one of the slots that nobody else of this process has, or is to
// have first; -1 where there is none.
func (a *slotAttempt) any(ticket *queue.Ticket) int {
	taken := ticket.Taken()
	first := rand.IntN(len(a.rows))
	for i := range a.rows {
		if slot := (first + i) % len(a.rows); !slices.Contains(taken, slot) {
			return slot
		}
	}
	return -1
}

// waitFor waits for any one of the slots for a while. It returns no guard where
// it is time to look at the others.
func (a *slotAttempt) waitFor(ticket *queue.Ticket) (*guard, int, error) {
	ctx, cancel := context.WithTimeout(a.patient, 2*slotSlice)
	defer cancel()
	freed := ticket.Freed()
	slot := a.any(ticket)
	if slot < 0 { // those who have them are here: they tell
		select {
		case <-freed:
		case <-time.After(slotSlice):
		case <-a.patient.Done():
			return nil, 0, context.Cause(a.patient)
		}
		return nil, 0, nil
	}
	go func() {
		select {
		case <-freed:
			cancel()
		case <-ctx.Done():
		}
	}()
	g, err := a.one(ctx, slot, slotSlice)
	switch {
	case err == nil:
		return g, slot, nil
	case a.patient.Err() != nil:
		return nil, 0, context.Cause(a.patient)
	case ctx.Err() != nil || errors.Is(err, ErrLocked):
		return nil, 0, nil
	}
	return nil, 0, err
}

// one takes a lease on one of the rows.
func (a *slotAttempt) one(ctx context.Context, slot int, wait time.Duration) (*guard, error) {
	p := a.p
	p.row, p.Slots = a.rows[slot], 0
	g, err := a.takeLease(ctx, p, wait, nil, a.lost)
	var e *Error
	if errors.As(err, &e) && e.Holder != nil {
		a.holder = e.Holder
	}
	return g, err
}

// explain turns a failure into the error that callers see.
func (a *slotAttempt) explain(err error) error {
	var e *Error
	switch {
	case a.ctx.Err() != nil:
		err = lockerr.With(ErrTimeout, a.ctx.Err())
	case !errors.Is(err, ErrLocked) && !errors.Is(err, ErrTimeout):
		return err
	case errors.As(err, &e): // of one of the slots
		err = e.Err
	}
	return &Error{Op: "lock", Key: a.p.Key, Strategy: a.p.Strategy, Holder: a.holder, Waited: time.Since(a.start), Err: err}
}

// fence checks, right before the transaction on link commits, that guards are
// still ours. Leases are kept so until the transaction has ended. Advisory locks
// are not: where the answer to its COMMIT is lost, unsure is to be called before
// they are given back.
func (l *locks) fence(link *pool.Conn, guards ...*guard) (unsure func(), err error) {
	unsure = func() {}
	if sabotage.NoFence.Load() {
		return unsure, nil
	}
	var leases []*lease.Lease
	var places []place
	var advisories []*advisory.Lock
	for _, g := range guards {
		switch kept := g.keeper.(type) {
		case *lease.Lease:
			leases, places = append(leases, kept), append(places, g.place)
		case *advisory.Lock:
			advisories = append(advisories, kept)
		}
	}
	if len(advisories) > 0 {
		var id uint64
		id, err = l.advisories.Check(context.Background(), link.Conn, advisories)
		unsure = func() {
			ctx, cancel := context.WithTimeout(context.Background(), commitLimit)
			defer cancel()
			l.advisories.AwaitEnd(ctx, id, advisories)
		}
	}
	if len(leases) > 0 && err == nil {
		err = l.leases.Fence(context.Background(), link.Conn, leases)
		var e *Error
		if at := slices.IndexFunc(places, func(p place) bool { return errors.As(err, &e) && e.Key == p.row }); at >= 0 {
			places = places[at : at+1]
		}
		err = naming(err, places)
	}
	return unsure, err
}

// drop gives all guards but the first few back. What was lost meanwhile needs
// no error: nothing that the unit of work did after that was committed.
func (s *scope) drop(keep int) {
	if len(s.guards) == keep {
		return
	}
	for _, g := range s.guards[keep:] {
		g.forget(lockctx.Token)
		g.forget(lockctx.Slot)
		_ = g.Release()
	}
	s.guards = slices.Clone(s.guards[:keep])
	if s.counted && !slices.ContainsFunc(s.guards, func(g *guard) bool { return g.version() == nil }) {
		s.k.crowd.done()
		s.counted = false
	}
	if keep > 0 {
		return
	}
	for _, hold := range s.joined {
		hold.cancel(ErrLost)
	}
	s.joined = nil
	if s.unwatch != nil {
		s.unwatch()
		s.unwatch = nil
	}
}

// watch gives the guards back when end does, the context that bounds what was
// read under them.
func (s *scope) watch(end context.Context) {
	if s.unwatch != nil && !s.endless || len(s.guards) == 0 {
		return
	}
	if s.unwatch != nil {
		s.unwatch()
	}
	s.endless = end.Done() == nil
	s.unwatch = context.AfterFunc(end, func() {
		_ = s.take(context.Background())
		defer s.give()
		if s.unit == nil && len(s.guards) > 0 { // a transaction gives them back at its own end
			s.failed = &Error{Op: "statement", Key: s.guards[0].Key, Strategy: s.guards[0].Strategy, Err: lockerr.With(ErrLost, errEnded)}
			s.drop(0)
		}
	})
}

var errEnded = errors.New("the lock context, or the context of the query that took the lock, has ended")

// lost is called when a guard of the unit of work may be lost.
func (s *scope) lost(g *guard) {
	s.k.doubt.Store(true)
	_ = s.take(context.Background())
	defer s.give()
	if slices.Contains(s.guards, g) {
		g.lost()
		s.fail(g.overError("statement"))
	}
}

// fail ends the unit of work, which has lost a guard.
func (s *scope) fail(cause error) {
	if s.unwatch != nil {
		s.failed = cause // what was decided under it must not be written without it
	}
	if s.unit != nil {
		s.unit.fail(cause, false)
	}
	s.drop(0)
}

// check returns why nothing can run in the lock context any more, or inside the
// holds around it.
func (s *scope) check(h *lockctx.Hint) error {
	for _, g := range s.guards {
		if err := g.overError("statement"); err != nil {
			s.fail(err)
			return err
		}
	}
	if s.failed != nil {
		return s.failed
	}
	if h == nil {
		return nil
	}
	return s.k.checkAround(h)
}

// checkAround returns why nothing can run inside the holds around h any more.
func (k *connector) checkAround(h *lockctx.Hint) error {
	for _, g := range k.around(h) {
		if err := g.overError("statement"); err != nil {
			return err
		}
	}
	return nil
}

// overError is what work under a guard gets that is over; nil where it is held.
func (g *guard) overError(op string) error {
	err := g.Err()
	if err == nil {
		return nil
	}
	if !errors.Is(err, ErrLost) {
		err = lockerr.With(ErrLost, errors.New("its hold has ended"))
	}
	return &Error{Op: op, Key: g.Key, Strategy: g.Strategy, Err: err}
}
