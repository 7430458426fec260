package mysqllock_test

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
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

// TestAdvisedOfTheBound: if waiters fill the bound of SetMaxOpenConns, the observer and
// the error say what helps, once each.
func TestAdvisedOfTheBound(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		db, w := s.watched(mysqllock.Config{Wait: time.Minute})
		for _, bound := range []int{4, 6} {
			// Where connections are slow to open, the driver finds too small a bound at first.
			for try := 1; ; try++ {
				wrong := s.refusedAt(t, db, w, bound)
				if len(wrong) == 0 {
					break
				}
				if try == 5 {
					t.Errorf("with a bound of %d it says: %s", bound, strings.Join(wrong, "\n"))
					break
				}
			}
		}
		told := w.advice()
		if len(told) != 1 || !strings.Contains(told[0], "use maxConns") || !regexp.MustCompile("all [2-4] connections").MatchString(told[0]) {
			t.Errorf("the observer was told %q", told)
		}
	})
}

// refusedAt has waiters fill the bound of SetMaxOpenConns. It returns what they are told that
// does not name the bound.
func (s *scratch) refusedAt(t *testing.T, db *sql.DB, w *witness, bound int) (wrong []string) {
	t.Helper()
	db.SetMaxOpenConns(bound)
	db.SetMaxIdleConns(bound)
	occupied(t, db, bound)() // more than before, so that the driver has to find the bound again
	dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
	ctx, end := context.WithCancel(lockctx.With(dbtest.Limited(t), "k"))
	_, err := read(ctx, db, 1)
	dbtest.OK(t, err)
	first := len(w.advice()) == 0
	var mu sync.Mutex
	var refused, advised atomic.Int32
	var waiters sync.WaitGroup
	for range 20 {
		waiters.Go(func() {
			tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k"), nil)
			switch {
			case err == nil:
				tx.Rollback()
			case errors.Is(err, mysqllock.ErrLocked):
				dbtest.Says(t, err, "connections that SetMaxOpenConns allows")
				if !strings.Contains(err.Error(), fmt.Sprintf("the %d connections that SetMaxOpenConns allows", bound)) {
					mu.Lock()
					wrong = append(wrong, err.Error())
					mu.Unlock()
				}
				refused.Add(1)
				if strings.Contains(err.Error(), "use maxConns") {
					advised.Add(1)
				}
			default:
				t.Error(err)
			}
		})
	}
	dbtest.Soon(t, "callers are refused", func() bool { return int(refused.Load()) > 20-bound }) // as the last connection is kept free
	_, err = db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
	dbtest.OK(t, err)
	end()
	waiters.Wait()
	if n := advised.Load(); (n == 1) != first || n > 1 {
		t.Errorf("%d of %d errors say what helps; the first of them: %v", n, refused.Load(), first)
	}
	return wrong
}

// TestAdvisedOfABoundBesideMaxConns: SetMaxOpenConns beside maxConns is told of, once. A
// holder that it keeps waiting gets through when the waits of others end.
func TestAdvisedOfABoundBesideMaxConns(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		nothing := func(context.Context) error { return nil }
		db, w := s.watched(mysqllock.Config{MaxConns: 8, Wait: time.Minute})
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing))
		if told := w.advice(); len(told) > 0 {
			t.Errorf("without a bound: %q", told)
		}
		db.SetMaxOpenConns(2)
		ctx := lockctx.With(dbtest.Limited(t), "k")
		n, err := read(ctx, db, 1)
		dbtest.OK(t, err)
		var waiters sync.WaitGroup
		waiting, over := context.WithCancel(dbtest.Limited(t))
		defer over()
		for range 2 {
			waiters.Go(func() {
				_, err := db.ExecContext(lockctx.With(waiting, "k"), "UPDATE p SET stock = 0 WHERE id = 2")
				if err != nil && !errors.Is(err, mysqllock.ErrTimeout) {
					t.Error(err)
				}
			})
		}
		dbtest.Soon(t, "both wait", func() bool { return db.Stats().InUse == 2 })
		time.AfterFunc(300*time.Millisecond, over)
		_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		dbtest.OK(t, err)
		waiters.Wait()
		s.wantStock(1, n-1)
		for range 3 {
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing))
		}
		if told := w.advice(); len(told) != 1 || !strings.Contains(told[0], "maxConns=8") || !strings.Contains(told[0], "SetMaxOpenConns(2)") {
			t.Errorf("the observer was told %q", told)
		}

		// A bound above maxConns counts only if callers have waited for it.
		db, w = s.watched(mysqllock.Config{MaxConns: 4})
		db.SetMaxOpenConns(5)
		dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), db, "k", nothing))
		if told := w.advice(); len(told) > 0 {
			t.Errorf("with a bound that nobody has met: %q", told)
		}
		defer occupied(t, db, 5)()
		dbtest.Soon(t, "a caller has waited for a connection", func() bool {
			short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
			defer cancel()
			_, err := db.Conn(short)
			dbtest.Want(t, err, context.DeadlineExceeded)
			return db.Stats().WaitCount > 0 // not if its context had ended before
		})
		_, err = mysqllock.Stats(db)
		dbtest.OK(t, err)
		if told := w.advice(); len(told) != 1 || !strings.Contains(told[0], "SetMaxOpenConns(5)") {
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
