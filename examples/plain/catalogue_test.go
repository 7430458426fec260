package plain

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// TestReadersOfTheCatalogueReadTogether: on two handles, which stand for processes. Nobody reads while it is built.
func TestReadersOfTheCatalogueReadTogether(t *testing.T) {
	testshop.Run(t, func(t *testing.T, shop *testshop.Shop) {
		var reading, building atomic.Int64
		ctx, two := t.Context(), make(chan struct{}) // closed when two read at a time
		both := sync.OnceFunc(func() { close(two) })
		var all sync.WaitGroup
		for range 2 {
			db := open(t, shop)
			for n := range 4 {
				all.Go(func() {
					err := ReadCatalogue(ctx, db, func(ctx context.Context) error {
						if reading.Add(1) > 1 {
							both()
						}
						defer reading.Add(-1)
						if building.Load() != 0 {
							return errors.New("it reads what is being built")
						}
						select {
						case <-two:
							return nil
						case <-ctx.Done():
							return context.Cause(ctx)
						}
					})
					if err != nil {
						t.Error(err)
					}
				})
				if n > 0 {
					continue
				}
				all.Go(func() {
					select {
					case <-two:
					case <-ctx.Done():
					}
					err := BuildCatalogue(ctx, db, func(context.Context) error {
						defer building.Add(-1)
						if building.Add(1) > 1 || reading.Load() != 0 {
							return errors.New("it is not alone")
						}
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
		}
		all.Wait()
	})
}
