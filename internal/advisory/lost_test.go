package advisory_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/advisory"
	"github.com/mysqllock/mysqllock/internal/dbtest"
	"github.com/mysqllock/mysqllock/internal/queue"
	"github.com/mysqllock/mysqllock/internal/strategy"
	"github.com/mysqllock/mysqllock/lockerr"
)

// told notes who is told of a loss.
type told struct {
	mu    sync.Mutex
	times map[string]int
	last  time.Time
	err   error
}

func (t *told) request(key string) advisory.Request {
	r := request(key, time.Minute)
	r.Lost = func(err error) {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.times == nil {
			t.times = make(map[string]int)
		}
		t.times[key]++
		t.last, t.err = time.Now(), err
	}
	return r
}

func (t *told) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.times)
}

// TestHoldersOfAKilledConnectionAreToldOnce: all holders are told within a second, once each, and the
// locks are there for others.
func TestHoldersOfAKilledConnectionAreToldOnce(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		const n = 100
		p, other, plain := s.process(settings{}), s.process(settings{}), s.open()
		var lost told
		locks := make([]*advisory.Grant, n)
		ids := make(map[uint64]bool)
		for i := range locks {
			var err error
			locks[i], err = p.Acquire(t.Context(), lost.request(fmt.Sprint(i)))
			dbtest.OK(t, err)
			ids[locks[i].ConnectionID()] = true
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

// TestAWaiterBehindALostLockGetsOneOfItsOwn: who waits in the queue behind a lost lock gets one of its
// own, on another connection.
func TestAWaiterBehindALostLockGetsOneOfItsOwn(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{}), s.open()
		lock := p.acquire("k", 0)
		got := p.acquiring("k", time.Minute)
		p.inQueue("k", 1)
		s.Exec(plain, fmt.Sprintf("KILL %d", lock.ConnectionID()))
		next := <-got
		dbtest.Is(t, "the one before", lock.Err(), lockerr.ErrLost)
		if next.ConnectionID() == lock.ConnectionID() || next.Err() != nil {
			t.Errorf("the next has connection %d, and %v", next.ConnectionID(), next.Err())
		}
		dbtest.OK(t, next.Release())
	})
}

// TestALockThatWasHandedOverIsLostAsAnyOther: a lock that was handed over is lost as any other, also
// on its way.
func TestALockThatWasHandedOverIsLostAsAnyOther(t *testing.T) {
	dbtest.OnServers(t, newScratch, func(t *testing.T, s *scratch) {
		p, plain := s.process(settings{change: func(c *strategy.Config) { c.HandOverTime = time.Minute }}), s.open()
		var lost, between told
		got := make(chan *advisory.Grant)
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

// TestALateGrantIsGivenBack: what a statement takes whose caller has left is given back.
func TestALateGrantIsGivenBack(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
			failed := p.asking(ctx, request("k", 0))
			<-asked
			start := time.Now()
			cancel()
			dbtest.Is(t, "who left", <-failed, context.Canceled)
			soonest = min(soonest, time.Since(start))
			if id := s.holder(plain, "k"); id != fmt.Sprint(good.ConnectionID()) {
				t.Fatal("the statement was not under way")
			}
			dbtest.Is(t, "meanwhile", dbtest.Err(p.Acquire(t.Context(), request("k", 0))), lockerr.ErrLocked)
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

// TestCallersLeaveAServerThatDoesNotAnswer: callers whose context ends leave a server that hears
// them but does not answer. What it has granted them is freed, and only who holds a lock is told of
// a loss.
func TestCallersLeaveAServerThatDoesNotAnswer(t *testing.T) {
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
				dbtest.Is(t, "who left", dbtest.Err(p.Acquire(ctx, left.request(fmt.Sprint(i)))), context.Canceled)
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
		dbtest.Equal(t, "%d are told that have no lock", left.count(), 0)
	})
}

// TestASilentConnectionIsGivenUpBeforeTheServerFreesIt: a connection that does not answer is waited
// for until the server may end it, and callers can leave meanwhile.
func TestASilentConnectionIsGivenUpBeforeTheServerFreesIt(t *testing.T) {
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
	dbtest.Is(t, "a caller", dbtest.Err(p.Acquire(ctx, request("other", 0))), context.DeadlineExceeded)
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
	dbtest.Is(t, "the lock", lock.Err(), lockerr.ErrLost)
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

func (s *switching) to() mysqlConn {
	if s.second.Load() {
		return s.other
	}
	return s.mysqlConn
}

func (s *switching) ExecContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Result, error) {
	return s.to().ExecContext(ctx, text, args)
}

func (s *switching) QueryContext(ctx context.Context, text string, args []driver.NamedValue) (driver.Rows, error) {
	return s.to().QueryContext(ctx, text, args)
}

func (s *switching) Close() error { return errors.Join(s.mysqlConn.Close(), s.other.Close()) }

func TestAProxyThatSharesConnectionsIsUnsafe(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
		dbtest.Equal(t, "connection %s has it", s.holder(plain, "2"), "")
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

// TestAReleaseWhoseAnswerIsLostFreesTheLock: a release whose answer is lost fails, and frees the
// lock all the same; so does a yield to other processes, after which who is next in the queue is granted
// it on another connection.
func TestAReleaseWhoseAnswerIsLostFreesTheLock(t *testing.T) {
	dbtest.OnOneServer(t, newScratch, func(t *testing.T, s *scratch) {
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
		dbtest.Is(t, "the release", lock.Release(), lockerr.ErrLost)
		lock = p.acquire("k", time.Minute)
		got := p.acquiring("k", time.Minute)
		p.inQueue("k", 1)
		cut.Store(true)
		dbtest.OK(t, lock.Release())
		next := <-got
		if p.held(s.open(), next); next.ConnectionID() == lock.ConnectionID() {
			t.Error("it is on the connection that was cut")
		}
		dbtest.OK(t, next.Release())
	})
}

func TestARestartLosesTheLocks(t *testing.T) {
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
		dbtest.Is(t, "the lock", lock.Err(), lockerr.ErrLost)
		dbtest.OK(t, p.acquire("k", 0).Release())

		warm := s.process(settings{conns: 1})
		for range 20 { // its statements are prepared by now
			dbtest.OK(t, warm.acquire("warm", 0).Release())
		}
		holder := s.open()
		s.Exec(holder, "DO GET_LOCK('"+advisory.Name(s.namespace, "waited")+"', 0)")
		waited := p.asking(t.Context(), request("waited", time.Minute))
		dbtest.Soon(t, "it waits", func() bool { return len(s.waiters(s.open(), "waited")) == 1 })
		s.Exec(s.open(), "SET GLOBAL read_only = 1")
		s.Exec(holder, "DO RELEASE_ALL_LOCKS()")
		dbtest.Is(t, "after a wait during which the server has become a replica", <-waited, lockerr.ErrUnsafe)
		dbtest.Is(t, "by a statement that was prepared before the server became a replica", dbtest.Err(warm.Acquire(t.Context(), request("warm", 0))), lockerr.ErrUnsafe)
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
