package chaos

import (
	"context"
	"database/sql"
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

// TestCommitsUnderLease has many goroutines commit all the time under one lease: it is
// not lost, and no commit is refused. LEASE_TIME makes it long, and the lease short.
func TestCommitsUnderLease(t *testing.T) {
	length, long := lengthOf(t, "LEASE_TIME", 4*time.Second)
	ttl, goroutines, on := 9*time.Second, 4, dbtest.OnServers[*scratch]
	if long {
		ttl, goroutines, on = 2*time.Second, 32, dbtest.OnEveryServer[*scratch]
	}
	on(t, newScratch, func(t *testing.T, s *scratch) {
		db := s.Handle()
		db.SetMaxIdleConns(goroutines)
		dbtest.Exec(t, s.Plain, "CREATE TABLE counters (id INT PRIMARY KEY, n BIGINT NOT NULL) ENGINE=InnoDB")
		rows := make([]string, goroutines)
		for i := range rows {
			rows[i] = fmt.Sprintf("(%d, 0)", i)
		}
		dbtest.Exec(t, s.Plain, "INSERT INTO counters VALUES "+strings.Join(rows, ", "))
		ctx, cancel := context.WithTimeout(t.Context(), length+time.Minute)
		defer cancel()
		began := time.Now()
		var commits atomic.Int64
		err := mysqllock.Do(ctx, db, "k", func(ctx context.Context) error {
			var all sync.WaitGroup
			for id := range goroutines {
				all.Go(func() {
					for n := 0; time.Since(began) < length; n++ {
						if err := countOne(ctx, db, id, n); err != nil {
							t.Errorf("after %v and %d commits: %v", time.Since(began).Round(time.Millisecond), commits.Load(), err)
							return
						}
						commits.Add(1)
						if id%4 == 1 {
							time.Sleep(10 * time.Millisecond)
						}
					}
				})
			}
			all.Wait()
			return nil
		}, lockctx.Lease(ttl))
		dbtest.OK(t, err)
		var sum int64
		dbtest.OK(t, s.Plain.QueryRow("SELECT SUM(n) FROM counters").Scan(&sum))
		if sum != commits.Load() {
			t.Errorf("%d commits have counted to %d", commits.Load(), sum)
		}
		t.Logf("%d commits in %v under a lease of %v, by %d goroutines", sum, time.Since(began).Round(time.Second), ttl, goroutines)
	})
}

// countOne commits in one way or another.
func countOne(ctx context.Context, db *sql.DB, id, n int) error {
	const count = "UPDATE counters SET n = n + 1 WHERE id = ?"
	if n%2 == 0 {
		_, err := db.ExecContext(ctx, count, id)
		return err
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if _, err := tx.ExecContext(ctx, count, id); err != nil {
		return err
	}
	return tx.Commit()
}
