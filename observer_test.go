package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// witness is an observer that remembers what it is told.
type witness struct {
	mu     sync.Mutex
	events []mysqllock.Event
	user   any // the context's value of userKey, of the last
}

type userKey struct{}

func (w *witness) Observe(ctx context.Context, e mysqllock.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events, w.user = append(w.events, e), ctx.Value(userKey{})
}

// told returns what has been told since the last call, once there is as much as
// wanted: what the driver finds out by itself may come a little later.
func (w *witness) told(t *testing.T, want ...string) []mysqllock.Event {
	t.Helper()
	var events []mysqllock.Event
	var got []string
	for deadline := time.Now().Add(dbtest.Patience); ; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		events = slices.Clone(w.events)
		if len(events) >= len(want) {
			w.events = nil
		}
		w.mu.Unlock()
		if len(events) >= len(want) || time.Now().After(deadline) {
			break
		}
	}
	for _, e := range events {
		got = append(got, fmt.Sprintf("%s %v %s", e.Strategy, e.Kind, strings.Join(e.Keys, "+")))
		if e.Start.IsZero() || e.Duration < 0 || e.Held < 0 || time.Since(e.Start) > time.Minute {
			t.Errorf("%s: start %v, duration %v, held %v", got[len(got)-1], e.Start, e.Duration, e.Held)
		}
		wantErr := map[mysqllock.EventKind]error{mysqllock.Refused: mysqllock.ErrLocked, mysqllock.Lost: mysqllock.ErrLost}[e.Kind]
		if !errors.Is(e.Err, wantErr) {
			t.Errorf("%s: the error is %v, want %v", got[len(got)-1], e.Err, wantErr)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("told of %q, want %q", got, want)
	}
	return events
}

// watched opens the scratch database with a witness.
func (s *scratch) watched(c mysqllock.Config) (*sql.DB, *witness) {
	s.T.Helper()
	w := new(witness)
	c.Observer = mysqllock.Observers{w, w}[:1]
	connector, err := mysqllock.NewConnector(s.Config(), c)
	dbtest.OK(s.T, err)
	db := sql.OpenDB(connector)
	s.T.Cleanup(func() { db.Close() })
	return db, w
}

var strategies = map[string]lockctx.Option{
	"row": lockctx.Row(), "lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
}

// TestObserver: each lock that is asked for is told of twice, however it is taken
// and given back.
func TestObserver(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, w := s.watched(mysqllock.Config{TTL: ttl})
		other := s.open("lockTTL=" + ttl.String())
		for strategy, kind := range strategies {
			key := "key-" + strategy
			taken, back := strategy+" acquired "+key, strategy+" released "+key
			within := func(parent context.Context, opts ...lockctx.Option) context.Context {
				return lockctx.With(context.WithValue(parent, userKey{}, strategy), key, append(opts, kind)...)
			}
			ctx := func(opts ...lockctx.Option) context.Context { return within(dbtest.Limited(t), opts...) }
			for range 2 {
				tx, err := db.BeginTx(ctx(), nil)
				dbtest.OK(t, err)
				granted := w.told(t, taken)
				time.Sleep(10 * time.Millisecond)
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				dbtest.OK(t, tx.Commit())
				over := w.told(t, back)
				if (granted[0].Token != 0) != (strategy == "lease") || granted[0].Token != over[0].Token || over[0].Held < 10*time.Millisecond {
					t.Errorf("%+v, %+v", granted, over)
				}
			}
			if w.user != strategy {
				t.Errorf("the observer's context is not the caller's, but that of %v", w.user)
			}

			_, err := db.ExecContext(ctx(), "UPDATE p SET stock = stock - 1 WHERE id = 1")
			dbtest.OK(t, err)
			w.told(t, taken, back)

			ending, cancel := context.WithCancel(dbtest.Limited(t))
			pinned := within(ending)
			for range 2 {
				_, err = read(pinned, db, 1)
				dbtest.OK(t, err)
			}
			w.told(t, taken)
			cancel()
			w.told(t, back)

			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error {
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				return tx.Rollback()
			}, kind))
			w.told(t, taken, back)

			tx, err := db.BeginTx(dbtest.Limited(t), nil) // late
			dbtest.OK(t, err)
			_, err = tx.ExecContext(ctx(), "UPDATE p SET stock = stock - 1 WHERE id = 1")
			dbtest.OK(t, err)
			w.told(t, taken)
			dbtest.OK(t, tx.Rollback())
			w.told(t, back)

			if strategy == "optimistic" {
				tx, err := db.BeginTx(ctx(), nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				_, err = other.ExecContext(ctx(), "UPDATE p SET stock = stock - 1 WHERE id = 2")
				dbtest.OK(t, err)
				if err := tx.Commit(); !errors.Is(err, mysqllock.ErrConflict) {
					t.Error(err)
				}
				w.mu.Lock()
				last := w.events[len(w.events)-1]
				last.Err, w.events[len(w.events)-1].Err = nil, nil
				w.mu.Unlock()
				w.told(t, taken, back)
				continue
			}
			hold, err := mysqllock.Acquire(dbtest.Limited(t), other, key, kind)
			dbtest.OK(t, err)
			if _, err := db.BeginTx(ctx(lockctx.NoWait()), nil); !errors.Is(err, mysqllock.ErrLocked) {
				t.Error(err)
			}
			w.told(t, strategy+" refused "+key)
			waited := make(chan error, 1)
			go func() {
				_, err := db.ExecContext(ctx(lockctx.Wait(20*time.Second)), "UPDATE p SET stock = stock - 1 WHERE id = 1")
				waited <- err
			}()
			dbtest.Soon(t, "somebody waits", func() bool { st, _ := mysqllock.Stats(db); return st.Waiters == 1 })
			time.Sleep(20 * time.Millisecond)
			dbtest.OK(t, hold.Release())
			dbtest.OK(t, <-waited)
			if e := w.told(t, taken, back); e[0].Duration < 20*time.Millisecond {
				t.Errorf("%v is less than it waited", e[0].Duration)
			}
			if st, err := mysqllock.Stats(db); err != nil || st.Waiters != 0 {
				t.Error(st, err)
			}
		}
	})
}

// TestObserverOfLosses: a lock that is lost is told of once, also where nobody asks.
func TestObserverOfLosses(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var lines bytes.Buffer
		logger := mysqllock.LogTo(slog.New(slog.NewTextHandler(&lines, nil)), time.Hour)
		db, w := s.watched(mysqllock.Config{TTL: ttl})
		for strategy, kind := range strategies {
			if strategy == "optimistic" {
				continue // nothing is held
			}
			key := "key-" + strategy
			hold, err := mysqllock.Acquire(dbtest.Limited(t), db, key, kind)
			dbtest.OK(t, err)
			w.told(t, strategy+" acquired "+key)
			switch strategy {
			case "row":
				var id int
				dbtest.OK(t, db.QueryRowContext(hold.Context(), "SELECT CONNECTION_ID()").Scan(&id))
				dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id))
			case "lease":
				s.steal(key)
			case "advisory":
				dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", s.named(key)))
			}
			for _, e := range w.told(t, strategy+" lost "+key) {
				logger.Observe(dbtest.Limited(t), e)
			}
			if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
				t.Error(err)
			}
			w.told(t)
		}
		if got := lines.String(); strings.Count(got, "level=ERROR msg=\"lock lost\"") != 3 || !strings.Contains(got, "key-advisory") {
			t.Error(got)
		}
	})
}

// TestLogTo: what is worth a line, and what is not.
func TestLogTo(t *testing.T) {
	busy := &mysqllock.Error{Op: "lock", Key: "k", Err: mysqllock.ErrLocked}
	lost := &mysqllock.Error{Op: "lock", Key: "k", Err: mysqllock.ErrLost}
	for _, c := range []struct {
		e    mysqllock.Event
		want string
	}{
		{mysqllock.Event{Kind: mysqllock.Acquired, Duration: time.Second - 1}, ""},
		{mysqllock.Event{Kind: mysqllock.Acquired, Duration: time.Second, Token: 7}, `level=WARN msg="slow wait for a lock" strategy=row keys=[k] token=7 waited=1s`},
		{mysqllock.Event{Kind: mysqllock.Refused, Err: busy}, ""},
		{mysqllock.Event{Kind: mysqllock.Refused, Err: context.Canceled}, ""},
		{mysqllock.Event{Kind: mysqllock.Refused, Duration: time.Second, Err: busy}, `level=WARN msg="lock not granted" strategy=row keys=[k] waited=1s error="` + busy.Error() + `"`},
		{mysqllock.Event{Kind: mysqllock.Refused, Err: errors.New("no table")}, `level=WARN msg="lock not granted" strategy=row keys=[k] waited=0s error="no table"`},
		{mysqllock.Event{Kind: mysqllock.Released, Held: time.Hour}, ""},
		{mysqllock.Event{Kind: mysqllock.LongHold, Held: time.Minute, Long: true}, `level=WARN msg="long hold of a lock" strategy=row keys=[k] held=1m0s`},
		{mysqllock.Event{Kind: mysqllock.Released, Held: time.Hour, Long: true}, `level=WARN msg="long hold of a lock has ended" strategy=row keys=[k] held=1h0m0s`},
		{mysqllock.Event{Kind: mysqllock.Lost, Held: time.Minute, Err: lost}, `level=ERROR msg="lock lost" strategy=row keys=[k] held=1m0s error="` + lost.Error() + `"`},
	} {
		var out bytes.Buffer
		l := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
		c.e.Strategy, c.e.Keys = "row", []string{"k"}
		mysqllock.LogTo(l, time.Second).Observe(context.Background(), c.e)
		want := strings.ReplaceAll(c.want, `"mysqllock: lock "k"`, `"mysqllock: lock \"k\"`)
		if got := strings.TrimSpace(out.String()); got != want {
			t.Errorf("%+v writes %q, want %q", c.e, got, want)
		}
	}
}
