package optimistic_test

import (
	"context"
	"database/sql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// way is one of the ways in which a unit of work reads a stock under the key k,
// decides, and writes it. between runs before it writes.
type way struct {
	name string
	unit func(ctx context.Context, db *sql.DB, between func()) error
}

// hintedBy is what its hint asks for.
func (w way) hintedBy(opts ...lockctx.Option) func(context.Context, *sql.DB, func()) error {
	return func(ctx context.Context, db *sql.DB, between func()) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		return w.unit(lockctx.With(ctx, "k", opts...), db, between)
	}
}

const increment = "UPDATE p SET stock = ? WHERE id = 1"

// decide reads, and writes what it has decided.
func decide(ctx context.Context, db stock.Querier, between func(), write func(n int) error) error {
	n, err := stock.Read(ctx, db, 1)
	if err != nil {
		return err
	}
	between()
	return write(n + 1)
}

// raise reads with one context and writes with another.
func raise(reading, writing context.Context, db interface {
	stock.Querier
	dbtest.Execer
}, between func(),
) error {
	return decide(reading, db, between, func(n int) error {
		_, err := db.ExecContext(writing, increment, n)
		return err
	})
}

// ways are with a hint in ctx.
var ways = []way{
	{"BeginTx", func(ctx context.Context, db *sql.DB, between func()) error {
		return stock.InTx(ctx, db, func(tx *sql.Tx) error { return raise(ctx, context.Background(), tx, between) })
	}},
	{"statements", func(ctx context.Context, db *sql.DB, between func()) error { return raise(ctx, ctx, db, between) }},
	{"query, BeginTx", func(ctx context.Context, db *sql.DB, between func()) error {
		return decide(ctx, db, between, func(n int) error {
			return stock.InTx(ctx, db, func(tx *sql.Tx) error { _, err := tx.Exec(increment, n); return err })
		})
	}},
	{"query that writes", func(ctx context.Context, db *sql.DB, between func()) error {
		return decide(ctx, db, between, func(n int) error {
			rows, err := db.QueryContext(ctx, increment, n)
			if err == nil {
				err = rows.Close()
			}
			return err
		})
	}},
	{"prepared", func(ctx context.Context, db *sql.DB, between func()) error {
		reading, err := db.Prepare("SELECT stock FROM p WHERE id = ?")
		if err != nil {
			return err
		}
		defer reading.Close()
		writing, err := db.Prepare(increment)
		if err != nil {
			return err
		}
		defer writing.Close()
		var n int
		if err := reading.QueryRowContext(ctx, 1).Scan(&n); err != nil {
			return err
		}
		between()
		_, err = writing.ExecContext(ctx, n+1)
		return err
	}},
	{"prepared in BeginTx", func(ctx context.Context, db *sql.DB, between func()) error {
		return stock.InTx(ctx, db, func(tx *sql.Tx) error {
			writing, err := tx.PrepareContext(ctx, increment)
			if err != nil {
				return err
			}
			defer writing.Close()
			return decide(ctx, tx, between, func(n int) error { _, err := writing.Exec(n); return err })
		})
	}},
	{"nested", func(ctx context.Context, db *sql.DB, between func()) error {
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		return stock.InTx(ctx, conn, func(*sql.Tx) error {
			return stock.InTx(ctx, conn, func(tx *sql.Tx) error { return raise(ctx, ctx, tx, between) })
		})
	}},
}

// holds are without a hint in ctx: what they ask for is opts.
func holds(opts ...lockctx.Option) []way {
	return []way{
		{"Do", func(ctx context.Context, db *sql.DB, between func()) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error { return raise(ctx, ctx, db, between) }, opts...)
		}},
		{"Acquire", func(ctx context.Context, db *sql.DB, between func()) error {
			h, err := mysqllock.Acquire(ctx, db, "k", opts...)
			if err != nil {
				return err
			}
			defer h.Rollback()
			if err := raise(h.Context(), h.Context(), db, between); err != nil {
				return err
			}
			return h.Release()
		}},
		{"BeginTx in Do", func(ctx context.Context, db *sql.DB, between func()) error {
			return mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
				return stock.InTx(ctx, db, func(tx *sql.Tx) error { return raise(ctx, ctx, tx, between) })
			}, opts...)
		}},
	}
}

// units are all ways, with opts.
func units(opts ...lockctx.Option) map[string]func(ctx context.Context, db *sql.DB, between func()) error {
	all := make(map[string]func(context.Context, *sql.DB, func()) error)
	for _, w := range ways {
		all[w.name] = w.hintedBy(opts...)
	}
	for _, w := range holds(opts...) {
		all[w.name] = w.unit
	}
	return all
}
