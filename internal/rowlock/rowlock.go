// Package rowlock keeps a lock as an InnoDB row lock on the key's row of the lock table, in
// the caller's own transaction. So the lock and the write commit together, and a caller
// that has lost the lock cannot commit.
//
// # How a lock is acquired
//
// The key's row is made first, outside any transaction. Then the caller queues with the other goroutines of its
// process, so that a thousand of them occupy one connection.
//
// A caller that finds the queue empty tries with NOWAIT, on a session. Sessions are not in autocommit, so the lock
// statement begins the transaction. The transaction's options go in front of the lock statement in the same text.
// Without options, the statement for one key is prepared on a session that stays. (Under mysqllock.Wrap the
// transaction begins by a call of the base driver, and nothing is handed over.)
//
// If the key is locked, the first caller in the queue waits in the server, which wakes it on release. The server limits
// that wait, so a waiter whose client is gone disappears by itself. If a caller stops waiting, its statement is killed
// and its transaction rolled back before the caller gets its error.
//
// The lock statement also tells whether the row has a lease. If so, the caller rolls the transaction back at once, since
// its row lock would keep the lease's holder from renewing. It waits for several keys in one statement each, and so
// holds no row with a lease while it waits for the next key. If the caller's host stands still, or is cut off, when the
// row is granted, the server ends the session after lockTTL of silence.
//
// After the rollback a control connection, whose clock is the server's, tells whether the lease is live. The caller
// waits for the end of a live lease without a transaction. It removes an expired lease from the row, and tries again;
// the removal waits for the last COMMIT under the lease.
//
// A caller that comes to the front of the queue tries with NOWAIT, too, unless another process had the key a moment ago:
// then the caller waits in the server, in the order of arrival there.
//
// Behind a holder of this process, the next caller in the queue goes ahead ([Request.GoesAhead]): it waits in the server,
// too, once something has run under the holder's lock. On MariaDB each next caller does so, on MySQL one whose query can
// go out with the lock. The holder's COMMIT gives the next caller the key, and with it the rows. A caller that goes ahead
// occupies a session, so none does if sessions are on a budget, or half of them are in use. For figures see
// [server.Flavour].
//
// A transaction that holds a lock already does not queue in the process. It waits in the
// server at once, because the server detects deadlocks.
//
// # Handoff
//
// A session goes with its lock to the next caller in the queue of this process, if both callers want the same key alone,
// in a transaction without options. One text, "COMMIT; SELECT 1; SELECT … FOR UPDATE NOWAIT", commits, and locks the key
// again for the next caller. Sessions are not in autocommit, so no START TRANSACTION is needed. A process that waits in
// the server gets the key at the COMMIT all the same, and the next caller then waits behind that process. The answer to
// SELECT 1 says that the COMMIT came through, whatever becomes of the lock. If two statements are two round trips
// ([pool.Conn.Packs]), COMMIT is sent alone, and the next caller asks for the lock.
//
// If nothing has run in the transaction since the lock was granted, there is nothing to commit, and no snapshot. Then the
// next caller gets the transaction as it is, after a look at the socket. For other processes such handoffs are one long
// hold, so [strategy.Config.HandOvers] and [strategy.Config.HandOverTime] since the last COMMIT bound them. HandOvers
// also bounds COMMITs that lock the key for the next caller: after that, callers of other processes that only look now
// and then have their turn. While a caller waits for any session, no session is handed over.
//
// A session on which a statement has left something is closed after its transaction, so it is not handed over. Nor is a
// session that holds more than its one key, or must check something before its COMMIT.
//
// # The caller's statements beside ours
//
// Outside of a transaction the query that takes the lock goes out behind the lock statement
// ([Request.Behind]), also behind one that waits. The write that ends the unit goes out in front of COMMIT, with the
// count of its rows between the two: if the write has changed nothing, the text stops at the count, since the unit then
// stays open. So read, decide, write is two round trips, as without the lock, and the next caller has the key of a hot
// row after two. The answer of the query is read only after that of the lock. It is not always known whether an error
// in front of COMMIT is that of the write: see [server.Uncounted].
//
// A write alone is one round trip: lock, write, count and COMMIT. Nobody reads the answer of the lock statement before the
// write runs. So that statement fails if the row is missing, has a lease or a version, or if the server takes no writes
// ([attempt.aloneSQL]). Then the lock is asked for again, without the write. A lock statement that waits in the server is
// sent without the write, too.
//
// # Shared keys
//
// Readers lock the row shared, each in its own transaction. In the process, readers that
// are next to each other in the queue go together: the first of them waits for all, and
// none passes a writer. In the server, a reader behind a waiting writer waits, and its
// NOWAIT fails, so new readers do not starve a writer of another process. MariaDB grants
// in the order of arrival. MySQL does so for writers; a waiting reader gets in with the
// readers before it, past a writer between them. (Measured on MySQL 9.7 and MariaDB 10.11:
// of 24 readers in two processes that never pause, each passes a writer about once.)
//
// A reader changes nothing that the key protects, so its commit does not change the
// version.
//
// # Slots
//
// The slots of a key are rows; a holder locks one of them. At most as many callers of a process as there are slots look
// for a slot at the same time. They look by [strategy.Attempt.TakeSlot], as for leases. First a caller tries the slot that
// was released last, or a random one. Then a control connection looks for a free slot with SKIP LOCKED, and the caller
// tries that. (A search in the holder's own transaction, at REPEATABLE READ, would lock the gap behind each locked row, and
// nobody could make a row there.) If no slot is free, the caller waits in the server for a random slot, for at most 250 ms,
// and looks again. If that slot has a lease, the caller waits as long for the lease, without a lock on the row.
//
// A slot that is released by a goroutine of this process goes to the caller that has
// looked for the longest time; its wait in the server is stopped for that. So within one
// process it is first come, first served. A slot that another process releases goes to
// the caller that waits for it or finds it. Waiters of several processes have no common
// order, and with fewer waiters than slots a released slot may stay unused for 250 ms.
//
// # Galera
//
// By themselves two nodes would grant the same row lock: nodes tell each other only of changes, and only at COMMIT. So an
// UPDATE in front of the lock statement changes the key's row, and makes the other nodes agree to that one change at
// once (streaming replication, for this statement alone). When the UPDATE returns, all nodes have agreed. From then on
// the row is locked on all nodes, until the transaction ends or its node is expelled. If a change of another node came
// first, perhaps one that has not arrived on this node yet, the UPDATE fails and the transaction is rolled back. Then the
// caller tries again.
//
// Because the nodes have agreed, the lock statement reads the latest state of the row, for example a lease in it. And the
// transaction can read what the previous holder has committed.
//
// Shared locks change nothing, so they are refused. So is every row lock on Group
// Replication with several primaries, which has no such way to agree.
//
// # Versions
//
// A versioned row belongs to a key that is used optimistically. A transaction that has
// locked it must change its version at its commit: see [Locker.Raise].
package rowlock

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/sabotage"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

const (
	// slack is how much later the server ends a wait than the client.
	slack = time.Second
	// wholeSecond is the shortest wait in a statement of a server that cannot end the wait sooner.
	wholeSecond = time.Second
	// breath is the longest pause of a caller that has met the last COMMIT under a lease, before it tries again.
	breath = 50 * time.Millisecond
	// arrival is how long a change of another node usually takes to arrive.
	arrival = 10 * time.Millisecond
	// controlWait is how long a request without a wait may wait for a control connection.
	controlWait = time.Second
	// background bounds work that must be done although its caller is gone.
	background = 10 * time.Second
)

// Grants are the privileges that the driver's account needs.
const Grants = "SELECT, INSERT, UPDATE on the lock table; CREATE where lockSchema=auto makes it"

var terms = strategy.Terms{
	Strategy: hint.StrategyRow, Grants: Grants, Writes: "nothing can be locked on it",
	Limits: strategy.Usual,
}

// Traits are the traits of row locks. [Locker.Begin] and [Locker.Join] take row locks inside of transactions, and
// [Locker.Raise] goes out in front of COMMIT.
var Traits = strategy.Traits{Name: hint.StrategyRow, Table: true, Inside: true, Excludes: true}

// Locker acquires row locks on one server. It is safe for concurrent use.
type Locker struct {
	cfg     strategy.Config
	fromRow string         // the part of a lock statement from FROM to the row's name
	streams bool           // locks hold on all nodes of a Galera cluster
	blind   atomic.Bool    // the server does not show the holders of locks to this account
	cleanup sync.WaitGroup // kills whose caller did not wait for them
}

// New returns a Locker on a table that exists.
func New(cfg strategy.Config) *Locker {
	l := &Locker{
		cfg:     cfg,
		fromRow: " FROM " + cfg.Table.String() + " WHERE " + schema.Row("", cfg.Namespace, ""),
		streams: cfg.Info.Streams() && !cfg.Unsafe,
	}
	l.blind.Store(!cfg.Info.Holders)
	return l
}

// Close waits for the kills that are still running.
func (l *Locker) Close() { l.cleanup.Wait() }

// Info returns what the server has told about itself.
func (l *Locker) Info() server.Info { return l.cfg.Info }

// Key is one of the keys of a request: the name of its row, and whether to lock it shared.
type Key = queue.Key

// Request says which keys to lock, and how long to queue for them.
type Request struct {
	Keys  []Key         // sorted by name, each once
	Slots []string      // in place of Keys: the rows of a key's slots, one of which is locked; the first stands for the key
	Label string        // the name of the keys in errors; "" stands for the names of their rows
	Wait  time.Duration // 0 fails at once if another caller holds a key
	Since time.Time     // when the caller began to wait, if this call is not its first; zero for now
	// Sessions gives Begin its session. Join has one already.
	Sessions Sessions
	Behind   *Behind // the caller's statement that may go out behind the lock statement; nil for none
	// GoesAhead says whether the caller now waits in the server already while another caller of its process uses the key; nil
	// for never. See [queue.Ends].
	GoesAhead func() bool
	Waiting   strategy.Waiting
}

// Sessions gives a caller the session on which it locks. No transaction is open on a session that it returns, and the
// caller has its turn.
type Sessions interface {
	// Get returns a session. It is called once the caller is in front of the queue.
	Get(context.Context) (*pool.Conn, error)
	// BeforeWait is called before the caller waits in the server. It returns the session to wait on: the same, or another.
	BeforeWait(context.Context) (*pool.Conn, error)
	// TookOver is called in place of Get, with the session that the previous holder has handed over.
	TookOver(*pool.Conn)
	// Short returns which bound keeps Get from returning a session now; nil if none does.
	Short() error
}

// Behind is a statement of the caller's that may stand behind the lock statement in one text.
type Behind struct {
	// Writes says that the statement changes something, and that COMMIT follows. The statement runs whatever the lock
	// statement answers, so the lock statement must fail if its answer would matter.
	Writes bool
	// Send sends lock, and behind it the statement, with mark in front of that. It calls granted with the answer of lock,
	// which must come within limit; 0 for no limit. It returns what granted returns, or the error of lock.
	// driver.ErrSkip says that nothing was sent. nil says that the statement was sent, whatever has become of it: the
	// caller that has made Behind knows.
	Send func(ctx context.Context, conn *pool.Conn, limit time.Duration, lock, mark string, granted func([][]string) error) error
	// Stopped is called after Send if the lock was granted although its wait was ended by a KILL, which may have met the
	// statement; nil where nothing waits.
	Stopped func()
}

// taking marks the statements that take the locks.
func (r Request) taking(ctx context.Context) context.Context {
	if len(r.Slots) > 0 {
		return purpose.Named(ctx, purpose.Take, hint.StrategyRow, r.Slots[0])
	}
	return purpose.With(ctx, purpose.Take, hint.StrategyRow, r.Keys, func(k Key) string { return k.Name })
}

// Locked is what a request has locked.
type Locked struct {
	Slot      int      // the index in Slots
	Versioned []string // the rows for which [Locker.Raise] must be called before the COMMIT
}

// Begun is a transaction that holds the locks.
type Begun struct {
	Locked
	Txn    *pool.Txn
	Ticket *queue.Ticket // Leave it when the transaction has ended
	// Handoff hands over the session, and the ticket; nil if they cannot be handed over.
	Handoff *Handoff
}

// Begin opens a transaction on a session, and locks the keys in it. After an error nothing is locked and no transaction
// is open, or the connection is not valid any more. After driver.ErrBadConn the caller may try another connection.
func (l *Locker) Begin(ctx context.Context, opts driver.TxOptions, r Request) (_ *Begun, err error) {
	ctx = r.taking(ctx)
	a := l.attempt(r)
	a.opts = opts
	var txn *pool.Txn
	defer a.Finish()
	defer func() {
		if txn == nil {
			a.Ticket.Leave()
		}
	}()
	if err = a.comeToFront(ctx); err == nil {
		txn, err = a.begin(ctx)
	}
	if err != nil {
		return nil, a.explain(ctx, err)
	}
	if len(r.Slots) > 0 {
		a.Ticket.Holds(a.locked.Slot)
	}
	a.Ticket.GrantedBy(l, &lockerr.Holder{ConnectionID: a.c.KnownID(), Program: l.cfg.Owner})
	return &Begun{a.locked, txn, a.Ticket, a.makeHandoff()}, nil
}

// attempt is one call of Begin or Join.
type attempt struct {
	strategy.Attempt
	l               *Locker
	c               *pool.Conn
	opts            driver.TxOptions
	mayHaveSnapshot bool // the transaction may have a snapshot: see settings
	txnOver         bool // the transaction of joinSlot is over
	r               Request
	names           []string // all rows that the attempt may lock, sorted
	keys            []Key    // the keys of the next lock statement
	locked          Locked
	before          *Handoff      // the handoff with which the session came; nil for a session from Sessions
	cleared         int           // how often an expired lease was removed from a row
	bound           time.Duration // the server's own limit on each statement of the last wait
	stopped         bool          // the last wait in the server was ended by a KILL, but the lock was granted
}

func (l *Locker) attempt(r Request) *attempt {
	a := &attempt{
		Attempt: strategy.Attempt{Key: r.Label, Wait: r.Wait, Waiting: r.Waiting, Start: time.Now(), Since: r.Since},
		l:       l, r: r, keys: r.Keys,
	}
	if r.Sessions != nil {
		a.Short = r.Sessions.Short
	}
	for _, key := range r.Keys {
		a.names = append(a.names, key.Name)
	}
	if len(r.Slots) > 0 {
		a.names = slices.Sorted(slices.Values(r.Slots))
		a.Once = true
	}
	switch {
	case a.Key != "":
	case len(r.Slots) > 0:
		a.Key = r.Slots[0]
	default:
		a.Key = strings.Join(a.names, ", ")
	}
	return a
}

var (
	errLeaving = lockerr.With(lockerr.ErrLocked, errors.New("the last COMMIT under an expired lease is still running"))
	errForm    = errors.New("a lock statement returned an unexpected result")
)

// allowed returns an error if row locks do not exclude here, or if the server lacks what they need.
func (a *attempt) allowed() error {
	if len(a.r.Slots) > 0 {
		if err := a.l.cfg.Info.Slots(); err != nil {
			return err
		}
	}
	topology := a.l.cfg.Info.Topology
	shared := slices.ContainsFunc(a.r.Keys, func(key Key) bool { return key.Shared })
	if shared {
		if err := a.l.cfg.Info.Shares("shared row locks", "leave out lockctx.Shared"); err != nil {
			return err
		}
	}
	// If a transaction keeps a snapshot, the snapshot must not be older than the lock.
	level := sql.IsolationLevel(a.opts.Isolation)
	if a.l.cfg.Info.EarlySnapshot && level != sql.LevelDefault && level != sql.LevelReadCommitted {
		return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
			"on %s a %v transaction takes its snapshot when it begins, before it has the lock;"+
				" say sql.LevelDefault or sql.LevelReadCommitted, with which it is READ COMMITTED", a.l.cfg.Info.Engine, level))
	}
	if _, err := pool.Options(a.opts); err != nil {
		return err
	}
	var kind string
	switch {
	case topology == "" || a.l.cfg.Unsafe || a.l.streams && !shared:
		return nil
	case a.l.streams:
		kind = "shared row locks"
	default:
		kind = "row locks"
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"%s do not exclude on %s, whose other nodes do not see them;"+
			" use a lease, or with lockUnsafe=allow row locks of one node, for an application that uses no other", kind, topology))
}

// outrun reports whether a lock was refused because another node was quicker. Then the transaction is rolled back.
func (l *Locker) outrun(err error) bool { return l.streams && server.Deadlock(err) }

// taken reports whether a lock was refused because another holder has it.
func (l *Locker) taken(err error) bool { return server.Locked(err) || l.outrun(err) }

// comeToFront makes the rows of the keys, and waits until the caller is in front of the queue.
func (a *attempt) comeToFront(ctx context.Context) error {
	if err := a.allowed(); err != nil {
		return err
	}
	if err := a.l.cfg.Rows.Exist(ctx, a.names); err != nil {
		return err
	}
	var giver any
	if a.takesHandoff() {
		giver = a.l
		a.GoesAhead = a.r.GoesAhead
	}
	keys := a.r.Keys
	if n := len(a.r.Slots); n > 0 {
		keys = []queue.Key{{Name: a.r.Slots[0], Slots: n}}
	}
	return a.Enqueue(ctx, a.l.cfg.Queue, keys, giver, nil)
}

// begin begins the transaction with the lock, for a caller in front of the queue. If the caller was in front at once, it
// first tries with NOWAIT, else it may wait in the server at once.
func (a *attempt) begin(ctx context.Context) (txn *pool.Txn, err error) {
	if before, handed := a.Ticket.HandedOver().(*Handoff); handed {
		return a.takeOver(ctx, before)
	}
	asked := time.Now()
	if a.c, err = a.r.Sessions.Get(ctx); err != nil {
		return nil, err
	}
	a.Ticket.Asks()
	if a.Wait > 0 { // Get has waited for a connection, not for the lock
		a.Wait += time.Since(asked)
	}
	if len(a.r.Slots) > 0 {
		return a.beginSlot(ctx)
	}
	a.Once = true // not before: Get has a wait of its own
	// A caller that had to queue in the process expects to wait in the server, too, if
	// another process had the key a moment ago, unless it came to the front because the key
	// is shared.
	allShared := !slices.ContainsFunc(a.r.Keys, func(key Key) bool { return !key.Shared })
	nowait := a.First || !a.Ticket.Ahead() && !a.Ticket.SeenOtherProcess() || allShared
	if !nowait {
		a.Heard.Store(true)
	}
	for {
		if nowait {
			txn, err = a.try(ctx)
		} else {
			txn, err = a.wait(ctx)
		}
		a.EndTurn()
		if err == nil {
			return txn, nil
		}
		if nowait, err = a.nextTry(ctx, err, nowait); err != nil {
			return nil, err
		}
	}
}

// giveWay follows a lock statement that has found a lease. If lease is nil, the lease is over, and the caller may try
// again, after a pause if that has happened often. Else giveWay waits for the lease. After an error there is no further
// attempt.
func (a *attempt) giveWay(ctx context.Context, lease *strategy.Leased) (err error) {
	switch {
	case lease != nil && a.Wait == 0:
		return lease
	case lease != nil:
		return a.await(ctx, lease)
	case a.cleared < 3:
		a.cleared++
		return nil
	case a.Wait == 0:
		return lockerr.ErrLocked
	}
	return a.rest(ctx, breath)
}

// nextTry decides how the request goes on after a lock statement that has failed with err: by one with NOWAIT, by one that
// waits in the server, or not at all.
func (a *attempt) nextTry(ctx context.Context, err error, nowait bool) (nowaitNext bool, _ error) {
	var lease *strategy.Leased
	if errors.As(err, &lease) {
		if lease, err = a.look(ctx, []string{lease.Key}); lease != nil || err == nil {
			return true, a.giveWay(ctx, lease)
		}
	}
	switch {
	case a.Vanished(err):
		return nowait, a.l.cfg.Rows.Renew(ctx, a.names)
	case a.l.outrun(err) && a.Wait > 0:
		return false, a.rest(ctx, arrival)
	case nowait && server.Locked(err) && a.Wait > 0:
		a.Ticket.SawOtherProcess()
		return false, nil
	case nowait && a.l.taken(err):
		return false, a.refuse(ctx, 0)
	case !nowait && server.Interrupted(err): // the server's own bound has ended the wait: queue again
		return false, nil
	}
	return false, err
}

// refuse is for a request without a wait, if somebody has locked a row. If that may be a clean-up, for a moment, refuse
// returns nil, and the request goes on as one that waits for the clean-up. waiter is the id of the connection that has
// asked; 0 if it is not known.
func (a *attempt) refuse(ctx context.Context, waiter uint64) error {
	a.Heard.Store(true)
	if a.Cleaning(ctx, a.l.cfg.Rows) {
		return nil
	}
	if a.HeldBy == nil {
		a.HeldBy = a.askHolder(ctx, waiter, "")
	}
	return lockerr.ErrLocked
}

// try begins a transaction and locks with NOWAIT: by a prepared statement, or by a text behind the statement that sets
// the transaction's options.
func (a *attempt) try(ctx context.Context) (txn *pool.Txn, err error) {
	caller := ctx
	ctx, cancel := server.Within(ctx, pool.AnswerTime)
	defer cancel()
	options, err := pool.Options(a.opts)
	if err != nil {
		return nil, err
	}
	if options != "" && !a.c.ByCalls() {
		return a.orRollBack(a.c.Begun(ctx), a.lock(ctx, append([]string{options}, a.trySQL()...)...))
	}
	if txn, err = a.c.Begin(ctx, a.opts); err != nil {
		return nil, err
	}
	if b := a.behind(); b != nil {
		lock := a.trySQL()[0]
		if b.Writes {
			lock = a.aloneSQL()
		}
		err := a.lockInFront(caller, b, pool.AnswerTime, lock, "", func() {})
		if !errors.Is(err, driver.ErrSkip) && (!b.Writes || !server.Stopped(err)) { // else the lock statement without the write says why
			return a.orRollBack(txn, err)
		}
	}
	if text, args := a.preparedSQL(); text != "" {
		rows, err := a.c.QueryPrepared(ctx, text, args...)
		if a.Heard.From(err); err == nil {
			err = a.granted(rows)
		}
		if !errors.Is(err, pool.ErrUnprepared) {
			return a.orRollBack(txn, err)
		}
	}
	return a.orRollBack(txn, a.lock(ctx, a.trySQL()...))
}

// behind returns the statement that can go out behind the lock statement; nil for none.
func (a *attempt) behind() *Behind {
	b := a.r.Behind
	if b == nil || len(a.keys) != 1 || a.l.streams {
		return nil
	}
	inOneText := !a.c.ByCalls() && a.c.Packs()
	refused := b.Writes && a.l.cfg.Rows.Versioned(a.keys[0].Name) // by aloneSQL, each time
	if !inOneText || refused {
		return nil
	}
	return b
}

// lockInFront runs a lock statement with b behind it, and calls granted as soon as the lock is granted.
func (a *attempt) lockInFront(ctx context.Context, b *Behind, limit time.Duration, lock, mark string, granted func()) error {
	heard := false
	err := b.Send(ctx, a.c, limit, lock, mark, func(answer [][]string) error {
		heard = true
		a.Heard.From(nil)
		err := a.granted(answer)
		if err == nil {
			granted()
		}
		return err
	})
	switch {
	case err == nil:
		a.c.Touch() // what went out behind the lock has been answered, too, perhaps long after it
	case !heard && !errors.Is(err, driver.ErrSkip):
		a.Heard.From(err)
		if server.Number(err) != 0 {
			a.c.Touch()
		}
	}
	return err
}

// orRollBack rolls the transaction back if its lock was not granted: a failed lock statement may have locked some rows.
func (a *attempt) orRollBack(txn *pool.Txn, err error) (*pool.Txn, error) {
	if err == nil {
		return txn, nil
	}
	if a.c.Valid() && txn.Rollback(background) != nil {
		a.c.Taint() // the transaction may still be open
	}
	return nil, err
}

// look returns a live lease on one of names, or nil. If one of their rows is missing, the error is ErrNoRow.
//
// look also removes expired leases from their rows. A holder may not know yet that its lease has expired, and its last
// transaction need not hold a lock that blocks ours. If a holder is just committing, the error is errLeaving.
//
// It uses a control connection, since the application may have set the clock of its own session.
func (a *attempt) look(ctx context.Context, names []string) (lease *strategy.Leased, err error) {
	err = a.onControl(ctx, func(c *pool.Conn) error {
		rows, err := server.Query(ctx, c.Conn, a.l.readSQL(names))
		for _, row := range rows {
			if lease, err = live(row); err != nil || lease.Remaining > 0 {
				return err
			}
			if lease.Owner == "" || sabotage.KeepLapsed.Load() {
				continue
			}
			if err := server.Exec(ctx, c.Conn, a.l.clearSQL(lease)); err != nil {
				return leaving(err)
			}
		}
		lease = nil
		if err == nil && len(rows) < len(names) {
			err = keyrow.ErrNoRow
		}
		return err
	})
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return lease, err
}

// leaving turns the error of clearSQL into errLeaving if the row is locked.
func leaving(err error) error {
	if server.Locked(err) || server.Deadlock(err) {
		return errLeaving
	}
	return err
}

// ask runs a plain read on a control connection.
func (a *attempt) ask(ctx context.Context, text string) (rows [][]string, err error) {
	err = a.onControl(ctx, func(c *pool.Conn) error {
		rows, err = server.Query(ctx, c.Conn, text)
		return err
	})
	return rows, err
}

// onControl runs f on a control connection.
func (a *attempt) onControl(ctx context.Context, f func(*pool.Conn) error) error {
	c, err := a.control(ctx, max(a.Wait-time.Since(a.Start), controlWait))
	if err != nil {
		return err
	}
	defer c.Release()
	return server.OfControl(because(ctx, f(c)))
}

// because returns why ctx has ended, in place of the error of a statement that ended with ctx.
func because(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// control returns a control connection, for which it waits for at most atMost.
func (a *attempt) control(ctx context.Context, atMost time.Duration) (*pool.Conn, error) {
	timed, cancel := server.Within(ctx, atMost)
	defer cancel()
	return a.l.cfg.Control.Acquire(timed)
}

// lock runs lock statements. The answer of the last one must show that every key's row exists and has no lease.
func (a *attempt) lock(ctx context.Context, texts ...string) error {
	answers, err := a.c.Send(ctx, texts...)
	a.Heard.From(err)
	if server.Number(err) != 0 {
		a.c.Touch() // the server has answered after a wait, and the transaction may go on
	}
	if err != nil {
		return err
	}
	return a.granted(answers[len(answers)-1])
}

// granted reads the answer of a lock statement, and returns an error if the lock is of no use.
func (a *attempt) granted(rows [][]string) error {
	a.c.Touch()
	a.locked.Versioned = nil
	if len(rows) < len(a.keys) {
		return keyrow.ErrNoRow
	}
	if len(rows[0]) != 6 {
		return errForm
	}
	if !server.TakesWrites(rows[0][4:]) {
		return lockerr.With(lockerr.ErrUnsafe, server.ErrReadOnly)
	}
	if a.c.KnownID() == 0 { // while the statement waits, queueUp may be reading it
		if err := a.c.SetID(rows[0][0]); err != nil {
			return err
		}
	}
	var found *strategy.Leased
	for i, key := range a.keys {
		token, owner, versioned := rows[i][1], rows[i][2], rows[i][3]
		if token != "0" {
			a.l.cfg.Rows.NoteLeased(key.Name)
		}
		if versioned != "0" {
			a.l.cfg.Rows.NoteVersioned(key.Name)
			if !key.Shared {
				a.locked.Versioned = append(a.locked.Versioned, key.Name)
			}
		}
		if owner != "" && found == nil {
			found = &strategy.Leased{Key: key.Name, Token: token, Owner: owner}
		}
	}
	if found == nil {
		return nil
	}
	return found
}

// live reads a row's lease from an answer on a control connection: the name and leaseColumns.
func live(row []string) (*strategy.Leased, error) {
	if len(row) != 4 {
		return nil, errForm
	}
	micros, err := strconv.ParseInt(row[1], 10, 64)
	if err != nil {
		return nil, errForm
	}
	return &strategy.Leased{Key: row[0], Token: row[2], Owner: row[3], Remaining: time.Duration(micros) * time.Microsecond}, nil
}

// explain turns a failure into the error that callers see.
func (a *attempt) explain(ctx context.Context, err error) error {
	if errors.Is(err, driver.ErrBadConn) && ctx.Err() == nil { // the driver closes a connection whose context ends
		return driver.ErrBadConn // nothing is held, so database/sql may try another connection
	}
	if !a.mayHaveSnapshot && server.Idle(err) && ctx.Err() == nil { // this process did not run for longer than the session may be silent
		if a.c != nil { // else the idle connection was another one, and there is no session yet
			_ = a.c.Close()
		}
		return driver.ErrBadConn
	}
	var lease *strategy.Leased
	if errors.As(err, &lease) {
		a.HeldBy = keyrow.HolderOf(lease.Owner)
		err = lockerr.ErrLocked
	}
	return a.Explain(ctx, terms, err, nil)
}
