// Package optimistic keeps a key without locking it: a unit of work remembers
// the key's version before its first statement, and compares and sets it right
// before its COMMIT, in the same transaction. Where they differ somebody else
// has committed under the key meanwhile, and the unit is rolled back.
//
// # The version
//
// It is the token of the key's row in the lock table, which only grows: by one
// with each commit of a unit that keeps the key optimistically, with each lease,
// and with each commit of a row lock that has written something. The last of
// these costs row locks a statement, so they do it only on rows that are marked
// as versioned, which a key's row is from when it is first kept optimistically.
//
// Whoever remembers a version reads the row as it was last committed. What they
// read after that is at least as new, so all that the version does not count
// must be over by then:
//
//   - A row that is not marked is marked first. That waits for who has locked the
//     row, and all who lock it later count.
//   - A lease counts once, when it is granted, and its holder may commit many
//     times. So a live one is waited for.
//   - The holder of a lease that has run out can have a last COMMIT under way,
//     which its fence lets through by a share lock on the row. So the row of a
//     lease that was never given back is settled first, as if the lease had been
//     given back: that waits for the COMMIT.
//
// Marking and settling add one to the token, too. A clean-up may remove the row;
// the next one begins at or above its token, and not marked, so no version of the
// old one is ever one of the new.
//
// Where several servers take writes, or where reads go to replicas, what is decided
// on has to be read from the server that told the version, or from one that is no
// further behind. The commit is a write of the key's row, so that the nodes of a
// cluster refuse all but one of those that have compared the same version: by the
// comparison, or as a deadlock.
//
// # The commit
//
// The row is locked without waiting, since the transaction holds the rows that it
// has written, and whoever has locked the key's row may be about to ask for them.
// A row that somebody has locked, shared or not, is a conflict, too.
//
// Versions in the caller's own tables need none of this: see [Changed].
package optimistic

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
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
	// giveUp is how long a caller whose context has ended may be kept while its
	// statement is taken off the server.
	giveUp = 35 * time.Millisecond
	// pace is the time between two looks at the same lease.
	pace = 250 * time.Millisecond
)

// Grants is what the driver's account needs on the lock table.
const Grants = "SELECT, INSERT, UPDATE on the lock table"

// Config says where versions are kept.
type Config struct {
	Table     schema.Table
	Namespace string // goes in front of keys
	Info      server.Info
	Control   *pool.Pool // connections in autocommit, with an innodb_lock_wait_timeout of a few seconds
	Rows      *keyrow.Rows
	TTL       time.Duration // the longest wait for a lease without a look, and for the server's answer at a commit
	// Await returns when key's lease may have been given back, after atMost, or
	// with ctx's error. done lets the next waiter have its turn.
	Await func(ctx context.Context, key string, atMost time.Duration) (done func(), err error)
}

// Locker remembers, compares and sets versions on one server. It has nothing to
// close, and is safe for concurrent use.
type Locker struct {
	cfg  Config
	turn chan struct{} // holds a token while one of Control waits for a row: the others are for those who don't
}

// New returns a Locker on a table that is there.
func New(cfg Config) *Locker { return &Locker{cfg: cfg, turn: make(chan struct{}, 1)} }

// Version is the version of a key, as it was remembered.
type Version struct {
	key    string
	number uint64
}

// Given is a version that was carried outside of the process, in a form field
// for instance: nothing is read.
func (l *Locker) Given(key string, number uint64) *Version { return &Version{key, number} }

// Key returns the key.
func (v *Version) Key() string { return v.key }

// Number returns what was remembered; it is never 0. The commit of a unit of work
// that keeps the key optimistically makes the key's version one more.
func (v *Version) Number() uint64 { return v.number }

// Err returns nil: only the commit tells whether it is still the version.
func (v *Version) Err() error { return nil }

// Release returns nil: nothing is held.
func (v *Version) Release() error { return nil }

// Request says which keys, and how long to wait for who has a lease on one of
// them, or, the first time, has locked its row.
type Request struct {
	Keys []string      // sorted and unique
	Wait time.Duration // 0 fails at once
	// Waiting is called before the caller begins to wait. It may refuse, and it
	// may end the wait through the context that it returns; done follows. nil is
	// nobody to ask.
	Waiting func(context.Context) (ctx context.Context, done func(), err error)
}

// Remember returns the versions of the keys, in their order. It reads on conn,
// which has no transaction open, or where that is nil on a connection of its own:
// one plain SELECT where nobody has to be waited for. Where conn is not in
// autocommit that opens a transaction, with its snapshot. After an error nothing
// is held; driver.ErrBadConn, of conn alone, means that another one may be tried.
func (l *Locker) Remember(ctx context.Context, conn driver.Conn, r Request) ([]*Version, error) {
	a := &attempt{Locker: l, conn: conn, r: r, start: time.Now()}
	versions, err := a.remember(ctx)
	if err != nil {
		return nil, a.explain(ctx, err)
	}
	return versions, nil
}

// attempt is one call of Remember.
type attempt struct {
	*Locker
	conn    driver.Conn
	r       Request
	start   time.Time
	holder  *lockerr.Holder
	awaited state     // what await waited for last,
	since   time.Time // and since when
}

var (
	errWaitOver = errors.New("the wait is over")
	errNoRow    = errors.New("a key's row in the lock table has vanished")
)

func (a *attempt) remember(ctx context.Context) ([]*Version, error) {
	if err := a.cfg.Rows.Exist(ctx, a.r.Keys); err != nil {
		return nil, err
	}
	done := func() {} // ends the turn that await gave
	for vanished := 0; ; {
		states, err := a.read(ctx)
		done()
		done = func() {}
		switch {
		case (errors.Is(err, errNoRow) || server.Missing(err)) && vanished < 3:
			vanished++
			if err := a.cfg.Rows.Renew(ctx, a.r.Keys); err != nil {
				return nil, err
			}
			continue
		case err != nil:
			return nil, err
		}
		leased := slices.IndexFunc(states, func(s state) bool { return s.remaining > 0 })
		unsettled := slices.IndexFunc(states, func(s state) bool { return !s.settled })
		switch {
		case leased >= 0:
			if done, err = a.await(ctx, states[leased]); err != nil {
				return nil, err
			}
		case unsettled >= 0:
			if err := a.settle(ctx, states[unsettled].key); err != nil {
				return nil, err
			}
		default:
			versions := make([]*Version, len(states))
			for i, s := range states {
				versions[i] = &Version{s.key, s.token}
			}
			return versions, nil
		}
	}
}

// state is what a key's row says.
type state struct {
	key       string
	token     uint64
	settled   bool          // all who commit under the key count
	remaining time.Duration // how long its lease is still live; 0 where none is
	owner     string        // of the lease
}

// read returns the states of the keys, as they were last committed: also where
// the caller's session reads what is not.
func (a *attempt) read(ctx context.Context) (states []state, err error) {
	began, text := time.Now(), a.readSQL(a.r.Keys)
	var rows [][]string
	if a.conn != nil {
		rows, err = server.Query(ctx, a.conn, text)
	}
	if a.conn == nil || err == nil && len(rows) > 0 && rows[0][0] == readUncommitted {
		err = a.control(ctx, func(c *pool.Conn) (err error) {
			rows, err = server.Query(ctx, c.Conn, text)
			if err == nil && len(rows) > 0 && rows[0][0] == readUncommitted {
				if err = server.Exec(ctx, c.Conn, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"); err == nil {
					rows, err = server.Query(ctx, c.Conn, text)
				}
			}
			return err
		})
	}
	if err != nil {
		return nil, err
	}
	found := make(map[string]state)
	for _, row := range rows {
		s := state{key: row[1], settled: row[3] == "1", owner: row[5]}
		if s.token, err = strconv.ParseUint(row[2], 10, 64); err != nil {
			return nil, fmt.Errorf("reading a key's version: %w", err)
		}
		if micros, _ := strconv.ParseInt(row[4], 10, 64); micros > 0 { // it counts from when the statement began
			s.remaining = max(time.Duration(micros)*time.Microsecond-time.Since(began), 1)
		}
		found[s.key] = s
	}
	for _, key := range a.r.Keys {
		s, ok := found[key]
		if !ok {
			return nil, errNoRow
		}
		states = append(states, s)
	}
	return states, nil
}

// control runs f with a connection of our own. It never fails with
// driver.ErrBadConn, which is about the caller's.
func (l *Locker) control(ctx context.Context, f func(*pool.Conn) error) error {
	c, err := l.cfg.Control.Acquire(ctx)
	if err == nil {
		err = f(c)
		c.Release()
	}
	if errors.Is(err, driver.ErrBadConn) {
		err = errors.New(err.Error())
	}
	return err
}

// waiting returns a context that ends with the wait.
func (a *attempt) waiting(ctx context.Context) (context.Context, func(), error) {
	if a.r.Wait == 0 {
		return nil, nil, lockerr.ErrLocked
	}
	return queue.Wait(ctx, a.r.Wait-time.Since(a.start), errWaitOver, a.r.Waiting)
}

// await waits until a lease may have been given back. done is for after the look
// that follows.
func (a *attempt) await(ctx context.Context, lease state) (done func(), err error) {
	a.holder = keyrow.HolderOf(lease.owner)
	ctx, stop, err := a.waiting(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	if lease.key == a.awaited.key && lease.token == a.awaited.token { // woken for nothing: not over and over
		select {
		case <-time.After(min(pace-time.Since(a.since), lease.remaining)):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	a.awaited, a.since = lease, time.Now()
	// The caller's connection is idle meanwhile, and the server may end one that is for a TTL.
	done, err = a.cfg.Await(ctx, lease.key, max(min(lease.remaining, a.cfg.TTL/3), time.Millisecond))
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return done, err
}

// settle marks key's row, and takes a lease off it that has run out. After nil
// the row has to be read again.
func (a *attempt) settle(ctx context.Context, key string) error {
	err := a.control(ctx, func(c *pool.Conn) error { return server.Exec(ctx, c.Conn, a.settleSQL(key, " NOWAIT")) })
	if !server.Locked(err) && !server.Deadlock(err) {
		return err
	}
	a.holder = nil // it is not a lease's any more
	ctx, done, err := a.waiting(ctx)
	if err != nil {
		return err
	}
	defer done()
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-time.After(pace): // somebody waits for another key; this one may be free by now
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	err = a.control(ctx, func(c *pool.Conn) error { return a.block(ctx, c, key) })
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case server.Interrupted(err) || server.Deadlock(err): // by the server's own bound: see how things are
		return nil
	}
	return err
}

// block settles key's row once nobody has locked it, which it waits for in the
// server. At the end of ctx it is killed there.
func (a *attempt) block(ctx context.Context, c *pool.Conn, key string) error {
	mark := pool.NewMark()
	own, abandon := context.WithCancel(context.WithoutCancel(ctx))
	defer abandon()
	answer := make(chan error, 1)
	go func() { answer <- server.Exec(own, c.Conn, a.settleSQL(key, "")+" /* mysqllock "+mark+" */") }()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
	}
	limit, cancel := context.WithTimeout(context.Background(), giveUp)
	defer cancel()
	late := a.cfg.Control.KillQuery(limit, c.KnownID(), mark)
	select {
	case err := <-answer:
		if late {
			c.Taint() // the KILL could hit the next statement
		}
		return err
	case <-limit.Done(): // the server's own bound ends it, and settling does no harm at any time
		abandon()
		return <-answer
	}
}

// explain turns a failure of Remember into the error that callers see.
func (a *attempt) explain(ctx context.Context, err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		return driver.ErrBadConn // nothing is held: database/sql may try another connection
	}
	switch {
	case errors.Is(err, errWaitOver):
		err = lockerr.ErrTimeout
	case ctx.Err() != nil:
		err = lockerr.With(lockerr.ErrTimeout, ctx.Err())
	}
	failed := failure("lock", strings.Join(a.r.Keys, ", "), err)
	failed.Waited = time.Since(a.start)
	if errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) {
		failed.Holder = a.holder
	}
	return failed
}

// failure is the error that callers see. It is never driver.ErrBadConn, which
// database/sql would take for the failure of a connection of its own.
func failure(op, key string, err error) *lockerr.Error {
	switch {
	case errors.Is(err, driver.ErrBadConn):
		err = errors.New(err.Error())
	case server.Refused(err):
		err = lockerr.With(lockerr.ErrUnsafe, fmt.Errorf("the server takes no writes, so no version can be set on it: %w", err))
	case server.Denied(err):
		err = fmt.Errorf("%w; the account needs %s", err, Grants)
	}
	return &lockerr.Error{Op: op, Key: key, Strategy: lockctx.StrategyOptimistic, Err: err}
}

// Commit compares the versions and sets the next ones, all or none, in the
// transaction that is about to commit on conn. It is one statement, which waits
// for nobody, or for a second where the table's definition is being changed.
// Where one of them is not the key's version any more, or somebody has locked its
// row, the error is lockerr.ErrConflict, in the second case lockerr.ErrLocked,
// too. After any error the transaction must be rolled back.
func (l *Locker) Commit(ctx context.Context, conn driver.Conn, versions []*Version) error {
	versions = slices.Clone(versions)
	slices.SortFunc(versions, func(a, b *Version) int { return strings.Compare(a.key, b.key) })
	versions = slices.CompactFunc(versions, func(a, b *Version) bool { return *a == *b })
	if len(versions) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.TTL)
	defer cancel()
	set, err := server.Affected(ctx, conn, l.commitSQL(versions))
	const changedSinceSnapshot = 1020 // by innodb_snapshot_isolation
	switch {
	case err == nil && set == int64(2*len(versions)):
		return nil
	case err == nil:
		err = lockerr.With(lockerr.ErrConflict, errors.New("it has another version"))
	case server.Locked(err):
		err = lockerr.With(lockerr.ErrConflict, lockerr.With(lockerr.ErrLocked, err))
	case server.Number(err) == changedSinceSnapshot:
		err = lockerr.With(lockerr.ErrConflict, err)
	}
	var keys []string
	for _, v := range versions {
		keys = append(keys, v.key)
	}
	return failure("commit", strings.Join(slices.Compact(keys), ", "), err)
}
