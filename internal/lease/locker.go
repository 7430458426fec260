// Package lease keeps a lock as a row of the lock table. The row says who holds the lock,
// with which token, and until when. Only the server's clock decides when a lease ends. The
// holder counts by its own monotonic clock; it begins to count before the server does, and
// gives up earlier.
//
// # How a lease is acquired
//
// One statement, one round trip, reads the key's row, decides, and grants the lease. The row has the token, which grows
// by one with each grant and never goes back. If a transaction has locked the row, the statement waits for that. So a
// lease and a row lock on the same key exclude each other.
//
// # How a waiter is woken
//
// The statement that grants a lease also acquires a named lock of the server, the wake-up
// lock; the statement that releases the lease releases it. A waiter waits in the server
// for the wake-up lock, on a connection of its own. The other goroutines of its process
// queue behind it. The wake-up lock only says that it is time to look: the row alone
// decides. If the connection with the wake-up lock was lost, the waiter asks four times a
// second.
//
// A holder that stands still or was cut off may keep its wake-up lock for longer than its lease. A waiter may find that
// the lease has run out, and that nothing has run for a second on the connection with the wake-up lock. Then the waiter
// closes that connection with KILL, and takes the lease with the wake-up lock.
//
// The wake-up locks of thousands of leases are held on a few lock connections. None of the statements there takes long.
//
// A caller for which there is no connection to wait on polls, ten times a second. It gets the lease if it asks between a
// release and the next grant.
//
// A lease that ends with a transaction is taken on the session of that transaction, if nobody has the lease. The COMMIT of
// the grant stands behind it in the same text. The transaction's own COMMIT releases the lease and the wake-up lock, so
// both releases cost no round trip: see onsession.go.
//
// If another caller of the same process waits for a lease that is released, the lease is
// handed over to it: with a new token, in one statement and without the wake-up lock. The
// number of handoffs in a row is limited, and so is their time; then waiters of other
// processes have their turn.
//
// # Many at a time
//
// Requests that find all lock connections busy gather, and so do releases whose wake-up locks are on the same connection.
// The caller that gets the next connection sends the gathered requests and releases as a batch: one transaction of four
// statements, in two texts if the server is far. The batch locks the rows that nobody has locked, decides, changes the
// rows, and commits. So all callers of the batch wait for one commit. The decision on each row follows what the server
// said while the row was locked, so each release knows whether its lease was still held. A request or release whose row
// is locked or missing is then sent alone, and so are all if the server refuses the batch. If the answer to the COMMIT is
// lost, each request gives back the lease that it may have been granted, and each release asks again, as both do when
// they are sent alone. In a cluster, whose nodes may refuse a transaction, and behind MySQL Router each request and
// each release is sent alone.
//
// # Why a lease is two commits
//
// The grant is committed before its holder goes on: else a server that is restarted would grant the same token again.
//
// The release needs a commit, too. Without one, other callers would have to take a key whose row says that it is held:
// for instance because a named lock of the holder is free, with the row to be written later. But a connection that
// breaks frees its named locks, too, while its lease goes on, so there would be two holders. And a release that is to be
// written later is forgotten if its process ends before: the key would stay taken for its TTL after a Release without
// an error. A lease that ends with a transaction is released by the COMMIT of that; otherwise the releases of several
// goroutines share a commit.
//
// # How a lease is kept
//
// One goroutine renews all leases. Leases that are due at about the same time are renewed
// in one statement. A lease whose row is locked, for example by the fences of transactions
// that commit, is renewed alone: the renewal waits in the server. A lease that could not be
// renewed in time is lost. Its holder is told before the server would grant it to another.
//
// # Without named locks
//
// On servers without named locks nobody is woken: a waiter asks four times a second, and when the lease expires. A lease is
// taken, renewed and released in a transaction that locks its row first, and nothing is handed over or sent in batches.
// Without share locks its fence is FOR UPDATE. A caller that takes a lease must lock its row and change its token. So a
// transaction commits under the fence only if nobody has taken the lease before, and nobody takes the lease until the
// transaction has ended.
//
// # Clusters
//
// To grant, renew or release a lease is a write of its row. The nodes of a cluster agree on one order of writes, so of two
// grants at the same time one is refused, on whichever nodes they are. On one server the fence is a locking read. If
// several nodes take writes, the fence is a write, since a read would not see a write that is on its way from another
// node. If the lease is renewed on another node at the same moment, that write can be refused, and with it the
// transaction. A wake-up lock wakes waiters on its own node only; waiters on other nodes ask four times a second.
package lease

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/batch"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

const (
	// answerLimit is the least time that the server has to answer a request. The statement may wait a second for a row, and
	// the server may be busy.
	answerLimit = 5 * time.Second
	// handoffWait is how long a release waits for the server, or for the next caller.
	handoffWait = 2 * time.Second
	// background bounds work that must be done although its caller is gone.
	background = 10 * time.Second
	// longest is how long a waiter relies on being woken.
	longest = 3 * time.Second
	// longestForRow is how long the server may let a statement wait for a row: its limit is one second, and it looks at the
	// limit once a second.
	longestForRow = 2 * time.Second
	// rowsPerStatement is how many rows a statement changes, at most.
	rowsPerStatement = 500
	// maxOwner leaves room for the mark in the owner column.
	maxOwner = 255 - len("#12345678")
)

// Locker acquires leases on one server. It is safe for concurrent use.
type Locker struct {
	cfg          strategy.Config
	running      *strategy.Running
	owner        string // the name of this process, with a suffix of this Locker
	leftBy       string // the name of this process, with a suffix of no Locker
	texts        texts
	steps        steps
	wakes        bool // there are wake-up locks, so a release wakes waiters
	keepAlive    *pool.KeepAlive
	takes        batch.Group[*take]
	maxLockConns int
	untold       atomic.Bool // the table has no columns for what tools show, or they cannot be written

	mu        sync.Mutex
	lockConns []*lockConn
	arrived   context.Context // ends when there is one more lock connection
	arrive    context.CancelFunc
	waitConns int                 // connections that waiters have or ask for
	opening   int                 // requests for which a lock connection is being opened
	leases    map[*Grant]struct{} // the leases that are held
	renewing  bool                // the renewing goroutine was started
	next      time.Time           // when the renewing goroutine looks which leases are due, if nobody wakes it; zero for as soon as it can
	wake      chan struct{}       // tells the renewing goroutine that a lease is due earlier than next
	queueing  chan struct{}       // holds a token for each lease whose renewal waits for its row
}

// New returns a Locker. It sends nothing to the server before the first lease. Close releases the leases that it holds.
//
// cfg.ReadTimeout, the driver's limit on a read, must be longer than a waiter's statement may wait for the wake-up lock,
// 3 seconds. With cfg.Unsafe the Locker also works where a promoted replica has other tokens.
func New(cfg strategy.Config) *Locker {
	var mark [4]byte
	_, _ = rand.Read(mark[:]) // never fails
	l := &Locker{
		cfg: cfg, running: strategy.NewRunning(),
		maxLockConns: max(1, cfg.Conns.Stat().Max/2),
		keepAlive:    pool.NewKeepAlive(max(time.Second, cfg.TTL.Truncate(time.Second)), 0),
		leases:       make(map[*Grant]struct{}), wake: make(chan struct{}, 1),
		queueing: make(chan struct{}, max(1, cfg.Conns.Stat().Max/4)),
	}
	l.steps, l.wakes = steps{l.takeAndWake, l.giveAndWake, l.giveSomeAndWake, l.giveUnknownAndWake, l.extend, l.extendSome}, true
	if !cfg.Info.NamedLocks {
		l.steps, l.wakes = steps{l.takeRow, l.giveRow, l.giveRows, l.giveUnknownRow, l.extendRow, l.extendRows}, false
		l.cfg.HandOvers = 0 // a release is a transaction, and so would a handoff be
	}
	name := cfg.Owner[:min(len(cfg.Owner), maxOwner)]
	l.owner, l.leftBy = name+"#"+hex.EncodeToString(mark[:]), name+keyrow.LeftSuffix
	l.texts = texts{
		take: l.takeText(""), takeNow: l.takeText(" NOWAIT"), takeOnSession: l.takeOnSessionText(), handoff: l.handoffText(),
		release: l.releaseText("NULL", "LEAST(expires, UTC_TIMESTAMP(6))"),
	}
	l.arrived, l.arrive = context.WithCancel(context.Background())
	return l
}

// Close ends all waits, tells the holders that their leases are lost, releases the leases
// as far as the server lets it within some seconds, and closes the connections.
func (l *Locker) Close() {
	if !l.running.Stop() {
		return
	}
	l.mu.Lock()
	held := slices.Collect(maps.Keys(l.leases))
	l.mu.Unlock()

	ctx, cancel := server.Within(context.Background(), background/2)
	left := l.releaseAll(ctx, endAll(held))
	cancel()
	l.running.Wait() // also waits for renewals, which had their rows locked
	ctx, cancel = server.Within(context.Background(), handoffWait)
	defer cancel()
	for left = l.releaseAll(ctx, left); len(left) > 0 && strategy.Sleep(ctx, strategy.RetryPause/5); {
		left = l.releaseAll(ctx, left)
	}
	l.keepAlive.Close()
	for _, lc := range l.lockConns {
		_ = lc.c.AwaitTurn(context.Background()) // nobody has it any more
		l.keepAlive.Forget(lc.c)
		lc.c.Destroy() // and with it the wake-up locks
	}
}

// Traits are the traits of leases.
var Traits = strategy.Traits{Name: hint.StrategyLease, Table: true, Excludes: true}

// Take takes one lease, or one of a key's slots.
func (l *Locker) Take(ctx context.Context, r strategy.Request) ([]strategy.Grant, error) {
	if r.Resources[0].Slots > 0 {
		s, err := l.acquireSlot(ctx, r)
		if err != nil {
			return nil, err
		}
		return []strategy.Grant{s}, nil
	}
	resource := r.Resources[0]
	ask := leaseOn(resource, resource.Row, r.Wait, r.Wants, r.Lost)
	ask.Lends = r.Lends
	held, err := l.Acquire(ctx, ask)
	if err != nil {
		return nil, err
	}
	return []strategy.Grant{held}, nil
}

// leaseOn returns a request for a lease on row, as resource asks for it.
func leaseOn(resource strategy.Resource, row string, wait time.Duration, waiting strategy.Waiting, lost func()) Request {
	return Request{
		Key: row, TTL: resource.TTL, MinHold: resource.MinHold, MaxHold: resource.MaxHold, Wait: wait, Waiting: waiting,
		Lost: func(error) { lost() },
	}
}

// Holder asks the server who has the lease on key, without waiting for anybody. It returns nil if nobody has it, or this
// Locker has, or if the server does not answer before ctx ends.
func (l *Locker) Holder(ctx context.Context, key string) *lockerr.Holder {
	c, err := l.cfg.Control.Acquire(ctx)
	if err != nil {
		return nil
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, l.holderSQL(key))
	if err != nil || len(rows) == 0 || rows[0][0] == l.owner {
		return nil
	}
	return keyrow.HolderOf(rows[0][0])
}
