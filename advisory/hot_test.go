package advisory_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
)

// rush has the goroutines of one process take and give back one lock for a
// while, with nothing to do in between but to count.
type rush struct {
	DSN, Namespace string
	Count          string // a file that all processes count in
	Goroutines     int
	Lasting        time.Duration
}

// waits are how long each grant took.
type waits struct {
	Times  []time.Duration
	Grants []int64 // that others got meanwhile, in any process
	Shares []int   // how many each goroutine got
	All    int64   // grants, also before and after those noted
	Sent   int64   // statements for all
}

const rushEnv = "MYSQLLOCK_TEST_RUSH"

// TestRush is one of the processes of hot: this test binary again. It begins
// when it reads a line, which says from when on to note the grants, so that all
// processes note those of the same time. Run by itself it does nothing.
func TestRush(t *testing.T) {
	text := os.Getenv(rushEnv)
	if text == "" {
		return
	}
	var r rush
	dbtest.OK(t, json.Unmarshal([]byte(text), &r))
	count := counter(t, r.Count)
	s := &scratch{dbtest.At(t, r.DSN), r.Namespace}
	p := s.process(settings{})
	dbtest.OK(t, p.acquire("warm", time.Minute).Release())
	fmt.Println("ready")
	var nanos int64
	_, err := fmt.Fscanln(os.Stdin, &nanos)
	dbtest.OK(t, err)
	dbtest.OK(t, json.NewEncoder(os.Stdout).Encode(p.rush(r.Goroutines, time.Unix(0, nanos), r.Lasting, count)))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// counter is a number that processes share.
func counter(t testing.TB, path string) *int64 {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	dbtest.OK(t, err)
	defer f.Close()
	shared, err := syscall.Mmap(int(f.Fd()), 0, 8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	dbtest.OK(t, err)
	t.Cleanup(func() { _ = syscall.Munmap(shared) })
	return (*int64)(unsafe.Pointer(&shared[0]))
}

func (p *process) rush(goroutines int, begin time.Time, lasting time.Duration, count *int64) (w waits) {
	var all sync.WaitGroup
	var mu sync.Mutex
	before := p.sent.Load()
	end := begin.Add(lasting)
	for range goroutines {
		all.Go(func() {
			var own waits
			for time.Now().Before(end) {
				first, start := atomic.LoadInt64(count), time.Now()
				lock, err := p.Acquire(context.Background(), request("hot", time.Minute))
				if err != nil {
					p.T.Error(err)
					return
				}
				n, now := atomic.LoadInt64(count), time.Now()
				own.All++
				if start.After(begin) && now.Before(end) {
					own.Times, own.Grants = append(own.Times, now.Sub(start)), append(own.Grants, n-first)
				}
				atomic.StoreInt64(count, n+1) // a number is lost where two have the lock
				if err := lock.Release(); err != nil {
					p.T.Error(err)
				}
			}
			mu.Lock()
			defer mu.Unlock()
			w.Times, w.Grants, w.Shares = append(w.Times, own.Times...), append(w.Grants, own.Grants...), append(w.Shares, len(own.Times))
			w.All += own.All
		})
	}
	all.Wait()
	w.Sent = p.sent.Load() - before
	return w
}

// hot has processes want one key, each with some goroutines.
func (s *scratch) hot(processes, goroutines int, lasting time.Duration) heat {
	s.T.Helper()
	count := filepath.Join(s.T.TempDir(), "count")
	dbtest.OK(s.T, os.WriteFile(count, make([]byte, 8), 0o600))
	text, err := json.Marshal(rush{s.DSN(), s.namespace, count, goroutines, lasting})
	dbtest.OK(s.T, err)
	self, err := os.Executable()
	dbtest.OK(s.T, err)
	each := make([]waits, processes)
	var all, ready sync.WaitGroup
	begin := make(chan struct{})
	var from time.Time
	for i := range processes {
		cmd := exec.Command(self, "-test.run=^TestRush$")
		cmd.Env = append(os.Environ(), rushEnv+"="+string(text))
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		dbtest.OK(s.T, err)
		out, err := cmd.StdoutPipe()
		dbtest.OK(s.T, err)
		dbtest.OK(s.T, cmd.Start())
		ready.Add(1)
		all.Go(func() {
			lines := bufio.NewReader(out)
			if line, err := lines.ReadString('\n'); err != nil || line != "ready\n" {
				s.T.Errorf("a process says %q, %v", line, err)
			}
			ready.Done()
			<-begin
			fmt.Fprintln(in, from.UnixNano())
			if err := json.NewDecoder(lines).Decode(&each[i]); err != nil {
				s.T.Error(err)
			}
			in.Close()
			_, _ = io.Copy(io.Discard, out)
			if err := cmd.Wait(); err != nil {
				s.T.Error(err)
			}
		})
	}
	ready.Wait()
	from = time.Now().Add(time.Second / 2) // connections are opened before
	close(begin)
	all.Wait()
	return sum(each, lasting)
}

// heat is what came of one key that all wanted.
type heat struct {
	perSecond   float64
	statements  float64 // for each grant
	mean        time.Duration
	longest     time.Duration
	late        float64 // the longest wait in times of the mean,
	overtaken   float64 // and the longest but for one of a thousand, the same counted in grants: a machine that is busy stops a goroutine that is about to ask
	leastShare  float64 // of a process, in times of the greatest
	leastOfAll  float64 // the same of a goroutine
	byTimesMean map[int]int
}

func sum(each []waits, lasting time.Duration) heat {
	var all waits
	var shares []int
	for _, w := range each {
		shares = append(shares, len(w.Times))
		all.Times, all.Grants, all.Shares = append(all.Times, w.Times...), append(all.Grants, w.Grants...), append(all.Shares, w.Shares...)
		all.All, all.Sent = all.All+w.All, all.Sent+w.Sent
	}
	h := heat{byTimesMean: make(map[int]int)}
	if len(all.Times) == 0 {
		return h
	}
	var total time.Duration
	var grants int64
	for i, w := range all.Times {
		total += w
		grants += all.Grants[i]
	}
	n := len(all.Times)
	h.perSecond, h.statements = float64(n)/lasting.Seconds(), float64(all.Sent)/float64(all.All)
	h.mean, h.longest = total/time.Duration(n), slices.Max(all.Times)
	h.late = float64(h.longest) / float64(h.mean)
	slices.Sort(all.Grants)
	h.overtaken = float64(all.Grants[n-1-n/1000]) * float64(n) / float64(max(1, grants))
	least := func(shares []int) float64 { return float64(slices.Min(shares)) / float64(slices.Max(shares)) }
	h.leastShare, h.leastOfAll = least(shares), least(all.Shares)
	for _, w := range all.Times {
		h.byTimesMean[int(w/h.mean)]++
	}
	return h
}

func (h heat) String() string {
	return fmt.Sprintf("%.0f grants a second, %.2f statements each; mean wait %v, longest %v or %.1f times, all but few in grants %.1f times; least share %.2f, of a goroutine %.2f; waits by times of the mean: %v",
		h.perSecond, h.statements, h.mean, h.longest, h.late, h.overtaken, h.leastShare, h.leastOfAll, h.byTimesMean)
}

// TestHotKey: nobody starves, neither a process nor a goroutine.
func TestHotKey(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, processes := range []int{1, 4} {
			for round := 1; ; round++ { // a busy machine starves processes, too
				h := s.hot(processes, 64/processes, 500*time.Millisecond)
				t.Logf("%d processes: %v", processes, h)
				if h.overtaken <= 10 && h.leastShare >= 0.5 && h.leastOfAll >= 0.5 && h.statements <= 0.4 { // the shares are 0.99 on a calm one
					break
				}
				if round == 20 {
					t.Fatalf("%d processes: in all of %d rounds waits are above 10 times the mean, in grants, or one process or goroutine gets less than half of what another gets, or a grant takes more than 0.4 statements", processes, round)
				}
			}
		}
		s.free(s.open(), "hot")
	})
}

// TestTurns: a process whose turn is over gives the lock to the next, but keeps
// a place of its own, with one statement and a look at the grant. Somebody who
// gives up meanwhile takes nobody's place.
func TestTurns(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		once := func(c *advisory.Config) { c.HandOverTime = 0 }
		p, q, plain := s.process(settings{change: once}), s.process(settings{change: once}), s.open()
		first := p.acquire("k", 0)
		got := make(chan *advisory.Lock)
		take := func(p *process, ctx context.Context) {
			go func() {
				lock, err := p.Acquire(ctx, request("k", time.Minute))
				if err != nil {
					lock = nil
				}
				got <- lock
			}()
		}
		take(q, t.Context())
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		take(p, t.Context())
		p.inLine("k", 1)
		dbtest.OK(t, first.Release())
		lock := <-got // q's
		dbtest.Soon(t, "p waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		fewest := int64(100)
		for i := range 6 { // in turn
			from := q
			if i%2 == 1 {
				from = p
			}
			ctx, cancel := context.WithCancel(t.Context())
			if i == 4 { // two wait; the first gives up when it waits in the server
				take(from, ctx)
				from.inLine("k", 1)
			}
			before := from.locks.Queue.Waiting("k")
			take(from, t.Context())
			from.inLine("k", 1+before)
			sent := from.sent.Load()
			dbtest.OK(t, lock.Release())
			lock = <-got
			if id := s.holder(plain, "k"); id != fmt.Sprint(lock.ConnectionID()) {
				t.Errorf("connection %q has it, not %d", id, lock.ConnectionID())
			}
			dbtest.Soon(t, "the other waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
			if i > 1 {
				fewest = min(fewest, from.sent.Load()-sent) // pings come on top
			}
			if i == 4 {
				cancel()
				if left := <-got; left != nil {
					t.Error("who gave up has the lock")
				}
				dbtest.Soon(t, "the next waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
			}
			cancel()
		}
		if fewest != 1 {
			t.Errorf("%d statements at the least to keep a place", fewest)
		}
		dbtest.OK(t, lock.Release())
		dbtest.OK(t, (<-got).Release())
		s.free(plain, "k")
		dbtest.Soon(t, "no connection is kept", func() bool { return p.conns.Stat().InUse+q.conns.Stat().InUse == 0 })
	})
}

// TestLostTurn: who may not wait, or no longer, when it has given the lock back
// leaves nothing behind.
func TestLostTurn(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		refused := errors.New("refused")
		for _, end := range []func(context.Context) (context.Context, error){
			func(ctx context.Context) (context.Context, error) { return ctx, refused },
			func(ctx context.Context) (context.Context, error) {
				ctx, cancel := context.WithCancelCause(ctx)
				cancel(refused)
				return ctx, nil
			},
		} {
			s := s.other(s.T)
			p := s.process(settings{change: func(c *advisory.Config) { c.HandOverTime = 0 }})
			q, plain := s.process(settings{}), s.open()
			first := q.acquire("k", 0)
			got := make(chan *advisory.Lock)
			go func() { got <- p.acquire("k", time.Minute) }() // with a rival
			dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
			dbtest.OK(t, first.Release())
			lock := <-got
			r, waits := request("k", time.Minute), 0
			r.Waiting = func(ctx context.Context) (context.Context, func(), error) {
				if waits++; waits == 1 {
					return ctx, func() {}, nil
				}
				ctx, err := end(ctx)
				return ctx, func() {}, err
			}
			failed := make(chan error)
			go func() {
				_, err := p.Acquire(t.Context(), r)
				failed <- err
			}()
			p.inLine("k", 1)
			dbtest.OK(t, lock.Release())
			if err := <-failed; !errors.Is(err, refused) || waits != 2 {
				t.Errorf("after %d waits: %v", waits, err)
			}
			s.free(plain, "k")
			dbtest.OK(t, p.acquire("k", time.Minute).Release())
			dbtest.Soon(t, "no connection is kept", func() bool { return p.conns.Stat().InUse == 0 })
		}
	})
}

// TestPollerHasAChance: who has no connection to wait on in the server, and so asks
// now and then, is not shut out by those who hand the lock over and over.
func TestPollerHasAChance(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, c := range []struct {
			what                string
			rivals, conns, held int // held are keys that the poller's process waits for as well, in vain
			section             time.Duration
		}{
			{"against one process, without a connection to spare", 1, 1, 0, 0},
			{"against one process with long sections", 1, 1, 0, 20 * time.Millisecond},
			{"against two, with others of its own process that wait", 2, 5, 3, time.Millisecond},
		} {
			ctx, cancel := context.WithCancel(t.Context())
			var all sync.WaitGroup
			for range c.rivals {
				p := s.process(settings{})
				for range 4 {
					all.Go(func() {
						for ctx.Err() == nil {
							lock, err := p.Acquire(ctx, request("k", time.Minute))
							if err != nil {
								continue
							}
							time.Sleep(c.section)
							_ = lock.Release()
						}
					})
				}
			}
			plain := s.open()
			poller := s.process(settings{conns: c.conns, ttl: 5 * time.Second})
			for i := range c.held {
				key := fmt.Sprint("held", i)
				s.Exec(plain, "DO GET_LOCK('"+advisory.Name(s.namespace, key)+"', 0)")
				all.Go(func() { _, _ = poller.Acquire(ctx, request(key, time.Minute)) })
				dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, key)) == 1 })
			}
			began := time.Now()
			const n = 3
			for range n {
				if lock := poller.acquire("k", time.Minute); lock != nil {
					dbtest.OK(t, lock.Release())
				}
			}
			if d := time.Since(began); d > 100*time.Second { // a few seconds on a calm machine
				t.Errorf("%s it had the lock %d times within %v", c.what, n, d)
			}
			t.Log(c.what, time.Since(began))
			cancel()
			all.Wait()
			s.Exec(plain, "DO RELEASE_ALL_LOCKS()")
			s.free(plain, "k")
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
