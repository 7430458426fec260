// Package optimistic protects a key without a lock: a unit of work remembers the key's
// version before its first statement. Right before its COMMIT, and in the same
// transaction, it compares the version and sets the next one. If the version has changed,
// another unit has committed under the key meanwhile, and the unit that compares is rolled back.
//
// # The version
//
// The version is the token of the key's row in the lock table. It only grows: by one with each commit of an optimistic
// unit, with each lease, and with each commit under a row lock that has written something. A commit under a row lock needs
// a statement for that, so it raises the version only if the row is marked as versioned. The first optimistic use of a
// key marks its row.
//
// Remember reads the row as it was last committed. Later reads of the unit are at least as new. So every transaction that
// the version does not count must be over by then:
//
//   - A row that is not marked is marked first. The marking waits for the holder of a row lock; commits under later row
//     locks count.
//   - A lease counts once, when it is granted, but its holder may commit many times. So
//     Remember waits for the end of a live lease.
//   - The holder of an expired lease can still be running its last COMMIT. Its fence holds a shared lock on the row. So
//     Remember first prepares the row of a lease that was not released, as if the lease had been released: the
//     preparation waits for the COMMIT.
//
// Marking and preparing also add one to the token. A clean-up may remove the row. The next
// row of the key begins at or above the old token, and not marked, so no old version is
// ever a version of the new row.
//
// If several servers take writes, or if reads go to replicas, the unit must read from the server that returned the version,
// or from one that is at least as new. The commit is a write of the key's row. So if several nodes have compared the same
// version, the cluster lets one of them commit; the others fail by the comparison, or with a deadlock.
//
// # The commit
//
// In front of COMMIT one statement compares the versions and sets the next ones, and a guard stops the COMMIT unless the
// statement has changed all of them. The statement locks the rows without waiting: the transaction has locked the rows that
// it wrote, and the holder of the key's row may be about to ask for these, so a wait could be a deadlock. So a locked row
// is a conflict, too, also if the lock is shared.
//
// Versions in your own tables need none of this: see [Changed].
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

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/keyrow"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
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

// New returns a Locker on a table that exists. cfg.TTL is also the longest wait for the server's answer at a commit.
func New(cfg strategy.Config) *Locker {
	return &Locker{cfg: cfg, turn: make(chan struct{}, 1)}
}

// Traits are the traits of versions.
var Traits = strategy.Traits{Name: hint.StrategyOptimistic, Table: true}

// Take remembers the versions of the resources, in one statement. It does not read versions that the caller has given.
func (l *Locker) Take(ctx context.Context, r strategy.Request) (versions []strategy.Grant, err error) {
	versions = make([]strategy.Grant, len(r.Resources))
	ask := Request{Wait: r.Wait, Waiting: r.Wants, Lends: r.Lends}
	var unread []int
	for i, resource := range r.Resources {
		if resource.Version != 0 {
			versions[i] = l.Given(resource.Row, resource.Version)
			continue
		}
		unread = append(unread, i)
		ask.Keys = append(ask.Keys, resource.Row)
	}
	if len(unread) == 0 {
		return versions, nil
	}
	remembered, err := l.Remember(ctx, ask)
	if err != nil {
		return nil, err
	}
	for i, v := range remembered {
		versions[unread[i]] = v
	}
	return versions, nil
}

// Check compares the versions, and sets new ones, if the transaction may have written anything. If a key has another
// version, the error matches lockerr.ErrConflict. If a key's row is locked, it matches lockerr.ErrConflict and
// lockerr.ErrLocked. No statement waits for a row, but one may wait for up to a second while the table's definition is
// being changed. Behind compareSQL comes, for one version:
//
//	SELECT /*+ MAX_EXECUTION_TIME(4294967295) */ IF(ROW_COUNT() = 2, 1, (SELECT 1 UNION ALL SELECT 2)) LIMIT 1
func (l *Locker) Check(_ context.Context, _ *pool.Conn, held []strategy.Grant, how strategy.Commit) (check strategy.Check, err error) {
	if !how.Wrote || len(held) == 0 {
		return check, nil
	}
	versions := make([]*Version, len(held))
	for i, h := range held {
		versions[i] = h.(*Version)
	}
	versions = distinct(versions)
	check.Before = []string{l.compareSQL(versions), l.cfg.Info.Guard(fmt.Sprintf("ROW_COUNT() = %d", 2*len(versions)))}
	check.Failed = func(_ context.Context, _ int, err error) error { return conflict(versions, err) }
	return check, nil
}

// Holder returns nil: a remembered version keeps nobody out.
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

// Verify looks whether the node that conn leads to has applied the version, which another node may have told. On one server
// there is nothing to ask. From then on the transaction shows the state that it has read here, or a newer one.
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
	return lockerr.With(lockerr.ErrConflict, errors.New("the node that this connection leads to does not show yet"+
		" what was committed under the key; try again"))
}

// Next returns the version that a commit has set.
func (v *Version) Next() strategy.Grant { return v.l.Given(v.key, v.number+1) }

// Moved reads the version as it was last committed, on one of the driver's own connections: the caller's connection may
// show an older version.
func (v *Version) Moved(ctx context.Context) (bool, error) {
	ctx, cancel := server.Within(purpose.Named(ctx, purpose.Fence, hint.StrategyOptimistic, v.key), v.l.cfg.TTL)
	defer cancel()
	a := attempt{l: v.l, r: Request{Keys: []string{v.key}}}
	rows, err := a.rows(ctx)
	return err == nil && (len(rows) != 1 || rows[0][2] != strconv.FormatUint(v.number, 10)), err
}

// Request says which keys, and how long to wait for the end of a lease on one of them, or,
// at the first use of a key, for the end of a row lock.
type Request struct {
	Keys    []string         // sorted and unique
	Wait    time.Duration    // 0 fails at once
	Waiting strategy.Waiting // called before each wait; nil for none
	Lends   *strategy.Lender // the connection to read on; nil for none
}

// Remember returns the versions of the keys, in their order. If it need not wait, it runs one plain SELECT: on the connection
// that the caller lends, or on one of the driver's own. On a lent connection a transaction may be open then, with the
// snapshot of that SELECT. After an error nothing is held.
func (l *Locker) Remember(ctx context.Context, r Request) ([]*Version, error) {
	ctx = purpose.Named(ctx, purpose.Take, hint.StrategyOptimistic, r.Keys...)
	a := &attempt{
		Attempt: strategy.Attempt{Key: strings.Join(r.Keys, ", "), Wait: r.Wait, Waiting: r.Waiting, Start: time.Now()},
		l:       l, r: r,
	}
	a.Once = true
	defer a.Finish()
	versions, err := a.remember(ctx)
	if err != nil {
		return nil, a.Explain(ctx, terms, err, nil)
	}
	return versions, nil
}

// attempt is one call of Remember.
type attempt struct {
	strategy.Attempt
	l *Locker
	r Request
}

func (a *attempt) remember(ctx context.Context) ([]*Version, error) {
	if err := a.l.cfg.Rows.Exist(ctx, a.r.Keys); err != nil {
		return nil, err
	}
	if states := a.readLent(ctx); states != nil {
		return a.l.versions(states), nil
	}
	for {
		states, err := a.read(ctx)
		a.EndTurn()
		switch {
		case a.Vanished(err):
			if err := a.l.cfg.Rows.Renew(ctx, a.r.Keys); err != nil {
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
			if err := a.AwaitLease(ctx, &a.l.cfg, &lease); err != nil {
				return nil, err
			}
		case unprepared >= 0:
			if err := a.prepareRow(ctx, states[unprepared].key); err != nil {
				return nil, err
			}
		default:
			return a.l.versions(states), nil
		}
	}
}

// versions returns the versions of the keys in states.
func (l *Locker) versions(states []state) []*Version {
	versions := make([]*Version, len(states))
	for i, s := range states {
		versions[i] = l.Given(s.key, s.token)
	}
	return versions
}

// state is the state of a key's row.
type state struct {
	key       string
	token     uint64
	prepared  bool          // every commit under the key changes the version
	remaining time.Duration // the remaining time of the key's lease; 0 without a live one
	owner     string        // of the lease
}

// readLent returns the states of the keys if the caller lends a connection to read them on, and there is nothing to wait
// for. Else it returns nil, and has given the connection back, without a transaction.
func (a *attempt) readLent(ctx context.Context) []state {
	if a.r.Lends == nil {
		return nil
	}
	c, err := a.r.Lends.Get(ctx)
	if err != nil { // the caller says why, when it needs a connection
		return nil
	}
	timed, cancel := server.Within(ctx, pool.AnswerTime)
	defer cancel()
	began := time.Now()
	rows, err := server.Query(timed, c.Conn, a.l.readSQL(a.r.Keys))
	if err == nil && !slices.ContainsFunc(rows, untrusted) {
		states, err := a.states(rows, began)
		if err == nil && !slices.ContainsFunc(states, func(s state) bool { return !s.prepared }) {
			c.Answered(began)
			return states
		}
	}
	c.RollBackUnknown(ctx, pool.AnswerTime)
	a.r.Lends.Put()
	return nil
}

// read returns the states of the keys as they were last committed.
func (a *attempt) read(ctx context.Context) ([]state, error) {
	ctx, cancel := server.Within(ctx, pool.AnswerTime)
	defer cancel()
	began := time.Now()
	rows, err := a.rows(ctx)
	if err != nil {
		return nil, err
	}
	return a.states(rows, began)
}

// states reads the answer to readSQL, which was sent at the time began.
func (a *attempt) states(rows [][]string, began time.Time) (states []state, err error) {
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

// rows returns the answer of readSQL on one of the driver's own connections.
func (a *attempt) rows(ctx context.Context) (rows [][]string, err error) {
	text := a.l.readSQL(a.r.Keys)
	err = a.l.control(ctx, func(c *pool.Conn) (err error) {
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

// newState reads a row of the answer to a statement that was sent at the time began.
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

// untrusted reports whether a row that was read on the caller's connection must be read again on one of the driver's own.
// The row may not be committed. Or it has a lease, whose remaining time depends on the session's clock, which the
// application may have set.
func untrusted(row []string) bool { return row[0] == readUncommitted || row[5] != "" }

// control runs f on a control connection.
func (l *Locker) control(ctx context.Context, f func(*pool.Conn) error) error {
	c, err := l.cfg.Control.Acquire(ctx)
	if err == nil {
		err = f(c)
		c.Release()
	}
	return server.OfControl(err)
}

// prepareRow marks key's row as versioned, and removes an expired lease from it. If it succeeds, the row must be read again.
func (a *attempt) prepareRow(ctx context.Context, key string) error {
	timed, cancel := server.Within(ctx, pool.AnswerTime)
	err := a.l.control(timed, func(c *pool.Conn) error { return server.Exec(timed, c.Conn, a.l.prepareRowSQL(key, " NOWAIT")) })
	cancel()
	if !server.Locked(err) && !server.Deadlock(err) {
		return err
	}
	a.Heard.From(err)
	a.HeldBy = nil // the transaction that has locked the row is not the holder of the lease
	if a.Wait == 0 && !a.Cleaning(ctx, a.l.cfg.Rows) {
		return lockerr.ErrLocked
	}
	ctx, done, err := a.Patient(ctx)
	if err != nil {
		return err
	}
	defer done()
	select {
	case a.l.turn <- struct{}{}:
		defer func() { <-a.l.turn }()
	case <-time.After(strategy.Pace): // the connection waits for another key; this key may be free by now
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	err = a.l.control(ctx, func(c *pool.Conn) error {
		w := strategy.Killable{Limits: terms.Limits, Conn: c, Mark: pool.NewMark(), Control: a.l.cfg.Control}
		// The server's own limit ends a statement that is not killed. To prepare the row does no harm at any time.
		_, _, err := w.Run(ctx, func(own context.Context) error {
			own, cancel := server.Within(own, pool.AnswerTime)
			defer cancel()
			return server.Exec(own, c.Conn, pool.Marked(w.Mark)+a.l.prepareRowSQL(key, ""))
		})
		return err
	})
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case server.Interrupted(err) || server.Deadlock(err): // the server's own limit has ended the statement: read again
		return nil
	}
	return err
}

// distinct returns the versions sorted by their keys, each once.
func distinct(versions []*Version) []*Version {
	versions = slices.Clone(versions)
	slices.SortFunc(versions, func(a, b *Version) int { return strings.Compare(a.key, b.key) })
	return slices.CompactFunc(versions, func(a, b *Version) bool { return a.key == b.key && a.number == b.number })
}

var errOtherVersion = errors.New("the key has another version: another unit of work has committed under it")

// conflict returns the error of a commit with versions that was refused, or not answered, because of err.
func conflict(versions []*Version, err error) error {
	if server.Stopped(err) {
		err = errOtherVersion
	}
	switch {
	case errors.Is(err, errOtherVersion), server.Changed(err):
		if len(versions) == 1 && versions[0].number > 0 {
			err = fmt.Errorf("%w; it was version %d when it was remembered", err, versions[0].number)
		}
		err = lockerr.With(lockerr.ErrConflict, err)
	case server.Locked(err):
		err = fmt.Errorf("another unit of work holds it, or commits under it: %w", err)
		err = lockerr.With(lockerr.ErrConflict, lockerr.With(lockerr.ErrLocked, err))
	}
	var keys []string
	for _, v := range versions {
		keys = append(keys, v.key)
	}
	return terms.Failure("commit", strings.Join(slices.Compact(keys), ", "), terms.Refusal(err))
}
