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
package queue

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"slices"
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

// turns are how long the last callers were in front that had the key exclusively.
type turns struct {
	began time.Time // when the present turn began
	last  [8]time.Duration
	n     int // how many turns there were in all
}

func (t *turns) end() {
	t.last[t.n%len(t.last)] = time.Since(t.began)
	t.n++
}

// quickest returns the shortest of the last turns; 0 while there are too few to tell.
func (t *turns) quickest() time.Duration {
	if t.n < len(t.last) {
		return 0
	}
	return slices.Min(t.last[:])
}

// lastMoments bounds how much time left is too little for a caller that comes to the front, if turns take longer.
const lastMoments = 10 * time.Millisecond

// hopeless returns why a caller with others in front of it is refused, whose context or wait ends after left; nil if
// the caller may succeed.
func (t *turns) hopeless(others int, left time.Duration) error {
	turn := t.quickest()
	if turn == 0 || time.Duration(others)*turn <= left {
		return nil
	}
	return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("%d callers of this process wait in front of it,"+
		" the last ones had the key for %v each, and it has %v left",
		others, turn.Round(time.Microsecond), left.Round(time.Microsecond)))
}

// tooLate returns why w is refused, which would come to the front now; nil if it is not.
func (t *turns) tooLate(w *waiter) error {
	if w.ends.IsZero() || w.ticket.place == w {
		return nil
	}
	turn, left := t.quickest(), time.Until(w.ends)
	if left >= min(turn, lastMoments) {
		return nil
	}
	return lockerr.With(lockerr.ErrTimeout, fmt.Errorf("the last ones had the key for %v each, and its context ends in %v",
		turn.Round(time.Microsecond), left.Round(time.Microsecond)))
}

// Ticket is a caller's place in front of the queues of some keys, or of the queue for the slots of one key.
type Ticket struct {
	q          *Queue
	passing    bool            // the caller will not wait, so nobody needs to wait for it
	positions  []position      // guarded by Queue.mu once there is a position
	first      [1]position     // the first memory of positions
	claims     []string        // see Queue.Claim; guarded by Queue.mu
	shared     bool            // at least one of claims is shared
	holder     *lockerr.Holder // nil before the ticket holds the lock; guarded by Queue.mu
	since      time.Time       // when holder was set
	giver      any             // identifies who may hand the lock over: see GrantedBy
	used       bool            // see Used; guarded by Queue.mu
	handedOver any             // what the previous holder has handed over
	asking     bool            // see Asks; guarded by Queue.mu
	knowsTaken bool            // see Told; guarded by Queue.mu
	waits      bool            // the ticket is in front of some queues, and waits in another one; guarded by Queue.mu
	place      *waiter         // the ticket's place, if it is the next and not in front: see Next; guarded by Queue.mu
	slot       int             // the slot that the ticket holds, noSlot before Holds; guarded by Queue.mu
	keptSlot   int             // the slot that is kept for the ticket, or noSlot; guarded by Queue.mu
	offered    bool            // Free has returned free; guarded by Queue.mu
	freed      chan struct{}   // closed while a slot is kept that Free has not returned; guarded by Queue.mu
}

// position is where a ticket stands in a queue.
type position struct {
	Key
	queue *keyQueue
}

const noSlot = -1

func (q *Queue) ticket() *Ticket {
	t := &Ticket{q: q, slot: noSlot, keptSlot: noSlot}
	t.positions = t.first[:0]
	return t
}

// TryEnter returns a ticket that is in front of the queues of all keys. If others are in the way, ok is false, and
// holder is one of these that holds the lock; nil if none holds it yet. passing is for a caller that will not wait in
// front either: it may share a key with others in front before these hold the key.
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
		if err := kq.turns.hopeless(kq.waiting.Len(), end.Sub(came)); err != nil {
			q.mu.Unlock()
			return err
		}
	}
	if ends.GoesAhead != nil {
		w.ahead, w.goesAhead = make(chan struct{}), ends.GoesAhead
	}
	w.element = kq.waiting.PushBack(w)
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
		kq.waiting.Remove(w.element)
		q.advance(kq) // waiters behind w may be able to share the key
		return err
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

// holder returns who has the ticket of held, with how long that has held the key.
func (kq *keyQueue) holder() (*lockerr.Holder, *Ticket) {
	t := kq.holding()
	if t == nil {
		return nil, nil
	}
	h := *t.holder // a copy: the holder is that of other keys, too
	h.Held, h.ThisProcess = time.Since(t.since), true
	return &h, t
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
	kq.turns.began = time.Now()
	if !t.passing {
		kq.pending++
	}
	kq.shared = key.Shared
	t.positions = append(t.positions, position{key, kq})
	if key.Slots > 0 {
		t.freed = make(chan struct{})
		t.keepOneLeft(kq)
	}
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

// call ends the wait of the first waiter: it is in front now, or refused.
func (kq *keyQueue) call(refused error) {
	w := kq.waiting.Remove(kq.waiting.Front()).(*waiter)
	w.ticket.waits, w.refused = false, refused
	close(w.front)
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

// HandedOver returns what the previous holder has handed over, or nil.
func (t *Ticket) HandedOver() any { return t.handedOver }

// slots returns the queue for slots that t is in front of, or nil.
func (t *Ticket) slots() *keyQueue {
	if len(t.positions) == 0 || t.positions[0].Slots == 0 {
		return nil
	}
	return t.positions[0].queue
}

// Holds notes which of the slots the ticket holds now.
func (t *Ticket) Holds(slot int) {
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	kq := t.slots()
	if kq == nil {
		return
	}
	kq.freeSlots = slices.DeleteFunc(kq.freeSlots, func(i int) bool { return i == slot })
	t.slot = slot
	kept := t.keptSlot
	if t.keptSlot = noSlot; kept != slot {
		kq.releaseSlot(kept)
	}
}

// Free returns a slot that another ticket has released, so that it may be free; -1 if there is none. The slot is kept
// for this ticket until the ticket holds a slot, leaves, or calls Free again because the slot was not free.
func (t *Ticket) Free() int {
	if t == nil {
		return noSlot
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	kq := t.slots()
	if kq == nil || t.slot != noSlot {
		return noSlot
	}
	if t.keptSlot == noSlot || t.offered {
		t.keepOneLeft(kq)
	}
	if t.keptSlot != noSlot {
		t.offered, t.freed = true, make(chan struct{})
	}
	return t.keptSlot
}

// Freed returns a channel that is closed when Free has another slot to return; nil if the ticket is nil or not for
// slots. After a call of Free, call Freed again for a new channel.
func (t *Ticket) Freed() <-chan struct{} {
	if t == nil {
		return nil
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	return t.freed
}

// ErrFreed is the cause with which the context of UntilFreed ends.
var ErrFreed = errors.New("a slot was released")

// UntilFreed returns a context that also ends when Freed's channel is closed.
func (t *Ticket) UntilFreed(ctx context.Context) (context.Context, func()) {
	freed := t.Freed()
	if freed == nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		select {
		case <-freed:
			cancel(ErrFreed)
		case <-ctx.Done():
		}
	}()
	return ctx, func() { cancel(nil) }
}

// AwaitFreed waits until a slot is kept for the ticket, but not longer than d. The error is the cause of ctx's end.
func (t *Ticket) AwaitFreed(ctx context.Context, d time.Duration) error {
	select {
	case <-t.Freed():
		return nil
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Untaken returns those of n slots that are not Taken.
func (t *Ticket) Untaken(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return Without(all, t.Taken())
}

// Without returns the slots that are not in except.
func Without(slots, except []int) (rest []int) {
	for _, i := range slots {
		if !slices.Contains(except, i) {
			rest = append(rest, i)
		}
	}
	return rest
}

// Taken returns the slots that other tickets in front hold, or that are kept for them. A caller that tries one of these
// may pass a caller that came before it. For a nil ticket there are none.
func (t *Ticket) Taken() []int {
	if t == nil {
		return nil
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	kq := t.slots()
	if kq == nil {
		return nil
	}
	var taken []int
	for _, other := range kq.front {
		for _, slot := range []int{other.slot, other.keptSlot} {
			if other != t && slot != noSlot {
				taken = append(taken, slot)
			}
		}
	}
	return taken
}

// releaseSlot keeps a slot for the first ticket in front that waits for one, or else for tickets that come later.
func (kq *keyQueue) releaseSlot(slot int) {
	if slot == noSlot {
		return
	}
	for _, t := range kq.front {
		if !t.passing && t.slot == noSlot && t.keptSlot == noSlot && slot < t.positions[0].Slots {
			t.keepSlot(slot)
			return
		}
	}
	kq.freeSlots = append(kq.freeSlots, slot)
}

// keepOneLeft keeps for t, of the slots that are kept for no ticket, the one that was released last.
func (t *Ticket) keepOneLeft(kq *keyQueue) {
	t.keptSlot, t.offered = noSlot, false
	for i, slot := range slices.Backward(kq.freeSlots) {
		if slot < t.positions[0].Slots {
			kq.freeSlots = slices.Delete(kq.freeSlots, i, i+1)
			t.keepSlot(slot)
			return
		}
	}
}

func (t *Ticket) keepSlot(slot int) {
	t.keptSlot, t.offered = slot, false
	close(t.freed)
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
		kq.waiting.Remove(w.element)
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
				kq.turns.end()
			}
		}
		kq.releaseSlot(t.slot)
		kq.releaseSlot(t.keptSlot)
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
