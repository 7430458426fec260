package lease

import (
	"context"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// TestAWaiterForASlotIsNotRefusedWhereNobodyCanLook which slot is free, since no connection is.
func TestAWaiterForASlotIsNotRefusedWhereNobodyCanLook(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		waits := make(chan struct{})
		request := func(wait time.Duration) strategy.Request {
			return strategy.Request{
				Resources: []strategy.Resource{{Lock: hint.Lock{Key: "k", Kind: hint.Kind{Slots: 2, TTL: time.Minute}}, Row: "k"}},
				Wait:      wait,
				Lost:      func() {},
				Wants: func(ctx context.Context) (context.Context, func(), error) {
					close(waits)
					return ctx, func() {}, nil
				},
			}
		}
		here, there := s.locker(setup{}), s.locker(setup{})
		slot, err := here.acquireSlot(dbtest.Limited(t), request(0)) // the rows are there
		dbtest.OK(t, err)
		dbtest.OK(t, slot.Release())
		for range here.control.Stat().Max {
			c, err := here.control.Acquire(dbtest.Limited(t))
			dbtest.OK(t, err)
			defer c.Release()
		}
		var held []*Slot
		for range 2 {
			slot, err := there.acquireSlot(dbtest.Limited(t), request(time.Minute))
			dbtest.OK(t, err)
			held = append(held, slot)
		}
		dbtest.Want(t, dbtest.Err(here.acquireSlot(dbtest.Limited(t), request(0))), lockerr.ErrLocked)
		got := dbtest.Go(func() error {
			slot, err := here.acquireSlot(dbtest.Limited(t), request(time.Minute))
			if err == nil {
				err = slot.Release()
			}
			return err
		})
		select {
		case <-waits:
		case err := <-got:
			t.Fatalf("it does not wait: %v", err)
		}
		for _, slot := range held {
			dbtest.OK(t, slot.Release())
		}
		dbtest.OK(t, <-got)
	})
}
