package main

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/inspect/record"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestHistoryTellsOfAnEarlierTime: who held a key then, who waited, and what happened is what the test has done:
// a lease was taken away, another one ran out, and a deadlock was broken.
func TestHistoryTellsOfAnEarlierTime(t *testing.T) {
	aloneOnServers(t, func(t *testing.T, s *scratch) {
		s.command("schema", "apply").start().must(0)
		dbtest.Exec(t, s.root, "CREATE TABLE pair (id INT PRIMARY KEY, n INT NOT NULL) ENGINE=InnoDB")
		dbtest.Exec(t, s.root, "INSERT INTO pair VALUES (1, 0), (2, 0)")
		path := s.file("locks.jsonl")
		before := time.Now()
		recorder := s.command("record", "--to", path, "--every", "100ms").start()
		events := func(what string) (found []record.Event) {
			_ = record.Read(path, func(e record.Event) {
				if e.What == what {
					found = append(found, e)
				}
			})
			return found
		}
		recorded := func(what, key string) {
			t.Helper()
			dbtest.Soon(t, what+" "+key+" is recorded", func() bool {
				return slices.ContainsFunc(events(what), func(e record.Event) bool { return e.Key == key && e.Namespace == s.Name || key == "" })
			})
		}
		recorded(record.Began, "")
		hold := s.keep("k", lockctx.Lease(5*time.Minute))
		ctx, cancel := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		defer waiting.Wait()
		defer cancel()
		db := s.process("the waiter")
		waiting.Go(func() { _, _ = mysqllock.Acquire(ctx, db, "k", lockctx.Lease(5*time.Minute), lockctx.Wait(time.Hour)) })
		recorded(record.Holds, "k")
		recorded(record.Waits, "k")
		at := time.Now()

		s.command("release", "k", "--force", "--yes", "--reason", "hangs").start().must(0)
		recorded(record.Forced, "k")
		dbtest.Soon(t, "the waiter has it", func() bool { return len(events(record.Holds)) == 2 })
		cancel()
		waiting.Wait()
		recorded(record.HoldsNot, "k")

		dbtest.OK(t, s.keep("dead", lockctx.Lease(time.Minute)).Release()) // so that there is a row
		for len(events(record.Lost)) == 0 {                                // a slow machine may not see that it is not renewed
			dbtest.Exec(t, s.root, "UPDATE mysqllock SET owner = 'ghost:1:batch#0123abcd', token = token + 1, expires = UTC_TIMESTAMP(6) + INTERVAL 2 SECOND WHERE name = 'dead'")
			began := len(events(record.HoldsNot))
			dbtest.Soon(t, "it has run out", func() bool { return len(events(record.HoldsNot)) > began })
		}
		s.deadlock()
		recorded(record.Deadlocks, "")
		dbtest.OK(t, recorder.Process.Signal(syscall.SIGTERM))
		recorder.must(0)

		moment := func(at time.Time, keys ...string) (m record.Moment) {
			t.Helper()
			s.command(append([]string{"history", "--json", "--from", path, "--at", at.UTC().Format(time.RFC3339Nano)}, keys...)...).read(&m)
			return m
		}
		m := moment(at, "k")
		if len(m.Holders) != 1 || m.Holders[0].Program != "the holder" || *m.Holders[0].Token != hold.Token() || !m.Known {
			t.Errorf("at %v it was held by %+v", at, m.Holders)
		}
		if len(m.Waiters) != 1 || m.Waiters[0].Program != "the waiter" || m.Waiters[0].Since.Before(before.Add(-time.Second)) {
			t.Errorf("at %v the waiters were %+v", at, m.Waiters)
		}
		around := make(map[string]record.Event)
		for _, e := range m.Around {
			around[e.What] = e
		}
		if e := around[record.Forced]; e.Reason != "hangs" || *e.Token != hold.Token() || e.Account == "" || e.Time.Before(at.Add(-time.Second)) {
			t.Errorf("by force: %+v", e)
		}
		if e := around[record.Deadlocks]; len(e.Sides) != 2 || e.Sides[0].RolledBack == e.Sides[1].RolledBack || e.Sides[0].ConnectionID == 0 ||
			!strings.Contains(e.Sides[0].Statement, "UPDATE pair SET n = n + ? WHERE id = ?") || !strings.Contains(e.Sides[1].WaitsFor, "`pair`") {
			t.Errorf("the deadlock: %+v", e)
		}
		if e, other := around[record.Lost]; other {
			t.Errorf("of another key: %+v", e)
		}
		if m := moment(at, "dead"); !slices.ContainsFunc(m.Around, func(e record.Event) bool { return e.What == record.Lost && e.Program == "ghost:1:batch" }) || len(m.Holders) > 0 {
			t.Errorf("of the key that was lost: %+v", m)
		}
		for _, unknown := range []time.Time{before.Add(-time.Hour), time.Now().Add(time.Hour)} {
			if m := moment(unknown); m.Known || len(m.Holders) > 0 {
				t.Errorf("at %v, when nobody looked: %+v", unknown, m)
			}
		}
		out := s.command("history", "--from", path, "--at", at.UTC().Format(time.RFC3339Nano), "k").start().must(0)
		for _, want := range []string{"the holder", "holds", "the waiter", "waits", "was taken away by", ": hangs", "the server broke deadlocks: 1; connection ", "and was rolled back", "the recorder ended"} {
			if !strings.Contains(out, want) {
				t.Errorf("no %q in\n%s", want, out)
			}
		}
		s.command("history", "--from", s.file("none")).start().fails(exitFailure, "there is no record")
		s.command("history", "--from", path, "--at", "noon").start().fails(exitFailure, "want a time such as 02:40")
		s.command("record").start().fails(exitFailure, "--to is missing")
		s.command("record", "--to", path, "--every", "1h").start().fails(exitFailure, "a look every 1h")
	})
}

// deadlock has two transactions wait for each other's row.
func (s *scratch) deadlock() {
	s.T.Helper()
	ctx := dbtest.Limited(s.T)
	begin := func(id string) *sql.Tx {
		tx := dbtest.Begin(s.T, ctx, s.root)
		dbtest.ExecIn(s.T, ctx, tx, "UPDATE pair SET n = n + 1 WHERE id = "+id)
		return tx
	}
	one, other := begin("1"), begin("2")
	var both sync.WaitGroup
	for tx, id := range map[*sql.Tx]string{one: "2", other: "1"} {
		both.Go(func() {
			_, _ = tx.ExecContext(ctx, "UPDATE pair SET n = n + 1 WHERE id = "+id)
			_ = tx.Rollback()
		})
	}
	both.Wait()
}

func TestATimeOfDayIsTheLastInUTC(t *testing.T) {
	now := time.Date(2026, 11, 28, 3, 0, 0, 0, time.UTC)
	for text, want := range map[string]string{
		"02:40": "2026-11-28T02:40:00Z", "03:40": "2026-11-27T03:40:00Z", "02:40:13": "2026-11-28T02:40:13Z", "": "2026-11-28T03:00:00Z",
		"2026-11-20 02:40": "2026-11-20T02:40:00Z", "2026-11-20T02:40:00+01:00": "2026-11-20T01:40:00Z",
	} {
		got, err := timeOf(text, now.In(time.FixedZone("", 3600)))
		dbtest.OK(t, err)
		dbtest.Equal(t, fmt.Sprintf("%q is %%s", text), got.Format(time.RFC3339), want)
	}
}
