package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

const takeOne = "UPDATE p SET stock = stock - 1 WHERE id = 1"

// TestHowNothingIsLocked: what docs/no-lock.md lists as silent is silent: while another
// holder has the key, the write goes through and there is no error. If one of these begins
// to fail, that is good news for users, and the page has to say so.
func TestHowNothingIsLocked(t *testing.T) {
	type way struct {
		held  []lockctx.Option // how the other holder has the key
		write func(ctx context.Context, s *scratch, db *sql.DB) error
	}
	write := func(ctx context.Context, db *sql.DB) error {
		_, err := db.ExecContext(ctx, takeOne)
		return err
	}
	ways := map[string]way{
		"no context": {write: func(_ context.Context, _ *scratch, db *sql.DB) error {
			_, err := db.Exec(takeOne)
			return err
		}},
		"Begin without a context": {write: func(_ context.Context, _ *scratch, db *sql.DB) error {
			tx, err := db.Begin()
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err := tx.Exec(takeOne); err != nil {
				return err
			}
			return tx.Commit()
		}},
		"With thrown away": {write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			lockctx.With(ctx, "k", lockctx.NoWait())
			return write(ctx, db)
		}},
		"another driver": {write: func(ctx context.Context, s *scratch, _ *sql.DB) error {
			return write(lockctx.With(ctx, "k", lockctx.NoWait()), s.plain)
		}},
		"a typo": {write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			return write(lockctx.With(ctx, "K", lockctx.NoWait()), db)
		}},
		"another namespace": {write: func(ctx context.Context, s *scratch, _ *sql.DB) error {
			return write(lockctx.With(ctx, "k", lockctx.NoWait()), s.open("lockNamespace=elsewhere"))
		}},
		"an advisory lock beside a row lock": {write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			return write(lockctx.With(ctx, "k", lockctx.NoWait(), lockctx.Advisory()), db)
		}},
		"a write under a shared lock": {held: []lockctx.Option{lockctx.Shared()}, write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			return write(lockctx.With(ctx, "k", lockctx.NoWait(), lockctx.Shared()), db)
		}},
	}
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		db, other := s.open(), s.open()
		for name, way := range ways {
			t.Run(name, func(t *testing.T) {
				hold, err := mysqllock.Acquire(dbtest.Limited(t), other, "k", way.held...)
				dbtest.OK(t, err)
				defer hold.Rollback()
				before := s.stock(1)
				dbtest.OK(t, way.write(dbtest.Limited(t), s, db))
				s.wantStock(1, before-1)
			})
		}
		t.Run("one lock context for two goroutines", func(t *testing.T) {
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait())
			if _, err := read(ctx, db, 1); err != nil {
				t.Fatal(err)
			}
			second := make(chan error)
			go func() {
				_, err := read(ctx, db, 1)
				second <- err
			}()
			dbtest.OK(t, <-second) // both have decided on the same stock
			dbtest.OK(t, write(ctx, db))
		})
		t.Run("the outer context inside a hold", func(t *testing.T) {
			outer, undone := dbtest.Limited(t), errors.New("undone")
			before := s.stock(1)
			err := mysqllock.Do(outer, db, "k", func(context.Context) error {
				if err := write(outer, db); err != nil {
					return err
				}
				return undone
			})
			dbtest.Want(t, err, undone)
			s.wantStock(1, before-1) // Do was rolled back, and the write stays
		})
	})
}

// TestHowNothingIsLockedIsTold: what the page says is told with an error.
func TestHowNothingIsLockedIsTold(t *testing.T) {
	dbtest.OnEachFlavour(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.open()
		nothing := func(context.Context) error { return errors.New("it ran") }
		err := mysqllock.Do(dbtest.Limited(t), s.plain, "k", nothing)
		dbtest.Says(t, err, "was opened with driver", `not with "mysqllock"`)
		_, err = mysqllock.Acquire(dbtest.Limited(t), s.plain, "k")
		dbtest.Says(t, err, `not with "mysqllock"`)

		// A caller that asks for the key again, beside the hold in which it is, would wait for itself.
		outer := dbtest.Limited(t)
		dbtest.OK(t, mysqllock.Do(outer, db, "k", func(context.Context) error {
			_, err := db.ExecContext(lockctx.With(outer, "k", lockctx.NoWait()), takeOne)
			dbtest.Want(t, err, mysqllock.ErrLocked)
			dbtest.Says(t, err, "held by this process")
			return nil
		}))
		s.wantStock(1, 10)
	})
}
