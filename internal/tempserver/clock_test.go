//go:build unix

package tempserver

import (
	"context"
	"database/sql"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestASteppedClockIsFollowedAtOnce: the time of day of a server that runs, on connections that
// are there, too. What the server waits for, and ends by itself, takes as long as ever where
// the clock was set before. The clock outlasts a restart.
func TestASteppedClockIsFollowedAtOnce(t *testing.T) {
	forEach(t, func(t *testing.T, b Binary) {
		s := startWithClock(t, b)
		db := open(t, s)
		holder, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer holder.Close()
		one(t, holder, "SELECT GET_LOCK('a', 0)")
		wantAhead(t, holder, 0)
		for _, ahead := range []time.Duration{5 * time.Second, time.Hour, -1500 * time.Millisecond, -time.Hour} {
			setClock(t, s, ahead)
			wantAhead(t, holder, ahead)
			if ahead.Abs() < time.Hour {
				continue
			}
			var waits sync.WaitGroup
			for _, text := range []string{
				"SELECT SLEEP(1)",
				"SELECT GET_LOCK('a', 1)",
				"/*M!100000 SET STATEMENT max_statement_time = 1 FOR */ SELECT /*+ MAX_EXECUTION_TIME(1000) */ SLEEP(60)",
			} {
				waits.Go(func() {
					began := time.Now()
					_ = db.QueryRowContext(t.Context(), text).Scan(new(sql.NullString)) // or it was ended
					if took := time.Since(began); took < 900*time.Millisecond || took > 30*time.Second {
						t.Errorf("%v ahead: %s took %v, not a second", ahead, text, took)
					}
				})
			}
			waits.Wait()
		}

		// Of a wait that is under way it is the end that counts, which is a time of day.
		over := make(chan struct{})
		began := time.Now()
		go func() {
			defer close(over)
			_ = db.QueryRowContext(t.Context(), "SELECT GET_LOCK('a', 600)").Scan(new(int))
		}()
		for one(t, holder, "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE '%a'', 600%' AND STATE LIKE '%ock%' AND ID <> CONNECTION_ID()") != "1" {
			time.Sleep(10 * time.Millisecond)
		}
		setClock(t, s, time.Minute)
		<-over
		if took := time.Since(began); took > 300*time.Second {
			t.Errorf("a wait for ten minutes took %v although the clock was set forward by an hour", took)
		}

		if err := s.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantAhead(t, db, time.Minute)
	})
}

// TestAClockCannotBeHadWithoutACompiler, and the error says what brings one.
func TestAClockCannotBeHadWithoutACompiler(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	t.Setenv("HOME", t.TempDir())
	t.Setenv("CC", "no-such-compiler")
	b := RequireOwn(t)[0]
	if _, err := b.WithClock(); err == nil || !strings.Contains(err.Error(), "packages gcc and libc6-dev") {
		t.Errorf("WithClock: %v", err)
	}
	if err := (&Server{binary: b}).SetClock(time.Hour); err == nil {
		t.Error("a clock is set that is the machine's")
	}
}

func startWithClock(t *testing.T, b Binary) *Server {
	t.Helper()
	b, err := b.WithClock()
	if err != nil {
		t.Fatal(err)
	}
	return start(t, b)
}

func setClock(t *testing.T, s *Server, ahead time.Duration) {
	t.Helper()
	if err := s.SetClock(ahead); err != nil {
		t.Fatal(err)
	}
}

type querier interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func one(t *testing.T, q querier, text string) (answer string) {
	t.Helper()
	if err := q.QueryRowContext(t.Context(), text).Scan(&answer); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return answer
}

// wantAhead fails the test unless the server's clock is so far ahead.
func wantAhead(t *testing.T, q querier, ahead time.Duration) {
	t.Helper()
	const slack = 100 * time.Millisecond // some servers look at a coarse clock
	for _, clock := range []string{"NOW(6)", "SYSDATE(6)", "UTC_TIMESTAMP(6) + INTERVAL TIMESTAMPDIFF(SECOND, UTC_TIMESTAMP(), NOW()) SECOND"} {
		before := time.Now().Add(-slack)
		var seconds float64
		if err := q.QueryRowContext(t.Context(), "SELECT UNIX_TIMESTAMP("+clock+")").Scan(&seconds); err != nil {
			t.Fatal(err)
		}
		after := time.Now().Add(slack)
		if is := time.UnixMicro(int64(seconds * 1e6)).Add(-ahead); is.Before(before) || is.After(after) {
			t.Errorf("%s is %v ahead, want %v", clock, is.Add(ahead).Sub(before), ahead)
		}
	}
}
