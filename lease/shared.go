package lease

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/step"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// While all lock connections are busy, and right after several went together, requests
// gather, and whoever gets the next connection sends them all: they share a transaction, and
// the wait for its commit. So do releases of leases whose wake-up locks are on the same
// connection.

// sharedConns is how many lock connections with room for wake-up locks there are before
// requests share them, beside those that were opened at the same moment: on more of them the
// server would commit each alone; of two, one gathers requests while the other one commits.
// Behind a statement that takes longer than sharedFor, since it may wait for a row, others
// are opened.
const (
	sharedConns = 2
	sharedFor   = 50 * time.Millisecond
)

// maxShared is how many requests share a transaction. Their rows are locked for that long,
// and their callers wait for each other.
const maxShared = 100

// shares reports whether requests may share a transaction: not where the nodes of a cluster
// may refuse it, or where a proxy may change the connection between two statements.
func (l *Locker) shares() bool { return l.info.Topology == "" && !l.info.Router }

// take is a request that is sent together with others.
type take struct {
	*attempt
	ticket *queue.Ticket
	inTurn bool
	polite bool
	outcome
	alone bool      // it is to be sent alone: on h, whose turn it has, or, if that is nil, on any
	lease *Lease    // what it was granted
	h     *lockConn // on which it was sent, or is to be
}

func (t *take) name() string { return t.r.Key }

// connOrShare returns a lock connection, and its turn, to send a request on. If all are
// busy, the request is sent together with others, and the connection is nil.
func (a *attempt) connOrShare(ctx context.Context, inTurn bool) (h *lockConn, s *Lease, err error) {
	if h, busy := a.freeConn(); h != nil && h.c.Fresh(ctx) {
		return h, nil, nil
	} else if h != nil {
		a.drop(h)
	} else if busy && a.shares() {
		t := &take{attempt: a, ticket: a.ticket, inTurn: inTurn, polite: a.polite(), outcome: outcome{done: make(chan struct{})}}
		s, alone, err := a.tryShared(ctx, t)
		switch {
		case !alone:
			return nil, s, err
		case t.h != nil:
			return t.h, nil, nil
		}
	}
	h, err = a.borrow(ctx)
	return h, nil, err
}

// freeConn returns a lock connection that is free, and its turn. If there is none, busy
// reports whether a request would have to wait for one; and it waits if others do, or may be
// about to.
func (l *Locker) freeConn() (free *lockConn, busy bool) {
	if l.takes.Gathers() {
		return nil, true
	}
	free, waited, _, more := l.pick(l.sharedConns())
	return free, waited != nil && (!more || !l.conns.Ready())
}

// tryShared is try for a request that is sent together with others. If it is to be sent
// alone, it has the turn of t.h, if that is not nil.
func (a *attempt) tryShared(ctx context.Context, t *take) (s *Lease, alone bool, err error) {
	if a.takes.Join(t) {
		a.running.Go(a.leadTakes)
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		if a.takes.Quit(t) {
			return nil, false, context.Cause(ctx)
		}
	}
	if !t.awaited(ctx) {
		a.forgo(t)
		return nil, false, context.Cause(ctx)
	}
	if t.alone {
		return nil, true, nil
	}
	a.left, a.polled = t.left, t.polled
	if t.polled {
		a.leaveFree(a.r.Key)
	}
	switch {
	case unknown(t.err):
		return nil, false, a.unanswered(ctx, t.h, &t.outcome)
	case t.err != nil:
		return nil, false, t.err
	case t.lease == nil:
		return nil, false, nil
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), strategy.ErrWaitOver):
		a.forgo(t)
		return nil, false, context.Cause(ctx)
	case t.late(a.ttl):
		a.forgo(t)
		return nil, false, errNoAnswer
	}
	return t.lease, false, nil
}

// forgo gives back, in the background, what t gets that nobody waits for.
func (a *attempt) forgo(t *take) {
	until := time.Now().Add(a.lasts)
	a.ticket = nil
	a.running.Go(func() {
		<-t.done
		switch {
		case t.alone && t.h != nil:
			a.giveBack(t.h)
		case t.lease != nil:
			t.lease.end(lockerr.ErrClosed)
			_ = a.relinquish(t.lease, false) // it goes on by itself
			return
		case unknown(t.err):
			a.freeUntil(until, t.h, false)
		}
		t.ticket.Leave()
	})
}

// leadTakes sends what has gathered on the next lock connection.
func (l *Locker) leadTakes() {
	for more := true; more; {
		h, err := l.borrowShared(l.ctx)
		runtime.Gosched() // whom the last statement has answered may be about to ask for more
		var some []*take
		some, more = l.takes.Depart(maxShared)
		if err == nil {
			l.takeTogether(h, some)
		}
		for _, t := range some {
			if err != nil {
				t.alone = true
			}
			close(t.done)
		}
	}
}

func (l *Locker) sharedConns() int { return min(sharedConns, l.maxLockConns) }

// borrowShared is borrow for requests that gather meanwhile.
func (l *Locker) borrowShared(ctx context.Context) (*lockConn, error) {
	patient, cancel := context.WithTimeout(ctx, sharedFor)
	defer cancel()
	h, err := l.borrowOf(patient, l.sharedConns())
	if h != nil || ctx.Err() != nil || patient.Err() == nil {
		return h, err
	}
	return l.borrow(ctx)
}

// takeTogether takes leases on h, whose turn is the caller's, and gives h back.
func (l *Locker) takeTogether(h *lockConn, some []*take) {
	if len(some) == 1 {
		some[0].alone, some[0].h = true, h
		return
	}
	defer l.giveBack(h)
	if len(some) == 0 {
		return
	}
	limit := answerLimit
	for _, t := range some {
		limit = max(limit, t.ttl)
	}
	ctx, cancel := context.WithTimeout(context.Background(), min(limit, background))
	defer cancel()
	ctx = step.AskedBy(ctx, some, func(t *take) step.Asked { return t.asked })
	ctx = step.With(ctx, step.Take, hint.StrategyLease, some, (*take).name)
	committing, err := l.take(ctx, h, some)
	if err != nil {
		h.c.Taint()
	}
	for _, t := range some {
		switch {
		case t.alone:
		case err != nil && committing && unknown(err):
			t.err, t.h = err, h
		case err != nil:
			t.alone = true // nothing was granted
		case t.token > 0:
			if t.lease, t.err = t.grant(h, t.ticket, t.answer); t.err != nil {
				_ = t.undo(h, t.token) // else it runs out by itself
			}
		}
	}
}

// take takes leases in one transaction. committing: it may have been committed, even after
// an error.
func (l *Locker) take(ctx context.Context, h *lockConn, some []*take) (committing bool, err error) {
	slices.SortFunc(some, func(a, b *take) int { return strings.Compare(a.r.Key, b.r.Key) })
	if _, err := h.exec(ctx, "START TRANSACTION"); err != nil {
		return false, err
	}
	rows, err := h.query(ctx, l.lookSQL(some))
	if err != nil {
		return false, err
	}
	free, err := decide(some, rows)
	if err != nil {
		return false, err
	}
	if len(free) > 0 {
		sent := time.Now()
		result, err := h.exec(ctx, l.takeSQL(free))
		if err != nil {
			return false, err
		}
		if n, err := result.RowsAffected(); err != nil || n != 2*int64(len(free)) {
			return false, errors.Join(err, fmt.Errorf("%d rows of %d were changed", n/2, len(free)))
		}
		for _, t := range free {
			t.token, t.sent = t.token+1, sent
		}
	}
	_, err = h.exec(ctx, "COMMIT")
	return true, err
}

// decide notes what the server says of the rows of takes, and returns those that may be
// taken. What it says nothing of was locked, or is missing.
func decide(some []*take, rows [][]string) (takes []*take, err error) {
	said := make(map[string][]string, len(rows))
	for _, row := range rows {
		said[row[0]] = row
	}
	for _, t := range some {
		row, ok := said[t.r.Key]
		if t.alone = !ok; t.alone {
			continue
		}
		token, err := strconv.ParseUint(row[1], 10, 64)
		if err != nil {
			return nil, err
		}
		left, err := strconv.ParseInt(row[2], 10, 64)
		if err != nil {
			return nil, err
		}
		t.left, t.polled = time.Duration(left)*time.Microsecond, row[3] == "1"
		switch found := row[4]; {
		case found == ours, found == free && !t.inTurn:
			t.token = token
			takes = append(takes, t)
		}
	}
	return takes, nil
}

// What lookSQL says of a lease.
const (
	free = "1" // it may be taken, but another connection has the wake-up lock
	ours = "2" // it may be taken, and the connection has the wake-up lock
)

// lookSQL locks the rows of takes that nobody has locked. Of each it says: name, token,
// microseconds left, whether it is left to a poller, and whether it may be taken; then the
// connection takes the wake-up lock, where nobody has it.
func (l *Locker) lookSQL(some []*take) string {
	d := derived(some, []string{"n", "w", "p", "polite"}, func(t *take) []any {
		return []any{
			schema.Literal(t.r.Key), "'" + lockname.OfWakeUp(l.namespace, t.r.Key) + "'",
			"'" + lockname.OfLeasePoller(l.namespace, t.r.Key) + "'", t.polite,
		}
	})
	return fmt.Sprintf("SELECT r.name, r.token, %s, %[2]s, IF(%[3]s OR %[2]s, 0, 1 + %[4]s)"+
		" FROM (%[5]s) d STRAIGHT_JOIN %[6]s r ON r.namespace = %[7]s AND r.name = d.n FOR UPDATE SKIP LOCKED",
		schema.Remaining("r."), "(d.polite AND IS_FREE_LOCK(d.p) = 0)", schema.Live("r."), wakeUpNamed("d.w", "0"), d, l.table, schema.Literal(l.namespace))
}

// takeSQL grants leases whose rows are locked. The insert always meets them, each by its
// primary key; it counts two rows for each.
func (l *Locker) takeSQL(free []*take) string {
	var rows, keys, ttls []string
	same := true
	for _, t := range free {
		key, ttl := schema.Literal(t.r.Key), t.ttl.Microseconds()
		rows = append(rows, "("+schema.Literal(l.namespace)+", "+key+")")
		keys, ttls = append(keys, key), append(ttls, strconv.FormatInt(ttl, 10))
		same = same && t.ttl == free[0].ttl
	}
	ttl := ttls[0]
	if !same {
		ttl = fmt.Sprintf("ELT(FIELD(name, %s), %s)", strings.Join(keys, ", "), strings.Join(ttls, ", "))
	}
	return fmt.Sprintf("INSERT INTO %s (namespace, name) VALUES %s ON DUPLICATE KEY UPDATE"+
		" token = token + 1, owner = %s, expires = UTC_TIMESTAMP(6) + INTERVAL %s MICROSECOND",
		l.table, strings.Join(rows, ", "), schema.Literal(l.owner), ttl)
}

// leaving is a release that is sent together with others.
type leaving struct {
	s     *Lease
	done  chan struct{}
	alone bool // it is to be sent alone
	found bool // the server still had it
	err   error
}

// releaseOnce releases a lease, and reports whether the server still had it; asked, whether
// it was asked. The release is sent alone if the connection with the wake-up lock is lost, or
// is free and no others are to be expected; else together with all that wait for it.
func (l *Locker) releaseOnce(ctx context.Context, s *Lease) (found, asked bool, err error) {
	h, shared := l.shareRelease(s)
	if shared != nil {
		select {
		case <-shared.done:
		case <-ctx.Done():
			return false, true, ctx.Err()
		}
		if !shared.alone {
			return shared.found, true, shared.err
		}
	}
	if h != nil && !h.c.Fresh(ctx) {
		l.drop(h)
		h = nil
	}
	if h == nil {
		if h, err = l.connOf(ctx, s); err != nil {
			return false, false, err
		}
	}
	defer l.giveBack(h)
	found, err = l.releaseOn(ctx, h, s)
	return found, true, err
}

// shareRelease returns the connection with the lease's wake-up lock, and its turn, if it is
// free and others are not to be expected; or else the release that goes with others; or neither.
func (l *Locker) shareRelease(s *Lease) (*lockConn, *leaving) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := s.conn
	switch {
	case h == nil || h.gone || s.minHold > 0 || !l.shares():
		return nil, nil
	case !h.releases.Gathers() && h.c.TryTurn():
		return h, nil
	}
	shared := &leaving{s: s, done: make(chan struct{})}
	if h.releases.Join(shared) {
		l.running.Go(func() { l.leadReleases(h) })
	}
	return nil, shared
}

// leadReleases sends the releases that have gathered for h.
func (l *Locker) leadReleases(h *lockConn) {
	for more := true; more; {
		ctx, cancel := context.WithTimeout(context.Background(), handOverWait)
		mine, _ := l.awaitTurn(ctx, h)
		cancel()
		runtime.Gosched() // as above
		var some []*leaving
		some, more = h.releases.Depart(maxShared)
		if mine {
			l.releaseTogether(h, some)
		}
		for _, r := range some {
			r.alone = r.alone || !mine
			close(r.done)
		}
	}
}

// releaseTogether releases leases on h, whose turn is the caller's, and gives h back.
func (l *Locker) releaseTogether(h *lockConn, some []*leaving) {
	defer l.giveBack(h)
	leases := make([]*Lease, len(some))
	for i, r := range some {
		leases[i] = r.s
	}
	ctx, cancel := context.WithTimeout(marked(context.Background(), step.Release, leases...), background/2)
	defer cancel()
	if len(some) == 1 {
		some[0].found, some[0].err = l.releaseOn(ctx, h, leases[0])
		return
	}
	committing, err := l.releaseMany(ctx, h, some)
	if err != nil {
		h.c.Taint()
	}
	for _, r := range some {
		switch {
		case err != nil && committing && unknown(err):
			r.found, r.alone, r.err = false, false, err
		case err != nil:
			r.found, r.alone = false, true // nothing was released
		}
	}
	if err == nil {
		l.forgetWakeUps(ctx, h, some)
	}
}

// releaseMany releases leases in one transaction, and notes of each whether the server still
// had it. committing: it may have been committed, even after an error.
func (l *Locker) releaseMany(ctx context.Context, h *lockConn, some []*leaving) (committing bool, err error) {
	if _, err := h.exec(ctx, "START TRANSACTION"); err != nil {
		return false, err
	}
	result, err := h.exec(ctx, l.releaseManySQL(some))
	if err != nil {
		return false, err
	}
	changed, err := result.RowsAffected()
	if err != nil {
		return false, err
	}
	for _, r := range some {
		r.found = true
	}
	if changed < 2*int64(len(some)) {
		if err := l.lookAfter(ctx, h, some); err != nil {
			return false, err
		}
	}
	_, err = h.exec(ctx, "COMMIT")
	return true, err
}

// lookAfter asks, before the COMMIT, what has become of leases of which not all were released:
// some rows were locked, or are no longer ours. Once it is committed, the next holder may have
// what was released.
func (l *Locker) lookAfter(ctx context.Context, h *lockConn, some []*leaving) error {
	var names []string
	for _, r := range some {
		names = append(names, schema.Literal(r.s.key))
	}
	rows, err := h.query(ctx, fmt.Sprintf("SELECT name, token, owner <=> %s FROM %s WHERE namespace = %s AND name IN (%s)",
		schema.Literal(l.owner), l.table, schema.Literal(l.namespace), strings.Join(names, ", ")))
	if err != nil {
		return err
	}
	held := make(map[string]string)
	for _, row := range rows {
		held[row[0]+"\x00"+row[1]] = row[2]
	}
	for _, r := range some {
		mine, same := held[r.s.key+"\x00"+strconv.FormatUint(r.s.token, 10)]
		// One that has run out, and was cleared by somebody else a moment ago, is taken for
		// released: it was held until its holder asked for that.
		r.found, r.alone = same && mine == "0", same && mine == "1"
	}
	return nil
}

// forgetWakeUps notes that h carries the wake-up locks of released leases no more, and gives
// back those of the leases that were lost.
func (l *Locker) forgetWakeUps(ctx context.Context, h *lockConn, some []*leaving) {
	var lost []string
	l.mu.Lock()
	for _, r := range some {
		if !r.alone && h.wakeUps[r.s.key] == r.s {
			delete(h.wakeUps, r.s.key)
			if !r.found {
				lost = append(lost, r.s.key)
			}
		}
	}
	l.mu.Unlock()
	if len(lost) > 0 {
		if _, err := h.exec(ctx, l.releaseWakeUpsSQL(lost...)); err != nil {
			h.c.Taint()
		}
	}
}

// releaseManySQL is releaseBlock for leases without a MinHold, of which nobody has locked the
// rows.
func (l *Locker) releaseManySQL(some []*leaving) string {
	d := derived(some, []string{"n", "k", "w"}, func(r *leaving) []any {
		return []any{schema.Literal(r.s.key), r.s.token, "'" + lockname.OfWakeUp(l.namespace, r.s.key) + "'"}
	})
	return l.changeRowsSQL(d, "TRUE", "owner = IF(RELEASE_LOCK(d.w) IS NULL, NULL, NULL), expires = LEAST(r.expires, UTC_TIMESTAMP(6))", " SKIP LOCKED")
}
