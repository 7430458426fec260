// Package queue lets the goroutines of one process queue for a key, first come first
// served, before any of them occupies a server connection.
//
// Each key has a queue. In front of the queue is one caller that wants the key exclusively, or several callers that
// share the key, or as many as there are slots. Callers that share the key come to the front together: the first of
// them comes alone, to find out whether the key is free. As soon as it holds the key, the callers right behind it
// follow. No caller passes an earlier one that wants the key exclusively.
//
// A slot that is released is kept for the caller that has been in front without a slot
// for the longest time: see [Ticket.Free].
//
// A caller that cannot come to the front in its time is refused at once: it would wait in vain, or be granted a lock
// that it cannot use. The queue knows how long the last holders were in front. A caller is refused if it would be too
// late even with the quickest of these turns for each caller before it. A caller is passed over if its context ends in
// less than such a turn.
//
// A [Key] has 32 bytes, which are compared; a strategy.Resource has 160. One type for both would bring hints and
// strategies into this package, to save the six lines of handle.QueueKeys.
//
// queue.go has what callers call, keyqueue.go the queue for one key, ticket.go a place in front of it, slots.go the slots
// of a key, turns.go how long holders take, and graph.go the deadlocks.
package queue

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Key says what a caller wants of a queue.
type Key struct {
	Name   string // the name of the key's row, or the key
	Shared bool   // the caller may be in front together with others that share the key
	Slots  int    // how many callers may be in front; 0 for a key without slots. Slots have a queue of their own
}

// Queue has a keyQueue for each key, and another one for the slots of a key. The zero value is ready to use.
type Queue struct {
	mu     sync.Mutex
	queues map[name]*keyQueue
	claims map[string][]*Ticket // by key: see Claim
}

// TryEnter returns a ticket that is in front of the queues of all keys. If others are in the way, ok is false. holder
// is one of these others that holds the lock; nil if none holds it yet. passing is for a caller that will not wait in
// front either: it may share a key with others in front before they hold the key.
func (q *Queue) TryEnter(keys []Key, passing bool) (t *Ticket, holder *lockerr.Holder, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, key := range keys {
		kq := q.queues[key.name()]
		if free := kq == nil || kq.admitsAtOnce(key) || passing && key.Shared && kq.isShared(); !free {
			holder, _ := kq.holder()
			return nil, holder, false
		}
	}
	t = q.ticket()
	t.passing = passing
	for _, key := range keys {
		q.admit(t, key)
	}
	return t, nil, true
}

// ErrDeadlock refuses a caller that would wait for itself.
var ErrDeadlock = Deadlock("the holder of the key, in this process, waits for a key that this caller holds")

// Deadlock returns the error of a caller in a deadlock, with what to do about it. circle says who waits for whom.
func Deadlock(circle string) error {
	return lockerr.With(lockerr.ErrDeadlock, errors.New(circle+"; lock keys in the same order everywhere, or together, with WithKeys"))
}

// ErrOver is the cause with which a wait ends that has lasted as long as the caller was ready to wait.
var ErrOver = errors.New("the wait is over")

// Ends are what ends a wait, beside the end of its context. It costs less than a derived context. The zero value ends
// nothing.
type Ends struct {
	// At is when the wait ends with ErrOver; zero for never. It ends up to grace later if no caller in front knows
	// yet whether somebody has the key.
	At      time.Time
	Closed  <-chan struct{} // ends the wait with lockerr.ErrClosed
	InFront *InFront        // is set to what the callers in front knew when the wait ended; nil for not to ask
	// GoesAhead, if it returns true, ends the wait with success as soon as the caller is the next, and the ticket in front is
	// in use: see [Ticket.Ahead] and [Ticket.Used]. It is for a caller that wants one key alone. It must not call the
	// Queue. nil is for a caller that waits until it is in front.
	GoesAhead func() bool
}

// InFront is what the callers in front of a waiter know of the key when the wait ends.
type InFront struct {
	// Taken: a caller in front has held the key; or was told, since the waiter came, that somebody has it; or keeps
	// its place while it waits for another key.
	Taken bool

	Asks bool // a caller in front has a connection, and asks the server
}

// Enter waits until the caller is in front of the queues of all keys, or until the wait ends. It may succeed although
// the wait has just ended. The keys must be sorted by their names: then two callers never wait for each other. The
// error is ErrDeadlock, or says why the wait has ended.
//
// The previous holder may hand over the lock on one key: see HandedOver. Several strategies share a queue, so giver
// identifies whose holders may: they pass the same value to Handoff. nil is for none.
func (q *Queue) Enter(ctx context.Context, keys []Key, giver any, ends Ends) (*Ticket, error) {
	t := q.ticket()
	for i, key := range keys {
		err := ErrDeadlock
		if i == 0 || !stuck(ctx, t, i) {
			err = q.enter(ctx, t, key, giver, ends)
		}
		if err != nil {
			t.Leave()
			return nil, err
		}
	}
	return t, nil
}

// enter waits until t has come to the front of one queue. If the wait ends before, it returns why.
func (q *Queue) enter(ctx context.Context, t *Ticket, key Key, giver any, ends Ends) (err error) {
	q.mu.Lock()
	kq := q.queues[key.name()]
	if kq == nil || kq.admitsAtOnce(key) {
		q.admit(t, key)
		q.mu.Unlock()
		return nil
	}
	came := time.Now()
	w := &waiter{ticket: t, key: key, giver: giver, front: make(chan struct{})}
	w.ends, _ = ctx.Deadline()
	for _, end := range []time.Time{w.ends, ends.At} {
		if end.IsZero() {
			continue
		}
		if err := kq.turns.hopeless(kq.alone, end.Sub(came)); err != nil {
			q.mu.Unlock()
			return err
		}
	}
	if ends.GoesAhead != nil {
		w.ahead, w.goesAhead = make(chan struct{}), ends.GoesAhead
	}
	kq.add(w)
	kq.callAhead()
	t.waits = true
	for _, p := range t.positions {
		p.queue.noteTaken() // nobody gets these keys before t gives up
	}
	q.mu.Unlock()
	over := new(time.Timer)
	if !ends.At.IsZero() {
		over = time.NewTimer(time.Until(ends.At))
		defer over.Stop()
	}
	var news <-chan struct{}
	taken := false // callers in front have said that the key is taken; they may have left since
	for late := false; err == nil; {
		select {
		case <-w.front:
			return w.refused
		case <-w.ahead:
			q.mu.Lock()
			defer q.mu.Unlock()
			if w.queued() {
				t.place, t.waits = w, false
			}
			return w.refused
		case <-ctx.Done():
			err = context.Cause(ctx)
		case <-ends.Closed:
			err = lockerr.ErrClosed
		case <-news:
			taken, err = true, ErrOver
		case <-over.C:
			if news = q.untold(kq, came); news == nil || late {
				taken, err = news == nil, ErrOver
				break
			}
			late = true
			over.Reset(grace)
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-w.front: // w has come to the front at the same moment
		return w.refused
	default:
		if ends.InFront != nil {
			*ends.InFront = kq.inFront(came)
			ends.InFront.Taken = ends.InFront.Taken || taken
		}
		kq.remove(w)
		q.advance(kq) // waiters behind w may be able to share the key
		return err
	}
}

// grace is how long a waiter whose wait is over still waits until the callers in front are told whether somebody has
// the key. They have asked, and do not leave before the answer either.
const grace = time.Second

// untold returns a channel that is closed when the callers in front know that somebody has the key; nil if they know
// already, as inFront says it for came.
func (q *Queue) untold(kq *keyQueue, came time.Time) <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	if kq.inFront(came).Taken {
		return nil
	}
	if kq.news == nil {
		kq.news = make(chan struct{})
	}
	return kq.news
}

// admit puts t in front of the queue for key.
func (q *Queue) admit(t *Ticket, key Key) {
	kq := q.queues[key.name()]
	if kq == nil {
		if q.queues == nil {
			q.queues = make(map[name]*keyQueue)
		}
		kq = &keyQueue{name: key.name()}
		kq.front = kq.first[:0]
		q.queues[kq.name] = kq
	}
	kq.front = append(kq.front, t)
	if !t.passing {
		kq.pending++
	}
	kq.shared = key.Shared
	t.positions = append(t.positions, position{key, kq, time.Now()})
	if key.Slots > 0 {
		t.slot.freed = make(chan struct{})
		t.keepOneLeft(kq)
	}
}

// advance lets all waiters come to the front that can do so now.
func (q *Queue) advance(kq *keyQueue) {
	together := kq.shared && kq.pending == 0 && kq.holding() != nil
	for w := kq.next(); w != nil; w = kq.next() {
		if next := kq.admits(w.key) || together && w.key.Shared; !next {
			break
		}
		q.admit(w.ticket, w.key)
		kq.call(nil)
	}
	kq.callAhead()
	if len(kq.front) == 0 {
		delete(q.queues, kq.name)
	}
}

// Waiting returns how many callers wait for a key, without those in front.
func (q *Queue) Waiting(key string) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	if kq := q.queues[name{key: key}]; kq != nil {
		return kq.waiting.Len()
	}
	return 0
}

// HolderOf returns the holder, in this process, of the first of keys that has one, and the holder's ticket; nil if none
// has. A key may have several holders: HolderOf returns one of these.
func (q *Queue) HolderOf(keys ...Key) (*lockerr.Holder, *Ticket) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, key := range keys {
		if kq := q.queues[key.name()]; kq != nil {
			if h, t := kq.holder(); h != nil {
				return h, t
			}
		}
	}
	return nil, nil
}
