package queue

import (
	"context"
	"errors"
	"slices"
	"time"
)

// noSlot stands for no slot.
const noSlot = -1

// slotState is which slot a ticket in front of a queue for slots holds, or waits for.
type slotState struct {
	held    int           // noSlot before Holds
	kept    int           // the slot that is kept for the ticket; noSlot for none
	offered bool          // Free has returned kept
	freed   chan struct{} // closed while a slot is kept that Free has not returned
}

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
	t.slot.held = slot
	kept := t.slot.kept
	if t.slot.kept = noSlot; kept != slot {
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
	if kq == nil || t.slot.held != noSlot {
		return noSlot
	}
	if t.slot.kept == noSlot || t.slot.offered {
		t.keepOneLeft(kq)
	}
	if t.slot.kept != noSlot {
		t.slot.offered, t.slot.freed = true, make(chan struct{})
	}
	return t.slot.kept
}

// Freed returns a channel that is closed when Free has another slot to return; nil if the ticket is nil or not for
// slots. After a call of Free, call Freed again for a new channel.
func (t *Ticket) Freed() <-chan struct{} {
	if t == nil {
		return nil
	}
	t.q.mu.Lock()
	defer t.q.mu.Unlock()
	return t.slot.freed
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
		for _, slot := range []int{other.slot.held, other.slot.kept} {
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
		if !t.passing && t.slot.held == noSlot && t.slot.kept == noSlot && slot < t.positions[0].Slots {
			t.keepSlot(slot)
			return
		}
	}
	kq.freeSlots = append(kq.freeSlots, slot)
}

// keepOneLeft keeps for t, of the slots that are kept for no ticket, the one that was released last.
func (t *Ticket) keepOneLeft(kq *keyQueue) {
	t.slot.kept, t.slot.offered = noSlot, false
	for i, slot := range slices.Backward(kq.freeSlots) {
		if slot < t.positions[0].Slots {
			kq.freeSlots = slices.Delete(kq.freeSlots, i, i+1)
			t.keepSlot(slot)
			return
		}
	}
}

func (t *Ticket) keepSlot(slot int) {
	t.slot.kept, t.slot.offered = slot, false
	close(t.slot.freed)
}
