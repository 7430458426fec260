// Package queue lets the goroutines of one process line up for a key, first
// come first served, before any of them occupies a server connection.
package queue

import (
	"context"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Queue has one line a key. The zero value is ready to use.
type Queue struct {
	mu    sync.Mutex
	lines map[string]*line
}

type line struct {
	turn   *semaphore.Weighted // first come first served
	users  int                 // in front or waiting; the line goes with the last
	holder *lockerr.Holder     // who is in front, once it holds the lock; guarded by Queue.mu
}

// Ticket is the place in front of the lines of some keys.
type Ticket struct {
	q    *Queue
	keys []string
}

// TryEnter takes the place in front of all the lines, or reports who is there;
// the holder is nil where the one in front does not hold the lock yet.
func (q *Queue) TryEnter(keys []string) (t *Ticket, holder *lockerr.Holder, ok bool) {
	t = &Ticket{q: q}
	for _, key := range keys {
		l := q.join(key)
		if !l.turn.TryAcquire(1) {
			q.mu.Lock()
			holder = l.holder
			q.mu.Unlock()
			q.part(key, l)
			t.Leave()
			return nil, holder, false
		}
		t.keys = append(t.keys, key)
	}
	return t, nil, true
}

// Enter takes the place in front of all the lines, waiting until ctx ends.
// The keys must be sorted: two callers then never wait for each other.
func (q *Queue) Enter(ctx context.Context, keys []string) (*Ticket, error) {
	t := &Ticket{q: q}
	for _, key := range keys {
		l := q.join(key)
		if err := l.turn.Acquire(ctx, 1); err != nil {
			q.part(key, l)
			t.Leave()
			return nil, err
		}
		t.keys = append(t.keys, key)
	}
	return t, nil
}

// Granted says that the one in front now holds the lock itself, for those who
// ask who does.
func (t *Ticket) Granted(h *lockerr.Holder) { t.q.setHolder(t.keys, h) }

// Leave lets the next in each line come to the front. A nil ticket, and a
// second call, do nothing.
func (t *Ticket) Leave() {
	if t == nil {
		return
	}
	t.q.setHolder(t.keys, nil)
	for _, key := range t.keys {
		t.q.mu.Lock()
		l := t.q.lines[key]
		t.q.mu.Unlock()
		l.turn.Release(1)
		t.q.part(key, l)
	}
	t.keys = nil
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

func (q *Queue) setHolder(keys []string, h *lockerr.Holder) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, key := range keys {
		q.lines[key].holder = h
	}
}

func (q *Queue) join(key string) *line {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.lines[key]
	if l == nil {
		if q.lines == nil {
			q.lines = make(map[string]*line)
		}
		l = &line{turn: semaphore.NewWeighted(1)}
		q.lines[key] = l
	}
	l.users++
	return l
}

func (q *Queue) part(key string, l *line) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if l.users--; l.users == 0 {
		delete(q.lines, key)
	}
}
