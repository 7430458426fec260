package lease

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Grant is a lease on one key, which lasts as long as it is renewed. It is safe for concurrent use.
type Grant struct {
	locker  *Locker
	key     string
	token   uint64
	ttl     time.Duration
	minHold time.Duration
	until   time.Time // when MaxHold is over; zero is never
	lost    func(error)
	ticket  *queue.Ticket
	since   time.Time // when the server granted the key to this process
	granted time.Time // when the server granted this lease
	handed  int       // how often the lease was handed over since then
	asked   purpose.Asked

	// session is the session of the transaction with which the lease ends; it has the wake-up lock in place of conn. It
	// is nil once it does not have the wake-up lock any more. The turn of the session guards it. lent: the lease was
	// taken on a session.
	session *pool.Conn
	lent    bool

	conn *lockConn // the lock connection that has the wake-up lock; nil once that is lost. Guarded by Locker.mu
	due  time.Time // when to renew the lease; zero for never. Guarded by Locker.mu
	busy bool      // others had the row locked for long at the last renewal. Guarded by Locker.mu

	mu       sync.Mutex
	expiry   time.Time   // when the lease may be over on the server
	deadline time.Time   // when the lease is over for its holder, before expiry
	timer    *time.Timer // fires at the deadline
	trouble  error       // why the last renewal failed
	err      error       // why the lease is over: lost, released or closed
	given    bool        // a COMMIT has released the lease
	maybe    bool        // a COMMIT may have released the lease
}

// margin returns how much earlier than the server the holder gives the lease up.
func margin(ttl time.Duration) time.Duration {
	if sabotage.LateNotice.Load() {
		return -ttl
	}
	return min(ttl/10, 5*time.Second)
}

// grant makes a Grant of the answer of lc that grants it. lc has its wake-up lock.
func (a *attempt) grant(lc *lockConn, ticket *queue.Ticket, ans answer) (*Grant, error) {
	now := time.Now()
	g := &Grant{
		locker: a.l, key: a.r.Key, token: ans.token, ttl: a.ttl, minHold: a.r.MinHold,
		lost: a.r.Lost, ticket: ticket, since: now, granted: now, asked: a.asked, lent: lc.lent,
	}
	g.lasts(ans.sent, a.ttl)
	if a.r.MaxHold > 0 {
		g.until = ans.sent.Add(a.r.MaxHold)
	}
	l := a.l
	g.mu.Lock()
	defer g.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running.Ctx.Err() != nil {
		return nil, lockerr.ErrClosed
	}
	g.timer = time.AfterFunc(time.Until(g.deadline), g.expire)
	g.ticket.Granted(&lockerr.Holder{Program: l.cfg.Owner})
	l.leases[g] = struct{}{}
	switch {
	case lc.lent:
		g.session = lc.c
	case l.wakes:
		g.conn = lc
		lc.wakeUps[g.key] = g
	}
	l.schedule(g, ans.sent, a.ttl)
	return g, nil
}

// Key returns the key.
func (g *Grant) Key() string { return g.key }

// Ticket returns the place in front of the queue with which the lease was granted.
func (g *Grant) Ticket() *queue.Ticket { return g.ticket }

// Token returns the fencing token: each grant of a key has a greater one.
func (g *Grant) Token() uint64 { return g.token }

// Expiry returns when the lease is over on the server at the earliest, by the clock of this process, if it is not
// renewed before.
func (g *Grant) Expiry() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.expiry
}

// lasts notes that the server keeps the lease for ttl from sent or later. The caller holds g.mu, or nobody else has g
// yet.
func (g *Grant) lasts(sent time.Time, ttl time.Duration) {
	g.expiry = sent.Add(ttl)
	g.deadline = g.expiry.Add(-margin(ttl))
}

// Err returns nil while the lease is held. It looks at the clock, so it may fail before anything else has shown that the
// lease is over. The error of a lost lease matches lockerr.ErrLost, that of a released one lockerr.ErrClosed.
func (g *Grant) Err() error {
	g.mu.Lock()
	err, over := g.err, !time.Now().Before(g.deadline)
	g.mu.Unlock()
	if err != nil || !over {
		return err
	}
	g.expire()
	return g.Err()
}

// expire tells the holder that the deadline is over. If the deadline has moved while the timer fired, expire waits for
// the new one.
func (g *Grant) expire() {
	g.mu.Lock()
	left := time.Until(g.deadline)
	if left > 0 || g.err != nil {
		if g.err == nil {
			g.timer.Reset(left)
		}
		g.mu.Unlock()
		return
	}
	trouble, maxHold := g.trouble, !g.until.IsZero() && !g.expiry.Before(g.until)
	g.mu.Unlock()
	switch {
	case maxHold:
		g.lose(errors.New("it was held for as long as MaxHold allows"))
	case trouble != nil:
		g.lose(fmt.Errorf("it was not renewed in time: %w", trouble))
	default: // a frozen holder may have lost it to force before; half of the margin stays for the holder
		if f := g.forced(min(margin(g.ttl)/2, askWhy)); f != nil {
			g.lose(f)
			return
		}
		g.lose(errors.New("it was not renewed in time"))
	}
}

// lose ends a lease that the server may grant to another caller, or has granted.
func (g *Grant) lose(cause error) {
	err := lockerr.With(lockerr.ErrLost, cause)
	if !g.end(err) {
		return
	}
	g.ticket.Leave()
	g.locker.dropWakeUp(g)
	if g.lost != nil {
		go g.lost(err)
	}
}

// loseFound is lose for a renewal that has not found the lease; it is called within Locker.running. It first asks who has
// taken the lease away, since the error that the holder gets does not change later. Until then the fence refuses the
// holder's commits.
func (g *Grant) loseFound() {
	g.mu.Lock()
	ending := g.given || g.maybe
	g.trouble = errNotOurs
	g.mu.Unlock()
	if ending { // a COMMIT has released the lease, and may not be answered for a while
		g.locker.retryLater(g, errNotOurs)
		return
	}
	g.locker.mu.Lock()
	g.due = time.Time{}
	g.locker.mu.Unlock()
	g.locker.running.Go(func() { g.lose(g.whyNotOurs()) })
}

var errNotOurs = errors.New("the server says that the lease has expired, or has another holder")

// whyNotOurs returns why the holder does not have the lease any more. It asks the server who has taken the lease away by
// force, for at most askWhy.
func (g *Grant) whyNotOurs() error {
	if f := g.forced(askWhy); f != nil {
		return f
	}
	return errNotOurs
}

// taken is the error of a lease that was taken away by force.
type taken struct {
	schema.Forced
	at time.Time // when it was taken at the latest, by this process's clock
}

// Error implements error.
func (t *taken) Error() string { return fmt.Sprintf("it was taken away on %v", t.Forced) }

// TakenAt returns until when the lease was held.
func (t *taken) TakenAt() time.Time { return t.at }

// forced asks the server who has taken the lease away by force; nil if nobody has, or if the server does not say so
// within bound.
func (g *Grant) forced(bound time.Duration) *taken {
	locker := g.locker
	if locker.untold.Load() || locker.running.Enter() != nil {
		return nil
	}
	defer locker.running.Done()
	ctx, cancel := server.Within(locker.running.Ctx, bound)
	defer cancel()
	c, err := locker.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, "SELECT released, CAST(UTC_TIMESTAMP(6) AS CHAR) FROM "+
		locker.cfg.Table.String()+" WHERE "+locker.row("", g.key))
	if err != nil || len(rows) == 0 {
		return nil
	}
	f, ok := schema.ReadForced(rows[0][0])
	now, err := time.Parse("2006-01-02 15:04:05.999999", rows[0][1])
	if !ok || err != nil || f.Token != g.token {
		return nil
	}
	return &taken{f, time.Now().Add(f.At.Sub(now))}
}

// askWhy is how long a holder waits at most for the server to say who has taken its lease away.
const askWhy = time.Second

// dropWakeUp gives back, in the background, the wake-up lock of a lease that is over.
func (l *Locker) dropWakeUp(g *Grant) {
	l.mu.Lock()
	lc := g.conn
	g.conn = nil
	l.mu.Unlock()
	if lc != nil && lc.stale.Join(g) {
		l.running.Background(func(context.Context) { l.releaseWakeUps(lc) })
	}
}

// end ends the lease because of err. It reports whether the lease was not over before.
func (g *Grant) end(err error) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return false
	}
	g.err = err
	g.timer.Stop()
	g.locker.mu.Lock()
	defer g.locker.mu.Unlock()
	delete(g.locker.leases, g)
	g.due = time.Time{}
	return true
}

// Lapse ends the renewals: the lease expires by itself, unless it is released before.
func (g *Grant) Lapse() {
	g.mu.Lock()
	if g.trouble == nil {
		g.trouble = errors.New("its renewals were ended")
	}
	g.mu.Unlock()
	g.locker.mu.Lock()
	defer g.locker.mu.Unlock()
	g.due = time.Time{}
}

// Release hands the lease over to the next caller in the queue of this process. If there is none, it releases the lease
// on the server. It waits up to two seconds for the server to say whether the lease was still held, and fails with
// lockerr.ErrLost if the lease was lost. After any other error the lease is over for its holder, but the key may still
// be taken: the Locker goes on to release the lease in the background, and on the server the lease expires within the
// TTL. After nil the key is free, or the next caller's. A second call does nothing.
//
// A lease that a COMMIT has released is free already. Its wake-up lock is given back in the background, or by the same
// COMMIT if that ran on the session with the wake-up lock.
func (g *Grant) Release() error {
	g.mu.Lock()
	given, maybe := g.given, g.maybe
	g.mu.Unlock()
	if given {
		if g.end(lockerr.ErrClosed) {
			g.locker.dropWakeUp(g)
			g.ticket.Leave()
		}
		return nil
	}
	if err := g.Err(); errors.Is(err, lockerr.ErrLost) {
		return terms.Failure("release", g.key, err)
	}
	locker := g.locker
	if locker.running.Enter() != nil {
		return nil // Close gives the lease back
	}
	defer locker.running.Done()
	if !g.end(lockerr.ErrClosed) {
		if err := g.Err(); errors.Is(err, lockerr.ErrLost) {
			return terms.Failure("release", g.key, err)
		}
		return nil
	}
	if g.mayBeHandedOver() {
		if given := (&handoff{giver: g, told: make(chan error, 1)}); g.ticket.Handoff(locker, given) {
			return given.wait()
		}
	}
	return locker.relinquish(g, g.ticket, maybe)
}

// mayBeHandedOver reports whether the lease may go to another caller of this process when it is released.
func (g *Grant) mayBeHandedOver() bool {
	return g.minHold == 0 && !g.lent && g.handed < g.locker.cfg.HandOvers && time.Since(g.since) < g.locker.cfg.HandOverTime
}

// handoff is a lease on its way from one caller to the next. The server tells the next caller whether the giver still
// had the lease.
//
// With tokens reserved in ranges a handoff would need no statement, and no commit. But a release promises to fail if the
// lease was lost, for example taken away by force, and only the server knows that. So each release would wait for a
// question of its own to the server; releases at the same time could share a question. The last release of a range
// would wait for the answers to all others, or the next grant of the key would look like a loss to them. That is more
// work than a statement for each handoff. And if somebody took the lease away in the middle of a range, a caller whose
// clock says that the lease lasts would hand it on, and no holder would notice the loss before its fence.
type handoff struct {
	giver *Grant
	told  chan error
}

// tell tells the giver what has become of its lease. Only the first call counts. A nil handoff has no giver.
func (h *handoff) tell(err error) {
	if h == nil {
		return
	}
	select {
	case h.told <- err:
	default:
	}
}

// wait returns why the giver did not have the lease any more. If the next caller is not told in time, wait returns nil: for
// the giver the lease was not lost.
func (h *handoff) wait() error {
	late := time.NewTimer(handoffWait)
	defer late.Stop()
	select {
	case err := <-h.told:
		if errors.Is(err, errNotOurs) {
			err = terms.Failure("release", h.giver.key, lockerr.With(lockerr.ErrLost, h.giver.whyNotOurs()))
		}
		return err
	case <-late.C:
		return nil
	}
}

// about marks a statement about leases.
func about(ctx context.Context, s purpose.Purpose, leases ...*Grant) context.Context {
	ctx = purpose.AskedBy(ctx, leases, func(g *Grant) purpose.Asked { return g.asked })
	return purpose.With(ctx, s, hint.StrategyLease, leases, (*Grant).Key)
}

// releasing returns the context of a statement that gives a lease back.
func releasing(key string) context.Context {
	return purpose.Named(context.Background(), purpose.Release, hint.StrategyLease, key)
}

// relinquish gives back a lease that is over for its holder, and then the place in the queue, which is that of the caller
// whom the lease was handed to, or the lease's own. sent: an earlier statement may have given the lease back already.
// If it has not succeeded within handoffWait, it goes on in the background, for as long as the lease may last.
func (l *Locker) relinquish(g *Grant, ticket *queue.Ticket, sent bool) error {
	over := g.Expiry()
	ctx, cancel := server.Within(about(context.Background(), purpose.Release, g), handoffWait)
	defer cancel()
	done, err := l.release(ctx, g, sent)
	if done {
		ticket.Leave()
	} else {
		l.running.Go(func() {
			defer ticket.Leave()
			ctx, cancel := l.lingering(over)
			defer cancel()
			if done, _ := l.release(about(ctx, purpose.Release, g), g, true); !done {
				l.dropWakeUp(g)
			}
		})
		err = stays(err, over)
	}
	if err != nil {
		return terms.Failure("release", g.key, err)
	}
	return nil
}

// stays returns the error for the giver of a lease that could not be given back so far.
func stays(err error, until time.Time) error {
	if errors.Is(err, lockerr.ErrExhausted) || errors.Is(err, lockerr.ErrNoAnswer) { // these errors would say that nothing is locked
		err = errors.New(err.Error())
	}
	return fmt.Errorf("the lease is not given back yet, and the key may stay taken for up to %v; it is tried again until then: %w",
		max(0, time.Until(until)).Round(time.Millisecond), err)
}

// lingering returns a context that ends at until, or some time after the Locker is closed: a key must not stay taken
// only because its process ends.
func (l *Locker) lingering(until time.Time) (context.Context, context.CancelFunc) {
	ctx, cancel := server.Within(context.Background(), time.Until(until))
	stop := context.AfterFunc(l.running.Ctx, func() {
		strategy.Sleep(ctx, handoffWait)
		cancel()
	})
	return ctx, func() {
		stop()
		cancel()
	}
}

// release tries to release a lease until ctx ends, whatever the server answers. The next try may go better: a row is locked
// only for a moment, a KILL is over, a server takes writes again, another connection works. done: the row is free, or not
// ours any more. sent: an earlier try may have succeeded.
func (l *Locker) release(ctx context.Context, g *Grant, sent bool) (done bool, err error) {
	for pause := strategy.RetryPause / 5; ; pause = min(2*pause, 2*strategy.RetryPause) {
		found, asked, failed := l.releaseOnce(ctx, g, pause > strategy.RetryPause)
		switch {
		case failed == nil && (found || sent): // if the lease is not found again, an earlier try has released it
			return true, nil
		case failed == nil:
			return true, lockerr.With(lockerr.ErrLost, g.whyNotOurs())
		case err == nil || ctx.Err() == nil:
			err = failed
		}
		sent = sent || asked && unknown(failed)
		if !strategy.Sleep(ctx, pause/2+rand.N(pause)) {
			return false, err
		}
	}
}

// connOf returns the lock connection that has the lease's wake-up lock, with its turn; any lock connection if the wake-up
// lock is lost.
func (l *Locker) connOf(ctx context.Context, g *Grant) (*lockConn, error) {
	l.mu.Lock()
	lc := g.conn
	l.mu.Unlock()
	if lc != nil {
		if ours, err := l.awaitTurn(ctx, lc); ours {
			return lc, nil
		} else if err != nil {
			return nil, err
		}
	}
	return l.borrow(ctx)
}

// releaseOn releases a lease on lc, whose turn the caller has.
func (l *Locker) releaseOn(ctx context.Context, lc *lockConn, g *Grant) (found bool, err error) {
	if l.cfg.ReadTimeout == 0 {
		var cancel context.CancelFunc
		ctx, cancel = server.Within(ctx, background/2)
		defer cancel()
	}
	found, err = l.steps.release(ctx, lc, g.key, g.token, g.minHold)
	if err == nil {
		l.forgetWakeUps(ctx, lc, []*leaving{{g: g, found: found}})
	}
	return found, err
}

func (l *Locker) giveAndWake(ctx context.Context, lc *lockConn, key string, token uint64, minHold time.Duration) (found bool, err error) {
	result, err := lc.change(ctx, l.releaseBlock(key, token, minHold))
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	return rows > 0, err
}

// releaseAll gives back those leases whose rows nobody has locked just now. It returns the leases that may still be held.
func (l *Locker) releaseAll(ctx context.Context, leases []*Grant) (left []*Grant) {
	sortByKey(leases)
	for some := range slices.Chunk(leases, rowsPerStatement) {
		own, passed := about(ctx, purpose.Release, some...), some
		lc, err := l.borrow(own)
		if err == nil {
			if passed, err = l.steps.releaseSome(own, lc, some); err != nil {
				passed = some
			}
			l.giveBack(lc)
		}
		left = append(left, passed...)
	}
	return left
}

func (l *Locker) giveSomeAndWake(ctx context.Context, lc *lockConn, leases []*Grant) (passed []*Grant, err error) {
	result, err := lc.exec(ctx, l.changeSQL(leases, func(g *Grant) time.Duration { return g.minHold }, lasted, l.leave(), " SKIP LOCKED"))
	if err != nil {
		return nil, err
	}
	if n, err := result.RowsAffected(); err != nil || n == 2*int64(len(leases)) {
		return nil, err
	}
	held, err := l.heldOn(ctx, lc, leases)
	for _, g := range leases {
		if _, ours := held(g); ours {
			passed = append(passed, g)
		}
	}
	return passed, err
}

// endAll ends leases for their holders, and tells the holders. It returns the leases that had not ended before.
func endAll(leases []*Grant) []*Grant {
	leases = slices.DeleteFunc(leases, func(g *Grant) bool { return !g.end(lockerr.ErrClosed) })
	for _, g := range leases {
		g.ticket.Leave()
		if g.lost != nil {
			go g.lost(lockerr.ErrClosed)
		}
	}
	return leases
}

func sortByKey(leases []*Grant) {
	slices.SortFunc(leases, func(a, b *Grant) int { return strings.Compare(a.key, b.key) })
}

// timeLeft returns how long the lease still lasts for its holder if it is not renewed.
func (g *Grant) timeLeft() time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	return time.Until(g.deadline)
}
