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

// Lease is a lock on one key that lasts as long as it is renewed. It is safe for
// concurrent use.
type Lease struct {
	l       *Locker
	key     string
	token   uint64
	ttl     time.Duration
	minHold time.Duration
	until   time.Time // when MaxHold is over; zero is never
	lost    func(error)
	ticket  *queue.Ticket
	since   time.Time // when this process was given the key by the server
	granted time.Time // when the server granted it
	handed  int       // how often it went from caller to caller since then
	asked   purpose.Asked

	// session is that of the transaction that the lease ends with, and carries its wake-up lock in place of conn; nil
	// once it does not. Guarded by the turn of the session. lent: it was taken on one.
	session *pool.Conn
	lent    bool

	conn *lockConn // carries its wake-up lock; nil once that is lost. Guarded by Locker.mu
	due  time.Time // when to renew it; zero is never. Guarded by Locker.mu
	busy bool      // others had locked its row for long when it was renewed last. Guarded by Locker.mu

	mu       sync.Mutex
	expiry   time.Time   // when it may be over on the server
	deadline time.Time   // when it is over for its holder, before that
	timer    *time.Timer // fires at the deadline
	trouble  error       // why it was not renewed
	err      error       // why it is over: lost, released or closed
	given    bool        // a COMMIT has released it
	maybe    bool        // the same, if that COMMIT comes through
}

// margin is how much earlier than the server the holder gives up.
func margin(ttl time.Duration) time.Duration {
	if sabotage.LateNotice.Load() {
		return -ttl
	}
	return min(ttl/10, 5*time.Second)
}

// grant makes a lease of a grant on h, which carries its wake-up lock.
func (a *attempt) grant(h *lockConn, ticket *queue.Ticket, ans answer) (*Lease, error) {
	now := time.Now()
	s := &Lease{
		l: a.Locker, key: a.r.Key, token: ans.token, ttl: a.ttl, minHold: a.r.MinHold,
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
func (s *Lease) Key() string { return s.key }

// Ticket is the place in front of its queue that the lease was granted with.
func (s *Lease) Ticket() *queue.Ticket { return s.ticket }

// Token returns the fencing token: of one key, each grant has a greater one.
func (s *Lease) Token() uint64 { return s.token }

// Expiry is when the lease is over on the server, by the clock of this process and at
// the earliest, if it is not renewed before.
func (s *Lease) Expiry() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.expiry
}

// lasts notes that the server keeps the lease for ttl from sent or later. s.mu is held,
// or nobody else has s yet.
func (s *Lease) lasts(sent time.Time, ttl time.Duration) {
	s.expiry = sent.Add(ttl)
	s.deadline = s.expiry.Add(-margin(ttl))
}

// Err returns nil while the lease is held. It looks at the clock, so it also fails before
// anything else has shown that the lease is over. A lost lease's error matches
// lockerr.ErrLost, that of a released one lockerr.ErrClosed.
func (s *Lease) Err() error {
	s.mu.Lock()
	err, over := s.err, !time.Now().Before(s.deadline)
	s.mu.Unlock()
	if err != nil || !over {
		return err
	}
	s.expire()
	return s.Err()
}

// expire tells the holder if the deadline is over, and else waits for it: it may
// have moved while the timer fired.
func (s *Lease) expire() {
	s.mu.Lock()
	left := time.Until(s.deadline)
	if left > 0 || s.err != nil {
		if s.err == nil {
			s.timer.Reset(left)
		}
		s.mu.Unlock()
		return
	}
	trouble, maxHold := s.trouble, !s.until.IsZero() && !s.expiry.Before(s.until)
	s.mu.Unlock()
	switch {
	case maxHold:
		s.lose(errors.New("it was held for as long as MaxHold allows"))
	case trouble != nil:
		s.lose(fmt.Errorf("it was not renewed in time: %w", trouble))
	default: // a holder that was frozen may have lost it before; the rest of the margin is for what it does then
		if f := s.forced(min(margin(s.ttl)/2, askWhy)); f != nil {
			s.lose(takenAway(f))
			return
		}
		s.lose(errors.New("it was not renewed in time"))
	}
}

// lose ends a lease that the server may give to another, or has given.
func (s *Lease) lose(cause error) {
	err := lockerr.With(lockerr.ErrLost, cause)
	if !s.end(err) {
		return
	}
	s.ticket.Leave()
	s.l.dropWakeUp(s)
	if s.lost != nil {
		go s.lost(err)
	}
}

// loseFound is lose for a renewal that has not found the lease, which runs within l.running. It asks
// first who has taken the lease away: what the holder is told does not change after that. Until then
// the fence refuses its commits.
func (s *Lease) loseFound() {
	s.mu.Lock()
	ending := s.given || s.maybe
	s.trouble = errNotOurs
	s.mu.Unlock()
	if ending { // the COMMIT has released it
		return
	}
	s.l.mu.Lock()
	s.due = time.Time{}
	s.l.mu.Unlock()
	s.l.running.Go(func() { s.lose(s.whyNotOurs()) })
}

var errNotOurs = errors.New("the server says that the lease has expired, or has another holder")

// whyNotOurs is why the server does not have the lease as the holder's any more. It asks the server
// who has taken it away by force, for at most askWhy.
func (s *Lease) whyNotOurs() error {
	if f := s.forced(askWhy); f != nil {
		return takenAway(f)
	}
	return errNotOurs
}

func takenAway(f *schema.Forced) error { return fmt.Errorf("it was taken away on %v", f) }

// forced asks the server who has taken the lease away by force; nil if nobody has, or if the server
// does not say so within bound.
func (s *Lease) forced(bound time.Duration) *schema.Forced {
	l := s.l
	if l.untold.Load() || l.running.Enter() != nil {
		return nil
	}
	defer l.running.Done()
	ctx, cancel := server.Within(l.running.Ctx, bound)
	defer cancel()
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, "SELECT released FROM "+l.cfg.Table.String()+" WHERE "+l.row("", s.key))
	if err != nil || len(rows) == 0 {
		return nil
	}
	if f, ok := schema.ReadForced(rows[0][0]); ok && f.Token == s.token {
		return &f
	}
	return nil
}

// askWhy is how long a holder waits at most to be told who has taken its lease away.
const askWhy = time.Second

// dropWakeUp has the wake-up lock of a lease that is over given back.
func (l *Locker) dropWakeUp(s *Lease) {
	l.mu.Lock()
	h := s.conn
	s.conn = nil
	l.mu.Unlock()
	if h != nil && h.stale.Join(s) {
		l.running.Background(func(context.Context) { l.releaseWakeUps(h) })
	}
}

// end makes the lease be over because of err. It reports whether it was not
// before.
func (s *Lease) end(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	s.err = err
	s.timer.Stop()
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	delete(s.l.leases, s)
	s.due = time.Time{}
	return true
}

// Lapse ends the renewals: the lease expires by itself, unless it is released before.
func (s *Lease) Lapse() {
	s.mu.Lock()
	if s.trouble == nil {
		s.trouble = errors.New("its renewals were ended")
	}
	s.mu.Unlock()
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	s.due = time.Time{}
}

// Release hands the lease over to the next caller in the queue of this process. If there is
// none, it releases the lease on the server. It waits up to two seconds for the server to
// say whether the lease was still held, and fails with lockerr.ErrLost if it was lost.
// After any other error the lease is over for its holder, but the key may still be taken: the
// Locker goes on releasing it in the background, and on the server it expires within the TTL.
// After nil the key is free, or the next caller's. A second call does nothing.
//
// What a COMMIT has released is free already. Its wake-up lock is given back in the background, or by the same COMMIT
// on the session that has it.
func (s *Lease) Release() error {
	s.mu.Lock()
	given, maybe := s.given, s.maybe
	s.mu.Unlock()
	if given {
		if s.end(lockerr.ErrClosed) {
			s.l.dropWakeUp(s)
			s.ticket.Leave()
		}
		return nil
	}
	if err := s.Err(); errors.Is(err, lockerr.ErrLost) {
		return terms.Failure("release", s.key, err)
	}
	l := s.l
	if l.running.Enter() != nil {
		return nil // Close gives it back
	}
	defer l.running.Done()
	if !s.end(lockerr.ErrClosed) {
		if err := s.Err(); errors.Is(err, lockerr.ErrLost) {
			return terms.Failure("release", s.key, err)
		}
		return nil
	}
	if s.mayBeHandedOver() {
		if given := (&handoff{from: s, told: make(chan error, 1)}); s.ticket.Handoff(l, given) {
			return given.wait()
		}
	}
	return l.relinquish(s, maybe)
}

// mayBeHandedOver reports whether the lease may go to another caller of this process when it is released.
func (s *Lease) mayBeHandedOver() bool {
	return s.minHold == 0 && !s.lent && s.handed < s.l.cfg.HandOvers && time.Since(s.since) < s.l.cfg.HandOverTime
}

// handoff is a lease on its way from one caller to the next. The server tells the
// next caller whether it was still the giver's.
type handoff struct {
	from *Lease
	told chan error
}

// tell tells the giver what has become of its lease. Only the first call counts,
// and nil has nobody to tell.
func (g *handoff) tell(err error) {
	if g == nil {
		return
	}
	select {
	case g.told <- err:
	default:
	}
}

// wait returns why the lease was not the giver's any more. Where the next caller does not
// hear of that in time it returns nil: for the giver the lease was not lost.
func (g *handoff) wait() error {
	late := time.NewTimer(handoffWait)
	defer late.Stop()
	select {
	case err := <-g.told:
		if errors.Is(err, errNotOurs) {
			err = terms.Failure("release", g.from.key, lockerr.With(lockerr.ErrLost, g.from.whyNotOurs()))
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

// releasing is the context of a statement that gives a lease back.
func releasing(key string) context.Context {
	return purpose.Named(context.Background(), purpose.Release, hint.StrategyLease, key)
}

// relinquish gives back a lease that is over for its holder. sent: it may have been given
// back already. What does not come off within handoffWait goes on in the background, for as
// long as the lease may last.
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

// stays is what the giver of a lease is told that could not be given back so far.
func stays(err error, until time.Time) error {
	if errors.Is(err, lockerr.ErrExhausted) || errors.Is(err, lockerr.ErrNoAnswer) { // which say that nothing is locked
		err = errors.New(err.Error())
	}
	return fmt.Errorf("the lease is not given back yet, and the key may stay taken for up to %v; it is tried again until then: %w",
		max(0, time.Until(until)).Round(time.Millisecond), err)
}

// lingering is a context that ends at until, or some time after the Locker is closed: a key is not
// to stay taken because its process ends just now.
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

// release tries until ctx ends, whatever the server answers: a row is locked only for a moment,
// a KILL is over, a server takes writes again, and another connection may be better. done means
// that the row is free, or not ours any more. sent means that an earlier try may have succeeded.
func (l *Locker) release(ctx context.Context, s *Lease, sent bool) (done bool, err error) {
	for pause := strategy.Pace / 5; ; pause = min(2*pause, 2*strategy.Pace) {
		found, asked, failed := l.releaseOnce(ctx, s, pause > strategy.Pace)
		switch {
		case failed == nil && (found || sent): // not found again: the first time was enough
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

// connOf returns the lock connection that has the lease's wake-up lock, or any if that is lost, and
// its turn.
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

// releaseOn releases a lease on h, whose turn is the caller's.
func (l *Locker) releaseOn(ctx context.Context, h *lockConn, s *Lease) (found bool, err error) {
	if l.cfg.ReadTimeout == 0 {
		var cancel context.CancelFunc
		ctx, cancel = server.Within(ctx, background/2)
		defer cancel()
	}
	found, err = l.by.give(ctx, h, s.key, s.token, s.minHold)
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

// releaseAll gives leases back whose rows nobody has locked just now. It returns those that
// may still be held.
func (l *Locker) releaseAll(ctx context.Context, leases []*Lease) (left []*Lease) {
	sortByKey(leases)
	for some := range slices.Chunk(leases, rowsPerStatement) {
		own, passed := about(ctx, purpose.Release, some...), some
		h, err := l.borrow(own)
		if err == nil {
			if passed, err = l.by.giveSome(own, h, some); err != nil {
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

// endAll ends leases for their holders, and tells them. It returns those that had not ended.
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

// left is how long the lease still lasts for its holder if it is not renewed.
func (s *Lease) left() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(s.deadline)
}
