package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

func TestDo(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		set := func(ctx context.Context, n int) {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n)
			ok(t, err)
		}
		ok(t, mysqllock.Do(limited(t), db, "k", func(ctx context.Context) error {
			s.wantLocked("k", true)
			set(ctx, 9) // an Exec in a hold does not end it
			s.wantLocked("k", true)
			tx, err := db.BeginTx(ctx, nil)
			ok(t, err)
			exec(t, tx, "UPDATE p SET stock = 1 WHERE id = 2")
			ok(t, tx.Rollback())
			tx, err = db.BeginTx(ctx, nil)
			ok(t, err)
			exec(t, tx, "UPDATE p SET stock = 3 WHERE id = 3")
			ok(t, tx.Commit())
			s.wantStock(1, 10)
			return nil
		}))
		s.wantLocked("k", false)
		s.wantStock(1, 9)
		s.wantStock(2, 10)
		s.wantStock(3, 3)

		mine := errors.New("mine")
		if err := mysqllock.Do(limited(t), db, "k", func(ctx context.Context) error { set(ctx, 1); return mine }); !errors.Is(err, mine) {
			t.Errorf("Do returned %v, not the function's error", err)
		}
		s.wantStock(1, 9)
		func() {
			defer func() {
				if p := recover(); p != "boom" {
					t.Errorf("recovered %v, want the panic of the function", p)
				}
			}()
			_ = mysqllock.Do(limited(t), db, "k", func(ctx context.Context) error { set(ctx, 1); panic("boom") })
		}()
		s.wantStock(1, 9)
		s.wantLocked("k", false)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = mysqllock.Do(limited(t), db, "k", func(ctx context.Context) error { set(ctx, 1); runtime.Goexit(); return nil })
		}()
		<-done
		s.wantStock(1, 9)
		s.wantLocked("k", false)

		ctx, cancel := context.WithCancel(limited(t))
		err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { set(ctx, 1); cancel(); return nil })
		if err == nil {
			t.Error("Do committed although its context had ended")
		}
		soon(t, "the lock is free", func() bool { return !s.locked("k") })
		s.wantStock(1, 9)
	})
}

func TestDoInsideDo(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		mine := errors.New("mine")
		ok(t, mysqllock.Do(limited(t), db, "a", func(ctx context.Context) error {
			for i, key := range []string{"a", "b"} {
				err := mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, "UPDATE p SET stock = 5 WHERE id = ?", 1+i)
					ok(t, err)
					if key == "b" {
						return mine
					}
					return nil
				})
				if key == "b" && !errors.Is(err, mine) || key == "a" && err != nil {
					t.Errorf("%s: %v", key, err)
				}
			}
			s.wantLocked("b", true)
			return nil
		}))
		s.wantStock(1, 5)
		s.wantStock(2, 10)
		s.wantLocked("a", false)
		s.wantLocked("b", false)
	})
}

func TestDoRetriesAfterADeadlock(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		var tries atomic.Int32
		both := make(chan error, 2)
		// Two holders that ask for each other's key: the server breaks it.
		for _, keys := range [][2]string{{"a", "b"}, {"b", "a"}} {
			go func() {
				both <- mysqllock.Do(limited(t), db, keys[0], func(ctx context.Context) error {
					tries.Add(1)
					for tries.Load() < 2 {
						time.Sleep(time.Millisecond)
					}
					_, err := db.ExecContext(lockctx.With(ctx, keys[1]), "UPDATE p SET stock = stock - 1 WHERE id = 1")
					return err
				}, lockctx.Retry(5))
			}()
		}
		ok(t, <-both)
		ok(t, <-both)
		if n := tries.Load(); n < 3 {
			t.Errorf("the functions ran %d times, so there was no deadlock", n)
		}
		s.wantStock(1, 8)
	})
}

func TestLocalDeadlockIsNotHidden(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open("lockWait=3s")
		ready := make(chan struct{}, 2)
		begin := make(chan struct{})
		both := make(chan error, 2)
		for _, keys := range [][2]string{{"a", "b"}, {"b", "a"}} {
			go func() {
				tx, err := db.BeginTx(lockctx.With(limited(t), keys[0]), nil)
				if err != nil {
					both <- err
					return
				}
				defer tx.Rollback()
				ready <- struct{}{}
				<-begin
				if _, err := tx.ExecContext(lockctx.With(context.Background(), keys[1]), "UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
					both <- err
					return
				}
				both <- tx.Commit()
			}()
		}
		<-ready
		<-ready
		close(begin)
		won := 0
		for range 2 {
			switch err := <-both; {
			case err == nil:
				won++
			case !errors.Is(err, mysqllock.ErrDeadlock) && !errors.Is(err, mysqllock.ErrTimeout):
				t.Error(err)
			}
		}
		if won != 1 {
			t.Errorf("%d sides won, want 1", won)
		}
	})
}

func TestHold(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		h, err := mysqllock.Acquire(limited(t), db, "k")
		ok(t, err)
		s.wantLocked("k", true)
		_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 9 WHERE id = 1")
		ok(t, err)
		ok(t, h.Release())
		ok(t, h.Release())
		ok(t, h.Rollback())
		s.wantStock(1, 9)
		s.wantLocked("k", false)
		if h.Context().Err() == nil {
			t.Error("the context of a hold goes on after its release")
		}

		h, err = mysqllock.Acquire(limited(t), db, "k")
		ok(t, err)
		_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 8 WHERE id = 1")
		ok(t, err)
		ok(t, h.Rollback())
		ok(t, h.Release())
		s.wantStock(1, 9)

		// A transaction left open in it.
		h, err = mysqllock.Acquire(limited(t), db, "k")
		ok(t, err)
		tx, err := db.BeginTx(h.Context(), nil)
		ok(t, err)
		if err := h.Release(); err == nil || !strings.Contains(err.Error(), "still open") {
			t.Errorf("Release with a transaction open: %v", err)
		}
		if err := tx.Commit(); err == nil {
			t.Error("a transaction committed after its hold was rolled back")
		}
		s.wantLocked("k", false)

		// The context that Acquire was given ends.
		ctx, cancel := context.WithCancel(limited(t))
		h, err = mysqllock.Acquire(ctx, db, "k")
		ok(t, err)
		_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 7 WHERE id = 1")
		ok(t, err)
		cancel()
		soon(t, "the lock is free", func() bool { return !s.locked("k") })
		if err := h.Release(); err == nil {
			t.Error("Release succeeded after the context had ended")
		}
		s.wantStock(1, 9)

		// Its connection is lost.
		db = s.open("lockTTL=3s")
		h, err = mysqllock.Acquire(limited(t), db, "k")
		ok(t, err)
		var id int
		ok(t, db.QueryRowContext(h.Context(), "SELECT CONNECTION_ID()").Scan(&id))
		exec(t, s.plain, fmt.Sprintf("KILL %d", id))
		select {
		case <-h.Context().Done():
			if cause := context.Cause(h.Context()); !errors.Is(cause, mysqllock.ErrLost) {
				t.Errorf("the cause is %v, want ErrLost", cause)
			}
		case <-time.After(30 * time.Second):
			t.Error("an idle hold does not notice that its connection is lost")
		}
		if err := h.Release(); !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("Release of a lost hold: %v", err)
		}
	})
}

func TestHoldOutlivesItsTTL(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open("lockTTL=2s")
		ok(t, mysqllock.Do(limited(t), db, "k", func(ctx context.Context) error {
			time.Sleep(3 * time.Second)
			s.wantLocked("k", true)
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = 9 WHERE id = 1")
			return err
		}))
		s.wantStock(1, 9)
		// A transaction on the application's own connection, too.
		tx, err := db.BeginTx(lockctx.With(limited(t), "k"), nil)
		ok(t, err)
		time.Sleep(3 * time.Second)
		exec(t, tx, "UPDATE p SET stock = 8 WHERE id = 1")
		ok(t, tx.Commit())
		// The limit on idleness that MariaDB got for it does not stay.
		tx, err = db.Begin()
		ok(t, err)
		time.Sleep(2500 * time.Millisecond)
		exec(t, tx, "UPDATE p SET stock = 7 WHERE id = 1")
		ok(t, tx.Commit())
		s.wantStock(1, 7)
	})
}

func TestCloseEndsEverything(t *testing.T) {
	onServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		ctx := lockctx.With(limited(t), "k")
		_, err := read(ctx, db, 1)
		ok(t, err)
		h, err := mysqllock.Acquire(limited(t), db, "h")
		ok(t, err)
		_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = 1 WHERE id = 1")
		ok(t, err)
		waits := make(chan error, 1)
		go func() {
			_, err := mysqllock.Acquire(limited(t), db, "k")
			waits <- err
		}()
		busy := make(chan error, 1)
		go func() {
			h, err := mysqllock.Acquire(limited(t), db, "busy")
			if err == nil {
				_, err = db.ExecContext(h.Context(), "DO SLEEP(25)")
			}
			busy <- err
		}()
		soon(t, "a statement runs on a session", func() bool {
			var n int
			ok(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO = 'DO SLEEP(25)'", s.database).Scan(&n))
			return n == 1
		})
		start := time.Now()
		ok(t, db.Close())
		if took := time.Since(start); took > 15*time.Second {
			t.Errorf("Close took %v, as long as a statement on a session", took)
		}
		if err := <-busy; !errors.Is(err, mysqllock.ErrLost) {
			t.Errorf("a statement that Close has ended: %v", err)
		}
		if err := <-waits; !errors.Is(err, mysqllock.ErrClosed) {
			t.Errorf("a waiter of a closed handle: %v", err)
		}
		if err := h.Release(); err == nil {
			t.Error("a hold was committed after its handle was closed")
		}
		s.wantLocked("k", false)
		s.wantLocked("h", false)
		s.wantStock(1, 10)
		if _, err := mysqllock.Acquire(limited(t), db, "k"); !errors.Is(err, mysqllock.ErrClosed) {
			t.Errorf("Acquire on a closed handle: %v", err)
		}
		soon(t, "no connection is left", func() bool {
			var n int
			ok(t, s.plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ? AND ID <> CONNECTION_ID()", s.database).Scan(&n))
			return n == 0
		})
	})
}

func TestOtherDriver(t *testing.T) {
	db, err := sql.Open("mysql", "root@tcp(127.0.0.1:1)/")
	ok(t, err)
	defer db.Close()
	if _, err := mysqllock.Acquire(context.Background(), db, "k"); err == nil || !strings.Contains(err.Error(), "mysqllock") {
		t.Errorf("Acquire on another driver's handle: %v", err)
	}
	if _, err := mysqllock.Stats(db); err == nil {
		t.Error("Stats of another driver's handle")
	}
}
