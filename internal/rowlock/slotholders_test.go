package rowlock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// slotKinds are the strategies that have slots.
var slotKinds = []struct {
	strategy string
	option   lockctx.Option
}{
	{hint.StrategyRow, lockctx.Row()},
	{hint.StrategyLease, lockctx.Lease(stock.TTL)},
}

// onSlots runs a test on each server with each strategy that has slots.
func onSlots(t *testing.T, test func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option)) {
	dbtest.OnServers(t, stock.NewShop, eachSlotKind(test))
}

func eachSlotKind(test func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option)) func(t *testing.T, s *stock.Shop) {
	return func(t *testing.T, s *stock.Shop) {
		var kinds dbtest.Together
		defer kinds.Wait()
		for _, kind := range slotKinds {
			kinds.Run(t, kind.strategy, func(t *testing.T) { test(t, stock.NewShop(s.Beside(t)), kind.strategy, kind.option) })
		}
	}
}

func wantSlot(t *testing.T, ctx context.Context, want int) {
	t.Helper()
	if slot, ok := mysqllock.Slot(ctx); ok != (want >= 0) || ok && slot != want {
		t.Errorf("the slot is %d, %v, want %d", slot, ok, want)
	}
}

// TestHoldersOfSlotsKnowWhichTheyHave. These are different, and a caller is told when there is none.
func TestHoldersOfSlotsKnowWhichTheyHave(t *testing.T) {
	onSlots(t, func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option) {
		const slots = 4
		dbs := []*sql.DB{s.Handle(), s.Handle()}
		var holds []*mysqllock.Hold
		var taken []int
		for i := range slots {
			h := stock.Acquire(t, dbs[i%2], "k", kind, lockctx.Slots(slots), lockctx.NoWait())
			slot, there := mysqllock.Slot(h.Context())
			if !there {
				t.Error("a holder does not know its slot")
			}
			holds, taken = append(holds, h), append(taken, slot)
		}
		if slices.Sort(taken); !slices.Equal(taken, []int{0, 1, 2, 3}) {
			t.Errorf("the slots are %v", taken)
		}
		for i, db := range []*sql.DB{dbs[0], dbs[1], s.Handle()} {
			ctx := lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(slots), lockctx.NoWait())
			_, err := db.BeginTx(ctx, nil)
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Key != "k" || e.Strategy != strategy {
				t.Errorf("handle %d, NoWait: %v", i, err)
			}
			wantSlot(t, ctx, -1)
			const wait = 200 * time.Millisecond
			err = stock.Told(func() error {
				_, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(slots), lockctx.Wait(wait)), nil)
				return err
			})
			if !errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Key != "k" || e.Waited < wait-10*time.Millisecond || e.Waited > wait+time.Minute {
				t.Errorf("handle %d: Wait(%v): %v", i, wait, err)
			}
			for limit := 300 * time.Millisecond; ; limit *= 2 {
				early, cancel := context.WithTimeout(dbtest.Limited(t), limit)
				start := time.Now()
				_, err = mysqllock.Acquire(early, db, "k", kind, lockctx.Slots(slots), lockctx.Wait(time.Minute))
				took := time.Since(start)
				cancel()
				if errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, mysqllock.ErrTimeout) && limit < 10*time.Second {
					continue // a busy server has not answered in time
				}
				if !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) || took > 50*time.Second {
					t.Errorf("handle %d: after %v, a context that ends: %v", i, took, err)
				}
				break
			}
		}
		// A slot that is given back is the next holder's.
		for _, h := range holds {
			slot, _ := mysqllock.Slot(h.Context())
			dbtest.OK(t, h.Release())
			ctx := lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(slots))
			tx, err := dbs[0].BeginTx(ctx, nil)
			dbtest.OK(t, err)
			wantSlot(t, ctx, slot)
			defer tx.Rollback()
		}
	})
}

// TestSlotZeroIsTheKey: the lock itself and slot 0 exclude each other, and other
// slots do not mind it.
func TestSlotZeroIsTheKey(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle(), s.Handle()
		free := func(opts ...lockctx.Option) bool {
			t.Helper()
			h, err := mysqllock.Acquire(dbtest.Limited(t), other, "k", append(opts, lockctx.NoWait())...)
			if err == nil {
				dbtest.OK(t, h.Release())
			} else if !errors.Is(err, mysqllock.ErrLocked) {
				t.Error(err)
			}
			return err == nil
		}
		for _, plain := range slotKinds {
			for _, slotted := range slotKinds {
				what := plain.strategy + ", slots " + slotted.strategy
				h := stock.Acquire(t, db, "k", plain.option)
				if free(slotted.option, lockctx.Slots(1)) {
					t.Errorf("%s: the only slot is free while the key is held", what)
				}
				if !free(slotted.option, lockctx.Slots(2)) {
					t.Errorf("%s: no slot is free while only the key is held", what)
				}
				two := stock.Acquire(t, db, "k", slotted.option, lockctx.Slots(2))
				wantSlot(t, two.Context(), 1)
				dbtest.OK(t, h.Release())
				if !free(plain.option) {
					t.Errorf("%s: slot 1 keeps the key", what)
				}
				one := stock.Acquire(t, db, "k", slotted.option, lockctx.Slots(2))
				wantSlot(t, one.Context(), 0)
				if free(plain.option) || free(plain.option, lockctx.Slots(2)) {
					t.Errorf("%s: the key or a slot is free while both slots are taken", what)
				}
				dbtest.OK(t, one.Release())
				dbtest.OK(t, two.Release())
			}
		}
	})
}

// childSlots takes slots, says which, and keeps them.
func childSlots(db *sql.DB, in *bufio.Scanner) {
	for in.Scan() {
		kind := slotKinds[slices.IndexFunc(slotKinds, func(k struct {
			strategy string
			option   lockctx.Option
		},
		) bool {
			return k.strategy == in.Text()
		})]
		opts := []lockctx.Option{kind.option, lockctx.Slots(3)}
		if kind.strategy == hint.StrategyLease { // whose end the test waits for
			opts[0] = lockctx.Lease(9 * time.Second)
		}
		h, err := mysqllock.Acquire(context.Background(), db, "k", opts...)
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(mysqllock.Slot(h.Context()))
	}
}

// TestSlotsOfAKilledProcessComeBack at once, or when the lease has run out.
func TestSlotsOfAKilledProcessComeBack(t *testing.T) {
	onSlots(t, func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option) {
		c, db := dbtest.StartJob(t, "slots", s.DSN()), s.Handle()
		for range 2 {
			c.Tell(strategy)
			if line := c.Line(); !strings.HasSuffix(line, "true") {
				t.Fatal(line)
			}
		}
		last := stock.Acquire(t, db, "k", kind, lockctx.Slots(3))
		dbtest.Is(t, "a fourth of three slots", dbtest.Err(mysqllock.Acquire(dbtest.Limited(t), db, "k", kind, lockctx.Slots(3), lockctx.NoWait())), mysqllock.ErrLocked)
		killed := time.Now()
		c.Kill()
		for range 2 {
			h := stock.Acquire(t, db, "k", kind, lockctx.Slots(3), lockctx.Wait(time.Minute))
			defer h.Release()
		}
		if took := time.Since(killed); took > time.Minute {
			t.Errorf("the slots of a killed process were back after %v", took)
		} else {
			t.Logf("back after %v", took)
		}
		dbtest.OK(t, last.Release())
	})
}

// TestWhoHasASlotAndAsksAgainJoins, as far as that slot is one of those that are asked for.
func TestWhoHasASlotAndAsksAgainJoins(t *testing.T) {
	onSlots(t, func(t *testing.T, s *stock.Shop, strategy string, kind lockctx.Option) {
		db, other := s.Handle(), s.Handle()
		taken := func(n int) (taken int) { // of n slots
			t.Helper()
			var holds []*mysqllock.Hold
			for {
				h, err := mysqllock.Acquire(dbtest.Limited(t), other, "k", kind, lockctx.Slots(n), lockctx.NoWait())
				if err != nil {
					break
				}
				holds = append(holds, h)
			}
			for _, h := range holds {
				dbtest.OK(t, h.Release())
			}
			return n - len(holds)
		}
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
			slot, _ := mysqllock.Slot(ctx)
			for range 2 {
				dbtest.OK(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					wantSlot(t, ctx, slot)
					return nil
				}, kind, lockctx.Slots(3)))
				inner := lockctx.With(ctx, "k", kind, lockctx.Slots(5))
				tx := dbtest.Begin(t, inner, db)
				wantSlot(t, inner, slot)
				dbtest.OK(t, tx.Commit())
			}
			dbtest.Equal(t, "%d slots are taken", taken(5), 1)
			return nil
		}, kind, lockctx.Slots(3)))

		// Asked for with two numbers before it is locked, it is one of the fewer.
		for range 5 {
			for _, n := range [][]int{{5, 1}, {1, 5}} {
				ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "k", kind, lockctx.Slots(n[0])), "k", kind, lockctx.Slots(n[1]))
				tx := dbtest.Begin(t, ctx, db)
				wantSlot(t, ctx, 0)
				if n := taken(1); n != 1 {
					t.Error("the only slot is free")
				}
				dbtest.OK(t, tx.Rollback())
			}
		}

		// The key itself is its first slot.
		ctx := lockctx.With(lockctx.With(dbtest.Limited(t), "k", kind), "k", kind, lockctx.Slots(1), lockctx.Wait(20*time.Second))
		tx := dbtest.Begin(t, ctx, db)
		dbtest.ExecIn(t, ctx, tx, "UPDATE p SET stock = 9 WHERE id = 1")
		wantSlot(t, ctx, 0)
		dbtest.OK(t, tx.Commit())
		wantSlot(t, ctx, -1)
		dbtest.Equal(t, "%d slots are taken", taken(5), 0)
	})
}

// TestSlotIsFenced: who has lost the lease on its slot commits nothing, and is
// told of the key by its name.
func TestSlotIsFenced(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		for range 4 { // whichever slot it is
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(stock.TTL), lockctx.Slots(4))
			tx := dbtest.Begin(t, ctx, db)
			dbtest.Exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
			dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = 'thief#00000000', token = token + 1 WHERE owner IS NOT NULL")
			err := tx.Commit()
			stock.WantLost(t, "Commit", err)
			var e *mysqllock.Error
			if !errors.As(err, &e) || e.Key != "k" {
				t.Errorf("the error is of another key: %v", err)
			}
			s.WantStock(1, 10)
			dbtest.Exec(t, s.Plain, "UPDATE mysqllock SET owner = NULL")
		}
	})
}
