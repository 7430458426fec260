package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// opening says for what a unit of work is opened. Where end is nil the caller ends the unit, and has a
// connection of database/sql in its hand until then.
type opening struct {
	op   string // the operation that errors name
	opts driver.TxOptions
	end  context.Context      // ends the unit at the latest; nil in a transaction of BeginTx, and for one statement
	hold *outerHold           // the hold that owns the unit; nil for none
	with *statement.Statement // the unit's first statement, which may go out with the lock; nil for none
}

// openUnit opens a unit of work on a session, with the locks that p asks for. First it takes those that
// lie outside of the transaction.
func (cs *ctxState) openUnit(ctx context.Context, p *plan, o opening) (_ *unit, err error) {
	defer func() { p.refused(ctx, cs.handle, err) }()
	if o.hold != nil {
		ctx = handle.ForHold(ctx)
	}
	exclusive := func(r strategy.Resource) bool { return r.Traits.Inside && !r.Shared }
	if o.opts.ReadOnly && slices.ContainsFunc(p.missing, exclusive) {
		return nil, &lockerr.Error{Op: o.op, Key: p.h.Names(), Strategy: hint.StrategyRow, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the server takes row locks in a READ ONLY transaction only if they are shared"))}
	}
	if err := p.prepare(ctx, cs, o.hold == nil); err != nil {
		return nil, err
	}
	opens := &opener{ctxState: cs, p: p, opening: o, levels: levelsOf(o.opts)}
	if p.compares {
		if err := p.l.Dirty(opens.levels); err != nil {
			return nil, cs.handle.Error(o.op, p.h, err)
		}
	}
	if len(p.outside) > 0 {
		var undo func()
		if undo, err = cs.takeGrants(ctx, p, opens.lender()); err != nil {
			return nil, handle.Yielded(err)
		}
		defer func() {
			if err != nil {
				undo()
			}
		}()
	}
	return opens.begin(ctx)
}

// levelsOf returns the isolation levels that a transaction with opts may have; 0 stands for those of a
// new connection.
func levelsOf(opts driver.TxOptions) sqltext.Levels {
	switch opts.Isolation {
	case 0: // sql.LevelDefault
		return 0
	case 1:
		return sqltext.ReadUncommitted
	case 2:
		return sqltext.ReadCommitted
	}
	return sqltext.RepeatableRead
}

// opener opens a unit of work on a session.
type opener struct {
	ctxState *ctxState
	p        *plan
	opening
	levels  sqltext.Levels // isolation levels that the transaction may have
	session *pool.Conn     // the session, whose turn the caller has; nil while there is none
	last    *lastWrite     // the write that went out with the lock and with COMMIT; nil for none
}

// connect takes a session. blocks: the caller is about to wait for a lock in the server, on this session.
func (o *opener) connect(ctx context.Context, blocks bool) (_ *pool.Conn, err error) {
	wait := o.ctxState.handle.Wait(o.p.h)
	if o.ctxState.handle.Bounded() && o.p.inTransaction() {
		wait = o.p.wait.Left()
	}
	caller := o.ctxState.connCaller(ctx, o.p.h, o.p.asker.Pooled, blocks)
	caller.Beside = o.end == nil
	o.session, err = o.ctxState.handle.Session(ctx, o.p.l, caller, wait)
	return o.session, err
}

// Get takes a session.
func (o *opener) Get(ctx context.Context) (*pool.Conn, error) { return o.connect(ctx, false) }

// BeforeWait returns the session on which the caller is to wait for the lock. If the caller must not keep
// its session while it waits, BeforeWait gives that back and takes another one.
func (o *opener) BeforeWait(ctx context.Context) (*pool.Conn, error) {
	switch {
	case !o.ctxState.handle.Bounded() || o.ctxState.holdsAny(o.p.h):
		return o.session, nil
	case o.session != nil && o.session.Block(): // nil after giveBack, if no session came in its place
		return o.session, nil
	}
	o.giveBack()
	return o.connect(ctx, true)
}

// TookOver notes the session that the previous holder has handed over.
func (o *opener) TookOver(c *pool.Conn) { o.session = c }

// Short returns which bound leaves no session for the caller now; nil if there may be a session. In a
// transaction of database/sql without maxConns it is always nil.
func (o *opener) Short() error {
	if o.end == nil && !o.ctxState.handle.Bounded() {
		return nil
	}
	return o.p.l.Short()
}

// giveBack gives the session back, if the opener has one.
func (o *opener) giveBack() {
	if o.session != nil {
		o.session.Release()
		o.session = nil
	}
}

// lender lends the session to the strategy that takes the lock outside of the transaction. It returns
// nil in three cases: if more is to be done before the transaction, or in it; for a lock that may outlast
// the transaction; and for a version, if the transaction would lock what it reads.
func (o *opener) lender() *strategy.Lender {
	p := o.p
	moreLocks := len(p.outside) > 1 || p.outside[0].Slots > 0 || len(o.ctxState.grants.list) > 0
	switch {
	case o.opts != (driver.TxOptions{}), p.inTransaction(), o.ctxState.handle.ByCalls():
		return nil
	case p.versions && p.l.ReadsLock():
		return nil
	case p.locks && (moreLocks || o.ctxState.decision.readStands):
		return nil
	}
	return &strategy.Lender{
		Get: func(ctx context.Context) (*pool.Conn, error) {
			if err := o.Short(); err != nil { // a caller that may have the lock soon does not wait for a session
				return nil, err
			}
			return o.Get(ctx)
		},
		Put: o.giveBack,
	}
}

// begin opens the unit of work.
func (o *opener) begin(ctx context.Context) (u *unit, err error) {
	p := o.p
	if p.inTransaction() {
		first := &p.requests[0]
		first.Since = time.Now() // later tries count from here, too
		p.asked = true
		first.seen, _ = o.ctxState.handle.Observe(ctx, first.resources...)
	}
	for tries, lent := 1, o.session != nil; ; tries++ {
		u, err = o.tryBegin(ctx)
		if lent || !errors.Is(err, driver.ErrBadConn) || tries == 3 {
			break
		}
	}
	if errors.Is(err, driver.ErrBadConn) {
		err = o.ctxState.handle.SetupError(p.h, err)
	}
	if err != nil {
		if p.inTransaction() {
			p.requests[0].seen.Answered(nil, nil, 0, err)
		}
		return nil, handle.Yielded(err)
	}
	if o.end != nil {
		u.watchEnd(o.end)
	}
	p.l.KeepAlive.Keep(u.session, u.lostBehind)
	if len(p.requests) > 1 {
		if err := u.lockRest(ctx, p); err != nil {
			return nil, handle.Yielded(err)
		}
	}
	if len(o.ctxState.grants.list) > 0 {
		if err := u.verify(ctx); err != nil {
			_ = u.finish(false)
			return nil, err
		}
	}
	return u, nil
}

// tryBegin opens a transaction with the first request of p. In a hold that has the key already, p may have
// no request.
func (o *opener) tryBegin(ctx context.Context) (u *unit, err error) {
	k, p, lent := o.ctxState.handle, o.p, o.session != nil
	unclosed, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := k.OnClose(cancel)
	defer stop()
	defer func() {
		switch {
		case u != nil:
			o.session.Unblocked()
			o.session.EndTurn()
			return
		case err != nil && k.Closed():
			err = k.SetupError(p.h, lockerr.ErrClosed)
		}
		if lent || o.session != nil && server.Gone(err, o.session.Conn) {
			o.session.Taint() // a lock was taken on the session, or the session is broken
		}
		o.giveBack()
	}()
	if p.inTransaction() {
		return o.lockFirst(unclosed)
	}
	if !lent {
		if _, err = o.Get(unclosed); err != nil {
			return nil, o.beginError(err)
		}
	}
	txn, err := o.session.Begin(unclosed, o.opts)
	if err != nil {
		return nil, o.beginError(err)
	}
	if p.l.Info().Topology != "" && !lent && !k.ByCalls() { // with wsrep_sync_wait=1 a node that is behind waits at START TRANSACTION alone
		if err = server.Exec(unclosed, o.session.Conn, "START TRANSACTION"); err != nil {
			return nil, o.beginError(err)
		}
	}
	u = newUnit(o, txn)
	if lent && p.versions {
		u.past.snapshot = versionSnapshot
	}
	return u, nil
}

// beginError turns err, with which no transaction could begin, into the error that the caller gets. The error
// is driver.ErrBadConn if the caller is to try another session.
func (o *opener) beginError(err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		return err
	}
	if server.Idle(err) { // the server has ended the session before anything was sent
		return driver.ErrBadConn
	}
	return o.ctxState.handle.SetupError(o.p.h, err)
}

// lockFirst is tryBegin for a transaction that begins with a row lock.
func (o *opener) lockFirst(ctx context.Context) (*unit, error) {
	k, p := o.ctxState.handle, o.p
	first := p.requests[0]
	if first.Wait = p.wait.Left(); first.Wait == 0 {
		k.AwaitEnding(ctx, first.resources)
	}
	first.Sessions = o
	readsFirst := false
	if st := o.with; st != nil && o.joinsLock(st) {
		alone := st.Last && len(p.around) == 0 && !o.ctxState.decision.readStands && !first.resources[0].Shared
		switch {
		case st.Query && !st.Last:
			readsFirst, first.Behind = true, query(st)
		case !st.Query && alone:
			first.Behind = o.alone(st)
		}
	}
	if readsFirst || p.l.Info().CheapWaits {
		first.GoesAhead = p.l.Spare
	}
	ctx, asked := first.seen.Within(ctx)
	defer asked()
	begun, err := p.l.RowLocks.Begin(ctx, o.opts, first.Request)
	if err != nil {
		return nil, err
	}
	first.seen.Answered(o.session, begun.Ticket, 0, nil)
	u := newUnit(o, begun.Txn)
	u.granted(first, begun.Ticket, begun.Locked)
	u.rowLocks.handoff = begun.Handoff
	return u, nil
}

// joinsLock reports whether st may go out in one text with the lock statement: it runs under one lock alone.
func (o *opener) joinsLock(st *statement.Statement) bool {
	oneLock := len(o.p.requests) == 1 && len(o.ctxState.grants.list) == 0
	return oneLock && joins(st, o.p.l.Info())
}

// watchEnd ends the unit with the context end, or with the handle, unless something ends it before.
func (u *unit) watchEnd(end context.Context) {
	u.l.Remember(u, u.endForClose)
	u.life.stop = context.AfterFunc(end, u.contextEnded)
	u.noteEnd(end)
	if u.ctxState.handle.Closed() {
		go u.endForClose(lockerr.ErrClosed)
	}
}
