package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestSlowWait: who has waited for long is told, with the grant, who held the lock; and for
// how long, if that was this very handle. A wait that was not slow asks nobody.
func TestSlowWait(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		first, _ := s.watched(mysqllock.Config{TTL: ttl, Owner: "the-first"})
		second, told := s.watched(mysqllock.Config{TTL: ttl, Owner: "the-second", SlowWait: time.Millisecond})
		patient, calm := s.watched(mysqllock.Config{TTL: ttl, SlowWait: time.Hour})
		for strategy, kind := range strategies {
			if strategy == "optimistic" {
				continue // it waits for nobody
			}
			key := "key-" + strategy
			e, _ := s.wait(t, first, second, told, key, kind, true)
			h := e.Holder
			if h.ThisProcess || h.Held != 0 || h.Program != "the-first" && (h.ConnectionID == 0 || s.Flavour == tempserver.MySQL) {
				t.Errorf("%s: another process held it: %+v", strategy, h)
			}
			if limit := e.Duration + time.Minute; strategy == "row" && h.Since > limit {
				t.Errorf("row: the transaction is of %v", h.Since)
			}
			e, age := s.wait(t, second, second, told, key, kind, true)
			h = e.Holder
			if !h.ThisProcess || h.Held <= 0 || h.Held > age || h.Since != 0 {
				t.Errorf("%s: this process held it, for at most %v: %+v", strategy, age, h)
			}
			var log bytes.Buffer
			mysqllock.LogTo(slog.New(slog.NewTextHandler(&log, nil)), time.Nanosecond).Observe(context.Background(), e)
			if !strings.Contains(log.String(), `holder="this process: `) {
				t.Errorf("%s: the log says %s", strategy, &log)
			}
			if e, _ := s.wait(t, first, patient, calm, key, kind, false); e.Holder != nil {
				t.Errorf("%s: a wait that was not slow: %+v", strategy, e.Holder)
			}
		}
		if _, err := mysqllock.NewConnector(s.Config(), mysqllock.Config{SlowWait: -1}); err == nil {
			t.Error("a negative SlowWait is taken")
		}
	})
}

// wait has a hold of first waited for by second, and returns what its observer is told of
// the grant, and how old the hold was then at most. With named, the hold lasts until the
// waiter has heard who has it.
func (s *scratch) wait(t *testing.T, first, second *sql.DB, told *witness, key string, kind lockctx.Option, named bool) (e mysqllock.Event, age time.Duration) {
	t.Helper()
	for d := 20 * time.Millisecond; ; d *= 2 {
		asked := time.Now()
		hold, err := mysqllock.Acquire(dbtest.Limited(t), first, key, kind)
		dbtest.OK(t, err)
		got := make(chan error, 1)
		go func() {
			hold, err := mysqllock.Acquire(dbtest.Limited(t), second, key, kind, lockctx.Wait(time.Minute))
			if err == nil {
				err = hold.Release()
			}
			got <- err
		}()
		time.Sleep(d)
		dbtest.OK(t, hold.Release())
		dbtest.OK(t, <-got)
		age = time.Since(asked)
		for _, one := range told.all() {
			if one.Kind == mysqllock.Acquired && (one.Holder != nil || !named) {
				e = one
			}
		}
		if e.Holder != nil || !named {
			return e, age
		}
		if d > time.Minute/4 {
			t.Fatalf("%s: who held it is not told after %v", key, d)
		}
	}
}

// all are the events since the last time.
func (w *witness) all() []mysqllock.Event {
	w.mu.Lock()
	defer w.mu.Unlock()
	events := w.events
	w.events = nil
	return events
}
