//go:build unix

package matrix

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// cell is one point of the product.
type cell struct{ strategy, way, place, conns, fault int }

// dimensions are how many values each of its coordinates has.
type dimensions [5]int

func (c cell) at() dimensions { return dimensions{c.strategy, c.way, c.place, c.conns, c.fault} }

// conns are the kinds of connections that a handle has.
var conns = []struct {
	name    string
	max     int
	wrapped bool // with a wrapper of drivers above, which hides what it can: with maxConns it must pass driver.Validator on
}{{"database/sql's", 0, false}, {"maxConns", 8, false}, {"wrapped", 0, true}, {"wrapped with maxConns", 8, true}}

// run is a cell while it runs. mine is the process that the cell is about.
type run struct {
	*testing.T
	cell
	place *place
	user  string
	mine  *sql.DB
	tap   *dbtest.Tap
	other *sql.DB // another process
	unit  unit

	mu    sync.Mutex
	done  int // what the counter must show, by what callers were told
	maybe int // how many units of work may be committed, too: their callers were told so
}

func (c cell) name(all []*place) string {
	return strings.Join([]string{strategies[c.strategy].name, ways[c.way].name, all[c.place].name, conns[c.conns].name, faults[c.fault].name}, ", ")
}

// begin opens the handles of a cell, and has each of them do what it does only once.
func (c cell) begin(t *testing.T, p *place) *run {
	t.Helper()
	r := &run{T: t, cell: c, place: p, user: p.account(t), tap: new(dbtest.Tap)}
	id := int(p.units.Add(1))
	dbtest.Exec(t, p.admin, "INSERT INTO counters VALUES (?, 0)", id)
	config := mysqllock.Config{TTL: faults[c.fault].ttl, Wait: dbtest.Patience, MaxConns: conns[c.conns].max}
	r.mine = p.open(t, r.user, r.tap, config, conns[c.conns].wrapped)
	r.other = p.open(t, p.account(t), nil, config, false)
	keys := []string{fmt.Sprintf("key %d é", id)}
	if strategies[c.strategy].name == "keys" {
		keys = append(keys, keys[0]+"b", keys[0]+"c")
	}
	r.unit = unit{id: id, keys: keys, opts: []lockctx.Option{strategies[c.strategy].option(faults[c.fault].ttl)}}
	r.told(r.work(dbtest.Limited(t)))
	r.told(r.work(dbtest.Limited(t)))
	r.told(r.another(dbtest.Limited(t)))
	if r.done != 3 {
		t.FailNow()
	}
	return r
}

// work runs the unit of work.
func (r *run) work(ctx context.Context) error {
	u := r.unit
	u.db = r.mine
	return ways[r.way].run(ctx, u)
}

// another runs one of another process.
func (r *run) another(ctx context.Context) error {
	return mysqllock.DoKeys(ctx, r.other, r.unit.keys, func(ctx context.Context) error {
		return unit{id: r.unit.id}.change(ctx, r.other)
	}, r.excluding()...)
}

// excluding are the options by which another process asks for the key: so that it has it
// alone.
func (r *run) excluding() []lockctx.Option {
	if strategies[r.strategy].name == "shared" {
		return []lockctx.Option{lockctx.Row()}
	}
	return r.unit.opts
}

// told notes what the caller of a unit of work was told.
func (r *run) told(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var e *mysqllock.Error
	switch {
	case err == nil:
		r.done++
	case errors.As(err, &e) && (e.Op == "release" || e.Op == "commit" && errors.Is(err, mysqllock.ErrLost) && !errors.Is(err, mysqllock.ErrConflict)):
		r.maybe++
	case errors.Is(err, errUnfinished):
		r.Error(err)
	}
}

// errUnfinished says that a unit of work has not come back.
var errUnfinished = errors.New("it hangs")

// finish runs a unit of work that must come back.
func (r *run) finish(work func(context.Context) error) (err error) {
	r.Helper()
	done := make(chan error, 1)
	ctx := dbtest.Limited(r.T)
	go func() { done <- work(ctx) }()
	select {
	case err = <-done:
	case <-time.After(dbtest.Patience):
		err = errUnfinished
	}
	r.told(err)
	return err
}

// check asks what is asked of each cell.
func (r *run) check() {
	r.Helper()
	began := time.Now()
	ctx := dbtest.Within(r.T, dbtest.Patience)
	err := r.another(ctx)
	r.told(err)
	if took := time.Since(began); err != nil || took > free {
		r.Errorf("the key was free after %v, and should have been within %v: %v", took, free, err)
	}
	dbtest.Eventually(r, "nothing of it runs on the server", func() error {
		if n := r.place.count(r.T, running, r.user); n > 0 {
			return fmt.Errorf("%d statements", n)
		}
		if left := dbtest.Transactions(r.T, r.place.admin, sessions, r.user); len(left) > 0 {
			return fmt.Errorf("transactions: %s", left)
		}
		return nil
	})
	closed := make(chan error, 1)
	go func() { closed <- r.mine.Close() }()
	select {
	case <-closed:
	case <-time.After(dbtest.Patience):
		r.Fatal("Close hangs")
	}
	dbtest.Eventually(r, "its connections have ended", func() error {
		if n := r.place.count(r.T, connections, r.user); n > 0 {
			return fmt.Errorf("%d connections", n)
		}
		return nil
	})
	if n := r.place.count(r.T, "SELECT n FROM counters WHERE id = ?", r.unit.id); n < r.done || n > r.done+r.maybe {
		r.Errorf("%d units of work are committed; callers were told of %d, and that %d may be", n, r.done, r.maybe)
	}
}

// What an account has on the server. PROCESSLIST of performance_schema is MySQL's; each
// server reads the half that it knows.
const (
	processes   = "FROM /*!80000 performance_schema.processlist */ /*M!100000 information_schema.PROCESSLIST */ AS p"
	ofAccount   = " " + processes + " WHERE p.USER = ?"
	sessions    = "SELECT p.ID" + ofAccount
	connections = "SELECT COUNT(*)" + ofAccount
	running     = connections + " AND p.COMMAND IN ('Query', 'Execute')"
)
