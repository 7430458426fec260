package queue

import (
	"context"
	"slices"
	"sync"
)

// graph has the callers of this process that wait while they hold something else, for all strategies and database
// handles. Waiters that hold nothing are in nobody's way.
var graph struct {
	mu    sync.Mutex
	waits map[*Wanted]struct{}
}

// Wanted is what a caller waits for, and what it holds meanwhile.
type Wanted struct {
	Queue *Queue
	Keys  []Key     // without those for slots, since any holder of a slot may release it
	Holds []*Ticket // tickets that the caller does not release before its wait has ended

	// Guarded by graph.mu.
	own       *Ticket // the ticket that is in front of the first queues while the caller waits for the others
	inFrontOf int     // in front of how many queues own is
}

// Wait notes that the caller waits from now on, until done. ok is false if that would be a deadlock: the holders of
// what the caller wants wait, directly or by way of others, for what the caller holds. Then nothing is noted.
//
// Wait knows only the callers of this process. Of the callers in a deadlock, the last to begin its wait sees it,
// since all others are noted before.
func (w *Wanted) Wait() (done func(), ok bool) {
	graph.mu.Lock()
	defer graph.mu.Unlock()
	if w.deadlocked() {
		return nil, false
	}
	if graph.waits == nil {
		graph.waits = make(map[*Wanted]struct{})
	}
	graph.waits[w] = struct{}{}
	return func() {
		graph.mu.Lock()
		defer graph.mu.Unlock()
		delete(graph.waits, w)
	}, true
}

// In returns a context that tells [Queue.Enter] that its caller is that of w.
func (w *Wanted) In(ctx context.Context) context.Context {
	if len(w.Keys) < 2 {
		return ctx
	}
	return context.WithValue(ctx, wantedKey{}, w)
}

type wantedKey struct{}

// stuck notes that ticket t of the caller of ctx is in front of the first has queues. It reports whether a wait for
// the other queues would be a deadlock.
func stuck(ctx context.Context, t *Ticket, has int) bool {
	w, _ := ctx.Value(wantedKey{}).(*Wanted)
	if w == nil {
		return false
	}
	graph.mu.Lock()
	defer graph.mu.Unlock()
	w.own, w.inFrontOf = t, has
	return w.deadlocked()
}

// deadlocked reports whether w waits for itself. The caller holds graph.mu.
func (w *Wanted) deadlocked() bool {
	seen := make(map[*Wanted]bool)
	for next := []*Wanted{w}; len(next) > 0; {
		waiting := next[len(next)-1]
		next = next[:len(next)-1]
		for _, t := range waiting.inTheWay() {
			if w.keeps(t) {
				return true
			}
			for other := range graph.waits {
				if !seen[other] && other.keeps(t) {
					seen[other] = true
					next = append(next, other)
				}
			}
		}
	}
	return false
}

// keeps reports whether w's caller does not release t before its wait has ended.
func (w *Wanted) keeps(t *Ticket) bool { return t == w.own || slices.Contains(w.Holds, t) }

// inTheWay returns the tickets that hold what w's caller still wants. A ticket that shares a key is not in the way of
// others that share the key, unless a caller that wants the key exclusively is between them. But the first ticket of a
// queue is in the way of all until it holds the key.
func (w *Wanted) inTheWay() (tickets []*Ticket) {
	w.Queue.mu.Lock()
	defer w.Queue.mu.Unlock()
	for _, key := range w.Keys[w.inFrontOf:] {
		if key.Slots > 0 {
			continue
		}
		kq := w.Queue.queues[key.name()]
		alone := !key.Shared || kq != nil && !kq.isShared()
		if kq != nil {
			for _, t := range kq.front {
				if t != w.own && (alone || t.holder == nil) {
					tickets = append(tickets, t)
				}
			}
		}
		for _, t := range w.Queue.claims[key.Name] {
			if alone || !t.shared {
				tickets = append(tickets, t)
			}
		}
	}
	return tickets
}

// isShared reports whether all callers in the queue share the key.
func (kq *keyQueue) isShared() bool {
	if !kq.shared {
		return false
	}
	for element := kq.waiting.Front(); element != nil; element = element.Next() {
		if !element.Value.(*waiter).key.Shared {
			return false
		}
	}
	return true
}

// Claim notes a holder that is not in front of the queues of keys: a transaction that locks further rows does not
// queue. Leave ends the claim.
func (q *Queue) Claim(keys []Key) *Ticket {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.claims == nil {
		q.claims = make(map[string][]*Ticket)
	}
	t := q.ticket()
	for _, key := range keys {
		if key.Slots > 0 {
			continue
		}
		t.shared = t.shared || key.Shared
		t.claims = append(t.claims, key.Name)
		q.claims[key.Name] = append(q.claims[key.Name], t)
	}
	return t
}
