// Package queue lets the goroutines of one process line up for a key, first
// come first served, before any of them occupies a server connection.
//
// In front of a line is one who wants the key for itself, or there are many who
// share it, or as many as there are slots. Those who share go together: the
// first of them comes to the front alone, to find out whether the key can be
// had, and as soon as it holds the key those right behind it come too. Whoever
// wants the key for itself is passed by nobody who comes later.
//
// A slot that is given back is kept for the one who has been in front for longest
// without one: whoever is in front learns which those are, see [Ticket.Free].
package queue

import (
	"container/list"
	"context"
	"slices"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Place is what somebody wants of a line.
type Place struct {
	Key    string
	Shared bool // in front together with all who say so
	Slots  int  // in front where fewer than so many are; 0 is without slots. A key's slots have a line of their own
}

// alone returns places in front of the lines of keys with nobody else.
func alone(keys []string) []Place {
	places := make([]Place, len(keys))
	for i, key := range keys {
		places[i].Key = key
	}
	return places
}

// Queue has one line a key, and one for its slots. The zero value is ready to
// use.
type Queue struct {
	mu    sync.Mutex
	lines map[name]*line
}

// name tells lines apart.
type name struct {
	key   string
	slots bool
}

func (p Place) name() name { return name{p.Key, p.Slots > 0} }

// line is there while somebody is in front of it. It is guarded by Queue.mu.
type line struct {
	name    name
	front   []*Ticket
	first   [1]*Ticket // of front
	shared  bool       // those in front share the key
	pending int        // of those in front who wait, how many do not hold the key yet
	left    []int      // slots that were given back and that nobody is told of, the last at the end
	waiting list.List  // of *waiter, the next in front
}

type waiter struct {
	ticket *Ticket
	place  Place
	heir   bool          // can take over the lock itself
	front  chan struct{} // closed when it is
}

// Ticket is the place in front of the lines of some keys, or of that for the
// slots of one.
type Ticket struct {
	q       *Queue
	passing bool            // it waits for nothing, so that nobody is to wait for it
	places  []taken         // guarded by Queue.mu once there is one
	first   [1]taken        // of places
	holder  *lockerr.Holder // who has the ticket, once it holds the lock; guarded by Queue.mu
	baton   any             // what the one before it has handed over
	slot    int             // which it holds, noSlot until it says so; guarded by Queue.mu
	free    int             // which one is kept for it, or noSlot; guarded by Queue.mu
	told    bool            // Free has told of it; guarded by Queue.mu
	freed   chan struct{}   // closed while there is one that Free has not told of; guarded by Queue.mu
}

// taken is a place in front of a line.
type taken struct {
	Place
	line *line
}

const noSlot = -1

func (q *Queue) ticket() *Ticket {
	t := &Ticket{q: q, slot: noSlot, free: noSlot}
	t.places = t.first[:0]
	return t
}

// TryEnter takes the place in front of all the lines, with nobody else, or
// reports who is there; the holder is nil where nobody in front holds the lock
// yet.
func (q *Queue) TryEnter(keys []string) (t *Ticket, holder *lockerr.Holder, ok bool) {
	return q.TryEnterAs(alone(keys), false)
}

// Enter takes the place in front of all the lines, with nobody else, waiting
// until ctx ends; it may succeed although ctx has just ended. The keys must be
// sorted: two callers then never wait for each other.
func (q *Queue) Enter(ctx context.Context, keys []string) (*Ticket, error) {
	return q.EnterAs(ctx, alone(keys))
}

// TryEnterAs is TryEnter for other places. passing is for somebody who will not
// wait in front either: it may share the key with those of whom it is not known
// yet whether they get it.
func (q *Queue) TryEnterAs(places []Place, passing bool) (t *Ticket, holder *lockerr.Holder, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, p := range places {
		l := q.lines[p.name()]
		if free := l == nil || l.free(p) || passing && l.passes(p); !free {
			return nil, l.holder(), false
		}
	}
	t = q.ticket()
	t.passing = passing
	for _, p := range places {
		q.take(t, p)
	}
	return t, nil, true
}

// EnterAs is Enter for other places.
func (q *Queue) EnterAs(ctx context.Context, places []Place) (*Ticket, error) {
	t := q.ticket()
	for _, p := range places {
		if !q.enter(ctx, t, p, false, Ends{}) {
			t.Leave()
			return nil, ctx.Err()
		}
	}
	return t, nil
}

// Ends are what ends a wait beside its context, which costs less than to derive a
// context from it. The zero value is nothing.
type Ends struct {
	Over   <-chan time.Time
	Closed <-chan struct{}
}

// Succeed is Enter for somebody to whom the one before may hand over the lock
// itself: see Baton. It returns nil where the wait has ended.
func (q *Queue) Succeed(ctx context.Context, key string, ends Ends) *Ticket {
	t := q.ticket()
	if !q.enter(ctx, t, Place{Key: key}, true, ends) {
		return nil
	}
	return t
}

// enter reports whether t has come to the front of the line before the wait ended.
func (q *Queue) enter(ctx context.Context, t *Ticket, p Place, heir bool, ends Ends) bool {
	q.mu.Lock()
	l := q.lines[p.name()]
	if l == nil || l.free(p) {
		q.take(t, p)
		q.mu.Unlock()
		return true
	}
	w := &waiter{ticket: t, place: p, heir: heir, front: make(chan struct{})}
	at := l.waiting.PushBack(w)
	q.mu.Unlock()
	select {
	case <-w.front:
		return true
	case <-ctx.Done():
	case <-ends.Over:
	case <-ends.Closed:
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-w.front: // in the same moment
		return true
	default:
		l.waiting.Remove(at)
		q.advance(l) // those behind it may want less than it did
		return false
	}
}

// free reports whether the next can come to the front where nobody waits.
func (l *line) free(p Place) bool { return l.waiting.Len() == 0 && l.admits(p) }

// admits reports whether the next in line can come to the front.
func (l *line) admits(p Place) bool {
	if p.Slots > 0 {
		return len(l.front) < p.Slots
	}
	return len(l.front) == 0 || p.Shared && l.shared && l.pending == 0
}

// passes reports whether everybody in the line shares the key, as p does.
func (l *line) passes(p Place) bool {
	if !p.Shared || !l.shared {
		return false
	}
	for at := l.waiting.Front(); at != nil; at = at.Next() {
		if !at.Value.(*waiter).place.Shared {
			return false
		}
	}
	return true
}

// holder returns one who is known to hold the key.
func (l *line) holder() *lockerr.Holder {
	for _, t := range l.front {
		if t.holder != nil {
			return t.holder
		}
	}
	return nil
}

// take puts t in front.
func (q *Queue) take(t *Ticket, p Place) {
	l := q.lines[p.name()]
	if l == nil {
		if q.lines == nil {
			q.lines = make(map[name]*line)
		}
		l = &line{name: p.name()}
		l.front = l.first[:0]
		q.lines[l.name] = l
	}
	l.front = append(l.front, t)
	if !t.passing {
		l.pending++
	}
	l.shared = p.Shared
	t.places = append(t.places, taken{p, l})
	if p.Slots > 0 {
		t.freed = make(chan struct{})
		t.next(l)
	}
}

// advance lets those come to the front who can now.
func (q *Queue) advance(l *line) {
	together := l.shared && l.pending == 0 && l.holder() != nil
	for at := l.waiting.Front(); at != nil; at = l.waiting.Front() {
		w := at.Value.(*waiter)
		if next := l.admits(w.place) || together && w.place.Shared; !next {
			break
		}
		l.waiting.Remove(at)
		q.take(w.ticket, w.place)
		close(w.front)
	}
	if len(l.front) == 0 {
		delete(q.lines, l.name)
	}
}

// Baton returns what the one before has handed over; nil where nothing was.
func (t *Ticket) Baton() any { return t.baton }

// slots returns the line that t is in front of for a slot; nil where there is
// none.
func (t *Ticket) slots() *line {
	if len(t.places) == 0 || t.places[0].Slots == 0 {
		return nil
	}
	return t.places[0].line
}

// Holds says which of the slots the ticket is for, for those who come later.
func (t *Ticket) Holds(slot int) {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	l := t.slots()
	if l == nil {
		return
	}
	l.left = slices.DeleteFunc(l.left, func(i int) bool { return i == slot })
	t.slot = slot
	kept := t.free
	if t.free = noSlot; kept != slot {
		l.give(kept)
	}
}

// Free returns a slot that somebody in front has given back, so that it may be
// free; -1 where none is known. It is kept for the ticket until that holds one or
// leaves, or asks again because it was not to be had.
func (t *Ticket) Free() int {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	l := t.slots()
	if l == nil || t.slot != noSlot {
		return noSlot
	}
	if t.free == noSlot || t.told {
		t.next(l)
	}
	if t.free != noSlot {
		t.told, t.freed = true, make(chan struct{})
	}
	return t.free
}

// Freed returns a channel that is closed when Free has another one to tell of,
// for somebody who waits; nil where the ticket is not for slots. It is to be
// asked for anew after Free.
func (t *Ticket) Freed() <-chan struct{} {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	return t.freed
}

// Taken returns the slots that others in front hold, or that are kept for them.
// Whoever tries one of these, or waits for it elsewhere, may pass one who has
// come before it.
func (t *Ticket) Taken() []int {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	l := t.slots()
	if l == nil {
		return nil
	}
	var taken []int
	for _, other := range l.front {
		for _, slot := range []int{other.slot, other.free} {
			if other != t && slot != noSlot {
				taken = append(taken, slot)
			}
		}
	}
	return taken
}

// give keeps a slot for the first in front who waits for one, else for those who
// come later.
func (l *line) give(slot int) {
	if slot == noSlot {
		return
	}
	for _, t := range l.front {
		if !t.passing && t.slot == noSlot && t.free == noSlot && slot < t.places[0].Slots {
			t.keep(slot)
			return
		}
	}
	l.left = append(l.left, slot)
}

// next keeps the slot for t that was given back last of those that nobody is told
// of.
func (t *Ticket) next(l *line) {
	t.free, t.told = noSlot, false
	for i, slot := range slices.Backward(l.left) {
		if slot < t.places[0].Slots {
			l.left = slices.Delete(l.left, i, i+1)
			t.keep(slot)
			return
		}
	}
}

func (t *Ticket) keep(slot int) {
	t.free, t.told = slot, false
	close(t.freed)
}

// Granted says that the one in front now holds the lock itself, for those who
// ask who does, and for those who can share it.
func (t *Ticket) Granted(h *lockerr.Holder) {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	first := t.holder == nil
	t.holder = h
	for _, p := range t.places {
		if first && !t.passing {
			p.line.pending--
			t.q.advance(p.line)
		}
	}
}

// HandOver lets the next in line come to the front, with the lock: baton is what
// it needs to know of it. Where nobody waits, or the next cannot take it over, it
// does nothing and reports false. The ticket is one of a single key, with nobody
// else in front.
func (t *Ticket) HandOver(baton any) bool {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	if len(t.places) != 1 || t.places[0].Place != (Place{Key: t.places[0].Key}) {
		return false
	}
	next := t.places[0].line.waiting.Front()
	if next == nil || !next.Value.(*waiter).heir {
		return false
	}
	next.Value.(*waiter).ticket.baton = baton
	t.leave()
	return true
}

// Leave lets the next in each line come to the front. A nil ticket, and a
// second call, do nothing.
func (t *Ticket) Leave() {
	if t == nil {
		return
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	t.leave()
}

func (t *Ticket) leave() {
	for _, p := range t.places {
		l := p.line
		at := slices.Index(l.front, t)
		l.front = slices.Delete(l.front, at, at+1)
		if t.holder == nil && !t.passing {
			l.pending--
		}
		l.give(t.slot)
		l.give(t.free)
		t.q.advance(l)
	}
	t.places = nil
}

// Waiting returns how many are in line for a key behind those in front.
func (q *Queue) Waiting(key string) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.lines[name{key: key}]; l != nil {
		return l.waiting.Len()
	}
	return 0
}

// Holder returns who in this process holds key; nil where nobody does.
func (q *Queue) Holder(key string) *lockerr.Holder { return q.HolderOf(Place{Key: key}) }

// HolderOf is Holder for other places: one of those who are in front.
func (q *Queue) HolderOf(p Place) *lockerr.Holder {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.lines[p.name()]; l != nil {
		return l.holder()
	}
	return nil
}
