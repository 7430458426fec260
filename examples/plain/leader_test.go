package plain

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// Of two candidates one plans; when it ends the other goes on.
func TestOneCandidatePlansUntilItEnds(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		var both sync.WaitGroup
		plans := make(chan int)
		cancels := make([]context.CancelFunc, 2)
		for i := range cancels {
			db := open(t, shop)
			var ctx context.Context
			ctx, cancels[i] = context.WithCancel(t.Context())
			both.Go(func() {
				err := Plan(ctx, db, time.Millisecond, func(ctx context.Context) error {
					if _, err := db.ExecContext(ctx, "UPDATE products SET stock = stock + 1 WHERE id = 1"); err != nil {
						return nil // it is not the leader any more, or is about to end
					}
					select {
					case plans <- i:
					case <-ctx.Done():
					}
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		first := <-plans
		cancels[first]()
		for <-plans == first {
		}
		cancels[1-first]()
		both.Wait()
	})
}
