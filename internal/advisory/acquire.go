package advisory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

var terms = strategy.Terms{
	Strategy: hint.StrategyAdvisory,
	Limits:   strategy.Limits{GiveUp: 20 * time.Millisecond, Calmly: 20 * time.Millisecond},
}

// Request says which lock to take, and how long to queue for it.
type Request struct {
	Key  string
	Wait time.Duration // 0 fails at once if another caller holds the key
	// Waiting is called before each wait; nil for none.
	Waiting strategy.Waiting
	// Lends lends the session of a transaction that the lock ends with; nil for none.
	Lends *strategy.Lender
	// Lost is called once, on a goroutine of its own, when the lock may be lost or the
	// Locker is closed. It may be nil.
	Lost func(error)
}

// Acquire acquires a lock. After an error the lock is not held. If a statement was not answered in time, Acquire
// releases in the background the lock that it may have acquired.
func (l *Locker) Acquire(ctx context.Context, r Request) (*Grant, error) {
	ctx = purpose.Named(ctx, purpose.Take, hint.StrategyAdvisory, r.Key)
	a := &attempt{
		Attempt: strategy.Attempt{Key: r.Key, Wait: r.Wait, Waiting: r.Waiting, Short: l.short, Start: time.Now()},
		l:       l, r: r, name: Name(l.cfg.Namespace, r.Key), asked: purpose.AskedIn(ctx),
	}
	if err := l.running.Enter(); err != nil {
		return nil, a.Explain(ctx, terms, err, a.askHolder)
	}
	defer l.running.Done()
	lock, err := a.acquire(ctx)
	if err != nil {
		return nil, a.Explain(ctx, terms, err, a.askHolder)
	}
	return lock, nil
}

// attempt is one call of Acquire.
type attempt struct {
	strategy.Attempt
	l     *Locker
	r     Request
	name  string
	polls bool // the attempt is counted as a poller
	asked purpose.Asked
	calm  time.Duration // the longest wait that a connection survives, learned when one broke; 0 if it is not known
}

// errInterrupted is for a GET_LOCK that has returned NULL: a KILL is no sign that somebody has the lock.
var errInterrupted = strategy.NoAnswer(errors.New("it interrupted the lock statement"))

// allowed refuses to work on a cluster, on which named locks do not exclude.
func (l *Locker) allowed() error {
	topology := l.cfg.Info.Topology
	if l.cfg.Info.SinglePrimary {
		topology = "Group Replication, where a failover frees them"
	}
	switch {
	case l.cfg.Unsafe:
		return nil
	case topology == "":
		return l.cfg.Info.AdvisoryLocks()
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"named locks are local to a node, so they do not exclude on %s;"+
			" use a lease, or lockUnsafe=allow, for an application that never leaves one node", topology))
}

// acquire does the work of Acquire. Without a lock the caller leaves the queue.
func (a *attempt) acquire(ctx context.Context) (lock *Grant, err error) {
	defer func() {
		if lock == nil {
			a.Ticket.Leave()
		}
	}()
	if err := a.l.allowed(); err != nil {
		return nil, err
	}
	if err := a.Enqueue(ctx, a.l.cfg.Queue, []queue.Key{{Name: a.r.Key}}, a.l, a.l.running.Ctx.Done()); err != nil {
		return nil, err
	}
	handed, _ := a.Ticket.HandedOver().(*Grant)
	yields := false
	switch {
	case handed == nil:
	case !handed.turnOver() || ctx.Err() != nil || time.Since(a.Start) >= a.Wait:
		if lock := a.takeHandoff(handed); lock != nil {
			return a.granted(ctx, lock)
		}
	default:
		if lc := a.yieldInPlace(handed); lc != nil {
			return a.wait(ctx, lc)
		}
		yields = true
		if r := (&request{lock: handed}); !handed.conn.do(ctx, r) {
			a.leaveLate(r)
			return nil, context.Cause(ctx)
		}
	}
	lock, refused, err := a.takeOnSession(ctx)
	if lock != nil || err != nil {
		return lock, err
	}
	if !refused {
		lock, err = a.try(ctx)
	}
	switch {
	case err != nil:
		return nil, err
	case lock != nil:
		lock.alone = yields
		return a.granted(ctx, lock)
	case a.Wait == 0:
		return nil, lockerr.ErrLocked
	}
	return a.wait(ctx, nil)
}

// lock returns the Grant of the attempt on lc.
func (a *attempt) lock(lc *lockConn) *Grant {
	return &Grant{locker: a.l, key: a.r.Key, name: a.name, ticket: a.Ticket, conn: lc, since: time.Now(), asked: a.asked}
}

// granted returns a lock that its connection holds now, unless the caller has gone.
func (a *attempt) granted(ctx context.Context, lock *Grant) (*Grant, error) {
	ended := ctx.Err() != nil
	lock.conn.loseIfOverdue() // by the clock the lock may be lost
	a.l.mu.Lock()
	err := lock.err
	if err == nil && !ended {
		lock.lost = a.r.Lost
	}
	a.l.mu.Unlock()
	if errors.Is(err, lockerr.ErrLost) { // the caller never had it
		return nil, lockerr.With(lockerr.ErrNoAnswer, errors.New("the lock was gone before the caller had it: "+err.Error()))
	}
	if err != nil {
		return nil, err
	}
	lock.ticket.Granted(lock.conn.holder)
	if ended {
		a.Ticket = nil
		a.l.running.Go(func() { _ = lock.Release() }) // the caller is gone
		return nil, context.Cause(ctx)
	}
	return lock, nil
}

// try asks for the lock once, on a lock connection. It returns nil if another process has the lock.
func (a *attempt) try(ctx context.Context) (*Grant, error) {
	for again := 0; ; {
		lc, err := a.l.pickConn(ctx)
		if server.Broken(err) && again < 3 && ctx.Err() == nil {
			again++
			continue
		}
		if err != nil {
			return nil, err
		}
		a.Ticket.Asks()
		r := &request{lock: a.lock(lc), acquire: true}
		sent := time.Now()
		if !lc.do(ctx, r) {
			a.leaveLate(r)
			return nil, context.Cause(ctx)
		}
		switch {
		case r.granted:
			return r.lock, nil
		case errors.Is(r.err, errRetired): // nothing was sent
		case r.err == nil:
			a.Heard.Store(true)
			return nil, nil
		case server.Broken(r.err) && time.Since(sent) > pool.AnswerTime*9/10: // the limit for the answer has broken the connection
			return nil, server.Silence{For: time.Since(sent)}
		case again < 3 && ctx.Err() == nil && lc.mayResend(r.err):
			again++
		default:
			return nil, r.err
		}
	}
}

// mayResend reports whether a request that failed with err may be sent again, on another connection. If the connection
// was lost, the lock that it may have been granted was lost with it.
func (lc *lockConn) mayResend(err error) bool {
	return !errors.Is(err, lockerr.ErrUnsafe) && !errors.Is(err, lockerr.ErrClosed) &&
		(server.Number(err) == 0 || server.Interrupted(err) || server.Gone(err, lc.c.Conn))
}

// leaveLate hands r, which was not answered in time, and the place in the queue over to releaseLate.
func (a *attempt) leaveLate(r *request) {
	ticket := a.Ticket
	a.Ticket = nil
	a.l.releaseLate(r, ticket)
}

// releaseLate releases, in the background, a lock that is granted to r after the caller of r has gone. ticket is the
// caller's place in the queue, or nil.
func (l *Locker) releaseLate(r *request, ticket *queue.Ticket) {
	l.running.Go(func() {
		defer ticket.Leave()
		<-r.answered
		if r.granted {
			r.lock.conn.do(context.Background(), &request{lock: r.lock})
		}
	})
}

// askHolder asks the server who holds the lock.
func (a *attempt) askHolder(ctx context.Context) *lockerr.Holder { return a.l.holderOf(ctx, a.name) }
