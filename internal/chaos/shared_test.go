package chaos

import (
	"database/sql"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestSharedByEachWay: readers go together, and nobody beside a writer, however
// they ask.
func TestSharedByEachWay(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.Plain, sectionsTable)
		other, db := dbtest.StartJob(t, "crew", s.DSN("lockWait=2m")), s.Handle("lockWait=2m")
		highest := 0
		read := func(way string, think time.Duration) (most, writers int) {
			all, sum := s.work(other, db, crew{Way: way, Workers: 4, Length: 40 * think, Keys: 1, Most: 1, Shared: 75, Think: think})
			most = wantExclusion(t, all)
			writers = len(slices.DeleteFunc(slices.Clone(all), func(x section) bool { return x.shared }))
			highest = max(highest, most)
			t.Logf("%s: %d sections, %d of writers, at most %d at the same time; longest wait %v", way, len(all), writers, most, sum.Longest)
			return most, writers
		}
		for _, way := range allWays {
			for round := 1; ; round++ {
				most, writers := read(way, 10*time.Millisecond)
				if most >= 2 && writers > 0 { // a busy machine may need another try
					break
				}
				if round == 10 {
					t.Fatalf("%s: at most %d readers at the same time, and %d writers", way, most, writers)
				}
			}
		}
		for round := 1; highest < 5 && round < 8; round++ {
			read(byBeginTx, 10*time.Millisecond<<round)
		}
		if highest < 5 { // more than a process has workers
			t.Errorf("at most %d readers at the same time", highest)
		}
	})
}

// TestWriterAmongReaders: among a steady stream of readers in two processes a
// writer, in one of them or in a third, gets in before many more have.
func TestWriterAmongReaders(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.Plain, sectionsTable)
		other, db, third := dbtest.StartJob(t, "crew", s.DSN("lockWait=2m")), s.Handle("lockWait=2m"), s.Handle("lockWait=2m")
		for _, db := range []*sql.DB{db, third} { // connections, and what comes with the first lock
			_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k00"), "DO 0")
			dbtest.OK(t, err)
		}
		const workers = 8
		type wait struct{ asked, granted int64 }
		var waits []wait
		var writer sync.WaitGroup
		writer.Go(func() {
			time.Sleep(300 * time.Millisecond)
			for i := range 20 {
				asked := time.Now().UnixMicro()
				tx, err := []*sql.DB{db, third}[i%2].BeginTx(lockctx.With(dbtest.Limited(t), "k00"), nil)
				if err != nil {
					t.Error(err)
					return
				}
				waits = append(waits, wait{asked, time.Now().UnixMicro()})
				dbtest.Exec(t, tx, "INSERT INTO sections (k, shared, slot, slots, who, began, ended) VALUES ('k00', FALSE, -1, 0, 'writer', ?, ?)", waits[i].granted, time.Now().UnixMicro())
				dbtest.OK(t, tx.Commit())
				time.Sleep(20 * time.Millisecond)
			}
		})
		all, _ := s.work(other, db, crew{Way: byBeginTx, Workers: workers, Length: 2 * time.Second, Keys: 1, Most: 1, Shared: 100, Think: 10 * time.Millisecond})
		writer.Wait()
		wantExclusion(t, s.sections())
		var grants []int
		var longest int64
		for _, w := range waits {
			n := 0
			for _, x := range all {
				if x.shared && w.asked < x.began && x.began < w.granted {
					n++
				}
			}
			grants, longest = append(grants, n), max(longest, w.granted-w.asked)
		}
		slices.Sort(grants)
		// Without a queue it would never get in. A machine that stands still for a
		// moment delays a writer that has not yet asked the server.
		if n := len(grants); n == 0 || grants[n*3/4] > 10*workers {
			t.Errorf("while a writer waited, %v readers of %d workers got in", grants, 2*workers)
		}
		t.Logf("readers that began while a writer waited: %v; longest wait %v; %d readers", grants, time.Duration(longest)*time.Microsecond, len(all))
	})
}
