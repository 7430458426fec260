package optimistic

import (
	"context"
	"database/sql/driver"
	"errors"
	"strconv"
	"time"

	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/purpose"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
	"github.com/mysqllock/mysqllock/pool"
)

// Traits of versions, for those who choose among strategies.
var Traits = strategy.Traits{Name: hint.StrategyOptimistic, Table: true}

// Strategy returns the Locker as units of work use it.
func (l *Locker) Strategy() strategy.Strategy { return asStrategy{l} }

type asStrategy struct{ *Locker }

func (k asStrategy) Traits() strategy.Traits { return Traits }

// Take remembers the versions of the resources, in one statement. Those that were given
// are not read.
func (k asStrategy) Take(ctx context.Context, r strategy.Request) (versions []strategy.Grant, err error) {
	versions = make([]strategy.Grant, len(r.Resources))
	ask := Request{Wait: r.Wait, Waiting: r.Wants, Begin: r.Begin}
	var at []int
	for i, p := range r.Resources {
		if p.Version != 0 {
			versions[i] = k.Given(p.Row, p.Version)
			continue
		}
		at = append(at, i)
		ask.Keys = append(ask.Keys, p.Row)
	}
	if len(at) == 0 {
		return versions, nil
	}
	remembered, err := k.Remember(ctx, r.Conn, ask)
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
func (k asStrategy) Check(_ context.Context, c *pool.Conn, held []strategy.Grant, wrote bool) (strategy.Check, error) {
	if !wrote {
		return strategy.Check{}, nil
	}
	versions := make([]*Version, len(held))
	for i, h := range held {
		versions[i] = h.(*Version)
	}
	return strategy.Check{
		Commit: func(ctx context.Context) (done, unknown bool, err error) { return k.Commit(ctx, c, versions) },
		Fence:  func(ctx context.Context) error { return k.Compare(ctx, c.Conn, versions) },
	}, nil
}

// Holder returns nil: whoever remembers a version keeps nobody out.
func (k asStrategy) Holder(context.Context, string) *lockerr.Holder { return nil }

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
