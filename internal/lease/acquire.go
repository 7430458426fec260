package lease

import (
	"context"
	"database/sql/driver"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

var terms = strategy.Terms{
	Strategy: hint.StrategyLease,
	Grants:   "SELECT, INSERT, UPDATE on the lock table",
	Writes:   "nothing can be locked on it",
	Limits:   strategy.Usual,
}

// Request says which lease to take, and how long to queue for it.
type Request struct {
	Key     string
	TTL     time.Duration    // how long the lease survives a holder that has fallen silent
	Wait    time.Duration    // 0 fails at once if another caller holds the key
	Since   time.Time        // when the caller began to wait, as others see it; zero for now
	MinHold time.Duration    // how long the lease stays after its release
	MaxHold time.Duration    // how long the lease is kept by renewals; 0 for no limit
	Waiting strategy.Waiting // called before each wait; nil for none
	// Lends lends the session of a transaction that the lease ends with; nil for none.
	Lends *strategy.Lender
	// Lost is called once, on a goroutine of its own, when the lease may be
	// lost: it was not renewed in time, was found to be gone, has reached MaxHold, or the
	// Locker is closed. It may be nil.
	Lost func(error)
}

// Acquire acquires a lease. After an error the lease is not held. If a statement was not answered in time, Acquire
// releases in the background the lease that it may have been granted.
func (l *Locker) Acquire(ctx context.Context, r Request) (*Grant, error) {
	ctx = purpose.Named(ctx, purpose.Take, hint.StrategyLease, r.Key)
	a := &attempt{
		Attempt: strategy.Attempt{Key: r.Key, Wait: r.Wait, Waiting: r.Waiting, Short: l.short, Start: time.Now(), Since: r.Since},
		l:       l, r: r, ttl: r.TTL, asked: purpose.AskedIn(ctx), endless: ctx.Done() == nil,
	}
	if r.MaxHold > 0 {
		a.ttl = min(a.ttl, r.MaxHold)
	}
	a.lasts = a.ttl
	err := l.usable()
	if err == nil {
		err = l.running.Enter()
	}
	if err != nil {
		return nil, a.Explain(ctx, terms, err, a.askHolder)
	}
	defer l.running.Done()
	open, end := l.running.Until(ctx)
	defer end(nil)
	g, err := a.acquire(open)
	if err != nil {
		if open.Err() != nil && (ctx.Err() == nil || !errors.Is(err, lockerr.ErrExhausted)) {
			err = context.Cause(open)
		}
		return nil, a.Explain(ctx, terms, err, a.askHolder)
	}
	l.cfg.Rows.NoteLeased(r.Key)
	return g, nil
}

// usable returns an error if leases are not safe on this server.
func (l *Locker) usable() error {
	if l.cfg.Info.StatementLog && !l.cfg.Unsafe {
		return server.ErrStatementLog
	}
	if err := l.cfg.Info.Pessimists("fences of leases"); err != nil && !l.cfg.Unsafe {
		return err
	}
	return l.cfg.Info.Leases()
}

// attempt is one call of Acquire. It goes from stage to stage until it has the lease, or fails:
//
//	stage         asks on                                  somebody has the lease    else
//	stageHandoff  the giver's lock connection              –                         stageSession, if the giver did not have it any more
//	stageSession  the session of the caller's transaction  stageWait                 stageAsk, if the session is not suitable
//	stageAsk      a lock connection, alone or in a batch   stageWait                 –
//	stageWait     a connection of its own, on which it     stageWait                 –
//	              waits for the wake-up lock; if there is
//	              none, it polls as in stageAsk
//
// An attempt begins with stageHandoff if a caller of its process has handed a lease over to it, and else with stageSession.
// In place of stageWait it fails if its caller does not wait, unless a clean-up has the row. If the key's row has vanished,
// the row is made, and the stage begins again. So it does if a connection breaks in stageAsk or stageWait, and the lease that
// the attempt may have been granted is given back. A grant that came too late is given back, too: then the attempt goes on
// to the next stage, or fails with errLate.
type attempt struct {
	strategy.Attempt
	l         *Locker
	r         Request
	stage     stage
	ttl       time.Duration
	lasts     time.Duration // how long the server may keep the granted lease: the TTL of a handed-over lease may be greater
	handoff   *handoff      // the handoff by which the attempt takes over a lease; nil in other stages than stageHandoff
	leaseLeft time.Duration // how long the lease in the way still lasted; 0 if that is not known
	// refused: somebody has locked the row, and the caller does not wait.
	refused bool
	resent  int  // how often the request was sent again, since its connection broke
	endless bool // the caller's context cannot end, only its wait
	asked   purpose.Asked
}

// stage is where an attempt asks for the lease.
type stage int

const (
	stageHandoff stage = iota
	stageSession
	stageAsk
	stageWait
)

// resend is how often a request is sent again whose connection broke.
const resend = 3

var (
	errResend = errors.New("the connection broke, and what the request may have been granted is released")
	errLate   = lockerr.With(lockerr.ErrNoAnswer, errors.New("it has granted the lease later than that lasts, and the lease is given back"))
	// errRowBusy: the attempt has not asked, since somebody had locked the row until then.
	errRowBusy = errors.New("somebody has locked the row")
)

func (a *attempt) acquire(ctx context.Context) (g *Grant, err error) {
	defer func() {
		if g == nil {
			a.Ticket.Leave()
		}
	}()
	keys := []string{a.r.Key}
	if err := a.l.cfg.Rows.Exist(ctx, keys); err != nil {
		return nil, err
	}
	if err := a.Enqueue(ctx, a.l.cfg.Queue, []queue.Key{{Name: a.r.Key}}, a.l, nil); err != nil {
		return nil, err
	}
	a.handoff, _ = a.Ticket.HandedOver().(*handoff)
	if a.handoff == nil {
		a.stage = stageSession
	}
	for badConns := 0; ; {
		g, taken, err := a.ask(ctx)
		switch {
		case g != nil:
			return g, nil
		case err != nil && a.Ticket == nil: // what may have been granted is given back in the background
			return nil, err
		case a.Vanished(err):
			if err := a.l.cfg.Rows.Renew(ctx, keys); err != nil {
				return nil, err
			}
		case errors.Is(err, errResend):
		case errors.Is(err, errLate) && a.Wait > 0:
			a.stage = stageWait
		case errors.Is(err, driver.ErrBadConn) && badConns < 3: // nothing was sent
			badConns++
		case err != nil:
			return nil, err
		case !taken:
			a.stage++
		case a.Wait == 0 && (!a.refused || !a.Cleaning(ctx, a.l.cfg.Rows)):
			return nil, lockerr.ErrLocked
		default:
			a.Heard.Store(true)
			a.stage = stageWait
		}
	}
}

// ask asks for the lease once, or in stageWait for as long as the caller waits. taken: somebody has the lease, has locked its
// row, or goes first.
func (a *attempt) ask(ctx context.Context) (g *Grant, taken bool, err error) {
	switch a.stage {
	case stageHandoff:
		if g, err = a.takeHandoff(ctx, a.handoff.giver); g == nil && err == nil {
			a.handoff = nil
		}
		return g, false, err
	case stageSession:
		if a.Wait > 0 {
			a.l.awaitDropped(ctx, a.r.Key)
		}
		return a.takeOnSession(ctx)
	case stageAsk:
		g, err = a.try(ctx, a.Wait > 0)
	case stageWait:
		g, err = a.wait(ctx)
	}
	return g, true, err
}

// takeHandoff makes the attempt the holder of a lease that was handed over, with a new token, in one statement. It
// returns nil if this process does not hold the lease any more: then the attempt asks for it like any other.
func (a *attempt) takeHandoff(ctx context.Context, giver *Grant) (*Grant, error) {
	a.lasts = max(a.lasts, giver.ttl)
	var g *Grant
	timed, cancel := context.WithTimeoutCause(ctx, a.Wait-time.Since(a.Start), strategy.ErrWaitOver)
	defer cancel()
	lc, err := a.l.connOf(timed, giver)
	if err == nil {
		var ours bool
		g, ours, err = a.request(timed, lc, func(own context.Context) (answer, error) {
			return lc.ask(own, a.l.handoffBlock(giver, a.ttl))
		})
		if ours {
			a.l.giveBack(lc)
		}
	}
	switch {
	case g != nil:
		g.since, g.handed = giver.since, giver.handed+1
		a.handoff.tell(nil)
		return g, nil
	case errors.Is(err, errLate), errors.Is(err, errResend): // the lease was given back
		a.handoff.tell(nil)
		a.l.dropWakeUp(giver)
		return nil, nil
	case errors.Is(err, keyrow.ErrNoRow):
		a.handoff.tell(errNotOurs)
		a.l.dropWakeUp(giver)
		return nil, nil
	case busy(err) && timed.Err() == nil:
		return a.takeHandoff(ctx, giver) // somebody has locked the row; this loop ends with the lease at the latest
	case a.Ticket == nil: // handleLate frees the lease in the background
		a.l.dropWakeUp(giver)
	default: // the caller does not wait for the release
		ticket := a.Ticket
		a.Ticket = nil
		given := a.handoff
		a.l.running.Go(func() { given.tell(a.l.relinquish(giver, ticket, false)) })
	}
	if timed.Err() != nil {
		err = context.Cause(timed)
	}
	return nil, err
}

// try asks once, on a lock connection. It returns nil if somebody else has the lease, has locked the row or, with
// inTurn, goes first.
func (a *attempt) try(ctx context.Context, inTurn bool) (*Grant, error) {
	lc, g, err := a.connOrShare(ctx, inTurn)
	if lc == nil {
		return g, err
	}
	var ours bool
	g, ours, err = a.request(ctx, lc, func(own context.Context) (answer, error) {
		return a.l.steps.take(own, lc, a, inTurn)
	})
	if !ours {
		return g, err
	}
	if server.Number(err) != 0 && !server.Locked(err) { // the statement may have got as far as the wake-up lock
		own, cancel := server.Within(a.releasing(), background/2)
		a.l.releaseWakeUpsOn(own, lc, a.r.Key)
		cancel()
	}
	a.l.giveBack(lc)
	if busy(err) {
		a.refused, err = a.Wait == 0, nil
	}
	return g, err
}

func (l *Locker) takeAndWake(ctx context.Context, lc *lockConn, a *attempt, inTurn bool) (answer, error) {
	return lc.ask(ctx, l.takeBlock(a.r.Key, a.ttl, inTurn, true))
}

// busy reports whether a take statement has met a statement that is about to change the row, or a lock on the row.
func busy(err error) bool {
	return server.Locked(err) || server.Deadlock(err) || errors.Is(err, errRowBusy)
}

// wait waits for the lease in the server, on a connection of its own. If there is no such connection, it polls.
func (a *attempt) wait(ctx context.Context) (*Grant, error) {
	ctx, done, err := a.Patient(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	for ctx.Err() == nil {
		g, err := a.waitOrPoll(ctx)
		if g != nil || err != nil && ctx.Err() == nil {
			return g, err
		}
	}
	return nil, context.Cause(ctx)
}

// waitOrPoll waits in the server, or for the time between two polls, and asks for the lease. It returns nil if another
// round may get the lease.
func (a *attempt) waitOrPoll(ctx context.Context) (g *Grant, err error) {
	lc, err := a.l.openWaitConn(ctx)
	if err != nil {
		return nil, err
	}
	if lc != nil {
		g, err = a.waitOn(ctx, lc)
	} else if strategy.Sleep(ctx, a.pause(a.l.wakes)) {
		g, err = a.try(ctx, false)
	}
	final := a.Ticket == nil || server.Number(err) != 0 && !server.Gone(err, nil) || errors.Is(err, keyrow.ErrNoRow)
	if err != nil && !final && ctx.Err() == nil { // the connection was lost, or the lease was granted too late
		strategy.Sleep(ctx, a.pause(false))
		return nil, nil
	}
	return g, err
}

// pause returns how long to wait for a holder that wakes nobody.
func (a *attempt) pause(polls bool) time.Duration {
	pause := strategy.Pause(polls)
	if a.leaseLeft > 0 {
		pause = min(pause, a.leaseLeft+time.Millisecond)
	}
	return pause
}

// listening is how an attempt in stageWait waits on a connection of its own, from one look at the lease to the next:
//
//	state         has the wake-up lock                   waits                      takes a free lease
//	listens       somebody else, or nobody               for the wake-up lock       if it has that by then
//	listensAlone  somebody else, but the lease was free  for the wake-up lock       in any case
//	woken         the attempt                            not at all                 in any case
//	beaten        the attempt, but somebody has the      as long as nobody wakes    in any case
//	              lease without it, or takes that now    it: see attempt.pause
//
// Right before the end of the caller's wait nobody waits for the wake-up lock any more: the attempt sleeps, and looks.
type listening int

const (
	listens listening = iota
	listensAlone
	woken
	beaten
)

// waitOn waits on the waiting connection lc until the lease is granted. Then lc has become a lock connection. After an
// error lc is closed, or given back.
func (a *attempt) waitOn(ctx context.Context, lc *lockConn) (*Grant, error) {
	for state := listens; ctx.Err() == nil; {
		alone := state == listensAlone
		switch bound := a.bound(ctx); {
		case state == beaten, bound <= 0:
			if !strategy.Sleep(ctx, a.pause(false)) {
				continue
			}
		case state != woken:
			got, err := a.l.listen(ctx, lc, a.r.Key, a.Began(), bound)
			if err != nil {
				return nil, err
			}
			if got {
				state = woken
			}
		}
		g, ours, err := a.look(ctx, lc, alone)
		switch {
		case g != nil:
			a.l.addLockConn(lc)
			a.l.giveBack(lc)
			return g, nil
		case !ours:
			return nil, err
		case errors.Is(err, errLate): // with the lease the wake-up lock was given back
			state = listens
			continue
		case err != nil && !busy(err):
			a.l.running.Go(func() { a.l.leaveWaitConn(lc, a.r.Key) })
			return nil, err
		}
		if state = a.afterLook(state, err); state == listensAlone {
			a.freeWakeUp(ctx, lc)
		}
	}
	a.l.running.Go(func() { a.l.leaveWaitConn(lc, a.r.Key) })
	return nil, context.Cause(ctx)
}

// afterLook returns the state after a look that has not got the lease. err is nil, or says that the row was busy.
func (a *attempt) afterLook(state listening, err error) listening {
	leased := a.leaseLeft > 0
	switch has := state == woken || state == beaten; {
	case has && (leased || server.Deadlock(err)):
		return beaten
	case has:
		return woken
	case !leased && err == nil:
		return listensAlone
	}
	return listens
}

// look asks for the lease on the waiting connection lc. It waits for the row, since the holder that has just released the
// wake-up lock may still be committing.
func (a *attempt) look(ctx context.Context, lc *lockConn, alone bool) (g *Grant, ours bool, err error) {
	deadline, _ := ctx.Deadline()
	brief := time.Until(deadline) < longestForRow
	g, ours, err = a.request(ctx, lc, func(own context.Context) (answer, error) {
		return lc.ask(own, a.l.takeBlock(a.r.Key, a.ttl, !alone, brief))
	})
	if ours && server.Locked(err) {
		return a.requestBehind(ctx, lc)
	}
	return g, ours, err
}

// freeWakeUp frees the wake-up lock of a lease that has run out, as lc has seen. Its holder stands still or was cut off,
// and the server has not ended the holder's connection yet. freeWakeUp kills that connection if it has been silent for
// a second: a new holder without the wake-up lock could wake nobody. This may fail without harm: if this account may
// not see the connection of another account, that connection stays.
func (a *attempt) freeWakeUp(ctx context.Context, lc *lockConn) {
	ctx, cancel := server.Within(ctx, background/5)
	defer cancel()
	_ = a.l.cfg.Control.KillSilent(ctx, lc.c, lockname.OfWakeUp(a.l.cfg.Namespace, a.r.Key), time.Second)
}

// bound returns how long to rely on the wake-up lock.
func (a *attempt) bound(ctx context.Context) time.Duration {
	bound := a.pause(false) // for a lease that is free while somebody else has the wake-up lock
	if a.leaseLeft > 0 {
		bound = min(longest-rand.N(longest/5), a.leaseLeft+time.Millisecond)
	}
	if deadline, ok := ctx.Deadline(); ok { // the server must end the wait before the client does, which costs the connection
		bound = min(bound, time.Until(deadline)-terms.GiveUp)
	}
	return bound
}

// requestBehind waits in a transaction behind those who have locked the row. Then it asks for the lease, by the server's
// time after the wait.
func (a *attempt) requestBehind(ctx context.Context, lc *lockConn) (g *Grant, ours bool, err error) {
	deadline, _ := ctx.Deadline()
	bound := max(time.Millisecond, min(time.Until(deadline)-terms.GiveUp, max(a.r.TTL, time.Second)))
	if a.l.cfg.ReadTimeout > 0 {
		bound = min(bound, a.l.cfg.ReadTimeout/2)
	}
	_, err = lc.exec(ctx, "SET SESSION "+rowWait(bound+time.Second))
	if err == nil {
		_, err = lc.exec(ctx, "START TRANSACTION")
	}
	if err == nil {
		_, err = lc.query(ctx, a.l.lockRowSQL(a.r.Key, bound))
	}
	switch {
	case server.Interrupted(err):
		if err = lc.leaveRow(ctx); err == nil {
			return nil, true, errRowBusy
		}
	case server.Deadlock(err):
		if failed := lc.leaveRow(ctx); failed == nil {
			return nil, true, err
		}
	}
	if err != nil {
		a.l.kill(lc)
		return nil, false, err
	}
	return a.request(ctx, lc, func(own context.Context) (answer, error) {
		ans, err := lc.ask(own, a.l.takeBlock(a.r.Key, a.ttl, false, false))
		if failed := lc.leaveRow(own); err == nil {
			err = failed
		}
		return ans, err
	})
}

// leaveRow ends the transaction of requestBehind.
func (lc *lockConn) leaveRow(ctx context.Context) error {
	_, err := lc.exec(ctx, "COMMIT")
	if _, failed := lc.exec(ctx, "SET SESSION "+rowWait(time.Second)); failed != nil {
		lc.c.Taint()
	}
	return err
}

// request asks for the lease on lc, by do. The caller has the turn of lc. do runs apart from ctx: at the end of a context
// the driver closes the socket, and a lease granted by then would be nobody's. ours: lc is still the caller's.
//
//	answer                        returned           lease that may be granted           lc             ticket
//	granted                       g, ours            the caller's                        the caller's   the grant's
//	somebody has the lease        ours               –                                   the caller's   the attempt's
//	the server has refused        ours, its error    –                                   the caller's   the attempt's
//	granted, too late             ours, errLate      given back                          the caller's   the attempt's
//	the connection has broken     errResend          given back (unanswered)             closed         the attempt's
//	none, or the caller has gone  an error           given back in the background        kept there     kept there
//	                                                 (handleLate)
func (a *attempt) request(ctx context.Context, lc *lockConn, do func(context.Context) (answer, error)) (g *Grant, ours bool, err error) {
	a.Ticket.Asks()
	own, stop := a.answerIn(ctx, lc)
	o := &outcome{done: make(chan struct{})}
	run := func() {
		defer close(o.done)
		defer stop()
		o.answer, o.err = do(own)
		switch {
		case o.err == nil:
		case own.Err() != nil:
			o.err = context.Cause(own)
		case a.l.cfg.ReadTimeout > 0 && server.Gone(o.err, nil) && time.Since(o.sent) >= a.l.cfg.ReadTimeout:
			o.err = server.Silence{For: a.l.cfg.ReadTimeout}
		}
		if a.Heard.From(o.err); o.err == nil && o.token == 0 {
			a.Heard.Store(true)
		}
	}
	_, limited := ctx.Deadline()
	if a.endless && !limited { // another goroutine would cost more than the rest of request
		run()
	} else {
		go run()
	}
	if !terms.Answered(ctx, o.done) {
		a.handleLate(lc, o)
		return nil, false, context.Cause(ctx)
	}
	a.leaseLeft = o.leaseLeft
	switch {
	case unknown(o.err):
		return nil, false, a.unanswered(ctx, lc, o)
	case o.err != nil:
		return nil, true, o.err
	case o.token == 0:
		return nil, true, nil
	case ctx.Err() != nil && !errors.Is(context.Cause(ctx), strategy.ErrWaitOver):
		a.handleLate(lc, o)
		return nil, false, context.Cause(ctx)
	case o.late(a.ttl):
		if a.undo(lc, o.token) != nil {
			a.handleLate(lc, o)
			return nil, false, lockerr.ErrNoAnswer
		}
		return nil, true, errLate
	}
	if g, err = a.grant(lc, a.Ticket, o.answer); err != nil {
		a.handleLate(lc, o)
		return nil, false, err
	}
	return g, true, nil
}

// answerIn bounds the wait for an answer on lc, apart from ctx. If the driver has a limit of its own, the context has
// none: a context that cannot end costs less, since the driver need not watch it.
func (a *attempt) answerIn(ctx context.Context, lc *lockConn) (own context.Context, stop context.CancelFunc) {
	own = context.WithoutCancel(ctx)
	if a.l.cfg.ReadTimeout > 0 {
		return own, func() {}
	}
	return server.Within(own, min(max(a.ttl, answerLimit), background))
}

// unanswered gives back the lease that a request may have been granted whose answer is lost. It returns errResend if that
// is done, so that the request can be sent again.
func (a *attempt) unanswered(ctx context.Context, lc *lockConn, o *outcome) error {
	if !server.Gone(o.err, nil) || a.resent >= resend || ctx.Err() != nil {
		a.handleLate(lc, o)
		return o.err
	}
	a.resent++
	if !a.l.isGone(lc) {
		a.l.drop(lc)
	}
	if a.freeKey(ctx, lc, false) != nil {
		a.handleLate(lc, o)
		return o.err
	}
	return errResend
}

// outcome is the result of request, once done is closed.
type outcome struct {
	answer
	err  error
	done chan struct{}
}

// handleLate takes care, in the background, of an outcome for which no caller waits.
func (a *attempt) handleLate(lc *lockConn, o *outcome) {
	ticket := a.Ticket
	a.Ticket = nil
	a.l.running.Go(func() {
		defer ticket.Leave()
		if lc.waits { // the statement may wait behind a row lock
			ctx, cancel := server.Within(a.releasing(), background/5)
			_ = a.l.cfg.Control.KillConnection(ctx, lc.c) // best effort: the statement ends by itself, and its lease is given back
			cancel()
		}
		<-o.done
		if errors.Is(o.err, keyrow.ErrNoRow) {
			a.handoff.tell(errNotOurs)
		} else {
			a.handoff.tell(nil) // the lease was ours, or nobody can tell
		}
		// A lease handed over, but not taken, is still this process's.
		sure := o.err == nil || errors.Is(o.err, keyrow.ErrNoRow) || a.handoff == nil && !unknown(o.err)
		if o.err == nil && o.token > 0 {
			sure = a.undo(lc, o.token) == nil
		}
		clean := lc.c.Clean()
		switch {
		case a.l.isGone(lc):
		case lc.waits:
			a.l.leaveWaitConn(lc, a.r.Key)
		default:
			a.l.giveBack(lc)
		}
		if !sure {
			a.freeUnknown(lc, clean)
		}
	})
}

// freeUnknown retries freeKey until it succeeds, or a lease that was granted before now has expired.
func (a *attempt) freeUnknown(lc *lockConn, alive bool) {
	ctx, cancel := a.l.lingering(time.Now().Add(a.lasts))
	defer cancel()
	for a.freeKey(a.releasing(), lc, alive) != nil && strategy.Sleep(ctx, strategy.RetryPause) {
	}
}

// releasing returns the context of a statement that gives the requested lease back.
func (a *attempt) releasing() context.Context {
	return purpose.Named(a.asked.In(context.Background()), purpose.Release, hint.StrategyLease, a.r.Key)
}

// undo gives back a lease for which no caller waits, and its wake-up lock.
func (a *attempt) undo(lc *lockConn, token uint64) error {
	ctx, cancel := server.Within(a.releasing(), background)
	defer cancel()
	_, err := a.l.steps.release(ctx, lc, a.r.Key, token, 0)
	return err
}

// freeKey gives back the lease that the lost connection of lc may have been granted, or may still be granted. No other
// caller of the process may be granted the key meanwhile. The lease is released by its token, so that a statement that
// arrives too late does not release a later grant.
func (a *attempt) freeKey(ctx context.Context, lc *lockConn, alive bool) error {
	ctx, cancel := server.Within(ctx, background/5)
	defer cancel()
	if !alive && a.l.cfg.Info.Kills {
		if err := a.l.cfg.Control.KillConnection(ctx, lc.c); err != nil {
			return err
		}
	}
	other, err := a.l.borrow(ctx)
	if err != nil {
		return err
	}
	defer a.l.giveBack(other)
	return a.l.steps.releaseUnknown(ctx, other, a.r.Key)
}

func (l *Locker) giveUnknownAndWake(ctx context.Context, lc *lockConn, key string) error {
	rows, err := lc.query(ctx, l.grantedSQL(key))
	if err != nil || len(rows) == 0 {
		return err
	}
	token, err := strconv.ParseUint(rows[0][0], 10, 64)
	if err == nil {
		release := l.releaseBlock(key, token, 0)
		if sabotage.FreeAny.Load() {
			release.Text = strings.Replace(release.Text, "token =", "token >=", 1)
		}
		_, err = lc.change(ctx, release)
	}
	return err
}

// Await waits until the lease on key may have been released, for at most about atMost. It is for callers that want the
// key by another strategy; since is when the caller began to wait. Call done after the caller's next attempt: done lets
// the next waiter of another process go on.
func (l *Locker) Await(ctx context.Context, key string, since time.Time, atMost time.Duration) (done func(), err error) {
	ctx = purpose.Named(ctx, purpose.Take, hint.StrategyLease, key)
	if err := l.running.Enter(); err != nil {
		return nil, err
	}
	lc := l.await(ctx, key, since, atMost)
	done = sync.OnceFunc(func() {
		if lc == nil {
			l.running.Done()
			return
		}
		go func() { // the caller need not wait for this
			l.leaveWaitConn(lc, key)
			l.running.Done()
		}()
	})
	switch {
	case ctx.Err() != nil:
		done()
		return nil, context.Cause(ctx)
	case l.running.Ctx.Err() != nil:
		done()
		return nil, lockerr.ErrClosed
	}
	return done, nil
}

// await waits as Await does. It returns the waiting connection that has the wake-up lock; nil if there is none.
func (l *Locker) await(ctx context.Context, key string, since time.Time, atMost time.Duration) *lockConn {
	ctx, end := l.running.Until(ctx)
	defer end(nil)
	a := &attempt{l: l, leaseLeft: atMost}
	until := time.Now().Add(atMost)
	lc, err := l.openWaitConn(ctx)
	if lc == nil || err != nil {
		strategy.Sleep(ctx, a.pause(false))
		return nil
	}
	hasWakeUp, err := l.listen(ctx, lc, key, since, a.bound(ctx))
	if err != nil {
		strategy.Sleep(ctx, a.pause(false))
		return nil
	}
	if !hasWakeUp {
		return lc
	}
	rows, err := lc.query(ctx, l.liveSQL(key))
	if err == nil && len(rows) > 0 { // the lease's own wake-up lock is lost
		a.leaseLeft = time.Until(until)
		strategy.Sleep(ctx, a.pause(false))
	}
	return lc
}

// askHolder asks the server who holds the lease.
func (a *attempt) askHolder(ctx context.Context) *lockerr.Holder {
	return a.l.Holder(ctx, a.r.Key)
}
