// Package strategy is the seam between units of work and the ways in which keys are
// kept locked. A strategy is one type behind one interface with four moments of a
// transaction:
//
//	before BEGIN    Take      what lies outside of the transaction is taken
//	after BEGIN     –         row locks alone lie inside: see rowlock.Locker's Begin and Join
//	with COMMIT     Check     what is held is still held; versions are compared
//	after the end   Release   and Next, of what is held
//
// Its Traits say what joins what, so that hardly anything outside a strategy's own package
// asks which one it is. What there is to do for another one: "a strategy" in
// docs/architecture.md.
package strategy

import (
	"context"
	"database/sql/driver"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Traits say how a strategy keeps a key, as far as others need to know.
type Traits struct {
	Name string

	// Table: the lock table keeps the key. All strategies of the table that exclude
	// do so on the same key, whichever of them a caller uses; each without the table, also
	// one with a table of its own, is a space of its own.
	Table bool

	// Inside: the lock is a part of the caller's transaction, and ends with it.
	Inside bool

	// Excludes: others are kept out while it is held. A strategy that does not
	// exclude remembers what was there, and its commit compares.
	Excludes bool

	// HearsClose: Take ends by itself when the handle is closed.
	HearsClose bool
}

// Waiting is called before a caller begins to wait. It may refuse the wait, or end it later through
// the context that it returns. done is called when the wait is over.
type Waiting = func(context.Context) (ctx context.Context, done func(), err error)

// Request asks for locks outside of a transaction.
type Request struct {
	// Resources are one where the strategy excludes, else all that are wanted, sorted.
	Resources []Resource
	Wait      time.Duration // 0 fails at once if somebody else has a key
	Wants     Waiting       // nil for nobody to ask

	// Lost is called once, on a goroutine of its own, when the lock may be lost.
	Lost func()

	// Lends is the connection on which the caller goes on; nil for none.
	Lends *Lender
}

// Lender lends the connection on which the caller of Take goes on: its session, on which a
// transaction begins with the first statement, or, outside of transactions, one of the
// application's. A strategy may take a lock or read a version there, as long as it need not wait.
type Lender struct {
	// Get returns the connection, with its turn. No transaction is open on it. Take calls it
	// at most once. After an error there is none, and it is for the caller to say why.
	Get func(ctx context.Context) (*pool.Conn, error)

	// Put gives it back, before Take waits, or fails: Take keeps no connection then. A connection
	// on which a transaction may be open, or a lock held, is tainted before.
	Put func()
}

// Strategy keeps locks on one server. It is safe for concurrent use.
type Strategy interface {
	// Take takes what lies outside of transactions, all or nothing, in the order of
	// the resources. The keys in an error are the resources' rows. It is not called for
	// strategies inside transactions.
	Take(ctx context.Context, r Request) ([]Grant, error)

	// Check says what makes sure, right before the transaction on c, a session, commits, that
	// what is held is still held. The keys in an error are the resources' rows. After an error
	// the transaction must be rolled back.
	Check(ctx context.Context, c *pool.Conn, held []Grant, how Commit) (Check, error)

	// Holder asks the server who has what row keeps, without waiting for anybody. It returns nil if
	// nobody has it or the strategy itself has, or if the server does not say before ctx ends.
	Holder(ctx context.Context, row string) *lockerr.Holder
}

// Grant is a lock, or a version, that Take has returned. It may have the methods of
// [Fenced], [Lapsing], [Versioned], [Verified], [Slotted] and [Queued], too.
type Grant interface {
	Key() string // the row that keeps it
	Err() error  // nil while it is held
	Release() error
}

// Fenced is what has a fencing token, and an expiry.
type Fenced interface {
	Token() uint64
	Expiry() time.Time
}

// Lapsing is what ends within its TTL if it is not renewed any more.
type Lapsing interface{ Lapse() }

// Versioned is a version that was remembered. Next is the one that the commit has set. Moved
// reports whether somebody has set another one since.
type Versioned interface {
	Number() uint64
	Next() Grant
	Moved(ctx context.Context) (bool, error)
}

// Verified is what may have been read on another connection than the application reads on. Verify
// fails with ErrConflict if conn, on which the application is about to read, may show what was there
// before that.
type Verified interface {
	Verify(ctx context.Context, conn driver.Conn) error
}

// Attached is what the connection of the transaction that began with it carries a part of.
// Detach takes that part off, and does nothing if there is none. The caller has the turn of the
// connection, and calls Detach before anybody else uses it. After an error the connection
// must be closed.
type Attached interface{ Detach() error }

// Slotted is one of several slots.
type Slotted interface{ Slot() int }

// Queued is what has a place in the process's own queue.
type Queued interface{ Ticket() *queue.Ticket }

// Commit says what a transaction has done that is about to commit.
type Commit struct {
	Wrote bool // it may have written
	Ends  bool // what is held ends with it, so its release may be a part of the COMMIT
}

// Check is what goes out with a COMMIT: see [pool.Conn.Send], also for what a text may be. The
// zero value is nothing.
type Check struct {
	// Before are statements of the transaction, in front of COMMIT: guards, which fail where
	// the check does ([server.Flavour.Guard]), and what the COMMIT is to change. None begins
	// with COMMIT or ROLLBACK.
	Before []string

	// After are statements behind COMMIT, which free what ends with the transaction. Each
	// begins with SELECT.
	After []string

	// Failed explains the error err with which Before[at] has failed. Nothing was committed then.
	// err has no number of the server's if the connection was lost.
	Failed func(ctx context.Context, at int, err error) error

	// Again reports whether Before[at], which has failed with err, is to be sent again, with all behind it: the
	// transaction is as it was. nil is no.
	Again func(at int, err error) bool

	// Ended is called once with how the COMMIT has ended. nil is nothing to do.
	Ended func(o Outcome)

	// Unsure is to be called if the answer to COMMIT is lost, before the locks are
	// given back: it returns when the server has done with it. nil is nothing to do.
	Unsure func(ctx context.Context)
}

// Outcome is how the COMMIT of a [Check] has ended.
type Outcome int

const (
	Failed        Outcome = iota // nothing was committed
	Unknown                      // it may be committed, as after any COMMIT that was not answered
	OnlyCommitted                // it is committed, and what comes behind COMMIT may not be done
	Committed                    // it is committed, and all that comes behind COMMIT is done
)

// Config says where a strategy keeps its locks. Each strategy uses what it needs of it.
type Config struct {
	keyrow.Config // Control is for all statements beside the caller's: making rows, asking, KILL

	Rows  *keyrow.Rows  // of the lock table
	Owner string        // the name of this process, for errors
	TTL   time.Duration // the longest wait in one statement, and how long a connection that holds something may be silent
	Queue *queue.Queue  // where the callers of this process queue; strategies whose locks exclude each other share it

	// Conns are the connections of the strategy's own, which began with its Setup(TTL). None of
	// them waits longer than a few seconds for a row.
	Conns *pool.Pool

	// ReadTimeout is the driver's own limit on each read from the connections on which the strategy
	// waits; 0 means that there is none, or that it is not known. A caller asks again after half of
	// it, and is then the last of the waiters in the server. With a known limit statements on
	// connections of the strategy's own cost less, since no context has to bound them.
	ReadTimeout time.Duration

	// A lock is handed over from caller to caller at most HandOvers times, and for at most
	// HandOverTime; then other processes have their turn.
	HandOvers    int
	HandOverTime time.Duration

	Unsafe bool // also work where the strategy cannot keep its promise, such as on clusters whose nodes do not see each other's locks

	// Await returns when key's lease may have been released, after atMost, or with ctx's error. The
	// caller has waited since then. done lets the next waiter have its turn.
	Await func(ctx context.Context, key string, since time.Time, atMost time.Duration) (done func(), err error)
}

// Running are the calls of a strategy, and their work in the background, until the strategy is
// closed. Between Enter and Done a call may have Go do something that Close waits for.
type Running struct {
	sync.WaitGroup
	Ctx  context.Context // ends, because of ErrClosed, when the strategy is closed
	stop context.CancelCauseFunc
	mu   sync.Mutex // nobody enters while Ctx ends
}

// NewRunning returns a Running that goes on.
func NewRunning() *Running {
	r := new(Running)
	r.Ctx, r.stop = context.WithCancelCause(context.Background())
	return r
}

// Enter begins a call, unless the strategy is closed. Done ends it.
func (r *Running) Enter() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.Ctx.Err() != nil {
		return lockerr.ErrClosed
	}
	r.Add(1)
	return nil
}

// Background runs f, unless the strategy is closed.
func (r *Running) Background(f func(context.Context)) {
	if r.Enter() == nil {
		go func() {
			defer r.Done()
			f(r.Ctx)
		}()
	}
}

// Stop ends Ctx, and lets nobody enter any more. It reports whether it was the first to do so.
// Wait returns when all has ended.
func (r *Running) Stop() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.Ctx.Err() == nil
	r.stop(lockerr.ErrClosed)
	return first
}

// Until returns a context that also ends, because of ErrClosed, when the strategy is closed.
func (r *Running) Until(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.Ctx, func() { end(lockerr.ErrClosed) })
	return ctx, func(cause error) {
		stop()
		end(cause)
	}
}
