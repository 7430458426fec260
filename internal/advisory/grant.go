package advisory

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Grant is a lock on one key. It lasts as long as the connection that holds it. It is safe for concurrent use.
type Grant struct {
	locker *Locker
	key    string
	name   string
	ticket *queue.Ticket
	conn   *lockConn
	// session is the session of the transaction that the lock ends with, which holds the lock in place of a lock
	// connection; nil for other locks. freed: the session does not hold the lock any more. The turn of the session
	// guards freed.
	session   *pool.Conn
	freed     bool
	since     time.Time // when the server granted the lock to this process
	handed    int       // how often the lock was handed over since then
	contended bool      // other processes had the lock, or waited for it, when it was granted
	alone     bool      // no other process took the lock at the last yield
	asked     purpose.Asked

	// Guarded by Locker.mu.
	lost    func(error)
	err     error         // why the lock is over: lost, released or closed
	commits int           // how many COMMITs that have checked the lock are under way
	quiet   chan struct{} // closed when no such COMMIT is under way any more; nil if nobody waits for that
}

// Name returns the server's name for the lock on key. Two keys never share one.
// If namespace and key are short and consist of lower-case letters, digits and "_.:-",
// the name has both in full. Else it has the beginning of the key and a hash of both.
func Name(namespace, key string) string { return lockname.OfAdvisory(namespace, key) }

// Ticket returns the place in the queue of this process with which the lock was granted.
func (g *Grant) Ticket() *queue.Ticket { return g.ticket }

// Key returns the key.
func (g *Grant) Key() string { return g.key }

// Name returns the server's name for the lock.
func (g *Grant) Name() string { return g.name }

// ConnectionID returns the server's id of the connection that holds the lock.
func (g *Grant) ConnectionID() uint64 { return g.conn.id }

// Err returns nil while the lock is held. It looks at the clock, so it may fail before anything else has shown that the
// server may have ended the connection. The error of a lost lock matches lockerr.ErrLost, that of a released one
// lockerr.ErrClosed.
func (g *Grant) Err() error {
	if g.session == nil {
		g.conn.loseIfOverdue()
	}
	g.locker.mu.Lock()
	defer g.locker.mu.Unlock()
	return g.err
}

// Release hands the lock over to the next caller in the queue. If there is none, it releases the lock on the server, and
// waits for the answer. It fails with lockerr.ErrLost if the lock was lost. A second call does nothing.
//
// A COMMIT may be under way that has checked the lock: then Release first waits for its end, for up to 30 seconds. The next
// holder would else read the data from before it.
//
// If a session holds the lock, its COMMIT or [Grant.Detach] releases it, or the lock ends with the session. Then Release
// only ends the lock for its holder.
func (g *Grant) Release() error {
	g.awaitCommits()
	if err := g.Err(); errors.Is(err, lockerr.ErrLost) {
		return terms.Failure("release", g.key, err)
	}
	locker := g.locker
	if locker.running.Enter() != nil {
		return nil // Close releases the lock
	}
	defer locker.running.Done()
	if err := g.end(); errors.Is(err, lockerr.ErrLost) {
		return terms.Failure("release", g.key, err)
	} else if err != nil {
		return nil
	}
	if g.session != nil {
		if !g.session.Clean() {
			g.isFree()
		}
		return nil
	}
	if g.ticket.Handoff(locker, g) {
		return nil
	}
	defer g.ticket.Leave()
	r := &request{lock: g}
	g.conn.do(context.Background(), r)
	if r.err != nil && !errors.Is(r.err, lockerr.ErrClosed) {
		return terms.Failure("release", g.key, lockerr.With(lockerr.ErrLost, r.err))
	}
	return nil
}

// turnOver reports whether the turn of this process is over: the next caller must yield the lock to other processes.
func (g *Grant) turnOver() bool {
	return !g.alone && g.handed >= g.locker.cfg.HandOvers || time.Since(g.since) >= g.locker.cfg.HandOverTime
}

// end ends the lock for its holder. If it has ended before, end returns why.
func (g *Grant) end() error {
	g.locker.mu.Lock()
	defer g.locker.mu.Unlock()
	if g.err != nil {
		return g.err
	}
	g.err = lockerr.ErrClosed
	return nil
}

// takeHandoff makes the attempt the holder of a lock that was handed over. It returns nil if
// the lock's connection was lost meanwhile.
func (a *attempt) takeHandoff(giver *Grant) *Grant {
	lock := a.lock(giver.conn)
	lock.since, lock.handed, lock.contended, lock.alone = giver.since, giver.handed+1, giver.contended, giver.alone
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	if giver.conn.err != nil {
		return nil
	}
	giver.conn.holds[lock.name] = lock
	return lock
}

// yieldInPlace is for a lock whose turn is over. If other processes wait for the lock, yieldInPlace returns the lock's
// connection, to wait on. There one statement releases the lock and queues for it again, so that the process loses no
// place, however slow it is. That statement waits, so the connection must hold no other lock; else yieldInPlace
// returns nil.
func (a *attempt) yieldInPlace(over *Grant) *lockConn {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	lc := over.conn
	inUse := lc.err != nil || lc.busy || lc.pending.Len() > 0 || len(lc.holds) > 1
	if !over.contended || inUse || !a.l.spare(len(a.l.lockConns)-1) || !lc.c.Block() {
		return nil
	}
	delete(lc.holds, over.name)
	lc.busy = true
	a.l.remove(lc, errRetired)
	a.l.waitConns++
	return lc
}
