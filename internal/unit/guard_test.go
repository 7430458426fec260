package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// under is the context of a lock that lies outside of the transactions under it.
func under(ctx context.Context, key string, more ...lockctx.Option) context.Context {
	return lockctx.With(lockctx.Without(ctx), key, append([]lockctx.Option{lockctx.Advisory()}, more...)...)
}

// workUnder are the ways to work under such a lock; each writes n.
var workUnder = map[string]func(ctx context.Context, db *sql.DB, n int) error{
	"a transaction": func(ctx context.Context, db *sql.DB, n int) error {
		tx, err := db.BeginTx(under(ctx, "a"), nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := put(ctx, tx, n); err != nil {
			return err
		}
		return tx.Commit()
	},
	"a statement": func(ctx context.Context, db *sql.DB, n int) error { return put(under(ctx, "a"), db, n) },
	"a decision": func(ctx context.Context, db *sql.DB, n int) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ctx = under(ctx, "a")
		var was int
		if err := db.QueryRowContext(ctx, read, 1).Scan(&was); err != nil {
			return err
		}
		return put(ctx, db, n)
	},
	"Do": func(ctx context.Context, db *sql.DB, n int) error {
		return mysqllock.Do(lockctx.Without(ctx), db, "a", func(ctx context.Context) error { return put(ctx, db, n) }, lockctx.Advisory())
	},
	"a transaction in Do": func(ctx context.Context, db *sql.DB, n int) error {
		return mysqllock.Do(lockctx.Without(ctx), db, "a", func(ctx context.Context) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if err := put(ctx, tx, n); err != nil {
				return err
			}
			return tx.Commit()
		}, lockctx.Advisory())
	},
	"a hold": func(ctx context.Context, db *sql.DB, n int) error {
		h, err := mysqllock.Acquire(lockctx.Without(ctx), db, "a", lockctx.Advisory())
		if err != nil {
			return err
		}
		return errors.Join(put(h.Context(), db, n), h.Release())
	},
	"a sql.Conn": func(ctx context.Context, db *sql.DB, n int) error {
		c, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		return put(under(ctx, "a"), c, n)
	},
	"a late hint": func(ctx context.Context, db *sql.DB, n int) error {
		tx, err := db.BeginTx(lockctx.Without(ctx), nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := put(under(ctx, "a"), tx, n); err != nil {
			return err
		}
		return tx.Commit()
	},
	"a prepared statement": func(ctx context.Context, db *sql.DB, n int) error {
		st, err := db.PrepareContext(ctx, write)
		if err != nil {
			return err
		}
		defer st.Close()
		_, err = st.ExecContext(under(ctx, "a"), n, 1)
		return err
	},
	"beside a row lock": func(ctx context.Context, db *sql.DB, n int) error {
		tx, err := db.BeginTx(under(ctx, "a"), nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := put(lockctx.With(ctx, "row"), tx, n); err != nil {
			return err
		}
		return tx.Commit()
	},
}

func TestWorkUnderAGuardCommitsAndGivesItBack(t *testing.T) {
	for name, work := range workUnder {
		for _, maxConns := range []int{0, 8} {
			t.Run(name, func(t *testing.T) {
				s, db, ctx := openWith(t, mysqllock.Config{MaxConns: maxConns})
				must(t, work(ctx, db, 3))
				must(t, work(ctx, db, 4))
				state(t, s, 4, 0)
				if names := s.Named("mysqllock:"); len(names) > 0 {
					t.Errorf("%q are held", names)
				}
			})
		}
	}
}

// TestAGuardThatIsLostBeforeItsCommitCommitsNothing: the server says at COMMIT whether the lock is
// still held.
func TestAGuardThatIsLostBeforeItsCommitCommitsNothing(t *testing.T) {
	for name, work := range workUnder {
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			must(t, work(ctx, db, 3))
			s.StealAt(write, "mysqllock:")
			if err := work(ctx, db, 4); !errors.Is(err, mysqllock.ErrLost) {
				t.Errorf("%v", err)
			}
			state(t, s, 3, 0)
		})
	}
}
