// Package queue lets the goroutines of one process line up for a key, first
// come first served, before any of them occupies a server connection.
package queue

import (
	"container/list"
	"context"
	"sync"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Queue has one line a key. The zero value is ready to use.
type Queue struct {
	mu    sync.Mutex
	lines map[string]*line
}

// line is there while somebody is in front of it. It is guarded by Queue.mu.
type line struct {
	waiting list.List       // of *waiter, the next in front
	holder  *lockerr.Holder // who is in front, once it holds the lock
}

type waiter struct {
	front chan struct{} // closed when it is
	heir  bool          // can take over the lock itself
	baton any           // what the one before it has handed over
}

// Ticket is the place in front of the lines of some keys.
type Ticket struct {
	q     *Queue
	keys  []string
	baton any
}

// TryEnter takes the place in front of all the lines, or reports who is there;
// the holder is nil where the one in front does not hold the lock yet.
func (q *Queue) TryEnter(keys []string) (t *Ticket, holder *lockerr.Holder, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, key := range keys {
		if l := q.lines[key]; l != nil {
			return nil, l.holder, false
		}
	}
	if q.lines == nil {
		q.lines = make(map[string]*line)
	}
	for _, key := range keys {
		q.lines[key] = new(line)
	}
	return &Ticket{q: q, keys: keys}, nil, true
}

// Enter takes the place in front of all the lines, waiting until ctx ends; it
// may succeed although ctx has just ended. The keys must be sorted: two callers
// then never wait for each other.
func (q *Queue) Enter(ctx context.Context, keys []string) (*Ticket, error) {
	t := &Ticket{q: q}
	for i, key := range keys {
		if _, err := q.enter(ctx, key, false); err != nil {
			t.Leave()
			return nil, err
		}
		t.keys = keys[:i+1]
	}
	return t, nil
}

// Succeed is Enter for somebody to whom the one before may hand over the lock
// itself: see Baton.
func (q *Queue) Succeed(ctx context.Context, key string) (*Ticket, error) {
	baton, err := q.enter(ctx, key, true)
	if err != nil {
		return nil, err
	}
	return &Ticket{q: q, keys: []string{key}, baton: baton}, nil
}

func (q *Queue) enter(ctx context.Context, key string, heir bool) (baton any, err error) {
	q.mu.Lock()
	l := q.lines[key]
	if l == nil {
		if q.lines == nil {
			q.lines = make(map[string]*line)
		}
		q.lines[key] = new(line)
		q.mu.Unlock()
		return nil, nil
	}
	w := &waiter{front: make(chan struct{}), heir: heir}
	place := l.waiting.PushBack(w)
	q.mu.Unlock()
	select {
	case <-w.front:
		return w.baton, nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	select {
	case <-w.front: // in the same moment
		return w.baton, nil
	default:
		l.waiting.Remove(place)
		return nil, ctx.Err()
	}
}

// Baton returns what the one before has handed over; nil where nothing was.
func (t *Ticket) Baton() any { return t.baton }

// Granted says that the one in front now holds the lock itself, for those who
// ask who does.
func (t *Ticket) Granted(h *lockerr.Holder) {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	for _, key := range t.keys {
		t.q.lines[key].holder = h
	}
}

// HandOver lets the next in line come to the front, with the lock: baton is what
// it needs to know of it. Where nobody waits, or the next cannot take it over, it
// does nothing and reports false. The ticket is one of a single key.
func (t *Ticket) HandOver(baton any) bool {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	if len(t.keys) != 1 {
		return false
	}
	next := t.q.lines[t.keys[0]].waiting.Front()
	if next == nil || !next.Value.(*waiter).heir {
		return false
	}
	t.q.next(t.keys[0], baton)
	t.keys = nil
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
	for _, key := range t.keys {
		t.q.next(key, nil)
	}
	t.keys = nil
}

// next lets the next in line come to the front.
func (q *Queue) next(key string, baton any) {
	l := q.lines[key]
	l.holder = nil
	first := l.waiting.Front()
	if first == nil {
		delete(q.lines, key)
		return
	}
	w := l.waiting.Remove(first).(*waiter)
	w.baton = baton
	close(w.front)
}

// Holder returns who in this process holds key; nil where nobody does.
func (q *Queue) Holder(key string) *lockerr.Holder {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l := q.lines[key]; l != nil {
		return l.holder
	}
	return nil
}
