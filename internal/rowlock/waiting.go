package rowlock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/pool"
)

// mayBlock has the caller's connection be one on which it may wait. Until then its request
// could not block, so that it had any connection.
func (a *attempt) mayBlock(ctx context.Context) (err error) {
	if a.r.Block == nil {
		return nil
	}
	asked := time.Now()
	a.c, err = a.r.Block(ctx)
	a.Wait += time.Since(asked) // that was a wait for a connection, not for the lock
	if err == nil && a.cfg.Info.Router {
		a.c.Moved()
	}
	return err
}

// rest waits for a while: until others may have gone on, or until a change of another node
// may have arrived here.
func (a *attempt) rest(ctx context.Context, atMost time.Duration) error {
	a.Heard.Store(true)
	ctx, done, err := a.Patient(ctx)
	if err != nil {
		return err
	}
	defer done()
	strategy.Sleep(ctx, atMost/2+rand.N(atMost/2))
	return context.Cause(ctx)
}

// await waits until a lease may have been released. Then it is the attempt's turn, until
// EndTurn.
func (a *attempt) await(ctx context.Context, lease *strategy.Leased) error {
	if err := a.mayBlock(ctx); err != nil {
		return err
	}
	return a.AwaitLease(ctx, &a.cfg, lease)
}

// wait begins a transaction and waits in the server.
func (a *attempt) wait(ctx context.Context) (*pool.Txn, error) {
	if err := a.mayBlock(ctx); err != nil {
		return nil, err
	}
	if _, err := a.c.ID(ctx); err != nil {
		return nil, err
	}
	ctx, done, err := a.Patient(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	for {
		called := a.calls(ctx)
		txn, err := a.open(ctx)
		if err != nil {
			return nil, because(ctx, err)
		}
		lift := func(err error) error { return err }
		if !called && a.cfg.Info.IdleTransactions == "" && !a.cfg.Info.Router && len(a.r.Slots) == 0 {
			lift, err = a.limitIdleness(ctx)
		}
		if err == nil {
			err = lift(a.block(ctx))
		} else {
			err = because(ctx, err)
		}
		txn, err = a.opened(txn, err)
		if !called || !a.refusesCall(err) {
			return txn, err
		}
	}
}

// block waits in the server until the keys are locked, or until ctx ends.
func (a *attempt) block(ctx context.Context) error {
	err := a.queueUp(ctx)
	if err != nil || !a.streams {
		return err
	}
	if err = a.lock(ctx, a.trySQL(), false); err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

// queueUp runs the waiting lock statement until it is answered or ctx ends. At the end of
// ctx it kills the statement on the server, so that it cannot be granted the lock later.
func (a *attempt) queueUp(ctx context.Context) error {
	deadline, _ := ctx.Deadline()
	bound := min(time.Until(deadline)+slack, max(a.cfg.TTL, time.Second))
	if len(a.r.Slots) > 0 {
		bound = slice
	}
	if t := a.cfg.ReadTimeout; t > 0 {
		bound = min(bound, t/2)
	}
	w := strategy.Waiter{
		Limits: terms.Limits, Conn: a.c, Mark: pool.NewMark(), Freed: a.Ticket.Freed(),
		Stops: func(ctx context.Context) { a.HeldBy = a.askHolder(ctx, a.c.KnownID()) },
	}
	if a.cfg.Info.Kills {
		w.Control = a.cfg.Control
	} else if a.late { // it holds something already
		w.Ends = wholeSecond + slack
	}
	texts := a.waitSQL(ctx, bound, w.Mark)
	stopped, usable, err := w.Run(ctx, func(own context.Context) error { return a.lockInTurn(own, texts) })
	if !stopped {
		return err
	}
	if !usable && a.cfg.Info.Kills {
		a.cleanup.Go(func() {
			kctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), background)
			defer cancel()
			a.cfg.Control.EndQuery(kctx, w.Mark) // the server's own limit ends it, too
		})
	}
	cause := context.Cause(ctx)
	if cause == nil {
		cause = queue.ErrFreed
	}
	switch {
	case usable && err == nil && (errors.Is(cause, strategy.ErrWaitOver) || errors.Is(cause, queue.ErrFreed)):
		return nil // granted at the last moment, and the caller is still there
	case err == nil || server.Interrupted(err) || a.outrun(err) || !usable: // Galera calls a KILL a deadlock
		return cause
	default:
		return err
	}
}

// A waiter may be granted a row that has got a lease meanwhile. If its host stands still or
// is cut off, it cannot unlock the row, and the lease could not be renewed. So the server
// itself rolls such a transaction back, if it holds nothing else: in an anonymous block on
// MariaDB, by a procedure on MySQL. Several keys are locked one after the other. The first
// row with a lease is the last, so that a waiter does not hold it while it waits for
// another.

// calls reports whether the attempt waits by the procedure, and makes it if it is missing.
func (a *attempt) calls(ctx context.Context) bool {
	if !a.callable() {
		return false
	}
	wait := a.cfg.Table.WaitProcedure()
	if !a.cfg.Procedures.Looked(wait) {
		timed, cancel := context.WithTimeout(ctx, controlWait)
		defer cancel()
		a.cfg.Procedures.Look(timed, wait)
	}
	return a.cfg.Procedures.Has(wait)
}

// refusesCall reports that the procedure cannot be called, and notes that.
func (a *attempt) refusesCall(err error) bool {
	const tooManyPrepared = 1461
	return (server.Missing(err) || server.Denied(err) || server.Number(err) == tooManyPrepared) &&
		a.cfg.Procedures.Set(a.cfg.Table.WaitProcedure(), false)
}

// callable reports whether the attempt can use the procedure. The procedure limits a wait
// by whole seconds, which is too coarse for slots and for a short ReadTimeout; it may
// end the transaction; and it sets user variables, with which a MySQL Router shares the
// connection no more.
func (a *attempt) callable() bool {
	const shortest = 5 * time.Second // half of it is asked for, and the server may take two seconds more
	return !a.cfg.Info.Blocks && !a.cfg.Info.Router && !a.late && len(a.r.Slots) == 0 && (a.cfg.ReadTimeout == 0 || a.cfg.ReadTimeout >= shortest)
}

// limitIdleness is for a wait without the procedure: if the row is granted to a client that
// does not answer, the server ends the connection after a second. lift removes the limit;
// it takes the error of the wait, and returns the error of both.
func (a *attempt) limitIdleness(ctx context.Context) (lift func(error) error, err error) {
	if err := a.cfg.Info.LimitSilence(ctx, a.c.Conn, 1); err != nil {
		return nil, err
	}
	return func(err error) error {
		if !a.c.Valid() {
			return err
		}
		own, cancel := context.WithTimeout(context.WithoutCancel(ctx), background)
		defer cancel()
		failed := a.cfg.Info.UnlimitSilence(own, a.c.Conn)
		if failed != nil {
			_ = a.c.Close() // it must not go back with the limit
		}
		if err == nil && server.Gone(failed, nil) { // we were too slow, and hold nothing
			failed = driver.ErrBadConn
		}
		if err == nil {
			err = failed
		}
		return err
	}, nil
}

// waitSQL waits in the server for the keys, in the open transaction: in one statement, or in
// one for each key. The server ends each after bound, so that a waiter whose client is
// gone disappears by itself. mark makes their texts unique, for KILL. It is in front, since
// servers show only the beginning of a long text. After it comes for how long the caller has
// waited; not in what follows another wait.
func (a *attempt) waitSQL(ctx context.Context, bound time.Duration, mark string) []string {
	waits := mark + " " + server.Waits(a.Began())
	comment := "/* mysqllock " + waits + " */ "
	if a.cfg.Info.Blocks {
		return []string{a.settings(fmt.Sprintf("max_statement_time = %.3f", bound.Seconds())) + a.waitBlock(comment)}
	}
	if a.calls(ctx) {
		keys := make([]string, len(a.keys))
		for i, key := range a.keys {
			shared := 0
			if key.Shared {
				shared = 1
			}
			keys[i] = fmt.Sprintf(`["%x", %d]`, key.Name, shared)
		}
		return []string{comment + fmt.Sprintf("CALL %s(%s, '[%s]', '%s', %d)", a.cfg.Table.WaitProcedure(), schema.Literal(a.cfg.Namespace),
			strings.Join(keys, ", "), waits, max(1, int(bound/time.Second)))}
	}
	if !a.cfg.Info.Kills {
		bound = wholeSecond
	}
	hint, tail := a.cfg.Info.Within(bound)
	texts := make([]string, len(a.keys))
	for i, key := range a.keys {
		texts[i] = a.selects([]Key{key}, hint+comment, tail)
		comment = "/* mysqllock " + mark + " */ "
	}
	return texts
}

// waitBlock is the procedure as an anonymous block. It uses variables of the session, since
// sql_mode ORACLE has DECLARE in another place. A transaction that holds something already
// goes on, or its caller rolls it back.
func (a *attempt) waitBlock(comment string) string {
	var b strings.Builder
	b.WriteString("BEGIN NOT ATOMIC SET @mysqllock_owner = NULL; ")
	for i, key := range a.keys {
		if i > 0 {
			b.WriteString("IF @mysqllock_token IS NOT NULL AND @mysqllock_owner IS NULL THEN ")
		}
		b.WriteString("SET @mysqllock_token = NULL; SELECT " + comment + "token, owner, versioned INTO @mysqllock_token, @mysqllock_owner, @mysqllock_versioned" +
			a.fromRow + schema.Literal(key.Name) + a.rowLock(key) + "; ")
		if !a.late {
			b.WriteString("IF @mysqllock_owner IS NOT NULL THEN ROLLBACK; END IF; ")
		}
		b.WriteString("IF @mysqllock_token IS NOT NULL THEN SELECT CONNECTION_ID(), @mysqllock_token, @mysqllock_owner, @mysqllock_versioned, " +
			server.WritableColumns + "; END IF; ")
		if i > 0 {
			b.WriteString("END IF; ")
		}
	}
	return b.String() + "END"
}

// lockInTurn is lock for several waiting statements, one after the other.
func (a *attempt) lockInTurn(ctx context.Context, texts []string) error {
	var rows [][]string
	for _, text := range texts {
		more, err := server.Query(ctx, a.c.Conn, text)
		if server.Number(err) != 0 {
			a.c.Touch() // it has waited, and the transaction may go on
			a.restoreLimit(ctx, err)
		}
		if err != nil {
			return err
		}
		if rows = append(rows, more...); len(more) == 0 || stopped(rows) {
			break
		}
	}
	if n := len(rows) - 1; stopped(rows) && n+1 < len(a.keys) {
		a.cfg.Rows.NoteLeased(a.keys[n].Name)
		return &strategy.Leased{Key: a.keys[n].Name, Token: rows[n][1], Owner: rows[n][2]}
	}
	return a.granted(rows, false)
}

// restoreLimit restores the setting that a killed procedure has left behind.
func (a *attempt) restoreLimit(ctx context.Context, err error) {
	const killed = 1317
	if server.Number(err) != killed || !a.callable() {
		return
	}
	err = server.Exec(ctx, a.c.Conn, "SET SESSION innodb_lock_wait_timeout = COALESCE(@mysqllock_limit, @@SESSION.innodb_lock_wait_timeout), @mysqllock_limit = NULL")
	if err != nil && !errors.Is(err, driver.ErrBadConn) {
		_ = a.c.Close()
	}
}

// stopped reports that the last of rows, the answers to lock statements, has an owner, so
// that the keys behind it were not locked.
func stopped(rows [][]string) bool {
	if len(rows) == 0 {
		return false
	}
	last := rows[len(rows)-1]
	return len(last) > 2 && last[2] != ""
}
