// Package rowlock keeps a lock as an InnoDB row lock on the key's row of the
// lock table, in the caller's own transaction: the lock and the write commit
// together, and whoever has lost the lock cannot commit.
//
// # How a lock is asked for
//
// The key's row is made first, outside any transaction. Then the caller lines
// up with the other goroutines of its process, so that a thousand of them
// occupy one server connection. Whoever finds the line empty tries with NOWAIT,
// in the same round trip as BEGIN where the server has a way; on a connection that
// stays, the statement for one key is prepared. Otherwise the one in front waits in
// the server, which wakes it on release; the server bounds that wait as well, so a
// waiter whose client is gone disappears by itself. A caller that stops waiting has
// its statement killed and its transaction rolled back before it gets its error.
//
// The lock statement also tells whether the row has a live lease. Then the
// transaction is rolled back at once, since it would keep the lease's holder
// from renewing, and the caller waits for the lease without one.
//
// A transaction that holds something already does not line up: it waits in the
// server at once, where a deadlock is seen.
//
// # Shared keys
//
// Readers lock the row shared, each in a transaction of its own. In the process,
// those next to each other in line go together: the first of them waits for all,
// and nobody passes a writer. In the server a reader behind a waiting writer
// waits, and its NOWAIT fails, so that new readers do not starve a writer of
// another process. MariaDB grants in the order of arrival. MySQL does so with
// writers, but a reader that waits already gets in with the readers before it,
// past a writer between them. (Measured on MySQL 9.7 and MariaDB 10.11; with 24
// readers in two processes that never pause, a writer is passed by each of them
// about once.)
//
// A reader changes nothing that the key protects, so its commit counts for no
// version.
//
// # Slots
//
// The slots of a key are rows, of which a holder locks one. As many callers of
// this process as there are slots look for one at a time; while there are others,
// the one that was given back last is tried first, else a random one that none of
// them has. Where that is taken, another connection looks for a free one with SKIP
// LOCKED: in the holder's own transaction, at REPEATABLE READ, a search that
// passes over a locked row would lock the gap behind it, in which then nobody
// could make a row. Where there is none, a caller waits in the server for a random
// one, for at most 250 ms, and looks again. A slot that is kept by a lease is
// passed over.
//
// A slot that a goroutine of this process gives back is for the one that has
// looked for longest, which stops its wait in the server for it, so that in one
// process it is first come first served. One that another process gives back goes
// to whoever waits for it or finds it: there is no order among the waiters of
// several processes, and with fewer of them than slots it may stay unused for
// 250 ms.
//
// # Galera
//
// Two nodes would grant the same row lock, since they tell each other only of what
// has changed, and only at COMMIT. So the lock statement changes the key's row, and
// has the other nodes agree to that one change at once (streaming replication, for
// the statement alone). From then on the row is locked on all of them, as it would
// be by somebody there, until the transaction ends or its node is expelled. An
// UPDATE that returns has been agreed to by all; it fails, and the transaction is
// rolled back, where a change of another node came before it, of which this one
// may not have heard yet: then the caller tries again.
//
// That the nodes have agreed also means that what the statement has read of the
// row was the latest, a lease in it for one, and that what the holder before has
// committed with it can be read here.
//
// Shared locks change nothing, so they are refused; and so is every row lock in
// Group Replication with several primaries, which has nothing of the kind.
//
// # Versions
//
// A row that is versioned is one that somebody keeps optimistically. Whoever
// locks it must let its commit be seen: see [Locker.Step].
package rowlock

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockctx"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

const (
	// giveUp is how long a caller whose context has ended may be kept, in all,
	// while its statement is taken off the server; one whose wait is over is in
	// less of a hurry.
	giveUp, giveUpCalmly = 35 * time.Millisecond, 200 * time.Millisecond
	// slack is how much later than the client the server ends a wait.
	slack = time.Second
	// pace is the time between two attempts that find the same lease.
	pace = 250 * time.Millisecond
	// slice is the longest time that a wait is for the same slot.
	slice = 250 * time.Millisecond
	// arrival is how long a node may be behind another without a reason.
	arrival = 10 * time.Millisecond
	// patience is how long a caller that does not wait stands in line for one of
	// the Control connections.
	patience = time.Second
	// background bounds what must be done although its caller has gone.
	background = 10 * time.Second
)

// Grants is what the driver's account needs on the lock table.
const Grants = "SELECT, INSERT, UPDATE on the lock table; CREATE, and on MySQL CREATE ROUTINE and EXECUTE, where lockSchema=auto makes it"

// Config says where locks are kept.
type Config struct {
	Table     schema.Table
	Namespace string        // goes in front of keys
	Owner     string        // how this process calls itself
	TTL       time.Duration // longest wait in one statement, and limit on idleness where the server has one
	// ReadTimeout is the driver's own limit on each read from the connections of
	// requests; 0 is none, or not known. Who waits for longer than half of it asks
	// again, and is then the last of those who wait in the server.
	ReadTimeout time.Duration
	Unsafe      bool // work as on one server where the nodes of a cluster do not see each other's row locks
	Info        server.Info
	Control     *pool.Pool   // connections in autocommit
	Queue       *queue.Queue // where the callers of this process line up
	Rows        *keyrow.Rows
	// Await returns when key's lease may have been given back, after atMost, or
	// with ctx's error. done lets the next waiter have its turn.
	Await func(ctx context.Context, key string, atMost time.Duration) (done func(), err error)
}

// Locker takes row locks on one server. It is safe for concurrent use.
type Locker struct {
	cfg                  Config
	fromRow              string         // of a lock statement, from FROM up to the row's name
	galera               bool           // a lock is one on all nodes
	single, singleShared single         // texts to be prepared
	blind                atomic.Bool    // the server does not show this account who holds a lock
	cleanup              sync.WaitGroup // kills that their caller did not wait for
}

// New returns a Locker on a table that is there.
func New(cfg Config) *Locker {
	l := &Locker{
		cfg:     cfg,
		fromRow: " FROM " + cfg.Table.String() + " WHERE namespace = " + schema.Literal(cfg.Namespace) + " AND name = ",
		galera:  cfg.Info.Streams() && !cfg.Unsafe,
	}
	l.single, l.singleShared = l.newSingle(false), l.newSingle(true)
	return l
}

// Close waits for the kills that are still under way.
func (l *Locker) Close() { l.cleanup.Wait() }

// Info is what the server said of itself.
func (l *Locker) Info() server.Info { return l.cfg.Info }

// IdleLimit is the limit, in seconds, that Begin puts on the idleness of a
// transaction that the server is to end; 0 where the server cannot or its own
// limit is shorter.
func (l *Locker) IdleLimit() int {
	limit := int(l.cfg.TTL / time.Second)
	if !l.cfg.Info.MariaDB || l.cfg.Info.IdleLimit > 0 && l.cfg.Info.IdleLimit <= limit {
		return 0
	}
	return limit
}

// Key is one of the keys that a request is for.
type Key struct {
	Name   string // of its row
	Shared bool   // together with all others who say so
}

// Request says which keys, and how long to queue for them.
type Request struct {
	Keys  []Key         // sorted by name, each once
	Slots []string      // instead of Keys: the rows of a key's slots, the first of which stands for the key; any one will do
	Label string        // what errors call the keys, where it is not their rows' names
	Wait  time.Duration // 0 fails at once where someone else has a key
	// Conn gives the connection, once the caller is in front of the queue. Its
	// turn is the caller's, and no transaction is open on it.
	Conn func(context.Context) (*pool.Conn, error)
	// Waiting is called before the caller begins to wait. It may refuse, and it
	// may end the wait through the context that it returns; done follows.
	Waiting func(context.Context) (ctx context.Context, done func(), err error)
}

// Locked is what a request has locked.
type Locked struct {
	Slot      int      // the index in Slots
	Versioned []string // the names that [Locker.Step] is for before the transaction commits
}

// Grant is a transaction with the locks in it.
type Grant struct {
	Locked
	Txn    *pool.Txn
	Ticket *queue.Ticket // to be left when the transaction has ended
}

// Begin opens a transaction in which the keys are locked. implicit means that
// the connection is not in autocommit, so the lock statement itself opens the
// transaction. After an error nothing is locked and no transaction is open, or
// the connection is no longer valid; driver.ErrBadConn means that another one
// may be tried.
func (l *Locker) Begin(ctx context.Context, opts driver.TxOptions, implicit bool, r Request) (*Grant, error) {
	a := l.attempt(r)
	defer func() { a.end() }()
	a.opts, a.implicit = opts, implicit
	txn, err := a.begin(ctx)
	if err != nil {
		a.ticket.Leave()
		return nil, a.explain(ctx, err)
	}
	if len(r.Slots) > 0 {
		a.ticket.Holds(a.locked.Slot)
	}
	a.ticket.Granted(&lockerr.Holder{ConnectionID: a.c.KnownID(), Program: l.cfg.Owner})
	return &Grant{a.locked, txn, a.ticket}, nil
}

// Join locks further keys in the transaction that is open on c. alive reports,
// after an error, that the transaction goes on as if Join had not been called;
// else it must be rolled back.
func (l *Locker) Join(ctx context.Context, c *pool.Conn, r Request) (locked Locked, alive bool, err error) {
	a := l.attempt(r)
	defer func() { a.end() }()
	a.c = c
	if alive, err = a.join(ctx); err != nil {
		return Locked{}, alive, a.explain(ctx, err)
	}
	return a.locked, true, nil
}

// attempt is one call of Begin or Join.
type attempt struct {
	*Locker
	c        *pool.Conn
	opts     driver.TxOptions
	implicit bool
	r        Request
	end      func()        // of the waits for slots, which are one to Request.Waiting
	ticket   *queue.Ticket // nil until there is one, and in Join
	names    []string      // of all rows that it may lock, sorted
	keys     []Key         // that the next lock statement is for
	locked   Locked
	start    time.Time
	holder   *lockerr.Holder
	awaited  leased    // what await waited for last,
	since    time.Time // and since when
}

func (l *Locker) attempt(r Request) *attempt {
	a := &attempt{Locker: l, r: r, keys: r.Keys, start: time.Now(), end: func() {}}
	for _, key := range r.Keys {
		a.names = append(a.names, key.Name)
	}
	if len(r.Slots) > 0 {
		a.names = slices.Sorted(slices.Values(r.Slots))
		a.r.Waiting = a.waitingOnce(r.Waiting)
	}
	return a
}

// places are where the attempt lines up.
func (a *attempt) places() []queue.Place {
	if n := len(a.r.Slots); n > 0 {
		return []queue.Place{{Key: a.r.Slots[0], Slots: n}}
	}
	places := make([]queue.Place, len(a.r.Keys))
	for i, key := range a.r.Keys {
		places[i] = queue.Place{Key: key.Name, Shared: key.Shared}
	}
	return places
}

var (
	errWaitOver = errors.New("the wait is over")
	errNoRow    = errors.New("a key's row in the lock table has vanished")
	errFreed    = errors.New("a slot was given back")
	errForm     = errors.New("a lock statement was answered in another form than ours")
)

// leased is why a lock statement has failed that found a live lease.
type leased struct {
	key       string
	token     string
	owner     string
	remaining time.Duration
}

func (l *leased) Error() string { return "somebody has a lease" }

// allowed refuses where row locks do not exclude, or the server lacks what they
// need.
func (a *attempt) allowed() error {
	if len(a.r.Slots) > 0 && !a.cfg.Info.SkipLocked() {
		return lockerr.With(lockerr.ErrUnsafe, errors.New("slots need SKIP LOCKED, which MariaDB has from 10.6 on"))
	}
	topology := a.cfg.Info.Topology
	shared := slices.ContainsFunc(a.r.Keys, func(key Key) bool { return key.Shared })
	var kind string
	switch {
	case topology == "" || a.cfg.Unsafe || a.streams() && !shared:
		return nil
	case a.streams():
		kind = "shared row locks"
	default:
		kind = "row locks"
	}
	return lockerr.With(lockerr.ErrUnsafe, fmt.Errorf(
		"%s do not exclude on %s, whose other nodes do not see them; use a lease, or with lockUnsafe=allow row locks of one node, for an application that uses no other", kind, topology))
}

// streams reports whether a lock is to be one on all nodes of a Galera cluster.
func (l *Locker) streams() bool { return l.galera }

// outrun reports that a lock was refused because another node was quicker, which
// has rolled the transaction back.
func (l *Locker) outrun(err error) bool { return l.streams() && server.Deadlock(err) }

// taken reports that a lock was refused because somebody else has it.
func (l *Locker) taken(err error) bool { return server.Locked(err) || l.outrun(err) }

func (a *attempt) begin(ctx context.Context) (*pool.Txn, error) {
	if err := a.allowed(); err != nil {
		return nil, err
	}
	if err := a.cfg.Rows.Exist(ctx, a.names); err != nil {
		return nil, err
	}
	var holder *lockerr.Holder
	var front bool
	a.ticket, holder, front = a.cfg.Queue.TryEnterAs(a.places(), a.r.Wait == 0)
	if !front {
		if a.r.Wait == 0 {
			a.holder = holder
			return nil, lockerr.ErrLocked
		}
		if err := a.lineUp(ctx); err != nil {
			return nil, err
		}
	}
	var err error
	if a.c, err = a.r.Conn(ctx); err != nil {
		return nil, err
	}
	if len(a.r.Slots) > 0 {
		return a.beginSlot(ctx)
	}
	return a.beginKeys(ctx, front)
}

func (a *attempt) beginKeys(ctx context.Context, front bool) (*pool.Txn, error) {
	// Whoever had to line up can expect to wait in the server too, but for those
	// who have come to the front because the key is shared.
	try := front || !slices.ContainsFunc(a.r.Keys, func(key Key) bool { return !key.Shared })
	done := func() {} // ends the turn that await gave
	for vanished := 0; ; {
		var txn *pool.Txn
		var err error
		if try {
			txn, err = a.try(ctx)
		} else {
			txn, err = a.wait(ctx)
		}
		done()
		done = func() {}
		var lease *leased
		switch {
		case err == nil:
			return txn, nil
		case errors.As(err, &lease) && a.r.Wait > 0:
			if done, err = a.await(ctx, lease); err != nil {
				return nil, err
			}
			try = true
		case (errors.Is(err, errNoRow) || server.Missing(err)) && vanished < 3:
			vanished++
			if err := a.cfg.Rows.Renew(ctx, a.names); err != nil {
				return nil, err
			}
		case a.outrun(err) && a.r.Wait > 0:
			if err := a.rest(ctx); err != nil {
				return nil, err
			}
			try = false
		case try && server.Locked(err) && a.r.Wait > 0:
			try = false
		case try && a.taken(err):
			a.holder = a.askHolder(ctx, 0)
			return nil, lockerr.ErrLocked
		case !try && server.Interrupted(err): // by the server's own bound: queue again
		default:
			return nil, err
		}
	}
}

// rest waits until what another node has done may have arrived here.
func (a *attempt) rest(ctx context.Context) error {
	ctx, done, err := a.waiting(ctx)
	if err != nil {
		return err
	}
	defer done()
	select {
	case <-time.After(arrival/2 + rand.N(arrival/2)):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// lineUp waits for the place in front of the process's own queue.
func (a *attempt) lineUp(ctx context.Context) error {
	ctx, done, err := a.waiting(ctx)
	if err != nil {
		return err
	}
	defer done()
	if a.ticket, err = a.cfg.Queue.EnterAs(ctx, a.places()); err != nil {
		for _, place := range a.places() {
			if a.holder == nil {
				a.holder = a.cfg.Queue.HolderOf(place)
			}
		}
		return context.Cause(ctx)
	}
	return nil
}

// waiting returns a context that ends with the wait.
func (a *attempt) waiting(ctx context.Context) (context.Context, func(), error) {
	return queue.Wait(ctx, a.r.Wait-time.Since(a.start), errWaitOver, a.r.Waiting)
}

// await waits until a lease may have been given back. done is for after the
// attempt that follows.
func (a *attempt) await(ctx context.Context, lease *leased) (done func(), err error) {
	a.holder = keyrow.HolderOf(lease.owner)
	ctx, stop, err := a.waiting(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	ctx, cancel := a.untilFreed(ctx)
	defer cancel()
	if lease.key == a.awaited.key && lease.token == a.awaited.token { // woken for nothing: not over and over
		select {
		case <-time.After(min(pace-time.Since(a.since), lease.remaining)):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	a.awaited, a.since = *lease, time.Now()
	// Our connection is idle meanwhile, and the server may end one that is for a TTL.
	done, err = a.cfg.Await(ctx, lease.key, max(min(lease.remaining, a.cfg.TTL/3), time.Millisecond))
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return done, err
}

// try begins a transaction and locks with NOWAIT.
func (a *attempt) try(ctx context.Context) (*pool.Txn, error) {
	if err := a.lockPrepared(ctx); !errors.Is(err, pool.ErrUnprepared) {
		return a.opened(a.c.Begun(), err)
	}
	if text, quiet := a.beginSQL(); text != "" {
		err := a.lock(ctx, text, quiet)
		if !server.Denied(err) && !server.Missing(err) && !errors.Is(err, errForm) || a.cfg.Info.MariaDB {
			return a.opened(a.c.Begun(), err)
		}
		a.cfg.Rows.NoProcedure() // dropped, replaced, or not ours to execute: go on without
		if err := server.Exec(ctx, a.c.Conn, "ROLLBACK"); err != nil {
			a.c.Taint()
			return nil, err
		}
	}
	txn, err := a.open(ctx)
	if err != nil {
		return nil, err
	}
	return a.opened(txn, a.lock(ctx, a.trySQL(), false))
}

// wait begins a transaction and queues in the server.
func (a *attempt) wait(ctx context.Context) (*pool.Txn, error) {
	if _, err := a.c.ID(ctx); err != nil {
		return nil, err
	}
	ctx, done, err := a.waiting(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	txn, err := a.open(ctx)
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, err
	}
	return a.opened(txn, a.block(ctx))
}

// open begins a transaction, with the limit on its idleness.
func (a *attempt) open(ctx context.Context) (*pool.Txn, error) {
	limit := a.IdleLimit()
	switch {
	case a.implicit:
		return a.c.Begun(), nil
	case limit == 0:
		return a.c.Begin(ctx, a.opts)
	case a.opts == (driver.TxOptions{}):
		return a.c.Begun(), server.Exec(ctx, a.c.Conn, "BEGIN NOT ATOMIC "+IdleLimitSQL(limit)+"; START TRANSACTION; END")
	}
	if err := server.Exec(ctx, a.c.Conn, IdleLimitSQL(limit)); err != nil {
		return nil, err
	}
	return a.c.Begin(ctx, a.opts)
}

// opened rolls the transaction back if its lock was not granted: what a failed
// lock statement had locked would stay locked.
func (a *attempt) opened(txn *pool.Txn, err error) (*pool.Txn, error) {
	if err == nil {
		return txn, nil
	}
	if a.c.Valid() && txn.Rollback(background) != nil {
		a.c.Taint() // it may carry the transaction
	}
	return nil, err
}

func (a *attempt) join(ctx context.Context) (alive bool, err error) {
	if err := a.allowed(); err != nil {
		return true, err
	}
	if err := a.cfg.Rows.Exist(ctx, a.names); err != nil {
		return true, err
	}
	if len(a.r.Slots) > 0 {
		return a.joinSlot(ctx)
	}
	done, err := a.unleased(ctx)
	if err != nil {
		return true, err
	}
	// One key that was not granted has locked nothing; of several, some may be.
	intact := func(err error) bool { return len(a.r.Keys) == 1 && !a.cfg.Info.EndsTransaction(err) }
	err = a.lock(ctx, a.trySQL(), false)
	done()
	if errors.Is(err, errNoRow) {
		a.cfg.Rows.Forget(a.names)
	}
	if err == nil || !server.Locked(err) {
		return false, err
	}
	if a.r.Wait == 0 {
		a.holder = a.askHolder(ctx, a.c.KnownID())
		return intact(err), lockerr.ErrLocked
	}
	if a.cfg.Info.EndsTransaction(err) {
		return false, lockerr.ErrLocked
	}
	if _, err := a.c.ID(ctx); err != nil {
		return false, err
	}
	for {
		wctx, done, err := a.waiting(ctx)
		if err != nil {
			return len(a.r.Keys) == 1 && !a.streams(), err
		}
		err = a.block(wctx)
		done()
		if err == nil || !server.Interrupted(err) || a.cfg.Info.EndsTransaction(err) {
			return errors.Is(err, errWaitOver) && !a.cfg.Info.RollbackOnTimeout && len(a.r.Keys) == 1 && !a.streams(), err
		}
	}
}

// unleased waits until no lease is live on those of the keys that have ever had
// one: once the open transaction has locked such a row, it could not give it
// back. It looks on another connection, since a plain read in the transaction
// could open its snapshot. done is for after the attempt that follows.
func (a *attempt) unleased(ctx context.Context) (done func(), err error) {
	done = func() {}
	for {
		lease, err := a.look(ctx)
		if err == nil && lease == nil {
			return done, nil
		}
		done()
		if err != nil {
			return nil, err
		}
		if a.r.Wait == 0 {
			return nil, lease
		}
		if done, err = a.await(ctx, lease); err != nil {
			return nil, err
		}
		a.keep(ctx)
	}
}

// keep keeps the transaction alive that a wait for a lease leaves idle.
func (a *attempt) keep(ctx context.Context) {
	if a.c.Silence() > a.cfg.TTL/4 {
		_ = a.c.Ping(ctx) // a lost one shows itself at its next statement
	}
}

// look returns a lease that is live on one of the keys; nil where it sees none,
// and where it cannot see, since the lock statement looks again.
func (a *attempt) look(ctx context.Context) (*leased, error) {
	names := slices.DeleteFunc(slices.Clone(a.names), func(name string) bool { return !a.cfg.Rows.Leased(name) })
	if len(names) == 0 {
		return nil, nil
	}
	rows, err := a.ask(ctx, a.leaseSQL(names))
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil || len(rows) == 0 {
		return nil, nil
	}
	return live(rows[0][0], rows[0]), nil
}

// ask runs a plain read on a connection of its own.
func (a *attempt) ask(ctx context.Context, text string) ([][]string, error) {
	c, err := a.control(ctx, max(a.r.Wait-time.Since(a.start), patience))
	if err != nil {
		return nil, err
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, text)
	if errors.Is(err, driver.ErrBadConn) {
		err = errors.New(err.Error()) // it is not the caller's connection
	}
	return rows, err
}

// control returns a connection of its own, within atMost: others may keep them
// all busy.
func (a *attempt) control(ctx context.Context, atMost time.Duration) (*pool.Conn, error) {
	timed, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	c, err := a.cfg.Control.Acquire(timed)
	switch {
	case err == nil || ctx.Err() != nil || timed.Err() == nil:
		return c, err
	case a.r.Wait == 0:
		return nil, lockerr.With(lockerr.ErrLocked, fmt.Errorf("for %v there was no connection to look on", atMost))
	}
	return nil, errWaitOver
}

// lock runs a lock statement and checks that every key's row was there, without
// a live lease. quiet means that no answer says so, too.
func (a *attempt) lock(ctx context.Context, text string, quiet bool) error {
	began := time.Now()
	rows, err := server.Query(ctx, a.c.Conn, text)
	if err != nil {
		return err
	}
	return a.granted(rows, began, quiet)
}

// lockPrepared is lock for a statement that is prepared, which also begins the
// transaction where that is not implicit. It returns pool.ErrUnprepared where there is
// none.
func (a *attempt) lockPrepared(ctx context.Context) error {
	text, args, quiet := a.preparedSQL()
	if text == "" {
		return pool.ErrUnprepared
	}
	began := time.Now()
	rows, err := a.c.QueryPrepared(ctx, text, args...)
	if err != nil {
		return err
	}
	return a.granted(rows, began, quiet)
}

// granted reads the answer of a lock statement that began then.
func (a *attempt) granted(rows [][]string, began time.Time, quiet bool) error {
	a.c.Touch()
	a.locked.Versioned = nil
	if quiet && rows == nil {
		return nil
	}
	if len(rows) < len(a.keys) {
		return errNoRow
	}
	if len(rows[0]) < 7 {
		return errForm
	}
	if !server.TakesWrites(rows[0][5:]) {
		return lockerr.With(lockerr.ErrUnsafe, server.ErrReadOnly)
	}
	if a.c.KnownID() == 0 { // while blocked, block may be reading it
		if err := a.c.SetID(rows[0][0]); err != nil {
			return err
		}
	}
	var found *leased
	for i, key := range a.keys {
		if rows[i][2] != "0" {
			a.cfg.Rows.NoteLeased(key.Name)
		}
		if rows[i][4] != "0" && !key.Shared {
			a.locked.Versioned = append(a.locked.Versioned, key.Name)
		}
		if lease := live(key.Name, rows[i]); lease != nil && found == nil {
			found = lease
		}
	}
	if found == nil {
		return nil
	}
	found.remaining = max(found.remaining-time.Since(began), 0) // it counts from when the statement began
	return found
}

// live reads the lease of key in a row of a statement's answer, whose second to
// fourth columns are leaseColumns.
func live(key string, row []string) *leased {
	if row[1] == "0" {
		return nil
	}
	micros, _ := strconv.ParseInt(row[1], 10, 64)
	return &leased{key, row[2], row[3], time.Duration(micros) * time.Microsecond}
}

// block locks the keys once nobody else has them, or until ctx ends.
func (a *attempt) block(ctx context.Context) error {
	err := a.queueUp(ctx)
	if err != nil || !a.streams() {
		return err
	}
	if err = a.lock(ctx, a.trySQL(), false); err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

// queueUp runs the blocking lock statement until it is answered or ctx ends.
// Then the statement is killed on the server, so that it cannot be granted the
// lock afterwards.
func (a *attempt) queueUp(ctx context.Context) error {
	deadline, _ := ctx.Deadline()
	bound := min(time.Until(deadline)+slack, max(a.cfg.TTL, time.Second))
	if len(a.r.Slots) > 0 {
		bound = slice
	}
	if t := a.cfg.ReadTimeout; t > 0 {
		bound = min(bound, t/2)
	}
	mark := pool.NewMark()
	text := a.waitSQL(a.keys, bound, mark)

	// The driver answers the end of a context by closing the socket, which
	// would leave the waiter on the server. So the statement runs apart from it.
	own, abandon := context.WithCancel(context.WithoutCancel(ctx))
	defer abandon()
	answer := make(chan error, 1)
	go func() { answer <- a.lock(own, text, false) }()
	select {
	case err := <-answer:
		return err
	case <-a.freed():
	case <-ctx.Done():
	}

	err, usable := a.stop(ctx, mark, answer, abandon)
	if !usable {
		id := a.c.KnownID()
		a.cleanup.Go(func() {
			kctx, cancel := context.WithTimeout(context.Background(), background)
			defer cancel()
			a.cfg.Control.KillQuery(kctx, id, mark) // the server's own bound ends it too
		})
	}
	cause := context.Cause(ctx)
	if cause == nil {
		cause = errFreed
	}
	switch {
	case usable && err == nil && (errors.Is(cause, errWaitOver) || errors.Is(cause, errFreed)):
		return nil // granted in the last moment, and the caller is still there
	case err == nil || server.Interrupted(err) || a.outrun(err) || !usable: // Galera calls a KILL a deadlock
		return cause
	default:
		return err
	}
}

// stop kills the statement marked mark until it has answered, within limits, and
// where that does not do, or not surely, its connection: that is not usable then.
// Before that it asks who was in the way.
func (a *attempt) stop(ctx context.Context, mark string, answer <-chan error, abandon func()) (err error, usable bool) {
	kctx := ctx // a caller who goes on has time
	if cause := context.Cause(ctx); cause != nil {
		limit := giveUp
		if errors.Is(cause, errWaitOver) {
			limit = giveUpCalmly
		}
		var cancel context.CancelFunc
		kctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), limit)
		defer cancel()
		a.holder = a.askHolder(kctx, a.c.KnownID())
	}
	late := false
	for {
		late = a.kill(kctx, mark) || late
		again := time.NewTimer(giveUp / 5)
		select {
		case err := <-answer:
			again.Stop()
			if late { // the KILL could hit the next statement
				_ = a.c.Close()
			}
			return err, !late
		case <-kctx.Done():
			again.Stop()
			abandon()
			err := <-answer
			_ = a.c.Close() // the statement may have been quicker
			return err, false
		case <-again.C: // the statement may not have reached the server before
		}
	}
}

// kill kills the statement marked mark. Who has time is not kept from the answer by
// a control connection that hangs.
func (a *attempt) kill(ctx context.Context, mark string) (late bool) {
	ctx, cancel := context.WithTimeout(ctx, 2*slice)
	defer cancel()
	return a.cfg.Control.KillQuery(ctx, a.c.KnownID(), mark)
}

// askHolder asks the server who has one of the keys, in one statement. It is a
// help, not a duty: where the server does not say, the answer is nil.
func (a *attempt) askHolder(ctx context.Context, waiter uint64) *lockerr.Holder {
	if a.blind.Load() || a.cfg.Info.MariaDB && waiter == 0 {
		return nil
	}
	bound := giveUpCalmly / 2
	if deadline, ok := ctx.Deadline(); ok { // half of the time is for the kill
		bound = min(bound, time.Until(deadline)/2)
	}
	c, err := a.control(ctx, giveUpCalmly)
	if err != nil {
		return nil
	}
	defer c.Release()
	rows, err := server.Query(ctx, c.Conn, a.holderSQL(a.names, waiter, max(bound, time.Millisecond)))
	if server.Denied(err) {
		a.blind.Store(true)
	}
	if err != nil || len(rows) == 0 {
		return nil
	}
	h := &lockerr.Holder{User: rows[0][1], Host: rows[0][2], Program: rows[0][3]}
	h.ConnectionID, _ = strconv.ParseUint(rows[0][0], 10, 64)
	if a.streams() && h.Host == "" { // the thread here that does what another node has done
		h = &lockerr.Holder{Program: "another node of the cluster"}
	}
	micros, _ := strconv.ParseInt(rows[0][4], 10, 64)
	h.Since = time.Duration(micros) * time.Microsecond
	return h
}

// label is what errors call the keys.
func (a *attempt) label() string {
	switch {
	case a.r.Label != "":
		return a.r.Label
	case len(a.r.Slots) > 0:
		return a.r.Slots[0]
	}
	return strings.Join(a.names, ", ")
}

// explain turns a failure into the error that callers see.
func (a *attempt) explain(ctx context.Context, err error) error {
	if errors.Is(err, driver.ErrBadConn) && ctx.Err() == nil { // the driver closes a connection whose context ends
		return driver.ErrBadConn // nothing is held: database/sql may try another connection
	}
	var lease *leased
	switch {
	case errors.As(err, &lease):
		a.holder = keyrow.HolderOf(lease.owner)
		err = lockerr.ErrLocked
	case errors.Is(err, errWaitOver):
		err = lockerr.ErrTimeout
	case ctx.Err() != nil:
		err = lockerr.With(lockerr.ErrTimeout, ctx.Err())
	case server.Deadlock(err):
		err = lockerr.With(lockerr.ErrDeadlock, err)
	case server.Refused(err):
		err = lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("the server takes no writes, so nothing can be locked on it: %w", err))
	case server.Denied(err):
		err = fmt.Errorf("%w; the account needs %s", err, Grants)
	}
	return &lockerr.Error{
		Op: "lock", Key: a.label(), Strategy: lockctx.StrategyRow,
		Holder: a.holder, Waited: time.Since(a.start), Err: err,
	}
}
