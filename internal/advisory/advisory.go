// Package advisory keeps a lock as a named lock of the server (GET_LOCK), which lasts as long as the connection that
// holds it.
//
// An advisory lock needs no table. Its keys are separate from those of the other strategies: a row lock or a lease on
// the same key does not exclude an advisory lock.
//
// # What a lock costs
//
// A transaction under a lock of its own costs one round trip more than a transaction without a lock: its session holds
// the lock, see [Grant.Detach]. One statement acquires the lock. The statements that check and release the lock go out
// with the COMMIT. When the COMMIT has returned, the lock is free, whatever the caller does next and wherever.
//
// All other locks of a process are held on a few connections, the lock connections: two,
// or more if one of them holds more than 10,000 locks. To acquire a lock is one
// statement, to release it another. Both are prepared on a connection that stays.
// Requests that arrive while a statement is running go out together in the next one,
// so the more callers there are, the fewer round trips each of them needs.
//
// # What a waiter costs
//
// A caller first queues with the other goroutines of its process, so that the server sees one waiter instead of a
// thousand. The caller in front asks once on a lock connection, without waiting. If another process holds the lock, the
// caller then waits in the server. A connection that waits can do nothing else, so each waiter needs a connection of its
// own: one for each key and process that waits for another process. If the pool has no connection left, the caller polls
// ten times a second instead. While there are pollers, each waiter gives its connection up after the same time, so that
// all callers have their turn to wait.
//
// # Handoff
//
// If another caller of the same process waits for a lock that is released, the lock is handed over to that caller without
// a statement. The number of handoffs in a row is limited, and so is their time. After that the next caller yields the
// lock to other processes: one statement releases the lock, and the next statement asks for it again. The server grants
// the lock to a process that waits. If a process was waiting at the last yield, one statement does both, and waits behind
// that process, so that a slow process loses no turn. If no process took the lock at the last yield, only the time limit
// counts from then on.
//
// A poller gets the lock if it asks between the two statements of a yield. Beside a process that hands the lock over all
// the time, this takes some seconds, and now and then longer than the poller's wait. When several other processes wait in
// the server, the lock goes from one of them to the next and is free for no poller: so give the pool more than one
// connection.
//
// The server grants the lock to waiters in the order in which they asked. A waiter asks
// again after half of ReadTimeout, and is then behind the others.
//
// # How long a lock lasts
//
// The server releases the locks of a connection when the connection ends, and it ends a connection that was silent for
// the TTL. One goroutine pings the lock connections, and so notices within a second that one of them is gone. If the
// server does not answer, the locks count as lost shortly before the server would end the connection. Lost locks are
// never acquired again silently.
//
// Each server has named locks of its own, and so has a replica. So each statement checks that its server takes writes,
// and clusters are refused.
package advisory

import (
	"context"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

const (
	// haste is how much earlier the wait in the server ends than the caller's wait. So the connection of the wait need not
	// be closed.
	haste = 10 * time.Millisecond
	// slack is how long the client waits for an overdue answer of the server.
	slack = time.Second
	// background bounds work that must be done although its caller is gone.
	background = 10 * time.Second
)

// Locker acquires advisory locks on one server. It is safe for concurrent use.
type Locker struct {
	cfg     strategy.Config
	running *strategy.Running
	enough  int           // how many lock connections there are, unless they are full
	ttl     time.Duration // after so long a silence the server ends a connection
	limit   time.Duration // after so long a silence a connection counts as lost; shorter than ttl
	pulse   time.Duration // how often the lock connections are looked after
	linger  time.Duration // how long a lock connection without a lock stays
	blind   atomic.Bool   // the server does not show the names of programs to this account
	pollers atomic.Int64  // callers that poll, since there is no connection for them to wait on

	mu        sync.Mutex
	lockConns []*lockConn // the oldest first
	opening   *opening    // a further lock connection that is being opened; nil for none
	waitConns int         // connections on which a caller waits in the server
	watching  bool        // the goroutine that looks after the lock connections is running

	shown map[string]*shown // the named locks of Show, by their names
}

// New returns a Locker. It sends nothing to the server before the first lock. Close releases the locks that it holds.
//
// No other strategy may share cfg.Queue. If cfg.ReadTimeout is at most nine tenths of the TTL, statements on lock
// connections are cheaper. If connections have such a limit and cfg.ReadTimeout does not say so, each caller that waits
// longer in the server loses a connection, and from then on asks again in half the time. cfg.HandOvers does not count if
// no process took the lock at the last yield.
func New(cfg strategy.Config) *Locker {
	ttl := silentFor(cfg.TTL)
	return &Locker{
		cfg: cfg, running: strategy.NewRunning(),
		shown:  make(map[string]*shown),
		enough: max(1, min(2, cfg.Conns.Stat().Max-1)), // one is left to wait on
		ttl:    ttl, limit: ttl - ttl/10, pulse: min(500*time.Millisecond, ttl/4), linger: min(2*time.Second, ttl/4),
	}
}

// Close ends all waits, tells the holders that their locks are lost, and releases the locks.
func (l *Locker) Close() {
	if !l.running.Stop() {
		return
	}
	l.mu.Lock()
	conns := slices.Clone(l.lockConns)
	l.mu.Unlock()
	for _, lc := range conns {
		lc.lose(lockerr.ErrClosed)
	}
	l.running.Wait()
}

// Traits are the traits of advisory locks.
var Traits = strategy.Traits{Name: hint.StrategyAdvisory, Excludes: true, HearsClose: true}

// Strategy returns the Locker as units of work use it.
func (l *Locker) Strategy() strategy.Strategy { return asStrategy{l} }

type asStrategy struct{ *Locker }

// Take takes one lock.
func (as asStrategy) Take(ctx context.Context, r strategy.Request) ([]strategy.Grant, error) {
	lock, err := as.Acquire(ctx, Request{
		Key: r.Resources[0].Row, Wait: r.Wait, Waiting: r.Wants, Lends: r.Lends, Lost: func(error) { r.Lost() },
	})
	if err != nil {
		return nil, err
	}
	return []strategy.Grant{lock}, nil
}

// Holder asks the server who has the lock on key. It returns nil if nobody has the lock, or this Locker has, or if the
// server does not answer before ctx ends.
func (l *Locker) Holder(ctx context.Context, key string) *lockerr.Holder {
	h := l.holderOf(ctx, Name(l.cfg.Namespace, key))
	l.mu.Lock()
	defer l.mu.Unlock()
	if h != nil && slices.ContainsFunc(l.lockConns, func(lc *lockConn) bool { return lc.id == h.ConnectionID }) {
		return nil
	}
	return h
}

// holderOf is Holder for the lock of that name.
func (l *Locker) holderOf(ctx context.Context, name string) *lockerr.Holder {
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	programs := l.cfg.Info.Attributes && !l.blind.Load()
	rows, err := server.QueryConnections(ctx, c.Conn, holderSQL(name, programs))
	if programs && server.Denied(err) {
		l.blind.Store(true)
		rows, err = server.QueryConnections(ctx, c.Conn, holderSQL(name, false))
	}
	if err != nil || len(rows) == 0 {
		return nil
	}
	id, err := strconv.ParseUint(rows[0][0], 10, 64)
	if err != nil { // NULL: the lock was released while the server made the row, and the row asks for its owner more than once
		return nil
	}
	return &lockerr.Holder{ConnectionID: id, User: rows[0][1], Host: rows[0][2], Program: rows[0][3]}
}
