package mysqllock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/optimistic"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
)

// unit is the open transaction of a unit of work, with the locks that it holds:
// on a session or on one of database/sql's own connections. Everything in it is guarded by its
// scope's turn; the connection under it also by the connection's own, which it
// shares with the keeper.
type unit struct {
	l       *locks
	scope   *scope
	link    *pool.Conn
	home    *conn     // the connection of database/sql that link belongs to; nil for a session
	txn     *pool.Txn // the transaction that holds the locks
	opts    driver.TxOptions
	rows    map[string]*row // that it has locked
	tickets []*queue.Ticket
	seen    []*observation
	leaving time.Time // when giving back began, where there is somebody to be told
	around  []*guard  // of the holds that it is inside of

	hold     *Hold       // set where Do or Acquire ends it, not a commit in it
	stack    []*tx       // open transactions of the caller, outermost first
	saves    int         // savepoints so far, for their names
	read     bool        // a plain read has run, so the snapshot is taken
	wrote    bool        // a statement has run that may have written
	compared []*guard    // whose versions its commit has compared and set
	stream   *rows       // rows that are still being read from link; holds link's turn
	broken   error       // what went wrong while streamed rows were read; guarded by the connection's turn
	failed   error       // why it is lost
	over     bool        // ended; its connection is someone else's
	keep     bool        // the guards of the unit of work outlive it
	done     func()      // tells the crowd that the session is free
	stop     func() bool // ends the watch on the lock context's end; nil without one
}

// row is a row of the lock table that a unit has locked.
type row struct {
	place
	versioned bool // others compare versions of it
}

// commitLimit bounds a COMMIT or ROLLBACK on a session.
const commitLimit = 30 * time.Second

// request is what to ask the locker for, and what it is for.
type request struct {
	rowlock.Request
	patience
	places []place
	seen   *observation
}

// now returns the request with what is left of its wait.
func (r request) now() rowlock.Request {
	r.Wait = r.left()
	return r.Request
}

// requests says what to ask the locker for, one request after the other. carried
// means that the caller occupies a connection of database/sql while it waits.
func (k *connector) requests(s *scope, wait patience, w wanted, carried bool) (requests []request) {
	plain := request{Request: rowlock.Request{Waiting: k.waitingFor(s, carried)}, patience: wait}
	if len(w.rows) > 0 {
		r := plain
		r.places = w.rows
		r.Label = label(w.rows)
		for _, p := range w.rows {
			r.Keys = append(r.Keys, rowlock.Key{Name: p.row, Shared: p.Shared})
		}
		requests = append(requests, r)
	}
	for _, p := range w.slots {
		r := plain
		r.places = []place{p}
		r.Label = p.Key
		r.Slots = p.slots()
		requests = append(requests, r)
	}
	return requests
}

// waiting counts a caller of s that waits from now on, and returns a context that
// also ends when the handle is closed.
func (k *connector) waiting(ctx context.Context, s *scope, carried bool) (_ context.Context, done func(), err error) {
	ctx, leave, err := k.counted(ctx, s, carried)
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(k.ctx, func() { cancel(ErrClosed) })
	return ctx, func() { stop(); cancel(nil); leave() }, nil
}

// counted is waiting for a caller who hears otherwise that the handle is closed.
func (k *connector) counted(ctx context.Context, s *scope, carried bool) (_ context.Context, done func(), err error) {
	leave := func() {}
	if carried {
		if ctx, leave, err = k.crowd.enter(ctx, s); err != nil {
			return nil, nil, err
		}
	}
	k.waiters.Add(1)
	return ctx, func() { leave(); k.waiters.Add(-1) }, nil
}

// begin opens a unit of work on a connection of database/sql that is free.
func (c *conn) begin(ctx context.Context, s *scope, h *lockctx.Hint, opts driver.TxOptions) (_ *unit, err error) {
	if c.raw || c.manual {
		return nil, &Error{Op: "begin", Key: names(h), Err: lockerr.With(ErrUnsafe, errors.New(
			"a transaction that plain SQL text has begun may be open on this connection; begin it with BeginTx"))}
	}
	w, err := c.k.wanted(s, h)
	if err != nil {
		return nil, err
	}
	if opts.ReadOnly && (len(w.slots) > 0 || slices.ContainsFunc(w.rows, func(p place) bool { return !p.Shared })) {
		return nil, &Error{Op: "begin", Key: names(h), Strategy: lockctx.StrategyRow, Err: lockerr.With(ErrUnsafe, errors.New(
			"the server takes row locks in a READ ONLY transaction only if they are shared"))}
	}
	l, err := c.k.use(ctx, h)
	if err != nil {
		return nil, c.k.setupError(h, err)
	}
	wait := c.k.patience(h)
	undo, err := s.guard(ctx, l, wait, w.guards, c.link, true)
	if err != nil {
		return nil, yielded(err)
	}
	defer func() {
		if err != nil {
			undo()
		}
	}()
	requests := c.k.requests(s, wait, w, true)
	u, err := c.beginUnit(ctx, l, s, h, opts, requests)
	if err != nil {
		if !c.link.Clean() {
			c.bad.Store(true)
		}
		return nil, yielded(err)
	}
	if c.unlimit != "" {
		l.keeper.Keep(c.link, u.lostBehind)
	}
	if err := u.lockRest(ctx, requests); err != nil {
		return nil, yielded(err)
	}
	return u, nil
}

// beginUnit begins the transaction of a unit of work, with the first of requests.
func (c *conn) beginUnit(ctx context.Context, l *locks, s *scope, h *lockctx.Hint, opts driver.TxOptions, requests []request) (*unit, error) {
	if err := c.link.Take(ctx); err != nil {
		return nil, err
	}
	defer c.link.Give()
	if len(requests) == 0 {
		if err := c.liftLimit(ctx); err != nil {
			return nil, err
		}
		txn, err := c.link.Begin(ctx, opts)
		if err != nil {
			return nil, err
		}
		return c.newUnit(l, s, h, txn, opts), nil
	}
	if l.IdleLimit() > 0 {
		c.unlimit = rowlock.IdleLimitSQL(l.Info().IdleLimit) // also where the lock is not granted
	}
	first := requests[0]
	first.Request = first.now()
	first.Conn = func(context.Context) (*pool.Conn, error) { return c.link, nil }
	first.seen = c.k.observe(ctx, first.places...)
	grant, err := l.Begin(ctx, opts, false, first.Request)
	c.k.answered(first.seen, 0, err)
	if err != nil {
		return nil, err
	}
	u := c.newUnit(l, s, h, grant.Txn, opts)
	u.granted(first, grant.Ticket, grant.Locked)
	return u, nil
}

// newUnit returns a unit on this connection.
func (c *conn) newUnit(l *locks, s *scope, h *lockctx.Hint, txn *pool.Txn, opts driver.TxOptions) *unit {
	u := newUnit(l, s, h, c.link, txn)
	u.home, u.opts = c, opts
	return u
}

// yielded makes database/sql try again where the crowd asked for it. Nothing
// was run and nothing is held.
func yielded(err error) error {
	if errors.Is(err, errYield) {
		return driver.ErrBadConn
	}
	return err
}

// openSession opens a unit of work on a session, which ends, at the latest,
// with the context end. hold is set where a hold owns it; else the caller
// occupies a connection of database/sql.
func (k *connector) openSession(ctx, end context.Context, s *scope, h *lockctx.Hint, hold *Hold) (_ *unit, err error) {
	l, err := k.use(ctx, h)
	if err != nil {
		return nil, k.setupError(h, err)
	}
	w, err := k.wanted(s, h)
	if err != nil {
		return nil, err
	}
	wait := k.patience(h)
	undo, err := s.guard(ctx, l, wait, w.guards, nil, hold == nil)
	if err != nil {
		return nil, yielded(err)
	}
	defer func() {
		if err != nil {
			undo()
		}
	}()
	requests := k.requests(s, wait, w, hold == nil)
	for tries := 1; ; tries++ {
		u, err := k.openUnit(ctx, l, s, h, requests, hold == nil)
		if errors.Is(err, driver.ErrBadConn) {
			if tries < 3 {
				continue
			}
			err = k.setupError(h, errors.New("connections for sessions break as soon as they are used"))
			if len(requests) > 0 {
				k.answered(k.observe(ctx, requests[0].places...), 0, err)
			}
		}
		if err != nil {
			return nil, yielded(err)
		}
		u.hold = hold
		l.mu.Lock()
		l.open[u] = struct{}{}
		l.mu.Unlock()
		k.crowd.hold()
		u.done = k.crowd.done
		l.keeper.Keep(u.link, u.lostBehind)
		u.stop = context.AfterFunc(end, u.contextEnded)
		if k.ctx.Err() != nil {
			go u.abandon(ErrClosed)
		}
		if err := u.lockRest(ctx, requests); err != nil {
			return nil, yielded(err)
		}
		return u, nil
	}
}

// openUnit opens a transaction on a session, with the first of requests. Inside a
// hold that has the key there may be none.
func (k *connector) openUnit(ctx context.Context, l *locks, s *scope, h *lockctx.Hint, requests []request, carried bool) (_ *unit, err error) {
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(k.ctx, cancel)
	defer stop()
	var link *pool.Conn
	connect := func(ctx context.Context) (_ *pool.Conn, err error) {
		link, err = k.dedicated(ctx, l, s, k.wait(h), carried)
		return link, err
	}
	defer func() {
		switch {
		case err == nil:
			link.Give()
			return
		case k.ctx.Err() != nil:
			err = k.setupError(h, ErrClosed)
		}
		if link != nil {
			link.Release()
		}
	}()
	if len(requests) == 0 {
		if _, err := connect(own); errors.Is(err, driver.ErrBadConn) {
			return nil, err
		} else if err != nil {
			return nil, k.setupError(h, err)
		}
		return newUnit(l, s, h, link, link.Begun()), nil // by its first statement: sessions are not in autocommit
	}
	first := requests[0]
	first.Request = first.now()
	first.Conn = connect
	first.seen = k.observe(ctx, first.places...)
	grant, err := l.Begin(own, driver.TxOptions{}, true, first.Request)
	k.answered(first.seen, 0, err)
	if err != nil {
		return nil, err
	}
	u := newUnit(l, s, h, link, grant.Txn)
	u.granted(first, grant.Ticket, grant.Locked)
	return u, nil
}

// dedicated takes a connection from the pool of sessions.
func (k *connector) dedicated(ctx context.Context, l *locks, s *scope, wait time.Duration, carried bool) (*pool.Conn, error) {
	ctx, done, err := k.waiting(ctx, s, carried && !l.sessions.Ready())
	if err != nil {
		return nil, err
	}
	defer done()
	full := fmt.Errorf("all %d connections for sessions are in use (lockMaxConns)", k.settings.maxConns)
	ctx, cancel := context.WithTimeoutCause(ctx, max(wait, time.Second), full)
	defer cancel()
	link, err := l.sessions.Acquire(ctx)
	switch cause := context.Cause(ctx); {
	case err == nil:
		return link, nil
	case errors.Is(cause, full):
		return nil, lockerr.With(ErrTimeout, full)
	case cause != nil:
		return nil, cause
	}
	return nil, err
}

func newUnit(l *locks, s *scope, h *lockctx.Hint, link *pool.Conn, txn *pool.Txn) *unit {
	u := &unit{l: l, scope: s, link: link, txn: txn, rows: make(map[string]*row), around: s.k.around(h)}
	s.unit = u
	return u
}

// granted notes the rows that were locked for r. The ticket is nil where nobody
// lined up for them.
func (u *unit) granted(r request, ticket *queue.Ticket, locked rowlock.Locked) {
	u.tickets = append(u.tickets, ticket)
	if r.seen != nil {
		u.seen = append(u.seen, r.seen)
	}
	for _, p := range r.places {
		name := p.row
		if p.Slots > 0 {
			name = r.Slots[locked.Slot]
			p.tell(lockctx.Slot, uint64(locked.Slot))
		}
		u.rows[name] = &row{p, slices.Contains(locked.Versioned, name)}
	}
}

// row returns the row of that name, if the unit has locked it. A nil unit has
// locked none.
func (u *unit) row(name string) *row {
	if u == nil {
		return nil
	}
	return u.rows[name]
}

// slotOf returns which slot of p the unit has locked.
func (u *unit) slotOf(p place) (slot int, ok bool) {
	if u == nil {
		return 0, false
	}
	for name, r := range u.rows {
		if slot := slices.Index(r.slots(), name); r.Slots > 0 && r.place.row == p.row {
			return slot, true // also where there were more of them
		}
	}
	r := u.rows[p.row] // the key itself is the first slot
	return 0, r != nil && !r.Shared
}

// setupError is a failure to get the lock table ready, or to reach the server
// for it.
func (k *connector) setupError(h *lockctx.Hint, err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		err = errors.New(err.Error()) // no reason for database/sql to try another connection
	}
	return &Error{Op: "lock", Key: names(h), Strategy: k.strategy(h), Err: err}
}

// join adds to the unit what of a hint it does not hold yet.
func (u *unit) join(ctx context.Context, k *connector, h *lockctx.Hint) error {
	for _, g := range k.around(h) {
		if !slices.Contains(u.around, g) {
			u.around = append(u.around, g)
		}
	}
	w, err := k.wanted(u.scope, h)
	if err != nil || w.nothing() {
		return err
	}
	if _, err := k.use(ctx, h); err != nil {
		return k.setupError(h, err)
	}
	if u.read && (!h.AllowStale || w.versions()) && u.l.Info().RepeatableRead(u.opts.Isolation) {
		return u.error("lock", lockerr.With(ErrStaleSnapshot, fmt.Errorf(
			"it has read before it asks for %s; ask for all keys at once (lockctx.WithKeys), or say lockctx.AllowStale()", names(h))))
	}
	wait := k.patience(h)
	undo, err := u.scope.guard(ctx, u.l, wait, w.guards, nil, false)
	if err != nil {
		return err
	}
	for i, r := range k.requests(u.scope, wait, w, false) {
		if err := u.lock(ctx, r, i == 0); err != nil {
			if !u.over {
				undo()
			}
			return err
		}
	}
	return nil
}

// lockRest takes the row locks that requests ask for after the first of them. If
// one is not granted the unit is over as if it had not begun: the guards that it
// began with stay, and the lock context may try again.
func (u *unit) lockRest(ctx context.Context, requests []request) error {
	u.keep = true
	for _, r := range requests[min(1, len(requests)):] {
		if err := u.lock(ctx, r, true); err != nil {
			_ = u.finish(false)
			return err
		}
	}
	u.keep = false
	return nil
}

// lock takes row locks in the open transaction. If they are not granted it goes
// on where that was the first thing it was asked for.
func (u *unit) lock(ctx context.Context, r request, first bool) error {
	if err := u.takeLink(ctx, "lock"); err != nil {
		return err
	}
	defer u.give()
	ctx, release := u.untilClosed(ctx)
	defer release()
	r.seen = u.scope.k.observe(ctx, r.places...)
	locked, alive, err := u.l.Join(ctx, u.link, r.now())
	u.scope.k.answered(r.seen, 0, err)
	if err == nil {
		u.granted(r, nil, locked)
		return nil
	}
	if !alive || !first {
		gone := server.Gone(err, u.link.Conn)
		err = noRetry(err)
		u.lose(err, gone)
	}
	return err
}

// noRetry makes sure that database/sql does not run a statement of a unit of
// work again on another connection.
func noRetry(err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		return lockerr.With(ErrLost, err)
	}
	return err
}

// takeLink waits for the turn to use the unit's connection, if it can still be
// used.
func (u *unit) takeLink(ctx context.Context, op string) error {
	if u.failed != nil {
		return u.failed
	}
	if u.stream != nil && u.stream.streaming() {
		return u.error(op, errors.New("the rows of an earlier query of this unit of work are still being read (they were too many to read ahead): close them first"))
	}
	if err := u.link.Take(ctx); err != nil {
		return err
	}
	if u.settle(); u.failed != nil {
		u.give()
		return u.failed
	}
	if u.home == nil {
		if err := u.l.keeper.Overdue(u.link); err != nil {
			u.lose(u.error(op, lockerr.With(ErrLost, err)), true)
			u.give()
			return u.failed
		}
	}
	return nil
}

// run runs a statement in the unit.
func (u *unit) run(ctx context.Context, st *statement) (driver.Rows, driver.Result, error) {
	op := st.op()
	if st.info.Kind == sqltext.Commits {
		return nil, nil, u.error(op, errCommits)
	}
	if err := u.takeLink(ctx, op); err != nil {
		return nil, nil, err
	}
	ctx, release := u.untilClosed(ctx)
	var base driver.Rows
	var res driver.Result
	var err error
	if st.info.Calls {
		err = server.Exec(ctx, u.link.Conn, "SAVEPOINT mysqllock_call")
	}
	u.wrote = u.wrote || st.mayWrite()
	if err == nil {
		base, res, err = st.run(ctx, u.link.Conn)
	}
	var r *rows
	if err == nil && base != nil {
		limit := bufferBytes
		if st.info.Calls || st.info.Kind == sqltext.Write && len(u.stack) == 0 && u.hold == nil {
			limit = 0 // RELEASE SAVEPOINT or COMMIT follows
		}
		r, err = readAhead(base, limit)
	}
	if st.info.Calls && (err == nil || server.Number(err) != 0) {
		err = u.called(ctx, err)
	}
	if st.info.Taints {
		u.link.Taint()
	}
	if err != nil {
		err = u.check(op, err)
		u.give()
		release()
		return nil, nil, err
	}
	u.link.Touch()
	u.read = u.read || st.info.Snapshot
	// Called by whoever closes streamed rows, without the scope's turn.
	over := func(err error) {
		u.broken = err
		u.link.Touch()
		u.give()
		release()
	}
	switch {
	case r == nil:
		over(nil)
		return nil, res, nil
	case r.tail == nil:
		over(nil)
		return r, nil, nil
	default:
		u.stream, r.done = r, over
		return r, nil, nil
	}
}

// called looks at what a procedure did to the transaction, which it may commit,
// or in which it may swallow a deadlock. A savepoint goes with its transaction,
// so it tells. err is what CALL returned.
func (u *unit) called(ctx context.Context, err error) error {
	gone := server.Exec(ctx, u.link.Conn, "RELEASE SAVEPOINT mysqllock_call")
	switch {
	case err != nil && u.l.Info().EndsTransaction(err):
		return err
	case server.NoSavepoint(gone):
		return lockerr.With(ErrLost, errors.New("the procedure has ended the transaction, and with it the lock"))
	case err == nil:
		return gone
	}
	return err
}

// untilClosed returns a context that also ends when the handle is closed: then
// nobody can wait for a statement on a session any more.
func (u *unit) untilClosed(ctx context.Context) (context.Context, func()) {
	if u.home != nil {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(u.l.ctx, cancel)
	return ctx, func() { stop(); cancel() }
}

var errCommits = lockerr.With(ErrUnsafe, errors.New(
	"the statement would end the transaction, and with it the lock; use sql.Tx for transactions, and lockctx.Without for DDL"))

// check looks at what a failed statement did to the transaction. The caller
// has the connection's turn.
func (u *unit) check(op string, err error) error {
	gone := server.Gone(err, u.link.Conn)
	switch {
	case server.Deadlock(err):
		err = u.error(op, lockerr.With(ErrDeadlock, err))
	case gone || u.l.Info().EndsTransaction(err):
		err = u.error(op, lockerr.With(ErrLost, err))
	case errors.Is(err, ErrLost):
		err = u.error(op, err)
	default:
		return err
	}
	u.lose(err, gone)
	return err
}

// settle looks at how streamed rows ended: a deadlock among them has rolled the
// transaction back. The caller has the connection's turn.
func (u *unit) settle() {
	if err := u.broken; err != nil {
		u.broken = nil
		_ = u.check("query", err)
	}
}

// lose marks the unit as lost and rolls back what may be left of it, unless the
// connection is gone, too. The caller has the connection's turn. Later
// statements get ErrLost.
func (u *unit) lose(cause error, gone bool) {
	if u.failed != nil || u.over {
		return
	}
	u.failed = cause
	if !errors.Is(cause, ErrLost) {
		u.failed = u.error("statement", lockerr.With(ErrLost, cause))
	}
	if gone || !u.link.Valid() || u.txn.Rollback(commitLimit) != nil {
		u.breakLink()
	}
	u.free()
	if u.hold != nil {
		u.hold.cancel(ErrLost)
	} else if u.home == nil && len(u.stack) == 0 && !u.keep {
		u.scope.failed = u.failed // what was decided in it must not be written without it
	}
	if len(u.stack) == 0 {
		u.end()
	}
}

// breakLink gives up a connection that may still carry the lock.
func (u *unit) breakLink() {
	u.scope.k.doubt.Store(true)
	u.link.Taint()
	if u.home != nil {
		u.home.bad.Store(true)
		return
	}
	// The server may be busy with a statement whose caller has gone, and would
	// keep the lock until it is done.
	link, l := u.link, u.l
	l.background(func(ctx context.Context) { _ = l.control.KillConnection(ctx, link) })
}

// free gives back what the unit holds of the connection and in the process:
// whoever waits may try now. It does not touch the callers' transactions.
func (u *unit) free() {
	for _, t := range u.tickets {
		t.Leave()
	}
	u.tickets = nil
	for _, seen := range u.seen {
		seen.over(u.leaving, u.failed)
	}
	u.seen = nil
}

// end takes the unit out of its scope. Its transaction has ended before. The
// caller has the connection's turn, and gives it next.
func (u *unit) end() {
	if u.over {
		return
	}
	u.over = true
	u.free()
	for _, r := range u.rows {
		r.forget(lockctx.Slot)
	}
	u.l.keeper.Forget(u.link)
	if u.stop != nil {
		u.stop()
	}
	if u.scope.unit == u {
		u.scope.unit = nil
		if !u.keep {
			u.scope.drop(0)
		}
	}
	if u.home != nil {
		return
	}
	u.l.mu.Lock()
	delete(u.l.open, u)
	u.l.mu.Unlock()
	u.done()
}

// give ends the turn to use the unit's connection. Where the unit has ended in
// it, a session goes back to the pool.
func (u *unit) give() {
	if u.over && u.home == nil {
		u.link.Release()
		return
	}
	u.link.Give()
}

// finish commits or rolls back and ends the unit.
func (u *unit) finish(commit bool) error {
	if u.over {
		return u.failed
	}
	u.cutStream()
	if err := u.link.Take(context.Background()); err != nil {
		return err
	}
	defer u.give()
	if u.settle(); u.failed != nil {
		u.end()
		return u.failed
	}
	if u.scope.k.settings.observer != nil {
		u.leaving = time.Now()
	}
	var err error
	op, fenced, unsure := "rollback", false, func() {}
	if commit {
		op = "commit"
		if u.home == nil {
			err = u.l.keeper.Overdue(u.link)
		}
		if err == nil {
			unsure, err = u.fence()
			fenced = err != nil
		}
		if err == nil {
			err = u.txn.Commit(u.limit())
		}
	} else {
		err = u.txn.Rollback(u.limit())
	}
	if err != nil {
		u.scope.k.suspect(err)
		if (fenced || server.Number(err) != 0) && !server.Gone(err, u.link.Conn) {
			// What is left of the transaction must go: the server has refused it,
			// or a guard is not ours any more.
			if server.Deadlock(err) && !errors.Is(err, ErrConflict) {
				err = lockerr.With(ErrDeadlock, err)
			}
			if rerr := u.txn.Rollback(u.limit()); rerr != nil {
				u.breakLink()
			}
		} else {
			u.breakLink()
			if !fenced {
				unsure()
			}
		}
		var said *Error
		if !errors.As(err, &said) || !errors.Is(err, ErrLost) && !errors.Is(err, ErrConflict) {
			err = u.error(op, lockerr.With(ErrLost, err))
		}
		u.failed = err
		for _, g := range u.compared {
			g.seen.over(u.leaving, err)
		}
		if commit && (u.scope.unwatch != nil || u.home == nil && u.hold == nil) {
			u.scope.failed = err // what was read before must not decide on what is written without it
		}
	}
	if commit && err == nil {
		u.newVersions()
	}
	u.end()
	return err
}

// fence checks, right before COMMIT and on the same connection, that the guards
// are still ours, and that the versions are those that were remembered. What was
// written makes versions new.
func (u *unit) fence() (unsure func(), err error) {
	if u.opts.ReadOnly {
		return func() {}, nil // there is nothing that could be written
	}
	guards := slices.Concat(u.scope.guards, u.around)
	if unsure, err = u.l.fence(u.link, guards...); err != nil || !u.wrote {
		return unsure, err
	}
	return unsure, u.setVersions(guards)
}

// setVersions compares the versions that the unit remembers with those that are,
// and sets new ones.
func (u *unit) setVersions(guards []*guard) error {
	var versions []*optimistic.Version
	var places []place
	var rows []string // that are locked, and that others compare versions of
	for _, g := range u.scope.guards {
		v := g.version()
		if v == nil {
			continue
		}
		p := g.remembered()
		if at := slices.IndexFunc(guards, func(lease *guard) bool { return lease.covers(p) }); at >= 0 {
			if err := guards[at].again(p); err != nil {
				return err
			}
			g.forget(lockctx.Version) // the lease has made it another
			continue
		}
		u.compared = append(u.compared, g)
		versions, places = append(versions, v), append(places, p)
	}
	for name, r := range u.rows {
		if r.versioned && !r.Shared && !slices.ContainsFunc(places, func(p place) bool { return p.row == name }) {
			rows = append(rows, name)
		}
	}
	if len(versions) > 0 {
		if err := u.l.versions.Commit(context.Background(), u.link.Conn, versions); err != nil {
			return naming(err, places)
		}
	}
	if len(rows) > 0 {
		slices.Sort(rows)
		return u.l.Step(context.Background(), u.link.Conn, rows)
	}
	return nil
}

// newVersions notes the versions that a commit has set.
func (u *unit) newVersions() {
	for _, g := range u.compared {
		next := g.version().Number() + 1
		g.keeper = u.l.versions.Given(g.row, next)
		g.tell(lockctx.Version, next)
	}
}

// steps reports whether others compare versions of what the unit has locked.
func (u *unit) steps() bool {
	for _, r := range u.rows {
		if r.versioned && !r.Shared {
			return true
		}
	}
	return false
}

// endTx ends a transaction of the caller: the unit's own, or a savepoint in it.
func (u *unit) endTx(t *tx, commit bool) error {
	op := "rollback"
	if commit {
		op = "commit"
	}
	last := len(u.stack) - 1
	switch {
	case t.failed != nil:
		return t.failed
	case u.over:
		return u.failed
	case u.stack[last] != t:
		err := u.error(op, errors.New("transactions of one lock context must end in the reverse order in which they began; the whole unit of work is rolled back"))
		for _, open := range u.stack {
			open.failed = err
		}
		u.stack = nil
		_ = u.finish(false)
		return err
	}
	u.stack = u.stack[:last]
	if t.save == "" {
		return u.finish(commit)
	}
	if commit && u.failed == nil && u.stream != nil && u.stream.streaming() {
		return nil // the savepoint goes with the transaction
	}
	u.cutStream()
	text := "ROLLBACK TO SAVEPOINT " + t.save
	if commit {
		text = "RELEASE SAVEPOINT " + t.save
	}
	err := u.text(context.Background(), op, text)
	if err != nil {
		u.fail(err, false) // its changes must not be committed by an outer transaction
	}
	return err
}

// nest begins a transaction inside the unit: on a session without one it is the
// session's own, else a savepoint.
func (u *unit) nest(ctx context.Context, t *tx, opts driver.TxOptions) error {
	if opts != (driver.TxOptions{}) && opts != u.opts {
		return u.error("begin", errors.New("its unit of work has a transaction with other options open; only the outermost BeginTx can choose them"))
	}
	if u.failed != nil {
		return u.failed
	}
	t.u, t.opts = u, u.opts
	if len(u.stack) > 0 || u.hold != nil {
		u.saves++
		t.save = fmt.Sprintf("mysqllock_%d", u.saves)
		if err := u.text(ctx, "begin", "SAVEPOINT "+t.save); err != nil {
			return err
		}
	}
	u.stack = append(u.stack, t)
	return nil
}

// text runs a statement of the driver's own in the unit.
func (u *unit) text(ctx context.Context, op, text string) error {
	if err := u.takeLink(ctx, op); err != nil {
		return err
	}
	defer u.give()
	ctx, release := u.untilClosed(ctx)
	defer release()
	if err := server.Exec(ctx, u.link.Conn, text); err != nil {
		return u.check(op, err)
	}
	u.link.Touch()
	return nil
}

// limit bounds COMMIT and ROLLBACK on sessions; on the application's own
// connections they take as long as they do without a lock.
func (u *unit) limit() time.Duration {
	if u.home == nil {
		return commitLimit
	}
	return 0
}

// cutStream closes rows that are still being read, since the connection is
// needed.
func (u *unit) cutStream() {
	if u.stream != nil {
		_ = u.stream.cutOff(u.error("query", errors.New("the unit of work ended while its rows were being read")))
		u.stream = nil
	}
}

// contextEnded is called when the lock context ends.
func (u *unit) contextEnded() {
	_ = u.scope.take(context.Background())
	defer u.scope.give()
	if u.over {
		return
	}
	// Only finished autocommit statements are in a unit without an open
	// transaction: rolling back would undo what the caller saw succeed.
	commit := len(u.stack) == 0 && u.hold == nil && u.failed == nil
	err := u.finish(commit)
	if err == nil {
		u.failed = u.error("statement", lockerr.With(ErrLost, errEnded))
	}
	if u.hold == nil { // a hold answers for itself, and what is around it goes on
		u.scope.failed = u.failed
	}
}

// lostBehind is called by the keeper when the connection is lost while no
// statement runs.
func (u *unit) lostBehind(cause error) {
	_ = u.scope.take(context.Background())
	defer u.scope.give()
	u.fail(cause, true)
}

// abandon ends a unit whose database handle is being closed.
func (u *unit) abandon(cause error) {
	_ = u.scope.take(context.Background())
	defer u.scope.give()
	if !u.over {
		_ = u.finish(false)
		u.failed = u.error("statement", cause)
		u.scope.failed = u.failed
		if u.hold != nil {
			u.hold.cancel(ErrLost)
		}
	}
}

// fail is lose for callers without the connection's turn.
func (u *unit) fail(cause error, gone bool) {
	if u.over || u.failed != nil {
		return
	}
	u.cutStream()
	_ = u.link.Take(context.Background())
	defer u.give()
	var said *Error
	if !errors.As(cause, &said) {
		cause = u.error("statement", cause)
	}
	u.lose(cause, gone)
}

func (u *unit) error(op string, err error) error {
	var keys []string
	strategy := lockctx.StrategyRow
	for _, r := range u.rows {
		keys = append(keys, r.Key)
	}
	for _, g := range slices.Concat(u.scope.guards, u.around) {
		if len(keys) == 0 {
			strategy = g.Strategy
		}
		keys = append(keys, g.Key)
	}
	slices.Sort(keys)
	return &Error{Op: op, Key: strings.Join(slices.Compact(keys), ", "), Strategy: strategy, Err: err}
}

// alive asks the server whether the unit still holds its locks, for the commit
// of a transaction elsewhere that ran under them.
func (u *unit) alive() error {
	if u.over || u.failed != nil {
		return u.error("commit", lockerr.With(ErrLost, errors.New("the unit of work that held the lock has ended; the transaction is rolled back")))
	}
	return u.text(context.Background(), "commit", "DO 0")
}

// closeLater has a statement closed when the rows that are being read are over.
func (u *unit) closeLater(s driver.Stmt) bool {
	_ = u.scope.take(context.Background())
	defer u.scope.give()
	return u.stream != nil && u.stream.closeLater(s)
}
