package mysqllock

import (
	"context"
	"database/sql/driver"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
	"github.com/mysqllock/mysqllock/rowlock"
)

// conn is one connection as database/sql sees it. Without a hint every call
// goes straight to the base driver's connection, and what that returns goes
// straight back. database/sql calls one method at a time.
type conn struct {
	k    *connector
	link *pool.Conn // the base connection

	tx      *tx         // the open transaction that BeginTx has begun here
	raw     bool        // plain SQL text has begun a transaction
	manual  bool        // plain SQL text has switched autocommit off
	unlimit string      // takes the limit on idleness off again that was set for a locked transaction; "" without one
	bad     atomic.Bool // must not be used again
}

var (
	_ driver.Conn               = (*conn)(nil)
	_ driver.ConnBeginTx        = (*conn)(nil)
	_ driver.ConnPrepareContext = (*conn)(nil)
	_ driver.NamedValueChecker  = (*conn)(nil)
	_ driver.Pinger             = (*conn)(nil)
	_ driver.SessionResetter    = (*conn)(nil)
	_ driver.Validator          = (*conn)(nil)

	_ driver.Execer         = execer{} //nolint:staticcheck // go-sql-driver/mysql has it, and code uses it through Conn.Raw
	_ driver.ExecerContext  = execer{}
	_ driver.Queryer        = queryer{} //nolint:staticcheck // as above
	_ driver.QueryerContext = queryer{}
)

// execer and queryer run statements without preparing them. A connection has
// them only where the base has the like: database/sql checks a statement's
// arguments before it asks one, and by other rules than a prepared statement's.
type (
	execer  struct{ c *conn }
	queryer struct{ c *conn }
)

// shaped returns the connection with what its base has of them.
func (c *conn) shaped() driver.Conn {
	base := c.link.Conn
	_, execs := base.(driver.ExecerContext)
	if !execs {
		_, execs = base.(driver.Execer) //nolint:staticcheck // for drivers without the context form
	}
	_, queries := base.(driver.QueryerContext)
	if !queries {
		_, queries = base.(driver.Queryer) //nolint:staticcheck // as above
	}
	switch {
	case execs && queries:
		return struct {
			*conn
			execer
			queryer
		}{c, execer{c}, queryer{c}}
	case execs:
		return struct {
			*conn
			execer
		}{c, execer{c}}
	case queries:
		return struct {
			*conn
			queryer
		}{c, queryer{c}}
	}
	return c
}

// Unwrap returns the base driver's connection. What runs on it directly is not
// under a lock.
func (c *conn) Unwrap() driver.Conn { return c.link.Conn }

// plain reports whether a transaction with ctx is none of our business.
func (c *conn) plain(ctx context.Context) bool {
	h, hinted := lockctx.From(ctx)
	return c.unlocked() && (!hinted || c.nothing(h))
}

// direct reports whether a statement with ctx is none of our business.
func (c *conn) direct(ctx context.Context) bool {
	h, hinted := lockctx.From(ctx)
	return c.unlocked() && (!hinted || c.nothing(h) && h.Claim == (lockctx.Locking{}))
}

// unlocked reports whether no transaction with a lock is open.
func (c *conn) unlocked() bool { return c.tx == nil || c.tx.u == nil && c.tx.failed == nil }

// nothing reports whether h asks for no lock.
func (c *conn) nothing(h *lockctx.Hint) bool {
	return h.Scope == nil && h.Err == nil && len(c.k.around(h)) == 0
}

func (e execer) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c := e.c
	if c.direct(ctx) {
		if err := c.note(ctx, text); err != nil {
			return nil, err
		}
		return execDirect(ctx, c.link.Conn, text, args)
	}
	_, res, err := c.run(ctx, &statement{text: text, args: args})
	return res, err
}

func (q queryer) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c := q.c
	if c.direct(ctx) {
		if err := c.note(ctx, text); err != nil {
			return nil, err
		}
		return queryDirect(ctx, c.link.Conn, text, args)
	}
	r, _, err := c.run(ctx, &statement{text: text, args: args, query: true})
	return r, err
}

// Exec is for code that calls it through sql.Conn.Raw.
func (e execer) Exec(text string, args []driver.Value) (driver.Result, error) {
	return e.ExecContext(context.Background(), text, named(args))
}

// Query is for code that calls it through sql.Conn.Raw.
func (q queryer) Query(text string, args []driver.Value) (driver.Rows, error) {
	return q.QueryContext(context.Background(), text, named(args))
}

// note remembers what an unhinted statement does to the transaction, for a
// hint that may come later. It sends nothing, but for a transaction that is
// begun by text where a limit for locked ones is still set.
func (c *conn) note(ctx context.Context, text string) error {
	if c.tx != nil {
		if !c.tx.read {
			c.tx.read = sqltext.Look(text).Snapshot
		}
		return nil
	}
	if isData(text) {
		return nil
	}
	info := sqltext.Look(text)
	if info.Kind != sqltext.Commits {
		return nil
	}
	switch verb := firstWord(text); {
	case verb == "SET":
		if c.manual = info.Opens; c.manual {
			return c.liftLimit(ctx)
		}
	case info.Opens:
		c.raw = true
		return c.liftLimit(ctx)
	case verb == "COMMIT" || verb == "ROLLBACK":
		c.raw = false // others need not end it: UNLOCK TABLES, for one
	}
	return nil
}

// isData knows most statements at a glance: one that reads or changes data, and
// cannot begin or end a transaction.
func isData(text string) bool {
	for _, verb := range [...]string{"SELECT ", "INSERT ", "UPDATE ", "DELETE ", "REPLACE "} {
		if len(text) > len(verb) && strings.EqualFold(text[:len(verb)], verb) {
			return strings.IndexByte(text, ';') < 0
		}
	}
	return false
}

func firstWord(text string) string {
	text = strings.TrimSpace(text)
	end := strings.IndexFunc(text, func(r rune) bool { return r < 'A' })
	if end < 0 {
		end = len(text)
	}
	return strings.ToUpper(text[:end])
}

// run runs a statement under the hint of its context, or in the unit of work
// that the connection's transaction belongs to.
func (c *conn) run(ctx context.Context, st *statement) (driver.Rows, driver.Result, error) {
	h, hinted := lockctx.From(ctx)
	if hinted && h.Err != nil {
		return nil, nil, &Error{Op: st.op(), Err: h.Err}
	}
	if c.tx != nil && c.tx.u == nil && c.tx.failed != nil {
		return nil, nil, c.tx.failed
	}
	st.info = sqltext.Look(st.text)
	if hinted && h.Claim != (lockctx.Locking{}) {
		return c.runClaiming(ctx, h, st)
	}
	return c.runLocked(ctx, h, hinted, st)
}

// runLocked runs a statement in the unit of work that the connection's
// transaction belongs to, or of its context.
func (c *conn) runLocked(ctx context.Context, h *lockctx.Hint, hinted bool, st *statement) (driver.Rows, driver.Result, error) {
	if t := c.tx; t != nil && t.u != nil {
		s := t.u.scope
		if err := s.take(ctx); err != nil {
			return nil, nil, err
		}
		defer s.give()
		if err := t.usable(); err != nil {
			return nil, nil, err
		}
		if err := s.check(h); err != nil {
			return nil, nil, err
		}
		if hinted {
			if err := t.u.join(ctx, c.k, h); err != nil {
				return nil, nil, err
			}
		}
		return t.u.run(ctx, st)
	}

	s := c.k.scope(h.Scope)
	if err := s.take(ctx); err != nil {
		return nil, nil, err
	}
	defer s.give()
	if err := s.check(h); err != nil {
		return nil, nil, err
	}
	switch {
	case st.info.Kind == sqltext.Commits:
		return nil, nil, &Error{Op: st.op(), Key: names(h), Err: errCommits}
	case c.tx != nil:
		return c.runLate(ctx, s, h, st)
	case s.unit != nil:
		return c.runJoined(ctx, s.unit, h, st)
	case st.query && st.info.Kind == sqltext.Read:
		return c.runRead(ctx, s, h, st)
	default:
		return c.runAlone(ctx, s, h, st)
	}
}

// runLate runs a statement of a transaction that began without the hint: the
// lock is taken in that transaction first.
func (c *conn) runLate(ctx context.Context, s *scope, h *lockctx.Hint, st *statement) (driver.Rows, driver.Result, error) {
	t := c.tx
	if t.under != nil && t.under != s.unit {
		return nil, nil, &Error{Op: st.op(), Key: names(h), Strategy: lockctx.StrategyRow, Err: lockerr.With(ErrLost, errors.New(
			"an earlier statement of this transaction ran under the lock of a unit of work that is another, or has ended; begin the transaction with the lock context"))}
	}
	w, err := c.k.wanted(s, h)
	if err != nil {
		return nil, nil, err
	}
	l, err := c.k.use(ctx, h)
	if err != nil {
		return nil, nil, c.k.setupError(h, err)
	}
	// What it has read under the unit is as new as the lock.
	if t.read && t.under == nil && (!h.AllowStale || w.versions()) && l.Info().RepeatableRead(t.opts.Isolation) {
		return nil, nil, &Error{Op: st.op(), Key: names(h), Strategy: c.k.strategy(h), Err: lockerr.With(ErrStaleSnapshot, errors.New(
			"begin the transaction with the lock context, or say lockctx.AllowStale()"))}
	}
	if s.unit != nil {
		return c.runUnder(ctx, s.unit, h, w, st)
	}
	wait := c.k.patience(h)
	undo, err := s.guard(ctx, l, wait, w.guards, nil, false)
	if err != nil {
		return nil, nil, err
	}
	if t.u, err = c.joinLate(ctx, l, s, h, c.k.requests(s, wait, w, false)); err != nil {
		undo()
		return nil, nil, err
	}
	return t.u.run(ctx, st)
}

// runUnder runs a statement of a transaction that began without the hint, under
// the locks that the lock context holds in a unit of work elsewhere.
func (c *conn) runUnder(ctx context.Context, u *unit, h *lockctx.Hint, w wanted, st *statement) (driver.Rows, driver.Result, error) {
	refuse := func(why string) (driver.Rows, driver.Result, error) {
		return nil, nil, &Error{Op: st.op(), Key: names(h), Err: lockerr.With(ErrUnsafe, errors.New(
			"the lock context has a unit of work open elsewhere, "+why+"; begin the transaction with the lock context"))}
	}
	switch {
	case !w.nothing():
		return refuse("which does not hold all of these keys")
	case u.steps() || u.scope.remembers():
		return refuse("whose commit is to set a version")
	}
	if err := u.join(ctx, c.k, h); err != nil { // the keys are held: for the holds around
		return nil, nil, err
	}
	t := c.tx
	t.read = t.read || st.info.Snapshot
	t.under = u
	u.wrote = u.wrote || st.mayWrite()
	return c.runHere(ctx, st)
}

// joinLate makes the open transaction, which began without the hint, that of a
// unit of work, and takes its row locks.
func (c *conn) joinLate(ctx context.Context, l *locks, s *scope, h *lockctx.Hint, requests []request) (*unit, error) {
	t := c.tx
	if err := c.link.Take(ctx); err != nil {
		return nil, err
	}
	defer c.link.Give()
	granted := make([]rowlock.Locked, len(requests))
	alive, err := false, c.openLate(ctx, l, len(requests) > 0)
	for i := range requests {
		if err != nil {
			break
		}
		r := &requests[i]
		r.seen = c.k.observe(ctx, r.places...)
		granted[i], alive, err = l.Join(ctx, c.link, r.now())
		alive = alive && i == 0
	}
	for _, r := range requests { // where one was refused, those before it were granted for nothing
		c.k.answered(r.seen, 0, err)
	}
	if err != nil {
		err = noRetry(err)
		if !alive || !c.link.Valid() { // its driver closes a connection that answers too late
			t.failed = &Error{Op: "statement", Key: names(h), Strategy: c.k.strategy(h), Err: lockerr.With(ErrLost, err)}
			if !c.link.Valid() || t.base.Rollback() != nil {
				c.bad.Store(true)
			}
		}
		return nil, err
	}
	u := c.newUnit(l, s, h, c.link.Continue(t.base), t.opts)
	for i, r := range requests {
		u.granted(r, nil, granted[i])
	}
	u.read, u.wrote, u.stack = t.read, true, []*tx{t} // it may have written before
	return u, nil
}

// runHere runs a statement on this connection as it is. On driver.ErrSkip
// database/sql prepares it.
func (c *conn) runHere(ctx context.Context, st *statement) (driver.Rows, driver.Result, error) {
	if st.claims {
		return c.runHereClaiming(ctx, st)
	}
	if st.stmt == nil && !st.prepared {
		return st.direct(ctx, c.link.Conn)
	}
	return st.run(ctx, c.link.Conn)
}

// openLate makes sure that the transaction is still open in which a lock is to
// be taken: COMMIT as text, DDL, a procedure or a swallowed deadlock may have
// ended it while nobody looked. A savepoint outlives its statement only in an
// open transaction. For row locks it also sets the limit on idleness that Begin
// would have.
func (c *conn) openLate(ctx context.Context, l *locks, rows bool) error {
	texts := []string{"SAVEPOINT mysqllock_late", "RELEASE SAVEPOINT mysqllock_late"}
	if s := l.IdleLimit(); rows && s > 0 {
		c.unlimit = rowlock.IdleLimitSQL(l.Info().IdleLimit)
		texts = append(texts, rowlock.IdleLimitSQL(s))
	}
	for _, text := range texts {
		err := server.Exec(ctx, c.link.Conn, text)
		if server.NoSavepoint(err) {
			return lockerr.With(ErrLost, errors.New("the transaction had ended before it asked for the lock"))
		}
		if err != nil && ctx.Err() != nil { // the driver has closed the connection, perhaps after an answer
			return ctx.Err()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// runJoined runs a statement in the unit of work that its lock context has
// open.
func (c *conn) runJoined(ctx context.Context, u *unit, h *lockctx.Hint, st *statement) (driver.Rows, driver.Result, error) {
	if err := u.join(ctx, c.k, h); err != nil {
		return nil, nil, err
	}
	if st.claims && !st.query && len(u.stack) == 0 && u.hold == nil {
		return nil, nil, st.unclaimed()
	}
	r, res, err := u.run(ctx, st)
	if err != nil || len(u.stack) > 0 || u.hold != nil || st.query && st.info.Kind == sqltext.Read {
		return r, res, err
	}
	if err := u.finish(true); err != nil {
		return nil, nil, err
	}
	return r, res, nil
}

// runRead runs a query that only reads, outside any transaction: the lock stays
// when it is over. A row lock needs a session for that. Under guards, and inside
// a hold, the query runs where it is.
func (c *conn) runRead(ctx context.Context, s *scope, h *lockctx.Hint, st *statement) (driver.Rows, driver.Result, error) {
	w, err := c.k.wanted(s, h)
	if err != nil {
		return nil, nil, err
	}
	if (c.raw || c.manual) && (w.versions() || s.remembers()) {
		return nil, nil, &Error{Op: st.op(), Key: names(h), Strategy: c.k.strategy(h), Err: lockerr.With(ErrUnsafe, errors.New(
			"a transaction that plain SQL text has begun may be open on this connection, and show what is older than the version; begin it with BeginTx"))}
	}
	var end context.Context
	if !w.nothing() {
		if end = h.Scope.Context(); end.Done() == nil && w.locks() {
			end = ctx
		}
		if end.Done() == nil && w.locks() {
			return nil, nil, &Error{Op: st.op(), Key: names(h), Strategy: c.k.strategy(h), Err: lockerr.With(ErrNoEnd, errors.New(
				"nothing would release the lock that this query takes; derive the context with context.WithCancel or WithTimeout before lockctx.With, or use BeginTx or mysqllock.Do"))}
		}
	}
	if w.inTransaction() {
		u, err := c.k.openSession(ctx, end, s, h, nil)
		if err != nil {
			return nil, nil, err
		}
		return u.run(ctx, st)
	}
	if st.claims {
		return nil, nil, st.unclaimed()
	}
	if len(w.guards) > 0 {
		l, err := c.k.use(ctx, h)
		if err != nil {
			return nil, nil, c.k.setupError(h, err)
		}
		if _, err := s.guard(ctx, l, c.k.patience(h), w.guards, c.link, true); err != nil {
			return nil, nil, yielded(err)
		}
		s.watch(end)
	}
	return c.runHere(ctx, st)
}

// runAlone runs a statement as a unit of work of its own, on this connection.
// Where the unit of work has read under guards before and the statement fails,
// it goes on.
func (c *conn) runAlone(ctx context.Context, s *scope, h *lockctx.Hint, st *statement) (driver.Rows, driver.Result, error) {
	if st.claims {
		return nil, nil, st.unclaimed()
	}
	goesOn := len(s.guards) > 0
	u, err := c.begin(ctx, s, h, driver.TxOptions{})
	if err != nil {
		return nil, nil, err
	}
	u.keep = goesOn // also where the statement ends its transaction
	r, res, err := u.run(ctx, st)
	u.keep = goesOn && err != nil
	// Also after an error: of several statements in one text, those that were
	// finished stay, as they do in autocommit.
	ferr := u.finish(true)
	if s.failed != nil {
		s.drop(0) // it does not go on
	}
	if err == nil && ferr != nil {
		return nil, nil, ferr
	}
	return r, res, err
}

// Begin is BeginTx without context and options.
func (c *conn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

// BeginTx begins a transaction; with a hint, under its lock.
func (c *conn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	t := &tx{c: c, ctx: ctx, opts: opts}
	if c.plain(ctx) {
		if err := c.liftLimit(ctx); err != nil {
			return nil, err
		}
		base, err := pool.Begin(ctx, c.link.Conn, opts)
		if err != nil {
			return nil, err
		}
		t.base = base
		c.tx, c.raw = t, false // what text had begun is committed by that
		return t, nil
	}
	if err := c.beginLocked(ctx, t, opts); err != nil {
		return nil, err
	}
	t.prev = c.tx
	c.tx = t
	return t, nil
}

func (c *conn) beginLocked(ctx context.Context, t *tx, opts driver.TxOptions) error {
	h, hinted := lockctx.From(ctx)
	if hinted && h.Err != nil {
		return &Error{Op: "begin", Err: h.Err}
	}
	var s *scope
	if c.tx != nil {
		if c.tx.u == nil && c.tx.failed != nil {
			return c.tx.failed
		}
		if c.tx.u == nil {
			return &Error{Op: "begin", Key: names(h), Err: errors.New("a transaction without the lock is open on this connection")}
		}
		s = c.tx.u.scope
	} else {
		s = c.k.scope(h.Scope)
	}
	if err := s.take(ctx); err != nil {
		return err
	}
	defer s.give()
	if c.tx != nil {
		if err := c.tx.usable(); err != nil {
			return err
		}
	}
	if err := s.check(h); err != nil {
		return err
	}
	if c.tx == nil && s.unit == nil {
		u, err := c.begin(ctx, s, h, opts)
		if err != nil {
			return err
		}
		t.u = u
		u.stack = append(u.stack, t)
		return nil
	}
	u := s.unit
	if hinted {
		if err := u.join(ctx, c.k, h); err != nil {
			return err
		}
	}
	return u.nest(ctx, t, opts)
}

// liftLimit takes the limit on idleness off before a transaction without a lock.
func (c *conn) liftLimit(ctx context.Context) error {
	if c.unlimit == "" {
		return nil
	}
	err := server.Exec(ctx, c.link.Conn, c.unlimit)
	if err == nil {
		c.unlimit = ""
	}
	return err
}

// Prepare is PrepareContext without a context.
func (c *conn) Prepare(text string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), text)
}

// PrepareContext prepares a statement. Preparing takes no lock; running it
// does, by the context that it runs with.
func (c *conn) PrepareContext(ctx context.Context, text string) (driver.Stmt, error) {
	if h, hinted := lockctx.From(ctx); hinted && h.Err != nil {
		return nil, &Error{Op: "prepare", Err: h.Err}
	}
	s := &stmt{c: c, text: text}
	if c.tx != nil && c.tx.u == nil && c.tx.failed != nil {
		return nil, c.tx.failed
	}
	if c.tx == nil || c.tx.u == nil {
		base, err := prepare(ctx, c.link.Conn, text)
		if err != nil {
			return nil, err
		}
		return s.over(base), nil
	}
	u := c.tx.u
	if err := u.scope.take(ctx); err != nil {
		return nil, err
	}
	defer u.scope.give()
	if err := c.tx.usable(); err != nil {
		return nil, err
	}
	if err := u.takeLink(ctx, "prepare"); err != nil {
		return nil, err
	}
	defer u.give()
	ctx, release := u.untilClosed(ctx)
	defer release()
	base, err := prepare(ctx, u.link.Conn, text)
	if err != nil {
		return nil, u.check("prepare", err)
	}
	if u.home == c {
		return s.over(base), nil
	}
	// The session goes its own ways when the unit is over, so the statement is
	// prepared there again whenever it runs. This was to see whether it can be.
	s.inputs = base.NumInput()
	return s, base.Close()
}

// CheckNamedValue converts arguments the way the base driver does.
func (c *conn) CheckNamedValue(v *driver.NamedValue) error {
	if n, ok := c.link.Conn.(driver.NamedValueChecker); ok {
		return n.CheckNamedValue(v)
	}
	return driver.ErrSkip
}

// Ping pings the base connection.
func (c *conn) Ping(ctx context.Context) error {
	p, ok := c.link.Conn.(driver.Pinger)
	if !ok {
		return nil
	}
	if err := c.link.Take(ctx); err != nil {
		return err
	}
	defer c.link.Give()
	return p.Ping(ctx)
}

// ResetSession is called before the connection is used again.
func (c *conn) ResetSession(ctx context.Context) error {
	if c.bad.Load() {
		return driver.ErrBadConn
	}
	if r, ok := c.link.Conn.(driver.SessionResetter); ok {
		return r.ResetSession(ctx)
	}
	return nil
}

// IsValid reports whether the connection may go back to database/sql's pool.
func (c *conn) IsValid() bool { return !c.bad.Load() && c.link.Valid() }

// Close closes the base connection, and with it the unit of work on it.
func (c *conn) Close() error {
	c.k.crowd.closed()
	for t := c.tx; t != nil; t = t.prev {
		if t.u != nil {
			_ = t.end(false)
		}
	}
	_ = c.link.Take(context.Background()) // a ping may be under way
	defer c.link.Give()
	return c.link.Conn.Close()
}

// tx is a transaction that BeginTx has begun: one of the base driver, the
// transaction of a unit of work, or a savepoint in it.
type tx struct {
	c     *conn
	ctx   context.Context // of BeginTx
	opts  driver.TxOptions
	base  driver.Tx // the base driver's; nil where it began with a hint
	read  bool      // a plain read has run before any hint
	u     *unit     // nil while it has no lock
	prev  *tx       // the transaction around it on the same connection
	under *unit     // holds, elsewhere, the lock that its statements ran under
	save  string    // the savepoint's name; "" for the unit's own transaction
	// why nothing can be done in it any more
	failed error
}

// Commit commits. In a unit of work the outermost Commit gives the lock back.
func (t *tx) Commit() error { return t.end(true) }

// Rollback rolls back. In a unit of work the outermost Rollback gives the lock
// back. What was lost is rolled back already.
func (t *tx) Rollback() error {
	err := t.end(false)
	if errors.Is(err, ErrLost) {
		err = nil
	}
	// database/sql keeps a connection after a rollback on cancellation only if
	// its driver can reset and check it. We claim that we can; does the base?
	if t.ctx.Err() != nil {
		_, resets := t.c.link.Conn.(driver.SessionResetter)
		_, checks := t.c.link.Conn.(driver.Validator)
		if !resets || !checks {
			t.c.bad.Store(true)
		}
	}
	return err
}

func (t *tx) end(commit bool) error {
	t.leave()
	if t.u == nil {
		switch {
		case t.failed != nil:
			return t.failed
		case commit && t.under != nil:
			// The unit must not end meanwhile; but a statement that runs in it may
			// be waiting for our own rows.
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			err := t.under.scope.take(ctx)
			cancel()
			if err != nil {
				_ = t.base.Rollback()
				return &Error{Op: "commit", Strategy: lockctx.StrategyRow, Err: errors.New("a statement of the lock context that this transaction ran under is still running; the transaction is rolled back")}
			}
			defer t.under.scope.give()
			unsure := func() {}
			err = t.under.alive()
			if err == nil {
				unsure, err = t.under.l.fence(t.c.link, slices.Concat(t.under.scope.guards, t.under.around)...)
			}
			if err != nil {
				_ = t.base.Rollback()
				return err
			}
			if err = t.base.Commit(); err != nil && server.Gone(err, t.c.link.Conn) {
				unsure()
			}
			return err
		case commit:
			return t.base.Commit()
		default:
			return t.base.Rollback()
		}
	}
	_ = t.u.scope.take(context.Background())
	defer t.u.scope.give()
	return t.u.endTx(t, commit)
}

// leave makes the transaction around it the connection's open one again.
func (t *tx) leave() {
	at := &t.c.tx
	for *at != nil && *at != t {
		at = &(*at).prev
	}
	if *at == t {
		*at = t.prev
	}
}

// usable returns why the transaction is not, if so.
func (t *tx) usable() error {
	switch {
	case t.failed != nil:
		return t.failed
	case t.u.failed != nil:
		return t.u.failed
	case t.u.over:
		return t.u.error("statement", lockerr.With(ErrLost, errors.New("its unit of work has ended")))
	}
	return nil
}

// stmt is a prepared statement.
type stmt struct {
	c      *conn
	text   string
	base   driver.Stmt // nil where it is prepared again for each use
	inputs int         // of a statement without base
}

// over completes a statement with its base; the optional ColumnConverter is
// claimed only where the base has it.
func (s *stmt) over(base driver.Stmt) driver.Stmt {
	s.base = base
	if cc, ok := base.(driver.ColumnConverter); ok { //nolint:staticcheck // old drivers have nothing else
		return stmtConverter{s, cc}
	}
	return s
}

type stmtConverter struct {
	*stmt
	converter driver.ColumnConverter //nolint:staticcheck // as above
}

func (s stmtConverter) ColumnConverter(i int) driver.ValueConverter {
	return s.converter.ColumnConverter(i)
}

func (s *stmt) Close() error {
	if s.base == nil {
		return nil
	}
	if t := s.c.tx; t != nil && t.u != nil && t.u.home == s.c && t.u.closeLater(s.base) {
		return nil
	}
	_ = s.c.link.Take(context.Background())
	defer s.c.link.Give()
	return s.base.Close()
}

func (s *stmt) NumInput() int {
	if s.base == nil {
		return s.inputs
	}
	return s.base.NumInput()
}

// Exec is ExecContext without a context.
func (s *stmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(context.Background(), named(args))
}

// Query is QueryContext without a context.
func (s *stmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), named(args))
}

func (s *stmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	if s.base != nil && s.c.direct(ctx) {
		if err := s.c.note(ctx, s.text); err != nil {
			return nil, err
		}
		return stmtExec(ctx, s.base, args)
	}
	_, res, err := s.run(ctx, args, false)
	return res, err
}

func (s *stmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if s.base != nil && s.c.direct(ctx) {
		if err := s.c.note(ctx, s.text); err != nil {
			return nil, err
		}
		return stmtQuery(ctx, s.base, args)
	}
	r, _, err := s.run(ctx, args, true)
	return r, err
}

func (s *stmt) run(ctx context.Context, args []driver.NamedValue, query bool) (driver.Rows, driver.Result, error) {
	if s.base == nil && s.c.plain(ctx) {
		return nil, nil, &Error{Op: "statement", Err: errors.New("the transaction that this statement was prepared in has ended")}
	}
	return s.c.run(ctx, &statement{
		text: s.text, args: args, query: query, prepared: true, stmt: s.base, on: s.c.link.Conn,
	})
}

// CheckNamedValue converts arguments the way the base driver's statement does,
// else its connection.
func (s *stmt) CheckNamedValue(v *driver.NamedValue) error {
	if n, ok := s.base.(driver.NamedValueChecker); ok {
		return n.CheckNamedValue(v)
	}
	return s.c.CheckNamedValue(v)
}
