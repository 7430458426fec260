package lease

import (
	"context"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
)

// schedule says when to renew a lease that the server keeps for ttl from sent or
// later. Locker.mu is held.
func (l *Locker) schedule(s *Lease, sent time.Time, ttl time.Duration) {
	s.due = time.Time{}
	if s.until.IsZero() || sent.Add(ttl).Before(s.until) {
		third := ttl / 3
		s.due = sent.Add(third - third/10 + rand.N(third/5))
	}
	l.changed()
}

// changed has the renewing goroutine look at the leases again, and starts it.
// Locker.mu is held.
func (l *Locker) changed() {
	if !l.renewing {
		l.renewing = true
		l.running.Go(l.renewals)
	}
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// renewals renews what is due until the Locker is closed.
func (l *Locker) renewals() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-l.wake:
		case <-timer.C:
		}
		due, limit, next := l.due(time.Now())
		for some := range slices.Chunk(due, batch) {
			l.renew(some, limit)
		}
		if len(due) > 0 {
			next = 0
		}
		timer.Reset(next)
	}
}

// due returns the leases to be renewed: where one is due, all that will soon be,
// so that they gather in few statements, and for how long a statement may hold
// up the shortest of all leases. Else it tells how long there is none.
func (l *Locker) due(now time.Time) (due []*Lease, limit, next time.Duration) {
	limit, next = background, time.Hour
	l.mu.Lock()
	for s := range l.leases {
		if s.due.IsZero() {
			continue
		}
		limit = min(limit, s.ttl/6)
		left := s.due.Sub(now)
		next = min(next, left)
		if left <= s.ttl/6 {
			due = append(due, s)
		}
	}
	l.mu.Unlock()
	if next > 0 {
		return nil, 0, next
	}
	sortByKey(due)
	return due, max(limit, 200*time.Millisecond), 0
}

// renew renews leases in one statement. Those whose rows somebody has locked are
// left alone, and tried again soon, so that they do not hold up the others.
func (l *Locker) renew(leases []*Lease, limit time.Duration) {
	var err error
	for range 2 { // the first connection may be lost
		ctx, cancel := context.WithTimeout(l.ctx, limit)
		err = l.renewOn(ctx, leases)
		cancel()
		if err == nil || server.Number(err) != 0 {
			break
		}
	}
	if err == nil || l.ctx.Err() != nil {
		return
	}
	for _, s := range leases {
		s.mu.Lock()
		s.trouble = err
		s.mu.Unlock()
		l.again(s)
	}
}

// again schedules a lease that could not be renewed.
func (l *Locker) again(s *Lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !s.due.IsZero() {
		s.due = time.Now().Add(s.ttl / 12)
	}
}

func (l *Locker) renewOn(ctx context.Context, leases []*Lease) error {
	h, err := l.borrow(ctx)
	if err != nil {
		return err
	}
	defer l.giveBack(h)
	sent := time.Now()
	ttl := func(s *Lease) time.Duration {
		if s.until.IsZero() {
			return s.ttl
		}
		return max(0, min(s.ttl, s.until.Sub(sent)))
	}
	result, err := h.exec(ctx, l.changeSQL(leases, ttl, extend, " SKIP LOCKED"))
	if err != nil {
		return err
	}
	changed, err := result.RowsAffected()
	if err != nil {
		return err
	}
	if changed == 2*int64(len(leases)) {
		for _, s := range leases {
			l.renewed(s, sent, ttl(s))
		}
		return nil
	}

	asked := time.Now()
	rows, err := h.query(ctx, l.heldSQL(leases))
	if err != nil {
		return err
	}
	held := make(map[string]time.Duration)
	for _, row := range rows {
		micros, err := strconv.ParseInt(row[2], 10, 64)
		if err != nil {
			return err
		}
		held[row[0]+"\x00"+row[1]] = time.Duration(micros) * time.Microsecond
	}
	took := time.Since(sent)
	for _, s := range leases {
		left, ours := held[s.key+"\x00"+strconv.FormatUint(s.token, 10)]
		switch {
		case !ours:
			s.lose(errNotOurs)
		case left < ttl(s)-took: // it was left alone
			l.again(s)
		default:
			l.renewed(s, asked, left)
		}
	}
	return nil
}

// renewed notes that the server keeps the lease for ttl from sent or later.
func (l *Locker) renewed(s *Lease, sent time.Time, ttl time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil { // the holder was told that it is over
		return
	}
	s.deadline = sent.Add(ttl - margin(ttl))
	s.trouble = nil
	s.timer.Reset(time.Until(s.deadline))
	l.mu.Lock()
	defer l.mu.Unlock()
	if !s.due.IsZero() {
		l.schedule(s, sent, ttl)
	}
}
