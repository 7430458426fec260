package mysqllock_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestOptimisticCommitUnanswered: the connection is lost at the statement that compares and
// commits. It has done both or neither; the caller is told that nothing is known, and not that
// somebody else was first. The same goes for a row lock that sets a version.
func TestOptimisticCommitUnanswered(t *testing.T) {
	const add = "UPDATE p SET stock = stock + 1 WHERE id = 1"
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		db, proxy := s.Proxied(mysqllock.Config{})
		dbtest.Exec(t, db, "SELECT 1") // the handle looks at its server
		inTx := func(ctx context.Context) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if _, err = tx.ExecContext(ctx, add); err != nil {
				return err
			}
			return tx.Commit()
		}
		exec := func(ctx context.Context) error { _, err := db.ExecContext(ctx, add); return err }
		word := "next2"
		if s.MariaDB() {
			word = "mysqllock_same"
		}
		var stock, token, before int
		both := func() {
			t.Helper()
			dbtest.OK(t, s.plain.QueryRow("SELECT p.stock, l.token FROM p, mysqllock l WHERE p.id = 1 AND l.name = 'k'").Scan(&stock, &token))
		}
		for _, opt := range []lockctx.Option{lockctx.Optimistic(), lockctx.Row()} {
			for _, do := range []func(context.Context) error{inTx, exec} {
				hint := func() context.Context { return lockctx.With(dbtest.Limited(t), "k", opt, lockctx.Wait(30*time.Second)) }
				for range 2 { // the procedure is there, and known
					dbtest.OK(t, do(hint()))
					both()
					before = stock - token
				}
				proxy.LoseAnswer(word)
				err := do(hint())
				proxy.Mend()
				if !errors.Is(err, mysqllock.ErrLost) || errors.Is(err, mysqllock.ErrConflict) || errors.Is(err, mysqllock.ErrLocked) {
					t.Errorf("without an answer: %v", err)
				}
				var tx *sql.Tx // which waits for what is left of it
				tx, err = db.BeginTx(lockctx.With(dbtest.Limited(t), "k", lockctx.Wait(30*time.Second)), nil)
				dbtest.OK(t, err)
				if both(); stock-token != before {
					t.Errorf("the stock is %d, and the version %d: of one the statement has made more than of the other, %d", stock, token, before)
				}
				dbtest.OK(t, tx.Rollback())
			}
		}
	})
}
