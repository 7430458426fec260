// Package cronlock has a wrapper for the jobs of github.com/robfig/cron/v3: of many
// processes with the same schedule, one runs the job at each tick.
//
//	c := cron.New()
//	once := cronlock.Once(ctx, db, "report", cronlock.AtLeast(30*time.Second), cronlock.AtMost(10*time.Minute))
//	c.AddJob("@hourly", cron.NewChain(once).Then(report))
//
// The lock is a lease in the MySQL or MariaDB that the application already has. cron gives
// a job no context: what it writes is not fenced, and it cannot be stopped. [OnceFunc] gives
// it one: a job that has lost its lock cannot commit what it writes with that context.
package cronlock

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// DefaultTTL is how long a job of a process that has died stays locked, unless [TTL] says
// otherwise.
const DefaultTTL = 30 * time.Second

// Option changes [Once] and [OnceFunc].
type Option func(*once)

// AtLeast keeps the job locked for d after it has ended. Set it longer than the clocks of
// the machines differ, and shorter than the job's interval: otherwise a machine whose clock
// is late runs a short job again at the same tick.
func AtLeast(d time.Duration) Option { return func(o *once) { o.atLeast = d } }

// AtMost ends the lock d after it was granted, even if the job still runs, so that a job
// that hangs does not stop all later ones. Without it a job keeps its lock for as long as
// it runs. At least a second.
func AtMost(d time.Duration) Option { return func(o *once) { o.atMost = d } }

// TTL is how long the job stays locked after its process has died, at least a second.
func TTL(d time.Duration) Option { return func(o *once) { o.ttl = d } }

// OnSkip calls f whenever this process does not run the job. errors.Is(err,
// mysqllock.ErrLocked) says that another process has it; other errors say why it could not
// be locked: then maybe no process has run it. Without OnSkip nobody is told.
func OnSkip(f func(error)) Option { return func(o *once) { o.skip = f } }

// OnError calls f with the errors of a job that this process has run: of the function of
// [OnceFunc], and [mysqllock.ErrLost] if the lock was lost before the job had ended, so that
// another process may have run it, too. Without OnError nobody is told.
func OnError(f func(error)) Option { return func(o *once) { o.failed = f } }

type once struct {
	ctx                  context.Context
	db                   *sql.DB
	key                  string
	ttl, atLeast, atMost time.Duration
	skip, failed         func(error)
}

// Once returns a wrapper that runs a job under the lock on key, or not at all if another
// process has it. db is opened with the driver "mysqllock". No job begins after the end of
// ctx; the lock of one that runs by then ends with the TTL, or with the job.
func Once(ctx context.Context, db *sql.DB, key string, opts ...Option) cron.JobWrapper {
	o := newOnce(ctx, db, key, opts)
	return func(job cron.Job) cron.Job {
		return cron.FuncJob(func() {
			o.run(func(context.Context) error {
				job.Run()
				return nil
			})
		})
	}
}

// OnceFunc returns a job that calls f under the lock on key, as [Once] does. f's context ends
// when the lock may be lost, and with ctx. What f writes with it on db commits only as long as
// the lock is held.
func OnceFunc(ctx context.Context, db *sql.DB, key string, f func(context.Context) error, opts ...Option) cron.Job {
	o := newOnce(ctx, db, key, opts)
	return cron.FuncJob(func() { o.run(f) })
}

func newOnce(ctx context.Context, db *sql.DB, key string, opts []Option) *once {
	o := &once{ctx: ctx, db: db, key: key, ttl: DefaultTTL, skip: func(error) {}, failed: func(error) {}}
	for _, opt := range opts {
		opt(o)
	}
	return o
}

// run runs a job once, if it can be locked.
func (o *once) run(job func(context.Context) error) {
	hold, err := mysqllock.Acquire(o.ctx, o.db, o.key,
		lockctx.Lease(o.ttl), lockctx.NoWait(), lockctx.MinHold(o.atLeast), lockctx.MaxHold(o.atMost))
	if err != nil {
		o.skip(err)
		return
	}
	defer func() { _ = hold.Release() }() // after a panic, too
	err = job(hold.Context())
	if lost := hold.Release(); lost != nil && !errors.Is(err, mysqllock.ErrLost) {
		err = errors.Join(err, lost)
	}
	if err != nil {
		o.failed(err)
	}
}
