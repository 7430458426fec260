// Package gooselock has a locker for github.com/pressly/goose/v3, on the MySQL or MariaDB
// that is migrated. Of many processes that start at the same time one migrates, and the
// others wait until it has done, however long that takes.
//
//	locker := gooselock.NewLocker(db)
//	provider, err := goose.NewProvider(goose.DialectMySQL, db, migrations, goose.WithLocker(locker))
//
// What goose runs knows nothing of the lock, so migrations of every kind run. If the lock
// is lost, goose goes on, and its error is ErrLost in the end. Without a locker, in
// [mysqllock.Do] with a lease and goose.WithIsolateDDL(true), each statement is checked,
// and the loss ends it: see docs/moving.md.
package gooselock

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"time"

	"github.com/pressly/goose/v3/lock"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// DefaultKey is the key that is locked, unless [Key] says otherwise.
const DefaultKey = "goose"

// DefaultWait is the longest wait for another process that migrates, unless [Wait] says
// otherwise.
const DefaultWait = time.Hour

// DefaultTTL is how long the lock of a process that has died stays, unless [TTL] says
// otherwise.
const DefaultTTL = 30 * time.Second

// Locker takes a lease for the time in which goose migrates. It is a lock.Locker for
// goose.WithLocker, and a lock.SessionLocker for goose.WithSessionLocker, whose
// connection it leaves alone.
type Locker struct {
	db        *sql.DB
	key       string
	ttl, wait time.Duration

	mu   sync.Mutex
	hold *mysqllock.Hold
}

var (
	_ lock.Locker        = (*Locker)(nil)
	_ lock.SessionLocker = (*Locker)(nil)
)

// Option changes a [Locker].
type Option func(*Locker)

// Key is for several sets of migrations in one database that may run at the same time.
func Key(key string) Option { return func(l *Locker) { l.key = key } }

// TTL is how long the lock stays after its process has died, at least a second. As long as
// the process lives, the lock is renewed.
func TTL(d time.Duration) Option { return func(l *Locker) { l.ttl = d } }

// Wait is the longest wait for another process that migrates: longer than the slowest
// migration. The end of the context ends it before.
func Wait(d time.Duration) Option { return func(l *Locker) { l.wait = d } }

// NewLocker returns a locker. db is opened with the driver "mysqllock"; goose's handle may
// be another one.
func NewLocker(db *sql.DB, opts ...Option) *Locker {
	l := &Locker{db: db, key: DefaultKey, ttl: DefaultTTL, wait: DefaultWait}
	for _, opt := range opts {
		opt(l)
	}
	return l
}

// Lock waits for the lock. mysqllock.ErrTimeout says that another process still has it.
func (l *Locker) Lock(ctx context.Context, _ *sql.DB) error {
	hold, err := mysqllock.Acquire(ctx, l.db, l.key, lockctx.Lease(l.ttl), lockctx.Wait(l.wait))
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.hold = hold
	return nil
}

// Unlock gives the lock back. mysqllock.ErrLost says that it had been lost before, so that
// another process may have migrated at the same time.
func (l *Locker) Unlock(context.Context, *sql.DB) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hold == nil {
		return errors.New("mysqllock: goose unlocks what it has not locked")
	}
	err := l.hold.Release()
	l.hold = nil
	return err
}

// SessionLock is Lock.
func (l *Locker) SessionLock(ctx context.Context, _ *sql.Conn) error { return l.Lock(ctx, nil) }

// SessionUnlock is Unlock.
func (l *Locker) SessionUnlock(ctx context.Context, _ *sql.Conn) error { return l.Unlock(ctx, nil) }
