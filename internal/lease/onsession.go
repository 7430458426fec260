package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// A lease that ends with its transaction is taken on the session of the transaction, which holds its wake-up lock
// (Lease.session): the statement that takes it goes out with the COMMIT that it needs, and the COMMIT of the
// transaction releases both. So the next caller of the process waits for nothing of it. Such a lease is not handed over: it
// would go on without its wake-up lock. Renewals are sent on lock connections.
//
// The session is asked once, by a caller that nobody of its process is in front of. If somebody has the lease, or the
// session does not do, the caller gives the session back, and goes on with lock connections. So it does for a lease that
// stays after its release (MinHold), which no COMMIT releases.
//
// A waiter that finds the lease run out and its holder silent closes the connection with the wake-up lock
// (freeWakeUp): here the holder's transaction goes with it, which could not commit any more.

// askOnSession takes the lease on the session that the caller lends, if that is suitable. Else ask is how to go on; nil
// after an error.
func (a *attempt) askOnSession(ctx context.Context) (s *Lease, ask func(context.Context) (*Lease, error), err error) {
	s, refused, err := a.takeOnSession(ctx)
	switch {
	case s != nil || err != nil:
	case !refused:
		ask = func(ctx context.Context) (*Lease, error) { return a.try(ctx, a.Wait > 0) }
	case a.Wait == 0:
		err = lockerr.ErrLocked
	default:
		ask = a.wait
	}
	return s, ask, err
}

// takeOnSession takes the lease on the session that the caller lends. refused reports that somebody has the lease, for
// which a.left is the time left. Without a lease the session is given back.
func (a *attempt) takeOnSession(ctx context.Context) (s *Lease, refused bool, err error) {
	if a.r.Lends == nil || !a.First || a.r.MinHold > 0 || !a.grantsOnSessions() {
		return nil, false, nil
	}
	c, err := a.r.Lends.Get(ctx)
	if err != nil { // the caller says why, when it needs a session
		return nil, false, nil
	}
	h := &lockConn{c: c, lent: true}
	o := &outcome{done: make(chan struct{})}
	close(o.done)
	a.Ticket.Asks()
	maybe := false
	if err = c.Identify(ctx); err == nil { // else what the session is granted for nobody could not be ended
		own, cancel := server.Within(ctx, min(max(a.ttl, answerLimit), background))
		o.answer, maybe, o.err = h.takeAndCommit(own, a)
		cancel()
		a.Heard.From(o.err)
	} else {
		o.err = driver.ErrBadConn
	}
	switch {
	case o.err == nil && o.token == 0:
		a.Heard.Store(true)
		a.left, refused = o.left, o.left > 0
	case o.err == nil && ctx.Err() == nil && !o.late(a.ttl):
		if s, o.err = a.grant(h, a.Ticket, o.answer); s != nil {
			return s, false, nil
		}
	case o.err == nil:
		o.err = lockerr.ErrNoAnswer
	case !maybe: // the server says that it has not granted it
		c.RollBackUnknown(ctx, pool.AnswerTime)
		if !server.Locked(o.err) && !server.ReadOnlyTransactions(o.err) { // it may have got as far as the wake-up lock
			c.Taint()
		}
		o.err = nil
	}
	if o.err != nil {
		c.Taint()
	}
	a.r.Lends.Put()
	if o.err == nil {
		return nil, refused, nil
	}
	h.gone = true
	if ctx.Err() == nil && a.freeKey(ctx, h, false) == nil {
		return nil, false, nil
	}
	a.handleLate(h, o)
	return nil, false, o.err
}

// grantsOnSessions reports whether sessions of transactions take leases. The nodes of a cluster may refuse the COMMIT.
func (l *Locker) grantsOnSessions() bool {
	return l.cfg.Info.SkipLocked && l.wakes && l.cfg.Info.Topology == ""
}

// takeAndCommit takes the lease on a session, without an autocommit, where nobody has it. maybe: after the error it may
// be granted. The id that the statement tells is 0 if the key has no row, so that of an earlier statement is taken away.
func (lc *lockConn) takeAndCommit(ctx context.Context, a *attempt) (ans answer, maybe bool, err error) {
	take := a.takeBy(a.texts.takeOnSession, a.r.Key, a.ttl, a.Wait > 0)
	if !lc.c.Packs(2) {
		if ans, err = lc.ask(ctx, take); err != nil {
			return ans, unknown(err), err
		}
		_, err = lc.exec(ctx, "COMMIT")
		return ans, true, err
	}
	ans.sent = time.Now()
	answers, err := lc.send(ctx, "DO LAST_INSERT_ID(0)", take.String(), server.Ask("LAST_INSERT_ID()"), "COMMIT")
	if err != nil {
		return ans, len(answers) > 0 || unknown(err), err
	}
	if len(answers[2]) != 1 {
		return ans, true, server.ErrAnswers
	}
	id, err := strconv.ParseInt(answers[2][0][0], 10, 64)
	if err == nil {
		err = ans.read(id)
	}
	return ans, !errors.Is(err, keyrow.ErrNoRow), err
}

// Detach takes the wake-up lock off the session of the transaction, once that has ended, unless its COMMIT has released
// it. The caller has the turn of the session. After an error the session must be closed.
func (l *Lease) Detach() (err error) {
	c := l.session
	if c == nil {
		return nil
	}
	l.session = nil
	if c.Clean() {
		ctx, cancel := server.Within(releasing(l.key), background)
		defer cancel()
		_, err = server.Query(ctx, c.Conn, l.wakesSQL())
	}
	return err
}

// wakesSQL gives the wake-up lock back on the session that has it.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ RELEASE_LOCK(_utf8mb4'mysqllock-lease-…') LIMIT 1
func (l *Lease) wakesSQL() string {
	return server.Ask("RELEASE_LOCK(" + lockname.Literal(lockname.OfWakeUp(l.locker.cfg.Namespace, l.key)) + ")")
}
