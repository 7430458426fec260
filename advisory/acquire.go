package advisory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

var terms = strategy.Terms{
	Strategy: hint.StrategyAdvisory,
	Limits:   strategy.Limits{GiveUp: 20 * time.Millisecond, Calmly: 20 * time.Millisecond},
}

// Request says which lock, and how long to queue for it.
type Request struct {
	Key  string
	Wait time.Duration // 0 fails at once if another caller holds the key
	// Waiting is what the caller is asked before it waits; nil for nobody to ask.
	Waiting strategy.Waiting
	// Begin is the transaction that may begin while the lock is asked for; nil for none.
	Begin *strategy.Beginning
	// Lost is called once, on a goroutine of its own, when the lock may be lost or the
	// Locker is closed. It may be nil.
	Lost func(error)
}

// Acquire acquires a lock. After an error the lock is not held; driver.ErrBadConn is about the
// connection of r.Begin, and means that the caller may try another one. If a statement was not
// answered in time, Acquire releases in the background what it may have acquired.
func (l *Locker) Acquire(ctx context.Context, r Request) (*Lock, error) {
	ctx = purpose.Named(ctx, purpose.Take, hint.StrategyAdvisory, r.Key)
	a := &attempt{
		Attempt: strategy.Attempt{Key: r.Key, Wait: r.Wait, Waiting: r.Waiting, Start: time.Now()},
		Locker:  l, r: r, name: Name(l.cfg.Namespace, r.Key), asked: purpose.AskedIn(ctx),
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
	*Locker
	r     Request
	name  string
	polls bool // it is counted as a poller
	asked purpose.Asked
	calm  time.Duration // the longest wait that connections survive, learned when one broke; 0 is unknown
}

var errInterrupted = lockerr.With(lockerr.ErrTimeout, errors.New("the lock statement was interrupted"))

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
		"named locks are local to a node, so they do not exclude on %s; use a lease, or lockUnsafe=allow, for an application that never leaves one node", topology))
}

// acquire is Acquire. Without a lock the caller is in the queue no more.
func (a *attempt) acquire(ctx context.Context) (lock *Lock, err error) {
	defer func() {
		if lock == nil {
			a.Ticket.Leave()
		}
	}()
	if err := a.allowed(); err != nil {
		return nil, err
	}
	if err := a.Enqueue(ctx, a.cfg.Queue, []queue.Key{{Name: a.r.Key}}, a.Locker, a.running.Ctx.Done()); err != nil {
		return nil, err
	}
	handed, _ := a.Ticket.HandedOver().(*Lock)
	switch {
	case handed == nil:
	case !handed.turnOver() || ctx.Err() != nil || time.Since(a.Start) >= a.Wait:
		if lock := a.takeHandoff(handed); lock != nil {
			return a.granted(ctx, lock)
		}
		handed = nil
	case handed.contended:
		if k := a.yieldInPlace(handed); k != nil {
			return a.wait(ctx, k)
		}
	}
	lock, err = a.tryBegin(ctx, handed)
	switch {
	case err != nil:
		return nil, err
	case lock != nil && lock.txConn != nil:
		return lock, nil
	case lock != nil:
		return a.granted(ctx, lock)
	case a.Wait == 0:
		return nil, lockerr.ErrLocked
	}
	return a.wait(ctx, nil)
}

// lock is what the attempt gets when k has the lock.
func (a *attempt) lock(k *lockConn) *Lock {
	return &Lock{l: a.Locker, key: a.r.Key, name: a.name, ticket: a.Ticket, conn: k, since: time.Now(), asked: a.asked}
}

// granted returns a lock that its connection holds now.
func (a *attempt) granted(ctx context.Context, lock *Lock) (*Lock, error) {
	ended := ctx.Err() != nil
	lock.conn.loseIfOverdue() // it may be lost by the clock
	a.mu.Lock()
	err := lock.err
	if err == nil && !ended {
		lock.lost = a.r.Lost
	}
	a.mu.Unlock()
	if err != nil { // lost meanwhile
		return nil, err
	}
	lock.ticket.Granted(lock.conn.holder)
	if ended {
		a.Ticket = nil
		a.running.Go(func() { _ = lock.Release() }) // the caller is gone
		return nil, context.Cause(ctx)
	}
	return lock, nil
}

// try asks for the lock once, on a lock connection. It returns nil if another process
// has the lock. If over is not nil, it is the lock of this process whose turn is over:
// the same statement releases it first, to processes that wait for it. If there are
// pollers, the statement leaves it free for them. beside, unless it is nil, is the transaction
// that may begin beside the first statement.
func (a *attempt) try(ctx context.Context, over *Lock, beside *strategy.Beginning) (*Lock, error) {
	var paused time.Time
	for again := 0; ; {
		var r *request
		if over != nil {
			r = &request{lock: a.lock(over.conn), acquire: true, yields: true}
			over, paused = nil, over.paused
		} else {
			k, err := a.pickConn(ctx)
			if server.Broken(err) && again < 3 && ctx.Err() == nil {
				again++
				continue
			}
			if err != nil {
				return nil, err
			}
			r = &request{lock: a.lock(k), acquire: true}
		}
		k, b := r.lock.conn, beside
		beside = nil // what does not come off is not tried again
		sent := time.Now()
		if !a.sendBeside(ctx, r, b) {
			return nil, context.Cause(ctx)
		}
		switch {
		case r.granted:
			r.lock.alone, r.lock.paused = r.yields, paused
			return r.lock, nil
		case errors.Is(r.err, errLeftToPoller): // by now it may have had the lock
			if time.Since(paused) > pauseEvery {
				strategy.Sleep(ctx, pause)
				paused = time.Now()
			}
		case errors.Is(r.err, errRetired): // nothing was sent
		case r.err == nil:
			a.Heard.Store(true)
			return nil, nil
		case server.Broken(r.err) && time.Since(sent) > pool.AnswerTime*9/10: // by the limit for its answer
			return nil, context.DeadlineExceeded
		case again < 3 && ctx.Err() == nil && k.mayResend(r.err):
			again++
		default:
			return nil, r.err
		}
	}
}

// mayResend reports whether a request that failed with err may be sent again, on another
// connection. A lost connection takes with it what it was granted.
func (k *lockConn) mayResend(err error) bool {
	return !errors.Is(err, lockerr.ErrUnsafe) && !errors.Is(err, lockerr.ErrClosed) &&
		(server.Number(err) == 0 || server.Interrupted(err) || server.Gone(err, k.c.Conn))
}

// releaseLate releases, in the background, a lock that r is granted after its caller has gone.
// ticket is the caller's place in the queue, or nil.
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
func (a *attempt) askHolder(ctx context.Context) *lockerr.Holder { return a.holderOf(ctx, a.name) }
