package lease

import (
	"context"
	"database/sql/driver"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
)

// schedule sets when to renew a lease that the server keeps for ttl from sent or later. The caller holds Locker.mu.
func (l *Locker) schedule(g *Grant, sent time.Time, ttl time.Duration) {
	g.due = time.Time{}
	if g.until.IsZero() || sent.Add(ttl).Before(g.until) {
		usual := schema.RenewedAfter(ttl)
		g.due = sent.Add(usual - usual/10 + rand.N(usual/5))
		l.changed(g.due)
	}
}

// RenewNow renews all leases at once, in the background. So the holder of a lease that was taken away hears of that now, and
// not only within a third of its TTL.
func (l *Locker) RenewNow() {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for g := range l.leases {
		if !g.due.IsZero() {
			g.due = now
			l.changed(now)
		}
	}
}

// changed makes the renewing goroutine look at all leases again, unless it does so before due. It starts that goroutine if
// needed. The caller holds Locker.mu.
func (l *Locker) changed(due time.Time) {
	if !l.renewing {
		l.renewing = true
		l.running.Go(l.renewals)
	}
	if !due.Before(l.next) {
		return
	}
	l.next = due
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// renewals renews the leases that are due, until the Locker is closed.
func (l *Locker) renewals() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-l.running.Ctx.Done():
			return
		case <-l.wake:
		case <-timer.C:
		}
		due, limit, next := l.due(time.Now())
		for _, g := range due {
			if l.isBusy(g) {
				l.queueUp(g)
			}
		}
		due = slices.DeleteFunc(due, l.isBusy)
		for some := range slices.Chunk(due, rowsPerStatement) {
			l.renew(some, limit)
		}
		if len(due) > 0 {
			next = 0
		}
		timer.Reset(next)
	}
}

// due returns the leases to renew. If one is due, due returns all that soon will be, so that few statements renew them. limit
// is how long a statement may take without harm to the lease with the shortest TTL. If no lease is due, next is the time
// until then. due never puts the next look off: else a caller that takes one lease after the other would have to ask for a
// look each time.
func (l *Locker) due(now time.Time) (due []*Grant, limit, next time.Duration) {
	limit, next = background, time.Hour
	l.mu.Lock()
	if l.next.After(now) {
		next = min(next, l.next.Sub(now))
	}
	for g := range l.leases {
		if g.due.IsZero() {
			continue
		}
		limit = min(limit, schema.RenewedAfter(g.ttl))
		left := g.due.Sub(now)
		next = min(next, left)
		if left <= schema.RenewedAfter(g.ttl)/2 {
			due = append(due, g)
		}
	}
	l.next = time.Time{}
	if next > 0 {
		l.next = now.Add(next)
	}
	l.mu.Unlock()
	if next > 0 {
		return nil, 0, next
	}
	sortByKey(due)
	return due, max(limit, 200*time.Millisecond), 0
}

// renew renews leases in one statement. The statement passes over leases whose rows are locked, so that these do not hold up
// the others: each of them is renewed by itself.
func (l *Locker) renew(leases []*Grant, limit time.Duration) {
	var err error
	for range 2 { // the first connection may be lost
		if err = l.renewTogether(leases, limit); err == nil || server.Number(err) != 0 {
			break
		}
	}
	if err == nil || l.running.Ctx.Err() != nil {
		return
	}
	for _, g := range leases {
		l.retryLater(g, err)
	}
}

// retryLater schedules a lease that could not be renewed because of err.
func (l *Locker) retryLater(g *Grant, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.trouble = err
	l.mu.Lock()
	defer l.mu.Unlock()
	if !g.due.IsZero() {
		g.due = time.Now().Add(schema.RenewedAfter(g.ttl) / 4)
		l.changed(g.due)
	}
}

// isBusy reports whether the last renewal waited for the row for long. If so, the next one waits at once: to find out first
// that the row is locked again takes two round trips, and on a slow server the lease may not have that time.
func (l *Locker) isBusy(g *Grant) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return g.busy
}

// queueUp renews a lease behind those who have locked its row. Transactions under the lease lock the row while they commit, so
// with many of them the row is hardly ever free. The renewal waits in the server like all others, and later transactions
// wait behind it. The statement renews this lease alone, so it holds no other row while it waits.
func (l *Locker) queueUp(g *Grant) {
	l.mu.Lock()
	if !g.due.IsZero() {
		g.due = time.Now().Add(schema.RenewedAfter(g.ttl)) // in case this fails
	}
	g.busy = true
	l.mu.Unlock()
	l.running.Go(func() {
		ctx, cancel := server.Within(l.running.Ctx, max(g.timeLeft(), time.Second))
		defer cancel()
		select {
		case l.queueing <- struct{}{}:
			defer func() { <-l.queueing }()
		case <-ctx.Done():
			return
		}
		if err := l.renewBehind(about(ctx, purpose.Renew, g), g); err != nil && l.running.Ctx.Err() == nil {
			l.retryLater(g, err)
		}
	})
}

// renewBehind renews one lease in its turn. It uses a connection of its own, if there is one, since it waits for up to a
// second.
func (l *Locker) renewBehind(ctx context.Context, g *Grant) error {
	c, err := l.poolConn(ctx, pool.As{}, true)
	if err != nil {
		return err
	}
	var lc *lockConn
	if c != nil {
		lc = &lockConn{c: c}
		defer c.Release()
	} else {
		if lc, err = l.borrow(ctx); err != nil {
			return err
		}
		defer l.giveBack(lc)
	}
	sent := time.Now()
	ttl := g.ttlAt(sent)
	found, err := l.steps.extend(ctx, lc, g, ttl)
	if err != nil {
		return err
	}
	l.mu.Lock()
	g.busy = time.Since(sent) > schema.RenewedAfter(ttl)/4
	l.mu.Unlock()
	switch {
	case !found:
		g.loseFound()
	default:
		l.renewed(g, sent, ttl)
	}
	return nil
}

func (l *Locker) extend(ctx context.Context, lc *lockConn, g *Grant, ttl time.Duration) (found bool, err error) {
	result, err := l.extendOn(ctx, lc, []*Grant{g}, func(*Grant) time.Duration { return ttl }, "")
	if err != nil {
		return false, err
	}
	changed, err := result.RowsAffected()
	return changed > 0, err
}

// ttlAt returns for how long to renew the lease.
func (g *Grant) ttlAt(now time.Time) time.Duration {
	if g.until.IsZero() {
		return g.ttl
	}
	return max(0, min(g.ttl, g.until.Sub(now)))
}

func (l *Locker) renewTogether(leases []*Grant, limit time.Duration) error {
	ctx, cancel := server.Within(about(l.running.Ctx, purpose.Renew, leases...), limit)
	defer cancel()
	lc, err := l.borrow(ctx)
	if err != nil {
		return err
	}
	defer l.giveBack(lc)
	sent := time.Now()
	return l.steps.extendSome(ctx, lc, leases, sent, func(g *Grant) time.Duration { return g.ttlAt(sent) })
}

func (l *Locker) extendSome(ctx context.Context, lc *lockConn, leases []*Grant, sent time.Time, ttl func(*Grant) time.Duration) error {
	result, err := l.extendOn(ctx, lc, leases, ttl, " SKIP LOCKED")
	if err != nil {
		return err
	}
	changed, err := result.RowsAffected()
	if err != nil {
		return err
	}
	if changed == 2*int64(len(leases)) {
		for _, g := range leases {
			l.renewed(g, sent, ttl(g))
		}
		return nil
	}

	asked := time.Now()
	held, err := l.heldOn(ctx, lc, leases)
	if err != nil {
		return err
	}
	took := time.Since(sent)
	for _, g := range leases {
		left, ours := held(g)
		switch {
		case !ours:
			g.loseFound()
		case left < ttl(g)-took: // the row is locked
			l.queueUp(g)
		default:
			l.renewed(g, asked, left)
		}
	}
	return nil
}

// extendOn renews leases on lc. It also writes since when the leases are held, and their TTLs, until the server has said that
// the table has no columns for that, or that the account may not write them.
func (l *Locker) extendOn(
	ctx context.Context, lc *lockConn, leases []*Grant, ttl func(*Grant) time.Duration, skip string,
) (driver.Result, error) {
	if !l.untold.Load() {
		result, err := lc.exec(ctx, l.changeSQL(leases, ttl, lasted, tell, skip))
		if !server.NoColumn(err) {
			return result, err
		}
		l.untold.Store(true)
	}
	return lc.exec(ctx, l.changeSQL(leases, ttl, lasted, extend, skip))
}

// heldOn asks on lc which of leases are live and ours, and for how long. The caller has the turn of lc.
func (l *Locker) heldOn(ctx context.Context, lc *lockConn, leases []*Grant) (held func(*Grant) (left time.Duration, ours bool), err error) {
	lefts := make(map[string]time.Duration)
	held = func(g *Grant) (left time.Duration, ours bool) {
		left, ours = lefts[g.key+"\x00"+strconv.FormatUint(g.token, 10)]
		return left, ours
	}
	rows, err := lc.query(ctx, l.heldSQL(leases))
	for _, row := range rows {
		micros, err := strconv.ParseInt(row[2], 10, 64)
		if err != nil {
			return held, err
		}
		lefts[row[0]+"\x00"+row[1]] = time.Duration(micros) * time.Microsecond
	}
	return held, err
}

// renewed notes that the server keeps the lease for ttl from sent or later.
func (l *Locker) renewed(g *Grant, sent time.Time, ttl time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil { // the holder was told that the lease is over
		return
	}
	g.lasts(sent, ttl)
	g.trouble = nil
	g.timer.Reset(time.Until(g.deadline))
	l.mu.Lock()
	defer l.mu.Unlock()
	if !g.due.IsZero() {
		l.schedule(g, sent, ttl)
	}
}
