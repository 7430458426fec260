package mysqllock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lease"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/optimistic"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
)

// locks is what a handle needs once a lock is asked for.
type locks struct {
	*rowlock.Locker
	leases     *lease.Locker
	advisories *advisory.Locker
	versions   *optimistic.Locker
	table      schema.Table
	furnished  atomic.Bool // it is there
	rows       *keyrow.Rows
	line       *queue.Queue // where the callers of this process line up for rows
	owner      string       // how this process calls itself
	sessions   *pool.Pool   // connections on which units of work live outside any sql.Tx
	leasing    *pool.Pool   // connections for leases
	advising   *pool.Pool   // connections for advisory locks
	control    *pool.Pool   // connections for making rows, asking who holds, killing waiters
	keeper     *pool.Keeper // keeps sessions alive

	mu   sync.Mutex
	open map[*unit]struct{} // units on sessions

	ctx   context.Context // the connector's: ends when the handle is closed
	later sync.WaitGroup  // work that its caller did not wait for
}

// use returns what is needed for the locks of h, making it at first use; h is nil
// for what needs none. Making it does not end with ctx, so that callers in a hurry
// do not start it over and over. A failure is not remembered: the next hint tries
// again.
func (k *connector) use(ctx context.Context, h *lockctx.Hint) (*locks, error) {
	if l := k.locks.Load(); l != nil && (l.furnished.Load() || !k.inTable(h)) && !k.doubt.Load() && k.ctx.Err() == nil {
		return l, nil
	}
	inTable := k.inTable(h)
	made := k.making.DoChan(strconv.FormatBool(inTable), func() (any, error) { return k.provide(inTable) })
	select {
	case r := <-made:
		switch {
		case k.ctx.Err() != nil:
			return nil, ErrClosed
		case r.Err != nil:
			return nil, r.Err
		}
		return r.Val.(*locks), nil
	case <-ctx.Done():
		return nil, lockerr.With(ErrTimeout, ctx.Err())
	}
}

// provide returns what is needed for locks on the server as it is now, with the
// lock table where they are to be in it.
func (k *connector) provide(inTable bool) (*locks, error) {
	k.mu.Lock() // Close waits until we are done
	defer k.mu.Unlock()
	if k.ctx.Err() != nil {
		return nil, ErrClosed
	}
	ctx, cancel := context.WithTimeout(k.ctx, 20*time.Second)
	defer cancel()
	l, err := k.current(ctx)
	if err != nil {
		return nil, err
	}
	if l != nil {
		return l, k.furnish(ctx, l, inTable)
	}
	if l, err = k.newLocks(ctx); err != nil {
		return nil, err
	}
	if err := k.furnish(ctx, l, inTable); err != nil {
		l.close()
		return nil, err
	}
	k.locks.Store(l)
	return l, nil
}

// current returns what was made for the server as it is now: nil where nothing was
// yet, and an error where nothing can be locked on it. k.mu is the caller's.
func (k *connector) current(ctx context.Context) (*locks, error) {
	l := k.locks.Load()
	if l == nil || !k.doubt.Load() {
		return l, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second) // others wait for this
	defer cancel()
	conn, err := k.base.Connect(ctx)
	if err != nil {
		return l, nil // what l is asked for will say why
	}
	defer conn.Close()
	info, err := server.Probe(ctx, conn)
	if err != nil {
		return l, nil
	}
	if err := info.Writable(); err != nil && !k.settings.unsafe {
		return nil, err
	}
	k.doubt.Store(false)
	if info == l.Info() {
		return l, nil
	}
	// Who uses l goes on. It is used again where the server is what it was, so that
	// there are no more of them than there are kinds of servers.
	at := slices.IndexFunc(k.former, func(f *locks) bool { return f.Info() == info })
	if at < 0 {
		k.former = append(k.former, l)
		k.locks.Store(nil)
		return nil, nil
	}
	k.former[at], l = l, k.former[at]
	k.locks.Store(l)
	return l, nil
}

// suspect notes a failure after which the server may not be what it was: a failover
// makes another one of it, and changes roles.
func (k *connector) suspect(err error) {
	if server.Refused(err) || server.Undecided(err) || errors.Is(err, server.ErrReadOnly) {
		k.doubt.Store(true)
	}
}

// inTable reports whether the lock table keeps any lock of h. Advisory locks need
// neither the table nor a privilege on it.
func (k *connector) inTable(h *lockctx.Hint) bool {
	return h != nil && slices.ContainsFunc(h.Locks, func(lock lockctx.Lock) bool {
		return k.kind(lock.Kind).Strategy != lockctx.StrategyAdvisory
	})
}

// newLocks makes what is needed for locks on the server as it is now, all but the
// lock table.
func (k *connector) newLocks(ctx context.Context) (_ *locks, err error) {
	l := &locks{owner: k.settings.owner, open: make(map[*unit]struct{}), ctx: k.ctx}
	defer func() {
		if err != nil {
			l.closePools()
		}
	}()
	if err := k.makePools(l); err != nil {
		return nil, err
	}
	info, err := k.ask(ctx, l.control)
	if err != nil {
		return nil, err
	}
	k.makeStrategies(l, info)
	l.keeper = pool.NewKeeper(k.settings.ttl.Truncate(time.Second))
	return l, nil
}

// makePools makes the pools of connections. It opens none.
func (k *connector) makePools(l *locks) (err error) {
	s := k.settings
	// A blocked DDL or insert must not occupy a control connection for long.
	if l.control, err = pool.New(pool.Config{
		Connect: k.own.Connect, Max: controlConns, Idle: s.ttl,
		Setup: "SET SESSION autocommit = 1, sql_select_limit = DEFAULT, innodb_lock_wait_timeout = 5, lock_wait_timeout = 2",
	}); err != nil {
		return err
	}
	// wait_timeout is what frees the lock of a holder that vanished without
	// closing its connection; autocommit=0 saves the round trip of BEGIN.
	if l.sessions, err = pool.New(pool.Config{
		Connect: k.base.Connect, Max: s.maxConns, Idle: s.ttl / 2,
		Setup: fmt.Sprintf("SET SESSION autocommit = 0, wait_timeout = %d", int(s.ttl/time.Second)),
	}); err != nil {
		return err
	}
	if l.leasing, err = pool.New(pool.Config{
		Connect: k.own.Connect, Max: s.maxConns, Idle: s.ttl / 2, Setup: lease.Setup(s.ttl),
	}); err != nil {
		return err
	}
	l.advising, err = pool.New(pool.Config{
		Connect: k.carriers.Connect, Max: s.maxConns, Idle: s.ttl / 2, Setup: advisory.Setup(s.ttl),
	})
	return err
}

// ask asks what the server is. It is an error where nothing can be locked on it.
func (k *connector) ask(ctx context.Context, control *pool.Pool) (server.Info, error) {
	c, err := control.Acquire(ctx)
	if err != nil {
		return server.Info{}, err
	}
	defer func() {
		if k.settings.strategy == lockctx.StrategyAdvisory {
			c.Destroy() // which has hardly any use for another one
			return
		}
		c.Release()
	}()
	info, err := server.Probe(ctx, c.Conn)
	if err == nil && !k.settings.unsafe {
		err = info.Writable()
	}
	return info, err
}

// makeStrategies makes the strategies, for a server that is what info says.
func (k *connector) makeStrategies(l *locks, info server.Info) {
	s := k.settings
	l.table = s.table.In(info.Database)
	namespace := s.namespace
	if namespace == "" {
		namespace = info.Database
	}
	l.rows = keyrow.New(keyrow.Config{
		Control: l.control, Table: l.table, Namespace: namespace, Info: info, Auto: s.auto, Procedure: !info.MariaDB, Stripes: s.stripes,
	})
	l.line = new(queue.Queue)
	l.leases = lease.New(lease.Config{
		Conns: l.leasing, Control: l.control, Rows: l.rows, Queue: l.line, Table: l.table, Namespace: namespace,
		Owner: s.owner, Info: info, TTL: s.ttl, HandOvers: s.handOvers, HandOverTime: s.handOverTime,
	})
	l.advisories = advisory.New(advisory.Config{
		Conns: l.advising, Control: l.control, Queue: new(queue.Queue), Namespace: namespace,
		Owner: s.owner, Info: info, TTL: s.ttl, Unsafe: s.unsafe, ReadTimeout: k.carriersReadTimeout,
		HandOvers: s.handOvers, HandOverTime: s.handOverTime,
	})
	l.versions = optimistic.New(optimistic.Config{
		Control: l.control, Rows: l.rows, Table: l.table, Namespace: namespace, Info: info, TTL: s.ttl, Await: l.leases.Await,
	})
	l.Locker = rowlock.New(rowlock.Config{
		Control: l.control, Rows: l.rows, Queue: l.line, Table: l.table, Namespace: namespace,
		Owner: s.owner, Info: info, TTL: s.ttl, ReadTimeout: k.readTimeout, Unsafe: s.unsafe, Await: l.leases.Await,
	})
}

// closePools closes the pools that there are, of locks that were not made to the end.
func (l *locks) closePools() {
	for _, p := range []*pool.Pool{l.sessions, l.leasing, l.advising, l.control} {
		if p != nil {
			p.Close()
		}
	}
}

// furnish sees to it that the lock table is there, for locks that are to be in it.
func (k *connector) furnish(ctx context.Context, l *locks, inTable bool) error {
	if !inTable || l.furnished.Load() {
		return nil
	}
	c, err := l.control.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	procedure, err := l.table.Ensure(ctx, c.Conn, l.Info(), k.settings.auto)
	if err != nil {
		return err
	}
	if !procedure {
		l.rows.NoProcedure()
	}
	if k.settings.stripes > 0 {
		if err := l.rows.Agree(ctx, c.Conn); err != nil {
			return err
		}
	}
	l.furnished.Store(true)
	return nil
}

// background does something that its caller need not wait for, but Close does.
func (l *locks) background(f func(context.Context)) {
	l.later.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		f(ctx)
	})
}

func (l *locks) close() {
	l.keeper.Close()
	l.mu.Lock()
	var open []*unit
	for u := range l.open {
		open = append(open, u)
	}
	l.mu.Unlock()
	for _, u := range open {
		u.abandon(ErrClosed)
	}
	var both sync.WaitGroup // who waits hears of it at once
	both.Go(l.leases.Close)
	both.Go(l.advisories.Close)
	both.Wait()
	l.later.Wait()
	l.sessions.Close()
	l.leasing.Close()
	l.advising.Close()
	l.Locker.Close()
	l.control.Close()
}
