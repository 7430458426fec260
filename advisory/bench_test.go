package advisory_test

import (
	"context"
	"database/sql/driver"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/tempserver"
)

func onEachServer(b *testing.B, bench func(b *testing.B, s *scratch)) {
	for _, bin := range tempserver.Require(b) {
		srv := tempserver.Share(b, bin)
		b.Run(bin.Name, func(b *testing.B) { bench(b, newScratch(dbtest.New(b, bin, srv))) })
	}
}

// BenchmarkUncontended compares taking and giving back a lock with two round
// trips that do nothing, and with the statements of the lock sent bare, on the
// connection that carries the lock, since one connection can be twice as slow as
// another: the ratios of the medians of short runs that take turns, so that a
// busy machine hits all.
func BenchmarkUncontended(b *testing.B) {
	onEachServer(b, func(b *testing.B, s *scratch) {
		var times [3][]time.Duration
		for b.Loop() {
			s.uncontended(b, &times)
		}
		ns := func(i int) float64 {
			return median(times[i], func(d time.Duration) float64 { return float64(d.Nanoseconds()) })
		}
		nothing, same, lock := ns(0), ns(1), ns(2)
		b.ReportMetric(lock/nothing, "lock/nothing")
		b.ReportMetric(same/nothing, "same/nothing")
		b.ReportMetric(lock/same, "lock/same")
		b.ReportMetric(lock, "ns/lock")
		b.ReportMetric(0, "ns/op")
	})
}

func (s *scratch) uncontended(b *testing.B, times *[3][]time.Duration) {
	background := context.Background()
	ctx, cancel := context.WithCancel(background) // as those of applications
	defer cancel()
	cfg := s.config()
	cfg.ReadTimeout = 20 * time.Second
	base := dbtest.Connector(s.T, cfg)
	var bare driver.Conn
	p := s.process(settings{connect: func(ctx context.Context) (c driver.Conn, err error) {
		c, err = base.Connect(ctx)
		bare = &noting{mysqlConn: c.(mysqlConn)}
		return bare, err
	}})
	defer p.Close()
	once := func() error {
		lock, err := p.Acquire(ctx, request("product:42", 0))
		if err != nil {
			return err
		}
		return lock.Release()
	}
	dbtest.OK(b, once()) // opens the connection
	noted := bare.(*noting)
	take, free := noted.query, noted.exec
	works := []func() error{
		func() error {
			if err := server.Exec(background, noted.mysqlConn, "DO 1"); err != nil {
				return err
			}
			return server.Exec(background, noted.mysqlConn, "DO 1")
		},
		func() error {
			if rows, err := server.Query(background, noted.mysqlConn, take); err != nil || rows[0][0] != "1" {
				return fmt.Errorf("%v, %w", rows, err)
			}
			return server.Exec(background, noted.mysqlConn, free)
		},
		once,
	}
	const batch = 50
	for range 20 {
		for i, once := range works {
			start := time.Now()
			for range batch {
				dbtest.OK(b, once())
			}
			times[i] = append(times[i], time.Since(start)/batch)
		}
	}
}

// noting is a connection that knows its last texts.
type noting struct {
	mysqlConn
	query, exec string
}

func (c *noting) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	c.exec = text
	return c.mysqlConn.ExecContext(ctx, text, args)
}

func (c *noting) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	c.query = text
	return c.mysqlConn.QueryContext(ctx, text, args)
}

// BenchmarkDistinct has goroutines that take and give back locks of their own.
func BenchmarkDistinct(b *testing.B) {
	onEachServer(b, func(b *testing.B, s *scratch) {
		for _, n := range []int{1, 8, 64, 512} {
			b.Run(fmt.Sprint(n), func(b *testing.B) {
				p := s.process(settings{})
				p.crowd(n, 20*time.Millisecond, func(i int) string { return fmt.Sprint(i) })
				sent := p.sent.Load()
				for b.Loop() {
					grants := p.crowd(n, 200*time.Millisecond, func(i int) string { return fmt.Sprint(i) })
					b.ReportMetric(float64(len(grants))*5, "locks/s")
					b.ReportMetric(float64(p.sent.Load()-sent)/float64(len(grants)), "statements/lock")
					sent = p.sent.Load()
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	})
}

// crowd has n goroutines take and give back locks for a while, and returns how
// long each grant took.
func (p *process) crowd(n int, lasting time.Duration, key func(int) string) (waits []time.Duration) {
	var all sync.WaitGroup
	var mu sync.Mutex
	end := time.Now().Add(lasting)
	for i := range n {
		all.Go(func() {
			var own []time.Duration
			for time.Now().Before(end) {
				start := time.Now()
				lock, err := p.Acquire(context.Background(), request(key(i), 20*time.Second))
				if err != nil {
					p.T.Error(err)
					return
				}
				own = append(own, time.Since(start))
				if err := lock.Release(); err != nil {
					p.T.Error(err)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			waits = append(waits, own...)
		})
	}
	all.Wait()
	return waits
}
