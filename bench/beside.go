package main

import (
	"context"
	"database/sql"
	"sync"
	"time"
)

// beside is what an application does without a lock through the handle on which others rush for locks.
type beside struct {
	ping, read func(context.Context) error
}

// besideEvery is how often each of these is begun: often enough for a 99th percentile, and seldom against what is sold meanwhile.
// They have rounds of their own all the same, so that what is sold in the others is what is sold without them.
const besideEvery = 25 * time.Millisecond

func besideOf(db *sql.DB) *beside {
	return &beside{db.PingContext, func(ctx context.Context) error { return readStock(ctx, db) }}
}

// readStock is a query by primary key.
func readStock(ctx context.Context, db *sql.DB) error {
	var stock int64
	return db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = ?", 1).Scan(&stock)
}

// timed is how long calls of each kind took.
type timed struct{ Pings, Reads []time.Duration }

// begin begins pings and reads until end.
func (b *beside) begin(ctx context.Context, every time.Duration, end time.Time) (t timed, err error) {
	var reads sync.WaitGroup
	var failed error
	reads.Go(func() { t.Reads, failed = beginEach(ctx, every, end, b.read) })
	t.Pings, err = beginEach(ctx, every, end, b.ping)
	reads.Wait()
	if err == nil {
		err = failed
	}
	return t, err
}

// beginEach begins a call every so often until end, also while earlier ones wait for their answer, and returns how long each
// took. One is begun however late it is. A call that has no answer when ctx ends has taken until then.
func beginEach(
	ctx context.Context, every time.Duration, end time.Time, call func(context.Context) error,
) (took []time.Duration, err error) {
	var (
		all sync.WaitGroup
		mu  sync.Mutex
	)
	for next := time.Now(); ; {
		all.Go(func() {
			start := time.Now()
			failed := call(ctx)
			mu.Lock()
			defer mu.Unlock()
			took = append(took, time.Since(start))
			if failed != nil && ctx.Err() == nil && err == nil {
				err = failed
			}
		})
		if next = next.Add(every); !next.Before(end) || ctx.Err() != nil {
			break
		}
		time.Sleep(time.Until(next))
	}
	all.Wait()
	return took, err
}
