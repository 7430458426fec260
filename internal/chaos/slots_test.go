package chaos

import (
	"database/sql"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/hint"
)

// eachWithSlots runs a test with each strategy that has slots.
func eachWithSlots(test func(t *testing.T, s *scratch, strategy string)) func(t *testing.T, s *scratch) {
	return func(t *testing.T, s *scratch) {
		for _, strategy := range []string{hint.StrategyRow, hint.StrategyLease} {
			t.Run(strategy, func(t *testing.T) { test(t, newScratch(s.Beside(t)), strategy) })
		}
	}
}

// TestSlotsByEachWay: there are never more holders than slots, however they ask,
// and all slots are used.
func TestSlotsByEachWay(t *testing.T) {
	dbtest.OnServers(t, newScratch, eachWithSlots(func(t *testing.T, s *scratch, strategy string) {
		const slots = 3
		dbtest.Exec(t, s.Plain, sectionsTable)
		other, db := dbtest.StartJob(t, "crew", s.DSN("lockWait=2m")), s.Handle("lockWait=2m")
		highest := 0
		try := func(way string, think time.Duration) {
			all, sum := s.work(other, db, crew{Way: way, Strategy: strategy, Workers: 4, Length: 50 * think, Keys: 1, Most: 1, Slots: slots, Think: think})
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
		for _, way := range allWays {
			try(way, 10*time.Millisecond)
		}
		for round := 1; highest < slots && round < 7; round++ { // on a busy machine there may be fewer at the same time
			try(byBeginTx, 10*time.Millisecond<<round)
		}
		if highest != slots {
			t.Errorf("at most %d of %d slots were in use", highest, slots)
		}
	}))
}

// TestSlotsUnderLoad: 50 workers in two processes want one of five slots. Never
// more than five have one, and as good as always five do: a slot that is given
// back is free until its COMMIT and the next grant are through, or for as long as
// a waiter in the other process looks at one slot only.
func TestSlotsUnderLoad(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, eachWithSlots(func(t *testing.T, s *scratch, strategy string) {
		const slots = 5
		dbtest.Exec(t, s.Plain, sectionsTable)
		other, db := dbtest.StartJob(t, "crew", s.DSN("lockWait=2m")), s.Handle("lockWait=2m")
		for _, way := range []string{byDo, byBeginTx} {
			c := crew{Way: way, Strategy: strategy, Workers: 25, Length: 2 * time.Second, Keys: 1, Most: 1, Slots: slots, Think: 100 * time.Millisecond}
			for round := 1; ; round++ {
				all, sum := s.work(other, db, c)
				most := wantExclusion(t, all)
				full, mean, longest := inUse(all, slots)
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
	}))
}

// inUse returns for which share of the time n sections were under way, how many
// were, and for how long at most fewer than n. The beginning and the end do not
// count. Between two sections there are a COMMIT and a grant, at least.
func inUse(all []section, n int) (full, mean float64, longest int64) {
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

// TestSlotsChange: the number of slots goes from 5 to 3 and back while they are
// in use. Nobody has a slot that another has, or above its own number.
func TestSlotsChange(t *testing.T) {
	dbtest.OnServers(t, newScratch, eachWithSlots(func(t *testing.T, s *scratch, strategy string) {
		dbtest.Exec(t, s.Plain, sectionsTable)
		dbs := []*sql.DB{s.Handle("lockWait=2m"), s.Handle("lockWait=2m")}
		var slots [2]atomic.Int32 // of each process, which are not told at the same time
		change := func(think, phase time.Duration) {
			slots[0].Store(5)
			slots[1].Store(5)
			end := time.Now().Add(6 * phase)
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
					time.Sleep(phase)
				}
			}
			all.Wait()
		}
		for round := 1; ; round++ { // on a busy machine there may be fewer at the same time
			change(10*time.Millisecond<<round, time.Duration(round)*400*time.Millisecond)
			had := s.sections()
			few := slices.DeleteFunc(slices.Clone(had), func(x section) bool { return x.slots != 3 })
			most := wantExclusion(t, had)
			mostOfFew := atOnce(few)
			t.Logf("%d sections, %d of them with 3 slots", len(had), len(few))
			if most == 5 && mostOfFew == 3 {
				break
			}
			if most > 5 || mostOfFew > 3 || round == 6 {
				t.Fatalf("at most %d at the same time, want 5, and %d of those who said 3", most, mostOfFew)
			}
		}
	}))
}
