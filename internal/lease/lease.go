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
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Lease is a lock on one key that lasts as long as it is renewed. It is safe for concurrent use.
type Lease struct {
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

// grant makes a Lease of the answer of h that grants it. h has its wake-up lock.
func (a *attempt) grant(h *lockConn, ticket *queue.Ticket, ans answer) (*Lease, error) {
	now := time.Now()
	s := &Lease{
		locker: a.Locker, key: a.r.Key, token: ans.token, ttl: a.ttl, minHold: a.r.MinHold,
		lost: a.r.Lost, ticket: ticket, since: now, granted: now, asked: a.asked, lent: h.lent,
	}
	s.lasts(ans.sent, a.ttl)
	if a.r.MaxHold > 0 {
		s.until = ans.sent.Add(a.r.MaxHold)
	}
	l := a.Locker
	s.mu.Lock()
	defer s.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running.Ctx.Err() != nil {
		return nil, lockerr.ErrClosed
	}
	s.timer = time.AfterFunc(time.Until(s.deadline), s.expire)
	s.ticket.Granted(&lockerr.Holder{Program: l.cfg.Owner})
	l.leases[s] = struct{}{}
	switch {
	case h.lent:
		s.session = h.c
	case l.wakes:
		s.conn = h
		h.wakeUps[s.key] = s
	}
	l.schedule(s, ans.sent, a.ttl)
	return s, nil
}

// Key returns the key.
func (l *Lease) Key() string { return l.key }

// Ticket returns the place in front of the queue with which the lease was granted.
func (l *Lease) Ticket() *queue.Ticket { return l.ticket }

// Token returns the fencing token: each grant of a key has a greater one.
func (l *Lease) Token() uint64 { return l.token }

// Expiry returns when the lease is over on the server at the earliest, by the clock of this process, if it is not
// renewed before.
func (l *Lease) Expiry() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.expiry
}

// lasts notes that the server keeps the lease for ttl from sent or later. The caller holds l.mu, or nobody else has l
// yet.
func (l *Lease) lasts(sent time.Time, ttl time.Duration) {
	l.expiry = sent.Add(ttl)
	l.deadline = l.expiry.Add(-margin(ttl))
}

// Err returns nil while the lease is held. It looks at the clock, so it may fail before anything else has shown that the
// lease is over. The error of a lost lease matches lockerr.ErrLost, that of a released one lockerr.ErrClosed.
func (l *Lease) Err() error {
	l.mu.Lock()
	err, over := l.err, !time.Now().Before(l.deadline)
	l.mu.Unlock()
	if err != nil || !over {
		return err
	}
	l.expire()
	return l.Err()
}

// expire tells the holder that the deadline is over. If the deadline has moved while the timer fired, expire waits for
// the new one.
func (l *Lease) expire() {
	l.mu.Lock()
	left := time.Until(l.deadline)
	if left > 0 || l.err != nil {
		if l.err == nil {
			l.timer.Reset(left)
		}
		l.mu.Unlock()
		return
	}
	trouble, maxHold := l.trouble, !l.until.IsZero() && !l.expiry.Before(l.until)
	l.mu.Unlock()
	switch {
	case maxHold:
		l.lose(errors.New("it was held for as long as MaxHold allows"))
	case trouble != nil:
		l.lose(fmt.Errorf("it was not renewed in time: %w", trouble))
	default: // a frozen holder may have lost it to force before; half of the margin stays for the holder
		if f := l.forced(min(margin(l.ttl)/2, askWhy)); f != nil {
			l.lose(f)
			return
		}
		l.lose(errors.New("it was not renewed in time"))
	}
}

// lose ends a lease that the server may grant to another caller, or has granted.
func (l *Lease) lose(cause error) {
	err := lockerr.With(lockerr.ErrLost, cause)
	if !l.end(err) {
		return
	}
	l.ticket.Leave()
	l.locker.dropWakeUp(l)
	if l.lost != nil {
		go l.lost(err)
	}
}

// loseFound is lose for a renewal that has not found the lease; it is called within l.running. It first asks who has
// taken the lease away, since the error that the holder gets does not change later. Until then the fence refuses the
// holder's commits.
func (l *Lease) loseFound() {
	l.mu.Lock()
	ending := l.given || l.maybe
	l.trouble = errNotOurs
	l.mu.Unlock()
	if ending { // a COMMIT has released the lease, and may not be answered for a while
		l.locker.again(l, errNotOurs)
		return
	}
	l.locker.mu.Lock()
	l.due = time.Time{}
	l.locker.mu.Unlock()
	l.locker.running.Go(func() { l.lose(l.whyNotOurs()) })
}

var errNotOurs = errors.New("the server says that the lease has expired, or has another holder")

// whyNotOurs returns why the holder does not have the lease any more. It asks the server who has taken the lease away by
// force, for at most askWhy.
func (l *Lease) whyNotOurs() error {
	if f := l.forced(askWhy); f != nil {
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
func (l *Lease) forced(bound time.Duration) *taken {
	locker := l.locker
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
		locker.cfg.Table.String()+" WHERE "+locker.row("", l.key))
	if err != nil || len(rows) == 0 {
		return nil
	}
	f, ok := schema.ReadForced(rows[0][0])
	now, err := time.Parse("2006-01-02 15:04:05.999999", rows[0][1])
	if !ok || err != nil || f.Token != l.token {
		return nil
	}
	return &taken{f, time.Now().Add(f.At.Sub(now))}
}

// askWhy is how long a holder waits at most for the server to say who has taken its lease away.
const askWhy = time.Second

// dropWakeUp gives back, in the background, the wake-up lock of a lease that is over.
func (l *Locker) dropWakeUp(s *Lease) {
	l.mu.Lock()
	h := s.conn
	s.conn = nil
	l.mu.Unlock()
	if h != nil && h.stale.Join(s) {
		l.running.Background(func(context.Context) { l.releaseWakeUps(h) })
	}
}

// end ends the lease because of err. It reports whether the lease was not over before.
func (l *Lease) end(err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return false
	}
	l.err = err
	l.timer.Stop()
	l.locker.mu.Lock()
	defer l.locker.mu.Unlock()
	delete(l.locker.leases, l)
	l.due = time.Time{}
	return true
}

// Lapse ends the renewals: the lease expires by itself, unless it is released before.
func (l *Lease) Lapse() {
	l.mu.Lock()
	if l.trouble == nil {
		l.trouble = errors.New("its renewals were ended")
	}
	l.mu.Unlock()
	l.locker.mu.Lock()
	defer l.locker.mu.Unlock()
	l.due = time.Time{}
}

// Release hands the lease over to the next caller in the queue of this process. If there is none, it releases the lease
// on the server. It waits up to two seconds for the server to say whether the lease was still held, and fails with
// lockerr.ErrLost if the lease was lost. After any other error the lease is over for its holder, but the key may still
// be taken: the Locker goes on to release the lease in the background, and on the server the lease expires within the
// TTL. After nil the key is free, or the next caller's. A second call does nothing.
//
// A lease that a COMMIT has released is free already. Its wake-up lock is given back in the background, or by the same
// COMMIT if that ran on the session with the wake-up lock.
func (l *Lease) Release() error {
	l.mu.Lock()
	given, maybe := l.given, l.maybe
	l.mu.Unlock()
	if given {
		if l.end(lockerr.ErrClosed) {
			l.locker.dropWakeUp(l)
			l.ticket.Leave()
		}
		return nil
	}
	if err := l.Err(); errors.Is(err, lockerr.ErrLost) {
		return terms.Failure("release", l.key, err)
	}
	locker := l.locker
	if locker.running.Enter() != nil {
		return nil // Close gives the lease back
	}
	defer locker.running.Done()
	if !l.end(lockerr.ErrClosed) {
		if err := l.Err(); errors.Is(err, lockerr.ErrLost) {
			return terms.Failure("release", l.key, err)
		}
		return nil
	}
	if l.mayBeHandedOver() {
		if given := (&handoff{giver: l, told: make(chan error, 1)}); l.ticket.Handoff(locker, given) {
			return given.wait()
		}
	}
	return locker.relinquish(l, maybe)
}

// mayBeHandedOver reports whether the lease may go to another caller of this process when it is released.
func (l *Lease) mayBeHandedOver() bool {
	return l.minHold == 0 && !l.lent && l.handed < l.locker.cfg.HandOvers && time.Since(l.since) < l.locker.cfg.HandOverTime
}

// handoff is a lease on its way from one caller to the next. The server tells the next caller whether the giver still
// had the lease.
type handoff struct {
	giver *Lease
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
func about(ctx context.Context, s purpose.Purpose, leases ...*Lease) context.Context {
	ctx = purpose.AskedBy(ctx, leases, func(s *Lease) purpose.Asked { return s.asked })
	return purpose.With(ctx, s, hint.StrategyLease, leases, (*Lease).Key)
}

// releasing returns the context of a statement that gives a lease back.
func releasing(key string) context.Context {
	return purpose.Named(context.Background(), purpose.Release, hint.StrategyLease, key)
}

// relinquish gives back a lease that is over for its holder. sent: an earlier statement may have given it back already.
// If it has not succeeded within handoffWait, it goes on in the background, for as long as the lease may last.
func (l *Locker) relinquish(s *Lease, sent bool) error {
	over := s.Expiry()
	ctx, cancel := server.Within(about(context.Background(), purpose.Release, s), handoffWait)
	defer cancel()
	done, err := l.release(ctx, s, sent)
	if done {
		s.ticket.Leave()
	} else {
		l.running.Go(func() {
			defer s.ticket.Leave()
			ctx, cancel := l.lingering(over)
			defer cancel()
			if done, _ := l.release(about(ctx, purpose.Release, s), s, true); !done {
				l.dropWakeUp(s)
			}
		})
		err = stays(err, over)
	}
	if err != nil {
		return terms.Failure("release", s.key, err)
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

// release tries to release a lease until ctx ends, whatever the server answers: a row is locked only for a moment, a KILL
// is over, a server takes writes again, and another connection may be better. done means that the row is free, or not
// ours any more. sent means that an earlier try may have succeeded.
func (l *Locker) release(ctx context.Context, s *Lease, sent bool) (done bool, err error) {
	for pause := strategy.Pace / 5; ; pause = min(2*pause, 2*strategy.Pace) {
		found, asked, failed := l.releaseOnce(ctx, s, pause > strategy.Pace)
		switch {
		case failed == nil && (found || sent): // if the lease is not found again, an earlier try has released it
			return true, nil
		case failed == nil:
			return true, lockerr.With(lockerr.ErrLost, s.whyNotOurs())
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
func (l *Locker) connOf(ctx context.Context, s *Lease) (*lockConn, error) {
	l.mu.Lock()
	h := s.conn
	l.mu.Unlock()
	if h != nil {
		if ours, err := l.awaitTurn(ctx, h); ours {
			return h, nil
		} else if err != nil {
			return nil, err
		}
	}
	return l.borrow(ctx)
}

// releaseOn releases a lease on h, whose turn the caller has.
func (l *Locker) releaseOn(ctx context.Context, h *lockConn, s *Lease) (found bool, err error) {
	if l.cfg.ReadTimeout == 0 {
		var cancel context.CancelFunc
		ctx, cancel = server.Within(ctx, background/2)
		defer cancel()
	}
	found, err = l.steps.give(ctx, h, s.key, s.token, s.minHold)
	if err == nil {
		l.forgetWakeUps(ctx, h, []*leaving{{s: s, found: found}})
	}
	return found, err
}

func (l *Locker) giveAndWake(ctx context.Context, h *lockConn, key string, token uint64, minHold time.Duration) (found bool, err error) {
	result, err := h.change(ctx, l.releaseBlock(key, token, minHold))
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	return rows > 0, err
}

// releaseAll gives back those leases whose rows nobody has locked just now. It returns the leases that may still be held.
func (l *Locker) releaseAll(ctx context.Context, leases []*Lease) (left []*Lease) {
	sortByKey(leases)
	for some := range slices.Chunk(leases, rowsPerStatement) {
		own, passed := about(ctx, purpose.Release, some...), some
		h, err := l.borrow(own)
		if err == nil {
			if passed, err = l.steps.giveSome(own, h, some); err != nil {
				passed = some
			}
			l.giveBack(h)
		}
		left = append(left, passed...)
	}
	return left
}

func (l *Locker) giveSomeAndWake(ctx context.Context, h *lockConn, leases []*Lease) (passed []*Lease, err error) {
	result, err := h.exec(ctx, l.changeSQL(leases, func(s *Lease) time.Duration { return s.minHold }, lasted, l.leave(), " SKIP LOCKED"))
	if err != nil {
		return nil, err
	}
	if n, err := result.RowsAffected(); err != nil || n == 2*int64(len(leases)) {
		return nil, err
	}
	held, err := l.heldOn(ctx, h, leases)
	for _, s := range leases {
		if _, ours := held(s); ours {
			passed = append(passed, s)
		}
	}
	return passed, err
}

// endAll ends leases for their holders, and tells the holders. It returns the leases that had not ended before.
func endAll(leases []*Lease) []*Lease {
	leases = slices.DeleteFunc(leases, func(s *Lease) bool { return !s.end(lockerr.ErrClosed) })
	for _, s := range leases {
		s.ticket.Leave()
		if s.lost != nil {
			go s.lost(lockerr.ErrClosed)
		}
	}
	return leases
}

func sortByKey(leases []*Lease) {
	slices.SortFunc(leases, func(a, b *Lease) int { return strings.Compare(a.key, b.key) })
}

// left returns how long the lease still lasts for its holder if it is not renewed.
func (l *Lease) left() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Until(l.deadline)
}
