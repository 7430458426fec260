package inspect_test

import (
	"context"
	"database/sql"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/keyrow"
)

// deadlock has two transactions wait for each other's row.
func (s *scratch) deadlock() {
	s.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	begin := func(id string) *sql.Tx {
		tx := dbtest.Begin(s.T, ctx, s.root)
		dbtest.ExecIn(s.T, ctx, tx, "UPDATE pair SET n = n + 1 WHERE id = "+id)
		return tx
	}
	one, other := begin("1"), begin("2")
	answers := make(chan error, 2)
	for tx, id := range map[*sql.Tx]string{one: "2", other: "1"} {
		go func() {
			_, err := tx.ExecContext(ctx, "UPDATE pair SET n = n + 1 WHERE id = "+id)
			answers <- err
			_ = tx.Rollback()
		}()
	}
	if a, b := <-answers, <-answers; (a == nil) == (b == nil) {
		s.T.Fatalf("of two that wait for each other, the answers are %v and %v", a, b)
	}
}

func TestDeadlocksAreCountedWhenAskedFor(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.root, "CREATE TABLE pair (id INT PRIMARY KEY, n INT NOT NULL) ENGINE=InnoDB")
		dbtest.Exec(t, s.root, "INSERT INTO pair VALUES (1, 0), (2, 0)")
		count := func(db *sql.DB) *inspect.Snapshot {
			t.Helper()
			snap, err := s.inspector(db).Snapshot(t.Context(), inspect.Filter{Deadlocks: true})
			dbtest.OK(t, err)
			return snap
		}
		before := count(s.root).Deadlocks
		if before.IsZero() {
			t.Fatal("they are not counted")
		}
		s.deadlock()
		s.deadlock()
		after := count(s.root).Deadlocks
		if after.IsZero() {
			t.Fatal("they are not counted any more")
		} else if value(after) != value(before)+2 {
			t.Errorf("after two of them they count %v, and %v before", after, before)
		}
		if snap := look(t, s.inspector(s.root)); !snap.Deadlocks.IsZero() {
			t.Errorf("counted although nobody asked: %v", snap.Deadlocks)
		}

		// MariaDB tells everybody.
		user := s.user()
		snap := count(s.open(user))
		g := gap(snap, "deadlocks")
		if s.kind == mysqlServer {
			if g == nil || !snap.Deadlocks.IsZero() || !strings.HasPrefix(g.Remedy, "GRANT SELECT ON performance_schema.* TO '"+user) {
				t.Errorf("without rights they count %v, and the gaps are %+v", snap.Deadlocks, snap.Gaps)
			}
		} else if g != nil || snap.Deadlocks.IsZero() {
			t.Errorf("without rights they count %v, and the gaps are %+v", snap.Deadlocks, snap.Gaps)
		}
	})
}

// TestBothSidesOfTheLatestDeadlockAreTold: with what each held and wanted; of rows of the lock table, the keys. An
// account without PROCESS is told nothing, and that is no error.
func TestBothSidesOfTheLatestDeadlockAreTold(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		db := s.process("root", "holder")
		dbtest.OK(t, s.acquire(db, "a").Release())
		dbtest.OK(t, s.acquire(db, "it's B").Release())
		ctx := dbtest.Limited(t)
		lock := func(tx *sql.Tx, key string) error {
			var token int
			return tx.QueryRowContext(ctx, "SELECT token FROM mysqllock WHERE namespace = ? AND name = ? FOR UPDATE", s.Name, keyrow.Name(key)).Scan(&token)
		}
		one, other := dbtest.Begin(t, ctx, s.root), dbtest.Begin(t, ctx, s.root)
		dbtest.OK(t, lock(one, "a"))
		dbtest.OK(t, lock(other, "it's B"))
		var both sync.WaitGroup
		for tx, key := range map[*sql.Tx]string{one: "it's B", other: "a"} {
			both.Go(func() { _ = lock(tx, key); _ = tx.Rollback() })
		}
		both.Wait()
		d, err := s.inspector(s.root).LatestDeadlock(ctx)
		dbtest.OK(t, err)
		if d == nil || len(d.Sides) != 2 || d.Time == "" {
			t.Fatalf("the deadlock is %+v", d)
		}
		wanted := map[string]bool{`"a"`: true, `"it's B"`: true}
		for _, side := range d.Sides {
			if !wanted[side.WaitsFor] || side.Holds == side.WaitsFor || side.ConnectionID == 0 || !strings.HasPrefix(side.Account, "root@") ||
				!strings.HasPrefix(side.Statement, "SELECT token FROM mysqllock WHERE namespace = ?") || strings.Contains(side.Statement, s.Name) {
				t.Errorf("a side is %+v", side)
			}
			delete(wanted, side.WaitsFor)
		}
		if d.Sides[0].RolledBack == d.Sides[1].RolledBack {
			t.Errorf("rolled back are %+v", d.Sides)
		}
		d, err = s.inspector(s.open(s.user())).LatestDeadlock(ctx)
		if d != nil || err != nil {
			t.Errorf("without PROCESS it is %+v, %v", d, err)
		}
	})
}
