package mysqllock_test

import (
	"bufio"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// A key with slots: a semaphore that counts the holders of all processes.

// slotKinds are the strategies that have slots.
var slotKinds = []struct {
	strategy string
	option   lockctx.Option
}{
	{lockctx.StrategyRow, lockctx.Row()},
	{lockctx.StrategyLease, lockctx.Lease(2 * time.Second)},
}

// onSlots runs a test on each server with each strategy that has slots.
func onSlots(t *testing.T, test func(t *testing.T, s *scratch, strategy string, kind lockctx.Option)) {
	onServers(t, func(t *testing.T, s *scratch) {
		for _, kind := range slotKinds {
			t.Run(kind.strategy, func(t *testing.T) { test(t, s.testServer.scratch(t), kind.strategy, kind.option) })
		}
	})
}

func wantSlot(t *testing.T, ctx context.Context, want int) {
	t.Helper()
	if slot, ok := mysqllock.Slot(ctx); ok != (want >= 0) || ok && slot != want {
		t.Errorf("the slot is %d, %v, want %d", slot, ok, want)
	}
}

// TestSlotsByEachWay: there are never more holders than slots, however they ask,
// and all slots are used.
func TestSlotsByEachWay(t *testing.T) {
	onSlots(t, func(t *testing.T, s *scratch, strategy string, _ lockctx.Option) {
		const slots = 3
		exec(t, s.plain, sectionsTable)
		other, db := startChild(t, "crew", s.childDSN()), s.open()
		highest := 0
		for _, way := range allWays {
			all, sum := s.work(other, db, crew{Way: way, Strategy: strategy, Workers: 4, Length: 500 * time.Millisecond, Keys: 1, Most: 1, Slots: slots, Think: 10 * time.Millisecond})
			most := wantExclusion(t, all)
			if most > slots {
				t.Errorf("%s: %d at the same time, want %d", way, most, slots)
			}
			highest = max(highest, most)
			for _, x := range all {
				if x.slot < 0 && way != byExec && way != byPrepared { // these tell nobody
					t.Errorf("%s: a holder did not know its slot", way)
					break
				}
			}
			t.Logf("%s: %d sections, longest wait %v", way, len(all), sum.Longest)
		}
		if highest != slots {
			t.Errorf("at most %d of %d slots were in use", highest, slots)
		}
	})
}

// TestSlotsUnderLoad: 50 workers in two processes want one of five slots. Never
// more than five have one, and as good as always five do: a slot that is given
// back is free until its COMMIT and the next grant are through, or for as long as
// a waiter in the other process looks at one slot only.
func TestSlotsUnderLoad(t *testing.T) {
	onSlots(t, func(t *testing.T, s *scratch, strategy string, _ lockctx.Option) {
		const slots = 5
		exec(t, s.plain, sectionsTable)
		other, db := startChild(t, "crew", s.childDSN()), s.open()
		for _, way := range []string{byDo, byBeginTx} {
			c := crew{Way: way, Strategy: strategy, Workers: 25, Length: 2 * time.Second, Keys: 1, Most: 1, Slots: slots, Think: 100 * time.Millisecond}
			for round := 1; ; round++ {
				all, sum := s.work(other, db, c)
				most := wantExclusion(t, all)
				full, mean, longest := load(all, slots)
				t.Logf("%s: %d grants, %v to each worker; %.1f slots in use, all of them for %.0f%% of the time, some not for at most %d µs; longest wait %v",
					way, len(all), sum.Grants, mean, 100*full, longest, sum.Longest)
				if most == slots && mean >= slots/2. { // a machine with much else to do may need another try
					break
				}
				if round == 6 {
					t.Fatalf("%s: of %d slots at most %d were in use, %.1f in the mean", way, slots, most, mean)
				}
				c.Think, c.Length = 300*time.Millisecond, 5*time.Second // and needs longer to hand one over
			}
		}
	})
}

// load returns for which share of the time n sections were under way, how many
// were, and for how long at most fewer than n. The beginning and the end do not
// count. Between two sections there are a COMMIT and a grant, at least.
func load(all []section, n int) (full, mean float64, longest int64) {
	type change struct {
		at   int64
		step int
	}
	var changes []change
	for _, x := range all {
		changes = append(changes, change{x.began, 1}, change{x.ended, -1})
	}
	slices.SortFunc(changes, func(a, b change) int { return int(a.at - b.at) })
	begin, end := changes[0].at+300_000, changes[len(changes)-1].at-500_000
	under, last, since := 0, begin, begin // how many, from when on, and since when there are n or fewer
	var sum, whole int64
	for _, c := range changes {
		if at := min(c.at, end); at > last {
			sum += int64(under) * (at - last)
			if under == n {
				whole += at - last
			} else if under+c.step == n || at == end {
				longest = max(longest, at-since)
			}
			last = at
		}
		if under == n {
			since = last
		}
		under += c.step
	}
	return float64(whole) / float64(end-begin), float64(sum) / float64(end-begin), longest
}

// TestSlotsTellWho: holders have different slots, know which, and are told when
// there is none.
func TestSlotsTellWho(t *testing.T) {
	onSlots(t, func(t *testing.T, s *scratch, strategy string, kind lockctx.Option) {
		const slots = 4
		dbs := []*sql.DB{s.open(), s.open()}
		var holds []*mysqllock.Hold
		var taken []int
		for i := range slots {
			h, err := mysqllock.Acquire(limited(t), dbs[i%2], "k", kind, lockctx.Slots(slots), lockctx.NoWait())
			ok(t, err)
			slot, there := mysqllock.Slot(h.Context())
			if !there {
				t.Error("a holder does not know its slot")
			}
			holds, taken = append(holds, h), append(taken, slot)
		}
		if slices.Sort(taken); !slices.Equal(taken, []int{0, 1, 2, 3}) {
			t.Errorf("the slots are %v", taken)
		}
		for i, db := range []*sql.DB{dbs[0], dbs[1], s.open()} {
			ctx := lockctx.With(limited(t), "k", kind, lockctx.Slots(slots), lockctx.NoWait())
			_, err := db.BeginTx(ctx, nil)
			var e *mysqllock.Error
			if !errors.Is(err, mysqllock.ErrLocked) || errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Key != "k" || e.Strategy != strategy {
				t.Errorf("handle %d, NoWait: %v", i, err)
			}
			wantSlot(t, ctx, -1)
			const wait = 600 * time.Millisecond
			start := time.Now()
			_, err = db.BeginTx(lockctx.With(limited(t), "k", kind, lockctx.Slots(slots), lockctx.Wait(wait)), nil)
			if took := time.Since(start); !errors.Is(err, mysqllock.ErrTimeout) || !errors.As(err, &e) || e.Key != "k" || e.Waited < wait-10*time.Millisecond || took > wait+10*time.Second {
				t.Errorf("handle %d: after %v, Wait(%v): %v", i, took, wait, err)
			}
			early, cancel := context.WithTimeout(limited(t), 300*time.Millisecond)
			start = time.Now()
			_, err = mysqllock.Acquire(early, db, "k", kind, lockctx.Slots(slots), lockctx.Wait(time.Minute))
			if took := time.Since(start); !errors.Is(err, mysqllock.ErrTimeout) || !errors.Is(err, context.DeadlineExceeded) || took > 10*time.Second {
				t.Errorf("handle %d: after %v, a context that ends: %v", i, took, err)
			}
			cancel()
		}
		// A slot that is given back is the next holder's.
		for _, h := range holds {
			slot, _ := mysqllock.Slot(h.Context())
			ok(t, h.Release())
			ctx := lockctx.With(limited(t), "k", kind, lockctx.Slots(slots))
			tx, err := dbs[0].BeginTx(ctx, nil)
			ok(t, err)
			wantSlot(t, ctx, slot)
			defer tx.Rollback()
		}
	})
}

// TestSlotZeroIsTheKey: the lock itself and slot 0 exclude each other, and other
// slots do not mind it.
func TestSlotZeroIsTheKey(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		free := func(opts ...lockctx.Option) bool {
			t.Helper()
			h, err := mysqllock.Acquire(limited(t), other, "k", append(opts, lockctx.NoWait())...)
			if err == nil {
				ok(t, h.Release())
			} else if !errors.Is(err, mysqllock.ErrLocked) {
				t.Error(err)
			}
			return err == nil
		}
		for _, plain := range slotKinds {
			for _, slotted := range slotKinds {
				what := plain.strategy + ", slots " + slotted.strategy
				h, err := mysqllock.Acquire(limited(t), db, "k", plain.option)
				ok(t, err)
				if free(slotted.option, lockctx.Slots(1)) {
					t.Errorf("%s: the only slot is free while the key is held", what)
				}
				if !free(slotted.option, lockctx.Slots(2)) {
					t.Errorf("%s: no slot is free while only the key is held", what)
				}
				two, err := mysqllock.Acquire(limited(t), db, "k", slotted.option, lockctx.Slots(2))
				ok(t, err)
				wantSlot(t, two.Context(), 1)
				ok(t, h.Release())
				if !free(plain.option) {
					t.Errorf("%s: slot 1 keeps the key", what)
				}
				one, err := mysqllock.Acquire(limited(t), db, "k", slotted.option, lockctx.Slots(2))
				ok(t, err)
				wantSlot(t, one.Context(), 0)
				if free(plain.option) || free(plain.option, lockctx.Slots(2)) {
					t.Errorf("%s: the key or a slot is free while both slots are taken", what)
				}
				ok(t, one.Release())
				ok(t, two.Release())
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
		h, err := mysqllock.Acquire(context.Background(), db, "k", kind.option, lockctx.Slots(3))
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Println(mysqllock.Slot(h.Context()))
	}
}

// TestSlotsOfAKilledProcess come back: at once, or when the lease has run out.
func TestSlotsOfAKilledProcess(t *testing.T) {
	onSlots(t, func(t *testing.T, s *scratch, strategy string, kind lockctx.Option) {
		c, db := startChild(t, "slots", s.childDSN()), s.open()
		for range 2 {
			fmt.Fprintln(c.in, strategy)
			if line := c.line(); !strings.HasSuffix(line, "true") {
				t.Fatal(line)
			}
		}
		last, err := mysqllock.Acquire(limited(t), db, "k", kind, lockctx.Slots(3))
		ok(t, err)
		if _, err := mysqllock.Acquire(limited(t), db, "k", kind, lockctx.Slots(3), lockctx.NoWait()); !errors.Is(err, mysqllock.ErrLocked) {
			t.Errorf("a fourth of three slots: %v", err)
		}
		killed := time.Now()
		ok(t, c.cmd.Process.Kill())
		for range 2 {
			h, err := mysqllock.Acquire(limited(t), db, "k", kind, lockctx.Slots(3), lockctx.Wait(20*time.Second))
			ok(t, err)
			defer h.Release()
		}
		if took := time.Since(killed); took > 20*time.Second { // the default TTL is longer
			t.Errorf("the slots of a killed process were back after %v", took)
		} else {
			t.Logf("back after %v", took)
		}
		ok(t, last.Release())
	})
}

// TestSlotsChange: the number of slots goes from 5 to 3 and back while they are
// in use. Nobody has a slot that another has, or above its own number.
func TestSlotsChange(t *testing.T) {
	onSlots(t, func(t *testing.T, s *scratch, strategy string, _ lockctx.Option) {
		exec(t, s.plain, sectionsTable)
		dbs := []*sql.DB{s.open(), s.open()}
		var slots [2]atomic.Int32 // of each process, which are not told at the same time
		change := func(think time.Duration) {
			slots[0].Store(5)
			slots[1].Store(5)
			end := time.Now().Add(2400 * time.Millisecond)
			var all sync.WaitGroup
			for worker := range 20 {
				all.Go(func() {
					for time.Now().Before(end) {
						c := crew{Way: []string{byBeginTx, byDo}[rand.IntN(2)], Strategy: strategy, Keys: 1, Most: 1, Slots: int(slots[worker%2].Load()), Think: think}
						if _, err := c.take(dbs[worker%2], nil, fmt.Sprint(worker)); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			for _, n := range []int32{5, 3, 5} {
				for process := range slots {
					slots[process].Store(n)
					time.Sleep(400 * time.Millisecond)
				}
			}
			all.Wait()
		}
		for round := 1; ; round++ { // on a busy machine there may be fewer at the same time
			change(10 * time.Millisecond << round)
			had := s.sections()
			few := slices.DeleteFunc(slices.Clone(had), func(x section) bool { return x.slots != 3 })
			most := wantExclusion(t, had)
			_, mostOfFew := overlaps(few)
			t.Logf("%d sections, %d of them with 3 slots", len(had), len(few))
			if most == 5 && mostOfFew == 3 {
				break
			}
			if most > 5 || mostOfFew > 3 || round == 6 {
				t.Fatalf("at most %d at the same time, want 5, and %d of those who said 3", most, mostOfFew)
			}
		}
	})
}

// TestSlotsJoin: who has a slot and asks again joins, as far as that slot is one
// of those that are asked for.
func TestSlotsJoin(t *testing.T) {
	onSlots(t, func(t *testing.T, s *scratch, strategy string, kind lockctx.Option) {
		db, other := s.open(), s.open()
		taken := func(n int) (taken int) { // of n slots
			t.Helper()
			var holds []*mysqllock.Hold
			for {
				h, err := mysqllock.Acquire(limited(t), other, "k", kind, lockctx.Slots(n), lockctx.NoWait())
				if err != nil {
					break
				}
				holds = append(holds, h)
			}
			for _, h := range holds {
				ok(t, h.Release())
			}
			return n - len(holds)
		}
		ok(t, mysqllock.Do(limited(t), db, "k", func(ctx context.Context) error {
			slot, _ := mysqllock.Slot(ctx)
			for range 2 {
				ok(t, mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
					wantSlot(t, ctx, slot)
					return nil
				}, kind, lockctx.Slots(3)))
				inner := lockctx.With(ctx, "k", kind, lockctx.Slots(5))
				tx, err := db.BeginTx(inner, nil)
				ok(t, err)
				wantSlot(t, inner, slot)
				ok(t, tx.Commit())
			}
			if n := taken(5); n != 1 {
				t.Errorf("%d slots are taken, want 1", n)
			}
			return nil
		}, kind, lockctx.Slots(3)))

		// Asked for with two numbers before it is locked, it is one of the fewer.
		for range 5 {
			for _, n := range [][]int{{5, 1}, {1, 5}} {
				ctx := lockctx.With(lockctx.With(limited(t), "k", kind, lockctx.Slots(n[0])), "k", kind, lockctx.Slots(n[1]))
				tx, err := db.BeginTx(ctx, nil)
				ok(t, err)
				wantSlot(t, ctx, 0)
				if n := taken(1); n != 1 {
					t.Error("the only slot is free")
				}
				ok(t, tx.Rollback())
			}
		}

		// The key itself is its first slot.
		ctx := lockctx.With(lockctx.With(limited(t), "k", kind), "k", kind, lockctx.Slots(1), lockctx.Wait(time.Second))
		tx, err := db.BeginTx(ctx, nil)
		ok(t, err)
		_, err = tx.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
		ok(t, err)
		wantSlot(t, ctx, 0)
		ok(t, tx.Commit())
		wantSlot(t, ctx, -1)
		if n := taken(5); n != 0 {
			t.Errorf("%d slots are taken, want none", n)
		}
	})
}

// TestSlotIsFenced: who has lost the lease on its slot commits nothing, and is
// told of the key by its name.
func TestSlotIsFenced(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		for range 4 { // whichever slot it is
			ctx := lockctx.With(limited(t), "k", lockctx.Lease(ttl), lockctx.Slots(4))
			tx, err := db.BeginTx(ctx, nil)
			ok(t, err)
			exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 1")
			exec(t, s.plain, "UPDATE mysqllock SET owner = 'thief#00000000', token = token + 1 WHERE owner IS NOT NULL")
			err = tx.Commit()
			wantLost(t, "Commit", err)
			var e *mysqllock.Error
			if !errors.As(err, &e) || e.Key != "k" {
				t.Errorf("the error is of another key: %v", err)
			}
			s.wantStock(1, 10)
			exec(t, s.plain, "UPDATE mysqllock SET owner = NULL")
		}
	})
}
