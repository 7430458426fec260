package queue

import (
	"container/list"
	"time"

	"github.com/mysqllock/mysqllock/lockerr"
)

// name identifies a queue.
type name struct {
	key   string
	slots bool
}

func (k Key) name() name { return name{k.Name, k.Slots > 0} }

// keyQueue is the queue for one key. It exists while a ticket is in front. Queue.mu guards it.
type keyQueue struct {
	name      name
	front     []*Ticket
	first     [1]*Ticket    // the first memory of front
	shared    bool          // the tickets in front share the key
	pending   int           // how many tickets in front do not hold the key yet, without passing ones
	freeSlots []int         // released slots that are kept for no ticket; the last released at the end
	waiting   list.List     // of *waiter; the first is the next to come to the front
	alone     int           // how many of waiting do not share the key
	otherSeen time.Time     // when another process was last seen to have the key
	toldAt    time.Time     // when a ticket in front was last told that somebody has the key
	news      chan struct{} // closed when somebody is known to have the key; nil if no waiter asks
	turns     turns
}

type waiter struct {
	ticket  *Ticket
	element *list.Element // the waiter's place in keyQueue.waiting
	key     Key
	giver   any           // identifies the holders that can hand the lock over to the waiter: see Enter; nil for none
	ends    time.Time     // the deadline of the waiter's context; zero if there is none
	front   chan struct{} // closed when the waiter is in front, or is refused
	refused error
	ahead   chan struct{} // closed when the waiter goes ahead; nil if it never does
	called  bool          // ahead is closed

	goesAhead func() bool // see Ends.GoesAhead
}

// queued reports whether w still waits to come to the front.
func (w *waiter) queued() bool {
	select {
	case <-w.front:
		return false
	default:
		return true
	}
}

// admitsAtOnce reports whether a new caller can come to the front at once.
func (kq *keyQueue) admitsAtOnce(key Key) bool { return kq.waiting.Len() == 0 && kq.admits(key) }

// admits reports whether the first waiter can come to the front.
func (kq *keyQueue) admits(key Key) bool {
	if key.Slots > 0 {
		return len(kq.front) < key.Slots
	}
	return len(kq.front) == 0 || key.Shared && kq.shared && kq.pending == 0
}

// noteTaken notes that somebody has the key.
func (kq *keyQueue) noteTaken() {
	kq.toldAt = time.Now()
	if kq.news != nil {
		close(kq.news)
		kq.news = nil
	}
}

// inFront returns what the callers in front know, for a waiter that has come at came.
func (kq *keyQueue) inFront(came time.Time) InFront {
	known := InFront{Taken: kq.toldAt.After(came)}
	for _, t := range kq.front {
		known.Taken = known.Taken || t.knowsTaken || t.waits || t.holder != nil
		known.Asks = known.Asks || t.asking
	}
	return known
}

// holding returns a ticket in front that holds the key, or nil. Where a caller that went ahead was granted the lock, the
// ticket before it has ended its transaction, so holding returns the last of these.
func (kq *keyQueue) holding() (held *Ticket) {
	for _, t := range kq.front {
		if t.holder != nil && (held == nil || t.place != nil) {
			held = t
		}
	}
	return held
}

// holder returns who has the key, and since when, and the ticket of that caller. It returns nil if nobody has the key.
func (kq *keyQueue) holder() (*lockerr.Holder, *Ticket) {
	t := kq.holding()
	if t == nil {
		return nil, nil
	}
	h := *t.holder // a copy: the holder is that of other keys, too
	h.Held, h.ThisProcess = time.Since(t.since), true
	return &h, t
}

// next returns the first waiter for which it is not too late; nil if there is none. It refuses the waiters before.
func (kq *keyQueue) next() *waiter {
	for element := kq.waiting.Front(); element != nil; element = kq.waiting.Front() {
		w := element.Value.(*waiter)
		late := kq.turns.tooLate(w)
		if late == nil {
			return w
		}
		kq.call(late)
	}
	return nil
}

// callAhead has the first waiter go ahead, if it wants to, and the ticket in front has the key, could hand the key over
// to it, and is in use.
func (kq *keyQueue) callAhead() {
	element := kq.waiting.Front()
	if element == nil || len(kq.front) != 1 || !kq.front[0].used {
		return
	}
	if w := element.Value.(*waiter); w.ahead != nil && !w.called && w.giver == kq.front[0].giver && w.goesAhead() {
		w.called = true
		close(w.ahead)
	}
}

func (kq *keyQueue) add(w *waiter) {
	w.element = kq.waiting.PushBack(w)
	if !w.key.Shared {
		kq.alone++
	}
}

func (kq *keyQueue) remove(w *waiter) {
	kq.waiting.Remove(w.element)
	if !w.key.Shared {
		kq.alone--
	}
}

// call ends the wait of the first waiter: it is in front now, or refused.
func (kq *keyQueue) call(refused error) {
	w := kq.waiting.Front().Value.(*waiter)
	kq.remove(w)
	w.ticket.waits, w.refused = false, refused
	close(w.front)
}
