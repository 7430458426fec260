package intercept_test

import (
	"database/sql"
	"slices"
	"testing"
	"time"

	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/lockctx"
)

// BenchmarkLockedTransaction is the price of an interceptor that does nothing where a server
// is at work: the ratio of the medians of transactions that take turns without and with it,
// so that a busy machine hits both. What it adds to single statements is too little to be
// seen here: see BenchmarkEmptyInterceptor of the driver.
func BenchmarkLockedTransaction(b *testing.B) {
	for _, d := range dbtest.Each(b) {
		b.Run(string(d.Flavour), func(b *testing.B) {
			s := &scratch{d.For(b)}
			s.open(mysqllock.Config{}) // makes the table
			handles := []*sql.DB{
				s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{})),
				s.OpenDB(mysqllock.NewConnector(s.Config(), mysqllock.Config{Base: intercept.With(sqlmw.NullInterceptor{})})),
			}
			ctx := lockctx.With(b.Context(), "a key")
			var times [2][]time.Duration
			for n := 0; n < 100 || b.Loop(); n++ { // at first connections are opened, statements prepared
				for i, db := range handles {
					start := time.Now()
					dbtest.OK(b, sell(ctx, db))
					times[i] = append(times[i], time.Since(start))
				}
			}
			median := func(d []time.Duration) float64 {
				slices.Sort(d)
				return float64(d[len(d)/2])
			}
			b.ReportMetric(median(times[1])/median(times[0]), "with/without")
			b.ReportMetric(0, "ns/op")
		})
	}
}
