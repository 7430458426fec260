package mysqllock_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestServersOwnIdleLimit: a transaction is kept alive where the server ends idle ones
// sooner than the TTL.
func TestServersOwnIdleLimit(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		if !s.MariaDB() {
			return // which has no such limit
		}
		var cases together
		defer cases.Wait()
		for i, limit := range []string{"idle_transaction_timeout=6", "idle_write_transaction_timeout=6"} {
			cases.Run(t, limit, func(t *testing.T) {
				db := s.open(limit)
				h, err := mysqllock.Acquire(dbtest.Limited(t), db, "held "+limit)
				dbtest.OK(t, err)
				_, err = db.ExecContext(h.Context(), "UPDATE p SET stock = stock - 1 WHERE id = ?", 2*i+1)
				dbtest.OK(t, err)
				tx, err := db.BeginTx(lockctx.With(dbtest.Limited(t), "begun "+limit), nil)
				dbtest.OK(t, err)
				dbtest.Exec(t, tx, fmt.Sprintf("UPDATE p SET stock = stock - 1 WHERE id = %d", 2*i+2))
				time.Sleep(8500 * time.Millisecond)
				if err := h.Release(); err != nil {
					t.Errorf("a hold: %v", err)
				}
				err = tx.Commit()
				if i == 0 { // the application's own rule for its transactions, with locks or without
					if !errors.Is(err, mysqllock.ErrLost) {
						t.Errorf("a transaction: %v", err)
					}
				} else if err != nil {
					t.Errorf("a transaction: %v", err)
				}
			})
		}
	})
}
