package lease

import (
	"context"
	"database/sql/driver"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/batch"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// lockConn is a lock connection. It runs the statements of many leases, one after the other, and has their wake-up locks,
// which only the same connection can release. It stays out of the pool as long as it has a wake-up lock.
//
// Package advisory has lock connections of another kind. There the named lock is the lock, so each statement is checked,
// none ever waits, and a holder that loses its connection loses its lock. In this package any statement has its turn, a
// lost connection costs waiters a quarter of a second, and a connection without a wake-up lock goes back to the pool at
// once. Both packages gather requests by package batch, poll at the pace of package strategy, and begin a wait as
// package server does. The two kinds differ in who opens a connection, how long it stays without a lock, whether a caller
// waits for its turn or joins a batch, how many locks it has, what pings it, and by which clock it is lost. One kind for
// both would have to be told all that.
type lockConn struct {
	c        *pool.Conn
	waits    bool                  // the connection is a waiter's own, on which the waiter may block; guarded by the turn
	lent     bool                  // the connection is a caller's session, which nobody else uses: see takeOnSession
	releases batch.Group[*leaving] // releases of leases in wakeUps
	stale    batch.Group[*Grant]   // leases in wakeUps that are over, so that their wake-up locks are to be given back

	// Guarded by Locker.mu.
	wakeUps map[string]*Grant // by key, the leases whose wake-up locks the connection has
	queued  int               // how many callers wait for the turn
	gone    bool              // the connection is destroyed, or back in the pool
}

// maxWakeUps is how many wake-up locks a lock connection may have. MariaDB takes longer for each wake-up lock the more
// there are: with 5,000 of them, four times as long for a batch of requests as with none (measured on MariaDB 10.11).
// MySQL 9.7 takes no longer.
const maxWakeUps = 2000

// hasRoom reports whether lc may have more wake-up locks. The caller holds l.mu.
func (l *Locker) hasRoom(lc *lockConn) bool { return len(lc.wakeUps) < maxWakeUps }

const (
	// spare is how many connections waiters leave to callers that take, renew and release leases.
	spare = 2
)

// exec runs a statement. The caller has the turn. After an error that is not the server's answer, nobody can use the
// connection any more.
func (lc *lockConn) exec(ctx context.Context, text string) (driver.Result, error) {
	result, err := server.Change(ctx, lc.c.Conn, text)
	lc.noted(err)
	return result, err
}

// change is exec for a block.
func (lc *lockConn) change(ctx context.Context, block pool.Block) (driver.Result, error) {
	result, err := lc.c.ChangeBlock(ctx, block)
	lc.noted(err)
	return result, err
}

// query is exec for a statement that returns rows.
func (lc *lockConn) query(ctx context.Context, text string) ([][]string, error) {
	rows, err := server.Query(ctx, lc.c.Conn, text)
	lc.noted(err)
	return rows, err
}

// send is exec for several statements: see [pool.Conn.Send].
func (lc *lockConn) send(ctx context.Context, texts ...string) ([][][]string, error) {
	answers, err := lc.c.Send(ctx, texts...)
	lc.noted(err)
	return answers, err
}

func (lc *lockConn) noted(err error) {
	switch {
	case err == nil:
		lc.c.Touch()
	case server.Number(err) == 0 || server.Gone(err, lc.c.Conn):
		lc.c.Taint()
	}
}

// borrow returns a lock connection and its turn: a free connection, else a new one if there may be more, else the connection
// with the shortest queue. Call giveBack when done. If that connection was closed, for example because the server was
// restarted, borrow looks for another.
func (l *Locker) borrow(ctx context.Context) (*lockConn, error) {
	return l.borrowOf(ctx, l.maxLockConns)
}

// borrowOf is borrow, with no more than most lock connections.
func (l *Locker) borrowOf(ctx context.Context, most int) (*lockConn, error) {
	for {
		l.mu.Lock()
		free, busy, more := l.pick(most)
		arrived := l.arrived
		l.mu.Unlock()
		if free != nil {
			if free.c.Fresh(ctx) {
				return free, nil
			}
			l.drop(free)
			continue
		}
		if busy == nil || more && l.cfg.Conns.Ready() {
			lc, err := l.connect(ctx, arrived, busy != nil)
			if lc != nil || busy == nil && err != nil {
				return lc, err
			}
		}
		if busy == nil {
			continue
		}
		patient, cancel := ctx, func() {}
		if more { // while the caller waits, the pool may get room for another one
			patient, cancel = server.Within(ctx, strategy.OpeningTime)
		}
		ours, err := l.awaitTurnFor(ctx, patient, busy)
		cancel()
		if ours {
			return busy, nil
		} else if err != nil {
			return nil, err
		}
	}
}

// pick returns a free lock connection, with its turn. If no connection is free, pick returns the one with the shortest
// queue, nil if there is none, and whether there may be more: most in all, not counting those without room. The caller holds l.mu.
func (l *Locker) pick(most int) (free, busy *lockConn, more bool) {
	room, roomy := 0, false // how many have room for wake-up locks, and whether busy has
	for _, lc := range l.lockConns {
		hasRoom := l.hasRoom(lc)
		if hasRoom && lc.c.TryTurn() {
			return lc, nil, false
		}
		if hasRoom {
			room++
		}
		if busy == nil || hasRoom && !roomy || hasRoom == roomy && lc.queued < busy.queued {
			busy, roomy = lc, hasRoom
		}
	}
	return nil, busy, room < most
}

// connect makes a lock connection of a connection of the pool. It returns nil if another lock connection has arrived
// meanwhile, which ends the context arrived. With optional it also returns nil if no connection is free for a while.
func (l *Locker) connect(ctx, arrived context.Context, optional bool) (*lockConn, error) {
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(arrived, cancel)()
	c, err := l.poolConn(own, pool.As{}, optional)
	if c == nil {
		if own.Err() != nil && ctx.Err() == nil { // another one has arrived
			err = nil
		}
		return nil, err
	}
	lc := &lockConn{c: c, wakeUps: make(map[string]*Grant)}
	l.addLockConn(lc)
	return lc, nil
}

func (l *Locker) poolConn(ctx context.Context, as pool.As, optional bool) (*pool.Conn, error) {
	actx, cancel := ctx, func() {}
	if optional {
		actx, cancel = server.Within(ctx, strategy.OpeningTime)
	}
	defer cancel()
	c, err := l.cfg.Conns.AcquireAs(actx, as)
	if err != nil && optional && ctx.Err() == nil && actx.Err() != nil {
		return nil, nil
	}
	return c, err
}

// addLockConn lets other callers use lc, too. lc may have been a waiting connection.
func (l *Locker) addLockConn(lc *lockConn) {
	l.mu.Lock()
	if lc.waits {
		lc.waits = false
		lc.c.Unblocked()
		l.waitConns--
	}
	l.lockConns = append(l.lockConns, lc)
	l.arrive()
	l.arrived, l.arrive = context.WithCancel(context.Background())
	l.mu.Unlock()
	l.keepAlive.Keep(lc.c, func(error) {
		if ours, _ := l.awaitTurn(context.Background(), lc); ours {
			l.drop(lc)
		}
	})
}

// awaitTurn waits for the turn of lc. It returns false if lc is gone by then.
func (l *Locker) awaitTurn(ctx context.Context, lc *lockConn) (bool, error) {
	return l.awaitTurnFor(ctx, ctx, lc)
}

// awaitTurnFor is awaitTurn until patient ends, which is derived from ctx. If patient ends first, it returns false.
func (l *Locker) awaitTurnFor(ctx, patient context.Context, lc *lockConn) (bool, error) {
	l.mu.Lock()
	gone := lc.gone
	lc.queued++
	l.mu.Unlock()
	var err error
	if !gone {
		err = lc.c.AwaitTurn(patient)
	}
	l.mu.Lock()
	lc.queued--
	nowGone := lc.gone
	l.mu.Unlock()
	if !gone && err == nil && nowGone {
		lc.c.EndTurn()
	}
	switch {
	case err != nil && ctx.Err() == nil && patient.Err() != nil:
		return false, nil
	case err != nil || nowGone:
		return false, err
	case !lc.c.Fresh(ctx):
		l.drop(lc)
		return false, nil
	}
	return true, nil
}

// giveBack ends the caller's turn. If lc has no wake-up locks, and nobody waits for it, giveBack puts lc back into the pool.
func (l *Locker) giveBack(lc *lockConn) {
	if !lc.c.Clean() {
		l.drop(lc)
		return
	}
	l.mu.Lock()
	idle := len(lc.wakeUps) == 0 && lc.queued == 0
	if idle {
		l.shut(lc)
	}
	l.mu.Unlock()
	if idle {
		l.keepAlive.Forget(lc.c)
		lc.c.Release()
	} else {
		lc.c.EndTurn()
	}
}

// drop ends the caller's turn and closes the connection. Leases go on without their wake-up locks, and callers that wait
// for these leases poll.
func (l *Locker) drop(lc *lockConn) {
	l.mu.Lock()
	l.shut(lc)
	for _, g := range lc.wakeUps {
		g.conn = nil
	}
	if lc.waits {
		l.waitConns--
	}
	l.mu.Unlock()
	l.keepAlive.Forget(lc.c)
	lc.c.Destroy()
}

func (l *Locker) isGone(lc *lockConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return lc.gone
}

func (l *Locker) shut(lc *lockConn) {
	lc.gone = true
	l.lockConns = slices.DeleteFunc(l.lockConns, func(other *lockConn) bool { return other == lc })
}

// releaseWakeUpsOn gives back those wake-up locks of keys that lc has. The caller has the turn of lc.
func (l *Locker) releaseWakeUpsOn(ctx context.Context, lc *lockConn, keys ...string) {
	if len(keys) == 0 || !lc.c.Clean() || !l.wakes {
		return
	}
	if _, err := lc.exec(ctx, l.releaseWakeUpsSQL(keys...)); err != nil {
		lc.c.Taint()
	}
}

// releaseWakeUps gives back the wake-up locks of leases that are over.
func (l *Locker) releaseWakeUps(lc *lockConn) {
	if ours, _ := l.awaitTurn(l.running.Ctx, lc); !ours {
		return
	}
	defer l.giveBack(lc)
	for more := true; more; {
		var over []*Grant
		over, more = lc.stale.Depart(rowsPerStatement)
		l.releaseWakeUpsOf(lc, over)
	}
}

// releaseWakeUpsOf gives back the wake-up locks of some leases. The caller has the turn of lc.
func (l *Locker) releaseWakeUpsOf(lc *lockConn, over []*Grant) {
	var keys []string
	l.mu.Lock()
	over = slices.DeleteFunc(over, func(g *Grant) bool { return lc.wakeUps[g.key] != g }) // the key's next lease has it
	l.mu.Unlock()
	for _, g := range over {
		keys = append(keys, g.key)
	}
	ctx, cancel := server.Within(l.running.Ctx, background)
	defer cancel()
	l.releaseWakeUpsOn(purpose.Named(ctx, purpose.Release, hint.StrategyLease, keys...), lc, keys...)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		delete(lc.wakeUps, key)
	}
}

// awaitDropped waits until this process does not have the wake-up lock of key any more, if that is to be given back. Else
// a caller that takes the lease in its turn would find that another connection has the wake-up lock.
func (l *Locker) awaitDropped(ctx context.Context, key string) {
	l.mu.Lock()
	i := slices.IndexFunc(l.lockConns, func(lc *lockConn) bool { return lc.wakeUps[key] != nil })
	var lc *lockConn
	if i >= 0 {
		lc = l.lockConns[i]
	}
	l.mu.Unlock()
	if lc == nil {
		return
	}
	if ours, _ := l.awaitTurn(ctx, lc); ours {
		l.releaseWakeUpsOf(lc, lc.stale.Along(rowsPerStatement))
		l.giveBack(lc)
	}
}

// openWaitConn returns a connection on which a waiter may block, and its turn; nil if waiters have enough of them, or if
// none is free for a while. Leave the connection with leaveWaitConn, or make it a lock connection.
func (l *Locker) openWaitConn(ctx context.Context) (*lockConn, error) {
	l.mu.Lock()
	free := l.wakes && l.waitConns < l.cfg.Conns.Stat().Max-spare && l.cfg.Conns.Ready()
	if free {
		l.waitConns++
	}
	l.mu.Unlock()
	if !free {
		return nil, nil
	}
	c, err := l.poolConn(ctx, pool.As{Waits: true}, true)
	if c == nil {
		l.mu.Lock()
		l.waitConns--
		l.mu.Unlock()
		return nil, err
	}
	return &lockConn{c: c, waits: true, wakeUps: make(map[string]*Grant)}, nil
}

// leaveWaitConn ends the waiting for key's wake-up lock on lc, and gives the wake-up lock back if lc has it.
func (l *Locker) leaveWaitConn(lc *lockConn, key string) {
	ctx, cancel := server.Within(releasing(key), background)
	defer cancel()
	l.releaseWakeUpsOn(ctx, lc, key)
	l.mu.Lock()
	l.waitConns--
	l.mu.Unlock()
	lc.c.Release()
}

// listen waits for key's wake-up lock on the waiting connection lc, until bound is over. If ctx ends, listen ends the wait
// on the server, and closes lc.
func (l *Locker) listen(ctx context.Context, lc *lockConn, key string, since time.Time, bound time.Duration) (got bool, err error) {
	ctx, cancel := server.Within(ctx, bound+terms.Calmly)
	defer cancel()
	rows, err := lc.query(ctx, l.listenSQL(key, since, bound))
	if server.Interrupted(err) {
		return false, nil
	}
	if err != nil {
		l.kill(lc)
		return false, err
	}
	return len(rows) == 1 && rows[0][0] == "1", nil
}

// kill closes a connection. In the background it tells the server to end the statement that runs there.
func (l *Locker) kill(lc *lockConn) {
	l.drop(lc)
	l.running.Go(func() {
		ctx, cancel := server.Within(context.Background(), background)
		defer cancel()
		_ = l.cfg.Control.KillConnection(ctx, lc.c) // best effort: the server's own bound ends it too
	})
}
