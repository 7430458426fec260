package lease

import (
	"context"
	"maps"
	"time"
)

// announce announces the attempt as a poller, unless it is already, or somebody else is.
// It is a help, not a duty.
func (a *attempt) announce(ctx context.Context) {
	if !a.wakes || a.announced != nil && !a.isGone(a.announced) {
		return
	}
	a.announced = nil
	h, err := a.borrow(ctx)
	if err != nil {
		return
	}
	defer a.giveBack(h)
	rows, err := h.query(ctx, a.announceSQL(a.r.Key))
	if err == nil && len(rows) == 1 && rows[0][0] == "1" {
		a.mu.Lock()
		h.polls++
		a.mu.Unlock()
		a.announced = h
	}
}

// withdraw gives back, on h, the named lock that announces a poller for key. Nobody need wait for that.
// Where h is gone it went with it.
func (l *Locker) withdraw(h *lockConn, key string) {
	if h == nil {
		return
	}
	l.running.Go(func() {
		ctx, cancel := context.WithTimeout(releasing(key), background)
		defer cancel()
		if ours, _ := l.awaitTurn(ctx, h); !ours {
			return
		}
		defer l.giveBack(h)
		if _, err := h.exec(ctx, l.withdrawSQL(key)); err != nil {
			h.c.Taint()
		}
		l.mu.Lock()
		h.polls--
		l.mu.Unlock()
	})
}

// yields reports whether the attempt leaves a free lease to a poller that has announced
// itself. It does so for a moment only, in which a poller which is there has taken it.
func (a *attempt) yields() bool {
	if a.Wait == 0 || a.announced != nil {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	since := time.Since(a.yieldedAt[a.r.Key])
	return since < yieldFor || since >= yieldEvery
}

// noteYield notes that the lease on key was left to a poller.
func (l *Locker) noteYield(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.yieldedAt, func(_ string, since time.Time) bool { return time.Since(since) >= yieldEvery })
	if l.yieldedAt[key].IsZero() {
		l.yieldedAt[key] = time.Now()
	}
}
