// Package stock has callers sell under a lock: they read the stock of a product,
// think, and write what they have decided. What the lock is worth shows in the
// figures, and in the number of callers who were inside at the same time.
package stock

import (
	"context"
	"database/sql"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Form is a way to raise the stock of product 1 in the table p (id, stock) by one
// under a lock on the key "p".
type Form struct {
	Name string
	Run  func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error
}

// Forms are the ways in which applications do it.
var Forms = []Form{
	{"BeginTx", func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error {
		tx, err := db.BeginTx(lockctx.With(ctx, "p", opts...), nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := raise(ctx, tx, think); err != nil {
			return err
		}
		return tx.Commit()
	}},
	{"session", func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error {
		ctx, cancel := context.WithTimeout(ctx, dbtest.Patience)
		defer cancel()
		return raise(lockctx.With(ctx, "p", opts...), db, think)
	}},
	{"Do", func(ctx context.Context, db *sql.DB, think func(), opts ...lockctx.Option) error {
		return mysqllock.Do(ctx, db, "p", func(ctx context.Context) error { return raise(ctx, db, think) }, opts...)
	}},
}

// runner is a *sql.DB or a *sql.Tx.
type runner interface {
	QueryRowContext(ctx context.Context, text string, args ...any) *sql.Row
	ExecContext(ctx context.Context, text string, args ...any) (sql.Result, error)
}

func raise(ctx context.Context, db runner, think func()) error {
	var stock int
	if err := db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&stock); err != nil {
		return err
	}
	think()
	_, err := db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", stock+1)
	return err
}

// Room is where two must never be at the same time.
type Room struct{ inside, overlaps atomic.Int32 }

// Think is what a Form does in the room.
func (r *Room) Think() {
	if r.inside.Add(1) != 1 {
		r.overlaps.Add(1)
	}
	time.Sleep(time.Millisecond) // for others to come in, if they can
	r.inside.Add(-1)
}

// Check fails the test if two were inside.
func (r *Room) Check(t testing.TB) {
	t.Helper()
	if n := r.overlaps.Load(); n > 0 {
		t.Errorf("%d times two were inside", n)
	}
}
