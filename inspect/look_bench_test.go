package inspect_test

import (
	"context"
	"database/sql"
	"flag"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/inspect"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/schema"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

var (
	lookKeys    = flag.Int("look.keys", 20, "how many keys BenchmarkLook has held")
	lookWaiters = flag.Int("look.waiters", 100, "how many connections wait for them in all")
)

// BenchmarkLook: what a Snapshot costs while rows are held, each by a transaction of its own,
// and waited for. make look has the numbers of a bad day.
func BenchmarkLook(b *testing.B) {
	for _, bin := range tempserver.Require(b) {
		b.Run(bin.Name, func(b *testing.B) {
			ctx := context.Background()
			conns := *lookKeys + *lookWaiters
			d := dbtest.New(b, bin, tempserver.Share(b, bin, fmt.Sprintf("--max-connections=%d", conns+100), "--innodb-lock-wait-timeout=3600"))
			db := d.Open("mysql")
			db.SetMaxIdleConns(1)
			table, err := schema.Parse(d.Name + ".mysqllock")
			dbtest.OK(b, err)
			for _, text := range table.Setup() {
				dbtest.Exec(b, db, text)
			}
			lock := func(key int) string {
				return fmt.Sprintf("SELECT token FROM %s WHERE namespace = x'%x' AND name = x'%x' FOR UPDATE", table, d.Name, fmt.Sprintf("order:%d", key))
			}
			for key := range *lookKeys {
				dbtest.Exec(b, db, fmt.Sprintf("INSERT INTO %s (namespace, name) VALUES (x'%x', x'%x')", table, d.Name, fmt.Sprintf("order:%d", key)))
			}
			txs := make([]*sql.Tx, *lookKeys)
			inParallel(*lookKeys, func(key int) {
				tx, err := db.BeginTx(ctx, nil)
				if err == nil {
					_, err = tx.Exec(lock(key))
				}
				if err != nil {
					b.Error(err)
				}
				txs[key] = tx
			})
			waits, cancel := context.WithCancel(ctx)
			var waiting sync.WaitGroup
			inParallel(*lookWaiters, func(n int) {
				conn, err := db.Conn(ctx)
				if err != nil {
					b.Error(err)
					return
				}
				waiting.Go(func() {
					_, _ = conn.ExecContext(waits, lock(n%*lookKeys))
					_ = conn.Close()
				})
			})
			b.Cleanup(func() {
				cancel()
				for _, tx := range txs {
					if tx != nil {
						_ = tx.Rollback()
					}
				}
				waiting.Wait()
			})
			i, err := inspect.New(d.Open("mysql"), inspect.Options{})
			dbtest.OK(b, err)
			seen, before := 0, -1 // not all, where the server lists more than is read
			for began := time.Now(); seen < *lookWaiters && (seen == 0 || seen != before) && time.Since(began) < 2*time.Minute; time.Sleep(time.Second) {
				seen, before = 0, seen
				snap, err := i.Snapshot(ctx, inspect.Filter{})
				dbtest.OK(b, err)
				for _, l := range snap.Locks {
					seen += len(l.Waiters.List)
				}
			}
			for b.Loop() {
				_, err := i.Snapshot(ctx, inspect.Filter{Deadlocks: true})
				dbtest.OK(b, err)
			}
			b.ReportMetric(float64(seen), "waiters-seen")
		})
	}
}

// inParallel calls f with 0 to n-1.
func inParallel(n int, f func(i int)) {
	var running sync.WaitGroup
	next := make(chan int)
	for range 16 {
		running.Go(func() {
			for i := range next {
				f(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	running.Wait()
}
