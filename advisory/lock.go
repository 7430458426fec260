package advisory

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Lock is a lock on one key. It lasts as long as the connection that holds it. It is safe for concurrent use.
type Lock struct {
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
	lost func(error)
	err  error // why the lock is over: lost, released or closed
}

// Name returns the server's name for the lock on key. Two keys never share one.
// If namespace and key are short and consist of lower-case letters, digits and "_.:-",
// the name has both in full. Else it has the beginning of the key and a hash of both.
func Name(namespace, key string) string { return lockname.OfAdvisory(namespace, key) }

// Ticket returns the place in the queue of this process with which the lock was granted.
func (l *Lock) Ticket() *queue.Ticket { return l.ticket }

// Key returns the key.
func (l *Lock) Key() string { return l.key }

// Name returns the server's name for the lock.
func (l *Lock) Name() string { return l.name }

// ConnectionID returns the server's id of the connection that holds the lock.
func (l *Lock) ConnectionID() uint64 { return l.conn.id }

// Err returns nil while the lock is held. It looks at the clock, so it may fail before anything else has shown that the
// server may have ended the connection. The error of a lost lock matches lockerr.ErrLost, that of a released one
// lockerr.ErrClosed.
func (l *Lock) Err() error {
	if l.session == nil {
		l.conn.loseIfOverdue()
	}
	l.locker.mu.Lock()
	defer l.locker.mu.Unlock()
	return l.err
}

// Release hands the lock over to the next caller in the queue. If there is none, it releases the lock on the server, and
// waits for the answer. It fails with lockerr.ErrLost if the lock was lost. A second call does nothing.
//
// If a session holds the lock, its COMMIT or [Lock.Detach] releases it, or the lock ends with the session. Then Release
// only ends the lock for its holder.
func (l *Lock) Release() error {
	if err := l.Err(); errors.Is(err, lockerr.ErrLost) {
		return terms.Failure("release", l.key, err)
	}
	locker := l.locker
	if locker.running.Enter() != nil {
		return nil // Close releases the lock
	}
	defer locker.running.Done()
	if err := l.end(); errors.Is(err, lockerr.ErrLost) {
		return terms.Failure("release", l.key, err)
	} else if err != nil {
		return nil
	}
	if l.session != nil {
		if !l.session.Clean() {
			l.isFree()
		}
		return nil
	}
	if l.ticket.Handoff(locker, l) {
		return nil
	}
	defer l.ticket.Leave()
	r := &request{lock: l}
	l.conn.do(context.Background(), r)
	if r.err != nil && !errors.Is(r.err, lockerr.ErrClosed) {
		return terms.Failure("release", l.key, lockerr.With(lockerr.ErrLost, r.err))
	}
	return nil
}

// turnOver reports whether the turn of this process is over: the next caller must yield the lock to other processes.
func (l *Lock) turnOver() bool {
	return !l.alone && l.handed >= l.locker.cfg.HandOvers || time.Since(l.since) >= l.locker.cfg.HandOverTime
}

// end ends the lock for its holder. If it has ended before, end returns why.
func (l *Lock) end() error {
	l.locker.mu.Lock()
	defer l.locker.mu.Unlock()
	if l.err != nil {
		return l.err
	}
	l.err = lockerr.ErrClosed
	return nil
}

// takeHandoff makes the attempt the holder of a lock that was handed over. It returns nil if
// the lock's connection was lost meanwhile.
func (a *attempt) takeHandoff(giver *Lock) *Lock {
	lock := a.lock(giver.conn)
	lock.since, lock.handed, lock.contended, lock.alone = giver.since, giver.handed+1, giver.contended, giver.alone
	a.mu.Lock()
	defer a.mu.Unlock()
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
func (a *attempt) yieldInPlace(over *Lock) *lockConn {
	a.mu.Lock()
	defer a.mu.Unlock()
	k := over.conn
	if !over.contended || k.err != nil || k.busy || k.pending.Len() > 0 || len(k.holds) > 1 || !a.spare(len(a.lockConns)-1) || !k.c.Block() {
		return nil
	}
	delete(k.holds, over.name)
	k.busy = true
	a.remove(k, errRetired)
	a.waitConns++
	return k
}
