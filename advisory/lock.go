package advisory

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Lock is a lock on one key that lasts as long as the connection that carries
// it. It is safe for concurrent use.
type Lock struct {
	l       *Locker
	key     string
	name    string
	ticket  *queue.Ticket
	carrier *carrier
	since   time.Time // when this process got it from the server
	handed  int       // how often it went from caller to caller since then
	rivals  bool      // others wait for it in the server, as they did when it was got
	alone   bool      // nobody took it when it was offered to others
	paused  time.Time // when it was last left free for those who ask now and then

	// Guarded by Locker.mu.
	lost func(error)
	err  error // why it is over: lost, released or closed
}

// Key returns the key.
func (k *Lock) Key() string { return k.key }

// Name returns the server's name for the lock.
func (k *Lock) Name() string { return k.name }

// ConnectionID returns the server's id of the connection that carries the lock.
func (k *Lock) ConnectionID() uint64 { return k.carrier.id }

// Err returns nil while the lock is held: by the clock, also before anybody has
// noticed that the server may have ended the connection. Else it returns an
// error that is lockerr.ErrLost, or after the release, lockerr.ErrClosed.
func (k *Lock) Err() error {
	k.carrier.look()
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	return k.err
}

// Release hands the lock over to the next caller in line, or gives it back, for
// which it waits. It fails with lockerr.ErrLost where the lock was lost. A second
// call does nothing.
func (k *Lock) Release() error {
	if err := k.Err(); errors.Is(err, lockerr.ErrLost) {
		return failure("release", k.key, err)
	}
	l := k.l
	if l.enter() != nil {
		return nil // Close gives it back
	}
	defer l.running.Done()
	if err := k.end(); errors.Is(err, lockerr.ErrLost) {
		return failure("release", k.key, err)
	} else if err != nil {
		return nil
	}
	if k.ticket.HandOver(k) {
		return nil
	}
	defer k.ticket.Leave()
	r := &request{lock: k}
	k.carrier.do(context.Background(), r)
	if r.err != nil && !errors.Is(r.err, lockerr.ErrClosed) {
		return failure("release", k.key, lockerr.With(lockerr.ErrLost, r.err))
	}
	return nil
}

// turnOver reports that other processes are to have the lock before another
// caller of this one: the next in line sees to it.
func (k *Lock) turnOver() bool {
	return !k.alone && k.handed >= k.l.handOvers || time.Since(k.since) >= k.l.handOverTime
}

// end makes the lock be over for its holder. It returns why it was before.
func (k *Lock) end() error {
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	if k.err != nil {
		return k.err
	}
	k.err = lockerr.ErrClosed
	return nil
}

// inherit takes over what the one before has handed over; nil where its carrier
// was lost meanwhile.
func (a *attempt) inherit(from *Lock) *Lock {
	lock := a.lock(from.carrier)
	lock.since, lock.handed, lock.rivals, lock.alone, lock.paused = from.since, from.handed+1, from.rivals, from.alone, from.paused
	a.mu.Lock()
	defer a.mu.Unlock()
	if from.carrier.err != nil {
		return nil
	}
	from.carrier.holds[lock.name] = lock
	return lock
}

// yield makes a station of the carrier of a lock whose turn is over, and that other
// processes want. There the caller gives it back and lines up for it again in
// one statement, so that the process loses no place however late it is itself.
// The statement waits, so nothing else may be on the carrier: nil where something
// is.
func (a *attempt) yield(over *Lock) *carrier {
	a.mu.Lock()
	defer a.mu.Unlock()
	k := over.carrier
	if k.err != nil || k.busy || len(k.line) > 0 || len(k.holds) > 1 || !a.spare(len(a.carriers)-1) {
		return nil
	}
	delete(k.holds, over.name)
	k.busy = true
	a.remove(k, errRetired)
	a.stations++
	return k
}

// Check makes sure, on the connection of a transaction that is about to commit,
// that the locks are held. It is one statement, which waits for nobody, and tells
// the server's id of the connection, for [Locker.AwaitEnd]. After an error the
// transaction must be rolled back.
func (l *Locker) Check(ctx context.Context, conn driver.Conn, locks []*Lock) (id uint64, err error) {
	if len(locks) == 0 {
		return 0, nil
	}
	var keys []string
	for _, lock := range locks {
		if err := lock.Err(); err != nil {
			return 0, failure("commit", lock.key, err)
		}
		keys = append(keys, lock.key)
	}
	rows, err := server.Query(ctx, conn, checkSQL(locks))
	switch {
	case err != nil:
	case len(rows) != 1 || rows[0][0] != "1":
		err = lockerr.With(lockerr.ErrLost, errors.New("the server of the transaction says that somebody else has the lock, or nobody"))
	default:
		id, err = strconv.ParseUint(rows[0][1], 10, 64)
	}
	if err != nil {
		return 0, failure("commit", strings.Join(keys, ", "), err)
	}
	return id, nil
}

// AwaitEnd is for after a COMMIT whose answer was lost with its connection: the
// server may be busy with it for a while, and nothing of the transaction keeps
// whoever has the locks next from reading what was before. It has the server end
// the connection of that id, and returns when it has, when the locks are lost, or
// with ctx. The id is taken to be that of another connection where the server does
// not say that the locks are held, since then it may have been started anew.
func (l *Locker) AwaitEnd(ctx context.Context, id uint64, locks []*Lock) {
	for {
		over, err := l.control.EndConnection(ctx, id, heldSQL(locks))
		lost := slices.ContainsFunc(locks, func(lock *Lock) bool { return lock.Err() != nil })
		if err == nil && over || lost {
			return
		}
		select {
		case <-time.After(glance):
		case <-ctx.Done():
			return
		}
	}
}

// glance is how often AwaitEnd looks.
const glance = 20 * time.Millisecond
