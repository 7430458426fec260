package plain

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// TestThreeAtATimeCallThePartner: of twelve callers on two handles, which stand for processes, three call at a time.
func TestThreeAtATimeCallThePartner(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		var calling, most, done atomic.Int64
		var all sync.WaitGroup
		for range 2 {
			db := open(t, shop)
			for range 6 {
				all.Go(func() {
					err := CallPartner(t.Context(), db, func(ctx context.Context) error {
						for now := calling.Add(1); ; {
							if before := most.Load(); now <= before || most.CompareAndSwap(before, now) {
								break
							}
						}
						defer calling.Add(-1)
						select {
						case <-time.After(100 * time.Millisecond):
							done.Add(1)
						case <-ctx.Done():
						}
						return ctx.Err()
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
		if most.Load() != partnerCalls || done.Load() != 12 {
			t.Errorf("%d have called, %d at a time", done.Load(), most.Load())
		}
	})
}
