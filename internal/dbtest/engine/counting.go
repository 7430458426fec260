package engine

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Lease is the TTL of leases that a test needs to its end.
const Lease = 10 * time.Second

// Times is how often each caller counts.
var Times = dbtest.Long(5, 20)

// Callers is how many there are in each process: of those that retry after conflicts only a few, since
// each of them costs the others a try.
func Callers(way string) int {
	if strings.HasPrefix(way, "optimistic") {
		return 2
	}
	return 8
}

// Mixed is the way to count by any strategy.
const Mixed = "row, lease or optimistic, BeginTx"

// Exclusive are the ways to hold a key alone. The TTL is one that no test outlives.
var Exclusive = map[string][]lockctx.Option{
	"row":         {lockctx.Row()},
	"row, slot":   {lockctx.Row(), lockctx.Slots(1)},
	"lease":       {lockctx.Lease(dbtest.Patience)},
	"lease, slot": {lockctx.Lease(dbtest.Patience), lockctx.Slots(1)},
}

// Way is a way to count under a lock.
type Way func(ctx context.Context, db *sql.DB) error

// Ways are the ways to count, by strategy and use. unit does so once, in a transaction that begins
// with began, and whose statements have the context ctx.
func Ways(unit func(began, ctx context.Context, db dbtest.Beginner) error) map[string]Way {
	begins := func(o ...lockctx.Option) Way {
		return func(ctx context.Context, db *sql.DB) error {
			ctx = lockctx.With(ctx, "k", o...)
			return unit(ctx, ctx, db)
		}
	}
	does := func(o ...lockctx.Option) Way {
		return func(ctx context.Context, db *sql.DB) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return unit(ctx, ctx, db) }, o...)
		}
	}
	joins := func(o ...lockctx.Option) Way {
		return func(ctx context.Context, db *sql.DB) error {
			began := lockctx.With(ctx, "first "+dbtest.Random())
			return unit(began, lockctx.With(began, "k", o...), db)
		}
	}
	again := func(way Way) Way {
		return func(ctx context.Context, db *sql.DB) error { return Again(func() error { return way(ctx, db) }) }
	}
	return map[string]Way{
		"row, BeginTx": begins(),
		"row, several keys": func(ctx context.Context, db *sql.DB) error {
			ctx = lockctx.WithKeys(ctx, []string{"j", "k", "l"})
			return unit(ctx, ctx, db)
		},
		"row, Do": does(),
		"row, Conn": func(ctx context.Context, db *sql.DB) error {
			c, err := db.Conn(ctx)
			if err != nil {
				return err
			}
			defer c.Close()
			ctx = lockctx.With(ctx, "k")
			return unit(ctx, ctx, c)
		},
		"row, second key":     joins(),
		"row, slot":           begins(lockctx.Slots(1)),
		"optimistic, BeginTx": again(begins(lockctx.Optimistic())),
		"optimistic, Do":      again(does(lockctx.Optimistic())),
		"lease, BeginTx":      begins(lockctx.Lease(Lease)),
		"lease, Do":           does(lockctx.Lease(Lease)),
		"lease, second key":   joins(lockctx.Lease(Lease)),
		"lease, slot":         begins(lockctx.Lease(Lease), lockctx.Slots(1)),
		Mixed: again(func(ctx context.Context, db *sql.DB) error {
			return begins([...]lockctx.Option{lockctx.Row(), lockctx.Lease(Lease), lockctx.Optimistic()}[rand.N(3)])(ctx, db)
		}),
	}
}
