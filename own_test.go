package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestHeldByThisProcess: an error that names the holder says where it is this process,
// and where it is the lock context that asks.
func TestHeldByThisProcess(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		short := lockctx.Wait(300 * time.Millisecond)
		for name, opt := range map[string]lockctx.Option{"row": lockctx.Row(), "lease": lockctx.Lease(ttl), "advisory": lockctx.Advisory()} {
			held := func(what string, who *sql.DB, ctx context.Context, want, same bool, opts ...lockctx.Option) {
				t.Helper()
				err := naming(func() error {
					_, err := who.ExecContext(lockctx.With(ctx, "k", append(opts, opt)...), setStock, 1)
					return err
				})
				var e *mysqllock.Error
				if !errors.Is(err, mysqllock.ErrLocked) || !errors.As(err, &e) || e.Holder == nil {
					t.Errorf("%s, %s: %v", name, what, err)
					return
				}
				if e.Holder.ThisProcess != want || e.Holder.ThisContext != same ||
					strings.Contains(err.Error(), "held by this process") != want || strings.Contains(err.Error(), "this very lock context") != same {
					t.Errorf("%s, %s: %v", name, what, err)
				}
			}
			outer := dbtest.Limited(t)
			dbtest.OK(t, mysqllock.Do(outer, db, "k", func(context.Context) error {
				held("the context from before Do", db, outer, true, false, short)
				held("at once", db, outer, true, false, lockctx.NoWait())
				held("another handle", other, outer, false, false, short)
				return nil
			}, opt))

			ctx := lockctx.With(outer, "around", opt)
			h, err := mysqllock.Acquire(ctx, db, "k", opt)
			dbtest.OK(t, err)
			if name != "row" { // which joins
				held("the lock context around a hold", db, ctx, true, true, short)
				held("another lock context", db, outer, true, false, short)
			}
			dbtest.OK(t, h.Release())

			free, err := db.ExecContext(lockctx.With(outer, "k", opt, lockctx.NoWait()), setStock, 10)
			if err != nil {
				t.Errorf("%s: after the hold: %v, %v", name, free, err)
			}
			h, err = mysqllock.Acquire(outer, other, "k", opt)
			dbtest.OK(t, err)
			err = naming(func() error {
				_, err := db.ExecContext(lockctx.With(outer, "k", opt, short), setStock, 1)
				return err
			})
			if !errors.Is(err, mysqllock.ErrTimeout) || strings.Contains(err.Error(), "this process") {
				t.Errorf("%s, held by another handle after ours: %v", name, err)
			}
			dbtest.OK(t, h.Rollback())
		}
	})
}
