package main

import (
	"context"
	"database/sql"
	"fmt"
	"slices"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
)

// The strategies, as the tables name them.
const (
	row      = "mysqllock row"
	lease    = "mysqllock lease"
	advisory = "mysqllock advisory"

	longTurns = "mysqllock advisory, lockHandOvers=200" // for keys that all want

	optimistic = "mysqllock optimistic" // only around transactions, since it locks nothing
)

type strategy struct {
	name, params string // the strategy, and what else goes into the DSN with it
	wide         bool
}

// strategies of locks that are taken with Acquire.
var strategies = []strategy{
	{row, hint.StrategyRow, true},
	{lease, hint.StrategyLease, false},
	{advisory, hint.StrategyAdvisory, false},
}

// ours are the strategies of mysqllock, through Acquire and Release.
func ours(on string) (all []contender) {
	for _, s := range append(slices.Clip(strategies), strategy{longTurns, hint.StrategyAdvisory + "&lockHandOvers=200", false}) {
		all = append(all, contender{
			Name: s.name, Server: on, Ours: true, wide: s.wide,
			Note: "defaults; `lockMaxConns` as many as are held at a time where that is more than 16, `lockWait` a minute",
			open: func(_ context.Context, at addresses, n size) (client, error) {
				db, err := openOurs(at[on], s.params, n)
				return &holds{db}, err
			},
		})
	}
	return all
}

func openOurs(address, params string, n size) (*sql.DB, error) {
	db, err := sql.Open("mysqllock", fmt.Sprintf("%s&lockStrategy=%s&lockMaxConns=%d&lockWait=1m", dsn(address), params, max(pool.DefaultMax, n.Locks)))
	if err == nil {
		db.SetMaxIdleConns(n.Workers)
	}
	return db, err
}

type holds struct{ *sql.DB }

func (h *holds) Lock(ctx context.Context, _ int, key string) (func() error, error) {
	hold, err := mysqllock.Acquire(ctx, h.DB, key)
	if err != nil {
		return nil, err
	}
	return hold.Release, nil
}
