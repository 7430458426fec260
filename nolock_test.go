package mysqllock_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"strings"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

const takeOne = "UPDATE p SET stock = stock - 1 WHERE id = 1"

// TestHowNothingIsLocked: what docs/no-lock.md lists as silent is silent: while another
// holder has the key, the write goes through and there is no error. If one of these begins
// to fail, that is good news for users, and the page has to say so.
func TestHowNothingIsLocked(t *testing.T) {
	type way struct {
		held   []lockctx.Option // how the other holder has the key
		strict error            // what it is with lockRequire; nil if it is silent there, too
		write  func(ctx context.Context, s *scratch, db *sql.DB) error
	}
	write := func(ctx context.Context, db *sql.DB) error { return exec(ctx, db, takeOne) }
	ways := map[string]way{
		"no context": {strict: mysqllock.ErrNoLock, write: func(_ context.Context, _ *scratch, db *sql.DB) error {
			_, err := db.Exec(takeOne)
			return err
		}},
		"Begin without a context": {strict: mysqllock.ErrNoLock, write: func(_ context.Context, _ *scratch, db *sql.DB) error {
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
		"With thrown away": {strict: mysqllock.ErrNoLock, write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			lockctx.With(ctx, "k", lockctx.NoWait())
			return write(ctx, db)
		}},
		"another driver": {write: func(ctx context.Context, s *scratch, _ *sql.DB) error {
			return write(lockctx.With(ctx, "k", lockctx.NoWait()), s.plain)
		}},
		"lockctx.Without": {strict: mysqllock.ErrNoLock, write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			return write(lockctx.Without(lockctx.With(ctx, "k", lockctx.NoWait())), db)
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
		"a write under a shared lock": {held: []lockctx.Option{lockctx.Shared()}, strict: mysqllock.ErrNoLock, write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			return write(lockctx.With(ctx, "k", lockctx.NoWait(), lockctx.Shared()), db)
		}},
		"a write in one of two slots": {held: []lockctx.Option{lockctx.Slots(2)}, strict: mysqllock.ErrNoLock, write: func(ctx context.Context, _ *scratch, db *sql.DB) error {
			return write(lockctx.With(ctx, "k", lockctx.NoWait(), lockctx.Slots(2)), db)
		}},
	}
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
		db, strict, other := s.open(), s.open("lockRequire=p"), s.open()
		for name, way := range ways {
			t.Run(name, func(t *testing.T) {
				hold := stock.Acquire(t, other, "k", way.held...)
				defer hold.Rollback()
				before := s.stock(1)
				dbtest.OK(t, way.write(dbtest.Limited(t), s, db))
				s.wantStock(1, before-1)
				if err := way.write(dbtest.Limited(t), s, strict); way.strict == nil {
					dbtest.OK(t, err)
					s.wantStock(1, before-2)
				} else {
					stock.WantError(t, "strict mode", err, way.strict, " writes p ")
					dbtest.Says(t, err, "_test.go:")
					s.wantStock(1, before-1)
				}
			})
		}
		t.Run("one lock context for two goroutines", func(t *testing.T) {
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait())
			dbtest.OK(t, dbtest.Err(read(ctx, db, 1)))
			second := make(chan error)
			go func() {
				_, err := read(ctx, db, 1)
				second <- err
			}()
			dbtest.OK(t, <-second) // both have decided on the same stock
			dbtest.OK(t, write(ctx, db))

			ctx = lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait())
			dbtest.OK(t, dbtest.Err(read(ctx, strict, 1)))
			dbtest.Want(t, write(ctx, strict), mysqllock.ErrUnsafe)
		})
		t.Run("a read before the lock", func(t *testing.T) {
			for name, strategy := range strategies {
				for _, db := range []*sql.DB{db, strict} {
					before := s.stock(1)
					n, err := read(dbtest.Limited(t), db, 1)
					dbtest.OK(t, err)
					locked := func(ctx context.Context, text string, args ...any) {
						t.Helper()
						dbtest.OK(t, mysqllock.Do(ctx, db, "read before "+name, func(ctx context.Context) error { return exec(ctx, db, text, args...) }, strategy))
					}
					locked(dbtest.Limited(t), takeOne)
					locked(dbtest.Limited(t), "UPDATE p SET stock = ? WHERE id = 1", n-1)
					s.wantStock(1, before-1) // the first sale is lost
				}
			}
		})
		t.Run("a wrapper that drops contexts", func(t *testing.T) {
			hold := stock.Acquire(t, other, "k")
			defer hold.Rollback()
			drops := func(c whole) driver.Conn { return forgetful{c} }
			ctx := lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait())
			dbtest.OK(t, write(ctx, s.wrapped(drops)))
			dbtest.Want(t, write(ctx, s.wrapped(drops, "lockRequire=p")), mysqllock.ErrNoLock)
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
			dbtest.Want(t, mysqllock.Do(outer, strict, "k", func(context.Context) error { return write(outer, strict) }), mysqllock.ErrNoLock)
			s.wantStock(1, before-1)
		})
	})
}

// forgetful is a wrapper of drivers without contexts.
type forgetful struct{ driver.Conn }

func (f forgetful) Prepare(text string) (driver.Stmt, error) {
	s, err := f.Conn.Prepare(text)
	return struct{ driver.Stmt }{s}, err
}

// TestHowNothingIsLockedIsTold: what the page says is told with an error.
func TestHowNothingIsLockedIsTold(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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

		// So does one that has no lock context, if the hold has changed what it is to change.
		short := s.open("innodb_lock_wait_timeout=1")
		dbtest.OK(t, mysqllock.Do(outer, short, "k", func(ctx context.Context) error {
			dbtest.ExecIn(t, ctx, short, takeOne)
			_, err = short.ExecContext(outer, takeOne)
			dbtest.Says(t, err, "Error 1205", `transactions open under locks: "k"; a row`, "pass it the context of the lock")
			if _, same := err.(*mysql.MySQLError); !same { //nolint:errorlint // callers may look at it like this
				t.Errorf("it is a %T", err)
			}
			_, err = s.open("innodb_lock_wait_timeout=1").ExecContext(outer, takeOne) // as in another process
			dbtest.Says(t, err, "Error 1205")
			if strings.Contains(err.Error(), "locks:") {
				t.Errorf("of a handle without locks: %v", err)
			}
			return nil
		}))
		s.wantStock(1, 9)
	})
}
