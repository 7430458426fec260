// Package lease keeps a lock as a row of the lock table that says who has it,
// with which token, and until when. The server's clock alone decides when a
// lease ends; the holder counts by its own monotonic clock, begins to count
// before the server does, and gives up earlier.
//
// # How a lease is asked for
//
// One statement reads the key's row, decides, and takes the lease: one round
// trip. The row of a key carries the token, which grows by one with each grant
// and never goes back. The statement waits for who has locked the row, so a
// lease and a row lock on the same key exclude each other.
//
// # How a waiter is woken
//
// Whoever takes a lease also takes a named lock of the server in the same
// statement, the bell, and gives it back in the statement that releases the
// lease. A waiter waits for the bell, in the server, on a connection of its own;
// the other goroutines of its process line up behind it. The bell only says that
// it is time to look: the row alone decides. Where there is no bell, because its
// connection was lost, the waiter looks four times a second.
//
// The bells of thousands of leases are on a few connections, the hosts, since
// none of their statements takes long.
//
// A lease that is released while another caller of the same process waits for it
// goes to that one, with a new token, in one statement and without the bell; but
// only so often and for so long, and then waiters of other processes have their
// turn.
//
// # How a lease is kept
//
// One goroutine renews all leases, those that are due at about the same time in
// one statement. A lease that could not be renewed in time is lost: its holder
// is told before the server would give it to another.
//
// # Clusters
//
// To take, renew and give back a lease are writes of its row, of which the nodes
// of a cluster agree on one order; so of two that take it one is refused, on
// whichever nodes. The fence is a read with a lock on one server; where several
// nodes take writes it is a write, too, since a read would not see what is on its
// way from another node. A renewal on another node at the same moment can refuse
// that transaction. Bells ring on their own node only: who waits on another one
// looks four times a second.
package lease

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

const (
	// giveUp is how long a caller whose context has ended may be kept, while a
	// statement that may take the lease is under way; one whose wait is over is
	// in less of a hurry.
	giveUp, giveUpCalmly = 35 * time.Millisecond, 200 * time.Millisecond
	// patience is how long the giver of a lease waits for the server to take it.
	patience = 2 * time.Second
	// background bounds what must be done although its caller has gone.
	background = 10 * time.Second
	// pollEvery is how often a waiter looks that nothing wakes, and longest how
	// long it relies on being woken.
	pollEvery, longest = 250 * time.Millisecond, 5 * time.Second
	// batch is how many rows go into one statement.
	batch = 500
	// maxOwner leaves room for the mark in the owner column.
	maxOwner = 255 - len("#12345678")
)

// Config says where leases are kept.
type Config struct {
	Conns     *pool.Pool // connections that began with Setup(TTL)
	Control   *pool.Pool // connections to kill waiters from
	Rows      *keyrow.Rows
	Queue     *queue.Queue
	Table     schema.Table
	Namespace string // goes in front of keys
	Owner     string // how this process calls itself
	Info      server.Info
	TTL       time.Duration // how long a connection of Conns may be silent
	// A lease goes from one caller to the next at most HandOvers times, and while
	// HandOverTime is not over, before other processes have their turn.
	HandOvers    int
	HandOverTime time.Duration
}

// Locker takes leases on one server. It is safe for concurrent use.
type Locker struct {
	conns     *pool.Pool
	control   *pool.Pool
	rows      *keyrow.Rows
	queue     *queue.Queue
	table     schema.Table
	namespace string
	program   string // as those see it who ask who has a lease
	owner     string // the same with a mark of this Locker's own
	leftBy    string // the same with a mark that nobody has
	info      server.Info
	keeper    *pool.Keeper
	maxHosts  int

	handOvers    int
	handOverTime time.Duration

	ctx     context.Context // ends when the Locker is closed
	stop    context.CancelCauseFunc
	running sync.WaitGroup // calls, and what they have left to be done

	mu       sync.Mutex
	closed   bool
	hosts    []*host
	arrived  context.Context // ends when there is one more of them
	arrive   context.CancelFunc
	stations int                 // connections that waiters have or ask for
	leases   map[*Lease]struct{} // that are held
	renewing bool                // the goroutine that renews them was started
	wake     chan struct{}       // tells it that one is due earlier than it knows
}

// New returns a Locker that has sent nothing to the server yet. Close it to give
// back what it holds.
func New(cfg Config) *Locker {
	var mark [4]byte
	_, _ = rand.Read(mark[:]) // never fails
	l := &Locker{
		conns: cfg.Conns, control: cfg.Control, rows: cfg.Rows, queue: cfg.Queue,
		table: cfg.Table, namespace: cfg.Namespace, program: cfg.Owner, info: cfg.Info,
		maxHosts:  max(1, cfg.Conns.Stat().Max/2),
		handOvers: cfg.HandOvers, handOverTime: cfg.HandOverTime,
		keeper: pool.NewKeeper(max(time.Second, cfg.TTL.Truncate(time.Second))),
		leases: make(map[*Lease]struct{}), wake: make(chan struct{}, 1),
	}
	name := cfg.Owner[:min(len(cfg.Owner), maxOwner)]
	l.owner, l.leftBy = name+"#"+hex.EncodeToString(mark[:]), name+"#00000000"
	l.ctx, l.stop = context.WithCancelCause(context.Background())
	l.arrived, l.arrive = context.WithCancel(context.Background())
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

// Close ends the waits, tells the holders, gives back what is held as far as the
// server answers in time, and closes its connections.
func (l *Locker) Close() {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.closed = true
	var held []*Lease
	for s := range l.leases {
		held = append(held, s)
	}
	l.mu.Unlock()

	l.stop(lockerr.ErrClosed)
	l.releaseAll(held)
	l.running.Wait()
	l.keeper.Close()
	for _, h := range l.hosts {
		_ = h.c.Take(context.Background()) // nobody has it any more
		l.keeper.Forget(h.c)
		h.c.Destroy() // and with it the bells
	}
}
