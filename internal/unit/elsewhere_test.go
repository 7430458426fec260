package unit_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestAForeignTransactionRunsUnderTheLockOfItsStatement: the lock was taken for a read outside of
// it, and is given back by its commit.
func TestAForeignTransactionRunsUnderTheLockOfItsStatement(t *testing.T) {
	for name, end := range map[string]struct {
		commit bool
		stock  int64
	}{"commit": {true, 9}, "rollback": {false, 10}} {
		t.Run(name, func(t *testing.T) {
			s, db, ctx := open(t)
			n := seen(t, db, ctx)
			tx, err := db.BeginTx(lockctx.Without(ctx), nil)
			must(t, err)
			must(t, put(ctx, tx, n-1))
			state(t, s, 10, 1)
			if end.commit {
				must(t, tx.Commit())
				if err := put(ctx, db, 1); !errors.Is(err, mysqllock.ErrStaleRead) {
					t.Errorf("a write after the commit, decided before: %v", err)
				}
			} else {
				must(t, tx.Rollback())
			}
			must(t, db.Close())
			state(t, s, end.stock, 0)
		})
	}
}

func TestAForeignTransactionCommitsOnlyWhileTheLockIsHeld(t *testing.T) {
	s, db, ctx := open(t)
	n := seen(t, db, ctx)
	tx, err := db.BeginTx(lockctx.Without(ctx), nil)
	must(t, err)
	must(t, put(ctx, tx, n-1))
	s.Fail("DO 0", mysql.ErrInvalidConn)
	if err := tx.Commit(); !errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("got %v", err)
	}
	state(t, s, 10, 0)
}

func TestAForeignTransactionKeepsToOneLock(t *testing.T) {
	s, db, ctx := open(t)
	first, cancel := context.WithCancel(ctx)
	defer cancel()
	first = lockctx.With(lockctx.Without(first), "k")
	seen(t, db, first)
	tx, err := db.BeginTx(lockctx.Without(ctx), nil)
	must(t, err)
	must(t, put(first, tx, 1))
	if err := put(lockctx.With(lockctx.Without(ctx), "other"), tx, 2); !errors.Is(err, mysqllock.ErrLost) {
		t.Errorf("under another lock: %v", err)
	}
	must(t, tx.Rollback())
	cancel()
	must(t, db.Close())
	state(t, s, 10, 0)
}

func TestAClaimChangesItsQueryOnly(t *testing.T) {
	s, db, ctx := open(t)
	claim := lockctx.Claim(lockctx.Without(ctx), lockctx.ForUpdate(), lockctx.NoWait())
	tx, err := db.BeginTx(lockctx.Without(ctx), nil)
	must(t, err)
	seen(t, tx, claim)
	must(t, put(claim, tx, 4))
	must(t, tx.Commit())
	if sent := s.Sent(); !slices.Contains(sent, read+" FOR UPDATE NOWAIT") || !slices.Contains(sent, write) {
		t.Errorf("sent %q", sent)
	}
	state(t, s, 4, 0)
	if err := db.QueryRowContext(claim, read, 1).Scan(new(int)); err == nil {
		t.Error("a claim outside of a transaction locks nothing, and is not refused")
	}
}
