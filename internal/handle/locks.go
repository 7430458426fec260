package handle

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lease"
	"github.com/mysqllock/mysqllock/internal/optimistic"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/rowlock"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Locks has what a handle needs once a caller asks for a lock: strategies and connections, for one server.
type Locks struct {
	RowLocks   *rowlock.Locker              // locks rows in transactions
	kept       map[string]strategy.Strategy // strategies outside of transactions, by name
	leases     *lease.Locker
	advisories *advisory.Locker
	table      schema.Table
	namespace  string                      // stands in front of keys
	server     atomic.Pointer[server.Info] // what the server is now
	tableReady atomic.Bool                 // the lock table is there
	rows       *keyrow.Rows
	queue      *queue.Queue            // where the handle's callers queue up for rows of the table
	queues     map[string]*queue.Queue // the same for locks without the table, by strategy
	sessions   *pool.Pool              // connections for units of work: see the package comment
	leasing    *pool.Pool              // connections for leases
	advising   *pool.Pool              // connections for advisory locks
	Control    *pool.Pool              // connections for making rows, asking who holds, killing waiters
	KeepAlive  *pool.KeepAlive         // keeps sessions alive

	mu   sync.Mutex
	open map[any]func(error) // by unit on a session, the function that ends the unit

	ctx   context.Context   // ends when the handle is closed
	later *strategy.Running // background work, for which its callers do not wait
}

// Use returns the Locks for the locks of hinted, and makes them at first use; hinted is nil for a caller that
// asks for no lock. The end of ctx does not stop the making, so that callers in a hurry do not start it over
// and over. A failure is not remembered: the next caller tries again.
func (h *Handle) Use(ctx context.Context, hinted *hint.Hint) (*Locks, error) {
	if l := h.locks.Load(); l != nil {
		ready := l.tableReady.Load() || !h.inTable(hinted)
		if ready && !h.doubt.Load() && h.ctx.Err() == nil {
			return l, nil
		}
	}
	inTable := h.inTable(hinted)
	made := h.making.DoChan(strconv.FormatBool(inTable), func() (any, error) { return h.provide(inTable) })
	select {
	case r := <-made:
		switch {
		case h.ctx.Err() != nil:
			return nil, lockerr.ErrClosed
		case r.Err != nil:
			return nil, r.Err
		}
		return r.Val.(*Locks), nil
	case <-h.ctx.Done(): // do not wait for provide, which waits for Close: that waits for units whose turn the caller may have
		return nil, lockerr.ErrClosed
	case <-ctx.Done():
		return nil, strategy.Silent(ctx)
	}
}

// provide returns the Locks for the server as it is now. inTable: the lock table must be there, too.
func (h *Handle) provide(inTable bool) (*Locks, error) {
	h.mu.Lock() // Close waits until we are done
	defer h.mu.Unlock()
	if h.ctx.Err() != nil {
		return nil, lockerr.ErrClosed
	}
	ctx, cancel := server.Within(h.ctx, 20*time.Second)
	defer cancel()
	l, err := h.current(ctx)
	if err != nil {
		return nil, err
	}
	if l != nil {
		return l, h.ensureTable(ctx, l, inTable)
	}
	if l, err = h.newLocks(ctx); err != nil {
		return nil, err
	}
	if err := h.ensureTable(ctx, l, inTable); err != nil {
		l.close()
		return nil, err
	}
	h.locks.Store(l)
	return l, nil
}

// current returns the Locks for the server as it is now; nil if there are none yet. It fails if nothing can be
// locked on that server. The caller holds h.mu.
func (h *Handle) current(ctx context.Context) (*Locks, error) {
	l := h.locks.Load()
	if l == nil || !h.doubt.Load() {
		return l, nil
	}
	ctx, cancel := server.Within(ctx, 3*time.Second) // others wait for this
	defer cancel()
	conn, closed, err := h.fresh(ctx, h.connectors.App)
	if err != nil {
		return l, nil // a statement of the caller will fail with the reason
	}
	defer closed()
	info, err := server.Probe(ctx, conn)
	if err == nil {
		err = h.reliable(info)
	}
	if err == nil && info.Router {
		err = server.NotSplit(ctx, conn)
	}
	if errors.Is(err, lockerr.ErrUnsafe) {
		return nil, err
	}
	if err != nil {
		return l, nil
	}
	if err := info.Writable(); err != nil && !h.Settings.Unsafe {
		return nil, err
	}
	h.doubt.Store(false)
	if info.Alike(l.Info()) {
		l.server.Store(&info)
		return l, nil
	}
	// Units of work that use l go on. l is used again if the server becomes what it was: so there are no
	// more Locks than there are kinds of servers.
	l.keep(false)
	i := slices.IndexFunc(h.former, func(f *Locks) bool { return f.Info().Alike(info) })
	if i < 0 {
		h.former = append(h.former, l)
		h.locks.Store(nil)
		return nil, nil
	}
	h.former[i], l = l, h.former[i]
	l.keep(true)
	l.server.Store(&info)
	h.locks.Store(l)
	return l, nil
}

// Suspect notes a failure after which the handle may have another server, or its server another role, as after a failover.
func (h *Handle) Suspect(err error) {
	if server.Refused(err) || server.Undecided(err) || errors.Is(err, server.ErrReadOnly) || errors.Is(err, server.ErrStatementLog) {
		h.doubt.Store(true)
	}
}

// inTable reports whether the lock table keeps any lock of hinted. Advisory locks need neither the table nor a
// privilege on it.
func (h *Handle) inTable(hinted *hint.Hint) bool {
	return hinted != nil && slices.ContainsFunc(hinted.Locks, func(lock hint.Lock) bool {
		return traitsOf(h.kind(lock.Kind).Strategy).Table
	})
}

// newLocks makes the Locks for the server as it is now, but not the lock table.
func (h *Handle) newLocks(ctx context.Context) (*Locks, error) {
	l := &Locks{open: make(map[any]func(error)), ctx: h.ctx, later: strategy.NewRunning()}
	var found atomic.Pointer[server.Info]
	h.makePools(l, &found)
	info, err := h.ask(ctx, l.Control, &found)
	if err != nil {
		for _, p := range []*pool.Pool{l.sessions, l.leasing, l.advising, l.Control} {
			p.Close()
		}
		return nil, err
	}
	h.makeStrategies(l, info)
	l.KeepAlive = pool.NewKeepAlive(h.Settings.TTL.Truncate(time.Second), info.Silence)
	return l, nil
}

// makePools makes the pools, which open no connection yet. The first connection will be a control connection: it
// notes in found what the server is.
func (h *Handle) makePools(l *Locks, found *atomic.Pointer[server.Info]) {
	s := h.Settings
	plain := func(settings string) func() string {
		return func() string {
			if info := found.Load(); info != nil {
				return info.Plain(settings)
			}
			return ""
		}
	}
	sessions, others, othersAre := s.LockMaxConns, s.LockMaxConns, "lockMaxConns"
	if h.Bounded() {
		sessions = min(sessions, s.MaxConns)
		if most := max(1, s.MaxConns/4); most < others { // lock connections are kept for long: most connections are for units of work
			others, othersAre = most, "a quarter of maxConns"
		}
	}
	control := h.control()
	control.BeforeSetup, control.SetupInstead = h.recognise(found), plain("autocommit = 1")
	control.Check, control.Uses = h.found, "the driver's own statements"
	control.Max, control.Budget, control.Control = pool.ControlMax, h.conns, true
	l.Control = pool.New(control)
	var several func(context.Context, *pool.Conn) (bool, error)
	if h.connectors.Session.Several {
		several = func(ctx context.Context, c *pool.Conn) (bool, error) {
			return h.packets.takes(ctx, c, found.Load().Flavour)
		}
	}
	// wait_timeout is what frees the lock of a holder that vanished without
	// closing its connection; autocommit=0 saves the round trip of BEGIN.
	l.sessions = pool.New(pool.Config{
		Connect: h.connect, Several: several, Splits: h.connectors.splits(), ByCalls: h.ByCalls(), Check: h.found,
		SetupInstead: plain("autocommit = 0"), Max: sessions, Uses: "sessions", MaxFrom: "lockMaxConns", Idle: s.TTL / 2, Budget: h.conns,
		Setup: fmt.Sprintf("SET "+server.Pin+" autocommit = 0, wait_timeout = %d", int(s.TTL/time.Second)) +
			server.InSession(int(s.TTL/time.Second)),
	})
	l.leasing = pool.New(pool.Config{
		Connect: func(ctx context.Context) (driver.Conn, error) {
			return h.connectOr(ctx, h.connectors.Lease, h.connectors.LeaseSingly)
		},
		Several: several, Check: h.leasable, SetupInstead: plain(lease.Plain),
		Ask: func() string { return l.server.Load().LeaseLog() }, Max: others, Uses: "leases", MaxFrom: othersAre,
		Idle: s.TTL / 2, Setup: lease.Setup(s.TTL), Budget: h.conns, Keeps: true,
	})
	l.advising = pool.New(pool.Config{
		Connect: h.connectors.Advisory.Connect, Check: h.found, Max: others, Uses: "advisory locks", MaxFrom: othersAre, Idle: s.TTL / 2,
		Setup: advisory.Setup(s.TTL), Budget: h.conns, Keeps: true,
	})
}

// keep says whether the budget keeps connections free for l: it does for the Locks that new callers use.
func (l *Locks) keep(keeps bool) {
	l.leasing.Keep(keeps)
	l.advising.Keep(keeps)
}

// control returns how control connections are opened. A DDL or insert that is blocked must not occupy one for
// long. And the locks of one must not stay when this program vanishes.
func (h *Handle) control() pool.Config {
	settings := h.Settings
	return pool.Config{
		Connect: h.connectors.Control.Connect, Idle: settings.TTL / 2,
		Setup: fmt.Sprintf("SET "+server.Pin+" autocommit = 1, %s, innodb_lock_wait_timeout = 5, lock_wait_timeout = 2, wait_timeout = %d",
			server.OwnSettings, int(settings.TTL/time.Second)),
	}
}

// killing is control for connections that kill abandoned statements. It refuses a server whose KILL may do more
// than end a connection.
func (h *Handle) killing() pool.Config {
	cfg := h.control()
	cfg.BeforeSetup = func(ctx context.Context, conn driver.Conn) error {
		info, err := server.Probe(ctx, conn)
		if err == nil && !info.Kills {
			err = errors.New("the server's KILL may do more than end a connection")
		}
		return err
	}
	return cfg
}

// found notes the settings with which new connections of this handle begin. It fails if COMMIT would do more on
// them than commit.
func (h *Handle) found(f pool.Found) error {
	h.manual.Store(!f.Autocommit)
	if f.CompletionType != "NO_CHAIN" {
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("completion_type is %s, so that a COMMIT begins the next transaction"+
			" or ends the connection; say completion_type=NO_CHAIN in the DSN", f.CompletionType))
	}
	return nil
}

// leasable is found for connections for leases. It also looks at binlog_format, which may have changed since the
// handle asked the server, or may be that of another server.
func (h *Handle) leasable(f pool.Found) error {
	if f.Asked == "1" && !h.Settings.Unsafe {
		return server.ErrStatementLog
	}
	return h.found(f)
}

// recognise returns a function that asks a new connection what its server is, before anything else is sent, and
// notes the answer in found. The function fails if nothing can be locked on the server.
func (h *Handle) recognise(found *atomic.Pointer[server.Info]) func(context.Context, driver.Conn) error {
	return func(ctx context.Context, conn driver.Conn) error {
		if found.Load() != nil {
			return nil
		}
		info, err := server.Probe(ctx, conn)
		switch {
		case err == nil:
			found.Store(&info)
			return h.reliable(info)
		case server.Number(err) != 0: // perhaps a limit of the account has ended the question; Handle.ask asks again
			return nil
		}
		return err
	}
}

// reliable returns an error if the server does not keep locks, or if nobody knows whether it does.
func (h *Handle) reliable(info server.Info) error {
	if h.Settings.Unsafe {
		return nil
	}
	return info.Reliable()
}

// ask opens the first connection, and returns what the server is. It fails if nothing can be locked there.
func (h *Handle) ask(ctx context.Context, control *pool.Pool, found *atomic.Pointer[server.Info]) (info server.Info, err error) {
	c, err := control.Acquire(ctx)
	if err != nil {
		return info, err
	}
	if known := found.Load(); known != nil {
		info = *known
	} else if info, err = server.Probe(ctx, c.Conn); err == nil {
		found.Store(&info)
		err = h.reliable(info)
	}
	if server.Broken(err) || !traitsOf(h.Settings.Strategy).Table { // without the table there is hardly any use for a control connection
		c.Destroy()
	} else {
		c.Release()
	}
	if err == nil && info.Router {
		err = h.notSplit(ctx)
	}
	if err == nil && !h.Settings.Unsafe {
		err = info.Writable()
	}
	return info, err
}

// fresh opens a connection for one question. With a budget it needs a permit of that.
func (h *Handle) fresh(ctx context.Context, connector driver.Connector) (conn driver.Conn, closed func(), err error) {
	p := pool.New(pool.Config{Connect: connector.Connect, Max: 1, Budget: h.conns, Control: true, Bare: true})
	c, err := p.Acquire(ctx)
	if err != nil {
		p.Shut()
		return nil, nil, err
	}
	return c.Conn, func() { c.Destroy(); p.Shut() }, nil
}

// notSplit fails if a MySQL Router sends reads to other servers than writes. It asks on a connection that is not
// pinned to one of them.
func (h *Handle) notSplit(ctx context.Context) error {
	conn, closed, err := h.fresh(ctx, h.connectors.Control)
	if err != nil {
		return err
	}
	defer closed()
	return server.NotSplit(ctx, conn)
}

// makeStrategies makes the strategies for a server as info describes it.
func (h *Handle) makeStrategies(l *Locks, info server.Info) {
	cfg := h.Settings.Config
	cfg.Info, cfg.Control = info, l.Control
	cfg.Table, cfg.Namespace = cfg.Table.In(info.Database), cmp.Or(cfg.Namespace, info.Database)
	l.server.Store(&info)
	l.table, l.namespace, l.rows = cfg.Table, cfg.Namespace, keyrow.New(cfg.Config)
	l.queue, l.queues = new(queue.Queue), make(map[string]*queue.Queue)
	for _, t := range known {
		if !t.Table {
			l.queues[t.Name] = new(queue.Queue)
		}
	}
	cfg.Rows, cfg.Queue = l.rows, l.queue
	leases, advisories := cfg, cfg
	leases.Conns, leases.ReadTimeout = l.leasing, h.connectors.Lease.ReadTimeout
	l.leases = lease.New(leases)
	advisories.Conns, advisories.ReadTimeout, advisories.Queue = l.advising, h.connectors.Advisory.ReadTimeout, l.queues[hint.StrategyAdvisory]
	l.advisories = advisory.New(advisories)
	cfg.Await, cfg.ReadTimeout = l.leases.Await, h.connectors.Session.ReadTimeout
	l.RowLocks = rowlock.New(cfg)
	l.kept = map[string]strategy.Strategy{
		hint.StrategyLease: l.leases, hint.StrategyAdvisory: l.advisories.Strategy(), hint.StrategyOptimistic: optimistic.New(cfg),
	}
}

// Info returns what the server has told about itself.
func (l *Locks) Info() server.Info { return l.RowLocks.Info() }

// By returns the strategy that keeps resource outside of transactions.
func (l *Locks) By(resource strategy.Resource) strategy.Strategy { return l.kept[resource.Strategy] }

// queueOf returns the queue in which the handle's callers queue up for resource.
func (l *Locks) queueOf(resource strategy.Resource) *queue.Queue {
	if resource.Traits.Table {
		return l.queue
	}
	return l.queues[resource.Strategy]
}

// Claim notes in the queue for rows that resources are locked by a caller that has not queued up for them.
func (l *Locks) Claim(resources []strategy.Resource) *queue.Ticket {
	return l.queue.Claim(QueueKeys(resources))
}

// ensureTable makes the lock table, unless it is there, or the caller's locks are not in it.
func (h *Handle) ensureTable(ctx context.Context, l *Locks, inTable bool) error {
	if !inTable || l.tableReady.Load() {
		return nil
	}
	c, err := l.Control.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	if err := l.table.Ensure(ctx, c.Conn, l.Info(), h.Settings.Auto); err != nil {
		return err
	}
	if h.Settings.Stripes > 0 {
		if err := l.rows.Agree(ctx, c.Conn); err != nil {
			return err
		}
	}
	l.tableReady.Store(true)
	return nil
}

// Background runs f, for which its caller does not wait. Close does wait for f, since after Close f has no
// connections.
func (l *Locks) Background(f func(context.Context)) {
	l.later.Background(func(context.Context) {
		ctx, cancel := server.Within(context.Background(), 10*time.Second)
		defer cancel()
		f(ctx)
	})
}

func (l *Locks) close() {
	l.KeepAlive.Close()
	l.mu.Lock()
	open := slices.Collect(maps.Values(l.open))
	l.mu.Unlock()
	var units sync.WaitGroup // a server that does not answer holds up each ROLLBACK for as long
	for _, abandon := range open {
		units.Go(func() { abandon(lockerr.ErrClosed) })
	}
	units.Wait()
	var both sync.WaitGroup // waiters of both hear of the close at once
	both.Go(l.leases.Close)
	both.Go(l.advisories.Close)
	both.Wait()
	l.later.Stop()
	l.later.Wait()
	l.sessions.Close()
	l.leasing.Close()
	l.advising.Close()
	l.RowLocks.Close()
	l.Control.Close()
}

// UntilClosed returns a context that also ends when the handle is closed.
func (l *Locks) UntilClosed(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(l.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

// Remember notes that abandon ends the unit of work u when the handle is closed. Forget takes that back.
func (l *Locks) Remember(u any, abandon func(error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open[u] = abandon
}

// inUse reports whether a unit of work is open on a session.
func (l *Locks) inUse() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.open) > 0
}

// Forget notes that the unit of work u has ended.
func (l *Locks) Forget(u any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.open, u)
}

// StaleSnapshot reports whether a transaction would still show data from before it has the locks of h. read: a
// query has run in it. levels are the isolation levels that it may have. versions: the transaction is to
// remember a version, which says nothing of earlier reads.
func (l *Locks) StaleSnapshot(read, versions bool, h *hint.Hint, levels sqltext.Levels) bool {
	switch {
	case !read && !l.Info().EarlySnapshot, h.AllowStale && !versions:
		return false
	case levels == 0:
		return l.Info().RepeatableRead()
	}
	return levels&(sqltext.RepeatableRead|sqltext.Serializable) != 0
}

// LockedLevel returns the isolation level of a transaction that begins with a row lock, or on a session; 0 for
// that of a new connection.
func (l *Locks) LockedLevel() sqltext.Levels {
	if l.Info().EarlySnapshot {
		return sqltext.ReadCommitted
	}
	return 0
}

// ReadsLock reports whether a plain read in a transaction locks the rows that it reads, as it does if new
// connections are SERIALIZABLE.
func (l *Locks) ReadsLock() bool {
	return sqltext.Level(l.Info().Isolation)&sqltext.Serializable != 0
}

// Dirty returns why a unit of work cannot compare versions at one of these levels; nil if it can.
func (l *Locks) Dirty(levels sqltext.Levels) error {
	if levels == 0 {
		levels = sqltext.Level(l.Info().Isolation)
	}
	if levels&sqltext.ReadUncommitted == 0 {
		return nil
	}
	return lockerr.With(lockerr.ErrUnsafe, errors.New(
		"at READ UNCOMMITTED what is read may be rolled back, and no version tells; read at READ COMMITTED or above with lockctx.Optimistic"))
}
