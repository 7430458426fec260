package mysqllock_test

import (
	"context"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// TestCommitInEachCharacterSet: leases are committed under whatever the character set is
// of the connection, and of the program that was the first to take one.
func TestCommitInEachCharacterSet(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, first := range []string{"charset=binary", "character_set_connection=binary", "charset=latin1", "character_set_connection=utf16"} {
			s := newScratch(s.Beside(t))
			for _, params := range []string{first, "charset=utf8mb4", "charset=binary", "character_set_connection=utf16"} {
				db := s.open(params)
				err := mysqllock.Do(dbtest.Limited(t), db, "k", func(ctx context.Context) error {
					_, err := db.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 1")
					return err
				}, lockctx.Lease(ttl))
				if err != nil {
					t.Errorf("%s after %s: %v", params, first, err)
				}
			}
			s.wantStock(1, 6)
		}
	})
}

// TestCommitBehindALockedRow: a commit waits for somebody who has locked the lease's row
// for as long as the lease lasts, and not only for the application's own limit. Where the
// account has no right to the procedure, the fence does.
func TestCommitBehindALockedRow(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		_, err := s.open().ExecContext(lockctx.With(dbtest.Limited(t), "made"), "DO 1")
		dbtest.OK(t, err)
		limit := "innodb_lock_wait_timeout=1"
		for name, db := range map[string]*scratch{
			"all rights": s, "few rights": s.user("SELECT, UPDATE ON $db.p", "SELECT, INSERT, UPDATE ON $db.mysqllock"),
		} {
			handle := db.open(limit)
			dbtest.OK(t, mysqllock.Do(dbtest.Limited(t), handle, "k", func(ctx context.Context) error {
				tx, err := s.plain.Begin()
				dbtest.OK(t, err)
				var n int
				dbtest.OK(t, tx.QueryRow("SELECT 1 FROM mysqllock WHERE name = 'k' FOR UPDATE").Scan(&n))
				time.AfterFunc(2500*time.Millisecond, func() { _ = tx.Rollback() })
				_, err = handle.ExecContext(ctx, "UPDATE p SET stock = stock - 1 WHERE id = 2")
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
				return nil
			}, lockctx.Lease(20*time.Second)))
		}
		s.wantStock(2, 8)
	})
}
