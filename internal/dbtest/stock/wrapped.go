package stock

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

const less = "UPDATE p SET stock = stock - 1 WHERE id = ?"

// ways are all ways to take one from the stock of product 1 under a key.
var ways = []struct {
	name string
	sell func(ctx context.Context, db *sql.DB, key string) error
}{
	{"BeginTx", func(ctx context.Context, db *sql.DB, key string) error { return Sell(ctx, db, 2, key, 1) }},
	{"read, decide, write", func(ctx context.Context, db *sql.DB, key string) error { return Decide(ctx, db, key, 1) }},
	{"Do", func(ctx context.Context, db *sql.DB, key string) error { return Sell(ctx, db, 1, key, 1) }},
	{"Exec", func(ctx context.Context, db *sql.DB, key string) error {
		_, err := db.ExecContext(lockctx.With(ctx, key), less, 1)
		return err
	}},
	{"Do with a lease", func(ctx context.Context, db *sql.DB, key string) error {
		return mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
			n, err := Read(ctx, db, 1)
			if err == nil {
				_, err = db.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
			}
			return err
		}, lockctx.Lease(30*time.Second))
	}},
	{"Acquire", func(ctx context.Context, db *sql.DB, key string) error {
		h, err := mysqllock.Acquire(ctx, db, key, lockctx.Advisory())
		if err != nil {
			return err
		}
		_, err = db.ExecContext(h.Context(), less, 1)
		return errors.Join(err, h.Release())
	}},
	{"a sql.Conn", func(ctx context.Context, db *sql.DB, key string) error {
		c, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		ctx = lockctx.With(ctx, key)
		n, err := Read(ctx, c, 1)
		if err == nil {
			_, err = c.ExecContext(ctx, "UPDATE p SET stock = ? WHERE id = 1", n-1)
		}
		return err
	}},
	{"a prepared statement", func(ctx context.Context, db *sql.DB, key string) error {
		st, err := db.PrepareContext(ctx, less)
		if err != nil {
			return err
		}
		_, err = st.ExecContext(lockctx.With(ctx, key), 1)
		return errors.Join(err, st.Close())
	}},
	{"no lock", func(ctx context.Context, db *sql.DB, _ string) error {
		rows, err := db.QueryContext(ctx, "SELECT id FROM p WHERE id > ?", 0)
		if err != nil {
			return err
		}
		for rows.Next() {
		}
		if err := errors.Join(rows.Err(), rows.Close(), db.PingContext(ctx)); err != nil {
			return err
		}
		_, err = db.ExecContext(ctx, less, 1)
		return err
	}},
}

// CheckWrapped checks a handle that was opened with a wrapper of drivers: 8 callers, each
// with all ways to take a lock, come through, and nothing stays in use.
func (s *Shop) CheckWrapped(t *testing.T, db *sql.DB) {
	t.Helper()
	const callers = 8
	db.SetMaxIdleConns(callers)
	ctx, key := dbtest.Limited(t), dbtest.Random()
	dbtest.OK(t, mysqllock.Do(ctx, db, key, func(context.Context) error { return nil })) // the table is there
	dbtest.Exec(t, s.Plain, "UPDATE p SET stock = 0 WHERE id = 1")
	for i, way := range ways {
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				if err := way.sell(ctx, db, key); err != nil {
					t.Errorf("%s: %v", way.name, err)
				}
			})
		}
		all.Wait()
		if got, want := s.Stock(1), -callers*(i+1); got != want {
			t.Fatalf("%s: the stock is %d, want %d", way.name, got, want)
		}
	}
	s.checkConns(ctx, t, db)
	s.SoonUnused(t, db)
	dbtest.OK(t, db.Close())
	s.SoonAlone(t)
}

// CheckHidden checks a handle with maxConns that was opened with a wrapper which hides driver.Validator: by its second use at
// the latest each statement says so, and names the wrapper. Nothing hangs, and Do and Stats say it at once.
func CheckHidden(t *testing.T, db *sql.DB, wrapper string) {
	t.Helper()
	db.SetMaxIdleConns(8)
	ctx := dbtest.Limited(t)
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v", what, err)
			return
		}
		dbtest.Says(t, err, "maxConns", "driver.Validator", "Config.Base", wrapper)
	}
	refused("Do", mysqllock.Do(ctx, db, "k", func(context.Context) error { return nil }))
	refused("Stats", dbtest.Err(mysqllock.Stats(db)))
	refused("a statement", dbtest.Err(db.ExecContext(ctx, "DO 0")))
	refused("BeginTx", dbtest.Err(db.BeginTx(ctx, nil)))
	refused("BeginTx with a lock", dbtest.Err(db.BeginTx(lockctx.With(ctx, "k"), nil)))
	refused("a prepared statement", dbtest.Err(db.PrepareContext(ctx, "DO 0")))
	c, err := db.Conn(ctx)
	dbtest.OK(t, err)
	refused("a sql.Conn", dbtest.Err(c.ExecContext(ctx, "DO 0")))
	dbtest.OK(t, c.Close())
	dbtest.OK(t, db.Close())
}

// SoonAlone waits until no connection to the database is left but those of s.Plain.
func (s *Shop) SoonAlone(t *testing.T) {
	t.Helper()
	dbtest.Eventually(t, "nothing is left on the server", func() error {
		var left int
		err := s.Plain.QueryRow("SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE DB = ?", s.Name).Scan(&left)
		if own := s.Plain.Stats().OpenConnections; err == nil && left > own {
			err = fmt.Errorf("%d connections, %d of them our own", left, own)
		}
		return err
	})
}

// checkConns checks that a sql.Conn keeps what its statements leave, beside others.
func (s *Shop) checkConns(ctx context.Context, t *testing.T, db *sql.DB) {
	t.Helper()
	s.others(ctx, t, db)
	c, err := db.Conn(ctx)
	dbtest.OK(t, err)
	var others [2]*sql.Tx // which may be where another sql.Conn was before c
	for i := range others {
		others[i], err = db.BeginTx(ctx, nil)
		dbtest.OK(t, err)
	}
	dbtest.Exec(t, c, "SET @x = 7")
	for _, tx := range others {
		dbtest.OK(t, tx.Rollback())
	}
	dbtest.Exec(t, c, "CREATE TEMPORARY TABLE mine (id INT AUTO_INCREMENT PRIMARY KEY)")
	for name, use := range uses {
		dbtest.OK(t, use(ctx, c))
		s.others(ctx, t, db)
		dbtest.Exec(t, c, "TRUNCATE mine")
		dbtest.Exec(t, c, "INSERT INTO mine VALUES (NULL), (NULL)")
		var id, n int
		var x sql.NullInt64
		dbtest.OK(t, c.QueryRowContext(ctx, "SELECT LAST_INSERT_ID()").Scan(&id))
		dbtest.OK(t, c.QueryRowContext(ctx, "SELECT @x, COUNT(*) FROM mine").Scan(&x, &n))
		if id != 1 || x.Int64 != 7 || n != 2 {
			t.Errorf("%s: the sql.Conn has lost what it had: its first id is %d, @x is %v, and its table has %d rows", name, id, x, n)
		}
	}
	dbtest.OK(t, c.Close())
	dbtest.Exec(t, db, "DO 0") // on the same light connection, so that what that sql.Conn had is given back
}

// uses are what programs do with a sql.Conn before they ask for what they have left there.
var uses = map[string]func(ctx context.Context, c *sql.Conn) error{
	"a statement": func(ctx context.Context, c *sql.Conn) error {
		_, err := c.ExecContext(ctx, "DO 0")
		return err
	},
	"rows": func(ctx context.Context, c *sql.Conn) error {
		rows, err := c.QueryContext(ctx, "SELECT 'one' UNION ALL SELECT 'two'")
		if err != nil {
			return err
		}
		return errors.Join(rows.Close(), rows.Err())
	},
	"a transaction": func(ctx context.Context, c *sql.Conn) error {
		tx, err := c.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, "DO 0")
		return errors.Join(err, tx.Commit())
	},
	"a prepared statement": func(ctx context.Context, c *sql.Conn) error {
		st, err := c.PrepareContext(ctx, "DO 0")
		if err != nil {
			return err
		}
		_, err = st.ExecContext(ctx)
		return errors.Join(err, st.Close())
	},
}

// others has 15 callers at once use a connection of their own.
func (s *Shop) others(ctx context.Context, t *testing.T, db *sql.DB) {
	var all sync.WaitGroup
	for range 15 {
		all.Go(func() {
			own, err := db.Conn(ctx)
			if err == nil {
				_, err = own.ExecContext(ctx, "DO 0")
				err = errors.Join(err, own.Close())
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// SoonUnused waits until no connection of the handle is in use.
func (s *Shop) SoonUnused(t *testing.T, db *sql.DB) {
	t.Helper()
	dbtest.Eventually(t, "nothing is in use in the end", func() error {
		st, err := mysqllock.Stats(db)
		if err == nil && st.App.Waiting+st.Waiters+st.App.InUse+st.InUse != 0 {
			err = fmt.Errorf("%+v", st)
		}
		return err
	})
}
