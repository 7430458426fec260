package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// advice is what the observer was told of how the handle is set up.
func (w *witness) advice() (out []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.events {
		if e.Kind == mysqllock.Advised {
			out = append(out, e.Err.Error())
		}
	}
	return out
}

// occupied takes n connections of database/sql, until it is told to give them back.
func occupied(t *testing.T, db *sql.DB, n int) (free func()) {
	t.Helper()
	conns := make([]*sql.Conn, n)
	for i := range conns {
		var err error
		conns[i], err = db.Conn(dbtest.Limited(t))
		dbtest.OK(t, err)
	}
	return func() {
		for _, conn := range conns {
			conn.Close()
		}
	}
}

// TestWaitersThatFillTheBoundAreAdvisedOnce by the observer, and by the error, of what helps: the bound is that of
// SetMaxOpenConns.
func TestWaitersThatFillTheBoundAreAdvisedOnce(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, w := s.watched(mysqllock.Config{Wait: 10 * time.Minute})
		for _, bound := range []int{4, 6} {
			s.refusedAt(t, db, w, bound)
		}
		told := w.advice()
		if len(told) != 1 || !strings.Contains(told[0], "use maxConns") || !regexp.MustCompile("all [2-4] connections").MatchString(told[0]) {
			t.Errorf("the observer was told %q", told)
		}
	})
}

// refusedAt has waiters fill the bound of SetMaxOpenConns, until they are told what it is. Where
// connections are slow to open, the driver finds too small a bound at first.
func (s *scratch) refusedAt(t *testing.T, db *sql.DB, w *witness, bound int) {
	t.Helper()
	db.SetMaxOpenConns(bound)
	db.SetMaxIdleConns(bound)
	occupied(t, db, bound)() // more than before, so that the driver has to find the bound again
	dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
	ctx, end := context.WithCancel(lockctx.With(dbtest.Limited(t), "k"))
	stock.MustRead(t, ctx, db, 1)
	first := len(w.advice()) == 0
	var refused, advised atomic.Int32
	var waiters sync.WaitGroup
	for range 20 {
		waiters.Go(func() {
			for {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
				if err == nil {
					tx.Rollback()
					return
				}
				if !errors.Is(err, mysqllock.ErrLocked) {
					t.Error(err)
					return
				}
				dbtest.Says(t, err, "connections that SetMaxOpenConns allows")
				if strings.Contains(err.Error(), "use maxConns") {
					advised.Add(1)
				}
				if strings.Contains(err.Error(), fmt.Sprintf("the %d connections that SetMaxOpenConns allows", bound)) {
					refused.Add(1)
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	dbtest.Soon(t, "callers are refused", func() bool { return int(refused.Load()) > 20-bound }) // as the last connection is kept free
	dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = 9 WHERE id = 1")
	end()
	waiters.Wait()
	if n := advised.Load(); (n == 1) != first || n > 1 {
		t.Errorf("%d errors say what helps; the first of them: %v", n, first)
	}
}

// TestABoundBesideMaxConnsIsToldOfOnce: it is that of SetMaxOpenConns. A holder that it keeps waiting gets through
// when the waits of others end.
func TestABoundBesideMaxConnsIsToldOfOnce(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		nothing := func(context.Context) error { return nil }
		db, w := s.watched(mysqllock.Config{MaxConns: 8, Wait: time.Minute})
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing))
		if told := w.advice(); len(told) > 0 {
			t.Errorf("without a bound: %q", told)
		}
		db.SetMaxOpenConns(2)
		ctx := lockctx.With(dbtest.Limited(t), "k")
		n := stock.MustRead(t, ctx, db, 1)
		var waiters sync.WaitGroup
		waiting, over := context.WithCancel(dbtest.Limited(t))
		defer over()
		for range 2 {
			waiters.Go(func() {
				_, err := db.ExecContext(lockctx.With(waiting, "k"), "UPDATE p SET stock = 0 WHERE id = 2")
				if err != nil && !errors.Is(err, context.Canceled) {
					t.Error(err)
				}
			})
		}
		dbtest.Soon(t, "both wait", func() bool { return db.Stats().InUse == 2 })
		time.AfterFunc(300*time.Millisecond, over)
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		waiters.Wait()
		s.wantStock(1, n-1)
		for range 3 {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing))
		}
		if told := w.advice(); len(told) != 1 || !strings.Contains(told[0], "maxConns=8") || !strings.Contains(told[0], "SetMaxOpenConns(2)") {
			t.Errorf("the observer was told %q", told)
		}

		// A bound above maxConns counts only if callers have waited for it.
		db, w = s.watched(mysqllock.Config{MaxConns: 6})
		db.SetMaxOpenConns(7)
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing))
		if told := w.advice(); len(told) > 0 {
			t.Errorf("with a bound that nobody has met: %q", told)
		}
		defer occupied(t, db, 7)()
		dbtest.Soon(t, "a caller has waited for a connection", func() bool {
			short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			_, err := db.Conn(short)
			dbtest.Want(t, err, context.DeadlineExceeded)
			return db.Stats().WaitCount > 0 // not if its context had ended before
		})
		_, err := mysqllock.Stats(db)
		dbtest.OK(t, err)
		if told := w.advice(); len(told) != 1 || !strings.Contains(told[0], "SetMaxOpenConns(7)") {
			t.Errorf("the observer was told %q", told)
		}
	})
}

// TestAdviceIsLogged: LogTo writes advice as a warning.
func TestAdviceIsLogged(t *testing.T) {
	var lines bytes.Buffer
	log := mysqllock.LogTo(slog.New(slog.NewTextHandler(&lines, nil)), time.Hour)
	log.Observe(t.Context(), mysqllock.Event{Kind: mysqllock.Advised, Err: errors.New("use another number")})
	if got := lines.String(); !strings.Contains(got, "level=WARN") || !strings.Contains(got, "use another number") || strings.Contains(got, "keys=") {
		t.Errorf("the log says %s", got)
	}
}

// A holder that pinned a session with a read must get a connection of
// database/sql for its write, although those who wait for its lock would take
// them all.
func TestHolderGetsThroughAFullPool(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		for round := range 3 {
			db := s.open("lockWait=2m")
			db.SetMaxOpenConns(4)
			dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
			ctx := lockctx.With(dbtest.Limited(t), "k")
			n := stock.MustRead(t, ctx, db, 1)
			var early, granted atomic.Int32
			var wg sync.WaitGroup
			for range 40 {
				wg.Go(func() {
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
					switch {
					case err == nil:
						granted.Add(1)
						tx.Rollback()
					case errors.Is(err, mysqllock.ErrLocked) && strings.Contains(err.Error(), "SetMaxOpenConns"):
						early.Add(1)
					default:
						t.Error(err)
					}
				})
			}
			dbtest.Soon(t, "the pool is full", func() bool { return db.Stats().InUse == 4 || early.Load() > 0 })
			start := time.Now()
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
			took := time.Since(start)
			dbtest.OK(t, err)
			if took > time.Minute { // the others wait for longer
				t.Errorf("the holder's write took %v", took)
			}
			wg.Wait()
			s.wantStock(1, 9)
			t.Logf("round %d: the write took %v; %d waiters were turned away, %d granted", round, took, early.Load(), granted.Load())
		}
	})
}

// TestAHolderGetsThroughAFullPoolByPreparedStatements, which an ORM keeps: database/sql tries them again as well.
func TestAHolderGetsThroughAFullPoolByPreparedStatements(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=2m")
		db.SetMaxOpenConns(4)
		read, err := db.Prepare("SELECT stock FROM p WHERE id = ?")
		dbtest.OK(t, err)
		write, err := db.Prepare("UPDATE p SET stock = ? WHERE id = ?")
		dbtest.OK(t, err)
		t.Cleanup(func() { read.Close(); write.Close() })
		dbtest.Exec(t, s.plain, "UPDATE p SET stock = 0 WHERE id = 1")
		start, sold := time.Now(), 0
		var mu sync.Mutex
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				ctx = lockctx.With(ctx, "k")
				var n int
				err := read.QueryRowContext(ctx, 1).Scan(&n)
				if err == nil {
					_, err = write.ExecContext(ctx, n+1, 1)
				}
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					sold++
				case !errors.Is(err, mysqllock.ErrLocked) || !strings.Contains(err.Error(), "SetMaxOpenConns"):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		s.wantStock(1, sold)
		if took := time.Since(start); took > time.Minute || sold == 0 { // they wait for longer
			t.Errorf("%d got through in %v", sold, took)
		}
	})
}

// An unbounded pool never turns anybody away, however long the holder thinks.
func TestNobodyIsTurnedAwayFromAnUnboundedPool(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=20s")
		ctx := lockctx.With(dbtest.Limited(t), "k")
		stock.MustRead(t, ctx, db, 1)
		var wg sync.WaitGroup
		for range 12 {
			wg.Go(func() {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
				if err != nil {
					t.Error(err)
					return
				}
				tx.Rollback()
			})
		}
		dbtest.Soon(t, "all wait", func() bool {
			stats, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return stats.Waiters == 12
		})
		time.Sleep(200 * time.Millisecond) // the driver looks for a full pool after 50 ms
		dbtest.ExecIn(t, ctx, db, "UPDATE p SET stock = 9 WHERE id = 1")
		wg.Wait()
	})
}

// slowDial takes its time to connect for those who wait for a lock.
type slowDial struct{ sqlmw.NullInterceptor }

func (slowDial) ConnectorConnect(ctx context.Context, k driver.Connector) (driver.Conn, error) {
	if _, ok := hint.From(ctx); ok {
		time.Sleep(100 * time.Millisecond)
	}
	return k.Connect(ctx)
}

// A connection that is opened for somebody else is not taken for a sign that
// the pool is full.
func TestUnboundedPoolIsNotTakenForFull(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{Base: intercept.With(slowDial{})}))
		h := stock.Acquire(t, db, "k")
		first := make(chan error, 1)
		begin := func(opts ...lockctx.Option) error {
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", opts...), nil)
			if err == nil {
				err = tx.Rollback()
			}
			return err
		}
		go func() { first <- begin() }()
		time.Sleep(190 * time.Millisecond) // it dialled, waited 50 ms, was asked, and dials again
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		var n int
		dbtest.OK(t, db.QueryRowContext(ctx, "SELECT 1").Scan(&n))
		dbtest.Is(t, "another waiter", stock.Told(func() error { return begin(lockctx.Wait(300 * time.Millisecond)) }), mysqllock.ErrTimeout)
		dbtest.OK(t, h.Release())
		dbtest.OK(t, <-first)
	})
}
