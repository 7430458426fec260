// Package handle has what one database handle needs for its locks: connections,
// strategies, waiters, and the locks held now. What is done with them is up to units of
// work, which it does not know.
//
// # Connections
//
// All that runs in a transaction with a lock runs on a session. Connections of database/sql are for the rest. Without
// maxConns each of them is a real one. The session of a transaction of BeginTx, or of a single write, stands beside it,
// idle as it is meanwhile, and so is not counted against lockMaxConns. With maxConns each is light: it has a real one, out
// of the budget, only while it needs it. If database/sql closes a light one that has none, an idle real one is closed in
// its place, the one that was opened first: so SetMaxIdleConns, SetConnMaxIdleTime and SetConnMaxLifetime work. It was tried
// to have light ones always, with a budget without a bound (MySQL 9.7, MariaDB 10.11), and not taken:
//   - Little would go, some 45 lines. [Handle.StarvationGuard] stays: SetMaxOpenConns bounds light ones, too, and
//     callers that wait have them. Without it a holder's next statement gets none, whatever is free
//     behind (TestHolderGetsThroughAFullPool).
//   - What db.Prepare has prepared stays so after its Close.
//   - A statement without a lock costs 0.3 to 0.6 µs more, a transaction 8 (BenchmarkLight): its BeginTx walks the
//     stack, to see whether it is of the pool. Without that walk the client's CPU for a query or a
//     transaction over TCP is 0 to 8 % more. A query enters 45 functions, and not 20 (make ways).
package handle

import (
	"context"
	"database/sql/driver"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/pool"
)

// Settings is what a database handle was told, checked and completed: see
// mysqllock.Config.
type Settings struct {
	// What strategies were told, where an empty Namespace is the database's name. The rest of what
	// they get is made when the server is known: see [Handle.makeStrategies].
	strategy.Config

	Strategy     string
	Wait         time.Duration
	MaxConns     int           // the budget of connections; 0 without one
	LockMaxConns int           // the most sessions; leases and advisory locks may have as many each
	LongHold     time.Duration // of a hold that is told while it lasts; 0 for none
	SlowWait     time.Duration // of a wait after which the holder is asked for; 0 for none
	Required     *Required     // nil if no table needs a lock

	// How the observer is told: see mysqllock.Observer and mysqllock.Tracer. Observe is nil if
	// there is no observer, the others if it is no Tracer.
	Observe   func(context.Context, Event)
	Asking    func(context.Context, Event) context.Context
	Releasing func(context.Context, Event)
}

// Connectors open the connections of a handle, one connector for each purpose. mysqllock.NewConnector has made each for
// its purpose; with mysqllock.Wrap each is that of the application, of which nothing is known.
type Connectors struct {
	App         Connector // statements of the application
	Session     Connector // sessions; App, where the server refuses those that run several statements
	Control     Connector // the driver's own statements: making rows, asking who holds, KILL
	Advisory    Connector // advisory locks
	Lease       Connector // leases
	LeaseSingly Connector // leases, where the server refuses those of Lease, since they run several statements
}

// Connector opens connections. What is said here of them is zero with mysqllock.Wrap.
type Connector struct {
	driver.Connector

	Several     bool          // they run a text of several statements
	ReadTimeout time.Duration // how long an answer may take; 0 is no limit
}

// All returns each of them.
func (c *Connectors) All() []*Connector {
	return []*Connector{&c.App, &c.Session, &c.Control, &c.Advisory, &c.Lease, &c.LeaseSingly}
}

// splits reports whether only the driver's own connections run several statements: there a text of the application must
// stay one, as it is on App.
func (c *Connectors) splits() bool { return c.Session.Several && !c.App.Several }

// Handle is what one database handle has for its locks. It is safe for concurrent use.
type Handle struct {
	connectors      Connectors
	Settings        Settings
	StarvationGuard starvationGuard // how many connections of database/sql there are, and how many wait

	poolBound atomic.Bool // the observer was told that database/sql bounds a handle with a budget

	conns    *pool.Budget                // nil without one, with the three below
	apps     *pool.Pool                  // connections for statements of the application
	endKills func()                      // ends the killing of abandoned statements
	sample   atomic.Pointer[driver.Conn] // see Sample

	wrappers sync.Map // of drivers: those above this one, by their names

	sampling chan struct{} // holds a token while somebody looks for the sample

	ctx  context.Context // ends when the handle is closed
	stop context.CancelFunc

	asking chan struct{} // holds a token while somebody asks who has kept a caller waiting

	held    heldLocks    // what it holds now
	waiters atomic.Int64 // callers that wait, for a lock or for a connection to take it on
	waits   ages         // of locks that are asked for now

	packets packets // which servers take several statements in a text

	manual atomic.Bool           // new connections are not in autocommit
	locks  atomic.Pointer[Locks] // made at the first hint
	doubt  atomic.Bool           // the server may be another one by now, or in another role
	former []*Locks              // made for what it was before; guarded by mu
	making singleflight.Group
	mu     sync.Mutex // held while they are made or closed
}

// New returns a handle that is to be closed. It connects to nothing.
func New(c Connectors, s Settings) *Handle {
	ctx, stop := context.WithCancel(context.Background())
	h := &Handle{connectors: c, Settings: s, ctx: ctx, stop: stop, asking: make(chan struct{}, 1)}
	h.StarvationGuard.met = h.boundMet
	if s.MaxConns > 0 {
		h.sampling = make(chan struct{}, 1)
		h.conns = pool.NewBudget(s.MaxConns, reservedConns(s.MaxConns), lockKinds)
		h.endKills = h.conns.KillClosed(h.killing())
		h.apps = pool.New(pool.Config{Connect: c.App.Connect, Max: s.MaxConns, Budget: h.conns, Bare: true})
	}
	return h
}

// Close ends every session, rolling back what is open on it, and closes the driver's
// own connections.
func (h *Handle) Close() {
	h.stop()
	h.StarvationGuard.stop()
	if h.Bounded() {
		h.apps.Shut() // those in use belong to database/sql, which closes them
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range append(h.former, h.locks.Swap(nil)) {
		if l != nil {
			l.close()
		}
	}
	if h.Bounded() {
		h.endKills()
	}
}

// RenewNow has all leases of the handle renewed at once: see [lease.Locker.RenewNow].
func (h *Handle) RenewNow() {
	if l := h.locks.Load(); l != nil {
		l.leases.RenewNow()
	}
}

// Stats has the fields of mysqllock.PoolStats, in the same order: one converts to the other.
type Stats struct {
	pool.Stats
	Waiters                        int
	OldestWait, OldestHold         time.Duration
	MaxConns, Reserved             int
	App, Leases, Advisory, Control pool.Stats
}

// Stats returns the counts of now.
func (h *Handle) Stats() Stats {
	l := h.locks.Load()
	s := Stats{
		Stats:      pool.Stats{Max: h.Settings.LockMaxConns},
		OldestWait: h.waits.oldest(), OldestHold: h.held.oldest(), MaxConns: h.Settings.MaxConns,
	}
	if h.Bounded() {
		s.App = h.apps.Stat()
		s.OldestWait = max(s.OldestWait, s.App.OldestWait)
		_, _, s.Reserved = h.conns.Shortage()
	}
	if l != nil {
		s.Stats, s.Leases, s.Advisory, s.Control = l.sessions.Stat(), l.leasing.Stat(), l.advising.Stat(), l.Control.Stat()
		s.Waiters = int(h.waiters.Load())
	}
	return s
}

// Holds reports whether a lock is held, or a unit of work is open.
func (h *Handle) Holds() bool {
	l := h.locks.Load()
	return h.held.any() || l != nil && l.inUse()
}

// Doubt notes that the server may not be what it was.
func (h *Handle) Doubt() { h.doubt.Store(true) }

// Closed reports whether the handle is closed.
func (h *Handle) Closed() bool { return h.ctx.Err() != nil }

// OnClose has f called when the handle is closed, unless stop is called before.
func (h *Handle) OnClose(f func()) (stop func() bool) { return context.AfterFunc(h.ctx, f) }

// Manual reports whether new connections are not in autocommit, if anybody has looked yet.
func (h *Handle) Manual() (manual, known bool) { return h.manual.Load(), h.locks.Load() != nil }

// ByCalls reports whether transactions on sessions begin and end by calls of the base driver, where the application
// has made its connector itself, and may be looking for them.
func (h *Handle) ByCalls() bool { return !h.connectors.Session.Several }

// Bounded reports whether the handle has a budget of connections (maxConns).
func (h *Handle) Bounded() bool { return h.apps != nil }
