// Package advisory keeps a lock as a named lock of the server (GET_LOCK), which
// lasts as long as the connection that has it. It needs no table, and is a space
// of its own: a row lock or a lease on the same key does not exclude it.
//
// # What a lock costs
//
// Locks are put on few connections, the carriers: two, unless there are more
// than 10,000 locks on each. To take a lock is one statement, to give it back
// another, which are prepared on a connection that stays. Those that are asked for
// while a statement is under way go out together in the next, so the round trips get
// fewer as the callers get more.
//
// # What a waiter costs
//
// A caller first lines up with the other goroutines of its process, so that a
// thousand of them are one waiter for the server. The one in front asks without
// waiting, on a carrier. Where another process has the lock it waits for it in
// the server, on a connection of its own, since a connection that waits can do
// nothing else: one connection for each key and process that waits for another
// process. Where the pool has none left it asks four times a second instead, and
// those who have one give it up for a while in as much time, so that all have their
// turn to wait.
//
// # Hand-over
//
// A lock that is given back while somebody of the same process waits for it goes
// to the next in line without a statement, but only so often and for so long:
// then the next in line offers it to other processes, which is to give it back and
// ask for it again in one statement. The server gives it to whoever waits for it.
// Where somebody was waiting the last time, that statement waits, too, behind them,
// so that no process loses a turn by being slow. After an offer that nobody took
// only the time counts.
//
// An offer would starve those who ask now and then. So they say that they do, by
// another lock, whose name is that of a wish; while there is one, the offer leaves
// the lock free until the next statement, and now and then for long enough to be
// asked for. Those who wait in the server in several other processes leave it free
// for nobody: so the pool should have more than one connection.
//
// In the server they have it in their order, too, as long as they wait for no
// longer than half of ReadTimeout: then they ask again, behind the others.
//
// # How long a lock lasts
//
// The server frees what a connection carries when the connection ends, and ends
// it when it was silent for the TTL. One goroutine pings the carriers, which
// shows within a second that one is gone; where no answer comes, its locks count
// as lost shortly before the server would end it. They are never silently taken
// again.
//
// Each server has its own named locks, also one that only replicates another: so
// each statement makes sure that its server takes writes, and clusters are refused.
package advisory

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

const (
	// giveUp is how long a caller whose context has ended may be kept while a
	// statement that may take the lock is under way, and again to find out who
	// has it; one whose wait is over has askCalmly for that.
	giveUp, askCalmly = 20 * time.Millisecond, 100 * time.Millisecond
	// haste is how much earlier than the caller's wait the one in the server ends,
	// so that its connection need not be closed.
	haste = 10 * time.Millisecond
	// slack is how long the client waits for an answer that the server owes it.
	slack = time.Second
	// background bounds what must be done although its caller has gone.
	background = 10 * time.Second
	// pollEvery is how often a waiter asks that nothing wakes, and wishEvery the same
	// of the one that others know of. For that one they leave the lock free for a
	// pause, each pauseEvery at the most.
	pollEvery, wishEvery = 250 * time.Millisecond, 100 * time.Millisecond
	pause, pauseEvery    = 130 * time.Millisecond, time.Second
)

// Config says where locks are kept.
type Config struct {
	Conns     *pool.Pool   // connections that began with Setup(TTL)
	Control   *pool.Pool   // connections to kill waiters from
	Queue     *queue.Queue // where the callers of this process line up; shared with no other strategy
	Namespace string       // goes in front of keys
	Owner     string       // how this process calls itself
	Info      server.Info
	TTL       time.Duration // how long a connection of Conns may be silent
	// ReadTimeout is the driver's own limit on each read from a connection of
	// Conns; 0 is none, or not known. One of at most nine tenths of the TTL makes
	// statements on carriers cheaper, since nobody else has to watch them. Where
	// there is one that is not told, each caller who waits in the server for longer
	// loses a connection to it, and from then on asks again in half the time.
	ReadTimeout time.Duration
	// A lock goes from one caller to the next while HandOverTime is not over, and at
	// most HandOvers times unless no other process took it when it was offered last,
	// before other processes have their turn.
	HandOvers    int
	HandOverTime time.Duration
	Unsafe       bool // also work where named locks do not exclude
}

// Locker takes advisory locks on one server. It is safe for concurrent use.
type Locker struct {
	conns        *pool.Pool
	control      *pool.Pool
	queue        *queue.Queue
	namespace    string
	owner        string
	info         server.Info
	enough       int           // carriers, unless they are full
	ttl          time.Duration // how long the server lets a connection be silent,
	limit        time.Duration // and how long we do
	pulse        time.Duration // how often carriers are looked after
	linger       time.Duration // how long one stays that has nothing to carry
	readTimeout  time.Duration
	handOvers    int
	handOverTime time.Duration
	unsafe       bool
	blind        atomic.Bool // the server does not show this account the programs

	ctx     context.Context // ends when the Locker is closed
	stop    context.CancelCauseFunc
	running sync.WaitGroup // calls, and what they have left to be done

	mu       sync.Mutex
	closed   bool
	carriers []*carrier // the oldest first
	opening  *opening   // one more
	stations int        // connections on which somebody waits
	wanting  int        // callers who have none
	watching bool       // the goroutine that looks after carriers runs
}

// New returns a Locker that has sent nothing to the server yet. Close it to give
// back what it holds.
func New(cfg Config) *Locker {
	ttl := silentFor(cfg.TTL)
	l := &Locker{
		conns: cfg.Conns, control: cfg.Control, queue: cfg.Queue, namespace: cfg.Namespace, owner: cfg.Owner, info: cfg.Info,
		enough: max(1, min(2, cfg.Conns.Stat().Max-1)), // with one left to wait on
		ttl:    ttl, limit: ttl - ttl/10, pulse: min(500*time.Millisecond, ttl/4), linger: min(2*time.Second, ttl/4),
		readTimeout: cfg.ReadTimeout, handOvers: cfg.HandOvers, handOverTime: cfg.HandOverTime, unsafe: cfg.Unsafe,
	}
	l.ctx, l.stop = context.WithCancelCause(context.Background())
	return l
}

// enter begins a call, unless the Locker is closed. l.running.Done ends it.
func (l *Locker) enter() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return lockerr.ErrClosed
	}
	l.running.Add(1)
	return nil
}

// Close ends the waits, tells the holders, and gives back what is held.
func (l *Locker) Close() {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.closed = true
	carriers := slices.Clone(l.carriers)
	l.running.Add(1)
	l.mu.Unlock()

	l.stop(lockerr.ErrClosed)
	for _, k := range carriers {
		k.lose(lockerr.ErrClosed)
	}
	l.running.Done()
	l.running.Wait()
}
