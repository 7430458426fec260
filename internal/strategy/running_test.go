package strategy_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/mysqllock/mysqllock/internal/dbtest"

	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestNobodyEntersAClosedStrategy, whose close waits for those who are in.
func TestNobodyEntersAClosedStrategy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := strategy.NewRunning()
		dbtest.OK(t, r.Enter())
		until, end := r.Until(t.Context())
		defer end(nil)
		var ended, closed bool
		r.Background(func(ctx context.Context) {
			<-ctx.Done()
			ended = true
		})
		go func() {
			if !r.Stop() || r.Stop() {
				t.Error("not the first of two is the first")
			}
			r.Wait()
			closed = true
		}()
		synctest.Wait()
		if !ended || closed {
			t.Errorf("the work in the background has ended: %v; the close has ended before the call: %v", ended, closed)
		}
		if err := context.Cause(until); !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("a call hears of %v", err)
		}
		dbtest.Is(t, "a caller enters", r.Enter(), lockerr.ErrClosed)
		r.Background(func(context.Context) { t.Error("it runs after the close") })
		r.Done()
		synctest.Wait()
		if !closed {
			t.Error("the close waits for nobody")
		}
	})
}
