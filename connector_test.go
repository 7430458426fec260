package mysqllock_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAConnectorServesSeveralHandles: a program that opens it a second time, after it has closed the first handle or
// before, has all that a new connector has. As with the plain driver a closed handle stays closed.
func TestAConnectorServesSeveralHandles(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		cfg, err := mysql.ParseDSN(s.DSN())
		dbtest.OK(t, err)
		ways := map[string]func(ctx context.Context, db *sql.DB) error{
			"Do": func(ctx context.Context, db *sql.DB) error {
				return mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil })
			},
			"Do, lease": func(ctx context.Context, db *sql.DB) error {
				return mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }, byLease)
			},
			"Exec": func(ctx context.Context, db *sql.DB) error {
				return exec(lockctx.With(ctx, "k"), db, "UPDATE p SET stock = 1 WHERE id = 1")
			},
			"Advisory": func(ctx context.Context, db *sql.DB) error {
				return exec(lockctx.With(ctx, "k", lockctx.Advisory()), db, "UPDATE p SET stock = 2 WHERE id = 1")
			},
			"plain": func(ctx context.Context, db *sql.DB) error {
				return exec(ctx, db, "UPDATE p SET stock = 3 WHERE id = 1")
			},
		}
		for name, use := range ways {
			for mode, c := range map[string]mysqllock.Config{"": {}, "maxConns": {MaxConns: 8}} {
				k, err := mysqllock.NewConnector(cfg, c)
				dbtest.OK(t, err)
				ctx := dbtest.Within(t, time.Minute/2)
				first := sql.OpenDB(k)
				dbtest.OK(t, use(ctx, first))
				beside := sql.OpenDB(k)
				dbtest.OK(t, use(ctx, beside))
				dbtest.OK(t, first.Close())
				for i := range 2 {
					if err := use(ctx, beside); err != nil {
						t.Errorf("%s, %s: the handle beside, use %d: %v", name, mode, i, err)
					}
				}
				dbtest.OK(t, beside.Close())
				after := sql.OpenDB(k)
				for i := range 2 {
					if err := use(ctx, after); err != nil {
						t.Errorf("%s, %s: the handle after, use %d: %v", name, mode, i, err)
					}
				}
				dbtest.OK(t, after.Close())
				if use(ctx, after) == nil || use(ctx, first) == nil {
					t.Errorf("%s, %s: a closed handle works", name, mode)
				}
			}
		}
	})
}
