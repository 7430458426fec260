//go:build unix

package matrix

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// strategies are the ways in which a key is kept.
var strategies = []struct {
	name   string
	option func(ttl time.Duration) lockctx.Option
}{
	{"row", always(lockctx.Row())},
	{"lease", lockctx.Lease},
	{"advisory", always(lockctx.Advisory())},
	{"optimistic", always(lockctx.Optimistic())},
	{"shared", always(lockctx.Shared())},
	{"slots", always(lockctx.Slots(1))},
	{"keys", always(lockctx.Row())},
}

func always(o lockctx.Option) func(time.Duration) lockctx.Option {
	return func(time.Duration) lockctx.Option { return o }
}

// The statements of the application. Each of its units of work adds one to a counter.
const (
	read     = "SELECT n FROM counters WHERE id = ?"
	add      = "UPDATE counters SET n = n + 1 WHERE id = ?"
	write    = "UPDATE counters SET n = ? WHERE id = ?"
	addSleep = "UPDATE counters SET n = n + 1 + SLEEP(20) WHERE id = ?" // for a caller that does not wait so long
)

// unit is one unit of work of a cell: it adds one to the counter id, under the lock of the
// contexts that lock makes.
type unit struct {
	db   *sql.DB
	id   int
	keys []string
	opts []lockctx.Option
	slow bool // its write takes 20 s, unless its caller gives up before
}

// lock returns a lock context.
func (u unit) lock(ctx context.Context) context.Context {
	return lockctx.WithKeys(ctx, u.keys, u.opts...)
}

// querier is a *sql.DB, *sql.Tx or *sql.Conn.
type querier interface {
	QueryRowContext(ctx context.Context, text string, args ...any) *sql.Row
	ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error)
}

// change reads, decides and writes.
func (u unit) change(ctx context.Context, q querier) error {
	var n int
	if err := q.QueryRowContext(ctx, read, u.id).Scan(&n); err != nil {
		return fmt.Errorf("read: %w", err)
	}
	if u.slow {
		return u.add(ctx, q)
	}
	if _, err := q.ExecContext(ctx, write, n+1, u.id); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

// add writes without a decision.
func (u unit) add(ctx context.Context, q querier) error {
	text := add
	if u.slow {
		text = addSleep
	}
	_, err := q.ExecContext(ctx, text, u.id)
	return err
}

// end ends tx by what became of what ran in it.
func end(tx *sql.Tx, err error) error {
	if err != nil {
		_ = tx.Rollback()
		return err
	}
	return tx.Commit()
}

// way is a way in which an application asks for a lock.
type way struct {
	name string
	run  func(ctx context.Context, u unit) error
}

var ways = []way{
	{"BeginTx", func(ctx context.Context, u unit) error {
		ctx = u.lock(ctx)
		tx, err := u.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		return end(tx, u.change(ctx, tx))
	}},
	{"Exec", func(ctx context.Context, u unit) error { return u.add(u.lock(ctx), u.db) }},
	{"read-decide-write", func(ctx context.Context, u unit) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ctx = u.lock(ctx) // which ends here: a lease stays after a statement that has failed
		return u.change(ctx, u.db)
	}},
	{"Do", func(ctx context.Context, u unit) error {
		return mysqllock.DoKeys(ctx, u.db, u.keys, func(ctx context.Context) error { return u.change(ctx, u.db) }, u.opts...)
	}},
	{"Acquire", func(ctx context.Context, u unit) error {
		hold, err := mysqllock.AcquireKeys(ctx, u.db, u.keys, u.opts...)
		if err != nil {
			return err
		}
		if err := u.change(hold.Context(), u.db); err != nil {
			return errors.Join(err, hold.Rollback())
		}
		return hold.Release()
	}},
	{"savepoint", func(ctx context.Context, u unit) error {
		ctx = u.lock(ctx)
		outer, err := u.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		return end(outer, func() error {
			for _, undo := range []bool{true, false} {
				inner, err := u.db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				if err := u.change(ctx, inner); err != nil || undo {
					if err := errors.Join(err, inner.Rollback()); err != nil {
						return err
					}
				} else if err := inner.Commit(); err != nil {
					return err
				}
			}
			return nil
		}())
	}},
	{"prepared", func(ctx context.Context, u unit) error {
		text := add
		if u.slow {
			text = addSleep
		}
		stmt, err := u.db.PrepareContext(ctx, text)
		if err != nil {
			return err
		}
		defer stmt.Close()
		_, err = stmt.ExecContext(u.lock(ctx), u.id)
		return err
	}},
}
