// Package options has keys and options that the first statement refuses, and good ones.
package options

import (
	"context"
	"database/sql"
	"strings"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

func use(...any) {}

func bad(ctx context.Context, db *sql.DB, fn func(context.Context) error) {
	const long = "0123456789012345678901234567890123456789012345678901234567890123"
	use(lockctx.With(ctx, ""))                                                     // want `With: the key is empty.*#options`
	use(lockctx.With(ctx, long+long+long+long))                                    // want `the key has 256 bytes`
	use(lockctx.With(ctx, "k", lockctx.Row(), lockctx.Lease(time.Minute)))         // want `Row and Lease exclude each other`
	use(lockctx.With(ctx, "k", lockctx.Advisory(), lockctx.IfVersion(7)))          // want `Advisory and Optimistic exclude`
	use(lockctx.With(ctx, "k", lockctx.Shared(), lockctx.Slots(3)))                // want `Shared and Slots exclude`
	use(lockctx.With(ctx, "k", lockctx.Shared(), lockctx.Advisory()))              // want `Shared needs Row, and the options say Advisory`
	use(lockctx.With(ctx, "k", lockctx.Slots(3), lockctx.Optimistic()))            // want `Slots needs Row or Lease, and the options say Optimistic`
	use(lockctx.With(ctx, "k", lockctx.MinHold(time.Second), lockctx.Row()))       // want `MinHold needs Lease`
	use(lockctx.With(ctx, "k", lockctx.Lease(time.Millisecond)))                   // want `Lease\(1ms\) is refused .* at least 1s`
	use(lockctx.With(ctx, "k", lockctx.Slots(0)))                                  // want `Slots\(0\) is refused .* 1 to 1000`
	use(lockctx.With(ctx, "k", lockctx.IfVersion(0)))                              // want `IfVersion\(0\)`
	use(lockctx.With(ctx, "k", lockctx.Wait(-1)))                                  // want `Wait\(-1ns\)`
	use(lockctx.With(ctx, "k", lockctx.Retry(3)))                                  // want `With cannot run anything again`
	mysqllock.Acquire(ctx, db, "k", lockctx.Retry(1))                              // want `Acquire cannot run anything again`
	mysqllock.Do(ctx, db, "k", fn, lockctx.Lease(time.Minute), lockctx.Retry(3))   // want `so Retry is refused`
	mysqllock.Do(ctx, db, "k", fn, lockctx.MaxHold(time.Hour), lockctx.Advisory()) // want `MaxHold needs Lease, and the options say Advisory`
}

func good(ctx context.Context, db *sql.DB, fn func(context.Context) error, ttl time.Duration, opts ...lockctx.Option) {
	use(lockctx.With(ctx, strings.Repeat("k", 300)))
	use(lockctx.With(ctx, "k", opts...))
	use(lockctx.With(ctx, "k", lockctx.Lease(ttl), lockctx.MinHold(time.Second), lockctx.MaxHold(0)))
	use(lockctx.With(ctx, "k", lockctx.Wait(time.Second), lockctx.NoWait(), lockctx.AllowStale()))
	use(lockctx.With(ctx, "k", lockctx.Optimistic(), lockctx.IfVersion(7)))
	use(lockctx.With(ctx, "k", lockctx.Slots(3), lockctx.Lease(time.Second)))
	use(lockctx.With(ctx, "k", lockctx.NoWait(), lockctx.Retry(0)))
	mysqllock.Do(ctx, db, "k", fn, lockctx.Retry(3))
	mysqllock.Do(ctx, db, "k", fn, lockctx.Optimistic(), lockctx.Retry(3))
}
