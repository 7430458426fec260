package mysqllock_test

import (
	"context"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestInnerHoldsStopNobody: goroutines that share a hold, as under a leader's lease, take
// holds of their own in it, one after the other. The end of one which has read stops
// neither its own goroutine nor those that write beside it.
func TestInnerHoldsStopNobody(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, outer := range guardHolds() {
			for inner, opts := range keptAs() {
				if inner == "shared" {
					continue // does not keep the others out
				}
				t.Run(inner+" in "+name, func(t *testing.T) {
					if inner == "optimistic" {
						opts = append(opts, lockctx.Retry(100))
					}
					dbtest.Exec(t, s.plain, "UPDATE p SET stock = 0")
					const rounds = 5
					dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "job", func(ctx context.Context) error {
						g, ctx := errgroup.WithContext(ctx)
						for id := range 2 {
							g.Go(func() error {
								for range rounds {
									if err := mysqllock.Do(ctx, db, "product", func(ctx context.Context) error {
										n, err := read(ctx, db, 1)
										if err != nil {
											return err
										}
										_, err = db.ExecContext(ctx, setStock, n+1)
										return err
									}, opts...); err != nil {
										return err
									}
									if _, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = ?", 3+id); err != nil {
										return err
									}
								}
								return nil
							})
						}
						return g.Wait()
					}, outer))
					s.wantStock(1, 2*rounds)
					s.wantStock(3, rounds)
					s.wantStock(4, rounds)
				})
			}
		}
	})
}
