// Package handle has what one database handle needs for its locks: connections, strategies, waiters, and
// the locks held now. Units of work use all of it, but the package does not know them.
//
// # Connections
//
// All statements in a transaction with a lock run on a session. Other statements run on connections of database/sql.
//
// Without maxConns each connection of database/sql is a real one. A transaction of BeginTx, or a single write, occupies
// one of them, which is idle, beside its session. So that session is not counted against lockMaxConns.
//
// With maxConns each connection of database/sql is light: it has a real connection, out of the budget, only while it
// needs one. If database/sql closes a light connection that has no real one, the handle closes an idle real connection in
// its place, the one that was opened first: so SetMaxIdleConns, SetConnMaxIdleTime and SetConnMaxLifetime work.
//
// Light connections without maxConns, with a budget without a bound, were tried (MySQL 9.7, MariaDB 10.11) and not taken:
//   - They would save little, some 45 lines. [Handle.StarvationGuard] would stay: SetMaxOpenConns bounds light
//     connections, too, and callers that wait occupy them. Without the guard a holder's next statement gets no light
//     connection, however many real ones are free (TestHolderGetsThroughAFullPool).
//   - Statements of db.Prepare would stay prepared after their Close.
//   - A statement without a lock costs 0.3 to 0.6 µs more, a transaction 8 (BenchmarkLight): BeginTx walks the stack, to
//     see whether database/sql calls it for its pool. Without that walk the client's CPU for a query or a
//     transaction over TCP is 0 to 8 % more. A query enters 45 functions, and not 20 (make ways).
package handle

import (
	"context"
	"database/sql/driver"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// Settings are the settings of a database handle, checked and completed: see mysqllock.Config.
type Settings struct {
	// Config has the settings of strategies, where an empty Namespace stands for the database's name. Its
	// other fields are set when the server is known: see [Handle.makeStrategies].
	strategy.Config

	Strategy     string
	Wait         time.Duration
	MaxConns     int           // the budget of connections; 0 without one
	LockMaxConns int           // the most sessions; leases and advisory locks may have as many each
	LongHold     time.Duration // after which the observer is told that a hold still lasts; 0 for never
	SlowWait     time.Duration // after which a waiter's handle asks who holds the lock; 0 for never
	Required     *Required     // nil if no table needs a lock

	// Observe, Asking and Releasing tell the observer: see mysqllock.Observer and mysqllock.Tracer.
	// Observe is nil without an observer, the others if the observer is no Tracer.
	Observe   func(context.Context, Event)
	Asking    func(context.Context, Event) context.Context
	Releasing func(context.Context, Event)
}

// Connectors open the connections of a handle, one connector for each purpose. mysqllock.NewConnector has made each for
// its purpose; with mysqllock.Wrap each is the application's, and nothing is known of it.
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

	poolBound atomic.Bool // the observer was told that database/sql bounds the handle, although that has a budget

	conns    *pool.Budget                // the budget; nil without one, as the three below
	apps     *pool.Pool                  // connections for statements of the application
	endKills func()                      // ends the killing of abandoned statements
	sample   atomic.Pointer[driver.Conn] // see Sample

	wrappers sync.Map // the wrappers of drivers above this driver, by their names

	sampling chan struct{} // holds a token while somebody looks for the sample

	ctx  context.Context // ends when the handle is closed
	stop context.CancelFunc

	asking chan struct{} // holds a token while somebody asks who has kept a caller waiting

	held    heldLocks    // the locks that units of work and holds of the handle have now
	waiters atomic.Int64 // callers that wait, for a lock or for a connection to take it on
	waits   ages         // how long locks have been asked for, of those not answered yet

	packets packets // which servers take several statements in a text

	manual atomic.Bool           // new connections are not in autocommit
	locks  atomic.Pointer[Locks] // made at the first hint
	doubt  atomic.Bool           // the handle may have another server by now, or its server another role
	former []*Locks              // made for servers, or roles, from before a failover; guarded by mu
	making singleflight.Group
	mu     sync.Mutex // held while Locks are made or closed
}

// New returns a handle, which must be closed. New connects to nothing.
func New(c Connectors, settings Settings) *Handle {
	ctx, stop := context.WithCancel(context.Background())
	h := &Handle{connectors: c, Settings: settings, ctx: ctx, stop: stop, asking: make(chan struct{}, 1)}
	h.StarvationGuard.met = h.boundMet
	if settings.MaxConns > 0 {
		h.sampling = make(chan struct{}, 1)
		h.conns = pool.NewBudget(settings.MaxConns, reservedConns(settings.MaxConns), lockKinds)
		h.endKills = h.conns.KillClosed(h.killing())
		h.apps = pool.New(pool.Config{Connect: c.App.Connect, Max: settings.MaxConns, Budget: h.conns, Bare: true})
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

// Stats has the fields of mysqllock.PoolStats.
type Stats struct {
	pool.Stats
	Waiters                        int
	OldestWait, OldestHold         time.Duration
	MaxConns, Reserved             int
	App, Leases, Advisory, Control pool.Stats
}

// Stats returns the present numbers.
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

// Holds reports whether the handle holds a lock, or has a unit of work open.
func (h *Handle) Holds() bool {
	l := h.locks.Load()
	return h.held.any() || l != nil && l.inUse()
}

// Doubt notes that the handle may have another server by now, or its server another role.
func (h *Handle) Doubt() { h.doubt.Store(true) }

// Closed reports whether the handle is closed.
func (h *Handle) Closed() bool { return h.ctx.Err() != nil }

// OnClose has f called when the handle is closed, unless stop is called before.
func (h *Handle) OnClose(f func()) (stop func() bool) { return context.AfterFunc(h.ctx, f) }

// Manual reports whether new connections are not in autocommit. known is false if no connection has shown it
// yet.
func (h *Handle) Manual() (manual, known bool) { return h.manual.Load(), h.locks.Load() != nil }

// ByCalls reports whether transactions on sessions begin and end by calls of the base driver. They do if the
// application has made its connector itself: it may look for these calls.
func (h *Handle) ByCalls() bool { return !h.connectors.Session.Several }

// Bounded reports whether the handle has a budget of connections (maxConns).
func (h *Handle) Bounded() bool { return h.apps != nil }
