package schema_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/lockerr"
)

// newRow makes a row as the driver does: with the high-water mark's token, which is locked
// meanwhile.
func (s *scratch) newRow(name string) string {
	return "INSERT IGNORE INTO " + s.table.String() + " (namespace, name, token, expires) SELECT 'app', '" + name + "', token, UTC_TIMESTAMP(6) FROM " +
		s.table.String() + " WHERE " + schema.HighWater + " LOCK IN SHARE MODE"
}

// fill makes rows "old 0000000"… and, between them, as many "young" ones as every says.
func (s *scratch) fill(prefix string, rows int, age time.Duration) {
	s.T.Helper()
	c := s.open()
	s.Exec(c, "SET SESSION /*!80000 cte_max_recursion_depth */ /*M!100000 max_recursive_iterations */ = 20000000")
	s.Exec(c, fmt.Sprintf("INSERT INTO %s (namespace, name, token, expires)"+
		" WITH RECURSIVE n AS (SELECT 0 AS i UNION ALL SELECT i + 1 FROM n WHERE i < %d)"+
		" SELECT 'app', CONCAT('%s ', LPAD(i, 8, '0')), i, UTC_TIMESTAMP(6) - INTERVAL %d SECOND FROM n",
		s.table, rows-1, prefix, int(age.Seconds())))
}

// TestNewRowsDoNotKeepOldOnesFromBeingRemoved, although they are being made all the time.
func TestNewRowsDoNotKeepOldOnesFromBeingRemoved(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		s.setup(s.open())
		s.fill("old", 3000, time.Hour)
		var makers sync.WaitGroup
		var made atomic.Int64
		stop := make(chan struct{})
		for i := range 4 {
			c := s.open()
			makers.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					default:
					}
					if err := server.Exec(context.Background(), c, s.newRow(fmt.Sprintf("new %d %d", i, n))); err != nil {
						t.Errorf("making a row: %v", err)
						return
					}
					made.Add(1)
				}
			})
		}
		removed, err := s.table.Clean(dbtest.Limited(t), s.open(), time.Minute, 1_000_000)
		close(stop)
		makers.Wait()
		if removed != 3000 || err != nil {
			t.Errorf("%d rows of 3000 were removed, %v", removed, err)
		}
		t.Logf("%d rows were made meanwhile", made.Load())
		dbtest.Equal(t, "the high-water mark is %s", s.highWater(s.open()), "2999")
	})
}

// TestACleanUpWhoseHostVanishesHoldsNobodyUp, although it has rows locked: new rows are made as
// if nothing was, and the locked ones are free soon.
func TestACleanUpWhoseHostVanishesHoldsNobodyUp(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.setup(c)
		s.fill("old", 100, time.Hour)
		s.Exec(c, schema.CleanSetup)
		vanished, frozen := make(chan struct{}), make(chan struct{})
		stopped := &stopBefore{Conn: c, text: "COMMIT", then: func() {
			close(vanished)
			<-frozen
		}}
		var host sync.WaitGroup
		host.Go(func() { _, _ = s.table.Clean(context.Background(), stopped, time.Minute, 1000) })
		defer host.Wait()
		defer close(frozen)
		<-vanished
		other := s.open()
		s.Exec(other, "SET SESSION innodb_lock_wait_timeout = 1")
		for i := range 20 { // none waits for the high-water mark
			s.Exec(other, s.newRow(fmt.Sprint("new ", i)))
		}
		s.Exec(other, "SET SESSION innodb_lock_wait_timeout = 30")
		began := time.Now()
		s.Exec(other, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = 'old 00000000' FOR UPDATE")
		if took := time.Since(began); took > 15*time.Second {
			t.Errorf("the row was free after %v", took)
		}
	})
}

// TestALockedHighWaterMarkIsNoEmptyTable: one that somebody has locked for long is told from a
// table with nothing to remove.
func TestALockedHighWaterMarkIsNoEmptyTable(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c, other := s.open(), s.open()
		s.setup(c)
		s.fill("old", 10, time.Hour)
		s.Exec(c, schema.CleanSetup)
		s.Exec(other, "BEGIN")
		s.Exec(other, s.newRow("new"))
		n, err := s.table.Clean(dbtest.Limited(t), c, time.Minute, 1000)
		if n != 0 || !errors.Is(err, lockerr.ErrLocked) {
			t.Errorf("removed %d, %v", n, err)
		}
		s.Exec(other, "COMMIT")
		if n, err := s.table.Clean(dbtest.Limited(t), c, time.Minute, 1000); n != 10 || err != nil {
			t.Errorf("removed %d, %v", n, err)
		}
		s.Exec(other, "BEGIN")
		s.Exec(other, s.newRow("new"))
		s.Exec(other, "ROLLBACK")
		if n, err := s.table.Clean(dbtest.Limited(t), c, time.Minute, 1000); n != 0 || err != nil {
			t.Errorf("with nothing to remove: %d, %v", n, err)
		}
	})
}

// TestAMarkTellsOfACleanUpUnderWay, for some seconds, also where the server's clock was set
// back since then.
func TestAMarkTellsOfACleanUpUnderWay(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.setup(c)
		s.fill("old", 10, time.Hour)
		s.Exec(c, schema.CleanSetup)
		dbtest.OK(t, s.table.Cleaner(time.Minute).Step(dbtest.Limited(t), c, 1000))
		if rows := s.Query(c, s.table.CleaningSQL()); len(rows) != 1 {
			t.Error("nobody is told of a clean-up that is under way")
		}
		s.Exec(c, "UPDATE "+s.table.String()+" SET expires = expires + INTERVAL 1 HOUR WHERE "+schema.HighWater) // as if it was set back by that
		if rows := s.Query(c, s.table.CleaningSQL()); len(rows) != 0 {
			t.Error("a mark from before the clock was set back counts")
		}
	})
}

// TestCleanGoesOn: a clean-up looks at each row once, however many are used, and in
// memory that does not grow with their number.
func TestCleanGoesOn(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		const used, old = 60_000, 3_000
		c := s.open()
		s.setup(c)
		s.fill("a used", used, 0)
		s.fill("b old", old, time.Hour)
		s.fill("c used", used, 0)
		reads := func() int {
			n, _ := strconv.Atoi(s.Query(c, "SHOW SESSION STATUS LIKE 'Handler_read_next'")[0][1])
			return n
		}
		before := reads()
		var most uint64
		var memory runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&memory)
		base := memory.HeapAlloc
		cleaner := s.table.Cleaner(30 * time.Minute) // longer than the test takes
		for !cleaner.Done {
			dbtest.OK(t, cleaner.Step(dbtest.Limited(t), c, 1_000_000))
			runtime.GC()
			runtime.ReadMemStats(&memory)
			most = max(most, memory.HeapAlloc)
		}
		if cleaner.Removed != old || cleaner.Left != 0 {
			t.Errorf("it has done %+v", cleaner)
		}
		if all := used + old + used + 1; cleaner.Looked != all {
			t.Errorf("it has looked at %d rows of %d", cleaner.Looked, all)
		}
		// Each row is read to find the end of the step, and to look at it.
		if n := reads() - before; n > 5*(2*used+old) {
			t.Errorf("the server has read %d rows", n)
		}
		if most > base+32<<20 {
			t.Errorf("it took %d MiB", (most-base)>>20)
		}
	})
}

// TestACleanUpRemovesAsManyRowsAsThereAre: CLEAN_ROWS says how many.
func TestACleanUpRemovesAsManyRowsAsThereAre(t *testing.T) {
	rows, err := strconv.Atoi(os.Getenv("CLEAN_ROWS"))
	if err != nil {
		t.Skip("CLEAN_ROWS says how many rows it is to be tried with")
	}
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.setup(c)
		began := time.Now()
		s.fill("old", rows, time.Hour)
		t.Logf("%d rows were made in %v", rows, time.Since(began))
		began = time.Now()
		cleaner := s.table.Cleaner(30 * time.Minute) // longer than the test takes
		var longest time.Duration
		for !cleaner.Done {
			step, before := time.Now(), cleaner.Removed*10/rows
			dbtest.OK(t, cleaner.Step(context.Background(), c, 1<<30))
			longest = max(longest, time.Since(step))
			if tenths := cleaner.Removed * 10 / rows; tenths > before {
				t.Logf("%d0%% after %v", tenths, time.Since(began).Round(time.Millisecond))
			}
		}
		var memory runtime.MemStats
		runtime.ReadMemStats(&memory)
		t.Logf("%d rows were removed in %v, the longest step took %v, %d MiB of the system's memory", cleaner.Removed, time.Since(began), longest, memory.Sys>>20)
		if cleaner.Removed != rows {
			t.Errorf("%d of %d rows were removed", cleaner.Removed, rows)
		}
	})
}
