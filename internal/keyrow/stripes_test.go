package keyrow_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestHandlesThatDisagreeAboutStripesRefuseToWork, and what the error says mends it.
func TestHandlesThatDisagreeAboutStripesRefuseToWork(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		use := func(params ...string) error {
			_, err := s.Handle(params...).ExecContext(lockctx.With(dbtest.Limited(t), "k", lockctx.Lease(stock.TTL)), "DO 0")
			return err
		}
		mend := func(err error) {
			t.Helper()
			if !errors.Is(err, mysqllock.ErrUnsafe) {
				t.Fatalf("another number of rows: %v", err)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != 4 {
				t.Fatalf("%v does not say what to do", err)
			}
			for _, text := range lines[1:3] {
				dbtest.Exec(t, s.Plain, text)
			}
		}
		tokens := func() (highest int) {
			t.Helper()
			dbtest.OK(t, s.Plain.QueryRow("SELECT MAX(token) FROM mysqllock WHERE NOT (namespace = ? AND name = ?)", s.Name, "\x00stripes").Scan(&highest))
			return highest
		}
		for range 7 {
			dbtest.OK(t, use())
		}
		// From rows of their own to four, to eight, and back.
		for _, params := range [][]string{{"lockStripes=4"}, {"lockStripes=8"}, nil} {
			before := tokens()
			mend(use(params...))
			dbtest.OK(t, use(params...))
			if after := tokens(); after <= before {
				t.Errorf("%v: the token went from %d to %d", params, before, after)
			}
			for _, others := range [][]string{{"lockStripes=4"}, {"lockStripes=8"}, nil} {
				if err := use(others...); errors.Is(err, mysqllock.ErrUnsafe) == slices.Equal(params, others) {
					t.Errorf("%v after %v: %v", others, params, err)
				}
			}
		}
	})
}

// TestStripesKeepTheTableSmall: a thousand keys use four rows.
func TestStripesKeepTheTableSmall(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle("lockStripes=4")
		var all sync.WaitGroup
		for worker := range 10 {
			all.Go(func() {
				for i := range 100 {
					opts := [][]lockctx.Option{{lockctx.Row()}, {lockctx.Lease(stock.TTL)}, {lockctx.Shared()}, {lockctx.Optimistic()}}[i%4]
					for {
						_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), fmt.Sprintf("%d-%d", worker, i), opts...), "DO 0")
						if errors.Is(err, mysqllock.ErrConflict) {
							continue
						}
						if err != nil {
							t.Error(err)
						}
						break
					}
				}
			})
		}
		all.Wait()
		rows := dbtest.Column[int](t, s.Plain, "SELECT COUNT(*) FROM mysqllock WHERE namespace = ?", s.Name)[0]
		if rows != 4+1 {
			t.Errorf("%d rows, want 4 and the note", rows)
		}
	})
}

// TestKeysThatShareARowAreOneLock, to be had again and again.
func TestKeysThatShareARowAreOneLock(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db, other := s.Handle("lockStripes=4", "lockWait=1m"), s.Handle("lockStripes=4")
		var keys []string
		for i := range 20 {
			keys = append(keys, fmt.Sprintf("k%02d", i))
		}
		var nest func(ctx context.Context, rest []string, opts ...[]lockctx.Option) error
		nest = func(ctx context.Context, rest []string, opts ...[]lockctx.Option) error {
			if len(rest) == 0 {
				for _, key := range keys {
					_, err := mysqllock.Acquire(dbtest.Limited(t), other, key, lockctx.NoWait())
					dbtest.Is(t, fmt.Sprintf("%s is not locked", key), err, mysqllock.ErrLocked)
				}
				return nil
			}
			return mysqllock.Do(ctx, db, rest[0], func(ctx context.Context) error { return nest(ctx, rest[1:], opts...) }, opts[len(rest)%len(opts)]...)
		}
		row, lease, shared := []lockctx.Option{lockctx.Row()}, []lockctx.Option{lockctx.Lease(stock.TTL)}, []lockctx.Option{lockctx.Shared()}
		dbtest.OK(t, nest(dbtest.Limited(t), keys, row))
		dbtest.OK(t, nest(dbtest.Limited(t), keys, lease))
		dbtest.OK(t, nest(dbtest.Limited(t), keys, shared))
		dbtest.OK(t, nest(dbtest.Limited(t), keys, row, shared))
		for _, opts := range [][]lockctx.Option{row, lease, shared} {
			tx := dbtest.Begin(t, lockctx.WithKeys(dbtest.Limited(t), keys, opts...), db)
			dbtest.OK(t, nest(dbtest.Limited(t), nil))
			dbtest.Exec(t, tx, "UPDATE p SET stock = 9 WHERE id = 1")
			dbtest.OK(t, tx.Commit())
		}
	})
}
