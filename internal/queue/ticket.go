package queue

import (
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// Ticket is a caller's place in front of the queues of some keys, or of the queue for the slots of one key.
type Ticket struct {
	q          *Queue
	passing    bool // the caller will not wait, so nobody needs to wait for it
	handedOver any  // what the previous holder has handed over

	// Guarded by Queue.mu. positions only once there is one.
	positions  []position
	first      [1]position     // the first memory of positions
	claims     []string        // see Queue.Claim
	shared     bool            // at least one of claims is shared
	holder     *lockerr.Holder // nil before the ticket holds the lock
	since      time.Time       // when holder was set
	giver      any             // identifies who may hand the lock over: see GrantedBy
	used       bool            // see Used
	asking     bool            // see Asks
	knowsTaken bool            // see Told
	waits      bool            // the ticket is in front of some queues, and waits in another one
	place      *waiter         // the ticket's place, if it is the next and not in front: see Ahead
	slot       slotState
}

// position is where a ticket stands in a queue.
type position struct {
	Key
	queue *keyQueue
	since time.Time
}

func (q *Queue) ticket() *Ticket {
	t := &Ticket{q: q, slot: slotState{held: noSlot, kept: noSlot}}
	t.positions = t.first[:0]
	return t
}

// Granted notes that the ticket holds the lock now. Others can then learn who holds it, and share it.
func (t *Ticket) Granted(h *lockerr.Holder) { t.GrantedBy(nil, h) }

// GrantedBy is Granted for a lock that can be handed over: giver identifies whose holders may, as in Enter.
func (t *Ticket) GrantedBy(giver any, h *lockerr.Holder) {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	first := t.holder == nil
	t.giver, t.holder, t.since = giver, h, time.Now()
	if w := t.place; w != nil && w.queued() { // the ticket in front has ended its transaction, and leaves
		kq := t.q.queues[w.key.name()]
		t.q.admit(t, w.key)
		kq.call(nil)
	}
	for _, p := range t.positions {
		p.queue.noteTaken()
		if first && !t.passing {
			p.queue.pending--
			t.q.advance(p.queue)
		}
	}
}

// Used notes that something has run under the ticket's lock, so that its end takes a COMMIT.
func (t *Ticket) Used() {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	t.used = true
	for _, p := range t.positions {
		p.queue.callAhead()
	}
}

// HandedOver returns what the previous holder has handed over, or nil.
func (t *Ticket) HandedOver() any { return t.handedOver }

// Handoff lets the next waiter in the queue come to the front, with the lock: HandedOver of its ticket returns handed.
// Handoff does nothing and returns false if the next waiter has not called Enter with giver.
func (t *Ticket) Handoff(giver, handed any) bool {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	next := t.nextFor(giver)
	if next == nil {
		return false
	}
	next.ends = time.Time{}                            // the next waiter comes to the front, however late it is
	next.ticket.handedOver, t.handedOver = handed, nil // t has used what it was handed itself
	t.leave()
	return true
}

// HasNext reports whether Handoff with giver would hand over the lock now.
func (t *Ticket) HasNext(giver any) bool {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	return t.nextFor(giver) != nil
}

// nextFor returns the next waiter in the queue if it has called Enter with giver. It returns nil for a ticket of several
// keys, or of a shared one. It also does while the ticket before is still in front, for which the ticket's caller went
// ahead: then the next waiter could not come to the front at once.
func (t *Ticket) nextFor(giver any) *waiter {
	oneKey := len(t.positions) == 1 && t.positions[0].Key == Key{Name: t.positions[0].Name}
	if !oneKey || len(t.positions[0].queue.front) != 1 {
		return nil
	}
	if next := t.positions[0].queue.next(); next != nil && next.giver == giver && !next.called {
		return next
	}
	return nil
}

// Ahead reports whether the ticket's caller has gone ahead, and is not in front yet. The caller waits in the server for the
// key, which the ticket in front has, and does not hand over. The caller comes to the front when the ticket in front
// leaves, or when the caller is granted the lock. Without a ticket nobody has.
func (t *Ticket) Ahead() bool {
	if t == nil {
		return false
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	return t.place != nil && t.place.queued()
}

// otherWants is for how long another process that had a key is assumed to want the key again.
const otherWants = 100 * time.Millisecond

// SawOtherProcess notes that another process has one of the ticket's keys.
func (t *Ticket) SawOtherProcess() {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	for _, p := range t.positions {
		p.queue.otherSeen = time.Now()
	}
}

// SeenOtherProcess reports whether another process had one of the ticket's keys a moment ago, as far as the callers
// have seen that were in the queue since then.
func (t *Ticket) SeenOtherProcess() bool {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	return slices.ContainsFunc(t.positions, func(p position) bool {
		return !p.queue.otherSeen.IsZero() && time.Since(p.queue.otherSeen) < otherWants
	})
}

// Asks notes that the ticket's caller has a connection, and asks the server. A nil ticket does nothing.
func (t *Ticket) Asks() {
	if t == nil {
		return
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	t.asking = true
}

// Told notes that the ticket's caller was told that somebody has one of the keys. A nil ticket does nothing.
func (t *Ticket) Told() {
	if t == nil {
		return
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	t.knowsTaken = true
	for _, p := range t.positions {
		p.queue.noteTaken()
	}
}

// Leave lets the next caller in each queue come to the front. A nil ticket, and a second call, do nothing.
func (t *Ticket) Leave() {
	if t == nil {
		return
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	t.leave()
}

func (t *Ticket) leave() {
	if w := t.place; w != nil && w.queued() {
		kq := t.q.queues[w.key.name()]
		kq.remove(w)
		t.q.advance(kq)
	}
	t.place = nil
	for _, p := range t.positions {
		kq := p.queue
		i := slices.Index(kq.front, t)
		kq.front = slices.Delete(kq.front, i, i+1)
		if t.holder == nil && !t.passing {
			kq.pending--
		}
		if t.holder != nil {
			kq.noteTaken()
			if !kq.shared && p.Slots == 0 {
				kq.turns.end(p.since)
			}
		}
		kq.releaseSlot(t.slot.held)
		kq.releaseSlot(t.slot.kept)
		t.q.advance(kq)
	}
	t.positions = nil
	for _, key := range t.claims {
		left := slices.DeleteFunc(t.q.claims[key], func(other *Ticket) bool { return other == t })
		if t.q.claims[key] = left; len(left) == 0 {
			delete(t.q.claims, key)
		}
	}
	t.claims = nil
}

// Awaited reports whether a caller of this process waits for what the ticket holds. For a nil ticket it is false.
func (t *Ticket) Awaited() bool {
	if t == nil {
		return false
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	for _, p := range t.positions {
		if p.queue.waiting.Len() > 0 {
			return true
		}
	}
	for _, key := range t.claims { // callers in front wait in the server
		if kq := t.q.queues[name{key: key}]; kq != nil && len(kq.front)+kq.waiting.Len() > 0 {
			return true
		}
	}
	return false
}
