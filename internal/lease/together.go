package lease

import (
	"context"
	"errors"
	"runtime"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// While all lock connections are busy, and right after several went together, requests
// gather, and so do releases of leases whose wake-up locks are on the same connection. Whoever
// gets the next connection sends them all, in a batch.

// sharedConns is how many lock connections with room for wake-up locks there are before
// requests share them: on more of them the server would commit each alone; of two, one gathers
// requests while the other one commits. Behind a statement that takes longer than sharedFor,
// since it may wait for a row, others are opened.
const (
	sharedConns = 2
	sharedFor   = 50 * time.Millisecond
)

// maxShared is how many requests share a batch, and how many releases. Their rows are
// locked for that long, and their callers wait for each other.
const maxShared = 100

// shares reports whether there may be batches: not where the nodes of a cluster
// may refuse it, or where a proxy may change the connection between two statements.
func (l *Locker) shares() bool { return l.cfg.Info.Topology == "" && !l.cfg.Info.Router }

// take is a request that is sent together with others.
type take struct {
	of     *attempt
	ticket *queue.Ticket
	inTurn bool
	yields bool

	// What has become of it, once done is closed.
	outcome
	alone bool      // it is to be sent alone: on h, whose turn it has, or, if that is nil, on any
	lease *Lease    // what it was granted
	h     *lockConn // not alone: on which it was sent, and may have been granted
}

// connOrShare returns a lock connection, and its turn, to send a request on. If all are
// busy, the request is sent together with others, and the connection is nil.
func (a *attempt) connOrShare(ctx context.Context, inTurn bool) (h *lockConn, s *Lease, err error) {
	h, opens := a.freeConn()
	switch {
	case opens:
		defer a.opened()
	case h != nil && h.c.Fresh(ctx):
		return h, nil, nil
	case h != nil:
		a.drop(h)
	case a.shares():
		t := &take{of: a, ticket: a.Ticket, inTurn: inTurn, yields: a.yields(), outcome: outcome{done: make(chan struct{})}}
		s, alone, err := a.tryShared(ctx, t)
		switch {
		case !alone:
			return nil, s, err
		case t.h != nil:
			return t.h, nil, nil
		}
	}
	if h, err = a.borrow(ctx); err != nil && ctx.Err() != nil && a.lacksConn() {
		err = errNoneFree
	}
	return h, nil, err
}

// errNoneFree is of a caller whose wait has ended before there was a connection to ask on.
var errNoneFree = lockerr.With(lockerr.ErrExhausted, errors.New("no connection is free for a lock connection"))

// lacksConn reports whether there is no lock connection, and none to be had.
func (l *Locker) lacksConn() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.lockConns) == 0 && !l.cfg.Conns.Ready()
}

// freeConn returns a lock connection that is free, and its turn. If there is none, opens
// reports whether the request is to open one for itself; call opened when it has. Else it
// gathers: because there are enough of them, or are about to be, or since others gather, or may
// be about to.
func (l *Locker) freeConn() (free *lockConn, opens bool) {
	if l.takes.ShouldJoin() {
		return nil, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	free, waited, more := l.pick(l.sharedConns() - l.opening)
	if opens = free == nil && more && (waited == nil || l.cfg.Conns.Ready()); opens {
		l.opening++
	}
	return free, opens
}

func (l *Locker) opened() {
	l.mu.Lock()
	l.opening--
	l.mu.Unlock()
}

// tryShared is try for a request that is sent together with others. If it is to be sent
// alone, it has the turn of t.h, if that is not nil.
func (a *attempt) tryShared(ctx context.Context, t *take) (s *Lease, alone bool, err error) {
	if a.takes.Join(t) {
		a.running.Go(a.leadTakes)
	}
	select {
	case <-t.done:
	case <-ctx.Done():
		if a.takes.Quit(t) {
			return nil, false, context.Cause(ctx)
		}
	}
	if !terms.Answered(ctx, t.done) {
		a.forgo(t)
		return nil, false, context.Cause(ctx)
	}
	if t.alone {
		return nil, true, nil
	}
	a.left, a.yielded = t.left, t.yielded
	if t.yielded {
		a.noteYield(a.r.Key)
	}
	switch {
	case t.h != nil:
		return nil, false, a.unanswered(ctx, t.h, &t.outcome)
	case t.err != nil:
		return nil, false, t.err
	case t.lease == nil:
		return nil, false, nil
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), strategy.ErrWaitOver):
		a.forgo(t)
		return nil, false, context.Cause(ctx)
	case t.late(a.ttl):
		a.forgo(t)
		return nil, false, strategy.ErrNoAnswer
	}
	return t.lease, false, nil
}

// forgo gives back, in the background, what t gets that nobody waits for.
func (a *attempt) forgo(t *take) {
	until := time.Now().Add(a.lasts)
	a.Ticket = nil
	a.running.Go(func() {
		<-t.done
		switch {
		case t.alone && t.h != nil:
			a.giveBack(t.h)
		case t.lease != nil:
			t.lease.end(lockerr.ErrClosed)
			_ = a.relinquish(t.lease, false) // it goes on by itself
			return
		case t.h != nil:
			a.freeUntil(until, t.h, false)
		}
		t.ticket.Leave()
	})
}

// leadTakes sends the requests that have gathered on the next lock connection, with the
// releases that have gathered for that.
func (l *Locker) leadTakes() {
	for more := true; more; {
		h, err := l.borrowShared(l.running.Ctx)
		runtime.Gosched() // whom the last batch has answered may be about to ask for more
		var takes []*take
		takes, more = l.takes.Depart(maxShared)
		if err == nil {
			l.sendBatch(h, takes, h.releases.Along(maxShared))
			continue
		}
		for _, t := range takes {
			t.alone = true
			close(t.done)
		}
	}
}

func (l *Locker) sharedConns() int { return min(sharedConns, l.maxLockConns) }

// borrowShared is borrow for requests that gather meanwhile.
func (l *Locker) borrowShared(ctx context.Context) (*lockConn, error) {
	patient, cancel := context.WithTimeout(ctx, sharedFor)
	defer cancel()
	h, err := l.borrowOf(patient, l.sharedConns())
	if h != nil || ctx.Err() != nil || patient.Err() == nil {
		return h, err
	}
	return l.borrow(ctx)
}

// leaving is a release that is sent together with others.
type leaving struct {
	s    *Lease
	h    *lockConn // which has the wake-up lock
	done chan struct{}

	// What has become of it, once done is closed.
	alone bool // it is to be sent alone
	found bool // the server still had it
	err   error
}

// releaseOnce releases a lease, and reports whether the server still had it; asked, whether
// it was asked. The release is sent alone if the connection with the wake-up lock is lost, or
// is free and no others are to be expected; else together with all that wait for it. If the server
// takes no writes, elsewhere has the next try go out on another connection: that may lead to
// the server that has taken its place.
func (l *Locker) releaseOnce(ctx context.Context, s *Lease, elsewhere bool) (found, asked bool, err error) {
	h, shared := l.shareRelease(s)
	if shared != nil {
		select {
		case <-shared.done:
		case <-ctx.Done():
			return false, !shared.h.releases.Quit(shared), ctx.Err()
		}
		if !shared.alone {
			return shared.found, true, shared.err
		}
	}
	if h != nil && !h.c.Fresh(ctx) {
		l.drop(h)
		h = nil
	}
	if h == nil {
		if h, err = l.connOf(ctx, s); err != nil {
			return false, false, err
		}
	}
	defer l.giveBack(h)
	if found, err = l.releaseOn(ctx, h, s); elsewhere && server.Refused(err) {
		h.c.Taint()
	}
	return found, true, err
}

// shareRelease returns the connection with the lease's wake-up lock, and its turn, if it is
// free and others are not to be expected; or else the release that goes with others; or neither.
func (l *Locker) shareRelease(s *Lease) (*lockConn, *leaving) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := s.conn
	switch {
	case h == nil || h.gone || s.minHold > 0 || !l.shares():
		return nil, nil
	case !h.releases.ShouldJoin() && h.c.TryTurn():
		return h, nil
	}
	shared := &leaving{s: s, h: h, done: make(chan struct{})}
	if h.releases.Join(shared) {
		l.running.Go(func() { l.leadReleases(h) })
	}
	return nil, shared
}

// leadReleases sends the releases that have gathered for h, with the requests that have
// gathered meanwhile.
func (l *Locker) leadReleases(h *lockConn) {
	for more := true; more; {
		ctx, cancel := context.WithTimeout(context.Background(), handoffWait)
		mine, _ := l.awaitTurn(ctx, h)
		cancel()
		runtime.Gosched() // as above
		var leaves []*leaving
		leaves, more = h.releases.Depart(maxShared)
		if mine {
			l.sendBatch(h, l.takesFor(h), leaves)
			continue
		}
		for _, r := range leaves {
			r.alone = true
			close(r.done)
		}
	}
}

// takesFor returns the requests that have gathered, if h may carry their wake-up locks.
func (l *Locker) takesFor(h *lockConn) []*take {
	l.mu.Lock()
	roomy := l.hasRoom(h)
	l.mu.Unlock()
	if !roomy {
		return nil
	}
	return l.takes.Along(maxShared)
}
