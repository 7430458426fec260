package unit

import (
	"context"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/mysqllock/mysqllock/internal/handle"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/pool"
	"github.com/mysqllock/mysqllock/internal/strategy"
)

// Unconnected returns the error of a call with ctx that has begun at start, and for which no connection
// could be opened because of err. If the call asks for a lock, the error says so, and an observer is told.
func Unconnected(ctx context.Context, k *handle.Handle, start time.Time, err error) error {
	h, ok := hint.From(ctx)
	asks := ok && h.Err == nil && h.LockContext != nil
	if !asks || errors.Is(err, driver.ErrBadConn) { // after ErrBadConn database/sql tries again
		return err
	}
	cs := ctxStateOf(k, h.LockContext)
	if !cs.tryTakeTurn() { // a statement of the lock context has the turn, so it has the lock, or asks for it
		return err
	}
	defer cs.giveTurn()
	p, planErr := cs.plan(h)
	if planErr != nil || len(p.missing) == 0 {
		return err
	}
	if ctx.Err() != nil {
		err = strategy.Silent(ctx)
	}
	err = k.SetupError(h, pool.ExplainFull(err))
	p.start = start
	p.refused(ctx, k, err)
	return err
}
