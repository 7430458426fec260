package advisory

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// strategy is what errors call these locks.
const strategy = "advisory"

// Request says which lock, and how long to queue for it.
type Request struct {
	Key  string
	Wait time.Duration // 0 fails at once where someone else has the key
	// Waiting is called before the caller begins to wait. It may refuse, and it
	// may end the wait through the context that it returns; done follows. nil is
	// to wait with the caller's context as it is.
	Waiting func(context.Context) (ctx context.Context, done func(), err error)
	// Lost is called once, on a goroutine of its own, when the lock may be lost,
	// or the Locker is closed. nil is nobody to tell.
	Lost func(error)
}

// Acquire takes a lock. After an error it is not held, and what an unanswered
// statement may have taken is given back in the background.
func (l *Locker) Acquire(ctx context.Context, r Request) (*Lock, error) {
	a := &attempt{Locker: l, r: r, name: Name(l.namespace, r.Key), start: time.Now()}
	if err := l.enter(); err != nil {
		return nil, a.explain(ctx, err)
	}
	defer l.running.Done()
	lock, err := a.acquire(ctx)
	if err != nil {
		a.ticket.Leave()
		return nil, a.explain(ctx, err)
	}
	return lock, nil
}

// attempt is one call of Acquire.
type attempt struct {
	*Locker
	r      Request
	name   string
	start  time.Time
	ticket *queue.Ticket // nil before it is ours, and once it is somebody else's
	holder *lockerr.Holder
	wants  bool          // it is counted as one who has no station; guarded by Locker.mu
	calm   time.Duration // for how long a connection may be waited on, as one has shown by breaking; 0 is unknown
}

var (
	errWaitOver    = errors.New("the wait is over")
	errInterrupted = errors.New("the lock statement was interrupted")
)

// allowed refuses where named locks do not exclude.
func (l *Locker) allowed() error {
	topology := l.info.Topology
	if l.info.SinglePrimary {
		topology = "Group Replication, where a failover frees them"
	}
	if topology == "" || l.unsafe {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"named locks are local to a node, so they do not exclude on %s; use a lease, or lockUnsafe=allow, for an application that never leaves one node", topology))
}

func (a *attempt) acquire(ctx context.Context) (*Lock, error) {
	if err := a.allowed(); err != nil {
		return nil, err
	}
	keys := []string{a.r.Key}
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
	handed, _ := ticket.Baton().(*Lock)
	switch {
	case handed == nil:
	case !handed.turnOver() || ctx.Err() != nil || time.Since(a.start) >= a.r.Wait:
		if lock := a.inherit(handed); lock != nil {
			return a.granted(ctx, lock)
		}
		handed = nil
	case handed.rivals:
		if k := a.yield(handed); k != nil {
			return a.wait(ctx, k)
		}
	}
	lock, err := a.try(ctx, handed)
	switch {
	case err != nil:
		return nil, err
	case lock != nil:
		return a.granted(ctx, lock)
	case a.r.Wait == 0:
		return nil, lockerr.ErrLocked
	}
	return a.wait(ctx, nil)
}

// lineUp waits for the place in front of the process's own queue.
func (a *attempt) lineUp(ctx context.Context) (*queue.Ticket, error) {
	ctx, left, done, err := a.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	over := time.NewTimer(left)
	defer over.Stop()
	if ticket := a.queue.Succeed(ctx, a.r.Key, queue.Ends{Over: over.C, Closed: a.ctx.Done()}); ticket != nil {
		return ticket, nil
	}
	a.holder = a.queue.Holder(a.r.Key)
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case a.ctx.Err() != nil:
		return nil, lockerr.ErrClosed
	}
	return nil, errWaitOver
}

// begin begins to wait, for what is left of the wait; done ends it.
func (a *attempt) begin(ctx context.Context) (_ context.Context, left time.Duration, done func(), err error) {
	left = a.r.Wait - time.Since(a.start)
	ctx, done, err = queue.Begin(ctx, left, errWaitOver, a.r.Waiting)
	return ctx, left, done, err
}

// waiting is begin with a context that also ends with the wait, or with the Locker.
func (a *attempt) waiting(ctx context.Context) (context.Context, func(), error) {
	ctx, left, done, err := a.begin(ctx)
	if err != nil {
		return nil, nil, err
	}
	open, end := context.WithCancelCause(ctx)
	over := time.AfterFunc(left, func() { end(errWaitOver) })
	stop := context.AfterFunc(a.ctx, func() { end(lockerr.ErrClosed) })
	return open, func() { stop(); over.Stop(); end(nil); done() }, nil
}

// lock is what the attempt gets once it is granted.
func (a *attempt) lock(k *carrier) *Lock {
	return &Lock{l: a.Locker, key: a.r.Key, name: a.name, ticket: a.ticket, carrier: k, since: time.Now()}
}

// granted tells the caller of a lock that is on its carrier by now.
func (a *attempt) granted(ctx context.Context, lock *Lock) (*Lock, error) {
	ended := ctx.Err() != nil
	lock.carrier.look() // what is lost by the clock, too
	a.mu.Lock()
	err := lock.err
	if err == nil && !ended {
		lock.lost = a.r.Lost
	}
	a.mu.Unlock()
	if err != nil { // lost since
		return nil, err
	}
	lock.ticket.Granted(lock.carrier.holder)
	if ended {
		a.ticket = nil
		a.running.Go(func() { _ = lock.Release() }) // nobody is left to be told
		return nil, context.Cause(ctx)
	}
	return lock, nil
}

// try asks once, on a carrier. It returns nil where someone else has the lock. One
// whose turn is over is given back by the same statement, to those who wait for it
// in other processes; and where some only ask now and then, it is left free, for
// them.
func (a *attempt) try(ctx context.Context, over *Lock) (*Lock, error) {
	var paused time.Time
	for again := 0; ; {
		var r *request
		if over != nil {
			r = &request{lock: a.lock(over.carrier), take: true, yields: true}
			over, paused = nil, over.paused
		} else {
			k, err := a.place(ctx)
			if err != nil {
				return nil, err
			}
			r = &request{lock: a.lock(k), take: true}
		}
		k := r.lock.carrier
		if !k.do(ctx, r) {
			ticket := a.ticket
			a.ticket = nil
			a.settle(r, ticket)
			return nil, context.Cause(ctx)
		}
		switch {
		case r.granted:
			r.lock.alone, r.lock.paused = r.yields, paused
			return r.lock, nil
		case errors.Is(r.err, errWished): // by now they may have had it
			if time.Since(paused) > pauseEvery {
				sleep(ctx, pause)
				paused = time.Now()
			}
		case errors.Is(r.err, errRetired): // it was sent nowhere
		case r.err == nil:
			return nil, nil
		case again < 3 && ctx.Err() == nil && !errors.Is(r.err, lockerr.ErrUnsafe) && !errors.Is(r.err, lockerr.ErrClosed) &&
			(server.Number(r.err) == 0 || server.Interrupted(r.err) || server.Gone(r.err, k.c.Conn)):
			again++ // what a lost carrier may have been granted goes with it
		default:
			return nil, r.err
		}
	}
}

// settle gives back, in the background, what r is granted when nobody waits for
// it any more; ticket is the place in line that it has, or nil.
func (l *Locker) settle(r *request, ticket *queue.Ticket) {
	l.running.Go(func() {
		defer ticket.Leave()
		<-r.answered
		if r.granted {
			r.lock.carrier.do(context.Background(), &request{lock: r.lock})
		}
	})
}

// wait waits in the server, on a connection that has nothing else: the station k
// first, if there is one. Where there is none to be had it asks now and then.
func (a *attempt) wait(ctx context.Context, k *carrier) (*Lock, error) {
	open, done, err := a.waiting(ctx)
	if err != nil {
		if k != nil {
			a.leave(k, true)
			a.leaveStation()
		}
		return nil, err
	}
	defer done()
	var wish *Lock
	defer func() { a.withdraw(wish) }()
	defer a.want(false)
	for k != nil || open.Err() == nil {
		var lock *Lock
		if k == nil {
			k = a.station(open)
		}
		if k != nil {
			lock, err = a.waitOn(open, k)
			if k = nil; lock == nil && err == nil {
				sleep(open, untilNext(wish))
			}
		} else if wish = a.wish(open, wish); sleep(open, untilNext(wish)) {
			lock, err = a.try(open, nil)
		}
		if err != nil {
			return nil, err
		}
		if lock != nil {
			return a.granted(ctx, lock)
		}
	}
	return nil, context.Cause(open)
}

// wish takes the lock by which others know that somebody asks for this one only now
// and then. It is a help, not a duty: nil where it is not to be had, as where
// somebody else has it, who asks, too.
func (a *attempt) wish(ctx context.Context, there *Lock) *Lock {
	if there != nil && there.Err() == nil {
		return there
	}
	k, err := a.place(ctx)
	if err != nil {
		return nil
	}
	r := &request{lock: &Lock{l: a.Locker, key: a.r.Key, name: lockname.OfWish(a.namespace, a.r.Key), carrier: k}, take: true}
	if !k.do(ctx, r) {
		a.settle(r, nil)
		return nil
	}
	if !r.granted {
		return nil
	}
	return r.lock
}

// withdraw gives back what wish has taken, which nobody need wait for.
func (a *attempt) withdraw(wish *Lock) {
	if wish != nil {
		a.running.Go(func() { wish.carrier.do(context.Background(), &request{lock: wish}) })
	}
}

// station returns a connection on which to wait; nil where there is none for a
// while, since some are left for those who do not wait.
func (a *attempt) station(ctx context.Context) *carrier {
	l := a.Locker
	l.mu.Lock()
	free := l.spare(len(l.carriers)) && l.conns.Ready()
	if free {
		l.stations++
	}
	l.mu.Unlock()
	if a.want(!free); !free {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, pollEvery)
	defer cancel()
	k, err := l.connect(ctx)
	if err != nil {
		l.leaveStation()
		return nil // polling shows why
	}
	return k
}

// want counts the attempt as one who has no station, or no longer.
func (a *attempt) want(wants bool) {
	l := a.Locker
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case wants && !a.wants:
		l.wanting++
	case !wants && a.wants:
		l.wanting--
	}
	a.wants = wants
}

// wanted reports whether others have no station, so that who has one should not keep
// it for long.
func (l *Locker) wanted() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.wanting > 0
}

// spare reports whether one more connection may be waited on beside so many
// carriers. l.mu is the caller's.
func (l *Locker) spare(carriers int) bool {
	return l.stations+max(l.enough, carriers) < l.conns.Stat().Max
}

func (l *Locker) leaveStation() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stations--
}

// waitOn waits on k until the lock is granted, which makes k a carrier. Without
// it, k is gone; where there is no error either, it is not the time for another.
func (a *attempt) waitOn(ctx context.Context, k *carrier) (*Lock, error) {
	defer a.leaveStation()
	deadline := a.start.Add(a.r.Wait)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	for {
		bound := min(a.ttl, time.Until(deadline)-haste)
		if bound <= 0 {
			a.leave(k, true)
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		if a.readTimeout > 0 {
			bound = min(bound, a.readTimeout/2)
		}
		if a.calm > 0 {
			bound = min(bound, a.calm)
		}
		if a.wanted() {
			bound = min(bound, pollEvery)
		}
		asked := time.Now()
		answer, err := k.wait(ctx, a.name, bound)
		switch {
		case ctx.Err() != nil: // the driver may have closed the connection, whatever was answered
			a.leave(k, !k.broken(err))
			return nil, context.Cause(ctx)
		case answer == alone || answer == inTurn:
			lock := a.lock(k)
			lock.rivals = answer == inTurn
			a.mu.Lock()
			defer a.mu.Unlock()
			k.busy, k.err = false, nil // where it was a carrier before
			k.holds[lock.name] = lock
			a.adopt(k)
			if k.err != nil {
				return nil, k.err
			}
			return lock, nil
		case err == nil || server.Interrupted(err):
			if a.wanted() {
				a.leave(k, true)
				return nil, nil
			}
			continue
		}
		a.leave(k, !k.broken(err))
		a.calm = max(pollEvery, time.Since(asked)/2)
		if !k.broken(err) || errors.Is(err, lockerr.ErrUnsafe) {
			return nil, err
		}
		return nil, nil
	}
}

// wait waits for the lock in the server. An answer is not believed without another
// where the connection may have ended since: it comes late, as to a process that was
// stopped, or the end of ctx has closed it.
func (k *carrier) wait(ctx context.Context, name string, bound time.Duration) (answer string, err error) {
	ctx, cancel := context.WithTimeout(ctx, bound+slack)
	defer cancel()
	answer, err = k.ask(ctx, k.waitSQL(name, bound))
	if err == nil && (k.silence() > k.l.limit/2 || !k.c.Valid()) {
		if _, err = k.ask(ctx, k.pingSQL()); err != nil {
			return "", err
		}
	}
	return answer, err
}

// leave gives k back: to the pool, where the server has answered what ran on it.
func (l *Locker) leave(k *carrier, answered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if k.busy, k.err = true, errScrapped; answered {
		k.err = errRetired
	}
	k.dispose()
}

// untilNext is how long somebody waits until it asks again, with a wish or without.
func untilNext(wish *Lock) time.Duration {
	if wish != nil {
		return wishEvery
	}
	return pollEvery + rand.N(pollEvery/5)
}

// sleep waits for so long, and reports whether ctx goes on.
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

// askHolder asks who has the lock. It is a help, not a duty.
func (a *attempt) askHolder(ctx context.Context) *lockerr.Holder {
	limit := askCalmly
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
	programs := !a.info.MariaDB && !a.blind.Load()
	rows, err := server.Query(ctx, c.Conn, holderSQL(a.name, programs))
	if programs && server.Denied(err) {
		a.blind.Store(true)
		rows, err = server.Query(ctx, c.Conn, holderSQL(a.name, false))
	}
	if err != nil || len(rows) == 0 {
		return nil
	}
	h := &lockerr.Holder{User: rows[0][1], Host: rows[0][2], Program: rows[0][3]}
	h.ConnectionID, _ = strconv.ParseUint(rows[0][0], 10, 64)
	return h
}

// explain turns a failure into the error that callers see.
func (a *attempt) explain(ctx context.Context, err error) error {
	const deadlock = 3058
	switch {
	case errors.Is(err, errWaitOver):
		err = lockerr.ErrTimeout
	case ctx.Err() != nil:
		err = lockerr.With(lockerr.ErrTimeout, ctx.Err())
	case server.Number(err) == deadlock || server.Deadlock(err):
		err = lockerr.With(lockerr.ErrDeadlock, err)
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
	return &lockerr.Error{Op: op, Key: key, Strategy: strategy, Err: err}
}
