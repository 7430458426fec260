package advisory

import (
	"context"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// wait waits for the lock in the server, on a connection that does nothing else: on lc first, unless lc is nil. While there is
// no connection to wait on, it polls.
func (a *attempt) wait(ctx context.Context, lc *lockConn) (*Grant, error) {
	patient, done, err := a.Patient(ctx)
	if err != nil {
		if lc != nil {
			a.l.leave(lc, true)
			a.l.leaveWaitConn()
		}
		return nil, err
	}
	defer done()
	open, end := a.l.running.Until(patient)
	defer end(nil)
	defer a.countPoller(false)
	for lc != nil || open.Err() == nil {
		var lock *Grant
		if lc == nil {
			lc = a.waitConn(open)
		}
		if lc != nil {
			lock, err = a.waitOn(open, lc)
			if lc = nil; lock == nil && err == nil {
				strategy.Sleep(open, strategy.Pause(false))
			}
		} else if strategy.Sleep(open, strategy.Pause(true)) {
			lock, err = a.try(open)
		}
		if err != nil {
			return nil, err
		}
		if lock != nil {
			return a.granted(ctx, lock)
		}
	}
	return nil, context.Cause(open)
}

// shown is a named lock that callers of the process hold together, to be seen.
type shown struct {
	callers int
	release func() // nil before the server has granted the lock, and if it has not
}

// Show acquires a named lock of the server for which nobody waits. Other processes can see that the lock is held, until
// release. ok is false if the lock was not acquired, for example because another process holds it. Callers of this process
// with the same name hold the lock together, until the last one releases it: on a connection GET_LOCK counts.
func (l *Locker) Show(ctx context.Context, name string) (release func(), ok bool) {
	l.mu.Lock()
	s := l.shown[name]
	first := s == nil
	if first {
		s = new(shown)
		l.shown[name] = s
	}
	s.callers++
	l.mu.Unlock()
	if first {
		release, ok := l.show(ctx, name)
		l.mu.Lock()
		if ok {
			s.release = release
		} else {
			delete(l.shown, name)
		}
		l.mu.Unlock()
		if !ok {
			return nil, false
		}
	}
	return func() { l.unshow(name, s) }, true
}

// unshow is the end of a Show.
func (l *Locker) unshow(name string, s *shown) {
	l.mu.Lock()
	s.callers--
	over := s.callers == 0 && s.release != nil
	if over {
		delete(l.shown, name)
	}
	l.mu.Unlock()
	if over {
		s.release()
	}
}

// show is Show for the first caller.
func (l *Locker) show(ctx context.Context, name string) (release func(), ok bool) {
	if l.running.Enter() != nil {
		return nil, false
	}
	defer l.running.Done()
	if l.allowed() != nil {
		return nil, false
	}
	lc, err := l.pickConn(ctx)
	if err != nil {
		return nil, false
	}
	r := &request{lock: &Grant{locker: l, key: name, name: name, conn: lc}, acquire: true}
	if !lc.do(ctx, r) {
		l.releaseLate(r, nil)
		return nil, false
	}
	return func() {
		if l.running.Enter() == nil { // else Close has released it
			defer l.running.Done()
			lc.do(context.Background(), &request{lock: r.lock})
		}
	}, r.granted
}

// waitConn returns a connection to wait on; nil if there is none for now, since some connections are reserved for requests
// that do not wait.
func (a *attempt) waitConn(ctx context.Context) *lockConn {
	l := a.l
	l.mu.Lock()
	free := l.spare(len(l.lockConns)) && l.cfg.Conns.Ready()
	if free {
		l.waitConns++
	}
	l.mu.Unlock()
	if a.countPoller(!free); !free {
		return nil
	}
	ctx, cancel := server.Within(ctx, strategy.OpeningTime)
	defer cancel()
	lc, err := l.connect(ctx, pool.As{Waits: true})
	if err != nil {
		l.leaveWaitConn()
		return nil // polling shows why
	}
	return lc
}

// countPoller counts the attempt as a poller, or no longer as one.
func (a *attempt) countPoller(polls bool) {
	switch {
	case polls && !a.polls:
		a.l.pollers.Add(1)
	case !polls && a.polls:
		a.l.pollers.Add(-1)
	}
	a.polls = polls
}

// hasPollers reports whether callers poll because they have no connection to wait on.
// Then no waiter should keep its connection for long.
func (l *Locker) hasPollers() bool { return l.pollers.Load() > 0 }

// spare reports whether one more connection may be used to wait on, beside so many lock connections. The caller holds l.mu.
func (l *Locker) spare(lockConns int) bool {
	return l.waitConns+max(l.enough, lockConns) < l.cfg.Conns.Stat().Max
}

func (l *Locker) leaveWaitConn() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waitConns--
}

// waitOn waits on lc until the lock is granted; lc is then a lock connection. If waitOn returns no lock, it has given lc up. If
// it returns no error either, the caller should not wait on another connection at once.
func (a *attempt) waitOn(ctx context.Context, lc *lockConn) (*Grant, error) {
	defer a.l.leaveWaitConn()
	deadline := a.Start.Add(a.Wait)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	for {
		bound := a.bound(deadline)
		if bound <= 0 {
			a.l.leave(lc, true)
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		asked := time.Now()
		answer, err := lc.wait(ctx, a.name, a.Start, bound)
		switch {
		case ctx.Err() != nil: // the driver may have closed the connection, whatever the answer is
			a.l.leave(lc, !lc.broken(err))
			return nil, context.Cause(ctx)
		case answer == alone || answer == inTurn:
			return a.waited(lc, answer == inTurn)
		case err != nil && !server.Interrupted(err):
			a.l.leave(lc, !lc.broken(err))
			a.calm = max(strategy.Pace, time.Since(asked)/2)
			if !lc.broken(err) || errors.Is(err, lockerr.ErrUnsafe) {
				return nil, err
			}
			return nil, nil
		case a.l.hasPollers():
			a.l.leave(lc, true)
			return nil, nil
		}
	}
}

// bound returns how long the next statement may wait in the server.
func (a *attempt) bound(deadline time.Time) time.Duration {
	bound := min(a.l.ttl, time.Until(deadline)-haste)
	if bound <= 0 {
		return bound
	}
	if a.l.cfg.ReadTimeout > 0 {
		bound = min(bound, a.l.cfg.ReadTimeout/2)
	}
	if a.calm > 0 {
		bound = min(bound, a.calm)
	}
	if a.l.hasPollers() {
		bound = min(bound, strategy.Pace)
	}
	return bound
}

// waited makes a lock connection of lc, on which a wait was granted the lock. contended says that other processes had the
// lock, or waited for it.
func (a *attempt) waited(lc *lockConn, contended bool) (*Grant, error) {
	lock := a.lock(lc)
	lock.contended = contended
	lc.c.Unblocked()
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	lc.busy, lc.err = false, nil // lc may have been a lock connection before
	lc.holds[lock.name] = lock
	a.l.share(lc)
	if lc.err != nil {
		return nil, lc.err
	}
	return lock, nil
}

// wait waits for the lock in the server. If the connection may have ended since the server sent its answer, wait checks that
// it still works: the process may have been stopped meanwhile, or the end of ctx has closed the connection.
func (lc *lockConn) wait(ctx context.Context, name string, since time.Time, bound time.Duration) (answer string, err error) {
	ctx, cancel := server.Within(ctx, bound+slack)
	defer cancel()
	answer, err = lc.ask(ctx, lc.waitSQL(name, since, bound))
	if err == nil && (lc.c.Silence() > lc.l.limit/2 || !lc.c.Valid()) {
		if _, err = lc.ask(ctx, lc.pingSQL()); err != nil {
			return "", err
		}
	}
	return answer, err
}

// leave gives lc up. If the server has answered all its statements, lc goes back to the
// pool.
func (l *Locker) leave(lc *lockConn, answered bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lc.busy, lc.err = true, errScrapped; answered {
		lc.err = errRetired
	}
	lc.dispose()
}
