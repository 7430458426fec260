package advisory

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/batch"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// lockConn is a lock connection: it holds locks. None of its statements waits for a lock, so each is answered soon. A
// request that finds the connection idle is sent at once. Requests that arrive while a statement is running are sent
// together in the next statement.
type lockConn struct {
	l           *Locker
	c           *pool.Conn
	id          uint64
	identity    string          // a named lock that only this connection ever has
	acquireText string          // acquires one lock; to be prepared
	holder      *lockerr.Holder // how waiters are told of the holder of the connection's locks
	ctx         context.Context // ends with the connection
	cancel      context.CancelFunc

	pending batch.Group[*request] // requests for the next statement; joined under Locker.mu
	several bool                  // the last statement was for several requests; for the user of the connection

	// Guarded by Locker.mu.
	holds map[string]*Grant // by name
	busy  bool              // the connection is in use
	err   error             // why no more statements are sent
}

// request asks to acquire a lock, or to release it.
type request struct {
	lock     *Grant
	acquire  bool
	answered chan struct{} // closed when the request is answered

	// Guarded by Locker.mu until it is answered.
	granted bool
	err     error
}

const (
	// maxHolds is how many locks a connection may hold. MariaDB gets slow with many.
	maxHolds = 10_000
	// maxBatch is how many requests go into one statement.
	maxBatch = 100
)

var (
	errForm      = errors.New("a lock statement returned an unexpected result")
	errRetired   = errors.New("the lock connection was given back, since it held no lock")
	errUnclean   = errors.New("a lock that may have been acquired could not be released")
	errScrapped  = errors.New("the lock connection was given up")
	errElsewhere = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"a statement reached another connection than the lock's: GET_LOCK is not safe behind a proxy that shares connections;"+
			" connect to the server directly, or use a lease"))
	errReadOnly = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"the server takes no writes, so other programs may lock on another server; connect to the one that takes writes"))
)

// pickConn returns the least busy lock connection, for the next lock. If there is none, or if all are busy and
// there may be more, pickConn opens another.
func (l *Locker) pickConn(ctx context.Context) (*lockConn, error) {
	for {
		if l.running.Ctx.Err() != nil {
			return nil, lockerr.ErrClosed
		}
		var o *opening
		l.mu.Lock()
		best, usable := l.leastBusy()
		if best == nil || best.busy && usable < l.enough && l.cfg.Conns.Ready() {
			o = l.openAnother()
		}
		l.mu.Unlock()
		if best != nil {
			return best, nil
		}
		select {
		case <-o.done:
			if o.err != nil {
				return nil, o.err
			}
		case <-ctx.Done():
			if short := l.short(); short != nil {
				return nil, fmt.Errorf("%w: %w", short, context.Cause(ctx))
			}
			return nil, context.Cause(ctx)
		}
	}
}

// short returns which bound leaves callers no connection to ask on; nil for none.
func (l *Locker) short() error {
	l.mu.Lock()
	best, _ := l.leastBusy()
	l.mu.Unlock()
	if best != nil {
		return nil
	}
	return l.cfg.Conns.Exhausted()
}

// leastBusy returns the least busy of the first lock connections that have room for a lock, nil if none has; usable is how
// many it has looked at. The caller holds l.mu.
func (l *Locker) leastBusy() (best *lockConn, usable int) {
	for _, lc := range l.lockConns {
		if len(lc.holds)+lc.pending.Len()+maxBatch > maxHolds {
			continue
		}
		if best == nil || best.busy && (!lc.busy || lc.pending.Len() < best.pending.Len()) {
			best = lc
		}
		if usable++; usable == l.enough {
			break
		}
	}
	return best, usable
}

// opening is a lock connection that is being opened.
type opening struct {
	done chan struct{}
	err  error
}

// openAnother opens a further lock connection, one at a time. The caller holds l.mu.
func (l *Locker) openAnother() *opening {
	if l.opening != nil {
		return l.opening
	}
	o := &opening{done: make(chan struct{})}
	l.opening = o
	l.running.Go(func() {
		defer close(o.done)
		ctx, cancel := server.Within(l.running.Ctx, background)
		defer cancel()
		lc, err := l.connect(ctx, pool.As{})
		l.mu.Lock()
		defer l.mu.Unlock()
		l.opening = nil
		if o.err = err; err == nil {
			l.share(lc)
		}
	})
	return o
}

// connect makes a lock connection of a connection of the pool.
func (l *Locker) connect(ctx context.Context, as pool.As) (*lockConn, error) {
	c, err := l.cfg.Conns.AcquireAs(ctx, as)
	if err != nil {
		return nil, err
	}
	lc := &lockConn{l: l, c: c, id: c.KnownID(), identity: newIdentity(), holds: make(map[string]*Grant)}
	lc.holder, lc.acquireText = &lockerr.Holder{ConnectionID: lc.id, Program: l.cfg.Owner}, lc.acquireSQL()
	lc.ctx, lc.cancel = context.WithCancel(context.Background())
	answer, err := lc.ask(ctx, lc.openSQL())
	if err == nil && answer != "1" {
		err = errors.New("mysqllock: GET_LOCK grants no lock on this server, not even a new one")
	}
	if err != nil {
		lc.cancel()
		c.Destroy()
		return nil, err
	}
	return lc, nil
}

// newIdentity returns the name of a lock that only one connection will ever have. It tells that connection from a later
// one to which a restarted server has given the same id.
func newIdentity() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return lockname.Any + "-carrier-" + hex.EncodeToString(b[:])
}

// share lets other requests use lc. The caller holds l.mu.
func (l *Locker) share(lc *lockConn) {
	if l.running.Ctx.Err() != nil {
		l.remove(lc, lockerr.ErrClosed)
		return
	}
	l.lockConns = append(l.lockConns, lc)
	if !l.watching {
		l.watching = true
		l.running.Go(l.watch)
	}
}

// do runs r, and waits for the answer. It returns false if ctx has ended and no answer came soon after. r.answered is
// closed when the answer comes.
func (lc *lockConn) do(ctx context.Context, r *request) bool {
	l := lc.l
	r.answered = make(chan struct{})
	l.mu.Lock()
	if lc.err != nil {
		r.err = lc.err
		close(r.answered)
		l.mu.Unlock()
		return true
	}
	lc.pending.Join(r)
	serve := !lc.busy
	lc.busy = true
	l.mu.Unlock()

	switch {
	case !serve:
	case ctx.Done() == nil: // a caller that cannot leave meanwhile sends the statement itself
		lc.serve()
	default:
		l.running.Go(lc.serve)
	}
	select {
	case <-r.answered:
		return true
	case <-ctx.Done():
	}
	if r.acquire && lc.pending.Quit(r) {
		r.err = context.Cause(ctx)
		return true
	}
	return terms.Answered(ctx, r.answered)
}

// serve sends the pending requests, releases first, answers them, and lets the next batch be sent. The callers that the last
// statement has answered may be about to add requests, so serve lets them run first. The caller has made lc busy.
func (lc *lockConn) serve() {
	if lc.several {
		runtime.Gosched()
	}
	batch, _ := lc.pending.Depart(maxBatch) // none if all their callers have gone
	lc.several = len(batch) > 1
	slices.SortStableFunc(batch, func(a, b *request) int {
		switch {
		case a.acquire == b.acquire:
			return 0
		case b.acquire:
			return -1
		}
		return 1
	})
	var answer string
	var err error
	if len(batch) > 0 {
		answer, err = lc.run(batch)
	}
	if lc.broken(err) {
		lc.lose(err)
	}
	lc.l.mu.Lock()
	defer lc.l.mu.Unlock()
	for i, r := range batch {
		switch {
		case lc.err != nil:
			r.err = lc.err
		case !r.acquire:
			if lc.holds[r.lock.name] == r.lock { // else another caller has the name by now: see Locker.Show
				delete(lc.holds, r.lock.name)
			}
		case err == nil && answer[i] == '1':
			r.granted = true
			lc.holds[r.lock.name] = r.lock
		default:
			switch {
			case err != nil:
				r.err = err
			case answer[i] != '0':
				r.err = errInterrupted
			}
		}
		close(r.answered)
	}
	lc.next()
}

// run runs the statement for batch. After an error of the server none of the locks of batch is held. If that is not sure, the
// error has no number, and the connection is given up.
func (lc *lockConn) run(batch []*request) (answer string, err error) {
	sent := time.Now()
	rows, err := lc.c.QueryBlock(lc.within(batch), lc.batchBlock(batch))
	if batch[len(batch)-1].acquire {
		if answer, err = lc.answer(sent, rows, err); answer == "" {
			answer = "2"
		}
		if err == nil && len(answer) != len(batch) {
			err = errForm
		}
	} else if err == nil {
		lc.c.Answered(sent)
	}
	if err != nil && !lc.broken(err) { // for example KILL QUERY, after some locks were acquired
		if again := lc.releaseLocks(batch); again != nil {
			return "", fmt.Errorf("%w: %s", errUnclean, again.Error()) // without its number
		}
	}
	return answer, err
}

// releaseLocks releases the locks of batch after a statement that may have left some of them held. It tries for about a second: a
// KILL that has met one try need not meet the next, and without a release the connection's other locks would be lost, too.
func (lc *lockConn) releaseLocks(batch []*request) (err error) {
	for pause := time.Millisecond; pause < slack; pause *= 2 {
		sent := time.Now()
		if err = server.Exec(lc.within(batch), lc.c.Conn, freeSQL(batch)); err == nil {
			lc.c.Answered(sent)
		}
		if !server.Interrupted(err) || !strategy.Sleep(lc.ctx, pause) {
			return err
		}
	}
	return err
}

// broken reports whether err is more than the refusal of a statement by the server.
func (lc *lockConn) broken(err error) bool {
	return err != nil && (server.Number(err) == 0 || server.Gone(err, lc.c.Conn))
}

// within returns the context for the statement of batch. A context that cannot end costs less, since the driver need not
// watch it.
func (lc *lockConn) within(batch []*request) context.Context {
	ctx, s := lc.ctx, purpose.Release
	if t := lc.l.cfg.ReadTimeout; t > 0 && t <= lc.l.limit {
		ctx = context.Background()
	}
	if batch[len(batch)-1].acquire {
		s = purpose.Take
	}
	ctx = purpose.AskedBy(ctx, batch, func(r *request) purpose.Asked { return r.lock.asked })
	return purpose.With(ctx, s, hint.StrategyAdvisory, batch, func(r *request) string { return r.lock.key })
}

// ask runs a statement that returns one value.
func (lc *lockConn) ask(ctx context.Context, text string) (string, error) {
	sent := time.Now()
	rows, err := server.Query(ctx, lc.c.Conn, text)
	return lc.answer(sent, rows, err)
}

// answer returns the one value that was returned for the statement that was sent at sent.
func (lc *lockConn) answer(sent time.Time, rows [][]string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	lc.c.Answered(sent)
	if len(rows) != 1 || len(rows[0]) != 1 {
		return "", errForm
	}
	switch rows[0][0] {
	case elsewhere:
		return "", errElsewhere
	case readOnly:
		return "", errReadOnly
	}
	return rows[0][0], nil
}

// next lets the next batch be sent. The caller holds Locker.mu.
func (lc *lockConn) next() {
	l := lc.l
	more := lc.pending.Len() > 0
	if lc.err == nil && !more && len(lc.holds) == 0 && len(l.lockConns) > l.enough {
		l.remove(lc, errRetired)
	}
	switch {
	case lc.err != nil:
		lc.dispose()
	case more:
		l.running.Go(lc.serve)
	default:
		lc.busy = false
	}
}

// remove lets no more requests use lc, and gives lc up, unless it is in use. The caller holds l.mu.
func (l *Locker) remove(lc *lockConn, why error) {
	lc.err = why
	l.lockConns = slices.DeleteFunc(l.lockConns, func(other *lockConn) bool { return other == lc })
	if !lc.busy {
		lc.busy = true
		lc.dispose()
	}
}

// lose ends the locks and requests of lc, once, and tells the holders.
func (lc *lockConn) lose(cause error) {
	l := lc.l
	l.mu.Lock()
	if lc.err != nil {
		l.mu.Unlock()
		return
	}
	l.remove(lc, cause)
	for _, r := range lc.pending.Along(lc.pending.Len()) {
		r.err = cause
		close(r.answered)
	}
	if !errors.Is(cause, lockerr.ErrClosed) {
		cause = lockerr.With(lockerr.ErrLost, cause)
	}
	var held []*Grant
	for _, lock := range lc.holds {
		if lock.err == nil {
			lock.err = cause
			held = append(held, lock)
		}
	}
	l.mu.Unlock()

	lc.cancel()
	for _, lock := range held {
		lock.ticket.Leave()
		if lock.lost != nil {
			go lock.lost(cause)
		}
	}
}

// dispose puts the connection back into the pool if it surely holds no lock. Else it closes the connection, and makes the
// server end it. Nobody uses the connection any more. The caller holds Locker.mu.
func (lc *lockConn) dispose() {
	l := lc.l
	l.running.Go(func() {
		defer lc.cancel()
		ctx, cancel := server.Within(purpose.Named(context.Background(), purpose.Release, hint.StrategyAdvisory), background)
		defer cancel()
		if errors.Is(lc.err, errRetired) || errors.Is(lc.err, lockerr.ErrClosed) && lc.c.Clean() {
			if server.Exec(ctx, lc.c.Conn, "DO RELEASE_ALL_LOCKS()") == nil {
				lc.c.Touch()
				lc.c.Release()
				return
			}
		}
		lc.c.Destroy()
		_ = l.cfg.Control.KillConnection(ctx, lc.c) // best effort: the server ends a silent connection, too
	})
}

// loseIfOverdue ends the locks of lc if the server may have ended the connection by now, or is about to.
func (lc *lockConn) loseIfOverdue() {
	if s := lc.c.Silence(); s >= lc.l.limit {
		lc.lose(fmt.Errorf("the lock connection was silent for %v, with a lockTTL of %v", s.Round(time.Millisecond), lc.l.ttl))
	}
}

// watch looks after the lock connections as long as there are any.
func (l *Locker) watch() {
	tick := time.NewTimer(l.pulse)
	defer tick.Stop()
	for more := true; more; {
		select {
		case <-l.running.Ctx.Done():
			return
		case <-tick.C:
		}
		var overdue []*lockConn
		var next time.Duration
		overdue, next, more = l.check()
		tick.Reset(max(next, time.Millisecond))
		for _, lc := range overdue {
			lc.loseIfOverdue()
		}
	}
}

// check pings or closes the idle lock connections. It returns the connections that are overdue, in how long to check again,
// and whether there is anything left to check.
func (l *Locker) check() (overdue []*lockConn, next time.Duration, more bool) {
	next = l.pulse
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, lc := range slices.Clone(l.lockConns) {
		silence := lc.c.Silence()
		if silence < l.limit {
			next = min(next, l.limit-silence)
		}
		switch {
		case (lc.busy || len(lc.holds) > 0) && silence >= l.limit:
			overdue = append(overdue, lc)
		case lc.busy:
		case len(lc.holds) == 0 && silence >= l.linger:
			l.remove(lc, errRetired)
		case len(lc.holds) > 0 && silence >= l.pulse/2:
			lc.busy = true
			l.running.Go(lc.ping)
		}
	}
	l.watching = len(l.lockConns) > 0 && l.running.Ctx.Err() == nil
	return overdue, next, l.watching
}

// ping checks that the locks are still held. The caller has made lc busy.
func (lc *lockConn) ping() {
	if _, err := lc.ask(purpose.For(lc.ctx, purpose.Renew), lc.pingSQL()); lc.broken(err) {
		lc.lose(err)
	}
	lc.l.mu.Lock()
	defer lc.l.mu.Unlock()
	lc.next()
}
