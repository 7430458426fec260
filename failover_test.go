package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/tempserver"
	"github.com/mysqllock/mysqllock/lockctx"
)

// onOwnServers runs a test on each server that is its own, to change its settings.
func onOwnServers(t *testing.T, test func(t *testing.T, s *scratch)) {
	t.Parallel()
	for _, bin := range tempserver.Require(t) {
		t.Run(string(bin.Flavour), func(t *testing.T) {
			t.Parallel()
			srv, err := tempserver.Start(limited(t), bin)
			ok(t, err)
			t.Cleanup(func() { srv.Stop() })
			test(t, newTestServer("failover", bin, srv).scratch(t))
		})
	}
}

// TestBecomesReadOnly: a server that does not take writes any more, as after a
// switchover, grants no row lock, also where nothing has failed meanwhile.
func TestBecomesReadOnly(t *testing.T) {
	onOwnServers(t, func(t *testing.T, s *scratch) {
		for _, params := range []string{"", "lockUnsafe=allow"} {
			db := s.open(params)
			ways := map[string]func(opts ...lockctx.Option) error{
				"BeginTx": func(opts ...lockctx.Option) error {
					tx, err := db.BeginTx(lockctx.With(limited(t), "k", opts...), nil)
					if err == nil {
						err = tx.Rollback()
					}
					return err
				},
				"Acquire": func(opts ...lockctx.Option) error {
					h, err := mysqllock.Acquire(limited(t), db, "k", opts...)
					if err == nil {
						err = h.Rollback()
					}
					return err
				},
				"session": func(opts ...lockctx.Option) error {
					ctx, cancel := context.WithCancel(limited(t))
					defer cancel()
					_, err := read(lockctx.With(ctx, "k", opts...), db, 1)
					return err
				},
				"late": func(opts ...lockctx.Option) error {
					tx, err := db.BeginTx(limited(t), nil)
					ok(t, err)
					defer tx.Rollback()
					_, err = tx.ExecContext(lockctx.With(limited(t), "k", opts...), "DO 1")
					return err
				},
			}
			for _, way := range ways {
				ok(t, way())
			}
			soon(t, "the key is free", func() bool { return ways["BeginTx"](lockctx.NoWait()) == nil })
			exec(t, s.plain, "SET GLOBAL read_only = 1")
			for name, way := range ways {
				for what, opts := range map[string][]lockctx.Option{
					"exclusive": nil, "no wait": {lockctx.NoWait()}, "shared": {lockctx.Shared()}, "slots": {lockctx.Slots(2)},
				} {
					if err := way(opts...); !errors.Is(err, mysqllock.ErrUnsafe) || !strings.Contains(err.Error(), "takes no writes") {
						t.Errorf("%s, %s, %s: %v", params, name, what, err)
					}
				}
			}
			// What has no hint is not touched by it.
			db.SetMaxOpenConns(1)
			tx, err := db.BeginTx(limited(t), &sql.TxOptions{ReadOnly: true})
			ok(t, err)
			ok(t, tx.Commit())
			exec(t, s.plain, "SET GLOBAL read_only = 0")
			for name, way := range ways {
				soon(t, name+" works again", func() bool { return way() == nil })
			}
		}
	})
}

// TestLeaseOutlivesAChange: a lease goes on where the server was found to be another
// one than it was, as after a failover, and so do its commits.
func TestLeaseOutlivesAChange(t *testing.T) {
	onOwnServers(t, func(t *testing.T, s *scratch) {
		db := s.open()
		job, err := mysqllock.Acquire(limited(t), db, "job", lockctx.Lease(ttl))
		ok(t, err)
		levels := []string{"READ-COMMITTED", "REPEATABLE-READ"}
		for i := range 6 {
			setting := "transaction_isolation"
			if s.mariadb {
				setting = "tx_isolation"
			}
			exec(t, s.plain, fmt.Sprintf("SET GLOBAL %s = '%s'", setting, levels[i%2]))
			h, err := mysqllock.Acquire(limited(t), db, "k")
			ok(t, err)
			var id int
			ok(t, db.QueryRowContext(h.Context(), "SELECT CONNECTION_ID()").Scan(&id))
			exec(t, s.plain, fmt.Sprintf("KILL %d", id))
			wantLost(t, "a hold whose connection was killed", h.Release())
			_, err = db.ExecContext(job.Context(), "UPDATE p SET stock = stock - 1 WHERE id = 1")
			ok(t, err)
		}
		ok(t, job.Release())
		s.wantStock(1, 4)
	})
}
