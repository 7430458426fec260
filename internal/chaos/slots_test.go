package chaos

import (
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
