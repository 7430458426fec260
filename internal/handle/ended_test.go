package handle_test

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/dbtest/stock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestNoWaitIsNotRefusedForWhatThisProcessGivesBack, since a context has ended.
func TestNoWaitIsNotRefusedForWhatThisProcessGivesBack(t *testing.T) {
	dbtest.OnServers(t, stock.NewShop, func(t *testing.T, s *stock.Shop) {
		db := s.Handle()
		read := func(ctx context.Context) error {
			var n int
			return db.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n)
		}
		begin := func(ctx context.Context) error {
			tx, err := db.BeginTx(ctx, nil)
			if err == nil {
				_, err = tx.ExecContext(ctx, "UPDATE p SET stock = stock WHERE id = 2")
			}
			return err
		}
		overConn := func(ctx context.Context) error {
			conn, err := db.Conn(context.Background())
			dbtest.OK(t, err)
			t.Cleanup(func() { conn.Close() })
			var n int
			return conn.QueryRowContext(ctx, "SELECT stock FROM p WHERE id = 1").Scan(&n)
		}
		acquired := func(ctx context.Context) error {
			h, _ := hint.From(ctx)
			_, err := mysqllock.Acquire(lockctx.Without(ctx), db, "k", func(to *hint.Hint) { to.Kind = h.Kind })
			return err
		}
		for strategy, option := range map[string]lockctx.Option{
			"row": lockctx.Row(), "lease": lockctx.Lease(stock.TTL), "advisory": lockctx.Advisory(), "slots": lockctx.Slots(1),
		} {
			firsts := map[string]func(context.Context) error{"read": read, "BeginTx": begin, "sql.Conn": overConn, "Acquire": acquired}
			if strategy != "row" {
				delete(firsts, "Acquire") // it stays until Release
			}
			for how, first := range firsts {
				refused := 0
				var last error
				for range 10 {
					ctx, cancel := context.WithCancel(dbtest.Limited(t))
					dbtest.OK(t, first(lockctx.With(ctx, "k", option)))
					cancel()
					began := time.Now()
					tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", option, lockctx.NoWait()), nil)
					if err != nil {
						if time.Since(began) < time.Second { // for longer it is not waited, should the server stand still
							refused, last = refused+1, err
						}
						soonGranted(s, t, db, option, strategy+", "+how)
					} else {
						dbtest.OK(t, tx.Rollback())
					}
				}
				if refused > 0 {
					t.Errorf("%s, %s: refused %d of 10: %v", strategy, how, refused, last)
				}
			}
		}

		// Another who has the key, and whose context goes on, is not waited for.
		ctx, cancel := context.WithCancel(dbtest.Limited(t))
		defer cancel()
		dbtest.OK(t, read(lockctx.With(ctx, "k")))
		for try := 1; ; try++ {
			began := time.Now()
			if err := read(lockctx.With(dbtest.Limited(t), "k", lockctx.NoWait())); err == nil {
				t.Error("granted twice")
			}
			waited := time.Since(began)
			if waited < 900*time.Millisecond {
				break
			}
			if try == 20 { // a busy machine may take as long once in a while
				t.Errorf("refused after %v, each time", waited)
				break
			}
		}
	})
}

// soonGranted waits until nobody has k any more.
func soonGranted(s *stock.Shop, t *testing.T, db *sql.DB, option lockctx.Option, after string) {
	t.Helper()
	tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "k", option, lockctx.Wait(time.Minute)), nil)
	if err != nil {
		t.Fatalf("after %s: %v", after, err)
	}
	dbtest.OK(t, err)
	dbtest.OK(t, tx.Rollback())
}
