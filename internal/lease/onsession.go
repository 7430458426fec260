package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// A lease that ends with its transaction is taken on the session of that transaction, which also has the lease's wake-up
// lock ([Grant].session). The statement that takes the lease goes out in one text with the COMMIT that it needs, and the
// COMMIT of the transaction releases the lease and the wake-up lock. So the next caller of the process waits for neither.
// Such a lease is not handed over, since it would go on without its wake-up lock. Its renewals are sent on lock connections.
//
// A caller asks on the session once, and only if nobody of its process is in front of it. If somebody has the lease, or the
// session is not suitable, the caller gives the session back, and goes on with lock connections. The same goes for a lease
// that stays after its release (MinHold), since no COMMIT releases that.
//
// A waiter that finds the lease run out and its holder silent closes the connection with the wake-up lock (freeWakeUp). With
// that session it ends the holder's transaction, which could not commit any more.

// takeOnSession takes the lease on the session that the caller lends, if that is suitable. taken: somebody has the lease;
// a.leaseLeft is how long that lasts. Without a lease the session is given back.
func (a *attempt) takeOnSession(ctx context.Context) (g *Grant, taken bool, err error) {
	if a.r.Lends == nil || !a.First || a.r.MinHold > 0 || !a.l.grantsOnSessions() {
		return nil, false, nil
	}
	c, err := a.r.Lends.Get(ctx)
	if err != nil { // the caller says why, when it needs a session
		return nil, false, nil
	}
	lc := &lockConn{c: c, lent: true}
	o := &outcome{done: make(chan struct{})}
	close(o.done)
	a.Ticket.Asks()
	maybe := false
	if err = c.Identify(ctx); err == nil { // without the id, a session whose caller has gone could not be ended
		own, cancel := server.Within(ctx, min(max(a.ttl, answerLimit), background))
		o.answer, maybe, o.err = lc.takeAndCommit(own, a)
		cancel()
		a.Heard.From(o.err)
	} else {
		o.err = driver.ErrBadConn
	}
	switch {
	case o.err == nil && o.token == 0:
		a.Heard.Store(true)
		a.leaseLeft, taken = o.leaseLeft, o.leaseLeft > 0
	case o.err == nil && ctx.Err() == nil && !o.late(a.ttl):
		if g, o.err = a.grant(lc, a.Ticket, o.answer); g != nil {
			return g, false, nil
		}
	case o.err == nil:
		o.err = lockerr.ErrNoAnswer
	case !maybe: // the server says that it has not granted the lease
		c.RollBackUnknown(ctx, pool.AnswerTime)
		if !server.Locked(o.err) && !server.ReadOnlyTransactions(o.err) { // the statement may have got as far as the wake-up lock
			c.Taint()
		}
		o.err = nil
	}
	if o.err != nil {
		c.Taint()
	}
	a.r.Lends.Put()
	if o.err == nil {
		return nil, taken, nil
	}
	lc.gone = true
	if ctx.Err() == nil && a.freeKey(ctx, lc, false) == nil {
		return nil, false, nil
	}
	a.handleLate(lc, o)
	return nil, false, o.err
}

// grantsOnSessions reports whether leases may be taken on sessions of transactions. The nodes of a cluster may refuse the
// COMMIT of the grant.
func (l *Locker) grantsOnSessions() bool {
	return l.cfg.Info.SkipLocked && l.wakes && l.cfg.Info.Topology == ""
}

// takeAndCommit takes the lease on a session, which is not in autocommit, if nobody has the lease. maybe: the lease may be
// granted in spite of an error. If the key has no row, the statement leaves LAST_INSERT_ID() as it was, so that is set to 0
// first.
func (lc *lockConn) takeAndCommit(ctx context.Context, a *attempt) (ans answer, maybe bool, err error) {
	take := a.l.takeBy(a.l.texts.takeOnSession, a.r.Key, a.ttl, a.Wait > 0)
	if !lc.c.Packs() {
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

// Detach releases the wake-up lock on the session of the transaction, once that has ended, unless its COMMIT has released the
// wake-up lock. The caller has the turn of the session. After an error the session must be closed.
func (g *Grant) Detach() (err error) {
	c := g.session
	if c == nil {
		return nil
	}
	g.session = nil
	if c.Clean() {
		ctx, cancel := server.Within(releasing(g.key), background)
		defer cancel()
		_, err = server.Query(ctx, c.Conn, g.wakesSQL())
	}
	return err
}

// wakesSQL returns the statement that releases the wake-up lock on the session that has it.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ RELEASE_LOCK(_utf8mb4'mysqllock-lease-…') LIMIT 1
func (g *Grant) wakesSQL() string {
	return server.Ask("RELEASE_LOCK(" + lockname.Literal(lockname.OfWakeUp(g.locker.cfg.Namespace, g.key)) + ")")
}
