package mysqllock_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Close ends while the units of work on sessions ask for further keys: none of them
// waits for Close, which waits for them.
func TestCloseWhileUnitsAskForMore(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for range 3 {
			db := s.open()
			var asking sync.WaitGroup
			for i := range 16 {
				hold, err := mysqllock.Acquire(context.Background(), db, fmt.Sprintf("hold %d", i))
				if err != nil {
					t.Fatal(err)
				}
				asking.Go(func() {
					for n := 0; ; n++ {
						ctx := lockctx.With(hold.Context(), fmt.Sprintf("more %d %d", i, n%20))
						if _, err := db.ExecContext(ctx, "DO 1"); err != nil {
							return
						}
					}
				})
			}
			time.Sleep(20 * time.Millisecond)
			closed := make(chan struct{})
			go func() {
				_ = db.Close()
				asking.Wait()
				close(closed)
			}()
			select {
			case <-closed:
			case <-time.After(time.Minute):
				t.Fatal("Close, or a caller, hangs")
			}
		}
	})
}
