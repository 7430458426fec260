package plain

import (
	"context"
	"database/sql"
	"time"

	"github.com/mysqllock/mysqllock/leader"
)

// Plan has one of all processes that call it plan every so often, until ctx ends.
func Plan(ctx context.Context, db *sql.DB, every time.Duration, plan func(context.Context) error) error {
	return leader.Run(ctx, db, "planner", func(ctx context.Context) error {
		for {
			if err := plan(ctx); err != nil { // its statements on db, with this ctx, are fenced
				return err
			}
			select {
			case <-ctx.Done(): // another process may lead soon, or this one is to end
				return nil
			case <-time.After(every):
			}
		}
	}, leader.TTL(10*time.Second))
}
