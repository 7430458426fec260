package moving

import (
	"context"
	"database/sql"
	"errors"
	"sync"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/examples/internal/testshop"
)

// byHand is a lock as the release before takes it: GET_LOCK on a connection of its own.
type byHand struct {
	db   *sql.DB
	conn *sql.Conn
}

func (l *byHand) LockContext(ctx context.Context) (err error) {
	if l.conn, err = l.db.Conn(ctx); err != nil {
		return err
	}
	var got sql.NullInt64
	if err := l.conn.QueryRowContext(ctx, "SELECT GET_LOCK('moving', 60)").Scan(&got); err != nil || got.Int64 != 1 {
		return errors.Join(errors.New("not locked"), err, l.conn.Close())
	}
	return nil
}

func (l *byHand) UnlockContext(ctx context.Context) (ok bool, err error) {
	err = l.conn.QueryRowContext(ctx, "SELECT RELEASE_LOCK('moving')").Scan(&ok)
	return ok, errors.Join(err, l.conn.Close())
}

func TestTwoReleasesTogetherSellExactly(t *testing.T) { testshop.Run(t, testBoth) }

// Programs of two releases that follow one another run together, and sell exactly.
func testBoth(t *testing.T, shop *testshop.Shop) {
	db, plain := open(t, "mysqllock", shop.LockDSN()), open(t, "mysql", shop.DSN)
	sell := func(ctx context.Context, db *sql.DB) error {
		var stock int
		if err := db.QueryRowContext(ctx, "SELECT stock FROM products WHERE id = 1").Scan(&stock); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, "UPDATE products SET stock = ? WHERE id = 1", stock-1)
		return err
	}
	old := func(ctx context.Context) error {
		l := &byHand{db: plain}
		if err := l.LockContext(ctx); err != nil {
			return err
		}
		err := sell(ctx, plain)
		_, unlocked := l.UnlockContext(ctx)
		return errors.Join(err, unlocked)
	}
	work := func(ctx context.Context) error { return sell(ctx, db) }
	both := func(ctx context.Context) error { return Both(ctx, db, &byHand{db: plain}, "product:1", work) }
	alone := func(ctx context.Context) error { return mysqllock.Do(ctx, db, "product:1", work) }

	for name, releases := range map[string][2]func(context.Context) error{
		"before and with both": {old, both}, "with both and after": {both, alone},
	} {
		const each = 40
		shop.Restock(t, 4*each)
		var sellers sync.WaitGroup
		for i := range 4 {
			sellers.Go(func() {
				for range each {
					if err := releases[i%2](t.Context()); err != nil {
						t.Errorf("%s: %v", name, err)
						return
					}
				}
			})
		}
		sellers.Wait()
		if left := shop.Stock(t); left != 0 {
			t.Errorf("%s: %d are left of %d that were sold", name, left, 4*each)
		}
	}
}

func open(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}
