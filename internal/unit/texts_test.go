package unit_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestErrorsSayWhatToDo: what is set up so that nothing can be locked is named.
func TestErrorsSayWhatToDo(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		dbtest.Exec(t, s.Plain, "CREATE VIEW locks AS SELECT * FROM p")
		readOnly := "transaction_read_only"
		if s.MariaDB() {
			readOnly = "tx_read_only"
		}
		for param, says := range map[string]string{
			"lockTable=locks":             "is a view",
			readOnly + "=1":               readOnly,
			"character_set_results=utf16": "character_set_results",
		} {
			for name, opts := range stock.KeptAs() {
				db := s.Handle(param)
				err := mysqllock.Do(t.Context(), db, "k", func(context.Context) error { return nil }, opts...)
				if err != nil || param == "lockTable=locks" && name != "advisory" { // what is of no use to one strategy may do for others
					stock.WantError(t, param+", "+name, err, mysqllock.ErrUnsafe, says)
				}
			}
		}
	})
}

// TestASpentLockContextSaysBeginAgain: the lock context of a lock that was lost fails, and says what
// to do.
func TestASpentLockContextSaysBeginAgain(t *testing.T) {
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		ctx, cancel := context.WithCancel(lockctx.With(t.Context(), "k"))
		defer cancel()
		stock.MustRead(t, ctx, db, 1)
		s.KillAllBut(0)
		for range 3 {
			_, err := stock.Read(ctx, db, 1)
			dbtest.Is(t, "a read", err, mysqllock.ErrLost)
		}
		_, err := stock.Read(ctx, db, 1)
		dbtest.Says(t, err, "begin again with lockctx.With")
	})
}

// TestCleanUpsWithoutAPauseCostNobodyALock: they remove rows as soon as they are unused.
func TestCleanUpsWithoutAPauseCostNobodyALock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		dbtest.OK(t, mysqllock.Do(t.Context(), db, "k", func(context.Context) error { return nil }, lockctx.Lease(stock.TTL)))
		var over atomic.Bool
		var cleaners, callers sync.WaitGroup
		for range 4 { // what clean-ups do, without what they do beside
			cleaners.Go(func() {
				for !over.Load() {
					_, _ = s.Plain.ExecContext(t.Context(), "DELETE FROM mysqllock WHERE namespace = ? AND owner IS NULL", s.Name)
				}
			})
		}
		var granted, vanished atomic.Int64
		for range 4 {
			callers.Go(func() {
				for began := time.Now(); time.Since(began) < 5*time.Second; {
					err := mysqllock.Do(t.Context(), db, dbtest.Random(), func(context.Context) error { return nil }, lockctx.Lease(stock.TTL), lockctx.Wait(time.Minute))
					switch {
					case err == nil:
						granted.Add(1)
					case errors.Is(err, mysqllock.ErrUnsafe):
						vanished.Add(1)
					}
				}
			})
		}
		callers.Wait()
		over.Store(true)
		cleaners.Wait()
		t.Logf("%d granted, %d vanished", granted.Load(), vanished.Load())
		if vanished.Load() > 0 || granted.Load() == 0 {
			t.Errorf("%d were granted, and %d failed since their rows vanished", granted.Load(), vanished.Load())
		}
	})
}
