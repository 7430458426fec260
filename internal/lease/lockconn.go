package lease

import (
	"context"
	"database/sql/driver"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/batch"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/pool"
)

// lockConn is a lock connection: it runs the statements of many leases, one after the
// other, and holds their wake-up locks, which only the same connection can release. It
// stays out of the pool as long as it holds one.
type lockConn struct {
	c        *pool.Conn
	waits    bool                  // a waiter's own, on which it may block; guarded by the turn
	lent     bool                  // a caller's session, see takeOnSession: nobody else uses it
	releases batch.Group[*leaving] // of leases whose wake-up locks it carries
	stale    batch.Group[*Lease]   // those of them that were lost

	// Guarded by Locker.mu.
	wakeUps map[string]*Lease // whose wake-up locks it carries, by key
	queued  int               // who waits for the turn
	gone    bool              // destroyed, or back in the pool
}

// maxWakeUps is how many wake-up locks a lock connection may carry. MariaDB takes longer for each
// the more there are: with 5,000 of them, four times as long for a batch of requests as with
// none (measured on MariaDB 10.11), while MySQL 9.7 takes no longer.
const maxWakeUps = 2000

// hasRoom reports whether h may carry more wake-up locks. l.mu is held.
func (l *Locker) hasRoom(h *lockConn) bool { return len(h.wakeUps) < maxWakeUps }

const (
	// spare is how many connections waiters leave to those who take, renew and
	// release.
	spare = 2
)

// exec runs a statement. The turn is the caller's. Whatever is not the server's
// answer leaves a connection that nobody can use any more.
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

// borrow returns a lock connection and its turn: a free one, else a new one if there may be
// more, else the one with the shortest queue. Call giveBack when done. If the connection was
// closed, for example because the server was restarted, borrow looks for another.
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
			h, err := l.connect(ctx, arrived, busy != nil)
			if h != nil || busy == nil && err != nil {
				return h, err
			}
		}
		if busy == nil {
			continue
		}
		patient, cancel := ctx, func() {}
		if more { // meanwhile the pool may have room for another
			patient, cancel = server.Within(ctx, strategy.Pace)
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

// pick returns a free lock connection, with its turn. If there is none, it returns the one
// with the shortest queue, nil without any, and whether there may be more: most in all,
// without those that are full. l.mu is held.
func (l *Locker) pick(most int) (free, busy *lockConn, more bool) {
	room, roomy := 0, false // how many may carry more wake-up locks, and whether busy may
	for _, h := range l.lockConns {
		hasRoom := l.hasRoom(h)
		if hasRoom && h.c.TryTurn() {
			return h, nil, false
		}
		if hasRoom {
			room++
		}
		if busy == nil || hasRoom && !roomy || hasRoom == roomy && h.queued < busy.queued {
			busy, roomy = h, hasRoom
		}
	}
	return nil, busy, room < most
}

// connect makes a lock connection of a connection of the pool's. It returns nil if another
// lock connection has arrived meanwhile, which ends arrived, or if optional is set and
// there is none for a while.
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
	h := &lockConn{c: c, wakeUps: make(map[string]*Lease)}
	l.open(h)
	return h, nil
}

func (l *Locker) poolConn(ctx context.Context, as pool.As, optional bool) (*pool.Conn, error) {
	actx, cancel := ctx, func() {}
	if optional {
		actx, cancel = server.Within(ctx, strategy.Pace)
	}
	defer cancel()
	c, err := l.cfg.Conns.AcquireAs(actx, as)
	if err != nil && optional && ctx.Err() == nil && actx.Err() != nil {
		return nil, nil
	}
	return c, err
}

// open lets others use h, too, which may have been a waiting connection.
func (l *Locker) open(h *lockConn) {
	l.mu.Lock()
	if h.waits {
		h.waits = false
		h.c.Unblocked()
		l.waitConns--
	}
	l.lockConns = append(l.lockConns, h)
	l.arrive()
	l.arrived, l.arrive = context.WithCancel(context.Background())
	l.mu.Unlock()
	l.keepAlive.Keep(h.c, func(error) {
		if ours, _ := l.awaitTurn(context.Background(), h); ours {
			l.drop(h)
		}
	})
}

// awaitTurn waits for the turn of h. It is false where h is gone by then.
func (l *Locker) awaitTurn(ctx context.Context, h *lockConn) (bool, error) {
	return l.awaitTurnFor(ctx, ctx, h)
}

// awaitTurnFor is awaitTurn until patient ends, which is within ctx: then it is false, too.
func (l *Locker) awaitTurnFor(ctx, patient context.Context, h *lockConn) (bool, error) {
	l.mu.Lock()
	gone := h.gone
	h.queued++
	l.mu.Unlock()
	var err error
	if !gone {
		err = h.c.AwaitTurn(patient)
	}
	l.mu.Lock()
	h.queued--
	nowGone := h.gone
	l.mu.Unlock()
	if !gone && err == nil && nowGone {
		h.c.EndTurn()
	}
	switch {
	case err != nil && ctx.Err() == nil && patient.Err() != nil:
		return false, nil
	case err != nil || nowGone:
		return false, err
	case !h.c.Fresh(ctx):
		l.drop(h)
		return false, nil
	}
	return true, nil
}

// giveBack ends the caller's turn, and puts a lock connection without wake-up locks back into the
// pool.
func (l *Locker) giveBack(h *lockConn) {
	if !h.c.Clean() {
		l.drop(h)
		return
	}
	l.mu.Lock()
	idle := len(h.wakeUps) == 0 && h.queued == 0
	if idle {
		l.shut(h)
	}
	l.mu.Unlock()
	if idle {
		l.keepAlive.Forget(h.c)
		h.c.Release()
	} else {
		h.c.EndTurn()
	}
}

// drop ends the caller's turn and closes the connection. Leases go on without
// their wake-up locks, and those who wait for them fall back to polling.
func (l *Locker) drop(h *lockConn) {
	l.mu.Lock()
	l.shut(h)
	for _, s := range h.wakeUps {
		s.conn = nil
	}
	if h.waits {
		l.waitConns--
	}
	l.mu.Unlock()
	l.keepAlive.Forget(h.c)
	h.c.Destroy()
}

func (l *Locker) isGone(h *lockConn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return h.gone
}

func (l *Locker) shut(h *lockConn) {
	h.gone = true
	l.lockConns = slices.DeleteFunc(l.lockConns, func(other *lockConn) bool { return other == h })
}

// releaseWakeUpsOn gives back the wake-up locks of keys where h has them, whose turn is the
// caller's.
func (l *Locker) releaseWakeUpsOn(ctx context.Context, h *lockConn, keys ...string) {
	if len(keys) == 0 || !h.c.Clean() || !l.wakes {
		return
	}
	if _, err := h.exec(ctx, l.releaseWakeUpsSQL(keys...)); err != nil {
		h.c.Taint()
	}
}

// releaseWakeUps gives back the wake-up locks of leases that are over.
func (l *Locker) releaseWakeUps(h *lockConn) {
	if ours, _ := l.awaitTurn(l.running.Ctx, h); !ours {
		return
	}
	defer l.giveBack(h)
	for more := true; more; {
		var over []*Lease
		over, more = h.stale.Depart(rowsPerStatement)
		l.releaseWakeUpsOf(h, over)
	}
}

// releaseWakeUpsOf is releaseWakeUps of some leases. The turn is the caller's.
func (l *Locker) releaseWakeUpsOf(h *lockConn, over []*Lease) {
	var keys []string
	l.mu.Lock()
	over = slices.DeleteFunc(over, func(s *Lease) bool { return h.wakeUps[s.key] != s }) // the key's next lease has it
	l.mu.Unlock()
	for _, s := range over {
		keys = append(keys, s.key)
	}
	ctx, cancel := server.Within(l.running.Ctx, background)
	defer cancel()
	l.releaseWakeUpsOn(purpose.Named(ctx, purpose.Release, hint.StrategyLease, keys...), h, keys...)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, key := range keys {
		delete(h.wakeUps, key)
	}
}

// awaitDropped returns when this process has no wake-up lock of key any more: who takes the lease in its turn
// would find that another connection has it.
func (l *Locker) awaitDropped(ctx context.Context, key string) {
	l.mu.Lock()
	at := slices.IndexFunc(l.lockConns, func(h *lockConn) bool { return h.wakeUps[key] != nil })
	var h *lockConn
	if at >= 0 {
		h = l.lockConns[at]
	}
	l.mu.Unlock()
	if h == nil {
		return
	}
	if ours, _ := l.awaitTurn(ctx, h); ours {
		l.releaseWakeUpsOf(h, h.stale.Along(rowsPerStatement))
		l.giveBack(h)
	}
}

// openWaitConn returns a connection on which a waiter may block, and its turn; nil
// where waiters have enough of them or there is none for a while. Leave it, or
// make it a lock connection.
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
	return &lockConn{c: c, waits: true, wakeUps: make(map[string]*Lease)}, nil
}

// leaveWaitConn ends the waiting for key's wake-up lock on h, and gives the wake-up lock back if
// h has it.
func (l *Locker) leaveWaitConn(h *lockConn, key string) {
	ctx, cancel := server.Within(releasing(key), background)
	defer cancel()
	l.releaseWakeUpsOn(ctx, h, key)
	l.mu.Lock()
	l.waitConns--
	l.mu.Unlock()
	h.c.Release()
}

// listen waits on the waiting connection h for key's wake-up lock until bound is over. When ctx
// ends the waiter is taken off the server, and h is gone.
func (l *Locker) listen(ctx context.Context, h *lockConn, key string, since time.Time, bound time.Duration) (got bool, err error) {
	ctx, cancel := server.Within(ctx, bound+terms.Calmly)
	defer cancel()
	rows, err := h.query(ctx, l.listenSQL(key, since, bound))
	if server.Interrupted(err) {
		return false, nil
	}
	if err != nil {
		l.kill(h)
		return false, err
	}
	return len(rows) == 1 && rows[0][0] == "1", nil
}

// kill closes a connection and sees to it, in the background, that the server
// ends what runs on it.
func (l *Locker) kill(h *lockConn) {
	l.drop(h)
	l.running.Go(func() {
		ctx, cancel := server.Within(context.Background(), background)
		defer cancel()
		_ = l.cfg.Control.KillConnection(ctx, h.c) // best effort: the server's own bound ends it too
	})
}
