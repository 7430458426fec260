package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Request says which lease, and how long to queue for it.
type Request struct {
	Key     string
	TTL     time.Duration // how long the lease survives a holder that has fallen silent
	Wait    time.Duration // 0 fails at once where someone else has the key
	MinHold time.Duration // how long the lease stays after its release
	MaxHold time.Duration // how long it is kept by renewing it; 0 is no limit
	// Waiting is called before the caller begins to wait. It may refuse, and it
	// may end the wait through the context that it returns; done follows. nil is
	// to wait with the caller's context as it is.
	Waiting func(context.Context) (ctx context.Context, done func(), err error)
	// Lost is called once, on a goroutine of its own, when the lease may be
	// lost: it was not renewed in time, was found to be gone, has reached
	// MaxHold, or the Locker is closed. nil is nobody to tell.
	Lost func(error)
}

// Acquire takes a lease. After an error it is not held, and what an unanswered
// statement may have taken is given back in the background.
func (l *Locker) Acquire(ctx context.Context, r Request) (*Lease, error) {
	a := &attempt{Locker: l, r: r, ttl: r.TTL, start: time.Now()}
	if r.MaxHold > 0 {
		a.ttl = min(a.ttl, r.MaxHold)
	}
	a.lasts = a.ttl
	if !l.info.SkipLocked() {
		return nil, a.explain(ctx, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"leases need SKIP LOCKED, which MariaDB has from 10.6 on; use a row lock")))
	}
	if err := l.enter(); err != nil {
		return nil, a.explain(ctx, err)
	}
	defer l.running.Done()
	open, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(l.ctx, func() { cancel(lockerr.ErrClosed) })()
	s, err := a.acquire(open)
	if err != nil {
		a.ticket.Leave()
		if open.Err() != nil {
			err = context.Cause(open)
		}
		return nil, a.explain(ctx, err)
	}
	l.rows.NoteLeased(r.Key)
	return s, nil
}

// attempt is one call of Acquire.
type attempt struct {
	*Locker
	r      Request
	ttl    time.Duration
	lasts  time.Duration // for how long the server may keep what was granted: the giver's TTL may be greater
	start  time.Time
	ticket *queue.Ticket // nil before it is ours, and once it is settle's
	left   time.Duration // how long the lease that is in the way still ran; 0 is unknown
	holder *lockerr.Holder
}

var (
	errWaitOver = errors.New("the wait is over")
	errNoAnswer = errors.New("the server did not answer in time")
	errNoRow    = errors.New("the key's row in the lock table has vanished")
)

func (a *attempt) acquire(ctx context.Context) (*Lease, error) {
	keys := []string{a.r.Key}
	if err := a.rows.Exist(ctx, keys); err != nil {
		return nil, err
	}
	ticket, holder, front := a.queue.TryEnter(keys)
	if !front {
		if a.r.Wait == 0 {
			a.holder = holder
			return nil, lockerr.ErrLocked
		}
		var err error
		if ticket, err = a.lineUp(ctx); err != nil {
			return nil, err
		}
	}
	a.ticket = ticket
	if from, handed := ticket.Baton().(*Lease); handed {
		if s, err := a.inherit(ctx, from); s != nil || err != nil {
			return s, err
		}
	}
	try := true
	for again := 0; ; {
		var s *Lease
		var err error
		if try {
			s, err = a.try(ctx, a.r.Wait > 0)
		} else {
			s, err = a.wait(ctx)
		}
		switch {
		case s != nil:
			return s, nil
		case (errors.Is(err, errNoRow) || server.Missing(err)) && again < 3:
			again++
			if err := a.rows.Renew(ctx, keys); err != nil {
				return nil, err
			}
		case errors.Is(err, driver.ErrBadConn) && again < 3: // nothing was sent
			again++
		case err != nil:
			return nil, err
		case a.r.Wait == 0:
			return nil, lockerr.ErrLocked
		default:
			try = false
		}
	}
}

// inherit takes over the lease that the one before in line has handed over, with
// a token of its own, in one statement. It returns nil where the lease is not
// ours any more: then it is asked for as by anybody.
func (a *attempt) inherit(ctx context.Context, from *Lease) (*Lease, error) {
	a.lasts = max(a.lasts, from.ttl)
	var s *Lease
	h, err := a.hostOf(ctx, from)
	if err == nil {
		var ours bool
		s, ours, err = a.take(ctx, h, func(own context.Context) (answer, error) {
			return h.take(own, a.inheritSQL(from, a.ttl))
		})
		if ours {
			a.giveBack(h)
		}
	}
	switch {
	case s != nil:
		s.since, s.handed = from.since, from.handed+1
		return s, nil
	case err == nil, errors.Is(err, errNoRow): // it came too late and was given back, or is not ours any more
		a.mute(from)
		return nil, nil
	case busy(err) && ctx.Err() == nil && time.Since(a.start) < a.r.Wait:
		return a.inherit(ctx, from) // somebody has locked the row; it ends with the lease at the latest
	case a.ticket == nil: // it is freed in the background
		a.mute(from)
	default:
		from.ticket, a.ticket = a.ticket, nil
		_ = a.relinquish(from)
	}
	return nil, err
}

// lineUp waits for the place in front of the process's own queue.
func (a *attempt) lineUp(ctx context.Context) (*queue.Ticket, error) {
	ctx, done, err := a.waiting(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	ticket := a.queue.Succeed(ctx, a.r.Key, queue.Ends{})
	if ticket == nil {
		a.holder = a.queue.Holder(a.r.Key)
		return nil, context.Cause(ctx)
	}
	return ticket, nil
}

// waiting returns a context that ends with the wait.
func (a *attempt) waiting(ctx context.Context) (context.Context, func(), error) {
	return queue.Wait(ctx, a.r.Wait-time.Since(a.start), errWaitOver, a.r.Waiting)
}

// try asks once, on a host. It returns nil where someone else has the lease or
// has locked the row or, inTurn, goes first.
func (a *attempt) try(ctx context.Context, inTurn bool) (*Lease, error) {
	h, err := a.borrow(ctx)
	if err != nil {
		return nil, err
	}
	s, ours, err := a.take(ctx, h, func(own context.Context) (answer, error) {
		return h.take(own, a.takeSQL(a.r.Key, a.ttl, inTurn, true))
	})
	if ours {
		a.giveBack(h)
	}
	if ours && busy(err) {
		err = nil
	}
	return s, err
}

// busy reports that a take statement met another that is about to change the
// row, or somebody who has locked it.
func busy(err error) bool { return server.Locked(err) || server.Deadlock(err) }

// wait waits in the server, on a connection of its own. Where there is none to
// be had it looks now and then.
func (a *attempt) wait(ctx context.Context) (*Lease, error) {
	ctx, done, err := a.waiting(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	for ctx.Err() == nil {
		h, err := a.enterStation(ctx)
		if err != nil {
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return nil, err
		}
		var s *Lease
		if h != nil {
			s, err = a.waitOn(ctx, h)
		} else if sleep(ctx, a.pause()) {
			s, err = a.try(ctx, false)
		}
		if s != nil {
			return s, nil
		}
		if err != nil && ctx.Err() == nil {
			if a.ticket == nil || server.Number(err) != 0 || errors.Is(err, errNoRow) {
				return nil, err
			}
			sleep(ctx, a.pause()) // the connection was lost
		}
	}
	return nil, context.Cause(ctx)
}

// pause is how long to wait for somebody who wakes nobody.
func (a *attempt) pause() time.Duration {
	pause := pollEvery + rand.N(pollEvery/5)
	if a.left > 0 {
		pause = min(pause, a.left+time.Millisecond)
	}
	return pause
}

// waitOn waits on the station h, until the lease is granted, in which case h has
// become a host, or there is an error, in which case h is gone or left.
func (a *attempt) waitOn(ctx context.Context, h *host) (*Lease, error) {
	belled, beaten := false, false
	for ctx.Err() == nil {
		var err error
		switch bound := a.bound(ctx); {
		case beaten || bound <= 0: // with the bell: others wait for it behind us, and the holder has none
			if !sleep(ctx, a.pause()) {
				continue
			}
		case !belled:
			if belled, err = a.listen(ctx, h, a.r.Key, bound); err != nil {
				return nil, err
			}
		}
		// Who has just rung may be about to commit: wait for the row.
		var s *Lease
		var ours bool
		s, ours, err = a.take(ctx, h, func(own context.Context) (answer, error) {
			return h.take(own, a.takeSQL(a.r.Key, a.ttl, false, false))
		})
		if ours && server.Locked(err) {
			s, ours, err = a.takeBehind(ctx, h)
		}
		switch {
		case s != nil:
			a.open(h)
			a.giveBack(h)
			return s, nil
		case !ours:
			return nil, err
		case err != nil && !busy(err):
			a.running.Go(func() { a.leaveStation(h, a.r.Key) })
			return nil, err
		}
		beaten = belled && (a.left > 0 || server.Deadlock(err))
	}
	a.running.Go(func() { a.leaveStation(h, a.r.Key) })
	return nil, context.Cause(ctx)
}

// bound is how long to rely on the bell.
func (a *attempt) bound(ctx context.Context) time.Duration {
	bound := a.pause() // where the lease is free, and someone else has the bell
	if a.left > 0 {
		bound = min(longest-rand.N(longest/5), a.left+time.Millisecond)
	}
	if deadline, ok := ctx.Deadline(); ok { // before the client ends it, which costs the connection
		bound = min(bound, time.Until(deadline)-giveUp)
	}
	return bound
}

// takeBehind waits in a transaction behind those who have locked the row, and
// then asks, by the server's time after the wait.
func (a *attempt) takeBehind(ctx context.Context, h *host) (s *Lease, ours bool, err error) {
	deadline, _ := ctx.Deadline()
	bound := max(time.Millisecond, min(time.Until(deadline)-giveUp, max(a.r.TTL, time.Second)))
	_, err = h.exec(ctx, "SET SESSION "+rowWait(bound+time.Second))
	if err == nil {
		_, err = h.exec(ctx, "START TRANSACTION")
	}
	if err == nil {
		_, err = h.query(ctx, a.lockRowSQL(a.r.Key, bound))
	}
	if err != nil && !server.Interrupted(err) && !server.Deadlock(err) {
		a.kill(h)
		return nil, false, err
	}
	locked := err == nil
	return a.take(ctx, h, func(own context.Context) (ans answer, err error) {
		if locked {
			ans, err = h.take(own, a.takeSQL(a.r.Key, a.ttl, false, false))
		}
		if _, failed := h.exec(own, "COMMIT"); err == nil {
			err = failed
		}
		if _, failed := h.exec(own, "SET SESSION "+rowWait(time.Second)); failed != nil {
			h.c.Taint()
		}
		return ans, err
	})
}

// take asks for the lease on h, whose turn is the caller's. The driver answers
// the end of a context by closing the socket, and what the server had granted
// by then would be granted to nobody; so do runs apart from ctx. ours is false
// where it was not answered in time, or so that it may have been granted: then
// h, and the ticket, are kept in the background until it is sure that it is not.
func (a *attempt) take(ctx context.Context, h *host, do func(context.Context) (answer, error)) (s *Lease, ours bool, err error) {
	own, stop := context.WithTimeoutCause(context.WithoutCancel(ctx), min(max(a.ttl, 2*time.Second), background), errNoAnswer)
	o := &outcome{done: make(chan struct{})}
	go func() {
		defer close(o.done)
		defer stop()
		if o.answer, o.err = do(own); o.err != nil && own.Err() != nil {
			o.err = context.Cause(own)
		}
	}()
	select {
	case <-o.done:
	case <-ctx.Done():
		limit := giveUp
		if errors.Is(context.Cause(ctx), errWaitOver) {
			limit = giveUpCalmly
		}
		hurry := time.NewTimer(limit)
		defer hurry.Stop()
		select {
		case <-o.done:
		case <-hurry.C:
			a.settle(h, o)
			return nil, false, context.Cause(ctx)
		}
	}
	a.left = o.left
	switch {
	case unknown(o.err):
		a.settle(h, o)
		return nil, false, o.err
	case o.err != nil:
		return nil, true, o.err
	case o.token == 0:
		return nil, true, nil
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), errWaitOver):
		a.settle(h, o)
		return nil, false, context.Cause(ctx)
	case time.Since(o.sent) >= a.ttl-margin(a.ttl): // over before it has begun
		if err := a.undo(h, o.token); err != nil {
			a.settle(h, o)
			return nil, false, errNoAnswer
		}
		return nil, true, nil
	}
	if s, err = a.grant(h, o.answer); err != nil {
		a.settle(h, o)
		return nil, false, err
	}
	return s, true, nil
}

// outcome is what take has got, once done is closed.
type outcome struct {
	answer
	err  error
	done chan struct{}
}

// settle takes care, in the background, of an outcome that nobody waits for.
func (a *attempt) settle(h *host, o *outcome) {
	until := time.Now().Add(a.lasts)
	ticket := a.ticket
	a.ticket = nil
	a.running.Go(func() {
		defer ticket.Leave()
		<-o.done
		sure := o.err == nil || !unknown(o.err)
		if o.err == nil && o.token > 0 {
			sure = a.undo(h, o.token) == nil
		}
		clean := h.c.Clean()
		switch {
		case !clean:
			a.drop(h)
		case h.station:
			a.leaveStation(h, a.r.Key)
		default:
			a.giveBack(h)
		}
		for !sure {
			sure = a.free(h, clean) == nil || !time.Now().Before(until) || !sleep(a.ctx, pollEvery)
		}
	})
}

// undo gives back a lease that nobody wants, and its bell.
func (a *attempt) undo(h *host, token uint64) error {
	ctx, cancel := context.WithTimeout(context.Background(), background)
	defer cancel()
	_, err := h.exec(ctx, a.releaseSQL(a.r.Key, token, 0))
	return err
}

// free gives back what the lost connection of h may have been granted, or still
// be granted.
func (a *attempt) free(h *host, alive bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), background/5)
	defer cancel()
	if !alive {
		if err := a.control.KillConnection(ctx, h.c); err != nil {
			return err
		}
	}
	_, err := a.exec(ctx, a.freeSQL(a.r.Key))
	return err
}

// exec runs a statement on any host.
func (l *Locker) exec(ctx context.Context, text string) (driver.Result, error) {
	h, err := l.borrow(ctx)
	if err != nil {
		return nil, err
	}
	defer l.giveBack(h)
	return h.exec(ctx, text)
}

// Await waits until the lease on key may have been given back, for at most about
// atMost. It is for those who want the key without a lease. done lets the next
// waiter of another process go, and must be called.
func (l *Locker) Await(ctx context.Context, key string, atMost time.Duration) (done func(), err error) {
	if err := l.enter(); err != nil {
		return nil, err
	}
	h := l.await(ctx, key, atMost)
	done = sync.OnceFunc(func() {
		if h == nil {
			l.running.Done()
			return
		}
		go func() { // the caller has better things to do
			l.leaveStation(h, key)
			l.running.Done()
		}()
	})
	switch {
	case ctx.Err() != nil:
		done()
		return nil, context.Cause(ctx)
	case l.ctx.Err() != nil:
		done()
		return nil, lockerr.ErrClosed
	}
	return done, nil
}

// await returns the station that has the bell; nil where there is none.
func (l *Locker) await(ctx context.Context, key string, atMost time.Duration) *host {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(l.ctx, cancel)()
	a := &attempt{Locker: l, left: atMost}
	until := time.Now().Add(atMost)
	h, err := l.enterStation(ctx)
	if h == nil || err != nil {
		sleep(ctx, a.pause())
		return nil
	}
	belled, err := l.listen(ctx, h, key, a.bound(ctx))
	if err != nil {
		sleep(ctx, a.pause())
		return nil
	}
	if !belled {
		return h
	}
	rows, err := h.query(ctx, l.liveSQL(key))
	if err == nil && len(rows) > 0 { // the lease's own bell is lost
		a.left = time.Until(until)
		sleep(ctx, a.pause())
	}
	return h
}

// sleep waits, and reports whether ctx goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// askHolder asks who has the lease. It is a help, not a duty.
func (a *attempt) askHolder(ctx context.Context) *lockerr.Holder {
	limit := giveUpCalmly / 2
	if ctx.Err() != nil {
		limit = giveUp
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), limit)
	defer cancel()
	c, err := a.control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, a.holderSQL(a.r.Key))
	if err != nil || len(rows) == 0 {
		return nil
	}
	return keyrow.HolderOf(rows[0][0])
}

// explain turns a failure into the error that callers see.
func (a *attempt) explain(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, errWaitOver):
		err = lockerr.ErrTimeout
	case ctx.Err() != nil:
		err = lockerr.With(lockerr.ErrTimeout, ctx.Err())
	case server.Refused(err):
		err = lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("the server takes no writes, so nothing can be locked on it: %w", err))
	case server.Denied(err):
		err = fmt.Errorf("%w; the account needs SELECT, INSERT, UPDATE on the lock table", err)
	}
	if a.holder == nil && (errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout)) {
		a.holder = a.askHolder(ctx)
	}
	failed := failure("lock", a.r.Key, err)
	failed.Holder, failed.Waited = a.holder, time.Since(a.start)
	return failed
}

// failure is the error that callers see. It is never driver.ErrBadConn, which
// database/sql would take for the failure of a connection of its own.
func failure(op, key string, err error) *lockerr.Error {
	if errors.Is(err, driver.ErrBadConn) {
		err = errors.New(err.Error())
	}
	return &lockerr.Error{Op: op, Key: key, Strategy: lockctx.StrategyLease, Err: err}
}
