package advisory

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// carrier is a connection that has locks. None of its statements waits for
// anybody, so one follows the other closely: a request that finds it idle goes
// out at once, and those that arrive while a statement is under way go out
// together in the next.
type carrier struct {
	l      *Locker
	c      *pool.Conn
	id     uint64
	guard  string          // the lock by which the connection is known
	take   string          // takes one lock, to be prepared
	holder *lockerr.Holder // what others in line are told of who has locks on it
	ctx    context.Context // ends what runs on it
	cancel context.CancelFunc
	heard  atomic.Int64 // when that was sent which the server has answered last, since epoch

	several bool // the last statement was for several requests; for who has made it busy

	// Guarded by Locker.mu.
	holds map[string]*Lock // by name
	line  []*request       // what goes out with the next statement
	busy  bool             // somebody uses the connection
	err   error            // why nothing goes out any more
}

// request is to take a lock, or to give it back.
type request struct {
	lock     *Lock
	take     bool
	yields   bool          // gives it back before, for others who want it
	answered chan struct{} // closed when it is

	// Guarded by Locker.mu until it is answered.
	granted bool
	err     error
}

const (
	// maxHolds is how many locks a carrier may have. MariaDB gets slow where one has
	// many.
	maxHolds = 10_000
	// maxBatch is how many requests go into one statement.
	maxBatch = 100
)

var (
	epoch = time.Now() // carries the monotonic clock

	errForm      = errors.New("a lock statement was answered in another form than ours")
	errRetired   = errors.New("the lock connection has nothing to carry")
	errUnclean   = errors.New("a lock that may have been taken could not be given back")
	errSlow      = fmt.Errorf("the server has let no lock connection be opened within %v", background)
	errWished    = errors.New("the lock was left to somebody who asks for it now and then")
	errScrapped  = errors.New("the lock connection was given up")
	errElsewhere = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"a statement has reached another connection than its own: GET_LOCK does not hold behind a proxy that shares connections"))
	errReadOnly = lockerr.With(lockerr.ErrUnsafe, errors.New(
		"the server takes no writes, so others may lock on another one; connect to the one that takes them"))
)

// silence is how long ago that was sent which the server has answered last. The
// server began to count no earlier.
func (k *carrier) silence() time.Duration {
	return time.Since(epoch) - time.Duration(k.heard.Load())
}

// place returns the carrier for the next lock.
func (l *Locker) place(ctx context.Context) (*carrier, error) {
	for {
		l.mu.Lock()
		if l.closed {
			l.mu.Unlock()
			return nil, lockerr.ErrClosed
		}
		var best *carrier
		few := 0
		for _, k := range l.carriers {
			if len(k.holds)+len(k.line)+maxBatch > maxHolds {
				continue
			}
			if best == nil || best.busy && (!k.busy || len(k.line) < len(best.line)) {
				best = k
			}
			if few++; few == l.enough {
				break
			}
		}
		var o *opening
		if best == nil || best.busy && few < l.enough && l.conns.Ready() {
			o = l.open()
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
			return nil, context.Cause(ctx)
		}
	}
}

// opening is a carrier to be.
type opening struct {
	done chan struct{}
	err  error
}

// open opens a further carrier, one at a time. l.mu is the caller's.
func (l *Locker) open() *opening {
	if l.opening != nil {
		return l.opening
	}
	o := &opening{done: make(chan struct{})}
	l.opening = o
	l.running.Go(func() {
		defer close(o.done)
		ctx, cancel := context.WithTimeoutCause(l.ctx, background, errSlow)
		defer cancel()
		k, err := l.connect(ctx)
		if err != nil && ctx.Err() != nil { // not the callers'
			err = context.Cause(ctx)
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.opening = nil
		if o.err = err; err == nil {
			l.adopt(k)
		}
	})
	return o
}

// connect makes a carrier of a connection of the pool's.
func (l *Locker) connect(ctx context.Context) (*carrier, error) {
	c, err := l.conns.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	k := &carrier{l: l, c: c, id: c.KnownID(), guard: newGuard(), holds: make(map[string]*Lock)}
	k.holder, k.take = &lockerr.Holder{ConnectionID: k.id, Program: l.owner}, k.takeSQL("?")
	k.ctx, k.cancel = context.WithCancel(context.Background())
	answer, err := k.ask(ctx, k.openSQL())
	switch {
	case err == nil && answer != "1":
		err = errors.New("mysqllock: the server grants no lock at all")
	}
	if err != nil {
		k.cancel()
		c.Destroy()
		return nil, err
	}
	return k, nil
}

// adopt lets others use k, too. l.mu is the caller's.
func (l *Locker) adopt(k *carrier) {
	if l.closed {
		k.busy, k.err = true, lockerr.ErrClosed
		k.dispose()
		return
	}
	l.carriers = append(l.carriers, k)
	if !l.watching {
		l.watching = true
		l.running.Go(l.watch)
	}
}

// do has r answered. It is false where ctx has ended and the answer did not come
// soon after: r.answered tells when it does.
func (k *carrier) do(ctx context.Context, r *request) bool {
	l := k.l
	l.mu.Lock()
	if k.err != nil {
		r.err = k.err
		l.mu.Unlock()
		return true
	}
	r.answered = make(chan struct{})
	k.line = append(k.line, r)
	serve := !k.busy
	k.busy = true
	l.mu.Unlock()

	switch {
	case !serve:
	case ctx.Done() == nil: // who cannot leave meanwhile needs nobody to send it
		k.serve()
	default:
		l.running.Go(k.serve)
	}
	select {
	case <-r.answered:
		return true
	case <-ctx.Done():
	}
	l.mu.Lock()
	if i := slices.Index(k.line, r); i >= 0 && !r.yields {
		k.line = slices.Delete(k.line, i, i+1)
		r.err = context.Cause(ctx)
		l.mu.Unlock()
		return true
	}
	l.mu.Unlock()
	hurry := time.NewTimer(giveUp)
	defer hurry.Stop()
	select {
	case <-r.answered:
		return true
	case <-hurry.C:
		return false
	}
}

// serve sends what is in the line, and what those add who are about to, whom the
// last statement has answered. The caller has made k busy.
func (k *carrier) serve() {
	if k.several {
		runtime.Gosched()
	}
	if batch := k.batch(); len(batch) > 0 {
		k.send(batch)
		return
	}
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	k.next()
}

// batch returns what goes out next: what is given back first.
func (k *carrier) batch() []*request {
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	n := min(len(k.line), maxBatch)
	k.several = n > 1
	batch := slices.Clone(k.line[:n])
	k.line = slices.Delete(k.line, 0, n)
	slices.SortStableFunc(batch, func(a, b *request) int {
		switch {
		case a.take == b.take:
			return 0
		case b.take:
			return -1
		}
		return 1
	})
	return batch
}

// send has batch answered and lets the next in line go on. The caller is who
// uses the connection.
func (k *carrier) send(batch []*request) {
	answer, err := k.run(batch)
	if k.broken(err) {
		k.lose(err)
	}
	l := k.l
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, r := range batch {
		switch {
		case k.err != nil:
			r.err = k.err
		case !r.take:
			delete(k.holds, r.lock.name)
		case err == nil && answer[i] == '1':
			r.granted = true
			k.holds[r.lock.name] = r.lock
		default:
			delete(k.holds, r.lock.name) // of who had it before
			switch {
			case err != nil:
				r.err = err
			case answer[i] == '3':
				r.err = errWished
			case answer[i] != '0':
				r.err = errInterrupted
			}
		}
		close(r.answered)
	}
	k.next()
}

// run runs the statement for batch. After an error of the server's nothing of it
// is held; where that is not sure the error is another, which costs the carrier.
func (k *carrier) run(batch []*request) (answer string, err error) {
	takes := batch[len(batch)-1].take
	answer, err = k.runPrepared(batch)
	switch {
	case !errors.Is(err, pool.ErrUnprepared):
	case takes:
		answer, err = k.ask(k.within(), k.batchSQL(batch))
	default:
		err = k.exec(k.within(), freeSQL(batch))
	}
	if takes && err == nil {
		if answer == "" {
			answer = "2"
		}
		if len(answer) != len(batch) {
			err = errForm
		}
	}
	if err != nil && !k.broken(err) { // KILL QUERY, for example, after some were done
		if again := k.exec(k.within(), freeSQL(batch)); again != nil {
			return "", fmt.Errorf("%w: %s", errUnclean, again.Error()) // without its number
		}
	}
	return answer, err
}

// broken reports whether err is more than the server's refusal of a statement.
func (k *carrier) broken(err error) bool {
	return err != nil && (server.Number(err) == 0 || server.Gone(err, k.c.Conn))
}

// within is the context for a statement on a carrier. One that cannot end costs
// less, since the driver has nobody watch it.
func (k *carrier) within() context.Context {
	if t := k.l.readTimeout; t > 0 && t <= k.l.limit {
		return context.Background()
	}
	return k.ctx
}

// runPrepared is run for one request, which is always the same statement. It returns
// pool.ErrUnprepared where that is not prepared, and for others.
func (k *carrier) runPrepared(batch []*request) (answer string, err error) {
	r, sent := batch[0], time.Since(epoch)
	switch {
	case len(batch) > 1 || r.yields:
		return "", pool.ErrUnprepared
	case r.take:
		rows, err := k.c.QueryPrepared(k.within(), k.take, r.lock.name)
		return k.answer(sent, rows, err)
	}
	if _, err = k.c.QueryPrepared(k.within(), "DO RELEASE_LOCK(?)", r.lock.name); err == nil {
		k.heard.Store(int64(sent))
	}
	return "", err
}

// ask runs a statement that returns one value.
func (k *carrier) ask(ctx context.Context, text string) (string, error) {
	sent := time.Since(epoch)
	rows, err := server.Query(ctx, k.c.Conn, text)
	return k.answer(sent, rows, err)
}

// answer is the one value that was returned for what was sent then.
func (k *carrier) answer(sent time.Duration, rows [][]string, err error) (string, error) {
	if err != nil {
		return "", err
	}
	k.heard.Store(int64(sent))
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

func (k *carrier) exec(ctx context.Context, text string) error {
	sent := time.Since(epoch)
	err := server.Exec(ctx, k.c.Conn, text)
	if err == nil {
		k.heard.Store(int64(sent))
	}
	return err
}

// next lets the next in line use the connection. Locker.mu is the caller's.
func (k *carrier) next() {
	l := k.l
	if k.err == nil && len(k.line) == 0 && len(k.holds) == 0 && len(l.carriers) > l.enough {
		l.remove(k, errRetired)
	}
	switch {
	case k.err != nil:
		k.dispose()
	case len(k.line) == 0:
		k.busy = false
	default:
		l.running.Go(k.serve)
	}
}

// remove keeps everybody from using k. l.mu is the caller's.
func (l *Locker) remove(k *carrier, why error) {
	k.err = why
	l.carriers = slices.DeleteFunc(l.carriers, func(other *carrier) bool { return other == k })
}

// lose ends what is on k, once, and tells the holders.
func (k *carrier) lose(cause error) {
	l := k.l
	l.mu.Lock()
	if k.err != nil {
		l.mu.Unlock()
		return
	}
	l.remove(k, cause)
	for _, r := range k.line {
		r.err = cause
		close(r.answered)
	}
	k.line = nil
	if !errors.Is(cause, lockerr.ErrClosed) {
		cause = lockerr.With(lockerr.ErrLost, cause)
	}
	var held []*Lock
	for _, lock := range k.holds {
		if lock.err == nil {
			lock.err = cause
			held = append(held, lock)
		}
	}
	if !k.busy {
		k.busy = true
		k.dispose()
	}
	l.mu.Unlock()

	k.cancel()
	for _, lock := range held {
		lock.ticket.Leave()
		if lock.lost != nil {
			go lock.lost(cause)
		}
	}
}

// dispose puts the connection back where it surely carries nothing, and else
// closes it and has the server end it. Nobody uses it any more. Locker.mu is the
// caller's.
func (k *carrier) dispose() {
	l := k.l
	l.running.Go(func() {
		defer k.cancel()
		ctx, cancel := context.WithTimeout(context.Background(), background)
		defer cancel()
		if errors.Is(k.err, errRetired) || errors.Is(k.err, lockerr.ErrClosed) && k.c.Clean() {
			if server.Exec(ctx, k.c.Conn, "DO RELEASE_ALL_LOCKS()") == nil {
				k.c.Touch()
				k.c.Release()
				return
			}
		}
		k.c.Destroy()
		_ = l.control.KillConnection(ctx, k.c) // best effort: the server ends it for its silence, too
	})
}

// overdue tells where the server may by now have ended k, or is about to.
func (k *carrier) overdue() error {
	if s := k.silence(); s >= k.l.limit {
		return fmt.Errorf("the lock connection was silent for %v, with a lockTTL of %v", s.Round(time.Millisecond), k.l.ttl)
	}
	return nil
}

// look loses k where it is overdue.
func (k *carrier) look() {
	if late := k.overdue(); late != nil {
		k.lose(late)
	}
}

// watch looks after the carriers as long as there are any.
func (l *Locker) watch() {
	tick := time.NewTimer(l.pulse)
	defer tick.Stop()
	for {
		select {
		case <-l.ctx.Done():
			return
		case <-tick.C:
		}
		var overdue []*carrier
		next := l.pulse
		l.mu.Lock()
		for _, k := range slices.Clone(l.carriers) {
			silence := k.silence()
			if silence < l.limit {
				next = min(next, l.limit-silence)
			}
			switch {
			case (k.busy || len(k.holds) > 0) && silence >= l.limit:
				overdue = append(overdue, k)
			case k.busy:
			case len(k.holds) == 0 && silence >= l.linger:
				k.busy = true
				l.remove(k, errRetired)
				k.dispose()
			case len(k.holds) > 0 && silence >= l.pulse/2:
				k.busy = true
				l.running.Go(k.ping)
			}
		}
		l.watching = len(l.carriers) > 0 && !l.closed
		on := l.watching
		l.mu.Unlock()
		tick.Reset(max(next, time.Millisecond))
		for _, k := range overdue {
			k.look()
		}
		if !on {
			return
		}
	}
}

// ping looks whether the locks are still there. The caller has made k busy.
func (k *carrier) ping() {
	if _, err := k.ask(k.ctx, k.pingSQL()); k.broken(err) {
		k.lose(err)
	}
	k.l.mu.Lock()
	defer k.l.mu.Unlock()
	k.next()
}
