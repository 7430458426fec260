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

type shower interface {
	dbtest.Execer
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}

// TestDecisionsOnWhatIsShown: whatever shows its caller data outside a transaction opens
// a decision, also where it is no SELECT, or leaves the data in a variable.
func TestDecisionsOnWhatIsShown(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE get_stock(n INT) SELECT stock FROM p WHERE id = n")
		dbtest.Exec(t, s.plain, "CREATE PROCEDURE out_stock(OUT n INT) SELECT stock INTO n FROM p WHERE id = 1")
		db := s.open("multiStatements=true")
		const write = "UPDATE p SET stock = 7 WHERE id = 1"
		type path struct {
			name    string
			mariadb bool
			shows   func(context.Context, shower) error
			write   string
		}
		query := func(text string) func(context.Context, shower) error {
			return func(ctx context.Context, c shower) error {
				rows, err := c.QueryContext(ctx, text)
				if err != nil {
					return err
				}
				for rows.Next() {
				}
				return errors.Join(rows.Err(), rows.Close())
			}
		}
		run := func(text string) func(context.Context, shower) error {
			return func(ctx context.Context, c shower) error {
				_, err := c.ExecContext(ctx, text)
				return err
			}
		}
		shown := []path{
			{"CALL", false, query("CALL get_stock(1)"), write},
			{"several statements", false, query("SELECT stock FROM p WHERE id = 1; SET @a = 1"), write},
			{"several statements, one writes", false, query("SELECT stock FROM p WHERE id = 1; UPDATE p SET stock = 8 WHERE id = 2"), write},
			{"DELETE RETURNING", true, query("DELETE FROM p WHERE id = 4 RETURNING stock"), write},
			{"a sequence", true, query("SELECT stock, NEXT VALUE FOR sq FROM p"), write},
		}
		left := []path{
			{"INTO a variable", false, run("SELECT stock INTO @n FROM p WHERE id = 1"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"SELECT assigns", false, run("SELECT @n := stock FROM p WHERE id = 1"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"SET", false, run("SET @n = (SELECT stock FROM p WHERE id = 1)"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"OUT parameter", false, run("CALL out_stock(@n)"), "UPDATE p SET stock = @n - 1 WHERE id = 1"},
			{"temporary table", false, run("CREATE TEMPORARY TABLE tt AS SELECT stock FROM p WHERE id = 1"), "UPDATE p SET stock = (SELECT stock FROM tt) - 1 WHERE id = 1"},
		}
		if s.MariaDB() {
			dbtest.Exec(t, s.plain, "CREATE SEQUENCE sq")
		}
		order := func(ctx context.Context, c shower) error {
			return run("INSERT INTO p VALUES (90, 1) ON DUPLICATE KEY UPDATE stock = stock + 1")(ctx, c)
		}
		check := func(p path, c shower, opts ...lockctx.Option) {
			t.Helper()
			if p.mariadb && !s.MariaDB() {
				return
			}
			ctx := lockctx.With(dbtest.Limited(t), "k", opts...)
			dbtest.OK(t, p.shows(ctx, c))
			err := order(ctx, c)
			if err == nil { // it was the first commit
				_, err = c.ExecContext(ctx, p.write)
			}
			if !errors.Is(err, mysqllock.ErrStaleRead) {
				t.Errorf("%s: %v", p.name, err)
			}
			dbtest.Exec(t, s.plain, "REPLACE INTO p VALUES (4, 10)")
		}
		for _, opts := range [][]lockctx.Option{{lockctx.Row()}, {lockctx.Lease(ttl)}, {lockctx.Advisory()}, {lockctx.Optimistic()}} {
			for _, p := range shown {
				check(p, db, opts...)
			}
		}
		for _, p := range left {
			c, err := db.Conn(dbtest.Limited(t))
			dbtest.OK(t, err)
			ctx := lockctx.With(dbtest.Limited(t), "k")
			dbtest.OK(t, p.shows(ctx, c))
			err = order(ctx, c)
			if err == nil {
				_, err = c.ExecContext(ctx, p.write)
			}
			if !errors.Is(err, mysqllock.ErrStaleRead) {
				t.Errorf("over a sql.Conn, %s: %v", p.name, err)
			}
			dbtest.OK(t, c.Close())
		}

		// What shows nothing decides nothing, and what reads no table of the
		// application's is no new read.
		db = s.open()
		ctx := lockctx.With(dbtest.Limited(t), "k")
		for range 2 {
			dbtest.OK(t, run("CALL get_stock(1)")(ctx, db))
		}
		for _, text := range []string{"SELECT 1 FROM DUAL", "SELECT 1 FROM information_schema.tables LIMIT 1"} {
			ctx := lockctx.With(dbtest.Limited(t), text)
			dbtest.OK(t, query("SELECT stock FROM p WHERE id = 1")(ctx, db))
			dbtest.OK(t, order(ctx, db))
			dbtest.OK(t, query(text)(ctx, db))
			if err := order(ctx, db); !errors.Is(err, mysqllock.ErrStaleRead) {
				t.Errorf("after %s: %v", text, err)
			}
		}
	})
}
