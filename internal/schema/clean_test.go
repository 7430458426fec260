package schema_test

import (
	"context"
	"database/sql/driver"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
)

// row makes a row whose lease ended, or will end, so long from now.
func (s *scratch) row(c driver.Conn, name, owner string, token int, end time.Duration) {
	s.T.Helper()
	s.Exec(c, fmt.Sprintf("INSERT INTO %s (namespace, name, owner, token, expires) VALUES ('app', '%s', %s, %d, UTC_TIMESTAMP(6) + INTERVAL %d MICROSECOND)",
		s.table, name, owner, token, end.Microseconds()))
}

func (s *scratch) names(c driver.Conn) (names []string) {
	s.T.Helper()
	for _, row := range s.Query(c, "SELECT name FROM "+s.table.String()+" WHERE namespace <> '' ORDER BY name") {
		names = append(names, row[0])
	}
	return names
}

func (s *scratch) highWater(c driver.Conn) string {
	s.T.Helper()
	return s.One(c, "SELECT token FROM "+s.table.String()+" WHERE namespace = '' AND name = ''")
}

// wantNoTransaction checks that c is in none: what it does is committed at once.
func (s *scratch) wantNoTransaction(c driver.Conn) {
	s.T.Helper()
	s.Exec(c, "INSERT INTO "+s.table.String()+" (namespace, name, expires) VALUES ('app', 'probe', UTC_TIMESTAMP(6))")
	other, probe := s.open(), s.table.String()+" WHERE namespace = 'app' AND name = 'probe'"
	s.Exec(other, "SELECT 1 FROM "+probe+" FOR UPDATE NOWAIT")
	s.Exec(other, "DELETE FROM "+probe)
}

func TestCleanRemovesOnlyRowsThatNobodyUses(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open() // in no database
		s.setup(c)
		clean := func(limit, want int, highWater string, left ...string) {
			t.Helper()
			n, err := s.table.Clean(t.Context(), c, time.Minute, limit)
			if err != nil || n != want {
				t.Fatalf("removed %d, %v, want %d", n, err, want)
			}
			if got := s.names(c); !slices.Equal(got, left) {
				t.Errorf("left are %q, want %q", got, left)
			}
			dbtest.Equal(t, "the high-water mark is %s", s.highWater(c), highWater)
		}
		clean(10, 0, "0") // the high-water mark is old, and stays
		s.row(c, "fresh", "NULL", 50, -time.Second)
		s.row(c, "live", "'x'", 60, time.Hour)
		s.row(c, "locked", "NULL", 70, -2*time.Minute)
		s.row(c, "old 1", "'dead'", 7, -2*time.Minute)
		s.row(c, "old 2", "NULL", 5, -2*time.Minute)
		s.row(c, "old 3", "NULL", 6, -2*time.Minute)
		s.row(c, "released early", "NULL", 80, time.Hour)

		holder := s.open()
		s.Exec(holder, "BEGIN")
		s.Exec(holder, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name = 'locked' FOR UPDATE")
		clean(10, 3, "70", "fresh", "live", "locked", "released early") // that of a row that it finds locked may be in the high-water mark
		s.wantNoTransaction(c)
		clean(10, 0, "70", "fresh", "live", "locked", "released early")
		s.wantNoTransaction(c)
		s.Exec(holder, "ROLLBACK")

		// The limit, and a high-water mark that is higher already.
		s.Exec(c, "UPDATE "+s.table.String()+" SET token = 1000 WHERE namespace = ''")
		s.row(c, "old 4", "NULL", 9, -2*time.Minute)
		clean(1, 1, "1000", "fresh", "live", "old 4", "released early")
		clean(1, 1, "1000", "fresh", "live", "released early")

		// An unused time of nothing still leaves what is live.
		if n, err := s.table.Clean(t.Context(), c, -time.Hour, 10); err != nil || n != 1 {
			t.Errorf("removed %d, %v", n, err)
		}
		if got := s.names(c); !slices.Equal(got, []string{"live", "released early"}) {
			t.Errorf("left are %q", got)
		}
	})
}

// TestCleanLocksOnlyWhatItRemoves looks at the locks of a clean-up that stops
// before its end.
func TestCleanLocksOnlyWhatItRemoves(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.setup(c)
		for i := range 6 {
			s.row(c, fmt.Sprint("old ", i), "NULL", i, -2*time.Minute)
			s.row(c, fmt.Sprint("young ", i), "NULL", i, 0)
		}
		stopped := &stopBefore{Conn: c, text: "DELETE", then: func() {
			other := s.open()
			n := len(s.Query(other, "SELECT 1 FROM "+s.table.String()+" WHERE namespace = 'app' AND name LIKE 'young%' FOR UPDATE SKIP LOCKED"))
			if n != 6 {
				t.Errorf("%d of 6 young rows are not locked", n)
			}
			s.Exec(other, "INSERT INTO "+s.table.String()+" (namespace, name) VALUES ('app', 'between')")
		}}
		if n, err := s.table.Clean(dbtest.Limited(t), stopped, time.Minute, 4); err != nil || n != 4 {
			t.Errorf("removed %d, %v", n, err)
		}
	})
}

// TestCleanLooksAgain: a row that comes into use after it was found stays.
func TestCleanLooksAgain(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c, other := s.open(), s.open()
		s.setup(c)
		s.row(c, "leased", "NULL", 1, -2*time.Minute)
		s.row(c, "removed", "NULL", 2, -2*time.Minute)
		s.row(c, "unused", "NULL", 3, -2*time.Minute)
		stopped := &stopBefore{Conn: c, text: "START", then: func() {
			s.Exec(other, "UPDATE "+s.table.String()+" SET owner = 'x', expires = UTC_TIMESTAMP(6) + INTERVAL 1 HOUR WHERE namespace = 'app' AND name = 'leased'")
			s.Exec(other, "DELETE FROM "+s.table.String()+" WHERE namespace = 'app' AND name = 'removed'")
		}}
		if n, err := s.table.Clean(dbtest.Limited(t), stopped, time.Minute, 10); err != nil || n != 1 {
			t.Errorf("removed %d, %v", n, err)
		}
		if got := s.names(c); !slices.Equal(got, []string{"leased"}) {
			t.Errorf("left are %q", got)
		}
	})
}

// stopBefore calls a function before a statement that begins with text.
type stopBefore struct {
	driver.Conn
	text string
	then func()
}

func (sb *stopBefore) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	if len(text) >= len(sb.text) && text[:len(sb.text)] == sb.text {
		sb.then()
	}
	return sb.Conn.(driver.ExecerContext).ExecContext(ctx, text, args)
}

func (sb *stopBefore) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return sb.Conn.(driver.QueryerContext).QueryContext(ctx, text, args)
}

// TestACleanUpThatFailsRemovesNothing, whatever goes wrong, and leaves no transaction open.
func TestACleanUpThatFailsRemovesNothing(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		root := s.open()
		s.setup(root)
		s.row(root, "old", "NULL", 7, -2*time.Minute)
		user := "u_" + s.Name[len(s.Name)-8:]
		s.Exec(root, "CREATE USER '"+user+"'@'%'")
		s.Exec(root, "GRANT SELECT, INSERT, UPDATE ON "+s.Name+".* TO '"+user+"'@'%'")
		c := s.Connect(dbtest.NoDatabase, dbtest.As(user))
		if n, err := s.table.Clean(t.Context(), c, time.Minute, 10); n != 0 || !server.Denied(err) {
			t.Errorf("without DELETE: removed %d, %v", n, err)
		}
		s.wantNoTransaction(c)
		s.wantUntouched(root)

		ctx, cancel := context.WithCancel(t.Context())
		inTime := &stopBefore{s.open(), "DELETE", cancel}
		if n, err := s.table.Clean(ctx, inTime, time.Minute, 10); n != 0 || err == nil {
			t.Errorf("cancelled: removed %d, %v", n, err)
		}
		s.wantUntouched(root)

		late := &stopBefore{s.open(), "COMMIT", nil}
		late.then = func() { late.Conn.Close() }
		if n, err := s.table.Clean(t.Context(), late, time.Minute, 10); n != 0 || err == nil {
			t.Errorf("broken: removed %d, %v", n, err)
		}
		s.wantUntouched(root)

		s.Exec(root, "DELETE FROM "+s.table.String()+" WHERE namespace = ''")
		if n, err := s.table.Clean(t.Context(), root, time.Minute, 10); n != 0 || err == nil {
			t.Errorf("without the high-water mark: removed %d, %v", n, err)
		}
		s.wantNoTransaction(root)
	})
}

func (s *scratch) wantUntouched(c driver.Conn) {
	s.T.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if len(s.Query(c, "SELECT 1 FROM "+s.table.String()+" FOR UPDATE SKIP LOCKED")) == 2 { // the server has noticed the end
			break
		}
	}
	if got := s.names(c); !slices.Equal(got, []string{"old"}) || s.highWater(c) != "7" {
		s.T.Errorf("left are %q over the high-water mark %s", got, s.highWater(c))
	}
}

// TestOneRunOfACleanUpIsBounded, with the longest of keys.
func TestOneRunOfACleanUpIsBounded(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.setup(c)
		const rows = 1200
		s.Exec(c, "INSERT INTO "+s.table.String()+" (namespace, name, token)"+
			" WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < "+strconv.Itoa(rows/2)+
			") SELECT REPEAT(ns, 255), CONCAT(REPEAT('k', 251), LPAD(i, 4, '0')), i FROM n, (SELECT 'a' AS ns UNION SELECT 'b') b")
		began := time.Now()
		var sum, runs int
		for cleaner := s.table.Cleaner(time.Minute); !cleaner.Done; runs++ {
			dbtest.OK(t, cleaner.Step(dbtest.Limited(t), c, 100_000))
			if n := cleaner.Removed - sum; n > 500 {
				t.Errorf("%d rows were removed in one transaction", n)
			}
			sum = cleaner.Removed
		}
		t.Logf("%d rows in %d runs, %v", sum, runs, time.Since(began))
		if sum != rows || runs < 3 || s.highWater(c) != strconv.Itoa(rows/2) {
			t.Errorf("%d rows were removed in %d runs, and the high-water mark is %s", sum, runs, s.highWater(c))
		}
	})
}

// TestCleanUpsAndRowLocksEndWithoutADeadlock on the same rows.
func TestCleanUpsAndRowLocksEndWithoutADeadlock(t *testing.T) {
	dbtest.OnEveryServer(t, newScratch, func(t *testing.T, s *scratch) {
		c := s.open()
		s.setup(c)
		for i := range 300 {
			s.row(c, fmt.Sprint(i), "NULL", i, -2*time.Minute)
		}
		var all sync.WaitGroup
		var sum int
		var mu sync.Mutex
		for range 4 {
			c := s.open()
			all.Go(func() {
				for range 50 {
					n, err := s.table.Clean(dbtest.Limited(t), c, time.Minute, 10)
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					sum += n
					mu.Unlock()
				}
			})
		}
		all.Wait()
		for len(s.names(c)) > 0 {
			n, err := s.table.Clean(dbtest.Limited(t), c, time.Minute, 100)
			dbtest.OK(t, err)
			sum += n
		}
		if sum != 300 || s.highWater(c) != "299" {
			t.Errorf("%d rows were removed, and the high-water mark is %s", sum, s.highWater(c))
		}
	})
}
