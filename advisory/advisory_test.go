package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/ngrok/sqlmw"

	"github.com/mysqllock/mysqllock/advisory"
	"github.com/mysqllock/mysqllock/intercept"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/lockname"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/server"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

func TestLock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		lock := p.acquire("Key", 0)
		if lock.Key() != "Key" || lock.Name() != advisory.Name(s.namespace, "Key") || lock.Err() != nil {
			t.Errorf("the lock says %q, %q, %v", lock.Key(), lock.Name(), lock.Err())
		}
		if id := s.holder(plain, "Key"); id != fmt.Sprint(lock.ConnectionID()) {
			t.Errorf("connection %s has it, not %d", id, lock.ConnectionID())
		}

		for i, q := range []*process{p, other} {
			var e *lockerr.Error
			for began := time.Now(); e == nil || e.Holder == nil && time.Since(began) < dbtest.Patience; { // a busy server does not say in time
				err := q.told("Key", 0)
				if !errors.Is(err, lockerr.ErrLocked) || errors.Is(err, lockerr.ErrTimeout) || !errors.As(err, &e) {
					t.Fatalf("without a wait: %v", err)
				}
			}
			if e.Op != "lock" || e.Key != "Key" || e.Strategy != "advisory" || e.Holder == nil || e.Holder.ConnectionID != lock.ConnectionID() {
				t.Errorf("the error is %+v, with holder %v", e, e.Holder)
			}
			if i == 1 && e.Holder != nil && (e.Holder.User != "root" || !strings.HasPrefix(e.Holder.Host, "localhost") && !strings.HasPrefix(e.Holder.Host, "127.0.0.1")) {
				t.Errorf("the holder is %v", e.Holder)
			}
			err := q.told("Key", 300*time.Millisecond)
			if !errors.Is(err, lockerr.ErrTimeout) || !errors.Is(err, lockerr.ErrLocked) || !errors.As(err, &e) || e.Waited < 300*time.Millisecond || e.Waited > 20*time.Second {
				t.Error(err)
			}
		}

		dbtest.OK(t, lock.Release())
		dbtest.OK(t, lock.Release())
		if err := lock.Err(); !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("after the release: %v", err)
		}
		// On a busy machine a statement that was given up may still get it for a moment.
		dbtest.Soon(t, "nobody has it", func() bool { return s.holder(plain, "Key") == "" })
		dbtest.OK(t, other.acquire("Key", 0).Release())
	})
}

// TestEachOnce: no lock is taken twice on its connection, nor given back twice; and those that are
// asked for at the same time share statements.
func TestEachOnce(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{}), s.open()
		var all sync.WaitGroup
		locks := make([]*advisory.Lock, 300)
		for i := range locks {
			all.Go(func() { locks[i] = p.acquire(fmt.Sprint(i), time.Minute) })
		}
		all.Wait()
		if sent := p.sent.Load(); sent > int64(len(locks))/2 {
			t.Errorf("%d statements for %d locks", sent, len(locks))
		}
		for i, lock := range locks {
			if id := s.holder(plain, fmt.Sprint(i)); id != fmt.Sprint(lock.ConnectionID()) {
				t.Errorf("connection %q has %d", id, i)
			}
		}
		for i, lock := range locks {
			all.Go(func() {
				if i%2 == 0 {
					dbtest.OK(t, lock.Release())
				}
			})
		}
		all.Wait()
		for i := range locks {
			if id := s.holder(plain, fmt.Sprint(i)); (id == "") != (i%2 == 0) {
				t.Errorf("connection %q has %d", id, i)
			}
		}
	})
}

func TestManyHolds(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const n = 2_000
		p := s.process(settings{})
		dbtest.OK(t, p.acquire("warm", 0).Release())
		locks := make([]*advisory.Lock, n)
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		var all sync.WaitGroup
		each := func(do func(i int)) time.Duration {
			start := time.Now()
			for w := range 200 {
				all.Go(func() {
					for i := w; i < n; i += 200 {
						do(i)
					}
				})
			}
			all.Wait()
			return time.Since(start)
		}
		taking := each(func(i int) { locks[i] = p.acquire(fmt.Sprintf("product:%d", i), time.Minute) })
		runtime.GC()
		runtime.ReadMemStats(&after)
		ids := make(map[uint64]int)
		for _, lock := range locks {
			ids[lock.ConnectionID()]++
		}
		if in := p.conns.Stat().InUse; len(ids) > 2 || in > 2 {
			t.Errorf("%d connections carry %d locks; %d are in use", len(ids), n, in)
		}
		freeing := each(func(i int) { dbtest.OK(t, locks[i].Release()) })
		t.Logf("%d locks on %v: taken in %v, given back in %v, %d bytes each",
			n, ids, taking, freeing, (int64(after.HeapAlloc)-int64(before.HeapAlloc))/n)
		dbtest.Soon(t, "no connection is in use", func() bool { return p.conns.Stat().InUse == 0 })
	})
}

// TestHandoff: a lock goes to the next of its process, but not for ever.
func TestHandoff(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 3, time.Minute }})
		other, plain := s.process(settings{}), s.open()
		first := p.acquire("k", 0)
		turns := make(chan string, 100)
		var all sync.WaitGroup
		take := func(p *process, who string) {
			all.Go(func() {
				lock := p.acquire("k", time.Minute)
				turns <- who
				dbtest.OK(t, lock.Release())
			})
		}
		take(other, "other")
		dbtest.Soon(t, "another process waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		for range 8 {
			take(p, "own")
		}
		p.inQueue("k", 8)
		dbtest.OK(t, first.Release())
		all.Wait()
		close(turns)
		var order []string
		for who := range turns {
			order = append(order, who)
		}
		if slices.Index(order, "other") != 3 {
			t.Errorf("the order was %v", order)
		}
		s.free(plain, "k")
	})
}

// TestHandoffAlone: once nobody has taken it to whom it was yielded, only the time
// counts.
func TestHandoffAlone(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 3, time.Minute }})
		const n = 20
		lock := p.acquire("k", 0)
		fewest := int64(100)
		for range 5 { // pings come on top
			got := make(chan *advisory.Lock)
			for range n {
				go func() { got <- p.acquire("k", time.Minute) }()
			}
			p.inQueue("k", n)
			sent := p.sent.Load()
			for range n {
				dbtest.OK(t, lock.Release())
				lock = <-got
			}
			fewest = min(fewest, p.sent.Load()-sent)
		}
		dbtest.OK(t, lock.Release())
		if fewest != 0 {
			t.Errorf("%d statements at the least for %d grants", fewest, n)
		}
	})
}

func TestHandOverTime(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOvers, c.HandOverTime = 1000, time.Millisecond }})
		plain := s.open()
		for _, announced := range []bool{false, true} {
			want := int64(1)
			if announced { // it is free for a moment
				want = 2
				s.Exec(plain, "DO GET_LOCK('"+lockname.OfPoller(s.namespace, "k")+"', 0)")
			}
			fewest := int64(100)
			for range 5 { // pings come on top
				first := p.acquire("k", 0)
				got := make(chan *advisory.Lock)
				go func() { got <- p.acquire("k", time.Minute) }()
				p.inQueue("k", 1)
				time.Sleep(2 * time.Millisecond) // it has been held for longer than that
				sent := p.sent.Load()
				dbtest.OK(t, first.Release())
				next := <-got
				fewest = min(fewest, p.sent.Load()-sent)
				dbtest.OK(t, next.Release())
			}
			if fewest != want {
				t.Errorf("announced is %v: %d statements to yield the lock to other processes and to take it again, want %d", announced, fewest, want)
			}
		}
	})
}

// TestHandoffAnnounced: where somebody asks now and then, a turn ends after so many
// handoffs, too.
func TestHandoffAnnounced(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const most, n = 3, 20
		p := s.process(settings{change: func(c *strategy.Config) { c.HandOvers, c.HandOverTime = most, time.Minute }})
		s.Exec(s.open(), "DO GET_LOCK('"+lockname.OfPoller(s.namespace, "k")+"', 0)")
		lock := p.acquire("k", 0)
		got := make(chan *advisory.Lock)
		for range n {
			go func() { got <- p.acquire("k", time.Minute) }()
		}
		p.inQueue("k", n)
		sent := p.sent.Load()
		for range n {
			dbtest.OK(t, lock.Release())
			lock = <-got
		}
		if sent := p.sent.Load() - sent; sent < n/(most+1)*2 {
			t.Errorf("%d statements for %d grants in turns of %d", sent, n, most+1)
		}
		dbtest.OK(t, lock.Release())
	})
}

// TestGaveUpYield: who gives up when it is about to yield a lock to others, and to
// take it again, has it given back all the same.
func TestGaveUpYield(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		slow := advisory.Name(s.namespace, "slow")
		under, answer := make(chan struct{}), make(chan struct{})
		p := s.process(settings{conns: 1, seen: failing(func(text string) error {
			if strings.Contains(text, "'"+slow) && strings.Contains(text, " GET_LOCK(") {
				close(under)
				<-answer
			}
			return nil
		}), change: func(c *strategy.Config) { c.HandOverTime = 0 }})
		lock := p.acquire("k", 0)
		ctx, cancel := context.WithCancel(t.Context())
		gaveUp := make(chan error)
		go func() {
			_, err := p.Acquire(ctx, request("k", time.Minute))
			gaveUp <- err
		}()
		p.inQueue("k", 1)
		got := make(chan *advisory.Lock)
		go func() { got <- p.acquire("slow", 0) }()
		<-under // so the yield has to wait
		dbtest.OK(t, lock.Release())
		time.Sleep(50 * time.Millisecond)
		cancel()
		if err := <-gaveUp; !errors.Is(err, context.Canceled) {
			t.Errorf("who gave up got %v", err)
		}
		close(answer)
		s.free(s.open(), "k")
		dbtest.OK(t, (<-got).Release())
		dbtest.OK(t, p.acquire("k", time.Minute).Release()) // who gave up leaves the queue after the server's answer
	})
}

// TestCloseInQueue: who waits in the queue hears at once that the Locker is closed, also
// where the server does not answer the one in front.
func TestCloseInQueue(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		name := advisory.Name(s.namespace, "k")
		under, answer := make(chan struct{}), make(chan struct{})
		p := s.process(settings{conns: 1, seen: failing(func(text string) error {
			if strings.Contains(text, "IF(RELEASE_LOCK('"+name) {
				close(under)
				<-answer
			}
			return nil
		}), change: func(c *strategy.Config) { c.HandOverTime = 0 }})
		lock := p.acquire("k", 0)
		failed := make(chan error, 2)
		wait := func() {
			lock, err := p.Acquire(context.Background(), request("k", time.Minute))
			for err == nil { // it was granted at the last moment, and is about to be lost
				time.Sleep(time.Millisecond)
				err = lock.Err()
			}
			failed <- err
		}
		go wait() // yields it to others
		p.inQueue("k", 1)
		go wait()
		p.inQueue("k", 2)
		dbtest.OK(t, lock.Release())
		<-under
		var closed sync.WaitGroup
		start := time.Now()
		closed.Go(p.Close)
		// The other one has no answer yet.
		if err := <-failed; !errors.Is(err, lockerr.ErrClosed) || time.Since(start) > 30*time.Second {
			t.Errorf("who waited in the queue got %v after %v", err, time.Since(start))
		}
		close(answer)
		if err := <-failed; !errors.Is(err, lockerr.ErrClosed) && !errors.Is(err, lockerr.ErrExhausted) {
			t.Errorf("who was in front got %v", err)
		}
		closed.Wait()
	})
}

// TestAnnounced: who only asks now and then says so, as long as it asks, and again
// where the connection is lost on which it has.
func TestAnnounced(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{conns: 1}), s.open()
		announced := func() string { return s.One(plain, "SELECT IS_USED_LOCK('"+lockname.OfPoller(s.namespace, "k")+"')") }
		for _, granted := range []bool{false, true} {
			s.Exec(plain, "DO GET_LOCK('"+advisory.Name(s.namespace, "k")+"', 0)")
			ctx, cancel := context.WithCancel(t.Context())
			got := make(chan *advisory.Lock)
			go func() {
				lock, _ := p.Acquire(ctx, request("k", time.Minute))
				got <- lock
			}()
			dbtest.Soon(t, "it says that it asks", func() bool { return announced() != "" })
			s.Exec(plain, "KILL "+announced())
			dbtest.Soon(t, "it says so again", func() bool { return announced() != "" })
			if granted {
				s.Exec(plain, "DO RELEASE_ALL_LOCKS()")
			} else {
				cancel()
			}
			lock := <-got
			if (lock != nil) != granted {
				t.Errorf("granted is %v: %v", granted, lock)
			}
			dbtest.Soon(t, "it asks no more", func() bool { return announced() == "" })
			if granted {
				dbtest.OK(t, lock.Release())
			}
			cancel()
		}
		dbtest.Soon(t, "no connection is in use", func() bool { return p.conns.Stat().InUse == 0 })
	})
}

// TestCancel has many who wait for one key, in several processes, and who often
// give up: none is left behind, and no grant gets lost.
func TestCancel(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var inside, granted atomic.Int32
		var cancelled atomic.Int32
		var slowest atomic.Int64
		var all sync.WaitGroup
		for range 4 {
			p := s.process(settings{conns: 4})
			for range 16 {
				all.Go(func() {
					for range 40 {
						ctx, cancel := context.WithCancel(context.Background())
						var ended atomic.Int64
						time.AfterFunc(rand.N(20*time.Millisecond), func() { ended.Store(time.Now().UnixNano()); cancel() })
						lock, err := p.Acquire(ctx, request("k", time.Minute))
						if err != nil {
							if at := ended.Load(); at != 0 {
								slowest.Store(max(slowest.Load(), time.Now().UnixNano()-at))
							}
							cancel()
							cancelled.Add(1)
							if !errors.Is(err, context.Canceled) || errors.Is(err, driver.ErrBadConn) {
								t.Errorf("a cancelled caller got %v", err)
							}
							continue
						}
						granted.Add(1)
						if inside.Add(1) != 1 {
							t.Error("two have the lock")
						}
						time.Sleep(rand.N(2 * time.Millisecond))
						inside.Add(-1)
						if err := lock.Release(); err != nil {
							t.Error(err)
						}
						cancel()
					}
				})
			}
		}
		all.Wait()
		t.Logf("%d granted, %d cancelled, the slowest after %v", granted.Load(), cancelled.Load(), time.Duration(slowest.Load()))
		if cancelled.Load() < 1000 || granted.Load() == 0 {
			t.Errorf("%d granted, %d cancelled: nothing is shown", granted.Load(), cancelled.Load())
		}
		plain := s.open()
		dbtest.Soon(t, "nobody waits on the server", func() bool { return len(s.waiters(plain, "k")) == 0 })
		s.free(plain, "k")
		dbtest.OK(t, s.process(settings{}).acquire("k", 0).Release())
	})
}

// TestCancelledWaiter is told soon, and is off the server soon.
func TestCancelledWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		lock := p.acquire("k", 0)
		ctx, cancel := context.WithCancel(t.Context())
		failed := make(chan error)
		go func() {
			_, err := other.Acquire(ctx, request("k", time.Minute))
			failed <- err
		}()
		dbtest.Soon(t, "it waits on the server", func() bool { return len(s.waiters(plain, "k")) == 1 })
		start := time.Now()
		cancel()
		err := <-failed
		if took := time.Since(start); took > 20*time.Second || !errors.Is(err, context.Canceled) {
			t.Errorf("after %v: %v", took, err)
		}
		dbtest.Soon(t, "it has left the server", func() bool { return len(s.waiters(plain, "k")) == 0 })
		dbtest.OK(t, lock.Release())
	})
}

// told notes who is told of a loss.
type told struct {
	mu    sync.Mutex
	times map[string]int
	last  time.Time
	err   error
}

func (l *told) request(key string) advisory.Request {
	r := request(key, time.Minute)
	r.Lost = func(err error) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if l.times == nil {
			l.times = make(map[string]int)
		}
		l.times[key]++
		l.last, l.err = time.Now(), err
	}
	return r
}

func (l *told) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.times)
}

// TestKilledLockConn: all holders are told within a second, once each, and the
// locks are there for others.
func TestKilledLockConn(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const n = 300
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		var lost told
		locks := make([]*advisory.Lock, n)
		var all sync.WaitGroup
		for i := range n {
			all.Go(func() {
				var err error
				locks[i], err = p.Acquire(t.Context(), lost.request(fmt.Sprint(i)))
				if err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		ids := make(map[uint64]bool)
		for _, lock := range locks {
			ids[lock.ConnectionID()] = true
		}
		start := time.Now()
		for id := range ids {
			s.Exec(plain, fmt.Sprintf("KILL %d", id))
		}
		dbtest.Soon(t, "all are told", func() bool { return lost.count() == n })
		t.Logf("%d holders on %d connections were told within %v", n, len(ids), lost.last.Sub(start))
		if took := lost.last.Sub(start); took > 10*time.Second { // a ping would find out later
			t.Errorf("they were told after %v", took)
		}
		if !errors.Is(lost.err, lockerr.ErrLost) || errors.Is(lost.err, driver.ErrBadConn) {
			t.Errorf("they were told %v", lost.err)
		}
		for i, lock := range locks {
			if err := lock.Err(); !errors.Is(err, lockerr.ErrLost) {
				t.Fatalf("%d: %v", i, err)
			}
			if err := lock.Release(); !errors.Is(err, lockerr.ErrLost) {
				t.Fatalf("%d: %v", i, err)
			}
		}
		for i := range n {
			owner := []*process{p, other}[i%2]
			dbtest.OK(t, owner.acquire(fmt.Sprint(i), time.Minute).Release()) // they hear of it before the server has freed all
		}
		time.Sleep(10 * time.Millisecond)
		for key, times := range lost.times {
			if times != 1 {
				t.Errorf("%s was told %d times", key, times)
			}
		}
	})
}

// TestLostWhileWaiting: who waits in the queue behind a lost lock gets one of its
// own, on another connection.
func TestLostWhileWaiting(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{}), s.open()
		lock := p.acquire("k", 0)
		got := make(chan *advisory.Lock)
		go func() { got <- p.acquire("k", time.Minute) }()
		p.inQueue("k", 1)
		s.Exec(plain, fmt.Sprintf("KILL %d", lock.ConnectionID()))
		next := <-got
		if err := lock.Err(); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("the one before: %v", err)
		}
		if next.ConnectionID() == lock.ConnectionID() || next.Err() != nil {
			t.Errorf("the next has connection %d, and %v", next.ConnectionID(), next.Err())
		}
		dbtest.OK(t, next.Release())
	})
}

// TestLostAfterHandoff: a lock that was handed over is lost as any other, also
// on its way.
func TestLostAfterHandoff(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{change: func(c *strategy.Config) { c.HandOverTime = time.Minute }}), s.open()
		var lost, between told
		got := make(chan *advisory.Lock)
		enqueue := func() {
			go func() {
				lock, err := p.Acquire(t.Context(), lost.request("k"))
				if err != nil {
					t.Error(err)
				}
				got <- lock
			}()
		}
		first := p.acquire("k", 0)
		enqueue()
		p.inQueue("k", 1)
		dbtest.OK(t, first.Release())
		second := <-got
		s.Exec(plain, fmt.Sprintf("KILL %d", second.ConnectionID()))
		dbtest.Soon(t, "the next caller is told", func() bool { return lost.count() == 1 })
		s.free(plain, "k") // which may come after that

		third := p.acquire("k", 0)
		onSame, err := p.Acquire(t.Context(), between.request("other"))
		dbtest.OK(t, err)
		if onSame.ConnectionID() != third.ConnectionID() {
			t.Fatal("two idle lock connections")
		}
		handed := make(chan *queue.Ticket)
		go func() {
			ticket, err := p.locks.Queue.Enter(t.Context(), []queue.Key{{Name: "k"}}, nil, queue.Ends{})
			if err != nil {
				t.Error(err)
			}
			handed <- ticket
		}()
		p.inQueue("k", 1)
		enqueue()
		p.inQueue("k", 2)
		dbtest.OK(t, third.Release())
		ticket := <-handed
		s.Exec(plain, fmt.Sprintf("KILL %d", third.ConnectionID()))
		dbtest.Soon(t, "the lock connection is lost", func() bool { return between.count() == 1 })
		ticket.Handoff(p.Locker, ticket.HandedOver())
		fourth := <-got
		if id := s.holder(plain, "k"); id != fmt.Sprint(fourth.ConnectionID()) || fourth.ConnectionID() == third.ConnectionID() {
			t.Errorf("connection %q has it, not %d", id, fourth.ConnectionID())
		}
		dbtest.OK(t, fourth.Release())
	})
}

// TestLateAnswer: what a statement takes whose caller has left is given back.
func TestLateAnswer(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var slow atomic.Pointer[chan struct{}] // while there is one, answers wait for its end
		asked := make(chan struct{}, 1)
		p := s.process(settings{seen: failing(func(text string) error {
			if end := slow.Load(); end != nil && strings.Contains(text, "GET_LOCK") {
				asked <- struct{}{}
				<-*end
			}
			return nil
		})})
		plain := s.open()
		good := p.acquire("good", 0)
		soonest := time.Hour
		for range 5 {
			end := make(chan struct{})
			slow.Store(&end)
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error)
			go func() {
				_, err := p.Acquire(ctx, request("k", 0))
				failed <- err
			}()
			<-asked
			start := time.Now()
			cancel()
			if err := <-failed; !errors.Is(err, context.Canceled) {
				t.Errorf("who left got %v", err)
			}
			soonest = min(soonest, time.Since(start))
			if id := s.holder(plain, "k"); id != fmt.Sprint(good.ConnectionID()) {
				t.Fatal("the statement was not under way")
			}
			if _, err := p.Acquire(t.Context(), request("k", 0)); !errors.Is(err, lockerr.ErrLocked) {
				t.Errorf("meanwhile: %v", err)
			}
			slow.Store(nil)
			close(end)
			s.free(plain, "k")
			dbtest.OK(t, p.acquire("k", time.Minute).Release())
		}
		if soonest > 500*time.Millisecond {
			t.Errorf("callers left after %v at the soonest", soonest)
		}
		dbtest.OK(t, good.Release())
	})
}

// TestLeave: callers whose context ends leave a server that hears them but does
// not answer. What it has granted them is freed, and only who holds a lock is
// told of a loss.
func TestLeave(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const ttl = 9 * time.Second
		way := dbtest.StartProxy(t, s.Server.Addr())
		cfg := s.config()
		cfg.Addr, cfg.ReadTimeout = way.Addr(), ttl*9/10
		p, plain := s.process(settings{ttl: ttl, connect: dbtest.Connector(s.T, cfg).Connect}), s.open()
		var lost, left told
		held, err := p.Acquire(t.Context(), lost.request("held"))
		dbtest.OK(t, err)
		way.Block(dbtest.Answers)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for i := range 3 { // one whose statement is under way, and behind it
			all.Go(func() {
				if _, err := p.Acquire(ctx, left.request(fmt.Sprint(i))); !errors.Is(err, context.Canceled) {
					t.Errorf("who left got %v", err)
				}
			})
		}
		granted := func() (n int) {
			for i := range 3 {
				if s.holder(plain, fmt.Sprint(i)) == fmt.Sprint(held.ConnectionID()) {
					n++
				}
			}
			return n
		}
		dbtest.Soon(t, "one is granted its lock", func() bool { return granted() > 0 })
		start := time.Now()
		cancel()
		all.Wait()
		if took := time.Since(start); took > 20*time.Second {
			t.Errorf("they left after %v", took)
		}
		if held.Err() != nil || granted() == 0 {
			t.Errorf("the holder's lock: %v; %d others are granted", held.Err(), granted())
		}
		dbtest.Soon(t, "the holder is told", func() bool { return lost.count() == 1 })
		way.Mend()
		for _, key := range []string{"0", "1", "2", "held"} {
			dbtest.Soon(t, "it can be had", func() bool { // a connection may still be being opened that was muted
				lock, err := p.Acquire(t.Context(), request(key, time.Minute))
				return err == nil && lock.Release() == nil
			})
		}
		if n := left.count(); n != 0 {
			t.Errorf("%d are told that have no lock", n)
		}
	})
}

// TestPlainRequest: a request needs no more than a key to wait.
func TestPlainRequest(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		lock, err := p.Acquire(t.Context(), advisory.Request{Key: "k"})
		dbtest.OK(t, err)
		var all sync.WaitGroup
		for _, p := range []*process{p, other} { // in the queue, and in the server
			all.Go(func() {
				lock, err := p.Acquire(t.Context(), advisory.Request{Key: "k", Wait: time.Minute})
				if err == nil {
					err = lock.Release()
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		p.inQueue("k", 1)
		dbtest.Soon(t, "the other waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		dbtest.OK(t, lock.Release())
		all.Wait()
	})
}

// TestShortReads: a limit on reads that nobody has told of costs a waiter one
// connection, not one after the other.
func TestShortReads(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		other := s.process(settings{})
		dbtest.AtItsPace(t, 600*time.Millisecond, func(reads time.Duration) error { // on a busy machine others, too, are not answered in time
			cfg := s.config()
			cfg.ReadTimeout = reads
			base := dbtest.Connector(s.T, cfg)
			var opened atomic.Int32
			p := s.process(settings{connect: func(ctx context.Context) (driver.Conn, error) {
				opened.Add(1)
				return base.Connect(ctx)
			}, change: func(c *strategy.Config) { c.ReadTimeout = 0 }})
			lock := other.acquire("k", time.Minute)
			time.AfterFunc(8*reads, func() { _ = lock.Release() })
			own, err := p.Acquire(t.Context(), request("k", 5*time.Minute))
			if err == nil {
				err = own.Release()
			}
			if n := opened.Load(); err == nil && n > 4 {
				err = fmt.Errorf("%d connections were opened", n)
			}
			return err
		})
	})
}

// TestGrantedWaiter: the connection on which somebody has waited carries the
// lock, and goes back when it carries nothing.
func TestGrantedWaiter(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		one, two := p.acquire("1", 0), p.acquire("2", 0)
		var all sync.WaitGroup
		locks := make([]*advisory.Lock, 3)
		for i, key := range []string{"1", "2"} {
			all.Go(func() { locks[i] = other.acquire(key, time.Minute) })
			dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, key)) == 1 })
		}
		dbtest.OK(t, one.Release())
		dbtest.OK(t, two.Release())
		all.Wait()
		locks[2] = other.acquire("3", 0)
		for i, lock := range locks {
			if id := s.holder(plain, fmt.Sprint(i+1)); id != fmt.Sprint(lock.ConnectionID()) {
				t.Errorf("connection %q has %d", id, i+1)
			}
		}
		for _, lock := range locks {
			dbtest.OK(t, lock.Release())
		}
		dbtest.Soon(t, "no connection is in use", func() bool { return other.conns.Stat().InUse == 0 })
	})
}

func TestFullPool(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other := s.process(settings{}), s.process(settings{conns: 1})
		lock := p.acquire("k", 0)
		time.AfterFunc(100*time.Millisecond, func() { _ = lock.Release() })
		sent, start := other.sent.Load(), time.Now()
		dbtest.OK(t, other.acquire("k", time.Minute).Release())
		most := 8 + 3*int64(time.Since(start)/(100*time.Millisecond)) // it looks so often, and pings come on top
		if n := other.sent.Load() - sent; n > most {
			t.Errorf("%d statements while it polled, more than %d", n, most)
		}
	})
}

// TestDeadlock: of two that each want what the other has, the one whose wait is
// over first gives up, and the other goes on.
func TestDeadlock(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, q := s.process(settings{}), s.process(settings{})
		a, b := p.acquire("a", 0), q.acquire("b", 0)
		failed := make(chan error)
		go func() {
			_, err := p.Acquire(t.Context(), request("b", 2*time.Second))
			_ = a.Release()
			failed <- err
		}()
		dbtest.OK(t, q.acquire("a", time.Minute).Release())
		if err := <-failed; !errors.Is(err, lockerr.ErrTimeout) {
			t.Errorf("the first: %v", err)
		}
		dbtest.OK(t, b.Release())
	})
}

func TestCheck(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{}), s.open()
		fine := func(conn driver.Conn, locks []*advisory.Lock) {
			t.Helper()
			_, err := p.Check(t.Context(), conn, locks)
			dbtest.OK(t, err)
		}
		fine(plain, nil)
		one, two := p.acquire("1", 0), p.acquire("2", 0)
		both := []*advisory.Lock{one, two}
		fine(plain, both)
		count := new(counting)
		counted, err := intercept.With(count)(s.Connector(dbtest.NoDatabase))
		dbtest.OK(t, err)
		conn, err := counted.Connect(t.Context())
		dbtest.OK(t, err)
		fine(conn, both)
		dbtest.OK(t, conn.Close())
		if n := count.sent.Load(); n != 1 {
			t.Errorf("%d statements", n)
		}
		check := func(want error, locks ...*advisory.Lock) {
			t.Helper()
			_, err := p.Check(t.Context(), plain, locks)
			var e *lockerr.Error
			if !errors.Is(err, want) || !errors.As(err, &e) || e.Op != "commit" || e.Strategy != "advisory" {
				t.Errorf("%v", err)
			}
		}
		dbtest.OK(t, two.Release())
		check(lockerr.ErrClosed, one, two)
		s.Exec(plain, fmt.Sprintf("KILL %d", one.ConnectionID()))
		s.free(plain, "1") // before anybody has noticed
		check(lockerr.ErrLost, one)
	})
}

func TestClose(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		var lost told
		lock, err := p.Acquire(t.Context(), lost.request("k"))
		dbtest.OK(t, err)
		theirs := other.acquire("theirs", 0)
		failed := make(chan error, 2)
		for _, key := range []string{"k", "theirs"} {
			go func() {
				_, err := p.Acquire(context.Background(), request(key, time.Minute))
				failed <- err
			}()
		}
		dbtest.Soon(t, "one waits on the server", func() bool { return len(s.waiters(plain, "theirs")) == 1 })
		start := time.Now()
		p.Close()
		if took := time.Since(start); took > 15*time.Second { // they wait for longer
			t.Errorf("it took %v", took)
		}
		for range 2 {
			if err := <-failed; !errors.Is(err, lockerr.ErrClosed) {
				t.Errorf("who waited got %v", err)
			}
		}
		s.free(plain, "k") // which the server may notice a moment later
		dbtest.Soon(t, "the holder is told", func() bool { return lost.count() == 1 })
		if !errors.Is(lost.err, lockerr.ErrClosed) || !errors.Is(lock.Err(), lockerr.ErrClosed) {
			t.Errorf("the holder was told %v, and %v", lost.err, lock.Err())
		}
		dbtest.OK(t, lock.Release())
		if _, err := p.Acquire(t.Context(), request("k", 0)); !errors.Is(err, lockerr.ErrClosed) {
			t.Errorf("after Close: %v", err)
		}
		dbtest.Soon(t, "nobody waits on the server", func() bool { return len(s.waiters(plain, "theirs")) == 0 })
		dbtest.OK(t, theirs.Release())
		p.Close()
	})
}

func TestUnsafe(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, unsafe := range []bool{false, true} {
			for _, change := range []func(*strategy.Config){
				func(c *strategy.Config) { c.Info.Topology = "Galera" },
				func(c *strategy.Config) { c.Info.SinglePrimary = true },
			} {
				p := s.process(settings{change: func(c *strategy.Config) { change(c); c.Unsafe = unsafe }})
				lock, err := p.Acquire(t.Context(), request("k", 0))
				if unsafe {
					dbtest.OK(t, err)
					dbtest.OK(t, lock.Release())
				} else if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "local to a node") {
					t.Errorf("it says %v", err)
				}
			}
		}
	})
}

// TestSilence: a connection that does not answer is waited for until the server
// may end it, and callers can leave meanwhile.
func TestSilence(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, limited := range []bool{true, false} { // by the driver
			t.Run(fmt.Sprint(limited), func(t *testing.T) {
				t.Parallel()
				s := s.other(t)
				dbtest.AtItsPace(t, 5*time.Second, func(ttl time.Duration) error { return s.silence(t, ttl, limited) })
			})
		}
	})
}

// silence has a connection not answer that has been kept alive for longer than ttl.
func (s *scratch) silence(t *testing.T, ttl time.Duration, limited bool) error {
	way := dbtest.StartProxy(t, s.Server.Addr())
	cfg := s.config()
	cfg.Addr = way.Addr()
	if limited {
		cfg.ReadTimeout = ttl * 9 / 10
	}
	p := s.process(settings{ttl: ttl, connect: dbtest.Connector(s.T, cfg).Connect, change: func(c *strategy.Config) { c.ReadTimeout = cfg.ReadTimeout }})
	plain := s.open()
	var lost told
	lock, err := p.Acquire(t.Context(), lost.request("k"))
	dbtest.OK(t, err)
	time.Sleep(ttl + ttl/4) // kept alive
	if err := lock.Err(); err != nil {
		return fmt.Errorf("it was lost: %w", err)
	}
	way.Block()
	start := time.Now()
	time.Sleep(200 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := p.Acquire(ctx, request("other", 0)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a caller got %v", err)
	}
	if lock.Err() != nil {
		return errors.New("a caller was kept until the connection was given up")
	}
	dbtest.Soon(t, "the holder is told", func() bool {
		if free := s.holder(plain, "k") != fmt.Sprint(lock.ConnectionID()); free && lock.Err() == nil {
			t.Error("the server has freed the lock of a holder who was not told")
		}
		return lost.count() == 1
	})
	if took := lost.last.Sub(start); took < ttl/4 { // from the last answer before
		t.Errorf("it was given up after %v already", took)
	}
	if _, err := p.Check(t.Context(), plain, []*advisory.Lock{lock}); !errors.Is(err, lockerr.ErrLost) {
		t.Errorf("the check says %v", err)
	}
	s.free(plain, "k")
	return nil
}

// switching is a connection behind a proxy that sends each statement to one of
// two, as it likes.
type switching struct {
	mysqlConn
	other  mysqlConn
	second *atomic.Bool
}

func (c *switching) to() mysqlConn {
	if c.second.Load() {
		return c.other
	}
	return c.mysqlConn
}

func (c *switching) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	return c.to().ExecContext(ctx, text, args)
}

func (c *switching) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return c.to().QueryContext(ctx, text, args)
}

func (c *switching) Close() error { return errors.Join(c.mysqlConn.Close(), c.other.Close()) }

func TestSharedConnections(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var second atomic.Bool
		base := s.Connector(dbtest.NoDatabase)
		p := s.process(settings{connect: func(ctx context.Context) (driver.Conn, error) {
			a, err := base.Connect(ctx)
			if err != nil {
				return nil, err
			}
			b, err := base.Connect(ctx)
			if err != nil {
				return nil, err
			}
			return &switching{a.(mysqlConn), b.(mysqlConn), &second}, nil
		}})
		plain := s.open()
		var lost told
		_, err := p.Acquire(t.Context(), lost.request("1"))
		dbtest.OK(t, err)
		second.Store(true)
		_, err = p.Acquire(t.Context(), request("2", 0))
		if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "proxy") {
			t.Errorf("it says %v", err)
		}
		if id := s.holder(plain, "2"); id != "" {
			t.Errorf("connection %s has it", id)
		}
		dbtest.Soon(t, "the holder is told", func() bool { return lost.count() == 1 })
		if !errors.Is(lost.err, lockerr.ErrLost) || !errors.Is(lost.err, lockerr.ErrUnsafe) {
			t.Errorf("the holder was told %v", lost.err)
		}
		s.free(plain, "1")

		second.Store(false)
		lock, err := p.Acquire(t.Context(), lost.request("3"))
		dbtest.OK(t, err)
		second.Store(true)
		dbtest.Soon(t, "a ping notices", func() bool { return lock.Err() != nil })
		second.Store(false)
	})
}

// failing has statements fail, after the server has carried out those that return rows.
// Nothing can be prepared: all of them are texts.
func failing(fail func(text string) error) []sqlmw.Interceptor {
	return []sqlmw.Interceptor{&faults{fail: fail}, unprepared{err: errors.New("it prepares nothing")}}
}

type faults struct {
	sqlmw.NullInterceptor
	fail func(text string) error
}

func (f *faults) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	if err := f.fail(text); err != nil {
		return nil, err
	}
	return f.NullInterceptor.ConnExecContext(ctx, conn, text, args)
}

func (f *faults) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	rows, err := conn.QueryContext(ctx, text, args)
	if failed := f.fail(text); failed != nil && err == nil {
		_ = rows.Close()
		return ctx, nil, failed
	}
	return ctx, rows, err
}

// unprepared refuses to prepare.
type unprepared struct {
	sqlmw.NullInterceptor
	err error
}

func (u unprepared) ConnPrepareContext(ctx context.Context, _ driver.ConnPrepareContext, _ string) (context.Context, driver.Stmt, error) {
	return ctx, nil, u.err
}

// TestPrepared: a connection that stays has the statements prepared that take and
// free one lock, and goes on with texts where it cannot.
func TestPrepared(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		plain := s.open()
		for _, able := range []bool{true, false} {
			runs := new(counting)
			seen := []sqlmw.Interceptor{runs}
			if !able {
				seen = append(seen, unprepared{err: &mysql.MySQLError{Number: 1461, Message: "Can't create more than max_prepared_stmt_count statements"}})
			}
			p := s.process(settings{conns: 1, seen: seen})
			for i := range 20 {
				key := fmt.Sprintf("Key %d", i%3)
				lock := p.acquire(key, 0)
				if id := s.holder(plain, key); id != fmt.Sprint(lock.ConnectionID()) {
					t.Errorf("connection %q has it, not %d", id, lock.ConnectionID())
				}
				dbtest.OK(t, lock.Release())
				if id := s.holder(plain, key); id != "" {
					t.Errorf("connection %q still has it", id)
				}
			}
			if n := runs.prepared.Load(); able && n < 20 || !able && n > 0 {
				t.Errorf("able to prepare is %v: %d statements were", able, n)
			}
		}
	})
}

// TestServerErrors: what the server refuses is not held, and costs nobody else
// a lock.
func TestServerErrors(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var number atomic.Int32
		var left atomic.Int32
		p := s.process(settings{seen: failing(func(text string) error {
			if strings.Contains(text, "GET_LOCK('"+advisory.Name(s.namespace, "bad")) && left.Add(-1) >= 0 {
				return &mysql.MySQLError{Number: uint16(number.Load()), Message: "refused"}
			}
			return nil
		})})
		plain := s.open()
		good := p.acquire("good", 0)
		for n, want := range map[int32]error{4163: nil, 3058: lockerr.ErrDeadlock, 1213: lockerr.ErrDeadlock} {
			number.Store(n)
			left.Store(1)
			_, err := p.Acquire(t.Context(), request("bad", 0))
			if server.Number(err) != uint16(n) || want != nil && !errors.Is(err, want) {
				t.Errorf("%d became %v", n, err)
			}
			if id := s.holder(plain, "bad"); id != "" {
				t.Errorf("connection %s has it", id)
			}
		}
		number.Store(1317) // KILL QUERY
		left.Store(1)
		dbtest.OK(t, p.acquire("bad", 0).Release())
		if err := good.Err(); err != nil {
			t.Errorf("another lock was lost: %v", err)
		}
		if id := s.holder(plain, "bad"); id != "" {
			t.Errorf("connection %s has it", id)
		}
		dbtest.OK(t, good.Release())
	})
}

// TestUnclean: a connection goes that may have kept a lock which its statement
// could not give back, and with it the others on it.
func TestUnclean(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var bad atomic.Bool
		name := advisory.Name(s.namespace, "bad")
		p := s.process(settings{seen: failing(func(text string) error {
			if bad.Load() && strings.Contains(text, name) {
				return &mysql.MySQLError{Number: 1317, Message: "interrupted"}
			}
			return nil
		})})
		plain := s.open()
		for _, taken := range []bool{false, true} { // and cannot be given back
			var lost told
			good, err := p.Acquire(t.Context(), lost.request("good"))
			dbtest.OK(t, err)
			var lock *advisory.Lock
			if taken {
				lock = p.acquire("bad", 0)
			}
			bad.Store(true)
			if taken {
				err = lock.Release()
			} else {
				_, err = p.Acquire(t.Context(), request("bad", 0))
			}
			bad.Store(false)
			if err == nil || errors.Is(err, lockerr.ErrLost) != taken {
				t.Errorf("taken is %v: %v", taken, err)
			}
			dbtest.Soon(t, "the other holder is told", func() bool { return lost.count() == 1 && errors.Is(good.Err(), lockerr.ErrLost) })
			s.free(plain, "bad")
		}
	})
}

// TestKilledReleaseIsRepeated: a release that is killed again and again loses no other lock of its
// connection, and neither does a request that is killed after the server has granted it.
func TestKilledReleaseIsRepeated(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var kills atomic.Int64
		name := advisory.Name(s.namespace, "bad")
		p := s.process(settings{seen: failing(func(text string) error {
			if strings.Contains(text, name) && kills.Add(-1) >= 0 {
				return &mysql.MySQLError{Number: 1317, Message: "interrupted"}
			}
			return nil
		})})
		plain := s.open()
		var lost told
		good, err := p.Acquire(t.Context(), lost.request("good"))
		dbtest.OK(t, err)
		for killed := int64(1); killed <= 5; killed++ {
			lock := p.acquire("bad", 0)
			kills.Store(killed)
			dbtest.OK(t, lock.Release())
			s.free(plain, "bad")

			kills.Store(killed)
			lock, err := p.Acquire(t.Context(), request("bad", 0))
			dbtest.OK(t, err)
			dbtest.OK(t, lock.Release())
		}
		dbtest.OK(t, good.Err())
		if lost.count() != 0 {
			t.Error("the other holder was told of a loss")
		}
		dbtest.OK(t, good.Release())
	})
}

// TestLostAnswer: a release whose answer is lost fails, and frees the lock all
// the same; so does a yield to other processes, after which who is next in the queue
// is granted it on another connection.
func TestLostAnswer(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var cut atomic.Bool
		name := advisory.Name(s.namespace, "k")
		p := s.process(settings{seen: failing(func(text string) error {
			if strings.Contains(text, "RELEASE_LOCK('"+name) && cut.CompareAndSwap(true, false) {
				return mysql.ErrInvalidConn
			}
			return nil
		}), change: func(c *strategy.Config) { c.HandOverTime = 0 }})
		lock := p.acquire("k", 0)
		cut.Store(true)
		if err := lock.Release(); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("the release: %v", err)
		}
		lock = p.acquire("k", time.Minute)
		got := make(chan *advisory.Lock)
		go func() { got <- p.acquire("k", time.Minute) }()
		p.inQueue("k", 1)
		cut.Store(true)
		dbtest.OK(t, lock.Release())
		next := <-got
		if id := s.holder(s.open(), "k"); id != fmt.Sprint(next.ConnectionID()) || id == fmt.Sprint(lock.ConnectionID()) {
			t.Errorf("connection %q has it, not %d", id, next.ConnectionID())
		}
		dbtest.OK(t, next.Release())
	})
}

// TestOldGrant: a grant that is read when the server has ended the connection,
// as by a process that was stopped, is none.
func TestOldGrant(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		var once sync.Once
		plain := s.open()
		p, killer := s.process(settings{}), s.open()
		const ttl = 6 * time.Second
		other := s.process(settings{ttl: ttl, seen: failing(func(text string) error {
			if strings.Contains(text, "IS_FREE_LOCK('"+advisory.Name(s.namespace, "k")) {
				once.Do(func() {
					s.Exec(killer, "KILL "+s.holder(killer, "k"))
					time.Sleep(ttl / 2)
				})
			}
			return nil
		})})
		lock := p.acquire("k", 0)
		got := make(chan *advisory.Lock)
		go func() { got <- other.acquire("k", time.Minute) }()
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		dbtest.OK(t, lock.Release())
		lock = <-got
		once.Do(func() { t.Error("the connection was not ended") })
		if id := s.holder(plain, "k"); id != fmt.Sprint(lock.ConnectionID()) {
			t.Errorf("connection %q has it, not %d", id, lock.ConnectionID())
		}
		dbtest.OK(t, lock.Release())
	})
}

// lateClose is a connection on which something happens when the answer of a
// statement was read.
type lateClose struct {
	mysqlConn
	read func(text string)
}

func (c *lateClose) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	rows, err := c.mysqlConn.QueryContext(ctx, text, args)
	if err != nil {
		return nil, err
	}
	return &lateRows{rows, func() { c.read(text) }}, nil
}

type lateRows struct {
	driver.Rows
	read func()
}

func (r *lateRows) Close() error {
	r.read()
	return r.Rows.Close()
}

// TestGaveUpWhenGranted: the driver closes a connection whose context ends, also
// when the statement was answered already. Such a grant is not handed over.
func TestGaveUpWhenGranted(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		first, giveUp := context.WithCancel(t.Context())
		base, plain := s.Connector(dbtest.NoDatabase), s.open()
		var waiting atomic.Bool
		p := s.process(settings{})
		other := s.process(settings{connect: func(ctx context.Context) (driver.Conn, error) {
			opened, err := base.Connect(ctx)
			if err != nil {
				return nil, err
			}
			c := opened.(mysqlConn)
			return &lateClose{c, func(text string) {
				if strings.Contains(text, "IS_FREE_LOCK('"+advisory.Name(s.namespace, "k")) && waiting.CompareAndSwap(true, false) {
					giveUp()
					for first := time.Now(); c.IsValid() && time.Since(first) < 10*time.Second; {
						time.Sleep(time.Millisecond) // the driver is about to close it
					}
				}
			}}, nil
		}})
		lock := p.acquire("k", 0)
		failed := make(chan error)
		go func() {
			_, err := other.Acquire(first, request("k", time.Minute))
			failed <- err
		}()
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(plain, "k")) == 1 })
		got := make(chan *advisory.Lock)
		go func() { got <- other.acquire("k", time.Minute) }()
		other.inQueue("k", 1)
		waiting.Store(true)
		dbtest.OK(t, lock.Release())
		if err := <-failed; !errors.Is(err, context.Canceled) {
			t.Errorf("the first got %v", err)
		}
		lock = <-got
		if id := s.holder(plain, "k"); id != fmt.Sprint(lock.ConnectionID()) {
			t.Errorf("connection %q has it, not %d", id, lock.ConnectionID())
		}
		dbtest.OK(t, lock.Release())
	})
}

// TestSameID: the check is not taken in by a connection of the same id that has
// the lock, as there may be after a restart of the server.
func TestSameID(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		base := s.Connector(dbtest.NoDatabase)
		var lockConn driver.Conn
		p := s.process(settings{connect: func(ctx context.Context) (c driver.Conn, err error) {
			lockConn, err = base.Connect(ctx)
			return lockConn, err
		}})
		lock := p.acquire("k", 0)
		s.Exec(lockConn, "DO RELEASE_ALL_LOCKS()")
		s.Exec(lockConn, "DO GET_LOCK('"+lock.Name()+"', 0)")
		if _, err := p.Check(t.Context(), s.open(), []*advisory.Lock{lock}); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("the check says %v", err)
		}
		dbtest.OK(t, lock.Release())
	})
}

// TestKilledStatement: KILL QUERY ends no wait and loses no lock.
func TestKilledStatement(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		lock := p.acquire("k", 0)
		got := make(chan *advisory.Lock)
		go func() { got <- other.acquire("k", time.Minute) }()
		for range 3 {
			var ids []string
			dbtest.Soon(t, "it waits", func() bool { ids = s.waiters(plain, "k"); return len(ids) == 1 })
			s.Exec(plain, "KILL QUERY "+ids[0])
			s.Exec(plain, fmt.Sprintf("KILL QUERY %d", lock.ConnectionID()))
			time.Sleep(20 * time.Millisecond)
		}
		dbtest.OK(t, lock.Release())
		dbtest.OK(t, (<-got).Release())
	})
}

func TestRestart(t *testing.T) {
	dbtest.OnOwnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p := s.process(settings{})
		var lost told
		lock, err := p.Acquire(t.Context(), lost.request("k"))
		dbtest.OK(t, err)
		start := time.Now()
		dbtest.OK(t, s.Server.Kill())
		dbtest.Soon(t, "the holder is told", func() bool { return lost.count() == 1 })
		if took := lost.last.Sub(start); took > 10*time.Second { // a ping would find out later
			t.Errorf("it was told after %v", took)
		}
		_, err = p.Acquire(t.Context(), request("k", 0))
		if err == nil || errors.Is(err, driver.ErrBadConn) {
			t.Errorf("without a server: %v", err)
		}
		dbtest.OK(t, s.Server.Restart(t.Context()))
		if _, err := p.Check(t.Context(), s.open(), []*advisory.Lock{lock}); !errors.Is(err, lockerr.ErrLost) {
			t.Errorf("the check says %v", err)
		}
		dbtest.OK(t, p.acquire("k", 0).Release())

		warm := s.process(settings{conns: 1})
		for range 20 { // its statements are prepared by now
			dbtest.OK(t, warm.acquire("warm", 0).Release())
		}
		holder, waited := s.open(), make(chan error)
		s.Exec(holder, "DO GET_LOCK('"+advisory.Name(s.namespace, "waited")+"', 0)")
		go func() {
			_, err := p.Acquire(t.Context(), request("waited", time.Minute))
			waited <- err
		}()
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(s.open(), "waited")) == 1 })
		s.Exec(s.open(), "SET GLOBAL read_only = 1")
		s.Exec(holder, "DO RELEASE_ALL_LOCKS()")
		if err := <-waited; !errors.Is(err, lockerr.ErrUnsafe) {
			t.Errorf("after a wait during which the server has become a replica: %v", err)
		}
		if _, err := warm.Acquire(t.Context(), request("warm", 0)); !errors.Is(err, lockerr.ErrUnsafe) {
			t.Errorf("by a statement that was prepared before the server became a replica: %v", err)
		}
		for _, unsafe := range []bool{false, true} {
			q := s.process(settings{change: func(c *strategy.Config) { c.Unsafe = unsafe }})
			if lock, err := q.Acquire(t.Context(), request("k", 0)); unsafe {
				dbtest.OK(t, err)
				dbtest.OK(t, lock.Release())
			} else if !errors.Is(err, lockerr.ErrUnsafe) || !strings.Contains(err.Error(), "takes no writes") {
				t.Errorf("on a replica it says %v", err)
			}
		}
	})
}

// brokenAtFirst are connections that break with the first statement that sets them up: as
// many as it says are opened.
type brokenAtFirst struct {
	sqlmw.NullInterceptor
	broken int32
	opened atomic.Int32
}

func (b *brokenAtFirst) ConnectorConnect(ctx context.Context, k driver.Connector) (driver.Conn, error) {
	b.opened.Add(1)
	return k.Connect(ctx)
}

func (b *brokenAtFirst) ConnExecContext(ctx context.Context, conn driver.ExecerContext, text string, args []driver.NamedValue) (driver.Result, error) {
	if b.opened.Load() > b.broken {
		return b.NullInterceptor.ConnExecContext(ctx, conn, text, args)
	}
	_ = conn.(driver.Conn).Close()
	return nil, mysql.ErrInvalidConn
}

// TestBreaksAtFirst: connections that break while they are set up are replaced, a
// dozen of them at most.
func TestBreaksAtFirst(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		for _, broken := range []int32{2, 3, 100} {
			b := &brokenAtFirst{broken: broken}
			p := s.process(settings{seen: []sqlmw.Interceptor{b}})
			lock, err := p.Acquire(t.Context(), request("k", 0))
			switch {
			case broken < 100:
				dbtest.OK(t, err)
				dbtest.OK(t, lock.Release())
			case !errors.Is(err, lockerr.ErrExhausted) || b.opened.Load() > 12:
				t.Errorf("after %d connections: %v", b.opened.Load(), err)
			}
		}
	})
}

// breaking breaks connections under a request for a lock, after it was carried out, as long
// as some are left.
type breaking struct {
	sqlmw.NullInterceptor
	left atomic.Int64
}

func (b *breaking) broken(text string) bool {
	return strings.Contains(text, "GET_LOCK") && b.left.Add(-1) >= 0
}

func (b *breaking) ConnQueryContext(ctx context.Context, conn driver.QueryerContext, text string, args []driver.NamedValue) (context.Context, driver.Rows, error) {
	rows, err := conn.QueryContext(ctx, text, args)
	if err == nil && b.broken(text) {
		_ = rows.Close()
		_ = conn.(driver.Conn).Close()
		return ctx, nil, mysql.ErrInvalidConn
	}
	return ctx, rows, err
}

func (b *breaking) ConnPrepareContext(ctx context.Context, conn driver.ConnPrepareContext, text string) (context.Context, driver.Stmt, error) {
	if b.broken(text) {
		_ = conn.(driver.Conn).Close()
		return ctx, nil, mysql.ErrInvalidConn
	}
	return b.NullInterceptor.ConnPrepareContext(ctx, conn, text)
}

// TestConnectionBreaksAtAcquire: a request whose connection breaks is sent again, and
// where that does not help either it ends with a sentinel.
func TestConnectionBreaksAtAcquire(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		b := new(breaking)
		k, err := intercept.With(b)(s.Connector(dbtest.NoDatabase))
		dbtest.OK(t, err)
		p := s.process(settings{connect: k.Connect})
		b.left.Store(1)
		dbtest.OK(t, p.acquire("k", 0).Release())
		b.left.Store(1 << 20)
		var e *lockerr.Error
		if _, err := p.Acquire(t.Context(), request("k", 0)); !errors.Is(err, lockerr.ErrExhausted) || !errors.As(err, &e) || e.Key != "k" {
			t.Errorf("it ended with %v", err)
		}
		b.left.Store(0)
		dbtest.OK(t, p.acquire("k", 0).Release())
	})
}

// TestWhoeverHasItIsKnown: the server asks for the holder of a lock more than once while it makes the
// answer. One that was released between is nobody's, and no holder without a connection.
func TestWhoeverHasItIsKnown(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, c := s.process(settings{}), s.open()
		var took sync.WaitGroup
		defer took.Wait()
		stop := make(chan struct{})
		defer close(stop)
		name := advisory.Name(s.namespace, "k")
		took.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, err := server.Query(t.Context(), c, "SELECT GET_LOCK('"+name+"', 0)")
					_, err2 := server.Query(t.Context(), c, "SELECT RELEASE_LOCK('"+name+"')")
					if err := errors.Join(err, err2); err != nil {
						t.Error(err)
						return
					}
				}
			}
		})
		for began := time.Now(); time.Since(began) < 2*time.Second; {
			if h := p.Holder(t.Context(), "k"); h != nil && h.ConnectionID == 0 {
				t.Fatalf("%+v has it", *h)
			}
		}
	})
}
