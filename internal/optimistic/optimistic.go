// Package optimistic protects a key without a lock: a unit of work remembers the key's
// version before its first statement. Right before its COMMIT, and in the same
// transaction, it compares the version and sets the next one. If the version has changed,
// another unit has committed under the key meanwhile, and this one is rolled back.
//
// # The version
//
// The version is the token of the key's row in the lock table. It only grows: by one with
// each commit of an optimistic unit, with each lease, and with each commit under a row
// lock that has written something. The last costs a statement, so row locks do it only if
// the row is marked as versioned. The first optimistic use of a key marks its row.
//
// Remember reads the row as it was last committed. What the unit reads after that is at
// least as new. So everything that the version does not count must be over by then:
//
//   - A row that is not marked is marked first. That waits for the holder of a row lock;
//     later row locks count.
//   - A lease counts once, when it is granted, but its holder may commit many times. So
//     Remember waits for the end of a live lease.
//   - The holder of an expired lease can still be running its last COMMIT. Its fence
//     holds a shared lock on the row. So Remember first prepares the row of a lease that
//     was not released, as if it had been released: that waits for the COMMIT.
//
// Marking and preparing also add one to the token. A clean-up may remove the row. The next
// row of the key begins at or above the old token, and not marked, so no old version is
// ever a version of the new row.
//
// If several servers take writes, or if reads go to replicas, the unit must read from the
// server that returned the version, or from one that is at least as new. The commit is a
// write of the key's row. So of several nodes that have compared the same version, the
// cluster lets one commit; the others fail by the comparison, or with a deadlock.
//
// # The commit
//
// Versions and COMMIT are one statement, where the server has a way for that. It locks the
// row without waiting: the transaction has locked the rows that it wrote, and the holder of
// the key's row may be about to ask for them, which would be a deadlock. So a locked row is
// a conflict, too, also if the lock is shared.
//
// Versions in your own tables need none of this: see [Changed].
package optimistic

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Grants is what the driver's account needs on the lock table.
const Grants = "SELECT, INSERT, UPDATE on the lock table"

var terms = strategy.Terms{
	Strategy: hint.StrategyOptimistic, Grants: Grants, Writes: "it cannot set a version",
	Limits: strategy.Limits{GiveUp: strategy.Usual.GiveUp, Calmly: strategy.Usual.GiveUp},
}

// Locker remembers, compares and sets versions on one server. It need not be closed, and is
// safe for concurrent use.
type Locker struct {
	cfg  strategy.Config
	turn chan struct{} // holds a token while a connection of Control waits for a row; the others never wait
}

// New returns a Locker on a table that exists. cfg.TTL is also the longest wait for the server's
// answer at a commit.
func New(cfg strategy.Config) *Locker {
	return &Locker{cfg: cfg, turn: make(chan struct{}, 1)}
}

// Traits of versions, for those who choose among strategies.
var Traits = strategy.Traits{Name: hint.StrategyOptimistic, Table: true}

// Take remembers the versions of the resources, in one statement. Those that were given
// are not read.
func (l *Locker) Take(ctx context.Context, r strategy.Request) (versions []strategy.Grant, err error) {
	versions = make([]strategy.Grant, len(r.Resources))
	ask := Request{Wait: r.Wait, Waiting: r.Wants, Begin: r.Begin}
	var at []int
	for i, p := range r.Resources {
		if p.Version != 0 {
			versions[i] = l.Given(p.Row, p.Version)
			continue
		}
		at = append(at, i)
		ask.Keys = append(ask.Keys, p.Row)
	}
	if len(at) == 0 {
		return versions, nil
	}
	remembered, err := l.Remember(ctx, r.Conn, ask)
	if err != nil {
		return nil, err
	}
	for i, v := range remembered {
		versions[at[i]] = v
	}
	return versions, nil
}

// Check leaves it to the COMMIT itself to compare the versions with those that are, and to
// set new ones, if anything may have been written.
func (l *Locker) Check(_ context.Context, c *pool.Conn, held []strategy.Grant, wrote bool) (strategy.Check, error) {
	if !wrote {
		return strategy.Check{}, nil
	}
	versions := make([]*Version, len(held))
	for i, h := range held {
		versions[i] = h.(*Version)
	}
	return strategy.Check{
		Commit: func(ctx context.Context) (done, unknown bool, err error) { return l.Commit(ctx, c, versions) },
		Fence:  func(ctx context.Context) error { return l.Compare(ctx, c.Conn, versions) },
	}, nil
}

// Holder returns nil: whoever remembers a version keeps nobody out.
func (l *Locker) Holder(context.Context, string) *lockerr.Holder { return nil }

// Version is a remembered version of a key.
type Version struct {
	l      *Locker
	key    string
	number uint64
}

// Given returns a version that was read before, perhaps by another process: one from a form field,
// for example. It reads nothing.
func (l *Locker) Given(key string, number uint64) *Version { return &Version{l, key, number} }

// Key returns the key.
func (v *Version) Key() string { return v.key }

// Number returns the remembered number; it is never 0. The commit of the unit of work adds
// one to the key's version.
func (v *Version) Number() uint64 { return v.number }

// Err returns nil: only the commit tells whether the version is still current.
func (v *Version) Err() error { return nil }

// Release returns nil: nothing is held.
func (v *Version) Release() error { return nil }

// Verify looks whether the node that conn leads to has applied the version: another node
// may have told of it. On one server there is nothing to ask. The transaction shows what
// it read here from then on, or what is newer.
func (v *Version) Verify(ctx context.Context, conn driver.Conn) error {
	if v.l.cfg.Info.Topology == "" {
		return nil
	}
	rows, err := server.Query(purpose.Named(ctx, purpose.Fence, hint.StrategyOptimistic, v.key), conn, v.l.readSQL([]string{v.key}))
	if err != nil {
		return err
	}
	if len(rows) == 1 {
		s, err := newState(rows[0], time.Now())
		if err != nil || s.token >= v.number {
			return err
		}
	}
	return lockerr.With(lockerr.ErrConflict, errors.New("the node that this connection leads to does not show yet what was committed under the key; try again"))
}

// Next returns the version that a commit has set.
func (v *Version) Next() strategy.Grant { return v.l.Given(v.key, v.number+1) }

// Moved reads the version as it was last committed, on a connection of our own: the caller's
// may show an older one.
func (v *Version) Moved(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(purpose.Named(ctx, purpose.Fence, hint.StrategyOptimistic, v.key), v.l.cfg.TTL)
	defer cancel()
	a := attempt{Locker: v.l, r: Request{Keys: []string{v.key}}}
	rows, err := a.rows(ctx)
	return err == nil && (len(rows) != 1 || rows[0][2] != strconv.FormatUint(v.number, 10)), err
}

// Request says which keys, and how long to wait for the end of a lease on one of them, or,
// at the first use of a key, for the end of a row lock.
type Request struct {
	Keys []string      // sorted and unique
	Wait time.Duration // 0 fails at once
	// Begin is the caller's transaction, which may begin in the statement that reads the
	// versions, on the connection that Remember is given. It may be nil.
	Begin   *strategy.Beginning
	Waiting strategy.Waiting // nil for nobody to ask
}

// Remember returns the versions of the keys, in their order. If it need not wait, it runs one
// plain SELECT: on c, which has no open transaction, or if c is nil, on a connection of
// its own. If c is not in autocommit, the SELECT opens a transaction with its snapshot.
// After an error nothing is held, and no transaction has begun. driver.ErrBadConn is only
// about conn, and means that the caller may try another one.
func (l *Locker) Remember(ctx context.Context, c *pool.Conn, r Request) ([]*Version, error) {
	ctx = purpose.Named(ctx, purpose.Take, hint.StrategyOptimistic, r.Keys...)
	a := &attempt{
		Attempt: strategy.Attempt{Key: strings.Join(r.Keys, ", "), Wait: r.Wait, Waiting: r.Waiting, Start: time.Now()},
		Locker:  l, conn: c, r: r,
	}
	a.Once = true
	defer a.Finish()
	versions, err := a.remember(ctx)
	if err != nil {
		return nil, a.explain(ctx, err)
	}
	return versions, nil
}

// attempt is one call of Remember.
type attempt struct {
	strategy.Attempt
	*Locker
	conn *pool.Conn
	r    Request
}

func (a *attempt) remember(ctx context.Context) ([]*Version, error) {
	if err := a.cfg.Rows.Exist(ctx, a.r.Keys); err != nil {
		return nil, err
	}
	a.cfg.Rows.ProvideCommit(ctx)
	for {
		states, err := a.read(ctx)
		a.EndTurn()
		switch {
		case a.Vanished(err):
			if err := a.cfg.Rows.Renew(ctx, a.r.Keys); err != nil {
				return nil, err
			}
			continue
		case err != nil:
			return nil, err
		}
		leased := slices.IndexFunc(states, func(s state) bool { return s.remaining > 0 })
		unprepared := slices.IndexFunc(states, func(s state) bool { return !s.prepared })
		switch {
		case leased >= 0:
			s := states[leased]
			lease := strategy.Leased{Key: s.key, Token: strconv.FormatUint(s.token, 10), Owner: s.owner, Remaining: s.remaining}
			if err := a.AwaitLease(ctx, &a.cfg, &lease); err != nil {
				return nil, err
			}
		case unprepared >= 0:
			if err := a.prepareRow(ctx, states[unprepared].key); err != nil {
				return nil, err
			}
		default:
			versions := make([]*Version, len(states))
			for i, s := range states {
				versions[i] = a.Given(s.key, s.token)
			}
			return versions, nil
		}
	}
}

// state is the state of a key's row.
type state struct {
	key       string
	token     uint64
	prepared  bool          // every commit under the key changes the version
	remaining time.Duration // the remaining time of its lease; 0 without a live one
	owner     string        // of the lease
}

// read returns the states of the keys as they were last committed, also if the caller's
// session reads uncommitted rows.
func (a *attempt) read(ctx context.Context) (states []state, err error) {
	ctx, cancel := context.WithTimeout(ctx, pool.AnswerTime)
	defer cancel()
	version, err := a.begun(ctx)
	switch {
	case err != nil:
		return nil, err
	case version != 0:
		return []state{{key: a.r.Keys[0], token: version, prepared: true}}, nil
	}
	began := time.Now()
	rows, err := a.rows(ctx)
	if err != nil {
		return nil, err
	}
	found := make(map[string]state)
	for _, row := range rows {
		s, err := newState(row, began)
		if err != nil {
			return nil, err
		}
		found[s.key] = s
	}
	for _, key := range a.r.Keys {
		s, ok := found[key]
		if !ok {
			return nil, keyrow.ErrNoRow
		}
		states = append(states, s)
	}
	return states, nil
}

// rows returns the answer of readSQL, on the caller's connection if it can be trusted.
func (a *attempt) rows(ctx context.Context) (rows [][]string, err error) {
	text := a.readSQL(a.r.Keys)
	if a.conn != nil {
		if rows, err = server.Query(ctx, a.conn.Conn, text); err != nil || !slices.ContainsFunc(rows, untrusted) {
			return rows, err
		}
	}
	err = a.control(ctx, func(c *pool.Conn) (err error) {
		rows, err = server.Query(ctx, c.Conn, text)
		if err == nil && len(rows) > 0 && rows[0][0] == readUncommitted {
			if err = server.Exec(ctx, c.Conn, "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"); err == nil {
				rows, err = server.Query(ctx, c.Conn, text)
			}
		}
		return err
	})
	return rows, err
}

// begun reads the version of a key and begins the caller's transaction in one statement. It is
// 0 if the server has no way for that, or if something has to be done before.
func (a *attempt) begun(ctx context.Context) (version uint64, err error) {
	if a.r.Begin == nil || a.conn == nil {
		return 0, nil
	}
	block := a.beginBlock(a.r.Keys)
	if block.Text == "" {
		return 0, nil
	}
	unused := a.r.Begin.Use(ctx, func(c *pool.Conn) (left strategy.State) {
		version, left, err = a.beginOn(ctx, c, block)
		return left
	})
	return version, cmp.Or(unused, err)
}

// beginOn is begun on c.
func (a *attempt) beginOn(ctx context.Context, c *pool.Conn, block pool.Block) (version uint64, left strategy.State, err error) {
	rows, err := c.QueryBlock(ctx, block)
	switch {
	case err == nil && rows == nil:
		return 0, strategy.Vacant, nil
	case err == nil && len(rows) == 1:
		version, err = strconv.ParseUint(rows[0][0], 10, 64)
	case err == nil:
		err = errors.New("the server has begun a transaction, and does not tell the key's version")
	case !a.cfg.Info.Blocks && (server.Missing(err) || server.Denied(err)): // dropped, or not ours to execute
		a.cfg.Procedures.Set(a.cfg.Table.BeginProcedure(), false)
		return 0, strategy.Vacant, nil
	case errors.Is(err, driver.ErrBadConn): // nothing was sent
		return 0, strategy.Unsure, err
	}
	if err == nil {
		return version, strategy.Begun, nil
	}
	return 0, strategy.Abandoned(ctx, c, terms.GiveUp+a.cfg.TTL), err // it may have begun
}

// newState reads a row of the answer to a statement that was sent at began.
func newState(row []string, began time.Time) (s state, err error) {
	s = state{key: row[1], prepared: row[3] == "1", owner: row[5]}
	if s.token, err = strconv.ParseUint(row[2], 10, 64); err != nil {
		return state{}, fmt.Errorf("reading a key's version: %w", err)
	}
	if micros, _ := strconv.ParseInt(row[4], 10, 64); micros > 0 { // the time since the statement began counts
		s.remaining = max(time.Duration(micros)*time.Microsecond-time.Since(began), 1)
	}
	return s, nil
}

// untrusted reports that a row, read on the caller's connection, must be read again on one
// of our own: it may not be committed, or it has a lease, whose remaining time depends on
// the session's clock, which the application may have set.
func untrusted(row []string) bool { return row[0] == readUncommitted || row[5] != "" }

// control runs f with a control connection. Its error never matches driver.ErrBadConn,
// which is only for the caller's connection.
func (l *Locker) control(ctx context.Context, f func(*pool.Conn) error) error {
	c, err := l.cfg.Control.Acquire(ctx)
	if err == nil {
		err = f(c)
		c.Release()
	}
	return server.HideBadConn(err)
}

// prepareRow marks key's row as versioned, and removes an expired lease from it. After nil the
// row must be read again.
func (a *attempt) prepareRow(ctx context.Context, key string) error {
	err := a.control(ctx, func(c *pool.Conn) error { return server.Exec(ctx, c.Conn, a.prepareRowSQL(key, " NOWAIT")) })
	if !server.Locked(err) && !server.Deadlock(err) {
		return err
	}
	a.Heard.Store(true)
	a.HeldBy = nil // it is not the holder of a lease
	ctx, done, err := a.Patient(ctx)
	if err != nil {
		return err
	}
	defer done()
	select {
	case a.turn <- struct{}{}:
		defer func() { <-a.turn }()
	case <-time.After(strategy.Pace): // the connection waits for another key; this key may be free by now
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	err = a.control(ctx, func(c *pool.Conn) error {
		w := strategy.Waiter{Limits: terms.Limits, Conn: c, Mark: pool.NewMark(), Control: a.cfg.Control}
		// The server's own limit ends what is not killed; preparing the row does no harm at any time.
		_, _, err := w.Run(ctx, func(own context.Context) error {
			return server.Exec(own, c.Conn, "/* mysqllock "+w.Mark+" */ "+a.prepareRowSQL(key, ""))
		})
		return err
	})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case server.Interrupted(err) || server.Deadlock(err): // by the server's own limit: read again
		return nil
	}
	return err
}

// explain turns a failure of Remember into the error that callers see.
func (a *attempt) explain(ctx context.Context, err error) error {
	if errors.Is(err, driver.ErrBadConn) {
		return driver.ErrBadConn // nothing is held, so database/sql may try another connection
	}
	return a.Explain(ctx, terms, err, nil)
}

// Commit compares the versions, sets the next ones, and commits the transaction on c, in one
// statement: see [strategy.Check]. It waits for no row, and for the server's answer as long as ctx
// goes on. The errors are those of Compare.
func (l *Locker) Commit(ctx context.Context, c *pool.Conn, versions []*Version) (done, unknown bool, err error) {
	ctx = purpose.With(ctx, purpose.Fence, hint.StrategyOptimistic, versions, (*Version).Key)
	versions = distinct(versions)
	next := make([]keyrow.Version, len(versions))
	for i, v := range versions {
		if v.number == 0 || i > 0 && v.key == versions[i-1].key {
			return false, false, nil // Compare says why not
		}
		next[i] = keyrow.Version{Key: v.key, Is: v.number}
	}
	if len(next) == 0 {
		return false, false, nil
	}
	switch outcome, err := l.cfg.Rows.Commit(ctx, c, next); outcome {
	case server.NoWay:
		return false, false, nil
	case server.Committed, server.OnlyCommitted:
		return true, false, nil
	case server.CheckFailed:
		return false, false, conflict(versions, errOtherVersion)
	default:
		return false, outcome == server.Unknown, conflict(versions, err)
	}
}

// distinct returns the versions sorted by their keys, each once.
func distinct(versions []*Version) []*Version {
	versions = slices.Clone(versions)
	slices.SortFunc(versions, func(a, b *Version) int { return strings.Compare(a.key, b.key) })
	return slices.CompactFunc(versions, func(a, b *Version) bool { return a.key == b.key && a.number == b.number })
}

// Compare compares the versions and sets the next ones, all or none, in the transaction
// that is about to commit on conn. It is one statement, which waits for no row; it waits
// up to a second while the table's definition is being changed. If a key has another
// version, the error matches lockerr.ErrConflict. If a key's row is locked, it matches
// lockerr.ErrConflict and lockerr.ErrLocked. After any error the transaction must be
// rolled back.
func (l *Locker) Compare(ctx context.Context, conn driver.Conn, versions []*Version) error {
	ctx = purpose.With(ctx, purpose.Fence, hint.StrategyOptimistic, versions, (*Version).Key)
	versions = distinct(versions)
	if len(versions) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, l.cfg.TTL)
	defer cancel()
	set, err := server.Affected(ctx, conn, l.compareSQL(versions))
	if err == nil && set == int64(2*len(versions)) {
		return nil
	}
	if err == nil {
		err = errOtherVersion
	}
	return conflict(versions, err)
}

var errOtherVersion = errors.New("the key has another version: another unit of work has committed under it")

// conflict is the error of a commit with versions that was not answered, or refused.
func conflict(versions []*Version, err error) error {
	switch {
	case errors.Is(err, errOtherVersion), server.Changed(err):
		if len(versions) == 1 && versions[0].number > 0 {
			err = fmt.Errorf("%w; it was version %d when it was remembered", err, versions[0].number)
		}
		err = lockerr.With(lockerr.ErrConflict, err)
	case server.Locked(err):
		err = lockerr.With(lockerr.ErrConflict, lockerr.With(lockerr.ErrLocked, err))
	}
	var keys []string
	for _, v := range versions {
		keys = append(keys, v.key)
	}
	return terms.Failure("commit", strings.Join(slices.Compact(keys), ", "), terms.Refusal(err))
}
