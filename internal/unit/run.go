package unit

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/mysqllock/mysqllock/internal/appconn"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/internal/statement"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// run runs a statement in the unit.
func (u *unit) run(ctx context.Context, st *statement.Statement) (driver.Rows, driver.Result, error) {
	op := st.Op()
	if st.Info.Kind == sqltext.Commits {
		return nil, nil, u.error(op, u.commitRefused())
	}
	if err := u.takeLink(st.Turn(ctx), op); err != nil {
		return nil, nil, err
	}
	open, release := u.untilClosed(ctx)
	if len(u.atCommit.doubts) > 0 && !st.LooksBack() {
		if err := u.resolveDoubts(open, op); err != nil {
			u.giveTurn()
			release()
			return nil, nil, err
		}
	}
	returned := false
	defer func() {
		if !returned {
			u.panicked(op)
			release()
		}
	}()
	r, res, err := u.send(open, st)
	u.notePrepared(st, err)
	if st.Info.Taints {
		u.session.Taint() // the connection must not reach the next user
	}
	if err != nil {
		returned = true
		err = u.checkAnswer(ctx, op, u.withConflict(open, err))
		u.giveTurn()
		release()
		if r.Fail(err) {
			return r, nil, nil
		}
		return nil, nil, err
	}
	if ctx.Err() != nil && !fromLock(context.Cause(ctx)) {
		u.overran = ctx.Err()
	}
	u.session.Touch()
	if u.savepoints.hasOlder {
		u.savepoints.noteSavepoint(st)
	}
	u.noteAnswer(st, r, res)
	returned = true
	// over ends the statement. Closing streamed rows calls over without the context state's turn.
	over := func(err error) {
		u.stream.broken = err
		u.session.Touch()
		u.giveTurn()
		release()
	}
	switch {
	case r == nil:
		over(nil)
		return nil, res, nil
	case !r.Streaming():
		over(nil)
		return r, nil, nil
	default:
		u.stream.open, r.Done = r, over
		return r, nil, nil
	}
}

// panicked ends the unit after a statement that did not return: the driver, or the reader of LOAD DATA
// LOCAL, has panicked, or ended its goroutine. The caller has the connection's turn; panicked ends it.
func (u *unit) panicked(op string) {
	_ = u.session.Close()
	u.lose(u.error(op, lockerr.With(lockerr.ErrLost, errors.New("a statement has panicked, or ended its goroutine, "+
		"so its connection was closed"))), true)
	u.giveTurn()
}

// overdue returns why the server may have ended the session, and the transaction with it; nil if not.
func (u *unit) overdue() error {
	if u.atCommit.last != nil {
		return nil
	}
	return u.l.KeepAlive.Overdue(u.session)
}

// takeLink waits for the turn to use the unit's connection. It fails if the unit is lost, or if its rows
// are still being read.
func (u *unit) takeLink(ctx context.Context, op string) error {
	if u.cause != nil {
		return u.cause
	}
	if u.stream.open != nil && u.stream.open.Streaming() {
		return u.error(op, lockerr.With(lockerr.ErrUnsafe, errors.New(
			"the rows of an earlier query of this unit of work are still being read (they were too many to read ahead): close them first")))
	}
	if err := u.session.AwaitTurn(ctx); err != nil {
		return err
	}
	u.touch()
	if u.stream.broken != nil {
		if u.afterRows(); u.cause != nil {
			u.giveTurn()
			return u.cause
		}
	}
	if err := u.overdue(); err != nil {
		u.lose(u.error(op, lockerr.With(lockerr.ErrLost, err)), true)
		u.giveTurn()
		return u.cause
	}
	return nil
}

// unwrapped returns the connection of the unit's session, for a caller that uses it beside this package; nil if the unit
// has ended.
func (u *unit) unwrapped() driver.Conn {
	_ = u.ctxState.takeTurn(context.Background())
	defer u.ctxState.giveTurn()
	if u.state != stateOpen {
		return nil
	}
	u.touch()
	return u.session.Conn
}

// touch notes that something may run in the transaction, which can then not go to the next caller as it is.
func (u *unit) touch() {
	if !u.past.touched && u.rowLocks.handoff != nil {
		u.rowLocks.handoff.Used()
	}
	u.past.touched = true
}

// send sends a statement. If needed it first sends statements of the driver's that will tell what the
// statement does to the transaction. The caller has the connection's turn. Rows that came before an
// error are returned with it.
func (u *unit) send(ctx context.Context, st *statement.Statement) (r *statement.Rows, res driver.Result, err error) {
	doubts, err := u.doubtful(ctx, st)
	u.past.wrote = u.past.wrote || st.MayWrite()
	if st.Info.Changes == sqltext.MayChange {
		u.noteChange(st)
	}
	u.past.snapshot.used()
	if st.Prepared && err == nil {
		err = u.prepare(ctx, st)
	}
	if err != nil {
		return nil, nil, err
	}
	limit := statement.BufferBytes
	if len(doubts) > 0 || st.Info.Kind == sqltext.Write && !u.inside() {
		limit = 0 // a statement of ours follows
	}
	u.atCommit.doubts = append(u.atCommit.doubts, doubts...)
	if st.Sent != nil {
		u.past.snapshot.read(st)
		return st.Sent.Rows, st.Sent.Result, st.Sent.Err
	}
	if u.joinsCommit(st) {
		if res, err = u.runLast(ctx, st); !errors.Is(err, driver.ErrSkip) {
			return nil, res, err
		}
	}
	st.Alone = u.session.Splits()
	rows, res, err := st.Run(ctx, u.session.Conn)
	if !errors.Is(err, driver.ErrSkip) {
		u.past.snapshot.read(st) // also after another error: a query that fails while it runs leaves its snapshot
	}
	if st.Alone && server.Unpreparable(err) {
		err = lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("under a lock a statement with a semicolon in its text or its "+
			"arguments is prepared, so that it stays one statement, "+
			"and the server cannot prepare this one; "+
			"write it without the semicolon, run it before the lock, or have multiStatements=true in the DSN: %w", err))
	}
	if err != nil || rows == nil {
		return nil, res, err
	}
	r, err = statement.ReadAhead(rows, limit)
	return r, res, err
}

// doubtful prepares for a statement that may end the transaction, or free its locks. It sends what must go
// before the statement, and returns functions that ask afterwards what the statement has done.
func (u *unit) doubtful(ctx context.Context, st *statement.Statement) (ask []func(context.Context) error, err error) {
	if st.Info.Calls {
		err = server.Exec(ctx, u.session.Conn, "SAVEPOINT mysqllock_call")
		ask = append(ask, u.askAfterCall)
	}
	if err == nil && u.savepoints.mayFree(st) {
		var before string
		before, err = rolledBack(ctx, u.session.Conn, u.l.Info())
		ask = append(ask, func(ctx context.Context) error { return u.stillLocked(ctx, before) })
	}
	return ask, err
}

// prepare prepares st on the session.
func (u *unit) prepare(ctx context.Context, st *statement.Statement) (err error) {
	st.On = u.session.Conn
	st.Stmt, err = appconn.StatementsOf(u.session).Prepared(ctx, u.session.Conn, st.Text, appconn.TypesOf(st.Args))
	return err
}

// notePrepared notes if the server does not know a prepared statement any more.
func (u *unit) notePrepared(st *statement.Statement, err error) {
	if st.Prepared && server.Unprepared(err) {
		appconn.StatementsOf(u.session).Forget()
	}
}

// resolveDoubts asks what earlier statements have done to the transaction. It runs before the next
// statement, or COMMIT, and not at once: a question of the driver's would reset what those statements
// leave for ROW_COUNT() and SHOW WARNINGS. The caller has the connection's turn.
func (u *unit) resolveDoubts(ctx context.Context, op string) error {
	if u.cause != nil {
		return u.cause
	}
	for _, ask := range u.atCommit.doubts {
		if err := ask(ctx); err != nil {
			_ = u.checkAnswer(ctx, op, lockerr.With(lockerr.ErrLost, err))
			return u.cause
		}
	}
	u.atCommit.doubts = nil
	return nil
}

// askAfterCall asks what a procedure has done to the transaction. It may have committed, or swallowed a
// deadlock. In both cases the savepoint from before the call has gone.
func (u *unit) askAfterCall(ctx context.Context) error {
	err := server.Exec(ctx, u.session.Conn, "RELEASE SAVEPOINT mysqllock_call")
	if server.NoSavepoint(err) {
		return errors.New("the procedure has ended the transaction, and with it the lock")
	}
	return err
}

// noteAnswer notes what st, which has run well and returned r or res, has changed and read. The server sends no
// count with the rows of RETURNING: an upsert that changed nothing returns its row all the same.
func (u *unit) noteAnswer(st *statement.Statement, r *statement.Rows, res driver.Result) {
	if st.Info.Changes == sqltext.ChangesCounted {
		n, err := int64(1), error(nil)
		if res != nil {
			n, err = res.RowsAffected()
		} else if r.Empty() {
			n = 0
		}
		if n != 0 || err != nil {
			u.noteChange(st)
		}
	}
	if !st.Reads(r) {
		return
	}
	switch {
	case u.inside():
		if st.Info.Tables {
			u.relying.fresh = true
			for _, g := range u.ctxState.grants.list {
				g.noted.Read()
			}
		}
	case u.ctxState.decision.hasRead(u.ctxState.handle, st, len(u.rowLocks.rows) > 0 || len(u.ctxState.grants.list) > 0):
		u.relying.relied = u.relying.relied || len(u.rowLocks.rows) > 0
	}
	noteHolds(st)
}

// noteChange notes that st may have changed something.
func (u *unit) noteChange(st *statement.Statement) {
	if u.relying.changed != "" {
		return
	}
	verb := ""
	if u.ctxState.decision.readStands || st.Query || st.Info.Taints {
		verb = sqltext.Verb(st.Text)
	}
	switch {
	case !u.inside():
		u.relying.changed = cmp.Or(verb, "a statement")
	case verb == "":
		u.relying.changed = "a transaction"
	default:
		u.relying.changed = "a transaction whose first write was " + verb
	}
}

// commitRefused returns why a statement that commits is refused.
func (u *unit) commitRefused() error {
	if len(u.rowLocks.rows) == 0 && len(u.ctxState.grants.list) == 0 && len(u.outer) > 0 {
		return errUnchecked
	}
	return errCommits
}

var errCommits = lockerr.With(lockerr.ErrUnsafe, errors.New(
	"the statement would end the transaction, and with it the lock; use sql.Tx for transactions; "+
		"run DDL in mysqllock.Do with lockctx.Lease, outside of a transaction, or without a lock by lockctx.Without"))

// errUnchecked refuses such a statement in a hold whose lock is not in the transaction.
var errUnchecked = lockerr.With(lockerr.ErrUnsafe, errors.New(
	"the statement would commit what came before it without a check of the lock; "+
		"use sql.Tx for transactions, and run DDL outside of them, or without a lock by lockctx.Without"))

// checkAnswer finds out what a failed statement has done to the transaction, and returns err as the caller gets
// it. ctx is the caller's. The caller has the connection's turn.
func (u *unit) checkAnswer(ctx context.Context, op string, err error) error {
	if server.Number(err) != 0 {
		u.session.Touch() // the server has answered
	}
	gone := server.Gone(err, u.session.Conn)
	if errors.Is(err, driver.ErrBadConn) && !errors.Is(err, lockerr.ErrLost) && ctx.Err() != nil {
		err = ctx.Err() // the end of ctx has closed the connection right before the statement was sent
	}
	if errors.Is(err, context.Canceled) && ctx.Err() == nil && u.ctxState.handle.Closed() {
		err = lockerr.ErrClosed // not the caller's end: see untilClosed
	}
	switch {
	case errors.Is(err, lockerr.ErrConflict):
		err = u.error(op, err)
	case gone && gaveUp(ctx, err): // the end of the caller's own context is no loss; later statements of the unit are told of one
		err = u.error(op, err)
		u.givenUp = u.givenUp || u.cause == nil
	case server.Changed(err):
		err = u.error(op, lockerr.With(lockerr.ErrConflict, err))
	case server.Deadlock(err):
		err = u.error(op, lockerr.With(lockerr.ErrDeadlock, err))
	case gone || u.l.Info().EndsTransaction(err):
		err = u.error(op, lockerr.With(lockerr.ErrLost, err))
	case errors.Is(err, lockerr.ErrLost):
		err = u.error(op, err)
	default:
		return err
	}
	u.lose(err, gone)
	return err
}

// gaveUp reports whether a statement failed with err because its caller's own context ctx has ended, and not
// because a hold was lost.
func gaveUp(ctx context.Context, err error) bool {
	return ctx.Err() != nil && errors.Is(err, ctx.Err()) && !errors.Is(context.Cause(ctx), lockerr.ErrLost)
}

// withConflict adds ErrConflict to an error of the server if somebody has committed under a version of the
// unit meanwhile: the loser of a race to insert a row gets a duplicate key, for example. A unit that has
// written cannot commit then. Only a failed statement asks.
func (u *unit) withConflict(ctx context.Context, err error) error {
	if !u.past.wrote || server.Number(err) == 0 || u.l.Info().EndsTransaction(err) {
		return err
	}
	for _, g := range u.ctxState.grants.list {
		if v, ok := g.held.(strategy.Versioned); ok {
			if moved, _ := v.Moved(ctx); moved {
				return lockerr.With(lockerr.ErrConflict, err)
			}
		}
	}
	return err
}

// noRetry turns an error that has cost the connection into ErrLost. Else database/sql would run the
// statement of a unit of work again, on another connection.
func noRetry(err error) error {
	var said *lockerr.Error
	if server.Gone(err, nil) && !errors.As(err, &said) {
		return lockerr.With(lockerr.ErrLost, err)
	}
	return err
}

// afterRows looks at the error with which streamed rows have ended: a deadlock among them has rolled the
// transaction back. The caller has the connection's turn, and has found u.stream.broken set.
func (u *unit) afterRows() {
	err := u.stream.broken
	u.stream.broken = nil
	_ = u.checkAnswer(context.Background(), "query", err)
}

// text runs a statement of the driver's own in the unit.
func (u *unit) text(ctx context.Context, op, text string) error {
	if err := u.takeLink(ctx, op); err != nil {
		return err
	}
	defer u.giveTurn()
	open, release := u.untilClosed(ctx)
	defer release()
	u.past.snapshot.used()
	err := u.resolveDoubts(open, op)
	if err == nil {
		if err = server.Exec(open, u.session.Conn, text); err != nil {
			err = u.checkAnswer(ctx, op, err)
		} else {
			u.session.Touch()
		}
	}
	return err
}
