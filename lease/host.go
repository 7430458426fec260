package lease

import (
	"context"
	"database/sql/driver"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/pool"
)

// host is a connection that runs the statements of many leases in turn, and
// carries their bells: named locks of the server, which only the connection can
// give back that took them. It stays out of the pool as long as it has one.
type host struct {
	c       *pool.Conn
	station bool // a waiter's own, on which it may block; guarded by the turn

	// Guarded by Locker.mu.
	bells map[string]*Lease // whose bells it carries, by key
	stale []*Lease          // those of them that were lost
	line  int               // who waits for the turn
	gone  bool              // destroyed, or back in the pool
}

const (
	maxBells = 5000 // MariaDB gets slow where a connection has many
	// spare is how many connections waiters leave to those who take, renew and
	// release.
	spare = 2
)

// exec runs a statement. The turn is the caller's. Whatever is not the server's
// answer leaves a connection that nobody can use any more.
func (h *host) exec(ctx context.Context, text string) (driver.Result, error) {
	result, err := server.Change(ctx, h.c.Conn, text)
	h.noted(err)
	return result, err
}

// query is exec for a statement that returns rows.
func (h *host) query(ctx context.Context, text string) ([][]string, error) {
	rows, err := server.Query(ctx, h.c.Conn, text)
	h.noted(err)
	return rows, err
}

func (h *host) noted(err error) {
	switch {
	case err == nil:
		h.c.Touch()
	case server.Number(err) == 0 || server.Gone(err, h.c.Conn):
		h.c.Taint()
	}
}

// borrow returns a host and its turn: one that is free, else a new one while
// there are few, else the one with the shortest line. giveBack it. Its socket is
// looked at first: a statement would be lost where the server has restarted.
func (l *Locker) borrow(ctx context.Context) (*host, error) {
	for {
		l.mu.Lock()
		var quiet *host
		for _, h := range l.hosts {
			if len(h.bells) < maxBells && h.c.TryTake() {
				l.mu.Unlock()
				if !h.c.Fresh(ctx) {
					l.drop(h)
					return l.borrow(ctx)
				}
				return h, nil
			}
			if quiet == nil || h.line < quiet.line {
				quiet = h
			}
		}
		few := len(l.hosts) < l.maxHosts || quiet != nil && len(quiet.bells) >= maxBells
		arrived := l.arrived
		l.mu.Unlock()

		if quiet == nil || few && l.conns.Ready() {
			h, err := l.connect(ctx, arrived, quiet != nil)
			if h != nil || quiet == nil && err != nil {
				return h, err
			}
		}
		if quiet == nil {
			continue
		}
		if ours, err := l.takeTurn(ctx, quiet); ours || err != nil {
			return quiet, err
		}
	}
}

// connect makes a host of a connection of the pool's. It returns nil where
// another host has arrived meanwhile, for which arrived ends, or where optional
// is set and there is none for a while.
func (l *Locker) connect(ctx, arrived context.Context, optional bool) (*host, error) {
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(arrived, cancel)()
	c, err := l.acquire(own, optional)
	if c == nil {
		if own.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	h := &host{c: c, bells: make(map[string]*Lease)}
	l.open(h)
	return h, nil
}

func (l *Locker) acquire(ctx context.Context, optional bool) (*pool.Conn, error) {
	actx, cancel := ctx, func() {}
	if optional {
		actx, cancel = context.WithTimeout(ctx, pollEvery)
	}
	defer cancel()
	c, err := l.conns.Acquire(actx)
	if err != nil && optional && ctx.Err() == nil && actx.Err() != nil {
		return nil, nil
	}
	return c, err
}

// open lets others use h, too, which may have been a station.
func (l *Locker) open(h *host) {
	l.mu.Lock()
	if h.station {
		h.station = false
		l.stations--
	}
	l.hosts = append(l.hosts, h)
	l.arrive()
	l.arrived, l.arrive = context.WithCancel(context.Background())
	l.mu.Unlock()
	l.keeper.Keep(h.c, func(error) {
		if ours, _ := l.takeTurn(context.Background(), h); ours {
			l.drop(h)
		}
	})
}

// takeTurn waits for the turn of h. It is false where h is gone by then.
func (l *Locker) takeTurn(ctx context.Context, h *host) (bool, error) {
	l.mu.Lock()
	gone := h.gone
	h.line++
	l.mu.Unlock()
	var err error
	if !gone {
		err = h.c.Take(ctx)
	}
	l.mu.Lock()
	h.line--
	nowGone := h.gone
	l.mu.Unlock()
	if !gone && err == nil && nowGone {
		h.c.Give()
	}
	if err != nil || nowGone {
		return false, err
	}
	if !h.c.Fresh(ctx) {
		l.drop(h)
		return false, nil
	}
	return true, nil
}

// giveBack ends the caller's turn, and puts a host without bells back into the
// pool.
func (l *Locker) giveBack(h *host) {
	if !h.c.Clean() {
		l.drop(h)
		return
	}
	l.mu.Lock()
	idle := len(h.bells) == 0 && h.line == 0
	if idle {
		l.shut(h)
	}
	l.mu.Unlock()
	if idle {
		l.keeper.Forget(h.c)
		h.c.Release()
	} else {
		h.c.Give()
	}
}

// drop ends the caller's turn and closes the connection. Leases go on without
// their bells, and those who wait for them fall back to polling.
func (l *Locker) drop(h *host) {
	l.mu.Lock()
	l.shut(h)
	for _, s := range h.bells {
		s.host = nil
	}
	if h.station {
		l.stations--
	}
	l.mu.Unlock()
	l.keeper.Forget(h.c)
	h.c.Destroy()
}

func (l *Locker) shut(h *host) {
	h.gone = true
	l.hosts = slices.DeleteFunc(l.hosts, func(other *host) bool { return other == h })
}

// hush gives back the bells of lost leases.
func (l *Locker) hush(h *host) {
	if ours, _ := l.takeTurn(l.ctx, h); !ours {
		return
	}
	defer l.giveBack(h)
	for {
		var keys []string
		l.mu.Lock()
		n := min(len(h.stale), batch)
		for _, s := range h.stale[:n] {
			if h.bells[s.key] == s { // else the key's next lease has it
				delete(h.bells, s.key)
				keys = append(keys, s.key)
			}
		}
		h.stale = h.stale[n:]
		l.mu.Unlock()
		if n == 0 {
			return
		}
		if len(keys) == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(l.ctx, background)
		_, err := h.exec(ctx, l.hushSQL(keys...))
		cancel()
		if err != nil {
			h.c.Taint()
			return
		}
	}
}

// enterStation returns a connection on which a waiter may block, and its turn; nil
// where waiters have enough of them or there is none for a while. Leave it, or
// make it a host.
func (l *Locker) enterStation(ctx context.Context) (*host, error) {
	l.mu.Lock()
	free := l.stations < l.conns.Stat().Max-spare && l.conns.Ready()
	if free {
		l.stations++
	}
	l.mu.Unlock()
	if !free {
		return nil, nil
	}
	c, err := l.acquire(ctx, true)
	if c == nil {
		l.mu.Lock()
		l.stations--
		l.mu.Unlock()
		return nil, err
	}
	return &host{c: c, station: true, bells: make(map[string]*Lease)}, nil
}

// leaveStation ends the waiting for key's bell on h, and gives the bell back if
// h has it.
func (l *Locker) leaveStation(h *host, key string) {
	ctx, cancel := context.WithTimeout(context.Background(), background)
	defer cancel()
	if h.c.Clean() {
		if _, err := h.exec(ctx, l.hushSQL(key)); err != nil {
			h.c.Taint()
		}
	}
	l.mu.Lock()
	l.stations--
	l.mu.Unlock()
	h.c.Release()
}

// listen waits on the station h for key's bell until bound is over. When ctx
// ends the waiter is taken off the server, and h is gone.
func (l *Locker) listen(ctx context.Context, h *host, key string, bound time.Duration) (got bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, bound+giveUpCalmly)
	defer cancel()
	rows, err := h.query(ctx, l.listenSQL(key, bound))
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
func (l *Locker) kill(h *host) {
	l.drop(h)
	l.running.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), background)
		defer cancel()
		_ = l.control.KillConnection(ctx, h.c) // best effort: the server's own bound ends it too
	})
}
