package mysqllock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestDecisionOnAnotherHandle: once a handle has given back, or lost, the lock under which
// a lock context has read, nothing that was decided on it is written through another
// handle either.
func TestDecisionOnAnotherHandle(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		one, two := s.open(), s.open()
		over := map[string]func(cancel func()){
			"row":        func(cancel func()) { cancel() },
			"lease":      func(cancel func()) { cancel() },
			"advisory":   func(cancel func()) { cancel() },
			"optimistic": func(cancel func()) { cancel() },
			"lost lease": func(func()) { s.steal("k") },
			"lost advisory": func(func()) {
				dbtest.Exec(t, s.plain, fmt.Sprintf("KILL %d", s.named("k")))
			},
		}
		opts := keptAs()
		opts["lost lease"], opts["lost advisory"] = opts["lease"], opts["advisory"]
		for name, ends := range over {
			t.Run(name, func(t *testing.T) {
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 10")
				base, cancel := context.WithCancel(dbtest.Limited(t))
				defer cancel()
				ctx := lockctx.With(base, "k", opts[name]...)
				n, err := read(ctx, one, 1)
				dbtest.OK(t, err)
				ends(cancel)
				ctx = context.WithoutCancel(ctx)
				dbtest.Soon(t, "the handle knows", func() bool {
					_, err := read(ctx, one, 2)
					return errors.Is(err, mysqllock.ErrLost)
				})
				if name == "lost lease" { // the thief has written, and has gone
					dbtest.Exec(t, s.plain, "UPDATE mysqllock SET owner = '', expires = UTC_TIMESTAMP(6)")
				}
				dbtest.Exec(t, s.plain, "UPDATE p SET stock = 110 WHERE id = 1")
				for what, write := range map[string]func() error{
					"a statement": func() error { _, err := two.ExecContext(ctx, setStock, n-1); return err },
					"a transaction": func() error {
						tx, err := two.BeginTx(ctx, nil)
						dbtest.OK(t, err)
						defer tx.Rollback()
						if _, err := tx.ExecContext(ctx, setStock, n-1); err != nil {
							return err
						}
						return tx.Commit()
					},
				} {
					if err := write(); !errors.Is(err, mysqllock.ErrStaleRead) {
						t.Errorf("%s: %v, want ErrStaleRead", what, err)
					}
				}
				if n := s.stock(1); n != 110 {
					t.Errorf("the stock is %d, want 110", n)
				}
			})
		}
	})
}
