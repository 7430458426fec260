package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
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
	handed  int       // how often it went from caller to caller since then

	host *host     // carries its bell; nil once that is lost. Guarded by Locker.mu
	due  time.Time // when to renew it; zero is never. Guarded by Locker.mu

	mu       sync.Mutex
	deadline time.Time   // when it may be over on the server
	timer    *time.Timer // fires at the deadline
	trouble  error       // why it was not renewed
	err      error       // why it is over: lost, released or closed
}

// margin is how much earlier than the server the holder gives up.
func margin(ttl time.Duration) time.Duration {
	if sabotage.LateNotice.Load() {
		return -ttl
	}
	return min(ttl/10, 5*time.Second)
}

// grant makes a lease of a grant on h, which carries its bell.
func (a *attempt) grant(h *host, ans answer) (*Lease, error) {
	s := &Lease{
		l: a.Locker, key: a.r.Key, token: ans.token, ttl: a.ttl, minHold: a.r.MinHold,
		lost: a.r.Lost, ticket: a.ticket, since: time.Now(), host: h, deadline: ans.sent.Add(a.ttl - margin(a.ttl)),
	}
	if a.r.MaxHold > 0 {
		s.until = ans.sent.Add(a.r.MaxHold)
	}
	l := a.Locker
	s.mu.Lock()
	defer s.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, lockerr.ErrClosed
	}
	s.timer = time.AfterFunc(time.Until(s.deadline), s.expire)
	s.ticket.Granted(&lockerr.Holder{Program: l.program})
	l.leases[s] = struct{}{}
	h.bells[s.key] = s
	l.schedule(s, ans.sent, a.ttl)
	return s, nil
}

// Key returns the key.
func (s *Lease) Key() string { return s.key }

// Token returns the fencing token: of one key, each grant has a greater one.
func (s *Lease) Token() uint64 { return s.token }

// Expiry is when the lease is over on the server, by the clock of this process and at
// the earliest, if it is not renewed before.
func (s *Lease) Expiry() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.deadline.Add(margin(s.ttl))
}

// Err returns nil while the lease is held: by the clock, also before anybody has
// noticed that it is over. Else it returns an error that is lockerr.ErrLost, or
// after the release, lockerr.ErrClosed.
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
	cause := s.trouble
	switch {
	case !s.until.IsZero() && !s.deadline.Add(margin(s.ttl)).Before(s.until):
		cause = errors.New("it was held for as long as MaxHold allows")
	case cause == nil:
		cause = errors.New("it was not renewed in time")
	default:
		cause = fmt.Errorf("it was not renewed in time: %w", cause)
	}
	s.mu.Unlock()
	s.lose(cause)
}

// lose ends a lease that the server may give to another, or has given.
func (s *Lease) lose(cause error) {
	err := lockerr.With(lockerr.ErrLost, cause)
	if !s.end(err) {
		return
	}
	s.ticket.Leave()
	s.l.mute(s)
	if s.lost != nil {
		go s.lost(err)
	}
}

// mute has the bell of a lease that is over given back.
func (l *Locker) mute(s *Lease) {
	l.mu.Lock()
	h := s.host
	s.host = nil
	hush := h != nil && !l.closed
	if hush {
		h.stale = append(h.stale, s)
		if hush = len(h.stale) == 1; hush {
			l.running.Add(1)
		}
	}
	l.mu.Unlock()
	if hush {
		go func() {
			defer l.running.Done()
			l.hush(h)
		}()
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

// Lapse ends the renewals: the lease runs out by itself, unless Release gives it
// back before.
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

// Release hands the lease over to the next caller of this process in line, or
// gives it back, for which it waits a while. It fails with lockerr.ErrLost where the lease was lost. After
// any other error it is over for its holder, and goes on being given back in the
// background; on the server it runs out within the TTL. A second call does
// nothing.
func (s *Lease) Release() error {
	if err := s.Err(); errors.Is(err, lockerr.ErrLost) {
		return failure("release", s.key, err)
	}
	l := s.l
	if l.enter() != nil {
		return nil // Close gives it back
	}
	defer l.running.Done()
	if !s.end(lockerr.ErrClosed) {
		if err := s.Err(); errors.Is(err, lockerr.ErrLost) {
			return failure("release", s.key, err)
		}
		return nil
	}
	if s.minHold == 0 && s.handed < l.handOvers && time.Since(s.since) < l.handOverTime && s.ticket.HandOver(s) {
		return nil
	}
	return l.relinquish(s)
}

// relinquish gives back a lease that is over for its holder.
func (l *Locker) relinquish(s *Lease) error {
	over := s.Expiry()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	again, err := l.release(ctx, s, false)
	if !again || !time.Now().Before(over) {
		s.ticket.Leave()
	} else {
		l.running.Go(func() {
			defer s.ticket.Leave()
			ctx, cancel := context.WithDeadline(l.ctx, over)
			defer cancel()
			_, _ = l.release(ctx, s, true)
		})
	}
	if err != nil {
		return failure("release", s.key, err)
	}
	return nil
}

// release tries until ctx ends: a row is locked only for a moment, and another
// connection may be better. again reports that it may still succeed. sent means
// that an earlier try may have succeeded.
func (l *Locker) release(ctx context.Context, s *Lease, sent bool) (again bool, err error) {
	text := l.releaseSQL(s.key, s.token, s.minHold)
	for {
		h, err := l.hostOf(ctx, s)
		if err == nil {
			var found bool
			found, err = l.releaseOn(ctx, h, s, text)
			if err == nil && (found || sent) { // not found again: the first time was enough
				return false, nil
			}
			if err == nil {
				return false, lockerr.With(lockerr.ErrLost, errors.New("it was not ours any more"))
			}
			sent = sent || unknown(err)
		}
		if !server.Locked(err) && server.Number(err) != 0 && !server.Gone(err, nil) {
			return false, err
		}
		if !sleep(ctx, pollEvery/5) {
			return true, err
		}
	}
}

// hostOf returns the host that has the lease's bell, or any if that is lost, and
// its turn.
func (l *Locker) hostOf(ctx context.Context, s *Lease) (*host, error) {
	l.mu.Lock()
	h := s.host
	l.mu.Unlock()
	if h != nil {
		if ours, err := l.takeTurn(ctx, h); ours || err != nil {
			return h, err
		}
	}
	return l.borrow(ctx)
}

func (l *Locker) releaseOn(ctx context.Context, h *host, s *Lease, text string) (found bool, err error) {
	defer l.giveBack(h)
	ctx, cancel := context.WithTimeout(ctx, background/2)
	defer cancel()
	result, err := h.exec(ctx, text)
	if err != nil {
		return false, err
	}
	rows, err := result.RowsAffected()
	if err != nil {
		return false, err
	}
	l.mu.Lock()
	ours := h.bells[s.key] == s
	if ours {
		delete(h.bells, s.key)
	}
	l.mu.Unlock()
	if rows == 0 && ours {
		if _, err := h.exec(ctx, l.hushSQL(s.key)); err != nil {
			h.c.Taint()
		}
	}
	return rows > 0, nil
}

// releaseAll tells the holders of leases and gives them back, those at least
// whose rows nobody has locked just now.
func (l *Locker) releaseAll(leases []*Lease) {
	leases = slices.DeleteFunc(leases, func(s *Lease) bool { return !s.end(lockerr.ErrClosed) })
	for _, s := range leases {
		s.ticket.Leave()
		if s.lost != nil {
			go s.lost(lockerr.ErrClosed)
		}
	}
	sortByKey(leases)
	ctx, cancel := context.WithTimeout(context.Background(), background/2)
	defer cancel()
	for some := range slices.Chunk(leases, batch) {
		if _, err := l.exec(ctx, l.changeSQL(some, func(s *Lease) time.Duration { return s.minHold }, l.leave(), " SKIP LOCKED")); err != nil {
			return // they run out by themselves
		}
	}
}

func sortByKey(leases []*Lease) {
	slices.SortFunc(leases, func(a, b *Lease) int { return strings.Compare(a.key, b.key) })
}

// Fence makes sure, in the transaction that is about to commit on conn, that the
// leases are held, and that nobody else gets one of them before the transaction
// ends. It is one statement. It waits for who has locked a row, but not for
// longer than the leases last, on the server either. After an error the
// transaction must be rolled back.
func (l *Locker) Fence(ctx context.Context, conn driver.Conn, leases []*Lease) error {
	leases = slices.Clone(leases)
	sortByKey(leases)
	leases = slices.Compact(leases)
	if len(leases) == 0 {
		return nil
	}
	left := time.Hour // more is too long to wait, and for MAX_EXECUTION_TIME
	for _, s := range leases {
		if err := s.Err(); err != nil {
			return failure("commit", s.key, err)
		}
		left = min(left, s.left())
	}
	ctx, cancel := context.WithTimeout(ctx, left+giveUpCalmly)
	defer cancel()
	held, err := l.fence(ctx, conn, leases, max(left, time.Millisecond))
	if server.Interrupted(err) {
		err = lockerr.With(lockerr.ErrLost, fmt.Errorf("somebody has locked the row for as long as the lease lasts: %w", err))
	}
	if err != nil {
		var keys []string
		for _, s := range leases {
			keys = append(keys, s.key)
		}
		return failure("commit", strings.Join(keys, ", "), err)
	}
	for _, s := range leases {
		if !held[s.key] {
			s.lose(errNotOurs)
			return failure("commit", s.key, lockerr.With(lockerr.ErrLost, errNotOurs))
		}
	}
	return nil
}

// left is how long the lease still lasts for its holder if it is not renewed.
func (s *Lease) left() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return time.Until(s.deadline)
}

var errNotOurs = errors.New("the server says that it has run out or is someone else's")

// fence returns the keys that are held. Where several nodes take writes, only a
// write is seen by all of them.
func (l *Locker) fence(ctx context.Context, conn driver.Conn, leases []*Lease, bound time.Duration) (map[string]bool, error) {
	held := make(map[string]bool)
	if l.info.Topology == "" {
		rows, err := server.Query(ctx, conn, l.fenceSQL(leases, bound))
		for _, row := range rows {
			held[row[0]] = true
		}
		return held, err
	}
	for _, s := range leases {
		text := s.l.changeSQL([]*Lease{s}, func(*Lease) time.Duration { return 0 }, touch, "")
		rows, err := server.Affected(ctx, conn, l.bounded(text, bound))
		if err != nil {
			return nil, err
		}
		held[s.key] = rows > 0
	}
	return held, nil
}
