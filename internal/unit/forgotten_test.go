package unit_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"
	"weak"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestNothingIsRememberedOfALockContextThatIsOver: a lock context is garbage as soon as the
// application has dropped it, also if it has read and never committed, and if the context
// around it goes on as long as the program.
func TestNothingIsRememberedOfALockContextThatIsOver(t *testing.T) {
	uses := map[string]func(ctx context.Context, db *sql.DB) error{
		"read, decide, write": func(ctx context.Context, db *sql.DB) error {
			if _, err := stock.Read(ctx, db, 1); err != nil {
				return err
			}
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		},
		"exec": func(ctx context.Context, db *sql.DB) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock + 1 WHERE id = 1")
			return err
		},
		"rollback": func(ctx context.Context, db *sql.DB) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			_, err = tx.Exec("UPDATE p SET stock = stock + 1 WHERE id = 1")
			return errors.Join(err, tx.Rollback())
		},
		"refused": func(ctx context.Context, db *sql.DB) error {
			if _, err := db.ExecContext(ctx, "UPDATE nowhere SET stock = 1"); err == nil {
				return errors.New("no error")
			}
			return nil
		},
		"Do": func(ctx context.Context, db *sql.DB) error {
			return mysqllock.Do(ctx, db, "inner", func(ctx context.Context) error { _, err := stock.Read(ctx, db, 1); return err })
		},
	}
	reads := map[string]func(ctx context.Context, db *sql.DB) error{
		"read": func(ctx context.Context, db *sql.DB) error { _, err := stock.Read(ctx, db, 1); return err },
		"prepared": func(ctx context.Context, db *sql.DB) error {
			st, err := db.PrepareContext(ctx, "SELECT stock FROM p WHERE id = 1")
			if err != nil {
				return err
			}
			defer st.Close()
			var n int
			return st.QueryRowContext(ctx).Scan(&n)
		},
		"a write that fails": func(ctx context.Context, db *sql.DB) error {
			if _, err := stock.Read(ctx, db, 1); err != nil {
				return err
			}
			if _, err := db.ExecContext(ctx, "UPDATE nowhere SET stock = 1"); err == nil {
				return errors.New("no error")
			}
			return nil
		},
	}
	dbtest.OnOneServer(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		long, cancel := context.WithCancel(context.Background())
		defer cancel()
		for mode, params := range map[string][]string{"": nil, "maxConns": {"maxConns=6"}} {
			db := s.Handle(params...)
			check := func(kind, way string, opt lockctx.Option, outer context.Context, use func(context.Context, *sql.DB) error) {
				t.Helper()
				forgets(s, fmt.Sprintf("%s %s, %s", kind, way, mode), func(own context.Context, key string) {
					dbtest.OK(t, use(lockctx.With(own, key, opt), db))
				}, outer)
			}
			for kind, opt := range map[string]lockctx.Option{
				"row": lockctx.Row(), "lease": lockctx.Lease(30 * time.Second), "advisory": lockctx.Advisory(), "optimistic": lockctx.Optimistic(),
			} {
				for way, use := range uses {
					if kind == "optimistic" && way == "Do" {
						continue // its row lock goes with no version
					}
					check(kind, way, opt, long, use)
				}
			}
			for way, use := range reads {
				check("optimistic", way, lockctx.Optimistic(), long, use)
				check("optimistic, endless", way, lockctx.Optimistic(), context.Background(), use)
			}
		}
	})
}

// forgets fails the test unless the contexts that were used are garbage soon. A few may be the
// last ones that a connection, or what is given back behind the caller, was used with.
func forgets(s *stock.Shop, what string, use func(own context.Context, key string), outer context.Context) {
	s.T.Helper()
	const all, few = 24, 9
	type mark struct{ _ [64]byte }
	var marks []weak.Pointer[mark]
	for i := range all {
		own := new(mark)
		marks = append(marks, weak.Make(own))
		use(context.WithValue(outer, markKey{}, own), fmt.Sprint("k", i%3))
	}
	dbtest.Eventually(s.T, what, func() error {
		runtime.GC()
		left := 0
		for _, m := range marks {
			if m.Value() != nil {
				left++
			}
		}
		if left > few {
			return fmt.Errorf("%d of %d lock contexts are remembered", left, all)
		}
		return nil
	})
}

type markKey struct{}
