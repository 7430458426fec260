package record

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/hint"
)

const (
	lease = hint.StrategyLease

	// heartbeat is how often it is written that a look saw no change.
	heartbeat = time.Minute

	// inNewFile is the text of Began where only the file is new.
	inNewFile = "in a new file"
)

// Recorder writes what changes between looks.
type Recorder struct {
	inspector *inspect.Inspector
	file      *file
	every     time.Duration

	open      map[string]Event // who holds, and who waits, by Event.party
	missed    map[string]time.Time
	lapsing   Lapses
	forced    map[string]uint64 // the tokens of the leases whose end by force was written, by Event.lock
	deadlocks inspect.Known[uint64]
	gaps      string    // what is not seen, as it was written last
	written   time.Time // the last event
	last      time.Time // the last look, by the server's clock
	out       []Event
}

// New returns a Recorder that looks every so often, and keeps at most maxSize bytes in the file at path and
// the one beside it that has ".1" at its end. If the file exists, it goes on at its end.
func New(i *inspect.Inspector, path string, every time.Duration, maxSize int64) (*Recorder, error) {
	if every < 100*time.Millisecond || every > heartbeat {
		return nil, fmt.Errorf("mysqllock: a look every %v, want %v to %v", every, 100*time.Millisecond, heartbeat)
	}
	if maxSize < 1<<16 {
		return nil, fmt.Errorf("mysqllock: a record of %d bytes, want %d or more", maxSize, 1<<16)
	}
	f, err := openFile(path, maxSize/2)
	if err != nil {
		return nil, err
	}
	return &Recorder{
		inspector: i, file: f, every: every,
		open: make(map[string]Event), missed: make(map[string]time.Time), forced: make(map[string]uint64),
	}, nil
}

// Run looks until ctx ends, and then closes the file. A look that fails is written, and is no error. It returns
// an error if it cannot write.
func (r *Recorder) Run(ctx context.Context) error {
	defer r.file.close()
	failing := false
	for began := false; ; {
		start := time.Now()
		snap, err := r.inspector.Snapshot(ctx, inspect.Filter{AllNamespaces: true, Deadlocks: true, Forced: true})
		switch {
		case ctx.Err() != nil:
			r.note(Event{What: Ended})
			return r.write()
		case err != nil && !failing:
			r.note(Event{Time: start.UTC(), What: Failed, Text: err.Error()}) // nothing is known of the time for which it has waited
			r.forget()
		case err == nil:
			if !began {
				r.last = snap.Time
				r.gaps = gaps(snap)
				r.note(Event{What: Began, Text: r.gaps})
			}
			if failing {
				r.note(Event{Time: snap.Time, What: Looked})
			}
			began = true
			r.see(ctx, snap, time.Since(start))
		}
		failing = err != nil
		if err := r.write(); err != nil {
			return err
		}
		select {
		case <-time.After(r.every):
		case <-ctx.Done():
		}
	}
}

// gaps is what the snapshot does not show.
func gaps(snap *inspect.Snapshot) (text string) {
	for i, g := range snap.Gaps {
		if i > 0 {
			text += "; "
		}
		text += "not seen: " + g.What + ": " + g.Why
	}
	return text
}

// numbers in gaps change with each look, and tell nothing new.
var numbers = regexp.MustCompile(`[0-9]+`)

// seeGaps notes what is not seen, if that has changed.
func (r *Recorder) seeGaps(snap *inspect.Snapshot) {
	now := gaps(snap)
	if numbers.ReplaceAllString(now, "") != numbers.ReplaceAllString(r.gaps, "") {
		r.gaps = now
		r.note(Event{What: NotSeen, Text: now})
	}
}

// note has the event written, with the time of the last look if it has none.
func (r *Recorder) note(e Event) {
	if e.Time.IsZero() {
		if e.Time = r.last; e.Time.IsZero() || e.What == Ended {
			e.Time = time.Now().UTC()
		}
	}
	r.out = append(r.out, e)
}

// forget is for a look that failed: what happens meanwhile is not known.
func (r *Recorder) forget() {
	r.deadlocks = inspect.Known[uint64]{}
	r.lapsing = Lapses{}
	clear(r.open)
	clear(r.missed)
}

// see notes what has changed since the look before.
func (r *Recorder) see(ctx context.Context, snap *inspect.Snapshot, took time.Duration) {
	r.last = snap.Time
	r.seeGaps(snap)
	for _, l := range r.lapsing.Follow(snap, took) {
		e := about(Lost, &l)
		e.by(l.Holders.List[0].Client)
		r.note(e)
	}
	now := make(map[string]Event)
	asks := make(map[string]bool) // what a waiter wants that was not there before
	for i := range snap.Locks {
		for _, e := range parties(snap, &snap.Locks[i]) {
			now[e.party()] = e
			if _, known := r.open[e.party()]; e.What == Waits && !known {
				asks[e.wanted()] = true
			}
		}
	}
	for _, party := range slices.Sorted(maps.Keys(r.open)) {
		if _, still := now[party]; still {
			delete(r.missed, party)
			continue
		}
		gone := r.open[party]
		// A waiter for a lease or an advisory lock asks again and again, perhaps on another connection, and is
		// not seen in between.
		asksAgain := gone.What == Waits && gone.Strategy != hint.StrategyRow
		if at, again := r.missed[party]; again {
			gone.Time = at
		} else if gone.Time = snap.Time; asksAgain && !asks[gone.wanted()] {
			r.missed[party] = snap.Time
			continue
		}
		gone.What = ended(snap, gone)
		gone.Since, gone.Earlier, gone.Activity = nil, false, ""
		delete(r.open, party)
		delete(r.missed, party)
		r.note(gone)
	}
	for _, party := range slices.Sorted(maps.Keys(now)) {
		if _, known := r.open[party]; !known {
			r.open[party] = now[party]
			r.note(now[party])
		}
	}
	r.seeForced(snap)
	r.seeDeadlocks(ctx, snap)
	if len(r.out) == 0 && snap.Time.Sub(r.written) >= heartbeat {
		r.note(Event{What: Looked})
	}
}

// ended is what has become of one that held or waited, and is not in the snapshot.
func ended(snap *inspect.Snapshot, gone Event) string {
	holders, waiters := snap.Incomplete(gone.Strategy)
	if gone.What == Waits {
		asksAgain := gone.Strategy != hint.StrategyRow || gone.Slot != nil
		if (asksAgain || waiters) && !granted(snap, gone) {
			return WaitsUnseen
		}
		return WaitsNot
	}
	for i := range snap.Locks {
		if l := &snap.Locks[i]; about(Holds, l).lock() == gone.lock() && len(l.Holders.List) > 0 && !l.Holders.More {
			return HoldsNot // these are all
		}
	}
	if holders {
		return HoldsUnseen
	}
	return HoldsNot
}

// granted reports whether who waited has the lock now, by its connection, or by a process of that name.
func granted(snap *inspect.Snapshot, waiter Event) bool {
	for i := range snap.Locks {
		l := &snap.Locks[i]
		if e := about(Holds, l); e.Strategy != waiter.Strategy || e.Namespace != waiter.Namespace || e.Key != waiter.Key {
			continue
		}
		for _, h := range l.Holders.List {
			if h.ConnectionID != 0 && h.ConnectionID == waiter.Connection || h.PID != 0 && h.Program == waiter.Program {
				return true
			}
		}
	}
	return false
}

func (r *Recorder) seeForced(snap *inspect.Snapshot) {
	for i := range snap.Forced {
		l := &snap.Forced[i]
		e := about(Forced, l)
		e.Strategy, e.Token = lease, &l.Forced.Token
		if r.forced[e.lock()] == l.Forced.Token {
			continue
		}
		r.forced[e.lock()] = l.Forced.Token
		e.Time, e.Account, e.Process, e.Reason = l.Forced.Time, l.Forced.Account, l.Forced.Process, l.Forced.Reason
		r.note(e)
	}
}

func (r *Recorder) seeDeadlocks(ctx context.Context, snap *inspect.Snapshot) {
	is, known := snap.Deadlocks.Get()
	was, before := r.deadlocks.Get()
	r.deadlocks = snap.Deadlocks
	if !known || !before || is <= was {
		return
	}
	e := Event{What: Deadlocks, Count: is - was}
	latest, err := r.inspector.LatestDeadlock(ctx)
	switch {
	case err != nil:
		e.Text = err.Error()
	case latest == nil:
		e.Text = "the server tells no sides: the account has no PROCESS, or it was one of GET_LOCK"
	default:
		e.Sides = latest.Sides
	}
	r.note(e)
}

// about is an event of a lock.
func about(what string, l *inspect.Lock) Event {
	e := Event{What: what, Namespace: l.Namespace, Key: l.Key, Strategy: l.Strategy, Name: []byte(l.Name)}
	if l.Stripe >= 0 {
		e.Key = fmt.Sprintf("stripe %d", l.Stripe)
	}
	if l.Slotted {
		e.Slot = &l.Slot
	}
	if token, known := l.Token.Get(); known {
		e.Token = &token
	}
	return e
}

func (e *Event) by(c inspect.Client) {
	e.Program, e.Connection, e.User, e.Host, e.PID = c.Program, c.ConnectionID, c.User, c.Host, c.PID
}

// parties are those of a lock: who holds it, and who waits.
func parties(snap *inspect.Snapshot, l *inspect.Lock) (out []Event) {
	at := func(what string, c inspect.Client, known inspect.Known[time.Duration], least time.Duration) Event {
		e := about(what, l)
		e.Time = snap.Time
		e.by(c)
		d, exact := known.Get()
		if !exact {
			d = least
		}
		since := snap.Time.Add(-d)
		e.Since, e.Earlier = &since, !exact
		return e
	}
	for i := range l.Holders.List {
		h := &l.Holders.List[i]
		if h.Left {
			continue
		}
		e := at(Holds, h.Client, h.Since, h.Least)
		if len(l.Waiters.List) > 0 && h.Activity != nil {
			e.Activity = h.Activity.String()
		}
		if l.Strategy == lease && e.Token == nil {
			e.Token = new(uint64)
		}
		out = append(out, e)
	}
	for _, w := range l.Waiters.List {
		e := at(Waits, w.Client, w.Waited, w.Least)
		e.Token = nil
		out = append(out, e)
	}
	return out
}

// write writes r.out. A new file begins with the present state.
func (r *Recorder) write() error {
	if len(r.out) == 0 {
		return nil
	}
	r.written = r.last
	out := r.out
	r.out = nil
	turned, err := r.file.append(out)
	if err != nil || !turned {
		return err
	}
	state := []Event{{Time: r.last, What: Began, Text: inNewFile}, {Time: r.last, What: NotSeen, Text: r.gaps}}
	for _, party := range slices.Sorted(maps.Keys(r.open)) {
		e := r.open[party]
		e.Time = r.last
		state = append(state, e)
	}
	_, err = r.file.append(state)
	return err
}
