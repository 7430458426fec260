package advisory

import (
	"context"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// A lock that ends with its transaction is held by the session of the transaction (Grant.session). So the lock costs one
// round trip: the COMMIT checks and releases it. Like a lock connection the session has an identity, and the server ends
// the session when it was silent for the TTL. The unit of work keeps the session alive, and is told when it is lost.
// Locker.Close leaves the session alone.
//
// A caller asks on the session once, and only if nobody of its process is in front of it. If another process has the lock,
// or the session does not answer, the caller gives the session back, and goes on with lock connections.

// takeOnSession acquires the lock on the session that the caller lends, if nobody has the lock. refused says that another
// process has it. Without a lock the session is given back.
func (a *attempt) takeOnSession(ctx context.Context) (lock *Grant, refused bool, err error) {
	if a.r.Lends == nil || !a.First || a.l.cfg.Unsafe { // with lockUnsafe only lock connections take locks
		return nil, false, nil
	}
	c, err := a.r.Lends.Get(ctx)
	if err != nil { // the caller says why, when it needs a session
		return nil, false, nil
	}
	ctx, cancel := server.Within(ctx, pool.AnswerTime)
	defer cancel()
	var answer string
	if err = c.Identify(ctx); err == nil { // else nobody could check the lock, or end the session
		lc := &lockConn{l: a.l, c: c, id: c.KnownID(), identity: newIdentity()}
		lc.holder = &lockerr.Holder{ConnectionID: lc.id, Program: a.l.cfg.Owner}
		lock = a.lock(lc)
		lock.session = c
		answer, err = lc.ask(ctx, lc.takeSQL(lock.name))
	}
	switch {
	case err == nil && answer == "1" && ctx.Err() == nil:
		lock.ticket.Granted(lock.conn.holder)
		return lock, false, nil
	case err != nil || answer != "0": // the session may have the lock
		c.Taint()
	}
	a.r.Lends.Put()
	if answer == "0" {
		a.Heard.Store(true)
		return nil, true, nil
	}
	return nil, false, context.Cause(ctx)
}

// Detach releases the lock on the session of its transaction, once that has ended, unless the COMMIT has released the lock.
// The caller has the turn of the session. After an error the session must be closed.
func (g *Grant) Detach() (err error) {
	if g.session == nil || g.freed {
		return nil
	}
	if g.session.Clean() {
		ctx, cancel := server.Within(purpose.Named(context.Background(), purpose.Release, hint.StrategyAdvisory, g.key), background)
		defer cancel()
		_, err = server.Query(ctx, g.session.Conn, g.releaseSQL())
	}
	g.isFree()
	return err
}

// isFree notes that the session does not have the lock any more, or that the session will soon be gone.
func (g *Grant) isFree() {
	g.freed = true
	_ = g.end()
	g.ticket.Leave()
}

// takeSQL returns the statement that acquires the lock of that name, and the identity of the session, if nobody has the
// lock. The answer is 1 if it has acquired them, and 0 if somebody has the lock.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */
//	  IF(CONNECTION_ID() = 12, IF(@@read_only, -2, IF(@@innodb_read_only, -2,
//	    GET_LOCK(_utf8mb4'mysqllock:app/k', 0) AND GET_LOCK(_utf8mb4'mysqllock-carrier-…', 0))), -1) LIMIT 1
func (lc *lockConn) takeSQL(name string) string {
	both := fmt.Sprintf("GET_LOCK(%s, 0) AND GET_LOCK(%s, 0)", lockname.Literal(name), lockname.Literal(lc.identity))
	return server.Ask(lc.here(both))
}

// releaseSQL returns the statement that releases the lock on its session.
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */
//	  RELEASE_LOCK(_utf8mb4'mysqllock:app/k'), RELEASE_LOCK(_utf8mb4'mysqllock-carrier-…') LIMIT 1
func (g *Grant) releaseSQL() string {
	return server.Ask(fmt.Sprintf("RELEASE_LOCK(%s), RELEASE_LOCK(%s)", lockname.Literal(g.name), lockname.Literal(g.conn.identity)))
}
