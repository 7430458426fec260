package advisory

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// A transaction under an advisory lock costs no round trip more than one without: one
// statement acquires the lock and begins the transaction, another one checks the lock,
// commits, and releases it. Both run on the transaction's own connection (txConn), which
// holds the lock meanwhile. As a lock connection it has an identity, and the server ends it
// when it was silent for the TTL; as that of a row lock it is kept alive by the unit of work,
// which is also told when it is lost. Close of the Locker leaves it alone.
//
// It is for a key that is free, and for what ends with the transaction. A caller that others
// of its process wait for in the queue, or that is in the queue itself, has the lock on a lock
// connection, from where it is handed over. Then, and where the server has no way for the
// above, BEGIN goes out while the lock is asked for: it takes no snapshot, so all that the
// transaction reads is read under the lock. Either is tried once, and only if a connection is
// free. A caller that has to wait for the lock keeps no connection meanwhile: its transaction
// begins after the wait.

// tryBegin is try, with the transaction that is to begin with the lock.
func (a *attempt) tryBegin(ctx context.Context, over *Lock) (lock *Lock, err error) {
	b := a.r.Begin
	switch {
	case b == nil || b.Options != (driver.TxOptions{}) || !b.Free():
	case a.First && b.Ends && a.commits() && !a.cfg.Unsafe: // what lockUnsafe allows is left to lock connections
		refused := false
		timed, cancel := context.WithTimeout(ctx, pool.AnswerTime)
		defer cancel()
		used := b.Use(ctx, func(c *pool.Conn) (left strategy.State) {
			lock, refused, left, err = a.beginOn(timed, c)
			b.Limited = lock != nil
			return left
		})
		if used == nil && (lock != nil || refused || err != nil) {
			if refused {
				a.Heard.Store(true)
			}
			return lock, err
		}
	default:
		return a.try(ctx, over, b)
	}
	return a.try(ctx, over, nil) // if somebody else has taken the free connection, who has the lock goes first
}

// sendBeside sends r and awaits the answer, while BEGIN goes out on the connection of b, unless
// that is nil. It reports whether there was an answer; if not, what r may be granted is released.
// By then the connection has been given back, with the transaction that belongs to the lock which
// was granted, or with none: while it is in use, the caller waits for nothing but these two
// answers, so that callers who have the connections of the application never wait for each other.
// What does not come off is tried again after the lock was granted, and tells why then.
func (a *attempt) sendBeside(ctx context.Context, r *request, b *strategy.Beginning) (answered bool) {
	k := r.lock.conn
	k.submit(r, ctx.Done() == nil && b == nil)
	if b == nil || !b.Free() || b.Use(ctx, func(c *pool.Conn) strategy.State {
		timed, cancel := context.WithTimeout(purpose.For(ctx, purpose.Other), pool.AnswerTime)
		defer cancel()
		begun := server.Exec(timed, c.Conn, "START TRANSACTION") == nil
		if answered = k.await(ctx, r); answered && r.granted && begun {
			return strategy.Begun
		}
		return strategy.Abandoned(ctx, c, slack)
	}) != nil {
		answered = k.await(ctx, r)
	}
	if !answered {
		ticket := a.Ticket
		a.Ticket = nil
		a.releaseLate(r, ticket)
	}
	return answered
}

// beginOn acquires the lock on c, whose turn is the caller's, and begins a transaction. It
// returns nil if somebody else has the lock, which is refused, or if the lock must be asked for
// on a lock connection, which also tells why. c is not to stay if it may have the lock in vain.
// The error matches driver.ErrBadConn if nothing was sent.
func (a *attempt) beginOn(ctx context.Context, c *pool.Conn) (lock *Lock, refused bool, left strategy.State, err error) {
	switch err := c.Identify(ctx); { // else nobody could check the lock, or end the connection
	case errors.Is(err, driver.ErrBadConn):
		return nil, false, strategy.Unsure, a.broken()
	case err != nil:
		return nil, false, strategy.Vacant, nil
	}
	k := &lockConn{l: a.Locker, c: c, id: c.KnownID(), identity: newIdentity()}
	k.holder = &lockerr.Holder{ConnectionID: k.id, Program: a.cfg.Owner}
	lock = a.lock(k)
	lock.txConn = c
	rows, err := c.QueryBlock(ctx, a.beginBlock(lock))
	switch {
	case errors.Is(err, driver.ErrBadConn):
		return nil, false, strategy.Unsure, a.broken()
	case server.Missing(err) || server.Denied(err): // dropped, or not ours to execute
		a.cfg.Procedures.Set(a.cfg.Table.NamedProcedure(), false)
		return nil, false, strategy.Vacant, nil
	case err == nil && len(rows) == 1 && rows[0][0] != "1":
		return nil, rows[0][0] == "0", strategy.Vacant, nil
	case err == nil && len(rows) == 1 && ctx.Err() == nil:
		c.Touch() // from now on it is kept alive
		lock.ticket.Granted(k.holder)
		return lock, false, strategy.Begun, nil
	case ctx.Err() != nil:
		return nil, false, strategy.Unsure, context.Cause(ctx)
	}
	return nil, false, strategy.Unsure, nil
}

// broken notes that the connection of the transaction was broken before, so that its caller may
// try another one.
func (a *attempt) broken() error {
	a.Broke = true
	return driver.ErrBadConn
}

// beginBlock acquires lock on its txConn, if nobody has it, and begins a transaction. The
// answer is 1 if it has, 0 if somebody has the lock, and else NULL. See
// [schema.Table.NamedProcedure]; MariaDB runs the same as an anonymous block.
func (l *Locker) beginBlock(lock *Lock) pool.Block {
	k, seconds := lock.conn, int64(l.ttl/time.Second)
	if !l.cfg.Info.Blocks {
		return pool.Block{Text: fmt.Sprintf("CALL %s(CONNECTION_ID() = %d AND NOT @@read_only AND NOT @@innodb_read_only, '%s', '%s', %d) /* lock and BEGIN */",
			l.cfg.Table.NamedProcedure(), k.id, lock.name, k.identity, seconds)}
	}
	return pool.Block{
		Text: "BEGIN NOT ATOMIC SET @mysqllock_held = IF(CONNECTION_ID() = ?, IF(@@read_only, NULL, IF(@@innodb_read_only, NULL, GET_LOCK(" + lockname.Value + ", 0))), NULL); " +
			"IF @mysqllock_held THEN DO GET_LOCK(" + lockname.Value + ", 0); " + schema.LimitSilence("?") + "; START TRANSACTION; END IF; SELECT @mysqllock_held; END",
		Values: []driver.Value{int64(k.id), lock.name, k.identity, seconds}, //nolint:gosec // connections are counted by one
	}
}

// Detach takes the lock off the connection of the transaction that was begun with it, once
// that has ended. The caller has the turn of that connection. After an error the connection
// must be closed.
func (k *Lock) Detach() (err error) {
	if k.txConn == nil || k.freed {
		return nil
	}
	if k.txConn.Clean() {
		ctx, cancel := context.WithTimeout(purpose.Named(context.Background(), purpose.Release, hint.StrategyAdvisory, k.key), background)
		defer cancel()
		err = server.Exec(ctx, k.txConn.Conn, fmt.Sprintf("SET @mysqllock_held = RELEASE_LOCK(%s) + RELEASE_LOCK(%s), %s",
			lockname.Literal(k.name), lockname.Literal(k.conn.identity), schema.Unlimited))
	}
	k.isFree()
	return err
}

// isFree notes that txConn has the lock no more, or will soon be gone.
func (k *Lock) isFree() {
	k.freed = true
	_ = k.end()
	k.ticket.Leave()
}
