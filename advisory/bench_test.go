package advisory_test

import (
	"context"
	"database/sql/driver"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/server"
)

func onEachServer(b *testing.B, bench func(b *testing.B, s *scratch)) {
	for flavour, srv := range startServers(b) {
		b.Run(string(flavour), func(b *testing.B) { bench(b, newScratch(b, srv.Addr())) })
	}
}

// BenchmarkUncontended compares taking and giving back a lock with two round
// trips that do nothing, on the connection that carries the lock, since one
// connection can be twice as slow as another: the ratio of the medians of short
// runs that take turns, so that a busy machine hits both.
func BenchmarkUncontended(b *testing.B) {
	onEachServer(b, func(b *testing.B, s *scratch) {
		var times [2][]time.Duration
		for b.Loop() {
			s.uncontended(b, &times)
		}
		median := func(d []time.Duration) float64 {
			slices.Sort(d)
			return float64(d[len(d)/2].Nanoseconds())
		}
		b.ReportMetric(median(times[1])/median(times[0]), "lock/bare")
		b.ReportMetric(median(times[1]), "ns/lock")
		b.ReportMetric(0, "ns/op")
	})
}

func (s *scratch) uncontended(b *testing.B, times *[2][]time.Duration) {
	background := context.Background()
	ctx, cancel := context.WithCancel(background) // as those of applications
	defer cancel()
	cfg := s.config()
	cfg.ReadTimeout = 20 * time.Second
	base := s.connector(cfg)
	var bare driver.Conn
	p := s.process(settings{connect: func(ctx context.Context) (c driver.Conn, err error) {
		bare, err = base.Connect(ctx)
		return bare, err
	}})
	defer p.Close()
	works := []func() error{
		func() error {
			if err := server.Exec(background, bare, "DO 1"); err != nil {
				return err
			}
			return server.Exec(background, bare, "DO 1")
		},
		func() error {
			lock, err := p.Acquire(ctx, request("product:42", 0))
			if err != nil {
				return err
			}
			return lock.Release()
		},
	}
	ok(b, works[1]()) // opens the connection
	const batch = 50
	for range 20 {
		for i, once := range works {
			start := time.Now()
			for range batch {
				ok(b, once())
			}
			times[i] = append(times[i], time.Since(start)/batch)
		}
	}
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

// BenchmarkHot has one key that all want, in one process and in several.
func BenchmarkHot(b *testing.B) {
	onEachServer(b, func(b *testing.B, s *scratch) {
		for _, n := range []int{1, 4} {
			for _, limits := range []struct {
				times int
				time  time.Duration
			}{{0, 0}, {1, time.Hour}, {10, time.Hour}, {100, time.Hour}, {1 << 30, time.Millisecond}, {1 << 30, 5 * time.Millisecond}, {1 << 30, 20 * time.Millisecond}} {
				b.Run(fmt.Sprintf("%d/times=%d,time=%v", n, limits.times, limits.time), func(b *testing.B) {
					for b.Loop() {
						s.hot(n, 64/n, time.Second, limits.times, limits.time).report(b)
					}
				})
			}
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
					p.t.Error(err)
					return
				}
				own = append(own, time.Since(start))
				if err := lock.Release(); err != nil {
					p.t.Error(err)
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

// heat is what came of one key that all wanted.
type heat struct {
	grants        int
	sent          int64
	mean, longest time.Duration
	shares        []int
	lasting       time.Duration
}

func (s *scratch) hot(processes, each int, lasting time.Duration, handOvers int, handOverTime time.Duration) (h heat) {
	h = heat{lasting: lasting, shares: make([]int, processes)}
	var all sync.WaitGroup
	var inside atomic.Int32
	waits := make([][]time.Duration, processes)
	begin := time.Now().Add(200 * time.Millisecond) // connections are opened before
	end := begin.Add(lasting)
	for i := range processes {
		p := s.process(settings{change: func(c *advisory.Config) { c.HandOvers, c.HandOverTime = handOvers, handOverTime }})
		var mu sync.Mutex
		for range each {
			all.Go(func() {
				var own []time.Duration
				for time.Now().Before(end) {
					start := time.Now()
					lock, err := p.Acquire(context.Background(), request("hot", 20*time.Second))
					if err != nil {
						s.t.Error(err)
						return
					}
					if inside.Add(1) != 1 {
						s.t.Error("two have the lock")
					}
					if start.After(begin) {
						own = append(own, time.Since(start))
					}
					inside.Add(-1)
					if err := lock.Release(); err != nil {
						s.t.Error(err)
					}
				}
				mu.Lock()
				defer mu.Unlock()
				waits[i] = append(waits[i], own...)
			})
		}
		before := p.sent.Load()
		defer func() { h.sent += p.sent.Load() - before }()
	}
	all.Wait()
	var sum time.Duration
	for i, own := range waits {
		h.shares[i] = len(own)
		h.grants += len(own)
		for _, w := range own {
			sum += w
			h.longest = max(h.longest, w)
		}
	}
	h.mean = sum / time.Duration(max(1, h.grants))
	return h
}

func (h heat) report(b *testing.B) {
	b.ReportMetric(float64(h.grants)/h.lasting.Seconds(), "grants/s")
	b.ReportMetric(float64(h.longest.Microseconds()), "us-longest")
	b.ReportMetric(float64(h.mean.Microseconds()), "us-mean")
	b.ReportMetric(float64(h.longest)/float64(h.mean), "longest/mean")
	b.ReportMetric(float64(slices.Min(h.shares))/float64(slices.Max(h.shares)), "least/most")
	b.ReportMetric(0, "ns/op")
}
