// Package gocronlock has a locker and an elector for github.com/go-co-op/gocron/v2, in the
// MySQL or MariaDB that an application already has. Of many processes with the same
// schedule, one runs each job, or one runs all jobs.
//
//	locker := gocronlock.NewLocker(db, gocronlock.MinHold(30*time.Second))
//	scheduler, err := gocron.NewScheduler(gocron.WithDistributedLocker(locker))
//
// gocron gives a job no context that knows of the lock: what the job writes is not
// fenced. A job that must not run twice at a time under any circumstances does its work
// in [mysqllock.Do], with another key and [lockctx.Lease].
package gocronlock

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-co-op/gocron/v2"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/leader"
	"github.com/mysqllock/mysqllock/lockctx"
)

// DefaultTTL is how long a job of a process that has died stays locked, unless [TTL] says
// otherwise.
const DefaultTTL = 30 * time.Second

// Locker gives the jobs of a schedule leases. It is a gocron.Locker.
type Locker struct {
	db      *sql.DB
	ttl     time.Duration
	minHold time.Duration
}

var _ gocron.Locker = (*Locker)(nil)

// Option changes a [Locker].
type Option func(*Locker)

// TTL is how long a job stays locked after its process has died, at least a second. As
// long as the process lives, the lock is renewed, however long the job runs, also after it
// was removed, or while its scheduler shuts down.
func TTL(d time.Duration) Option { return func(l *Locker) { l.ttl = d } }

// MinHold keeps a job locked for d after it has ended. Set it longer than the clocks of
// the machines differ, and shorter than the job's interval: otherwise a machine whose clock
// is late runs a short job again.
func MinHold(d time.Duration) Option { return func(l *Locker) { l.minHold = d } }

// NewLocker returns a locker. db is opened with the driver "mysqllock". A job's name is
// its key: give each job one, by gocron.WithName, the same in all processes.
func NewLocker(db *sql.DB, opts ...Option) *Locker {
	l := &Locker{db: db, ttl: DefaultTTL}
	for _, opt := range opts {
		opt(l)
	}
	return l
}

// Lock locks a job, or fails at once: then gocron leaves the run to the other process, and
// tells gocron.AfterLockError. errors.Is(err, mysqllock.ErrLocked) says that another
// process has the job; other errors say why none may have run it.
func (l *Locker) Lock(ctx context.Context, key string) (gocron.Lock, error) {
	// gocron ends ctx as it removes the job, or shuts down, while the job may go on: after
	// the lock is granted that must not end the lease.
	held, cancel := context.WithCancel(context.WithoutCancel(ctx))
	granted := context.AfterFunc(ctx, cancel)
	hold, err := mysqllock.Acquire(held, l.db, key, lockctx.Lease(l.ttl), lockctx.NoWait(), lockctx.MinHold(l.minHold))
	if !granted() && err == nil {
		err = errors.Join(ctx.Err(), hold.Rollback())
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return lock{hold, cancel}, nil
}

type lock struct {
	hold   *mysqllock.Hold
	cancel context.CancelFunc // of its context
}

// Unlock gives the lock back. ErrLost says that it had been lost before, so that another
// process may have run the job meanwhile.
func (l lock) Unlock(context.Context) error {
	defer l.cancel()
	return l.hold.Release()
}

// ErrNotLeader is the answer of [Elector.IsLeader] in all processes but one.
var ErrNotLeader = errors.New("mysqllock: another process is the leader")

// Elector has one process run all jobs. It is a gocron.Elector.
type Elector struct {
	leads  atomic.Bool
	cancel context.CancelFunc
	done   sync.WaitGroup
	err    error // of leader.Run; read it after done
}

var _ gocron.Elector = (*Elector)(nil)

// NewElector begins to campaign for the leadership of key, with the options of
// [leader.Run], until [Elector.Close] or the end of ctx.
func NewElector(ctx context.Context, db *sql.DB, key string, opts ...leader.Option) *Elector {
	e := &Elector{}
	ctx, e.cancel = context.WithCancel(ctx)
	e.done.Go(func() {
		e.err = leader.Run(ctx, db, key, func(ctx context.Context) error {
			e.leads.Store(true)
			<-ctx.Done()
			e.leads.Store(false)
			return nil
		}, opts...)
	})
	return e
}

// IsLeader returns nil in the process that leads, and ErrNotLeader elsewhere. A process that has stood
// still for longer than the TTL can return nil for a moment more, until it has heard of the loss: what
// must never run twice takes a lock of its own in the job.
func (e *Elector) IsLeader(context.Context) error {
	if e.leads.Load() {
		return nil
	}
	return ErrNotLeader
}

// Close ends the campaign, and gives the leadership back. Shut the scheduler down before:
// another process leads within moments. The error is that of [leader.Run]: why this
// process could not campaign any more, before Close was called.
func (e *Elector) Close() error {
	e.cancel()
	e.done.Wait()
	return e.err
}
