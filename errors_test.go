package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
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
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestFailuresNameTheirState: what the driver refuses by itself is an Error around a
// sentinel.
func TestFailuresNameTheirState(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		want := func(name string, err error, sentinel error) {
			t.Helper()
			var e *mysqllock.Error
			if !errors.As(err, &e) || !errors.Is(err, sentinel) {
				t.Errorf("%s: %v (%T), want %v", name, err, err, sentinel)
			}
		}

		// BeginTx where a transaction without the lock is open: through Raw.
		conn := dbtest.Conn(t, db)
		dbtest.OK(t, conn.Raw(func(c any) error {
			begins := c.(driver.ConnBeginTx)
			open, err := begins.BeginTx(dbtest.Limited(t), driver.TxOptions{})
			dbtest.OK(t, err)
			_, err = begins.BeginTx(lockctx.With(dbtest.Limited(t), "k"), driver.TxOptions{})
			want("begin in a transaction without the lock", err, mysqllock.ErrUnsafe)
			return open.Rollback()
		}))

		// Other options than those of the open transaction.
		hold := stock.Acquire(t, db, "k")
		_, err := db.BeginTx(hold.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
		want("other options", err, mysqllock.ErrUnsafe)
		inner := dbtest.Begin(t, hold.Context(), db)
		want("a hold with an open transaction", hold.Release(), mysqllock.ErrUnsafe)
		_ = inner.Rollback()

		// Out of order.
		ctx := lockctx.With(dbtest.Limited(t), "k")
		outer := dbtest.Begin(t, ctx, db)
		inner = dbtest.Begin(t, ctx, db)
		want("out of order", outer.Commit(), mysqllock.ErrUnsafe)
		want("out of order, the inner one", inner.Commit(), mysqllock.ErrUnsafe)
	})
}

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

// TestTheObserverIsToldOfEachLockTwice, however it is taken and given back.
func TestTheObserverIsToldOfEachLockTwice(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
				tx := dbtest.Begin(t, ctx(), db)
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

			dbtest.ExecIn(t, ctx(), db, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			w.told(t, taken, back)

			ending, cancel := context.WithCancel(dbtest.Limited(t))
			pinned := within(ending)
			for range 2 {
				stock.MustRead(t, pinned, db, 1)
			}
			w.told(t, taken)
			cancel()
			w.told(t, back)

			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, key, func(ctx context.Context) error {
				tx := dbtest.Begin(t, ctx, db)
				return tx.Rollback()
			}, kind))
			w.told(t, taken, back)

			if strategy == "optimistic" {
				tx := dbtest.Begin(t, ctx(), db)
				dbtest.Exec(t, tx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
				dbtest.ExecIn(t, ctx(), other, "UPDATE p SET stock = stock - 1 WHERE id = 2")
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
			hold := stock.Acquire(t, other, key, kind)
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
			s.nothingLasts(db, other)
		}
	})
}

// nothingLasts checks that no handle counts a wait or a hold any more.
func (s *scratch) nothingLasts(handles ...*sql.DB) {
	s.T.Helper()
	for i, db := range handles {
		if st, err := mysqllock.Stats(db); err != nil || st.OldestWait != 0 || st.OldestHold != 0 {
			s.T.Errorf("handle %d: somebody waits for %v, something is held for %v: %v", i, st.OldestWait, st.OldestHold, err)
		}
	}
}

// TestAHandleKnowsItsOldestWaitAndHold while they last, with and without an observer. What
// waits for a connection waits, too. Versions are no hold.
func TestAHandleKnowsItsOldestWaitAndHold(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		observed, _ := s.watched(mysqllock.Config{TTL: ttl})
		db := s.open("maxConns=8", "lockTTL="+ttl.String())
		age := func(db *sql.DB) (wait, hold time.Duration) {
			st, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return st.OldestWait, st.OldestHold
		}
		for strategy, kind := range strategies {
			for _, holder := range []*sql.DB{observed, db} {
				began := time.Now()
				hold := stock.Acquire(t, holder, "k", kind)
				younger := stock.Acquire(t, holder, "another", kind)
				time.Sleep(10 * time.Millisecond)
				if strategy == "optimistic" {
					s.nothingLasts(holder)
				} else {
					if _, held := age(holder); held < 10*time.Millisecond || held > time.Since(began) {
						t.Errorf("%s: held for %v", strategy, held)
					}
					asked := time.Now()
					waited := make(chan error)
					go func() {
						other, err := mysqllock.Acquire(dbtest.Limited(t), db, "k", kind, lockctx.WaitForever())
						if err == nil {
							err = other.Release()
						}
						waited <- err
					}()
					dbtest.Soon(t, "a caller has waited for 20 ms", func() bool { w, _ := age(db); return w > 20*time.Millisecond })
					if w, _ := age(db); w > time.Since(asked) {
						t.Errorf("%s: has waited for %v", strategy, w)
					}
					dbtest.OK(t, hold.Release())
					dbtest.OK(t, <-waited)
				}
				dbtest.OK(t, hold.Release())
				dbtest.OK(t, younger.Release())
				s.nothingLasts(holder, db)
			}
		}
		st, err := mysqllock.Stats(db)
		dbtest.OK(t, err)
		const kept = 4 // two for control, and one each for leases and advisory locks, which may still be in use
		if n := st.Reserved + st.Leases.InUse + st.Advisory.InUse; n != kept {
			t.Errorf("%d connections are reserved: %+v", n, st)
		}
		var full []*sql.Tx
		for range st.MaxConns - kept {
			tx := dbtest.Begin(t, dbtest.Limited(t), db)
			full = append(full, tx)
		}
		queued := make(chan error)
		go func() { queued <- db.PingContext(dbtest.Limited(t)) }()
		dbtest.Soon(t, "a caller has waited for a connection", func() bool { w, _ := age(db); return w > 10*time.Millisecond })
		for _, tx := range full {
			dbtest.OK(t, tx.Rollback())
		}
		dbtest.OK(t, <-queued)
		s.nothingLasts(db)
	})
}

// TestTheObserverIsToldOfEachLossOnce, also where nobody asks.
func TestTheObserverIsToldOfEachLossOnce(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var lines bytes.Buffer
		logger := mysqllock.LogTo(slog.New(slog.NewTextHandler(&lines, nil)), time.Hour)
		db, w := s.watched(mysqllock.Config{TTL: ttl})
		for strategy, kind := range strategies {
			if strategy == "optimistic" {
				continue // nothing is held
			}
			key := "key-" + strategy
			hold := stock.Acquire(t, db, key, kind)
			w.told(t, strategy+" acquired "+key)
			lose := func(ctx context.Context, query func(context.Context, string, ...any) *sql.Row) {
				switch strategy {
				case "row":
					var id int
					dbtest.OK(t, query(ctx, "SELECT CONNECTION_ID()").Scan(&id))
					dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", id))
				case "lease":
					s.steal(key)
				case "advisory":
					dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", s.named(key)))
				}
			}
			lose(hold.Context(), db.QueryRowContext)
			for _, e := range w.told(t, strategy+" lost "+key) {
				logger.Observe(dbtest.Limited(t), e)
			}
			if err := hold.Release(); !errors.Is(err, mysqllock.ErrLost) {
				t.Error(err)
			}
			w.told(t)

			key += "-tx"
			ctx := lockctx.With(dbtest.Limited(t), key, kind)
			tx := dbtest.Begin(t, ctx, db)
			lose(ctx, tx.QueryRowContext)
			dbtest.Soon(t, "a statement is told", func() bool {
				_, err := tx.ExecContext(ctx, "DO 1")
				return errors.Is(err, mysqllock.ErrLost)
			})
			s.nothingLasts(db) // although the transaction is still to be rolled back
			dbtest.OK(t, tx.Rollback())
			w.told(t, strategy+" acquired "+key, strategy+" lost "+key)
		}
		s.nothingLasts(db)
		if got := lines.String(); strings.Count(got, "level=ERROR msg=\"lock lost\"") != 3 || !strings.Contains(got, "key-advisory") {
			t.Error(got)
		}
	})
}

func TestTheLogTellsOnlyWhatIsWorthALine(t *testing.T) {
	busy := &mysqllock.Error{Op: "lock", Key: "k", Err: mysqllock.ErrLocked}
	lost := &mysqllock.Error{Op: "lock", Key: "k", Err: mysqllock.ErrLost}
	for _, c := range []struct {
		e    mysqllock.Event
		want string
	}{
		{mysqllock.Event{Kind: mysqllock.Acquired, Duration: time.Second - 1}, ""},
		{mysqllock.Event{Kind: mysqllock.Acquired, Duration: time.Second, Token: 7}, `level=WARN msg="slow wait for a lock" strategy=row keys=[k] token=7 waited_ms=1000`},
		{mysqllock.Event{Kind: mysqllock.Acquired, Duration: time.Hour, Leadership: true}, ""},
		{mysqllock.Event{Kind: mysqllock.Refused, Duration: time.Hour, Leadership: true, Err: context.Canceled}, ""},
		{mysqllock.Event{Kind: mysqllock.Refused, Err: busy}, ""},
		{mysqllock.Event{Kind: mysqllock.Refused, Err: context.Canceled}, ""},
		{mysqllock.Event{Kind: mysqllock.Refused, Duration: time.Second, Err: busy}, `level=WARN msg="lock not granted" strategy=row keys=[k] waited_ms=1000 error="` + busy.Error() + `"`},
		{mysqllock.Event{Kind: mysqllock.Refused, Err: errors.New("no table")}, `level=WARN msg="lock not granted" strategy=row keys=[k] waited_ms=0 error="no table"`},
		{mysqllock.Event{Kind: mysqllock.Refused, Duration: 1999999, Leadership: true, Err: errors.New("no table")}, `level=WARN msg="lock not granted" strategy=row keys=[k] waited_ms=1 error="no table"`},
		{mysqllock.Event{Kind: mysqllock.Released, Held: time.Hour}, ""},
		{mysqllock.Event{Kind: mysqllock.LongHold, Held: time.Minute, Long: true}, `level=WARN msg="long hold of a lock" strategy=row keys=[k] held_ms=60000`},
		{mysqllock.Event{Kind: mysqllock.Released, Held: time.Hour, Long: true}, `level=WARN msg="long hold of a lock has ended" strategy=row keys=[k] held_ms=3600000`},
		{mysqllock.Event{Kind: mysqllock.Lost, Held: time.Minute, Err: lost}, `level=ERROR msg="lock lost" strategy=row keys=[k] held_ms=60000 error="` + lost.Error() + `"`},
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

// TestALongHoldIsToldOnceAndAtItsEnd: once while it lasts. A version is no hold.
func TestALongHoldIsToldOnceAndAtItsEnd(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		short, calm := s.watched(mysqllock.Config{TTL: ttl, LongHold: time.Hour})
		db, w := s.watched(mysqllock.Config{TTL: ttl, LongHold: time.Millisecond})
		for strategy, kind := range strategies {
			if strategy == "optimistic" {
				ctx := lockctx.With(dbtest.Limited(t), "key-optimistic", kind)
				tx := dbtest.Begin(t, ctx, db)
				time.Sleep(20 * time.Millisecond)
				dbtest.OK(t, tx.Commit())
				w.told(t, "optimistic acquired key-optimistic", "optimistic released key-optimistic")
				continue
			}
			key := "key-" + strategy
			hold := stock.Acquire(t, db, key, kind)
			events := w.told(t, strategy+" acquired "+key, strategy+" long hold "+key)
			if e := events[1]; !e.Long || e.Held < time.Millisecond || e.Token != events[0].Token || events[0].Long {
				t.Errorf("while it lasts: %+v, after %+v", e, events[0])
			}
			dbtest.OK(t, hold.Release())
			for _, e := range w.told(t, strategy+" released "+key) {
				if !e.Long || e.Held < events[1].Held {
					t.Errorf("at the end: %+v, before %+v", e, events[1])
				}
			}

			hold = stock.Acquire(t, short, key, kind)
			dbtest.OK(t, hold.Release())
			for _, e := range calm.told(t, strategy+" acquired "+key, strategy+" released "+key) {
				if e.Long {
					t.Errorf("a short one: %+v", e)
				}
			}
		}
		if _, err := mysqllock.NewConnector(s.Config(), mysqllock.Config{LongHold: -1}); err == nil {
			t.Error("a negative LongHold is taken")
		}
	})
}

// TestASlowWaitIsToldWithItsHolder: who has waited for long is told, with the grant, who held
// the lock; and for how long, if that was this very handle. A wait that was not slow asks
// nobody.
func TestASlowWaitIsToldWithItsHolder(t *testing.T) {
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
		hold := stock.Acquire(t, first, key, kind)
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

// wantBadHint wants an *Error that says what is wrong with a hint.
func wantBadHint(t *testing.T, what string, err error, says string) {
	t.Helper()
	var e *mysqllock.Error
	if !errors.As(err, &e) || !strings.Contains(err.Error(), "bad hint") || !strings.Contains(err.Error(), says) {
		t.Errorf("%s: %v, want a bad hint: %s", what, err, says)
	}
}

// TestABadHintIsRefusedByEachCall: before anything of it is sent.
func TestABadHintIsRefusedByEachCall(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, base := s.open(), dbtest.Limited(t)
		var none context.Context
		with := func(opts ...lockctx.Option) context.Context { return lockctx.With(base, "k", opts...) }
		for says, ctx := range map[string]context.Context{
			"empty key":                    lockctx.With(base, ""),
			"longer than":                  lockctx.With(base, strings.Repeat("k", 256)),
			"negative wait":                with(lockctx.Wait(-1)),
			"negative retr":                with(lockctx.Retry(-1)),
			"no key":                       lockctx.WithKeys(base, nil),
			"Retry":                        with(lockctx.Retry(3)),
			"both row and lease":           with(lockctx.Row(), lockctx.Lease(ttl)),
			"both lease and row":           with(lockctx.Lease(ttl), lockctx.Row()),
			"both advisory and optimist":   with(lockctx.Advisory(), lockctx.Optimistic()),
			"context is nil":               lockctx.With(none, "k"),
			"bad hint: the context is nil": lockctx.WithKeys(none, []string{"a", "b"}),
		} {
			wantBadHint(t, "Exec", exec(ctx, db, stock.SetStock, 0), says)
			_, err := read(ctx, db, 1)
			wantBadHint(t, "Query", err, says)
			_, err = db.BeginTx(ctx, nil)
			wantBadHint(t, "BeginTx", err, says)
			_, err = db.PrepareContext(ctx, "SELECT 1")
			wantBadHint(t, "Prepare", err, says)
		}
		ran := func(context.Context) error { return errors.New("it ran") }
		_, acquired := mysqllock.Acquire(none, db, "k")
		_, retried := mysqllock.Acquire(base, db, "k", lockctx.Retry(3))
		_, both := mysqllock.Acquire(base, db, "k", lockctx.Row(), lockctx.Lease(ttl))
		for what, c := range map[string]struct {
			err  error
			says string
		}{
			"Acquire, nil":          {acquired, "context is nil"},
			"Acquire, Retry":        {retried, "Retry"},
			"Acquire, both":         {both, "both row and lease"},
			"Do, nil":               {mysqllock.Do(none, db, "k", ran), "context is nil"},
			"Do, both":              {mysqllock.Do(base, db, "k", ran, lockctx.Lease(ttl), lockctx.Row()), "both lease and row"},
			"Do of a lease":         {mysqllock.Do(base, db, "k", ran, lockctx.Retry(3), lockctx.Lease(ttl)), "Retry"},
			"Do of an advisory":     {mysqllock.Do(base, db, "k", ran, lockctx.Retry(3), lockctx.Advisory()), "Retry"},
			"Do of leases by a DSN": {mysqllock.Do(base, s.open("lockStrategy=lease"), "k", ran, lockctx.Retry(3)), "Retry"},
		} {
			wantBadHint(t, what, c.err, c.says)
		}
		for _, opts := range [][]lockctx.Option{{lockctx.Retry(3)}, {lockctx.Retry(3), lockctx.Row()}, {lockctx.Optimistic(), lockctx.Retry(3)}, {lockctx.Lease(ttl), lockctx.Retry(0)}} {
			dbtest.OK(t, mysqllock.Do(base, db, "k", func(context.Context) error { return nil }, opts...))
		}
		if _, ok := mysqllock.Token(none); ok {
			t.Error("nil has a token")
		}
		s.wantStock(1, 10)
	})
}

// TestALoopThatDerivesEachContextFromTheLastIsRefused: before its keys pile up.
func TestALoopThatDerivesEachContextFromTheLastIsRefused(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := dbtest.Limited(t)
		for i := range 2 * lockctx.MaxNested {
			ctx = lockctx.With(ctx, fmt.Sprint("row ", i))
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			if i <= lockctx.MaxNested {
				dbtest.OK(t, err)
			} else {
				wantBadHint(t, fmt.Sprint("loop ", i), err, "in a loop")
			}
		}
		s.wantStock(1, 10+lockctx.MaxNested+1)

		keys := make([]string, 300) // as many as one likes, in one WithKeys
		for i := range keys {
			keys[i] = fmt.Sprint("key ", i)
		}
		dbtest.ExecIn(t, lockctx.WithKeys(dbtest.Limited(t), keys), db, "UPDATE p SET stock = 10 WHERE id = 1")
	})
}

// TestHasKnowsTheKeysOfAHoldInIt, and those around it, but not outside.
func TestHasKnowsTheKeysOfAHoldInIt(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		for name, opts := range stock.KeptAs() {
			outer := lockctx.With(dbtest.Limited(t), "outer")
			if name == "optimistic" { // which goes with no lock
				outer = lockctx.With(dbtest.Limited(t), "outer", lockctx.Optimistic())
			}
			dbtest.OK(t, mysqllock.Do(outer, db, "k", func(ctx context.Context) error {
				if !lockctx.Has(ctx, "k") || !lockctx.Has(ctx, "outer") || lockctx.Has(ctx, "other") || lockctx.Has(lockctx.Without(ctx), "k") {
					t.Errorf("in a hold, %s", name)
				}
				return nil
			}, opts...))
			if lockctx.Has(outer, "k") {
				t.Errorf("around a hold, %s", name)
			}
		}
	})
}
