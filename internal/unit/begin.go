package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// opening says what a unit of work is opened for. Its caller ends it, who has a connection of
// database/sql in its hand meanwhile, unless end does.
type opening struct {
	op   string // in errors
	opts driver.TxOptions
	end  context.Context      // ends it at the latest; nil in a transaction of BeginTx, and for one statement
	hold *outerHold           // owns it; nil for none
	with *statement.Statement // it begins with this one, which may go out with the lock; nil for none
}

// open opens a unit of work on a session, with what p asks for. What lies outside of the transaction is taken
// first.
func (cs *ctxState) open(ctx context.Context, p *plan, o opening) (_ *unit, err error) {
	defer func() { p.refused(ctx, cs.k, err) }()
	if o.hold != nil {
		ctx = handle.ForHold(ctx)
	}
	exclusive := func(r strategy.Resource) bool { return r.Traits.Inside && !r.Shared }
	if o.opts.ReadOnly && slices.ContainsFunc(p.missing, exclusive) {
		return nil, &lockerr.Error{Op: o.op, Key: p.h.Names(), Strategy: hint.StrategyRow, Err: lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the server takes row locks in a READ ONLY transaction only if they are shared"))}
	}
	if err := p.ready(ctx, cs, o.hold == nil); err != nil {
		return nil, err
	}
	at := &session{ctxState: cs, p: p, opening: o, levels: levelsOf(o.opts)}
	if p.compares {
		if err := p.l.Dirty(at.levels); err != nil {
			return nil, cs.k.Error(o.op, p.h, err)
		}
	}
	if len(p.outside) > 0 {
		var undo func()
		if undo, err = cs.takeGrants(ctx, p, at.lender()); err != nil {
			return nil, handle.Yielded(err)
		}
		defer func() {
			if err != nil {
				undo()
			}
		}()
	}
	return at.open(ctx)
}

// levelsOf are the isolation levels that a transaction with opts may have; 0 for those of a new connection.
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

// session is one on which a unit of work is about to be opened.
type session struct {
	*ctxState
	p *plan
	opening
	levels sqltext.Levels // of isolation
	link   *pool.Conn     // whose turn the caller has; nil while there is none
	last   *lastWrite     // went out with the lock; nil if nothing did
}

// connect takes a session. blocks: the caller is about to wait in the server on it.
func (s *session) connect(ctx context.Context, blocks bool) (_ *pool.Conn, err error) {
	wait := s.k.Wait(s.p.h)
	if s.k.Bounded() && s.p.inTransaction() {
		wait = s.p.wait.Left()
	}
	by := s.asks(ctx, s.p.h, s.p.by.Pooled, blocks)
	by.Beside = s.end == nil
	s.link, err = s.k.Session(ctx, s.p.l, by, wait)
	return s.link, err
}

// giveBack gives the session back, if there is one.
func (s *session) giveBack() {
	if s.link != nil {
		s.link.Release()
		s.link = nil
	}
}

// lender lends the session to the strategy that takes what lies outside of the transaction. It is nil where more is
// to be done before the transaction, or in it; for a lock that may outlast the transaction; and for a version where
// the transaction would lock what it reads.
func (s *session) lender() *strategy.Lender {
	switch p := s.p; {
	case s.opts != (driver.TxOptions{}), p.inTransaction(), s.k.ByCalls():
		return nil
	case p.versions && p.l.ReadsLock():
		return nil
	case p.locks && (len(p.outside) > 1 || p.outside[0].Slots > 0 || len(s.grants) > 0 || s.readStands):
		return nil
	}
	return &strategy.Lender{
		Get: func(ctx context.Context) (*pool.Conn, error) {
			if s.end != nil || s.k.Bounded() {
				if err := s.p.l.Short(); err != nil { // who may have the lock soon does not wait for a session
					return nil, err
				}
			}
			return s.connect(ctx, false)
		},
		Put: s.giveBack,
	}
}

// open opens the unit of work.
func (s *session) open(ctx context.Context) (u *unit, err error) {
	p := s.p
	if p.inTransaction() {
		first := &p.requests[0]
		first.Since = time.Now() // also of the tries that follow
		p.asked = true
		first.seen, _ = s.k.Observe(ctx, first.resources...)
	}
	for tries, lent := 1, s.link != nil; ; tries++ {
		u, err = s.try(ctx)
		if lent || !errors.Is(err, driver.ErrBadConn) || tries == 3 {
			break
		}
	}
	if errors.Is(err, driver.ErrBadConn) {
		err = s.k.SetupError(p.h, err)
	}
	if err != nil {
		if p.inTransaction() {
			p.requests[0].seen.Answered(nil, nil, 0, err)
		}
		return nil, handle.Yielded(err)
	}
	if s.end != nil {
		u.live(s.end)
	}
	p.l.KeepAlive.Keep(u.link, u.lostBehind)
	if len(p.requests) > 1 {
		if err := u.lockRest(ctx, p); err != nil {
			return nil, handle.Yielded(err)
		}
	}
	if len(s.grants) > 0 {
		if err := u.verify(ctx); err != nil {
			_ = u.finish(false)
			return nil, err
		}
	}
	return u, nil
}

// try opens a transaction, with the first request of p. Inside a hold that has the key there may be none.
func (s *session) try(ctx context.Context) (u *unit, err error) {
	k, p, lent := s.k, s.p, s.link != nil
	own, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := k.OnClose(cancel)
	defer stop()
	defer func() {
		switch {
		case u != nil:
			s.link.Unblocked()
			s.link.EndTurn()
			return
		case err != nil && k.Closed():
			err = k.SetupError(p.h, lockerr.ErrClosed)
		}
		if lent || s.link != nil && server.Gone(err, s.link.Conn) {
			s.link.Taint() // it has what was taken on it, or is of no use
		}
		s.giveBack()
	}()
	if p.inTransaction() {
		return s.lockFirst(own)
	}
	if !lent {
		if _, err = s.connect(own, false); err != nil {
			return nil, s.setup(err)
		}
	}
	txn, err := s.link.Begin(own, s.opts)
	if err != nil {
		return nil, s.setup(err)
	}
	if p.l.Info().Topology != "" && !lent && !k.ByCalls() { // a node that is behind waits at START TRANSACTION alone, with wsrep_sync_wait=1
		if err = server.Exec(own, s.link.Conn, "START TRANSACTION"); err != nil {
			return nil, s.setup(err)
		}
	}
	u = newUnit(s, txn)
	u.looked = lent && p.versions
	return u, nil
}

// setup is err with which there is no transaction, as the caller gets it; driver.ErrBadConn to try another session.
func (s *session) setup(err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		return err
	}
	if server.Idle(err) { // the server has ended the session before anything was sent
		return driver.ErrBadConn
	}
	return s.k.SetupError(s.p.h, err)
}

// lockFirst is try with a row lock.
func (s *session) lockFirst(ctx context.Context) (*unit, error) {
	k, p := s.k, s.p
	first := p.requests[0]
	if first.Wait = p.wait.Left(); first.Wait == 0 {
		k.AwaitEnding(ctx, first.resources)
	}
	first.Conn = func(ctx context.Context) (*pool.Conn, error) { return s.connect(ctx, false) }
	if s.end != nil || k.Bounded() {
		first.Short = p.l.Short
	}
	if k.Bounded() && !s.holds(p.h) {
		first.Block = func(ctx context.Context) (*pool.Conn, error) {
			if s.link != nil && s.link.Block() { // it is nil where an earlier one was given back, and none came in its place
				return s.link, nil
			}
			s.giveBack()
			return s.connect(ctx, true)
		}
	}
	first.TakeOver = func(c *pool.Conn) { s.link = c }
	if st := s.with; st != nil && len(p.requests) == 1 && len(s.grants) == 0 && joins(st, p.l.Info()) {
		switch {
		case st.Query && !st.Last:
			first.Ahead = p.l.Far() && !k.Bounded()
			first.Behind = query(st)
		case !st.Query && st.Last && len(p.around) == 0 && !s.readStands && !first.resources[0].Shared:
			first.Behind = s.alone(st)
		}
	}
	ctx, asked := first.seen.Within(ctx)
	defer asked()
	begun, err := p.l.Begin(ctx, s.opts, first.Request)
	if err != nil {
		return nil, err
	}
	first.seen.Answered(s.link, begun.Ticket, 0, nil)
	u := newUnit(s, begun.Txn)
	u.granted(first, begun.Ticket, begun.Locked)
	u.handoff = begun.Handoff
	return u, nil
}

// live has the unit end with end, or with the handle, if nothing ends it before.
func (u *unit) live(end context.Context) {
	u.l.Remember(u, u.endForClose)
	u.stop = context.AfterFunc(end, u.contextEnded)
	u.endsWith(end)
	if u.ctxState.k.Closed() {
		go u.endForClose(lockerr.ErrClosed)
	}
}
