// Package leader elects one process of many to do what one has to do alone: to plan
// work, to feed an outbox, to run migrations. It is built on leases (see
// [lockctx.Lease]), so what the leader writes to the database is fenced: a process that
// was paused or cut off, and has lost its leadership meanwhile, cannot commit.
//
//	err := leader.Run(ctx, db, "planner", func(ctx context.Context) error {
//		for {
//			if err := plan(ctx, db); err != nil { // with this ctx: fenced
//				return err
//			}
//			select {
//			case <-ctx.Done():
//				return nil
//			case <-time.After(time.Minute):
//			}
//		}
//	})
//
// # What holds, and what does not
//
// The leader's context ends before the server lets anybody else lead. A leader that does
// not look at its context, or stands still, goes on running beside the next one, but
// commits nothing: each commit with its context checks the lease, right before COMMIT,
// on the same connection. What it does outside of the database is not protected, unless
// the system there refuses an older [mysqllock.Token] than the newest that it has seen.
//
// [Run] gives the lease back as soon as the leader's function has returned, and another
// process leads within a few round trips; in up to 0.3 s if the server was restarted, or the
// leader's connection was lost, since it began to lead. If the leading process dies, or its
// host vanishes, another one leads once the TTL is over.
//
// # At SIGTERM
//
// Without a handler Go ends the process at SIGTERM, as a crash does: nobody leads for the rest
// of the TTL. So let the signal end the context of Run, and return from main only when Run has
// returned:
//
//	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
//	defer stop()
//	err := leader.Run(ctx, db, "planner", lead)
//
// To call db.Close gives the leadership back, too.
package leader

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// DefaultTTL is how long nobody leads after the leading process has died, also of a SIGTERM that
// it did not handle, unless [TTL] says otherwise.
const DefaultTTL = 15 * time.Second

const (
	// After it has resigned, a process lets others go first.
	resigned = time.Second
	// The longest pause before the next try, after a campaign has failed.
	longestPause = time.Second
)

// Option changes how [Run] campaigns.
type Option func(*campaign)

// TTL is how long a leader keeps its leadership without being able to renew it, at least
// one second. A leader renews it every third of d. So d is the longest time for which
// nobody leads after the leading process has died, and a leader that stands still for d
// is replaced. Less is a bad hint, which Run returns.
func TTL(d time.Duration) Option { return func(c *campaign) { c.ttl = d } }

// OnChange calls f when this process begins to lead, and when it ends: when its context
// does, for whatever reason, or when its function returns. Calls do not overlap, and
// none comes after Run has returned. f must return soon: the leader's function starts only
// when it has.
func OnChange(f func(Change)) Option { return func(c *campaign) { c.changed = f } }

// OnError calls f with the errors of campaigns that Run tries again: the server is
// restarted, or cannot be reached, or takes no writes at the moment. Run does not log.
func OnError(f func(error)) Option { return func(c *campaign) { c.failed = f } }

// Change is what [OnChange] is told.
type Change struct {
	Leads bool      // this process leads from now on
	Token uint64    // of this leadership; each has a greater one than all before
	Since time.Time // when this process began to lead, by its own clock
	Err   error     // why it has ended; nil if the function returned nil, or ctx ended
}

// Run campaigns for the leadership of key until ctx ends, and calls lead whenever this
// process leads. All processes that call Run with the same key, on handles that share
// locks, are candidates; one of them leads. db is opened with the driver "mysqllock".
// While it waits, and while it leads, Run uses connections of the driver's own, not of
// the pool.
//
// lead gets a context that ends when the leadership may be lost, and when ctx ends; then
// lead has to return. What it runs on db with that context is fenced. Transactions in it
// are what they are without: each commits by itself.
//
//   - If the leadership was lost, Run campaigns again, whatever lead returns.
//   - If lead returns nil before, this process has resigned: Run gives the leadership
//     back, lets others go first for a second, and campaigns again.
//   - If lead returns an error, or panics, Run gives the leadership back and passes that
//     on. It does not campaign again: a program that wants to go on calls Run again, or
//     has lead deal with its errors.
//   - If ctx ends, Run waits for lead, gives the leadership back, and returns nil. If the
//     process is to end anyway, this makes way for the next leader at once: derive ctx from
//     [os/signal.NotifyContext], and wait for Run before main returns.
//
// Otherwise Run returns an error only for what does not pass: a bad key or TTL
// (a *[mysqllock.Error]), another driver, a closed handle, a missing privilege. What may
// pass goes to [OnError], and Run tries again, at least once a second.
func Run(ctx context.Context, db *sql.DB, key string, lead func(context.Context) error, opts ...Option) error {
	c := &campaign{db: db, key: key, lead: lead, ttl: DefaultTTL, changed: func(Change) {}, failed: func(error) {}}
	for _, opt := range opts {
		opt(c)
	}
	ctx = lockctx.Without(ctx) // a leadership is no part of the caller's unit of work
	failures := 0
	for ctx.Err() == nil {
		pause := resigned
		elected, wasLost, err := c.term(ctx)
		switch {
		case ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err()) || errors.Is(err, mysqllock.ErrLost) || !elected):
			return nil
		case wasLost:
			failures, pause = 0, 0
		case elected && err == nil:
			failures = 0
		case elected || c.lasts(err):
			return err
		default:
			c.failed(err)
			failures++
			pause = rand.N(min(50*time.Millisecond<<min(failures, 5), longestPause))
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	return nil
}

// leadership tells observers what the lease is.
func leadership(h *hint.Hint) { h.Leadership = true }

// campaign is what one call of Run is about.
type campaign struct {
	db      *sql.DB
	key     string
	lead    func(context.Context) error
	ttl     time.Duration
	changed func(Change)
	failed  func(error)
}

// term waits for the leadership, and leads. elected says that lead was called; then err is
// what lead has returned, or, with wasLost, how the leadership was lost.
func (c *campaign) term(ctx context.Context) (elected, wasLost bool, err error) {
	hold, err := mysqllock.Acquire(ctx, c.db, c.key, lockctx.Lease(c.ttl), lockctx.WaitForever(), leadership)
	if err != nil {
		return false, false, err
	}
	// Whatever ends lead, a panic and Goexit too, makes way for others.
	defer func() { _ = hold.Release() }()
	inside := hold.Context()
	began := Change{Leads: true, Token: hold.Token(), Since: time.Now()}
	c.changed(began)
	var once sync.Once
	ended := func(err error) {
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			err = nil
		}
		once.Do(func() { c.changed(Change{Token: began.Token, Since: began.Since, Err: err}) })
	}
	// A lead that does not look at its context may go on for long: the change is told
	// when the context ends.
	lost := func() error { // how the leadership was lost: an ErrLost of lead may be that of another lock
		if cause := context.Cause(inside); ctx.Err() == nil && errors.Is(cause, mysqllock.ErrLost) {
			return cause
		}
		return nil
	}
	stop := context.AfterFunc(inside, func() { ended(lost()) })
	defer func() { stop(); ended(err) }()
	err = c.lead(inside)
	gone := lost()
	stop() // the release ends the context, too
	// A commit may have found out before the context has ended; the release always does.
	if released := hold.Release(); gone == nil && errors.Is(released, mysqllock.ErrLost) {
		gone = released
	}
	if gone != nil {
		return true, true, gone
	}
	return true, false, err
}

// lasts reports whether a failed campaign will fail again, as long as nobody changes the
// program or its account.
func (c *campaign) lasts(err error) bool {
	if _, err := mysqllock.Stats(c.db); errors.Is(err, errors.ErrUnsupported) { // a handle of another driver
		return true
	}
	hint := lockctx.With(context.Background(), c.key, lockctx.Lease(c.ttl))
	if !lockctx.Has(hint, c.key) || errors.Is(err, mysqllock.ErrClosed) {
		return true
	}
	var refused *mysql.MySQLError
	if !errors.As(err, &refused) {
		return false
	}
	return slices.Contains(lasting, refused.Number)
}

// lasting are the numbers of the errors that last.
var lasting = []uint16{
	1044, // ER_DBACCESS_DENIED_ERROR
	1045, // ER_ACCESS_DENIED_ERROR
	1049, // ER_BAD_DB_ERROR: no such database
	1142, // ER_TABLEACCESS_DENIED_ERROR
	1143, // ER_COLUMNACCESS_DENIED_ERROR
	1146, // ER_NO_SUCH_TABLE
	1227, // ER_SPECIFIC_ACCESS_DENIED_ERROR
}

// Leader is the process that leads.
type Leader struct {
	Host    string // as it calls itself; empty if it has a lockOwner of another form
	PID     int
	Program string
	Token   uint64
	Expires time.Time // when the leadership ends unless it is renewed, by the server's clock
}

// Current returns who leads, as the server shows it at the moment. ok is false if nobody
// does, or if the lock table does not exist. It is an error if the account may not read it, so that nobody knows. The
// Inspector says in which lock table and namespace to look.
func Current(ctx context.Context, in *inspect.Inspector, key string) (leads Leader, ok bool, err error) {
	shown, err := in.Snapshot(ctx, inspect.Filter{Keys: []string{key}})
	if err != nil {
		return Leader{}, false, err
	}
	for _, lock := range shown.Locks {
		if lock.Strategy != "lease" || lock.Slot > 0 {
			continue
		}
		for _, h := range lock.Holders.List {
			if token, ok := lock.Token.Get(); ok && !h.Left {
				return Leader{Host: h.Host, PID: h.PID, Program: h.Program, Token: token, Expires: lock.Expires}, true, nil
			}
		}
	}
	if shown.NoTable { // nobody has stood for election yet
		return Leader{}, false, nil
	}
	if hidden, _ := shown.Incomplete("lease"); hidden {
		return Leader{}, false, errors.New("mysqllock: who leads is not known: the account cannot read the leases;" +
			" give it SELECT on the lock table")
	}
	return Leader{}, false, nil
}
