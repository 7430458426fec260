// Package strategy is the seam between units of work and the ways in which keys are kept locked. A strategy is one
// type with one interface, and has a part in four moments of a transaction:
//
//	before BEGIN    Take      the strategy takes locks and versions that lie outside of the transaction
//	after BEGIN     –         for row locks alone, which lie inside: see rowlock.Locker's Begin and Join
//	with COMMIT     Check     the strategy makes sure that locks are still held, and compares versions
//	after the end   Release   each grant is given back; Next is the version that COMMIT has set
//
// A strategy's Traits say which locks join, so that hardly any code outside the strategy's own package asks which
// strategy it has. How to add a strategy: see "a strategy" in docs/architecture.md.
package strategy

import (
	"context"
	"database/sql/driver"
	"sync"
	"time"

	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Traits say how a strategy keeps a key, as far as others need to know.
type Traits struct {
	Name string

	// Table: the lock table keeps the key. All such strategies that exclude do so on the same key, whichever of
	// them a caller uses. Each other strategy, also one with a table of its own, is a space of its own.
	Table bool

	// Inside: the lock is a part of the caller's transaction, and ends with it.
	Inside bool

	// Excludes: others are kept out while the lock is held. A strategy that does not exclude remembers a version,
	// and its commit compares.
	Excludes bool

	// HearsClose: Take ends by itself when the handle is closed.
	HearsClose bool
}

// Waiting is called before a caller begins to wait. It may refuse the wait, or end it later through
// the context that it returns. done is called when the wait is over.
type Waiting = func(context.Context) (ctx context.Context, done func(), err error)

// Request asks for locks outside of a transaction.
type Request struct {
	// Resources is one resource if the strategy excludes, else all resources that are wanted, sorted.
	Resources []Resource
	Wait      time.Duration // 0 fails at once if somebody else has a key
	Wants     Waiting       // called before each wait; nil for none

	// Lost is called once, on a goroutine of its own, when the lock may be lost.
	Lost func()

	// Lends lends the connection on which the caller goes on; nil for none.
	Lends *Lender
}

// Lender lends the connection on which the caller of Take goes on. That is its session, on which a transaction begins
// with the first statement; or, outside of transactions, a connection of the application. A strategy may take a lock
// or read a version there, as long as it need not wait.
type Lender struct {
	// Get returns the connection, with its turn. No transaction is open on it. Take calls Get at most once. If Get
	// fails there is no connection, and Take's caller says why.
	Get func(ctx context.Context) (*pool.Conn, error)

	// Put gives the connection back. Take calls Put before it waits, and before it fails. If a transaction may be
	// open on the connection, or a lock held, Take taints the connection first.
	Put func()
}

// Strategy keeps locks on one server. It is safe for concurrent use.
type Strategy interface {
	// Take takes locks or versions outside of transactions, all or nothing, in the order of the resources. Errors
	// name keys by the resources' rows. Take is not called for strategies inside transactions.
	Take(ctx context.Context, r Request) ([]Grant, error)

	// Check returns what goes out with the COMMIT of the transaction on c, a session, to make sure that held is
	// still held. Errors name keys by the resources' rows. After an error the transaction must be rolled back.
	Check(ctx context.Context, c *pool.Conn, held []Grant, how Commit) (Check, error)

	// Holder asks the server who has the lock that row keeps, without waiting for anybody. It returns nil if nobody
	// has the lock, or this Strategy has it, or if the server does not say before ctx ends.
	Holder(ctx context.Context, row string) *lockerr.Holder
}

// Grant is a lock, or a version, that Take has returned. It may have the methods of
// [Fenced], [Lapsing], [Versioned], [Verified], [Slotted] and [Queued], too.
type Grant interface {
	Key() string // the row that keeps the grant
	Err() error  // nil while the grant is held
	Release() error
}

// Fenced is a grant with a fencing token, and an expiry.
type Fenced interface {
	Token() uint64
	Expiry() time.Time
}

// Lapsing is a grant that ends within its TTL once it is not renewed any more.
type Lapsing interface{ Lapse() }

// Versioned is a version that was remembered. Next is the version that the commit has set. Moved reports whether
// somebody has set another version since.
type Versioned interface {
	Number() uint64
	Next() Grant
	Moved(ctx context.Context) (bool, error)
}

// Verified is a version that may have been read on another connection than the application's next read. Verify fails
// with ErrConflict if conn, on which the application is about to read, may show data from before the version.
type Verified interface {
	Verify(ctx context.Context, conn driver.Conn) error
}

// Attached is a grant that has a part on the connection of the transaction: that transaction began with the
// grant. Detach removes that part from the connection, and does nothing if there is none. The caller has the turn of
// the connection, and calls Detach before anybody else uses it. After an error the connection must be closed.
type Attached interface{ Detach() error }

// Slotted is a grant of one of several slots.
type Slotted interface{ Slot() int }

// Queued is a grant with a place in the queue of this process.
type Queued interface{ Ticket() *queue.Ticket }

// Commit says what a transaction has done that is about to commit, and what becomes of its grants.
type Commit struct {
	Wrote bool // the transaction may have written
	Ends  bool // the grants end with the transaction, so their release may go out with the COMMIT
}

// Check is what goes out with a COMMIT; [pool.Conn.Send] says which texts may. The zero value is nothing.
type Check struct {
	// Before are statements of the transaction, in front of COMMIT: guards, which fail if the check fails
	// ([server.Flavour.Guard]), and changes that are to be committed. None begins with COMMIT or ROLLBACK.
	Before []string

	// After are statements behind COMMIT, which free locks that end with the transaction. Each begins with SELECT.
	After []string

	// Failed explains the error err with which Before[i] has failed. Nothing was committed then. If the connection
	// was lost, err has no number of the server's.
	Failed func(ctx context.Context, i int, err error) error

	// Again reports whether Before[i], which has failed with err, is to be sent again, with all that is behind it.
	// The transaction is as it was. A nil Again stands for no.
	Again func(i int, err error) bool

	// Ended is called once, with how the COMMIT has ended; nil for nothing to do.
	Ended func(o Outcome)

	// Unsure is called if the answer to COMMIT is lost, before the locks are given back. It returns when the server has
	// done with the COMMIT; nil for nothing to do.
	Unsure func(ctx context.Context)
}

// Outcome is how the COMMIT of a [Check] has ended.
type Outcome int

const (
	Failed        Outcome = iota // nothing is committed
	Unknown                      // the transaction may be committed, as after any COMMIT that was not answered
	OnlyCommitted                // the transaction is committed, and the statements behind COMMIT may not have run
	Committed                    // the transaction is committed, and all statements behind COMMIT have run
)

// Config says where a strategy keeps its locks. Each strategy uses the fields that it needs.
type Config struct {
	keyrow.Config // Control is for all statements beside the caller's: making rows, asking, KILL

	Rows  *keyrow.Rows  // of the lock table
	Owner string        // the name of this process, for errors
	TTL   time.Duration // the longest wait in one statement, and how long a connection that holds something may be silent
	Queue *queue.Queue  // where the callers of this process queue; strategies whose locks exclude each other share it

	// Conns are the strategy's own connections, which began with its Setup(TTL). None of them waits for a row for
	// longer than a few seconds.
	Conns *pool.Pool

	// ReadTimeout is the base driver's own limit on each read from the connections on which the strategy waits; 0
	// means that there is none, or that it is not known. A caller that waits asks again after half of it, and is
	// then the last of the waiters in the server. With a known limit, statements on the strategy's own
	// connections cost less, since no context has to bound them.
	ReadTimeout time.Duration

	// A lock is handed over from caller to caller at most HandOvers times, and for at most
	// HandOverTime; then other processes have their turn.
	HandOvers    int
	HandOverTime time.Duration

	Unsafe bool // also lock where locks do not exclude, such as on clusters whose nodes do not see each other's locks

	// Await waits until key's lease may have been released, for at most atMost, or fails when ctx ends. since is when
	// the caller began to wait. Then the caller has the turn to ask, until done.
	Await func(ctx context.Context, key string, since time.Time, atMost time.Duration) (done func(), err error)
}

// Running are the calls of a strategy, and its work in the background, until the strategy is closed. Between Enter
// and Done a call may start more work with Go: Wait waits for that, too.
type Running struct {
	sync.WaitGroup
	Ctx  context.Context // ends, with the cause ErrClosed, when the strategy is closed
	stop context.CancelCauseFunc
	mu   sync.Mutex // nobody enters while Ctx ends
}

// NewRunning returns a Running of a strategy that is not closed.
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

// Stop ends Ctx, and lets nobody enter any more. It reports whether this is the first call. Wait returns when all
// calls and all work have ended.
func (r *Running) Stop() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	first := r.Ctx.Err() == nil
	r.stop(lockerr.ErrClosed)
	return first
}

// Until returns a context that also ends, with the cause ErrClosed, when the strategy is closed.
func (r *Running) Until(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, end := context.WithCancelCause(ctx)
	stop := context.AfterFunc(r.Ctx, func() { end(lockerr.ErrClosed) })
	return ctx, func(cause error) {
		stop()
		end(cause)
	}
}
