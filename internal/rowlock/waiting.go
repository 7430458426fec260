package rowlock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// mayBlock is called before the attempt waits. It gets the caller of Begin a session on which to wait: until then any
// session would do, since no request could block.
func (a *attempt) mayBlock(ctx context.Context) (err error) {
	if a.r.Sessions == nil {
		return nil
	}
	asked := time.Now()
	a.c, err = a.r.Sessions.BeforeWait(ctx)
	a.Wait += time.Since(asked) // that was a wait for a connection, not for the lock
	return err
}

// rest waits for a while: until other callers may have gone on, or until a change of another node may have arrived here.
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

// await waits until a lease may have been released. Then the attempt has the turn to ask, until EndTurn.
func (a *attempt) await(ctx context.Context, lease *strategy.Leased) error {
	if err := a.mayBlock(ctx); err != nil {
		return err
	}
	return a.AwaitLease(ctx, &a.l.cfg, lease)
}

// wait begins a transaction, and waits for the lock in the server.
func (a *attempt) wait(ctx context.Context) (*pool.Txn, error) {
	if err := a.mayBlock(ctx); err != nil {
		return nil, err
	}
	if _, err := a.c.ID(ctx); err != nil {
		return nil, err
	}
	patient, done, err := a.Patient(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	txn, err := a.c.Begin(patient, a.opts)
	if err != nil {
		return nil, because(patient, err)
	}
	if b := a.behind(); b != nil && !b.Writes {
		if err := a.blockInFront(ctx, patient, b); !errors.Is(err, driver.ErrSkip) {
			return a.orRollBack(txn, err)
		}
	}
	return a.orRollBack(txn, a.block(patient))
}

// blockInFront is block with a query behind the lock. patient ends the wait, and ctx ends the query.
func (a *attempt) blockInFront(ctx, patient context.Context, b *Behind) error {
	until, end := context.WithCancelCause(ctx)
	defer end(nil)
	inTime := context.AfterFunc(patient, func() { end(context.Cause(patient)) })
	defer inTime()
	err := a.queueUp(until, func(own context.Context, mark string, texts []string) error {
		return a.lockInFront(own, b, 0, texts[0], pool.Marked(mark), func() { inTime() })
	})
	if err == nil && a.stopped && b.Stopped != nil {
		b.Stopped()
	}
	return err
}

// block waits in the server until the keys are locked, or until ctx ends.
func (a *attempt) block(ctx context.Context) error {
	err := a.queueUp(ctx, func(own context.Context, _ string, texts []string) error {
		own, cancel := server.Within(own, time.Duration(len(texts))*a.bound+pool.AnswerTime) // a server may fall silent
		defer cancel()
		return a.lockInTurn(own, texts)
	})
	if err != nil || !a.l.streams {
		return err
	}
	if err = a.lock(ctx, a.trySQL()...); err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

// queueUp runs the lock statements that wait, by send, until they are answered or ctx ends. If ctx ends, queueUp kills
// the statement on the server, so that it cannot be granted the lock later.
func (a *attempt) queueUp(ctx context.Context, send func(own context.Context, mark string, texts []string) error) error {
	left := a.Left()
	if deadline, ok := ctx.Deadline(); ok {
		left = min(left, time.Until(deadline))
	}
	bound := min(left+slack, max(a.l.cfg.TTL, time.Second))
	if len(a.r.Slots) > 0 {
		bound = strategy.SlotWait
	}
	if t := a.l.cfg.ReadTimeout; t > 0 {
		bound = min(bound, t/2)
	}
	a.bound = bound
	mark := pool.NewMark()
	w := strategy.Killable{
		Limits: terms.Limits, Conn: a.c, Mark: mark, Freed: a.Ticket.Freed(),
		Stops: func(ctx context.Context) { a.HeldBy = a.blocker(ctx, mark) },
	}
	if a.l.cfg.Info.Kills {
		w.Control = a.l.cfg.Control
	} else if a.mayHaveSnapshot { // the transaction holds something already
		w.Ends = wholeSecond + slack
	}
	texts := a.waitSQL(bound, mark)
	a.stopped = false
	stopped, usable, err := w.Run(ctx, func(own context.Context) error { return send(own, mark, texts) })
	if server.Interrupted(err) { // the statement has waited
		a.Heard.Store(true)
	}
	if !stopped {
		if errors.As(err, new(server.Silence)) && a.l.cfg.Info.Kills {
			a.l.EndQuery(ctx, mark) // it may be granted the lock yet
		}
		return err
	}
	if !usable && a.l.cfg.Info.Kills {
		a.l.EndQuery(ctx, mark) // the server's own limit ends the statement, too
	}
	cause := context.Cause(ctx)
	if cause == nil {
		cause = queue.ErrFreed
	}
	switch {
	case usable && err == nil && (errors.Is(cause, strategy.ErrWaitOver) || errors.Is(cause, queue.ErrFreed)):
		a.stopped = true
		return nil // the lock was granted at the last moment, and the caller is still there
	case err == nil || server.Interrupted(err) || a.l.outrun(err) || !usable: // Galera calls a KILL a deadlock
		return cause
	default:
		return err
	}
}

// EndQuery ends a statement that its caller has given up, with mark in the statement's text. It works in the background,
// and goes on when ctx ends.
func (l *Locker) EndQuery(ctx context.Context, mark string) {
	l.cleanup.Go(func() {
		ctx, cancel := server.Within(context.WithoutCancel(ctx), background)
		defer cancel()
		l.cfg.Control.EndQuery(ctx, mark)
	})
}

// waitSQL returns statements that wait in the server for the keys, in the open transaction. There is one for each key: a
// waiter that is granted a row with a lease does not go on to wait for another row. The server ends each statement after
// bound, so that a waiter whose client is gone disappears by itself. mark makes the texts unique, for KILL. It stands in
// front, since servers show only the beginning of a long text. Behind it the first text says for how long the caller has
// waited. On MySQL:
//
//	SELECT /*+ MAX_EXECUTION_TIME(10000) */ /* mysqllock 6f1c waits 1 ms */
//	  CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only
//	FROM mysqllock WHERE namespace = 'app' AND name = 'k' LIMIT 1 FOR UPDATE
//
// On MariaDB:
//
//	SET STATEMENT max_statement_time = 10.000 FOR SELECT /* mysqllock 6f1c waits 1 ms */
//	  CONNECTION_ID(), token, owner, versioned, @@read_only, @@innodb_read_only
//	FROM mysqllock WHERE namespace = 'app' AND name = 'k' LIMIT 1 FOR UPDATE
func (a *attempt) waitSQL(bound time.Duration, mark string) []string {
	comment := "/* mysqllock " + mark + " " + server.Waits(a.Began()) + " */ "
	settings, hint, tail := a.settings(""), "", ""
	if a.l.cfg.Info.Settings {
		settings = a.settings(fmt.Sprintf("max_statement_time = %.3f", bound.Seconds()))
	} else {
		if !a.l.cfg.Info.Kills {
			bound = wholeSecond
		}
		hint, tail = a.l.cfg.Info.Within(bound)
	}
	texts := make([]string, len(a.keys))
	for i, key := range a.keys {
		texts[i] = settings + a.l.selects([]Key{key}, hint+comment, tail)
		comment = pool.Marked(mark)
	}
	return texts
}

// lockInTurn is lock for the statements of waitSQL, which it sends one after the other.
func (a *attempt) lockInTurn(ctx context.Context, texts []string) error {
	var rows [][]string
	for _, text := range texts {
		more, err := server.Query(ctx, a.c.Conn, text)
		if server.Number(err) != 0 {
			a.c.Touch() // the server has answered after a wait, and the transaction may go on
		}
		if err != nil {
			return err
		}
		if rows = append(rows, more...); len(more) == 0 || stopped(rows) {
			break
		}
	}
	if n := len(rows) - 1; stopped(rows) && n+1 < len(a.keys) {
		a.l.cfg.Rows.NoteLeased(a.keys[n].Name)
		return &strategy.Leased{Key: a.keys[n].Name, Token: rows[n][1], Owner: rows[n][2]}
	}
	return a.granted(rows)
}

// stopped reports whether the last of rows, the answers to lock statements, has a lease's owner. Then the keys behind it
// were not locked.
func stopped(rows [][]string) bool {
	if len(rows) == 0 {
		return false
	}
	last := rows[len(rows)-1]
	return len(last) > 2 && last[2] != ""
}
