package mysqllock_test

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestGivingUpAStatementFreesTheKey: the server does not notice that the client of a
// busy connection has gone, so the driver ends it.
func TestGivingUpAStatementFreesTheKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		// Busy for minutes, and deaf to the end of its client.
		const busy = "UPDATE p SET stock = stock + BENCHMARK(500000000, SHA2('x', 512)) WHERE id = "
		db := s.open()
		_, err := db.ExecContext(lockctx.With(dbtest.Limited(t), "k"), "DO 1") // makes the table
		dbtest.OK(t, err)
		id := 10
		for how, run := range map[string]func(ctx context.Context, key, busy string) error{
			"Exec": func(ctx context.Context, key, busy string) error {
				_, err := db.ExecContext(lockctx.With(ctx, key), busy)
				return err
			},
			"BeginTx": func(ctx context.Context, key, busy string) error {
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), key), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(ctx, busy)
				return err
			},
			"BeginTx with the context": func(ctx context.Context, key, busy string) error {
				tx, err := db.BeginTx(lockctx.With(ctx, key), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(ctx, busy)
				return err
			},
			"a late hint": func(ctx context.Context, key, busy string) error {
				tx, err := db.BeginTx(dbtest.Limited(t), nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(lockctx.With(ctx, key), busy)
				return err
			},
			"prepared": func(ctx context.Context, key, busy string) error {
				st, err := db.PrepareContext(ctx, busy)
				if err != nil {
					return err
				}
				defer st.Close()
				_, err = st.ExecContext(lockctx.With(ctx, key))
				return err
			},
			"a lease, then a row lock": func(ctx context.Context, key, busy string) error {
				lease := lockctx.With(ctx, "lease of "+key, lockctx.Lease(30*time.Second))
				tx, err := db.BeginTx(lease, nil)
				if err != nil {
					return err
				}
				defer tx.Rollback()
				_, err = tx.ExecContext(lockctx.With(lease, key, lockctx.Row()), busy)
				return err
			},
			"Do": func(ctx context.Context, key, busy string) error {
				return mysqllock.Do(ctx, db, key, func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, busy)
					return err
				})
			},
		} {
			id++
			dbtest.Exec(t, s.plain, "INSERT INTO p VALUES (?, 1)", id)
			t.Run(how, func(t *testing.T) {
				key := "k " + how
				ctx, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				done := make(chan error, 1)
				go func() { done <- run(ctx, key, busy+strconv.Itoa(id)) }()
				dbtest.Soon(t, "it runs under the lock", func() bool { return s.locked(key) && s.runs(id) })
				cancel()
				if err := <-done; !errors.Is(err, context.Canceled) && !errors.Is(err, mysqllock.ErrLost) {
					t.Errorf("whoever gave up got %v", err)
				}
				dbtest.Soon(t, "the key is free", func() bool { return !s.locked(key) })
			})
		}
	})
}

// runs reports whether an update of a product runs, and not only waits.
func (s *scratch) runs(id int) (yes bool) {
	s.T.Helper()
	dbtest.OK(s.T, s.plain.QueryRow("SELECT COUNT(*) > 0 FROM information_schema.PROCESSLIST WHERE DB = ? AND INFO LIKE ?",
		s.Name, fmt.Sprintf("UPDATE p SET%%BENCHMARK%%id = %d", id)).Scan(&yes))
	return yes
}
