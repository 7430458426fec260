package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// Parameters of the DSN that are not ours, and are for other statements than ours.

// TestSelectLimit: a limit on the rows of a SELECT is none on the rows of ours, of
// which several keys have one each.
func TestSelectLimit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		other, db := s.open(), s.open("sql_select_limit=1")
		keys := []string{"a", "b", "c"}
		tx, err := other.BeginTx(lockctx.WithKeys(dbtest.Limited(t), keys), nil)
		dbtest.OK(t, err)
		_, err = db.ExecContext(lockctx.WithKeys(dbtest.Limited(t), keys, lockctx.NoWait()), "UPDATE p SET stock = 9")
		if !errors.Is(err, mysqllock.ErrLocked) { // rows that are there are not made again, which would wait for who has locked them
			t.Errorf("keys that are held: %v", err)
		}
		dbtest.OK(t, tx.Rollback())
		for _, how := range rightsOf {
			t.Run(how.name, func(t *testing.T) {
				hint := func() context.Context { return lockctx.WithKeys(dbtest.Limited(t), keys, how.holds) }
				_, err := db.ExecContext(hint(), "UPDATE p SET stock = 9")
				dbtest.OK(t, err)
				ctx := hint()
				_, err = read(ctx, db, 1)
				dbtest.OK(t, err)
				tx, err := db.BeginTx(ctx, nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, "UPDATE p SET stock = 8")
				dbtest.OK(t, tx.Commit())
				tx, err = db.Begin()
				dbtest.OK(t, err)
				_, err = tx.ExecContext(hint(), "UPDATE p SET stock = 7")
				dbtest.OK(t, err)
				dbtest.OK(t, tx.Commit())
				s.wantStock(4, 7)
			})
		}
	})
}

// TestReadTimeout: a limit on how long an answer may take is none on how long one
// waits for a lock.
func TestReadTimeout(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const readTimeout = 6 * time.Second
		cfg, log := s.Config(), new(failures)
		cfg.ReadTimeout, cfg.Logger = readTimeout, log
		connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Wait: 5 * time.Minute})
		dbtest.OK(t, err)
		holder, db := s.open(), sql.OpenDB(connector)
		t.Cleanup(func() { db.Close() })
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		write := func(ctx context.Context) error {
			_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
			return err
		}
		ways := map[string]func(key string, how lockctx.Option) error{
			"Exec": func(key string, how lockctx.Option) error { return write(lockctx.With(ctx, key, how)) },
			"Do":   func(key string, how lockctx.Option) error { return mysqllock.Do(ctx, db, key, write, how) },
			"late": func(key string, how lockctx.Option) error {
				tx, err := db.BeginTx(ctx, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				if _, err := tx.ExecContext(lockctx.With(ctx, key, how), "UPDATE p SET stock = stock - 1 WHERE id = 1"); err != nil {
					return err
				}
				return tx.Commit()
			},
		}
		var held []*mysqllock.Hold
		var waiting sync.WaitGroup
		for what, how := range map[string]lockctx.Option{
			"row": lockctx.Row(), "slots": lockctx.Slots(1), "lease": lockctx.Lease(5 * time.Minute), "advisory": lockctx.Advisory(),
		} {
			for name, way := range ways {
				key := what + ", " + name
				h, err := mysqllock.Acquire(ctx, holder, key, how)
				dbtest.OK(t, err)
				held = append(held, h)
				waiting.Go(func() {
					if err := way(key, how); err != nil {
						t.Errorf("%s: %v", key, err)
					}
				})
			}
		}
		dbtest.Soon(t, "all wait", func() bool {
			st, err := mysqllock.Stats(db)
			dbtest.OK(t, err)
			return st.Waiters >= len(held)
		})
		time.Sleep(readTimeout * 4 / 3) // so long they wait, for nothing
		for _, h := range held {
			dbtest.OK(t, h.Release())
		}
		waiting.Wait()
		s.wantStock(1, 10-len(held))
		if n := log.timeouts.Load(); n > 0 {
			t.Errorf("%d connections were given up", n)
		}
	})
}

// failures counts what go-sql-driver has to say of answers that took too long.
type failures struct{ timeouts atomic.Int64 }

func (f *failures) Print(v ...any) {
	if strings.Contains(fmt.Sprint(v...), "i/o timeout") {
		f.timeouts.Add(1)
	}
}
